/* mem.c: see mem.h. */
#include "base/mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static _Atomic uint64_t fail_countdown;

static bool fail_now(void)
{
	uint64_t left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);

	while (left != 0)
		if (atomic_compare_exchange_weak(&fail_countdown, &left, left - 1))
			return left == 1;
	return false;
}

void mem_fail_at(uint64_t nth)
{
	atomic_store(&fail_countdown, nth);
}

void *mem_alloc(size_t bytes)
{
	return fail_now() ? NULL : malloc(bytes ? bytes : 1);
}

void *mem_zalloc(size_t count, size_t bytes)
{
	return fail_now() ? NULL : calloc(count ? count : 1, bytes ? bytes : 1);
}

void *mem_grow(void *p, size_t count, size_t bytes)
{
	return fail_now() ? NULL : reallocarray(p, count ? count : 1, bytes ? bytes : 1);
}

void mem_free(void *p)
{
	free(p);
}

char *mem_strdup(const char *z)
{
	size_t n = strlen(z) + 1;
	char *copy = mem_alloc(n);

	if (copy)
		memcpy(copy, z, n);
	return copy;
}

void mem_free_ptr(void *p_to_pointer)
{
	void *p;

	memcpy(&p, p_to_pointer, sizeof p);
	free(p);
}
