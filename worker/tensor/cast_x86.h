/* cast_x86.h: instructions compilers do not find for cast.c's loops: conversions of halves in hardware (F16C), floats to floats without
 * a block between (AVX-512), and a table of 256 bytes that lies in four registers (AVX-512 VBMI). The results are those of the loops, bit
 * for bit. For cast.c alone, which asks whether the CPU has them. */
#pragma once
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define F16C __attribute__((target("avx2,f16c")))
#define VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))

static inline bool x86_has_f16c(void)
{
	return __builtin_cpu_supports("avx2"); /* x86-64-v3 has both */
}

/* Each returns how many elements it converted: all but less than 8. */
F16C static inline size_t x86_f16_decode(float *to, const void *from, size_t n)
{
	size_t i = 0;

	for (; i + 8 <= n; i += 8)
		_mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)((const char *)from + 2 * i))));
	return i;
}

F16C static inline size_t x86_f16_encode(void *to, const float *from, size_t n)
{
	size_t i = 0;

	for (; i + 8 <= n; i += 8)
		_mm_storeu_si128((__m128i_u *)((char *)to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
	return i;
}

#define V4 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline))

static inline bool x86_has_v4(void)
{
	return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* 16 elements as floats, and back. Doubles go through float as in the loops. */
V4 static inline __m512 x86_decode(enum dtype d, const unsigned char *p)
{
	switch (d) {
	case DT_FLOAT64:
		return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_loadu_pd(p))),
					  _mm512_cvtpd_ps(_mm512_loadu_pd(p + 64)), 1);
	case DT_FLOAT16:
		return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)p));
	case DT_BFLOAT16:
		return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16));
	default:
		return _mm512_loadu_ps(p);
	}
}

/* bf16_encode of 16 floats. */
V4 static inline __m256i x86_bf16_encode(__m512 f)
{
	const __m512i one = _mm512_set1_epi32(1), almost_half = _mm512_set1_epi32(0x7FFF);
	__m512i u = _mm512_castps_si512(f), high = _mm512_srli_epi32(u, 16);
	__m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, almost_half), _mm512_and_si512(high, one));

	rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
	return _mm512_cvtepi32_epi16(rounded);
}

/* f8_encode of 16 floats. Of a kind without infinities and -0 the code of all that is too large is NaN's already. */
V4 static inline __m512i x86_f8_encode(const struct f8 *k, __m512 f)
{
	uint32_t drop = 23 - k->mantissa_bits;
	const __m512i smallest = _mm512_set1_epi32((int)((128 - k->bias) << 23)), sign = _mm512_set1_epi32(0x80);
	const __m512i magic = _mm512_set1_epi32((int)((128 - k->bias + drop) << 23));
	const __m512i offset = _mm512_set1_epi32((int)((1u << (drop - 1)) - 1 - ((127 - k->bias) << 23)));
	__m512i u = _mm512_castps_si512(f), any = _mm512_and_si512(u, _mm512_set1_epi32(0x7FFFFFFF));
	__m512i a = _mm512_min_epu32(any, _mm512_set1_epi32((int)k->most)), signs = _mm512_srli_epi32(u, 24);
	__m512i low = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(magic)));
	__m512i odd = _mm512_and_si512(_mm512_srli_epi32(a, drop), _mm512_set1_epi32(1));
	__m512i code = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(a, offset), odd), drop);

	code = _mm512_mask_sub_epi32(code, _mm512_cmplt_epu32_mask(a, smallest), low, magic);
	if (k->unsigned_zero)
		return _mm512_mask_ternarylogic_epi32(code, _mm512_test_epi32_mask(code, code), signs, sign, 0xF8);
	code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), _mm512_set1_epi32(k->nan));
	return _mm512_ternarylogic_epi32(code, signs, sign, 0xF8); /* code | (signs & sign) */
}

