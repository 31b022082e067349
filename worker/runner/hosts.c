/* hosts.c: how hosts meet (see hosts.h). Through files, because the storage is the one thing that a shared save needs anyway: no
 * new port, no credentials between hosts, no process group that a trainer's death would break. Directories are opened anew for every look,
 * which makes NFS ask its server; clocks are compared with themselves only. */
#include "runner/hosts_impl.h"

#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/num.h"

enum {
	LOOK_FIRST_MS = 5, LOOK_MS = 200, LOOK_FAR_MS = 1000, BEATS_PER_TIMEOUT = 8, BEAT_MAX_MS = 2000, JOIN_TIMEOUTS = 6,
	BYE_MS = 5000, END_MAX = 64 << 10
};

const char *hosts_name(const struct hosts *h, uint32_t host)
{
	return host < h->spec->names.n ? h->spec->names.v[host].p : "?";
}

void hosts_file(char out[32], const char *what, uint32_t host)
{
	snprintf(out, 32, "%s-%u", what, host);
}

enum err hosts_put(struct hosts *h, const char *what, const void *bytes, uint64_t n, bool durable)
{
	char name[32];

	hosts_file(name, what, h->index);
	return h->store->ops->put(h->dir, name, bytes, n, durable);
}

/* ---- the beat: a thread of its own, since planning and syncing take their time ---- */

static void *beat(void *user)
{
	struct hosts *h = user;
	int64_t every = num_min((uint64_t)(h->timeout_ms / BEATS_PER_TIMEOUT), BEAT_MAX_MS);

	pthread_mutex_lock(&h->lock);
	for (uint64_t n = 1; !h->stop; n++) {
		pthread_mutex_unlock(&h->lock);
		if (hosts_put(h, "beat", &n, sizeof n, false))
			err_clear(); /* others will see that it stopped */
		struct timespec until = clock_mono_in(every);
		pthread_mutex_lock(&h->lock);
		if (!h->stop)
			pthread_cond_clockwait(&h->wake, &h->lock, CLOCK_MONOTONIC, &until);
	}
	pthread_mutex_unlock(&h->lock);
	return NULL;
}

static void end_beat(struct hosts *h)
{
	if (!h->beating)
		return;
	pthread_mutex_lock(&h->lock);
	h->stop = true;
	pthread_cond_signal(&h->wake);
	pthread_mutex_unlock(&h->lock);
	pthread_join(h->beater, NULL);
	h->beating = false;
}

/* ---- looking around ---- */

static enum err note_name(void *user, const char *name, unsigned char)
{
	struct hosts_view *v = user;
	char **at;

	TRY(vec_push(&v->names, &at));
	*at = mem_strdup(name);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a name");
}

static void view_free(struct hosts_view *v)
{
	for (uint64_t i = 0; i < v->names.n; i++)
		mem_free(v->names.v[i]);
	vec_free(&v->names);
}

static bool has(const struct hosts_view *v, const char *what, uint32_t host)
{
	char name[32];

	hosts_file(name, what, host);
	for (uint64_t i = 0; i < v->names.n; i++)
		if (strcmp(v->names.v[i], name) == 0)
			return true;
	return false;
}

static FALLIBLE enum err look(const struct hosts *h, struct hosts_view *v)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;

	*v = (struct hosts_view){ 0 };
	enum err e = store_enter(store_top(h->store), h->path, &dir);
	e = e ?: store_list(dir, note_name, v);
	v->gone = e == ERR_NOT_FOUND;
	return v->gone ? OK : e;
}

