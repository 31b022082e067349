/* image_dcpd.c: reads the `dcpd` text of an image: which part of which tensor an entry is, values, key paths. Strict: it has a version,
 * so a field that is not known is a mistake and not the future. */
#include "format/image_impl.h"

static FALLIBLE enum err again(const struct jscan *js, unsigned field, unsigned *seen)
{
	if (!field || (*seen & field))
		return jscan_bad(js, field ? "a field for the second time" : "an unknown field");
	*seen |= field;
	return OK;
}

/* The number of members of the object or elements of the array that begins with `first`. */
static FALLIBLE enum err count_members(const struct jscan *at, const struct jscan_token *first, uint32_t *out)
{
	struct jscan js = *at;
	struct jscan_token t = *first;
	uint32_t n = 0, depth = js.depth;

	while (js.depth >= depth) {
		TRY(jscan_next(&js, &t));
		bool member = t.kind == JSCAN_KEY || t.kind >= JSCAN_STRING;
		n += js.depth == depth && (first->kind == JSCAN_OBJECT ? t.kind == JSCAN_KEY : member);
	}
	*out = n;
	return OK;
}

static FALLIBLE enum err read_dims(struct jscan *js, struct arena *a, uint32_t *ndim_out, const int64_t **out)
{
	int64_t dims[NDIM_MAX], *copy;
	struct jscan_token t;
	uint32_t n = 0;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	for (;; n++) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_ARRAY_END)
			break;
		if (n == NDIM_MAX)
			return jscan_bad(js, "too many dims");
		if (!jscan_i64(&t, &dims[n]) || dims[n] < 0)
			return jscan_bad(js, "not a number >= 0");
	}
	TRY(arena_i64(a, (uint64_t)n + 1, &copy)); /* a pointer for 0-d too */
	memcpy(copy, dims, n * sizeof *dims);
	*ndim_out = n;
	*out = copy;
	return OK;
}

static FALLIBLE enum err read_ranks(struct jscan *js, struct arena *a, struct sd_outer *out)
{
	struct jscan_token t;
	uint32_t *ranks, n;
	int64_t rank;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	TRY(count_members(js, &t, &n));
	if (n == 0)
		return jscan_bad(js, "a group without ranks");
	TRY(arena_alloc(a, n, sizeof *ranks, &ranks));
	for (uint32_t i = 0; i < n; i++) {
		TRY(jscan_next(js, &t));
		if (!jscan_i64(&t, &rank) || rank < 0 || rank >= UINT32_MAX)
			return jscan_bad(js, "not a rank");
		ranks[i] = (uint32_t)rank;
	}
	out->ranks = ranks;
	out->rank_count = n;
	return jscan_expect(js, JSCAN_ARRAY_END, &t);
}

/* ["ShardedTensor","DTensor"]: what the outer and what the inner tensor is. */
static FALLIBLE enum err read_types(struct jscan *js, struct sd_outer *out)
{
	bool *const dtensor[] = { &out->outer_dtensor, &out->inner_dtensor };
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	for (size_t i = 0; i < 2; i++) {
		TRY(jscan_expect(js, JSCAN_STRING, &t));
		*dtensor[i] = str_is(t.raw, "DTensor");
		if (!*dtensor[i] && !str_is(t.raw, "ShardedTensor"))
			return jscan_bad(js, "a type that is neither ShardedTensor nor DTensor");
	}
	return jscan_expect(js, JSCAN_ARRAY_END, &t);
}

static FALLIBLE enum err read_outer(struct image *im, struct jscan *js, struct image_chunk *c)
{
	enum { SHAPE = 1, OFFSETS = 2, RANKS = 4, TYPES = 8 };
	struct jscan_token t;
	unsigned seen = 0;

	TRY(arena_alloc(im->arena, 1, sizeof *c->outer, &c->outer));
	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		unsigned field = str_is(t.raw, "global_shape") ? SHAPE : str_is(t.raw, "offsets") ? OFFSETS :
				 str_is(t.raw, "ranks") ? RANKS : str_is(t.raw, "types") ? TYPES : 0;
		TRY(again(js, field, &seen));
		if (field == SHAPE)
			TRY(read_dims(js, im->arena, &c->outer_shape_ndim, &c->outer_shape));
		else if (field == OFFSETS)
			TRY(read_dims(js, im->arena, &c->outer_offsets_ndim, &c->outer->offsets));
		else if (field == RANKS)
			TRY(read_ranks(js, im->arena, c->outer));
		else
			TRY(read_types(js, c->outer));
	}
	return (seen & (SHAPE | OFFSETS)) == (SHAPE | OFFSETS) ? OK : jscan_bad(js, "outer needs a global_shape and offsets");
}

