/* s3_upload.c: multipart uploads, and copies on the server.
 *
 * An upload's id, as callers have it, is MARK.ID: the mark that the object will carry as metadata, and the server's own id. With the mark a
 * completion whose answer was lost is told from another writer's. Uploads that a list found have '-' for it. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/num.h"
#include "io/digest.h"
#include "store/s3_impl.h"
#include "store/s3_xml.h"

/* Takes a caller's id apart: the mark, and the server's id. */
static FALLIBLE enum err split_id(const char *id, char mark_out[S3_MARK_MAX], const char **id_out)
{
	const char *dot = strchr(id, '.');

	if (!dot || dot - id >= S3_MARK_MAX || !dot[1])
		return ERR(NOT_FOUND, "there is no such upload");
	memcpy(mark_out, id, (size_t)(dot - id));
	mark_out[dot - id] = '\0';
	*id_out = dot + 1;
	return OK;
}

static FALLIBLE enum err join_id(const char *mark, struct str id, char *out)
{
	int n = snprintf(out, S3_UPLOAD_ID_MAX, "%s.%.*s", mark, (int)num_min(id.n, S3_UPLOAD_ID_MAX), id.p);

	if (id.n == 0 || n >= S3_UPLOAD_ID_MAX || memchr(id.p, '\0', id.n))
		return ERR(STORAGE_IO, "the object storage sent an id of an upload that cannot be used");
	return OK;
}

/* The text of one element. */
struct wanted {
	const char *path;
	struct buf text;
};

static enum err take(void *user, const char *path, struct str text)
{
	struct wanted *w = user;

	if (strcmp(path, w->path) != 0)
		return OK;
	w->text.len = 0;
	buf_put(&w->text, text.p, text.n);
	return buf_status(&w->text);
}

static struct str text_of(const struct buf *b)
{
	return (struct str){ b->p ? (const char *)b->p : "", b->len };
}

/* ---- begin, parts ---- */

FALLIBLE enum err s3_upload_begin(struct s3 *s3, const char *key, const char *mark, const struct s3_call *call, char *id_out)
{
	struct s3_op op = s3_op(s3, call, "POST", key);
	CLEANUP(buf_free) struct buf xml = BUF_INIT(S3_XML_TEXT_MAX);
	struct wanted w = { "InitiateMultipartUploadResult/UploadId", BUF_INIT(S3_UPLOAD_ID_MAX) };
	char own[S3_MARK_MAX];

	if (!mark) {
		TRY(s3_new_mark(own));
		mark = own;
	}
	s3_op_query(&op, "uploads", "");
	s3_op_header(&op, S3_MARK_HEADER, mark);
	s3_op_header(&op, "x-amz-checksum-algorithm", "CRC32");
	s3_op_header(&op, "x-amz-checksum-type", "FULL_OBJECT");
	s3_op_header(&op, "content-type", "application/octet-stream");
	op.x.text = &xml;
	TRY(s3_run(&op));
	enum err e = s3_xml_read(text_of(&xml), take, &w);
	e = e ?: join_id(mark, text_of(&w.text), id_out);
	buf_free(&w.text);
	return e;
}

static FALLIBLE enum err set_place(struct s3_op *op, char number_text[16], uint32_t number, const char *id)
{
	if (number < 1 || number > S3_PARTS_MAX)
		return ERR(LIMIT_EXCEEDED, "an upload has at most %d parts", S3_PARTS_MAX);
	snprintf(number_text, 16, "%u", number);
	s3_op_query(op, "partNumber", number_text);
	s3_op_query(op, "uploadId", id);
	return OK;
}

FALLIBLE enum err s3_upload_part(struct s3 *s3, const char *key, const char *id, uint32_t number, const void *bytes, size_t n,
				 const struct s3_call *call, struct s3_part *out)
{
	struct s3_op op = s3_op(s3, call, "PUT", key);
	struct s3_part part = { .number = number, .crc32 = digest_crc32(0, bytes, n), .has_crc = true, .bytes = n };
	char mark[S3_MARK_MAX], crc[16], number_text[16];

	if (n > S3_PART_MAX)
		return ERR(LIMIT_EXCEEDED, "a part of an upload has at most 5 GiB");
	TRY(split_id(id, mark, &id));
	TRY(set_place(&op, number_text, number, id));
	s3_op_checksum(&op, part.crc32, crc);
	op.x.body = bytes;
	op.x.body_bytes = n;
	TRY(s3_run(&op));
	TRY(s3_op_etag(&op, part.etag));
	*out = part;
	return OK;
}

