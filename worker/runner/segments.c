/* segments.c: see segments.h. */
#include "runner/segments.h"


#include "base/num.h"
#include "format/jscan.h"
#include "os/fs.h"

enum { PAGE = 4096, HEADER_MAX = SFT_HEADER_MAX + 8192, VALUES_MAX = 2 * HEADER_MAX };
#define ALL_HEADERS_MAX (UINT64_C(1) << 30)

struct headers {
	struct buf *bufs;              /* per rank */
	uint64_t *image_bytes;
	uint32_t world_size;
	struct image_value *values;
	uint64_t value_count;
	struct arena *arena;
	struct segments_form form;
};

static FALLIBLE enum err read_value(const struct input *source, const struct sd_value *v, struct arena *a,
				    struct image_value *out)
{
	struct item_value value;
	void *bytes = NULL;
	uint64_t n = 0;

	if (v->kind == SD_VALUE_STORED && v->loc.length > HEADER_MAX)
		return err_at_fqn(ERR(LIMIT_EXCEEDED, "a value of %ju bytes has no place in a header", (uintmax_t)v->loc.length),
				  v->fqn.p, v->fqn.n);
	TRY(input_value(source, v, &bytes, &n));
	enum err e = input_item_value(bytes, n, &value);
	if (e) {
		mem_free(bytes);
		return input_at_value(source, v, e);
	}
	struct str text = { (char *)value.text.p, value.text.len };
	out->fqn = v->fqn;
	out->path = v->path;
	out->kind = value.kind == ITEM_VALUE_JSON    ? IMAGE_VALUE_JSON
		    : value.kind == ITEM_VALUE_BYTES ? IMAGE_VALUE_BYTES
						     : IMAGE_VALUE_PICKLE;
	if (value.kind == ITEM_VALUE_OPAQUE)
		text = (struct str){ bytes, n };
	e = arena_str(a, text, &out->bytes);
	item_value_free(&value);
	mem_free(bytes);
	return err_at_fqn(e, v->fqn.p, v->fqn.n);
}

static FALLIBLE enum err read_values(const struct input *source, const struct sdict *view, struct headers *h)
{
	h->values = mem_zalloc(view->value_count, sizeof *h->values);
	NEED(h->values, "no memory for %ju values", (uintmax_t)view->value_count);
	h->value_count = view->value_count;
	for (uint64_t i = 0; i < view->value_count; i++)
		TRY(read_value(source, &view->values[i], h->arena, &h->values[i]));
	return OK;
}

static FALLIBLE enum err lay_out(struct headers *h, struct sdict *target)
{
	h->bufs = mem_zalloc(h->world_size, sizeof *h->bufs);
	h->image_bytes = mem_zalloc(h->world_size, sizeof *h->image_bytes);
	NEED(h->bufs && h->image_bytes, "no memory for %u images", h->world_size);
	uint64_t total = 0;
	struct image_more more = { .plain = h->form.plain, .outers = h->form.outers };
	for (uint32_t r = 0; r < h->world_size; r++) {
		bool valued = r == 0 || h->form.values_everywhere;
		h->bufs[r] = BUF_INIT(HEADER_MAX);
		enum err e = image_build_more(target, r, valued ? h->values : NULL, valued ? h->value_count : 0, &more, &h->bufs[r],
					      &h->image_bytes[r]);
		if (e)
			return err_at_rank(e, r);
		total += h->bufs[r].len;
		if (total > ALL_HEADERS_MAX) /* values on every rank: a large one times many ranks */
			return err_at_rank(ERR(LIMIT_EXCEEDED, "the images' headers, with the values in them, are more than %ju bytes",
					       (uintmax_t)ALL_HEADERS_MAX), r);
	}
	return OK;
}

enum err segments_ask(struct job *j, uint32_t world_size, const uint64_t *image_bytes, const uint64_t *bytes)
{
	json_t *ranks = json_array(), *doc = json_pack("{s:I, s:o}", "world_size", (json_int_t)world_size, "ranks", ranks);
	uint64_t total = 0;

