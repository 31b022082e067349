/* gate.c: see gate.h. The number is read with pread, not through a mapping: a segment that shrinks is then an error, not a signal. */
#include "runner/gate.h"

#include <endian.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/num.h"
#include "os/fs.h"
#include "tensor/dtype.h"

enum { PAGE = 4096, REST_MIN_US = 250, REST_MAX_US = 5000, REST_RANK_US = 20, REST_LIMIT_US = 100000,
       SPANS_OF_A_RING = 4 };

/* ---- what a task reads ---- */

static FALLIBLE enum err need(struct run_build *b, struct run_task *t, const struct run_src *s, uint64_t begin, uint64_t end)
{
	struct run_gate *g;

	if (b->files.v[s->file].kind != RUN_FILE_SEGMENT)
		return OK;
	for (uint32_t i = 0; i < t->gate_count; i++) {
		g = &b->gates.v[t->first_gate + i];
		if (g->file == s->file) {
			g->begin = num_min(g->begin, begin);
			g->end = num_max(g->end, end);
			return OK;
		}
	}
	TRY(vec_push(&b->gates, &g));
	*g = (struct run_gate){ s->file, begin, end };
	t->gate_count++;
	return OK;
}

/* [begin, end) of an item's payload, of a source: that much where both are the same box, else all of it. */
static FALLIBLE enum err need_part(struct run_build *b, struct run_task *t, const struct run_dst *d, uint64_t begin, uint64_t end)
{
	for (uint32_t i = 0; i < d->piece_count; i++) {
		const struct run_src *s = &b->srcs.v[b->pieces.v[d->first_piece + i]];
		bool same = d->kind == RUN_DST_TENSOR && s->kind == RUN_SRC_PLAIN && s->ndim == d->ndim &&
			    memcmp(b->dims.v + s->dims_at, b->dims.v + d->dims_at, 2ull * d->ndim * sizeof *b->dims.v) == 0;
		uint64_t to = dtype_bytes((enum dtype)d->dtype), from = dtype_bytes((enum dtype)s->dtype);
		uint64_t stop = same ? num_div_up(end, to) * from : s->length;
		TRY(need(b, t, s, s->offset + (same ? begin / to * from : 0), s->offset + num_min(stop, s->length)));
	}
	return OK;
}

static FALLIBLE enum err gate_blocks(struct run_build *b, struct run_task *t)
{
	for (uint64_t i = t->first; i < t->first + t->count; i++) {
		const struct run_block *k = &b->blocks.v[i];
		for (uint32_t p = 0; p < k->part_count; p++) {
			const struct run_part *part = &b->parts.v[b->block_parts.v[k->first_part + p]];
			TRY(need_part(b, t, &b->dsts.v[part->dst], part->begin, part->end));
		}
	}
	return OK;
}

static FALLIBLE enum err gate_scans(struct run_build *b, struct run_task *t)
{
	for (uint64_t i = t->first; i < t->first + t->count; i++) {
		const struct run_src *s = &b->srcs.v[b->scans.v[i].src];
		TRY(need(b, t, s, s->offset + b->scans.v[i].begin, s->offset + num_min(b->scans.v[i].end, s->length)));
	}
	return OK;
}

enum err gate_tasks(struct run_build *b)
{
	b->gates.n = 0;
	each(t, b->tasks.v, b->tasks.n) {
		t->first_gate = b->gates.n;
		t->gate_count = 0;
		TRY(t->scan ? gate_scans(b, t) : gate_blocks(b, t));
	}
	return OK;
}

/* ---- their order ---- */

struct ready_at {
	uint64_t end, at;
};

static int compare_ready(const void *a, const void *b)
{
	const struct ready_at *x = a, *y = b;

	return num_order(x->end, y->end) ?: num_order(x->at, y->at);
}

static void sort_rank(struct run *run, const struct run_rank *k, struct ready_at *order, struct run_task *tasks)
{
	for (uint64_t i = 0; i < k->task_count; i++) {
		tasks[i] = run->tasks[k->first_task + i];
		order[i] = (struct ready_at){ 0, i };
		for (uint32_t g = 0; g < tasks[i].gate_count; g++)
			order[i].end = num_max(order[i].end, run->gates[tasks[i].first_gate + g].end);
	}
	qsort(order, k->task_count, sizeof *order, compare_ready);
	for (uint64_t i = 0; i < k->task_count; i++)
		run->tasks[k->first_task + i] = tasks[order[i].at];
}

