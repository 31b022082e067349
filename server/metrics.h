/* metrics.h: counters, gauges and histograms in Prometheus' text form and in OpenMetrics. The families are one table in metrics.c; a name
 * that is not there is a programmer's error. Labels are given ready-made: `kind="save",outcome="succeeded"`; no ids in them. */
#pragma once
#include "base/buf.h"

struct metrics;

enum { METRICS_SERIES_MAX = 8192 };

FALLIBLE enum err metrics_new(struct metrics **out);
void metrics_free(struct metrics *m);
/* Series beyond METRICS_SERIES_MAX are dropped: labels that callers choose must not fill the memory. */
void metrics_add(struct metrics *m, const char *family, const char *labels, double by);
void metrics_set(struct metrics *m, const char *family, const char *labels, double value);
void metrics_observe(struct metrics *m, const char *family, const char *labels, double value); /* histograms */
/* Removes a family's series: of gauges that mirror things which come and go. */
void metrics_clear(struct metrics *m, const char *family);
/* Prometheus' text form 0.0.4, or OpenMetrics 1.0. */
void metrics_render(const struct metrics *m, bool open_metrics, struct buf *out);
