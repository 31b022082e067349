/* worker.c: see worker.h.
 *
 * A worker ends in one way only: its pidfd becomes readable. Whatever goes wrong before (a bad frame, a closed socket, a deadline)
 * kills it and leaves the rest to that event, so that its owner hears of each worker's end exactly once. A worker whose end goes
 * unnoticed hangs its job and blocks its lane, so a second look every LOOK_MS finds zombies that no event told of. The pid and its
 * start time are in the journal while it runs: the next daemon makes sure that a worker of a killed one is gone before it recovers
 * jobs. */
#include "server/worker.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "ctl/build_id.h"
#include "os/fs.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/events.h"
#include "server/journal.h"
#include "server/loop.h"
#include "server/metrics.h"

enum { HELLO_MS = 15000, LOOK_MS = 2000, COLLECT_MAX = 256, FRAMES_A_TURN = 64, BODY_MAX = 16 << 20 };

struct workers {
	struct worker_parts parts;
	struct worker *first;
	struct loop_timer *look;
	uint64_t last_number;
	int stats_fd;                  /* where gangs keep figures of tensors (runner/stats_cache.h); -1: nowhere */
};

/* false: there is no such process, or no /proc. */
static bool read_proc(pid_t pid, const char *name, char *text, size_t cap)
{
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd >= 0 ? read(fd, text, cap - 1) : -1;
	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = '\0';
	return n > 0;
}

/* Field 22 of /proc/PID/stat: with it a pid names one process for ever. 0: there is none. */
static uint64_t start_ticks(pid_t pid)
{
	char text[1024];
	unsigned long long ticks = 0;

	if (!read_proc(pid, "stat", text, sizeof text))
		return 0;
	const char *p = strrchr(text, ')'); /* the name may hold anything */
	if (p && p[1] && (p[2] == 'Z' || p[2] == 'X'))
		return 0; /* ended; only its parent has not noticed */
	for (int field = 2; p && field < 22; field++)
		p = strchr(p + 1, ' ');
	return p && sscanf(p, "%llu", &ticks) == 1 ? ticks : 0;
}

static uint64_t number_after(const char *text, const char *key)
{
	const char *at = strstr(text, key);
	unsigned long long v = 0;

	return at && sscanf(at + strlen(key), "%llu", &v) == 1 ? v : 0;
}

bool worker_moved(struct worker *w)
{
	char text[4096];

	if (!read_proc(w->child.pid, "status", text, sizeof text))
		return false;
	uint64_t switches = number_after(text, "\nvoluntary_ctxt_switches:") + number_after(text, "\nnonvoluntary_ctxt_switches:");
	bool moved = strstr(text, "\nState:\tR") || switches != w->switches;
	w->switches = switches;
	return moved;
}

void worker_set(struct worker *w, const char *state, const char *job)
{
	snprintf(w->state, sizeof w->state, "%s", state);
	snprintf(w->job, sizeof w->job, "%s", job ? job : "");
}

/* ---- ending ---- */

/* A worker that cannot be killed is one that is gone: nothing follows from a failure. */
static void kill_quietly(const struct worker *w, int signo)
{
	if (spawn_kill(w->exit ? watch_fd(w->exit) : w->child.pidfd, signo) != OK)
		log_err("cannot kill a worker", "worker", w->id, NULL);
}

void worker_kill(struct worker *w, enum err why)
{
	if (w->killed)
		return;
	w->killed = true;
	w->lost = why;
	if (why)
		w->lost_info = *err_last();
	watch_free(&w->control);
	loop_timer_stop(&w->hello_timer);
	kill_quietly(w, SIGKILL);
}

void worker_disown(struct worker *w)
{
	w->owner = NULL;
	worker_set(w, "ending", NULL);
	worker_kill(w, OK);
}

bool worker_await_end(const struct worker *w, int ms)
{
	struct pollfd end = { .fd = w->exit ? watch_fd(w->exit) : w->child.pidfd, .events = POLLIN };

	return poll(&end, 1, ms) > 0;
}

static void worker_free(struct worker *w)
{
	list_remove(&w->all->first, w);
	loop_timer_stop(&w->hello_timer);
	frame_conn_free(w->conn);
	watch_free(&w->control);
	watch_free(&w->exit);
	spawn_release(&w->child);
	mem_free(w);
}

