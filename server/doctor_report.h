/* doctor_report.h: GET /v1/doctor: the rows of doctor.h, and what the running daemon knows of journal, workers, storages and drivers. */
#pragma once
#include "base/buf.h"

struct server;
/* {"findings":[{"name","state","words","command"},…],"bad":N} */
FALLIBLE enum err doctor_report(const struct server *s, struct buf *out);
