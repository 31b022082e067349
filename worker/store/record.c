/* record.c: see record.h. */
#include "store/record.h"

#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "base/num.h"
#include "format/jscan.h"
#include "spec/ref.h"
#include "store/beside.h"
#include "store/checkpoint.h"

/* Bytes of a manifest that are read at first: enough for most records. WHOLE_MAX: metadata that is compared by the digest of all of it. */
enum { FRONT_BYTES = 8 << 10, TAIL_BYTES = 4 << 10, WHOLE_MAX = 1 << 20, TEXT_MAX = 512, NAME_BYTES_MAX = 4096 };

void record_free(struct record *r)
{
	json_decref(r->doc);
	*r = (struct record){ 0 };
}

/* ---- the form ---- */

enum form { TEXT, COUNT, DIGEST, TEXTS, NUMBERS, OBJECT, LIST };

struct member {
	const char *key;
	enum form form;
	size_t max;                    /* bytes of a text, members of an object or list */
	const struct member *inside;
};

static const struct member made_by[] = {
	{ "job", TEXT, 63, NULL },	{ "kind", TEXT, 31, NULL },	  { "attempt", COUNT, 0, NULL },
	{ "version", TEXT, 63, NULL },	{ "plan_digest", DIGEST, 0, NULL }, { "uid", COUNT, 0, NULL },	{ NULL, TEXT, 0, NULL },
};
static const struct member parent[] = {
	{ "role", TEXT, 31, NULL },  { "storage", TEXT, 32, NULL },		    { "name", TEXT, NAME_BYTES_MAX, NULL },
	{ "job", TEXT, 63, NULL },   { "content_digest", DIGEST, 0, NULL }, { NULL, TEXT, 0, NULL },
};
static const struct member members[] = {
	{ "made_by", OBJECT, 0, made_by },	{ "durable_at", TEXT, 39, NULL },
	{ "generation", COUNT, 0, NULL },	{ "labels", TEXTS, RECORD_LABELS_MAX, NULL },
	{ "metrics", NUMBERS, RECORD_METRICS_MAX, NULL }, { "parents", LIST, RECORD_PARENTS_MAX, parent },
	{ "bytes_shared", COUNT, 0, NULL },	{ "content_digest", DIGEST, 0, NULL },
	{ "content_unknown", TEXT, 200, NULL }, { NULL, TEXT, 0, NULL },
};

static FALLIBLE enum err take_object(const struct member *m, const struct jval *v, json_t **out);

static FALLIBLE enum err take_text(const struct member *m, const struct jval *v)
{
	struct str text;

	TRY(jval_string(v, &text));
	if (text.n > m->max)
		return jval_fail(v, ERR_VALIDATION_FAILED, "has more than %zu bytes", m->max);
	return OK;
}

static FALLIBLE enum err take_digest(const struct jval *v)
{
	unsigned char digest[16];
	struct str text;

	TRY(jval_string(v, &text));
	return buf_unhex(text, digest, sizeof digest) ? jval_fail(v, ERR_VALIDATION_FAILED, "is no digest") : OK;
}

/* An object of texts, or of numbers. */
static FALLIBLE enum err take_map(const struct member *m, const struct jval *v)
{
	const char *key;
	json_t *value;

	if (!json_is_object(v->j) || json_object_size(v->j) > m->max)
		return jval_fail(v, ERR_VALIDATION_FAILED, "is no object of at most %zu members", m->max);
	json_object_foreach(v->j, key, value) {
		struct jval one = { value, v, key, 0 };
		struct str text;
		if (strlen(key) > TEXT_MAX)
			return jval_fail(v, ERR_VALIDATION_FAILED, "has a key of more than %d bytes", TEXT_MAX);
		if (m->form == NUMBERS && !json_is_number(value))
			return jval_fail(&one, ERR_VALIDATION_FAILED, "is no number");
		if (m->form == TEXTS)
			TRY(jval_string(&one, &text));
	}
	return OK;
}

static FALLIBLE enum err take_list(const struct member *m, const struct jval *v, json_t **out)
{
	size_t n = 0;

	TRY(jval_array(v, m->max, &n));
	*out = json_array();
	NEED(*out, "no memory for a record");
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(v, i);
		json_t *taken = NULL;
		TRY(take_object(m->inside, &one, &taken));
		if (json_array_append_new(*out, taken) != 0)
			return ERR(NO_MEMORY, "no memory for a record");
	}
	return OK;
}

