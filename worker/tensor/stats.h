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

/* How far apart two elements may be to count as equal: |a - b| <= atol + rtol * |b|. */
struct stats_near {
	double rtol, atol;
	bool sums;                     /* fill aa to dd */
};
/* The difference of two runs a and b of elements of one dtype. */
struct stats_diff {
	uint64_t first, count;         /* first differing element, how many differ (beyond the tolerance) */
	uint64_t bits;                 /* that differ, whatever the tolerance */
	uint64_t odd;                  /* differing elements of which one is NaN or infinite: they are in no sum */
	double max_abs, max_rel;       /* of |a - b| and |a - b| / |b|: NaN if one is, infinite beside an infinity or a zero */
	long double aa, bb, ab, dd;    /* sums of |a|^2, |b|^2, Re(a conj(b)), |a - b|^2 over elements that are finite on both sides */
};
/* Elements with the same bits are equal, NaN too; others if they are near. Adds to *d, which begins as zeros; first is set when count was
 * 0, as `base` + index. A complex element is one number, of which |…| is the modulus; bool is 0 and 1; float4_e2m1fn_x2 counts as two
 * elements with one index. 64-bit integers are subtracted exactly.
 * The result depends on the elements and on where runs begin, not on the CPU. */
void stats_compare(enum dtype d, const void *a, const void *b, uint64_t n, const struct stats_near *near, uint64_t base,
		   struct stats_diff *diff);
/* Adds the counts, sums and largest differences of another run; `first` stays. */
void stats_diff_add(struct stats_diff *to, const struct stats_diff *more);
