/* zero_model.c: see zero_impl.h. The 16-bit weights in `module` are left out where the masters are: they are copies. All else that the file
 * holds is taken over as it is, so that nothing which training kept is lost. */

#include "base/num.h"
#include "format/zero_impl.h"

void zero_model_free(struct zero_model *m)
{
	vec_free(&m->params);
	vec_free(&m->frozen);
	vec_free(&m->aliases);
	vec_free(&m->fragments);
	map_free(&m->known);
}

enum err zero_model_find(const struct format_source *s, bool merged, const char **out)
{
	struct format_zero_name is, best = { .rank = INT64_MAX };

	*out = NULL;
	for (uint64_t i = 0; i < s->payload_count; i++) {
		const char *name = s->payload[i];
		if (str_starts(str_of(name), "zero/"))
			continue;
		if (!format_zero_name(name, &is))
			return err_at_file(ERR(FORMAT_UNSUPPORTED, "a file of layers or experts: make a universal checkpoint of pipeline "
					       "or expert parallel training first (DeepSpeed's ds_to_universal.py)"), name, -1);
		if (is.model_rank > 0 && !merged)
			return err_at_file(ERR(FORMAT_UNSUPPORTED, "a file of model parallel rank %jd: make a universal checkpoint of "
					       "tensor or pipeline parallel training first (DeepSpeed's ds_to_universal.py)",
					       (intmax_t)is.model_rank), name, -1);
		if (is.is_model && is.model_rank == 0 && is.rank < best.rank) {
			best = is;
			*out = name;
		}
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------------ names */

uint32_t zero_index(const struct sd_path_part *part)
{
	uint64_t v = (uint64_t)part->index;

	if (part->key.p && !str_to_u64(part->key, &v))
		return UINT32_MAX;
	return v < UINT32_MAX ? (uint32_t)v : UINT32_MAX;
}

enum err zero_name(struct arena *a, struct str key, struct str param, struct str *fqn_out, struct sd_path *path_out)
{
	struct sd_path_part *parts;

	if (key.n + param.n > SD_FQN_MAX - 16)
		return ERR(LIMIT_EXCEEDED, "a parameter's name of %zu bytes", param.n);
	TRY(arena_alloc(a, 3, sizeof *parts, &parts));
	*path_out = (struct sd_path){ parts, key.n ? 3 : 1 };
	*fqn_out = parts[0].key = param;
	if (key.n == 0)
		return OK;
	parts[0].key = STR("optim");
	parts[1].key = key;
	parts[2].key = param;
	return arena_printf(a, fqn_out, "optim.%.*s.%.*s", (int)key.n, key.p, (int)param.n, param.p);
}

bool zero_flat_of(const struct torch_file *f, const struct torch_leaf *leaf, struct zero_flat *out)
{
	const struct item_tensor *t = &leaf->tensor;

	*out = (struct zero_flat){ .dtype = t->dtype };
	if (!leaf->is_tensor || leaf->is_sharded || t->ndim != 1 || !t->c_order || t->conj || t->neg)
		return false;
	out->numel = (uint64_t)t->sizes[0];
	out->offset = f->storages.v[leaf->storage].offset;
	if (out->numel)
		out->offset += t->storage_offset * dtype_bytes(t->dtype);
	return true;
}

enum err zero_optim_leaf(struct torch_file *f, struct torch_leaf *leaf, uint32_t skip, bool *keep_out)
{
	static const char *const layout[] = { "single_partition_of_fp32_groups", "fp32_flat_groups", "zero_stage", "partition_count",
					      "group_paddings", "param_alignment_paddings", "param_slice_mappings", "ds_version" };
	const struct sd_path_part *parts = leaf->path.parts;
	uint32_t n = leaf->path.count;

	*keep_out = n > skip;
	for (size_t i = 0; i < sizeof layout / sizeof *layout && *keep_out; i++)
		*keep_out = !str_is(parts[skip].key, layout[i]);
	if (!*keep_out)
		return OK;
	bool inner = str_is(parts[skip].key, "optimizer_state_dict") || str_is(parts[skip].key, "base_optimizer_state");
	if (inner && n > skip + 1) {
		skip++;
		*keep_out = str_is(parts[skip].key, "param_groups");
	} else if (inner) {
		*keep_out = false;
	}
	if (*keep_out && str_is(parts[skip].key, "param_groups") && n == skip + 3 && str_is(parts[skip + 2].key, "params"))
		*keep_out = false; /* numbers of flat tensors */
	return *keep_out ? torch_leaf_move(f->arena, leaf, skip, STR("optim")) : OK;
}

/* ----------------------------------------------------------------------------------------------------------- shapes */

static FALLIBLE enum err read_shape(struct zero_model *m, const struct pickle *pk, pnode n, struct zero_param *p)
{
	struct pickle_iter it = pickle_iter(pk, n);
	int64_t dims[NDIM_MAX], *kept;
	pnode item;

	if (pickle_kind(pk, n) != PK_SIZE && pickle_kind(pk, n) != PK_TUPLE && pickle_kind(pk, n) != PK_LIST)
		return ERR(FORMAT_METADATA, "the parameter's shape is no torch.Size");
	for (; pickle_next(pk, &it, &item); p->ndim++) {
		if (p->ndim == NDIM_MAX)
			return ERR(LIMIT_EXCEEDED, "a parameter of more than %d dims", NDIM_MAX);
		if (!pickle_int(pk, item, &dims[p->ndim]) || dims[p->ndim] < 0)
			return ERR(FORMAT_METADATA, "the parameter's shape in dim %u is no number >= 0", p->ndim);
	}
	TRY(box_numel(p->ndim, dims, &p->numel));
	TRY(arena_i64(m->arena, p->ndim, &kept));
	if (p->ndim)
		memcpy(kept, dims, p->ndim * sizeof *dims);
	p->shape = kept;
	return OK;
}

/* Names of one dict, with the shapes that it gives them. */
static FALLIBLE enum err read_shapes(struct zero_model *m, const struct pickle *pk, pnode dict, uint32_t group, bool frozen)
{
	struct pickle_iter it = pickle_iter(pk, dict);
	struct zero_param *p;
	uint64_t index;
	uint32_t found;
	pnode key, shape;

	if (pickle_kind(pk, dict) != PK_DICT && pickle_kind(pk, dict) != PK_ORDERED_DICT)
		return ERR(FORMAT_METADATA, "the shapes of parameters are no dict");
	while (pickle_next(pk, &it, &key) && pickle_next(pk, &it, &shape)) {
		index = frozen ? ZERO_OTHER + m->frozen.n : m->params.n;
		TRY(frozen ? vec_push(&m->frozen, &p) : vec_push(&m->params, &p));
		p->group = group;
		TRY(arena_str(m->arena, pickle_str(pk, key), &p->fqn));
		if (p->fqn.n == 0)
			return ERR(FORMAT_METADATA, "a parameter without a name");
		TRY(err_at_fqn(read_shape(m, pk, shape, p), p->fqn.p, p->fqn.n));
		TRY(map_intern(&m->known, p->fqn, (uint32_t)index, &found));
		if (found != index)
			return err_at_fqn(ERR(FORMAT_METADATA, "the parameter has two shapes"), p->fqn.p, p->fqn.n);
	}
	return OK;
}

static FALLIBLE enum err read_aliases(struct zero_model *m, const struct pickle *pk, pnode dict)
{
	struct pickle_iter it = pickle_iter(pk, dict);
	struct zero_alias *a;
	pnode key, of;

	if (pickle_kind(pk, dict) != PK_DICT && pickle_kind(pk, dict) != PK_ORDERED_DICT)
		return OK;
	while (pickle_next(pk, &it, &key) && pickle_next(pk, &it, &of)) {
		TRY(vec_push(&m->aliases, &a));
		TRY(arena_str(m->arena, pickle_str(pk, key), &a->fqn));
		TRY(arena_str(m->arena, pickle_str(pk, of), &a->of));
		if (map_get(&m->known, a->fqn) != MAP_NONE || a->fqn.n == 0)
			m->aliases.n--; /* it has bytes of its own */
		else
			TRY(map_put(&m->known, a->fqn, ZERO_OTHER + (uint32_t)m->frozen.n));
	}
	return OK;
}

static FALLIBLE enum err read_params(struct zero_model *m, const struct torch_file *f)
{
	const struct pickle *pk = f->item.pk;
	pnode root = pickle_root(pk), groups = pickle_dict_get(pk, root, "param_shapes"), group;
	pnode frozen = pickle_dict_get(pk, root, "frozen_param_shapes");
	struct pickle_iter it = pickle_iter(pk, groups);

	if (pickle_kind(pk, groups) != PK_LIST)
		return ERR(FORMAT_METADATA, "the file has no param_shapes: it is not of training with ZeRO. If it is a whole state dict, "
			   "name the file itself");
	for (; pickle_next(pk, &it, &group); m->group_count++)
		TRY(read_shapes(m, pk, group, (uint32_t)m->group_count, false));
	if (pickle_kind(pk, frozen) != PK_NONE && frozen)
		TRY(read_shapes(m, pk, frozen, 0, true));
	return read_aliases(m, pk, pickle_dict_get(pk, root, "shared_params"));
}

/* ----------------------------------------------------------------------------------------------------------- leaves */

static bool is_below(const struct torch_leaf *leaf, const char *first)
{
	return leaf->path.count > 1 && leaf->path.parts[0].key.p && str_is(leaf->path.parts[0].key, first);
}

static uint32_t frozen_at(const struct zero_model *m, struct str fqn)
{
	uint32_t at = map_get(&m->known, fqn);

	return at != MAP_NONE && at >= ZERO_OTHER && at - ZERO_OTHER < m->frozen.n ? at - ZERO_OTHER : UINT32_MAX;
}

static FALLIBLE enum err add_fragment(struct zero_model *m, const struct torch_file *f, const struct torch_leaf *leaf, uint32_t rank,
				      uint32_t file)
{
	struct str fqn = torch_leaf_tail(leaf, 1);
	struct zero_flat *kept, flat;
	uint32_t at = frozen_at(m, fqn);

	if (at == UINT32_MAX)
		return OK;
	if (!zero_flat_of(f, leaf, &flat))
		return err_at_fqn(ERR(FORMAT_METADATA, "rank %u's fragment of a frozen parameter is not flat", rank), fqn.p, fqn.n);
	TRY(vec_push(&m->fragments, &kept));
	*kept = flat;
	kept->state = ZERO_FROZEN;
	kept->stream = kept->group = at;
	kept->rank = rank;
	kept->file = file;
	return OK;
}

/* Stages 1 and 2 have frozen parameters whole. */
static FALLIBLE enum err check_frozen(const struct zero_model *m, const struct torch_leaf *leaf)
{
	uint32_t at = frozen_at(m, leaf->fqn);
	const struct zero_param *p = at == UINT32_MAX ? NULL : &m->frozen.v[at];

	if (p && leaf->is_tensor && box_same_shape(p->ndim, p->shape, leaf->tensor.ndim, leaf->tensor.sizes))
		return OK;
	return err_at_fqn(ERR(FORMAT_METADATA, "the frozen parameter is not of the shape in frozen_param_shapes"), leaf->fqn.p,
			  leaf->fqn.n);
}

/* Stage 3 leaves empty tensors in the places of parameters. */
static bool is_placeholder(const struct zero_model *m, const struct torch_leaf *leaf, const struct map *buffers)
{
	return m->sliced && leaf->is_tensor && box_empty(leaf->tensor.ndim, leaf->tensor.sizes) &&
	       map_get(buffers, leaf->fqn) == MAP_NONE;
}

static FALLIBLE enum err take_leaf(struct zero_model *m, struct torch_file *f, struct torch_leaf *leaf, const struct map *buffers,
				   bool *keep)
{
	static const char *const told[] = { "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
					    "buffer_names", "module" };

	if (is_below(leaf, "frozen_param_fragments")) {
		TRY(torch_leaf_move(f->arena, leaf, 1, STR("")));
		*keep = !m->sliced;
		return *keep ? check_frozen(m, leaf) : OK;
	}
	if (is_below(leaf, "module")) {
		TRY(torch_leaf_move(f->arena, leaf, 1, STR("")));
		*keep = map_get(&m->known, leaf->fqn) == MAP_NONE && !is_placeholder(m, leaf, buffers);
		return OK;
	}
	*keep = true;
	for (size_t i = 0; i < sizeof told / sizeof *told && *keep; i++)
		*keep = !leaf->path.parts[0].key.p || !str_is(leaf->path.parts[0].key, told[i]);
	return OK;
}

static FALLIBLE enum err take_leaves(struct zero_model *m, struct torch_file *f)
{
	const struct pickle *pk = f->item.pk;
	struct pickle_iter it = pickle_iter(pk, pickle_dict_get(pk, pickle_root(pk), "buffer_names"));
	CLEANUP(map_free) struct map buffers = { 0 };
	uint64_t n = 0;
	bool keep;
	pnode name;

	while (pickle_next(pk, &it, &name))
		TRY(map_put(&buffers, pickle_str(pk, name), 1));
	for (uint64_t i = 0; i < f->leaves.n; i++) {
		struct torch_leaf leaf = f->leaves.v[i];
		TRY(take_leaf(m, f, &leaf, &buffers, &keep));
		if (keep)
			f->leaves.v[n++] = leaf;
	}
	f->leaves.n = n;
	return OK;
}

static FALLIBLE enum err read_open(struct zero_model *m, struct torch_file *f, uint32_t file, uint32_t rank, bool first)
{
	if (first)
		TRY(read_params(m, f));
	for (uint64_t i = 0; m->sliced && i < f->leaves.n; i++)
		if (is_below(&f->leaves.v[i], "frozen_param_fragments"))
			TRY(add_fragment(m, f, &f->leaves.v[i], rank, file));
	if (first)
		TRY(take_leaves(m, f));
	else
		f->leaves.n = 0;
	return torch_file_add(f, m->sd, file, rank);
}

enum err zero_model_read(struct zero_model *m, const char *name, uint32_t rank, bool first)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };
	uint32_t file;

