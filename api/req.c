/* req.c: the answers and the query of a request (see http.h). */
#include <stdio.h>
#include <unistd.h>

#include "api/api_impl.h"
#include "base/jval.h"
#include "api/accept.h"
#include "api/form.h"
#include "api/problem.h"
#include "api/range.h"
#include "api/url.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/near.h"
#include "base/num.h"
#include "os/fs.h"
#include "server/audit.h"
#include "server/parts.h"
#include "server/state_dict.h"
#include "server/unread.h"

enum { TLS_BLOCK = 64 << 10 };

static const char policy_api[] = "default-src 'none'; frame-ancestors 'none'";
static const char policy_page[] = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/* Headers of every answer: nothing is sniffed, framed, cached or sent on as a referrer. */
FALLIBLE enum err req_dress(struct MHD_Response *m, const char *content_type, bool page, const char *id)
{
	enum MHD_Result ok = MHD_YES;

	if (content_type)
		ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
	ok &= MHD_add_response_header(m, "X-Content-Type-Options", "nosniff");
	ok &= MHD_add_response_header(m, "Content-Security-Policy", page ? policy_page : policy_api);
	ok &= MHD_add_response_header(m, "Referrer-Policy", "no-referrer");
	ok &= MHD_add_response_header(m, REQUEST_ID_HEAD, id);
	ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
	return ok == MHD_YES ? OK : ERR(NO_MEMORY, "cannot make an answer");
}

static void on_audited(void *user, enum err e)
{
	struct req *r = user;

	if (e)
		log_err("a change is not in the audit", "request", r->id, "action", r->audit, "path", r->path, NULL);
	r->awaits_audit = false;
	http_wake(r);
	req_release(r);
}

/* The subject of a change: as the handler has it, the target of a delete job, else "STORAGE:NAME", "STORAGE:RUN@ALIAS", or a name, from the
 * path. */
static void put_subject(const struct req *r, char out[AUDIT_SUBJECT_MAX])
{
	const json_t *target = json_object_get(r->body, "target");
	const char *name = json_string_value(json_object_get(target ? target : r->body, "name"));
	struct str a = r->part_count > 2 ? r->parts[2] : STR(""), b = r->part_count > 3 ? r->parts[3] : STR("");
	struct str c = r->part_count > 5 ? r->parts[5] : STR("");

	if (r->audit_subject[0])
		snprintf(out, AUDIT_SUBJECT_MAX, "%s", r->audit_subject);
	else if (a.n == 0 && target)
		snprintf(out, AUDIT_SUBJECT_MAX, "%s:%s", json_string_value(json_object_get(target, "storage")) ?: "", name ? name : "");
	else if (a.n == 0)
		snprintf(out, AUDIT_SUBJECT_MAX, "%s", name ? name : "");
	else
		snprintf(out, AUDIT_SUBJECT_MAX, "%.*s%s%.*s%s%.*s", (int)a.n, a.p, b.n ? ":" : "", (int)b.n, b.p, c.n ? "@" : "",
			 (int)c.n, c.p);
}

/* Notes who has changed what, on disk before the client hears of it. false: nothing is to be waited for. dropped: the client has had
 * another answer (the daemon ends); what it asked for is done all the same. */
static bool audits(struct req *r, unsigned status, bool dropped)
{
	char subject[AUDIT_SUBJECT_MAX];

	if (!r->audit || status >= 300 || !r->core->journal)
		return false;
	put_subject(r, subject);
	log_info("change", "action", r->audit, "subject", subject, "request", r->id, "job", r->audit_job[0] ? r->audit_job : NULL, NULL);
	bool has_url = strncmp(r->audit, "webhook.", 8) == 0; /* which may have a password in it */
	const struct audit_entry entry = { .uid = r->caller.uid, .token = r->caller.token, .policy = "", .action = r->audit,
					   .subject = subject, .job = r->audit_job, .request = has_url ? NULL : r->body };
	if (!dropped) {
		r->awaits_audit = true;
		req_hold(r);
	}
	audit_add(r->core, &entry, dropped ? NULL : on_audited, r);
	return r->awaits_audit;
}

static FALLIBLE enum err give_dressed(struct req *r, unsigned status, struct MHD_Response *m, const char *type, bool page)
{
	NEED(m, "cannot make an answer");
	enum err e = req_dress(m, type, page, r->id);
	if (e) {
		MHD_destroy_response(m);
		return e;
	}
	/* Takes m. An answer to a request that has one already, or whose client was given up, is dropped. */
	if (r->answered || r->finished) {
		audits(r, status, true);
		MHD_destroy_response(m);
		return OK;
	}
	r->answered = true;
	r->answer = m;
	r->status = status;
	if (!audits(r, status, false))
		http_wake(r);
	return OK;
}

