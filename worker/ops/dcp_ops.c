/* dcp_ops.c: see dcp_ops.h.
 *
 * A rank's tree is told to the others in the form of an image's header, so that there is one way from bytes to trees, which is tested
 * with hostile input, and the plan is the daemon's. Only addresses are this process's own: they stand where a job has offsets
 * in segments. */
#include "ops/dcp_ops.h"

#include "base/num.h"
#include "ops/state_dict_op_tables.h"
#include "runner/exchange.h"

enum { SIDES = STATE_DICT_OP_SIDES, SHARD_UNKNOWN = 0 };

struct op {
	struct comm *comm;
	uint32_t me, size;
	struct state_dict_op_request rq;
	const struct dcp_options *options;
	const struct tree *mine[SIDES];
	bool has[SIDES];
	struct state_dict_op_images told[SIDES];        /* of this rank: what the others get, and which slot is which shard */
	struct state_dict_op_trees *trees;              /* of both sides; the result refers to them */
	struct state_dict_op_places places;
	struct state_dict_op_plan plan;
	struct state_dict_op_images images;             /* the target's slots */
	struct run_build build;
	struct dcp_state_dict *out;
	bool equal;
};

void dcp_free(struct dcp_state_dict *s)
{
	for (uint64_t i = 0; i < s->block_count; i++)
		mem_free(s->blocks[i]);
	mem_free(s->blocks);
	for (uint32_t i = 0; s->kept && i < SIDES; i++)
		state_dict_op_trees_free(&s->kept[i]);
	arena_free(s->arena);
	*s = (struct dcp_state_dict){ 0 };
}

/* ------------------------------------------------------------------------------------------------- telling others */

/* The slots of this rank's image are its shards in the order of the walk: the shards' addresses, in that order. */
static FALLIBLE enum err list_addresses(const struct tree *t, uint64_t *list, uint64_t n, uint64_t *at)
{
	if (tree_is_container(t)) {
		for (uint32_t i = 0; i < t->count; i++)
			TRY(list_addresses(t->children[i], list, n, at));
		return OK;
	}
	for (uint32_t i = 0; tree_is_tensor(t) && i < t->tensor.shard_count; i++) {
		if (*at >= n)
			return ERR(INTERNAL, "more shards than were told");
		list[(*at)++] = t->tensor.shards[i].at;
	}
	return OK;
}

struct told {
	uint64_t header_bytes, image_bytes;
};

static FALLIBLE enum err make_headers(struct op *o, struct buf *both, struct told told[SIDES])
{
	struct tree **trees;

	TRY(arena_alloc(o->out->arena, (uint64_t)o->size + 1, sizeof *trees, &trees));
	for (uint32_t i = 0; i < SIDES; i++) {
		trees[o->me] = (struct tree *)(uintptr_t)o->mine[i];
		if (!o->mine[i])
			continue;
		TRY(tree_check(o->mine[i], o->me, o->size));
		TRY(state_dict_op_images_make(trees, o->size, NULL, o->out->arena, &o->told[i]));
		told[i] = (struct told){ o->told[i].headers[o->me].len, o->told[i].image_bytes[o->me] };
		buf_put(both, o->told[i].headers[o->me].p, o->told[i].headers[o->me].len);
	}
	return buf_status(both);
}

static FALLIBLE enum err take_header(struct op *o, uint32_t rank, uint32_t side, const unsigned char *p, struct told told)
{
	if (told.header_bytes == 0)
		return OK;
	o->has[side] = true;
	TRY(image_parse(p, told.header_bytes, told.image_bytes, rank, &o->trees[side].images[rank]));
	return state_dict_op_trees_add(o->trees[side].images[rank], rank, side, o->out->arena, &o->places, &o->trees[side]);
}

/* Everyone's headers to everyone: sizes first. */
static FALLIBLE enum err tell_all(struct op *o)
{
	CLEANUP(buf_free) struct buf both = BUF_INIT(UINT32_MAX);
	CLEANUP(mem_free_ptr) struct told *told = mem_zalloc((uint64_t)o->size * SIDES, sizeof *told);
	CLEANUP(mem_free_ptr) uint64_t *bytes = mem_zalloc(o->size, sizeof *bytes);
	struct told mine[SIDES] = { 0 };
	uint64_t total = 0, at = 0;

	NEED(told && bytes, "no memory for %u ranks", o->size);
	TRY(err_at_rank(make_headers(o, &both, mine), o->me));
	TRY(comm_all_gather(o->comm, mine, sizeof mine, told));
	for (uint32_t r = 0; r < o->size; r++) {
		TRY(num_add(told[r * SIDES].header_bytes, told[r * SIDES + 1].header_bytes, &bytes[r]));
		TRY(num_add(total, bytes[r], &total));
	}
	CLEANUP(mem_free_ptr) unsigned char *all = mem_alloc(total);
	NEED(all, "no memory for the structures of %u ranks", o->size);
	TRY(comm_all_gather_v(o->comm, both.p, bytes, all));
	for (uint32_t i = 0; i < SIDES; i++)
		TRY(state_dict_op_trees_begin(o->size, o->out->arena, &o->trees[i]));
	for (uint32_t r = 0; r < o->size; r++)
		for (uint32_t i = 0; i < SIDES; i++) {
			TRY(err_at_rank(take_header(o, r, i, all + at, told[r * SIDES + i]), r));
			at += told[r * SIDES + i].header_bytes;
		}
	return OK;
}

