/* exec.c: the loop that keeps slots busy and the engine full (see exec.h). */
#include "runner/exec.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#include "base/num.h"
#include "os/fs.h"
#include "runner/exec_impl.h"

enum { SLOTS_MAX = 8, PAGE = 4096, SCAN_ROOM = 128 << 10, TICK_MS = 200 };

static enum err exec_at_dst(const struct run *run, uint32_t dst, enum err e)
{
	const struct run_dst *d = &run->dsts[dst];
	struct str fqn = run_dst_fqn(run, d);
	char room[ERR_FILE_MAX];

	e = err_at_file(e, run_file_label(run, d->file, room), (int64_t)d->offset);
	return err_at_rank(err_at_fqn(e, fqn.p, fqn.n), d->rank);
}

struct guarded {
	struct slot *slot;
	enum err (*fn)(struct slot *s);
	enum err result;
};

static void call_guarded(void *user)
{
	struct guarded *g = user;

	g->result = g->fn(g->slot);
}

enum err exec_guarded(struct slot *s, enum err (*fn)(struct slot *s))
{
	struct guarded g = { s, fn, OK };

	if (!s->x->has_segments)
		return fn(s);
	TRY(seg_guard(call_guarded, &g));
	return g.result;
}

/* ------------------------------------------------------------------------------------------------------- queue */

struct bytes_copy {
	void *to;
	const void *from;
	size_t n;
};

static void copy_bytes(void *user)
{
	const struct bytes_copy *c = user;

	memcpy(c->to, c->from, c->n);
}

/* An operation on a file of a store that has no descriptors. Its buffer may be a segment, which may shrink at any moment: the store, which
 * may hold locks, never touches it. */
static enum err transfer_stored(struct io_op *op)
{
	CLEANUP(mem_free_ptr) void *bounce = NULL;
	struct wave_op *w = (struct wave_op *)op;
	struct store_at *at = op->at;
	const struct store_ops *ops = at->store->ops;

	if (op->kind == IO_FSYNC)
		return ops->finish(at, true, "");
	if (op->kind == IO_READ && ops->take)
		return ops->take(*at, op->buf, op->bytes, op->offset, w->digest ? w->which : 0,
				 wave_digest(&((struct slot *)op->user)->wave, w));
	bounce = mem_alloc(op->bytes);
	NEED(bounce, "no memory for a transfer");
	if (op->kind == IO_READ) {
		TRY(ops->read(*at, bounce, op->bytes, op->offset, ""));
		return seg_guard(copy_bytes, &(struct bytes_copy){ op->buf, bounce, op->bytes });
	}
	TRY(seg_guard(copy_bytes, &(struct bytes_copy){ bounce, op->buf, op->bytes }));
	return ops->write(*at, bounce, op->bytes, op->offset, "");
}

enum err exec_queue(struct slot *s, struct wave_op *op)
{
	struct exec *x = s->x;
	struct wave_op **place;
	struct store_at *at;

	TRY(files_pin(&x->files, op->file, &at));
	op->pinned = true;
	int direct = op->past_cache ? files_direct(&x->files, op->file) : -1;
	op->past_cache = direct >= 0;
	if (at->store->ops->fd_of) {
		op->io.fd = direct >= 0 ? direct : store_fd(*at);
	} else {
		op->io.transfer = transfer_stored;
		op->io.at = at;
		if (op->which && at->store->ops->take)
			TRY(wave_hash(&s->wave, op));
	}
	op->io.user = s;
	TRY(vec_push(&x->queue, &place));
	*place = op;
	s->pending++;
	return OK;
}

bool exec_is_aligned(const void *into, uint64_t offset, uint64_t bytes)
{
	return ((uintptr_t)into | offset | bytes) % PAGE == 0;
}

/* Tries the page cache first: for cached pages an inline copy is cheaper than an io_uring round trip. Pages that are known not to be there
 * are read past it where the run wants that: the disk writes them to their place, at a third of the CPU time. */
