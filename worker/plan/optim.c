/* optim.c: which optimizer tensors of a checkpoint go to which rank (see optim.h).
 *
 * PyTorch reads a tensor's place from its key path: path[0] is the optimizer's key, path[2] the parameter. That holds for
 * {"optim": {"state": {FQN: {"exp_avg": …}}}} and fails (IndexError) for flattened state dicts, {"optim": {"state.FQN.exp_avg": …}}, and
 * without planner_data. Here what follows the key is taken as text, too, and the model says where a parameter's name ends. */
#include "plan/optim_impl.h"

#include <stdio.h>

#include "base/buf.h"
#include "base/num.h"
#include "tensor/dtensor.h"
#include "tensor/box.h"

enum { NAME_PARTS_MAX = 1024, KEYS_SHOWN = 20, KEY_SHOWN = 100, CHUNKS_MAX = 1 << 24 };

struct maker {
	const struct sdict *source;
	const struct optim_model *model;
	struct str key;
	struct optim_plan *out;
	struct buf rest;               /* what follows the key, as text */
};

static struct str part_text(const struct sd_path_part *p, char number[24])
{
	return p->key.p ? p->key : (struct str){ number, (size_t)snprintf(number, 24, "%jd", (intmax_t)p->index) };
}

/* Does it belong to the optimizer? *used_out: how many parts of the path are the key; of an FQN without a path, how many bytes. */
static bool under_key(struct str key, struct str fqn, struct sd_path path, size_t *used_out)
{
	char number[24];
	size_t at = 0;

	if (path.count == 0) {
		*used_out = key.n + 1;
		return fqn.n >= key.n && (key.n == 0 || memcmp(fqn.p, key.p, key.n) == 0) && (fqn.n == key.n || fqn.p[key.n] == '.');
	}
	for (uint32_t i = 0; i < path.count; i++) {
		struct str text = part_text(&path.parts[i], number);
		if (text.n > key.n - at || (text.n && memcmp(key.p + at, text.p, text.n) != 0))
			return false;
		at += text.n;
		*used_out = i + 1;
		if (at == key.n)
			return true;
		if (key.p[at++] != '.')
			return false;
	}
	return false;
}

/* The longest beginning of `text`, up to a dot, that is a tensor of the model. */
static FALLIBLE enum err longest(const struct optim_model *m, struct str text, uint32_t *out)
{
	size_t ends[NAME_PARTS_MAX], n = 0;

	*out = OPTIM_NONE;
	for (size_t i = 0; i <= text.n && n < NAME_PARTS_MAX; i++)
		if (i == text.n || text.p[i] == '.')
			ends[n++] = i;
	while (n > 0 && *out == OPTIM_NONE)
		TRY(optim_model_find(m, (struct str){ text.p, ends[--n] }, out));
	return OK;
}

/* Finds the model's tensor that the state belongs to, or OPTIM_NONE. */
static FALLIBLE enum err param_of(struct maker *m, struct str fqn, struct sd_path path, size_t used, uint32_t *out)
{
	char number[24];

	*out = OPTIM_NONE;
	if (path.count >= used + 2)
		TRY(optim_model_find(m->model, part_text(&path.parts[used + 1], number), out));
	if (*out != OPTIM_NONE)
		return OK;
	m->rest.len = 0;
	if (path.count == 0 && used < fqn.n)
		buf_put(&m->rest, fqn.p + used, fqn.n - used);
	for (size_t i = used; i < path.count; i++) {
		struct str text = part_text(&path.parts[i], number);
		if (i > used)
			buf_putc(&m->rest, '.');
		buf_put(&m->rest, text.p, text.n);
	}
	TRY(buf_status(&m->rest));
	struct str text = { (char *)m->rest.p, m->rest.len };
	if (!text.n)
		return OK;
	if (str_starts(text, "state."))
		text = (struct str){ text.p + 6, text.n - 6 };
	return longest(m->model, text, out);
}