/* Bytes that were not counted are not given back: a request may have tried several answers. */
static void note_unread(struct req *r, uint64_t bytes)
{
	if (bytes > UNREAD_SMALL)
		r->unread += bytes;
}

/* A GET's answer has a form to be chosen; problems, and answers that tell of a change, go out as they are. */
static bool has_forms(const struct req *r, unsigned status)
{
	return status == 200 && r->conn && (strcmp(r->method, "GET") == 0 || strcmp(r->method, "HEAD") == 0);
}

static FALLIBLE enum err give_buf(struct req *r, unsigned status, const char *content_type, struct buf *b, bool page)
{
	bool formed = has_forms(r, status);
	CLEANUP(form_drop) struct form form = { 0 };
	enum err e = buf_status(b);

	if (!e && formed)
		e = form_apply(r, &content_type, b, &form);
	if (!e && !r->reads_only)
		unread_add(r->core->unread, b->len);
	else if (!e && !unread_take(r->core->unread, b->len))
		e = ERR(BUSY, "answers that other clients have not read yet leave no room for %zu bytes", b->len);
	if (e) {
		buf_free(b);
		return e;
	}
	note_unread(r, b->len);
	struct MHD_Response *m = MHD_create_response_from_buffer_with_free_callback(b->len, b->p, mem_free);
	if (!m)
		buf_free(b);
	*b = BUF_INIT(b->max);
	if (m && formed && form_dress(&form, m) != OK) {
		MHD_destroy_response(m);
		m = NULL;
	}
	return form.same ? give_dressed(r, 304, m, NULL, page) : give_dressed(r, status, m, content_type, page);
}

FALLIBLE enum err req_bytes(struct req *r, unsigned status, const char *content_type, struct buf *b)
{
	return give_buf(r, status, content_type, b, false);
}

FALLIBLE enum err req_page(struct req *r, const char *content_type, struct buf *b)
{
	return give_buf(r, 200, content_type, b, true);
}

FALLIBLE enum err req_json(struct req *r, unsigned status, struct buf *b)
{
	return req_bytes(r, status, "application/json", b);
}

FALLIBLE enum err req_json_doc(struct req *r, unsigned status, const json_t *doc)
{
	struct buf b = BUF_INIT(64 << 20);
	enum err e = jval_dump(doc, &b);

	if (e) {
		buf_free(&b);
		return e;
	}
	return req_json(r, status, &b);
}

FALLIBLE enum err req_static(struct req *r, const char *content_type, struct str bytes, const struct form *form)
{
	struct MHD_Response *m = MHD_create_response_from_buffer(form->same ? 0 : bytes.n, (void *)(uintptr_t)bytes.p,
								 MHD_RESPMEM_PERSISTENT);
	if (m && form_dress(form, m) != OK) {
		MHD_destroy_response(m);
		m = NULL;
	}
	return give_dressed(r, form->same ? 304 : 200, m, form->same ? NULL : content_type, true);
}

/* A range of a file that is read here: what is encrypted cannot go by sendfile(), and libmicrohttpd itself reads 4 KiB at a time. */
struct file_part {
	int fd;
	struct range range;
};

static ssize_t read_part(void *user, uint64_t at, char *into, size_t max)
{
	const struct file_part *p = user;
	size_t n = (size_t)num_min(max, p->range.bytes - at);

	return fs_pread(p->fd, into, n, p->range.from + at, "answer") ? MHD_CONTENT_READER_END_WITH_ERROR : (ssize_t)n;
}

static void free_part(void *user)
{
	struct file_part *p = user;

	fs_drop(&p->fd);
	mem_free(p);
}

/* Takes fd. */
static struct MHD_Response *part_response(int fd, const struct range *range)
{
	struct file_part *p = mem_alloc(sizeof *p);

	if (!p) {
		close(fd);
		return NULL;
	}
	*p = (struct file_part){ fd, *range };
	struct MHD_Response *m = MHD_create_response_from_callback(range->bytes, TLS_BLOCK, read_part, p, free_part);
	if (!m)
		free_part(p);
	return m;
}

/* The response for the range; takes fd. */
static struct MHD_Response *range_response(const struct req *r, int fd, const char *etag, uint64_t of, const struct range *range)
{
	bool tls = r->conn && MHD_get_connection_info(r->conn, MHD_CONNECTION_INFO_GNUTLS_SESSION);
	bool read = tls && range->bytes > TLS_BLOCK;
	struct MHD_Response *m = read ? part_response(fd, range) : MHD_create_response_from_fd_at_offset64(range->bytes, fd, range->from);
	enum MHD_Result ok = MHD_YES;
	char text[RANGE_TEXT_MAX];

