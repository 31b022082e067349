/* lookup_tensors.c: a page of what a checkpoint or state dict holds. The page token is the number of the entry to go on with: tensors
 * first, then values, each in the order of the metadata. */
#include "base/jtext.h"
#include "base/num.h"
#include "query/lookup.h"
#include "query/lookup_cache.h"
#include "runner/input.h"

enum {
	PAGE_DEFAULT = 100, TOKEN_MAX = 18, PAGE_MAX = 10000, PAGE_BYTES = 4 << 20, CHUNKS_SHOWN = 10000, CHUNKS_BYTES = 4 << 20,
	VALUE_SHOWN = 1 << 20
};

struct page {
	struct input source;
	struct str prefix;
	struct checked checked;        /* of the values that are shown */
	uint64_t from, left, at;       /* entries: the first wanted, how many more, the one in hand */
	bool more;
};

static void put_ints(struct buf *b, const char *key, const int64_t *v, uint32_t n)
{
	buf_printf(b, "\"%s\":[", key);
	for (uint32_t i = 0; i < n; i++)
		buf_printf(b, "%s%jd", i ? "," : "", (intmax_t)v[i]);
	buf_puts(b, "]");
}

static void put_path(struct buf *b, struct sd_path path)
{
	if (path.count == 0) {
		buf_puts(b, "null");
		return;
	}
	buf_puts(b, "[");
	for (uint32_t i = 0; i < path.count; i++) {
		buf_puts(b, i ? "," : "");
		if (path.parts[i].key.p)
			buf_json_str(b, path.parts[i].key);
		else
			buf_printf(b, "%jd", (intmax_t)path.parts[i].index);
	}
	buf_puts(b, "]");
}

static void put_loc(struct buf *b, const struct sdict *sd, struct sd_loc loc)
{
	if (loc.file == SD_NO_FILE)
		return;
	buf_json_member(b, ",\"file\":", sd->files[loc.file].name);
	buf_printf(b, ",\"offset\":%ju,\"length\":%ju", (uintmax_t)loc.offset, (uintmax_t)loc.length);
}

