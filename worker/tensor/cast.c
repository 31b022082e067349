/* cast.c: see cast.h. 22 dtypes make 462 pairs; a function for each would be a table nobody reads. PyTorch's rule is simpler than
 * that: small floats are floats with few bits, so every element passes through one of four carriers that holds it exactly
 * (int64, uint64, float, double), and 22 loads and 4 x 13 stores say everything. A block of them stays in the L1 cache; elements of
 * a carrier's dtype are stored from where they lie, or loaded to where they go. Bytes have 256 values, so long runs of them are looked up
 * in a table that the same functions fill. Complex elements are two of their component. */
/* The loops are simple enough for the vectoriser, but -O2 does not try; and each is compiled for three generations of x86-64, of which the
 * loader picks the one that the CPU has: up to ten times as fast as for the first alone. Sanitizers cannot be in what the loader calls. */
#pragma GCC optimize("O3")
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

#include "tensor/cast.h"

#include <math.h>
#include <string.h>

#include "tensor/small_float.h"
#if defined(__x86_64__)
#include "tensor/cast_x86.h"
#else
static inline bool x86_has_f16c(void) { return false; }
static inline bool x86_has_vbmi(void) { return false; }
static inline size_t x86_f16_decode(float *to, const void *from, size_t n) { return (void)to, (void)from, n & 0; }
static inline size_t x86_f16_encode(void *to, const float *from, size_t n) { return (void)to, (void)from, n & 0; }
static inline bool x86_has_v4(void) { return false; }
static inline size_t x86_convert(unsigned char *to, enum dtype t, const unsigned char *from, enum dtype f, size_t n)
{
	return (void)to, (void)t, (void)from, (void)f, n & 0;
}
static inline size_t x86_look_up(unsigned char *to, const uint8_t *codes, const unsigned char *table, size_t bytes, bool doubled, size_t n)
{
	return (void)to, (void)codes, (void)table, (void)bytes, (void)doubled, n & 0;
}
#endif

enum { BLOCK = 1024, TABLE = 256, TABLE_RUN_MIN = 4096 };

enum carrier { C_I64, C_U64, C_F32, C_F64 };

/* Carriers, also where they are a caller's elements, at any address. */
typedef int64_t __attribute__((may_alias, aligned(1))) any_i64;
typedef uint64_t __attribute__((may_alias, aligned(1))) any_u64;
typedef float __attribute__((may_alias, aligned(1))) any_f32;
typedef double __attribute__((may_alias, aligned(1))) any_f64;
typedef uint32_t __attribute__((may_alias, aligned(1))) any_u32;
typedef uint16_t __attribute__((may_alias, aligned(1))) any_u16;

static enum dtype component(enum dtype d)
{
	switch (d) {
	case DT_COMPLEX128:
		return DT_FLOAT64;
	case DT_COMPLEX64:
		return DT_FLOAT32;
	case DT_COMPLEX32:
		return DT_FLOAT16;
	case DT_BCOMPLEX32:
		return DT_BFLOAT16;
	default:
		return d;
	}
}

static enum carrier carrier_of(enum dtype d)
{
	if (d == DT_FLOAT64)
		return C_F64;
	if (dtype_is_float(d))
		return C_F32;
	return d == DT_UINT64 ? C_U64 : C_I64;
}

/* Is a carrier of this kind an element of this dtype? */
static bool is_carrier(enum dtype d, enum carrier c)
{
	static const enum dtype dtypes[] = { [C_I64] = DT_INT64, [C_U64] = DT_UINT64, [C_F32] = DT_FLOAT32, [C_F64] = DT_FLOAT64 };

	return dtypes[c] == d;
}

