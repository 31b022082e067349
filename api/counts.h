/* counts.h: answers counted by route and status. Counting is cheap; /metrics hands the counts on. */
#pragma once
#include "api/http.h"

void counts_note(const struct req *r);      /* its answer is being sent */
void counts_flush(struct api *a);           /* into the coordinator's metrics, with what is open now */