static enum err describe_end(struct worker *w, const struct spawn_exit *how)
{
	char what[64];

	if (how->signalled)
		snprintf(what, sizeof what, "signal %d (SIG%s)", how->code, sigabbrev_np(how->code) ? sigabbrev_np(how->code) : "?");
	else
		snprintf(what, sizeof what, "exit code %d", how->code);
	if (!w->killed || !w->lost) {
		w->lost = ERR(WORKER_LOST, "worker %s (pid %d) ended with %s", w->id, (int)w->child.pid, what);
		return err_expected(w->lost, "", what);
	}
	err_restore(&w->lost_info);
	return w->lost;
}

static void report_loss(struct worker *w, const struct spawn_exit *how)
{
	json_t *doc = json_pack("{s:s, s:i, s:s*, s:b, s:i}", "worker", w->id, "pid", (int)w->child.pid, "job",
				w->job[0] ? w->job : NULL, "signalled", how->signalled, how->signalled ? "signal" : "exit_code",
				how->code);

	log_err("worker lost", "worker", w->id, "job", w->job, NULL);
	events_emit(w->all->parts.events, "worker.lost", w->job[0] ? w->job : NULL, doc);
	metrics_add(w->all->parts.metrics, "dcpd_workers_lost_total", "", 1);
}

static void forget_worker(struct workers *all, pid_t pid)
{
	struct journal_txn *t = journal_txn_new(all->parts.journal);

	journal_delete_worker(t, pid);
	journal_commit(all->parts.journal, t, NULL, NULL);
}

/* The owner may start other workers from within `ended`: until worker_free, the pidfd stays open and its number taken. */
static void on_exit_event(void *user)
{
	struct worker *w = user;
	struct spawn_exit how = { 0 };
	bool ended = false;

	if (spawn_reap(watch_fd(w->exit), 0, &ended, &how) != OK)
		log_err("it is not known how a worker ended", "worker", w->id, NULL); /* it has: something else collected it */
	else if (!ended)
		return;
	forget_worker(w->all, w->child.pid);
	bool ours = w->killed && !w->lost && !w->hung_up; /* one of a gang that is being ended: no loss of its own */
	enum err e = describe_end(w, &how);
	if (w->owner) {
		struct err_info info = *err_last();
		if (!ours)
			report_loss(w, &how);
		err_restore(&info);
		w->ops->ended(w, e);
	}
	worker_free(w);
}

static struct worker *worker_of(const struct workers *all, pid_t pid)
{
	struct worker *w = all->first;

	while (w && w->child.pid != pid)
		w = w->next;
	return w;
}

/* Finds every zombie child, whatever the reason why no event told of it: a worker's end that is lost would hang its job for ever.
 * A worker gets one look of grace, since its event may be due in this turn of the loop. A child that is no worker is one whose start
 * failed halfway, or an orphan if the daemon is its container's init. */
static void look_for_ended(void *user)
{
	struct workers *all = user;
	pid_t pid;

	for (int i = 0; i < COLLECT_MAX && (pid = spawn_find_ended()) != 0; i++) {
		struct worker *w = worker_of(all, pid);
		if (!w) {
			spawn_collect(pid);
			forget_worker(all, pid);
		} else if (!w->seen_ended) {
			w->seen_ended = true;
			return;
		} else {
			log_warn("no event told of a worker's end", "worker", w->id, "job", w->job, NULL);
			on_exit_event(w);
		}
	}
}

/* ---- talking ---- */

static void on_write_event(void *user)
{
	struct worker *w = user;
	bool empty = false;

	enum err e = frame_flush(w->conn, &empty);
	e = e ?: watch_writes(w->control, !empty);
	if (e)
		worker_kill(w, e);
}

void worker_send(struct worker *w, uint16_t type, uint64_t generation, const json_t *body, const int *fds, uint32_t fd_count)
{
	if (w->killed)
		return;
	char *text = jtext_of(body);
	enum err e = body && !text ? ERR(NO_MEMORY, "cannot write a message") :
				     frame_send(w->conn, type, generation, text ? str_of(text) : STR("{}"), fds, fd_count);
	mem_free(text); /* jansson's allocator is mem_*: server_new */
	e = e ?: watch_writes(w->control, frame_wants_write(w->conn));
	if (e)
		worker_kill(w, e);
}

