/* safetensors.c: see safetensors.h. The header is scanned twice: a first pass counts, so that the arrays are made once and an arena
 * of a fixed cap is enough whatever the header says; the second fills them. Entries are then sorted by place and must lie one behind
 * the other from 0 to the end of the file. */
#include "format/safetensors.h"

#include <stdlib.h>

#include "base/map.h"
#include "base/num.h"
#include "base/reader.h"
#include "base/vec.h"
#include "format/jscan.h"

enum err sft_header_bytes(const unsigned char first8[8], uint64_t file_bytes, uint64_t *json_bytes_out)
{
	struct reader r = reader_of(first8, 8);
	uint64_t n = reader_u64(&r);

	if (file_bytes < 8)
		return ERR(FORMAT_SAFETENSORS, "a file of %ju bytes is too short", (uintmax_t)file_bytes);
	if (n > SFT_HEADER_MAX)
		return ERR(FORMAT_SAFETENSORS, "a header of %ju bytes is too large", (uintmax_t)n);
	if (n > file_bytes - 8)
		return ERR(FORMAT_SAFETENSORS, "a header of %ju bytes is longer than its file of %ju",
			   (uintmax_t)n, (uintmax_t)file_bytes);
	if (n < 2)
		return ERR(FORMAT_SAFETENSORS, "a header of %ju bytes is too short", (uintmax_t)n);
	*json_bytes_out = n;
	return OK;
}

/* While an entry is being read. */
struct sft_reader {
	struct jscan js;
	struct arena *arena;
	struct sft *out;
	struct map names, meta_keys;
	uint64_t data_bytes;
};

static void drop_reader(struct sft_reader *r)
{
	map_free(&r->names);
	map_free(&r->meta_keys);
}

static FALLIBLE enum err count_entries(struct str json, uint64_t *entries, uint64_t *metas)
{
	struct jscan js = jscan_of(json, ERR_FORMAT_SAFETENSORS);
	struct jscan_token t;

	*entries = *metas = 0;
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	for (bool meta = false;;) {
		TRY(jscan_next(&js, &t));
		if (t.kind == JSCAN_END)
			return OK;
		if (t.kind != JSCAN_KEY)
			continue;
		if (js.depth == 1) {
			meta = str_is(t.raw, "__metadata__");
			*entries += !meta;
		} else if (js.depth == 2 && meta) {
			++*metas;
		}
	}
}

