/* mem.h: the only way to the heap. mem_* fail like malloc (NULL), so that running out of memory is an ordinary error;
 * tests make the n-th allocation fail with mem_fail_at(). Tensor bytes are never here: they live in segments and pools. */
#pragma once
#include "base/err.h"

void *mem_alloc(size_t bytes);                 /* not cleared; mem_alloc(0) is a valid pointer */
void *mem_zalloc(size_t count, size_t bytes);  /* cleared, product checked */
void *mem_grow(void *p, size_t count, size_t bytes); /* realloc with checked product; p stays valid on failure */
void mem_free(void *p);
char *mem_strdup(const char *z);
void mem_fail_at(uint64_t nth);                /* fails the nth allocation from now on (1 = next), 0 = never */

void mem_free_ptr(void *p_to_pointer);         /* for CLEANUP(mem_free_ptr) */
