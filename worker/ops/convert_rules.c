/* convert_rules.c: see convert_rules.h. */
#include "ops/convert_rules.h"

#include "base/jtext.h"
#include "base/num.h"

enum { ROWS_MAX = 10000, FROM_MAX = 16 };

static FALLIBLE enum err open_others(struct job *j, struct convert_rules *r)
{
	uint64_t chunks = r->stored->sd->chunk_count;

	for (uint32_t i = 0; i < r->c.count; i++) {
		if (r->c.rules[i].kind != CONVERT_FROM || convert_source_of(&r->c, i) != r->source_count)
			continue;
		uint32_t k = r->source_count++;
		struct input *other = &r->others[k - 1];
		TRY(input_open(j, &r->c.rules[i].from, other));
		TRY(input_undo_transforms(j, other, false));
		r->sources[k] = (struct convert_source){ .sd = other->sd, .first_chunk = (uint32_t)chunks };
		TRY(num_add(chunks, other->sd->chunk_count, &chunks));
		if (chunks >= VIEW_ZEROS)
			return ERR(LIMIT_EXCEEDED, "the checkpoints have more than %u chunks", VIEW_ZEROS - 1);
	}
	return OK;
}

/* The request's rules, then the format's. */
static FALLIBLE enum err add_rules(struct convert_rules *r, const json_t *of_format)
{
	const struct jval more = { (json_t *)(uintptr_t)of_format, NULL, "transform", 0 }, none = { NULL, NULL, "vars", 0 };
	struct conversion own;
	struct conversion_rule *all;

	if (json_array_size(of_format) == 0)
		return OK;
	TRY(conversion_read(&more, &none, r->arena, &own));
	TRY(arena_alloc(r->arena, r->c.count + own.count, sizeof *all, &all));
	if (r->c.count)
		memcpy(all, r->c.rules, r->c.count * sizeof *all);
	memcpy(all + r->c.count, own.rules, own.count * sizeof *all);
	r->c.rules = all;
	r->c.count += own.count;
	return OK;
}

enum err convert_rules_apply(struct job *j, const struct spec_view *stored, const json_t *of_format, struct convert_rules *r,
			     struct spec_view *view_out)
{
	const struct sdict *sd = stored->sd;
	const enum dtype *dtypes = stored->dtypes;

	*r = (struct convert_rules){ .arena = arena_new(UINT64_MAX), .stored = stored, .source_count = 1,
				       .c = j->spec.transform };
	NEED(r->arena, "no memory for conversion rules");
	TRY(add_rules(r, of_format));
	if (r->c.count) {
		TRY(arena_alloc(r->arena, r->c.count, sizeof *r->others, &r->others));
		TRY(arena_alloc(r->arena, r->c.count + 1u, sizeof *r->file_maps, &r->file_maps));
		TRY(arena_alloc(r->arena, r->c.count + 1u, sizeof *r->sources, &r->sources));
		r->sources[0] = (struct convert_source){ sd, dtypes, 0 };
		TRY(open_others(j, r));
		TRY(convert(&r->c, r->sources, &r->made));
		sd = r->made.sd;
		dtypes = NULL;
	}
	*view_out = (struct spec_view){ .sd = r->c.count ? r->made.sd : stored->sd, .skipped = stored->skipped,
					.dtypes = mem_alloc(sd->tensor_count * sizeof *view_out->dtypes + 1) };
	NEED(view_out->dtypes, "no memory for %ju tensors", (uintmax_t)sd->tensor_count);
	for (uint64_t i = 0; i < sd->tensor_count; i++)
		view_out->dtypes[i] = dtypes ? dtypes[i] : sd->tensors[i].dtype;
	return OK;
}

enum err convert_rules_like(const struct convert_rules *first, const struct spec_view *stored, struct convert_rules *r)
{
	uint64_t own = stored->sd->chunk_count, chunks = own;

