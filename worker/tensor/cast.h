/* cast.h: element conversion as torch.Tensor.copy_ does it on a CPU, for runs of elements. Bit for bit the same, but for what C
 * and PyTorch leave to the machine: a float that is out of the range of an integer type, and which NaN a NaN becomes. */
#pragma once
#include "tensor/dtype.h"

/* dst and src: n elements each, little-endian, any alignment, not overlapping. ERR_DTYPE_UNSUPPORTED for float4_e2m1fn_x2 to or
 * from another dtype, which PyTorch refuses too. */
FALLIBLE enum err cast_run(void *dst, enum dtype to, const void *src, enum dtype from, size_t n);
/* Does cast_run know the pair? For a plan, before any byte is read. */
FALLIBLE enum err cast_check(enum dtype to, enum dtype from);

/* The lazy bits of a stored tensor, resolved in place: conj of complex elements, negation of any signed or float ones. */
FALLIBLE enum err cast_conj(void *p, enum dtype d, size_t n);
FALLIBLE enum err cast_neg(void *p, enum dtype d, size_t n);
