/* manifest.c: reading `.dcpd.json` (see manifest.h). It lies beside files that anybody may have written, so nothing in it is believed:
 * it can make a checkpoint fail its verification, and nothing else. */
#include "store/manifest.h"

#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/num.h"
#include "format/format.h"
#include "format/jscan.h"

void manifest_free(struct manifest *m)
{
	if (!m)
		return;
	vec_free(&m->hosts);
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

/* Digits alone, without zeros in front: no two names for one rank. */
static bool rank_digits(struct str s, uint64_t *out)
{
	return s.n && s.n < 10 && (s.p[0] != '0' || s.n == 1) && str_to_u64(s, out);
}

void manifest_name(const char *metadata, char out[MANIFEST_NAME_MAX])
{
	struct format_file file;

	if (format_file(metadata, &file) && file.rank >= 0)
		snprintf(out, MANIFEST_NAME_MAX, ".dcpd.%jd.json", (intmax_t)file.rank);
	else
		snprintf(out, MANIFEST_NAME_MAX, MANIFEST_NAME);
}

bool manifest_is_of(const struct manifest_file *f, const struct stat *st)
{
	return S_ISREG(st->st_mode) && (uint64_t)st->st_size == f->bytes && f->mtime_ns && st->st_mtim.tv_sec == f->mtime_ns / 1000000000 &&
	       st->st_mtim.tv_nsec == f->mtime_ns % 1000000000;
}

bool manifest_is(const char *name, int64_t *rank_out)
{
	struct str s = str_of(name);
	uint64_t rank;

	*rank_out = -1;
	if (str_is(s, MANIFEST_NAME))
		return true;
	if (!str_starts(s, ".dcpd.") || !str_ends(s, ".json") || s.n < 12 || !rank_digits((struct str){ s.p + 6, s.n - 11 }, &rank))
		return false;
	*rank_out = (int64_t)rank;
	return true;
}

static FALLIBLE enum err digest_of(struct jscan *js, const struct jscan_token *t, unsigned char out[16])
{
	if (buf_unhex(t->raw, out, 16))
		return jscan_bad(js, "a digest that is not 32 hex digits");
	return OK;
}

static FALLIBLE enum err take_digest(struct jscan *js, unsigned char out[16])
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_STRING, &t));
	return digest_of(js, &t, out);
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

static FALLIBLE enum err take_crc(struct jscan *js, uint32_t *out)
{
	struct jscan_token t;
	uint32_t big_endian = 0;

	TRY(jscan_expect(js, JSCAN_STRING, &t));
	if (t.raw.n == 8 && buf_unhex(t.raw, (unsigned char *)&big_endian, sizeof big_endian))
		return jscan_bad(js, "a CRC32 that is not 8 hex digits");
	*out = be32toh(big_endian);
	return OK;
}

/* [end, "digest", …] */
static FALLIBLE enum err take_blocks(struct jscan *js, struct manifest *m, struct manifest_item *item)
{
	struct jscan_token t;
	struct block_digest *d;
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

/* [offset, length, "crc32", "xxh3_128", [blocks]?, true?]: without blocks the one digest is that of the whole payload, whose size is not
 * told: its end is UINT64_MAX until the item's size is known. */
static FALLIBLE enum err take_item(struct jscan *js, struct manifest *m, uint32_t file)
{
	struct manifest_item *item;
	struct block_digest *d;
	struct jscan_token t;
	unsigned char whole[16];

	TRY(vec_push(&m->items, &item));
	item->file = file;
	item->digest_at = m->digests.n;
	TRY(take_u64(js, &item->offset));
	TRY(take_u64(js, &item->length));
	TRY(take_crc(js, &item->crc32));
	TRY(take_digest(js, whole));
	memcpy(item->xxh3_128, whole, sizeof whole);
	TRY(jscan_next(js, &t));
	bool blocks = t.kind == JSCAN_ARRAY;
	if (blocks) {
		TRY(take_blocks(js, m, item));
		TRY(jscan_next(js, &t));
	}
	item->raw = t.kind == JSCAN_TRUE;
	if (item->raw)
		TRY(jscan_next(js, &t));
	if (t.kind != JSCAN_ARRAY_END)
		return jscan_bad(js, "an item with more than it should have");
	if (blocks)
		return OK;
	TRY(vec_push(&m->digests, &d));
	d->end = UINT64_MAX;
	memcpy(d->xxh3_128, whole, sizeof whole);
	item->digest_count = 1;
	return OK;
}

/* ["hex",…], one for each item; "" for those without. Items are still in the order of the text. */
static FALLIBLE enum err take_edges(struct jscan *js, struct manifest *m, uint32_t file)
{
	const struct manifest_file *f = &m->files.v[file];
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	for (uint64_t i = 0;; i++) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_ARRAY_END)
			return i == f->item_count ? OK : jscan_bad(js, "another number of edges than of items");
		if (t.kind != JSCAN_STRING || i >= f->item_count)
			return jscan_bad(js, "another number of edges than of items");
		struct manifest_item *item = &m->items.v[f->first_item + i];
		if (t.raw.n == 0)
			continue;
		TRY(digest_of(js, &t, item->edges));
		item->has_edges = true;
	}
}