	*r = (struct convert_rules){ .arena = arena_new(UINT64_MAX), .stored = stored, .source_count = 1, .c = first->c };
	NEED(r->arena, "no memory for conversion rules");
	TRY(arena_alloc(r->arena, first->source_count, sizeof *r->sources, &r->sources));
	r->sources[0] = (struct convert_source){ stored->sd, stored->dtypes, 0 };
	for (uint32_t k = 1; k < first->source_count; k++) {
		r->sources[k] = (struct convert_source){ .sd = first->sources[k].sd, .first_chunk = (uint32_t)chunks };
		TRY(num_add(chunks, first->sources[k].sd->chunk_count, &chunks));
	}
	if (chunks >= VIEW_ZEROS)
		return ERR(LIMIT_EXCEEDED, "the checkpoints have more than %u chunks", VIEW_ZEROS - 1);
	TRY(convert(&r->c, r->sources, &r->made));
	for (uint64_t i = 0; i < r->made.sd->chunk_count; i++)
		if (r->made.views[i].source >= own)
			r->made.views[i].source = VIEW_ZEROS;
	return OK;
}

enum err convert_rules_sources(struct convert_rules *r, struct run_build *b, uint32_t first_stored, uint32_t *first_out)
{
	uint64_t n = r->stored->sd->chunk_count;

	*first_out = first_stored;
	if (!r->c.count)
		return OK;
	for (uint32_t k = 1; k < r->source_count; k++)
		n += r->sources[k].sd->chunk_count;
	CLEANUP(mem_free_ptr) uint32_t *base = mem_alloc(n * sizeof *base + 1);
	NEED(base, "no memory for %ju chunks", (uintmax_t)n);
	for (uint32_t k = 0; k < r->source_count; k++) {
		const struct convert_source *s = &r->sources[k];
		uint32_t first = first_stored;
		if (k > 0) {
			struct input *other = &r->others[k - 1];
			TRY(input_add_files(other, b, false, &r->file_maps[k]));
			TRY(build_sources(b, s->sd, input_kind(other), r->file_maps[k], input_manifest(other), &first));
		}
		for (uint64_t i = 0; i < s->sd->chunk_count; i++)
			base[s->first_chunk + i] = first + (uint32_t)i;
	}
	return build_views(b, r->made.sd, r->made.views, base, first_out);
}

/* Are there dims of more than one index whose strides are not in C order, the innermost among them? */
static bool is_transposed(uint32_t ndim, const struct view *v)
{
	const int64_t *size = v->dims + ndim, *stride = size + ndim;
	int64_t least = INT64_MAX, inner = 0;

	for (uint32_t d = 0; d < ndim; d++)
		if (size[d] > 1) {
			least = stride[d] < least ? stride[d] : least;
			inner = stride[d];
		}
	return inner > least;
}

bool convert_rules_transpose(const struct convert_rules *r)
{
	const struct sdict *sd = r->made.sd;

	for (uint64_t i = 0; r->c.count && i < sd->chunk_count; i++)
		if (r->made.views[i].source != VIEW_ZEROS && is_transposed(sd->tensors[sd->chunks[i].tensor].ndim, &r->made.views[i]))
			return true;
	return false;
}

uint64_t convert_rules_value(const struct convert_rules *r, uint64_t i)
{
	return r->c.count ? r->made.value_from[i] : i;
}

/* ------------------------------------------------------------------------------------------------------- table */

/* The tensor whose chunk a view shows; *source: number of its checkpoint. */
static const struct sd_tensor *shown(const struct convert_rules *r, const struct view *v, uint32_t *source)
{
	uint32_t k = r->source_count - 1;

	while (v->source < r->sources[k].first_chunk)
		k--;
	*source = k;
	const struct sdict *sd = r->sources[k].sd;
	return &sd->tensors[sd->chunks[v->source - r->sources[k].first_chunk].tensor];
}

/* Adds "path" to the row of an entry whose key path is more than its FQN. */
static FALLIBLE enum err add_path(json_t *row, struct sd_path path)
{
	if (path.count == 0 || (path.count == 1 && path.parts[0].key.p))
		return OK;
	json_t *list = json_array();
	enum err e = list && json_object_set_new(row, "path", list) == 0 ? OK : ERR(NO_MEMORY, "no memory for the plan");
	for (uint32_t i = 0; !e && i < path.count; i++) {
		json_t *part = path.parts[i].key.p ? jtext_value(path.parts[i].key) : json_integer((json_int_t)path.parts[i].index);
		if (!part || json_array_append_new(list, part) != 0)
			e = ERR(NO_MEMORY, "no memory for the plan");
	}
	return e;
}