uint64_t gate_span(const struct run_build *b)
{
	uint64_t least = 0;

	for (uint64_t i = 0; i < b->files.n; i++) {
		uint64_t bytes = b->files.v[i].ring_bytes;
		least = bytes && (!least || bytes < least) ? bytes : least;
	}
	return least / SPANS_OF_A_RING;
}

/* The ring that a rank's tasks read: all of them, and no task of another rank does. */
static FALLIBLE enum err ring_of_rank(struct run *run, struct run_rank *k)
{
	const struct run_task *tasks = &run->tasks[k->first_task];
	bool mixed = false;

	for (uint64_t i = 0; i < k->task_count; i++)
		for (uint32_t g = 0; g < tasks[i].gate_count; g++) {
			uint32_t file = run->gates[tasks[i].first_gate + g].file;
			if (run->files[file].ring_bytes)
				k->ring = file + 1;
		}
	for (uint64_t i = 0; k->ring && i < k->task_count; i++)
		for (uint32_t g = 0; g < tasks[i].gate_count; g++)
			mixed = mixed || run->gates[tasks[i].first_gate + g].file != k->ring - 1;
	for (const struct run_rank *other = run->ranks; k->ring && other < k; other++)
		mixed = mixed || other->ring == k->ring;
	return !mixed ? OK : err_at_rank(ERR(PLAN_INVALID, "what one rank writes comes from a ring and another segment, or from the ring "
					     "of another rank"), k->rank);
}

static uint64_t end_of(const struct run *run, const struct run_task *t)
{
	return t->gate_count ? run->gates[t->first_gate].end : 0;
}

/* Sets what each task and those behind it still need. A ring goes on when the bytes of its next task are there: all that is kept until
 * then must have room in it. */
static FALLIBLE enum err keep_of_rank(struct run *run, struct run_rank *k)
{
	struct run_task *tasks = &run->tasks[k->first_task];

	TRY(ring_of_rank(run, k));
	if (!k->ring)
		return OK;
	const struct run_file *f = &run->files[k->ring - 1];
	uint64_t keep = f->bytes;
	for (uint64_t i = k->task_count; i-- > 0;) {
		if (tasks[i].gate_count)
			keep = num_min(keep, run->gates[tasks[i].first_gate].begin);
		tasks[i].keep = keep;
		if (end_of(run, &tasks[i]) > keep && end_of(run, &tasks[i]) - keep > f->ring_bytes)
			return err_at_rank(ERR(PLAN_INVALID, "bytes %ju to %ju of the image are needed at once, and its ring has %ju",
					       (uintmax_t)keep, (uintmax_t)end_of(run, &tasks[i]), (uintmax_t)f->ring_bytes), k->rank);
	}
	return OK;
}

enum err gate_sort(struct run *run)
{
	CLEANUP(mem_free_ptr) struct ready_at *order = mem_zalloc(run->tasks_n, sizeof *order);
	CLEANUP(mem_free_ptr) struct run_task *tasks = mem_zalloc(run->tasks_n, sizeof *tasks);

	NEED(order && tasks, "no memory to sort %ju tasks", (uintmax_t)run->tasks_n);
	for (uint64_t i = 0; i < run->ranks_n; i++)
		sort_rank(run, &run->ranks[i], order, tasks);
	for (uint64_t i = 0; i < run->ranks_n; i++)
		TRY(keep_of_rank(run, &run->ranks[i]));
	return OK;
}

/* ---- while it runs ---- */

enum err gate_open(struct run *run, const int *fds, uint32_t fd_count, struct gate *out, bool *active_out)
{
	*active_out = false;
	for (uint64_t i = 0; i < run->files_n; i++) {
		bool filling = run->files[i].kind == RUN_FILE_SEGMENT && run->files[i].filling;
		must(!filling || run->files[i].fd_index < fd_count);
		*active_out = *active_out || filling;
	}
	if (!*active_out)
		return OK;
	*out = (struct gate){ .run = run, .fds = fds, .marks = mem_zalloc(run->files_n, sizeof(uint64_t)),
			      .pages = mem_zalloc(run->files_n, sizeof(struct seg_map)), .moved_ms = clock_mono_ms(),
			      .rest_us = REST_MIN_US }; /* a look costs a call for each rank: the more there are, the rarer it is */
	return out->marks && out->pages ? OK : ERR(NO_MEMORY, "no memory to wait for %ju files", (uintmax_t)run->files_n);
}