static FALLIBLE enum err read_chunk(struct image *im, struct jscan *js, struct image_chunk *c)
{
	enum { FQN = 1, SHAPE = 2, OFFSETS = 4, DTYPE = 8, OUTER = 16 };
	struct jscan_token t;
	unsigned seen = 0;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		unsigned field = str_is(t.raw, "fqn") ? FQN : str_is(t.raw, "global_shape") ? SHAPE :
				 str_is(t.raw, "offsets") ? OFFSETS : str_is(t.raw, "dtype") ? DTYPE :
				 str_is(t.raw, "outer") ? OUTER : 0;
		TRY(again(js, field, &seen));
		if (field == SHAPE) {
			TRY(read_dims(js, im->arena, &c->shape_ndim, &c->shape));
		} else if (field == OFFSETS) {
			TRY(read_dims(js, im->arena, &c->offsets_ndim, &c->offsets));
		} else if (field == OUTER) {
			TRY(read_outer(im, js, c));
		} else {
			TRY(jscan_expect(js, JSCAN_STRING, &t));
			if (field == FQN)
				TRY(jscan_str(js, &t, im->arena, &c->fqn));
			else
				TRY(dtype_parse(t.raw, &c->dtype));
			c->dtype_given |= field == DTYPE;
		}
	}
	return OK;
}

static FALLIBLE enum err read_tensors(struct image *im, struct jscan *js)
{
	struct jscan_token t;
	struct str name;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		TRY(jscan_str(js, &t, im->arena, &name));
		uint32_t i = map_get(&im->by_name, name);
		if (i == MAP_NONE)
			return err_at_fqn(jscan_bad(js, "a tensor without an entry"), name.p, name.n);
		struct image_chunk *c = &im->chunks[i];
		if (c->listed)
			return err_at_fqn(jscan_bad(js, "a tensor for the second time"), name.p, name.n);
		c->listed = true;
		TRY(err_at_fqn(read_chunk(im, js, c), name.p, name.n));
	}
	return OK;
}

static FALLIBLE enum err read_value(struct image *im, struct jscan *js, struct image_text *v)
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	TRY(jscan_expect(js, JSCAN_KEY, &t));
	if (str_is(t.raw, "json")) {
		v->kind = IMAGE_TEXT_JSON;
		TRY(jscan_next(js, &t));
		TRY(jscan_skip(js, &t, &v->text));
	} else {
		v->kind = str_is(t.raw, "bytes") ? IMAGE_TEXT_BYTES : IMAGE_TEXT_PICKLE;
		if (v->kind == IMAGE_TEXT_PICKLE && !str_is(t.raw, "pickle"))
			return jscan_bad(js, "a value that is neither json, bytes nor pickle");
		TRY(jscan_expect(js, JSCAN_STRING, &t));
		TRY(jscan_str(js, &t, im->arena, &v->text));
	}
	return jscan_expect(js, JSCAN_OBJECT_END, &t);
}

static FALLIBLE enum err read_values(struct image *im, struct jscan *js)
{
	CLEANUP(map_free) struct map seen = { 0 };
	struct jscan_token t;
	uint32_t n, found;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	TRY(count_members(js, &t, &n));
	TRY(arena_alloc(im->arena, (uint64_t)n + 1, sizeof *im->values, &im->values));
	JSCAN_EACH(js, &t) {
		struct image_text *v = &im->values[im->value_count];
		TRY(jscan_str(js, &t, im->arena, &v->fqn));
		TRY(map_intern(&seen, v->fqn, im->value_count, &found));
		if (found != im->value_count)
			return err_at_fqn(ERR(DUPLICATE_KEY, "a value for the second time"), v->fqn.p, v->fqn.n);
		TRY(err_at_fqn(read_value(im, js, v), v->fqn.p, v->fqn.n));
		im->value_count++;
	}
	return OK;
}

enum err image_read_values(struct image *im, struct str text)
{
	struct jscan js = jscan_of(text, ERR_FORMAT_IMAGE);
	struct jscan_token t;