	for (uint32_t r = 0; r < world_size; r++) {
		json_int_t n = (json_int_t)(bytes ? bytes[r] : image_bytes[r]);
		TRY(num_add(total, (uint64_t)n, &total));
		json_array_append_new(ranks, json_pack("{s:I, s:I, s:I}", "rank", (json_int_t)r, "bytes", n, "image_bytes",
						       (json_int_t)image_bytes[r]));
	}
	NEED(doc, "no memory for a message");
	json_object_set_new(j->result, "segment_bytes", json_integer((json_int_t)total));
	json_object_set(j->result, "ranks", ranks);
	enum err e = j->dry_run ? OK : job_send_json(j, FRAME_WANT_SEGMENTS, doc);
	json_decref(doc);
	if (e || j->dry_run)
		return e;
	TRY(job_wait_segments(j));
	if (j->segments.count != world_size)
		return ERR(PROTOCOL, "%u segments for %u ranks", j->segments.count, world_size);
	return OK;
}

enum err segments_put_headers(struct job *j, const struct buf *headers)
{
	for (uint32_t r = 0; !j->dry_run && r < j->segments.count; r++)
		TRY(err_at_rank(fs_pwrite(j->fds[j->segments.v[r].fd], headers[r].p, headers[r].len, 0, "segment"), r));
	return OK;
}

/* Asks for segments as large as the images and what lies behind them. */
static FALLIBLE enum err ask_for(struct job *j, const struct headers *h)
{
	CLEANUP(mem_free_ptr) uint64_t *bytes = NULL;

	if (!h->form.behind)
		return segments_ask(j, h->world_size, h->image_bytes, NULL);
	bytes = mem_zalloc(h->world_size, sizeof *bytes);
	NEED(bytes, "no memory for %u ranks", h->world_size);
	memcpy(h->form.image_bytes, h->image_bytes, h->world_size * sizeof *h->image_bytes);
	for (uint32_t r = 0; r < h->world_size; r++)
		TRY(num_add((h->image_bytes[r] + PAGE - 1) / PAGE * PAGE, h->form.behind[r], &bytes[r]));
	return segments_ask(j, h->world_size, h->image_bytes, bytes);
}

enum err segments_make(struct job *j, const struct input *source, const struct sdict *view, struct sdict *target,
		       uint32_t world_size, const struct segments_form *form)
{
	struct headers h = { .world_size = world_size, .arena = arena_new(VALUES_MAX) };

	if (form)
		h.form = *form;
	enum err e = h.arena ? read_values(source, view, &h) : ERR(NO_MEMORY, "no memory for images");
	e = e ?: lay_out(&h, target);
	e = e ?: ask_for(j, &h);
	e = e ?: segments_put_headers(j, h.bufs);
	for (uint32_t r = 0; h.bufs && r < world_size; r++)
		buf_free(&h.bufs[r]);
	mem_free(h.bufs);
	mem_free(h.image_bytes);
	mem_free(h.values);
	arena_free(h.arena);
	return e;
}

/* ------------------------------------------------------------------------------------------------- in place */

/* A value as an image has it. */
static void put_value(struct buf *b, const struct image_value *v)
{
	if (v->kind == IMAGE_VALUE_JSON) {
		buf_puts(b, "{\"json\":");
		buf_put(b, v->bytes.p, v->bytes.n);
		buf_puts(b, "}");
		return;
	}
	buf_puts(b, v->kind == IMAGE_VALUE_BYTES ? "{\"bytes\":\"" : "{\"pickle\":\"");
	buf_base64(b, v->bytes.p, v->bytes.n);
	buf_puts(b, "\"}");
}

/* Goes on to the value of a member of the object that js is in. *found_out: there is one; else the object is behind js. */
static FALLIBLE enum err find_member(struct jscan *js, const char *name, struct arena *a, bool *found_out)
{
	struct jscan_token t;
	struct str key, span;

	for (;;) {
		TRY(jscan_next(js, &t));
		*found_out = t.kind == JSCAN_KEY;
		if (!*found_out)
			return OK;
		TRY(jscan_str(js, &t, a, &key));
		if (str_is(key, name))
			return OK;
		TRY(jscan_next(js, &t));
		TRY(jscan_skip(js, &t, &span));
	}
}

