/* main.c: the worker process: says HELLO, closes its sandbox, then does jobs (in a gang) or answers questions (as a look-up worker) until
 * its control socket closes. One thread; the order of messages is in ctl/README.md. */
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/log.h"
#include "comm/nccl.h"
#include "ctl/build_id.h"
#include "query/capabilities.h"
#include "query/lookup_kept.h"
#include "query/lookup_tree.h"
#include "runner/gang_run.h"
#include "session/gpu.h"
#include "session/group.h"
#include "session/job.h"

#include "os/fs.h"
#include "os/sandbox.h"
#include "runner/plan_cache.h"
#include "runner/stats_cache.h"
#include "store/trash.h"

enum { GANG_NICE = 5, IO_DEPTH = 32, WAIT_FOREVER = -1, SWEEP_MS = 2000, STUCK_MS = 2000, PROBLEM_ROOM = 64,
       MEMORY_MIN = 16 << 20, DATA_MIN = 1 << 30,
       HEAP_KEPT = 4 << 20 };

static FALLIBLE enum err open_stores(struct worker *w, const json_t *roots)
{
	if (json_array_size(roots) > STORES_MAX)
		return ERR(LIMIT_EXCEEDED, "%zu storage roots", json_array_size(roots));
	for (size_t i = 0; i < json_array_size(roots); i++) {
		const json_t *root = json_array_get(roots, i);
		const json_t *mode = json_object_get(root, "file_mode"), *gid = json_object_get(root, "file_gid");
		const char *name = json_string_value(json_object_get(root, "name"));
		const char *path = json_string_value(json_object_get(root, "path"));
		struct store *s = &w->stores.v[w->stores.count++];
		if (!name || !path || strlen(name) >= sizeof s->name)
			return ERR(PROTOCOL, "a root without name or path");
		memcpy(s->name, name, strlen(name) + 1);
		s->index = (uint32_t)i;
		/* without a word about it, nobody else can read what is made there */
		const struct store_place place = { path, json_is_integer(mode) ? (mode_t)json_integer_value(mode) & 0777 : 0600,
						   json_is_integer(gid) ? (gid_t)json_integer_value(gid) : (gid_t)-1,
						   json_object_get(root, "options") };
		if (store_open(s, &place)) {
			s->error = *err_last();
			if (s->error.code == ERR_NOT_FOUND)
				s->error.code = ERR_STORAGE_GONE;
		}
	}
	return OK;
}

static enum io_engine_kind engine_kind(const json_t *hello)
{
	const char *name = json_string_value(json_object_get(hello, "io_engine"));

	if (name && strcmp(name, "io_uring") == 0)
		return IO_URING;
	return name && strcmp(name, "threads") == 0 ? IO_THREADS : IO_AUTO;
}

static FALLIBLE enum err close_sandbox(const struct worker *w, const json_t *hello_roots, struct sandbox_done *done)
{
	struct sandbox_root roots[STORES_MAX];
	uint16_t ports[STORES_MAX * STORE_PORTS_MAX];
	const char *readable[STORES_MAX * STORE_READABLE_MAX + 1] = { NULL };
	uint32_t readable_count = 0;
	/* a plan that a hostile .metadata asks for ends in an error of ours, not in the host's memory being used up */
	uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
	struct sandbox_spec spec = { .roots = roots, .data_bytes = memory < DATA_MIN ? DATA_MIN : memory, .network = w->network,
				     .device = w->device, .ports = ports, .readable = readable };

	for (uint32_t i = 0; i < w->stores.count; i++) {
		const json_t *r = json_array_get(hello_roots, i), *gid = json_object_get(r, "file_gid");
		const char *path = json_string_value(json_object_get(r, "path"));
		const struct store *s = &w->stores.v[i];
		if (s->top < 0)
			continue;
		memcpy(ports + spec.port_count, s->ports, s->port_count * sizeof *ports);
		spec.port_count += s->port_count;
		for (uint32_t k = 0; k < STORE_READABLE_MAX && s->readable[k]; k++)
			readable[readable_count++] = s->readable[k];
		if (!s->ops->fd_of)
			continue;
		roots[spec.root_count++] = (struct sandbox_root){ s->ops->fd_of(store_top(s)), true, path };
		spec.gives_groups = spec.gives_groups || (json_is_integer(gid) && json_integer_value(gid) >= 0 &&
							  json_integer_value(gid) != getegid());
	}
	return sandbox_enter(&spec, done);
}

