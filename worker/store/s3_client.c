/* s3_client.c: see s3_client.h. Where the bucket is, and calls about one object. */
#include "store/s3_client.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/mem.h"
#include "io/digest.h"
#include "store/s3_fetch.h"
#include "store/s3_impl.h"

enum { CONNECTIONS = 32, CONNECT_MS = 5000, STALL_MS = 20000, CALL_MS = 300000, TRIES = 6, BUDGET_AT_FIRST = 500 };

/* ---- open ---- */

static FALLIBLE enum err bad_endpoint(const char *why)
{
	return ERR(CONFIG, "the endpoint of an object storage %s: http[s]://HOST[:PORT]", why);
}

static FALLIBLE enum err url_part(CURLU *u, CURLUPart part, unsigned flags, char **out)
{
	char *text = NULL;

	if (curl_url_get(u, part, &text, flags) != CURLUE_OK)
		return OK;
	*out = mem_strdup(text);
	curl_free(text);
	NEED(*out, "cannot use a storage");
	return OK;
}

static FALLIBLE enum err read_endpoint(struct s3 *s3, const char *endpoint, bool path_style)
{
	static const CURLUPart none[] = { CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_QUERY, CURLUPART_FRAGMENT };
	CLEANUP(mem_free_ptr) char *scheme = NULL, *host = NULL, *port = NULL, *path = NULL, *extra = NULL;
	CURLU *u = curl_url();
	enum err e = OK;

	NEED(u, "cannot use a storage");
	if (curl_url_set(u, CURLUPART_URL, endpoint, 0) != CURLUE_OK)
		e = bad_endpoint("is no URL");
	for (size_t i = 0; i < sizeof none / sizeof *none && !e && !extra; i++)
		e = url_part(u, none[i], 0, &extra);
	e = e ?: url_part(u, CURLUPART_SCHEME, 0, &scheme);
	e = e ?: url_part(u, CURLUPART_HOST, 0, &host);
	e = e ?: url_part(u, CURLUPART_PORT, CURLU_NO_DEFAULT_PORT, &port);
	e = e ?: url_part(u, CURLUPART_PATH, 0, &path);
	curl_url_cleanup(u);
	TRY(e);
	if (extra || !host || !scheme || (path && strcmp(path, "/") != 0))
		return bad_endpoint("is more than scheme, host and port");
	bool tls = strcmp(scheme, "https") == 0;
	if (!tls && strcmp(scheme, "http") != 0)
		return bad_endpoint("has another scheme");
	struct in6_addr address;
	bool is_number = host[0] == '[' || inet_pton(AF_INET, host, &address) == 1;
	/* An address has no names below it, and a wildcard certificate covers one label. */
	path_style |= is_number || (tls && strchr(s3->bucket, '.'));
	CLEANUP(buf_free) struct buf at = BUF_INIT(1024), base = BUF_INIT(1024), begin = BUF_INIT(1024);
	buf_printf(&at, "%s%s%s%s%s", path_style ? "" : s3->bucket, path_style ? "" : ".", host, port ? ":" : "", port ? port : "");
	buf_printf(&base, "%s://%.*s", scheme, (int)at.len, (const char *)at.p);
	buf_printf(&begin, "/%s%s", path_style ? s3->bucket : "", path_style ? "/" : "");
	TRY(buf_status(&at));
	TRY(buf_status(&base));
	TRY(buf_status(&begin));
	s3->host = mem_strndup((const char *)at.p, at.len);
	s3->base = mem_strndup((const char *)base.p, base.len);
	s3->path = mem_strndup((const char *)begin.p, begin.len);
	NEED(s3->host && s3->base && s3->path, "cannot use a storage");
	return OK;
}