/* *out: what stands in for the value; NULL: the value itself. */
static FALLIBLE enum err take_value(const struct member *m, const struct jval *v, json_t **out)
{
	int64_t n;

	switch (m->form) {
	case TEXT:
		return take_text(m, v);
	case COUNT:
		return jval_integer(v, 0, INT64_MAX, &n);
	case DIGEST:
		return take_digest(v);
	case TEXTS:
	case NUMBERS:
		return take_map(m, v);
	case OBJECT:
		return take_object(m->inside, v, out);
	case LIST:
		return take_list(m, v, out);
	}
	return OK;
}

/* Takes the members that are known; those of a newer dcpd are left out. */
static FALLIBLE enum err take_object(const struct member *m, const struct jval *v, json_t **out)
{
	CLEANUP(jval_drop) json_t *doc = json_object();

	NEED(doc, "no memory for a record");
	if (!json_is_object(v->j))
		return jval_fail(v, ERR_VALIDATION_FAILED, "is no object");
	for (; m->key; m++) {
		struct jval one = jval_get(v, m->key);
		CLEANUP(jval_drop) json_t *taken = NULL;
		if (!one.j || json_is_null(one.j))
			continue;
		TRY(take_value(m, &one, &taken));
		if (json_object_set(doc, m->key, taken ? taken : one.j) != 0)
			return ERR(NO_MEMORY, "no memory for a record");
	}
	*out = move(doc);
	return OK;
}

/* ---- the front of a manifest ---- */

/* Members in front of a manifest's files. */
struct front {
	json_t *made_by, *created_at, *generation;
	struct str record, digest;     /* texts; p NULL: there is none */
	struct record_metadata metadata;
};

static FALLIBLE enum err bad_digest(const char *why)
{
	return ERR(FORMAT_MANIFEST, "the record in the manifest %s", why);
}

static FALLIBLE enum err take_metadata(struct str span, struct record_metadata *out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct str name = STR(""), save_id = STR(""), digest = STR("");
	int64_t bytes = 0;

	TRY(jval_parse(span, &doc));
	struct jval root = JVAL_ROOT(doc);
	TRY(jval_must_text(&root, "name", &name));
	TRY(jval_must_text(&root, "xxh3_128", &digest));
	TRY(jval_opt_integer(&root, "bytes", 0, INT64_MAX, &bytes));
	if (json_object_get(doc, "save_id"))
		TRY(jval_must_text(&root, "save_id", &save_id));
	if (name.n >= sizeof out->name || save_id.n >= sizeof out->save_id || buf_unhex(digest, out->xxh3_128, sizeof out->xxh3_128))
		return ERR(FORMAT_MANIFEST, "the manifest's metadata is not told as a manifest tells it");
	snprintf(out->name, sizeof out->name, "%s", name.p);
	snprintf(out->save_id, sizeof out->save_id, "%s", save_id.p);
	out->bytes = (uint64_t)bytes;
	return OK;
}

/* A text or a number at the front of an older manifest. */
static FALLIBLE enum err note_old(struct front *f, struct str key, struct str span)
{
	static const char *const kept[] = { "job", "kind", "attempt", "uid" };
	CLEANUP(jval_drop) json_t *doc = NULL;
	CLEANUP(buf_free) struct buf text = BUF_INIT(2 * TEXT_MAX);

	buf_puts(&text, "{\"v\":");
	buf_put(&text, span.p, span.n);
	buf_puts(&text, "}");
	TRY(buf_status(&text));
	TRY(jval_parse((struct str){ (char *)text.p, text.len }, &doc));
	json_t *v = json_object_get(doc, "v");
	if (str_is(key, "created_at") || str_is(key, "generation")) {
		json_t **at = str_is(key, "generation") ? &f->generation : &f->created_at;
		json_decref(*at); /* a key may be there twice */
		*at = json_incref(v);
		return OK;
	}
	for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
		if (str_is(key, kept[i]) && json_object_set(f->made_by, kept[i], v) != 0)
			return ERR(NO_MEMORY, "no memory for a record");
	return OK;
}

/* Behind the key `files`: what the first row says of its file, as far as the text goes. */
static void scan_file(struct jscan *js, struct manifest_file *out)
{
	struct jscan_token t, v;
	int64_t bytes = -1, mtime = 0;

	if (jscan_expect(js, JSCAN_ARRAY, &t) == OK && jscan_expect(js, JSCAN_OBJECT, &t) == OK)
		while (!mtime && jscan_next(js, &t) == OK && t.kind == JSCAN_KEY && jscan_next(js, &v) == OK) {
			int64_t *to = str_is(t.raw, "bytes") ? &bytes : str_is(t.raw, "mtime_ns") ? &mtime : NULL;
			if (to ? !jscan_i64(&v, to) : v.kind != JSCAN_STRING)
				break;
		}
	err_clear();
	if (bytes >= 0 && mtime > 0)
		*out = (struct manifest_file){ .bytes = (uint64_t)bytes, .mtime_ns = mtime };
}