/* "/BUCKET/KEY", encoded, as the header x-amz-copy-source has it. */
static FALLIBLE enum err put_source(const struct s3 *s3, const char *from, struct buf *out)
{
	buf_printf(out, "/%s/", s3->bucket);
	s3_sign_encode(out, str_of(s3->prefix), '/');
	s3_sign_encode(out, str_of(from), '/');
	buf_putc(out, '\0');
	return buf_status(out);
}

/* Runs a copy, whose answer has the ETag in `path`. */
static FALLIBLE enum err run_copy(struct s3_op *op, const char *from, const char *from_etag, const char *path, char *etag_out)
{
	CLEANUP(buf_free) struct buf source = BUF_INIT(4 * S3_KEY_MAX), xml = BUF_INIT(S3_XML_TEXT_MAX);
	struct wanted w = { path, BUF_INIT(S3_ETAG_MAX) };
	char etag[S3_ETAG_MAX];

	TRY(put_source(op->s3, from, &source));
	s3_op_header(op, "x-amz-copy-source", (const char *)source.p);
	if (from_etag)
		s3_op_header(op, "x-amz-copy-source-if-match", from_etag);
	op->reads = true;
	op->is_slow = true;
	op->x.text = &xml;
	TRY(s3_run(op));
	enum err e = s3_xml_read(text_of(&xml), take, &w);
	if (!e && !s3_answer_etag(etag, text_of(&w.text)))
		e = ERR(STORAGE_IO, "the object storage's answer to a copy lacks an ETag");
	if (!e && etag_out)
		memcpy(etag_out, etag, sizeof etag);
	buf_free(&w.text);
	return e;
}

FALLIBLE enum err s3_copy(struct s3 *s3, const char *from, const char *from_etag, const char *to, const char *mark,
			  const struct s3_call *call, char etag_out[S3_ETAG_MAX])
{
	struct s3_op op = s3_op(s3, call, "PUT", to);

	if (mark) {
		s3_op_header(&op, S3_MARK_HEADER, mark);
		s3_op_header(&op, "x-amz-metadata-directive", "REPLACE");
		s3_op_header(&op, "content-type", "application/octet-stream");
	}
	return run_copy(&op, from, from_etag, "CopyObjectResult/ETag", etag_out);
}

FALLIBLE enum err s3_upload_part_copy(struct s3 *s3, const char *key, const char *id, uint32_t number, const char *from,
				      const char *from_etag, uint64_t offset, uint64_t n, const struct s3_call *call,
				      struct s3_part *out)
{
	struct s3_op op = s3_op(s3, call, "PUT", key);
	struct s3_part part = { .number = number, .bytes = n };
	char mark[S3_MARK_MAX], number_text[16];

	if (n == 0 || n > S3_PART_MAX || offset > INT64_MAX)
		return ERR(LIMIT_EXCEEDED, "a part of an upload has 1 byte to 5 GiB");
	TRY(split_id(id, mark, &id));
	TRY(set_place(&op, number_text, number, id));
	snprintf(op.range, sizeof op.range, "bytes=%ju-%ju", (uintmax_t)offset, (uintmax_t)(offset + n - 1));
	s3_op_header(&op, "x-amz-copy-source-range", op.range);
	TRY(run_copy(&op, from, from_etag, "CopyPartResult/ETag", part.etag));
	*out = part;
	return OK;
}

/* ---- end ---- */

