/* job.c: a job's line to the coordinator, and its execution by the gang (see job.h). */
#include "ops/job.h"

#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/jtext.h"
#include "ops/exchange.h"
#include "ops/exec.h"
#include "ops/gate.h"
#include "ops/sdop_run.h"
#include "os/fs.h"

enum { PROGRESS_MS = 250, WAIT_MS = 500, RANKS_SHOWN_MAX = 64, IDLE_LIMIT_MS = 60000 };

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

enum err job_root(struct worker *w, const char *name, uint32_t *index_out)
{
	for (uint32_t i = 0; i < w->root_count; i++) {
		if (strcmp(w->roots[i].name, name) != 0)
			continue;
		if (w->roots[i].fd < 0) {
			err_restore(&w->roots[i].error);
			return w->roots[i].error.code;
		}
		*index_out = i;
		return OK;
	}
	return ERR(NOT_FOUND, "this worker has no storage '%s'", name);
}

enum err job_send(struct job *j, enum frame_type type, struct str json, const int *fds, uint32_t fd_count)
{
	bool empty = false;

	TRY(frame_send(j->worker->conn, (uint16_t)type, j->generation, json, fds, fd_count));
	while (frame_wants_write(j->worker->conn) && !empty)
		TRY(frame_flush(j->worker->conn, &empty));
	return OK;
}

enum err job_send_json(struct job *j, enum frame_type type, const json_t *doc)
{
	char *text = jtext_of(doc);

	if (doc && !text)
		return ERR(NO_MEMORY, "no memory for a message");
	enum err e = job_send(j, type, text ? str_of(text) : STR("{}"), NULL, 0);
	mem_free(text);
	return e;
}

static void put_text(struct buf *b, const char *key, const char *value)
{
	if (!value[0])
		return;
	buf_printf(b, ",\"%s\":", key);
	buf_json_str(b, str_of(value));
}

void job_problem_put(struct buf *b, enum err e)
{
	const struct err_info *i = err_last();

	buf_printf(b, "{\"code\":\"%s\",\"detail\":", err_code_name(e));
	buf_json_str(b, str_of(i->code == e ? i->text : err_title(e)));
	if (i->code == e) {
		put_text(b, "fqn", i->fqn);
		put_text(b, "file", i->file);
		put_text(b, "expected", i->expected);
		put_text(b, "actual", i->actual);
		if (i->rank >= 0)
			buf_printf(b, ",\"rank\":%jd", (intmax_t)i->rank);
		if (i->offset >= 0)
			buf_printf(b, ",\"offset\":%jd", (intmax_t)i->offset);
		put_text(b, "place", i->place ? i->place : "");
	}
	buf_puts(b, "}");
}

enum err job_state(struct job *j, const char *state, const char *stage, const json_t *plan, uint64_t bytes_total)
{
	json_t *doc = json_pack("{s:s, s:s, s:I}", "state", state, "stage", stage, "bytes_total", (json_int_t)bytes_total);

	if (doc && plan)
		json_object_set(doc, "plan", (json_t *)(uintptr_t)plan);
	if (!doc)
		return ERR(NO_MEMORY, "no memory for a message");
	enum err e = job_send_json(j, FRAME_STATE, doc);
	json_decref(doc);
	return e;
}

static FALLIBLE enum err send_progress(struct job *j)
{
	const struct run *r = j->run;
	CLEANUP(buf_free) struct buf b = BUF_INIT(64 << 10);

	buf_printf(&b, "{\"bytes_done\":%ju,\"bytes_total\":%ju,\"ranks\":[", (uintmax_t)(r ? run_bytes_done(r) : 0),
		   (uintmax_t)(r ? run_bytes_total(r) : 0));
	for (uint64_t i = 0; r && i < r->ranks_n && i < RANKS_SHOWN_MAX; i++)
		buf_printf(&b, "%s{\"rank\":%u,\"bytes_done\":%ju,\"bytes_total\":%ju}", i ? "," : "", r->ranks[i].rank,
			   (uintmax_t)atomic_load(&r->ranks[i].bytes_done), (uintmax_t)r->ranks[i].bytes_total);
	buf_puts(&b, "]}");
	TRY(buf_status(&b));
	return job_send(j, FRAME_PROGRESS, (struct str){ (char *)b.p, b.len }, NULL, 0);
}