static FALLIBLE enum err take_items(struct jscan *js, struct manifest *m, uint32_t file)
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	if (m->files.v[file].item_count)
		return jscan_bad(js, "a file with two lists of items");
	m->files.v[file].first_item = m->items.n;
	JSCAN_EACH(js, &t) {
		if (t.kind != JSCAN_ARRAY)
			return jscan_bad(js, "an item that is no array");
		TRY(take_item(js, m, file));
		m->files.v[file].item_count++;
	}
	return OK;
}

static FALLIBLE enum err take_file(struct jscan *js, struct manifest *m)
{
	uint32_t file = (uint32_t)m->files.n;
	struct manifest_file *f;
	struct jscan_token t;
	struct str span;
	uint64_t mtime;

	TRY(vec_push(&m->files, &f));
	JSCAN_EACH(js, &t) {
		if (str_is(t.raw, "name")) {
			TRY(jscan_expect(js, JSCAN_STRING, &t));
			TRY(jscan_str(js, &t, m->arena, &m->files.v[file].name));
		} else if (str_is(t.raw, "bytes")) {
			TRY(take_u64(js, &m->files.v[file].bytes));
		} else if (str_is(t.raw, "mtime_ns")) {
			TRY(take_u64(js, &mtime));
			m->files.v[file].mtime_ns = (int64_t)mtime;
		} else if (str_is(t.raw, "items")) {
			TRY(take_items(js, m, file));
		} else if (str_is(t.raw, "edges")) {
			m->has_edges = true;
			TRY(take_edges(js, m, file));
		} else {
			TRY(jscan_next(js, &t));
			TRY(jscan_skip(js, &t, &span));
		}
	}
	uint32_t found;
	if (!m->files.v[file].name.n)
		return jscan_bad(js, "a file without a name");
	TRY(map_intern(&m->names, m->files.v[file].name, file, &found));
	return found == file ? OK : jscan_bad(js, "a file for the second time");
}

static FALLIBLE enum err take_files(struct jscan *js, struct manifest *m)
{
	struct jscan_token t;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	JSCAN_EACH(js, &t) {
		if (t.kind != JSCAN_OBJECT)
			return jscan_bad(js, "a file that is no object");
		TRY(take_file(js, m));
	}
	return OK;
}

static FALLIBLE enum err take_metadata(struct jscan *js, struct manifest *m)
{
	struct jscan_token t;
	struct str span;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		if (str_is(t.raw, "name"))
			TRY(take_text(js, m, m->metadata_name, sizeof m->metadata_name));
		else if (str_is(t.raw, "bytes"))
			TRY(take_u64(js, &m->metadata_bytes));
		else if (str_is(t.raw, "save_id"))
			TRY(take_text(js, m, m->save_id, sizeof m->save_id));
		else if (str_is(t.raw, "xxh3_128"))
			TRY(take_digest(js, m->metadata_xxh3));
		else {
			TRY(jscan_next(js, &t));
			TRY(jscan_skip(js, &t, &span));
		}
	}
	return OK;
}

