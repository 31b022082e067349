/* shm_wait.c: how members of a region wait for one another, notice who is gone, and fail together.
 *
 * Nothing waits without an end: a sleep is at most a slice, then the group's failure, the caller's tick, the deadline and the others'
 * life words are looked at. Why not a wake-up by the kernel at a death: it wakes one waiter of one word, and whom it should wake waits
 * for other words too; a slice is soon enough. Spinning pays only when every member has a core of its own; with fewer cores, giving
 * the core away (sched_yield) lets the one run that is waited for. */
#include "comm/shm_impl.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- sleeping ---- */

void shm_futex_wake(_Atomic uint32_t *word)
{
	(void)syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* In the opened group's page only, so that a member that waits in one subgroup counts as alive in all of them. */
static void beat(const struct shm *s)
{
	const struct shm *root = s->c->root->impl;

	if (!root) /* which is being opened */
		root = s;
	if (root->region)
		atomic_store_explicit(&shm_member(root, root->c->rank)->beat, comm_now_ns(), memory_order_relaxed);
}

static inline void relax(void)
{
#ifdef __x86_64__
	__builtin_ia32_pause();
#endif
}

/* Did the word change while the core was used or given away? */
static bool soon(const struct shm *s, _Atomic uint32_t *word, uint32_t seen)
{
	for (uint32_t i = 0; i < s->spins; i++) {
		if (atomic_load_explicit(word, memory_order_acquire) != seen)
			return true;
		relax();
	}
	for (uint32_t i = 0; i < s->yields; i++) {
		if (atomic_load_explicit(word, memory_order_acquire) != seen)
			return true;
		sched_yield();
	}
	return false;
}

static FALLIBLE enum err shm_aborted(const struct shm *s);

enum err shm_sleep(struct shm *s, _Atomic uint32_t *word, uint32_t seen, bool *late_out)
{
	*late_out = false;
	if (soon(s, word, seen))
		return OK;
	TRY(shm_aborted(s));
	beat(s);
	struct timespec slice = { 0, SHM_SLICE_MS * 1000000L };
	(void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
	TRY(shm_aborted(s));
	return comm_wait(s->c, late_out);
}

enum err shm_alive(struct shm *s)
{
	bool late;

	beat(s);
	TRY(shm_aborted(s));
	TRY(comm_wait(s->c, &late));
	if (late && shm_stalest(s->c) == UINT32_MAX)
		return comm_at(s->c, ERR(PEER_TIMEOUT, "moving the bytes took longer than the deadline"), s->c->rank);
	return late ? shm_late(s, s->c->rank) : OK;
}

void shm_ring(struct shm *s, uint32_t member)
{
	struct shm_member *m = shm_member(s, member);

	atomic_fetch_add(&m->bell, 1);
	if (atomic_load(&m->asleep))
		shm_futex_wake(&m->bell);
}

/* ---- life ---- */

static pthread_mutex_t *life_of(const struct shm *s)
{
	return (pthread_mutex_t *)((unsigned char *)s->life + SHM_LIFE);
}

_Static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0 && offsetof(pthread_mutex_t, __data.__owner) == 8,
	       "only the lock word may lie in the shared page");

static FALLIBLE enum err lock_life(struct shm *s)
{
	pthread_mutexattr_t attr;
	_Atomic uint32_t *word = (_Atomic uint32_t *)life_of(s);
	int bad = pthread_mutexattr_init(&attr);

	if (bad)
		return ERR(NO_MEMORY, "no memory for a mutex");
	(void)pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	(void)pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	bad = atomic_load(word) ? EBUSY : pthread_mutex_init(life_of(s), &attr);
	if (!bad)
		bad = pthread_mutex_trylock(life_of(s));
	pthread_mutexattr_destroy(&attr);
	return bad ? ERR(COMM_PROTOCOL, "another process is rank %u of this group", s->c->names[s->c->rank]) : OK;
}

enum err shm_life_begin(struct shm *s, int fd, uint64_t page_offset)
{
	void *two = mmap(NULL, 2 * (size_t)SHM_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (two == MAP_FAILED)
		return ERR_SYS(NO_MEMORY, "cannot map two pages");
	if (mmap(two, SHM_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)page_offset) == MAP_FAILED) {
		enum err e = ERR_SYS(SYSTEM, "cannot map a page of the arena");
		munmap(two, 2 * (size_t)SHM_PAGE);
		return e;
	}
	s->life = two;
	enum err e = lock_life(s);
	if (e) {
		munmap(two, 2 * (size_t)SHM_PAGE);
		s->life = NULL;
	}
	return e;
}

void shm_life_end(struct shm *s)
{
	if (!s->life)
		return;
	/* The library unlinks it from this thread's list, which must be done before the page goes. It refuses a word that is not ours:
	 * a peer wrote to it. If one does so again in between, the pages stay for as long as the process. */
	atomic_store((_Atomic uint32_t *)life_of(s), (uint32_t)gettid());
	if (pthread_mutex_unlock(life_of(s)) == 0)
		munmap(s->life, 2 * (size_t)SHM_PAGE);
	s->life = NULL;
}

static uint32_t life_word(const struct shm *s, uint32_t member)
{
	return atomic_load((_Atomic uint32_t *)((unsigned char *)shm_member(s, member) + SHM_LIFE));
}

static bool died(const struct shm *s, uint32_t member)
{
	return atomic_load(&shm_member(s, member)->joined) && (life_word(s, member) & FUTEX_OWNER_DIED);
}

enum err shm_lost(const struct shm *s, uint32_t member)
{
	enum err e;

	/* A member that has not joined the subgroup yet may have died in the group. */
	if (!atomic_load(&shm_member(s, member)->joined))
		return s == s->c->root->impl ? OK : shm_lost(s->c->root->impl, s->in_root[member]);
	uint32_t word = life_word(s, member);
	if (word != 0 && !(word & FUTEX_OWNER_DIED))
		return OK;
	e = word ? ERR(PEER_LOST, "rank %u of the group died", s->c->names[member])
		 : ERR(PEER_LOST, "rank %u left the group", s->c->names[member]);
	return comm_at(s->c, e, member);
}

struct stalest {
	uint64_t now, oldest;
	uint32_t member;                            /* of the opened group; UINT32_MAX: all show themselves */
};

static void look_at_beat(const struct shm *root, uint32_t member, struct stalest *z)
{
	uint64_t shown = atomic_load(&shm_member(root, member)->beat);

	if (member == root->c->rank || shown >= z->oldest || z->now - shown < SHM_STALE_MS * UINT64_C(1000000))
		return;
	z->oldest = shown;
	z->member = member;
}

static uint32_t stalest(const struct shm *s)
{
	const struct shm *root = s->c->root->impl;
	struct stalest z = { .now = comm_now_ns(), .oldest = UINT64_MAX, .member = UINT32_MAX };

	for (uint32_t r = 0; root && r < s->c->size; r++)
		look_at_beat(root, s->in_root[r], &z);
	/* All of this group wait as we do: some of them for one that is not in it. */
	for (uint32_t r = 0; root && z.member == UINT32_MAX && r < root->c->size; r++)
		look_at_beat(root, r, &z);
	return z.member;
}

uint32_t shm_stalest(const struct comm *c)
{
	return c->impl ? stalest(c->impl) : UINT32_MAX;
}

enum err shm_late(const struct shm *s, uint32_t suspect)
{
	const struct comm *root = s->c->root;
	uint32_t member = stalest(s);
	uint32_t rank = member != UINT32_MAX ? root->names[member] : s->c->names[suspect];
	/* On a busy host it may have been kept from showing itself, and wait for one of another host. */
	uint32_t other = root->beyond ? root->beyond(root->spec.user, rank) : UINT32_MAX;

	rank = other != UINT32_MAX ? other : rank;
	return err_at_rank(ERR(PEER_TIMEOUT, "rank %u did not answer in time", rank), rank);
}

/* ---- failing together ---- */

/* In one word, so that one compare-and-swap decides: the error, the author of its text, and the rank that caused it + 1. */
static uint64_t abort_word(const struct err_info *f, uint32_t author)
{
	uint64_t rank = f->rank >= 0 && f->rank < COMM_RANKS_MAX ? (uint64_t)f->rank + 1 : 0;

	return rank << 32 | (uint64_t)author << 16 | (uint64_t)f->code;
}

/* A copy of text that somebody else may be changing. */
static void take_text(char *to, size_t room, const char *from, size_t max)
{
	size_t n = 0;

	while (n < max && n + 1 < room && ((const volatile char *)from)[n]) {
		to[n] = ((const volatile char *)from)[n];
		n++;
	}
	to[n] = '\0';
}

static enum err raise_abort(const struct shm *root, uint64_t word)
{
	uint32_t code = word & 0xFFFF, author = word >> 16 & 0xFFFF;
	int64_t rank = (int64_t)(word >> 32) - 1;
	char text[SHM_TEXT] = "", fqn[SHM_FQN] = "", file[SHM_FQN] = "";
	int64_t offset = -1;

	if (code == OK || code >= ERR_COUNT)
		code = ERR_COMM_PROTOCOL;
	if (author < root->c->size) {
		const struct shm_member *m = shm_member(root, author);
		take_text(text, sizeof text, m->text, SHM_TEXT);
		take_text(fqn, sizeof fqn, m->fqn, SHM_FQN);
		take_text(file, sizeof file, m->file, SHM_FQN);
		offset = m->offset;
	}
	err_record((enum err)code, 0, ERR_PLACE, "%s", text[0] ? text : err_title((enum err)code));
	enum err e = rank >= 0 ? err_at_rank((enum err)code, rank) : (enum err)code;
	if (fqn[0])
		e = err_at_fqn(e, fqn, strlen(fqn));
	return file[0] ? err_at_file(e, file, offset) : e;
}

static enum err shm_aborted(const struct shm *s)
{
	const struct shm *root = s->c->root->impl;

	/* While it is being opened, the group itself has no failure to look at yet. */
	if (!root)
		return OK;
	uint64_t word = atomic_load_explicit(&shm_head(root)->abort, memory_order_acquire);
	return word ? raise_abort(root, word) : OK;
}

void shm_abort(struct comm *root, struct err_info *f)
{
	struct shm *s = root->impl;
	struct shm_head *head = shm_head(s);
	struct shm_member *me = shm_member(s, root->rank);
	uint64_t none = 0;

	take_text(me->text, SHM_TEXT, f->text, sizeof f->text);
	take_text(me->fqn, SHM_FQN, f->fqn, sizeof f->fqn);
	take_text(me->file, SHM_FQN, f->file, sizeof f->file);
	me->offset = f->offset;
	if (!atomic_compare_exchange_strong(&head->abort, &none, abort_word(f, root->rank))) {
		(void)raise_abort(s, none);
		*f = *err_last();
		return;
	}
	shm_futex_wake(&head->round);
	for (uint32_t r = 0; r < root->size; r++)
		shm_futex_wake(&shm_member(s, r)->bell);
}

enum err shm_poll(struct comm *c)
{
	struct shm *s = c->impl;

	beat(s);
	TRY(shm_aborted(s));
	/* A member that left may have finished its part: a wait decides that. */
	for (uint32_t r = 0; r < c->size; r++)
		if (r != c->rank && died(s, r))
			TRY(shm_lost(s, r));
	return OK;
}

/* ---- rounds ---- */

static bool reached(const struct shm *s)
{
	return (int32_t)(atomic_load(&shm_head(s)->round) - s->round) >= 0;
}

/* Of those that have not come, who is gone; and who is late. */
static FALLIBLE enum err missing(const struct shm *s, bool late)
{
	uint32_t first = UINT32_MAX;

	for (uint32_t r = 0; r < s->c->size; r++) {
		const struct shm_member *m = shm_member(s, r);
		if (r == s->c->rank || (int32_t)(atomic_load(&m->round) - s->round) >= 0)
			continue;
		if (reached(s))
			return OK;
		/* It may have come, let the others go and left since: looked at in this order, it has not. */
		enum err e = shm_lost(s, r);
		if (e && !reached(s))
			return e;
		first = first == UINT32_MAX ? r : first;
	}
	if (!late || first == UINT32_MAX || reached(s))
		return OK;
	return shm_late(s, first);
}

static FALLIBLE enum err wait_for_all(struct shm *s)
{
	struct shm_head *head = shm_head(s);
	bool late = false;

	while (!reached(s)) {
		uint32_t seen = atomic_load(&head->round);
		atomic_fetch_add(&head->sleepers, 1);
		enum err e = reached(s) ? OK : shm_sleep(s, &head->round, seen, &late);
		atomic_fetch_sub(&head->sleepers, 1);
		TRY(e);
		if (!reached(s))
			TRY(missing(s, late));
	}
	return OK;
}

enum err shm_arrive(struct shm *s, const struct shm_post *post)
{
	struct shm_head *head = shm_head(s);
	struct comm *c = s->c;
	struct shm_member *me = shm_member(s, c->rank);

	/* A member that arrives after the others gave up must not take them for present. */
	TRY(shm_aborted(s));
	s->round++;
	me->posts[s->round & 1] = *post;
	me->posts[s->round & 1].call = c->call;
	atomic_store(&me->round, s->round);
	beat(s);
	if (atomic_fetch_add(&head->arrived, 1) + 1 == (uint64_t)s->round * c->size) {
		atomic_store(&head->round, s->round);
		if (atomic_load(&head->sleepers))
			shm_futex_wake(&head->round);
	} else {
		TRY(wait_for_all(s));
	}
	TRY(shm_aborted(s));
	for (uint32_t r = 0; r < c->size; r++) {
		struct comm_call theirs = shm_member(s, r)->posts[s->round & 1].call;
		if (r != c->rank && !comm_call_same(&c->call, &theirs))
			return comm_mismatch(c, r, &theirs);
	}
	return OK;
}
