/* lookup.c: see lookup.h.
 *
 * A pool per storage and lane: a queue of questions and a few workers, started when a question waits and gone after an idle time.
 *
 * Two clocks. A question waits in the queue for a limited time, then it is answered with ERR_BUSY: who asked waits for us. A worker that
 * starts or has a question is looked at LOOKS times in the look-up deadline; if the kernel has not run it between that many looks, it is
 * in a system call that does not return, and the storage is stalled. Looks are counted, not time: a daemon that was stopped itself for
 * a while reads what came meanwhile before it looks again. A worker that runs on and on ends after LONGEST deadlines.
 *
 * An answer that comes in a memfd is made only when unread.h has room for it. The room is taken before the worker gets the question,
 * which says how much it is; a worker whose answer needs more says so (ERR_BUSY, `actual` bytes), and the question waits for that. */
#include "server/lookup.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/list.h"
#include "base/mem.h"
#include "base/vec.h"
#include "os/fs.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/gang.h"
#include "server/loop.h"
#include "server/storage.h"
#include "server/unread.h"
#include "server/worker.h"

enum { LOOKUP_MEMORY = 64 << 20, ANSWER_MAX = (1 << 30) + (1 << 20), WORKERS_MAX = 2, LOOKS = 4, LONGEST = 30, LIST_IDLES = 40 };

enum lane { LANE_JOBS, LANE_MEND, LANE_READ, LANE_LIST, LANE_SUMS };

static const uint32_t lane_workers[] = { [LANE_JOBS] = 2, [LANE_MEND] = 2, [LANE_READ] = 2, [LANE_LIST] = 1, [LANE_SUMS] = 2 };

static const struct op {
	const char *name;
	enum lane lane;
	bool shared;                       /* equal ones that wait are asked once */
	uint64_t room;                     /* first granted to an answer in a memfd; 0: the answer has none */
} ops[] = {
	{ "exists", LANE_JOBS, true, 0 },
	{ "probe", LANE_JOBS, true, 0 },
	{ "meet", LANE_JOBS, false, 0 },
	{ "hold", LANE_JOBS, false, 0 },
	{ "aliases", LANE_JOBS, false, 0 },
	{ "recover", LANE_MEND, false, 0 },
	{ "sweep", LANE_MEND, false, 0 },
	{ "trash", LANE_MEND, false, 0 },
	{ "show", LANE_READ, true, 0 },
	{ "files", LANE_READ, true, 0 },
	{ "tensors", LANE_READ, true, 0 },
	{ "loadable", LANE_READ, true, 0 },
	{ "slice", LANE_READ, false, UNREAD_SMALL },
	{ "file", LANE_READ, false, UNREAD_SMALL },
	{ "locate", LANE_READ, false, 4 << 20 },
	{ "list", LANE_LIST, true, 0 },
	{ "find", LANE_LIST, true, 0 },
	{ "runs", LANE_LIST, true, 0 },
	{ "images", LANE_LIST, false, 0 },
	{ "digests", LANE_SUMS, false, 1 << 20 },
};

struct pool;

struct question {
	struct question *next;
	struct question *twin;             /* the same question, asked by another: it gets the same answer */
	const struct op *op;
	struct pool *pool;
	struct lookup_worker *at;          /* NULL: it waits */
	json_t *body;
	int *fds;
	uint32_t fd_count;
	lookup_fn fn;
	void *user;
	uint64_t number;
	uint64_t needs;                    /* room for its answer; 0: it comes without a memfd */
	uint64_t room;                     /* taken for it, while a worker has it */
	uint32_t lost;                     /* workers that died with it */
	struct loop_timer *deadline;       /* while it waits */
};

struct lookup_worker {
	struct pool *pool;
	struct worker *worker;             /* NULL: none */
	struct question *question;
	bool ready;
	struct loop_timer *idle, *look;
	uint32_t still;                    /* looks in a row that found it where it was */
	int64_t since_ms;                  /* when it began to start, or got its question */
};

