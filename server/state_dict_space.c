/* state_dict_space.c: how much shared memory is held, and the threads that make segments.
 *
 * Making one means to have the kernel allocate and clear its pages (seg_allocate): seconds for a large one, so it is done off the loop,
 * in steps that a stop can interrupt. A few threads, because the ranks of a first save ask at the same moment. The bytes are counted when
 * they are promised, not when they exist: two reservations cannot both believe in the same space. */
#include <pthread.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/list.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/config.h"
#include "server/state_dict_impl.h"

enum { STEP_BYTES = 64 << 20, THREADS = 4, HOLDERS_SHOWN = 3, ROOM_MS = 2000, ROOM_STEP_MS = 10 };

struct making {
	struct making *next;
	struct seg_maker *maker;
	struct seg_wanted want;
	struct state_dicts *all;
	uid_t uid;
	int fd;
	char name[SEG_NAME_MAX];
	bool again;            /* warm slots made room for it */
	enum err e;
	struct err_info info;
};

struct seg_maker {
	pthread_t threads[THREADS];
	int thread_count;
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct making *first, **last;
	bool stop;
};

uint64_t state_dict_space_round(uint64_t bytes)
{
	uint64_t unit = bytes > 1 << 20 ? 1 << 20 : 4096;

	return (bytes + unit - 1) / unit * unit;
}

static bool stopping(struct seg_maker *m)
{
	pthread_mutex_lock(&m->lock);
	bool stop = m->stop;
	pthread_mutex_unlock(&m->lock);
	return stop;
}

/* ---- accounting ---- */

static uint64_t held_by(const struct state_dict *sd)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < state_dict_slots(sd); i++)
		sum += state_dict_nth(sd, i)->bytes;
	return sum;
}

static enum err exhausted(struct state_dicts *s, uint64_t needed, uint64_t free_bytes, uint64_t total, uint64_t others)
{
	char holders[512] = "";
	size_t n = 0;
	const struct state_dict *shown[HOLDERS_SHOWN] = { NULL };

	for (int i = 0; i < HOLDERS_SHOWN; i++) {
		const struct state_dict *best = NULL, *sd;
		map_each(&s->table, sd) {
			bool seen = false;
			for (int k = 0; k < i; k++)
				seen |= shown[k] == sd;
			if (!seen && held_by(sd) > (best ? held_by(best) : 0))
				best = sd;
		}
		shown[i] = best;
		if (best && n < sizeof holders)
			n += (size_t)snprintf(holders + n, sizeof holders - n, "%s%.100s (uid %u) %ju", i ? ", " : "",
					      best->name, best->uid, (uintmax_t)held_by(best));
	}
	if (others && n < sizeof holders)
		n += (size_t)snprintf(holders + n, sizeof holders - n, "%sothers, not through dcpd, %ju", n ? ", " : "",
				      (uintmax_t)others);
	enum err e = ERR(SHM_EXHAUSTED, "%ju bytes are needed, %ju of %ju are free; held by %s", (uintmax_t)needed,
			 (uintmax_t)free_bytes, (uintmax_t)total, n ? holders : "nobody");
	char want[32], have[32];
	snprintf(want, sizeof want, "%ju", (uintmax_t)needed);
	snprintf(have, sizeof have, "%ju", (uintmax_t)free_bytes);
	return err_expected(e, want, have);
}

void state_dict_shm(const struct state_dicts *s, uint64_t *limit_out, uint64_t *used_out, uint64_t *free_out)
{
	uint64_t limit = s->parts.config->shm_limit, used = s->used_bytes;

	*limit_out = limit;
	*used_out = used;
	*free_out = limit > used ? limit - used : 0;
}

uint64_t state_dict_orphaned(const struct state_dicts *s)
{
	const struct state_dict *sd;
	uint64_t sum = 0;

	map_each(&s->table, sd)
		sum += sd->orphaned_ms ? held_by(sd) : 0;
	return sum;
}

static bool is_spare(const struct slot *sl)
{
	return sl->state == SLOT_FREE && sl->uses == 0 && sl->fd >= 0;
}

static uint64_t spare_bytes(const struct state_dicts *s)
{
	const struct state_dict *sd;
	uint64_t sum = 0;

	map_each(&s->table, sd)
		for (uint32_t i = 0; i < state_dict_slots(sd); i++)
			sum += is_spare(state_dict_nth(sd, i)) ? state_dict_nth(sd, i)->bytes : 0;
	return sum;
}

/* Slots that nobody holds are kept warm for the next step. When memory runs short they go first: a reservation that is refused costs
 * a snapshot, a warm slot only the faulting of its pages. The bytes that they had, until `bytes` are found. */
static uint64_t drop_spares(struct state_dicts *s, uint64_t bytes)
{
	struct state_dict *sd;
	uint64_t found = 0;

	map_each(&s->table, sd) {
		for (uint32_t i = 0; i < state_dict_slots(sd) && found < bytes; i++) {
			if (!is_spare(state_dict_nth(sd, i)))
				continue;
			found += state_dict_nth(sd, i)->bytes;
			state_dict_drop_segment(sd, state_dict_nth(sd, i));
		}
	}
	return found;
}

static FALLIBLE enum err make(struct making *k)
{
	TRY(seg_create(&k->all->owner, k->want.bytes, k->name, &k->fd));
	state_dict_owner_hold(k->fd);
	if (k->uid != geteuid())
		TRY(seg_grant(k->fd, k->uid));
	for (uint64_t at = 0; at < k->want.bytes; at += STEP_BYTES) {
		if (stopping(k->maker))
			return ERR(DRAINING, "the daemon is shutting down");
		TRY(seg_allocate(k->fd, at, num_min(STEP_BYTES, k->want.bytes - at)));
	}
	return OK;
}