/* Another host's end, if it failed: its problem becomes ours. */
static FALLIBLE enum err read_end(struct hosts *h, uint32_t host)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t n = 0;
	char name[32];

	hosts_file(name, "end", host);
	enum err e = store_get(h->dir, name, END_MAX, &bytes, &n, NULL);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	json_t *doc;
	e = jtext_parse((struct str){ bytes, n }, 0, &doc);
	if (e == ERR_NO_MEMORY)
		return e;
	e = OK;
	const char *code = json_string_value(json_object_get(doc, "code"));
	const char *detail = json_string_value(json_object_get(doc, "detail"));
	if (!json_is_true(json_object_get(doc, "ok"))) {
		e = code ? err_from_name(code) : ERR_PEER_LOST;
		if (e == ERR_INTERNAL || e == ERR_CANCELLED || e == OK)
			e = ERR_PEER_LOST;
		err_record(e, 0, ERR_PLACE, "host %s: %s", hosts_name(h, host), detail ? detail : "it gave up");
	}
	json_decref(doc);
	return e;
}

static void read_beat(struct hosts *h, uint32_t host)
{
	struct hosts_seen *s = &h->seen[host];
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t beat, n = 0;
	int64_t now = clock_mono_ms();
	char name[32];

	if (s->read_ms && now - s->read_ms < h->timeout_ms / BEATS_PER_TIMEOUT)
		return;
	s->read_ms = now;
	hosts_file(name, "beat", host);
	if (store_get(h->dir, name, sizeof beat, &bytes, &n, NULL) == OK && n == sizeof beat) {
		memcpy(&beat, bytes, sizeof beat);
		if (beat != s->beat || !s->at_ms)
			*s = (struct hosts_seen){ beat, clock_mono_ms(), now };
	}
	err_clear();
}

static FALLIBLE enum err check_host(struct hosts *h, const struct hosts_view *v, uint32_t host, bool here)
{
	int64_t now = clock_mono_ms(), join = h->timeout_ms * (h->job->attempt > 1 ? 1 : JOIN_TIMEOUTS);

	if (has(v, "end", host))
		TRY(read_end(h, host));
	if (here)
		return OK;
	read_beat(h, host);
	if (!h->seen[host].at_ms && has(v, "heads", host)) /* it began, and stopped before its first beat */
		h->seen[host].at_ms = now;
	if (h->seen[host].at_ms && now - h->seen[host].at_ms > h->timeout_ms)
		return ERR(PEER_TIMEOUT, "host %s is silent for %jd s: its daemon or its storage does not answer", hosts_name(h, host),
			   (intmax_t)((now - h->seen[host].at_ms) / 1000));
	if (!h->seen[host].at_ms && now - h->began_ms > join)
		return ERR(PEER_TIMEOUT, "host %s did not begin its part of the save within %jd s", hosts_name(h, host),
			   (intmax_t)(join / 1000));
	return OK;
}

static FALLIBLE enum err gave_up(const struct hosts *h)
{
	return ERR(PEER_LOST, "host %s gave the save up", hosts_name(h, 0));
}

/* Looks at hosts [0, until): are all their files `what` there? */
static FALLIBLE enum err look_for(struct hosts *h, const char *what, uint32_t until, bool *all, bool *gone)
{
	struct hosts_view v;
	enum err e = look(h, &v);

	*gone = !e && v.gone;
	*all = !e && !*gone;
	for (uint32_t k = 0; !e && !*gone && k < h->count; k++) {
		bool wanted = k < until, here = k == h->index || (wanted && has(&v, what, k));
		*all = *all && (!wanted || has(&v, what, k));
		if (k != h->index && (h->leads || k == 0)) /* the leader hears of everybody's end */
			e = check_host(h, &v, k, here);
	}
	view_free(&v);
	return e;
}

/* The pause before the next look: each look asks an object storage several times. */
static int longer(const struct hosts *h, int ms)
{
	int most = h->store->ops->fd_of ? LOOK_MS : LOOK_FAR_MS;

	return ms * 2 < most ? ms * 2 : most;
}

static FALLIBLE enum err wait_for(struct hosts *h, const char *what, uint32_t until, bool *gone)
{
	bool all = false;

	for (int ms = LOOK_FIRST_MS;; ms = longer(h, ms)) {
		TRY(look_for(h, what, until, &all, gone));
		if (all || *gone)
			return OK;
		TRY(job_pause(h->job, ms));
	}
}

