/* hosts.c: how hosts meet (see hosts.h). Through files, because the storage is the one thing that a shared save needs anyway: no
 * new port, no credentials between hosts, no process group that a trainer's death would break. Directories are opened anew for every look,
 * which makes NFS ask its server; clocks are compared with themselves only. */
#include "runner/hosts_impl.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/num.h"
#include "os/fs.h"
#include "store/commit.h"

enum {
	LOOK_FIRST_MS = 5, LOOK_MS = 200, BEATS_PER_TIMEOUT = 8, BEAT_MAX_MS = 2000, JOIN_TIMEOUTS = 6, BYE_MS = 5000, BYE_FAILED_MS = 2000,
	END_MAX = 64 << 10
};

const char *hosts_name(const struct hosts *h, uint32_t host)
{
	const char *name = json_string_value(json_array_get(json_object_get(h->spec, "names"), host));

	return name ? name : "?";
}

void hosts_file(char out[32], const char *what, uint32_t host)
{
	snprintf(out, 32, "%s-%u", what, host);
}

enum err hosts_put(struct hosts *h, const char *name, const void *bytes, uint64_t n, bool sync)
{
	char tmp[48];
	int fd = -1;

	snprintf(tmp, sizeof tmp, "%s.tmp", name);
	enum err e = fs_open(h->dir, tmp, O_CREAT | O_TRUNC | O_WRONLY, 0644, &fd);
	if (!e)
		e = fs_pwrite(fd, bytes, n, 0, name);
	if (!e && sync)
		e = fs_fsync(fd, name);
	if (!e)
		e = fs_close(&fd);
	fs_drop(&fd);
	return e ? e : fs_rename(h->dir, tmp, h->dir, name);
}

/* ---- the beat: a thread of its own, since planning and syncing take their time ---- */

static void *beat(void *user)
{
	struct hosts *h = user;
	int64_t every = num_min((uint64_t)(h->timeout_ms / BEATS_PER_TIMEOUT), BEAT_MAX_MS);

	pthread_mutex_lock(&h->lock);
	for (uint64_t n = 1; !h->stop; n++) {
		pthread_mutex_unlock(&h->lock);
		if (fs_pwrite(h->beat_fd, &n, sizeof n, 0, "beat") == OK && fs_fsync(h->beat_fd, "beat") != OK)
			err_clear(); /* others will see that it stopped */
		struct timespec until = clock_mono_in(every);
		pthread_mutex_lock(&h->lock);
		if (!h->stop)
			pthread_cond_clockwait(&h->wake, &h->lock, CLOCK_MONOTONIC, &until);
	}
	pthread_mutex_unlock(&h->lock);
	return NULL;
}