static FALLIBLE enum err add_row(json_t *list, const struct sd_tensor *t, const char *dtype, json_t **row_out)
{
	*row_out = json_pack("{s:o, s:o, s:s}", "fqn", jtext_value(t->fqn), "shape", jtext_numbers(t->shape, t->ndim),
			     "dtype", dtype);
	return *row_out && json_array_append_new(list, *row_out) == 0 ? OK : ERR(NO_MEMORY, "no memory for the plan");
}

/* The values that the rules leave, under their new names. */
static FALLIBLE enum err add_values(json_t *list, const struct sdict *sd)
{
	for (uint64_t i = 0; i < sd->value_count && i < ROWS_MAX; i++) {
		json_t *row = json_pack("{s:o}", "fqn", jtext_value(sd->values[i].fqn));
		if (!row || json_array_append_new(list, row) != 0)
			return ERR(NO_MEMORY, "no memory for the plan");
		TRY(add_path(row, sd->values[i].path));
	}
	return OK;
}

/* The tensors that one comes from, each once: the first of them, and how many there are if that is more. */
static FALLIBLE enum err add_from(const struct convert_rules *r, const struct sd_tensor *t, json_t *row)
{
	const struct sd_tensor *last = NULL;
	json_t *from = json_array();
	uint64_t count = 0;

	if (!from || json_object_set_new(row, "from", from) != 0)
		return ERR(NO_MEMORY, "no memory for the plan");
	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++) {
		uint32_t k;
		if (r->made.views[i].source == VIEW_ZEROS)
			continue;
		const struct sd_tensor *s = shown(r, &r->made.views[i], &k);
		bool known = s == last;
		for (size_t n = 0; !known && n < json_array_size(from); n++)
			known = str_is(s->fqn, json_string_value(json_array_get(from, n)));
		last = s;
		if (known)
			continue;
		count++;
		if (json_array_size(from) < FROM_MAX)
			json_array_append_new(from, jtext_value(s->fqn));
	}
	return OK;
}

enum err convert_rules_table(const struct convert_rules *r, const struct spec_view *view, json_t **out)
{
	const struct sdict *before = r->stored->sd, *after = view->sd;
	json_t *row;

	*out = NULL;
	if (!r->c.count)
		return OK;
	*out = json_pack("{s:[], s:[], s:[], s:I, s:I, s:I}", "before", "after", "values", "before_count", (json_int_t)before->tensor_count,
			 "after_count", (json_int_t)after->tensor_count, "value_count", (json_int_t)after->value_count);
	NEED(*out, "no memory for the plan");
	for (uint64_t i = 0; i < before->tensor_count && i < ROWS_MAX; i++)
		TRY(add_row(json_object_get(*out, "before"), &before->tensors[i], dtype_name(before->tensors[i].dtype), &row));
	for (uint64_t i = 0; i < after->tensor_count && i < ROWS_MAX; i++) {
		const char *dtype = after->tensors[i].q8_0 ? SPEC_Q8_0 : dtype_name(view->dtypes[i]);
		TRY(add_row(json_object_get(*out, "after"), &after->tensors[i], dtype, &row));
		TRY(add_from(r, &after->tensors[i], row));
		TRY(add_path(row, after->tensors[i].path));
	}
	return add_values(json_object_get(*out, "values"), after);
}

enum err convert_rules_casts(const struct convert_rules *r, json_t **list)
{
	const struct sdict *sd = r->made.sd;
	uint32_t k;

	for (uint64_t i = 0; r->c.count && i < sd->tensor_count && json_array_size(*list) < ROWS_MAX; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		const struct view *v = t->chunk_count ? &r->made.views[t->first_chunk] : NULL;
		if (!v || v->source == VIEW_ZEROS || (v->cast_count == 0 && shown(r, v, &k)->dtype == t->dtype))
			continue;
		if (!*list)
			*list = json_array();
		if (json_array_append_new(*list, json_pack("{s:o, s:s, s:s}", "fqn", jtext_value(t->fqn), "from",
							   dtype_name(shown(r, v, &k)->dtype), "to", dtype_name(t->dtype))) != 0)
			return ERR(NO_MEMORY, "no memory for a report");
	}
	return OK;
}

void convert_rules_free(struct convert_rules *r)
{
	for (uint32_t k = 1; k < r->source_count; k++) {
		mem_free(r->file_maps[k]);
		input_close(&r->others[k - 1]);
	}
	convert_free(&r->made);
	arena_free(r->arena);
	*r = (struct convert_rules){ 0 };
}