enum err hosts_wait_all(struct hosts *h, const char *what)
{
	bool gone = false;

	TRY(wait_for(h, what, h->count, &gone));
	return gone ? gave_up(h) : OK;
}

static FALLIBLE enum err hosts_wait_leader(struct hosts *h, const char *what)
{
	bool gone = false;

	TRY(wait_for(h, what, 1, &gone));
	return gone ? gave_up(h) : OK;
}

/* Is the target what this save committed? Its manifest has the leader's job, and the id of the save, which is never used twice: so a host
 * that has not met the leader can tell, too. */
static bool committed(const struct hosts *h)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	CLEANUP(err_restore) struct err_info info = *err_last();

	if (store_enter(store_top(h->store), h->job->spec.target.name.p, &dir) ||
	    checkpoint_manifest(dir, MANIFEST_NAME, &m) || !m)
		return false;
	if (h->leader_job[0])
		return strcmp(m->job, h->leader_job) == 0;
	bool yes = false;
	for (uint64_t i = 0; i < m->hosts.n; i++)
		yes = yes || str_eq(m->hosts.v[i], h->spec->id);
	return yes;
}

static FALLIBLE enum err await_leader(struct hosts *h)
{
	bool gone = false;

	TRY(job_state(h->job, "running", "waiting for the other hosts", NULL, 0));
	enum err e = wait_for(h, "end", 1, &gone);
	if ((e == ERR_PEER_TIMEOUT || gone) && committed(h)) {
		err_clear();
		return OK;
	}
	return e ? e : gone ? gave_up(h) : OK;
}

bool hosts_written(struct hosts *h)
{
	struct hosts_view v;

	if (h->is_committed || h->leads)
		return h->is_committed;
	bool there = look(h, &v) == OK && has(&v, "part", h->index);
	view_free(&v);
	return there;
}

static FALLIBLE enum err set_recovered(struct hosts *h)
{
	h->job->result = json_pack("{s:o, s:b}", "checkpoint", ref_doc(&h->job->spec.target), "recovered", true);
	return h->job->result ? OK : ERR(NO_MEMORY, "no memory for the result");
}

enum err hosts_await_again(struct hosts *h)
{
	if (!h->is_committed) {
		TRY(hosts_read_leader(h));
		TRY(await_leader(h));
	}
	return set_recovered(h);
}

enum err hosts_end_again(struct hosts *h, enum err e)
{
	if (e == OK || e == ERR_CANCELLED || h->leads || h->job->attempt == 1 || !committed(h))
		return e;
	err_clear();
	return set_recovered(h);
}

/* ---- begin ---- */

static FALLIBLE enum err read_ranks(struct hosts *h)
{
	uint64_t world = 0;

	for (uint32_t k = 0; k < h->count; k++)
		world += h->spec->ranks[k].n;
	if (world == 0 || world > SPEC_WORLD_MAX)
		return ERR(VALIDATION_FAILED, "hosts: %ju ranks in all", (uintmax_t)world);
	h->world = (uint32_t)world;
	h->host_of = mem_alloc(h->world * sizeof *h->host_of);
	h->local = mem_zalloc(h->world, sizeof *h->local);
	h->seen = mem_zalloc(h->count, sizeof *h->seen);
	NEED(h->host_of && h->local && h->seen, "no memory for %u ranks", h->world);
	memset(h->host_of, 0xFF, h->world * sizeof *h->host_of);
	for (uint32_t k = 0; k < h->count; k++) {
		for (size_t i = 0; i < h->spec->ranks[k].n; i++) {
			uint32_t r = h->spec->ranks[k].v[i];
			if (r >= h->world || h->host_of[r] != UINT32_MAX)
				return ERR(VALIDATION_FAILED, "hosts: the ranks are not 0 to %u, each once", h->world - 1);
			h->host_of[r] = k;
			h->local[r] = k == h->index;
		}
	}
	return OK;
}

