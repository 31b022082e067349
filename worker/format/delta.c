/* delta.c: see delta.h. */
#include "format/delta.h"

#include <inttypes.h>
#include <string.h>

#include "format/jscan.h"
#include "format/torch_item.h"

enum { PATH_MAX_PARTS = 64 };

static const char *const encodings[] = { [DELTA_XOR] = "xor", [DELTA_OVERWRITE] = "overwrite" };
static const char *const checksums[] = { [DELTA_XXH3_128] = "xxh3-128", [DELTA_ADLER32] = "adler32" };

const char *delta_encoding_name(enum delta_encoding e)
{
	return encodings[e];
}

/* An error is only that the text ends: the rest of a long index is not looked at. */
static FALLIBLE enum err find_mark(struct jscan *js, bool *is_out)
{
	struct jscan_token t;
	struct str skipped;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	TRY(jscan_expect(js, JSCAN_KEY, &t));
	if (!str_is(t.raw, "metadata"))
		return OK;
	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		*is_out = *is_out || str_is(t.raw, "delta_encoding");
		TRY(jscan_next(js, &t));
		TRY(jscan_skip(js, &t, &skipped));
	}
	return OK;
}

bool delta_index_is(const void *first, size_t n)
{
	struct jscan js = jscan_of((struct str){ first, n }, ERR_FORMAT_SAFETENSORS);
	bool is = false;

	if (find_mark(&js, &is))
		err_clear();
	return is;
}

static FALLIBLE enum err take_word(struct str text, const char *what, const char *const *words, size_t count, unsigned *out)
{
	for (*out = 0; *out < count; ++*out)
		if (str_is(text, words[*out]))
			return OK;
	return ERR(FORMAT_UNSUPPORTED, "a delta's %s '%.*s' is not known", what, (int)(text.n < 40 ? text.n : 40), text.p);
}

static bool is_digest(struct str s)
{
	return s.n == 32 && strspn(s.p, "0123456789abcdef") >= 32;
}

struct members {
	struct str encoding, compression, checksum;
	struct delta_index *out;
};

static struct str *member_of(struct members *m, struct str key)
{
	return str_is(key, "delta_encoding")        ? &m->encoding
	       : str_is(key, "compression_format")  ? &m->compression
	       : str_is(key, "checksum_format")     ? &m->checksum
	       : str_is(key, "version")             ? &m->out->version
	       : str_is(key, "base_version")        ? &m->out->base_version
	       : str_is(key, "base_content_digest") ? &m->out->base_content
	       : str_is(key, "content_digest")      ? &m->out->content
						    : NULL;
}

static FALLIBLE enum err read_members(struct jscan *js, struct arena *arena, struct members *m)
{
	struct jscan_token t;
	struct str key, skipped;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		TRY(jscan_str(js, &t, arena, &key));
		struct str *to = member_of(m, key);
		if (to && to->p)
			return jscan_bad(js, "a member of metadata twice");
		if (to) {
			TRY(jscan_expect(js, JSCAN_STRING, &t));
			TRY(jscan_str(js, &t, arena, to));
		} else {
			TRY(jscan_next(js, &t));
			TRY(jscan_skip(js, &t, &skipped));
		}
	}
	return OK;
}

static FALLIBLE enum err check_members(const struct members *m)
{
	static const char *const compressions[] = { "zstd" };
	unsigned encoding, checksum, compression;

	if (!m->encoding.p || !m->compression.p || !m->checksum.p)
		return ERR(FORMAT_SAFETENSORS, "a delta's index names delta_encoding, compression_format and checksum_format");
	TRY(take_word(m->encoding, "delta_encoding", encodings, 2, &encoding));
	TRY(take_word(m->compression, "compression_format", compressions, 1, &compression));
	TRY(take_word(m->checksum, "checksum_format", checksums, 2, &checksum));
	m->out->encoding = (enum delta_encoding)encoding;
	m->out->checksum = (enum delta_checksum)checksum;
	if ((m->out->base_content.p && !is_digest(m->out->base_content)) || (m->out->content.p && !is_digest(m->out->content)))
		return ERR(FORMAT_SAFETENSORS, "a content digest has 32 hex digits");
	return OK;
}

/* ---- values ---- */

static FALLIBLE enum err read_path(struct jscan *js, struct arena *arena, struct sd_path *out)
{
	struct sd_path_part parts[PATH_MAX_PARTS] = { 0 };
	struct jscan_token t;
	uint32_t n = 0;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	JSCAN_EACH(js, &t) {
		if (n == PATH_MAX_PARTS)
			return jscan_bad(js, "a value's path of too many parts");
		if (t.kind == JSCAN_STRING)
			TRY(jscan_str(js, &t, arena, &parts[n].key));
		else if (!jscan_i64(&t, &parts[n].index) || parts[n].index < 0)
			return jscan_bad(js, "a value's path is of keys and of positions in lists");
		n++;
	}
	struct sd_path_part *kept;
	TRY(arena_alloc(arena, n + 1u, sizeof *kept, &kept));
	memcpy(kept, parts, n * sizeof *kept);
	*out = (struct sd_path){ kept, n };
	return OK;
}