void gate_close(struct gate *g)
{
	for (uint64_t i = 0; g->pages && i < g->run->files_n; i++)
		seg_unmap(&g->pages[i]);
	mem_free(g->pages);
	mem_free(g->marks);
	*g = (struct gate){ 0 };
}

/* The page with the numbers. */
static uint64_t numbers_at(const struct run_file *f)
{
	return f->ring_bytes ? f->ring_at + f->ring_bytes : (f->bytes + PAGE - 1) / PAGE * PAGE;
}

/* As far as the rank's ring may be written over, if n of its tasks are done. */
static uint64_t released(const struct run *run, const struct run_rank *k, uint64_t n)
{
	return n < k->task_count ? run->tasks[k->first_task + n].keep : run->files[k->ring - 1].bytes;
}

struct put {
	_Atomic uint64_t *at;
	uint64_t number;
};

static void put_number(void *user)
{
	struct put *p = user;

	atomic_store(p->at, htole64(p->number));
}

/* Through a mapping: a write to the file would give a segment that was shrunk its bytes back, as zeros. */
static FALLIBLE enum err put_released(const struct run *run, const int *fds, uint32_t file, uint64_t number, struct seg_map *page)
{
	const struct run_file *f = &run->files[file];
	struct put p = { .number = number };

	if (!page->p)
		TRY(seg_map_page(fds[f->fd_index], numbers_at(f), page));
	p.at = (_Atomic uint64_t *)(void *)(page->p + GATE_RELEASED_AT);
	return err_at_rank(seg_guard(put_number, &p), f->rank);
}

enum err gate_begin(struct run *run, const int *fds)
{
	for (uint32_t i = 0; i < run->files_n; i++) {
		uint64_t low = run->files[i].bytes; /* a rank whose parts others write has no task */
		for (uint64_t r = 0; r < run->ranks_n; r++)
			low = run->ranks[r].ring == i + 1 ? released(run, &run->ranks[r], 0) : low;
		struct seg_map page = { 0 };
		enum err e = run->files[i].ring_bytes ? put_released(run, fds, i, low, &page) : OK;
		seg_unmap(&page);
		TRY(e);
	}
	return OK;
}

enum err gate_done(struct gate *g, uint64_t task)
{
	struct run *run = g->run;
	struct run_rank *k = &run->ranks[run->tasks[task].rank_index];
	uint64_t n = atomic_load(&k->tasks_done);

	if (!k->ring || atomic_exchange(&run->tasks[task].done, 1))
		return OK;
	while (n < k->task_count && atomic_load(&run->tasks[k->first_task + n].done))
		if (atomic_compare_exchange_strong(&k->tasks_done, &n, n + 1))
			n++;
	do { /* a worker that wrote a smaller number meanwhile writes once more */
		n = atomic_load(&k->tasks_done);
		TRY(put_released(run, g->fds, k->ring - 1, released(run, k, n), &g->pages[k->ring - 1]));
	} while (n != atomic_load(&k->tasks_done));
	return OK;
}

/* A number that runs ahead of the room in a ring: bytes were written over before they were read. */
static FALLIBLE enum err check_room(const struct gate *g, uint32_t file, uint64_t mark)
{
	const struct run *run = g->run;
	const struct run_file *f = &run->files[file];

	each(k, run->ranks, run->ranks_n) {
		uint64_t low = k->ring == file + 1 ? released(run, k, atomic_load(&k->tasks_done)) : UINT64_MAX;
		if (mark > low && mark - low > f->ring_bytes)
			return err_at_rank(ERR(FORMAT_IMAGE, "%ju bytes are said to be there, through a ring of %ju, and those from %ju on "
					       "are needed", (uintmax_t)mark, (uintmax_t)f->ring_bytes, (uintmax_t)low), f->rank);
	}
	return OK;
}