/* A state tensor has its parameter's shape, or none of its business: another number of dims, or ones where it is reduced. */
static FALLIBLE enum err fits(const struct sd_tensor *t, const struct optim_param *p, bool *same_out)
{
	bool same = t->ndim == p->ndim, reduced = false;
	char a[128], b[128];

	for (uint32_t d = 0; d < t->ndim && t->ndim == p->ndim; d++) {
		same &= t->shape[d] == p->shape[d];
		if (t->shape[d] != p->shape[d] && t->shape[d] != 1)
			reduced = true;
	}
	*same_out = same;
	if (!reduced)
		return OK;
	box_print(t->ndim, t->shape, a, sizeof a);
	box_print(p->ndim, p->shape, b, sizeof b);
	return err_expected(err_at_rank(ERR(SIZE_MISMATCH, "Size mismatch between saved %s and the model's %s for %.*s: the optimizer "
					    "state of another model", a, b, (int)num_min(p->fqn.n, 300), p->fqn.p), p->rank), a, b);
}

static FALLIBLE enum err whole(struct maker *m, uint32_t tensor, const int64_t *dims)
{
	for (uint32_t r = 0; r < m->model->world_size; r++)
		TRY(sdict_add_chunk(m->out->sd, tensor, dims, r, (struct sd_loc){ .file = SD_NO_FILE }));
	return OK;
}

/* The rank's piece of its slice of tensor t, or of all of it. */
static FALLIBLE enum err piece(struct maker *m, const struct sd_tensor *t, uint32_t tensor, uint32_t rank, const struct sd_outer *slice)
{
	const struct optim_group *g = &m->model->groups[rank];
	uint32_t count = g->count ? g->count : m->model->world_size, place = g->count ? g->place : rank;
	int64_t dims[2 * NDIM_MAX], start;

	for (uint32_t d = 0; d < t->ndim; d++) {
		dims[d] = slice ? slice->offsets[d] : 0;
		dims[t->ndim + d] = slice ? slice->sizes[d] : t->shape[d];
	}
	dtensor_chunk(dims[t->ndim], count, place, &start, &dims[t->ndim]);
	dims[0] += start;
	return sdict_add_chunk(m->out->sd, tensor, dims, rank, (struct sd_loc){ .file = SD_NO_FILE });
}

static FALLIBLE enum err cut(struct maker *m, const struct sd_tensor *t, size_t used, uint32_t tensor)
{
	const struct optim_param *p = NULL;
	uint64_t numel, first = m->out->sd->chunk_count;
	uint32_t param = OPTIM_NONE;
	bool same = false;
	int64_t dims[2 * NDIM_MAX];

	TRY(box_numel(t->ndim, t->shape, &numel));
	memset(dims, 0, sizeof dims);
	for (uint32_t d = 0; d < t->ndim; d++)
		dims[t->ndim + d] = t->shape[d];
	m->out->plain[tensor] = numel == 1;
	if (numel == 1)
		return whole(m, tensor, dims);
	if (m->model->nested)
		TRY(param_of(m, t->fqn, t->path, used, &param));
	if (param != OPTIM_NONE)
		TRY(fits(t, p = &m->model->params.v[param], &same));
	else
		m->out->unmatched += m->model->nested;
	for (uint32_t r = 0; r < m->model->world_size; r++) {
		const struct sd_outer *slice = same && p->outers ? p->outers[r] : NULL;
		TRY(piece(m, t, tensor, r, slice));
		m->out->outers[first + r] = slice;
	}
	return OK;
}

static FALLIBLE enum err add_tensor(struct maker *m, const struct sd_tensor *t, enum dtype dtype, size_t used)
{
	uint32_t index;

	TRY(sdict_add_tensor(m->out->sd, t->fqn, dtype, t->ndim, t->shape, &index));
	m->out->sd->tensors[index].requires_grad = t->requires_grad;
	TRY(sdict_copy_path(m->out->sd, t->path, &m->out->sd->tensors[index].path));
	return cut(m, t, used, index);
}

static FALLIBLE enum err add_value(struct maker *m, const struct sd_value *v)
{
	uint32_t index;

	TRY(sdict_add_value(m->out->sd, v->fqn, 0, v->loc, &index));
	struct sd_value *to = &m->out->sd->values[index];
	to->kind = v->kind;
	if (v->bytes.n)
		TRY(arena_str(m->out->sd->arena, v->bytes, &to->bytes));
	return sdict_copy_path(m->out->sd, v->path, &to->path);
}

