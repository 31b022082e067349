/* convert.c: see convert.h. A rule takes the list of tensors and makes the next one; names that two tensors would have are found after each
 * rule, so that the error names the rule. */
#include "plan/convert_impl.h"

#include <stdio.h>

#include "base/num.h"
#include "plan/companions.h"

enum { VIEWS_MAX = 1 << 24 };    /* of all tensors: each becomes a source of the run */

uint32_t convert_source_of(const struct conversion *c, uint32_t rule)
{
	uint32_t n = 0;

	for (uint32_t i = 0;; i++) {
		const struct ref *ref = &c->rules[i].from;
		if (c->rules[i].kind != CONVERT_FROM)
			continue;
		bool known = false;
		for (uint32_t k = 0; k < i && !known; k++) {
			const struct ref *other = &c->rules[k].from;
			known = c->rules[k].kind == CONVERT_FROM && str_eq(other->storage, ref->storage) && str_eq(other->name, ref->name);
			if (known && i == rule)
				return convert_source_of(c, k);
		}
		n += !known;
		if (i == rule)
			return n;
	}
}

enum err convert_push(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor *out;

	TRY(vec_push(&v->next, &out));
	*out = *t;
	out->matches = false;
	return OK;
}

enum err convert_dim(const struct converter *v, const struct convert_tensor *t, uint32_t count, uint32_t *out)
{
	int64_t d = v->rule->dim < 0 ? v->rule->dim + (int64_t)count : v->rule->dim;
	char shape[192];

	if (d < 0 || d >= (int64_t)count || count > NDIM_MAX)
		return ERR(SIZE_MISMATCH, "dim %d of a tensor of the shape %s", v->rule->dim,
			   box_print(t->ndim, t->shape, shape, sizeof shape));
	*out = (uint32_t)d;
	return OK;
}

enum err convert_resized(struct converter *v, const struct convert_tensor *t, uint32_t d, int64_t size, int64_t **out)
{
	uint64_t numel, bytes;

	TRY(arena_i64(v->a, t->ndim + 1u, out));
	memcpy(*out, t->shape, t->ndim * sizeof **out);
	(*out)[d] = size;
	TRY(box_numel(t->ndim, *out, &numel));
	return num_mul(numel, dtype_bytes(t->dtype), &bytes);
}

/* The text with every {i} in it, but for ${i}, exchanged for the number. */
static FALLIBLE enum err number_in(struct converter *v, struct str text, int64_t number, struct str *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(PATTERN_NAME_MAX);

	for (size_t i = 0; i < text.n;) {
		bool here = i + 3 <= text.n && memcmp(text.p + i, "{i}", 3) == 0 && (i == 0 || text.p[i - 1] != '$');
		if (here)
			buf_printf(&b, "%jd", (intmax_t)number);
		else
			buf_putc(&b, (unsigned char)text.p[i]);
		i += here ? 3 : 1;
	}
	TRY(buf_status(&b));
	return arena_str(v->a, (struct str){ (char *)b.p, b.len }, out);
}

enum err convert_name(struct converter *v, const struct convert_tensor *t, uint32_t i, int64_t number, struct str *out)
{
	struct str text = v->rule->names[i];

	if (number >= 0)
		TRY(number_in(v, text, number, &text));
	TRY(pattern_expand(v->patterns, v->index, t->fqn, text, out));
	if (out->n == 0)
		return ERR(VALIDATION_FAILED, "the new name is empty");
	return arena_str(v->a, *out, out);
}

/* -------------------------------------------------------------------------------------------------- companions */

static struct convert_tensor *find(const struct converter *v, struct str fqn)
{
	uint32_t i = map_get(&v->names, fqn);

	return i == MAP_NONE || i >= v->now.n ? NULL : &v->now.v[i];
}

/* Refuses a rule that would change a quantised weight's elements, or their order without its companions' order. */
static FALLIBLE enum err check_companions(const struct converter *v, const struct convert_tensor *t)
{
	struct companions c = { .main = t->fqn };
	struct str name;

	if (t->blocks && v->rule->kind == CONVERT_DTYPE)
		return companions_no_cast(str_of(t->blocks));
	if (!companions_dtype(t->dtype) || v->rule->kind == CONVERT_RENAME || v->rule->kind == CONVERT_DROP)
		return OK;
	while (companions_next(&c, &name)) {
		const struct convert_tensor *other = find(v, name);
		if (other && v->rule->kind == CONVERT_DTYPE)
			return companions_no_cast(name);
		if (other && !other->matches)
			return ERR(VALIDATION_FAILED, "the weight is quantised and %.*s belongs to it, which the rule does not match: "
				   "both change together or not at all", (int)num_min(name.n, 300), name.p);
	}
	return OK;
}

