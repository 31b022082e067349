/* copy.c: see copy.h.
 *
 * An ordinary store first reads the line that it will overwrite; a streaming store does not, which takes a third off a copy of what
 * fits no cache. Where bytes are hashed they pass through a buffer of the L1 cache: the digest is of what was written. */
#include "io/copy.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { HOT_BYTES = 16 << 10, LINE = 64 };

#ifdef __SSE2__
static void stream(unsigned char *to, const unsigned char *from, size_t n)
{
	size_t head = -(uintptr_t)to % sizeof(__m128i);

	if (n < LINE + head) {
		memcpy(to, from, n);
		return;
	}
	memcpy(to, from, head);
	for (to += head, from += head, n -= head; n >= LINE; to += LINE, from += LINE, n -= LINE) {
		__m128i *t = (__m128i *)(void *)to;
		const __m128i_u *f = (const __m128i_u *)(const void *)from;
		__m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1), c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);
		_mm_stream_si128(t, a);
		_mm_stream_si128(t + 1, b);
		_mm_stream_si128(t + 2, c);
		_mm_stream_si128(t + 3, d);
	}
	memcpy(to, from, n);
}

/* Streaming stores become visible in no order of their own. */
static void end_stream(void)
{
	_mm_sfence();
}
#else
static void stream(unsigned char *to, const unsigned char *from, size_t n)
{
	memcpy(to, from, n);
}

static void end_stream(void)
{
}
#endif

void copy_hashed(struct digest_stream *s, void *to, const void *from, size_t n)
{
	_Alignas(LINE) unsigned char hot[HOT_BYTES];
	unsigned char *t = to;
	const unsigned char *f = from;

	if (!s->which)
		stream(t, f, n);
	for (size_t at = 0, piece; s->which && at < n; at += piece) {
		piece = n - at < HOT_BYTES ? n - at : HOT_BYTES;
		memcpy(hot, f + at, piece);
		digest_add(s, hot, piece);
		stream(t + at, hot, piece);
	}
	end_stream();
}