	TRY(read_values(im, &js));
	return jscan_expect(&js, JSCAN_END, &t);
}

static FALLIBLE enum err read_path(struct image *im, struct jscan *js, struct sd_path *path)
{
	struct sd_path_part *parts;
	struct jscan_token t;
	uint32_t n;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	TRY(count_members(js, &t, &n));
	if (n == 0)
		return jscan_bad(js, "an empty path");
	TRY(arena_alloc(im->arena, n, sizeof *parts, &parts));
	for (uint32_t i = 0; i < n; i++) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_STRING) {
			TRY(jscan_str(js, &t, im->arena, &parts[i].key));
			if (!parts[i].key.p)
				parts[i].key = STR("");
		} else if (!jscan_i64(&t, &parts[i].index) || parts[i].index < 0) {
			return jscan_bad(js, "a part of a path that is neither a key nor a position");
		}
	}
	*path = (struct sd_path){ parts, n };
	return jscan_expect(js, JSCAN_ARRAY_END, &t);
}

/* The lists in the list that was just entered. */
static FALLIBLE enum err count_lists(const struct jscan *at, uint32_t *out)
{
	struct jscan js = *at;
	struct jscan_token t;
	uint32_t depth = js.depth;

	for (*out = 0; js.depth >= depth;) {
		TRY(jscan_next(&js, &t));
		*out += t.kind == JSCAN_ARRAY && js.depth == depth + 1;
	}
	return OK;
}

static FALLIBLE enum err read_tuples(struct image *im, struct jscan *js)
{
	struct jscan_token t;
	uint32_t n;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	TRY(count_lists(js, &n));
	TRY(arena_alloc(im->arena, (uint64_t)n + 1, sizeof *im->tuples, &im->tuples));
	while (im->tuple_count < n)
		TRY(read_path(im, js, &im->tuples[im->tuple_count++]));
	return jscan_expect(js, JSCAN_ARRAY_END, &t);
}

static FALLIBLE enum err read_paths(struct image *im, struct jscan *js)
{
	struct jscan_token t;
	struct str fqn;
	uint32_t n, found;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	TRY(count_members(js, &t, &n));
	TRY(arena_alloc(im->arena, (uint64_t)n + 1, sizeof *im->paths, &im->paths));
	JSCAN_EACH(js, &t) {
		TRY(jscan_str(js, &t, im->arena, &fqn));
		TRY(map_intern(&im->path_of, fqn, im->path_count, &found));
		if (found != im->path_count)
			return err_at_fqn(jscan_bad(js, "a path for the second time"), fqn.p, fqn.n);
		TRY(err_at_fqn(read_path(im, js, &im->paths[im->path_count]), fqn.p, fqn.n));
		im->path_count++;
	}
	return OK;
}

static unsigned field_of(struct str name)
{
	static const char *const names[] = { "version", "tensors", "values", "paths", "layout", "tuples" };

	for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
		if (str_is(name, names[i]))
			return 1u << i;
	return 0;
}

enum err image_read_dcpd(struct image *im, struct str text)
{
	enum { VERSION = 1, TENSORS = 2, VALUES = 4, PATHS = 8, LAYOUT = 16, TUPLES = 32 };
	struct jscan js = jscan_of(text, ERR_FORMAT_IMAGE);
	struct jscan_token t;
	int64_t version = 0;
	unsigned seen = 0;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		unsigned field = field_of(t.raw);
		TRY(again(&js, field, &seen));
		if (field == VERSION) {
			TRY(jscan_next(&js, &t));
			if (!jscan_i64(&t, &version) || version != 1)
				return jscan_bad(&js, "a version other than 1");
		} else if (field == LAYOUT) { /* a checkpoint has no use for it, operations in memory do */
			TRY(jscan_expect(&js, JSCAN_ARRAY, &t));
			TRY(jscan_skip(&js, &t, &im->layout));
		} else if (field == TUPLES) {
			TRY(read_tuples(im, &js));
		} else {
			TRY(field == TENSORS ? read_tensors(im, &js) : field == VALUES ? read_values(im, &js)
										    : read_paths(im, &js));
		}
	}
	TRY(jscan_expect(&js, JSCAN_END, &t));
	return version == 1 ? OK : jscan_bad(&js, "no version");
}