	if (!m && !read)
		close(fd);
	if (m && etag) {
		ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_ETAG, etag);
		ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_VARY, "Accept");
		ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_ACCEPT_RANGES, "bytes");
	}
	if (m && range->bytes < of)
		ok &= MHD_add_response_header(m, MHD_HTTP_HEADER_CONTENT_RANGE, range_text(range, of, text));
	if (ok == MHD_YES)
		return m;
	MHD_destroy_response(m);
	return NULL;
}

FALLIBLE enum err req_fd(struct req *r, const char *content_type, int fd, uint64_t bytes, uint64_t held, const char *etag)
{
	struct range range = { 0, bytes };
	bool same = etag && accept_has(req_head(r, MHD_HTTP_HEADER_IF_NONE_MATCH), etag);
	const char *wish = etag && !same ? req_head(r, MHD_HTTP_HEADER_RANGE) : NULL;
	const char *only_if = req_head(r, MHD_HTTP_HEADER_IF_RANGE);

	note_unread(r, held);
	if (wish && (!only_if || strcmp(only_if, etag) == 0) && !range_read(wish, bytes, &range)) {
		close(fd);
		r->range_of = 1 + bytes;
		return ERR(RANGE_INVALID, "the range %.100s is not inside the answer's %ju bytes", wish, (uintmax_t)bytes);
	}
	if (same)
		range.bytes = bytes = 0;
	struct MHD_Response *m = range_response(r, fd, etag, bytes, &range);
	return give_dressed(r, same ? 304 : range.bytes < bytes ? 206 : 200, m, same ? NULL : content_type, false);
}

FALLIBLE enum err req_empty(struct req *r, unsigned status)
{
	return give_dressed(r, status, MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT), NULL, false);
}

FALLIBLE enum err req_ready(struct req *r, unsigned status, struct MHD_Response *response)
{
	if (r->answered || r->finished)
		return OK;
	must(!r->suspended && !r->id_is_sent);
	/* libmicrohttpd copies the headers as soon as this request's handler is back, before it looks at another connection. */
	char *id = (char *)(uintptr_t)MHD_get_response_header(response, REQUEST_ID_HEAD);
	NEED(id && strlen(id) == REQUEST_ID_OWN, "a kept answer has no room for an id");
	memcpy(id, r->id, REQUEST_ID_OWN);
	r->answered = r->answer_kept = true;
	r->answer = response;
	r->status = status;
	return OK;
}

FALLIBLE enum err req_header(struct req *r, const char *name, const char *value)
{
	if (r->answer && !r->answer_kept && MHD_add_response_header(r->answer, name, value) != MHD_YES)
		return ERR(NO_MEMORY, "cannot add a header");
	return OK;
}

FALLIBLE enum err req_stream(struct req *r, const char *content_type, MHD_ContentReaderCallback read, void *user,
			     MHD_ContentReaderFreeCallback done)
{
	struct MHD_Response *m = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1024, read, user, done);

	if (!m)
		done(user);
	return give_dressed(r, 200, m, content_type, false);
}

/* Whether the same request may succeed soon: somebody else has what it needs, or too much is asked for. */
static bool is_worth_waiting(enum err code, unsigned status)
{
	return err_retryable(code) && (status == 409 || status == 429 || status == 503 || status == 504);
}

void req_fail(struct req *r, enum err code, const char *job)
{
	struct buf b = BUF_INIT(64 << 10);
	const struct err_info *info = err_last();
	unsigned status = (unsigned)err_http_status(code);

	if (r->answered || r->finished)
		return;
	if (code == ERR_INTERNAL || code == ERR_NO_MEMORY)
		log_err("request failed", "request", r->id, "method", r->method, "path", r->path, NULL);
	problem_put(&b, info, r->path, job, r->id);
	if (req_bytes(r, status, "application/problem+json", &b) != OK) {
		/* No memory even for that: on_request finds no answer and cuts the connection. */
		r->answered = true;
		http_wake(r);
		return;
	}
	if (code == ERR_UNAUTHENTICATED && req_header(r, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer realm=\"dcpd\"") != OK)
		return;
	if (code == ERR_METHOD_NOT_ALLOWED && req_header(r, MHD_HTTP_HEADER_ALLOW, r->allow) != OK)
		return;
	if (is_worth_waiting(code, status) && req_header(r, MHD_HTTP_HEADER_RETRY_AFTER, "1") != OK)
		return;
	char range[RANGE_TEXT_MAX];
	if (r->range_of && req_header(r, MHD_HTTP_HEADER_CONTENT_RANGE, range_text(NULL, r->range_of - 1, range)) != OK)
		return;
}

