/* s3_list.c: calls about many objects: lists, which come in pages, and deleting by the thousand. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/num.h"
#include "store/s3_impl.h"
#include "store/s3_xml.h"

/* A page may take as long as a call. The order of keys is no bound: SeaweedFS sorts folder by folder. */
enum { ENTRIES_MAX = 1 << 20, EMPTY_PAGES_MAX = 100, LIST_CALLS = 4 };

/* ---- pages ---- */

void s3_paging_begin(const struct s3 *s3, const struct s3_call *call, struct s3_paging *out)
{
	int64_t now = clock_mono_ms();

	*out = (struct s3_paging){ .call = call ? *call : (struct s3_call){ 0 } };
	out->end_ms = out->call.deadline_ms ? out->call.deadline_ms : now + LIST_CALLS * s3->call_ms;
	if (!out->call.deadline_ms)
		out->call.deadline_ms = now + s3->call_ms;
}

FALLIBLE enum err s3_paging_next(const struct s3 *s3, struct s3_paging *p, uint64_t entries)
{
	int64_t now = clock_mono_ms(), until = now + s3->call_ms;

	p->entries += entries;
	p->empty = entries ? 0 : p->empty + 1;
	if (p->entries > ENTRIES_MAX)
		return ERR(LIMIT_EXCEEDED, "the object storage lists more than %d keys", ENTRIES_MAX);
	if (p->empty >= EMPTY_PAGES_MAX)
		return ERR(STORAGE_IO, "the object storage's list does not go on: %d pages of it are empty", EMPTY_PAGES_MAX);
	if (now >= p->end_ms)
		return ERR(STORAGE_STALLED, "the object storage's list did not end in time: %ju keys came", (uintmax_t)p->entries);
	p->call.deadline_ms = until < p->end_ms ? until : p->end_ms;
	return OK;
}

FALLIBLE enum err s3_unescape(struct str v, struct buf *out)
{
	out->len = 0;
	for (size_t i = 0; i < v.n; i++) {
		int64_t c = v.p[i] == '%' && v.n - i > 2 ? str_hex((struct str){ v.p + i + 1, 2 }, 2) : -1;
		if (v.p[i] == '%' && c < 0)
			return ERR(STORAGE_IO, "the object storage sent a key that is not URL-encoded");
		buf_putc(out, c >= 0 ? (unsigned char)c : v.p[i] == '+' ? ' ' : (unsigned char)v.p[i]);
		i += c >= 0 ? 2 : 0;
	}
	return buf_status(out);
}

/* The key below the configured prefix; the server must name nothing else. */
FALLIBLE enum err s3_relative(const struct s3 *s3, const char *prefix, struct str key, struct str *out)
{
	size_t n = strlen(s3->prefix);

	if (!str_starts(key, s3->prefix) || !str_starts((struct str){ key.p + n, key.n - n }, prefix) || memchr(key.p, '\0', key.n))
		return ERR(STORAGE_IO, "the object storage listed a key that does not begin with what was asked for");
	*out = (struct str){ key.p + n, key.n - n };
	return OK;
}

struct page {
	const struct s3 *s3;
	const char *prefix;
	s3_entry_fn fn;
	void *user;
	uint64_t left;                 /* entries that the caller still takes */
	bool is_full, is_encoded, is_truncated;
	uint64_t entries;
	struct buf key, token;
	struct s3_object object;
	bool has_key;
};

static FALLIBLE enum err key_of(struct page *p, struct str text)
{
	if (p->is_encoded)
		return s3_unescape(text, &p->key);
	p->key.len = 0;
	buf_put(&p->key, text.p, text.n);
	return buf_status(&p->key);
}

static FALLIBLE enum err tell(struct page *p, const struct s3_object *object)
{
	struct str key;

	if (p->is_full)
		return OK;
	TRY(s3_relative(p->s3, p->prefix, (struct str){ p->key.p ? (const char *)p->key.p : "", p->key.len }, &key));
	p->entries++;
	TRY(p->fn(p->user, key, object));
	p->is_full = --p->left == 0;
	return OK;
}

FALLIBLE enum err s3_iso_time(struct str text, int64_t *out)
{
	char z[CLOCK_TEXT_MAX];

	s3_answer_put(z, sizeof z, text);
	*out = 0;
	(void)clock_of_text(z, out);           /* a time that cannot be read is one that is not known */
	return OK;
}

