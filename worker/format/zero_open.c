/* zero_open.c: checkpoints of DeepSpeed's ZeRO optimizers, stages 1 to 3, as a source. No rank's file holds a parameter: each has, of every
 * parameter group and optimizer state, a flat tensor. Which elements of it are whose is said nowhere but in the order of param_shapes:
 *
 *     stages 1, 2   a stream per group: the ranks' partitions, one behind the other. Parameters follow each other in it, with padding
 *                   behind each if param_alignment_paddings says so, and padding at the end
 *     stage 3       a stream per rank: its groups, one behind the other. A parameter has ceil(numel / ranks) elements in each rank's
 *                   stream, at the same place; its last ones may be padding
 *
 * zero_place.c makes chunks of these. */

#include "format/zero_impl.h"

enum { STATES_MAX = 64 };

/* A rank's open file. */
struct optim {
	struct zero *z;
	struct torch_file f;
	pnode dict;                             /* optimizer_state_dict */
	const char *name;
	uint32_t rank, file;
};

/* --------------------------------------------------------------------------------------------------- what a file says */

static FALLIBLE enum err check_stage(const struct optim *o)
{
	const struct pickle *pk = o->f.item.pk;
	pnode n = pickle_dict_get(pk, o->dict, "zero_stage");
	int64_t stage = 0;

	if (!pickle_int(pk, n, &stage)) /* ZeroStageEnum(2) */
		(void)pickle_int(pk, pickle_at(pk, pickle_args(pk, n), 0), &stage);
	if (stage < 1 || stage > 3)
		return ERR(FORMAT_METADATA, "the optimizer's state has no zero_stage between 1 and 3");
	if ((stage == 3) != o->z->model.sliced)
		return ERR(FORMAT_METADATA, "the optimizer's state is of stage %jd, '%s' is not", (intmax_t)stage, o->z->model.name);
	if (pickle_dict_get(pk, o->dict, "ds_zero_partition_groups"))
		return ERR(FORMAT_UNSUPPORTED, "parameters partitioned over groups of experts: make a universal checkpoint first "
			   "(DeepSpeed's ds_to_universal.py)");
	return OK;
}

/* partition_count: a number, or one for each group. */
static FALLIBLE enum err check_world(const struct optim *o)
{
	const struct pickle *pk = o->f.item.pk;
	pnode count = pickle_dict_get(pk, o->dict, "partition_count"), one;
	struct pickle_iter it = pickle_iter(pk, count);
	int64_t world = 0, v;
	uint32_t have = o->z->world_size;

	if (!pickle_int(pk, count, &world)) {
		while (pickle_next(pk, &it, &one)) {
			if (!pickle_int(pk, one, &v) || v < 1)
				return ERR(FORMAT_METADATA, "partition_count is no list of numbers");
			if (world && v != world)
				return ERR(FORMAT_UNSUPPORTED, "groups of %jd and of %jd partitions, as expert parallel training has: make "
					   "a universal checkpoint first (DeepSpeed's ds_to_universal.py)", (intmax_t)world, (intmax_t)v);
			world = v;
		}
	}
	if (world < 1)
		return ERR(FORMAT_METADATA, "the optimizer's state has no partition_count");
	if (world > have)
		return err_at_rank(ERR(CHECKPOINT_INCOMPLETE, "the optimizer's state is of %jd ranks, the folder has the files of %u",
				       (intmax_t)world, have), have);
	return world == have ? OK : ERR(FORMAT_METADATA, "the optimizer's state is of %jd ranks, the folder has the files of %u: some are "
					"left from another save", (intmax_t)world, have);
}

static FALLIBLE enum err read_paddings(struct optim *o)
{
	const struct pickle *pk = o->f.item.pk;
	pnode all = pickle_dict_get(pk, o->dict, "param_alignment_paddings"), group, one;
	struct pickle_iter it = pickle_iter(pk, all), in;
	const struct zero_model *m = &o->z->model;
	uint64_t *padding;
	int64_t v;

	if (m->sliced || pickle_kind(pk, all) != PK_LIST)
		return OK;
	while (pickle_next(pk, &it, &group))
		for (in = pickle_iter(pk, group); pickle_next(pk, &in, &one);) {
			TRY(vec_push(&o->z->paddings, &padding));
			if (!pickle_int(pk, one, &v) || v < 0)
				return ERR(FORMAT_METADATA, "param_alignment_paddings is no list of numbers");
			*padding = (uint64_t)v;
		}
	return o->z->paddings.n == m->params.n ? OK :
	       ERR(FORMAT_METADATA, "param_alignment_paddings has %ju numbers, param_shapes %ju parameters", (uintmax_t)o->z->paddings.n,
		   (uintmax_t)m->params.n);
}

