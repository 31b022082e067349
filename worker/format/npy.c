/* npy.c: see npy.h. */
#include "format/npy.h"

#include <string.h>

#include "base/num.h"
#include "base/reader.h"

static const struct { enum dtype dtype; const char *name; } types[] = {
	{ DT_FLOAT64, "<f8" }, { DT_FLOAT32, "<f4" }, { DT_FLOAT16, "<f2" }, { DT_INT64, "<i8" },
	{ DT_INT32, "<i4" },   { DT_INT16, "<i2" },   { DT_INT8, "|i1" },    { DT_UINT64, "<u8" },
	{ DT_UINT32, "<u4" },  { DT_UINT16, "<u2" },  { DT_UINT8, "|u1" },   { DT_BOOL, "|b1" },
	{ DT_COMPLEX128, "<c16" }, { DT_COMPLEX64, "<c8" },
};

const char *npy_type(enum dtype d)
{
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

/* ------------------------------------------------------------------------------------------------------------ reading */

enum { MAGIC = 6, VERSION_MAX = 3 };

enum err npy_head_bytes(const unsigned char first[NPY_FIRST], uint64_t *out)
{
	struct reader r = reader_of(first, NPY_FIRST);
	struct str magic = reader_str(&r, MAGIC);
	uint8_t major = reader_u8(&r);

	reader_u8(&r); /* minor version */
	if (memcmp(magic.p, "\x93NUMPY", MAGIC) != 0)
		return ERR(FORMAT_NPZ, "no array of NumPy: it does not begin so");
	if (major == 0 || major > VERSION_MAX)
		return ERR(FORMAT_NPZ, "a head of version %u; known are 1 to %d", major, VERSION_MAX);
	uint64_t n = major == 1 ? reader_u16(&r) : reader_u32(&r);
	*out = r.at + n;
	return *out > NPY_HEAD_MAX ? ERR(LIMIT_EXCEEDED, "a head of %ju bytes", (uintmax_t)*out) : OK;
}

/* A cursor over the text of a dict that Python's ast.literal_eval would read. */
struct scan {
	const char *p, *end;
};

static char next(struct scan *s)
{
	while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\t'))
		s->p++;
	return s->p < s->end ? *s->p : '\0';
}

static bool take(struct scan *s, const char *word)
{
	size_t n = strlen(word);
	bool is = next(s) && (size_t)(s->end - s->p) >= n && memcmp(s->p, word, n) == 0;

	s->p += is ? n : 0;
	return is;
}

/* A text in quotes, without escapes: no key and no type needs one. */
static bool take_text(struct scan *s, struct str *out)
{
	char quote = next(s);
	const char *from = s->p + 1, *to;

	if (quote != '\'' && quote != '"')
		return false;
	to = memchr(from, quote, (size_t)(s->end - from));
	if (!to || memchr(from, '\\', (size_t)(to - from)))
		return false;
	*out = (struct str){ from, (size_t)(to - from) };
	s->p = to + 1;
	return true;
}

static bool take_dim(struct scan *s, int64_t *out)
{
	uint64_t n;

	next(s);
	const char *from = s->p;
	while (s->p < s->end && *s->p >= '0' && *s->p <= '9')
		s->p++;
	if (!str_to_u64((struct str){ from, (size_t)(s->p - from) }, &n) || n > INT64_MAX)
		return false;
	take(s, "L"); /* as Python 2 wrote it */
	*out = (int64_t)n;
	return true;
}

static FALLIBLE enum err take_shape(struct scan *s, struct npy_head *h)
{
	if (!take(s, "("))
		return ERR(FORMAT_NPZ, "the head's shape is no tuple");
	for (bool comma = true; !take(s, ")"); comma = take(s, ",")) {
		if (h->ndim == NDIM_MAX)
			return ERR(LIMIT_EXCEEDED, "an array of more than %d dims", NDIM_MAX);
		if (!comma || !take_dim(s, &h->shape[h->ndim]))
			return ERR(FORMAT_NPZ, "the head's shape has an entry that is no size");
		h->ndim++;
	}
	return OK;
}

static FALLIBLE enum err take_pair(struct scan *s, struct npy_head *h, bool seen[3])
{
	static const char *const keys[] = { "descr", "fortran_order", "shape" };
	struct str key;
	size_t k = 0;

	if (!take_text(s, &key) || !take(s, ":"))
		return ERR(FORMAT_NPZ, "the head is no dict");
	while (k < 3 && !str_is(key, keys[k]))
		k++;
	if (k == 3 || seen[k])
		return ERR(FORMAT_NPZ, "the head has a key that it should not have, or has it twice");
	seen[k] = true;
	if (k == 2)
		return take_shape(s, h);
	if (k == 1) {
		h->fortran = take(s, "True");
		return h->fortran || take(s, "False") ? OK : ERR(FORMAT_NPZ, "the head's fortran_order is no bool");
	}
	if (take_text(s, &h->type))
		return OK;
	return next(s) == '[' ? ERR(FORMAT_UNSUPPORTED, "an array of records") : ERR(FORMAT_NPZ, "the head's descr is no type");
}

enum err npy_parse_head(struct str head, struct npy_head *out)
{
	bool seen[3] = { false };
	uint64_t n = 0;

	*out = (struct npy_head){ 0 };
	if (head.n < NPY_FIRST)
		return ERR(FORMAT_NPZ, "a head of %zu bytes", head.n);
	TRY(npy_head_bytes((const unsigned char *)head.p, &n));
	if (n != head.n)
		return ERR(FORMAT_NPZ, "a head of another length");
	struct scan s = { head.p + (head.p[MAGIC] == 1 ? 10 : NPY_FIRST), head.p + head.n };
	if (!take(&s, "{"))
		return ERR(FORMAT_NPZ, "the head is no dict");
	for (bool comma = true; !take(&s, "}"); comma = take(&s, ",")) {
		if (!comma)
			return ERR(FORMAT_NPZ, "the head is no dict");
		TRY(take_pair(&s, out, seen));
	}
	return seen[0] && seen[1] && seen[2] && !next(&s) ? OK : ERR(FORMAT_NPZ, "the head lacks a key, or has something behind its dict");
}

static FALLIBLE enum err void_dtype(struct str type, struct str name, enum dtype *out)
{
	uint64_t bytes;

	if (name.n && !dtype_parse(name, out) && str_to_u64((struct str){ type.p + 2, type.n - 2 }, &bytes) && bytes == dtype_bytes(*out))
		return OK;
	err_clear();
	return ERR(DTYPE_UNSUPPORTED, "NumPy's type %.*s is a void, as arrays of ml_dtypes are saved: the file does not say of which dtype",
		   (int)num_min(type.n, 16), type.p);
}

enum err npy_dtype(struct str type, struct str name, enum dtype *out)
{
	static const struct { char kind; const char *what; } others[] = {
		{ 'O', "Python objects" }, { 'U', "texts" }, { 'S', "texts" }, { 'M', "dates" }, { 'm', "times" },
	};
	const char *what = "which dcpd has not";

	for (size_t i = 0; type.n > 2 && i < sizeof types / sizeof *types; i++)
		if (strlen(types[i].name) == type.n && memcmp(types[i].name + 1, type.p + 1, type.n - 1) == 0 &&
		    (strchr("<|=", type.p[0]) || (type.p[0] == '>' && type.n == 3 && type.p[2] == '1'))) {
			*out = types[i].dtype;
			return OK;
		}
	if (type.n > 2 && type.p[1] == 'V')
		return void_dtype(type, name, out);
	for (size_t i = 0; type.n > 1 && i < sizeof others / sizeof *others; i++)
		if (type.p[1] == others[i].kind)
			what = others[i].what;
	if (type.n > 2 && type.p[0] == '>')
		what = "big-endian";
	return ERR(DTYPE_UNSUPPORTED, "NumPy's type %.*s: %s", (int)num_min(type.n, 16), type.p, what);
}
