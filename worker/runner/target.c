/* target.c: see target.h. */
#include "runner/target.h"


#include "base/jtext.h"
#include "base/map.h"
#include "tensor/cast.h"

enum { NAMES_MAX = 10000 };

static FALLIBLE enum err add_tensor(const struct spec_view *v, uint64_t i, struct sdict *out, uint32_t *index)
{
	const struct sd_tensor *t = &v->sd->tensors[i];

	TRY(sdict_add_tensor(out, t->fqn, v->dtypes[i], t->ndim, t->shape, index));
	out->tensors[*index].requires_grad = t->requires_grad;
	out->tensors[*index].blocks = t->blocks;
	out->tensors[*index].q8_0 = t->q8_0;
	return sdict_copy_path(out, t->path, &out->tensors[*index].path);
}

static FALLIBLE enum err add_values(const struct spec_view *v, struct sdict *out)
{
	uint32_t index;

	out->has_paths = v->sd->has_paths;
	TRY(sdict_copy_files(out, v->sd));
	each(from, v->sd->values, v->sd->value_count) {
		TRY(sdict_add_value(out, from->fqn, 0, from->loc, &index));
		struct sd_value *to = &out->values[index];
		to->kind = from->kind;
		TRY(sdict_copy_path(out, from->path, &to->path));
		if (from->bytes.n)
			TRY(arena_str(out->arena, from->bytes, &to->bytes));
	}
	return OK;
}

/* A tensor that cannot be cut: what was cut of it is dropped. */
static FALLIBLE enum err not_cut(struct sdict *out, uint32_t index, struct problems *problems, enum err e)
{
	struct sd_tensor *t = &out->tensors[index];

	e = err_at_fqn(e, t->fqn.p, t->fqn.n);
	if (!problems)
		return e;
	out->chunk_count -= t->chunk_count;
	t->chunk_count = 0;
	return problems_note(problems, e);
}

static FALLIBLE enum err cut_all(const struct spec_view *v, const struct layout *l, struct sdict *out, struct problems *problems,
				  struct layout_use *use)
{
	uint32_t index, rule;

	for (uint64_t i = 0; i < v->sd->tensor_count; i++) {
		TRY(add_tensor(v, i, out, &index));
		enum err e = layout_apply(l, out, index, &rule);
		if (e)
			TRY(not_cut(out, index, problems, e));
		TRY(layout_use_note(use, l, &out->tensors[index], rule));
	}
	TRY(layout_use_check(use, l, out, problems));
	return add_values(v, out);
}

enum err target_report_rules(json_t *result, const struct layout *l, const struct layout_use *use)
{
	json_t *unmatched = NULL, *list = NULL;

	for (uint32_t r = 0; r < l->rule_count; r++) {
		if (use->rules[r].took)
			continue;
		if (!unmatched && json_object_set_new(result, "unmatched_rules", unmatched = json_array()) < 0)
			return ERR(NO_MEMORY, "no memory for a report");
		json_array_append_new(unmatched, jtext_value(l->rules[r].match));
	}
	each(f, use->fallbacks.v, use->fallbacks.n) {
		json_t *one = json_pack("{s:o, s:o, s:o}", "fqn", jtext_value(f->fqn), "rule", jtext_value(l->rules[f->rule].match), "took",
					f->took < l->rule_count ? jtext_value(l->rules[f->took].match) : json_null());
		if (!list && json_object_set_new(result, "fell_back", list = json_array()) < 0)
			return ERR(NO_MEMORY, "no memory for a report");
		if (json_array_append_new(list, one) < 0)
			return ERR(NO_MEMORY, "no memory for a report");
	}
	if (list)
		json_object_set_new(result, "fell_back_count", json_integer((json_int_t)use->fallback_count));
	return OK;
}

