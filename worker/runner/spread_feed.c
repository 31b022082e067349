/* spread_feed.c: the leader's part of a spread load: see spread.h.
 *
 * The group is opened by the job's own thread, before the run. Then one thread has the group: it exchanges one window after the other,
 * each when this host's part of it is read and its memory is free. A few threads read this host's units, as far ahead as there is memory.
 * A window's memory is free when all scans that need it were served; if these wait for later windows, for a moment too long, it is taken
 * from them, and they read the storage. */
#include <stdlib.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/num.h"
#include "comm/comm.h"
#include "os/fs.h"
#include "runner/spread.h"
#include "session/group.h"

enum { READERS = 4, STALL_MS = 1000, PAGE = 4096,
       MESSAGES_MAX = SPREAD_WINDOW_UNITS * SPREAD_HOSTS_MAX * ((SPREAD_UNIT + COMM_BLOCK_MAX - 1) / COMM_BLOCK_MAX) };

/* Every host tells the others a greeting at the beginning and a farewell at the end. */
struct greeting {
	unsigned char identity[16];    /* identity of the checkpoint that the host has open */
	uint64_t ranges;
};
struct farewell {
	uint64_t read_bytes;           /* bytes that the host has read from the storage */
};

struct spread {
	struct job *job;
	const json_t *doc, *nodes;
	struct group_meeting meeting;
	struct comm *comm;
	uint32_t index, hosts;
	struct spread_plan plan;
	struct run *run;               /* NULL until spread_begin() */
	struct files files;            /* for the threads that read; under `opening` */
	pthread_mutex_t opening;
	uint32_t *files_of;            /* run file by number in the checkpoint */
	uint32_t *own_left;            /* under spread_shared.lock: units of this host that are not read yet, by window */
	uint64_t next_unit;            /* under spread_shared.lock: the next unit of the plan that a reader looks at */
	pthread_t readers[READERS], feeder;
	uint32_t reader_count;
	bool past_cache;               /* units that are not in the page cache are read past it */
	bool feeds;                    /* the feeder runs; written when it does not */
	bool fed;                      /* under spread_shared.lock: the feeder has ended */
	_Atomic bool stop;
	enum err failed;               /* under spread_shared.lock while threads run, as is failure: why windows ended before their time */
	struct err_info failure;
	struct farewell *farewells;    /* by host; NULL: a host's farewell is missing */
};

static const char *node_name(const struct spread *s, int64_t rank)
{
	const char *name = rank >= 0 ? json_string_value(json_array_get(s->nodes, (size_t)rank)) : NULL;

	return name ? name : "another node";
}

/* ---- the group ---- */

static enum err tick(void *user)
{
	struct spread *s = user;

	if (atomic_load(&s->stop))
		return ERR(CANCELLED, "the load has ended on this host");
	return s->feeds ? OK : job_tick(s->job);
}

static enum err meet(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out)
{
	return group_meet(&((struct spread *)user)->meeting, mine, all_out);
}

static FALLIBLE enum err open_group(struct spread *s)
{
	const struct worker *w = s->job->worker;
	uint32_t deadline = (uint32_t)json_integer_value(json_object_get(s->doc, "deadline_ms"));
	/* generation: of how windows are cut, which all must do alike */
	struct comm_spec spec = { .rank = s->index, .size = s->hosts, .inside = COMM_TCP, .between = COMM_TCP, .arena_fd = -1,
				  .group_id = (uint64_t)json_integer_value(json_object_get(s->doc, "group_id")), .generation = 2,
				  .listen = w->listen[0] ? w->listen : NULL, .deadline_ms = deadline, .meet = meet, .tick = tick,
				  .user = s };

	s->meeting = (struct group_meeting){ .job = s->job, .size = s->hosts,
						.deadline_ms = (uint32_t)json_integer_value(json_object_get(s->doc, "wait_ms")) };
	TRY(group_secret(s->doc, spec.secret));
	return comm_open(&spec, &s->comm);
}

/* ---- who needs what ---- */

struct ranges {
	const uint32_t *keys;          /* by run file: 1 + its number in the checkpoint; 0: not spread */
	struct vec(struct spread_range) list;
};