static FALLIBLE enum err scan_front(struct str text, struct front *f)
{
	struct jscan js = jscan_of(text, ERR_FORMAT_MANIFEST);
	struct jscan_token t, first;
	struct str span;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		if (str_is(t.raw, "files")) {
			scan_file(&js, &f->metadata.file);
			return OK;
		}
		TRY(jscan_next(&js, &first));
		TRY(jscan_skip(&js, &first, &span));
		if (str_is(t.raw, "record"))
			f->record = span;
		else if (str_is(t.raw, "record_xxh3_128"))
			f->digest = first.kind == JSCAN_STRING ? first.raw : STR("");
		else if (str_is(t.raw, "metadata"))
			TRY(take_metadata(span, &f->metadata));
		else if (!f->record.p && span.n < TEXT_MAX && first.kind != JSCAN_OBJECT && first.kind != JSCAN_ARRAY)
			TRY(note_old(f, t.raw, span));
	}
	return OK;
}

static FALLIBLE enum err from_front(const struct front *f, json_t **out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	unsigned char got[16];
	char hex[33];

	if (f->record.p) {
		digest_xxh3(f->record.p, f->record.n, got);
		digest_hex(got, hex);
		if (!str_is(f->digest, hex))
			return bad_digest("is not what was written");
		TRY(jval_parse(f->record, &doc));
	} else {
		doc = json_pack("{s:O}", "made_by", f->made_by);
		if (!doc || (f->created_at && json_object_set(doc, "durable_at", f->created_at) != 0) ||
		    (f->generation && json_object_set(doc, "generation", f->generation) != 0))
			return ERR(NO_MEMORY, "no memory for a record");
	}
	struct jval root = JVAL_ROOT(doc);
	return take_object(members, &root, out);
}

enum err record_parse(struct str text, json_t **doc_out, struct record_metadata *metadata)
{
	struct front f = { .made_by = json_object() };

	enum err e = f.made_by ? scan_front(text, &f) : ERR(NO_MEMORY, "no memory for a record");
	e = e ?: from_front(&f, doc_out);
	json_decref(f.made_by);
	json_decref(f.created_at);
	json_decref(f.generation);
	if (!e)
		*metadata = f.metadata;
	return e;
}

/* ---- does it go with what lies there? ---- */

/* PyTorch writes over a checkpoint and leaves the manifest. Metadata that is older than the manifest is what dcpd wrote, if its size is the
 * one on record; of younger metadata (a copied folder, say) the digest tells, and where that would cost too much the id of its save, which
 * stands at its end. */
static FALLIBLE enum err is_of_metadata(struct store_at dir, const struct stat *manifest, const struct record_metadata *m, bool *out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	CLEANUP(mem_free_ptr) unsigned char *bytes = NULL;
	unsigned char got[16];
	struct stat st;

	*out = true;
	if (!m->name[0])
		return OK;
	enum err e = store_stat(dir, m->name, &st);
	*out = !e && S_ISREG(st.st_mode) && (uint64_t)st.st_size == m->bytes;
	if (e == ERR_NOT_FOUND)
		err_clear();
	else
		TRY(e);
	if (!*out || st.st_mtim.tv_sec < manifest->st_mtim.tv_sec ||
	    (st.st_mtim.tv_sec == manifest->st_mtim.tv_sec && st.st_mtim.tv_nsec <= manifest->st_mtim.tv_nsec))
		return OK;
	bool whole = m->bytes <= WHOLE_MAX;
	uint64_t n = whole ? m->bytes : TAIL_BYTES;
	bytes = mem_alloc(n + 1);
	NEED(bytes, "no memory for metadata");
	TRY(store_open_file(dir, m->name, STORE_READ, &file));
	TRY(store_read(file, bytes, n, m->bytes - n, m->name));
	digest_xxh3(bytes, n, got);
	size_t id = strlen(m->save_id);
	*out = whole ? memcmp(got, m->xxh3_128, sizeof got) == 0 : id && memmem(bytes, n, m->save_id, id);
	return OK;
}

/* An error that is the record's own fault becomes its problem. */
static FALLIBLE enum err noted(struct record *r, enum err e)
{
	if (e != ERR_FORMAT_MANIFEST && e != ERR_VALIDATION_FAILED && e != ERR_INVALID_JSON && e != ERR_LIMIT_EXCEEDED &&
	    e != ERR_NAME_INVALID && e != ERR_FORBIDDEN)
		return e;
	snprintf(r->problem, sizeof r->problem, "%.*s", RECORD_PROBLEM_MAX - 1, err_last()->text);
	err_clear();
	return OK;
}

