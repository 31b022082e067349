/* state_dict_op_run.c: see state_dict_op_run.h.
 *
 * Why not exec.c, which fills segments, too: there a source is read from a disk, through the page cache or a ring, and checked. Here
 * both sides are mapped, and a copy is all there is. */
#include "runner/state_dict_op_run.h"

#include "base/num.h"
#include "io/digest.h"
#include "runner/fold.h"
#include "runner/move.h"
#include "tensor/stats.h"

struct moving {
	const struct exec_spec *spec;
	struct run *run;
	struct files files;
	unsigned char *buf;            /* of FOLD_BYTES and more, or two pieces to compare */
	uint64_t buf_bytes, piece_bytes;
	/* what runs guarded */
	const struct run_move *move;
	uint32_t parts;
	const int64_t *off, *size;
	enum err result;
	struct stats_diff diff;
};

static FALLIBLE enum err need(struct moving *x, uint64_t bytes)
{
	if (bytes <= x->buf_bytes)
		return OK;
	mem_free(x->buf);
	x->buf = mem_alloc(bytes);
	x->buf_bytes = x->buf ? bytes : 0;
	return x->buf ? OK : ERR(NO_MEMORY, "no memory for a buffer of %ju bytes", (uintmax_t)bytes);
}

static FALLIBLE enum err guarded(struct moving *x, void (*fn)(void *user))
{
	x->result = OK;
	TRY(seg_guard(fn, x));
	return x->result;
}

static void copy_piece(void *user)
{
	struct moving *x = user;

	x->result = move_copy(&x->files, x->run, x->move, x->off, x->size);
}

static void pack_parts(void *user)
{
	struct moving *x = user;
	const struct run_src *s = &x->run->srcs[x->move->src];
	uint64_t stride = box_volume(s->ndim, x->size) * dtype_bytes((enum dtype)s->dtype);

	for (uint32_t i = 0; i < x->parts; i++)
		move_pack(&x->files, x->run, x->move[i].src, x->off, x->size, x->buf + i * stride);
}

static void unpack_folded(void *user)
{
	struct moving *x = user;
	enum dtype dtype = (enum dtype)x->run->srcs[x->move->src].dtype;

	x->result = move_unpack(&x->files, x->run, x->move->dst, dtype, x->off, x->size, x->buf);
}

static void compare_piece(void *user)
{
	struct moving *x = user;
	const struct run_src *s = &x->run->srcs[x->move->src];
	uint64_t n = box_volume(s->ndim, x->size);
	unsigned char *b = x->buf + n * dtype_bytes((enum dtype)s->dtype);

	move_pack(&x->files, x->run, x->move->src, x->off, x->size, x->buf);
	move_pack(&x->files, x->run, x->move->dst, x->off, x->size, b);
	stats_compare((enum dtype)s->dtype, x->buf, b, n, &x->run->head->opts.near, 0, &x->diff);
}

/* ------------------------------------------------------------------------------------------------------ pieces */

static void count_done(struct moving *x, uint32_t rank_index, const struct run_move *m, uint32_t parts, uint64_t bytes)
{
	uint32_t to = x->run->head->opts.mode == RUN_MOVE_BOXES ? x->run->dsts[m->dst].rank : x->run->srcs[m->dst].rank;

	atomic_fetch_add(&x->run->ranks[rank_index].bytes_done, bytes);
	for (uint32_t i = 0; i < parts; i++)
		if (x->run->srcs[m[i].src].rank != to)
			atomic_fetch_add(&x->run->head->moved_bytes, bytes);
}

/* ------------------------------------------------------------------------------------------------------- deltas */

static void pack_source(void *user)
{
	struct moving *x = user;

	move_pack(&x->files, x->run, x->move->src, x->off, x->size, x->buf);
}

static void pack_target(void *user)
{
	struct moving *x = user;

	move_pack_target(&x->files, x->run, x->move->dst, x->off, x->size, x->buf + x->piece_bytes);
}

static FALLIBLE enum err target_is(struct moving *x, const struct block_digest *now, bool *same_out)
{
	unsigned char there[sizeof now->xxh3_128];

	TRY(guarded(x, pack_target));
	digest_xxh3(x->buf + x->piece_bytes, x->piece_bytes, there);
	*same_out = memcmp(there, now->xxh3_128, sizeof there) == 0;
	return OK;
}

/* Writes a piece unless the target has it already, and compares what is there then with the digest of the source's bytes. The entry of
 * the target's newest generation decides what is looked at first: bytes that have changed since are not worth a look. */
