/* metrics.h: counters, gauges and histograms in Prometheus' text form. The families are one table in metrics.c; a name that is not
 * there is a programmer's error. Labels are given ready-made: `kind="save",outcome="succeeded"`; no ids in them. */
#pragma once
#include "server/server.h"

enum { METRICS_SERIES_MAX = 2048 };

FALLIBLE enum err metrics_new(struct metrics **out);
void metrics_free(struct metrics *m);
/* Series beyond METRICS_SERIES_MAX are dropped: labels that callers choose must not fill the memory. */
void metrics_add(struct metrics *m, const char *family, const char *labels, double by);
void metrics_set(struct metrics *m, const char *family, const char *labels, double value);
void metrics_observe(struct metrics *m, const char *family, const char *labels, double value); /* histograms */
/* All families; gauges that mirror state (jobs, workers, shared memory, storages) are filled in from the server first. */
void metrics_render(struct server *s, struct buf *out);