static FALLIBLE enum err answer_hello(struct worker *w, const struct sandbox_done *done)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	buf_printf(&b, "{\"build_id\":\"%s\",\"pid\":%d,\"engine\":\"%s\",", BUILD_ID, (int)getpid(), io_engine_name(w->io));
	buf_printf(&b, "\"sandbox\":\"%s\",\"landlock\":%d,\"seccomp\":%s", done->kind, done->landlock_abi,
		   done->seccomp ? "true" : "false");
	if (done->why[0]) {
		buf_json_member(&b, ",\"unconfined\":", str_of(done->why));
	}
	buf_puts(&b, ",\"roots\":[");
	for (uint32_t i = 0; i < w->stores.count; i++) {
		const struct store *s = &w->stores.v[i];
		buf_printf(&b, "%s{\"name\":\"%s\",\"ok\":%s", i ? "," : "", s->name, s->top >= 0 ? "true" : "false");
		if (s->top < 0) {
			err_restore(&s->error);
			buf_puts(&b, ",\"problem\":");
			job_problem_put(&b, s->error.code);
		}
		buf_puts(&b, "}");
	}
	buf_puts(&b, "]}");
	TRY(buf_status(&b));
	return frame_send(w->conn, FRAME_HELLO, 0, (struct str){ (char *)b.p, b.len }, NULL, 0);
}

/* A probe opens drivers, says what it found, and waits for its end. No byte of others gets here: it needs no sandbox, and has none. */
static FALLIBLE enum err answer_probe(struct worker *w)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	log_init("probe", false, LOG_LEVEL_INFO);
	buf_printf(&b, "{\"build_id\":\"%s\",\"pid\":%d,\"engine\":\"\",", BUILD_ID, (int)getpid());
	buf_puts(&b, "\"sandbox\":\"none\",\"landlock\":0,\"seccomp\":false,\"roots\":[],");
	capabilities_put(&b);
	buf_putc(&b, '}');
	TRY(buf_status(&b));
	return frame_send(w->conn, FRAME_HELLO, 0, (struct str){ (char *)b.p, b.len }, NULL, 0);
}

static FALLIBLE enum err start(struct worker *w, const json_t *hello)
{
	const char *build = json_string_value(json_object_get(hello, "build_id"));
	const char *role = json_string_value(json_object_get(hello, "role"));
	struct sandbox_done done = { 0 };
	char name[32];

	if (!build || strcmp(build, BUILD_ID) != 0)
		return ERR(PROTOCOL, "the coordinator is of build %s, this worker of %s", build ? build : "?", BUILD_ID);
	if (role && strcmp(role, "probe") == 0)
		return answer_probe(w);
	bool copier = role && (strcmp(role, "device") == 0 || strcmp(role, "holder") == 0);
	w->lookup = copier || (role && strcmp(role, "lookup") == 0);
	w->index = (uint32_t)json_integer_value(json_object_get(hello, "index"));
	w->count = (uint32_t)json_integer_value(json_object_get(hello, "count"));
	w->count = w->count ? w->count : 1;
	w->memory_bytes = (uint64_t)json_integer_value(json_object_get(hello, "memory_bytes"));
	w->memory_bytes = w->memory_bytes < MEMORY_MIN ? MEMORY_MIN : w->memory_bytes;
	const char *listen = json_string_value(json_object_get(hello, "listen"));
	w->device = json_is_true(json_object_get(hello, "device"));
	w->network = json_is_true(json_object_get(hello, "network"));
	snprintf(w->listen, sizeof w->listen, "%s", listen ? listen : "");
	snprintf(name, sizeof name, "%s %u", copier ? role : w->lookup ? "lookup" : "worker", w->index);
	log_init(name, json_is_true(json_object_get(hello, "log_json")), LOG_LEVEL_INFO);
	/* the coordinator's answers and the trainer's steps come before our bytes when the CPU is short; 0 and -1 are both fine */
	if (!w->lookup && nice(GANG_NICE) < 0)
		errno = 0;
	umask(0); /* modes are those of the storages */
	TRY(open_stores(w, json_object_get(hello, "roots")));
	TRY(io_engine_open(engine_kind(hello), IO_DEPTH, &w->io));
	TRY(close_sandbox(w, json_object_get(hello, "roots"), &done));
	return answer_hello(w, &done);
}

/* ---------------------------------------------------------------------------------------------------------- jobs */

static enum err (*const operations[JOB_KIND_COUNT])(struct job *j) = {
#define KIND(NAME, name, number, lane, reads, writes, traits, operation, ...) [number] = operation##_job,
#include "spec/kinds.def"
#undef KIND
};