static FALLIBLE enum err put_parts(struct buf *body, const struct s3_part *parts, size_t count, bool crc, uint32_t *whole_out,
				   uint64_t *bytes_out)
{
	*whole_out = 0;
	*bytes_out = 0;
	buf_puts(body, "<CompleteMultipartUpload>");
	for (size_t i = 0; i < count; i++) {
		const struct s3_part *p = &parts[i];
		unsigned char big[4] = { (unsigned char)(p->crc32 >> 24), (unsigned char)(p->crc32 >> 16), (unsigned char)(p->crc32 >> 8),
					 (unsigned char)p->crc32 };
		if (i && p->number <= parts[i - 1].number)
			return ERR(INTERNAL, "the parts of an upload do not ascend");
		buf_puts(body, "<Part>");
		if (crc) {
			buf_puts(body, "<ChecksumCRC32>");
			buf_base64(body, big, sizeof big);
			buf_puts(body, "</ChecksumCRC32>");
			*whole_out = i ? digest_crc32_combine(*whole_out, p->crc32, p->bytes) : p->crc32;
		}
		buf_puts(body, "<ETag>");
		s3_xml_put(body, str_of(p->etag));
		buf_printf(body, "</ETag><PartNumber>%u</PartNumber></Part>", p->number);
		TRY(num_add(*bytes_out, p->bytes, bytes_out));
	}
	buf_puts(body, "</CompleteMultipartUpload>");
	return buf_status(body);
}

FALLIBLE enum err s3_upload_complete(struct s3 *s3, const char *key, const char *id, const struct s3_part *parts, size_t count,
				     struct s3_condition condition, const struct s3_call *call, char etag_out[S3_ETAG_MAX])
{
	struct s3_op op = s3_op(s3, call, "POST", key);
	CLEANUP(buf_free) struct buf body = BUF_INIT(4 << 20), xml = BUF_INIT(S3_XML_TEXT_MAX);
	struct wanted w = { "CompleteMultipartUploadResult/ETag", BUF_INIT(S3_ETAG_MAX) };
	char mark[S3_MARK_MAX], crc[16], size[24], etag[S3_ETAG_MAX];
	bool has_crc = true;
	uint32_t whole;
	uint64_t bytes;

	if (count < 1 || count > S3_PARTS_MAX)
		return ERR(LIMIT_EXCEEDED, "an upload has 1 to %d parts", S3_PARTS_MAX);
	TRY(split_id(id, mark, &id));
	for (size_t i = 0; i < count; i++)
		has_crc &= parts[i].has_crc;
	TRY(put_parts(&body, parts, count, has_crc, &whole, &bytes));
	s3_op_query(&op, "uploadId", id);
	s3_op_header(&op, "content-type", "application/xml");
	if (has_crc) {
		s3_op_checksum(&op, whole, crc);
		s3_op_header(&op, "x-amz-checksum-type", "FULL_OBJECT");
	}
	snprintf(size, sizeof size, "%ju", (uintmax_t)bytes);
	s3_op_header(&op, "x-amz-mp-object-size", size);
	s3_op_condition(&op, condition);
	op.is_slow = true;
	op.x.body = body.p;
	op.x.body_bytes = body.len;
	op.x.text = &xml;
	enum err e = s3_run(&op);
	if (e)
		return s3_settle(&op, e, mark, etag_out);
	e = s3_xml_read(text_of(&xml), take, &w);
	if (!e && !s3_answer_etag(etag, text_of(&w.text)))
		e = ERR(STORAGE_IO, "the object storage's answer lacks an ETag");
	if (!e && etag_out)
		memcpy(etag_out, etag, sizeof etag);
	buf_free(&w.text);
	return e;
}

FALLIBLE enum err s3_upload_abort(struct s3 *s3, const char *key, const char *id, const struct s3_call *call)
{
	struct s3_op op = s3_op(s3, call, "DELETE", key);
	char mark[S3_MARK_MAX];

	TRY(split_id(id, mark, &id));
	s3_op_query(&op, "uploadId", id);
	enum err e = s3_run(&op);
	return e == ERR_NOT_FOUND ? OK : e;
}

/* ---- lists ---- */

struct uploads {
	const struct s3 *s3;
	const char *prefix;
	s3_upload_fn fn;
	void *user;
	bool is_encoded, is_truncated;
	struct buf key, id, next_key, next_id;
	int64_t begun_ms;
	uint64_t entries;              /* of a page */
};

static FALLIBLE enum err keep(struct buf *out, bool is_encoded, struct str text)
{
	if (is_encoded)
		return s3_unescape(text, out);
	out->len = 0;
	buf_put(out, text.p, text.n);
	return buf_status(out);
}

