/* arena.c: chained blocks; big requests get a block of their own so that the current one stays in use (see arena.h). */
#include "base/arena.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/num.h"

enum { BLOCK_BYTES = 4 << 10, BLOCK_MAX = 1 << 20, ALIGN = 16, ALIGN_SMALL = 8 };

struct block {
	struct block *next;
	uint64_t used, size;
	_Alignas(16) unsigned char bytes[];
};

struct arena {
	struct block *head;
	uint64_t cap, taken, next_size;
	struct arena *kept;
	_Atomic uint32_t keepers;
};

struct arena *arena_new(uint64_t cap_bytes)
{
	struct arena *a = mem_zalloc(1, sizeof *a);

	if (a) {
		a->cap = cap_bytes;
		a->next_size = BLOCK_BYTES;
	}
	return a;
}

void arena_keep(struct arena *a, struct arena *other)
{
	must(!a->kept && a != other);
	other->keepers++;
	a->kept = other;
}

/* The owner and every keeper call it once. */
void arena_free(struct arena *a)
{
	if (!a || a->keepers-- > 0)
		return;
	for (struct block *b = a->head, *next; b; b = next) {
		next = b->next;
		mem_free(b);
	}
	arena_free(a->kept);
	mem_free(a);
}

void arena_free_ptr(struct arena **a)
{
	arena_free(*a);
}

uint64_t arena_used(const struct arena *a)
{
	return a->taken;
}

static FALLIBLE enum err add_block(struct arena *a, uint64_t need, struct block **out)
{
	uint64_t size = num_max(need, a->next_size), total;

	if (a->taken + size > a->cap)
		size = need;
	TRY(num_add(a->taken, size, &total));
	if (total > a->cap)
		return ERR(LIMIT_EXCEEDED, "more than %ju bytes of metadata", (uintmax_t)a->cap);
	struct block *b = mem_alloc(sizeof *b + size);
	NEED(b, "no memory for %ju bytes of metadata", (uintmax_t)size);
	b->used = 0;
	b->size = size;
	a->taken = total;
	if (a->next_size < BLOCK_MAX)
		a->next_size *= 2;
	if (a->head && need > a->head->size - a->head->used && need > BLOCK_MAX) {
		b->next = a->head->next; /* a block of its own, behind the current one */
		a->head->next = b;
	} else {
		b->next = a->head;
		a->head = b;
	}
	*out = b;
	return OK;
}

static FALLIBLE enum err take(struct arena *a, uint64_t bytes, uint64_t align, void **out)
{
	struct block *b = a->head;
	uint64_t at = b ? (b->used + align - 1) & ~(align - 1) : 0;

	if (!b || bytes > b->size || at > b->size - bytes) {
		TRY(add_block(a, bytes ? bytes : 1, &b));
		at = 0;
	}
	b->used = at + bytes;
	*out = memset(b->bytes + at, 0, bytes);
	return OK;
}

enum err arena_alloc_(struct arena *a, uint64_t count, uint64_t bytes, void **out)
{
	uint64_t total;

	TRY(num_mul(count, bytes, &total));
	return take(a, total, ALIGN, out);
}

enum err arena_i64(struct arena *a, uint64_t count, int64_t **out)
{
	uint64_t total;
	void *p;

	TRY(num_mul(count, sizeof **out, &total));
	TRY(take(a, total, ALIGN_SMALL, &p));
	*out = p;
	return OK;
}

enum err arena_str(struct arena *a, struct str s, struct str *out)
{
	uint64_t total;
	void *p;

	TRY(num_add(s.n, 1, &total));
	TRY(take(a, total, 1, &p));
	if (s.n)
		memcpy(p, s.p, s.n);
	*out = (struct str){ p, s.n };
	return OK;
}

enum err arena_printf(struct arena *a, struct str *out, const char *fmt, ...)
{
	char small[512];
	va_list ap;

	va_start(ap, fmt);
	int n = vsnprintf(small, sizeof small, fmt, ap);
	va_end(ap);
	if (n < 0)
		return ERR(INTERNAL, "cannot format '%s'", fmt);
	if ((size_t)n < sizeof small)
		return arena_str(a, (struct str){ small, (size_t)n }, out);
	void *p;
	TRY(take(a, (uint64_t)n + 1, 1, &p));
	va_start(ap, fmt);
	vsnprintf(p, (size_t)n + 1, fmt, ap);
	va_end(ap);
	*out = (struct str){ p, (size_t)n };
	return OK;
}
