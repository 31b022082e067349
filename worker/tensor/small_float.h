/* small_float.h: floats of 16 and 8 bits ↔ float, with round to nearest even. Inline, so that the loops of cast.c can be vectorised;
 * without branches where that was possible for the same reason. Casts on a GPU (device/gather_cast.h) call the same functions, so this
 * header is C++ too and includes nothing that a GPU lacks. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

static inline uint32_t f32_bits(float f)
{
	uint32_t u;

	__builtin_memcpy(&u, &f, sizeof u);
	return u;
}

static inline float f32_of(uint32_t u)
{
	float f;

	__builtin_memcpy(&f, &u, sizeof f);
	return f;
}

static inline float bf16_decode(uint16_t h)
{
	return f32_of((uint32_t)h << 16);
}

static inline uint16_t bf16_encode(float f)
{
	uint32_t u = f32_bits(f), round = 0x7FFF + (u >> 16 & 1);

	return (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)((u + round) >> 16);
}

/* Exponent and mantissa are moved into place; subnormals get their exponent from a subtraction. */
static inline float f16_decode(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = h & 0x7FFF;
	uint32_t normal = (a << 13) + 0x38000000;
	uint32_t high = (a << 13) + 0x70000000;          /* inf and NaN */
	uint32_t low = f32_bits(f32_of((a << 13) + 0x38800000) - f32_of(0x38800000));

	high |= (uint32_t)(a > 0x7C00) << 22;            /* quiet */
	return f32_of(sign | (a >= 0x7C00 ? high : a < 0x0400 ? low : normal));
}

static inline uint16_t f16_encode(float f)
{
	uint32_t u = f32_bits(f), a = u & 0x7FFFFFFF;
	uint32_t normal = (a - 0x38000000 + 0x0FFF + (a >> 13 & 1)) >> 13;
	uint32_t low = f32_bits(f32_of(a < 0x38800000 ? a : 0) + 0.5f) - 0x3F000000;
	uint32_t h = a < 0x38800000 ? low : normal;

	h = a >= 0x47800000 ? 0x7C00 : h;
	h = a > 0x7F800000 ? 0x7E00 | (a >> 13 & 0x3FF) : h;
	return (uint16_t)(h | (u >> 16 & 0x8000));
}

/* A kind of 8-bit float. */
struct f8 {
	unsigned mantissa_bits, bias;
	uint32_t most;                   /* all beyond has this float's code: 448 (e4m3fn saturates), 2^16 (Inf), 2^8 or 2^16 (NaN) */
	uint8_t nan;                     /* the code of NaN */
	bool unsigned_zero;              /* fnuz: 0x80 is the only NaN, there is no -0 */
};

static const struct f8 f8_e4m3fn = { 3, 7, 0x43E00000, 0x7F, false };
static const struct f8 f8_e5m2 = { 2, 15, 0x47800000, 0x7F, false };
static const struct f8 f8_e4m3fnuz = { 3, 8, 0x43800000, 0x80, true };
static const struct f8 f8_e5m2fnuz = { 2, 16, 0x47800000, 0x80, true };

/* Every branch is worked out and one result chosen, as vectors do it. */
static inline uint8_t f8_encode(const struct f8 *k, float f)
{
	uint32_t u = f32_bits(f), any = u & 0x7FFFFFFF, a = any < k->most ? any : k->most, drop = 23 - k->mantissa_bits;
	uint32_t smallest = (128 - k->bias) << 23;       /* the smallest normal value */
	uint32_t magic = (128 - k->bias + drop) << 23;   /* its last bit is the smallest subnormal: adding it rounds as wanted */
	uint32_t low = f32_bits(f32_of(a) + f32_of(magic)) - magic;
	uint32_t normal = (a - ((127 - k->bias) << 23) + (1u << (drop - 1)) - 1 + (a >> drop & 1)) >> drop;
	uint32_t code = a < smallest ? low : normal, sign = u >> 24 & 0x80;

	code = any > 0x7F800000 ? k->nan : code;
	if (!k->unsigned_zero)
		return (uint8_t)(code | sign);
	return (uint8_t)(code == 0 ? 0 : code | sign);
}

static inline float f8_decode(const struct f8 *k, uint8_t code)
{
	uint32_t a = code & 0x7F, sign = (uint32_t)(code & 0x80) << 24, drop = 23 - k->mantissa_bits;
	uint32_t smallest = (128 - k->bias) << 23;
	uint32_t normal = (a << drop) + ((127 - k->bias) << 23);
	uint32_t low = f32_bits(f32_of(smallest + (a << drop)) - f32_of(smallest));
	uint32_t bits = sign | (a >> k->mantissa_bits ? normal : low);

	if (k->most == f8_e5m2.most && !k->unsigned_zero) /* e5m2 is the upper byte of a half */
		return f16_decode((uint16_t)(code << 8));
	if (k->unsigned_zero)
		return f32_of(code == 0x80 ? 0x7F800001 : bits);
	return f32_of(a == 0x7F ? sign | 0x7FF00000 : bits);
}

/* e8m0: an exponent and nothing else. Sign and zero are lost; rounding is to the nearest power of two. */
static inline uint8_t f8_e8m0_encode(float f)
{
	uint32_t u = f32_bits(f), exponent = u >> 23 & 0xFF;
	bool half = u & 0x400000, more = u & 0x3FFFFF;

	if (exponent == 0xFF)
		return 0xFF;
	return (uint8_t)(exponent + (half && (more || exponent > 0)));
}

static inline float f8_e8m0_decode(uint8_t code)
{
	return f32_of(code == 0xFF ? 0x7F800001 : code ? (uint32_t)code << 23 : 0x00400000);
}
