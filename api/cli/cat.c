/* cat.c: dcpctl cat: the values of a tensor, or its bytes. The daemon cuts and converts nothing: a slice comes as stored, and
 * becomes text here, so that looking at a number needs neither Python nor PyTorch. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"

enum { DIMS_MAX = 64 };

enum value_kind { VALUE_INT, VALUE_UINT, VALUE_BOOL, VALUE_F64, VALUE_F32, VALUE_F16, VALUE_BF16, VALUE_E4M3, VALUE_E5M2,
		  VALUE_C64, VALUE_C128, VALUE_OTHER };

static const struct {
	const char *name;
	enum value_kind kind;
	size_t bytes;
} dtypes[] = {
	{ "float64", VALUE_F64, 8 },  { "float32", VALUE_F32, 4 },      { "float16", VALUE_F16, 2 },
	{ "bfloat16", VALUE_BF16, 2 }, { "float8_e4m3fn", VALUE_E4M3, 1 }, { "float8_e5m2", VALUE_E5M2, 1 },
	{ "complex64", VALUE_C64, 8 }, { "complex128", VALUE_C128, 16 }, { "int64", VALUE_INT, 8 },
	{ "int32", VALUE_INT, 4 },    { "int16", VALUE_INT, 2 },        { "int8", VALUE_INT, 1 },
	{ "uint64", VALUE_UINT, 8 },  { "uint32", VALUE_UINT, 4 },      { "uint16", VALUE_UINT, 2 },
	{ "uint8", VALUE_UINT, 1 },   { "bool", VALUE_BOOL, 1 },
};

/* A small float of `exponent` and `mantissa` bits. e4m3fn has no infinity: all ones are NaN, the rest of that row is numbers. */
static double small_float(unsigned bits, int exponent, int mantissa, bool finite)
{
	int top = (1 << exponent) - 1, bias = top >> 1, e = (int)(bits >> mantissa) & top;
	unsigned m = bits & ((1u << mantissa) - 1);
	double sign = bits >> (exponent + mantissa) & 1 ? -1 : 1;

	if (e == top && !finite)
		return m ? (double)NAN : sign * (double)INFINITY;
	if (e == top && m == (1u << mantissa) - 1)
		return (double)NAN;
	if (e == 0)
		return sign * ldexp((double)m, 1 - bias - mantissa);
	return sign * ldexp((double)(m + (1u << mantissa)), e - bias - mantissa);
}

static double read_f32(const unsigned char *p)
{
	float f;

	memcpy(&f, p, sizeof f);
	return (double)f;
}

static double read_f64(const unsigned char *p)
{
	double d;

	memcpy(&d, p, sizeof d);
	return d;
}

static void print_value(enum value_kind kind, size_t bytes, const unsigned char *p)
{
	uint64_t u = 0;
	double d = 0;

	memcpy(&u, p, bytes < sizeof u ? bytes : sizeof u);
	switch (kind) {
	case VALUE_INT:
		printf("%jd", (intmax_t)((int64_t)(u << (64 - 8 * bytes)) >> (64 - 8 * bytes)));
		return;
	case VALUE_UINT:
		printf("%ju", (uintmax_t)u);
		return;
	case VALUE_BOOL:
		fputs(u ? "true" : "false", stdout);
		return;
	case VALUE_C64:
		printf("%.9g%+.9gj", read_f32(p), read_f32(p + 4));
		return;
	case VALUE_C128:
		printf("%.17g%+.17gj", read_f64(p), read_f64(p + 8));
		return;
	case VALUE_F64:
		printf("%.17g", read_f64(p));
		return;
	case VALUE_F32:
		d = read_f32(p);
		break;
	case VALUE_F16:
		d = small_float((unsigned)u, 5, 10, false);
		break;
	case VALUE_BF16:
		d = small_float((unsigned)u, 8, 7, false);
		break;
	case VALUE_E4M3:
		d = small_float((unsigned)u, 4, 3, true);
		break;
	case VALUE_E5M2:
		d = small_float((unsigned)u, 5, 2, false);
		break;
	case VALUE_OTHER:
		printf("%02x", (unsigned)(u & 0xff));
		return;
	}
	printf("%.9g", d);
}

/* One line for each run of the last dim; an empty line where a higher dim begins anew. */
static void print_values(enum value_kind kind, size_t bytes, const struct buf *b, const uint64_t *dims, size_t n)
{
	uint64_t row = n ? dims[n - 1] : 1, plane = n > 1 ? row * dims[n - 2] : 0;

	for (uint64_t i = 0; (i + 1) * bytes <= b->len; i++) {
		if (plane && i > 0 && i % plane == 0)
			putchar('\n');
		print_value(kind, bytes, b->p + i * bytes);
		putchar(row == 0 || (i + 1) % row == 0 ? '\n' : ' ');
	}
}

static void print_tensor(const struct answer *a)
{
	json_t *shape = json_loads(a->shape, JSON_DECODE_ANY, NULL), *dim;
	enum value_kind kind = VALUE_OTHER;
	uint64_t dims[DIMS_MAX] = { 0 };
	size_t bytes = 1, n = 0, i;

	json_array_foreach(shape, i, dim)
		if (n < DIMS_MAX)
			dims[n++] = (uint64_t)json_integer_value(dim);
	for (i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
		if (strcmp(a->dtype, dtypes[i].name) == 0) {
			kind = dtypes[i].kind;
			bytes = dtypes[i].bytes;
		}
	show_note("%s %s\n", a->dtype, a->shape);
	print_values(kind, bytes, &a->body, dims, n);
	json_decref(shape);
}

int cat_tensor(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	const char *colon = strchr(a->words[0], ':'), *format = args_value(a, "format");
	struct answer got = { 0 };
	char storage[64];

	if (!colon || args_is_shm(a->words[0]) || colon - a->words[0] >= (int)sizeof storage)
		return follow_failed(c, ERR(INVALID_REQUEST, "cat reads a checkpoint: STORAGE:NAME"));
	snprintf(storage, sizeof storage, "%.*s", (int)(colon - a->words[0]), a->words[0]);
	client_put(&path, "/v1/checkpoints/%/%/tensors/%?format=%", storage, colon + 1, a->words[1], format ? format : "raw");
	client_put(&path, "&verify=%", args_value(a, "verify"));
	client_put(&path, "&slice=%", args_value(a, "slice"));
	enum err e = client_get_at(c, &path, &got);
	if (e)
		return follow_failed(c, e);
	if (!format)
		print_tensor(&got);
	else if (fwrite(got.body.p, 1, got.body.len, stdout) != got.body.len)
		e = ERR_SYS(SYSTEM, "cannot write");
	client_drop(&got);
	return e ? follow_failed(c, e) : EXIT_DONE;
}