static FALLIBLE enum err begin_beat(struct hosts *h)
{
	char name[32];

	hosts_file(name, "beat", h->index);
	TRY(fs_open(h->dir, name, O_CREAT | O_TRUNC | O_WRONLY, 0644, &h->beat_fd));
	if (pthread_create(&h->beater, NULL, beat, h) != 0)
		return ERR(NO_MEMORY, "cannot start a thread");
	h->beating = true;
	return OK;
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

static enum err note_name(void *user, const char *name, unsigned char d_type)
{
	struct hosts_view *v = user;
	char **at;

	(void)d_type;
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
	int dir = -1;

	*v = (struct hosts_view){ 0 };
	enum err e = fs_open_dir(h->parent, h->name, &dir);
	if (!e)
		e = fs_list(dir, note_name, v);
	fs_drop(&dir);
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
	enum err e = fs_read_all(h->dir, name, END_MAX, &bytes, &n);
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
	uint64_t n = 0;
	char name[32];
	int fd = -1;

	hosts_file(name, "beat", host);
	if (fs_open(h->dir, name, O_RDONLY, 0, &fd) == OK && fs_pread(fd, &n, sizeof n, 0, name) == OK && (n != s->beat || !s->at_ms)) {
		s->beat = n;
		s->at_ms = clock_mono_ms();
	}
	fs_drop(&fd);
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

static FALLIBLE enum err wait_for(struct hosts *h, const char *what, uint32_t until, bool *gone)
{
	bool all = false;

	for (int ms = LOOK_FIRST_MS;; ms = ms * 2 < LOOK_MS ? ms * 2 : LOOK_MS) {
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

/* The leader is gone, or silent: did it commit before? */
static bool committed(const struct hosts *h)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	struct err_info info = *err_last();
	int dir = -1;

	bool yes = h->leader_job[0] && fs_open_dir(h->parent, h->target, &dir) == OK &&
		   checkpoint_manifest(dir, MANIFEST_NAME, &m) == OK && m && strcmp(m->job, h->leader_job) == 0;
	fs_drop(&dir);
	err_restore(&info);
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

bool hosts_written(const struct hosts *h)
{
	struct hosts_view v;
	bool there = !h->leads && look(h, &v) == OK;

	there = there && has(&v, "part", h->index);
	if (!h->leads)
		view_free(&v);
	return there;
}

enum err hosts_await_again(struct hosts *h)
{
	TRY(hosts_read_leader(h));
	TRY(await_leader(h));
	h->job->result = json_pack("{s:o, s:b}", "checkpoint", ref_doc(&h->job->spec.target), "recovered", true);
	return h->job->result ? OK : ERR(NO_MEMORY, "no memory for the result");
}

/* ---- begin ---- */

static FALLIBLE enum err read_ranks(struct hosts *h)
{
	const json_t *all = json_object_get(h->spec, "ranks"), *ranks, *rank;
	size_t k, i;

	json_array_foreach(all, k, ranks)
		h->world += (uint32_t)num_min(json_array_size(ranks), HOSTS_WORLD_MAX);
	if (json_array_size(all) != h->count || h->world == 0 || h->world > HOSTS_WORLD_MAX)
		return ERR(VALIDATION_FAILED, "hosts: the ranks of %u hosts, %u in all", (unsigned)json_array_size(all), h->world);
	h->host_of = mem_alloc(h->world * sizeof *h->host_of);
	h->local = mem_zalloc(h->world, sizeof *h->local);
	h->seen = mem_zalloc(h->count, sizeof *h->seen);
	if (!h->host_of || !h->local || !h->seen)
		return ERR(NO_MEMORY, "no memory for %u ranks", h->world);
	memset(h->host_of, 0xFF, h->world * sizeof *h->host_of);
	json_array_foreach(all, k, ranks) {
		json_array_foreach(ranks, i, rank) {
			json_int_t r = json_is_integer(rank) ? json_integer_value(rank) : -1;
			if (r < 0 || r >= h->world || h->host_of[r] != UINT32_MAX)
				return ERR(VALIDATION_FAILED, "hosts: the ranks are not 0 to %u, each once", h->world - 1);
			h->host_of[r] = (uint32_t)k;
			h->local[r] = k == h->index;
		}
	}
	return OK;
}

static bool usable_id(const char *id)
{
	size_t n = id ? strlen(id) : 0;

	return n >= 8 && n <= 64 && strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == n;
}

static FALLIBLE enum err read_spec(struct hosts *h)
{
	const struct ref *target = &h->job->spec.target;
	const char *id = json_string_value(json_object_get(h->spec, "id"));
	json_int_t index = json_integer_value(json_object_get(h->spec, "index"));
	json_int_t seconds = json_integer_value(json_object_get(h->spec, "timeout_s"));
	size_t count = json_array_size(json_object_get(h->spec, "ranks"));

	if (!usable_id(id) || count < 2 || count > HOSTS_MAX || index < 0 || (size_t)index >= count || seconds < 1)
		return ERR(VALIDATION_FAILED, "hosts: id, index, ranks or timeout_s cannot be used");
	if (h->job->dry_run)
		return ERR(VALIDATION_FAILED, "a save by several hosts has no dry run");
	snprintf(h->name, sizeof h->name, HOSTS_PREFIX "%s", id);
	h->count = (uint32_t)count;
	h->index = (uint32_t)index;
	h->leads = index == 0;
	h->timeout_ms = seconds * 1000;
	h->began_ms = clock_mono_ms();
	TRY(roots_find(&h->job->worker->roots, target->storage.p, &h->root));
	TRY(staging_divide(target->name.p, h->parent_path, sizeof h->parent_path, h->target, sizeof h->target));
	return read_ranks(h);
}

static FALLIBLE enum err make_place(struct hosts *h)
{
	int root = h->job->worker->roots.fds[h->root];

	if (h->parent_path[0])
		TRY(fs_mkdirs(root, h->parent_path, &h->parent));
	else
		TRY(fs_open_dir(root, ".", &h->parent));
	enum err e = fs_mkdir(h->parent, h->name, 0755);
	if (e == ERR_CHECKPOINT_EXISTS) /* of an attempt of ours: those who wait there still do */
		err_clear();
	else if (e)
		return e;
	return fs_open_dir(h->parent, h->name, &h->dir);
}

/* The leader makes it; the one who comes first waits. */
static FALLIBLE enum err find_place(struct hosts *h)
{
	int root = h->job->worker->roots.fds[h->root];
	int64_t until = h->began_ms + h->timeout_ms * (h->job->attempt > 1 ? 1 : JOIN_TIMEOUTS);

	for (int ms = LOOK_FIRST_MS;; ms = ms * 2 < LOOK_MS ? ms * 2 : LOOK_MS) {
		fs_drop(&h->parent);
		enum err e = fs_open_dir(root, h->parent_path[0] ? h->parent_path : ".", &h->parent);
		if (!e)
			e = fs_open_dir(h->parent, h->name, &h->dir);
		if (!e || e != ERR_NOT_FOUND)
			return e;
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
	TRY(h->leads ? make_place(h) : find_place(h));
	for (uint32_t k = 0; k < h->count; k++) /* one who gave up before we came, or came again */
		if (k != h->index)
			TRY(read_end(h, k));
	h->met = true;
	return begin_beat(h);
}

enum err hosts_open(struct job *j, struct hosts **out)
{
	const json_t *spec = j->spec.hosts;

	*out = NULL;
	if (!json_is_object(spec))
		return OK;
	struct hosts *h = mem_zalloc(1, sizeof *h);
	if (!h)
		return ERR(NO_MEMORY, "no memory for a save by several hosts");
	*h = (struct hosts){ .job = j, .spec = spec, .parent = -1, .dir = -1, .beat_fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER,
			     .wake = PTHREAD_COND_INITIALIZER };
	enum err e = meet(h);
	if (e)
		hosts_close(h, e);
	else
		*out = h;
	return e;
}

/* ---- the stage ---- */

/* An attempt of ours that broke off may have left these. */
static FALLIBLE enum err unlink_old(int dir, const char *name)
{
	enum err e = fs_unlink(dir, name);

	if (e != ERR_NOT_FOUND)
		return e;
	err_clear();
	return OK;
}

static FALLIBLE enum err open_data(struct hosts *h, struct staging *s)
{
	*s = (struct staging){ .by = job_in_store(h->job), .root = h->root, .parent = -1, .dir = -1, .done = true };
	memcpy(s->parent_path, h->parent_path, sizeof s->parent_path);
	memcpy(s->target, h->target, sizeof s->target);
	snprintf(s->name, sizeof s->name, "%s/data", h->name);
	snprintf(s->path, sizeof s->path, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", s->name);
	TRY(fs_open_dir(h->dir, "data", &s->dir));
	s->in_memory = fs_in_memory(s->dir);
	s->direct = !s->in_memory && fs_direct_ok(s->dir);
	return OK;
}

static enum err stage(void *user, struct job *j, struct staging *out)
{
	const struct store_job by = job_in_store(j);
	struct hosts *h = user;
	char name[sizeof out->name];

	if (h->leads) {
		snprintf(name, sizeof name, "%s/data", h->name);
		TRY(staging_open_as(&by, &h->job->spec, name, out));
		TRY(unlink_old(out->dir, DCP_METADATA));
		TRY(unlink_old(out->dir, MANIFEST_NAME));
	} else {
		TRY(hosts_wait_leader(h, "data-ready"));
		TRY(open_data(h, out));
	}
	return h->leads ? hosts_put(h, "data-ready-0", "", 0, false) : OK;
}

static enum err written(void *user, struct job *j, struct run *run, struct staging *st, bool *ends_out)
{
	struct hosts *h = user;

	(void)j;
	(void)st;
	TRY(hosts_exchange(h, run));
	*ends_out = !h->leads;
	return h->leads ? OK : await_leader(h);
}

struct write_store hosts_store(struct hosts *h)
{
	return (struct write_store){ stage, written, h->local, h };
}

/* ---- the end ---- */

static void put_end(struct hosts *h, enum err e)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(END_MAX);
	char name[32];

	if (e)
		job_problem_put(&b, e);
	else
		buf_puts(&b, "{\"ok\":true}");
	hosts_file(name, "end", h->index);
	if (buf_status(&b) == OK && hosts_put(h, name, b.p, b.len, false))
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

static void say_goodbye(struct hosts *h, bool failed)
{
	int64_t until = clock_mono_ms() + (failed ? BYE_FAILED_MS : BYE_MS);

	for (int ms = LOOK_FIRST_MS; clock_mono_ms() < until && !all_ended(h); ms = ms * 2 < LOOK_MS ? ms * 2 : LOOK_MS) {
		if (job_pause(h->job, ms)) { /* cancelled: no time for that */
			err_clear();
			break;
		}
	}
	if (fs_remove_tree(h->parent, h->name))
		err_clear(); /* the next sweep takes it */
}

void hosts_close(struct hosts *h, enum err e)
{
	struct err_info info = *err_last();

	if (!h)
		return;
	if (h->dir >= 0)
		put_end(h, e);
	if (h->leads && h->dir >= 0 && e != ERR_NOT_DURABLE) /* the meeting place may hold the only copy that is on the disk: swept later */
		say_goodbye(h, e != OK);
	end_beat(h);
	fs_drop(&h->beat_fd);
	fs_drop(&h->dir);
	fs_drop(&h->parent);
	json_decref(h->entry);
	mem_free(h->host_of);
	mem_free(h->local);
	mem_free(h->seen);
	mem_free(h);
	err_restore(&info);
}

/* ---- is the storage shared? ---- */

static FALLIBLE enum err token_in(int parent, const char *mark, const char *action, bool *seen)
{
	int dir = -1;

	if (strcmp(action, "drop") == 0)
		return fs_remove_tree(parent, mark);
	enum err e = strcmp(action, "put") == 0 ? fs_mkdir(parent, mark, 0755) : OK;
	if (e && e != ERR_CHECKPOINT_EXISTS)
		return e;
	e = fs_open_dir(parent, mark, &dir);
	*seen = e == OK;
	fs_drop(&dir);
	return e == ERR_NOT_FOUND ? OK : e;
}

enum err hosts_token(int root, const char *name, const char *token, const char *action, bool *seen)
{
	char parent_path[4096], last[256], mark[96];
	int parent = -1;

	*seen = false;
	TRY(staging_divide(name ? name : "", parent_path, sizeof parent_path, last, sizeof last));
	snprintf(mark, sizeof mark, HOSTS_PREFIX "%s", token ? token : "");
	enum err e = parent_path[0] && strcmp(action, "put") == 0 ? fs_mkdirs(root, parent_path, &parent) :
								     fs_open_dir(root, parent_path[0] ? parent_path : ".", &parent);
	if (!e)
		e = token_in(parent, mark, action, seen);
	fs_drop(&parent);
	return e == ERR_NOT_FOUND ? OK : e;
}