enum err job_tell_io(struct worker *w)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64 << 10);
	bool empty = false;

	for (uint32_t i = 0; i < w->root_count; i++) {
		uint64_t bytes_read = fs_count_take(w->root_fds[i], false), written = fs_count_take(w->root_fds[i], true);
		if (bytes_read || written)
			buf_printf(&b, "%c\"%s\":[%ju,%ju]", b.len ? ',' : '{', w->roots[i].name, (uintmax_t)bytes_read,
				   (uintmax_t)written);
	}
	if (b.len == 0)
		return OK;
	buf_putc(&b, '}');
	TRY(buf_status(&b));
	TRY(frame_send(w->conn, FRAME_IO, 0, (struct str){ (char *)b.p, b.len }, NULL, 0));
	while (frame_wants_write(w->conn) && !empty)
		TRY(frame_flush(w->conn, &empty));
	return OK;
}

/* The leader tells how far all are; the others, that they are there. */
static FALLIBLE enum err show_life(struct job *j)
{
	TRY(job_tell_io(j->worker));
	return j->worker->index == 0 ? send_progress(j) : job_send(j, FRAME_PROGRESS, str_of("{}"), NULL, 0);
}

static FALLIBLE enum err take_segments(struct job *j, struct frame *f)
{
	json_t *doc;
	enum err e = jtext_parse(f->json, 0, &doc);

	if (e)
		return e == ERR_NO_MEMORY ? e : ERR(PROTOCOL, "SEGMENTS is not JSON");
	json_t *ranks = json_object_get(doc, "ranks");
	for (size_t i = 0; i < json_array_size(ranks); i++) { /* the frame's numbers become the job's */
		json_t *fd = json_object_get(json_array_get(ranks, i), "fd");
		json_integer_set(fd, json_integer_value(fd) + j->fd_count);
	}
	json_decref(j->segments);
	j->segments = doc;
	j->made_at = j->fd_count;
	for (uint32_t i = 0; i < f->fd_count; i++) {
		uint32_t index;
		TRY(job_add_fd(j, f->fds[i], &index));
		f->fds[i] = -1;
	}
	return OK;
}

static FALLIBLE enum err take_frame(struct job *j, struct frame *f)
{
	if (f->generation != j->generation)
		return OK;
	switch (f->type) {
	case FRAME_CANCEL:
		j->cancelled = true;
		return ERR(CANCELLED, "the job was cancelled");
	case FRAME_PEERS_DONE:
		j->peers_done = true;
		return OK;
	case FRAME_COMMIT_OK:
		j->commit_ok = true;
		return OK;
	case FRAME_SEALED:
		j->sealed = true;
		if (j->run)
			atomic_store(&j->run->head->sealed, 1);
		return OK;
	case FRAME_SEGMENTS:
		return take_segments(j, f);
	case FRAME_MEET_ALL:
		json_decref(j->met);
		return jtext_parse(f->json, 0, &j->met);
	default:
		return ERR(PROTOCOL, "a frame of type %u in a job", f->type);
	}
}

static FALLIBLE enum err poll_frames(struct job *j, int timeout_ms)
{
	for (;;) {
		struct frame f;
		bool got = false, closed = false;
		TRY(frame_wait(j->worker->conn, timeout_ms, &f, &got, &closed));
		if (closed)
			_exit(0); /* the coordinator is gone: nobody waits for this job any more */
		if (!got)
			return OK;
		TRY(take_frame(j, &f));
		timeout_ms = 0;
	}
}

static FALLIBLE enum err talk(struct job *j)
{
	int64_t now = now_ms();

	if (now - j->last_progress_ms < PROGRESS_MS)
		return j->cancelled ? ERR(CANCELLED, "the job was cancelled") : OK;
	j->last_progress_ms = now;
	TRY(poll_frames(j, 0));
	return show_life(j);
}

enum err job_tick(void *user)
{
	struct job *j = user;

	if (j->worker->lookup) /* it answers one question at a time, and nothing else may come between */
		return OK;
	TRY(talk(j));
	for (int ms; (ms = pace_rest_ms(&j->pace)) > 0 && !atomic_load(&j->run->head->cancelled);) {
		TRY(poll_frames(j, ms));
		TRY(talk(j));
	}
	return OK;
}

