/* vec.h: a growable array of any element type, and the walk over any array.
 *
 *     struct vec(struct item) items = { 0 };
 *     TRY(vec_push(&items, &item_ptr));      item_ptr points at a new zeroed element
 *     vec_free(&items);
 *
 * After a successful vec_reserve(), of no elements too, v is not NULL: pointer arithmetic on NULL is undefined, even with 0. */
#pragma once
#include <string.h>
#include "base/mem.h"

#define vec(type)           \
	{                   \
		type *v;    \
		uint64_t n; \
		uint64_t cap; \
	}

static inline FALLIBLE enum err vec_grow_(void **v, uint64_t *cap, uint64_t n, uint64_t more, size_t bytes)
{
	uint64_t need = n + more;

	if (more <= *cap - n && *v)
		return OK;
	if (need < n)
		return ERR(LIMIT_EXCEEDED, "too many elements");
	uint64_t want = *cap ? *cap + *cap / 2 : 16;
	if (want < need)
		want = need;
	void *p = mem_grow(*v, want, bytes);
	NEED(p, "no memory for %ju elements", (uintmax_t)want);
	*v = p;
	*cap = want;
	return OK;
}

#define vec_reserve(a, more) \
	vec_grow_((void **)&(a)->v, &(a)->cap, (a)->n, more, sizeof *(a)->v)
#define vec_push(a, ptr_out)                                                       \
	({                                                                         \
		enum err vec_e_ = vec_reserve(a, 1);                               \
		if (vec_e_ == OK) {                                                \
			*(ptr_out) = memset(&(a)->v[(a)->n++], 0, sizeof *(a)->v); \
		}                                                                  \
		vec_e_;                                                            \
	})
#define vec_free(a)                          \
	do {                                 \
		mem_free((a)->v);            \
		(a)->v = NULL;               \
		(a)->n = (a)->cap = 0;       \
	} while (0)

/* Each of the n elements of an array, in turn at `p`, a pointer. The body must not let the array grow; an array of none may be NULL. */
#define each(p, array, n) \
	for (__typeof__(*(array)) *p = (array), *p##_end = p ? p + (n) : p; p < p##_end; p++)
