/* mem.h: the only way to the heap. mem_* fail like malloc (NULL), so that running out of memory is an ordinary error;
 * tests make the n-th allocation fail with mem_fail_at(). Tensor bytes are never here: they live in segments and pools. */
#pragma once
#include "base/err.h"

void *mem_alloc(size_t bytes);                 /* not cleared; mem_alloc(0) is a valid pointer */
void *mem_zalloc(size_t count, size_t bytes);  /* cleared, product checked */
void *mem_grow(void *p, size_t count, size_t bytes); /* realloc with checked product; p stays valid on failure */
void mem_free(void *p);
char *mem_strdup(const char *z);
char *mem_strndup(const char *p, size_t n);   /* p[0 .. n), and a NUL behind */
void mem_fail_at(uint64_t nth);                /* fails the nth allocation from now on (1 = next), 0 = never */

/* So many allocations of this thread have failed. Libraries that use mem_* seldom say why they failed: a count that has grown does. */
uint64_t mem_failures(void);

/* Has the processor fetch the bytes that a walk will come to; p may be NULL. */
static inline void mem_prefetch(const void *p, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 64)
		__builtin_prefetch((const char *)p + i);
}

/* Address space without access at a multiple of MEM_HUGE_PAGE, `bytes` of it, whole pages: elsewhere the kernel could map no huge pages.
 * NULL with errno; ends by munmap. */
enum { MEM_HUGE_PAGE = 2 << 20 };
void *mem_space(size_t bytes);

/* A buffer for large reads and writes, of huge pages where the system has them: a disk takes it in few requests, as its bytes lie together
 * in memory. Whole pages, cleared; NULL if there are none. A sanitizer has ordinary ones, whose ends it knows. */
void *mem_huge(size_t bytes);
void mem_huge_free(void *p, size_t bytes);     /* NULL: nothing */

/* A daemon's reserve. Some allocations cannot fail: those of what carries an outcome, which itself would have to be carried. They
 * fall back on blocks set aside at start, which mem_free puts back. Before these run out, mem_is_short() says that no new work
 * should be taken on, so that what was accepted can end. Without a reserve, and when it is empty, mem_sure ends the process. */
enum { MEM_SURE_MAX = 2560, MEM_RESERVE_BLOCKS = 4096 };
FALLIBLE enum err mem_reserve(void);           /* once, before there are threads; again is fine */
void *mem_sure(size_t bytes);                  /* cleared; at most MEM_SURE_MAX bytes; never NULL; not for mem_grow */
bool mem_is_short(void);                       /* a quarter of the reserve is in use */

/* Gives the heap's free pages back to the system if there are more than `keep` bytes. glibc keeps large blocks for reuse, and a worker's
 * next job may want others. */
void mem_trim(size_t keep);
bool mem_is_zero(const void *p, size_t n);       /* all n bytes are 0 */
void mem_free_ptr(void *p_to_pointer);         /* for CLEANUP(mem_free_ptr) */