void req_hold(struct req *r)
{
	r->refs++;
}

void req_release(struct req *r)
{
	must(r->refs > 0);
	if (--r->refs > 0)
		return;
	must(r->finished && !r->suspended);
	if (r->answer && !r->answer_kept)
		MHD_destroy_response(r->answer);
	unread_give(r->core->unread, r->unread);
	state_dict_read_end(&r->reading);
	http_drop_body(r);
	jval_drop(&r->note);
	mem_free(r->decoded);
	mem_free(r->refused);
	mem_free(r);
}

void req_done(struct req *r, enum err e)
{
	if (e)
		req_fail(r, e, NULL);
	req_release(r);
}

const char *req_head(const struct req *r, const char *name)
{
	return r->conn ? MHD_lookup_connection_value(r->conn, MHD_HEADER_KIND, name) : NULL;
}

FALLIBLE enum err req_query(struct req *r, const char *key, struct str *out, bool *there_out)
{
	const char *value = NULL;
	size_t n = 0;

	*there_out = r->conn && MHD_lookup_connection_value_n(r->conn, MHD_GET_ARGUMENT_KIND, key, strlen(key), &value,
							      &n) == MHD_YES;
	if (!*there_out)
		return OK;
	if (!value)
		return ERR(INVALID_REQUEST, "the query's \"%s\" has no value", key);
	/* libmicrohttpd keeps the query in the connection's memory, which ours may rewrite: decoding never grows. */
	TRY(url_decode((char *)(uintptr_t)value, n, &n));
	*out = (struct str){ value, n };
	return OK;
}

FALLIBLE enum err req_query_u64(struct req *r, const char *key, uint64_t max, uint64_t *out)
{
	struct str text = { 0 };
	uint64_t n = 0;
	bool there;

	TRY(req_query(r, key, &text, &there));
	if (!there)
		return OK;
	if (!str_to_u64(text, &n) || n > max)
		return ERR(INVALID_REQUEST, "the query's \"%s\" must be a number of at most %ju", key, (uintmax_t)max);
	*out = n;
	return OK;
}

FALLIBLE enum err req_query_bool(struct req *r, const char *key, bool *out)
{
	struct str text = { 0 };
	bool there;

	TRY(req_query(r, key, &text, &there));
	if (!there)
		return OK;
	if (!str_is(text, "true") && !str_is(text, "false"))
		return ERR(INVALID_REQUEST, "the query's \"%s\" must be true or false", key);
	*out = str_is(text, "true");
	return OK;
}

FALLIBLE enum err req_query_wait(struct req *r, unsigned *ms_out)
{
	enum { WAIT_MAX_MS = 60000 };
	struct str text = { 0 };
	uint64_t n = 0, unit = 1000;
	bool there;

	*ms_out = 0;
	TRY(req_query(r, "wait", &text, &there));
	if (!there)
		return OK;
	if (str_ends(text, "ms")) {
		unit = 1;
		text.n -= 2;
	} else if (str_ends(text, "s")) {
		text.n -= 1;
	} else if (str_ends(text, "m")) {
		unit = 60000;
		text.n -= 1;
	}
	if (text.n > 9 || !str_to_u64(text, &n))
		return ERR(INVALID_REQUEST, "the query's \"wait\" must be a duration such as 30s or 500ms");
	n *= unit;
	*ms_out = (unsigned)(n < WAIT_MAX_MS ? n : WAIT_MAX_MS);
	return OK;
}

struct only {
	const char *const *keys;
	char bad[64];
};

static enum MHD_Result check_key(void *user, enum MHD_ValueKind, const char *key, const char *)
{
	struct only *o = user;

	for (size_t i = 0; o->keys[i]; i++)
		if (strcmp(o->keys[i], key) == 0)
			return MHD_YES;
	snprintf(o->bad, sizeof o->bad, "%.60s", key);
	return MHD_NO;
}

static enum err unknown_query(const char *bad, const char *const *keys)
{
	char hint[NEAR_HINT_MAX], list[256] = "no field is";
	size_t n = 0;

	for (size_t i = 0; keys[i] && n < sizeof list; i++)
		n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? ", " : "known are: ", keys[i]);
	return ERR(UNKNOWN_FIELD, "the query's \"%s\" is not known here%s; %s", bad, near_hint(str_of(bad), keys, hint), list);
}

FALLIBLE enum err req_query_only(struct req *r, const char *const *keys)
{
	struct only o = { .keys = keys };

	MHD_get_connection_values(r->conn, MHD_GET_ARGUMENT_KIND, check_key, &o);
	if (o.bad[0])
		return unknown_query(o.bad, keys);
	return OK;
}