struct pool {
	struct pool *next;
	struct lookups *all;
	char storage[STORAGE_NAME_MAX + 1];  /* "": segments */
	enum lane lane;
	uint32_t worker_count;
	uint32_t stillborn;                /* workers in a row that died before they were ready */
	struct lookup_worker workers[WORKERS_MAX];
	struct question *first, **last;
	uint32_t waiting;
};

struct lookups {
	struct lookup_parts parts;
	struct pool *pools;
	uint64_t last_number;
	bool ended;                        /* nothing is asked any more */
};

static void pump(struct pool *p);

static struct storage *storage_of(const struct pool *p)
{
	struct storage *st;

	return p->storage[0] && storage_find(p->all->parts.storages, str_of(p->storage), &st) == OK ? st : NULL;
}

static void answer_one(struct question *q, enum err e, const json_t *ok, int *fd)
{
	struct unread *unread = q->pool ? q->pool->all->parts.unread : NULL;
	uint64_t room = q->room;
	lookup_fn fn = q->fn;
	void *user = q->user;
	int none = -1;

	loop_timer_stop(&q->deadline);
	for (uint32_t i = 0; i < q->fd_count; i++)
		close(q->fds[i]);
	mem_free(q->fds);
	json_decref(q->body);
	mem_free(q);
	fn(user, e, ok, fd ? fd : &none);
	if (room && (!fd || *fd >= 0))
		unread_give(unread, room);
}

/* Ends a question and its twins: they are out of the queue and of their worker already. A memfd's room goes to whoever takes the
 * memfd. */
static void answer(struct question *q, enum err e, const json_t *ok, int *fd)
{
	struct err_info info = *err_last();

	for (struct question *twin; q; q = twin) {
		twin = q->twin;
		err_restore(&info);
		answer_one(q, e, ok, fd);
	}
}

static void take_out(struct question *q)
{
	struct pool *p = q->pool;

	for (struct question **at = &p->first; *at; at = &(*at)->next)
		if (*at == q) {
			*at = q->next;
			if (!*at)
				p->last = at;
			p->waiting--;
			return;
		}
}

static void on_deadline(void *user);

static void start_waiting(struct question *q)
{
	const struct config *c = q->pool->all->parts.config;
	int64_t ms = c->lookup_deadline_ms + c->lookup_deadline_ms / 2; /* a storage that hangs is found out before */

	/* Removing what is left over takes as long as the tree is large. */
	loop_timer_start(q->pool->all->parts.loop, q->pool->lane == LANE_MEND ? ms * LONGEST : ms, on_deadline, q, &q->deadline);
}

/* Back to the head of the queue. */
static void put_back(struct question *q)
{
	struct pool *p = q->pool;

	unread_give(q->pool->all->parts.unread, q->room);
	q->room = 0;
	q->at = NULL;
	q->next = p->first;
	if (!p->first)
		p->last = &q->next;
	p->first = q;
	p->waiting++;
	start_waiting(q);
}

static void fail_waiting(struct pool *p, enum err e)
{
	struct err_info info = *err_last();

	while (p->first) {
		struct question *q = p->first;
		take_out(q);
		err_restore(&info);
		answer(q, e, NULL, NULL);
	}
}

static void on_deadline(void *user)
{
	struct question *q = user;
	struct pool *p = q->pool;

	q->deadline = NULL;
	take_out(q);
	if (q->needs > UNREAD_SMALL)
		answer(q, ERR(BUSY, "answers that other clients have not read yet leave no room for %ju bytes", (uintmax_t)q->needs),
		       NULL, NULL);
	else
		answer(q, ERR(BUSY, "other questions to %s%s take all its workers", p->storage[0] ? "storage " : "segments", p->storage),
		       NULL, NULL);
	pump(p);
}

/* ---- its workers ---- */

static void forget_worker(struct lookup_worker *lw)
{
	loop_timer_stop(&lw->idle);
	loop_timer_stop(&lw->look);
	lw->ready = false;
	lw->worker = NULL;
}

