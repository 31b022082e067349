/* stats.c: see stats.h. Elements go through double in small batches, which stay in the L1 cache; integers compare exactly by their bits
 * first. */
/* The loops are simple enough for the vectoriser, but -O2 does not try. */
#pragma GCC optimize("O3,fp-contract=off")

#include "tensor/stats_impl.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "tensor/cast.h"

/* Real parts of complex elements count as elements of their own. */
static enum dtype part_of(enum dtype d)
{
	static const struct { enum dtype complex, part; } parts[] = {
		{ DT_COMPLEX128, DT_FLOAT64 }, { DT_COMPLEX64, DT_FLOAT32 },
		{ DT_COMPLEX32, DT_FLOAT16 },  { DT_BCOMPLEX32, DT_BFLOAT16 },
	};

	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		if (parts[i].complex == d)
			return parts[i].part;
	return d;
}

/* Two numbers a byte, the first one in the low bits: a sign, two bits of exponent, one of mantissa. */
static uint64_t unpack_e2m1(const unsigned char *p, uint64_t n, double *out)
{
	static const double values[8] = { 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0 };

	for (uint64_t i = 0; i < 2 * n; i++) {
		unsigned code = i % 2 ? p[i / 2] >> 4 : p[i / 2] & 15;
		out[i] = code & 8 ? -values[code & 7] : values[code & 7];
	}
	return 2 * n;
}

uint64_t stats_to_double(enum dtype d, const unsigned char *p, uint64_t n, double *out)
{
	uint64_t parts = dtype_is_complex(d) ? 2 * n : n;

	if (d == DT_FLOAT4_E2M1FN_X2)
		return unpack_e2m1(p, n, out);
	must(cast_run(out, DT_FLOAT64, p, part_of(d), parts) == OK);
	return parts;
}

WIDE static bool all_finite(const double *v, uint64_t n)
{
	double probe[LANES] = { 0 };

	for (uint64_t i = 0; i + LANES <= n; i += LANES)
		for (unsigned l = 0; l < LANES; l++)
			probe[l] += v[i + l] * 0.0;
	for (uint64_t i = n - n % LANES; i < n; i++)
		probe[0] += v[i] * 0.0;
	for (unsigned l = 1; l < LANES; l++)
		probe[0] += probe[l];
	return probe[0] == 0.0;
}

bool stats_all_finite(const double *v, uint64_t n)
{
	return all_finite(v, n);
}

double stats_fold(double *lane)
{
	for (unsigned half = LANES / 2; half > 0; half /= 2)
		for (unsigned l = 0; l < half; l++)
			lane[l] += lane[l + half];
	return lane[0];
}

/* ------------------------------------------------------------------------------------------------------ figures */

enum { TABLES = 8, F64_BIAS = 1023, CODES_MIN = 64 << 10 };

/* Counters of bins: neighbours count in different tables, so that an increment need not wait for the one before. */
typedef uint32_t tables[TABLES][STATS_BINS];

struct lanes {
	double sum[LANES], squares[LANES], min[LANES], max[LANES], zeros[LANES];
};

static uint64_t double_bits(double v)
{
	uint64_t bits;

	memcpy(&bits, &v, sizeof bits);
	return bits;
}

/* Sorts like the value. */
static uint64_t double_key(double v)
{
	uint64_t bits = double_bits(v + 0.0); /* -0.0 is 0.0 */

	return bits >> 63 ? ~bits : bits | 1ull << 63;
}

static void keep_larger(uint64_t *at, uint64_t key)
{
	*at = key > *at ? key : *at;
}

/* Counts what is not finite and takes it out; how many are left. */
static uint64_t take_out(double *v, uint64_t n, struct stats *s)
{
	uint64_t kept = 0;

	for (uint64_t i = 0; i < n; i++) {
		s->nan_count += isnan(v[i]) != 0;
		s->inf_count += isinf(v[i]) != 0;
		v[kept] = v[i];
		kept += isfinite(v[i]) != 0;
	}
	return kept;
}

/* By the upper half of a double, which has its sign and exponent: 32-bit vectors have twice the lanes, and comparisons on every CPU. */
static inline uint16_t bin_of(uint32_t upper)
{
	int32_t k = (int32_t)(upper >> 20 & 0x7FF) - (F64_BIAS + STATS_FIRST);

	k = k < 0 ? 0 : k;
	k = k < STATS_EXPONENTS ? k : STATS_EXPONENTS - 1;
	return (uint16_t)(k + (int32_t)(upper >> 31) * STATS_EXPONENTS);
}