static FALLIBLE enum err check_texts(const struct s3_config *c, const char *region)
{
	size_t n = c->bucket ? strlen(c->bucket) : 0;

	if (n < 3 || n > 63 || strspn(c->bucket, "abcdefghijklmnopqrstuvwxyz0123456789.-") != n)
		return ERR(CONFIG, "a bucket's name has 3 to 63 lower-case letters, digits, '.' and '-', not '%.64s'", c->bucket ?: "");
	n = strlen(region);
	if (n == 0 || n > 40 || strspn(region, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") != n)
		return ERR(CONFIG, "'%.64s' is no region of an object storage", region);
	if (c->prefix && (strlen(c->prefix) > S3_KEY_MAX / 2 || !str_utf8(str_of(c->prefix))))
		return ERR(CONFIG, "the prefix of an object storage is UTF-8 of at most %d bytes", S3_KEY_MAX / 2);
	return OK;
}

static FALLIBLE enum err read_ca(const struct s3_config *config, struct buf *ca)
{
	const char *path = getenv("AWS_CA_BUNDLE");

	if (config->ca_pem.n) {
		buf_put(ca, config->ca_pem.p, config->ca_pem.n);
		return buf_status(ca);
	}
	enum err e = s3_read_file(config, path && *path ? path : S3_HTTP_CA_SYSTEM, ca);
	if (e && !(path && *path)) {
		ca->len = 0;                   /* a host without authorities: http still works, and https says what is missing */
		return OK;
	}
	return e;
}

static FALLIBLE enum err open_parts(struct s3 *s3, const struct s3_config *config)
{
	const char *region = config->region ?: getenv("AWS_REGION") ?: getenv("AWS_DEFAULT_REGION") ?: "us-east-1";
	CLEANUP(buf_free) struct buf ca = BUF_INIT(4 << 20);
	char usual[128];

	TRY(check_texts(config, region));
	snprintf(usual, sizeof usual, "https://s3.%s.amazonaws.com", region);
	s3->region = mem_strdup(region);
	s3->bucket = mem_strdup(config->bucket);
	s3->prefix = mem_strdup(config->prefix ? config->prefix : "");
	NEED(s3->region && s3->bucket && s3->prefix, "cannot use a storage");
	TRY(read_endpoint(s3, config->endpoint ? config->endpoint : usual, config->path_style));
	TRY(read_ca(config, &ca));
	s3->call_ms = config->call_ms > 0 ? config->call_ms : CALL_MS;
	s3->tries = config->tries ? config->tries : TRIES;
	s3->budget = BUDGET_AT_FIRST;
	const struct s3_http_config http = {
		.ca_pem = { (const char *)ca.p, ca.len },
		.connections = config->connections ? config->connections : CONNECTIONS,
		.connect_ms = config->connect_ms > 0 ? config->connect_ms : CONNECT_MS,
		.stall_ms = config->stall_ms > 0 ? config->stall_ms : STALL_MS,
		.address_ok = config->address_ok,
		.user = config->user,
	};
	TRY(s3_http_new(&http, &s3->http));
	return s3_credentials_new(config, s3->region, s3->http, &s3->credentials);
}

FALLIBLE enum err s3_open(const struct s3_config *config, struct s3 **out)
{
	struct s3 *s3 = mem_zalloc(1, sizeof *s3);

	NEED(s3, "cannot use a storage");
	enum err e = open_parts(s3, config);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		s3_close(s3);
		return e;
	}
	*out = s3;
	return OK;
}

void s3_close(struct s3 *s3)
{
	if (!s3)
		return;
	s3_credentials_free(s3->credentials);
	s3_http_free(s3->http);
	mem_free(s3->base);
	mem_free(s3->host);
	mem_free(s3->path);
	mem_free(s3->bucket);
	mem_free(s3->prefix);
	mem_free(s3->region);
	mem_free(s3);
}

struct s3_counts s3_counts(const struct s3 *s3)
{
	struct s3_counts c = { .repeats = __atomic_load_n(&s3->repeats, __ATOMIC_RELAXED) };

	s3_http_count(s3->http, &c);
	return c;
}

/* ---- reading ---- */

static void set_object(const struct s3_answer *a, uint64_t bytes, struct s3_object *out)
{
	*out = (struct s3_object){ .bytes = bytes, .mtime_ms = a->mtime_ms };
	memcpy(out->etag, a->etag, sizeof out->etag);
	memcpy(out->mark, a->mark, sizeof out->mark);
}

struct wanted {
	uint64_t offset, n;
	const char *etag;
};

/* Compares the head of an answer with what was asked, before a byte of it is taken. */
static FALLIBLE enum err check_head(void *user, const struct s3_answer *a)
{
	const struct wanted *w = user;

	if (a->status != 206 && (a->status != 200 || w->offset))
		return ERR(STORAGE_IO, "the object storage answered %ld to a request for a range", a->status);
	if (a->has_length && a->length != w->n)
		return ERR(STORAGE_IO, "the object storage announced %ju bytes where %ju were asked for", (uintmax_t)a->length,
			   (uintmax_t)w->n);
	if (a->status == 206 && (!a->has_range || a->range_begin != w->offset || a->range_end - a->range_begin != w->n ||
				 (a->range_total && a->range_total < a->range_end)))
		return ERR(STORAGE_IO, "the object storage sent another range than was asked for");
	if (!a->etag[0])
		return ERR(STORAGE_IO, "the object storage's answer lacks an ETag");
	if (w->etag && strcmp(a->etag, w->etag) != 0)
		return ERR(CHECKPOINT_REPLACED, "the object was replaced: its ETag is %s, not %s", a->etag, w->etag);
	return OK;
}

FALLIBLE enum err s3_get(struct s3 *s3, const char *key, uint64_t offset, void *into, size_t n, const char *etag,
			 const struct s3_call *call, struct s3_object *out)
{
	struct s3_op op = s3_op(s3, call, "GET", key);
	struct wanted w = { offset, n, etag };

	must(n > 0);
	if (offset > INT64_MAX || n > INT64_MAX - offset)
		return ERR(RANGE_INVALID, "no object has so many bytes");
	snprintf(op.range, sizeof op.range, "bytes=%ju-%ju", (uintmax_t)offset, (uintmax_t)(offset + n - 1));
	s3_op_header(&op, "range", op.range);
	if (etag)
		s3_op_header(&op, "if-match", etag);
	op.reads = true;
	op.x.into = into;
	op.x.into_bytes = n;
	op.x.begin = check_head;
	op.x.user = &w;
	TRY(s3_run(&op));
	if (out)
		set_object(&op.x.answer, op.x.answer.range_total ? op.x.answer.range_total : op.x.answer.status == 200 ? n : 0, out);
	return OK;
}

/* The checksum of a whole object, where the server keeps one of a kind that can be computed here. */
static FALLIBLE enum err check_crc(const struct s3_answer *a, struct str bytes)
{
	CLEANUP(buf_free) struct buf crc = BUF_INIT(16);
	uint32_t is = digest_crc32(0, bytes.p, bytes.n);

	if (!a->crc32[0] || a->is_composite || strlen(a->crc32) != 8)
		return OK;
	if (buf_unbase64(&crc, str_of(a->crc32)) != OK || crc.len != 4)
		return ERR(STORAGE_IO, "the object storage sent a checksum that is none");
	uint32_t told = (uint32_t)crc.p[0] << 24 | (uint32_t)crc.p[1] << 16 | (uint32_t)crc.p[2] << 8 | crc.p[3];
	if (told != is)
		return ERR(STORAGE_IO, "the object's bytes are not those that were stored: their CRC-32 is %08x, not %08x", is, told);
	return OK;
}

FALLIBLE enum err s3_get_all(struct s3 *s3, const char *key, const struct s3_call *call, struct buf *out, struct s3_object *is)
{
	struct s3_op op = s3_op(s3, call, "GET", key);
	size_t before = out->len;

	s3_op_header(&op, "x-amz-checksum-mode", "ENABLED");
	op.reads = true;
	op.x.text = out;
	enum err e = s3_run(&op);
	if (e) {
		out->len = before;
		return e;
	}
	size_t n = out->len - before;
	if (op.x.answer.has_length && op.x.answer.length != n)
		return ERR(STORAGE_IO, "the object storage announced %ju bytes and sent %zu", (uintmax_t)op.x.answer.length, n);
	TRY(check_crc(&op.x.answer, (struct str){ out->p ? (const char *)out->p + before : "", n }));
	TRY(s3_op_etag(&op, NULL));
	if (is)
		set_object(&op.x.answer, n, is);
	return OK;
}

static FALLIBLE enum err head(struct s3 *s3, const char *key, const struct s3_call *call, struct s3_answer *out)
{
	struct s3_op op = s3_op(s3, call, "HEAD", key), again = s3_op(s3, call, "GET", key);

	op.reads = true;
	enum err e = s3_run(&op);
	*out = op.x.answer;
	if (!e && !op.x.answer.has_length)
		e = ERR(STORAGE_IO, "the object storage did not tell an object's size");
	if (!e)
		return s3_op_etag(&op, NULL);
	if (out->status < 300)
		return e;
	/* An answer to HEAD has no body, so no words: a GET of one byte has. */
	again.reads = again.is_once = true;
	again.deadline_ms = op.deadline_ms;
	s3_op_header(&again, "range", "bytes=0-0");
	struct err_info info = *err_last();
	enum err said = s3_run(&again);
	if (said && again.x.answer.status == out->status)
		return said;
	err_restore(&info);
	return e;
}

FALLIBLE enum err s3_head(struct s3 *s3, const char *key, const struct s3_call *call, struct s3_object *out)
{
	struct s3_answer a;

	TRY(head(s3, key, call, &a));
	set_object(&a, a.length, out);
	return OK;
}

/* ---- writing ---- */

FALLIBLE enum err s3_new_mark(char out[S3_MARK_MAX])
{
	uint64_t random[2];

	if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
		return ERR_SYS(SYSTEM, "no random bytes");
	snprintf(out, S3_MARK_MAX, "%016jx%016jx", (uintmax_t)random[0], (uintmax_t)random[1]);
	return OK;
}

enum err s3_settle(struct s3_op *op, enum err e, const char *mark, char *etag_out)
{
	struct s3_answer a;
	struct s3_call call = op->call ? *op->call : (struct s3_call){ 0 };

	if (!e || !mark || (e != ERR_CHECKPOINT_EXISTS && e != ERR_NOT_FOUND && !op->is_ambiguous) || e == ERR_CANCELLED)
		return e;
	struct err_info info = *err_last();
	call.deadline_ms = op->deadline_ms;
	call.unsure_out = NULL;
	if (head(op->s3, op->key, &call, &a) == OK && strcmp(a.mark, mark) == 0) {
		err_clear();
		if (etag_out)
			memcpy(etag_out, a.etag, S3_ETAG_MAX);
		return OK;
	}
	err_restore(&info);
	return e;
}

FALLIBLE enum err s3_put(struct s3 *s3, const char *key, const void *bytes, size_t n, struct s3_condition condition, const char *mark,
			 const struct s3_call *call, char etag_out[S3_ETAG_MAX])
{
	struct s3_op op = s3_op(s3, call, "PUT", key);
	char own[S3_MARK_MAX], crc[16];

	if (!mark) {
		TRY(s3_new_mark(own));
		mark = own;
	}
	s3_op_header(&op, S3_MARK_HEADER, mark);
	s3_op_checksum(&op, digest_crc32(0, bytes, n), crc);
	s3_op_condition(&op, condition);
	op.x.body = bytes;
	op.x.body_bytes = n;
	enum err e = s3_run(&op);
	if (e)
		return s3_settle(&op, e, condition.is == S3_IF_ANY ? NULL : mark, etag_out);
	return s3_op_etag(&op, etag_out);
}

FALLIBLE enum err s3_delete(struct s3 *s3, const char *key, const struct s3_call *call)
{
	struct s3_op op = s3_op(s3, call, "DELETE", key);
	enum err e = s3_run(&op);

	return e == ERR_NOT_FOUND ? OK : e;
}

enum err s3_delete_if(struct s3 *s3, const char *key, const char *etag, const struct s3_call *call)
{
	struct s3_op op = s3_op(s3, call, "DELETE", key);

	s3_op_header(&op, "if-match", etag);
	enum err e = s3_run(&op);
	if (e == ERR_UNSUPPORTED || (e && op.x.answer.status == 400)) /* the server knows of no condition here */
		return s3_delete(s3, key, call);
	return e == ERR_NOT_FOUND || (e && op.x.answer.status == 412) ? OK : e;
}

/* ---- what a server can do ---- */

static FALLIBLE enum err was_refused(enum err e, const char *header, const char *of)
{
	if (e == ERR_CHECKPOINT_EXISTS)
		return OK;
	if (e && e != ERR_UNSUPPORTED)
		return e;
	return ERR(UNSUPPORTED, "this object storage does not heed %s%s: two commits could overwrite each other", header, of);
}

static FALLIBLE enum err complete_one(struct s3 *s3, const char *key, const char *id, struct s3_condition condition,
				      const struct s3_call *call)
{
	struct s3_part part;

	TRY(s3_upload_part(s3, key, id, 1, "2", 1, call, &part));
	return s3_upload_complete(s3, key, id, &part, 1, condition, call, NULL);
}

/* Writes whose condition does not hold must fail, whole ones and those of uploads. */
static FALLIBLE enum err must_refuse(struct s3 *s3, const char *key, struct s3_condition condition, const char *header,
				     const struct s3_call *call)
{
	char id[S3_UPLOAD_ID_MAX];

	TRY(was_refused(s3_put(s3, key, "2", 1, condition, NULL, call, NULL), header, ""));
	TRY(s3_upload_begin(s3, key, NULL, call, id));
	enum err e = was_refused(complete_one(s3, key, id, condition, call), header, " of CompleteMultipartUpload");
	struct err_info info = *err_last();
	if (s3_upload_abort(s3, key, id, call))
		err_clear(); /* a sweep finds it */
	if (e)
		err_restore(&info);
	return e;
}

FALLIBLE enum err s3_probe_conditions(struct s3 *s3, const char *key, const struct s3_call *call)
{
	char etag[S3_ETAG_MAX];

	TRY(s3_put(s3, key, "1", 1, S3_ALWAYS, NULL, call, etag));
	enum err e = must_refuse(s3, key, (struct s3_condition){ S3_IF_NONE, NULL }, "If-None-Match", call);
	e = e ?: must_refuse(s3, key, (struct s3_condition){ S3_IF_ETAG, "\"00000000000000000000000000000000\"" }, "If-Match", call);
	if (!e && s3_put(s3, key, "3", 1, (struct s3_condition){ S3_IF_ETAG, etag }, NULL, call, NULL) != OK)
		e = ERR(UNSUPPORTED, "this object storage refuses If-Match with the ETag that it gave: %.*s", 200, err_last()->text);
	CLEANUP(err_restore) struct err_info info = *err_last();
	(void)!s3_delete(s3, key, call);
	return e;
}