static FALLIBLE enum err list_field(void *user, const char *path, struct str text)
{
	struct page *p = user;
	const char *field = path + sizeof "ListBucketResult/" - 1;

	if (!str_starts(str_of(path), "ListBucketResult/"))
		return str_is(str_of(path), "ListBucketResult") ? OK : ERR(STORAGE_IO, "the answer to a list is something else");
	if (strcmp(field, "Contents/Key") == 0) {
		p->has_key = true;
		return key_of(p, text);
	}
	if (strcmp(field, "Contents/Size") == 0 && !str_to_u64(text, &p->object.bytes))
		return ERR(STORAGE_IO, "the object storage listed an object of no size");
	if (strcmp(field, "Contents/ETag") == 0)
		(void)s3_answer_etag(p->object.etag, text);
	else if (strcmp(field, "Contents/LastModified") == 0)
		return s3_iso_time(text, &p->object.mtime_ms);
	else if (strcmp(field, "Contents") == 0) {
		struct s3_object object = p->object;
		bool has_key = p->has_key;
		p->object = (struct s3_object){ 0 };
		p->has_key = false;
		return has_key ? tell(p, &object) : ERR(STORAGE_IO, "the object storage listed an object without a key");
	} else if (strcmp(field, "CommonPrefixes/Prefix") == 0) {
		TRY(key_of(p, text));
		return tell(p, NULL);
	} else if (strcmp(field, "IsTruncated") == 0)
		p->is_truncated = str_is(text, "true");
	else if (strcmp(field, "NextContinuationToken") == 0) {
		p->token.len = 0;
		buf_put(&p->token, text.p, text.n);
		return buf_status(&p->token);
	}
	return OK;
}

/* EncodingType may stand behind the keys that it is about. */
static FALLIBLE enum err find_encoding(void *user, const char *path, struct str text)
{
	if (strcmp(path, "ListBucketResult/EncodingType") == 0)
		((struct page *)user)->is_encoded = str_is(text, "url");
	return OK;
}

static FALLIBLE enum err list_page(struct s3 *s3, struct page *p, char delimiter, const char *after, const char *token,
				   const struct s3_call *call)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(S3_XML_MAX), prefix = BUF_INIT(2 * S3_KEY_MAX), start = BUF_INIT(2 * S3_KEY_MAX);
	struct s3_op op = s3_op(s3, call, "GET", NULL);
	char most[24], parted[2] = { delimiter, '\0' };

	buf_printf(&prefix, "%s%s%c", s3->prefix, p->prefix, 0);
	buf_printf(&start, "%s%s%c", s3->prefix, after ? after : "", 0);
	TRY(buf_status(&prefix));
	TRY(buf_status(&start));
	snprintf(most, sizeof most, "%ju", (uintmax_t)num_min(p->left, S3_LIST_PAGE));
	s3_op_query(&op, "list-type", "2");
	s3_op_query(&op, "encoding-type", "url");
	s3_op_query(&op, "max-keys", most);
	s3_op_query(&op, "prefix", (const char *)prefix.p);
	if (delimiter)
		s3_op_query(&op, "delimiter", parted);
	if (token)
		s3_op_query(&op, "continuation-token", token);
	else if (after)
		s3_op_query(&op, "start-after", (const char *)start.p);
	op.x.text = &text;
	TRY(s3_run(&op));
	struct str xml = { text.p ? (const char *)text.p : "", text.len };
	p->is_truncated = p->is_encoded = false;
	p->entries = 0;
	p->token.len = 0;
	TRY(s3_xml_read(xml, find_encoding, p));
	return s3_xml_read(xml, list_field, p);
}

static FALLIBLE enum err list_pages(struct s3 *s3, struct page *p, char delimiter, const char *after, const struct s3_call *call)
{
	CLEANUP(mem_free_ptr) char *token = NULL;
	struct s3_paging paging;

	s3_paging_begin(s3, call, &paging);
	for (;;) {
		TRY(list_page(s3, p, delimiter, after, token, &paging.call));
		if (!p->is_truncated || p->is_full)
			return OK;
		const char *next = p->token.p ? (const char *)p->token.p : "";
		if (p->token.len == 0 || (token && strlen(token) == p->token.len && memcmp(token, next, p->token.len) == 0))
			return ERR(STORAGE_IO, "the object storage's list does not go on: it sent no new continuation token");
		TRY(s3_paging_next(s3, &paging, p->entries));
		mem_free(token);
		token = mem_strndup(next, p->token.len);
		NEED(token, "cannot list a storage");
	}
}

