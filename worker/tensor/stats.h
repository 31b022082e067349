/* stats.h: what a run of elements is like: NaN, Inf, zero; and how two runs differ. */
#pragma once
#include "tensor/dtype.h"

struct stats {
	uint64_t nan_count, inf_count, nonzero_count;
};
/* Adds to *s. Complex elements count once per part. */
void stats_run(enum dtype d, const void *p, uint64_t n, struct stats *s);

struct stats_diff {
	uint64_t first, count;         /* first differing element, how many differ (beyond the tolerance) */
	double max_abs, max_rel;
};
/* Elements are equal if their bits are, or if |a - b| <= atol + rtol * |b|. Adds to *d; first is set when count was 0, as
 * `base` + index. */
void stats_compare(enum dtype d, const void *a, const void *b, uint64_t n, double rtol, double atol, uint64_t base,
		   struct stats_diff *diff);