static FALLIBLE enum err put_tensor(struct buf *b, const struct sdict *sd, const struct sd_tensor *t)
{
	size_t most = b->len + CHUNKS_BYTES;
	uint64_t numel, bytes;

	TRY(box_numel(t->ndim, t->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	buf_json_member(b, "{\"fqn\":", t->fqn);
	buf_printf(b, ",\"dtype\":\"%s\",", dtype_name(t->dtype));
	if (t->blocks)
		buf_printf(b, "\"blocks\":\"%s\",", t->blocks);
	put_ints(b, "shape", t->shape, t->ndim);
	buf_printf(b, ",\"bytes\":%ju,\"path\":", (uintmax_t)bytes);
	put_path(b, t->path);
	buf_printf(b, ",\"chunk_count\":%ju,\"chunks\":[", (uintmax_t)t->chunk_count);
	for (uint64_t i = 0; i < t->chunk_count && i < CHUNKS_SHOWN && b->len < most; i++) {
		const struct sd_chunk *c = &sd->chunks[t->first_chunk + i];
		buf_printf(b, "%s{\"rank\":%u,", i ? "," : "", c->rank);
		put_ints(b, "offsets", sd_offsets(c), t->ndim);
		buf_puts(b, ",");
		put_ints(b, "sizes", sd_sizes(c, t->ndim), t->ndim);
		put_loc(b, sd, c->loc);
		buf_puts(b, "}");
	}
	buf_puts(b, "]}");
	return OK;
}

static FALLIBLE enum err put_value(struct buf *b, const struct page *p, const struct sd_value *v)
{
	struct item_value value;
	void *bytes = NULL;
	uint64_t n = 0;

	buf_json_member(b, "{\"fqn\":", v->fqn);
	buf_puts(b, ",\"path\":");
	put_path(b, v->path);
	if (v->unread.n) {
		buf_puts(b, ",\"opaque\":");
		buf_json_str(b, v->unread);
	} else if (sd_is_transformed(v->loc)) {
		buf_puts(b, ",\"opaque\":\"transformed\"");
	} else if (v->kind == SD_VALUE_STORED && v->loc.length > VALUE_SHOWN) {
		buf_puts(b, ",\"opaque\":\"too large to show\"");
	} else {
		TRY(input_value(&p->source, v, &bytes, &n));
		enum err e = input_item_value(bytes, n, &value);
		mem_free(bytes);
		if (e)
			return input_at_value(&p->source, v, e);
		struct str text = { (char *)value.text.p, value.text.len };
		buf_puts(b, value.kind == ITEM_VALUE_JSON ? ",\"value\":" : ",\"opaque\":");
		if (value.kind == ITEM_VALUE_JSON)
			buf_put(b, text.p, text.n);
		else
			buf_json_str(b, value.kind == ITEM_VALUE_BYTES ? STR("bytes") : text);
		item_value_free(&value);
	}
	if (v->kind == SD_VALUE_STORED)
		put_loc(b, p->source.sd, v->loc);
	buf_puts(b, "}");
	return OK;
}

/* Is this entry on the page? Counts it. A page is full when it has so many entries, or so many bytes. */
static bool on_page(struct page *p, struct str fqn, const struct buf *out)
{
	if (p->prefix.n && (fqn.n < p->prefix.n || memcmp(fqn.p, p->prefix.p, p->prefix.n) != 0))
		return false;
	if (p->at++ < p->from)
		return false;
	if (p->left == 0 || out->len >= PAGE_BYTES) {
		p->more = true;
		p->at--;
		return false;
	}
	p->left--;
	return true;
}

/* The figures of checked_report, as members. */
static FALLIBLE enum err put_checked(const struct checked *c, struct buf *out)
{
	json_t *doc = json_object();

	checked_report(c, doc);
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);
	json_decref(doc);
	NEED(text, "no memory for a page");
	buf_puts(out, ",");
	buf_put(out, text + 1, strlen(text) - 2);
	return OK;
}

static FALLIBLE enum err put_page(struct page *p, struct buf *out)
{
	const struct sdict *sd = p->source.sd;
	bool first = true;

	buf_puts(out, "{\"tensors\":[");
	for (uint64_t i = 0; i < sd->tensor_count && !p->more; i++) {
		if (!on_page(p, sd->tensors[i].fqn, out))
			continue;
		buf_puts(out, first ? "" : ",");
		first = false;
		TRY(put_tensor(out, sd, &sd->tensors[i]));
	}
	buf_puts(out, "],\"values\":[");
	first = true;
	for (uint64_t i = 0; i < sd->value_count && !p->more; i++) {
		if (!on_page(p, sd->values[i].fqn, out))
			continue;
		buf_puts(out, first ? "" : ",");
		first = false;
		TRY(put_value(out, p, &sd->values[i]));
	}
	buf_puts(out, "]");
	if (p->more)
		buf_printf(out, ",\"next_page_token\":\"%ju\"", (uintmax_t)p->at);
	if (p->source.checkpoint)
		TRY(put_checked(&p->checked, out));
	buf_puts(out, "}");
	return OK;
}

static FALLIBLE enum err open_source(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count,
				     struct input *out)
{
	if (json_object_get(q, "state_dict")) {
		struct rank_segments s;
		enum err e = rank_segments_read(q, 0, fd_count, &s);
		e = e ?: input_images(&s, fds, &out->images);
		rank_segments_free(&s);
		TRY(e);
		out->sd = out->images;
		return OK;
	}
	TRY(lookup_checkpoint(w, q, &out->checkpoint));
	checkpoint_note(out->checkpoint, false, out->checked);
	out->sd = out->checkpoint->sd;
	return OK;
}

enum err lookup_tensors(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out)
{
	const char *prefix = json_string_value(json_object_get(q, "prefix"));
	const char *token = json_string_value(json_object_get(q, "page_token"));
	json_int_t size = json_integer_value(json_object_get(q, "page_size"));
	struct page p = { .prefix = str_of(prefix ? prefix : ""),
			  .left = size > 0 ? num_min((uint64_t)size, PAGE_MAX) : PAGE_DEFAULT };

	if (token && token[0] && (strlen(token) > TOKEN_MAX || !str_to_u64(str_of(token), &p.from)))
		return ERR(VALIDATION_FAILED, "not a page token");
	p.source.checked = &p.checked;
	enum err e = open_source(w, q, fds, fd_count, &p.source);
	e = e ?: put_page(&p, out);
	checked_free(&p.checked);
	input_close(&p.source);
	return e;
}
