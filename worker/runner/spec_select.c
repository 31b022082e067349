/* spec_select.c: which tensors and values of a source take part, under which names and dtypes (see spec.h).
 * Patterns come from users: globs are linear, PCRE2 runs with match limits and without JIT. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>

#include "runner/spec.h"

enum { MATCH_LIMIT = 100000, DEPTH_LIMIT = 1000, HEAP_LIMIT_KIB = 1024, RENAMES_MAX = 64, NAME_MAX_BYTES = 64 << 10 };

struct rename {
	pcre2_code *code;
	const char *replacement;
};

struct selector {
	const json_t *include, *exclude, *dtype;
	struct rename renames[RENAMES_MAX];
	uint32_t rename_count;
	pcre2_match_context *limits;
	char *name, *other;            /* NAME_MAX_BYTES each */
};

static void selector_close(struct selector *s)
{
	for (uint32_t i = 0; i < s->rename_count; i++)
		pcre2_code_free(s->renames[i].code);
	pcre2_match_context_free(s->limits);
	mem_free(s->name);
	mem_free(s->other);
}

static FALLIBLE enum err compile(struct selector *s, const json_t *pair)
{
	const char *pattern = json_string_value(json_array_get(pair, 0));
	const char *replacement = json_string_value(json_array_get(pair, 1));
	PCRE2_SIZE at = 0;
	int number = 0;
	PCRE2_UCHAR why[128];

	if (!pattern || !replacement || s->rename_count == RENAMES_MAX)
		return ERR(VALIDATION_FAILED, "rename takes at most %d pairs of pattern and replacement", RENAMES_MAX);
	struct rename *r = &s->renames[s->rename_count];
	r->replacement = replacement;
	r->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_NEVER_BACKSLASH_C, &number, &at, NULL);
	if (!r->code) {
		pcre2_get_error_message(number, why, sizeof why);
		return ERR(VALIDATION_FAILED, "rename '%s': %s at %zu", pattern, (char *)why, (size_t)at);
	}
	s->rename_count++;
	return OK;
}

static FALLIBLE enum err selector_open(const struct spec *spec, struct selector *s)
{
	*s = (struct selector){ .include = spec->include, .exclude = spec->exclude, .dtype = spec->dtype };
	s->limits = pcre2_match_context_create(NULL);
	s->name = mem_alloc(NAME_MAX_BYTES);
	s->other = mem_alloc(NAME_MAX_BYTES);
	if (!s->limits || !s->name || !s->other)
		return ERR(NO_MEMORY, "no memory to select");
	pcre2_set_match_limit(s->limits, MATCH_LIMIT);
	pcre2_set_depth_limit(s->limits, DEPTH_LIMIT);
	pcre2_set_heap_limit(s->limits, HEAP_LIMIT_KIB);
	for (size_t i = 0; i < json_array_size(spec->rename); i++)
		TRY(compile(s, json_array_get(spec->rename, i)));
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

/* *out lies in s->name until the next call, or is fqn itself. */
static FALLIBLE enum err rename_fqn(struct selector *s, struct str fqn, struct str *out)
{
	struct str now = fqn;

	for (uint32_t i = 0; i < s->rename_count; i++) {
		PCRE2_SIZE n = NAME_MAX_BYTES;
		PCRE2_UCHAR why[128];
		int rc = pcre2_substitute(s->renames[i].code, (PCRE2_SPTR)now.p, now.n, 0, PCRE2_SUBSTITUTE_GLOBAL, NULL,
					  s->limits, (PCRE2_SPTR)s->renames[i].replacement, PCRE2_ZERO_TERMINATED,
					  (PCRE2_UCHAR *)s->other, &n);
		if (rc < 0) {
			pcre2_get_error_message(rc, why, sizeof why);
			return err_at_fqn(ERR(VALIDATION_FAILED, "rename %u: %s", i, (char *)why), fqn.p, fqn.n);
		}
		if (rc == 0)
			continue;
		char *swap = s->name;
		s->name = s->other;
		s->other = swap;
		now = (struct str){ s->name, n };
	}
	*out = now;
	return OK;
}

/* A renamed key keeps the parts of its path that its new name still ends with; what is in front becomes one part. */
static FALLIBLE enum err rename_path(struct sdict *sd, struct sd_path from, struct str old, struct str name,
				     struct sd_path *out)
{
	char number[24];
	uint32_t keep = from.count;
	size_t left = name.n;
	struct sd_path_part *parts;

	if (str_eq(old, name) || from.count == 0)
		return sdict_copy_path(sd, from, out);
	while (keep > 0) {
		const struct sd_path_part *p = &from.parts[keep - 1];
		struct str text = p->key;
		if (!text.p)
			text = (struct str){ number, (size_t)snprintf(number, sizeof number, "%jd", (intmax_t)p->index) };
		if (text.n > left || memcmp(name.p + left - text.n, text.p, text.n) != 0)
			break;
		size_t rest = left - text.n;
		if (rest > 0 && name.p[rest - 1] != '.')
			break;
		left = rest ? rest - 1 : 0;
		keep--;
		if (rest == 0)
			break;
	}
	uint32_t kept = from.count - keep, head = left > 0 ? 1 : 0;
	TRY(arena_alloc(sd->arena, kept + head + 1, sizeof *parts, &parts));
	if (head)
		TRY(arena_str(sd->arena, (struct str){ name.p, left }, &parts[0].key));
	for (uint32_t i = 0; i < kept; i++) {
		parts[head + i] = from.parts[keep + i];
		if (parts[head + i].key.p)
			TRY(arena_str(sd->arena, from.parts[keep + i].key, &parts[head + i].key));
	}
	*out = (struct sd_path){ parts, kept + head };
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
	TRY(rename_path(v->sd, t->path, t->fqn, name, &v->sd->tensors[index].path));
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
	TRY(rename_path(v->sd, val->path, val->fqn, name, &v->sd->values[index].path));
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
	selector_close(&s);
	return e;
}

void spec_view_free(struct spec_view *v)
{
	sdict_free(v->sd);
	mem_free(v->dtypes);
	*v = (struct spec_view){ 0 };
}
