/* state_dict_op_tables.c: see state_dict_op_tables.h.
 *
 * A target that exists keeps what no move brings. Its new segment is another one, so what it keeps is moved, too: from its old
 * segment, on the same rank. */
#include "ops/state_dict_op_tables.h"

#include "base/num.h"
#include "runner/move.h"

struct making {
	const struct state_dict_op_tables *t;
	struct run_build *b;
	uint32_t *files[STATE_DICT_OP_SIDES], *made;    /* run files by rank */
	uint64_t filled;                       /* bytes in the task being made */
	uint32_t groups;
};

/* In a program of its own each rank is a process: one "file" per rank, and offsets are addresses. */
static FALLIBLE enum err add_memories(struct making *m)
{
	uint32_t n = m->t->memories;

	for (uint32_t i = 0; i < STATE_DICT_OP_SIDES; i++)
		m->files[i] = mem_zalloc(n, sizeof **m->files);
	m->made = mem_zalloc(n, sizeof *m->made);
	NEED(m->files[0] && m->files[1] && m->made, "no memory for %u ranks", n);
	for (uint32_t r = 0; r < n; r++) {
		TRY(run_add_file(m->b, RUN_FILE_MEMORY, 0, STR(""), 0, &m->made[r]));
		m->b->files.v[m->made[r]].rank = r;
		for (uint32_t i = 0; i < STATE_DICT_OP_SIDES; i++)
			m->files[i][r] = m->made[r];
	}
	return OK;
}

static FALLIBLE enum err add_files(struct run_build *b, const struct rank_segments *s, bool writable, uint32_t **out)
{
	*out = mem_zalloc(s->count, sizeof **out);
	NEED(*out, "no memory for %u segments", s->count);
	for (uint32_t i = 0; i < s->count; i++)
		TRY(input_add_segment(b, &s->v[i], i, writable, &(*out)[i]));
	return OK;
}

static FALLIBLE enum err add_sources(struct making *m)
{
	const struct state_dict_op_places *places = m->t->places;
	struct run_src *s;

	TRY(vec_reserve(&m->b->srcs, places->n));
	each(p, places->v, places->n) {
		TRY(vec_push(&m->b->srcs, &s));
		*s = (struct run_src){ .kind = RUN_SRC_PLAIN, .dtype = (uint8_t)p->dtype, .ndim = p->ndim, .rank = p->rank,
				       .file = m->files[p->dict][p->rank], .offset = p->offset, .length = p->bytes,
				       .fqn_len = (uint32_t)p->fqn.n };
		TRY(run_add_string(m->b, p->fqn, &s->fqn_at));
		TRY(run_add_dims(m->b, p->dims, p->ndim, &s->dims_at));
	}
	return OK;
}

static FALLIBLE enum err add_targets(struct making *m)
{
	const struct state_dict_op_images *im = m->t->images;
	struct run_dst *d;

	TRY(vec_reserve(&m->b->dsts, im->slots.n));
	each(s, im->slots.v, im->slots.n) {
		TRY(vec_push(&m->b->dsts, &d));
		*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)s->dtype, .bare = true, .ndim = s->ndim,
				       .rank = s->rank, .file = m->made[s->rank], .offset = s->offset, .payload_bytes = s->bytes,
				       .length = s->bytes, .fqn_len = (uint32_t)s->fqn.n };
		TRY(run_add_string(m->b, s->fqn, &d->fqn_at));
		TRY(run_add_dims(m->b, s->dims, s->ndim, &d->dims_at));
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- moves */

static FALLIBLE enum err begin_rank(struct making *m, uint32_t rank)
{
	struct run_rank *k;

	if (m->b->ranks.n && m->b->ranks.v[m->b->ranks.n - 1].rank == rank)
		return OK;
	TRY(vec_push(&m->b->ranks, &k));
	k->rank = rank;
	k->first_task = m->b->tasks.n;
	m->filled = BUILD_TASK_BYTES;
	return OK;
}

