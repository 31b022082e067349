/* mem.c: see mem.h. */
#include "base/mem.h"

#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static _Atomic uint64_t fail_countdown;
static _Thread_local uint64_t failures;

union block {
	union block *next;             /* while it is free */
	char bytes[MEM_SURE_MAX];
};

/* Untouched until they are needed, so that they cost address space and no memory. */
static struct {
	union block *blocks, *free;    /* free: those that were in use; NULL: none */
	size_t fresh;                  /* blocks from here on were never used */
	_Atomic size_t used;
	pthread_mutex_t lock;
} reserve = { .lock = PTHREAD_MUTEX_INITIALIZER };

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

static void *counted(void *p)
{
	failures += p == NULL;
	return p;
}

uint64_t mem_failures(void)
{
	return failures;
}

void *mem_alloc(size_t bytes)
{
	return counted(fail_now() ? NULL : malloc(bytes ? bytes : 1));
}

void *mem_zalloc(size_t count, size_t bytes)
{
	return counted(fail_now() ? NULL : calloc(count ? count : 1, bytes ? bytes : 1));
}

void *mem_grow(void *p, size_t count, size_t bytes)
{
	return counted(fail_now() ? NULL : reallocarray(p, count ? count : 1, bytes ? bytes : 1));
}

enum err mem_reserve(void)
{
	if (!reserve.blocks)
		reserve.blocks = malloc(MEM_RESERVE_BLOCKS * sizeof *reserve.blocks);
	return reserve.blocks ? OK : ERR(NO_MEMORY, "cannot set memory aside");
}

bool mem_is_short(void)
{
	return atomic_load_explicit(&reserve.used, memory_order_relaxed) >= MEM_RESERVE_BLOCKS / 4;
}

static union block *take_block(void)
{
	union block *b = NULL;

	pthread_mutex_lock(&reserve.lock);
	if (reserve.free) {
		b = reserve.free;
		reserve.free = b->next;
	} else if (reserve.blocks && reserve.fresh < MEM_RESERVE_BLOCKS) {
		b = &reserve.blocks[reserve.fresh++];
	}
	reserve.used += b != NULL;
	pthread_mutex_unlock(&reserve.lock);
	return b;
}

static bool put_back(void *p)
{
	union block *b = p;

	if (!reserve.blocks || b < reserve.blocks || b >= reserve.blocks + MEM_RESERVE_BLOCKS)
		return false;
	pthread_mutex_lock(&reserve.lock);
	b->next = reserve.free;
	reserve.free = b;
	reserve.used--;
	pthread_mutex_unlock(&reserve.lock);
	return true;
}

void *mem_sure(size_t bytes)
{
	must(bytes <= MEM_SURE_MAX);
	void *p = mem_zalloc(1, bytes);
	if (p)
		return p;
	p = take_block();
	must(p);
	return memset(p, 0, bytes);
}

void mem_free(void *p)
{
	if (!put_back(p))
		free(p);
}

char *mem_strndup(const char *p, size_t n)
{
	char *copy = mem_alloc(n + 1);

	if (!copy)
		return NULL;
	memcpy(copy, p, n);
	copy[n] = '\0';
	return copy;
}

char *mem_strdup(const char *z)
{
	return mem_strndup(z, strlen(z));
}

void *mem_space(size_t bytes)
{
	unsigned char *room = mmap(NULL, bytes + MEM_HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (room == MAP_FAILED)
		return NULL;
	size_t before = -(uintptr_t)room & (MEM_HUGE_PAGE - 1);
	munmap(room + before + bytes, MEM_HUGE_PAGE - before);
	if (before)
		munmap(room, before);
	return room + before;
}

#ifdef __SANITIZE_ADDRESS__
void *mem_huge(size_t bytes)
{
	void *p = fail_now() ? NULL : aligned_alloc(4096, bytes);

	if (p)
		memset(p, 0, bytes);
	return counted(p);
}

void mem_huge_free(void *p, size_t bytes)
{
	(void)bytes;
	mem_free(p);
}
#else
void *mem_huge(size_t bytes)
{
	void *p = fail_now() ? NULL : mem_space(bytes);

	if (p && mprotect(p, bytes, PROT_READ | PROT_WRITE) < 0) {
		munmap(p, bytes);
		p = NULL;
	}
	if (p)
		(void)madvise(p, bytes, MADV_HUGEPAGE);
	return counted(p);
}

void mem_huge_free(void *p, size_t bytes)
{
	if (p)
		munmap(p, bytes);
}
#endif

void mem_trim(size_t keep)
{
	if (mallinfo2().fordblks > keep)
		malloc_trim(0);
}

void mem_free_ptr(void *p_to_pointer)
{
	void *p;

	memcpy(&p, p_to_pointer, sizeof p);
	mem_free(p);
}

bool mem_is_zero(const void *p, size_t n)
{
	const unsigned char *bytes = p;

	return n == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, n - 1) == 0);
}