static void leave(struct lookup_worker *lw)
{
	struct worker *w = lw->worker;

	forget_worker(lw);
	worker_disown(w);
}

/* Ends a worker that hangs (ERR_STORAGE_STALLED) or goes on for too long. */
static void give_up(struct lookup_worker *lw, enum err e)
{
	struct err_info info = *err_last();
	struct pool *p = lw->pool;
	struct question *q = lw->question;
	struct storage *st = storage_of(p);

	lw->question = NULL;
	leave(lw);
	if (st && e == ERR_STORAGE_STALLED) {
		storage_set_state(p->all->parts.storages, st, STORAGE_STATE_STALLED);
		p->all->parts.hangs(p->all->parts.user, st);
	}
	err_restore(&info);
	if (q)
		answer(q, e, NULL, NULL);
	err_restore(&info);
	if (e == ERR_STORAGE_STALLED)
		fail_waiting(p, e);
	pump(p);
}

static void on_look(void *user);

static void look_later(struct lookup_worker *lw)
{
	struct lookups *all = lw->pool->all;

	loop_timer_start(all->parts.loop, all->parts.config->lookup_deadline_ms / LOOKS, on_look, lw, &lw->look);
}

static void on_look(void *user)
{
	struct lookup_worker *lw = user;
	const struct config *c = lw->pool->all->parts.config;
	const char *storage = lw->pool->storage;

	lw->look = NULL;
	lw->still = worker_moved(lw->worker) ? 0 : lw->still + 1;
	if (lw->still >= LOOKS)
		give_up(lw, ERR(STORAGE_STALLED, "%s%s did not answer in time", storage[0] ? "storage " : "a worker", storage));
	else if (clock_mono_ms() - lw->since_ms >= c->lookup_deadline_ms * LONGEST)
		give_up(lw, ERR(TIMED_OUT, "the question took longer than %jd s", (intmax_t)(c->lookup_deadline_ms * LONGEST / 1000)));
	else
		look_later(lw);
}

/* From now on it is expected to answer. */
static void watch_worker(struct lookup_worker *lw)
{
	loop_timer_stop(&lw->look);
	lw->still = 0;
	lw->since_ms = clock_mono_ms();
	(void)worker_moved(lw->worker);
	look_later(lw);
}

static void on_idle(void *user)
{
	struct lookup_worker *lw = user;

	lw->idle = NULL;
	leave(lw);
}

static void rest(struct lookup_worker *lw)
{
	worker_set(lw->worker, "idle", NULL);
	loop_timer_stop(&lw->look);
	loop_timer_stop(&lw->idle);
	int64_t ms = lw->pool->all->parts.config->lookup_idle_ms;
	if (lw->pool->lane == LANE_LIST && lw->pool->storage[0]) /* it knows all checkpoints: the next one would have to look at each */
		ms *= LIST_IDLES;
	loop_timer_start(lw->pool->all->parts.loop, ms, on_idle, lw, &lw->idle);
}

static void on_ready(struct worker *w, enum err e, const json_t *)
{
	struct lookup_worker *lw = w->owner;
	struct pool *p = lw->pool;
	struct storage *st = storage_of(p);

	gang_note_worker(p->all->parts.gangs, w);
	if (e) {
		struct err_info info = *err_last();
		leave(lw);
		if (st)
			storage_set_state(p->all->parts.storages, st, STORAGE_STATE_GONE);
		err_restore(&info);
		fail_waiting(p, e);
		return;
	}
	lw->ready = true;
	p->stillborn = 0;
	rest(lw);
	pump(p);
}

uint64_t lookup_fd_bytes(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
}

/* The answer needs more room than the question came with: it waits for that, at the head of the queue. */
static bool needs_more(struct question *q, enum err e)
{
	uint64_t needs;

	if (e != ERR_BUSY || q->needs == 0 || !str_to_u64(str_of(err_last()->actual), &needs) || needs <= q->needs || needs > ANSWER_MAX)
		return false;
	q->needs = needs;
	put_back(q);
	return true;
}

