/* npy.h: the head of NumPy's array format (numpy/lib/format.py, NEP 1), and archives of such arrays, .npz. */
#pragma once
#include "base/buf.h"
#include "tensor/dtype.h"

enum { NPY_ALIGN = 64 };

/* "<f4"; NULL: NumPy has no such type. */
const char *npy_type(enum dtype d);
/* Appends version 1.0 of the head, padded to a multiple of NPY_ALIGN; `type` as NumPy spells it, C order. */
FALLIBLE enum err npy_put_head(struct buf *b, const char *type, uint32_t ndim, const int64_t *shape);
