/* stats.h: what a run of elements is like: NaN, Inf, zeros, range, sums, histogram; and how two runs differ.
 *
 * An element is a number as PyTorch counts them, but for float4_e2m1fn_x2, whose bytes hold two each. A complex element is NaN if one of
 * its parts is, else Inf if one of its parts is. Sums, range and histogram are of the finite elements alone.
 *
 * Bin b of the histogram, of STATS_EXPONENTS per sign, counts elements with 2^(STATS_FIRST + b) <= |x| < twice that; the first one has
 * all smaller ones too, the last one all larger ones; zeros are in none. The positive bins come first. Of complex elements |x| is
 * counted, as positive. Powers of two need no range to be known beforehand, and say what a narrower dtype would lose. */
#pragma once
#include "tensor/dtype.h"

enum { STATS_EXPONENTS = 128, STATS_FIRST = -80, STATS_BINS = 2 * STATS_EXPONENTS };

/* Sums of x (of real and imaginary parts) and of |x|^2. Wider than double, so that neither overflows. */
struct stats_sums {
	long double real, imag, squares;
};

struct stats {
	uint64_t count, nan_count, inf_count, zero_count;
	/* Keys of the range, see stats_key_value; those of `min` are inverted, so that of two keys the larger one counts. Complex elements
	 * have none. */
	uint64_t min_key, max_key;
	struct stats_sums sums;
};

/* Adds to *s and to bins (STATS_BINS; NULL: no histogram), which begin as zeros. The result depends on the elements and on where runs
 * begin, not on the CPU: sums go through 16 accumulators, 512 elements at a time, in double. */
void stats_run(enum dtype d, const void *p, uint64_t n, struct stats *s, uint64_t *bins);
static inline void stats_sums_add(struct stats_sums *s, const struct stats_sums *more)
{
	s->real += more->real;
	s->imag += more->imag;
	s->squares += more->squares;
}

/* Returns the value of a key: an integer dtype's value as it is (uint64 as its bits), else a double in *real_out. */
int64_t stats_key_value(enum dtype d, uint64_t key, double *real_out);

struct stats_diff {
	uint64_t first, count;         /* first differing element, how many differ (beyond the tolerance) */
	double max_abs, max_rel;
};
/* Elements are equal if their bits are, or if |a - b| <= atol + rtol * |b|. Adds to *d; first is set when count was 0, as
 * `base` + index. Parts of complex elements are compared one by one. */
void stats_compare(enum dtype d, const void *a, const void *b, uint64_t n, double rtol, double atol, uint64_t base,
		   struct stats_diff *diff);