static FALLIBLE enum err check_roots(const json_t *body)
{
	const json_t *root;
	size_t i;

	json_array_foreach(json_object_get(body, "roots"), i, root) {
		if (json_is_true(json_object_get(root, "ok")))
			continue;
		const char *name = json_string_value(json_object_get(root, "name"));
		enum err e = errdoc_restore(json_object_get(root, "problem"));
		struct err_info info = *err_last();
		err_record(e, 0, info.place, "storage %s: %.900s", name ? name : "?", info.text);
		return e;
	}
	return OK;
}

static void take_hello(struct worker *w, const json_t *body)
{
	const char *build = json_string_value(json_object_get(body, "build_id"));
	const char *engine = json_string_value(json_object_get(body, "engine"));
	const char *sandbox = json_string_value(json_object_get(body, "sandbox"));
	const char *unconfined = json_string_value(json_object_get(body, "unconfined"));

	if (!build || strcmp(build, BUILD_ID) != 0) {
		enum err e = ERR(PROTOCOL, "the worker program is of another build: %.60s", build ? build : "?");
		worker_kill(w, err_expected(e, BUILD_ID, build ? build : "?"));
		return;
	}
	loop_timer_stop(&w->hello_timer);
	w->greeted = true;
	snprintf(w->engine, sizeof w->engine, "%s", engine ? engine : "");
	snprintf(w->sandbox, sizeof w->sandbox, "%s", sandbox ? sandbox : "none");
	snprintf(w->unconfined, sizeof w->unconfined, "%s", unconfined ? unconfined : "");
	w->landlock = (int)json_integer_value(json_object_get(body, "landlock"));
	w->seccomp = json_is_true(json_object_get(body, "seccomp"));
	worker_set(w, "idle", NULL);
	w->ops->ready(w, check_roots(body), body);
}

static void take_frame(struct worker *w, const struct frame *f)
{
	CLEANUP(json_decrefp) json_t *body = NULL;
	enum err e = f->json.n > BODY_MAX ? OK : jtext_parse(f->json, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &body);

	if (e == ERR_NO_MEMORY) {
		worker_kill(w, e);
	} else if (!json_is_object(body)) {
		worker_kill(w, ERR(PROTOCOL, "worker %s sent a message of %zu bytes that is no JSON object", w->id, f->json.n));
	} else if (!w->greeted) {
		if (f->type == FRAME_HELLO)
			take_hello(w, body);
		else
			worker_kill(w, ERR(PROTOCOL, "worker %s did not say HELLO first", w->id));
	} else {
		w->ops->frame(w, f, body);
	}
}

static void on_read_event(void *user)
{
	struct worker *w = user;
	struct frame f = { 0 };

	for (int i = 0; i < FRAMES_A_TURN && !w->killed && w->owner; i++) {
		bool got = false, closed = false;
		enum err e = frame_read(w->conn, &f, &got, &closed);
		if (e) {
			worker_kill(w, e);
		} else if (closed) {
			watch_free(&w->control); /* its end follows */
			w->killed = w->hung_up = true;
			kill_quietly(w, SIGTERM);
			return;
		} else if (got) {
			take_frame(w, &f);
		} else {
			return;
		}
	}
}

static void on_hello_late(void *user)
{
	struct worker *w = user;

	w->hello_timer = NULL;
	worker_kill(w, ERR(STORAGE_STALLED, "worker %s did not come up in %d s", w->id, HELLO_MS / 1000));
}

/* ---- starting ---- */

static json_t *make_hello(const struct workers *all, const struct worker_spec *spec)
{
	json_t *roots = json_array();

	for (uint32_t i = 0; i < spec->root_count; i++) {
		const struct worker_root *r = &spec->roots[i];
		json_int_t gid = r->file_gid == CONFIG_NO_GROUP ? (json_int_t)-1 : (json_int_t)r->file_gid;
		if (json_array_append_new(roots, json_pack("{s:s, s:s, s:i, s:I, s:O*}", "name", r->name, "path", r->path, "file_mode",
							   (int)r->file_mode, "file_gid", gid, "options", r->options)) != 0) {
			json_decref(roots);
			return NULL;
		}
	}
	return json_pack("{s:s, s:s, s:i, s:i, s:o, s:s, s:I, s:b, s:s, s:b}", "build_id", BUILD_ID, "role", spec->role, "index",
			 (int)spec->index, "count", (int)spec->count, "roots", roots, "io_engine", all->parts.config->io_engine,
			 "memory_bytes", (json_int_t)spec->memory_bytes, "network", spec->network, "listen", all->parts.config->comm_listen,
			 "device", spec->device);
}

