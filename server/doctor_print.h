/* doctor_print.h: `dcpd --doctor`: the rows of doctor.h, what the drivers' libraries say, and a row for each storage on a file system. */
#pragma once
#include <stdio.h>
#include "server/config.h"

/* Writes it as text, or as JSON in the form of GET /v1/doctor, as c->doctor says. *bad_out: rows that are bad. ERR_CONFIG: no such form. */
FALLIBLE enum err doctor_print(const struct config *c, FILE *to, unsigned *bad_out);
