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

enum { CODE_MIN = 1 << 10, CODE_MAX = 4 << 20, LINES_MAX = 8 << 20 };
enum { HEAD_BYTES = 2 << 10, FIELD_BYTES = 80 }; /* of an answer's head besides a link; of what libmicrohttpd notes of each field */

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

/* Bytes that the answer's head can give to a link: it shares the connection's memory with the request's head. */
static size_t link_room(const struct req *r)
{
	const union MHD_ConnectionInfo *head = MHD_get_connection_info(r->conn, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
	int fields = MHD_get_connection_values(r->conn, (enum MHD_ValueKind)(MHD_HEADER_KIND | MHD_GET_ARGUMENT_KIND), NULL, NULL);
	size_t taken = (head ? head->header_size : 0) + (fields > 0 ? (size_t)fields : 0) * FIELD_BYTES + HEAD_BYTES;

	return taken < HTTP_CONNECTION_BYTES ? HTTP_CONNECTION_BYTES - taken : 1;
}

/* Makes the link to the next page: the request's path and query, with this token. */
static FALLIBLE enum err make_link(const struct req *r, const json_t *token, struct form *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(link_room(r));

	if (!json_is_string(token))
		return OK;
	buf_printf(&b, "<%s?page_token=", r->path);
	url_encode(&b, (struct str){ json_string_value(token), json_string_length(token) });
	MHD_get_connection_values(r->conn, MHD_GET_ARGUMENT_KIND, put_argument, &(struct query){ &b, "page_token" });
	buf_puts(&b, ">; rel=\"next\"");
	buf_putc(&b, '\0');
	enum err e = buf_status(&b);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e)
		return ERR(NOT_ACCEPTABLE, "the link to the next page is too long for a head; ask for %s, which has next_page_token", json);
	out->link = (char *)b.p;
	b = BUF_INIT(0);
	return OK;
}

/* {"jobs":[A,B],"next_page_token":…,"problems":[P]} → A, B, {"problem":P}, a line each. */
static FALLIBLE enum err to_lines(const struct req *r, struct buf *b, struct form *out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	CLEANUP(buf_free) struct buf text = BUF_INIT(b->max);
	const json_t *row;
	size_t i;

	TRY(buf_status(b));
	if (b->len > LINES_MAX)
		return ERR(NOT_ACCEPTABLE, "a list of %zu bytes, and lines are made of at most %d: ask for fewer rows (page_size) or %s",
			   b->len, LINES_MAX, json);
	TRY(jtext_parse((struct str){ (const char *)b->p, b->len }, JSON_ALLOW_NUL, &doc)); /* FQNs may have NULs */
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
	TRY(make_link(r, json_object_get(doc, "next_page_token"), out));
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
	char mark[20], *link = NULL;

	if (wants_lines(r)) {
		TRY(to_lines(r, b, out));
		link = out->link;
		*type_io = lines;
	}
	snprintf(mark, sizeof mark, "%016jx", (uintmax_t)XXH3_64bits(b->p, b->len));
	form_decide(r, mark, out);
	out->link = link;
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
	if (f->link)
		ok &= MHD_add_response_header(m, "Link", f->link);
	return ok == MHD_YES ? OK : ERR(NO_MEMORY, "cannot make an answer");
}
