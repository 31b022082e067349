/* image_part.c: the values of an image by themselves. From step to step of a training they change and nothing else does; who knows where
 * they lie in the header, and that the rest is what it was, need not read it again. */
#include "format/image_impl.h"

#include "base/mem.h"

/* Offset in the string as written of the byte number `want` of its value. */
static size_t raw_offset(struct str raw, size_t want)
{
	size_t at = 0, text = 0;
	char utf8[4];

	while (at < raw.n && text < want) {
		bool escaped = raw.p[at] == '\\';
		text += escaped ? str_put_utf8(utf8, jscan_escape(raw, &at)) : 1;
		at += !escaped;
	}
	return at;
}

/* The dcpd text as written, between its quotes; p NULL: there is none. */
static FALLIBLE enum err find_dcpd(struct str json, struct jscan_token *out)
{
	struct jscan js = jscan_of(json, ERR_FORMAT_IMAGE);
	struct jscan_token t;
	struct str span;

	*out = (struct jscan_token){ 0 };
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		bool meta = str_is(t.raw, "__metadata__");
		TRY(jscan_next(&js, &t));
		if (!meta) {
			TRY(jscan_skip(&js, &t, &span));
			continue;
		}
		for (;;) {
			TRY(jscan_next(&js, &t));
			if (t.kind != JSCAN_KEY)
				return OK;
			bool dcpd = str_is(t.raw, "dcpd");
			TRY(jscan_expect(&js, JSCAN_STRING, &t));
			if (dcpd)
				*out = t;
			if (dcpd)
				return OK;
		}
	}
	return OK;
}

static FALLIBLE enum err find_values(struct str text, struct str *out)
{
	struct jscan js = jscan_of(text, ERR_FORMAT_IMAGE);
	struct jscan_token t;
	struct str span;

	*out = (struct str){ 0 };
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		bool values = str_is(t.raw, "values");
		TRY(jscan_next(&js, &t));
		TRY(jscan_skip(&js, &t, &span));
		if (values)
			*out = span;
	}
	return OK;
}

enum err image_values_span(const void *header, uint64_t header_bytes, uint64_t *begin_out, uint64_t *end_out)
{
	struct arena *a CLEANUP(arena_free_ptr) = arena_new((1 << 20) + header_bytes * 2);
	struct str json = { (const char *)header + 8, header_bytes - 8 }, text, values;
	struct jscan js = jscan_of(json, ERR_FORMAT_IMAGE);
	struct jscan_token dcpd;

	NEED(a, "no memory for a header");
	TRY(find_dcpd(json, &dcpd));
	*begin_out = *end_out = 0;
	if (!dcpd.raw.p)
		return OK;
	TRY(jscan_str(&js, &dcpd, a, &text));
	TRY(find_values(text, &values));
	if (!values.p)
		return OK;
	uint64_t base = (uint64_t)(dcpd.raw.p - (const char *)header);
	size_t from = (size_t)(values.p - text.p);
	*begin_out = base + (dcpd.escaped ? raw_offset(dcpd.raw, from) : from);
	*end_out = base + (dcpd.escaped ? raw_offset(dcpd.raw, from + values.n) : from + values.n);
	return OK;
}

static void free_ptr(struct image **im)
{
	image_free(*im);
}

static FALLIBLE enum err copy_paths(struct image *im, const struct image *like)
{
	struct sd_path_part *parts;

	TRY(arena_alloc(im->arena, (uint64_t)im->value_count + 1, sizeof *im->paths, &im->paths));
	for (uint32_t i = 0; i < im->value_count; i++) {
		uint32_t at = map_get(&like->path_of, im->values[i].fqn);
		if (at == MAP_NONE)
			continue;
		const struct sd_path *p = &like->paths[at];
		TRY(arena_alloc(im->arena, p->count, sizeof *parts, &parts));
		for (uint32_t k = 0; k < p->count; k++) {
			parts[k] = p->parts[k];
			if (parts[k].key.p)
				TRY(arena_str(im->arena, p->parts[k].key, &parts[k].key));
		}
		im->paths[im->path_count] = (struct sd_path){ parts, p->count };
		TRY(map_put(&im->path_of, im->values[i].fqn, im->path_count++));
	}
	return OK;
}

/* The quotes make it one string: bytes that would end it earlier are an error here as they would be there. */
static FALLIBLE enum err unescape(struct image *im, struct str raw, struct str *out)
{
	struct jscan_token t;
	char *quoted;

	TRY(arena_alloc(im->arena, raw.n + 2, 1, &quoted));
	quoted[0] = quoted[raw.n + 1] = '"';
	memcpy(quoted + 1, raw.p, raw.n);
	struct jscan js = jscan_of((struct str){ quoted, raw.n + 2 }, ERR_FORMAT_IMAGE);
	TRY(jscan_expect(&js, JSCAN_STRING, &t));
	TRY(jscan_str(&js, &t, im->arena, out));
	return jscan_expect(&js, JSCAN_END, &t);
}

enum err image_parse_values(struct str raw, uint32_t rank, const struct image *like, struct image **out)
{
	struct image *im CLEANUP(free_ptr) = mem_zalloc(1, sizeof *im);
	struct str text;

	NEED(im, "no memory for an image");
	im->rank = rank;
	im->sft.data_off = raw.n; /* what room for values is reckoned with */
	im->arena = arena_new(image_arena_cap(raw.n));
	NEED(im->arena, "no memory for an image");
	if (raw.n) {
		TRY(unescape(im, raw, &text));
		TRY(image_read_values(im, text));
	}
	TRY(copy_paths(im, like));
	*out = move(im);
	return OK;
}

bool image_same_values(const struct image *a, const struct image *b)
{
	bool same = a->value_count == b->value_count;

	for (uint32_t i = 0; same && i < a->value_count; i++)
		same = a->values[i].kind == b->values[i].kind && str_eq(a->values[i].fqn, b->values[i].fqn);
	return same;
}

enum err image_collect_values(struct image *const *images, uint32_t count, struct sdict **out)
{
	struct sdict *sd CLEANUP(sdict_free_ptr) = NULL;
	CLEANUP(image_seen_free) struct image_seen seen = { 0 };

	TRY(sdict_new(image_sdict_cap(images, count), &sd));
	sd->has_paths = true;
	for (uint32_t r = 0; r < count; r++)
		TRY(image_add_values(sd, images[r], &seen));
	*out = move(sd);
	return OK;
}