FALLIBLE enum err s3_list(struct s3 *s3, const char *prefix, char delimiter, const char *after, uint64_t at_most,
			  const struct s3_call *call, s3_entry_fn fn, void *user)
{
	struct page p = { .s3 = s3, .prefix = prefix, .fn = fn, .user = user, .left = at_most ? at_most : UINT64_MAX,
			  .key = BUF_INIT(S3_XML_TEXT_MAX), .token = BUF_INIT(S3_XML_TEXT_MAX) };
	enum err e = list_pages(s3, &p, delimiter, after, call);

	buf_free(&p.key);
	buf_free(&p.token);
	return e;
}

/* ---- deleting many ---- */

void s3_xml_put(struct buf *out, struct str text)
{
	for (size_t i = 0; i < text.n; i++) {
		unsigned char c = (unsigned char)text.p[i];
		if (c == '&' || c == '<' || c == '>' || c == '"' || c == '\r' || c == '\n' || c == '\t')
			buf_printf(out, "&#%d;", c);
		else
			buf_putc(out, c);
	}
}

struct deleted {
	struct s3_answer said;         /* the first error */
	bool is_other;                 /* the entry is of a key that another object has by now */
};

static FALLIBLE enum err deleted_field(void *user, const char *path, struct str text)
{
	struct deleted *d = user;

	if (strcmp(path, "DeleteResult/Error/Code") == 0) {
		d->is_other = str_is(text, "PreconditionFailed");
		if (!d->is_other && !d->said.code[0])
			s3_answer_put(d->said.code, sizeof d->said.code, text);
	} else if (strcmp(path, "DeleteResult/Error/Message") == 0 && !d->is_other && !d->said.message[0]) {
		s3_answer_put(d->said.message, sizeof d->said.message, text);
	}
	return OK;
}

static FALLIBLE enum err put_keys(const struct s3 *s3, const char *const *keys, const char *const *etags, size_t count, struct buf *out)
{
	buf_puts(out, "<Delete><Quiet>true</Quiet>");
	for (size_t i = 0; i < count; i++) {
		buf_puts(out, "<Object><Key>");
		s3_xml_put(out, str_of(s3->prefix));
		s3_xml_put(out, str_of(keys[i]));
		buf_puts(out, "</Key>");
		if (etags && etags[i][0]) {
			buf_puts(out, "<ETag>");
			s3_xml_put(out, str_of(etags[i]));
			buf_puts(out, "</ETag>");
		}
		buf_puts(out, "</Object>");
	}
	buf_puts(out, "</Delete>");
	return buf_status(out);
}

FALLIBLE enum err s3_delete_many(struct s3 *s3, const char *const *keys, const char *const *etags, size_t count,
				 const struct s3_call *call)
{
	CLEANUP(buf_free) struct buf body = BUF_INIT(S3_XML_MAX), md5 = BUF_INIT(64), text = BUF_INIT(S3_XML_MAX);
	struct s3_op op = s3_op(s3, call, "POST", NULL);
	struct deleted d = { .said.status = 200 };
	enum s3_verdict verdict;

	must(count <= S3_LIST_PAGE);
	if (count == 0)
		return OK;
	TRY(put_keys(s3, keys, etags, count, &body));
	TRY(s3_sign_md5(&md5, (struct str){ (const char *)body.p, body.len }));
	buf_putc(&md5, '\0');
	TRY(buf_status(&md5));
	s3_op_query(&op, "delete", "");
	s3_op_header(&op, "content-type", "application/xml");
	s3_op_header(&op, "content-md5", (const char *)md5.p);
	op.x.body = body.p;
	op.x.body_bytes = body.len;
	op.x.text = &text;
	enum err e = s3_run(&op);
	if (etags && (e == ERR_UNSUPPORTED || (e && op.x.answer.status == 400))) /* the server knows of no ETags here */
		return s3_delete_many(s3, keys, NULL, count, call);
	TRY(e);
	TRY(s3_xml_read((struct str){ text.p ? (const char *)text.p : "", text.len }, deleted_field, &d));
	return d.said.code[0] ? s3_answer_error(&d.said, false, &verdict) : OK;
}