static FALLIBLE enum err read_spec(struct hosts *h)
{
	const struct ref *target = &h->job->spec.target;

	if (h->job->dry_run)
		return ERR(VALIDATION_FAILED, "a save by several hosts has no dry run");
	snprintf(h->name, sizeof h->name, HOSTS_PREFIX "%s", h->spec->id.p);
	h->count = (uint32_t)h->spec->count;
	h->index = h->spec->index;
	h->leads = h->index == 0;
	h->timeout_ms = h->spec->timeout_s * 1000;
	h->began_ms = clock_mono_ms();
	TRY(stores_find(&h->job->worker->stores, target->storage.p, &h->store));
	TRY(staging_beside(target->name.p, h->name, h->path));
	return read_ranks(h);
}

/* The leader makes it; a host that comes first waits. A host whose first attempt broke off may come when all is over: the leader removes
 * the place behind its commit. */
static FALLIBLE enum err find_place(struct hosts *h)
{
	int64_t until = h->began_ms + h->timeout_ms * (h->job->attempt > 1 ? 1 : JOIN_TIMEOUTS);

	for (int ms = LOOK_FIRST_MS;; ms = longer(h, ms)) {
		enum err e = store_enter(store_top(h->store), h->path, &h->dir);
		if (!e || e != ERR_NOT_FOUND)
			return e;
		h->is_committed = h->job->attempt > 1 && committed(h);
		if (h->is_committed) {
			err_clear();
			return OK;
		}
		if (clock_mono_ms() > until)
			return ERR(PEER_TIMEOUT, "host %s, which leads, did not begin the save within %jd s, or gave it up",
				   hosts_name(h, 0), (intmax_t)((clock_mono_ms() - h->began_ms) / 1000));
		TRY(job_pause(h->job, ms));
	}
}

static FALLIBLE enum err meet(struct hosts *h)
{
	TRY(read_spec(h));
	TRY(job_state(h->job, "planning", "waiting for the other hosts", NULL, 0));
	TRY(h->leads ? h->store->ops->make(store_top(h->store), h->path, &h->dir) : find_place(h)); /* ours: of an earlier attempt, too */
	if (h->is_committed)
		return OK;
	for (uint32_t k = 0; k < h->count; k++) /* one who gave up before we came, or came again */
		if (k != h->index)
			TRY(read_end(h, k));
	h->met = true;
	if (pthread_create(&h->beater, NULL, beat, h) != 0)
		return ERR(NO_MEMORY, "cannot start a thread");
	h->beating = true;
	return OK;
}

enum err hosts_open(struct job *j, struct hosts **out)
{
	*out = NULL;
	if (!j->spec.hosts.count)
		return OK;
	struct hosts *h = mem_zalloc(1, sizeof *h);
	NEED(h, "no memory for a save by several hosts");
	*h = (struct hosts){ .job = j, .spec = &j->spec.hosts, .lock = PTHREAD_MUTEX_INITIALIZER,
			     .wake = PTHREAD_COND_INITIALIZER };
	enum err e = meet(h);
	if (e)
		hosts_close(h, e);
	else
		*out = h;
	return e;
}

/* ---- the stage ---- */

static enum err stage(const struct write_store *store, struct job *j, struct staging *out)
{
	const struct store_job by = job_in_store(j);
	struct hosts *h = store->user;
	char name[sizeof out->name];

	snprintf(name, sizeof name, "%s/data", h->name);
	if (!h->leads) {
		TRY(hosts_wait_leader(h, "data-ready"));
		TRY(staging_open_part(&by, &j->spec, name, out));
		out->done = true; /* the leader's to remove */
		return OK;
	}
	TRY(staging_open_as(&by, &j->spec, name, out));
	TRY(store_drop(out->dir, DCP_METADATA)); /* an attempt of ours that broke off may have left these */
	TRY(store_drop(out->dir, MANIFEST_NAME));
	return hosts_put(h, "data-ready", "", 0, false);
}