/* Memory of warm slots that were dropped comes back when the last process that maps them, a worker whose job has just ended, lets go. */
static void wait_for_room(const struct making *k)
{
	struct statvfs v;

	for (int ms = 0; ms < ROOM_MS && !stopping(k->maker); ms += ROOM_STEP_MS) {
		if (statvfs("/dev/shm", &v) != 0 || v.f_bavail * v.f_frsize >= k->want.bytes)
			return;
		usleep(ROOM_STEP_MS * 1000);
	}
}

static void unmake(struct making *k)
{
	if (k->fd >= 0) {
		close(k->fd);
		if (seg_unlink(k->name) != OK)
			k->fd = -1; /* the sweep at the next start takes it */
	}
	k->fd = -1;
}

static void enqueue(struct making *k)
{
	struct seg_maker *m = k->maker;

	k->next = NULL;
	pthread_mutex_lock(&m->lock);
	*m->last = k;
	m->last = &k->next;
	pthread_cond_signal(&m->more);
	pthread_mutex_unlock(&m->lock);
}

/* /dev/shm is full before our limit is reached: others use it too. true: it is tried once more, without our warm slots. */
static bool make_room(struct making *k)
{
	struct state_dicts *s = k->all;
	struct statvfs v;

	if (!k->again && drop_spares(s, k->want.bytes)) {
		k->again = true;
		enqueue(k);
		return true;
	}
	if (statvfs("/dev/shm", &v) == 0) {
		uint64_t unit = v.f_frsize, gone = (v.f_blocks - v.f_bfree) * unit;
		uint64_t held = s->used_bytes - k->want.bytes;
		k->e = exhausted(s, k->want.bytes, v.f_bavail * unit, v.f_blocks * unit, gone > held ? gone - held : 0);
		k->info = *err_last();
	}
	return false;
}

/* In the loop: hands the segment to its slot, or takes the promise back. */
static void arrive(void *user)
{
	struct making *k = user;
	struct state_dict *sd = k->want.sd;
	struct slot *sl = k->want.slot;

	if (!k->e && sd->dead) {
		unmake(k);
		k->e = ERR(NOT_FOUND, "the state dict was deleted meanwhile");
		k->info = *err_last();
	}
	if (k->e == ERR_SHM_EXHAUSTED && make_room(k))
		return;
	if (k->e) {
		k->all->used_bytes -= k->want.bytes;
		err_restore(&k->info);
	} else {
		sl->fd = k->fd;
		sl->bytes = k->want.bytes;
		memcpy(sl->segment, k->name, sizeof sl->segment);
	}
	k->want.fn(k->want.user, k->e);
	state_dict_unref(sd);
	mem_free(k);
}

static void *maker_thread(void *user)
{
	struct seg_maker *m = user;

	pthread_mutex_lock(&m->lock);
	while (!m->stop) {
		struct making *k = m->first;
		if (!k) {
			pthread_cond_wait(&m->more, &m->lock);
			continue;
		}
		m->first = k->next;
		if (!m->first)
			m->last = &m->first;
		pthread_mutex_unlock(&m->lock);
		if (k->again)
			wait_for_room(k);
		k->e = make(k);
		if (k->e) {
			k->info = *err_last();
			unmake(k);
		}
		loop_post(k->all->parts.loop, arrive, k);
		pthread_mutex_lock(&m->lock);
	}
	pthread_mutex_unlock(&m->lock);
	return NULL;
}

FALLIBLE enum err state_dict_space_clear(struct state_dicts *s, uint64_t bytes)
{
	uint64_t limit, used, free_bytes;

	state_dict_shm(s, &limit, &used, &free_bytes);
	if (bytes > free_bytes && bytes - free_bytes > spare_bytes(s))
		return exhausted(s, bytes, free_bytes, limit, 0);
	if (bytes > free_bytes)
		(void)drop_spares(s, bytes - free_bytes);
	return OK;
}

FALLIBLE enum err state_dict_space_make(struct state_dicts *s, const struct seg_wanted *w)
{
	struct seg_maker *m = s->maker;

	TRY(state_dict_space_clear(s, w->bytes));
	struct making *k = mem_zalloc(1, sizeof *k);
	NEED(k, "cannot make a segment");
	k->maker = m;
	k->want = *w;
	k->all = s;
	k->uid = w->sd->uid;
	k->fd = -1;
	w->sd->refs++;
	s->used_bytes += w->bytes;
	enqueue(k);
	return OK;
}

FALLIBLE enum err state_dict_space_new(struct state_dicts *s)
{
	struct seg_maker *m = mem_zalloc(1, sizeof *m);

	NEED(m, "cannot make segments");
	pthread_mutex_init(&m->lock, NULL);
	pthread_cond_init(&m->more, NULL);
	m->last = &m->first;
	s->maker = m;
	for (; m->thread_count < THREADS; m->thread_count++)
		if (pthread_create(&m->threads[m->thread_count], NULL, maker_thread, m) != 0)
			return ERR(SYSTEM, "cannot start a thread that makes segments");
	return OK;
}

/* Ends the segment maker: the segment in work is finished or given up, queued ones are dropped. The next start sweeps segments without a
 * journal row. */
void state_dict_space_free(struct state_dicts *all)
{
	struct seg_maker *m = all->maker;

	if (!m)
		return;
	pthread_mutex_lock(&m->lock);
	m->stop = true;
	pthread_cond_broadcast(&m->more);
	pthread_mutex_unlock(&m->lock);
	for (int i = 0; i < m->thread_count; i++)
		pthread_join(m->threads[i], NULL);
	list_each(k, m->first)
		mem_free(k);
	pthread_mutex_destroy(&m->lock);
	pthread_cond_destroy(&m->more);
	mem_free(m);
	all->maker = NULL;
}