static FALLIBLE enum err read_front(struct store_at file, const char *name, bool beside, json_t **doc, struct record_metadata *metadata)
{
	struct stat st;

	TRY(store_stat(file, "", &st));
	uint64_t bytes = (uint64_t)st.st_size;
	CLEANUP(mem_free_ptr) char *text = mem_alloc(num_min(bytes, RECORD_BYTES_MAX) + 1);
	uint64_t n = num_min(bytes, FRONT_BYTES);

	NEED(text, "no memory for a record");
	TRY(store_read(file, text, n, 0, name));
	enum err e = record_parse((struct str){ text, n }, doc, metadata);
	if ((!e && (!beside || metadata->file.mtime_ns)) || n == bytes || e == ERR_NO_MEMORY)
		return e;
	err_clear();
	json_decref(*doc);
	*doc = NULL;
	n = num_min(bytes, RECORD_BYTES_MAX);
	TRY(store_read(file, text, n, 0, name));
	return record_parse((struct str){ text, n }, doc, metadata);
}

static FALLIBLE enum err read_dir(struct store_at dir, const char *manifest, struct record *out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct record_metadata metadata = { 0 };
	struct stat st;
	bool fits;

	TRY(store_open_file(dir, manifest, STORE_READ, &file));
	TRY(store_stat(file, "", &st));
	TRY(read_front(file, manifest, false, &doc, &metadata));
	TRY(is_of_metadata(dir, &st, &metadata, &fits));
	if (!fits)
		return ERR(FORMAT_MANIFEST, "the manifest is of another save: the metadata was written by something else since");
	json_decref(out->doc);
	out->doc = move(doc);
	return OK;
}

/* A page that was made for another file of the name says nothing of this one. */
static FALLIBLE enum err read_beside(struct store_at folder, const char *name, const struct stat *of, struct record *out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct record_metadata metadata = { 0 };
	char page[BESIDE_MAX];

	if (!beside_path(name, MANIFEST_NAME, page))
		return OK;
	TRY(store_open_file(folder, page, STORE_READ, &file));
	TRY(read_front(file, page, true, &doc, &metadata));
	if (!manifest_is_of(&metadata.file, of))
		return OK;
	json_decref(out->doc);
	out->doc = move(doc);
	return OK;
}

/* Of a page that is not there the record stays empty. */
static FALLIBLE enum err taken(struct record *out, enum err e)
{
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return noted(out, e);
}

enum err record_of_dir(struct store_at dir, const char *manifest, struct record *out)
{
	*out = (struct record){ .doc = json_object() };
	NEED(out->doc, "no memory for a record");
	return taken(out, read_dir(dir, manifest, out));
}

enum err record_of(struct store_at folder, const char *name, struct record *out)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct stat st;

	*out = (struct record){ .doc = json_object() };
	NEED(out->doc, "no memory for a record");
	TRY(store_stat(folder, name, &st));
	if (!S_ISDIR(st.st_mode))
		return taken(out, read_beside(folder, name, &st, out));
	TRY(store_enter(folder, name, &dir));
	return taken(out, read_dir(dir, MANIFEST_NAME, out));
}

/* ---- put ---- */

enum err record_put(struct buf *b, const json_t *doc)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(RECORD_BYTES_MAX - TAIL_BYTES);
	unsigned char xxh3[16];
	char hex[33];

	TRY(jval_dump(doc, &text));
	digest_xxh3(text.p, text.len, xxh3);
	digest_hex(xxh3, hex);
	buf_puts(b, ",\"record\":");
	buf_put(b, text.p, text.len);
	buf_printf(b, ",\"record_xxh3_128\":\"%s\"", hex);
	return buf_status(b);
}

/* The number at the name's end, else the label `step`, else the generation; -1: none. */
static int64_t step_of(const json_t *doc, const char *name)
{
	const json_t *generation = json_object_get(doc, "generation");
	const char *label = json_string_value(json_object_get(json_object_get(doc, "labels"), "step"));
	uint64_t step;

	if (label && str_to_u64(str_of(label), &step) && step <= INT64_MAX)
		return ref_step(name, (int64_t)step);
	return ref_step(name, json_is_integer(generation) ? json_integer_value(generation) : -1);
}

enum err record_put_members(struct buf *b, const struct record *r, const char *name)
{
	int64_t step = step_of(r->doc, name);
	const char *key;
	json_t *value;

	if (step < 0)
		buf_puts(b, ",\"step\":null");
	else
		buf_printf(b, ",\"step\":%jd", (intmax_t)step);
	json_object_foreach(r->doc, key, value) {
		if (strcmp(key, "generation") == 0)
			continue;
		buf_printf(b, ",\"%s\":", key);
		TRY(jval_dump(value, b));
	}
	if (r->problem[0])
		buf_json_member(b, ",\"record_problem\":", str_of(r->problem));
	return buf_status(b);
}