enum err target_cut(struct worker *w, const struct spec_view *view, const struct layout_rules *rules, uint32_t world_size,
		    struct problems *problems, struct sdict **out, json_t *result)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(layout_use_free) struct layout_use use = { 0 };
	struct spec_layout l;

	enum err e = spec_layout_open(w, rules, world_size, &l);
	e = e ?: layout_check(&l.layout);
	e = e ?: layout_use_new(&l.layout, &use);
	e = e ?: sdict_new(UINT64_MAX, &sd);
	e = e ?: cut_all(view, &l.layout, sd, problems, &use);
	e = e ?: target_report_rules(result, &l.layout, &use);
	spec_layout_free(&l);
	if (!e)
		*out = move(sd);
	return e;
}

enum err target_whole(const struct spec_view *view, struct sdict **out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	int64_t dims[2 * NDIM_MAX];
	uint32_t index;

	TRY(sdict_new(UINT64_MAX, &sd));
	for (uint64_t i = 0; i < view->sd->tensor_count; i++) {
		const struct sd_tensor *t = &view->sd->tensors[i];
		TRY(add_tensor(view, i, sd, &index));
		for (uint32_t d = 0; d < t->ndim; d++) {
			dims[d] = 0;
			dims[t->ndim + d] = t->shape[d];
		}
		TRY(sdict_add_chunk(sd, index, dims, 0, (struct sd_loc){ .file = SD_NO_FILE }));
	}
	TRY(add_values(view, sd));
	*out = move(sd);
	return OK;
}

/* Makes a key of the place and strides of a stored tensor of one chunk. */
static FALLIBLE enum err stored_key(const struct sdict *sd, const struct sd_tensor *t, struct arena *a, struct str *out)
{
	const struct sd_loc loc = sd->chunks[t->first_chunk].loc;
	const struct sd_strided *view = sd_strided_of(sd, loc);
	int64_t *key, n = 0;

	TRY(arena_i64(a, 10 + 2 * t->ndim, &key));
	key[n++] = loc.file;
	key[n++] = view ? 0 : loc.transform;
	key[n++] = (int64_t)loc.offset;
	key[n++] = (int64_t)loc.length;
	key[n++] = t->dtype;
	key[n++] = t->ndim;
	key[n++] = view ? 1 + view->conj + 2 * view->neg + 4 * view->q8_0 : 0;
	for (uint32_t d = 0; d < t->ndim; d++)
		key[n++] = t->shape[d];
	for (uint32_t d = 0; view && d < t->ndim; d++)
		key[n++] = view->strides[d];
	*out = (struct str){ (char *)key, (size_t)n * sizeof *key };
	return OK;
}

/* For each chunk, the first one that is the same bytes, read in the same way. */
static FALLIBLE enum err find_same(const struct sdict *sd, struct arena *a, uint32_t **out)
{
	CLEANUP(map_free) struct map seen = { 0 };
	uint32_t *same;
	struct str key;

	TRY(arena_alloc(a, sd->chunk_count, sizeof *same, &same));
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		same[i] = (uint32_t)i;
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		if (t->chunk_count != 1 || !sd->chunks[t->first_chunk].loc.length)
			continue;
		TRY(stored_key(sd, t, a, &key));
		TRY(map_intern(&seen, key, t->first_chunk, &same[t->first_chunk]));
	}
	*out = same;
	return OK;
}

/* Adds to a key all that says which elements tensor `i` of a source's view has: the stored chunks that it shows, and what becomes of them.
 * *any: there are such chunks. */
static FALLIBLE enum err tie_key(const struct target_ties *ties, const uint32_t *same, uint64_t i, struct buf *out, bool *any)
{
	const struct sdict *sd = ties->view->sd;
	const struct sd_tensor *t = &sd->tensors[i];

	buf_put(out, &t->ndim, sizeof t->ndim);
	buf_put(out, t->shape, t->ndim * sizeof *t->shape);
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++) {
		const struct view *v = ties->views ? &ties->views[c] : NULL;
		uint32_t source = v ? v->source : (uint32_t)c;
		*any = *any || (v ? source != VIEW_ZEROS : sd->chunks[c].loc.length > 0);
		if (source < ties->stored->sd->chunk_count)
			source = same[source];
		buf_put(out, &source, sizeof source);
		if (!v)
			continue;
		buf_put(out, &v->first, sizeof v->first);
		buf_put(out, &v->cast_count, sizeof v->cast_count);
		buf_put(out, v->casts, v->cast_count * sizeof *v->casts);
		buf_put(out, v->dims, 3ull * t->ndim * sizeof *v->dims);
	}
	return buf_status(out);
}

