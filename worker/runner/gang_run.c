/* gang_run.c: see gang_run.h. */
#include "runner/gang_run.h"
#include "runner/sums.h"

#include "base/clock.h"
#include "base/jtext.h"
#include "comm/comm.h"
#include "runner/exchange.h"
#include "runner/exec.h"
#include "runner/gate.h"
#include "runner/state_dict_op_run.h"

enum { RANKS_SHOWN_MAX = 64 };

/* ------------------------------------------------------------------------------------- the run, as the job's line sees it */

struct run_work {
	struct job_work face;          /* first: a pointer to it is one to all of it */
	struct run *run;
};

static void put_progress(const struct job_work *w, struct buf *b)
{
	const struct run *r = ((const struct run_work *)w)->run;

	buf_printf(b, "{\"bytes_done\":%ju,\"bytes_total\":%ju,\"ranks\":[", (uintmax_t)run_bytes_done(r), (uintmax_t)run_bytes_total(r));
	for (uint64_t i = 0; i < r->ranks_n && i < RANKS_SHOWN_MAX; i++)
		buf_printf(b, "%s{\"rank\":%u,\"bytes_done\":%ju,\"bytes_total\":%ju}", i ? "," : "", r->ranks[i].rank,
			   (uintmax_t)atomic_load(&r->ranks[i].bytes_done), (uintmax_t)r->ranks[i].bytes_total);
	buf_puts(b, "]}");
}

static void seal(struct job_work *w)
{
	atomic_store(&((struct run_work *)w)->run->head->sealed, 1);
}

static bool stopped(const struct job_work *w)
{
	return atomic_load(&((const struct run_work *)w)->run->head->cancelled) != 0;
}

static struct run_work work_of(struct run *run)
{
	return (struct run_work){ { put_progress, seal, stopped }, run };
}

/* ------------------------------------------------------------------------------------------------------------ its parts */

static struct exec_spec exec_spec_of(struct job *j, struct run *run, const int *fds, uint32_t fd_count)
{
	return (struct exec_spec){ .run = run, .stores = &j->worker->stores, .fds = fds, .fd_count = fd_count,
				   .io = j->worker->io, .index = j->worker->index, .count = j->worker->count,
				   .memory_bytes = j->worker->memory_bytes, .leavings = &j->worker->leavings, .tick = job_tick, .user = j };
}

/* This worker's part. group: of members that talk; NULL: all segments are on this host. */
static FALLIBLE enum err do_part(struct job *j, const json_t *group, const struct exec_spec *spec)
{
	enum run_mode mode = spec->run->head->opts.mode;

	if (mode == RUN_MOVE_BOXES || mode == RUN_COMPARE_BOXES)
		return group ? exchange_part(j, group, spec) : state_dict_op_run(spec);
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
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);
	enum err e = fds && text ? OK : ERR(NO_MEMORY, "no memory for a message");

	if (!e) {
		fds[0] = run->fd;
		for (uint32_t i = 0; i < spools; i++)
			fds[1 + i] = j->fds[j->segment_count + i];
		e = job_send(j, FRAME_RUN, str_of(text), fds, 1 + spools);
	}
	return e;
}

/* All bytes of a job that streams are written, but only the seal says that it was all. */
static FALLIBLE enum err wait_sealed(struct job *j, const struct run *run)
{
	if (!j->streams || j->sealed)
		return OK;
	TRY(job_progress(j)); /* the last for as long as the wait is */
	TRY(job_state(j, "running", "await_seal", NULL, run_bytes_total(run)));
	TRY(job_wait_sealed(j, clock_mono_ms() + GATE_STALL_MS));
	return j->sealed ? OK : ERR(NOT_SEALED, "all is filled, and %d s later not sealed", GATE_STALL_MS / 1000);
}

/* A store without descriptors takes each file from one process: from the leader, which publishes them, unless who made the run knows
 * that their objects may be made by others. */
static void deal(const struct job *j, struct run *run)
{
	enum run_takers *takers = &run->head->opts.takers;

	each(f, run->files, run->files_n)
		if (f->kind == RUN_FILE_TARGET && *takers == RUN_TAKE_ANY && !j->worker->stores.v[run->dirs[f->dir].root].ops->fd_of)
			*takers = RUN_TAKE_FIRST;
}

enum err gang_run(struct job *j, struct run *run)
{
	struct exec_spec spec = exec_spec_of(j, run, j->fds, j->fd_count);
	uint32_t spools = (j->segments.v ? j->made_at : j->fd_count) - j->segment_count;
	const json_t *group;
	CLEANUP(json_decrefp) json_t *doc = run_doc(j, spools, &group);

	NEED(doc, "no memory for a message");
	run->head->opts.pace = j->spec.pace;
	struct run_work work = work_of(run);
	j->work = &work.face;
	j->peers_done = false;
	atomic_store(&run->head->sealed, !j->streams || j->sealed);
	deal(j, run);
	enum err e = j->streams ? gate_begin(run, j->fds) : OK;
	if (!e && j->worker->count > 1)
		e = share_run(j, run, spools, doc);
	else
		j->peers_done = true;
	e = e ?: do_part(j, group, &spec);
	e = e ?: job_wait(j, &j->peers_done);
	e = e ?: wait_sealed(j, run);
	e = e ?: sums_done(run);
	e = e ?: job_tell_io(j->worker); /* before the commit, which is another stage */
	e = e ?: job_progress(j);
	if (e) /* nobody needs what the others would still do */
		atomic_store(&run->head->cancelled, 1);
	j->work = NULL;
	return e;
}

enum err gang_run_built(struct job *j, struct run_build *b, const char *stage, const json_t *plan, struct run *run)
{
	enum err e = run_share(b, run);

	run_build_free(b);
	TRY(e);
	TRY(job_state(j, "running", stage, plan, run_bytes_total(run)));
	return gang_run(j, run);
}

void gang_run_note(struct job *j, const struct run *run)
{
	json_object_set_new(j->result, "read_bytes", json_integer((json_int_t)atomic_load(&run->head->read_bytes)));
	run_checked(run, &j->checked);
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
enum err gang_run_join(struct job *j, int *fds, uint32_t fd_count)
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
	struct run_work work = work_of(&run);
	j->work = &work.face;
	enum err e = do_part(j, json_object_get(j->doc, "comm"), &spec);
	if (e)
		atomic_store(&run.head->cancelled, 1);
	j->work = NULL;
	run_detach(&run);
	return e;
}
