/* npy.c: see npy.h. */
#include "format/npy.h"

const char *npy_type(enum dtype d)
{
	static const struct { enum dtype dtype; const char *name; } types[] = {
		{ DT_FLOAT64, "<f8" }, { DT_FLOAT32, "<f4" }, { DT_FLOAT16, "<f2" }, { DT_INT64, "<i8" },
		{ DT_INT32, "<i4" },   { DT_INT16, "<i2" },   { DT_INT8, "|i1" },    { DT_UINT64, "<u8" },
		{ DT_UINT32, "<u4" },  { DT_UINT16, "<u2" },  { DT_UINT8, "|u1" },   { DT_BOOL, "|b1" },
		{ DT_COMPLEX128, "<c16" }, { DT_COMPLEX64, "<c8" },
	};

	for (size_t i = 0; i < sizeof types / sizeof *types; i++)
		if (types[i].dtype == d)
			return types[i].name;
	return NULL;
}

enum err npy_put_head(struct buf *b, const char *type, uint32_t ndim, const int64_t *shape)
{
	CLEANUP(buf_free) struct buf dict = BUF_INIT(60000);

	buf_printf(&dict, "{'descr': '%s', 'fortran_order': False, 'shape': (", type);
	for (uint32_t i = 0; i < ndim; i++)
		buf_printf(&dict, "%jd%s", (intmax_t)shape[i], ndim == 1 || i + 1 < ndim ? ", " : "");
	buf_puts(&dict, "), }");
	buf_fill(&dict, ' ', NPY_ALIGN - 1 - (10 + dict.len) % NPY_ALIGN);
	buf_puts(&dict, "\n");
	TRY(buf_status(&dict));
	buf_put(b, "\x93NUMPY\x01\x00", 8);
	buf_le16(b, (uint16_t)dict.len);
	buf_put(b, dict.p, dict.len);
	return buf_status(b);
}
