/* stats_diff.c: how two runs of elements differ (stats.h). Each loop over a batch does little, over LANES accumulators: the compiler
 * makes vectors of it. Batches with NaN, infinities, complex elements or numbers whose squares leave the range of double go element by
 * element, in long double. */
#pragma GCC optimize("O3,fp-contract=off")

#include "tensor/stats_impl.h"

#include <math.h>
#include <string.h>

struct batch {
	enum dtype dtype;
	const unsigned char *pa, *pb;
	double a[BATCH], b[BATCH], d[BATCH]; /* both sides' elements, |a - b| */
	uint64_t parts, elements;            /* doubles; what they are of */
	uint64_t base;                       /* the first element's index in the tensor */
};

/* Of |a|^2 and so on, of one batch. */
struct squares {
	double aa, bb, ab, dd, largest;
};

static double larger(double so_far, double v)
{
	return v > so_far || isnan(v) ? v : so_far;
}

void stats_diff_add(struct stats_diff *to, const struct stats_diff *more)
{
	to->count += more->count;
	to->bits += more->bits;
	to->odd += more->odd;
	to->max_abs = larger(to->max_abs, more->max_abs);
	to->max_rel = larger(to->max_rel, more->max_rel);
	to->aa += more->aa;
	to->bb += more->bb;
	to->ab += more->ab;
	to->dd += more->dd;
}

WIDE static uint64_t count_bits(const unsigned char *a, const unsigned char *b, uint64_t n)
{
	uint64_t count = 0, x, y, at = 0;

	for (; at + sizeof x <= n; at += sizeof x) {
		memcpy(&x, a + at, sizeof x);
		memcpy(&y, b + at, sizeof y);
		count += (uint64_t)__builtin_popcountll(x ^ y);
	}
	for (; at < n; at++)
		count += (uint64_t)__builtin_popcount(a[at] ^ b[at]);
	return count;
}

static double int_distance(enum dtype d, const unsigned char *pa, const unsigned char *pb)
{
	uint64_t flip = d == DT_INT64 ? 1ull << 63 : 0, x, y;

	memcpy(&x, pa, sizeof x);
	memcpy(&y, pb, sizeof y);
	x ^= flip;
	y ^= flip;
	return (double)(x > y ? x - y : y - x);
}

/* Doubles do not hold all 64-bit integers: neighbours beyond 2^53 would be no distance apart. */
static bool is_wide_int(enum dtype d)
{
	return d == DT_INT64 || d == DT_UINT64;
}

static void take_distances(struct batch *x)
{
	if (is_wide_int(x->dtype)) {
		for (uint64_t i = 0; i < x->parts; i++)
			x->d[i] = int_distance(x->dtype, x->pa + i * sizeof(uint64_t), x->pb + i * sizeof(uint64_t));
		return;
	}
	for (uint64_t i = 0; i < x->parts; i++)
		x->d[i] = fabs(x->a[i] - x->b[i]);
}

/* ----------------------------------------------------------------------------------------------- element by element */

/* Counts an element that is not near the other one. */
static bool note(const struct stats_near *near, double d, double b, uint64_t index, struct stats_diff *out)
{
	if (d <= near->atol + near->rtol * b && !isinf(d)) /* an infinity is near nothing, though rtol times it is infinite too */
		return false;
	if (out->count++ == 0)
		out->first = index;
	out->max_abs = larger(out->max_abs, d);
	out->max_rel = larger(out->max_rel, b != 0.0 ? d / b : INFINITY);
	return true;
}

static bool same_bits(const struct batch *x, uint64_t element)
{
	uint32_t bytes = dtype_bytes(x->dtype);

	if (x->dtype == DT_FLOAT4_E2M1FN_X2) /* half a byte, never NaN */
		return x->a[element] == x->b[element];
	return memcmp(x->pa + element * bytes, x->pb + element * bytes, bytes) == 0;
}

