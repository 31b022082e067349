/* state_dict_op.c: what every operation needs: the request's checks, and the lists that a plan consists of (see state_dict_op.h). */
#include "plan/state_dict_op.h"

#include "base/num.h"
#include "plan/state_dict_op_impl.h"
#include "tensor/box.h"
#include "tensor/cast.h"

/* Scratch grows with the trees; the bound is there for mistakes. */
#define SCRATCH_MAX ((uint64_t)1 << 36)

enum err state_dict_op_path(struct state_dict_op_build *b, const struct iterate_row *row, struct str *out)
{
	if (!b->has_path || b->path_row != row->number)
		TRY(iterate_path(row, b->arena, &b->path));
	b->has_path = true;
	b->path_row = row->number;
	*out = b->path;
	return OK;
}

enum err state_dict_op_move_add(struct state_dict_op_build *b, struct state_dict_op_move move)
{
	const struct tree_tensor *t = &move.from->tensor;
	struct state_dict_op_move *m;
	uint64_t bytes;

	if (!b->wanted[move.to_rank])
		return OK;
	if (b->moves.n >= STATE_DICT_OP_MOVES_MAX)
		return ERR(LIMIT_EXCEEDED, "the plan has more than %d moves: plan for fewer ranks at a time", STATE_DICT_OP_MOVES_MAX);
	TRY(box_numel(t->ndim, move.dims + t->ndim, &bytes));
	TRY(num_mul(bytes, dtype_bytes(t->dtype), &bytes));
	TRY(num_add(b->out->bytes_total, bytes, &b->out->bytes_total));
	if (move.from_rank != move.to_rank)
		b->out->bytes_needed += bytes;
	TRY(vec_push(&b->moves, &m));
	*m = move;
	return OK;
}

enum err state_dict_op_whole_dims(struct state_dict_op_build *b, const struct tree_tensor *t, const int64_t **out)
{
	int64_t *dims;

	TRY(arena_i64(b->arena, (uint64_t)t->ndim * 2 + 1, &dims));
	for (uint32_t d = 0; d < t->ndim; d++)
		dims[t->ndim + d] = t->shape[d];
	*out = dims;
	return OK;
}

enum err state_dict_op_move_own(struct state_dict_op_build *b, uint32_t rank, const struct tree *from, const struct tree *to)
{
	const struct tree_tensor *t = &from->tensor;

	if (!b->wanted[rank])
		return OK;
	for (uint32_t i = 0; i < t->shard_count; i++) {
		struct state_dict_op_move m = { .from_rank = rank, .to_rank = rank, .from = from, .to = to, .from_shard = i, .to_shard = i,
						.dims = t->shards[i].dims };
		if (!m.dims)
			TRY(state_dict_op_whole_dims(b, t, &m.dims));
		if (!box_empty(t->ndim, m.dims + t->ndim))
			TRY(state_dict_op_move_add(b, m));
	}
	return OK;
}

enum err state_dict_op_note_add(struct state_dict_op_build *b, enum state_dict_op_what what, const struct iterate_row *row,
				uint32_t rank, struct str from,
		       struct str to)
{
	struct state_dict_op_note *n;

	TRY(vec_push(&b->notes, &n));
	*n = (struct state_dict_op_note){ .what = what, .rank = rank, .from = from, .to = to };
	return state_dict_op_path(b, row, &n->path);
}

enum err state_dict_op_cast(struct state_dict_op_build *b, const struct iterate_row *row, uint32_t rank, const struct tree *from,
			    const struct tree *to)
{
	if (from->tensor.dtype == to->tensor.dtype)
		return OK;
	TRY(cast_check(to->tensor.dtype, from->tensor.dtype));
	return state_dict_op_note_add(b, STATE_DICT_OP_NOTE_CAST, row, rank, str_of(dtype_name(from->tensor.dtype)),
				      str_of(dtype_name(to->tensor.dtype)));
}

