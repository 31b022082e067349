/* zero_universal_open.c: DeepSpeed's universal checkpoints as a source. ds_to_universal.py makes them of ZeRO checkpoints of any
 * parallelism:
 *
 *     zero/FQN/fp32.pt, exp_avg.pt, …   {"param": the whole tensor, "cat_dim": …}, or of stage 3 the tensor alone, flat
 *     zero/FQN/step.pt                  a number, or a tensor of one
 *     zero/optimizer_state.pt           what the optimizer has besides; of stage 3 with rank 0's partitions, which count for nothing
 *     *_model_states.pt                 as the source of the conversion had them: shapes, buffers, frozen parameters
 *
 * Newer converters write buffers, frozen and shared parameters there, too, as fp32 copies of the 16-bit model: the model states have these
 * as they were, and count. Each file is read by itself, so that there may be as many as there are parameters. */

#include "base/num.h"
#include "format/zero_impl.h"

struct universal {
	struct zero z;
	struct map stored;               /* FQNs with an fp32.pt; keys point into names of files */
	uint64_t model_tensors;          /* of the model states: the first in the sdict */
};

/* "zero/FQN/STATE.pt" */
static bool part_name(const char *name, struct str *fqn, struct str *state)
{
	struct str s = str_of(name);

	if (!str_starts(s, "zero/") || !str_ends(s, ".pt"))
		return false;
	const char *slash = memchr(s.p + 5, '/', s.n - 5);
	if (!slash)
		return false;
	*fqn = (struct str){ s.p + 5, (size_t)(slash - s.p) - 5 };
	*state = (struct str){ slash + 1, (size_t)(s.p + s.n - slash) - 4 };
	return fqn->n && state->n && !memchr(state->p, '/', state->n);
}

/* ------------------------------------------------------------------------------------------------------- a parameter */

/* A flat tensor gets the shape that the model states say. */
static FALLIBLE enum err shape_of(const struct zero_model *m, struct str fqn, const struct torch_file *f, struct torch_leaf *leaf)
{
	uint32_t at = map_get(&m->known, fqn);
	const struct zero_param *p = at < m->params.n ? &m->params.v[at] : NULL;
	struct zero_flat flat;
	int64_t stride = 1;

	if (!p || !zero_flat_of(f, leaf, &flat))
		return OK;
	if (flat.numel != p->numel)
		return ERR(FORMAT_METADATA, "the file has %ju elements, param_shapes says %ju", (uintmax_t)flat.numel, (uintmax_t)p->numel);
	leaf->tensor.ndim = p->ndim;
	for (uint32_t d = p->ndim; d-- > 0; stride *= p->shape[d] ? p->shape[d] : 1) {
		leaf->tensor.sizes[d] = p->shape[d];
		leaf->tensor.strides[d] = stride;
	}
	return OK;
}

static FALLIBLE enum err put_part(struct universal *u, struct torch_file *f, uint32_t file, struct str fqn, struct str state)
{
	struct zero_model *m = &u->z.model;
	pnode root = pickle_root(f->item.pk);
	struct torch_leaf *leaf = NULL;

	bool alone = item_is_tensor(f->item.pk, root);
	for (uint64_t i = 0; i < f->leaves.n && !leaf; i++)
		if (f->leaves.v[i].path.count == 1 && (alone || str_is(f->leaves.v[i].path.parts[0].key, "param")))
			leaf = &f->leaves.v[i];
	if (!leaf || !leaf->is_tensor)
		return ERR(FORMAT_METADATA, "the file holds no tensor 'param'");
	if (alone && !str_is(state, "step"))
		TRY(shape_of(m, fqn, f, leaf));
	TRY(zero_name(m->arena, str_is(state, "fp32") ? STR("") : state, fqn, &leaf->fqn, &leaf->path));
	f->leaves.v[0] = *leaf;
	f->leaves.n = 1;
	return torch_file_add(f, m->sd, file, 0);
}

/* A number by itself: the file is the value's archive. */
static FALLIBLE enum err put_number(struct universal *u, const char *name, uint32_t file, struct str fqn, struct str state)
{
	struct zero_model *m = &u->z.model;
	struct sd_loc loc = { .file = file };
	struct sd_path path;
	struct str full;
	uint32_t index;

	TRY(m->s->bytes_of(m->s->user, name, &loc.length));
	TRY(zero_name(m->arena, state, fqn, &full, &path));
	TRY(sdict_add_value(m->sd, full, 0, loc, &index));
	return sdict_copy_path(m->sd, path, &m->sd->values[index].path);
}

static FALLIBLE enum err open_part(struct universal *u, const char *name, struct str fqn, struct str state)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };
	uint32_t file;

	TRY(sdict_add_file(u->z.model.sd, str_of(name), 0, &file));
	enum err e = torch_file_open(u->z.model.s, name, &f);
	if (e == ERR_FORMAT_UNSUPPORTED && str_is(state, "step"))
		return err_at_fqn(put_number(u, name, file, fqn, state), fqn.p, fqn.n);
	e = e ?: put_part(u, &f, file, fqn, state);
	return err_at_file(err_at_fqn(e, fqn.p, fqn.n), name, -1);
}