/* 64 codes in their order: packing weaves lanes of 16 bytes. */
V4 static inline void x86_f8_store(const struct f8 *k, unsigned char *p, const __m512 f[4])
{
	const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	__m512i low = _mm512_packus_epi32(x86_f8_encode(k, f[0]), x86_f8_encode(k, f[1]));
	__m512i high = _mm512_packus_epi32(x86_f8_encode(k, f[2]), x86_f8_encode(k, f[3]));

	_mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

/* x86_f8_encode of 32 floats of 16 bits with `mantissa` bits, in lanes of 16: half as many instructions as by way of floats. Subnormals
 * are shifted by what their exponents lack. */
V4 static inline __m512i x86_f8_narrow(const struct f8 *k, uint32_t mantissa, __m512i h)
{
	const uint32_t bias = mantissa == 7 ? 127 : 15, drop = mantissa - k->mantissa_bits;
	const uint32_t field = bias + 1 - k->bias; /* the exponent of the smallest normal value */
	const uint32_t most = ((k->most >> 23) + bias - 127) << mantissa | (k->most >> (23 - mantissa) & ((1u << mantissa) - 1));
	const bool own = field <= 1; /* all that is below the smallest normal value is subnormal in the source, too */
	const __m512i one = _mm512_set1_epi16(1), sign = _mm512_set1_epi16(0x80);
	const __m512i smallest = _mm512_set1_epi16((short)((own ? 1 : field) << mantissa));
	const __m512i offset = _mm512_set1_epi16((short)((1u << (drop - 1)) - 1 - ((field - 1) << mantissa)));
	__m512i any = _mm512_and_si512(h, _mm512_set1_epi16(0x7FFF)), signs = _mm512_srli_epi16(h, 8);
	__m512i a = _mm512_min_epu16(any, _mm512_set1_epi16((short)most));
	__m512i odd = _mm512_and_si512(_mm512_srli_epi16(a, drop), one);
	__m512i code = _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(a, offset), odd), drop);
	__m512i by = _mm512_set1_epi16((short)(drop + field - 1)), m = a;

	if (!own) { /* the leading one becomes a bit like others */
		by = _mm512_sub_epi16(_mm512_set1_epi16((short)(drop + field)), _mm512_srli_epi16(a, mantissa));
		const __m512i one_point = _mm512_set1_epi16((short)(1u << mantissa)), below = _mm512_sub_epi16(one_point, one);
		m = _mm512_ternarylogic_epi32(a, below, one_point, 0xEA); /* a & below | one_point */
	}
	odd = _mm512_and_si512(_mm512_srlv_epi16(m, by), one);
	__m512i half = _mm512_sub_epi16(_mm512_sllv_epi16(one, _mm512_sub_epi16(by, one)), one);
	__m512i low = _mm512_srlv_epi16(_mm512_add_epi16(_mm512_add_epi16(m, half), odd), by);
	code = _mm512_mask_mov_epi16(code, _mm512_cmplt_epu16_mask(a, smallest), low);
	if (k->unsigned_zero)
		return _mm512_or_si512(code, _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(code, code), _mm512_and_si512(signs, sign)));
	code = _mm512_mask_mov_epi16(code, _mm512_cmpgt_epu16_mask(any, _mm512_set1_epi16((short)((2 * bias + 1) << mantissa))),
				     _mm512_set1_epi16(k->nan));
	return _mm512_ternarylogic_epi32(code, signs, sign, 0xF8);
}

/* 64 of them. */
V4 static inline void x86_f8_store_narrow(const struct f8 *k, uint32_t mantissa, unsigned char *p, const unsigned char *from)
{
	const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
	__m512i low = x86_f8_narrow(k, mantissa, _mm512_loadu_si512(from));
	__m512i high = x86_f8_narrow(k, mantissa, _mm512_loadu_si512(from + 64));

	_mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high)));
}