static FALLIBLE enum err made(struct state_dict_op_build *b, uint32_t rank, enum tree_kind kind, struct tree_tensor t, struct tree **out)
{
	struct tree_shard *shards;

	TRY(arena_alloc(b->arena, t.shard_count, sizeof *shards, &shards));
	for (uint32_t i = 0; i < t.shard_count; i++)
		shards[i] = (struct tree_shard){ .dims = kind == TREE_TENSOR ? NULL : t.shards[i].dims, .made = true,
						 .at = b->out->made[rank]++ };
	t.shards = shards;
	/* Set here, not by iterate: the moves name this very node. */
	if (b->rq->cpu_offload || b->rq->kind == JOB_OFFLOAD)
		t.device = TREE_CPU;
	else if (b->rq->has_device)
		t.device = b->rq->device;
	return tree_tensor_new(b->arena, kind, &t, out);
}

enum err state_dict_op_made(struct state_dict_op_build *b, uint32_t rank, const struct tree *like, struct tree **out)
{
	return made(b, rank, like->kind, like->tensor, out);
}

enum err state_dict_op_made_whole(struct state_dict_op_build *b, uint32_t rank, const struct tree *like, struct tree **out)
{
	struct tree_tensor t = like->tensor;

	t.shard_count = 1;
	t.mesh = NULL;
	t.placements = NULL;
	return made(b, rank, TREE_TENSOR, t, out);
}

enum err state_dict_op_same_size(const struct tree *source, const struct tree *target)
{
	char a[192], b[192];

	if (tree_same_shape(source, target))
		return OK;
	return err_expected(ERR(SIZE_MISMATCH, "Size mismatch between source %s and target %s",
				box_print(source->tensor.ndim, source->tensor.shape, a, sizeof a),
				box_print(target->tensor.ndim, target->tensor.shape, b, sizeof b)), b, a);
}

enum err state_dict_op_describe(struct arena *a, const struct tree *tensor, struct str *out)
{
	char text[256];

	return arena_printf(a, out, "%s %s", dtype_name(tensor->tensor.dtype),
			    box_print(tensor->tensor.ndim, tensor->tensor.shape, text, sizeof text));
}

struct iterate_options state_dict_op_iterate_options(const struct state_dict_op_build *b)
{
	const struct state_dict_op_request *rq = b->rq;

	return (struct iterate_options){
		.group = rq->group, .group_count = rq->group_count, .ranks_only = rq->ranks_only,
		.ranks_only_count = rq->ranks_only_count, .companion = b->companion, .cpu_offload = rq->cpu_offload,
		.type_check = rq->type_check,
	};
}

static FALLIBLE enum err check_request(struct state_dict_op_build *b)
{
	const struct state_dict_op_request *rq = b->rq;
	uint32_t size = rq->group ? rq->group_count : rq->world_size;

	if (!kind_is(rq->kind, KIND_OPERATES))
		return ERR(INVALID_REQUEST, "no such operation");
	if (rq->world_size < 1 || rq->world_size > 65536)
		return ERR(WORLD_MISMATCH, "a world has 1 to 65536 ranks, not %u", rq->world_size);
	for (uint32_t i = 0; i < size; i++) {
		uint32_t rank = rq->group ? rq->group[i] : i;
		if (rank >= rq->world_size)
			return ERR(INVALID_REQUEST, "rank %u of the group is not in a world of %u", rank, rq->world_size);
		if (b->member[rank])
			return ERR(INVALID_REQUEST, "rank %u is in the group twice", rank);
		b->member[rank] = 1;
	}
	if ((rq->kind == JOB_BROADCAST || rq->kind == JOB_DISTRIBUTE) && rq->root >= size)
		return ERR(INVALID_REQUEST, "root %u is not in a group of %u", rq->root, size);
	if ((rq->kind == JOB_COPY || rq->kind == JOB_COMPARE) && !b->companion)
		return ERR(INVALID_REQUEST, "%s needs two state dicts", rq->kind == JOB_COPY ? "copy" : "compare");
	if (rq->kind == JOB_CREATE && b->companion)
		return ERR(INVALID_REQUEST, "create makes a new state dict, the target exists");
	for (uint32_t i = 0; rq->plan_for && i < rq->plan_for_count; i++) {
		if (rq->plan_for[i] >= rq->world_size)
			return ERR(INVALID_REQUEST, "rank %u is not in a world of %u", rq->plan_for[i], rq->world_size);
		b->wanted[rq->plan_for[i]] = 1;
	}
	if (!rq->plan_for)
		memset(b->wanted, 1, rq->world_size);
	return OK;
}