/* ------------------------------------------------------------------------------------------------------- the rest */

static FALLIBLE enum err take_leaf(struct universal *u, struct torch_file *f, uint32_t file, struct torch_leaf *leaf, bool *keep)
{
	const struct sd_path_part *parts = leaf->path.parts;

	*keep = false;
	if (!str_is(parts[0].key, "optimizer_state_dict"))
		return zero_optim_leaf(f, leaf, 0, keep);
	if (leaf->path.count != 4 || !str_is(parts[1].key, "state") || !zero_is_number(&u->z, leaf))
		return OK;
	return zero_put_number(&u->z, f, file, leaf, zero_index(&parts[2]), parts[3].key);
}

static FALLIBLE enum err open_optimizer(struct universal *u, const char *name)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };
	uint64_t n = 0;
	uint32_t file;
	bool keep;

	TRY(sdict_add_file(u->z.model.sd, str_of(name), 0, &file));
	TRY(torch_file_open(u->z.model.s, name, &f));
	for (uint64_t i = 0; i < f.leaves.n; i++) {
		struct torch_leaf leaf = f.leaves.v[i];
		TRY(err_at_file(take_leaf(u, &f, file, &leaf, &keep), name, -1));
		if (keep)
			f.leaves.v[n++] = leaf;
	}
	f.leaves.n = n;
	return err_at_file(torch_file_add(&f, u->z.model.sd, file, 0), name, -1);
}

static FALLIBLE enum err find_parts(struct universal *u)
{
	const struct format_source *s = u->z.model.s;
	struct str fqn, state;

	for (uint64_t i = 0; i < s->payload_count; i++)
		if (part_name(s->payload[i], &fqn, &state) && str_is(state, "fp32"))
			TRY(map_put(&u->stored, fqn, 1));
	return OK;
}

static FALLIBLE enum err open_model(struct universal *u)
{
	struct zero_model *m = &u->z.model;
	struct format_zero_name is;

	TRY(zero_model_find(m->s, true, &m->name));
	if (!m->name)
		return ERR(CHECKPOINT_INCOMPLETE, "the folder has no *_model_states.pt of model parallel rank 0");
	must(format_zero_name(m->name, &is));
	m->sliced = is.rank >= 0;
	TRY(zero_model_read(m, m->name, 0, true));
	u->model_tensors = m->sd->tensor_count;
	u->z.group_count = (uint32_t)m->group_count;
	for (uint64_t i = 0; i < m->params.n; i++) {
		struct str fqn = m->params.v[i].fqn;
		if (map_get(&u->stored, fqn) == MAP_NONE)
			return err_at_fqn(err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the folder has no zero/%.*s/fp32.pt",
							  (int)num_min(fqn.n, 256), fqn.p), m->name, -1), fqn.p, fqn.n);
	}
	for (uint64_t i = 0; m->sliced && m->frozen.n && i < m->s->payload_count; i++) {
		const char *name = m->s->payload[i];
		if (!format_zero_name(name, &is) || !is.is_model || strcmp(name, m->name) == 0)
			continue;
		if (is.model_rank > 0)
			return err_at_file(ERR(FORMAT_UNSUPPORTED, "frozen parameters of tensor parallel training: DeepSpeed merges none"),
					   name, -1);
		TRY(zero_model_read(m, name, (uint32_t)is.rank, false));
	}
	return OK;
}

/* Do the model states have the tensor as it was? */
static bool is_elsewhere(const struct universal *u, struct str fqn)
{
	uint32_t known = map_get(&u->z.model.known, fqn);

	return known == MAP_NONE ? sdict_find(u->z.model.sd, fqn) < u->model_tensors : known >= ZERO_OTHER;
}

static FALLIBLE enum err open_all(struct universal *u)
{
	struct zero_model *m = &u->z.model;
	struct str fqn, state;

	TRY(find_parts(u));
	TRY(open_model(u));
	for (uint64_t i = 0; i < m->s->payload_count; i++) {
		const char *name = m->s->payload[i];
		if (strcmp(name, "zero/optimizer_state.pt") == 0)
			TRY(open_optimizer(u, name));
		else if (part_name(name, &fqn, &state) && !is_elsewhere(u, fqn))
			TRY(open_part(u, name, fqn, state));
	}
	return err_at_file(zero_put(&u->z), m->name, -1);
}

enum err format_open_zero_universal(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	struct universal u = { .z = { .model = { .s = s, .arena = scratch }, .world_size = 1 } };

	TRY(sdict_new(UINT64_MAX, out));
	u.z.model.sd = *out;
	enum err e = open_all(&u);
	map_free(&u.stored);
	zero_free(&u.z);
	return e;
}
