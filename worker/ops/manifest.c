/* manifest.c: reading `.dcpd.json` (see manifest.h). It lies beside files that anybody may have written, so nothing in it is believed:
 * it can make a checkpoint fail its verification, and nothing else. */
#include "ops/manifest.h"

#include <stdlib.h>

#include "base/num.h"
#include "format/jscan.h"

void manifest_free(struct manifest *m)
{
	if (!m)
		return;
	vec_free(&m->files);
	vec_free(&m->items);
	vec_free(&m->digests);
	map_free(&m->names);
	arena_free(m->arena);
	mem_free(m);
}

void manifest_free_ptr(struct manifest **m)
{
	manifest_free(*m);
}

static bool nibble(char c, unsigned *out)
{
	*out = c >= '0' && c <= '9' ? (unsigned)(c - '0') : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
	return *out < 16;
}

static FALLIBLE enum err take_digest(struct jscan *js, unsigned char out[16])
{
	struct jscan_token t;
	unsigned hi, lo;

	TRY(jscan_expect(js, JSCAN_STRING, &t));
	if (t.raw.n != 32)
		return jscan_bad(js, "a digest that is not 32 hex digits");
	for (size_t i = 0; i < 16; i++) {
		if (!nibble(t.raw.p[2 * i], &hi) || !nibble(t.raw.p[2 * i + 1], &lo))
			return jscan_bad(js, "a digest that is not 32 hex digits");
		out[i] = (unsigned char)(hi << 4 | lo);
	}
	return OK;
}

static FALLIBLE enum err take_u64(struct jscan *js, uint64_t *out)
{
	struct jscan_token t;
	int64_t v;

	TRY(jscan_expect(js, JSCAN_NUMBER, &t));
	if (!jscan_i64(&t, &v) || v < 0)
		return jscan_bad(js, "a number that is no size");
	*out = (uint64_t)v;
	return OK;
}

static FALLIBLE enum err take_text(struct jscan *js, struct manifest *m, char *into, size_t max)
{
	struct jscan_token t;
	struct str s;

	TRY(jscan_expect(js, JSCAN_STRING, &t));
	TRY(jscan_str(js, &t, m->arena, &s));
	if (s.n >= max)
		return jscan_bad(js, "a text that is too long");
	memcpy(into, s.p, s.n);
	into[s.n] = '\0';
	return OK;
}

/* [end, "digest", …] */
static FALLIBLE enum err take_blocks(struct jscan *js, struct manifest *m, struct manifest_item *item)
{
	struct jscan_token t;
	struct run_digest *d;
	uint64_t before = 0;

	for (;;) {
		int64_t end;
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_ARRAY_END)
			return OK;
		if (t.kind != JSCAN_NUMBER || !jscan_i64(&t, &end) || (uint64_t)end < before || end < 0)
			return jscan_bad(js, "blocks that do not grow");
		TRY(vec_push(&m->digests, &d));
		d->end = before = (uint64_t)end;
		TRY(take_digest(js, d->xxh3_128));
		item->digest_count++;
	}
}

/* [offset, length, "crc32", "xxh3_128", [blocks]?]: without blocks the one digest is that of the whole payload, whose size is not told:
 * its end is UINT64_MAX until the item's size is known. */
static FALLIBLE enum err take_item(struct jscan *js, struct manifest *m, uint32_t file)
{
	struct manifest_item *item;
	struct run_digest *d;
	struct jscan_token t;
	unsigned char whole[16];

	TRY(vec_push(&m->items, &item));
	item->file = file;
	item->digest_at = m->digests.n;
	TRY(take_u64(js, &item->offset));
	TRY(take_u64(js, &item->length));
	TRY(jscan_expect(js, JSCAN_STRING, &t));
	TRY(take_digest(js, whole));
	TRY(jscan_next(js, &t));
	if (t.kind == JSCAN_ARRAY) {
		TRY(take_blocks(js, m, item));
		return jscan_expect(js, JSCAN_ARRAY_END, &t);
	}
	if (t.kind != JSCAN_ARRAY_END)
		return jscan_bad(js, "an item with more than it should have");
	TRY(vec_push(&m->digests, &d));
	d->end = UINT64_MAX;
	memcpy(d->xxh3_128, whole, sizeof whole);
	item->digest_count = 1;
	return OK;
}

static FALLIBLE enum err take_items(struct jscan *js, struct manifest *m, uint32_t file)
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	if (m->files.v[file].item_count)
		return jscan_bad(js, "a file with two lists of items");
	m->files.v[file].first_item = m->items.n;
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_ARRAY_END)
			return OK;
		if (t.kind != JSCAN_ARRAY)
			return jscan_bad(js, "an item that is no array");
		TRY(take_item(js, m, file));
		m->files.v[file].item_count++;
	}
}