/* Companions of a weight that is dropped or renamed, and that the rule itself does not match, follow it. */
static FALLIBLE enum err take_along(struct converter *v, const struct convert_tensor *t, struct str renamed)
{
	struct companions c = { .main = t->fqn };
	char room[COMPANION_NAME_MAX];
	struct str name, follows;

	while (companions_dtype(t->dtype) && companions_next(&c, &name)) {
		struct convert_tensor *other = find(v, name);
		if (!other || other->matches)
			continue;
		if (v->rule->kind == CONVERT_DROP) {
			other->matches = true;
			continue;
		}
		if (!companions_follow(&c, renamed, room, &follows))
			return ERR(VALIDATION_FAILED, "%.*s belongs to the weight, whose new name %.*s does not end as the old one: "
				   "rename both", (int)num_min(name.n, 300), name.p, (int)num_min(renamed.n, 300), renamed.p);
		TRY(arena_str(v->a, follows, &other->fqn));
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- rules */

static FALLIBLE enum err renamed(struct converter *v, struct str fqn, struct str *out)
{
	TRY(pattern_replace(v->patterns, v->index, fqn, v->rule->names[0], out));
	if (out->n == 0)
		return ERR(VALIDATION_FAILED, "the new name is empty");
	return str_eq(*out, fqn) ? OK : arena_str(v->a, *out, out);
}

static FALLIBLE enum err rename_all(struct converter *v)
{
	for (uint64_t i = 0; i < v->now.n; i++) {
		struct convert_tensor *t = &v->now.v[i], out = *t;
		if (!t->matches)
			continue;
		enum err e = renamed(v, t->fqn, &out.fqn);
		e = e ?: take_along(v, t, out.fqn);
		if (e)
			return err_at_fqn(e, t->fqn.p, t->fqn.n);
		t->fqn = out.fqn;
	}
	each(value, v->values.v, v->values.n) {
		if (value->matches)
			TRY(err_at_fqn(renamed(v, value->fqn, &value->fqn), value->fqn.p, value->fqn.n));
	}
	for (uint64_t i = 0; i < v->now.n; i++)
		TRY(convert_push(v, &v->now.v[i]));
	return OK;
}

static FALLIBLE enum err drop_all(struct converter *v)
{
	uint64_t kept = 0;

	for (uint64_t i = 0; i < v->now.n; i++)
		if (v->now.v[i].matches)
			TRY(take_along(v, &v->now.v[i], v->now.v[i].fqn));
	for (uint64_t i = 0; i < v->now.n; i++)
		if (!v->now.v[i].matches)
			TRY(convert_push(v, &v->now.v[i]));
	for (uint64_t i = 0; i < v->values.n; i++)
		if (!v->values.v[i].matches)
			v->values.v[kept++] = v->values.v[i];
	v->values.n = kept;
	return OK;
}

static FALLIBLE enum err stored_tensor(struct converter *v, const struct convert_source *s, uint64_t i, struct convert_tensor *out)
{
	const struct sd_tensor *t = &s->sd->tensors[i];
	enum dtype to = s->dtypes ? s->dtypes[i] : t->dtype;

	*out = (struct convert_tensor){ .fqn = t->fqn, .stored = t->fqn, .path = t->path, .shape = t->shape, .dtype = to, .ndim = t->ndim,
					.requires_grad = t->requires_grad, .blocks = t->blocks };
	TRY(arena_alloc(v->a, t->chunk_count, sizeof *out->views.v, &out->views.v));
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		if (!box_empty(t->ndim, s->sd->chunks[c].dims + t->ndim))
			TRY(view_of_chunk(v->a, t->ndim, s->sd->chunks[c].dims, s->first_chunk + (uint32_t)c,
					  &out->views.v[out->views.n++]));
	return to == t->dtype ? OK : err_at_fqn(views_cast(v->a, out->views, t->dtype, to, &out->views), t->fqn.p, t->fqn.n);
}

/* The tensor under its own name with the contents of the other checkpoint's. */
static FALLIBLE enum err take_from(struct converter *v, const struct convert_tensor *t)
{
	const struct convert_source *s = &v->sources[convert_source_of(v->c, v->index)];
	struct convert_tensor out;
	struct str name = t->fqn;

	if (v->rule->name_count)
		TRY(convert_name(v, t, 0, -1, &name));
	const struct sd_tensor *other = sdict_tensor(s->sd, name);
	if (!other)
		return ERR(MISSING_KEY, "%.*s:%.*s has no tensor %.*s", (int)v->rule->from.storage.n, v->rule->from.storage.p,
			   (int)v->rule->from.name.n, v->rule->from.name.p, (int)num_min(name.n, 400), name.p);
	TRY(stored_tensor(v, s, (uint64_t)(other - s->sd->tensors), &out));
	out.fqn = t->fqn;
	out.stored = t->stored;
	out.path = t->path;
	return convert_push(v, &out);
}

/* Adds the other checkpoint's tensors that are missing here, if the rule gives no name of its own. *count: names that the rule matches
 * there. */
static FALLIBLE enum err add_from(struct converter *v, uint64_t *count)
{
	const struct convert_source *s = &v->sources[convert_source_of(v->c, v->index)];
	struct convert_tensor out;
	bool matches;

	for (uint64_t i = 0; i < s->sd->tensor_count && v->rule->name_count == 0; i++) {
		struct str fqn = s->sd->tensors[i].fqn;
		if (map_get(&v->names, fqn) != MAP_NONE)
			continue;
		TRY(err_at_fqn(pattern_match(v->patterns, v->index, fqn, &matches), fqn.p, fqn.n));
		if (!matches)
			continue;
		++*count;
		TRY(stored_tensor(v, s, i, &out));
		TRY(convert_push(v, &out));
	}
	return OK;
}

/* Both names have the values of the one that the rule names, if that is there, else of the one that it matches. */
static FALLIBLE enum err tie(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor out = *t;
	struct str name;

	TRY(convert_name(v, t, 0, -1, &name));
	const struct convert_tensor *other = find(v, name);
	if (other) {
		out = *other;
		out.fqn = t->fqn;
		out.stored = t->stored;
		out.path = t->path;
		return convert_push(v, &out);
	}
	TRY(convert_push(v, &out));
	out.fqn = name;
	return convert_push(v, &out);
}

static FALLIBLE enum err one_by_one(struct converter *v)
{
	each(t, v->now.v, v->now.n) {
		enum err e = !t->matches ? convert_push(v, t) : v->rule->kind == CONVERT_FROM ? take_from(v, t) :
			     v->rule->kind == CONVERT_TIE ? tie(v, t) : convert_shape(v, t);
		if (e)
			return err_at_fqn(e, t->fqn.p, t->fqn.n);
	}
	return OK;
}

static FALLIBLE enum err apply_kind(struct converter *v)
{
	switch (v->rule->kind) {
	case CONVERT_RENAME:
		return rename_all(v);
	case CONVERT_DROP:
		return drop_all(v);
	case CONVERT_CONCAT:
	case CONVERT_STACK:
		return convert_join(v);
	default:
		return one_by_one(v);
	}
}

/* FQN → index in `now`, values behind the tensors. A name that two have is an error. */
static FALLIBLE enum err index_names(struct converter *v)
{
	map_free(&v->names);
	for (uint64_t i = 0; i < v->now.n + v->values.n; i++) {
		struct str fqn = i < v->now.n ? v->now.v[i].fqn : v->values.v[i - v->now.n].fqn;
		uint32_t found;
		TRY(map_intern(&v->names, fqn, (uint32_t)i, &found));
		if (found != i)
			return err_at_fqn(ERR(DUPLICATE_KEY, "two tensors or values would be called %.*s", (int)num_min(fqn.n, 400), fqn.p),
					  fqn.p, fqn.n);
	}
	return OK;
}

static FALLIBLE enum err match_all(struct converter *v, uint64_t *count)
{
	bool values = v->rule->kind == CONVERT_RENAME || v->rule->kind == CONVERT_DROP;

	*count = 0;
	each(t, v->now.v, v->now.n) {
		TRY(err_at_fqn(pattern_match(v->patterns, v->index, t->fqn, &t->matches), t->fqn.p, t->fqn.n));
		*count += t->matches;
	}
	each(value, v->values.v, v->values.n) {
		value->matches = false;
		if (values)
			TRY(err_at_fqn(pattern_match(v->patterns, v->index, value->fqn, &value->matches), value->fqn.p, value->fqn.n));
		*count += value->matches;
	}
	for (uint64_t i = 0; i < v->now.n; i++)
		if (v->now.v[i].matches)
			TRY(err_at_fqn(check_companions(v, &v->now.v[i]), v->now.v[i].fqn.p, v->now.v[i].fqn.n));
	return OK;
}

static FALLIBLE enum err apply(struct converter *v)
{
	uint64_t count, views = 0;

	TRY(match_all(v, &count));
	v->next.n = 0;
	TRY(apply_kind(v));
	if (v->rule->kind == CONVERT_FROM)
		TRY(add_from(v, &count));
	if (count == 0 && !v->rule->optional)
		return ERR(VALIDATION_FAILED, "the %s rule matches no name: '%.*s' (\"optional\":true allows that)", v->rule->word,
			   (int)num_min(v->rule->match.n, 300), v->rule->match.p);
	for (uint64_t i = 0; i < v->next.n; i++)
		views += v->next.v[i].views.n;
	if (views > VIEWS_MAX)
		return ERR(LIMIT_EXCEEDED, "the rules cut the tensors into more than %d pieces", VIEWS_MAX);
	struct convert_tensors was = v->now;
	v->now = v->next;
	v->next = was;
	return index_names(v);
}

/* ------------------------------------------------------------------------------------------------------ results */

static FALLIBLE enum err put_tensor(const struct convert_tensor *t, struct converted *out)
{
	uint32_t index;

	TRY(err_at_fqn(sdict_add_tensor(out->sd, t->fqn, t->dtype, t->ndim, t->shape, &index), t->fqn.p, t->fqn.n));
	out->sd->tensors[index].requires_grad = t->requires_grad;
	out->sd->tensors[index].blocks = t->blocks;
	TRY(sdict_rename_path(out->sd, t->path, t->stored, t->fqn, &out->sd->tensors[index].path));
	each(view, t->views.v, t->views.n) {
		out->views[out->sd->chunk_count] = *view;
		TRY(sdict_add_chunk(out->sd, index, view->dims, 0, (struct sd_loc){ .file = SD_NO_FILE }));
	}
	return OK;
}

static FALLIBLE enum err put_value(const struct converter *v, const struct convert_value *value, struct converted *out)
{
	const struct sd_value *from = &v->sources[0].sd->values[value->index];
	uint32_t index;

	TRY(err_at_fqn(sdict_add_value(out->sd, value->fqn, from->rank, from->loc, &index), value->fqn.p, value->fqn.n));
	out->sd->values[index].kind = from->kind;
	out->value_from[index] = value->index;
	TRY(sdict_rename_path(out->sd, from->path, from->fqn, value->fqn, &out->sd->values[index].path));
	return from->bytes.n ? arena_str(out->sd->arena, from->bytes, &out->sd->values[index].bytes) : OK;
}

static FALLIBLE enum err put_all(struct converter *v, struct converted *out)
{
	uint64_t views = 0;

	for (uint64_t i = 0; i < v->now.n; i++)
		views += v->now.v[i].views.n;
	TRY(sdict_new(UINT64_MAX, &out->sd));
	TRY(sdict_reserve(out->sd, v->now.n + v->values.n, v->now.n, views));
	TRY(sdict_copy_files(out->sd, v->sources[0].sd));
	out->sd->has_paths = v->sources[0].sd->has_paths;
	TRY(arena_alloc(v->a, views, sizeof *out->views, &out->views));
	TRY(arena_alloc(v->a, v->values.n, sizeof *out->value_from, &out->value_from));
	for (uint64_t i = 0; i < v->now.n; i++)
		TRY(put_tensor(&v->now.v[i], out));
	for (uint64_t i = 0; i < v->values.n; i++)
		TRY(put_value(v, &v->values.v[i], out));
	return OK;
}

static FALLIBLE enum err start(struct converter *v)
{
	const struct sdict *sd = v->sources[0].sd;
	struct convert_tensor *t;
	struct convert_value *value;
	uint32_t index;
	char pointer[48];

	TRY(patterns_open(&v->patterns));
	for (uint32_t i = 0; i < v->c->count; i++) {
		enum err e = pattern_add(v->patterns, v->c->rules[i].match, &index);
		snprintf(pointer, sizeof pointer, "/transform/%u/match", i);
		if (e)
			return err_at_pointer(e, pointer);
	}
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		TRY(vec_push(&v->now, &t));
		TRY(stored_tensor(v, &v->sources[0], i, t));
	}
	for (uint64_t i = 0; i < sd->value_count; i++) {
		TRY(vec_push(&v->values, &value));
		*value = (struct convert_value){ .fqn = sd->values[i].fqn, .index = (uint32_t)i };
	}
	return index_names(v);
}

static FALLIBLE enum err run(struct converter *v, struct converted *out)
{
	char pointer[48];

	TRY(start(v));
	for (v->index = 0; v->index < v->c->count; v->index++) {
		v->rule = &v->c->rules[v->index];
		enum err e = apply(v);
		snprintf(pointer, sizeof pointer, "/transform/%u", v->index);
		if (e)
			return err_at_pointer(e, pointer);
	}
	return put_all(v, out);
}

enum err convert(const struct conversion *c, const struct convert_source *sources, struct converted *out)
{
	struct converter v = { .c = c, .sources = sources, .a = arena_new(UINT64_MAX) };

	*out = (struct converted){ .arena = v.a };
	enum err e = v.a ? run(&v, out) : ERR(NO_MEMORY, "no memory for conversion rules");
	patterns_free(v.patterns);
	vec_free(&v.now);
	vec_free(&v.next);
	vec_free(&v.values);
	map_free(&v.names);
	return e;
}

void convert_free(struct converted *c)
{
	sdict_free(c->sd);
	arena_free(c->arena);
	*c = (struct converted){ 0 };
}
