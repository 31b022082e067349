/* form.c: see form.h. Small bodies are not compressed: the head would weigh more than what is saved. Large ones are not either: they would
 * hold up the event loop. */
#include "api/form.h"

#include <stdio.h>
#include <strings.h>
#include <xxhash.h>

#include "api/accept.h"
#include "api/url.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/mem.h"

enum { CODE_MIN = 1 << 10, CODE_MAX = 4 << 20 };

static const char *head_of(const struct req *r, const char *name)
{
	return r->conn ? MHD_lookup_connection_value(r->conn, MHD_HEADER_KIND, name) : NULL;
}

static const char json[] = "application/json", lines[] = "application/x-ndjson";

void form_decide(const struct req *r, const char *mark, struct form *out)
{
	enum coding coding = coding_choose(head_of(r, MHD_HTTP_HEADER_ACCEPT_ENCODING));

	*out = (struct form){ .coding = coding };
	snprintf(out->etag, sizeof out->etag, "\"%s%s%s\"", mark, coding ? "-" : "", coding ? coding_names[coding] : "");
	out->same = accept_has(head_of(r, MHD_HTTP_HEADER_IF_NONE_MATCH), out->etag);
}

struct query {
	struct buf *out;
	const char *skip;
};

static enum MHD_Result put_argument(void *user, enum MHD_ValueKind, const char *key, const char *value)
{
	struct query *q = user;

	if (strcmp(key, q->skip) == 0)
		return MHD_YES;
	buf_printf(q->out, "&%s=", key);
	url_encode(q->out, str_of(value ? value : "")); /* decoded by now, see req_query() */
	return MHD_YES;
}

/* Sets the link to the next page: the request's path and query, with this token. "": it does not fit, the client has to ask for JSON. */
static void set_link(const struct req *r, const json_t *token, struct form *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(sizeof out->link);
	const char *text = json_string_value(token);

	out->link[0] = '\0';
	if (!text)
		return;
	buf_printf(&b, "<%s?page_token=", r->path);
	url_encode(&b, str_of(text));
	MHD_get_connection_values(r->conn, MHD_GET_ARGUMENT_KIND, put_argument, &(struct query){ &b, "page_token" });
	buf_puts(&b, ">; rel=\"next\"");
	buf_putc(&b, '\0');
	if (buf_status(&b) == OK)
		memcpy(out->link, b.p, b.len);
}

/* {"jobs":[A,B],"next_page_token":…,"problems":[P]} → A, B, {"problem":P}, a line each. */
static FALLIBLE enum err to_lines(const struct req *r, struct buf *b, struct form *out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	CLEANUP(buf_free) struct buf text = BUF_INIT(b->max);
	const json_t *row;
	size_t i;

	TRY(buf_status(b));
	TRY(jtext_parse((struct str){ (const char *)b->p, b->len }, 0, &doc));
	buf_free(b);
	json_array_foreach(json_object_get(doc, r->route->list), i, row) {
		TRY(jval_dump(row, &text));
		buf_putc(&text, '\n');
	}
	json_array_foreach(json_object_get(doc, "problems"), i, row) {
		buf_puts(&text, "{\"problem\":");
		TRY(jval_dump(row, &text));
		buf_puts(&text, "}\n");
	}
	TRY(buf_status(&text));
	set_link(r, json_object_get(doc, "next_page_token"), out);
	*b = text;
	text = BUF_INIT(0);
	return OK;
}

static bool wants_lines(const struct req *r)
{
	const char *accept = head_of(r, MHD_HTTP_HEADER_ACCEPT);

	return accept && r->route && r->route->list && accept_quality(accept, lines) > accept_quality(accept, json);
}

static FALLIBLE enum err apply_coding(struct buf *b, struct form *f)
{
	CLEANUP(buf_free) struct buf coded = BUF_INIT(2 * CODE_MAX);

	TRY(coding_apply(f->coding, false, (struct str){ (const char *)b->p, b->len }, &coded));
	if (coded.len < b->len) {
		buf_free(b);
		*b = coded;
		coded = BUF_INIT(0);
	} else {
		f->coding = CODING_NONE;
	}
	return OK;
}

FALLIBLE enum err form_apply(struct req *r, const char **type_io, struct buf *b, struct form *out)
{
	char mark[20], link[sizeof out->link] = "";

	if (wants_lines(r)) {
		TRY(to_lines(r, b, out));
		memcpy(link, out->link, sizeof link);
		*type_io = lines;
	}
	snprintf(mark, sizeof mark, "%016jx", (uintmax_t)XXH3_64bits(b->p, b->len));
	form_decide(r, mark, out);
	memcpy(out->link, link, sizeof link);
	if (out->same)
		b->len = 0;
	else if (out->coding && b->len >= CODE_MIN && b->len <= CODE_MAX)
		return apply_coding(b, out);
	else
		out->coding = CODING_NONE;
	return OK;
}

FALLIBLE enum err form_dress(const struct form *f, struct MHD_Response *m)
{
	enum MHD_Result ok = MHD_add_response_header(m, MHD_HTTP_HEADER_ETAG, f->etag);

	ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_VARY, "Accept, Accept-Encoding");
	if (f->coding && !f->same)
		ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_CONTENT_ENCODING, coding_names[f->coding]);
	if (f->link[0])
		ok &= MHD_add_response_header(m, "Link", f->link);
	return ok == MHD_YES ? OK : ERR(NO_MEMORY, "cannot make an answer");
}