static FALLIBLE enum err read_meta(struct sft_reader *r)
{
	struct jscan_token t;

	TRY(jscan_expect(&r->js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&r->js, &t) {
		struct str *key = &r->out->meta[r->out->meta_count].key;
		uint32_t i = (uint32_t)r->out->meta_count, found;
		TRY(jscan_str(&r->js, &t, r->arena, key));
		TRY(map_intern(&r->meta_keys, *key, i, &found));
		if (found != i)
			return jscan_bad(&r->js, "a key of __metadata__ for the second time");
		TRY(jscan_expect(&r->js, JSCAN_STRING, &t));
		TRY(jscan_str(&r->js, &t, r->arena, &r->out->meta[r->out->meta_count].value));
		r->out->meta_count++;
	}
	return OK;
}

static FALLIBLE enum err read_shape(struct sft_reader *r, struct sft_entry *e)
{
	int64_t dims[NDIM_MAX], *copy;
	struct jscan_token t;
	uint32_t n = 0;

	TRY(jscan_expect(&r->js, JSCAN_ARRAY, &t));
	JSCAN_EACH(&r->js, &t) {
		if (n == NDIM_MAX)
			return jscan_bad(&r->js, "too many dims");
		if (!jscan_i64(&t, &dims[n]) || dims[n] < 0)
			return jscan_bad(&r->js, "a dim that is no size");
		n++;
	}
	TRY(arena_i64(r->arena, n, &copy));
	memcpy(copy, dims, n * sizeof *dims);
	e->shape = copy;
	e->ndim = n;
	return OK;
}

static FALLIBLE enum err read_offsets(struct sft_reader *r, struct sft_entry *e)
{
	struct jscan_token t;
	int64_t v[2];

	TRY(jscan_expect(&r->js, JSCAN_ARRAY, &t));
	for (int i = 0; i < 2; i++) {
		TRY(jscan_expect(&r->js, JSCAN_NUMBER, &t));
		if (!jscan_i64(&t, &v[i]) || v[i] < 0)
			return jscan_bad(&r->js, "an offset that is none");
	}
	TRY(jscan_expect(&r->js, JSCAN_ARRAY_END, &t));
	e->begin = (uint64_t)v[0];
	e->end = (uint64_t)v[1];
	return OK;
}

/* Two elements of four bits are one here, as in PyTorch. */
static FALLIBLE enum err pair_elements(struct arena *a, struct sft_entry *e)
{
	int64_t *shape;

	if (e->dtype != DT_FLOAT4_E2M1FN_X2)
		return OK;
	if (e->ndim == 0 || e->shape[e->ndim - 1] % 2)
		return ERR(FORMAT_SAFETENSORS, "rows of F4 that are not made of whole bytes");
	TRY(arena_i64(a, e->ndim, &shape));
	memcpy(shape, e->shape, e->ndim * sizeof *shape);
	shape[e->ndim - 1] /= 2;
	e->shape = shape;
	return OK;
}

static FALLIBLE enum err check_entry(const struct sft_reader *r, const struct sft_entry *e)
{
	uint64_t numel, bytes;

	if (e->begin > e->end || e->end > r->data_bytes)
		return ERR(FORMAT_SAFETENSORS, "data_offsets [%ju, %ju] are not inside of %ju bytes",
			   (uintmax_t)e->begin, (uintmax_t)e->end, (uintmax_t)r->data_bytes);
	TRY(box_numel(e->ndim, e->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(e->dtype), &bytes));
	if (bytes != e->end - e->begin)
		return ERR(FORMAT_SAFETENSORS, "shape and dtype need %ju bytes, data_offsets give %ju",
			   (uintmax_t)bytes, (uintmax_t)(e->end - e->begin));
	return OK;
}

static FALLIBLE enum err read_entry(struct sft_reader *r, struct sft_entry *e)
{
	enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
	struct jscan_token t;
	unsigned seen = 0;

	TRY(jscan_expect(&r->js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&r->js, &t) {
		unsigned field = str_is(t.raw, "dtype") ? DTYPE : str_is(t.raw, "shape") ? SHAPE :
				 str_is(t.raw, "data_offsets") ? OFFSETS : 0;
		if (!field || (seen & field))
			return jscan_bad(&r->js, field ? "a field for the second time" : "an unknown field");
		seen |= field;
		if (field == DTYPE) {
			TRY(jscan_expect(&r->js, JSCAN_STRING, &t));
			TRY(dtype_from_safetensors(t.raw, &e->dtype));
		} else {
			TRY(field == SHAPE ? read_shape(r, e) : read_offsets(r, e));
		}
	}
	if (seen != (DTYPE | SHAPE | OFFSETS))
		return jscan_bad(&r->js, "dtype, shape or data_offsets is missing");
	TRY(pair_elements(r->arena, e));
	return check_entry(r, e);
}

static FALLIBLE enum err read_header(struct sft_reader *r)
{
	struct jscan_token t;
	bool meta_seen = false;

	TRY(jscan_expect(&r->js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&r->js, &t) {
		struct sft_entry *e = &r->out->entries[r->out->entry_count];
		uint32_t i = (uint32_t)r->out->entry_count, found;
		struct str name;
		TRY(jscan_str(&r->js, &t, r->arena, &name));
		/* The first pass looked for the name as it is usually written; so only that writing counts here. */
		if (str_is(t.raw, "__metadata__")) {
			if (meta_seen)
				return jscan_bad(&r->js, "a second __metadata__");
			meta_seen = true;
			TRY(read_meta(r));
			continue;
		}
		if (str_is(name, "__metadata__"))
			return jscan_bad(&r->js, "an escaped __metadata__");
		TRY(map_intern(&r->names, name, i, &found));
		if (found != i)
			return err_at_fqn(jscan_bad(&r->js, "an entry for the second time"), name.p, name.n);
		e->name = name;
		TRY(err_at_fqn(read_entry(r, e), name.p, name.n));
		r->out->entry_count++;
	}
	return jscan_expect(&r->js, JSCAN_END, &t);
}

/* Empty entries share their place with a neighbour: begin, then end, then the name. */
static int by_place(const void *a, const void *b)
{
	const struct sft_entry *x = a, *y = b;

	return num_order(x->begin, y->begin) ?: num_order(x->end, y->end) ?: str_cmp(x->name, y->name);
}

static FALLIBLE enum err check_order(const struct sft *s)
{
	uint64_t at = 0;

	each(e, s->entries, s->entry_count) {
		if (e->begin != at)
			return err_at_fqn(ERR(FORMAT_SAFETENSORS, "%s in the data at %ju",
					      e->begin > at ? "a hole" : "an overlap", (uintmax_t)num_min(at, e->begin)),
					  e->name.p, e->name.n);
		at = e->end;
	}
	if (at != s->data_bytes)
		return ERR(FORMAT_SAFETENSORS, "%ju bytes of data, the entries describe %ju",
			   (uintmax_t)s->data_bytes, (uintmax_t)at);
	return OK;
}

enum err sft_parse(struct str json, uint64_t file_bytes, struct arena *arena, struct sft *out)
{
	struct sft s = { 0 };
	CLEANUP(drop_reader) struct sft_reader r = { .js = jscan_of(json, ERR_FORMAT_SAFETENSORS), .arena = arena,
						 .out = &s };
	uint64_t entries, metas;

	TRY(num_add(json.n, 8, &s.data_off));
	if (s.data_off > file_bytes)
		return ERR(FORMAT_SAFETENSORS, "the header is longer than its file");
	if (json.n == 0 || json.p[0] != '{')
		return ERR(FORMAT_SAFETENSORS, "the header does not begin with '{'");
	s.data_bytes = file_bytes - s.data_off;
	r.data_bytes = s.data_bytes;
	TRY(count_entries(json, &entries, &metas));
	if (entries > json.n / SFT_ENTRY_MIN)
		return ERR(FORMAT_SAFETENSORS, "%ju entries in a header of %zu bytes", (uintmax_t)entries, json.n);
	if (metas > SFT_META_MAX)
		return ERR(LIMIT_EXCEEDED, "%ju keys in __metadata__, more than %d", (uintmax_t)metas, SFT_META_MAX);
	TRY(arena_alloc(arena, entries + 1, sizeof *s.entries, &s.entries));
	TRY(arena_alloc(arena, metas + 1, sizeof *s.meta, &s.meta));
	TRY(read_header(&r));
	qsort(s.entries, s.entry_count, sizeof *s.entries, by_place);
	TRY(check_order(&s));
	*out = s;
	return OK;
}

static void put_entry(struct buf *b, const struct sft_entry *e)
{
	const char *dtype = dtype_safetensors_word(e->dtype);
	int64_t last = e->dtype == DT_FLOAT4_E2M1FN_X2 ? 2 : 1;

	must(dtype);
	buf_printf(b, ":{\"dtype\":\"%s\",\"shape\":[", dtype);
	for (uint32_t d = 0; d < e->ndim; d++)
		buf_printf(b, "%s%jd", d ? "," : "", (intmax_t)(e->shape[d] * (d + 1 == e->ndim ? last : 1)));
	buf_printf(b, "],\"data_offsets\":[%ju,%ju]}", (uintmax_t)e->begin, (uintmax_t)e->end);
}

enum err sft_put_header(struct buf *b, const struct sft_entry *entries, uint64_t count, const struct str (*meta)[2],
			uint64_t meta_count, uint32_t align)
{
	size_t start = b->len;

	must(align >= 8 && (align & (align - 1)) == 0);
	buf_le64(b, 0);
	buf_putc(b, '{');
	if (meta_count)
		buf_puts(b, "\"__metadata__\":{");
	for (uint64_t i = 0; i < meta_count; i++) {
		if (i)
			buf_putc(b, ',');
		TRY(jscan_put_str(b, meta[i][0]));
		buf_putc(b, ':');
		TRY(jscan_put_str(b, meta[i][1]));
	}
	if (meta_count)
		buf_puts(b, count ? "}," : "}");
	for (uint64_t i = 0; i < count; i++) {
		if (i)
			buf_putc(b, ',');
		TRY(err_at_fqn(jscan_put_str(b, entries[i].name), entries[i].name.p, entries[i].name.n));
		put_entry(b, &entries[i]);
	}
	buf_putc(b, '}');
	buf_fill(b, ' ', (align - (b->len - start) % align) % align);
	TRY(buf_status(b));
	uint64_t n = b->len - start - 8;
	if (n > SFT_HEADER_MAX)
		return ERR(LIMIT_EXCEEDED, "a safetensors header of %ju bytes", (uintmax_t)n);
	n = htole64(n);
	memcpy(b->p + start, &n, sizeof n);
	return OK;
}
