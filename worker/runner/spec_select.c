/* spec_select.c: which tensors and values of a source take part, under which names and dtypes (see spec.h).
 * Patterns come from users: globs are linear, PCRE2 runs with match limits and without JIT. */
#include "base/pattern.h"
#include "runner/spec.h"

enum { RENAMES_MAX = 64 };

struct selector {
	const json_t *include, *exclude, *dtype, *rename;
	struct patterns *patterns;     /* of the renames, in their order */
};

static struct str text_of(const json_t *list, size_t i)
{
	const json_t *t = json_array_get(list, i);

	return json_is_string(t) ? (struct str){ json_string_value(t), json_string_length(t) } : (struct str){ NULL, 0 };
}

static FALLIBLE enum err selector_open(const struct spec *spec, struct selector *s)
{
	uint32_t index;

	*s = (struct selector){ .include = spec->include, .exclude = spec->exclude, .dtype = spec->dtype, .rename = spec->rename };
	TRY(patterns_open(&s->patterns));
	for (size_t i = 0; i < json_array_size(spec->rename); i++) {
		const json_t *pair = json_array_get(spec->rename, i);
		if (i >= RENAMES_MAX || !text_of(pair, 0).p || !text_of(pair, 1).p)
			return ERR(VALIDATION_FAILED, "rename takes at most %d pairs of pattern and replacement", RENAMES_MAX);
		TRY(pattern_add(s->patterns, text_of(pair, 0), &index));
	}
	return OK;
}

static bool any_match(const json_t *globs, struct str fqn)
{
	for (size_t i = 0; i < json_array_size(globs); i++) {
		const json_t *g = json_array_get(globs, i);
		if (str_glob((struct str){ json_string_value(g), json_string_length(g) }, fqn))
			return true;
	}
	return false;
}

static bool is_wanted(const struct selector *s, struct str fqn)
{
	return (json_array_size(s->include) == 0 || any_match(s->include, fqn)) && !any_match(s->exclude, fqn);
}

/* *out lies in s->patterns until the next call, or is fqn itself. */
static FALLIBLE enum err rename_fqn(struct selector *s, struct str fqn, struct str *out)
{
	*out = fqn;
	for (uint32_t i = 0; i < json_array_size(s->rename); i++) {
		enum err e = pattern_replace(s->patterns, i, *out, text_of(json_array_get(s->rename, i), 1), out);
		if (e)
			return err_at_fqn(e, fqn.p, fqn.n);
	}
	return OK;
}

static FALLIBLE enum err choose_dtype(const struct selector *s, struct str fqn, enum dtype *dtype)
{
	for (size_t i = 0; i < json_array_size(s->dtype); i++) {
		const json_t *pair = json_array_get(s->dtype, i), *glob = json_array_get(pair, 0);
		const char *name = json_string_value(json_array_get(pair, 1));
		if (!str_glob((struct str){ json_string_value(glob), json_string_length(glob) }, fqn))
			continue;
		return dtype_parse(str_of(name ? name : ""), dtype);
	}
	return OK;
}

static FALLIBLE enum err copy_tensor(struct selector *s, const struct sdict *from, const struct sd_tensor *t,
				     struct spec_view *v)
{
	struct str name;
	uint32_t index;

	TRY(rename_fqn(s, t->fqn, &name));
	enum err e = sdict_add_tensor(v->sd, name, t->dtype, t->ndim, t->shape, &index);
	if (e)
		return err_at_fqn(e, name.p, name.n);
	v->sd->tensors[index].requires_grad = t->requires_grad;
	TRY(sdict_rename_path(v->sd, t->path, t->fqn, name, &v->sd->tensors[index].path));
	v->dtypes[index] = t->dtype;
	TRY(choose_dtype(s, name, &v->dtypes[index]));
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		TRY(sdict_add_chunk(v->sd, index, from->chunks[c].dims, from->chunks[c].rank, from->chunks[c].loc));
	return OK;
}

static FALLIBLE enum err copy_value(struct selector *s, const struct sd_value *val, struct spec_view *v)
{
	struct str name;
	uint32_t index;

	TRY(rename_fqn(s, val->fqn, &name));
	enum err e = sdict_add_value(v->sd, name, val->rank, val->loc, &index);
	if (e)
		return err_at_fqn(e, name.p, name.n);
	TRY(sdict_rename_path(v->sd, val->path, val->fqn, name, &v->sd->values[index].path));
	v->sd->values[index].kind = val->kind;
	return val->bytes.n ? arena_str(v->sd->arena, val->bytes, &v->sd->values[index].bytes) : OK;
}

static FALLIBLE enum err copy_files(const struct sdict *from, struct sdict *to)
{
	uint32_t index;

	TRY(sdict_copy_files(to, from));
	for (uint64_t i = 0; i < from->transform_count; i++)
		TRY(sdict_add_transform(to, from->transforms[i], &index));
	to->has_paths = from->has_paths;
	return OK;
}

/* What other ranks have instead of the values that take part; kept[i]: where value i of `from` is now. */
static FALLIBLE enum err copy_differing(const struct sdict *from, const uint32_t *kept, struct sdict *to)
{
	for (uint64_t i = 0; i < from->differing_count; i++) {
		const struct sd_differing *d = &from->differing[i];
		if (kept[d->value] != SD_NONE)
			TRY(sdict_add_differing(to, kept[d->value], d->rank, d->bytes));
	}
	return OK;
}

static FALLIBLE enum err select_all(struct selector *s, const struct sdict *from, struct spec_view *v)
{
	CLEANUP(mem_free_ptr) uint32_t *kept = mem_alloc((from->value_count + 1) * sizeof *kept);

	if (!kept)
		return ERR(NO_MEMORY, "no memory for %ju values", (uintmax_t)from->value_count);
	TRY(copy_files(from, v->sd));
	for (uint64_t i = 0; i < from->tensor_count; i++) {
		if (!is_wanted(s, from->tensors[i].fqn))
			v->skipped++;
		else
			TRY(copy_tensor(s, from, &from->tensors[i], v));
	}
	for (uint64_t i = 0; i < from->value_count; i++) {
		kept[i] = is_wanted(s, from->values[i].fqn) ? (uint32_t)v->sd->value_count : SD_NONE;
		if (kept[i] == SD_NONE)
			v->skipped++;
		else
			TRY(copy_value(s, &from->values[i], v));
	}
	return copy_differing(from, kept, v->sd);
}

enum err spec_select(const struct spec *spec, const struct sdict *source, struct spec_view *out)
{
	struct selector s;

	*out = (struct spec_view){ .dtypes = mem_zalloc(source->tensor_count, sizeof *out->dtypes) };
	if (!out->dtypes)
		return ERR(NO_MEMORY, "no memory for %ju tensors", (uintmax_t)source->tensor_count);
	TRY(sdict_new(UINT64_MAX, &out->sd));
	enum err e = selector_open(spec, &s);
	if (!e)
		e = select_all(&s, source, out);
	patterns_free(s.patterns);
	return e;
}

void spec_view_free(struct spec_view *v)
{
	sdict_free(v->sd);
	mem_free(v->dtypes);
	*v = (struct spec_view){ 0 };
}