static FALLIBLE enum err attach(struct worker *w)
{
	struct event_base *base = w->all->parts.base;

	TRY(watch_new(base, &w->child.pidfd, on_exit_event, NULL, w, &w->exit));
	TRY(watch_reads(w->exit, true));
	TRY(watch_new(base, &w->child.control_fd, on_read_event, on_write_event, w, &w->control));
	TRY(watch_reads(w->control, true));
	TRY(frame_conn_new(watch_fd(w->control), &w->conn));
	loop_timer_start(w->all->parts.loop, HELLO_MS, on_hello_late, w, &w->hello_timer);
	return OK;
}

static void remember_pid(struct worker *w)
{
	struct journal_txn *t = journal_txn_new(w->all->parts.journal);

	journal_put_worker(t, w->child.pid, start_ticks(w->child.pid));
	journal_commit(w->all->parts.journal, t, NULL, NULL);
}

static void name_storages(struct worker *w, const struct worker_spec *spec)
{
	size_t n = 0;

	for (uint32_t i = 0; i < spec->root_count && n < sizeof w->storages; i++)
		n += (size_t)snprintf(w->storages + n, sizeof w->storages - n, "%s%s", i ? "," : "", spec->roots[i].name);
}

FALLIBLE enum err worker_start(struct workers *all, const struct worker_spec *spec, struct worker **out)
{
	char fd_text[16];
	struct worker *w = mem_zalloc(1, sizeof *w);

	NEED(w, "cannot start a worker");
	snprintf(fd_text, sizeof fd_text, "%d", SPAWN_CONTROL_FD);
	char *argv[] = { (char *)all->parts.config->worker_path, (char *)"--control-fd", fd_text, NULL };
	struct spawn_spec how = { .path = all->parts.config->worker_path, .argv = argv, .log_fd = -1 };
	enum err e = spawn_start(&how, &w->child);
	if (e) {
		mem_free(w);
		return e;
	}
	w->all = all;
	w->owner = spec->owner;
	w->ops = spec->ops;
	w->index = spec->index;
	w->role = spec->role;
	w->device = spec->device;
	w->number = ++all->last_number;
	w->started_ms = clock_wall_ms();
	snprintf(w->id, sizeof w->id, "%s-%" PRIu64, spec->role, w->number);
	worker_set(w, "starting", NULL);
	name_storages(w, spec);
	w->next = all->first;
	all->first = w;
	remember_pid(w);
	e = attach(w);
	if (e) {
		struct err_info info = *err_last();
		kill_quietly(w, SIGKILL);
		worker_free(w); /* its socket closes too, and look_for_ended collects it */
		err_restore(&info);
		return e;
	}
	json_t *hello = make_hello(all, spec);
	const int *keep_fd = strcmp(spec->role, "gang") == 0 ? &all->stats_fd : spec->keep_fd;
	if (hello)
		worker_send(w, FRAME_HELLO, 0, hello, keep_fd, keep_fd && *keep_fd >= 0);
	else
		worker_kill(w, ERR(NO_MEMORY, "cannot greet a worker"));
	json_decref(hello);
	*out = w;
	return OK;
}

/* ---- all of them ---- */

/* Without the file, gangs keep what they have counted as long as they are warm. */
int worker_open_kept(const struct config *config, const char *name)
{
	char path[CONFIG_PATH_MAX + 80];

	snprintf(path, sizeof path, "%s/%s.cache", config->state_dir, name);
	return open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
}

FALLIBLE enum err workers_new(const struct worker_parts *parts, struct workers **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot keep workers");
	(*out)->parts = *parts;
	(*out)->stats_fd = worker_open_kept(parts->config, "stats");
	return loop_every(parts->loop, LOOK_MS, look_for_ended, *out, &(*out)->look);
}