static FALLIBLE enum err take_hosts(struct jscan *js, struct manifest *m)
{
	struct jscan_token t;
	struct str *at;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	JSCAN_EACH(js, &t) {
		if (t.kind != JSCAN_STRING)
			return jscan_bad(js, "an id that is no text");
		TRY(vec_push(&m->hosts, &at));
		TRY(jscan_str(js, &t, m->arena, at));
		TRY(arena_str(m->arena, *at, at));
	}
	return OK;
}

static FALLIBLE enum err take_member(struct jscan *js, struct manifest *m, struct str key)
{
	struct jscan_token t;
	struct str span;

	if (str_is(key, "job"))
		return take_text(js, m, m->job, sizeof m->job);
	if (str_is(key, "hosts"))
		return take_hosts(js, m);
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
	if (str_is(key, "uid")) {
		m->has_uid = true;
		return take_u64(js, &m->uid);
	}
	if (str_is(key, "generation")) {
		m->has_generation = true;
		return take_u64(js, &m->generation);
	}
	if (str_is(key, "sync")) {
		TRY(jscan_next(js, &t));
		m->unsynced = t.kind == JSCAN_FALSE;
		return jscan_skip(js, &t, &span);
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

/* Compares the manifest's own digest, which ends the text. *found: there is one. */
static FALLIBLE enum err check_self(const char *json, uint64_t n, bool *found)
{
	struct str key = STR(MANIFEST_SELF);
	uint64_t tail = key.n + 32 + 3;        /* then `"}\n` */
	unsigned char got[16];
	char hex[33];

	*found = n >= tail && memcmp(json + n - tail, key.p, key.n) == 0 && memcmp(json + n - 3, "\"}\n", 3) == 0;
	if (!*found)
		return OK;
	digest_xxh3(json, n - tail, got);
	digest_hex(got, hex);
	if (memcmp(json + n - 35, hex, 32) == 0)
		return OK;
	char want[33] = { 0 };
	memcpy(want, json + n - 35, 32);
	return err_expected(ERR(CHECKPOINT_DAMAGED, "the manifest is not what was written"), want, hex);
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
	bool has_self;

	NEED(m, "no memory for a manifest");
	TRY(check_self(json, n, &has_self));
	m->arena = arena_new(n + (1 << 20));
	NEED(m->arena, "no memory for a manifest");
	TRY(parse(&js, m));
	if (m->has_edges && !has_self) /* only manifests of older versions lack both */
		return ERR(CHECKPOINT_DAMAGED, "the manifest does not end with its own digest");
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

static FALLIBLE enum err join_file(struct manifest *m, const struct manifest *from, const struct manifest_file *f)
{
	struct manifest_file *to;
	struct manifest_item *item;
	struct block_digest *d;

	if (map_get(&m->names, f->name) != MAP_NONE)
		return OK;
	TRY(vec_push(&m->files, &to));
	*to = *f;
	to->first_item = m->items.n;
	TRY(arena_str(m->arena, f->name, &to->name));
	for (uint64_t i = 0; i < f->item_count; i++) {
		const struct manifest_item *one = &from->items.v[f->first_item + i];
		TRY(vec_push(&m->items, &item));
		*item = *one;
		item->file = (uint32_t)(m->files.n - 1);
		item->digest_at = m->digests.n;
		for (uint32_t k = 0; k < one->digest_count; k++) {
			TRY(vec_push(&m->digests, &d));
			*d = from->digests.v[one->digest_at + k];
		}
	}
	return map_put(&m->names, to->name, (uint32_t)(m->files.n - 1));
}

enum err manifest_join(struct manifest *m, const struct manifest *from)
{
	for (uint64_t i = 0; i < from->files.n; i++)
		TRY(join_file(m, from, &from->files.v[i]));
	m->bytes += from->bytes;
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

const struct manifest_item *manifest_covering(const struct manifest *m, struct str file, uint64_t offset, uint64_t length)
{
	uint32_t f = map_get(&m->names, file);

	if (f == MAP_NONE)
		return NULL;
	const struct manifest_item *items = m->items.v + m->files.v[f].first_item;
	uint64_t lo = 0, hi = m->files.v[f].item_count;
	while (lo < hi) { /* the last one that begins at the offset or before */
		uint64_t mid = lo + (hi - lo) / 2;
		if (items[mid].offset <= offset)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo == 0 || !items[lo - 1].raw)
		return NULL;
	uint64_t skip = offset - items[lo - 1].offset;
	return skip <= items[lo - 1].length && length <= items[lo - 1].length - skip ? &items[lo - 1] : NULL;
}

/* ------------------------------------------------------------------------------------------------------- ranges */

/* Digests of a range: those of its item's payload, or (raw) those of the blocks that it touches. */
struct range_digests {
	const struct block_digest *v;
	uint64_t count, first;         /* first: number of v[0] in its item */
	uint64_t begin, at;            /* raw: where v[0] begins in the item, where the range does */
	bool raw;
};

/* The first block that ends behind `at`; n: none. */
static uint64_t first_behind(const struct block_digest *d, uint64_t n, uint64_t at)
{
	uint64_t lo = 0, hi = n;

	while (lo < hi) {
		uint64_t mid = lo + (hi - lo) / 2;
		if (d[mid].end <= at)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static bool digests_of(const struct manifest_range *r, struct range_digests *out)
{
	const struct manifest *m = r->manifest;
	const struct manifest_item *item = m ? manifest_find(m, r->file, r->offset, r->length) : NULL;

	*out = (struct range_digests){ 0 };
	if (item && !item->raw) {
		out->v = m->digests.v + item->digest_at;
		out->count = item->digest_count;
		return out->count > 0;
	}
	item = m ? manifest_covering(m, r->file, r->offset, r->length) : NULL;
	if (!item || r->length == 0)
		return false;
	out->raw = true;
	out->at = r->offset - item->offset;
	const struct block_digest *all = m->digests.v + item->digest_at;
	out->first = first_behind(all, item->digest_count, out->at);
	out->begin = out->first ? all[out->first - 1].end : 0;
	out->v = all + out->first;
	uint64_t last = first_behind(all, item->digest_count, out->at + r->length - 1);
	out->count = last - out->first + 1;
	return last < item->digest_count && last >= out->first;
}

bool manifest_same(const struct manifest_range *a, const struct manifest_range *b)
{
	struct range_digests x, y;

	if (!digests_of(a, &x) || !digests_of(b, &y) || x.raw != y.raw || x.count != y.count || x.first != y.first || x.begin != y.begin ||
	    x.at != y.at || a->length != b->length)
		return false;
	for (uint64_t i = 0; i < x.count; i++)
		if (x.v[i].end != y.v[i].end || memcmp(x.v[i].xxh3_128, y.v[i].xxh3_128, sizeof x.v[i].xxh3_128) != 0)
			return false;
	return true;
}

/* ------------------------------------------------------------------------------------------------------ writing */

void manifest_put_metadata(struct buf *b, const struct manifest_metadata *metadata)
{
	char hex[33];

	digest_hex(metadata->xxh3_128, hex);
	buf_printf(b, "{\"name\":\"%s\",\"bytes\":%ju,\"xxh3_128\":\"%s\",\"save_id\":\"%s\"}", metadata->name,
		   (uintmax_t)metadata->bytes, hex, metadata->save_id ? metadata->save_id : "");
}

enum err manifest_put_self(struct buf *b)
{
	unsigned char xxh3[16];
	char hex[33];

	TRY(buf_status(b));
	digest_xxh3(b->p, b->len, xxh3);
	digest_hex(xxh3, hex);
	buf_printf(b, MANIFEST_SELF "%s\"}\n", hex);
	return buf_status(b);
}

enum err manifest_renew(struct str text, const struct manifest_metadata *metadata, struct buf *out)
{
	struct jscan js = jscan_of(text, ERR_FORMAT_MANIFEST);
	struct jscan_token t, first;
	struct str span, old = { NULL, 0 };
	const char *end = text.p;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		TRY(jscan_next(&js, &first));
		TRY(jscan_skip(&js, &first, &span));
		if (str_is(t.raw, "metadata"))
			old = span;
		if (!str_is(t.raw, "self_xxh3_128"))
			end = span.p + span.n;
	}
	if (!old.p)
		return jscan_bad(&js, "no member \"metadata\"");
	buf_put(out, text.p, (size_t)(old.p - text.p));
	manifest_put_metadata(out, metadata);
	buf_put(out, old.p + old.n, (size_t)(end - (old.p + old.n)));
	return manifest_put_self(out);
}

enum err manifest_renew_record(struct str text, struct str record, struct buf *out)
{
	static const char *const others[] = { "dcpd", "record", "record_xxh3_128", "self_xxh3_128" };
	struct jscan js = jscan_of(text, ERR_FORMAT_MANIFEST);
	struct jscan_token t, first;
	struct str span;

	buf_puts(out, "{\"dcpd\":1");
	buf_put(out, record.p, record.n);
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		bool is_other = false;
		TRY(jscan_next(&js, &first));
		TRY(jscan_skip(&js, &first, &span));
		for (size_t i = 0; i < sizeof others / sizeof *others; i++)
			is_other |= str_is(t.raw, others[i]);
		if (!is_other) {
			buf_printf(out, ",\"%.*s\":", (int)t.raw.n, t.raw.p);
			buf_put(out, span.p, span.n);
		}
	}
	return manifest_put_self(out);
}

/* ------------------------------------------------------------------------------------------------------- checks */

void manifest_check_begin(struct manifest_check *c, const struct block_digest *digests, uint32_t count)
{
	c->digests = digests;
	c->count = count;
	c->at = 0;
	c->pos = 0;
	digest_begin_one(&c->stream, DIGEST_XXH3);
}

static FALLIBLE enum err end_block(struct manifest_check *c, uint64_t begin)
{
	const struct block_digest *d = &c->digests[c->at++];
	char want_hex[33], got_hex[33];
	struct digest got;

	digest_end(&c->stream, &got);
	digest_begin_one(&c->stream, DIGEST_XXH3);
	if (memcmp(got.xxh3_128, d->xxh3_128, sizeof got.xxh3_128) == 0)
		return OK;
	digest_hex(d->xxh3_128, want_hex);
	digest_hex(got.xxh3_128, got_hex);
	enum err e = ERR(DIGEST_MISMATCH, "bytes %ju to %ju of the item are not those written", (uintmax_t)begin, (uintmax_t)c->pos);
	return err_expected(e, want_hex, got_hex);
}

enum err manifest_check_add(struct manifest_check *c, const void *bytes, uint64_t n, bool last)
{
	const unsigned char *p = bytes;
	uint64_t begin = c->at ? c->digests[c->at - 1].end : 0;

	while (c->at < c->count) {
		uint64_t end = c->digests[c->at].end, part = num_min(n, end - c->pos); /* UINT64_MAX: the item's end */
		digest_add(&c->stream, p, part);
		p += part;
		n -= part;
		c->pos += part;
		if (c->pos < end && !(last && end == UINT64_MAX))
			break;
		TRY(end_block(c, begin));
		begin = end;
	}
	if (n || (last && c->at < c->count))
		return ERR(DIGEST_MISMATCH, "the item has another length than the manifest tells");
	return OK;
}

static bool is_uuid(const char *p)
{
	for (int i = 0; i < 36; i++) {
		bool dash = i == 8 || i == 13 || i == 18 || i == 23;
		if (dash ? p[i] != '-' : !((p[i] >= '0' && p[i] <= '9') || (p[i] >= 'a' && p[i] <= 'f')))
			return false;
	}
	return true;
}

/* In every pickle protocol the key's text is followed, a few opcodes later, by that of the value. */
void manifest_save_id(const void *metadata, uint64_t n, char out[MANIFEST_SAVE_ID])
{
	const char *begin = metadata, *at = n ? memmem(begin, n, "save_id", 7) : NULL;

	out[0] = '\0';
	for (const char *p = at ? at + 7 : NULL; p && p < at + 40 && (uint64_t)(p - begin) + 36 <= n; p++)
		if (is_uuid(p)) {
			memcpy(out, p, 36);
			out[36] = '\0';
			return;
		}
}