static FALLIBLE enum err tell_upload(struct uploads *u)
{
	char id[S3_UPLOAD_ID_MAX];
	struct str key;

	TRY(s3_relative(u->s3, u->prefix, text_of(&u->key), &key));
	TRY(join_id("-", text_of(&u->id), id));
	TRY(u->fn(u->user, key, id, u->begun_ms));
	u->key.len = u->id.len = 0;
	u->begun_ms = 0;
	u->entries++;
	return OK;
}

static FALLIBLE enum err uploads_field(void *user, const char *path, struct str text)
{
	struct uploads *u = user;
	const char *field = path + sizeof "ListMultipartUploadsResult" - 1;

	if (!str_starts(str_of(path), "ListMultipartUploadsResult"))
		return ERR(STORAGE_IO, "the answer to a list is something else");
	if (strcmp(field, "/Upload/Key") == 0)
		return keep(&u->key, u->is_encoded, text);
	if (strcmp(field, "/Upload/UploadId") == 0)
		return keep(&u->id, false, text);
	if (strcmp(field, "/Upload/Initiated") == 0)
		return s3_iso_time(text, &u->begun_ms);
	if (strcmp(field, "/Upload") == 0)
		return tell_upload(u);
	if (strcmp(field, "/NextKeyMarker") == 0)
		return keep(&u->next_key, u->is_encoded, text);
	if (strcmp(field, "/NextUploadIdMarker") == 0)
		return keep(&u->next_id, false, text);
	if (strcmp(field, "/IsTruncated") == 0)
		u->is_truncated = str_is(text, "true");
	return OK;
}

static FALLIBLE enum err uploads_encoding(void *user, const char *path, struct str text)
{
	if (strcmp(path, "ListMultipartUploadsResult/EncodingType") == 0)
		((struct uploads *)user)->is_encoded = str_is(text, "url");
	return OK;
}

/* after_key, after_id: "" for the first page. */
static FALLIBLE enum err uploads_page(struct uploads *u, struct s3 *s3, const char *after_key, const char *after_id,
				      const struct s3_call *call)
{
	CLEANUP(buf_free) struct buf xml = BUF_INIT(S3_XML_MAX), prefix = BUF_INIT(2 * S3_KEY_MAX);
	struct s3_op op = s3_op(s3, call, "GET", NULL);

	buf_printf(&prefix, "%s%s%c", s3->prefix, u->prefix, 0);
	TRY(buf_status(&prefix));
	s3_op_query(&op, "uploads", "");
	s3_op_query(&op, "encoding-type", "url");
	s3_op_query(&op, "prefix", (const char *)prefix.p);
	if (*after_key)
		s3_op_query(&op, "key-marker", after_key);
	if (*after_id)
		s3_op_query(&op, "upload-id-marker", after_id);
	op.x.text = &xml;
	TRY(s3_run(&op));
	u->is_encoded = u->is_truncated = false;
	u->entries = 0;
	u->next_key.len = u->next_id.len = 0;
	TRY(s3_xml_read(text_of(&xml), uploads_encoding, u));
	return s3_xml_read(text_of(&xml), uploads_field, u);
}

static FALLIBLE enum err uploads_pages(struct uploads *u, struct s3 *s3, const struct s3_call *call)
{
	CLEANUP(mem_free_ptr) char *key = NULL, *id = NULL;
	struct s3_paging paging;

	s3_paging_begin(s3, call, &paging);
	for (;;) {
		TRY(uploads_page(u, s3, key ? key : "", id ? id : "", &paging.call));
		if (!u->is_truncated)
			return OK;
		if (u->next_key.len == 0 || (key && id && str_is(text_of(&u->next_key), key) && str_is(text_of(&u->next_id), id)))
			return ERR(STORAGE_IO, "the object storage's list of uploads does not go on");
		TRY(s3_paging_next(s3, &paging, u->entries));
		mem_free(key);
		mem_free(id);
		key = mem_strndup(text_of(&u->next_key).p, u->next_key.len);
		id = mem_strndup(text_of(&u->next_id).p, u->next_id.len);
		NEED(key && id, "cannot list a storage");
	}
}

