/* stats.c: see stats.h. Elements go through double in small batches; integers compare exactly by their bits first. */
#include "tensor/stats.h"

#include <math.h>
#include <string.h>

#include "tensor/cast.h"

enum { BATCH = 512 };

/* Real parts of complex elements count as elements of their own. */
static enum dtype part_of(enum dtype d, uint64_t *n)
{
	static const struct { enum dtype complex, part; } parts[] = {
		{ DT_COMPLEX128, DT_FLOAT64 }, { DT_COMPLEX64, DT_FLOAT32 },
		{ DT_COMPLEX32, DT_FLOAT16 },  { DT_BCOMPLEX32, DT_BFLOAT16 },
	};

	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		if (parts[i].complex == d) {
			*n *= 2;
			return parts[i].part;
		}
	return d;
}

static void to_double(enum dtype d, const unsigned char *p, uint64_t n, double *out)
{
	if (d == DT_FLOAT4_E2M1FN_X2 || cast_run(out, DT_FLOAT64, p, d, n))
		for (uint64_t i = 0; i < n; i++)
			out[i] = p[i];
}

void stats_run(enum dtype d, const void *p, uint64_t n, struct stats *s)
{
	double v[BATCH];
	enum dtype part = part_of(d, &n);
	uint32_t bytes = dtype_bytes(part);

	for (uint64_t at = 0; at < n; at += BATCH) {
		uint64_t m = n - at < BATCH ? n - at : BATCH;
		to_double(part, (const unsigned char *)p + at * bytes, m, v);
		for (uint64_t i = 0; i < m; i++) {
			s->nan_count += isnan(v[i]) != 0;
			s->inf_count += isinf(v[i]) != 0;
			s->nonzero_count += v[i] != 0.0;
		}
	}
}

static void compare_batch(const double *a, const double *b, const unsigned char *pa, const unsigned char *pb,
			  uint32_t bytes, uint64_t n, double rtol, double atol, uint64_t base, struct stats_diff *diff)
{
	for (uint64_t i = 0; i < n; i++) {
		if (memcmp(pa + i * bytes, pb + i * bytes, bytes) == 0)
			continue;
		double d = fabs(a[i] - b[i]), rel = b[i] != 0.0 ? d / fabs(b[i]) : INFINITY;
		/* equal as doubles but not as bits: -0.0 and 0.0, or integers beyond 2^53, which are at least one apart */
		if (d == 0.0 && a[i] != 0.0) {
			d = 1.0;
			rel = 1.0 / fabs(b[i]);
		}
		/* an infinity is near nothing, though rtol times it is infinite too */
		bool close = d <= atol + rtol * fabs(b[i]) && !isinf(d);
		if (close)
			continue;
		if (diff->count++ == 0)
			diff->first = base + i;
		if (d > diff->max_abs || isnan(d))
			diff->max_abs = d;
		if (rel > diff->max_rel || isnan(rel))
			diff->max_rel = rel;
	}
}

void stats_compare(enum dtype d, const void *a, const void *b, uint64_t n, double rtol, double atol, uint64_t base,
		   struct stats_diff *diff)
{
	double va[BATCH], vb[BATCH];
	uint64_t parts = n;
	enum dtype part = part_of(d, &parts);
	uint32_t bytes = dtype_bytes(part);
	uint64_t per_element = n ? parts / n : 1, before = diff->count;

	if (memcmp(a, b, n * dtype_bytes(d)) == 0)
		return;
	for (uint64_t at = 0; at < parts; at += BATCH) {
		uint64_t m = parts - at < BATCH ? parts - at : BATCH;
		const unsigned char *pa = (const unsigned char *)a + at * bytes, *pb = (const unsigned char *)b + at * bytes;
		if (memcmp(pa, pb, m * bytes) == 0)
			continue;
		to_double(part, pa, m, va);
		to_double(part, pb, m, vb);
		compare_batch(va, vb, pa, pb, bytes, m, rtol, atol, at, diff);
	}
	if (before == 0 && diff->count)
		diff->first = base + diff->first / per_element;
}