/* A worker's word is not believed: a memfd has the room that was taken for it, and not more. */
static FALLIBLE enum err settle_room(struct question *q, const struct frame *f)
{
	uint64_t bytes = f->fd_count ? lookup_fd_bytes(f->fds[0]) : 0;

	if (f->fd_count > 1 || bytes > q->room)
		return ERR(PROTOCOL, "an answer of %ju bytes, where %ju were granted", (uintmax_t)bytes, (uintmax_t)q->room);
	unread_shrink(q->pool->all->parts.unread, q->room, bytes);
	q->room = bytes;
	return OK;
}

/* A lookup worker has one storage, whatever it says. */
static void count_stage(const struct lookup_worker *lw, struct storage *st, const json_t *body)
{
	const json_t *pair = st ? json_object_get(body, st->name) : NULL;
	int64_t ns = lw->question ? (clock_mono_ms() - lw->since_ms) * 1000000 : 0;

	for (size_t w = 0; w < 2; w++)
		if (json_integer_value(json_array_get(pair, w)) > 0)
			storage_count_stage(st, "lookup", w, (uint64_t)json_integer_value(json_array_get(pair, w)), ns);
}

static void on_frame(struct worker *w, const struct frame *f, const json_t *body)
{
	struct lookup_worker *lw = w->owner;
	struct pool *p = lw->pool;
	struct question *q = lw->question;
	struct storage *st = storage_of(p);
	const json_t *ok = json_object_get(body, "ok");

	if (f->type == FRAME_IO) {
		storage_count_io(p->all->parts.storages, body);
		count_stage(lw, st, body);
		return;
	}
	if (f->type != FRAME_ANSWER || !q || f->generation != q->number) {
		worker_kill(w, ERR(PROTOCOL, "worker %s answered what it was not asked", w->id));
		return;
	}
	enum err e = settle_room(q, f);
	if (e) {
		worker_kill(w, e);
		return;
	}
	lw->question = NULL;
	e = ok ? OK : errdoc_restore(json_object_get(body, "problem"));
	if (e == ERR_STORAGE_GONE)
		leave(lw); /* it holds what was there: the next one opens the root anew */
	else
		rest(lw);
	if (st)
		storage_answered(p->all->parts.storages, st, e);
	if (e)
		errdoc_restore(json_object_get(body, "problem"));
	if (!needs_more(q, e))
		answer(q, e, ok, ok && f->fd_count ? &f->fds[0] : NULL);
	pump(p);
}

/* May the worker that died have done what was asked, and would another one answer that it cannot be done? Who asked must look. */
static bool is_done_once(const struct question *q)
{
	return json_object_get(q->body, "if") || json_object_get(q->body, "restore");
}

/* A checkpoint that came back leaves an entry of the trash without one, until its worker removes that. */
static void note_soiled(const struct question *q)
{
	struct storage *st = storage_of(q->pool);

	if (st && json_object_get(q->body, "restore"))
		st->sweep_due = true;
}

/* All of a pool's workers may have died before the daemon notices. A question whose next worker dies too is what kills them. */
static void on_ended(struct worker *w, enum err e)
{
	struct lookup_worker *lw = w->owner;
	struct question *q = lw->question;
	bool was_ready = lw->ready;
	struct pool *p = lw->pool;

	lw->question = NULL;
	forget_worker(lw);
	if (q && q->lost++ < p->worker_count && !is_done_once(q)) {
		put_back(q);
		pump(p);
	} else if (q) {
		note_soiled(q);
		answer(q, e, NULL, NULL);
		pump(p);
	} else if (!was_ready && (e != ERR_WORKER_LOST || (p->waiting && p->stillborn++ >= p->worker_count))) {
		p->stillborn = 0;
		fail_waiting(p, e); /* a worker cannot even start */
	} else {
		pump(p);
	}
}

static const struct worker_ops worker_calls = { .ready = on_ready, .frame = on_frame, .ended = on_ended };