/* Elements by which a rank's states may be longer than its masters, which DeepSpeed saves without padding. */
static uint64_t padding_of(const struct optim *o, uint32_t group)
{
	const struct pickle *pk = o->f.item.pk;
	pnode all = pickle_dict_get(pk, o->dict, "group_paddings"), one;
	struct pickle_iter it = pickle_iter(pk, all);
	int64_t v = -1;

	if (o->z->model.sliced)
		return 0;
	for (uint32_t i = 0; i <= group; i++)
		if (!pickle_next(pk, &it, &one))
			return 2ull * o->z->world_size;
	return pickle_int(pk, one, &v) && v >= 0 ? (uint64_t)v : 0;
}

/* --------------------------------------------------------------------------------------------------------- its leaves */

static bool is_master(const struct torch_leaf *leaf)
{
	return leaf->path.count == 3 && (str_is(leaf->path.parts[1].key, "single_partition_of_fp32_groups") ||
					 str_is(leaf->path.parts[1].key, "fp32_flat_groups"));
}

static FALLIBLE enum err read_masters(struct optim *o)
{
	struct zero *z = o->z;
	uint64_t first = z->masters.n;
	struct zero_flat flat, *kept;

	each(leaf, o->f.leaves.v, o->f.leaves.n) {
		uint32_t group = (uint32_t)(z->masters.n - first);
		if (!is_master(leaf))
			continue;
		if (zero_index(&leaf->path.parts[2]) != group || !zero_flat_of(&o->f, leaf, &flat))
			return err_at_fqn(ERR(FORMAT_METADATA, "the masters of group %u are not flat, or not the next in the list", group),
					  leaf->fqn.p, leaf->fqn.n);
		TRY(vec_push(&z->masters, &kept));
		*kept = flat;
		kept->group = group;
		kept->rank = o->rank;
		kept->stream = z->model.sliced ? o->rank : group;
		kept->file = o->file;
	}
	if (o->rank == 0)
		z->group_count = (uint32_t)z->masters.n;
	if (z->masters.n - first != z->group_count || z->group_count == 0)
		return ERR(FORMAT_METADATA, "the file has masters of %ju groups, that of rank 0 of %u", (uintmax_t)(z->masters.n - first),
			   z->group_count);
	return OK;
}

static FALLIBLE enum err state_of(struct zero *z, struct str key, uint32_t *out)
{
	uint32_t next = (uint32_t)z->states.n;
	struct str *name, copy;

	if (next == STATES_MAX)
		return ERR(LIMIT_EXCEEDED, "an optimizer of more than %d states", STATES_MAX);
	TRY(arena_str(z->model.arena, key, &copy));
	TRY(map_intern(&z->by_state, copy, next, out));
	if (*out != next)
		return OK;
	TRY(vec_push(&z->states, &name));
	*name = copy;
	return OK;
}

/* State that is neither flat nor a number belongs to nobody but the rank: optim.state.0.KEY.rank1. */
static FALLIBLE enum err keep_as_is(struct optim *o, struct torch_leaf *leaf)
{
	struct sd_path_part *parts;

	TRY(torch_leaf_move(o->f.arena, leaf, 2, STR("optim")));
	TRY(arena_alloc(o->f.arena, leaf->path.count + 1u, sizeof *parts, &parts));
	memcpy(parts, leaf->path.parts, leaf->path.count * sizeof *parts);
	TRY(arena_printf(o->f.arena, &parts[leaf->path.count].key, "rank%u", o->rank));
	leaf->path = (struct sd_path){ parts, leaf->path.count + 1 };
	return arena_printf(o->f.arena, &leaf->fqn, "%.*s.rank%u", (int)leaf->fqn.n, leaf->fqn.p, o->rank);
}

/* `key` of a group's state. */
static FALLIBLE enum err take_state(struct optim *o, struct torch_leaf *leaf, uint32_t group, struct str key, bool *keep)
{
	struct zero *z = o->z;
	struct zero_flat flat, *kept;

	*keep = leaf->is_tensor || o->rank == 0;
	if (group >= z->group_count)
		return *keep ? keep_as_is(o, leaf) : OK;
	const struct zero_flat *master = &z->masters.v[(uint64_t)o->rank * z->group_count + group];
	if (zero_flat_of(&o->f, leaf, &flat) && flat.numel >= master->numel && flat.numel - master->numel <= padding_of(o, group)) {
		*keep = false;
		TRY(state_of(z, key, &flat.state));
		TRY(vec_push(&z->flats, &kept));
		*kept = *master;
		kept->state = flat.state;
		kept->dtype = flat.dtype;
		kept->offset = flat.offset;
		return OK;
	}
	if (!zero_is_number(z, leaf))
		return *keep ? keep_as_is(o, leaf) : OK;
	*keep = false;
	return o->rank == 0 ? zero_put_number(z, &o->f, o->file, leaf, group, key) : OK;
}