/* Places of this rank: offsets in the image that was told become addresses. */
static FALLIBLE enum err find_addresses(struct op *o)
{
	for (uint32_t side = 0; side < SIDES; side++) {
		const struct state_dict_op_images *told = &o->told[side];
		uint64_t n = told->slots.n, at = 0, slot = 0;
		CLEANUP(mem_free_ptr) uint64_t *list = mem_zalloc(n + 1, sizeof *list);
		NEED(list, "no memory for %ju shards", (uintmax_t)n);
		if (o->mine[side])
			TRY(list_addresses(o->mine[side], list, n, &at));
		each(p, o->places.v, o->places.n) {
			if (p->rank != o->me || p->dict != side)
				continue;
			while (slot < n && (told->slots.v[slot].offset != p->offset || !str_eq(told->slots.v[slot].fqn, p->fqn)))
				slot++; /* empty boxes are not places */
			if (slot == n)
				return ERR(INTERNAL, "a shard that was told is not found");
			p->offset = list[slot];
		}
	}
	return OK;
}

/* -------------------------------------------------------------------------------------------------- the target */

static FALLIBLE enum err new_block(struct dcp_state_dict *s, uint64_t bytes, uint64_t *address_out)
{
	void **more = mem_grow(s->blocks, s->block_count + 1, sizeof *more);

	NEED(more, "no memory for a tensor");
	s->blocks = more;
	s->blocks[s->block_count] = mem_zalloc(bytes ? bytes : 1, 1);
	NEED(s->blocks[s->block_count], "no memory for a tensor of %ju bytes", (uintmax_t)bytes);
	*address_out = (uint64_t)(uintptr_t)s->blocks[s->block_count++];
	return OK;
}

/* Places this rank's target shards: new memory, or the companion's (or the source's) memory. */
static FALLIBLE enum err place_slots(struct op *o)
{
	each(s, o->images.slots.v, o->images.slots.n) {
		uint64_t keeps = s->keeps;
		s->keeps = UINT64_MAX; /* it is there already */
		if (s->rank != o->me)
			continue;
		if (keeps == UINT64_MAX) {
			TRY(err_at_rank(err_at_fqn(new_block(o->out, s->bytes, &s->offset), s->fqn.p, s->fqn.n), s->rank));
		} else {
			must(keeps < o->places.n);
			s->offset = o->places.v[keeps].offset;
		}
	}
	return OK;
}

static FALLIBLE enum err with_addresses(struct op *o, const struct tree *t, struct tree **out)
{
	struct arena *a = o->out->arena;

	TRY(arena_alloc(a, 1, sizeof **out, out));
	**out = *t;
	if (tree_is_container(t)) {
		TRY(arena_alloc(a, (uint64_t)t->count + 1, sizeof *(*out)->children, &(*out)->children));
		for (uint32_t i = 0; i < t->count; i++)
			TRY(with_addresses(o, t->children[i], &(*out)->children[i]));
		return OK;
	}
	struct tree_shard *shards;
	if (!tree_is_tensor(t) || t->tensor.shard_count == 0)
		return OK;
	TRY(arena_alloc(a, t->tensor.shard_count, sizeof *shards, &shards));
	for (uint32_t i = 0; i < t->tensor.shard_count; i++) {
		uint64_t slot = state_dict_op_images_slot(&o->images, o->me, t, i);
		shards[i] = t->tensor.shards[i];
		shards[i].made = false;
		shards[i].at = slot == UINT64_MAX ? SHARD_UNKNOWN : o->images.slots.v[slot].offset;
	}
	(*out)->tensor.shards = shards;
	return OK;
}

static enum err no_tick(void *)
{
	return OK;
}