static FALLIBLE enum err check_trees(const struct state_dict_op_build *b)
{
	for (uint32_t r = 0; r < b->rq->world_size; r++) {
		if (b->source[r])
			TRY(tree_check(b->source[r], r, b->rq->world_size));
		if (b->companion && b->companion[r])
			TRY(tree_check(b->companion[r], r, b->rq->world_size));
	}
	return OK;
}

/* The walk made the moves path by path; each rank wants its own in a row. */
static FALLIBLE enum err sort_moves(struct state_dict_op_build *b)
{
	uint64_t *at, sum = 0;

	TRY(arena_alloc(b->scratch, b->rq->world_size, sizeof *at, &at));
	TRY(arena_alloc(b->arena, b->moves.n, sizeof *b->out->moves, &b->out->moves));
	for (uint64_t i = 0; i < b->moves.n; i++)
		at[b->moves.v[i].to_rank]++;
	for (uint32_t r = 0; r < b->rq->world_size; r++) {
		uint64_t n = at[r];
		at[r] = sum;
		sum += n;
	}
	for (uint64_t i = 0; i < b->moves.n; i++)
		b->out->moves[at[b->moves.v[i].to_rank]++] = b->moves.v[i];
	b->out->move_count = b->moves.n;
	return OK;
}

static FALLIBLE enum err hand_over(struct state_dict_op_build *b)
{
	struct state_dict_op_plan *p = b->out;

	TRY(sort_moves(b));
	TRY(arena_alloc(b->arena, b->notes.n, sizeof *p->notes, &p->notes));
	if (b->notes.n)
		memcpy(p->notes, b->notes.v, b->notes.n * sizeof *p->notes);
	p->note_count = b->notes.n;
	TRY(arena_alloc(b->arena, b->differences.n, sizeof *p->differences, &p->differences));
	if (b->differences.n)
		memcpy(p->differences, b->differences.v, b->differences.n * sizeof *p->differences);
	p->difference_count = b->differences.n;
	p->equal = p->difference_total == 0;
	return OK;
}

static FALLIBLE enum err make(struct state_dict_op_build *b)
{
	uint32_t world = b->rq->world_size;

	TRY(arena_alloc(b->scratch, world, 1, &b->member));
	TRY(arena_alloc(b->scratch, world, 1, &b->wanted));
	TRY(arena_alloc(b->scratch, world, sizeof *b->load, &b->load));
	TRY(check_request(b));
	TRY(check_trees(b));
	TRY(arena_alloc(b->arena, world, sizeof *b->out->target, &b->out->target));
	TRY(arena_alloc(b->arena, world, sizeof *b->out->made, &b->out->made));
	switch (b->rq->kind) {
	case JOB_CREATE:
	case JOB_COPY:
	case JOB_OFFLOAD:
		TRY(state_dict_op_local(b));
		break;
	case JOB_GATHER:
		TRY(state_dict_op_gather(b));
		break;
	case JOB_COMPARE:
		TRY(state_dict_op_compare(b));
		break;
	default:
		TRY(state_dict_op_fill(b));
	}
	return hand_over(b);
}

enum err state_dict_op_plan(const struct state_dict_op_request *rq, struct tree *const *source, struct tree *const *companion,
			    const uint32_t *hosts, struct arena *arena, struct state_dict_op_plan *out)
{
	CLEANUP(arena_free_ptr) struct arena *scratch = arena_new(SCRATCH_MAX);
	struct state_dict_op_build b = { .rq = rq, .source = source, .companion = companion, .hosts = hosts, .arena = arena,
					 .scratch = scratch, .out = out };

	NEED(scratch, "no memory for a plan");
	*out = (struct state_dict_op_plan){ 0 };
	enum err e = make(&b);
	vec_free(&b.moves);
	vec_free(&b.notes);
	vec_free(&b.differences);
	return e;
}