/* Zeros look like the smallest numbers, and are taken out again. */
WIDE static void count_bins(const double *v, uint64_t n, uint64_t zeros, tables h)
{
	uint32_t upper[BATCH];
	uint16_t bin[BATCH];
	uint32_t negative = 0;

	for (uint64_t i = 0; i < n; i++)
		upper[i] = (uint32_t)(double_bits(v[i]) >> 32);
	for (uint64_t i = 0; i < n; i++)
		bin[i] = bin_of(upper[i]);
	uint64_t i = 0;
	for (; i + TABLES <= n; i += TABLES)
		for (unsigned t = 0; t < TABLES; t++)
			h[t][bin[i + t]]++;
	for (; i < n; i++)
		h[0][bin[i]]++;
	if (zeros == 0)
		return;
	for (i = 0; i < n; i++)
		negative += double_bits(v[i]) == 1ull << 63;
	h[0][0] -= (uint32_t)zeros - negative; /* the sum over the tables is what counts: one may pass below 0 */
	h[0][STATS_EXPONENTS] -= negative;
}

/* The same sums where squares leave the range of double, or their own digits. */
static void sum_wide(const double *v, uint64_t n, struct stats_sums *sums)
{
	struct stats_sums here = { 0 };

	for (uint64_t i = 0; i < n; i++) {
		here.real += v[i];
		here.squares += (long double)v[i] * v[i];
	}
	stats_sums_add(sums, &here);
}

static inline __attribute__((always_inline)) void add_to_lane(struct lanes *a, unsigned l, double x)
{
	a->sum[l] += x;
	a->squares[l] += x * x;
	a->min[l] = x < a->min[l] ? x : a->min[l];
	a->max[l] = x > a->max[l] ? x : a->max[l];
	a->zeros[l] += x == 0.0 ? 1.0 : 0.0;
}

/* Loops over lanes: the compiler makes vectors of them, of any width, and the order of additions stays the same. */
WIDE static uint64_t add_finite(const double *v, uint64_t n, enum dtype d, struct stats *s)
{
	struct lanes a = { .sum = { 0 } };
	double min, max;

	for (unsigned l = 0; l < LANES; l++)
		a.min[l] = a.max[l] = v[0];
	for (uint64_t i = 0; i + LANES <= n; i += LANES)
		for (unsigned l = 0; l < LANES; l++)
			add_to_lane(&a, l, v[i + l]);
	for (uint64_t i = n - n % LANES; i < n; i++)
		add_to_lane(&a, (unsigned)(i % LANES), v[i]);
	min = a.min[0];
	max = a.max[0];
	for (unsigned l = 1; l < LANES; l++) {
		min = a.min[l] < min ? a.min[l] : min;
		max = a.max[l] > max ? a.max[l] : max;
	}
	uint64_t zeros = (uint64_t)stats_fold(a.zeros);
	s->zero_count += zeros;
	double largest = fmax(-min, max);
	if (largest > 0x1p500 || (largest > 0.0 && largest < 0x1p-500)) {
		sum_wide(v, n, &s->sums);
	} else {
		s->sums.real += stats_fold(a.sum);
		s->sums.squares += stats_fold(a.squares);
	}
	if (d != DT_INT64 && d != DT_UINT64) {
		keep_larger(&s->min_key, ~double_key(min));
		keep_larger(&s->max_key, double_key(max));
	}
	return zeros;
}

/* Doubles do not hold all of them. */
static void range_of_ints(enum dtype d, const unsigned char *p, uint64_t n, struct stats *s)
{
	uint64_t flip = d == DT_INT64 ? 1ull << 63 : 0, key;

	for (uint64_t i = 0; i < n; i++) {
		memcpy(&key, p + i * sizeof key, sizeof key);
		keep_larger(&s->min_key, ~(key ^ flip));
		keep_larger(&s->max_key, key ^ flip);
	}
}

static void add_real(enum dtype d, const unsigned char *p, uint64_t n, struct stats *s, tables h)
{
	uint32_t bytes = dtype_bytes(d), some = d == DT_FLOAT4_E2M1FN_X2 ? BATCH / 2 : BATCH;
	double v[BATCH];

	for (uint64_t at = 0, m; at < n; at += some) {
		const unsigned char *from = p + at * bytes;
		m = n - at < some ? n - at : some;
		if (d == DT_INT64 || d == DT_UINT64)
			range_of_ints(d, from, m, s);
		m = stats_to_double(d, from, m, v);
		s->count += m;
		if (!stats_all_finite(v, m))
			m = take_out(v, m, s);
		if (m == 0)
			continue;
		count_bins(v, m, add_finite(v, m, d, s), h);
	}
}