static uint64_t tensor_index(const struct batch *x, uint64_t element)
{
	return x->base + (x->dtype == DT_FLOAT4_E2M1FN_X2 ? element / 2 : element);
}

static double length_of(const double *part, uint64_t parts)
{
	return parts == 1 ? fabs(part[0]) : hypot(part[0], part[1]);
}

static void add_element(const double *a, const double *b, double d, uint64_t parts, struct stats_diff *out)
{
	for (uint64_t k = 0; k < parts; k++) {
		out->aa += (long double)a[k] * a[k];
		out->bb += (long double)b[k] * b[k];
		out->ab += (long double)a[k] * b[k];
	}
	out->dd += (long double)d * d;
}

static void compare_each(const struct batch *x, const struct stats_near *near, struct stats_diff *out)
{
	uint64_t per = x->parts / x->elements;

	for (uint64_t i = 0; i < x->elements; i++) {
		const double *a = x->a + i * per, *b = x->b + i * per;
		bool finite = stats_all_finite(a, per) && stats_all_finite(b, per);
		double gap[2] = { a[0] - b[0], per == 2 ? a[1] - b[1] : 0.0 };
		double d = is_wide_int(x->dtype) ? x->d[i] : length_of(gap, per);
		if (finite)
			add_element(a, b, d, per, out);
		if (!same_bits(x, i) && note(near, d, length_of(b, per), tensor_index(x, i), out) && !finite)
			out->odd++;
	}
}

/* --------------------------------------------------------------------------------------------------- all at once */

/* Room behind the last element up to a whole row of lanes is zeros, which add nothing and are never apart. */
static uint64_t pad(struct batch *x)
{
	uint64_t n = x->parts;

	for (; n % LANES; n++)
		x->a[n] = x->b[n] = x->d[n] = 0.0;
	return n;
}

WIDE static void add_squares(const double *v, uint64_t n, double *squares, double *largest)
{
	double sum[LANES] = { 0 }, most[LANES] = { 0 };

	for (uint64_t i = 0; i < n; i += LANES)
		for (unsigned l = 0; l < LANES; l++) {
			double x = fabs(v[i + l]);
			sum[l] += x * x;
			most[l] = x > most[l] ? x : most[l];
		}
	for (unsigned l = 0; l < LANES; l++)
		*largest = most[l] > *largest ? most[l] : *largest;
	*squares = stats_fold(sum);
}

WIDE static void add_products(const double *a, const double *b, const double *d, uint64_t n, struct squares *s)
{
	double ab[LANES] = { 0 }, dd[LANES] = { 0 };

	for (uint64_t i = 0; i < n; i += LANES)
		for (unsigned l = 0; l < LANES; l++) {
			ab[l] += a[i + l] * b[i + l];
			dd[l] += d[i + l] * d[i + l];
		}
	s->ab = stats_fold(ab);
	s->dd = stats_fold(dd);
}

/* How many are apart, and how far. */
WIDE static uint64_t count_apart(const double *b, const double *d, uint64_t n, double rtol, double atol, double *abs_out, double *rel_out)
{
	double count[LANES] = { 0 }, most[LANES] = { 0 }, rel[LANES] = { 0 };

	for (uint64_t i = 0; i < n; i += LANES)
		for (unsigned l = 0; l < LANES; l++) {
			double y = fabs(b[i + l]), x = d[i + l] > atol + rtol * y ? d[i + l] : 0.0;
			double r = x > 0.0 ? x / y : 0.0;
			count[l] += x > 0.0 ? 1.0 : 0.0;
			most[l] = x > most[l] ? x : most[l];
			rel[l] = r > rel[l] ? r : rel[l];
		}
	for (unsigned l = 0; l < LANES; l++) {
		*abs_out = most[l] > *abs_out ? most[l] : *abs_out;
		*rel_out = rel[l] > *rel_out ? rel[l] : *rel_out;
	}
	return (uint64_t)stats_fold(count);
}

