/* test_comm_threads.c: the back ends with members that are threads of one process, for the thread sanitizer.
 *
 * Members that are processes map the arena each for itself, where a sanitizer sees nothing of how they meet. Here mmap and munmap are
 * the test's own (the Makefile wraps them): what is mapped of one file at one place is mapped once, so that all members use the same
 * addresses, and an access that is not ordered by the protocol is a race that is reported. */
#include "lib/t_collectives.h"

#include <pthread.h>
#include <sys/stat.h>

void *__real_mmap(void *p, size_t bytes, int prot, int flags, int fd, off_t at);
int __real_munmap(void *p, size_t bytes);
void *__wrap_mmap(void *p, size_t bytes, int prot, int flags, int fd, off_t at);
int __wrap_munmap(void *p, size_t bytes);

enum { MAPS_MAX = 4096 };

static struct {
	pthread_mutex_t lock;
	bool on;
	uint32_t count, shared;        /* shared: how often somebody got what was there */
	struct { dev_t dev; ino_t ino; off_t at; size_t bytes; void *p; } maps[MAPS_MAX];
} one = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void *map_once(size_t bytes, int prot, int flags, int fd, off_t at)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return MAP_FAILED;
	for (uint32_t i = 0; i < one.count; i++) {
		if (one.maps[i].dev != st.st_dev || one.maps[i].ino != st.st_ino || one.maps[i].at != at || one.maps[i].bytes != bytes)
			continue;
		one.shared++;
		return one.maps[i].p;
	}
	T_CHECK(one.count < MAPS_MAX);
	void *p = __real_mmap(NULL, bytes, prot, flags, fd, at);
	if (p == MAP_FAILED)
		return p;
	one.maps[one.count].dev = st.st_dev;
	one.maps[one.count].ino = st.st_ino;
	one.maps[one.count].at = at;
	one.maps[one.count].bytes = bytes;
	one.maps[one.count++].p = p;
	return p;
}

void *__wrap_mmap(void *p, size_t bytes, int prot, int flags, int fd, off_t at)
{
	/* Of life words only the address in the member's page is looked at by others: they stay each thread's own. */
	if (fd < 0 || (flags & (MAP_SHARED | MAP_FIXED)) != MAP_SHARED || !one.on)
		return __real_mmap(p, bytes, prot, flags, fd, at);
	pthread_mutex_lock(&one.lock);
	p = map_once(bytes, prot, flags, fd, at);
	pthread_mutex_unlock(&one.lock);
	return p;
}

int __wrap_munmap(void *p, size_t bytes)
{
	bool ours = false;

	pthread_mutex_lock(&one.lock);
	for (uint32_t i = 0; i < one.count && !ours; i++)
		ours = one.maps[i].p == p && one.maps[i].bytes == bytes;
	pthread_mutex_unlock(&one.lock);
	return ours ? 0 : __real_munmap(p, bytes);
}

static void forget_maps(void)
{
	one.on = false;
	for (uint32_t i = 0; i < one.count; i++)
		(void)__real_munmap(one.maps[i].p, one.maps[i].bytes);
	one.count = 0;
}

/* ---- members ---- */

static void *member(void *user)
{
	(void)t_member(user);
	return NULL;
}

static void run(struct t_group *g)
{
	static struct t_group of[T_RANKS];
	pthread_t threads[T_RANKS];

	one.on = true;
	one.shared = 0;
	for (uint32_t r = 0; r < g->spec.size; r++) {
		of[r] = *g;
		of[r].spec.rank = r;
		if (g->arena2 && g->spec.hosts[r] == 1)
			of[r].spec.arena_fd = g->arena2;
		assert_int_equal(pthread_create(&threads[r], NULL, member, &of[r]), 0);
	}
	for (uint32_t r = 0; r < g->spec.size; r++)
		assert_int_equal(pthread_join(threads[r], NULL), 0);
	forget_maps();
}

static void start(struct t_group *g, enum comm_backend backend, uint32_t size, const uint32_t *hosts,
		  enum err (*fn)(struct comm *c, struct t_group *g))
{
	t_group_init(g, backend, size, fn);
	g->spec.deadline_ms = 60000;
	if (!hosts)
		return;
	g->spec.hosts = hosts;
	g->spec.between = COMM_TCP;
	T_OK(comm_arena_new(size, &g->arena2));
}

static void expect(struct t_group *g, enum err code, int64_t rank)
{
	for (uint32_t r = 0; r < g->spec.size; r++)
		if (g->shared->ends[r].code != (int)code || g->shared->ends[r].rank != rank)
			T_FAIL("rank %u of %u: error %d of rank %lld: %s", r, g->spec.size, g->shared->ends[r].code,
			       (long long)g->shared->ends[r].rank, g->shared->ends[r].text);
	t_group_end(g);
}

/* t_every_collective with fewer sizes: a sanitizer is slow. */
static enum err collectives(struct comm *c, struct t_group *g)
{
	static const uint64_t sizes[] = { 0, 16385, 7, 300001 };