/* `times` times the same number. */
static void add_number(double x, uint64_t times, struct stats *s, uint64_t *bins)
{
	if (!isfinite(x)) {
		*(isnan(x) ? &s->nan_count : &s->inf_count) += times;
		return;
	}
	keep_larger(&s->min_key, ~double_key(x));
	keep_larger(&s->max_key, double_key(x));
	s->sums.real += (long double)x * times;
	s->sums.squares += (long double)x * x * times;
	if (x == 0.0)
		s->zero_count += times;
	else if (bins)
		bins[bin_of((uint32_t)(double_bits(x) >> 32))] += times;
}

/* Of 8 and 16 bits there are few different elements: counts how often each is there, which needs no arithmetic at all, and looks at each
 * once. codes: 1 << 8 * bytes zeros. */
static void add_codes(enum dtype d, const unsigned char *p, uint64_t n, uint32_t *codes, struct stats *s,
		      uint64_t *bins)
{
	uint32_t bytes = dtype_bytes(d), count = 1u << 8 * bytes;
	uint16_t code, some[BATCH / 2];
	double v[BATCH];

	for (uint64_t i = 0; i < n; i++) {
		if (bytes == 2)
			memcpy(&code, p + 2 * i, sizeof code);
		else
			code = p[i];
		codes[code]++;
	}
	for (uint32_t first = 0; first < count; first += BATCH / 2) {
		for (uint32_t c = 0; c < BATCH / 2; c++)
			if (bytes == 2)
				some[c] = (uint16_t)(first + c);
			else
				((uint8_t *)some)[c] = (uint8_t)c;
		uint64_t parts = stats_to_double(d, (unsigned char *)some, BATCH / 2, v) / (BATCH / 2);
		for (uint32_t c = 0; c < BATCH / 2; c++) {
			s->count += parts * codes[first + c];
			for (uint64_t i = 0; codes[first + c] && i < parts; i++)
				add_number(v[c * parts + i], codes[first + c], s, bins);
		}
	}
}

/* Without hypot() where squares fit: it takes ten times as long. */
static double length_of(double re, double im)
{
	double square = re * re + im * im;

	return square > 0x1p-900 && square < 0x1p900 ? sqrt(square) : fmin(hypot(re, im), DBL_MAX);
}

static void add_complex(enum dtype d, const unsigned char *p, uint64_t n, struct stats *s, tables h)
{
	double v[BATCH], size[BATCH / 2];

	for (uint64_t at = 0; at < n; at += BATCH / 2) {
		uint64_t m = n - at < BATCH / 2 ? n - at : BATCH / 2, kept = 0, zeros = s->zero_count;
		stats_to_double(d, p + at * dtype_bytes(d), m, v);
		s->count += m;
		for (uint64_t i = 0; i < m; i++) {
			double re = v[2 * i], im = v[2 * i + 1];
			if (isnan(re) || isnan(im)) {
				s->nan_count++;
			} else if (isinf(re) || isinf(im)) {
				s->inf_count++;
			} else {
				s->zero_count += re == 0.0 && im == 0.0;
				s->sums.real += re;
				s->sums.imag += im;
				s->sums.squares += (long double)re * re + (long double)im * im;
				size[kept++] = length_of(re, im);
			}
		}
		count_bins(size, kept, s->zero_count - zeros, h);
	}
}

void stats_run(enum dtype d, const void *p, uint64_t n, struct stats *s, uint64_t *bins)
{
	uint32_t bytes = dtype_bytes(d);
	uint32_t *codes = bytes <= 2 && n >= CODES_MIN && n <= UINT32_MAX ? mem_zalloc(1u << 8 * bytes, sizeof *codes) : NULL;
	tables h;

	if (codes) {
		add_codes(d, p, n, codes, s, bins);
		mem_free(codes);
		return;
	}
	memset(h, 0, sizeof h);
	if (dtype_is_complex(d))
		add_complex(d, p, n, s, h);
	else
		add_real(d, p, n, s, h);
	for (unsigned b = 0; bins && b < STATS_BINS; b++) {
		uint32_t sum = 0;
		for (unsigned t = 0; t < TABLES; t++)
			sum += h[t][b];
		bins[b] += sum;
	}
}

int64_t stats_key_value(enum dtype d, uint64_t key, double *real_out)
{
	if (d == DT_INT64 || d == DT_UINT64)
		return (int64_t)(d == DT_INT64 ? key ^ 1ull << 63 : key);
	uint64_t bits = key >> 63 ? key ^ 1ull << 63 : ~key;
	memcpy(real_out, &bits, sizeof bits);
	return 0;
}
