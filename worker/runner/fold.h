/* fold.h: reductions of a Partial tensor's pieces: the parts of one box are collected, in the order of the plan, and become one. */
#pragma once
#include "runner/run.h"

enum { FOLD_BYTES = 4 << 20 };         /* of all parts of one piece together, where that is possible */

/* Elements of a piece when `n` parts of it are held at once. */
uint64_t fold_elements(enum dtype dtype, uint64_t n);
/* ERR_DTYPE_UNSUPPORTED for what PyTorch does not reduce either. */
FALLIBLE enum err fold_check(enum dtype dtype, const struct run_move *m);
/* parts: n runs of `count` elements, `stride` bytes apart; the result is in the first. */
FALLIBLE enum err fold_parts(unsigned char *parts, uint64_t stride, uint32_t n, uint64_t count, enum dtype dtype,
			     const struct run_move *m);
