/* spec_select.c: which tensors and values of a source take part, under which names and dtypes (see spec.h).
 * Patterns come from users: globs are linear, PCRE2 runs with match limits and without JIT. */
#include "base/pattern.h"
#include "plan/companions.h"
#include "runner/spec.h"

struct selector {
	const struct spec *spec;
	struct patterns *patterns;     /* of the renames, in their order */
};

static FALLIBLE enum err selector_open(const struct spec *spec, struct selector *s)
{
	uint32_t index;

	*s = (struct selector){ .spec = spec };
	TRY(patterns_open(&s->patterns));
	for (size_t i = 0; i < spec->rename.n; i++)
		TRY(pattern_add(s->patterns, spec->rename.v[i].left, &index));
	return OK;
}

static bool is_wanted(const struct selector *s, struct str fqn)
{
	return (s->spec->include.n == 0 || strs_match(&s->spec->include, fqn)) && !strs_match(&s->spec->exclude, fqn);
}

/* *out lies in s->patterns until the next call, or is fqn itself. */
static FALLIBLE enum err rename_fqn(struct selector *s, struct str fqn, struct str *out)
{
	*out = fqn;
	for (uint32_t i = 0; i < s->spec->rename.n; i++) {
		TRY(err_at_fqn(pattern_replace(s->patterns, i, *out, s->spec->rename.v[i].right, out), fqn.p, fqn.n));
	}
	return OK;
}

/* The dtype that the first cast asks for whose glob matches, else the tensor's own. */
static enum dtype choose_dtype(const struct selector *s, struct str fqn, enum dtype own)
{
	for (size_t i = 0; i < s->spec->dtype.n; i++)
		if (str_glob(s->spec->dtype.v[i].glob, fqn))
			return s->spec->dtype.v[i].dtype;
	return own;
}

static FALLIBLE enum err copy_tensor(struct selector *s, const struct sdict *from, const struct sd_tensor *t,
				     struct spec_view *v)
{
	struct str name;
	uint32_t index;

	TRY(rename_fqn(s, t->fqn, &name));
	TRY(err_at_fqn(sdict_add_tensor(v->sd, name, t->dtype, t->ndim, t->shape, &index), name.p, name.n));
	v->sd->tensors[index].requires_grad = t->requires_grad;
	v->sd->tensors[index].blocks = t->blocks;
	TRY(sdict_rename_path(v->sd, t->path, t->fqn, name, &v->sd->tensors[index].path));
	v->dtypes[index] = choose_dtype(s, name, t->dtype);
	return sdict_copy_chunks(v->sd, index, from, t);
}

static FALLIBLE enum err copy_value(struct selector *s, const struct sdict *from, const struct sd_value *val, struct spec_view *v)
{
	struct str name;
	uint32_t index;

	TRY(sdict_check_read(from, val));
	TRY(rename_fqn(s, val->fqn, &name));
	TRY(err_at_fqn(sdict_add_value(v->sd, name, val->rank, val->loc, &index), name.p, name.n));
	TRY(sdict_rename_path(v->sd, val->path, val->fqn, name, &v->sd->values[index].path));
	v->sd->values[index].kind = val->kind;
	return val->bytes.n ? arena_str(v->sd->arena, val->bytes, &v->sd->values[index].bytes) : OK;
}

enum err spec_copy_files(const struct sdict *from, struct sdict *to)
{
	uint32_t index;

	TRY(sdict_copy_files(to, from));
	for (uint64_t i = 0; i < from->transform_count; i++)
		TRY(sdict_add_transform(to, from->transforms[i], &index));
	to->has_paths = from->has_paths;
	return OK;
}

/* Copies the values that other ranks have instead of those that take part; kept[i]: the present index of value i of `from`. */
static FALLIBLE enum err copy_differing(const struct sdict *from, const uint32_t *kept, struct sdict *to)
{
	each(d, from->differing, from->differing_count) {
		if (kept[d->value] != SD_NONE)
			TRY(sdict_add_differing(to, kept[d->value], d->rank, d->bytes));
	}
	return OK;
}

static FALLIBLE enum err select_all(struct selector *s, const struct sdict *from, struct spec_view *v)
{
	CLEANUP(mem_free_ptr) uint32_t *kept = mem_alloc((from->value_count + 1) * sizeof *kept);

	NEED(kept, "no memory for %ju values", (uintmax_t)from->value_count);
	TRY(spec_copy_files(from, v->sd));
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
			TRY(copy_value(s, from, &from->values[i], v));
	}
	return copy_differing(from, kept, v->sd);
}

/* A cast changes codes that scales belong to into other values. */
static FALLIBLE enum err check_casts(const struct spec_view *v)
{
	for (uint64_t i = 0; i < v->sd->tensor_count; i++) {
		const struct sd_tensor *t = &v->sd->tensors[i];
		struct companions c = { .main = t->fqn };
		struct str name;
		if (v->dtypes[i] != t->dtype && t->blocks)
			return err_at_fqn(companions_no_cast(str_of(t->blocks)), t->fqn.p, t->fqn.n);
		while (v->dtypes[i] != t->dtype && companions_dtype(t->dtype) && companions_next(&c, &name))
			if (sdict_tensor(v->sd, name))
				return err_at_fqn(companions_no_cast(name), t->fqn.p, t->fqn.n);
	}
	return OK;
}

enum err spec_select(const struct spec *spec, const struct sdict *source, struct spec_view *out)
{
	struct selector s;

	*out = (struct spec_view){ .dtypes = mem_zalloc(source->tensor_count, sizeof *out->dtypes) };
	NEED(out->dtypes, "no memory for %ju tensors", (uintmax_t)source->tensor_count);
	TRY(sdict_new(UINT64_MAX, &out->sd));
	enum err e = selector_open(spec, &s);
	e = e ?: select_all(&s, source, out);
	e = e ?: check_casts(out);
	patterns_free(s.patterns);
	return e;
}

void spec_view_free(struct spec_view *v)
{
	sdict_free(v->sd);
	mem_free(v->dtypes);
	*v = (struct spec_view){ 0 };
}