static FALLIBLE enum err add_range(struct ranges *r, uint64_t file, uint64_t begin, uint64_t end)
{
	struct spread_range *last = r->list.n ? &r->list.v[r->list.n - 1] : NULL;

	if (last && last->file == file && begin >= last->begin && begin <= last->end + SPREAD_SLACK) {
		last->end = num_max(last->end, end);
		return OK;
	}
	if (r->list.n >= SPREAD_RANGES_MAX)
		return ERR(LIMIT_EXCEEDED, "the load needs more than %d pieces of the checkpoint", SPREAD_RANGES_MAX);
	TRY(vec_push(&r->list, &last));
	*last = (struct spread_range){ begin, end, file };
	return OK;
}

/* Does the scan read the file that spread_scan_span() tells, and only there? */
static bool is_spread(const struct run_src *src, const uint32_t *keys)
{
	return keys[src->file] && !src->memory && !src->sparse && !src->record;
}

/* Calls fn, in the order of the tasks, with the bytes [lo, hi) of a run file that a scan reads and that may be spread. */
static FALLIBLE enum err each_span(const struct run_build *b, const uint32_t *keys,
				   enum err (*fn)(void *user, uint32_t file, uint64_t lo, uint64_t hi), void *user)
{
	uint64_t lo, hi;

	each(t, b->tasks.v, b->tasks.n)
		for (uint64_t i = t->first; i < t->first + t->count; i++) {
			const struct run_src *src = &b->srcs.v[b->scans.v[i].src];
			if (!is_spread(src, keys))
				continue;
			spread_scan_span(src, &b->scans.v[i], &lo, &hi);
			hi = num_min(hi, b->files.v[src->file].bytes);
			if (lo < hi)
				TRY(fn(user, src->file, lo, hi));
		}
	return OK;
}

static enum err need_span(void *user, uint32_t file, uint64_t lo, uint64_t hi)
{
	struct ranges *r = user;

	return add_range(r, r->keys[file] - 1, lo, hi);
}

static FALLIBLE enum err compare(const struct spread *s, const struct greeting *all)
{
	for (uint32_t h = 0; h < s->hosts; h++) {
		if (memcmp(all[h].identity, all[s->index].identity, sizeof all[h].identity) != 0)
			return err_at_rank(ERR(CHECKPOINT_REPLACED, "node \"%s\" has another version of the checkpoint, or another "
					       "storage of that name, than node \"%s\"", node_name(s, h), node_name(s, s->index)), h);
		if (all[h].ranges > SPREAD_RANGES_MAX)
			return err_at_rank(ERR(COMM_PROTOCOL, "a load that needs %ju ranges", (uintmax_t)all[h].ranges), h);
	}
	return OK;
}

/* Tells the others what this host needs, hears the same of them, and plans. */
static FALLIBLE enum err agree(struct spread *s, const struct ranges *mine, const uint64_t *files, uint64_t file_count)
{
	struct greeting own = { .ranges = mine->list.n }, all[SPREAD_HOSTS_MAX];
	const struct spread_range *by_host[SPREAD_HOSTS_MAX];
	uint64_t bytes[SPREAD_HOSTS_MAX], counts[SPREAD_HOSTS_MAX], sum = 0;

	digest_xxh3(s->job->identity, strlen(s->job->identity), own.identity);
	TRY(comm_all_gather(s->comm, &own, sizeof own, all));
	TRY(compare(s, all));
	for (uint32_t h = 0; h < s->hosts; h++) {
		counts[h] = all[h].ranges;
		bytes[h] = counts[h] * sizeof(struct spread_range);
		sum += bytes[h];
	}
	CLEANUP(mem_free_ptr) struct spread_range *ranges = mem_alloc(sum + 1);
	NEED(ranges, "no memory for what %u hosts need", s->hosts);
	TRY(comm_all_gather_v(s->comm, mine->list.v, bytes, ranges));
	sum = 0;
	for (uint32_t h = 0; h < s->hosts; h++) {
		by_host[h] = ranges + sum;
		sum += counts[h];
	}
	return spread_plan_make(by_host, counts, s->hosts, files, file_count, &s->plan);
}

/* ---- the tables ---- */

static int by_place(const void *a, const void *b)
{
	const struct run_spread_unit *x = a, *y = b;

	return num_order(x->file, y->file) ?: num_order(x->number, y->number);
}

static void count_scan(void *user, uint32_t window)
{
	((struct run_build *)user)->spread_windows.v[window].left++;
}

static enum err count_span(void *user, uint32_t file, uint64_t lo, uint64_t hi)
{
	struct run_build *b = user;

