/* fold.c: see fold.h. */
#include "runner/fold.h"

#include "base/num.h"
#include "comm/reduce.h"
#include "tensor/cast.h"

enum { BLOCK = 512 };

uint64_t fold_elements(enum dtype dtype, uint64_t n)
{
	return num_max(FOLD_BYTES / (n * dtype_bytes(dtype)), 1);
}

static enum reduce_op op_of(const struct run_move *m, uint32_t n)
{
	/* sums over one mesh dim and averages over another: divided by less than there are parts */
	return m->op == REDUCE_AVG && n && m->divisor != n ? REDUCE_SUM : (enum reduce_op)m->op;
}

enum err fold_check(enum dtype dtype, const struct run_move *m)
{
	return comm_reduce_check(dtype, op_of(m, 0));
}

/* In double: what a narrower type rounds its quotient to is the same. */
static FALLIBLE enum err divide(unsigned char *p, uint64_t count, enum dtype dtype, uint32_t by)
{
	enum dtype as = dtype_is_complex(dtype) ? DT_COMPLEX128 : DT_FLOAT64;
	uint32_t item = dtype_bytes(dtype), per = dtype_is_complex(dtype) ? 2 : 1;
	double wide[2 * BLOCK];

	for (uint64_t at = 0; at < count; at += BLOCK) {
		uint64_t n = num_min(BLOCK, count - at);
		TRY(cast_run(wide, as, p + at * item, dtype, n));
		for (uint64_t i = 0; i < n * per; i++)
			wide[i] /= by;
		TRY(cast_run(p + at * item, dtype, wide, as, n));
	}
	return OK;
}

enum err fold_parts(unsigned char *parts, uint64_t stride, uint32_t n, uint64_t count, enum dtype dtype,
		    const struct run_move *m)
{
	CLEANUP(mem_free_ptr) const void **in = mem_zalloc(n, sizeof *in);
	enum reduce_op op = op_of(m, n);

	NEED(in, "no memory for a reduction of %u", n);
	for (uint32_t i = 0; i < n; i++)
		in[i] = parts + i * stride;
	comm_reduce_run(parts, in, n, count, dtype, op);
	return m->op == REDUCE_AVG && op == REDUCE_SUM ? divide(parts, count, dtype, m->divisor) : OK;
}