FALLIBLE enum err s3_uploads_list(struct s3 *s3, const char *prefix, const struct s3_call *call, s3_upload_fn fn, void *user)
{
	struct uploads u = { .s3 = s3, .prefix = prefix, .fn = fn, .user = user, .key = BUF_INIT(S3_XML_TEXT_MAX),
			     .id = BUF_INIT(S3_XML_TEXT_MAX), .next_key = BUF_INIT(S3_XML_TEXT_MAX), .next_id = BUF_INIT(S3_XML_TEXT_MAX) };
	enum err e = uploads_pages(&u, s3, call);

	buf_free(&u.key);
	buf_free(&u.id);
	buf_free(&u.next_key);
	buf_free(&u.next_id);
	return e;
}

struct parts {
	s3_part_fn fn;
	void *user;
	struct s3_part part;
	uint64_t last, next;           /* numbers: told last; where the next page begins */
	bool is_truncated;
};

static FALLIBLE enum err parts_field(void *user, const char *path, struct str text)
{
	struct parts *p = user;
	const char *field = path + sizeof "ListPartsResult" - 1;
	uint64_t number = 0;

	if (!str_starts(str_of(path), "ListPartsResult"))
		return ERR(STORAGE_IO, "the answer to a list is something else");
	if (strcmp(field, "/Part/PartNumber") == 0) {
		if (!str_to_u64(text, &number) || number < 1 || number > S3_PARTS_MAX)
			return ERR(STORAGE_IO, "the object storage listed a part without a number");
		p->part.number = (uint32_t)number;
	} else if (strcmp(field, "/Part/Size") == 0) {
		if (!str_to_u64(text, &p->part.bytes))
			return ERR(STORAGE_IO, "the object storage listed a part of no size");
	} else if (strcmp(field, "/Part/ETag") == 0) {
		(void)s3_answer_etag(p->part.etag, text);
	} else if (strcmp(field, "/Part/ChecksumCRC32") == 0) {
		CLEANUP(buf_free) struct buf crc = BUF_INIT(16);
		p->part.has_crc = text.n == 8 && buf_unbase64(&crc, text) == OK && crc.len == 4;
		if (p->part.has_crc)
			p->part.crc32 = (uint32_t)crc.p[0] << 24 | (uint32_t)crc.p[1] << 16 | (uint32_t)crc.p[2] << 8 | crc.p[3];
	} else if (strcmp(field, "/Part") == 0) {
		struct s3_part part = p->part;
		p->part = (struct s3_part){ 0 };
		if (part.number <= p->last || !part.etag[0])
			return ERR(STORAGE_IO, "the object storage listed parts that do not ascend, or have no ETag");
		p->last = part.number;
		return p->fn(p->user, &part);
	} else if (strcmp(field, "/IsTruncated") == 0) {
		p->is_truncated = str_is(text, "true");
	} else if (strcmp(field, "/NextPartNumberMarker") == 0) {
		(void)str_to_u64(text, &p->next);
	}
	return OK;
}

FALLIBLE enum err s3_upload_parts_list(struct s3 *s3, const char *key, const char *id, const struct s3_call *call, s3_part_fn fn,
				       void *user)
{
	struct parts p = { .fn = fn, .user = user };
	char mark[S3_MARK_MAX], after[24];

	TRY(split_id(id, mark, &id));
	for (uint64_t begin = 0;; begin = p.next) {
		struct s3_op op = s3_op(s3, call, "GET", key);
		CLEANUP(buf_free) struct buf xml = BUF_INIT(S3_XML_MAX);
		s3_op_query(&op, "uploadId", id);
		snprintf(after, sizeof after, "%ju", (uintmax_t)begin);
		if (begin)
			s3_op_query(&op, "part-number-marker", after);
		op.x.text = &xml;
		TRY(s3_run(&op));
		p.is_truncated = false;
		TRY(s3_xml_read(text_of(&xml), parts_field, &p));
		if (!p.is_truncated)
			return OK;
		if (p.next <= begin)
			return ERR(STORAGE_IO, "the object storage's list of parts does not go on");
	}
}
