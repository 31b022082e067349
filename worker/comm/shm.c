/* shm.c: the arena, and groups that come and go in it. See shm_impl.h for its form, shm_wait.c for how members meet.
 *
 * The first member of a group takes a free region and writes the group's key to the arena's head; the others look for that key. Why not
 * a number that is passed around: the secret goes into the key, so that who does not know it finds no region. */
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/mem.h"
#include "comm/shm_impl.h"

enum { SPINS = 2000, YIELDS = 0, WINDOWS_MAX = 4096 };

static uint64_t region_bytes(uint32_t members)
{
	uint64_t each = SHM_PAGE + 2 * (uint64_t)SHM_INLINE + (uint64_t)SHM_SLOTS * SHM_SLOT_BYTES;

	return SHM_PAGE + members * each;
}

enum err comm_arena_new(uint32_t members, int *fd_out)
{
	struct shm_arena_head head = { .magic = SHM_MAGIC, .members = members, .stride = region_bytes(members) };

	if (members < 1 || members > COMM_RANKS_MAX)
		return ERR(INVALID_REQUEST, "an arena for %u members", members);
	head.file_bytes = SHM_PAGE + head.stride * SHM_REGIONS;
	int fd = memfd_create("dcpd-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return ERR_SYS(SHM_EXHAUSTED, "cannot make an arena");
	enum err e = OK;
	if (ftruncate(fd, (off_t)head.file_bytes) < 0)
		e = ERR_SYS(SHM_EXHAUSTED, "cannot give the arena its size");
	else if (pwrite(fd, &head, sizeof head, 0) != (ssize_t)sizeof head)
		e = ERR_SYS(SHM_EXHAUSTED, "cannot write the arena's head");
	else if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		e = ERR_SYS(SYSTEM, "cannot seal the arena");
	if (e) {
		close(fd);
		return e;
	}
	*fd_out = fd;
	return OK;
}

/* ---- mapping ---- */

/* Maps an arena of another process, trusting only its seals and its size. */
static FALLIBLE enum err map_arena(struct shm *s, int fd)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 || st.st_size < SHM_PAGE)
		return ERR(BACKEND_UNAVAILABLE, "shm needs an arena, and descriptor %d is none", fd);
	void *p = mmap(NULL, SHM_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		return ERR_SYS(NO_MEMORY, "cannot map the arena");
	s->arena = p;
	s->arena_members = *(volatile uint32_t *)&s->arena->members;
	if (s->arena->magic != SHM_MAGIC || s->arena_members < s->c->size || s->arena_members > COMM_RANKS_MAX)
		return ERR(COMM_PROTOCOL, "the arena has no room for a group of %u", s->c->size);
	s->stride = region_bytes(s->arena_members);
	if ((uint64_t)st.st_size < SHM_PAGE + s->stride * SHM_REGIONS)
		return ERR(COMM_PROTOCOL, "the arena is too small");
	return OK;
}

static uint64_t region_offset(const struct shm *s)
{
	return SHM_PAGE + s->stride * s->index;
}

static FALLIBLE enum err map_region(struct shm *s, int fd)
{
	void *p = mmap(NULL, s->stride, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)region_offset(s));

	if (p == MAP_FAILED)
		return ERR_SYS(NO_MEMORY, "cannot map a region of the arena");
	s->region = p;
	return OK;
}

/* ---- keys ---- */

static bool look_for_key(struct shm *s)
{
	for (uint32_t i = 0; i < SHM_REGIONS; i++) {
		if (atomic_load(&s->arena->keys[i]) == s->key) {
			s->index = i;
			return true;
		}
	}
	return false;
}

static FALLIBLE enum err publish_key(struct shm *s)
{
	if (look_for_key(s))
		return ERR(COMM_PROTOCOL, "a group of this id and generation exists");
	for (uint32_t i = 0; i < SHM_REGIONS; i++) {
		uint64_t none = 0;
		if (!atomic_compare_exchange_strong(&s->arena->keys[i], &none, s->key))
			continue;
		s->index = i;
		atomic_fetch_add(&s->arena->changes, 1);
		shm_futex_wake(&s->arena->changes);
		return OK;
	}
	return ERR(LIMIT_EXCEEDED, "all %d groups of the arena are in use", SHM_REGIONS);
}