static FALLIBLE enum err read_mark(struct gate *g, uint32_t file)
{
	const struct run_file *f = &g->run->files[file];
	uint64_t mark, place = numbers_at(f);

	enum err e = fs_pread(g->fds[f->fd_index], &mark, sizeof mark, place, "segment");
	if (e)
		return err_at_rank(e == ERR_STORAGE_IO ? ERR(SEGMENT_SHRUNK, "the segment is smaller than its image") : e, f->rank);
	__sync_synchronize(); /* what was there before the number was; gcc has no narrower fence that it takes with -fsanitize=thread */
	mark = le64toh(mark);
	if (mark > f->bytes)
		return err_at_rank(ERR(FORMAT_IMAGE, "%ju bytes are said to be there, of an image of %ju", (uintmax_t)mark,
				       (uintmax_t)f->bytes), f->rank);
	if (mark < g->marks[file])
		return err_at_rank(ERR(FORMAT_IMAGE, "%ju bytes are said to be there, after %ju were", (uintmax_t)mark,
				       (uintmax_t)g->marks[file]), f->rank);
	if (f->ring_bytes)
		TRY(check_room(g, file, mark));
	if (mark > g->marks[file])
		g->moved_ms = clock_mono_ms();
	g->marks[file] = mark;
	return OK;
}

/* A seal says that all of an image is there; of one that goes through a ring, only the number does. */
static bool is_there(const struct gate *g, const struct run_gate *k)
{
	const struct run_file *f = &g->run->files[k->file];

	return !f->filling || g->marks[k->file] >= k->end || (!f->ring_bytes && atomic_load(&g->run->head->sealed));
}

static FALLIBLE enum err is_ready(struct gate *g, const struct run_task *t, bool *ready_out)
{
	*ready_out = true;
	for (uint32_t i = 0; i < t->gate_count && *ready_out; i++) {
		const struct run_gate *k = &g->run->gates[t->first_gate + i];
		if (is_there(g, k))
			continue;
		TRY(read_mark(g, k->file));
		*ready_out = g->marks[k->file] >= k->end;
	}
	return OK;
}

static FALLIBLE enum err stalled(const struct gate *g)
{
	each(k, g->run->ranks, g->run->ranks_n) {
		uint64_t next = atomic_load(&k->next_task);
		const struct run_task *t = &g->run->tasks[k->first_task + next];
		if (k->ring && atomic_load(&k->tasks_done) < next)
			continue; /* the disk holds it up: the ring is full */
		for (uint32_t n = 0; next < k->task_count && n < t->gate_count; n++) {
			const struct run_gate *at = &g->run->gates[t->first_gate + n];
			const struct run_file *f = &g->run->files[at->file];
			if (f->filling && g->marks[at->file] < at->end)
				return err_at_rank(ERR(NOT_SEALED, "rank %u has filled %ju of %ju bytes, and none for %d s", f->rank,
						       (uintmax_t)g->marks[at->file], (uintmax_t)f->bytes, GATE_STALL_MS / 1000), f->rank);
		}
	}
	return OK; /* they were taken while we looked */
}

/* The next one of rank k, if it is ready: another worker may take it before us. */
static FALLIBLE enum err take_of(struct gate *g, struct run_rank *k, uint64_t *task_out, bool *taken_out)
{
	uint64_t next = atomic_load(&k->next_task);
	bool ready = true;

	while (ready && next < k->task_count) {
		TRY(is_ready(g, &g->run->tasks[k->first_task + next], &ready));
		if (ready && atomic_compare_exchange_strong(&k->next_task, &next, next + 1)) {
			*task_out = k->first_task + next;
			*taken_out = true;
			return OK;
		}
	}
	g->held = g->held || next < k->task_count;
	return OK;
}

enum err gate_take(struct gate *g, uint32_t index, uint32_t count, uint64_t *task_out, bool *taken_out)
{
	struct run *run = g->run;
	uint64_t begin = run->ranks_n * index / count;

	*taken_out = g->held = false;
	for (uint64_t i = 0; i < run->ranks_n && !*taken_out; i++)
		TRY(take_of(g, &run->ranks[(begin + i) % run->ranks_n], task_out, taken_out));
	if (*taken_out) {
		g->held = false;
		g->moved_ms = clock_mono_ms();
		g->rest_us = REST_MIN_US;
		return OK;
	}
	/* Room that workers made in rings is what ranks wait for: time counts from then on. */
	uint64_t done = 0;
	for (uint64_t i = 0; i < g->run->ranks_n; i++)
		done += atomic_load(&g->run->ranks[i].tasks_done);
	if (done != g->done_seen)
		g->moved_ms = clock_mono_ms();
	g->done_seen = done;
	g->rest_us = (int)num_min((uint64_t)g->rest_us * 2, num_min(REST_MAX_US + run->ranks_n * REST_RANK_US, REST_LIMIT_US));
	return g->held && clock_mono_ms() - g->moved_ms > GATE_STALL_MS ? stalled(g) : OK;
}
