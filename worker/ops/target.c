/* target.c: see target.h. */
#include "ops/target.h"

#include "tensor/cast.h"

#include <stdio.h>

enum { NAMES_MAX = 10000 };

static FALLIBLE enum err add_tensor(const struct spec_view *v, uint64_t i, struct sdict *out, uint32_t *index)
{
	const struct sd_tensor *t = &v->sd->tensors[i];

	TRY(sdict_add_tensor(out, t->fqn, v->dtypes[i], t->ndim, t->shape, index));
	out->tensors[*index].requires_grad = t->requires_grad;
	return sdict_copy_path(out, t->path, &out->tensors[*index].path);
}

static FALLIBLE enum err add_values(const struct spec_view *v, struct sdict *out)
{
	uint32_t index;

	out->has_paths = v->sd->has_paths;
	TRY(sdict_copy_files(out, v->sd));
	for (uint64_t i = 0; i < v->sd->value_count; i++) {
		const struct sd_value *from = &v->sd->values[i];
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
				  bool *used)
{
	uint32_t index, rule;

	for (uint64_t i = 0; i < v->sd->tensor_count; i++) {
		TRY(add_tensor(v, i, out, &index));
		enum err e = layout_apply(l, out, index, &rule);
		if (e)
			TRY(not_cut(out, index, problems, e));
		if (rule < l->rule_count)
			used[rule] = true;
	}
	return add_values(v, out);
}

static json_t *list_unmatched(const struct layout *l, const bool *used)
{
	json_t *list = NULL;

	for (uint32_t r = 0; r < l->rule_count; r++) {
		if (used[r])
			continue;
		if (!list)
			list = json_array();
		json_array_append_new(list, json_stringn(l->rules[r].match.p, l->rules[r].match.n));
	}
	return list;
}

enum err target_cut(struct worker *w, const struct spec_view *view, const json_t *layout, uint32_t world_size,
		    struct problems *problems, struct sdict **out, json_t **unmatched_out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	struct spec_layout l;

	enum err e = spec_layout_read(w, layout, world_size, &l);
	CLEANUP(mem_free_ptr) bool *used = mem_zalloc(l.layout.rule_count, sizeof *used);
	if (!e && !used)
		e = ERR(NO_MEMORY, "no memory for %u rules", l.layout.rule_count);
	if (!e)
		e = sdict_new(UINT64_MAX, &sd);
	if (!e)
		e = cut_all(view, &l.layout, sd, problems, used);
	*unmatched_out = e ? NULL : list_unmatched(&l.layout, used);
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

enum err target_casts(const struct sdict *source, const struct sdict *target, struct problems *problems, json_t **out)
{
	*out = NULL;
	for (uint64_t i = 0; i < target->tensor_count; i++) {
		const struct sd_tensor *t = &target->tensors[i], *s = sdict_tensor(source, t->fqn);
		if (!s || s->dtype == t->dtype)
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
		json_t *fqn = json_stringn(t->fqn.p, t->fqn.n);
		json_array_append_new(*out, json_pack("{s:o, s:s, s:s}", "fqn", fqn ? fqn : json_string("?"), "from",
						      dtype_name(s->dtype), "to", dtype_name(t->dtype)));
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

enum dedup target_dedup(const json_t *options)
{
	const char *word = json_string_value(json_object_get(options, "dedup"));

	return word && strcmp(word, "lowest_rank") == 0 ? DEDUP_LOWEST_RANK : DEDUP_BALANCED;
}

json_t *target_names(const struct str *names, uint64_t n)
{
	json_t *list = json_array();

	for (uint64_t i = 0; i < n && i < NAMES_MAX; i++) {
		json_t *s = json_stringn(names[i].p, names[i].n);
		json_array_append_new(list, s ? s : json_string("?"));
	}
	return list;
}
