/* reduce.h: the arithmetic of reductions, without communication: for the back ends, and for state-dict operations in one shared memory. */
#pragma once
#include "comm/comm.h"

/* ERR_DTYPE_UNSUPPORTED: PyTorch's gloo does not reduce this dtype with this operation either. */
FALLIBLE enum err comm_reduce_check(enum dtype d, enum reduce_op op);
/* out[i] = in[0][i] op in[1][i] op … in this order, n >= 1; out may be one of the inputs. Pointers are aligned to the element. */
void comm_reduce_run(void *out, const void *const *in, uint32_t n, uint64_t count, enum dtype d, enum reduce_op op);