/* parent: of a split; its failure is ours. */
static FALLIBLE enum err wait_for_key(struct shm *s, const struct shm *parent, uint32_t first)
{
	for (;;) {
		uint32_t seen = atomic_load(&s->arena->changes);
		bool late;
		if (look_for_key(s))
			return OK;
		TRY(shm_sleep(s, &s->arena->changes, seen, &late));
		if (look_for_key(s))
			return OK;
		if (parent)
			TRY(shm_lost(parent, first));
		if (late)
			return shm_late(s, 0);
	}
}

/* Never 0. */
static uint64_t key_of(const struct comm *c, uint64_t from, uint64_t also)
{
	struct { unsigned char secret[COMM_SECRET_BYTES]; uint64_t from, also; } all = { .from = from, .also = also };

	memcpy(all.secret, c->root->spec.secret, sizeof all.secret);
	uint64_t key = XXH3_64bits(&all, sizeof all);
	explicit_bzero(&all, sizeof all);
	return key | 1;
}

/* ---- joining ---- */

static void set_patience(struct shm *s)
{
	cpu_set_t cores;
	int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;

	s->spins = (uint32_t)n >= s->c->size ? SPINS : 0;
	s->yields = s->spins ? 0 : YIELDS;
}

static FALLIBLE enum err join(struct shm *s, int fd)
{
	struct shm_post nothing = { .mode = SHM_NOTHING };
	struct shm_member *me = shm_member(s, s->c->rank);

	TRY(shm_life_begin(s, fd, region_offset(s) + SHM_PAGE * (1 + (uint64_t)s->c->rank)));
	atomic_store(&me->beat, comm_now_ns());
	atomic_store(&me->joined, 1);
	return shm_arrive(s, &nothing);
}

static void destroy(struct shm *s)
{
	if (s->region)
		munmap(s->region, s->stride);
	if (s->arena)
		munmap(s->arena, SHM_PAGE);
	s->region = NULL;
	s->arena = NULL;
	mem_free(s->blocks);
	mem_free(s->in_root);
	mem_free(s->scratch);
	mem_free(s->windows);
	mem_free(s->splits);
	mem_free(s);
}

/* parent and ranks: of a subgroup. */
static FALLIBLE enum err create(struct comm *c, int fd, const struct shm *parent, const uint32_t *ranks, struct shm **out)
{
	struct shm *s = mem_zalloc(1, sizeof *s);

	NEED(s, "no memory for a group");
	s->c = c;
	s->blocks = mem_zalloc(c->size, sizeof *s->blocks);
	s->in_root = mem_zalloc(c->size, sizeof *s->in_root);
	for (uint32_t r = 0; s->in_root && r < c->size; r++)
		s->in_root[r] = parent ? parent->in_root[ranks[r]] : r;
	enum err e = s->blocks && s->in_root ? map_arena(s, fd) : ERR(NO_MEMORY, "no memory for a group");
	if (e) {
		destroy(s);
		return e;
	}
	set_patience(s);
	*out = s;
	return OK;
}

/* The last one to leave gives the region's pages back, so that the next group finds it empty. */
static void leave(struct shm *s)
{
	uint32_t size = s->c->size;

	shm_life_end(s);
	if (atomic_fetch_add(&shm_head(s)->left, 1) + 1 != size)
		return;
	if (madvise(s->region, s->stride, MADV_REMOVE) == 0) {
		uint64_t key = s->key;
		(void)atomic_compare_exchange_strong(&s->arena->keys[s->index], &key, 0);
	}
}

/* From here on the group is there: an error is told to the others. */
static FALLIBLE enum err enter(struct shm *s, int fd)
{
	TRY(map_region(s, fd));
	s->c->impl = s;
	return join(s, fd);
}

static enum err give_up(struct shm *s, enum err e)
{
	struct err_info info = *err_last();
	struct comm *c = s->c;

	if (s->region) {
		info.code = e;
		if (c == c->root)
			shm_abort(c, &info);
		if (s->life)
			leave(s);
	}
	c->impl = NULL;
	destroy(s);
	err_restore(&info);
	return info.code;
}