	spread_each_window(b->spread_units.v, b->spread_units.n, file, lo, hi, count_scan, b);
	return OK;
}

static FALLIBLE enum err build_tables(struct spread *s, struct run_build *b, const uint32_t *keys)
{
	struct run_spread_unit *unit;

	TRY(vec_reserve(&b->spread_windows, s->plan.windows.n));
	memset(b->spread_windows.v, 0, s->plan.windows.n * sizeof *b->spread_windows.v);
	b->spread_windows.n = s->plan.windows.n;
	each(u, s->plan.units.v, s->plan.units.n)
		if (u->needers >> s->index & 1) {
			TRY(vec_push(&b->spread_units, &unit));
			*unit = (struct run_spread_unit){ .lo = u->lo, .hi = u->hi, .number = u->number, .at = u->at, .window = u->window,
							  .file = s->files_of[u->file], .own = u->owner == s->index };
			b->files.v[unit->file].spread = true;
		}
	if (b->spread_units.n)
		qsort(b->spread_units.v, b->spread_units.n, sizeof *b->spread_units.v, by_place);
	TRY(each_span(b, keys, count_span, b));
	s->past_cache = b->opts.past_cache;
	b->opts.past_cache = b->opts.past_cache && !b->spread_units.n;
	b->room = spread_room(&s->plan);
	return OK;
}

static void drop_tables(struct run_build *b)
{
	b->spread_units.n = b->spread_windows.n = b->room = 0;
	each(f, b->files.v, b->files.n)
		f->spread = false;
}

static FALLIBLE enum err plan(struct spread *s, struct run_build *b, const uint32_t *keys)
{
	CLEANUP(mem_free_ptr) uint64_t *bytes = mem_zalloc(b->files.n + 1, sizeof *bytes);
	struct ranges mine = { .keys = keys };
	uint64_t n = 0;

	s->files_of = mem_zalloc(b->files.n + 1, sizeof *s->files_of);
	NEED(bytes && s->files_of, "no memory for %ju files", (uintmax_t)b->files.n);
	for (uint32_t i = 0; i < b->files.n; i++)
		if (keys[i]) {
			bytes[keys[i] - 1] = b->files.v[i].bytes;
			s->files_of[keys[i] - 1] = i;
			n = num_max(n, keys[i]);
		}
	enum err e = each_span(b, keys, need_span, &mine);
	if (e) /* the others wait for it */
		comm_abort(s->comm, e);
	e = e ?: agree(s, &mine, bytes, n);
	vec_free(&mine.list);
	TRY(e);
	return build_tables(s, b, keys);
}

static FALLIBLE enum err read_doc(struct spread *s)
{
	s->nodes = json_object_get(s->doc, "nodes");
	s->hosts = (uint32_t)json_array_size(s->nodes);
	s->index = (uint32_t)json_integer_value(json_object_get(s->doc, "index"));
	if (s->hosts < 2 || s->hosts > SPREAD_HOSTS_MAX || s->index >= s->hosts)
		return ERR(PROTOCOL, "a load spread over %u hosts, of which this is number %u", s->hosts, s->index);
	return OK;
}

/* Lets the load go on without the other hosts, with a warning that says why. */
static void go_alone(struct spread *s, enum err e)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(ERR_TEXT_MAX + 512);
	const struct err_info info = *err_last();

	buf_printf(&text, "this host reads all that it needs from the storage: ");
	if (info.rank >= 0 && e != ERR_CHECKPOINT_REPLACED)
		buf_printf(&text, "node \"%s\": ", node_name(s, info.rank));
	buf_printf(&text, "%s", info.text);
	buf_putc(&text, '\0');
	checked_warn(&s->job->checked, "spread_broken", buf_status(&text) ? info.text : (char *)text.p);
	err_clear();
}

enum err spread_join(struct job *j, struct run_build *b, const uint32_t *keys, struct spread **out)
{
	const json_t *doc = json_object_get(j->doc, "spread");