static FALLIBLE enum err start_worker(struct lookup_worker *lw)
{
	struct pool *p = lw->pool;
	struct worker_root root = { .path = NULL };
	CLEANUP(fs_drop) int keep_fd = -1;
	struct worker_spec spec = { .role = "lookup", .count = 1, .memory_bytes = LOOKUP_MEMORY, .keep_fd = &keep_fd, .ops = &worker_calls,
				    .owner = lw };
	char name[STORAGE_NAME_MAX + 16];

	if (p->storage[0]) {
		struct storage *st;
		TRY(storage_find(p->all->parts.storages, str_of(p->storage), &st));
		storage_root(st, &root);
		spec.roots = &root;
		spec.root_count = 1;
		snprintf(name, sizeof name, "catalogue.%s", p->storage);
		if (p->lane == LANE_LIST && !st->adhoc)
			keep_fd = worker_open_kept(p->all->parts.config, name);
	}
	TRY(worker_start(p->all->parts.workers, &spec, &lw->worker));
	watch_worker(lw);
	return OK;
}

/* The first question that can be asked now. A look-up that waits for room is overtaken only by look-ups that need none. */
static struct question *next_question(struct pool *p)
{
	bool full = false;

	for (struct question *q = p->first; q; q = q->next) {
		bool needs_room = q->needs > UNREAD_SMALL;
		if (needs_room && (full || !unread_take(p->all->parts.unread, q->needs))) {
			full = true;
			continue;
		}
		q->room = q->needs;
		return q;
	}
	return NULL;
}

static void ask_worker(struct lookup_worker *lw, struct question *q)
{
	take_out(q);
	loop_timer_stop(&q->deadline);
	q->at = lw;
	lw->question = q;
	loop_timer_stop(&lw->idle);
	watch_worker(lw);
	worker_set(lw->worker, "busy", NULL);
	if (q->needs && json_object_set_new(q->body, "room", json_integer((json_int_t)q->room)) != 0)
		worker_kill(lw->worker, ERR(NO_MEMORY, "cannot ask a question"));
	worker_send(lw->worker, FRAME_LOOKUP, q->number, q->body, q->fds, q->fd_count);
}

static void pump(struct pool *p)
{
	uint32_t starting = 0;

	each(lw, p->workers, p->worker_count) {
		if (!lw->ready || lw->question) {
			starting += lw->worker && !lw->ready;
			continue;
		}
		struct question *q = next_question(p);
		if (!q)
			return;
		ask_worker(lw, q);
	}
	for (uint32_t i = 0; i < p->worker_count && p->waiting > starting; i++) {
		if (p->workers[i].worker)
			continue;
		enum err e = start_worker(&p->workers[i]);
		if (e) {
			fail_waiting(p, e);
			return;
		}
		starting++;
	}
}

/* ---- asking ---- */

static FALLIBLE enum err find_pool(struct lookups *all, const char *storage, enum lane lane, struct pool **out)
{
	for (struct pool *p = all->pools; p; p = p->next)
		if (p->lane == lane && strcmp(p->storage, storage) == 0) {
			*out = p;
			return OK;
		}
	struct pool *p = mem_zalloc(1, sizeof *p);
	NEED(p, "cannot ask a question");
	p->all = all;
	p->last = &p->first;
	snprintf(p->storage, sizeof p->storage, "%s", storage);
	p->lane = lane;
	p->worker_count = lane_workers[lane];
	for (uint32_t i = 0; i < p->worker_count; i++)
		p->workers[i].pool = p;
	p->next = all->pools;
	all->pools = p;
	*out = p;
	return OK;
}

static FALLIBLE enum err check_storage(struct lookups *all, const char *storage, bool is_probe)
{
	struct storage *st;

	TRY(storage_find(all->parts.storages, str_of(storage), &st));
	if (st->state == STORAGE_STATE_STALLED && !is_probe)
		return ERR(STORAGE_STALLED, "storage %s does not answer", storage);
	return OK;
}