	(void)g;
	for (uint32_t n = 0; n < 4; n++) {
		uint64_t bytes = sizes[n];
		TRY(comm_barrier(c));
		TRY(t_all_gathers(c, bytes, n));
		TRY(t_rooted(c, bytes, n));
		TRY(t_reductions(c, bytes / 8, n));
		TRY(t_exchanges(c, 60, n));
	}
	TRY(t_transposition(c, 120, 240));
	return t_subgroups(c);
}

static const uint32_t two_hosts[] = { 0, 1, 0, 1 };

static void each_collective(void **state)
{
	struct t_group g;

	(void)state;
	for (uint32_t size = 2; size <= 4; size += 2) {
		start(&g, COMM_SHM, size, NULL, collectives);
		run(&g);
		assert_true(one.shared >= 2 * (size - 1)); /* or this test shows nothing */
		expect(&g, OK, -1);
		start(&g, COMM_TCP, size, NULL, collectives);
		run(&g);
		expect(&g, OK, -1);
	}
	start(&g, COMM_SHM, 4, two_hosts, collectives);
	run(&g);
	expect(&g, OK, -1);
}

/* ---- windows ---- */

enum { PART = 300000 };
static unsigned char window[4][PART];

static enum err use_windows(struct comm *c, struct t_group *g)
{
	uint32_t me = comm_rank(c);
	unsigned char *out = malloc(sizeof window);

	(void)g;
	T_CHECK(out);
	TRY(comm_window_add(c, 5, window, sizeof window));
	for (uint32_t n = 0; n < 4; n++) {
		/* Every collective is over when it returns: what was read of us may be changed at once. */
		for (uint64_t i = 0; i < PART; i++)
			window[me][i] = t_byte(me, n, i);
		TRY(comm_all_gather(c, window[me], PART, out));
		for (uint32_t r = 0; r < 4; r++)
			T_CHECK(t_is(out + (size_t)r * PART, r, n, 0, PART));
		memset(window[me], 0, PART);
		for (uint64_t i = 0; n == me && i < PART; i++)
			window[me][i] = t_byte(me, 9, i);
		TRY(comm_broadcast(c, n == me ? window[me] : out, PART, n));
		memset(window[me], 1, PART);
		T_CHECK(n == me || t_is(out, n, 9, 0, PART));
	}
	free(out);
	return OK;
}

static void windows(void **state)
{
	struct t_group g;

	(void)state;
	start(&g, COMM_SHM, 4, NULL, use_windows);
	run(&g);
	expect(&g, OK, -1);
}

/* ---- failing together ---- */

static enum err one_aborts(struct comm *c, struct t_group *g)
{
	uint64_t until = t_now_ms() + *(const uint32_t *)g->arg;
	unsigned char in[64] = { 0 }, out[4 * 64];

	for (;;) {
		if (comm_rank(c) == 2 && t_now_ms() >= until)
			comm_abort(c, err_at_fqn(ERR(SHM_EXHAUSTED, "no room here"), "model.w", 7));
		enum err e = comm_all_gather(c, in, sizeof in, out);
		if (!e)
			continue;
		T_CHECK(strcmp(err_last()->fqn, "model.w") == 0 && strcmp(err_last()->text, "no room here") == 0);
		return e;
	}
}

static void an_abort(void **state)
{
	struct t_group g;

	(void)state;
	for (uint32_t ms = 0; ms < 30; ms += 7) {
		start(&g, COMM_SHM, 4, ms % 2 ? two_hosts : NULL, one_aborts);
		g.arg = &ms;
		run(&g);
		expect(&g, ERR_SHM_EXHAUSTED, 2);
		start(&g, COMM_TCP, 4, NULL, one_aborts);
		g.arg = &ms;
		run(&g);
		expect(&g, ERR_SHM_EXHAUSTED, 2);
	}
}

/* Two at once: all end with one of the two errors, the same. */
static enum err two_abort(struct comm *c, struct t_group *g)
{
	enum err e = OK;

	(void)g;
	TRY(comm_barrier(c));
	if (comm_rank(c) < 2)
		comm_abort(c, comm_rank(c) ? ERR(CANCELLED, "enough") : ERR(SHM_EXHAUSTED, "no room here"));
	while (!e)
		e = comm_barrier(c);
	return e;
}

static void two_aborts(void **state)
{
	struct t_group g;

	(void)state;
	for (int i = 0; i < 10; i++) {
		start(&g, COMM_SHM, 4, NULL, two_abort);
		run(&g);
		int code = g.shared->ends[0].code;
		assert_true(code == ERR_CANCELLED || code == ERR_SHM_EXHAUSTED);
		expect(&g, (enum err)code, code == ERR_CANCELLED);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_collective), cmocka_unit_test(windows), cmocka_unit_test(an_abort), cmocka_unit_test(two_aborts),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