	*out = NULL;
	if (!json_is_object(doc) || j->dry_run)
		return OK;
	struct spread *s = mem_zalloc(1, sizeof *s);
	NEED(s, "no memory for a group of hosts");
	pthread_mutex_init(&s->opening, NULL);
	s->job = j;
	s->doc = doc;
	enum err e = read_doc(s);
	if (!e) {
		e = job_state(j, "planning", "spread", NULL, 0);
		e = e ?: open_group(s);
		e = e ?: plan(s, b, keys);
	}
	if (!e) {
		*out = s;
		return OK;
	}
	drop_tables(b);
	if (!(e == ERR_CANCELLED && j->cancelled) && e != ERR_PROTOCOL) { /* another host's cancel is its own matter */
		go_alone(s, e);
		e = OK;
	}
	struct err_info info = *err_last();
	spread_free(s);
	if (e)
		err_restore(&info);
	return e;
}

/* ---- threads ---- */

/* The lock is held. */
static bool over(const struct spread *s)
{
	return atomic_load(&s->stop) || s->failed || atomic_load(&s->run->head->cancelled);
}

/* Waits until the memory of this window is free; the lock is held. False: there is no need any more. */
static bool wait_for_slot(struct spread *s, uint64_t window)
{
	struct spread_shared *sh = spread_shared_of(s->run);
	struct run_spread_window *before = window < SPREAD_WINDOWS ? NULL : &s->run->spread_windows[window - SPREAD_WINDOWS];
	uint64_t taken = sh->taken;
	int64_t since = clock_mono_ms();

	while (before && before->state != SPREAD_OVER && !over(s)) {
		bool done = before->state == SPREAD_HERE && !before->left;
		if (taken != sh->taken || !sh->waiting)
			since = clock_mono_ms();
		taken = sh->taken;
		if (before->state == SPREAD_HERE && !before->readers && (done || clock_mono_ms() - since > STALL_MS)) {
			before->state = SPREAD_OVER;
			pthread_cond_broadcast(&sh->change);
		} else {
			spread_wait(sh, &sh->change);
		}
	}
	return !over(s);
}

static void fail(struct spread *s, enum err e)
{
	struct spread_shared *sh = spread_shared_of(s->run);

	pthread_mutex_lock(&sh->lock);
	if (!s->failed) {
		s->failed = e;
		s->failure = *err_last();
	}
	sh->broken = true;
	for (unsigned i = 0; i < SPREAD_WINDOWS; i++)
		pthread_cond_broadcast(&sh->came[i]);
	pthread_cond_broadcast(&sh->change);
	pthread_mutex_unlock(&sh->lock);
}

/* Reads whole pages past the page cache, if they are not in it. *done_out: bytes that were read. */
static FALLIBLE enum err read_past_cache(struct spread *s, struct store_at at, int direct, const struct spread_unit *u, uint64_t *done_out)
{
	uint64_t n = (u->hi - u->lo) & ~(uint64_t)(PAGE - 1);

	*done_out = 0;
	if (direct < 0 || !n || fs_cached(store_fd(at), u->lo, u->hi - u->lo) != FS_NOT_CACHED)
		return OK;
	enum err e = fs_pread(direct, spread_slot(s->run, u->window) + u->at, n, u->lo, "");
	if (e && err_last()->sys_errno == EINVAL) { /* the file system has no O_DIRECT after all */
		err_clear();
		return OK;
	}
	*done_out = e ? 0 : n;
	return e;
}

static FALLIBLE enum err read_unit(struct spread *s, const struct spread_unit *u)
{
	struct spread_shared *sh = spread_shared_of(s->run);
	uint32_t file = s->files_of[u->file];
	char label[ERR_FILE_MAX];
	struct store_at *at;
	uint64_t done;

	pthread_mutex_lock(&s->opening);
	enum err e = files_pin(&s->files, file, &at);
	int direct = !e && s->past_cache ? files_direct(&s->files, file) : -1;
	pthread_mutex_unlock(&s->opening);
	TRY(e);
	e = read_past_cache(s, *at, direct, u, &done);
	if (!e && done < u->hi - u->lo)
		e = store_read(*at, spread_slot(s->run, u->window) + u->at + done, u->hi - u->lo - done, u->lo + done, "");
	e = err_at_file(e, run_file_label(s->run, file, label), (int64_t)u->lo);
	atomic_fetch_add(&sh->own_bytes, e ? 0 : u->hi - u->lo);
	struct err_info info = *err_last();
	pthread_mutex_lock(&s->opening);
	files_unpin(&s->files, file);
	pthread_mutex_unlock(&s->opening);
	if (e)
		err_restore(&info);
	return e;
}