/* ---- nothing found ---- */

static struct str first_part(struct str fqn, struct sd_path path, char number[24])
{
	const char *dot = path.count ? NULL : fqn.n ? memchr(fqn.p, '.', fqn.n) : NULL;

	if (path.count)
		return part_text(&path.parts[0], number);
	return dot ? (struct str){ fqn.p, (size_t)(dot - fqn.p) } : fqn;
}

static FALLIBLE enum err no_such_key(const struct maker *m)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(4096);
	CLEANUP(map_free) struct map seen = { 0 };
	const struct sdict *s = m->source;
	char number[24];

	for (uint64_t i = 0; i < s->tensor_count + s->value_count && seen.raw.count <= KEYS_SHOWN; i++) {
		bool tensor = i < s->tensor_count;
		struct str fqn = tensor ? s->tensors[i].fqn : s->values[i - s->tensor_count].fqn, text;
		struct sd_path path = tensor ? s->tensors[i].path : s->values[i - s->tensor_count].path;
		uint32_t found, n = seen.raw.count;
		text = first_part(fqn, path, number);
		if (text.p == number) /* a top level that is a list: no key can name it */
			continue;
		TRY(map_intern(&seen, text, n, &found));
		if (found != n)
			continue;
		if (n == KEYS_SHOWN)
			buf_puts(&b, ", …");
		else
			buf_printf(&b, "%s%.*s", n ? ", " : "", (int)num_min(text.n, KEY_SHOWN), text.p);
	}
	TRY(buf_status(&b));
	enum err e = ERR(MISSING_KEY, "the checkpoint has no optimizer state of the key '%.*s'; its keys are: %.*s",
			 (int)num_min(m->key.n, KEY_SHOWN), m->key.p, (int)b.len, b.len ? (char *)b.p : "");
	return err_at_fqn(e, m->key.p, m->key.n);
}

static FALLIBLE enum err make(struct maker *m, const enum dtype *dtypes)
{
	const struct sdict *s = m->source;
	size_t used;

	m->out->sd->has_paths = s->has_paths;
	for (uint64_t i = 0; i < s->tensor_count; i++) {
		const struct sd_tensor *t = &s->tensors[i];
		if (!under_key(m->key, t->fqn, t->path, &used))
			continue;
		TRY(err_at_fqn(add_tensor(m, t, dtypes[i], used), t->fqn.p, t->fqn.n));
	}
	for (uint64_t i = 0; i < s->value_count; i++)
		if (under_key(m->key, s->values[i].fqn, s->values[i].path, &used))
			TRY(add_value(m, &s->values[i]));
	return m->out->sd->tensor_count + m->out->sd->value_count ? OK : no_such_key(m);
}

enum err optim_plan_make(const struct sdict *source, const enum dtype *dtypes, const struct optim_model *model, struct str key,
			 struct arena *a, struct optim_plan *out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint64_t tensors = 0, chunks = 0;
	size_t used;

	*out = (struct optim_plan){ 0 };
	for (uint64_t i = 0; i < source->tensor_count; i++)
		tensors += under_key(key, source->tensors[i].fqn, source->tensors[i].path, &used);
	TRY(num_mul(tensors, model->world_size, &chunks));
	if (chunks > CHUNKS_MAX)
		return ERR(LIMIT_EXCEEDED, "%ju optimizer tensors on %u ranks are more than %d parts", (uintmax_t)tensors,
			   model->world_size, CHUNKS_MAX);
	TRY(sdict_new(UINT64_MAX, &sd));
	TRY(arena_alloc(a, tensors + 1, sizeof *out->plain, &out->plain));
	TRY(arena_alloc(a, chunks + 1, sizeof *out->outers, &out->outers));
	struct maker m = { source, model, key, out, BUF_INIT(64 << 20) };
	out->sd = sd;
	enum err e = make(&m, dtypes);
	buf_free(&m.rest);
	out->sd = e ? NULL : move(sd);
	return e;
}