static FALLIBLE enum err move_by_digest(struct moving *x)
{
	const struct block_digest *newest = &x->run->digests[2 * (uint64_t)(x->move - x->run->moves)];
	struct block_digest *now = (struct block_digest *)(uintptr_t)newest + 1;
	bool same = false;

	TRY(need(x, 2 * x->piece_bytes));
	move_populate(&x->files, x->run, x->move, x->off, x->size, true, false);
	TRY(guarded(x, pack_source));
	digest_xxh3(x->buf, x->piece_bytes, now->xxh3_128);
	now->end = x->piece_bytes;
	bool changed = !newest->end || memcmp(newest->xxh3_128, now->xxh3_128, sizeof now->xxh3_128) != 0;
	if (!changed && x->move->warm)
		TRY(target_is(x, now, &same));
	if (same)
		return OK;
	move_populate(&x->files, x->run, x->move, x->off, x->size, false, true);
	TRY(guarded(x, unpack_folded));
	TRY(target_is(x, now, &same));
	return same ? OK : ERR(DIGEST_MISMATCH, "what was written differs from the source: does somebody write into the target's segment?");
}

static FALLIBLE enum err do_piece(struct moving *x)
{
	struct run_src *s = &x->run->srcs[x->move->src];
	uint64_t n = box_volume(s->ndim, x->size), bytes = n * dtype_bytes((enum dtype)s->dtype);

	if (x->run->head->opts.mode == RUN_COMPARE_BOXES) {
		TRY(need(x, 2 * bytes));
		x->diff = (struct stats_diff){ 0 };
		TRY(guarded(x, compare_piece));
		x->diff.first = move_shard_element(x->run, x->move->src, x->off, x->size, x->diff.first);
		if (x->diff.count)
			run_note_difference(s, &x->diff);
		return OK;
	}
	x->piece_bytes = bytes;
	if (x->run->digests_n && !x->move->reduce)
		return move_by_digest(x);
	move_populate(&x->files, x->run, x->move, x->off, x->size, true, true);
	if (!x->move->reduce)
		return guarded(x, copy_piece);
	TRY(need(x, x->parts * bytes));
	TRY(guarded(x, pack_parts));
	TRY(fold_parts(x->buf, bytes, x->parts, n, (enum dtype)s->dtype, x->move));
	return guarded(x, unpack_folded);
}

/* One move, or all of a reduction. */
static FALLIBLE enum err do_moves(struct moving *x, const struct run_move *m, uint32_t parts, uint32_t rank_index)
{
	const struct run_src *s = &x->run->srcs[m->src];
	bool compare = x->run->head->opts.mode == RUN_COMPARE_BOXES;
	uint32_t item = dtype_bytes((enum dtype)s->dtype);
	uint64_t most = m->reduce ? fold_elements((enum dtype)s->dtype, parts) : num_max(MOVE_PIECE_BYTES / item, 1);
	int64_t dims[2 * NDIM_MAX + 1];
	struct move_cut cut;
	unsigned char *p;

	for (uint32_t i = 0; i < parts; i++)
		TRY(move_map(&x->files, x->run, &m[i], true, !compare));
	if (compare)
		TRY(files_segment(&x->files, x->run->srcs[m->dst].file, &p));
	x->move = m;
	x->parts = parts;
	x->off = dims;
	x->size = dims + s->ndim;
	move_cut_begin(&cut, s->ndim, x->run->dims + m->dims_at, most);
	while (move_cut_next(&cut, dims, dims + s->ndim)) {
		if (atomic_load(&x->run->head->cancelled))
			return OK;
		TRY(do_piece(x));
		count_done(x, rank_index, m, parts, box_volume(s->ndim, x->size) * item);
		TRY(x->spec->tick(x->spec->user));
	}
	return OK;
}

static FALLIBLE enum err do_task(struct moving *x, const struct run_task *t)
{
	const struct run_move *m = &x->run->moves[t->first];

	for (uint32_t i = 0, parts; i < t->count; i += parts) {
		for (parts = 1; m[i].reduce && i + parts < t->count && m[i + parts].reduce == m[i].reduce;)
			parts++;
		enum err e = do_moves(x, &m[i], parts, t->rank_index);
		if (e && e != ERR_CANCELLED)
			return move_error(&x->files, x->run, &m[i], e);
		TRY(e);
	}
	return OK;
}

enum err state_dict_op_run(const struct exec_spec *spec)
{
	struct moving x = { .spec = spec, .run = spec->run };
	enum err e = files_open(spec->run, spec->stores, spec->fds, spec->fd_count, &x.files);
	uint64_t task;

	TRY(e);
	while (!e && !atomic_load(&spec->run->head->cancelled) && run_take_task(spec->run, spec->index, spec->count, &task))
		e = do_task(&x, &spec->run->tasks[task]);
	mem_free(x.buf);
	files_close(&x.files);
	return e;
}