	if (first)
		m->name = name;
	TRY(sdict_add_file(m->sd, str_of(name), rank, &file));
	TRY(torch_file_open(m->s, name, &f));
	return err_at_file(read_open(m, &f, file, rank, first), name, -1);
}

enum err zero_model_share(const struct zero_model *m)
{
	struct sdict *sd = m->sd;
	struct sd_path path;
	struct str fqn;
	uint32_t index;

	each(a, m->aliases.v, m->aliases.n) {
		const struct sd_tensor *of = sdict_tensor(sd, a->of);
		if (!of)
			return err_at_file(err_at_fqn(ERR(FORMAT_METADATA, "a parameter shared with '%.*s', which is not there",
							  (int)num_min(a->of.n, 256), a->of.p), a->fqn.p, a->fqn.n), m->name, -1);
		const struct sd_tensor was = *of;
		TRY(sdict_add_tensor(sd, a->fqn, was.dtype, was.ndim, was.shape, &index));
		sd->tensors[index].requires_grad = was.requires_grad;
		TRY(zero_name(m->arena, STR(""), a->fqn, &fqn, &path));
		TRY(sdict_copy_path(sd, path, &sd->tensors[index].path));
		for (uint32_t k = 0; k < was.chunk_count; k++) {
			const struct sd_chunk c = sd->chunks[was.first_chunk + k];
			TRY(sdict_add_chunk_of(sd, index, &c));
		}
	}
	return OK;
}