static void *read_units(void *user)
{
	struct spread *s = user;
	struct spread_shared *sh = spread_shared_of(s->run);
	enum err e = OK;

	pthread_mutex_lock(&sh->lock);
	while (!e && !over(s) && s->next_unit < s->plan.units.n) {
		const struct spread_unit *u = &s->plan.units.v[s->next_unit++];
		if (u->owner != s->index || !wait_for_slot(s, u->window))
			continue;
		pthread_mutex_unlock(&sh->lock);
		e = read_unit(s, u);
		if (e)
			fail(s, e);
		pthread_mutex_lock(&sh->lock);
		if (--s->own_left[u->window] == 0)
			pthread_cond_broadcast(&sh->change);
	}
	pthread_mutex_unlock(&sh->lock);
	return NULL;
}

/* ---- an exchange ---- */

struct passing {
	unsigned char *slot;
	uint64_t *at;                  /* offset in the window, by message */
	struct vec(struct comm_message) messages;
};

static enum err pack(void *user, uint64_t index, void *out)
{
	const struct passing *p = user;

	memcpy(out, p->slot + p->at[index], p->messages.v[index].bytes);
	return OK;
}

static enum err unpack(void *user, uint64_t index, const void *in)
{
	const struct passing *p = user;

	memcpy(p->slot + p->at[index], in, p->messages.v[index].bytes);
	return OK;
}

static FALLIBLE enum err pass_to(struct passing *p, const struct spread_unit *u, uint32_t host)
{
	for (uint64_t at = 0, n = u->hi - u->lo; at < n; at += COMM_BLOCK_MAX) {
		struct comm_message *m;
		must(p->messages.n < MESSAGES_MAX);
		p->at[p->messages.n] = u->at + at;
		TRY(vec_push(&p->messages, &m));
		*m = (struct comm_message){ u->owner, host, (uint32_t)num_min(COMM_BLOCK_MAX, n - at) };
	}
	return OK;
}

/* A window that some hosts need: to each what it needs. */
static FALLIBLE enum err exchange_some(struct spread *s, const struct spread_window *w, unsigned char *slot)
{
	CLEANUP(mem_free_ptr) uint64_t *at = mem_alloc(MESSAGES_MAX * sizeof *at);
	struct passing p = { .slot = slot, .at = at };
	enum err e = at ? OK : ERR(NO_MEMORY, "no memory for messages");

	for (uint32_t i = 0; i < w->count; i++)
		for (uint32_t h = 0; !e && h < s->hosts; h++) {
			const struct spread_unit *u = &s->plan.units.v[w->first + i];
			if (h != u->owner && u->needers >> h & 1)
				e = pass_to(&p, u, h);
		}
	const struct comm_exchange x = { p.messages.v, p.messages.n, pack, unpack, &p };
	if (e)
		comm_abort(s->comm, e);
	e = e ?: comm_exchange(s->comm, &x);
	vec_free(&p.messages);
	return e;
}

/* A window that all need: comm chooses tree, chain or ring by its size. */
static FALLIBLE enum err exchange_all(struct spread *s, const struct spread_window *w, unsigned char *slot)
{
	uint64_t bytes[SPREAD_HOSTS_MAX] = { 0 }, before = 0;
	uint32_t owners = 0, owner = 0;

	for (uint32_t i = 0; i < w->count; i++) {
		const struct spread_unit *u = &s->plan.units.v[w->first + i];
		owners += bytes[u->owner] == 0;
		owner = u->owner;
		bytes[u->owner] += (i + 1 < w->count ? u[1].at : w->bytes) - u->at;
	}
	if (owners == 1)
		return comm_broadcast(s->comm, slot, w->bytes, owner);
	for (uint32_t h = 0; h < s->index; h++)
		before += bytes[h];
	return comm_all_gather_v(s->comm, slot + before, bytes, slot);
}

static uint64_t received(const struct spread *s, const struct spread_window *w)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < w->count; i++) {
		const struct spread_unit *u = &s->plan.units.v[w->first + i];
		bytes += u->owner != s->index && (u->needers >> s->index & 1) ? u->hi - u->lo : 0;
	}
	return bytes;
}