static enum err shm_open_group(struct comm *c, const struct comm_spec *spec)
{
	struct shm *s;

	c->call = (struct comm_call){ .bytes = c->size, .digest = spec->generation };
	TRY(create(c, spec->arena_fd, NULL, NULL, &s));
	s->key = key_of(c, spec->group_id, spec->generation);
	enum err e = c->rank == 0 ? publish_key(s) : wait_for_key(s, NULL, 0);
	e = e ?: enter(s, spec->arena_fd);
	if (e)
		return give_up(s, e);
	/* The descriptor is the caller's: subgroups need one of our own. */
	c->spec.arena_fd = fcntl(spec->arena_fd, F_DUPFD_CLOEXEC, 0);
	return c->spec.arena_fd >= 0 ? OK : give_up(s, ERR_SYS(SYSTEM, "cannot keep the arena's descriptor"));
}

/* How often this list has been split off before, counted in the same way by all in it. */
static FALLIBLE enum err count_split(struct shm *s, uint64_t list, uint64_t *nth_out)
{
	uint32_t i = 0;

	while (i < s->split_count && s->splits[i].list != list)
		i++;
	if (i == s->split_count) {
		struct shm_split_count *more = mem_grow(s->splits, i + (size_t)1, sizeof *more);
		NEED(more, "no memory for a subgroup");
		s->splits = more;
		s->splits[s->split_count++] = (struct shm_split_count){ .list = list };
	}
	*nth_out = ++s->splits[i].count;
	return OK;
}

static FALLIBLE enum err copy_windows(struct shm *to, const struct shm *from)
{
	if (!from->window_count)
		return OK;
	to->windows = mem_zalloc(from->window_count, sizeof *to->windows);
	NEED(to->windows, "no memory for a subgroup");
	memcpy(to->windows, from->windows, from->window_count * sizeof *to->windows);
	to->window_count = from->window_count;
	return OK;
}

static enum err shm_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub)
{
	struct shm *p = parent->impl, *s;
	uint64_t list = XXH3_64bits(ranks, count * sizeof *ranks), nth;
	int fd = parent->root->spec.arena_fd;

	TRY(count_split(p, list, &nth));
	TRY(create(sub, fd, p, ranks, &s));
	s->key = key_of(sub, p->key ^ list, nth);
	enum err e = copy_windows(s, p);
	e = e ?: (sub->rank == 0 ? publish_key(s) : wait_for_key(s, p, ranks[0]));
	e = e ?: enter(s, fd);
	return e ? give_up(s, e) : OK;
}

static void shm_close(struct comm *c)
{
	struct shm *s = c->impl;

	leave(s);
	if (c == c->root && c->spec.arena_fd >= 0)
		close(c->spec.arena_fd);
	c->impl = NULL;
	destroy(s);
}

/* ---- windows ---- */

static enum err shm_window_add(struct comm *c, uint64_t key, const void *p, uint64_t bytes)
{
	struct shm *s = c->impl;

	for (uint32_t i = 0; i < s->window_count; i++) {
		if (s->windows[i].key == key) {
			s->windows[i] = (struct shm_window){ key, bytes, p };
			return OK;
		}
	}
	if (s->window_count >= WINDOWS_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d windows", WINDOWS_MAX);
	struct shm_window *more = mem_grow(s->windows, s->window_count + (size_t)1, sizeof *more);
	NEED(more, "no memory for a window");
	s->windows = more;
	s->windows[s->window_count++] = (struct shm_window){ key, bytes, p };
	return OK;
}

static const struct comm_ops ops = {
	.name = "shm", .open = shm_open_group, .split = shm_split, .close = shm_close, .abort = shm_abort,
	.poll = shm_poll, .stalest = shm_stalest,
	.window_add = shm_window_add, .barrier = shm_barrier, .broadcast = shm_broadcast, .all_gather_v = shm_all_gather_v,
	.exchange = shm_exchange, .gather = shm_gather, .scatter = shm_scatter,
};

const struct comm_ops *comm_shm_ops(void)
{
	return &ops;
}
