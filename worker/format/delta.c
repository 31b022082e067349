/* delta.c: see delta.h. */
#include "format/delta.h"

#include <inttypes.h>
#include <string.h>

#include "format/jscan.h"

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
