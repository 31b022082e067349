/* request_id.h: the id of a request, in its answer, in a problem and in the log. */
#pragma once
#include "api/http.h"

/* The number that a daemon's first id is made of: no other daemon's ids are these. */
uint64_t request_id_seed(void);
/* Sets r->id: what the caller sent, if that may stand in a log and in a header, else one that no other request has. */
void request_id_take(struct req *r);