static FALLIBLE enum err take_fds(struct job *j, struct frame *f)
{
	uint32_t index;

	for (uint32_t i = 0; i < f->fd_count; i++) {
		TRY(job_add_fd(j, f->fds[i], &index));
		f->fds[i] = -1;
	}
	j->segment_count = j->fd_count;
	return OK;
}

/* Stores are opened once. A root that was removed since would answer that no checkpoint is there, which is not the same. */
static FALLIBLE enum err check_stores(const struct worker *w)
{
	for (uint32_t i = 0; i < w->stores.count; i++)
		if (w->stores.v[i].top >= 0)
			TRY(w->stores.v[i].ops->check(&w->stores.v[i]));
	return OK;
}

static FALLIBLE enum err run_job(struct job *j, struct frame *f)
{
	j->id = json_string_value(json_object_get(j->doc, "job"));
	const char *kind = json_string_value(json_object_get(j->doc, "kind"));
	json_t *request = json_object_get(j->doc, "spec");
	j->attempt = (uint64_t)json_integer_value(json_object_get(j->doc, "attempt"));
	j->mark = json_string_value(json_object_get(json_object_get(j->doc, "owner"), "mark"));
	j->turn = (uint32_t)json_integer_value(json_object_get(json_object_get(j->doc, "owner"), "turn"));
	j->dry_run = json_is_true(json_object_get(j->doc, "dry_run"));
	j->uid = (uid_t)json_integer_value(json_object_get(j->doc, "uid"));
	j->admin = json_is_true(json_object_get(j->doc, "admin"));
	if (!j->id || !kind || !request)
		return ERR(PROTOCOL, "a job without id, kind or spec");
	if (!kind_parse(str_of(kind), &j->kind))
		return ERR(UNKNOWN_KIND, "a job of kind '%s'", kind);
	TRY(field_put_default(request, "kind", json_string(kind)));
	TRY(spec_read(request, &j->spec));
	j->request = request;
	TRY(take_fds(j, f));
	TRY(job_read_state_dicts(j));
	TRY(check_stores(j->worker));
	return operations[j->kind](j);
}

/* The problem, with what the job adds to it; without that, if it is more than a frame holds. */
static FALLIBLE enum err report_failure(struct job *j, enum err e)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(FRAME_JSON_MAX);

	job_problem_put(&b, e);
	char *more = jtext_of(j->error_more);
	if (more && b.len + strlen(more) + PROBLEM_ROOM <= FRAME_JSON_MAX) {
		b.len--; /* its closing brace */
		buf_printf(&b, ",\"more\":%s}", more);
	}
	mem_free(more);
	TRY(buf_status(&b));
	return job_send(j, FRAME_FAILED, (struct str){ (char *)b.p, b.len }, NULL, 0);
}

static FALLIBLE enum err report_job(struct job *j, enum err e)
{
	struct err_info info = *err_last();

	TRY(job_tell_io(j->worker));
	err_restore(&info);
	if (e)
		return report_failure(j, e);
	CLEANUP(json_decrefp) json_t *done = json_object();
	if (j->result)
		json_object_set(done, j->dry_run ? "plan" : "result", j->result);
	if (trash_ms() > 0)
		json_object_set_new(done, "trash_ms", json_integer(trash_ms()));
	return job_send_json(j, FRAME_DONE, done);
}

/* An NCCL group of this process does not end, and neither would its ordinary exit. The coordinator hears the job's end, and starts another
 * gang. */
static void end_stuck(struct worker *w)
{
	int64_t end = clock_mono_ms() + STUCK_MS;
	struct frame f;
	bool got, closed = false;

	while (w->conn && !closed && frame_wants_write(w->conn) && clock_mono_ms() < end)
		if (frame_wait(w->conn, 100, &f, &got, &closed) != OK)
			break;
	_exit(1);
}

static FALLIBLE enum err handle_job(struct worker *w, struct frame *f)
{
	struct job j = { .worker = w, .generation = f->generation };

	gpu_sweep(w);
	enum err e = jtext_parse(f->json, 0, &j.doc);
	if (e)
		e = e == ERR_NO_MEMORY ? e : ERR(PROTOCOL, "a frame that is not JSON");
	else if (f->type == FRAME_JOB)
		e = run_job(&j, f);
	else
		e = gang_run_join(&j, f->fds, f->fd_count);
	e = report_job(&j, e);
	if (comm_nccl_stuck())
		end_stuck(w);
	job_free(&j);
	seg_leavings_unmap(&w->leavings);
	mem_trim(HEAP_KEPT);
	return e;
}