static FALLIBLE enum err read_cached(struct slot *s, struct wave_op *op, bool *done_out)
{
	uint64_t wanted = op->io.bytes - op->io.slack;
	struct store_at *at;

	TRY(files_pin(&s->x->files, op->file, &at));
	int fd = store_fd(*at);
	bool cold = fd >= 0 && s->x->past_cache && fs_cached(fd, op->io.offset, wanted) == FS_NOT_CACHED;
	*done_out = fd >= 0 && !cold && fs_pread_cached(fd, op->io.buf, wanted, op->io.offset);
	files_unpin(&s->x->files, op->file);
	op->past_cache = cold && exec_is_aligned(op->io.buf, op->io.offset, op->io.bytes);
	return OK;
}

enum err exec_queue_wave(struct slot *s)
{
	TRY(wave_plan(&s->wave, s));
	each(op, s->wave.ops.v, s->wave.ops.n) {
		bool is_spare = s->x->run->files[op->file].spare, done = false;
		if (is_spare) {
			s->wave.read_bytes -= op->io.bytes; /* the storage is not asked */
			done = op->failed = !files_spare_answers(&s->x->files, op->file);
		} else {
			TRY(read_cached(s, op, &done));
		}
		if (!done)
			TRY(exec_queue(s, op));
	}
	return OK;
}