static FALLIBLE enum err feed_window(struct spread *s, uint64_t window)
{
	struct spread_shared *sh = spread_shared_of(s->run);
	const struct spread_window *w = &s->plan.windows.v[window];

	pthread_mutex_lock(&sh->lock);
	bool go = wait_for_slot(s, window);
	while (go && s->own_left[window] && !over(s))
		spread_wait(sh, &sh->change);
	go = go && !over(s);
	enum err failed = s->failed; /* a reader may fail any moment */
	struct err_info failure = s->failure;
	pthread_mutex_unlock(&sh->lock);
	if (!go && failed)
		err_restore(&failure);
	if (!go)
		return failed ? failed : ERR(CANCELLED, "the load has ended on this host");
	TRY((w->all ? exchange_all : exchange_some)(s, w, spread_slot(s->run, window)));
	atomic_fetch_add(&sh->node_bytes, received(s, w));
	pthread_mutex_lock(&sh->lock);
	s->run->spread_windows[window].state = SPREAD_HERE;
	if (!s->run->spread_windows[window].left) /* nothing here needs it: its memory is free for who reads ahead */
		pthread_cond_broadcast(&sh->change);
	pthread_cond_broadcast(&sh->came[window % SPREAD_WINDOWS]);
	pthread_mutex_unlock(&sh->lock);
	return OK;
}

static void *feed(void *user)
{
	struct spread *s = user;
	struct spread_shared *sh = spread_shared_of(s->run);
	enum err e = OK;

	for (uint64_t w = 0; !e && w < s->plan.windows.n; w++)
		e = feed_window(s, w);
	if (e) {
		fail(s, e);
		err_restore(&s->failure); /* set once, and not before the lock that fail() took */
		comm_abort(s->comm, s->failed);
	}
	pthread_mutex_lock(&sh->lock);
	s->fed = true;
	pthread_cond_broadcast(&sh->change);
	pthread_mutex_unlock(&sh->lock);
	return NULL;
}

/* ---- beginning and end ---- */

static FALLIBLE enum err init_shared(struct spread_shared *sh, uint64_t widest)
{
	pthread_mutexattr_t lock;
	pthread_condattr_t change;
	bool bad = pthread_mutexattr_init(&lock) || pthread_condattr_init(&change) ||
		   pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED) ||
		   pthread_condattr_setpshared(&change, PTHREAD_PROCESS_SHARED) || pthread_condattr_setclock(&change, CLOCK_MONOTONIC) ||
		   pthread_mutex_init(&sh->lock, &lock) || pthread_cond_init(&sh->change, &change);

	for (unsigned i = 0; i < SPREAD_WINDOWS && !bad; i++)
		bad = pthread_cond_init(&sh->came[i], &change) != 0;
	if (bad)
		return ERR(SYSTEM, "cannot make a lock that processes share");
	sh->widest = widest;
	return OK;
}

enum err spread_begin(struct spread *s, struct run *run)
{
	if (!s || !s->plan.windows.n)
		return OK;
	TRY(init_shared(run_room(run), s->plan.widest));
	s->own_left = mem_zalloc(s->plan.windows.n, sizeof *s->own_left);
	NEED(s->own_left, "no memory for %ju windows", (uintmax_t)s->plan.windows.n);
	each(u, s->plan.units.v, s->plan.units.n)
		s->own_left[u->window] += u->owner == s->index;
	TRY(files_open(run, &s->job->worker->stores, NULL, 0, &s->files));
	s->files.as_stored = true;
	s->run = run;
	s->feeds = true; /* before the thread looks: it reads without the lock */
	if (pthread_create(&s->feeder, NULL, feed, s) != 0)
		s->feeds = false;
	while (s->feeds && s->reader_count < READERS && pthread_create(&s->readers[s->reader_count], NULL, read_units, s) == 0)
		s->reader_count++;
	return s->feeds && s->reader_count ? OK : ERR(SYSTEM, "cannot start threads");
}

static void join(struct spread *s)
{
	for (uint32_t i = 0; i < s->reader_count; i++)
		pthread_join(s->readers[i], NULL);
	if (s->feeds)
		pthread_join(s->feeder, NULL);
	s->feeds = false;
	s->reader_count = 0;
}

/* Bytes that this host has read from the storage: what its workers have read, but for what windows served, and what it read for these. */
static uint64_t read_bytes(const struct spread *s, const struct run *run)
{
	const struct spread_shared *sh = s->run ? spread_shared_of(s->run) : NULL;
	uint64_t all = atomic_load(&run->head->read_bytes), served = sh ? atomic_load(&sh->served_bytes) : 0;

	return all - num_min(all, served) + (sh ? atomic_load(&sh->own_bytes) : 0);
}