static const struct op *find_op(const json_t *body)
{
	const char *name = json_string_value(json_object_get(body, "op"));

	for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
		if (name && strcmp(name, ops[i].name) == 0)
			return &ops[i];
	must_failed(name ? name : "no op", ERR_PLACE);
}

/* An equal question that waits: what it finds out will be as new as what this one would. */
static bool join_twin(const struct pool *p, struct question *q)
{
	for (struct question *x = p->first; x && q->op->shared; x = x->next)
		if (x->op == q->op && x->fd_count == 0 && json_equal(x->body, q->body)) {
			q->twin = x->twin;
			x->twin = q;
			return true;
		}
	return false;
}

static FALLIBLE enum err take_fds(struct question *q, const int *fds, uint32_t fd_count)
{
	q->fds = mem_zalloc(fd_count, sizeof *q->fds);
	NEED(q->fds, "cannot ask a question");
	for (uint32_t i = 0; i < fd_count; i++) {
		q->fds[i] = dup(fds[i]);
		if (q->fds[i] < 0)
			return ERR_SYS(SYSTEM, "cannot pass a segment on");
		q->fd_count++;
	}
	return OK;
}

static FALLIBLE enum err enqueue(struct lookups *all, const char *storage, struct question *q, const int *fds, uint32_t fd_count)
{
	struct pool *p;

	NEED(q->body, "cannot ask a question");
	q->op = find_op(q->body);
	if (all->ended)
		return ERR(DRAINING, "the daemon is shutting down");
	if (storage)
		TRY(check_storage(all, storage, strcmp(q->op->name, "probe") == 0));
	TRY(find_pool(all, storage ? storage : "", q->op->lane, &p));
	q->pool = p;
	q->needs = q->op->room;
	if (fd_count == 0 && join_twin(p, q))
		return OK;
	if (p->waiting >= LOOKUP_WAITING_MAX)
		return ERR(BUSY, "%u questions to storage %s are waiting", p->waiting, p->storage);
	TRY(take_fds(q, fds, fd_count));
	start_waiting(q);
	*p->last = q;
	p->last = &q->next;
	p->waiting++;
	return OK;
}

static void fail_later(void *user, enum err e)
{
	answer(user, e, NULL, NULL);
}

static void pump_later(void *user, enum err)
{
	struct lookups *all = user;

	for (struct pool *p = all->pools; p; p = p->next)
		pump(p);
}

void lookup_ask(struct lookups *all, const char *storage, json_t *question, const int *fds, uint32_t fd_count, lookup_fn fn,
		void *user)
{
	struct question *q = mem_sure(sizeof *q);

	q->body = question;
	q->fn = fn;
	q->user = user;
	q->number = ++all->last_number;
	enum err e = enqueue(all, storage, q, fds, fd_count);
	if (e)
		loop_later(all->parts.loop, fail_later, q, e);
	else
		loop_later(all->parts.loop, pump_later, all, OK);
}

/* ---- start and end ---- */

FALLIBLE enum err lookups_new(const struct lookup_parts *parts, struct lookups **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot keep look-ups");
	(*out)->parts = *parts;
	unread_listen(parts->unread, pump_later, *out);
	return OK;
}

/* Whoever asked hears that there is no answer to come: a callback that never runs leaves what it holds behind. */
void lookups_end(struct lookups *all)
{
	if (!all)
		return;
	all->ended = true;
	for (struct pool *p = all->pools; p; p = p->next) {
		for (uint32_t i = 0; i < p->worker_count; i++) {
			struct question *q = p->workers[i].question;
			p->workers[i].question = NULL;
			if (p->workers[i].worker)
				leave(&p->workers[i]);
			if (q)
				answer(q, ERR(DRAINING, "the daemon is shutting down"), NULL, NULL);
		}
		fail_waiting(p, ERR(DRAINING, "the daemon is shutting down"));
	}
}

void lookups_free(struct lookups *l)
{
	if (!l)
		return;
	list_each(p, l->pools) {
		must(!p->first);
		mem_free(p);
	}
	mem_free(l);
}