static FALLIBLE enum err pump(struct exec *x)
{
	while (x->queue_at < x->queue.n && io_engine_free_slots(x->spec->io) > 0)
		TRY(io_submit(x->spec->io, &x->queue.v[x->queue_at++]->io));
	if (x->queue_at == x->queue.n)
		x->queue.n = x->queue_at = 0;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- slots */

static bool is_dst_driven(const struct run *r)
{
	enum run_mode mode = r->head->opts.mode;

	return mode == RUN_WRITE_FILES || mode == RUN_DIFF || mode == RUN_STREAMS || mode == RUN_COPY_FILES;
}

static void *buffer_new(const struct exec *x, uint64_t bytes)
{
	return x->is_long ? mem_huge(bytes) : aligned_alloc(PAGE, bytes);
}

static void buffer_free(const struct exec *x, void *p, uint64_t bytes)
{
	if (x->is_long)
		mem_huge_free(p, bytes);
	else
		mem_free(p);
}

static FALLIBLE enum err slot_open(struct slot *s, struct exec *x)
{
	s->x = x;
	s->reads.sources = &x->sources;
	s->in = buffer_new(x, x->in_bytes);
	s->out = x->out_bytes ? buffer_new(x, x->out_bytes) : NULL;
	if (!s->in || (!s->out && x->out_bytes))
		return ERR(NO_MEMORY, "no memory for buffers of %ju bytes", (uintmax_t)(x->in_bytes + x->out_bytes));
	return OK;
}

static void slot_close(struct slot *s)
{
	read_plan_free(&s->reads);
	wave_free(&s->wave);
	vec_free(&s->blocks);
	vec_free(&s->scans);
	exec_block_drop(s);
	exec_stream_close(s);
	vec_free(&s->quants);
	vec_free(&s->writes);
	vec_free(&s->finish);
	vec_free(&s->sync);
	if (s->x) {
		buffer_free(s->x, s->in, s->x->in_bytes);
		buffer_free(s->x, s->out, s->x->out_bytes);
	}
	mem_free(s->edges);
	vec_free(&s->legs);
	mem_free(s->leg_room);
}

static bool is_scan(const struct slot *s)
{
	return !is_dst_driven(s->x->run) || s->x->run->tasks[s->task].scan;
}

static FALLIBLE enum err slot_begin(struct slot *s)
{
	if (is_scan(s))
		return exec_scan_begin(s);
	switch (s->x->run->head->opts.mode) {
	case RUN_STREAMS:
		return exec_stream_begin(s);
	case RUN_COPY_FILES:
		return exec_copy_begin(s);
	default:
		return exec_block_begin(s);
	}
}

static FALLIBLE enum err slot_advance(struct slot *s)
{
	if (is_scan(s))
		return exec_scan_advance(s);
	switch (s->x->run->head->opts.mode) {
	case RUN_STREAMS:
		return exec_stream_advance(s);
	case RUN_COPY_FILES:
		return exec_copy_advance(s);
	default:
		return exec_block_advance(s);
	}
}

/* A segment that its owner shrank is seen as a fault somewhere in a copy: which one it was is found out by looking. */
static void name_segment(const struct exec *x)
{
	struct stat st;

	each(f, x->run->files, x->run->files_n) {
		if (f->kind != RUN_FILE_SEGMENT || f->fd_index >= x->spec->fd_count || fstat(x->spec->fds[f->fd_index], &st) < 0 ||
		    (uint64_t)st.st_size >= run_file_span(f))
			continue;
		err_at_rank(ERR_SEGMENT_SHRUNK, f->rank);
		return;
	}
}

/* Names the tensor that owns a byte range: an I/O error itself knows only file and offset. */
static void name_item(const struct exec *x, uint32_t file, uint64_t offset, enum err e)
{
	const struct run *run = x->run;

	for (uint64_t i = 0; i < run->srcs_n; i++)
		if (run->srcs[i].file == file && offset - run->srcs[i].offset < run->srcs[i].length) {
			sources_at(run, (uint32_t)i, e);
			return;
		}
	for (uint64_t i = 0; i < run->dsts_n && run->head->opts.mode == RUN_WRITE_FILES; i++)
		if (run->dsts[i].file == file && offset - run->dsts[i].offset < run->dsts[i].length) {
			exec_at_dst(run, (uint32_t)i, e);
			return;
		}
}

static void keep_error(struct exec *x, enum err e)
{
	if (!e || x->error.code)
		return;
	if (e == ERR_SEGMENT_SHRUNK)
		name_segment(x);
	/* A failure after another worker's may follow from it, for the leader removes the staging: the first reason is the job's. The
	 * user's cancel reaches all workers, and is the reason of each. */
	if (atomic_exchange(&x->run->head->cancelled, 1) && e != ERR_CANCELLED)
		err_record(ERR_CANCELLED, 0, ERR_PLACE, "another worker of the job has failed");
	x->error = *err_last();
}

static FALLIBLE enum err take_task(struct exec *x, uint64_t *task_out, bool *taken_out)
{
	*taken_out = false;
	if (atomic_load(&x->run->head->cancelled)) {
		x->gate.held = false;
		return OK;
	}
	if (x->gate.held) /* seen a moment ago */
		return OK;
	if (x->gated && x->run->head->opts.takers == RUN_TAKE_FIRST && x->spec->index)
		return OK;
	if (x->gated)
		return gate_take(&x->gate, x->spec->index, x->spec->count, task_out, taken_out);
	bool in_order = x->run->spread_windows_n > 0; /* windows come in the order of the tasks (spread.h) */
	*taken_out = run_take_task(x->run, in_order ? 0 : x->spec->index, x->spec->count, task_out);
	return OK;
}

/* A task, or what must be written after all. */
static FALLIBLE enum err begin_next(struct slot *s, bool *taken_out)
{
	struct exec *x = s->x;

	if (atomic_load(&x->run->head->cancelled))
		x->redo.n = 0;
	*taken_out = s->redo = x->redo.n > 0;
	if (s->redo) {
		const struct slot_redo r = x->redo.v[--x->redo.n];
		return exec_block_redo(s, &r);
	}
	TRY(take_task(x, &s->task, taken_out));
	return *taken_out ? slot_begin(s) : OK;
}

/* Takes new tasks and drives slots without pending I/O until all wait for I/O or nothing is left. */
static void drive(struct exec *x)
{
	for (uint32_t i = 0; i < x->slot_count && !x->error.code; i++) {
		struct slot *s = &x->slots[i];
		while (s->pending == 0 && !x->error.code) {
			enum err e;
			if (s->phase == SLOT_IDLE) {
				bool taken;
				e = begin_next(s, &taken);
				if (!e && !taken)
					break;
			} else {
				e = slot_advance(s);
				if (!e && x->gated && s->phase == SLOT_IDLE && !s->redo)
					e = gate_done(&x->gate, s->task);
			}
			e = e ?: pump(x);
			keep_error(x, e ? e : x->spec->tick(x->spec->user)); /* tasks without I/O go on and on here */
		}
	}
}

static bool busy(const struct exec *x)
{
	for (uint32_t i = 0; i < x->slot_count; i++)
		if (x->slots[i].pending || x->slots[i].phase != SLOT_IDLE)
			return true;
	return false;
}

/* A file system that has no O_DIRECT after all: the operation goes through the page cache. */
static bool read_again(struct exec *x, struct wave_op *op)
{
	struct wave_op **place;

	if (!op->past_cache || !io_is_refused(&op->io) || x->error.code || vec_push(&x->queue, &place))
		return false;
	files_refuse_direct(&x->files, op->file);
	op->past_cache = false;
	op->io.fd = store_fd(x->files.opened[op->file]);
	*place = op;
	return true;
}

static void complete(struct exec *x, struct io_op *io)
{
	struct wave_op *op = (struct wave_op *)io;
	struct slot *s = io->user;

	if (read_again(x, op))
		return;
	s->pending--;
	if (op->pinned)
		files_unpin(&x->files, op->file);
	op->pinned = false;
	if (io->error && io->error != ERR_SEGMENT_SHRUNK && x->run->files[op->file].spare) {
		op->failed = true;
		files_spare_gone(&x->files, op->file);
	} else if (io->error && !x->error.code) {
		char room[ERR_FILE_MAX];
		enum err e = io_report(io);
		err_at_file(e, run_file_label(x->run, op->file, room), (int64_t)(io->offset + io_moved(io)));
		if (e != ERR_SEGMENT_SHRUNK) /* then the fault is not the file's */
			name_item(x, op->file, io->offset + io_moved(io), e);
		keep_error(x, e);
	}
	io_done(io);
}

/* After an error: what is in flight must come back before its buffers go. */
static void drain(struct exec *x)
{
	for (; x->queue_at < x->queue.n; x->queue_at++) {
		struct wave_op *op = x->queue.v[x->queue_at];
		files_unpin(&x->files, op->file);
		((struct slot *)op->io.user)->pending--;
	}
	while (io_in_flight(x->spec->io) > 0) {
		struct io_op *io = NULL;
		if (io_wait(x->spec->io, &io))
			return;
		complete(x, io);
	}
}

/* For the next operation that is done; or, where tasks are held, for a moment. */
static void wait_some(struct exec *x)
{
	struct io_op *io = NULL;
	bool timed_out = false;
	struct timespec rest = { .tv_nsec = x->gate.rest_us * 1000L };

	if (x->gate.held && io_in_flight(x->spec->io) == 0) {
		nanosleep(&rest, NULL);
		return;
	}
	enum err e = io_wait_for(x->spec->io, x->gate.held ? 1 + x->gate.rest_us / 1000 : TICK_MS, &io, &timed_out);
	keep_error(x, e);
	if (!e && io)
		complete(x, io);
}

static FALLIBLE enum err loop(struct exec *x)
{
	for (;;) {
		x->gate.held = false;
		drive(x);
		if (x->error.code || (!busy(x) && !x->gate.held))
			break;
		keep_error(x, pump(x));
		wait_some(x);
		keep_error(x, x->spec->tick(x->spec->user));
	}
	drain(x);
	if (x->error.code) {
		err_restore(&x->error);
		return x->error.code;
	}
	return OK;
}

/* Bytes that averages need besides a task's own: the sums and one leg, in the dtype that they are added up in. */
static uint64_t most_leg_bytes(const struct run *r)
{
	uint64_t widest = 0;

	for (uint64_t i = 0; r->head->opts.leg_count && i < r->dsts_n; i++)
		if (r->dsts[i].first_leg)
			widest = num_max(widest, dtype_bytes((enum dtype)r->dsts[r->dsts[i].first_leg].dtype) /
							 dtype_bytes((enum dtype)r->dsts[i].dtype));
	return 2 * widest * r->head->opts.task_bytes;
}

/* A store without descriptors has no page cache, and reads no bytes behind a file's end. */
static bool reads_past_cache(const struct exec *x)
{
	const struct run *run = x->run;

	for (uint64_t i = 0; run->head->opts.past_cache && i < run->dirs_n; i++)
		if (run->dirs[i].is_source && !x->spec->stores->v[run->dirs[i].root].ops->fd_of)
			return false;
	return run->head->opts.past_cache;
}

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);
}

