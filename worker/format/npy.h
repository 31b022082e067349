/* npy.h: the head of NumPy's array format (numpy/lib/format.py, NEP 1), and archives of such arrays, .npz. */
#pragma once
#include "base/buf.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

enum { NPY_ALIGN = 64, NPY_HEAD_MAX = 256 << 10, NPY_FIRST = 12 /* bytes that say how long a head is */ };

/* "<f4"; NULL: NumPy has no such type. */
const char *npy_type(enum dtype d);
/* Appends version 1.0 of the head, padded to a multiple of NPY_ALIGN; `type` as NumPy spells it, C order. */
FALLIBLE enum err npy_put_head(struct buf *b, const char *type, uint32_t ndim, const int64_t *shape);

/* Do the first bytes of a file say that it is an .npz? */
bool npz_file_is(const void *first, size_t n);

struct npy_head {
	struct str type;               /* "<f4": borrowed from the text */
	bool fortran;                  /* the first dim runs fastest */
	uint32_t ndim;
	int64_t shape[NDIM_MAX];
};
/* The length of a head, of versions 1.0 to 3.0, from the NPY_FIRST bytes that it begins with. ERR_FORMAT_NPZ. */
FALLIBLE enum err npy_head_bytes(const unsigned char first[NPY_FIRST], uint64_t *out);
/* Parses a whole head. ERR_FORMAT_NPZ; ERR_FORMAT_UNSUPPORTED: a record array. */
FALLIBLE enum err npy_parse_head(struct str head, struct npy_head *out);
/* The dtype of a head's type; `name`: the dtype that a void stands for, or empty. ERR_DTYPE_UNSUPPORTED names what it is: objects, texts,
 * dates, big-endian numbers, a void whose dtype nobody says. */
FALLIBLE enum err npy_dtype(struct str type, struct str name, enum dtype *out);