/* A task for `bytes` more of the rank that was begun last: the one being made, or the next. */
static FALLIBLE enum err task_for(struct making *m, uint64_t bytes)
{
	struct run_rank *k = &m->b->ranks.v[m->b->ranks.n - 1];
	struct run_task *task;

	k->bytes_total += bytes;
	if (m->filled && m->filled + bytes <= BUILD_TASK_BYTES) {
		m->filled += bytes;
		return OK;
	}
	TRY(vec_push(&m->b->tasks, &task));
	*task = (struct run_task){ .first = m->b->moves.n, .rank_index = (uint32_t)m->b->ranks.n - 1 };
	k->task_count++;
	m->filled = bytes + 1;
	return OK;
}

static FALLIBLE enum err push_move(struct making *m, struct run_move move, uint32_t ndim, const int64_t *dims)
{
	struct run_move *out;

	TRY(build_room(m->b->moves.n, 1));
	TRY(run_add_dims(m->b, dims, ndim, &move.dims_at));
	TRY(vec_push(&m->b->moves, &out));
	*out = move;
	for (int i = 0; i < 2 && m->t->by_digest; i++) {
		struct block_digest *none;
		TRY(vec_push(&m->b->digests, &none));
	}
	m->b->tasks.v[m->b->tasks.n - 1].count++;
	return OK;
}

/* `n` moves that bring the same box (one, or those of a reduction), in pieces. */
static FALLIBLE enum err add_moves(struct making *m, const struct run_move *moves, uint64_t n, const int64_t *box)
{
	const struct run_src *s = &m->b->srcs.v[moves[0].src];
	uint32_t item = dtype_bytes((enum dtype)s->dtype), ndim = s->ndim;
	int64_t dims[2 * NDIM_MAX];
	struct move_cut cut;

	move_cut_begin(&cut, ndim, box, num_max((m->t->by_digest ? MOVE_PIECE_BYTES : BUILD_TASK_BYTES) / item, 1));
	while (move_cut_next(&cut, dims, dims + ndim)) {
		TRY(task_for(m, box_volume(ndim, dims + ndim) * item));
		m->groups++;
		for (uint64_t i = 0; i < n; i++) {
			struct run_move move = moves[i];
			move.reduce = n > 1 || move.reduce ? m->groups : 0;
			TRY(push_move(m, move, ndim, dims));
		}
	}
	return OK;
}

static FALLIBLE enum err place_of(struct making *m, const struct tree *node, uint32_t shard, uint32_t *out)
{
	if (shard >= node->tensor.shard_count || node->tensor.shards[shard].made ||
	    node->tensor.shards[shard].at >= m->t->places->n)
		return ERR(INTERNAL, "a move of a shard that is nowhere");
	*out = (uint32_t)node->tensor.shards[shard].at;
	return OK;
}

static FALLIBLE enum err to_run_move(struct making *m, const struct state_dict_op_move *from, struct run_move *out)
{
	*out = (struct run_move){ .reduce = from->reduce, .divisor = from->divisor, .op = from->op };
	TRY(place_of(m, from->from, from->from_shard, &out->src));
	if (!m->t->images)
		return place_of(m, from->to, from->to_shard, &out->dst);
	uint64_t slot = state_dict_op_images_slot(m->t->images, from->to_rank, from->to, from->to_shard);
	if (slot == UINT64_MAX)
		return ERR(INTERNAL, "a move to a shard that is nowhere");
	out->dst = (uint32_t)slot;
	return OK;
}

static uint64_t group_end(const struct state_dict_op_plan *p, uint64_t i)
{
	uint64_t end = i + 1;

	while (p->moves[i].reduce && end < p->move_count && p->moves[end].reduce == p->moves[i].reduce)
		end++;
	return end;
}