static FALLIBLE enum err open_slots(struct exec *x)
{
	uint64_t task = x->run->head->opts.task_bytes;
	x->past_cache = reads_past_cache(x);
	x->in_bytes = 2 * task - num_min(wave_table_bytes(2 * task), task);
	for (uint64_t i = 0; i < x->run->scans_n; i++)
		x->in_bytes = num_max(x->in_bytes, x->run->scans[i].end - x->run->scans[i].begin + SCAN_ROOM);
	uint64_t more = 0;
	if (x->run->head->opts.mode == RUN_STREAMS) {
		x->out_bytes = EXEC_STREAM_BUFFERS * task;
		more = exec_stream_memory(x->run);
	} else if (x->run->head->opts.mode == RUN_COPY_FILES) {
		x->in_bytes = task; /* a piece of whole pages */
		x->out_bytes = EXEC_COPY_AGAIN;
	} else if (is_dst_driven(x->run))
		x->out_bytes = task + task / 4;
	else if (x->run->head->opts.mode == RUN_STATS && x->run->dsts_n)
		x->out_bytes = x->in_bytes; /* two tasks, or the largest scan */
	x->in_bytes = whole_pages(x->in_bytes);
	x->out_bytes = whole_pages(x->out_bytes);
	uint64_t n = x->spec->memory_bytes / (x->in_bytes + wave_table_bytes(x->in_bytes) + x->out_bytes + more +
					    most_leg_bytes(x->run));

	x->slot_count = (uint32_t)num_min(num_max(n, 1), SLOTS_MAX);
	x->slots = mem_zalloc(x->slot_count, sizeof *x->slots);
	NEED(x->slots, "no memory for slots");
	x->is_long = task >= MEM_HUGE_PAGE && x->run->tasks_n / x->spec->count > 2 * x->slot_count;
	for (uint32_t i = 0; i < x->slot_count; i++)
		TRY(slot_open(&x->slots[i], x));
	return OK;
}

enum err exec_run(const struct exec_spec *spec)
{
	struct exec x = { .spec = spec, .run = spec->run };

	each(f, spec->run->files, spec->run->files_n)
		x.has_segments = x.has_segments || f->kind == RUN_FILE_SEGMENT;
	TRY(files_open(spec->run, spec->stores, spec->fds, spec->fd_count, &x.files));
	x.files.leavings = spec->leavings;
	enum err e = sources_open(spec->run, &x.files, &x.sources);
	e = e ?: gate_open(spec->run, spec->fds, spec->fd_count, &x.gate, &x.gated);
	e = e ?: open_slots(&x);
	e = e ?: loop(&x);
	uint64_t read = x.sources.read_bytes;
	for (uint32_t i = 0; x.slots && i < x.slot_count; i++) {
		read += x.slots[i].wave.read_bytes;
		slot_close(&x.slots[i]);
	}
	atomic_fetch_add(&spec->run->head->read_bytes, read);
	mem_free(x.slots);
	gate_close(&x.gate);
	vec_free(&x.queue);
	vec_free(&x.redo);
	sources_close(&x.sources);
	files_close(&x.files);
	return e;
}