static FALLIBLE enum err move_all(struct op *o, bool compare)
{
	struct state_dict_op_tables t = { .memories = o->size, .places = &o->places, .images = compare ? NULL : &o->images,
.plan = &o->plan };
	struct run run = { .fd = -1 };
	uint64_t differing = 0;

	TRY(state_dict_op_tables_make(&t, &o->build));
	o->build.opts.near = (struct stats_near){ .rtol = o->options->rtol, .atol = o->options->atol };
	TRY(run_share(&o->build, &run));
	struct exec_spec spec = { .run = &run, .index = o->me, .count = o->size, .tick = no_tick };
	enum err e = exchange_run(&spec, o->comm);
	o->out->moved_bytes = atomic_load(&run.head->moved_bytes);
	o->out->needed_bytes = o->plan.bytes_needed;
	for (uint64_t i = 0; i < run.srcs_n; i++)
		differing += atomic_load(&run.srcs[i].diff_count) != 0;
	run_detach(&run);
	TRY(e);
	if (!compare)
		return OK;
	TRY(comm_all_reduce(o->comm, &differing, &differing, 1, DT_UINT64, REDUCE_SUM));
	o->equal = o->plan.equal && differing == 0;
	return OK;
}

static FALLIBLE enum err operate(struct op *o)
{
	bool compare = o->rq.kind == JOB_COMPARE;

	o->out->arena = arena_new(UINT64_MAX);
	NEED(o->out->arena, "no memory for a plan");
	TRY(arena_alloc(o->out->arena, SIDES, sizeof *o->trees, &o->trees));
	o->out->kept = o->trees;
	TRY(tell_all(o));
	TRY(find_addresses(o));
	TRY(state_dict_op_plan(&o->rq, o->trees[0].ranks, o->has[1] ? o->trees[1].ranks : NULL, NULL, o->out->arena, &o->plan));
	o->equal = o->plan.equal;
	if (compare)
		return o->plan.move_count ? move_all(o, true) : OK;
	TRY(state_dict_op_images_make(o->plan.target, o->size, o->trees, o->out->arena, &o->images));
	TRY(place_slots(o));
	TRY(move_all(o, false));
	return o->plan.target[o->me] ? with_addresses(o, o->plan.target[o->me], &o->out->tree) : OK;
}

static FALLIBLE enum err run_op(struct comm *c, enum job_kind kind, const struct tree *source, const struct tree *into,
				const struct dcp_options *options, struct dcp_state_dict *out, bool *equal_out)
{
	struct op o = { .comm = c, .me = comm_rank(c), .size = comm_size(c), .mine = { source, into }, .options = options, .out = out };

	*out = (struct dcp_state_dict){ 0 };
	o.rq = (struct state_dict_op_request){ .kind = kind, .ranks_only = options->ranks_only,
					       .ranks_only_count = options->ranks_only_count,
				      .root = options->root, .type_check = options->type_check, .strict = options->strict,
				      .cpu_offload = options->cpu_offload, .values = options->values, .layout = options->layout,
				      .world_size = o.size };
	enum err e = operate(&o);
	struct err_info info = *err_last();
	if (e)
		comm_abort(c, e); /* the others may be waiting for this rank */
	run_build_free(&o.build);
	state_dict_op_images_free(&o.images);
	for (uint32_t i = 0; i < SIDES; i++)
		state_dict_op_images_free(&o.told[i]);
	vec_free(&o.places);
	if (equal_out)
		*equal_out = o.equal;
	if (e || equal_out)
		dcp_free(out);
	if (e)
		err_restore(&info);
	return e;
}

#define ONE_SIDED(name, kind)                                                                                                 \
	enum err name(struct comm *c, const struct tree *source, const struct dcp_options *o, struct dcp_state_dict *out)     \
	{                                                                                                                     \
		return run_op(c, kind, source, NULL, o, out, NULL);                                                           \
	}
#define TWO_SIDED(name, kind)                                                                                                 \
	enum err name(struct comm *c, const struct tree *source, const struct tree *into, const struct dcp_options *o,        \
		      struct dcp_state_dict *out)                                                                             \
	{                                                                                                                     \
		return run_op(c, kind, source, into, o, out, NULL);                                                           \
	}

ONE_SIDED(dcp_create, JOB_CREATE)
ONE_SIDED(dcp_offload, JOB_OFFLOAD)
ONE_SIDED(dcp_gather, JOB_GATHER)
ONE_SIDED(dcp_redistribute, JOB_REDISTRIBUTE)
TWO_SIDED(dcp_copy, JOB_COPY)
TWO_SIDED(dcp_broadcast, JOB_BROADCAST)
TWO_SIDED(dcp_distribute, JOB_DISTRIBUTE)

enum err dcp_compare(struct comm *c, const struct tree *a, const struct tree *b, const struct dcp_options *o, bool *equal_out)
{
	struct dcp_state_dict unused;

	return run_op(c, JOB_COMPARE, a, b, o, &unused, equal_out);
}