static uint64_t first_apart(const struct batch *x, const struct stats_near *near)
{
	uint64_t i = 0;

	while (i + 1 < x->parts && !(x->d[i] > near->atol + near->rtol * fabs(x->b[i])))
		i++;
	return tensor_index(x, i);
}

/* Do the squares of numbers up to here neither overflow nor lose their digits? */
static bool is_ordinary(double largest)
{
	return largest == 0.0 || (largest <= 0x1p500 && largest >= 0x1p-500);
}

static void compare_real(struct batch *x, const struct stats_near *near, struct stats_diff *out)
{
	struct squares s = { 0 };
	uint64_t n = pad(x);
	double most = 0.0, rel = 0.0;

	if (near->sums) {
		add_squares(x->a, n, &s.aa, &s.largest);
		add_squares(x->b, n, &s.bb, &s.largest);
		add_products(x->a, x->b, x->d, n, &s);
	}
	if (!is_ordinary(s.largest)) {
		compare_each(x, near, out);
		return;
	}
	out->aa += s.aa;
	out->bb += s.bb;
	out->ab += s.ab;
	out->dd += s.dd;
	uint64_t apart = count_apart(x->b, x->d, n, near->rtol, near->atol, &most, &rel);
	if (apart && out->count == 0)
		out->first = first_apart(x, near);
	out->count += apart;
	out->max_abs = larger(out->max_abs, most);
	out->max_rel = larger(out->max_rel, rel);
}

/* Adds the sums of elements that are the same on both sides. */
static void add_alike(struct batch *x, struct stats_diff *out)
{
	static const struct stats_near exact = { .sums = true };
	double squares = 0.0, largest = 0.0;

	x->parts = stats_to_double(x->dtype, x->pa, x->elements, x->a);
	if (stats_all_finite(x->a, x->parts)) {
		add_squares(x->a, pad(x), &squares, &largest);
		if (is_ordinary(largest)) {
			out->aa += squares;
			out->bb += squares;
			out->ab += squares;
			return;
		}
	}
	memcpy(x->b, x->a, x->parts * sizeof *x->a);
	memset(x->d, 0, sizeof x->d);
	if (!dtype_is_complex(x->dtype))
		x->elements = x->parts;
	compare_each(x, &exact, out);
}

static void compare_batch(struct batch *x, const struct stats_near *near, struct stats_diff *out)
{
	uint64_t bytes = x->elements * dtype_bytes(x->dtype);

	if (memcmp(x->pa, x->pb, bytes) == 0) {
		if (near->sums)
			add_alike(x, out);
		return;
	}
	out->bits += count_bits(x->pa, x->pb, bytes);
	x->parts = stats_to_double(x->dtype, x->pa, x->elements, x->a);
	stats_to_double(x->dtype, x->pb, x->elements, x->b);
	if (!dtype_is_complex(x->dtype))
		x->elements = x->parts;
	take_distances(x);
	if (dtype_is_complex(x->dtype) || !stats_all_finite(x->a, x->parts) || !stats_all_finite(x->b, x->parts))
		compare_each(x, near, out);
	else
		compare_real(x, near, out);
}

void stats_compare(enum dtype d, const void *a, const void *b, uint64_t n, const struct stats_near *near, uint64_t base,
		   struct stats_diff *out)
{
	uint32_t bytes = dtype_bytes(d);
	uint64_t some = dtype_is_complex(d) || d == DT_FLOAT4_E2M1FN_X2 ? BATCH / 2 : BATCH;
	struct batch x = { .dtype = d };

	if (!near->sums && memcmp(a, b, n * bytes) == 0)
		return;
	for (uint64_t at = 0; at < n; at += some) {
		x.pa = (const unsigned char *)a + at * bytes;
		x.pb = (const unsigned char *)b + at * bytes;
		x.base = base + at;
		x.elements = n - at < some ? n - at : some;
		compare_batch(&x, near, out);
	}
}
