/* arena.h: memory for the metadata of one job or one request, freed as a whole.
 *
 *     struct arena *a = arena_new(64 << 20);            at most 64 MiB, whatever the input says
 *     TRY(arena_alloc(a, n, sizeof *items, &items));    zeroed; ERR_LIMIT_EXCEEDED beyond the cap, ERR_NO_MEMORY
 *     arena_free(a);                                    accepts NULL
 *
 * Not thread-safe: one arena, one thread. Pointers stay valid until arena_free (blocks never move). An arena that
 * another one keeps (arena_keep) is freed when both were let go. */
#pragma once
#include "base/err.h"
#include "base/str.h"

struct arena;

struct arena *arena_new(uint64_t cap_bytes);   /* NULL when out of memory */
void arena_free(struct arena *a);
void arena_keep(struct arena *a, struct arena *other);   /* what is in `other` stays as long as `a` is there; one other at most */
void arena_free_ptr(struct arena **a);         /* for CLEANUP(arena_free_ptr) */
uint64_t arena_used(const struct arena *a);    /* bytes taken from the system */

/* count * bytes zeroed bytes, aligned to 16. *out is a pointer to any object pointer. */
FALLIBLE enum err arena_alloc_(struct arena *a, uint64_t count, uint64_t bytes, void **out);
#define arena_alloc(a, count, bytes, out)                                      \
	({                                                                     \
		void *arena_p_ = NULL;                                         \
		enum err arena_e_ = arena_alloc_(a, count, bytes, &arena_p_);  \
		if (arena_e_ == OK)                                            \
			*(out) = arena_p_;                                     \
		arena_e_;                                                      \
	})
/* As arena_alloc, aligned to 8 and packed tighter: for the many small arrays of a plan. */
FALLIBLE enum err arena_i64(struct arena *a, uint64_t count, int64_t **out);
FALLIBLE enum err arena_str(struct arena *a, struct str s, struct str *out); /* a copy, NUL-terminated too */
FALLIBLE enum err arena_printf(struct arena *a, struct str *out, const char *fmt, ...)
	PRINTF_LIKE(3, 4);