/* The key of tensor `i` of the first source over all sources. The others have a part in averages alone. */
static FALLIBLE enum err tie_keys(const struct target_ties *ties, uint32_t n, uint32_t *const *same, uint64_t i, bool average,
				  struct buf *out)
{
	struct str fqn = ties->view->sd->tensors[i].fqn;
	bool any = false;

	out->len = 0;
	buf_put(out, &average, sizeof average);
	buf_put(out, &ties->view->dtypes[i], sizeof *ties->view->dtypes);
	TRY(tie_key(&ties[0], same[0], i, out, &any));
	for (uint32_t k = 1; k < n && average; k++) {
		const struct sdict *sd = ties[k].view->sd;
		const struct sd_tensor *t = sdict_tensor(sd, fqn);
		must(t != NULL);
		TRY(tie_key(&ties[k], same[k], (uint64_t)(t - sd->tensors), out, &any));
	}
	if (!any)
		out->len = 0;
	return OK;
}

enum err target_tie(const struct target_ties *ties, uint32_t n, const bool *averages, struct sdict *target)
{
	CLEANUP(arena_free_ptr) struct arena *a = arena_new(UINT64_MAX);
	CLEANUP(map_free) struct map seen = { 0 };
	CLEANUP(buf_free) struct buf key = BUF_INIT(UINT64_MAX);
	uint32_t first, **same;
	struct str kept;

	NEED(a, "no memory to look for tied weights");
	must(ties->view->sd->tensor_count == target->tensor_count);
	TRY(arena_alloc(a, n, sizeof *same, &same));
	for (uint32_t k = 0; k < n; k++)
		TRY(find_same(ties[k].stored->sd, a, &same[k]));
	for (uint64_t i = 0; i < target->tensor_count; i++) {
		TRY(tie_keys(ties, n, same, i, averages && averages[i], &key));
		if (!key.len)
			continue;
		TRY(arena_str(a, (struct str){ (char *)key.p, key.len }, &kept));
		TRY(map_intern(&seen, kept, (uint32_t)i, &first));
		if (first != i)
			target->tensors[i].tied_to = 1 + first;
	}
	return OK;
}

enum err target_casts(const struct sdict *source, const struct sdict *target, struct problems *problems, json_t **out)
{
	*out = NULL;
	for (uint64_t i = 0; i < target->tensor_count; i++) {
		const struct sd_tensor *t = &target->tensors[i], *s = sdict_tensor(source, t->fqn);
		if (!s || (s->dtype == t->dtype && !t->q8_0))
			continue;
		enum err e = cast_check(t->dtype, s->dtype);
		if (e) {
			e = err_at_fqn(e, t->fqn.p, t->fqn.n);
			TRY(problems ? problems_note(problems, e) : e);
			continue;
		}
		if (!*out)
			*out = json_array();
		if (json_array_size(*out) >= NAMES_MAX)
			continue;
		json_array_append_new(*out, json_pack("{s:o, s:s, s:s}", "fqn", jtext_value(t->fqn), "from", dtype_name(s->dtype), "to",
						      t->q8_0 ? SPEC_Q8_0 : dtype_name(t->dtype)));
	}
	return OK;
}

enum err target_identity(uint64_t chunks, struct arena *a, struct load_plan *out)
{
	TRY(arena_alloc(a, chunks + 1, sizeof *out->first, &out->first));
	TRY(arena_alloc(a, chunks, sizeof *out->sources, &out->sources));
	for (uint64_t i = 0; i < chunks; i++) {
		out->first[i] = i;
		out->sources[i] = (uint32_t)i;
	}
	out->first[chunks] = chunks;
	out->source_count = chunks;
	return OK;
}

json_t *target_names(const struct str *names, uint64_t n)
{
	json_t *list = json_array();

	for (uint64_t i = 0; i < n && i < NAMES_MAX; i++)
		json_array_append_new(list, jtext_value(names[i]));
	return list;
}
