/* gather_cast.h: how the threads of a GPU share casts between floating dtypes, on the way of their elements over the bus. The kernel
 * (gather.cu) and its emulation in the tests' fake driver call this one function.
 *
 * The results are those of tensor/cast.c, bit for bit: every pair passes through float, by the same functions. A NaN is carried over by
 * its bits, since GPUs make one NaN of all where they convert between float and double.
 *
 * A thread takes 4 bytes of the narrower side at a time: that side lies in host memory, and a bus wants the accesses of neighbouring
 * threads to make long ones. Branches depend on the dtypes only, so all threads of a row take the same ones. */
#pragma once
#include "device/gather.h"
#include "tensor/small_float.h"

enum gather_kind {
	GATHER_F64, GATHER_F32, GATHER_F16, GATHER_BF16, GATHER_E4M3FN, GATHER_E5M2, GATHER_E4M3FNUZ, GATHER_E5M2FNUZ, GATHER_E8M0FNU,
	GATHER_KINDS
};

/* Elements that are cast: addresses as the GPU sees them, multiples of the elements' sizes. */
struct gather_cast_row {
	uint64_t to, from, count;
	uint32_t to_kind, from_kind;   /* enum gather_kind */
};

typedef uint64_t gather_8 __attribute__((may_alias));
typedef uint16_t gather_2 __attribute__((may_alias));

static inline uint32_t gather_width(uint32_t kind)
{
	return kind == GATHER_F64 ? 8 : kind == GATHER_F32 ? 4 : kind <= GATHER_BF16 ? 2 : 1;
}

static inline uint64_t gather_load(const unsigned char *p, uint32_t width)
{
	switch (width) {
	case 8: return *(const gather_8 *)(const void *)p;
	case 4: return *(const gather_4 *)(const void *)p;
	case 2: return *(const gather_2 *)(const void *)p;
	default: return *p;
	}
}

static inline void gather_store(unsigned char *p, uint32_t width, uint64_t bits)
{
	switch (width) {
	case 8: *(gather_8 *)(void *)p = bits; return;
	case 4: *(gather_4 *)(void *)p = (uint32_t)bits; return;
	case 2: *(gather_2 *)(void *)p = (uint16_t)bits; return;
	default: *p = (unsigned char)bits;
	}
}

static inline float gather_float_of_double(uint64_t bits)
{
	double v;

	if ((bits & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull)
		return f32_of((uint32_t)(bits >> 32 & 0x80000000u) | 0x7FC00000u | (uint32_t)(bits >> 29 & 0x3FFFFF));
	__builtin_memcpy(&v, &bits, sizeof v);
	return (float)v;
}

static inline uint64_t gather_double_of_float(float f)
{
	uint32_t u = f32_bits(f);
	uint64_t bits;
	double v;

	if ((u & 0x7FFFFFFFu) > 0x7F800000u)
		return (uint64_t)(u & 0x80000000u) << 32 | 0x7FF8000000000000ull | (uint64_t)(u & 0x3FFFFF) << 29;
	v = (double)f;
	__builtin_memcpy(&bits, &v, sizeof bits);
	return bits;
}

static inline float gather_decode(uint32_t kind, uint64_t bits)
{
	switch (kind) {
	case GATHER_F64: return gather_float_of_double(bits);
	case GATHER_F32: return f32_of((uint32_t)bits);
	case GATHER_F16: return f16_decode((uint16_t)bits);
	case GATHER_BF16: return bf16_decode((uint16_t)bits);
	case GATHER_E4M3FN: return f8_decode(&f8_e4m3fn, (uint8_t)bits);
	case GATHER_E5M2: return f8_decode(&f8_e5m2, (uint8_t)bits);
	case GATHER_E4M3FNUZ: return f8_decode(&f8_e4m3fnuz, (uint8_t)bits);
	case GATHER_E5M2FNUZ: return f8_decode(&f8_e5m2fnuz, (uint8_t)bits);
	default: return f8_e8m0_decode((uint8_t)bits);
	}
}

static inline uint64_t gather_encode(uint32_t kind, float f)
{
	switch (kind) {
	case GATHER_F64: return gather_double_of_float(f);
	case GATHER_F32: return f32_bits(f);
	case GATHER_F16: return f16_encode(f);
	case GATHER_BF16: return bf16_encode(f);
	case GATHER_E4M3FN: return f8_encode(&f8_e4m3fn, f);
	case GATHER_E5M2: return f8_encode(&f8_e5m2, f);
	case GATHER_E4M3FNUZ: return f8_encode(&f8_e4m3fnuz, f);
	case GATHER_E5M2FNUZ: return f8_encode(&f8_e5m2fnuz, f);
	default: return f8_e8m0_encode(f);
	}
}

/* Casts elements [at, at + n); n > 1: 4 bytes of one side, or of both. Sides of 4 bytes that begin at a multiple of 4 are one access. */
static inline void gather_cast_unit(unsigned char *to, const unsigned char *from, const struct gather_cast_row *r, uint64_t at, uint32_t n)
{
	uint32_t wide = gather_width(r->to_kind), width = gather_width(r->from_kind), made = 0, whole = 0;
	bool loads = n > 1 && n * width == 4 && ((uintptr_t)from + at * width) % 4 == 0;
	bool stores = n > 1 && n * wide == 4 && ((uintptr_t)to + at * wide) % 4 == 0;

	if (loads)
		whole = *(const gather_4 *)(const void *)(from + at * width);
	for (uint32_t k = 0; k < n; k++) {
		uint64_t bits = loads ? whole >> 8 * width * k : gather_load(from + (at + k) * width, width);
		uint64_t out = gather_encode(r->to_kind, gather_decode(r->from_kind, bits));
		if (stores)
			made |= (uint32_t)out << 8 * wide * k;
		else
			gather_store(to + (at + k) * wide, wide, out);
	}
	if (stores)
		*(gather_4 *)(void *)(to + at * wide) = made;
}

/* The share of one thread of `threads` in a row, whose addresses `to` and `from` are the same ones for this caller. */
static inline void gather_cast_part(unsigned char *to, const unsigned char *from, const struct gather_cast_row *r, uint32_t thread,
				    uint32_t threads)
{
	uint32_t wide = gather_width(r->to_kind), width = gather_width(r->from_kind);
	bool reads = width <= wide;    /* the narrower side, by which elements are taken together, is read */
	uint32_t narrow = reads ? width : wide, n = narrow < 4 ? 4 / narrow : 1;
	uint64_t apart = reads ? (uintptr_t)from : (uintptr_t)to, head = (4 - apart % 4) % 4 / narrow;

	if (head > r->count)
		head = r->count;
	uint64_t units = (r->count - head) / n, behind = head + units * n, alone = r->count - units * n;
	for (uint64_t i = thread; i < alone + units; i += threads) {
		bool one = i < alone;      /* in front of the first unit, or behind the last */
		uint64_t at = !one ? head + (i - alone) * n : i < head ? i : behind + i - head;
		gather_cast_unit(to, from, r, at, one ? 1 : n);
	}
}