static FALLIBLE enum err take_file(struct jscan *js, struct manifest *m)
{
	uint32_t file = (uint32_t)m->files.n;
	struct manifest_file *f;
	struct jscan_token t;
	struct str span;

	TRY(vec_push(&m->files, &f));
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			break;
		if (str_is(t.raw, "name")) {
			TRY(jscan_expect(js, JSCAN_STRING, &t));
			TRY(jscan_str(js, &t, m->arena, &m->files.v[file].name));
		} else if (str_is(t.raw, "bytes")) {
			TRY(take_u64(js, &m->files.v[file].bytes));
		} else if (str_is(t.raw, "items")) {
			TRY(take_items(js, m, file));
		} else {
			TRY(jscan_next(js, &t));
			TRY(jscan_skip(js, &t, &span));
		}
	}
	return map_put(&m->names, m->files.v[file].name, file);
}

static FALLIBLE enum err take_files(struct jscan *js, struct manifest *m)
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_ARRAY_END)
			return OK;
		if (t.kind != JSCAN_OBJECT)
			return jscan_bad(js, "a file that is no object");
		TRY(take_file(js, m));
	}
}

static FALLIBLE enum err take_metadata(struct jscan *js, struct manifest *m)
{
	struct jscan_token t;
	struct str span;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			return OK;
		if (str_is(t.raw, "name"))
			TRY(take_text(js, m, m->metadata_name, sizeof m->metadata_name));
		else if (str_is(t.raw, "bytes"))
			TRY(take_u64(js, &m->metadata_bytes));
		else if (str_is(t.raw, "xxh3_128"))
			TRY(take_digest(js, m->metadata_xxh3));
		else {
			TRY(jscan_next(js, &t));
			TRY(jscan_skip(js, &t, &span));
		}
	}
}

static FALLIBLE enum err take_member(struct jscan *js, struct manifest *m, struct str key)
{
	struct jscan_token t;
	struct str span;

	if (str_is(key, "job"))
		return take_text(js, m, m->job, sizeof m->job);
	if (str_is(key, "kind"))
		return take_text(js, m, m->kind, sizeof m->kind);
	if (str_is(key, "created_at"))
		return take_text(js, m, m->created_at, sizeof m->created_at);
	if (str_is(key, "attempt"))
		return take_u64(js, &m->attempt);
	if (str_is(key, "world_size"))
		return take_u64(js, &m->world_size);
	if (str_is(key, "bytes"))
		return take_u64(js, &m->bytes);
	if (str_is(key, "generation")) {
		m->has_generation = true;
		return take_u64(js, &m->generation);
	}
	if (str_is(key, "metadata"))
		return take_metadata(js, m);
	if (str_is(key, "files"))
		return take_files(js, m);
	TRY(jscan_next(js, &t));
	return jscan_skip(js, &t, &span);
}

static FALLIBLE enum err parse(struct jscan *js, struct manifest *m)
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			return jscan_expect(js, JSCAN_END, &t);
		TRY(take_member(js, m, t.raw));
	}
}

static int by_offset(const void *a, const void *b)
{
	const struct manifest_item *x = a, *y = b;

	return x->offset < y->offset ? -1 : x->offset > y->offset;
}

enum err manifest_parse(const void *json, uint64_t n, struct manifest **out)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = mem_zalloc(1, sizeof *m);
	struct jscan js = jscan_of((struct str){ json, n }, ERR_FORMAT_MANIFEST);

	if (!m)
		return ERR(NO_MEMORY, "no memory for a manifest");
	m->arena = arena_new(n + (1 << 20));
	if (!m->arena)
		return ERR(NO_MEMORY, "no memory for a manifest");
	TRY(parse(&js, m));
	for (uint64_t i = 0; i < m->files.n; i++) /* names point into the text when they had no escapes */
		TRY(arena_str(m->arena, m->files.v[i].name, &m->files.v[i].name));
	map_free(&m->names);
	for (uint32_t i = 0; i < m->files.n; i++) {
		TRY(map_put(&m->names, m->files.v[i].name, i));
		if (m->files.v[i].item_count)
			qsort(m->items.v + m->files.v[i].first_item, m->files.v[i].item_count, sizeof *m->items.v, by_offset);
	}
	*out = move(m);
	return OK;
}

const struct manifest_item *manifest_find(const struct manifest *m, struct str file, uint64_t offset, uint64_t length)
{
	uint32_t f = map_get(&m->names, file);
	struct manifest_item key = { .offset = offset };

	if (f == MAP_NONE || m->files.v[f].item_count == 0)
		return NULL;
	const struct manifest_item *item = bsearch(&key, m->items.v + m->files.v[f].first_item, m->files.v[f].item_count,
						   sizeof key, by_offset);
	return item && item->length == length ? item : NULL;
}
