/* dtype.h: the element types that PyTorch 2.15 both saves and loads, under PyTorch's own names (without "torch."). */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum dtype {
	DT_FLOAT64, DT_FLOAT32, DT_FLOAT16, DT_BFLOAT16,
	DT_INT64, DT_INT32, DT_INT16, DT_INT8,
	DT_UINT64, DT_UINT32, DT_UINT16, DT_UINT8,
	DT_BOOL,
	DT_COMPLEX128, DT_COMPLEX64, DT_COMPLEX32, DT_BCOMPLEX32,
	DT_FLOAT8_E4M3FN, DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FNUZ, DT_FLOAT8_E5M2FNUZ, DT_FLOAT8_E8M0FNU,
	DT_FLOAT4_E2M1FN_X2,
	DT_COUNT
};

uint32_t dtype_bytes(enum dtype d);                  /* 1, 2, 4, 8 or 16 */
const char *dtype_name(enum dtype d);                /* "bfloat16" */
/* ERR_DTYPE_UNSUPPORTED names the dtype; an optional "torch." in front is skipped. */
FALLIBLE enum err dtype_parse(struct str name, enum dtype *out);
bool dtype_is_complex(enum dtype d);
bool dtype_is_float(enum dtype d);                   /* real floating point, float8 and float4 included */

/* safetensors names; NULL where safetensors has none (complex128, complex32, bcomplex32, fnuz types, float4_x2): such entries are
 * U8 and the image's own metadata carries the dtype. */
const char *dtype_safetensors_name(enum dtype d);
/* The same with those that the format has got since: the fnuz types, and F4, whose last dim counts elements, two of them a byte. Segment
 * images go on without them. */
const char *dtype_safetensors_word(enum dtype d);
FALLIBLE enum err dtype_from_safetensors(struct str name, enum dtype *out);

/* torch.save's typed storage class ("FloatStorage"), or NULL for dtypes that use UntypedStorage and _rebuild_tensor_v3. */
const char *dtype_storage_class(enum dtype d);
FALLIBLE enum err dtype_from_storage_class(struct str name, enum dtype *out);