enum err job_wait(struct job *j, const bool *flag)
{
	while (!*flag) {
		TRY(poll_frames(j, WAIT_MS));
		if (!*flag)
			TRY(send_progress(j));
	}
	return OK;
}

enum err job_pause(struct job *j, int ms)
{
	int64_t until = now_ms() + ms;

	for (int64_t left = ms; left > 0; left = until - now_ms())
		TRY(poll_frames(j, (int)left));
	return job_tick(j);
}

enum err job_wait_segments(struct job *j)
{
	while (!j->segments) {
		TRY(poll_frames(j, WAIT_MS));
		if (!j->segments)
			TRY(send_progress(j));
	}
	return OK;
}

enum err job_meet(struct job *j, struct str mine, uint32_t deadline_ms, json_t **all_out)
{
	int64_t until = now_ms() + deadline_ms;

	TRY(job_send(j, FRAME_MEET, mine, NULL, 0));
	while (!j->met) {
		TRY(poll_frames(j, WAIT_MS));
		if (!j->met)
			TRY(show_life(j));
		if (!j->met && now_ms() > until)
			return ERR(PEER_TIMEOUT, "the members of the group did not meet within %u ms", deadline_ms);
	}
	*all_out = json_incref(json_object_get(j->met, "all"));
	json_decref(j->met);
	j->met = NULL;
	return OK;
}

enum err job_add_fd(struct job *j, int fd, uint32_t *index_out)
{
	int *more = mem_grow(j->fds, j->fd_count + 1, sizeof *more);

	if (!more)
		return ERR(NO_MEMORY, "no memory for descriptors");
	j->fds = more;
	*index_out = j->fd_count;
	j->fds[j->fd_count++] = fd;
	return OK;
}

void job_free(struct job *j)
{
	for (uint32_t i = 0; i < j->fd_count; i++)
		fs_drop(&j->fds[i]);
	mem_free(j->fds);
	json_decref(j->doc);
	json_decref(j->segments);
	json_decref(j->result);
	json_decref(j->error_more);
	json_decref(j->met);
	checked_free(&j->checked);
	*j = (struct job){ 0 };
}

static struct exec_spec exec_spec_of(struct job *j, struct run *run, const int *fds, uint32_t fd_count)
{
	return (struct exec_spec){ .run = run, .root_fds = j->worker->root_fds, .fds = fds, .fd_count = fd_count,
				   .io = j->worker->io, .index = j->worker->index, .count = j->worker->count,
				   .memory_bytes = j->worker->memory_bytes, .tick = job_tick, .user = j };
}

/* This worker's part. group: of members that talk; NULL: all segments are on this host. */
static FALLIBLE enum err do_part(struct job *j, const json_t *group, const struct exec_spec *spec)
{
	enum run_mode mode = spec->run->head->opts.mode;

	if (mode == RUN_MOVE_BOXES || mode == RUN_COMPARE_BOXES)
		return group ? exchange_part(j, group, spec) : sdop_run(spec);
	pace_begin(&j->pace, spec->run->head->opts.pace, spec->index, spec->count);
	enum err e = exec_run(spec);
	pace_begin(&j->pace, PACE_FULL, 0, 0);
	return e;
}

/* RUN's document. *group_out: its `comm`, borrowed from it. */
static json_t *run_doc(const struct job *j, uint32_t spools, const json_t **group_out)
{
	json_t *doc = json_pack("{s:s, s:I, s:I, s:I, s:I}", "job", j->id, "attempt", (json_int_t)j->attempt, "segments",
				(json_int_t)(j->fd_count - spools), "spools", (json_int_t)spools, "spools_at",
				(json_int_t)j->segment_count);

	*group_out = NULL;
	if (!doc || j->backend == COMM_SHM)
		return doc;
	json_t *group = json_copy(json_object_get(j->doc, "comm"));
	json_object_set_new(group, "backend", json_string(comm_backend_name((enum comm_backend)j->backend)));
	json_object_set_new(group, "members", json_integer(j->members));
	json_object_set_new(doc, "comm", group);
	*group_out = group;
	return doc;
}

