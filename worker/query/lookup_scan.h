/* lookup_scan.h: what a look-up worker knows of a storage's checkpoints, brought up to date. */
#pragma once
#include "query/lookup_tree.h"

/* All whose names begin with the prefix. *more_out: the time was up before all were known; the next call goes on. */
FALLIBLE enum err lookup_scan(const struct lookup_look *look, struct store_at top, struct str prefix, bool *more_out);
/* All checkpoints of one run. *out: the run's folder; NULL: there is none. */
FALLIBLE enum err lookup_scan_run(const struct lookup_look *look, struct store_at top, const char *run, struct lookup_dir **out,
				  bool *more_out);
