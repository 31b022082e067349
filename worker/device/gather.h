/* gather.h: how the threads of a GPU share the copy of many small pieces. The kernel (gather.cu) and its emulation in the tests'
 * fake driver call this one function.
 *
 * A block of threads takes a piece. Neighbouring threads copy neighbouring words, so that the memory sees long accesses. Words of 16 or 4
 * bytes need both addresses at the same distance from such a boundary; else single bytes are copied. */
#pragma once
#include <stdint.h>

enum { GATHER_THREADS = 256 };

/* A piece: addresses as the GPU sees them. */
struct gather_row {
	uint64_t to, from, bytes;
};

typedef uint32_t gather_16 __attribute__((vector_size(16), may_alias));
typedef uint32_t gather_4 __attribute__((may_alias));

#define GATHER_WORDS(type)                                                                          \
	for (uint64_t i = thread; i < words; i += threads)                                          \
		((type *)(void *)(to + head))[i] = ((const type *)(const void *)(from + head))[i]

/* The share of one thread of `threads` in the copy of a piece. */
static inline void gather_part(unsigned char *to, const unsigned char *from, uint64_t bytes, uint32_t thread, uint32_t threads)
{
	uint64_t apart = (uintptr_t)to ^ (uintptr_t)from, width = apart % 16 == 0 ? 16 : apart % 4 == 0 ? 4 : 1;
	uint64_t head = (width - (uintptr_t)to % width) % width;

	if (head > bytes)
		head = bytes;
	uint64_t words = (bytes - head) / width;
	for (uint64_t i = thread; i < head; i += threads)
		to[i] = from[i];
	if (width == 16)
		GATHER_WORDS(gather_16);
	else if (width == 4)
		GATHER_WORDS(gather_4);
	else
		GATHER_WORDS(unsigned char);
	for (uint64_t i = head + words * width + thread; i < bytes; i += threads)
		to[i] = from[i];
}