static FALLIBLE enum err count_covered(struct making *m)
{
	const struct state_dict_op_plan *p = m->t->plan;
	struct run_move move;

	for (uint64_t i = 0; i < p->move_count; i = group_end(p, i)) {
		TRY(to_run_move(m, &p->moves[i], &move));
		struct state_dict_op_slot *s = &m->t->images->slots.v[move.dst];
		s->covered += box_volume(s->ndim, p->moves[i].dims + s->ndim);
	}
	return OK;
}

static FALLIBLE enum err keep_slot(struct making *m, uint64_t slot)
{
	const struct state_dict_op_slot *s = &m->t->images->slots.v[slot];
	uint64_t numel = box_volume(s->ndim, s->dims + s->ndim);

	if (s->covered != 0 && s->covered != numel) {
		enum err e = ERR(COVERAGE_HOLE, "%ju of %ju elements of a shard would be set", (uintmax_t)s->covered, (uintmax_t)numel);
		return err_at_rank(err_at_fqn(e, s->fqn.p, s->fqn.n), s->rank);
	}
	if (s->covered || s->keeps == UINT64_MAX)
		return OK;
	must(s->keeps < m->t->places->n);
	struct run_move move = { .src = (uint32_t)s->keeps, .dst = (uint32_t)slot };
	/* in the old shard's own numbers: the box is the same, whatever it is called */
	if (m->b->srcs.v[s->keeps].length != s->bytes)
		return ERR(INTERNAL, "what is kept has another size");
	return add_moves(m, &move, 1, s->dims);
}

static FALLIBLE enum err add_group(struct making *m, uint64_t first, uint64_t end)
{
	const struct state_dict_op_plan *p = m->t->plan;
	CLEANUP(mem_free_ptr) struct run_move *moves = mem_zalloc(end - first, sizeof *moves);

	NEED(moves, "no memory for a reduction of %ju", (uintmax_t)(end - first));
	for (uint64_t i = first; i < end; i++)
		TRY(to_run_move(m, &p->moves[i], &moves[i - first]));
	return add_moves(m, moves, end - first, p->moves[first].dims);
}

/* In the order of target ranks; of each first what it keeps. */
static FALLIBLE enum err add_all(struct making *m)
{
	const struct state_dict_op_plan *p = m->t->plan;
	uint64_t slots = m->t->images ? m->t->images->slots.n : 0, slot = 0, i = 0;

	if (m->t->images)
		TRY(count_covered(m));
	while (slot < slots || i < p->move_count) {
		uint32_t a = slot < slots ? m->t->images->slots.v[slot].rank : UINT32_MAX;
		uint32_t b = i < p->move_count ? p->moves[i].to_rank : UINT32_MAX;
		uint32_t rank = a < b ? a : b;
		TRY(begin_rank(m, rank));
		for (; slot < slots && m->t->images->slots.v[slot].rank == rank; slot++)
			TRY(keep_slot(m, slot));
		while (i < p->move_count && p->moves[i].to_rank == rank) {
			uint64_t end = group_end(p, i);
			TRY(add_group(m, i, end));
			i = end;
		}
	}
	return OK;
}

enum err state_dict_op_tables_make(const struct state_dict_op_tables *t, struct run_build *b)
{
	struct making m = { .t = t, .b = b };
	enum err e = t->memories ? add_memories(&m) : OK;

	b->opts.mode = t->images ? RUN_MOVE_BOXES : RUN_COMPARE_BOXES;
	b->opts.task_bytes = BUILD_TASK_BYTES;
	for (uint32_t i = 0; !e && i < STATE_DICT_OP_SIDES; i++)
		if (t->dicts[i])
			e = add_files(b, t->dicts[i], false, &m.files[i]);
	if (!e && t->made)
		e = add_files(b, t->made, true, &m.made);
	e = e ?: add_sources(&m);
	if (!e && t->images)
		e = add_targets(&m);
	e = e ?: add_all(&m);
	for (uint32_t i = 0; i < STATE_DICT_OP_SIDES; i++)
		mem_free(m.files[i]);
	mem_free(m.made);
	return e;
}