/* The members of `values`, with those of the view in place of what the image has. Keys may be any text, NUL too: jansson would refuse. */
static FALLIBLE enum err put_members(struct jscan *js, const struct sdict *view, const struct headers *h, struct buf *b)
{
	struct jscan_token t, value;
	struct str key, span;

	for (bool first = true;; first = false) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END) {
			buf_puts(b, "}");
			return buf_status(b);
		}
		TRY(jscan_str(js, &t, h->arena, &key));
		TRY(jscan_next(js, &value));
		TRY(jscan_skip(js, &value, &span));
		buf_puts(b, first ? "\"" : ",\"");
		buf_put(b, t.raw.p, t.raw.n);
		buf_puts(b, "\":");
		const struct sd_value *v = sdict_value(view, key);
		if (v)
			put_value(b, &h->values[v - view->values]);
		else
			buf_put(b, span.p, span.n);
	}
}

/* `dcpd`, the text in an image's __metadata__, with the view's values. *found_out: it lists values. */
static FALLIBLE enum err put_dcpd(struct str dcpd, const struct sdict *view, const struct headers *h, struct buf *b, bool *found_out)
{
	struct jscan js = jscan_of(dcpd, ERR_FORMAT_IMAGE);
	struct jscan_token t;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	TRY(find_member(&js, "values", h->arena, found_out));
	if (!*found_out)
		return OK;
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	buf_put(b, dcpd.p, js.at);
	TRY(put_members(&js, view, h, b));
	buf_put(b, dcpd.p + js.at, dcpd.n - js.at);
	return buf_status(b);
}

static FALLIBLE enum err set_in_header(int fd, const char *json, uint64_t json_bytes, const struct sdict *view,
				       const struct headers *h)
{
	struct str text = { json, json_bytes }, dcpd;
	struct jscan js = jscan_of(text, ERR_FORMAT_IMAGE);
	CLEANUP(buf_free) struct buf fresh = BUF_INIT(HEADER_MAX), b = BUF_INIT(HEADER_MAX);
	struct jscan_token t;
	bool found;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	TRY(find_member(&js, "__metadata__", h->arena, &found));
	if (found) {
		TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
		TRY(find_member(&js, "dcpd", h->arena, &found));
	}
	if (!found)
		return OK;
	TRY(jscan_expect(&js, JSCAN_STRING, &t));
	TRY(jscan_str(&js, &t, h->arena, &dcpd));
	TRY(put_dcpd(dcpd, view, h, &fresh, &found));
	if (!found)
		return OK;
	buf_put(&b, json, (size_t)(t.raw.p - json) - 1);
	TRY(jscan_put_str(&b, (struct str){ (char *)fresh.p, fresh.len }));
	const char *end = json + json_bytes, *behind = t.raw.p + t.raw.n + 1;
	while (end > behind && end[-1] == ' ') /* the old padding */
		end--;
	buf_put(&b, behind, (size_t)(end - behind));
	TRY(buf_status(&b));
	if (b.len > json_bytes)
		return ERR(SHM_EXHAUSTED, "the image's header has %ju bytes, its new values need %zu", (uintmax_t)json_bytes, b.len);
	buf_fill(&b, ' ', json_bytes - b.len);
	TRY(buf_status(&b));
	return fs_pwrite(fd, b.p, b.len, 8, "segment");
}

static FALLIBLE enum err set_rank(struct job *j, const struct rank_segment *r, const struct sdict *view, const struct headers *h)
{
	CLEANUP(mem_free_ptr) void *header = NULL;
	uint64_t n = 0;

	TRY(input_read_header(r, j->fds, &header, &n));
	return set_in_header(j->fds[r->fd], (char *)header + 8, n - 8, view, h);
}

enum err segments_set_values(struct job *j, const struct rank_segments *target, const struct input *source, const struct sdict *view)
{
	struct headers h = { .arena = arena_new(VALUES_MAX) };

	enum err e = h.arena ? read_values(source, view, &h) : ERR(NO_MEMORY, "no memory for values");
	for (uint32_t i = 0; !e && view->value_count && i < target->count; i++)
		e = err_at_rank(set_rank(j, &target->v[i], view, &h), target->v[i].rank);
	mem_free(h.values);
	arena_free(h.arena);
	return e;
}
