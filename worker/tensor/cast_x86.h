/* cast_x86.h: instructions compilers do not find for cast.c's loops: conversions of halves in hardware (F16C), and a table of 256 bytes
 * that lies in four registers (AVX-512 VBMI). The results are those of the loops, bit for bit. For cast.c alone, which asks whether the CPU
 * has them. */
#pragma once
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define F16C __attribute__((target("avx2,f16c")))
#define VBMI __attribute__((target("avx512bw,avx512vbmi")))

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

static inline bool x86_has_vbmi(void)
{
	return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw");
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

/* Looks up bytes in a table of 256 elements of 1, 2 or 4 bytes. Returns how many: all but less than 64. Bytes of elements are woven in
 * lanes of 16, so codes are put into such an order first that results come out in theirs. */
VBMI static inline size_t x86_look_up(unsigned char *to, const uint8_t *codes, const unsigned char *table, size_t bytes, size_t n)
{
	struct x86_plane plane[4];
	uint8_t room[64];
	size_t i = 0, lane = 16 / bytes;

	for (size_t p = 0; p < bytes; p++)
		for (size_t part = 0; part < 4; part++) {
			for (size_t k = 0; k < 64; k++)
				room[k] = table[(part * 64 + k) * bytes + p];
			plane[p].part[part] = _mm512_loadu_si512(room);
		}
	for (size_t k = 0; k < 64; k++)
		room[k] = (uint8_t)(k % 16 / lane * 4 * lane + k / 16 * lane + k % lane);
	const __m512i order = _mm512_loadu_si512(room);
	for (; i + 64 <= n; i += 64, to += 64 * bytes) {
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
		_mm512_storeu_si512(to, _mm512_unpacklo_epi16(low, low2));
		_mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low, low2));
		_mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(high, high2));
		_mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(high, high2));
	}
	return i;
}