static FALLIBLE enum err read_archive(const struct jscan *js, struct str text, struct arena *arena, struct str *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(DELTA_VALUES_BYTES);
	struct item_value value;
	uint64_t checked, unknown;

	if (buf_unbase64(&b, text))
		return jscan_bad(js, "a value's archive is base64");
	TRY(arena_str(arena, (struct str){ (char *)b.p, b.len }, out));
	const struct item_source item = source_memory(out);
	TRY(item_check_crc(&item, false, &checked, &unknown));
	TRY(item_read_value(&item, &value));
	item_value_free(&value);
	return OK;
}

static FALLIBLE enum err read_value(struct jscan *js, struct arena *arena, struct delta_value *v)
{
	struct jscan_token t;
	struct str text = { NULL, 0 }, skipped;
	bool has_path = false;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		if (str_is(t.raw, "path") && !has_path) {
			has_path = true;
			TRY(read_path(js, arena, &v->path));
		} else if (str_is(t.raw, "archive") && !text.p) {
			TRY(jscan_expect(js, JSCAN_STRING, &t));
			TRY(jscan_str(js, &t, arena, &text));
		} else {
			TRY(jscan_next(js, &t));
			TRY(jscan_skip(js, &t, &skipped));
		}
	}
	if (!has_path || !text.p)
		return jscan_bad(js, "a value has a path and an archive");
	return read_archive(js, text, arena, &v->archive);
}

static FALLIBLE enum err read_values(struct jscan *js, struct arena *arena, struct delta_index *out)
{
	struct delta_value *v;
	struct jscan_token t;

	if (out->has_values)
		return jscan_bad(js, "values twice");
	out->has_values = true;
	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		TRY(vec_push(&out->values, &v));
		TRY(jscan_str(js, &t, arena, &v->fqn));
		TRY(err_at_fqn(read_value(js, arena, v), v->fqn.p, v->fqn.n));
	}
	return OK;
}

static void put_path(struct buf *b, struct sd_path path)
{
	for (uint32_t i = 0; i < path.count; i++) {
		buf_puts(b, i ? ", " : "");
		if (path.parts[i].key.p)
			buf_json_str(b, path.parts[i].key);
		else
			buf_printf(b, "%" PRId64, path.parts[i].index);
	}
}

void delta_put_values(struct buf *b, const struct delta_head *head)
{
	if (!head->values)
		return;
	buf_puts(b, ",\n  \"values\": {");
	for (uint64_t i = 0; i < head->value_count; i++) {
		const struct delta_value *v = &head->values[i];
		buf_puts(b, i ? ",\n    " : "\n    ");
		buf_json_str(b, v->fqn);
		buf_puts(b, ": {\"path\": [");
		put_path(b, v->path);
		buf_puts(b, "], \"archive\": \"");
		buf_base64(b, v->archive.p, v->archive.n);
		buf_puts(b, "\"}");
	}
	buf_puts(b, "\n  }");
}

/* ---- the index ---- */

enum err delta_index_read(struct str json, struct arena *arena, struct delta_index *out)
{
	struct jscan js = jscan_of(json, ERR_FORMAT_SAFETENSORS);
	struct members m = { .out = out };
	struct jscan_token t;
	struct str skipped;

	*out = (struct delta_index){ 0 };
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		if (str_is(t.raw, "metadata")) {
			TRY(read_members(&js, arena, &m));
			continue;
		}
		if (str_is(t.raw, "values")) {
			TRY(read_values(&js, arena, out));
			continue;
		}
		TRY(jscan_next(&js, &t));
		TRY(jscan_skip(&js, &t, &skipped));
	}
	return check_members(&m);
}

static void put_hex(struct buf *b, const unsigned char d[16])
{
	for (int i = 0; i < 16; i++)
		buf_printf(b, "%02x", d[i]);
}

void delta_put_metadata(struct buf *b, const struct delta_head *head)
{
	buf_printf(b, "\n    \"version\": \"%06" PRIu64 "\",\n    \"base_version\": \"%06" PRIu64 "\",\n    \"delta_encoding\": \"%s\","
		   "\n    \"compression_format\": \"zstd\",\n    \"checksum_format\": \"%s\",\n    \"base_content_digest\": \"",
		   head->version, head->base_version, encodings[head->encoding], checksums[DELTA_XXH3_128]);
	put_hex(b, head->base_content);
	buf_puts(b, "\",\n    \"content_digest\": \"");
	put_hex(b, head->content);
	buf_puts(b, "\"\n  ");
}