static FALLIBLE enum err take_leaf(struct optim *o, struct torch_leaf *leaf, bool *keep)
{
	const struct sd_path_part *parts = leaf->path.parts;
	uint32_t n = leaf->path.count;

	*keep = false;
	if (n < 2 || !str_is(parts[0].key, "optimizer_state_dict") || is_master(leaf))
		return OK;
	bool inner = str_is(parts[1].key, "base_optimizer_state") || str_is(parts[1].key, "optimizer_state_dict");
	if (inner && n > 4 && str_is(parts[2].key, "state"))
		return take_state(o, leaf, zero_index(&parts[3]), torch_leaf_tail(leaf, 4), keep);
	if (inner && n > 3 && !parts[2].key.p) /* an elastic checkpoint: a list of groups */
		return take_state(o, leaf, zero_index(&parts[2]), torch_leaf_tail(leaf, 3), keep);
	return o->rank == 0 ? zero_optim_leaf(&o->f, leaf, 1, keep) : OK;
}

static FALLIBLE enum err take_leaves(struct optim *o)
{
	uint64_t n = 0;
	bool keep;

	for (uint64_t i = 0; i < o->f.leaves.n; i++) {
		struct torch_leaf leaf = o->f.leaves.v[i];
		TRY(err_at_fqn(take_leaf(o, &leaf, &keep), leaf.fqn.p, leaf.fqn.n));
		if (keep)
			o->f.leaves.v[n++] = leaf;
	}
	o->f.leaves.n = n;
	return torch_file_add(&o->f, o->z->model.sd, o->file, o->rank);
}

static FALLIBLE enum err read_optim(struct optim *o)
{
	const struct pickle *pk = o->f.item.pk;

	o->dict = pickle_dict_get(pk, pickle_root(pk), "optimizer_state_dict");
	TRY(check_stage(o));
	TRY(check_world(o));
	if (o->rank == 0)
		TRY(read_paddings(o));
	TRY(read_masters(o));
	return take_leaves(o);
}

static FALLIBLE enum err open_optim(struct zero *z, const char *name, uint32_t rank)
{
	struct optim o = { .z = z, .name = name, .rank = rank };

	TRY(sdict_add_file(z->model.sd, str_of(name), rank, &o.file));
	enum err e = torch_file_open(z->model.s, name, &o.f);
	e = e ?: err_at_file(read_optim(&o), name, -1);
	torch_file_close(&o.f);
	return e;
}

/* ------------------------------------------------------------------------------------------------------------ files */

/* Each rank has one file; they come by rank. */
static FALLIBLE enum err check_optims(struct zero *z)
{
	const struct format_source *s = z->model.s;
	struct format_zero_name is;

	for (uint64_t i = 0; i < s->payload_count; i++) {
		if (!format_zero_name(s->payload[i], &is) || is.is_model)
			continue;
		if (is.rank != z->world_size)
			return err_at_rank(err_at_file(is.rank < z->world_size ?
						       ERR(FORMAT_METADATA, "two files of rank %jd's optimizer state", (intmax_t)is.rank) :
						       ERR(CHECKPOINT_INCOMPLETE, "rank %u's optimizer state is missing from the folder",
							   z->world_size), s->payload[i], -1), z->world_size);
		z->world_size++;
	}
	return z->world_size ? OK : ERR(CHECKPOINT_INCOMPLETE, "the folder has no *_optim_states.pt: it is not of training with ZeRO. If "
					"'%s' is a whole state dict, name the file itself", z->model.name);
}

/* The ranks' files; frozen parameters are in those of the model. */
static FALLIBLE enum err open_ranks(struct zero *z)
{
	struct zero_model *m = &z->model;
	struct format_zero_name is;

	for (uint64_t i = 0; i < m->s->payload_count; i++) {
		const char *name = m->s->payload[i];
		must(format_zero_name(name, &is));
		if (!is.is_model)
			TRY(open_optim(z, name, (uint32_t)is.rank));
		else if (m->sliced && m->frozen.n && strcmp(name, m->name) != 0)
			TRY(zero_model_read(m, name, (uint32_t)is.rank, false));
	}
	return OK;
}

static FALLIBLE enum err open_all(struct zero *z)
{
	struct zero_model *m = &z->model;
	struct format_zero_name is;
	uint32_t masters;

	TRY(zero_model_find(m->s, false, &m->name));
	if (!m->name)
		return ERR(CHECKPOINT_INCOMPLETE, "the folder has no *_model_states.pt");
	must(format_zero_name(m->name, &is));
	m->sliced = is.rank >= 0;
	if (is.rank > 0)
		return err_at_rank(ERR(CHECKPOINT_INCOMPLETE, "rank 0's model states are missing from the folder"), 0);
	TRY(check_optims(z));
	TRY(state_of(z, STR(""), &masters));
	TRY(zero_model_read(m, m->name, 0, true));
	TRY(open_ranks(z));
	return err_at_file(zero_put(z), m->name, -1);
}

enum err format_open_zero(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	CLEANUP(zero_free) struct zero z = { .model = { .s = s, .arena = scratch } };

	TRY(sdict_new(UINT64_MAX, out));
	z.model.sd = *out;
	return open_all(&z);
}