static FALLIBLE enum err handle_lookup(struct worker *w, struct frame *f)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(FRAME_JSON_MAX);
	json_t *q;
	CLEANUP(fs_drop) int fd = -1;

	enum err e = jtext_parse(f->json, 0, &q);
	if (e != ERR_NO_MEMORY)
		e = q ? check_stores(w) : ERR(PROTOCOL, "a question that is not JSON");
	e = e ?: lookup_answer(w, q, f->fds, f->fd_count, &b, &fd);
	if (e) {
		buf_free(&b);
		buf_puts(&b, "{\"problem\":");
		job_problem_put(&b, e);
		buf_puts(&b, "}");
	}
	e = buf_status(&b);
	e = e ?: job_tell_io(w);
	e = e ?: frame_send(w->conn, FRAME_ANSWER, f->generation, (struct str){ (char *)b.p, b.len }, &fd, fd >= 0);
	json_decref(q);
	return e;
}

static FALLIBLE enum err handle(struct worker *w, struct frame *f)
{
	switch (f->type) {
	case FRAME_JOB:
	case FRAME_RUN:
		return handle_job(w, f);
	case FRAME_LOOKUP:
		return handle_lookup(w, f);
	case FRAME_CANCEL: /* of a job that has ended here already */
	case FRAME_PEERS_DONE:
	case FRAME_COMMIT_OK:
	case FRAME_SEGMENTS:
	case FRAME_RENDEZVOUS_ALL:
	case FRAME_SEALED:
		return OK;
	default:
		return ERR(PROTOCOL, "a frame of type %u", f->type);
	}
}

static FALLIBLE enum err next_frame(struct worker *w, struct frame *f, bool *closed)
{
	bool got = false;

	*closed = false;
	while (!got && !*closed) {
		bool empty;
		if (frame_wants_write(w->conn))
			TRY(frame_flush(w->conn, &empty));
		TRY(frame_wait(w->conn, frame_wants_write(w->conn) ? 10 : w->pins.n ? SWEEP_MS : WAIT_FOREVER, f, &got, closed));
		if (!got)
			gpu_sweep(w); /* what is page-locked stays in memory, also when its name is gone */
	}
	return OK;
}

/* The file has what workers before have found out; this one adds to it. */
static void keep_in(struct worker *w, int fd)
{
	if (w->lookup)
		lookup_kept_in(w->tree->kept, fd);
	else
		stats_cache_keep_in(w->stats, fd);
}

static FALLIBLE enum err serve(struct worker *w, int control_fd)
{
	struct frame f;
	bool closed;
	json_t *hello = NULL;

	TRY(frame_conn_new(control_fd, &w->conn));
	TRY(next_frame(w, &f, &closed));
	if (closed)
		return OK;
	enum err e = f.type == FRAME_HELLO ? jtext_parse(f.json, 0, &hello) : ERR(PROTOCOL, "the first frame is no HELLO");
	e = e ?: start(w, hello);
	if (!e && f.fd_count) {
		keep_in(w, f.fds[0]);
		f.fds[0] = -1;
	}
	json_decref(hello);
	while (!e) {
		e = next_frame(w, &f, &closed);
		if (e || closed)
			break;
		e = handle(w, &f);
	}
	return e;
}

int main(int argc, char **argv)
{
	static struct worker w;
	static struct plan_cache plans;
	static struct lookup_cache kept;
	static struct lookup_kept known;
	static struct lookup_tree tree = { .kept = &known };
	static struct stats_cache stats;

	if (argc != 3 || strcmp(argv[1], "--control-fd") != 0) {
		fprintf(stderr, "dcpd-worker is started by dcpd; usage: dcpd-worker --control-fd N\n");
		return 2;
	}
	uint64_t fd = 0;
	if (!str_to_u64(str_of(argv[2]), &fd) || fd > INT_MAX)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN); /* a limit on file size is an error of the write, not our end */
	jtext_init();
	json_object_seed(0);
	w.plans = &plans;
	w.stats = &stats;
	w.kept = &kept;
	w.tree = &tree;
	enum err e = serve(&w, (int)fd);
	if (e)
		log_err("worker ends", NULL);
	plan_cache_free(&plans);
	stats_cache_free(&stats);
	lookup_cache_free(&kept);
	lookup_tree_free(&tree);
	lookup_kept_free(&known);
	group_close(&w);
	if (comm_nccl_stuck())
		end_stuck(&w);
	gpu_close(&w);
	io_engine_close(w.io);
	frame_conn_free(w.conn);
	return e ? 1 : 0;
}
