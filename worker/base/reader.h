/* reader.h: the one way to take binary fields out of bytes that others wrote: a cursor that never leaves its bytes. A read that does not
 * fit takes nothing, gives zeros and marks the reader as failed, as does every later one; `at` then is the offset of the field that is
 * cut off. A parser may so read a whole record and ask once, before it believes any of it. */
#pragma once
#include <endian.h>

#include "base/str.h"

struct reader {
	const unsigned char *p;
	uint64_t n, at;
	bool failed;
};

static inline struct reader reader_of(const void *p, uint64_t n)
{
	return (struct reader){ .p = p, .n = n };
}

static inline uint64_t reader_left(const struct reader *r)
{
	return r->n - r->at;
}

/* The next n bytes, or NULL. */
static inline const unsigned char *reader_take(struct reader *r, uint64_t n)
{
	r->failed = r->failed || n > r->n - r->at;
	if (r->failed)
		return NULL;
	r->at += n;
	return r->p + (r->at - n);
}

static inline void reader_copy(struct reader *r, void *to, uint64_t n)
{
	const unsigned char *p = reader_take(r, n);

	if (p)
		memcpy(to, p, n);
	else
		memset(to, 0, n);
}

/* A little-endian number of 1 to 8 bytes. */
static inline uint64_t reader_le(struct reader *r, unsigned bytes)
{
	uint64_t v = 0;
	const unsigned char *p = reader_take(r, bytes);

	if (p)
		memcpy(&v, p, bytes);
	return le64toh(v);
}

static inline uint8_t reader_u8(struct reader *r) { return (uint8_t)reader_le(r, 1); }
static inline uint16_t reader_u16(struct reader *r) { return (uint16_t)reader_le(r, 2); }
static inline uint32_t reader_u32(struct reader *r) { return (uint32_t)reader_le(r, 4); }
static inline uint64_t reader_u64(struct reader *r) { return reader_le(r, 8); }

/* The next n bytes as text; empty if they are not there. */
static inline struct str reader_str(struct reader *r, uint64_t n)
{
	const char *p = (const char *)reader_take(r, n);

	return (struct str){ p, p ? n : 0 };
}