static FALLIBLE enum err share_run(struct job *j, struct run *run, uint32_t spools, const json_t *doc)
{
	CLEANUP(mem_free_ptr) int *fds = mem_zalloc(1 + spools, sizeof *fds);
	char *text = jtext_of(doc);
	enum err e = fds && text ? OK : ERR(NO_MEMORY, "no memory for a message");

	if (!e) {
		fds[0] = run->fd;
		for (uint32_t i = 0; i < spools; i++)
			fds[1 + i] = j->fds[j->segment_count + i];
		e = job_send(j, FRAME_RUN, str_of(text), fds, 1 + spools);
	}
	mem_free(text);
	return e;
}

/* All bytes of a job that streams are written, but only the seal says that it was all. */
static FALLIBLE enum err wait_sealed(struct job *j)
{
	int64_t until = now_ms() + GATE_STALL_MS;

	if (!j->streams || j->sealed)
		return OK;
	TRY(job_state(j, "running", "await_seal", NULL, run_bytes_total(j->run)));
	while (!j->sealed && now_ms() < until) {
		TRY(poll_frames(j, WAIT_MS));
		if (!j->sealed)
			TRY(send_progress(j));
	}
	return j->sealed ? OK : ERR(NOT_SEALED, "all is filled, and %d s later not sealed", GATE_STALL_MS / 1000);
}

enum err job_execute(struct job *j, struct run *run)
{
	struct exec_spec spec = exec_spec_of(j, run, j->fds, j->fd_count);
	uint32_t spools = (j->segments ? j->made_at : j->fd_count) - j->segment_count;
	const json_t *group;
	json_t *doc = run_doc(j, spools, &group);

	if (!doc)
		return ERR(NO_MEMORY, "no memory for a message");
	run->head->opts.pace = pace_kind_of(json_string_value(json_object_get(json_object_get(j->spec, "options"), "pace")));
	j->run = run;
	atomic_store(&run->head->sealed, !j->streams || j->sealed);
	enum err e = OK;
	if (j->worker->count > 1)
		e = share_run(j, run, spools, doc);
	else
		j->peers_done = true;
	if (!e)
		e = do_part(j, group, &spec);
	if (!e)
		e = job_wait(j, &j->peers_done);
	if (!e)
		e = wait_sealed(j);
	if (!e)
		e = send_progress(j);
	if (e) /* nobody needs what the others would still do */
		atomic_store(&run->head->cancelled, 1);
	j->run = NULL;
	json_decref(doc);
	return e;
}

static FALLIBLE enum err take_fds(struct job *j, int *fds, uint32_t from, uint32_t to)
{
	uint32_t index;

	for (uint32_t i = from; i < to; i++) {
		TRY(job_add_fd(j, fds[i], &index));
		fds[i] = -1;
	}
	return OK;
}

/* fds: the memfd, the spools, then the segments. The run numbers them as the leader does: the JOB frame's segments, spools, made ones. */
enum err job_join(struct job *j, int *fds, uint32_t fd_count)
{
	struct run run;
	json_int_t spools = json_integer_value(json_object_get(j->doc, "spools"));
	json_int_t at = json_integer_value(json_object_get(j->doc, "spools_at"));

	if (spools < 0 || at < 0 || fd_count < 1 || spools > fd_count - 1 || at > fd_count - 1 - spools)
		return ERR(PROTOCOL, "a run with %u descriptors and %jd spools behind %jd", fd_count, (intmax_t)spools, (intmax_t)at);
	uint32_t first = 1 + (uint32_t)spools, made = first + (uint32_t)at;
	TRY(take_fds(j, fds, first, made));
	TRY(take_fds(j, fds, 1, first));
	TRY(take_fds(j, fds, made, fd_count));
	TRY(run_attach(fds[0], &run));
	fds[0] = -1;
	struct exec_spec spec = exec_spec_of(j, &run, j->fds, j->fd_count);
	j->run = &run;
	enum err e = do_part(j, json_object_get(j->doc, "comm"), &spec);
	if (e)
		atomic_store(&run.head->cancelled, 1);
	j->run = NULL;
	run_detach(&run);
	return e;
}