void workers_free(struct workers *all)
{
	if (!all)
		return;
	loop_timer_stop(&all->look);
	for (struct worker *w = all->first; w; w = w->next)
		kill_quietly(w, SIGKILL);
	while (all->first) {
		struct worker *w = all->first;
		struct spawn_exit how;
		bool ended = false;
		if (spawn_reap(watch_fd(w->exit), 1000, &ended, &how) == OK && ended && all->parts.journal)
			forget_worker(all, w->child.pid);
		worker_free(w);
	}
	fs_drop(&all->stats_fd);
	mem_free(all);
}

uint32_t workers_count(const struct workers *all, const char *role, const char *state)
{
	uint32_t n = 0;

	for (const struct worker *w = all->first; w; w = w->next)
		n += (!role || strcmp(w->role, role) == 0) && (!state || strcmp(w->state, state) == 0);
	return n;
}

FALLIBLE enum err worker_put_page(const struct workers *all, uint32_t most, uint64_t before, struct buf *out)
{
	const struct worker *w = all->first;
	char stamp[CLOCK_TEXT_MAX];
	const char *comma = "";
	uint64_t last = 0;

	buf_puts(out, "{\"workers\":[");
	while (w && w->number >= before)
		w = w->next;
	for (; w && most > 0; w = w->next, most--) {
		last = w->number;
		buf_printf(out, "%s{\"id\":\"%s\",\"pid\":%d,\"role\":\"%s\",\"index\":%u,\"state\":\"%s\",", comma, w->id,
			   (int)w->child.pid, w->role, w->index, w->state);
		if (w->job[0])
			buf_printf(out, "\"job\":\"%s\",", w->job);
		buf_puts(out, "\"storages\":[");
		for (const char *p = w->storages, *c = ""; *p; c = ",") {
			size_t n = strcspn(p, ",");
			buf_printf(out, "%s\"%.*s\"", c, (int)n, p);
			p += n + (p[n] == ',');
		}
		buf_json_member(out, "],\"engine\":", str_of(w->engine));
		buf_printf(out, ",\"sandbox\":");
		buf_json_str(out, str_of(w->sandbox));
		buf_printf(out, ",\"landlock\":%d,\"seccomp\":%s,\"started_at\":\"%s\"}", w->landlock,
			   w->seccomp ? "true" : "false", clock_text(w->started_ms, stamp));
		comma = ",";
	}
	buf_putc(out, ']');
	if (w)
		buf_printf(out, ",\"next_page_token\":\"%" PRIu64 "\"", last);
	buf_putc(out, '}');
	return buf_status(out);
}

/* ---- those of a killed daemon ---- */

struct sweep {
	pid_t pids[4096];
	uint64_t ticks[4096];
	uint32_t count;
};

static enum err note_pid(void *user, pid_t pid, uint64_t ticks)
{
	struct sweep *sw = user;

	if (sw->count < sizeof sw->pids / sizeof *sw->pids && ticks && start_ticks(pid) == ticks) {
		sw->pids[sw->count] = pid;
		sw->ticks[sw->count++] = ticks;
	}
	return OK;
}

static enum err forget_pid(void *user, pid_t pid, uint64_t)
{
	journal_delete_worker(user, pid);
	return OK;
}

/* Between the check and the signal the pid could be another's: the pidfd is opened first and the check repeated. */
static void kill_old(pid_t pid, uint64_t ticks)
{
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);

	if (fd >= 0 && start_ticks(pid) == ticks)
		(void)syscall(SYS_pidfd_send_signal, fd, SIGKILL, NULL, 0);
	if (fd >= 0)
		close(fd);
}

void workers_sweep(struct workers *all)
{
	CLEANUP(mem_free_ptr) struct sweep *sw = mem_zalloc(1, sizeof *sw);
	struct journal_txn *t = journal_txn_new(all->parts.journal);

	if (!sw || journal_read_workers(all->parts.journal, note_pid, sw) != OK ||
	    journal_read_workers(all->parts.journal, forget_pid, t) != OK)
		log_err("cannot read the pids of an earlier start", NULL);
	for (uint32_t i = 0; sw && i < sw->count; i++) {
		kill_old(sw->pids[i], sw->ticks[i]);
		for (int turn = 0; turn < 250 && start_ticks(sw->pids[i]) == sw->ticks[i]; turn++)
			nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
	}
	journal_commit(all->parts.journal, t, NULL, NULL);
}