/* Hears how much each host has read. Those that have failed meanwhile do not say. */
static void part(struct spread *s, const struct run *run)
{
	struct farewell own = { .read_bytes = read_bytes(s, run) };

	s->farewells = mem_zalloc(s->hosts, sizeof *s->farewells);
	enum err e = s->farewells ? comm_all_gather(s->comm, &own, sizeof own, s->farewells) : ERR(NO_MEMORY, "no memory for figures");
	if (!e)
		return;
	err_clear();
	mem_free(s->farewells);
	s->farewells = NULL;
}

/* Warns of bytes that others sent and that were not the checkpoint's: with whose part of the reading they came. */
static void tell_doubt(struct spread *s)
{
	const struct spread_shared *sh = spread_shared_of(s->run);
	CLEANUP(buf_free) struct buf text = BUF_INIT(ERR_TEXT_MAX + 512);
	char label[ERR_FILE_MAX];
	uint64_t named = 0;

	buf_printf(&text, "bytes %ju to %ju of %s are not the checkpoint's as they came from ", (uintmax_t)sh->doubted_lo,
		   (uintmax_t)sh->doubted_hi, run_file_label(s->run, sh->doubted_file, label));
	each(u, s->plan.units.v, s->plan.units.n) {
		if (s->files_of[u->file] != sh->doubted_file || u->hi <= sh->doubted_lo || u->lo >= sh->doubted_hi ||
		    u->owner == s->index || named >> u->owner & 1)
			continue;
		buf_printf(&text, "%snode \"%s\"", named ? " or " : "", node_name(s, u->owner));
		named |= 1ull << u->owner;
	}
	buf_printf(&text, ": this host has read them from the storage");
	buf_putc(&text, '\0');
	checked_warn(&s->job->checked, "spread_broken", buf_status(&text) ? "another node sent other bytes" : (char *)text.p);
	err_clear();
}

static FALLIBLE enum err report(struct spread *s, const struct run *run)
{
	const struct spread_shared *sh = s->run ? spread_shared_of(s->run) : NULL;
	json_t *doc = json_pack("{s:O, s:I, s:I}", "nodes", s->nodes, "bytes_from_storage", (json_int_t)read_bytes(s, run),
				"bytes_from_nodes", (json_int_t)(sh ? atomic_load(&sh->node_bytes) : 0));
	uint64_t sum = 0;

	for (uint32_t h = 0; s->farewells && h < s->hosts; h++)
		sum += s->farewells[h].read_bytes;
	if (s->farewells)
		json_object_set_new(doc, "storage_bytes_of_all", json_integer((json_int_t)sum));
	if (!doc || json_object_set_new(s->job->result, "spread", doc) != 0)
		return ERR(NO_MEMORY, "no memory for a result");
	if (s->failed) {
		err_restore(&s->failure);
		go_alone(s, s->failed);
	} else if (sh && sh->doubted) {
		tell_doubt(s);
	}
	return OK;
}

enum err spread_end(struct spread *s, const struct run *run, enum err e)
{
	struct err_info info = *err_last();
	enum err tick_error = OK;

	if (!s)
		return e;
	atomic_store(&s->stop, e != OK);
	while (!e && !tick_error && s->feeds) {
		struct spread_shared *sh = spread_shared_of(s->run);
		pthread_mutex_lock(&sh->lock);
		if (!s->fed)
			spread_wait(sh, &sh->change);
		bool fed = s->fed;
		pthread_mutex_unlock(&sh->lock);
		if (fed)
			break;
		tick_error = job_pause(s->job, 0);
	}
	atomic_store(&s->stop, e || tick_error);
	struct err_info stopped = *err_last();
	join(s);
	if (!e && !tick_error && !s->failed)
		part(s, run);
	if (!e && !tick_error)
		return report(s, run);
	err_restore(e ? &info : &stopped);
	return e ? e : tick_error;
}

void spread_free(struct spread *s)
{
	if (!s)
		return;
	atomic_store(&s->stop, true);
	join(s);
	comm_close(s->comm);
	if (s->run)
		files_close(&s->files);
	pthread_mutex_destroy(&s->opening);
	spread_plan_free(&s->plan);
	mem_free(s->files_of);
	mem_free(s->own_left);
	mem_free(s->farewells);
	mem_free(s);
}
