/* reduce.c: elementwise reductions, as torch.distributed's gloo does them.
 *
 * Sources are taken in rank order, a block of elements at a time, into an accumulator: so the result is the same wherever it is
 * computed, and 16-bit and 8-bit floats are rounded once at the end and not after each member. Loops are over plain arrays without
 * branches that the compiler could not turn into selects. */
#include "comm/reduce.h"

#include <string.h>

#include "tensor/cast.h"
#include "tensor/placement.h"

enum { BLOCK = 512 };

/* As PyTorch's minimum and maximum: a NaN on either side is the result. */
#define FLOAT_MIN(a, b) ((a) != (a) ? (a) : (b) < (a) || (b) != (b) ? (b) : (a))
#define FLOAT_MAX(a, b) ((a) != (a) ? (a) : (b) > (a) || (b) != (b) ? (b) : (a))
#define INT_MIN_OF(a, b) ((b) < (a) ? (b) : (a))
#define INT_MAX_OF(a, b) ((b) > (a) ? (b) : (a))

/* acc[i] = acc[i] op in[i]. Sums and products of integers wrap around, as unsigned ones do. */
#define FOLD(dtype, type, wide, whole, min, max)                                                        \
	static void fold_##type(type *restrict acc, const type *restrict in, uint64_t n, enum reduce_op op) \
	{                                                                                               \
		switch (op) {                                                                           \
		case REDUCE_MIN:                                                                          \
			for (uint64_t i = 0; i < n; i++)                                                \
				acc[i] = min(acc[i], in[i]);                                            \
			break;                                                                          \
		case REDUCE_MAX:                                                                          \
			for (uint64_t i = 0; i < n; i++)                                                \
				acc[i] = max(acc[i], in[i]);                                            \
			break;                                                                          \
		case REDUCE_PRODUCT:                                                                      \
			for (uint64_t i = 0; i < n; i++)                                                \
				acc[i] = (type)((wide)acc[i] * (wide)in[i]);                            \
			break;                                                                          \
		default:                                                                                \
			for (uint64_t i = 0; i < n; i++)                                                \
				acc[i] = (type)((wide)acc[i] + (wide)in[i]);                            \
		}                                                                                       \
	}

/* dtype, its type, the type in which it is multiplied and added, the type in which an average is divided, minimum, maximum */
#define TYPES(X)                                                        \
	X(FLOAT64, double, double, double, FLOAT_MIN, FLOAT_MAX)        \
	X(FLOAT32, float, float, float, FLOAT_MIN, FLOAT_MAX)           \
	X(INT64, int64_t, uint64_t, int64_t, INT_MIN_OF, INT_MAX_OF)    \
	X(INT32, int32_t, uint32_t, int32_t, INT_MIN_OF, INT_MAX_OF)    \
	X(INT16, int16_t, uint32_t, int32_t, INT_MIN_OF, INT_MAX_OF)    \
	X(INT8, int8_t, uint32_t, int32_t, INT_MIN_OF, INT_MAX_OF)      \
	X(UINT64, uint64_t, uint64_t, uint64_t, INT_MIN_OF, INT_MAX_OF) \
	X(UINT32, uint32_t, uint32_t, uint32_t, INT_MIN_OF, INT_MAX_OF) \
	X(UINT16, uint16_t, uint32_t, uint32_t, INT_MIN_OF, INT_MAX_OF) \
	X(UINT8, uint8_t, uint32_t, uint32_t, INT_MIN_OF, INT_MAX_OF)

TYPES(FOLD)

/* How a dtype is reduced: as which one, with how many of them an element, and what its accumulator is cast to in between. */
struct way {
	enum dtype as;                 /* of the accumulator: one of those with a fold */
	uint32_t per;                  /* of it to an element: 2 for complex */
	bool cast;
};

static struct way way_of(enum dtype d)
{
	switch (d) {
	case DT_COMPLEX128:
		return (struct way){ DT_FLOAT64, 2, false };
	case DT_COMPLEX64:
		return (struct way){ DT_FLOAT32, 2, false };
	case DT_COMPLEX32:
	case DT_BCOMPLEX32:
		return (struct way){ DT_FLOAT32, 2, true };
	case DT_BOOL:
		return (struct way){ DT_UINT8, 1, false };
	default:
		return dtype_is_float(d) && d != DT_FLOAT64 && d != DT_FLOAT32 ? (struct way){ DT_FLOAT32, 1, true }
									      : (struct way){ d, 1, false };
	}
}

enum err comm_reduce_check(enum dtype d, enum reduce_op op)
{
	bool sums = op == REDUCE_SUM || op == REDUCE_AVG;

	if (d == DT_FLOAT4_E2M1FN_X2 || (dtype_is_complex(d) && !sums) || (d == DT_BOOL && op == REDUCE_AVG))
		return ERR(DTYPE_UNSUPPORTED, "%s is not defined for %s", placement_reduce_name((enum reduce_op)op), dtype_name(d));
	return OK;
}

static void fold(void *acc, const void *in, uint64_t n, enum dtype as, enum reduce_op op)
{
	switch (as) {
#define X(dtype, type, ...) case DT_##dtype: fold_##type(acc, in, n, op); return;
	TYPES(X)
#undef X
	default: must(!"a dtype without a fold");
	}
}

static void divide(void *acc, uint64_t n, enum dtype as, uint32_t by)
{
	switch (as) {
#define X(dtype, type, wide, whole, ...)                                          \
	case DT_##dtype:                                                          \
		for (uint64_t i = 0; i < n; i++)                                  \
			((type *)acc)[i] = (type)(((type *)acc)[i] / (whole)by);  \
		return;
	TYPES(X)
#undef X
	default: must(!"a dtype without a fold");
	}
}

/* Of bool, sum and max are "any", product and min are "all"; a byte of a bool may be anything but 0. */
static void as_bools(unsigned char *p, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		p[i] = p[i] != 0;
}

static FALLIBLE enum err take(void *to, const void *from, uint64_t n, enum dtype d, const struct way *w)
{
	if (w->cast)
		return cast_run(to, w->per == 2 ? DT_COMPLEX64 : w->as, from, d, n);
	memcpy(to, from, n * dtype_bytes(d));
	if (d == DT_BOOL)
		as_bools(to, n);
	return OK;
}

void comm_reduce_run(void *out, const void *const *in, uint32_t n, uint64_t count, enum dtype d, enum reduce_op op)
{
	_Alignas(16) unsigned char acc[BLOCK * 16], next[BLOCK * 16];
	const struct way w = way_of(d);
	enum reduce_op how = d != DT_BOOL ? op : op == REDUCE_SUM ? REDUCE_MAX : op == REDUCE_PRODUCT ? REDUCE_MIN : op;
	uint64_t item = dtype_bytes(d);

	for (uint64_t at = 0; at < count; at += BLOCK) {
		uint64_t some = count - at < BLOCK ? count - at : BLOCK;
		must(take(acc, (const unsigned char *)in[0] + at * item, some, d, &w) == OK);
		for (uint32_t k = 1; k < n; k++) {
			const void *from = (const unsigned char *)in[k] + at * item;
			if (w.cast || d == DT_BOOL) {
				must(take(next, from, some, d, &w) == OK);
				from = next;
			}
			fold(acc, from, some * w.per, w.as, how);
		}
		if (op == REDUCE_AVG)
			divide(acc, some * w.per, w.as, n);
		if (w.cast)
			must(cast_run((unsigned char *)out + at * item, d, acc, w.per == 2 ? DT_COMPLEX64 : w.as, some) == OK);
		else
			memcpy((unsigned char *)out + at * item, acc, some * item);
	}
}
