/* explain.h: what api/errors.md says of a code. */
#pragma once
#include "base/str.h"

/* False: the page does not name it. */
bool explain_find(const char *code, struct str *what_out, struct str *remedy_out);