static enum err publish(const struct write_store *store, struct write *w)
{
	struct hosts *h = store->user;

	TRY(hosts_exchange(h, w->run));
	return h->leads ? write_publish(w) : await_leader(h);
}

struct write_store hosts_store(struct hosts *h)
{
	return (struct write_store){ stage, publish, h->local, true, h };
}

/* ---- the end ---- */

static void put_end(struct hosts *h, enum err e)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(END_MAX);

	if (e)
		job_problem_put(&b, e);
	else
		buf_puts(&b, "{\"ok\":true}");
	if (buf_status(&b) == OK && hosts_put(h, "end", b.p, b.len, false))
		err_clear(); /* the others will miss our beat */
}

/* Has everybody who came seen the end? */
static bool all_ended(struct hosts *h)
{
	struct hosts_view v;
	bool all = true;

	if (look(h, &v) || v.gone)
		err_clear();
	for (uint32_t k = 1; k < h->count && !v.gone; k++)
		all = all && (has(&v, "end", k) || !has(&v, "beat", k));
	view_free(&v);
	return all;
}

static void say_goodbye(struct hosts *h)
{
	int64_t until = clock_mono_ms() + BYE_MS;

	for (int ms = LOOK_FIRST_MS; clock_mono_ms() < until && !all_ended(h); ms = longer(h, ms)) {
		if (job_pause(h->job, ms)) { /* cancelled: no time for that */
			err_clear();
			break;
		}
	}
	if (store_drop(store_top(h->store), h->path))
		err_clear(); /* the next sweep takes it */
}

static enum err drop_own(void *user, const char *name, unsigned char)
{
	const struct hosts *h = user;
	char mine[32];

	hosts_file(mine, "", h->index);
	const char *dash = strrchr(name, '-');
	return dash && strcmp(dash, mine) == 0 ? store_drop(h->dir, name) : OK;
}

/* An object storage takes pages for a place that is removed: this host's go, if they came behind the leader's goodbye. */
static void drop_late_pages(struct hosts *h)
{
	struct hosts_view v;

	if (h->store->ops->fd_of)
		return;
	enum err e = look(h, &v);
	if (!e && v.gone)
		e = store_list(h->dir, drop_own, h);
	view_free(&v);
	if (e)
		err_clear(); /* the next sweep takes them */
}

void hosts_close(struct hosts *h, enum err e)
{
	struct err_info info = *err_last();

	if (!h)
		return;
	bool came = h->dir.store && h->dir.handle >= 0;
	end_beat(h); /* first: no page may come while the place is removed */
	if (came)
		put_end(h, e);
	if (h->leads && came && e != ERR_NOT_DURABLE) /* the meeting place may hold the only copy that is on the disk: swept later */
		say_goodbye(h);
	else if (!h->leads && came)
		drop_late_pages(h);
	store_close(&h->dir);
	rank_segments_free(&h->whole);
	mem_free(h->host_of);
	mem_free(h->local);
	mem_free(h->seen);
	mem_free(h);
	err_restore(&info);
}

/* ---- is the storage shared? ---- */

enum err hosts_token(struct store_at top, const char *name, const char *token, const char *action, bool *seen)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	char mark[96], path[STAGING_BESIDE_MAX];

	snprintf(mark, sizeof mark, HOSTS_PREFIX "%s", token ? token : "");
	TRY(staging_beside(name ? name : "", mark, path));
	if (strcmp(action, "drop") == 0)
		return store_drop(top, path);
	enum err e = strcmp(action, "put") == 0 ? top.store->ops->make(top, path, &dir) : store_enter(top, path, &dir);
	*seen = e == OK;
	return e == ERR_NOT_FOUND ? OK : e;
}
