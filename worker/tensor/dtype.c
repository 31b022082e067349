/* dtype.c: one table says everything about element types. The names are those in checkpoints: PyTorch's own, safetensors' and the
 * typed storage classes of torch.save; a dtype that a format cannot name has NULL there. */
#include "tensor/dtype.h"

static const struct {
	const char *name, *safetensors, *storage;
	uint8_t bytes;
	bool is_float, is_complex;
} types[DT_COUNT] = {
	[DT_FLOAT64] = { "float64", "F64", "DoubleStorage", 8, true, false },
	[DT_FLOAT32] = { "float32", "F32", "FloatStorage", 4, true, false },
	[DT_FLOAT16] = { "float16", "F16", "HalfStorage", 2, true, false },
	[DT_BFLOAT16] = { "bfloat16", "BF16", "BFloat16Storage", 2, true, false },
	[DT_INT64] = { "int64", "I64", "LongStorage", 8, false, false },
	[DT_INT32] = { "int32", "I32", "IntStorage", 4, false, false },
	[DT_INT16] = { "int16", "I16", "ShortStorage", 2, false, false },
	[DT_INT8] = { "int8", "I8", "CharStorage", 1, false, false },
	[DT_UINT64] = { "uint64", "U64", NULL, 8, false, false },
	[DT_UINT32] = { "uint32", "U32", NULL, 4, false, false },
	[DT_UINT16] = { "uint16", "U16", NULL, 2, false, false },
	[DT_UINT8] = { "uint8", "U8", "ByteStorage", 1, false, false },
	[DT_BOOL] = { "bool", "BOOL", "BoolStorage", 1, false, false },
	[DT_COMPLEX128] = { "complex128", NULL, "ComplexDoubleStorage", 16, false, true },
	[DT_COMPLEX64] = { "complex64", "C64", "ComplexFloatStorage", 8, false, true },
	[DT_COMPLEX32] = { "complex32", NULL, NULL, 4, false, true },
	[DT_BCOMPLEX32] = { "bcomplex32", NULL, NULL, 4, false, true },
	[DT_FLOAT8_E4M3FN] = { "float8_e4m3fn", "F8_E4M3", NULL, 1, true, false },
	[DT_FLOAT8_E5M2] = { "float8_e5m2", "F8_E5M2", NULL, 1, true, false },
	[DT_FLOAT8_E4M3FNUZ] = { "float8_e4m3fnuz", NULL, NULL, 1, true, false },
	[DT_FLOAT8_E5M2FNUZ] = { "float8_e5m2fnuz", NULL, NULL, 1, true, false },
	[DT_FLOAT8_E8M0FNU] = { "float8_e8m0fnu", "F8_E8M0", NULL, 1, true, false },
	[DT_FLOAT4_E2M1FN_X2] = { "float4_e2m1fn_x2", NULL, NULL, 1, true, false },
};

/* Names come from files: what goes into a message is cut. */
static int shown(struct str s)
{
	return s.n < 64 ? (int)s.n : 64;
}

uint32_t dtype_bytes(enum dtype d)
{
	must(d < DT_COUNT);
	return types[d].bytes;
}

const char *dtype_name(enum dtype d)
{
	must(d < DT_COUNT);
	return types[d].name;
}

/* The dtype that `word` calls so. */
static bool find(struct str name, const char *(*word)(enum dtype d), enum dtype *out)
{
	for (enum dtype d = 0; d < DT_COUNT; d++)
		if (word(d) && str_is(name, word(d))) {
			*out = d;
			return true;
		}
	return false;
}

enum err dtype_parse(struct str name, enum dtype *out)
{
	struct str bare = name;

	if (str_starts(bare, "torch."))
		bare = (struct str){ bare.p + 6, bare.n - 6 };
	if (find(bare, dtype_name, out))
		return OK;
	return ERR(DTYPE_UNSUPPORTED, "dtype %.*s cannot be stored", shown(name), name.n ? name.p : "");
}

bool dtype_is_complex(enum dtype d)
{
	must(d < DT_COUNT);
	return types[d].is_complex;
}

bool dtype_is_float(enum dtype d)
{
	must(d < DT_COUNT);
	return types[d].is_float;
}

const char *dtype_safetensors_name(enum dtype d)
{
	must(d < DT_COUNT);
	return types[d].safetensors;
}

const char *dtype_safetensors_word(enum dtype d)
{
	switch (d) {
	case DT_FLOAT8_E4M3FNUZ:
		return "F8_E4M3FNUZ";
	case DT_FLOAT8_E5M2FNUZ:
		return "F8_E5M2FNUZ";
	case DT_FLOAT4_E2M1FN_X2:
		return "F4";
	default:
		return dtype_safetensors_name(d);
	}
}

enum err dtype_from_safetensors(struct str name, enum dtype *out)
{
	if (find(name, dtype_safetensors_word, out))
		return OK;
	return ERR(DTYPE_UNSUPPORTED, "safetensors dtype %.*s is not known", shown(name),
		   name.n ? name.p : "");
}

const char *dtype_storage_class(enum dtype d)
{
	must(d < DT_COUNT);
	return types[d].storage;
}

enum err dtype_from_storage_class(struct str name, enum dtype *out)
{
	if (find(name, dtype_storage_class, out))
		return OK;
	return ERR(DTYPE_UNSUPPORTED, "storage class %.*s cannot be read", shown(name),
		   name.n ? name.p : "");
}