#define LOAD(type, field, expr)                                                     \
	for (size_t i = 0; i < n; i++) {                                            \
		type v;                                                             \
		memcpy(&v, (const char *)src + i * step * sizeof v, sizeof v);      \
		((any_##field *)b)[i] = (expr);                                     \
	}                                                                           \
	break

/* n elements that lie `step` elements apart, as carriers. */
FOR_EACH_CPU static void load(void *b, enum dtype d, const void *src, size_t step, size_t n)
{
	switch (d) {
	case DT_FLOAT64: LOAD(double, f64, v);
	case DT_FLOAT32: LOAD(float, f32, v);
	case DT_FLOAT16: LOAD(uint16_t, f32, f16_decode(v));
	case DT_BFLOAT16: LOAD(uint16_t, f32, bf16_decode(v));
	case DT_INT64: LOAD(int64_t, i64, v);
	case DT_INT32: LOAD(int32_t, i64, v);
	case DT_INT16: LOAD(int16_t, i64, v);
	case DT_INT8: LOAD(int8_t, i64, v);
	case DT_UINT64: LOAD(uint64_t, u64, v);
	case DT_UINT32: LOAD(uint32_t, i64, v);
	case DT_UINT16: LOAD(uint16_t, i64, v);
	case DT_UINT8: LOAD(uint8_t, i64, v);
	case DT_BOOL: LOAD(uint8_t, i64, v != 0);
	case DT_FLOAT8_E4M3FN: LOAD(uint8_t, f32, f8_decode(&f8_e4m3fn, v));
	case DT_FLOAT8_E5M2: LOAD(uint8_t, f32, f8_decode(&f8_e5m2, v));
	case DT_FLOAT8_E4M3FNUZ: LOAD(uint8_t, f32, f8_decode(&f8_e4m3fnuz, v));
	case DT_FLOAT8_E5M2FNUZ: LOAD(uint8_t, f32, f8_decode(&f8_e5m2fnuz, v));
	default: LOAD(uint8_t, f32, f8_e8m0_decode(v));
	}
}

/* Converts as x86 does, also for a float that the integer cannot hold, so that results do not depend on the optimiser. */
static int64_t to_i64(double v)
{
	return v >= -0x1p63 && v < 0x1p63 ? (int64_t)v : INT64_MIN;
}

static int32_t to_i32(double v)
{
	return v > -2147483649.0 && v < 2147483648.0 ? (int32_t)v : INT32_MIN;
}

static uint64_t to_u64(double v)
{
	if (v >= 0x1p63)
		return v < 0x1p64 ? (uint64_t)v : 0;
	return (uint64_t)to_i64(v);
}

static uint32_t to_u32(double v)
{
	if (v >= 0x1p31)
		return v < 0x1p32 ? (uint32_t)v : 0;
	return (uint32_t)to_i32(v);
}

#define STORE(type, expr)                                                           \
	for (size_t i = 0; i < n; i++) {                                            \
		type out = (type)(expr);                                            \
		memcpy((char *)dst + i * sizeof out, &out, sizeof out);             \
	}                                                                           \
	return

#define STORE_FLOATS(x)                                                             \
	case DT_FLOAT64: STORE(double, x);                                          \
	case DT_FLOAT32: STORE(float, x);                                           \
	case DT_FLOAT16: STORE(uint16_t, f16_encode((float)(x)));                   \
	case DT_BFLOAT16: STORE(uint16_t, bf16_encode((float)(x)));                 \
	case DT_FLOAT8_E4M3FN: STORE(uint8_t, f8_encode(&f8_e4m3fn, (float)(x)));   \
	case DT_FLOAT8_E5M2: STORE(uint8_t, f8_encode(&f8_e5m2, (float)(x)));       \
	case DT_FLOAT8_E4M3FNUZ: STORE(uint8_t, f8_encode(&f8_e4m3fnuz, (float)(x))); \
	case DT_FLOAT8_E5M2FNUZ: STORE(uint8_t, f8_encode(&f8_e5m2fnuz, (float)(x))); \
	case DT_FLOAT8_E8M0FNU: STORE(uint8_t, f8_e8m0_encode((float)(x)));         \
	case DT_BOOL: STORE(uint8_t, (x) != 0);                                     \
	default: return

#define STORE_INTS(x)                                                               \
	case DT_INT64: case DT_UINT64: STORE(uint64_t, x);                          \
	case DT_INT32: case DT_UINT32: STORE(uint32_t, x);                          \
	case DT_INT16: case DT_UINT16: STORE(uint16_t, x);                          \
	case DT_INT8: case DT_UINT8: STORE(uint8_t, x)

#define STORE_INTS_OF_FLOAT(x, to_u8)                                               \
	case DT_INT64: STORE(int64_t, to_i64(x));                                   \
	case DT_UINT64: STORE(uint64_t, to_u64(x));                                 \
	case DT_INT32: STORE(int32_t, to_i32(x));                                   \
	case DT_UINT32: STORE(uint32_t, to_u32(x));                                 \
	case DT_INT16: case DT_UINT16: STORE(uint16_t, to_i32(x));                  \
	case DT_INT8: STORE(uint8_t, to_i32(x));                                    \
	case DT_UINT8: STORE(uint8_t, to_u8(x))

FOR_EACH_CPU static void store_i64(void *dst, enum dtype d, const any_i64 *b, size_t n)
{
	switch (d) {
	STORE_INTS(b[i]);
	STORE_FLOATS(b[i]);
	}
}

FOR_EACH_CPU static void store_u64(void *dst, enum dtype d, const any_u64 *b, size_t n)
{
	switch (d) {
	STORE_INTS(b[i]);
	STORE_FLOATS(b[i]);
	}
}

FOR_EACH_CPU static void store_f32(void *dst, enum dtype d, const any_f32 *b, size_t n)
{
	switch (d) {
	STORE_INTS_OF_FLOAT((double)b[i], to_i32);
	STORE_FLOATS(b[i]);
	}
}

FOR_EACH_CPU static void store_f64(void *dst, enum dtype d, const any_f64 *b, size_t n)
{
	switch (d) {
	STORE_INTS_OF_FLOAT(b[i], to_i64);
	STORE_FLOATS(b[i]);
	}
}

static void store(void *dst, enum dtype d, const void *b, enum carrier c, size_t n)
{
	switch (c) {
	case C_I64:
		store_i64(dst, d, b, n);
		return;
	case C_U64:
		store_u64(dst, d, b, n);
		return;
	case C_F32:
		store_f32(dst, d, b, n);
		return;
	case C_F64:
		store_f64(dst, d, b, n);
		return;
	}
}

/* Elements of `to` two apart, zeros between: the imaginary parts. */
static void spread(unsigned char *dst, const unsigned char *parts, size_t part_bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		memcpy(dst + 2 * i * part_bytes, parts + i * part_bytes, part_bytes);
		memset(dst + (2 * i + 1) * part_bytes, 0, part_bytes);
	}
}

/* To or from a dtype's own complex form nothing is converted: the bits of a NaN stay. */
static void copy_parts(unsigned char *dst, const unsigned char *src, size_t step, size_t part_bytes, size_t n)
{
	for (size_t i = 0; i < n; i++)
		memcpy(dst + i * part_bytes, src + i * step * part_bytes, part_bytes);
}

/* A complex number is true if one of its parts is. dst has those of the real parts already. */
static void or_imaginary(uint8_t *dst, enum dtype part, const unsigned char *imag, size_t n)
{
	any_u64 b[BLOCK];
	uint8_t more[BLOCK];

	load(b, part, imag, 2, n);
	store(more, DT_BOOL, b, carrier_of(part), n);
	for (size_t i = 0; i < n; i++)
		dst[i] |= more[i];
}

#define LOOK_UP(type)                                                               \
	for (size_t i = 0; i < n; i++)                                              \
		((type *)dst)[i] = ((const type *)table)[codes[i]];                 \
	return

static void look_up(unsigned char *restrict dst, const uint8_t *codes, const void *restrict table, size_t bytes, size_t n)
{
	switch (bytes) {
	case 1: LOOK_UP(uint8_t);
	case 2: LOOK_UP(any_u16);
	case 4: LOOK_UP(any_u32);
	default: LOOK_UP(any_u64);
	}
}

/* n elements, `step` elements apart, none of them complex: at most BLOCK of them unless one of the two dtypes is a carrier's. */
static void convert(void *dst, enum dtype to, const void *src, enum dtype from, size_t step, size_t n)
{
	enum carrier c = carrier_of(from);
	any_u64 room[BLOCK];
	void *b = is_carrier(to, c) ? dst : room;
	size_t done = 0;

	if (!is_carrier(from, c) || step != 1) {
		if (from == DT_FLOAT16 && step == 1 && x86_has_f16c())
			done = x86_f16_decode(b, src, n);
		load((any_f32 *)b + done, from, (const any_u16 *)src + done, step, n - done);
		src = b;
	}
	if (b == dst)
		return;
	done = to == DT_FLOAT16 && c == C_F32 && x86_has_f16c() ? x86_f16_encode(dst, src, n) : 0;
	store((any_u16 *)dst + done, to, (const any_f32 *)src + done, c, n - done);
}

/* Doubles are looked up as floats, which hold every code of a byte exactly. */
static void convert_bytes(unsigned char *dst, enum dtype to, const uint8_t *src, enum dtype from, size_t n)
{
	enum dtype in = to == DT_FLOAT64 ? DT_FLOAT32 : to;
	uint8_t codes[TABLE];
	any_u64 table[TABLE];
	size_t done = 0;

	for (size_t i = 0; i < TABLE; i++)
		codes[i] = (uint8_t)i;
	if (dtype_bytes(in) < 8 && x86_has_vbmi()) {
		convert(table, in, codes, from, 1, TABLE);
		done = x86_look_up(dst, src, (const unsigned char *)table, dtype_bytes(in), in != to, n);
	}
	convert(table, to, codes, from, 1, TABLE);
	look_up(dst + done * dtype_bytes(to), src + done, table, dtype_bytes(to), n - done);
}

enum err cast_check(enum dtype to, enum dtype from)
{
	if (to != from && (to == DT_FLOAT4_E2M1FN_X2 || from == DT_FLOAT4_E2M1FN_X2))
		return ERR(DTYPE_UNSUPPORTED, "%s cannot be converted to %s", dtype_name(from), dtype_name(to));
	return OK;
}

enum err cast_run(void *dst, enum dtype to, const void *src, enum dtype from, size_t n)
{
	enum dtype from_part = component(from), to_part = component(to);
	bool both = dtype_is_complex(from) && dtype_is_complex(to);
	size_t step = dtype_is_complex(from) && !both ? 2 : 1;
	bool spread_out = dtype_is_complex(to) && !both;
	unsigned char parts[BLOCK * 8], *out = dst;
	const unsigned char *in = src;

	TRY(cast_check(to, from));
	if (to == from) {
		if (n)
			memcpy(dst, src, n * dtype_bytes(to));
		return OK;
	}
	if (dtype_bytes(from) == 1 && n >= TABLE_RUN_MIN && !dtype_is_complex(to)) {
		convert_bytes(out, to, in, from, n);
		return OK;
	}
	if (x86_has_v4() && !dtype_is_complex(from) && !dtype_is_complex(to)) {
		size_t done = x86_convert(out, to, in, from, n);
		in += done * dtype_bytes(from);
		out += done * dtype_bytes(to);
		n -= done;
	}
	for (size_t left = both ? 2 * n : n; left > 0;) {
		size_t some = left < BLOCK ? left : BLOCK;
		unsigned char *to_here = spread_out ? parts : out;
		if (from_part == to_part && to != DT_COMPLEX32) { /* PyTorch converts in that one */
			copy_parts(to_here, in, step, dtype_bytes(to_part), some);
		} else {
			convert(to_here, to_part, in, from_part, step, some);
		}
		if (spread_out)
			spread(out, parts, dtype_bytes(to_part), some);
		if (to == DT_BOOL && step == 2)
			or_imaginary(out, from_part, in + dtype_bytes(from_part), some);
		in += some * step * dtype_bytes(from_part);
		out += some * dtype_bytes(to_part) * (spread_out ? 2 : 1);
		left -= some;
	}
	return OK;
}

/* Flips the sign of every `step`-th component from `first` on. */
static void flip_signs(unsigned char *p, size_t part_bytes, size_t first, size_t step, size_t count)
{
	p += first * part_bytes + part_bytes - 1;
	for (size_t i = 0; i < count; i++)
		p[i * step * part_bytes] ^= 0x80;
}

enum err cast_conj(void *p, enum dtype d, size_t n)
{
	if (dtype_is_complex(d))
		flip_signs(p, dtype_bytes(d) / 2, 1, 2, n);
	return OK;
}

static void negate_ints(unsigned char *p, size_t bytes, size_t n)
{
	for (size_t i = 0; i < n; i++, p += bytes) {
		unsigned carry = 1;
		for (size_t k = 0; k < bytes; k++) {
			unsigned v = (unsigned char)~p[k] + carry;
			p[k] = (unsigned char)v;
			carry = v >> 8;
		}
	}
}

enum err cast_neg(void *p, enum dtype d, size_t n)
{
	if (d == DT_BOOL || (dtype_is_float(d) && dtype_bytes(d) == 1))
		return ERR(DTYPE_UNSUPPORTED, "%s cannot be negated", dtype_name(d));
	if (dtype_is_complex(d))
		flip_signs(p, dtype_bytes(d) / 2, 0, 1, 2 * n);
	else if (dtype_is_float(d))
		flip_signs(p, dtype_bytes(d), 0, 1, n);
	else
		negate_ints(p, dtype_bytes(d), n);
	return OK;
}