/* 16 elements of two bytes or more. */
V4 static inline void x86_encode(enum dtype d, unsigned char *p, __m512 f)
{
	switch (d) {
	case DT_FLOAT64:
		_mm512_storeu_pd(p, _mm512_cvtps_pd(_mm512_castps512_ps256(f)));
		_mm512_storeu_pd(p + 64, _mm512_cvtps_pd(_mm512_extractf32x8_ps(f, 1)));
		return;
	case DT_FLOAT16:
		_mm256_storeu_si256((__m256i_u *)p, _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
		return;
	case DT_BFLOAT16:
		_mm256_storeu_si256((__m256i_u *)p, x86_bf16_encode(f));
		return;
	default:
		_mm512_storeu_ps(p, f);
	}
}

V4 static inline size_t x86_narrow(const struct f8 *k, unsigned char *to, const unsigned char *from, enum dtype d, size_t n)
{
	size_t i = 0;

	for (; i + 64 <= n; i += 64)
		x86_f8_store_narrow(k, d == DT_FLOAT16 ? 10 : 7, to + i, from + 2 * i);
	return i;
}

V4 static inline size_t x86_floats(unsigned char *to, enum dtype t, const unsigned char *from, enum dtype d, size_t n)
{
	const struct f8 *k = t == DT_FLOAT8_E4M3FN ? &f8_e4m3fn : t == DT_FLOAT8_E5M2 ? &f8_e5m2 : t == DT_FLOAT8_E4M3FNUZ ? &f8_e4m3fnuz :
			     t == DT_FLOAT8_E5M2FNUZ ? &f8_e5m2fnuz : NULL;
	size_t i = 0, out = dtype_bytes(t), in = dtype_bytes(d);

	if (k && in == 2)
		return x86_narrow(k, to, from, d, n);
	for (; i + 64 <= n; i += 64, to += 64 * out) {
		__m512 f[4];
#pragma GCC unroll 4
		for (size_t j = 0; j < 4; j++, from += 16 * in)
			f[j] = x86_decode(d, from);
		if (k) {
			x86_f8_store(k, to, f);
			continue;
		}
#pragma GCC unroll 4
		for (size_t j = 0; j < 4; j++)
			x86_encode(t, to + j * 16 * out, f[j]);
	}
	return i;
}

#undef V4
#define V4 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define TO(t) case t: return x86_floats(to, t, from, d, n)
#define FROM(name, dtype_)                                                                                             \
	V4 static size_t name(unsigned char *to, enum dtype t, const unsigned char *from, size_t n)                    \
	{                                                                                                              \
		const enum dtype d = dtype_;                                                                                \
		switch (t) {                                                                                           \
		TO(DT_FLOAT64); TO(DT_FLOAT32); TO(DT_FLOAT16); TO(DT_BFLOAT16); TO(DT_FLOAT8_E4M3FN);                 \
		TO(DT_FLOAT8_E5M2); TO(DT_FLOAT8_E4M3FNUZ); TO(DT_FLOAT8_E5M2FNUZ);                                    \
		default: return 0;                                                                                     \
		}                                                                                                      \
	}
FROM(x86_from_f64, DT_FLOAT64)
FROM(x86_from_f32, DT_FLOAT32)
FROM(x86_from_f16, DT_FLOAT16)
FROM(x86_from_bf16, DT_BFLOAT16)

/* Returns how many elements it converted: none of a pair that it does not know, else all but less than 64. */
static inline size_t x86_convert(unsigned char *to, enum dtype t, const unsigned char *from, enum dtype f, size_t n)
{
	switch (f) {
	case DT_FLOAT64: return x86_from_f64(to, t, from, n);
	case DT_FLOAT32: return x86_from_f32(to, t, from, n);
	case DT_FLOAT16: return x86_from_f16(to, t, from, n);
	case DT_BFLOAT16: return x86_from_bf16(to, t, from, n);
	default: return 0;
	}
}

static inline bool x86_has_vbmi(void)
{
	return __builtin_cpu_supports("avx512vbmi") && x86_has_v4();
}

/* A byte of 256 elements in registers. */
struct x86_plane {
	__m512i part[4];
};

VBMI static inline __m512i x86_look_up_64(const struct x86_plane *t, __m512i codes)
{
	return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), _mm512_permutex2var_epi8(t->part[0], codes, t->part[1]),
				      _mm512_permutex2var_epi8(t->part[2], codes, t->part[3]));
}

/* 16 elements of four bytes; those that are floats and wanted as doubles become such. */
VBMI static inline void x86_put(unsigned char *to, __m512i v, bool doubled)
{
	if (doubled)
		x86_encode(DT_FLOAT64, to, _mm512_castsi512_ps(v));
	else
		_mm512_storeu_si512(to, v);
}

/* Looks up bytes in a table of 256 elements of 1, 2 or 4 bytes; doubled: of floats, for doubles. Returns how many: all but less than 64.
 * Bytes of elements are woven in lanes of 16, so codes are put into such an order first that results come out in theirs. */
VBMI static inline size_t x86_look_up(unsigned char *to, const uint8_t *codes, const unsigned char *table, size_t bytes, bool doubled,
				      size_t n)
{
	struct x86_plane plane[4];
	uint8_t room[64];
	size_t i = 0, lane = 16 / bytes, stored = 16 * (doubled ? 8 : 4);

	for (size_t p = 0; p < bytes; p++)
		for (size_t part = 0; part < 4; part++) {
			for (size_t k = 0; k < 64; k++)
				room[k] = table[(part * 64 + k) * bytes + p];
			plane[p].part[part] = _mm512_loadu_si512(room);
		}
	for (size_t k = 0; k < 64; k++)
		room[k] = (uint8_t)(k % 16 / lane * 4 * lane + k / 16 * lane + k % lane);
	const __m512i order = _mm512_loadu_si512(room);
	for (; i + 64 <= n; i += 64, to += 64 * (doubled ? 8 : bytes)) {
		__m512i at = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(codes + i)), a = x86_look_up_64(&plane[0], at);
		if (bytes == 1) {
			_mm512_storeu_si512(to, a);
			continue;
		}
		__m512i b = x86_look_up_64(&plane[1], at), low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
		if (bytes == 2) {
			_mm512_storeu_si512(to, low);
			_mm512_storeu_si512(to + 64, high);
			continue;
		}
		__m512i c = x86_look_up_64(&plane[2], at), d = x86_look_up_64(&plane[3], at);
		__m512i low2 = _mm512_unpacklo_epi8(c, d), high2 = _mm512_unpackhi_epi8(c, d);
		x86_put(to, _mm512_unpacklo_epi16(low, low2), doubled);
		x86_put(to + stored, _mm512_unpackhi_epi16(low, low2), doubled);
		x86_put(to + 2 * stored, _mm512_unpacklo_epi16(high, high2), doubled);
		x86_put(to + 3 * stored, _mm512_unpackhi_epi16(high, high2), doubled);
	}
	return i;
}
