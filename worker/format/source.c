/* source.c: see source.h. */
#include "format/source.h"

#include "base/num.h"

static enum err memory_read(void *user, uint64_t offset, void *into, size_t n)
{
	const struct str *bytes = user;

	if (!num_inside(offset, n, bytes->n))
		return ERR(FORMAT_ITEM, "%zu bytes at %ju are beyond the end at %zu", n,
			   (uintmax_t)offset, bytes->n);
	if (n)
		memcpy(into, bytes->p + offset, n);
	return OK;
}

struct item_source source_memory(const struct str *bytes)
{
	union { const struct str *in; void *out; } user = { .in = bytes };

	return (struct item_source){ .read = memory_read, .user = user.out, .length = bytes->n };
}

enum err source_read(const struct item_source *src, uint64_t offset, void *into, size_t n)
{
	if (!num_inside(offset, n, src->length))
		return ERR(FORMAT_ITEM, "%zu bytes at %ju are beyond the end of the item at %ju", n,
			   (uintmax_t)offset, (uintmax_t)src->length);
	return n ? src->read(src->user, offset, into, n) : OK;
}
