/* s3_answer.c: see s3_answer.h. */
#include "store/s3_answer.h"

#include <curl/curl.h>
#include <stdio.h>
#include <strings.h>

#include "base/clock.h"
#include "base/num.h"
#include "store/s3_xml.h"

void s3_answer_put(char *out, size_t max, struct str text)
{
	size_t n = num_min(text.n, max - 1);

	while (n < text.n && n && ((unsigned char)text.p[n] & 0xc0) == 0x80)
		n--;
	bool utf8 = str_utf8((struct str){ text.p, n });
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)text.p[i];
		out[i] = c == '\n' || c == '\t' || c == '\r' ? ' ' : c < ' ' || c == 0x7f || (c > 0x7f && !utf8) ? '?' : (char)c;
	}
	out[n] = '\0';
}

bool s3_answer_etag(char out[S3_ETAG_MAX], struct str text)
{
	bool bare = text.n && *text.p != '"' && !str_starts(text, "W/");

	if (text.n == 0 || text.n > S3_ETAG_MAX - 3)
		return false;
	out[0] = '"';
	s3_answer_put(out + bare, S3_ETAG_MAX - 2, text);
	if (bare)
		memcpy(out + text.n + 1, "\"", 2);
	return true;
}

/* ---- headers ---- */

static bool to_range(struct str v, struct s3_answer *a)
{
	uint64_t last;

	if (!str_starts(v, "bytes "))
		return false;
	v = (struct str){ v.p + 6, v.n - 6 };
	const char *dash = memchr(v.p, '-', v.n), *slash = memchr(v.p, '/', v.n);
	if (!dash || !slash || dash > slash || !str_to_u64((struct str){ v.p, (size_t)(dash - v.p) }, &a->range_begin) ||
	    !str_to_u64((struct str){ dash + 1, (size_t)(slash - dash - 1) }, &last) || last < a->range_begin || last == UINT64_MAX)
		return false;
	struct str total = { slash + 1, (size_t)(v.p + v.n - slash - 1) };
	if (!str_is(total, "*") && !str_to_u64(total, &a->range_total))
		return false;
	a->range_end = last + 1;
	return true;
}

static int64_t to_time(struct str v)
{
	char text[S3_WORD_MAX];

	if (v.n >= sizeof text)
		return 0;
	s3_answer_put(text, sizeof text, v);
	time_t t = curl_getdate(text, NULL);
	return t > 0 && t < INT64_C(1) << 40 ? (int64_t)t * 1000 : 0;
}

/* Whole, or not at all: half of a text that is compared or sent back would be another text. */
static void put_whole(char *out, size_t max, struct str v)
{
	if (v.n < max)
		s3_answer_put(out, max, v);
}

void s3_answer_header(struct s3_answer *a, struct str line)
{
	while (line.n && (line.p[line.n - 1] == '\r' || line.p[line.n - 1] == '\n' || line.p[line.n - 1] == ' '))
		line.n--;
	if (str_starts(line, "HTTP/")) {
		*a = (struct s3_answer){ 0 };
		return;
	}
	const char *colon = line.n ? memchr(line.p, ':', line.n) : NULL;
	if (!colon)
		return;
	struct str name = { line.p, (size_t)(colon - line.p) }, v = { colon + 1, line.n - name.n - 1 };
	while (v.n && (*v.p == ' ' || *v.p == '\t'))
		v = (struct str){ v.p + 1, v.n - 1 };
#define IS(literal) (name.n == sizeof(literal) - 1 && strncasecmp(name.p, literal, name.n) == 0)
	if (IS("content-length"))
		a->has_length = str_to_u64(v, &a->length);
	else if (IS("content-range"))
		a->has_range = to_range(v, a);
	else if (IS("etag"))
		put_whole(a->etag, sizeof a->etag, v);
	else if (IS("last-modified"))
		a->mtime_ms = to_time(v);
	else if (IS("retry-after"))
		(void)str_to_u64(v, &a->retry_after_s);
	else if (IS("x-amz-request-id") || IS("x-amzn-requestid"))
		s3_answer_put(a->request_id, sizeof a->request_id, v);
	else if (IS("x-amz-bucket-region"))
		s3_answer_put(a->region, sizeof a->region, v);
	else if (IS("date")) {
		s3_answer_put(a->date, sizeof a->date, v);
		a->date_ms = to_time(v);
	}
	else if (IS("x-amz-checksum-crc32"))
		put_whole(a->crc32, sizeof a->crc32, v);
	else if (IS("x-amz-checksum-type"))
		a->is_composite = !str_is(v, "FULL_OBJECT");
	else if (IS(S3_MARK_HEADER))
		put_whole(a->mark, sizeof a->mark, v);
#undef IS
}

static enum err word(void *user, const char *path, struct str text)
{
	struct s3_answer *a = user;
	const char *last = strrchr(path, '/');

	/* S3's <Error><Code>, and STS's <ErrorResponse><Error><Code> */
	if (!last || (strncmp(path, "Error/", 6) != 0 && strncmp(path, "ErrorResponse/", 14) != 0))
		return OK;
	if (strcmp(last, "/Code") == 0)
		s3_answer_put(a->code, sizeof a->code, text);
	else if (strcmp(last, "/Message") == 0)
		s3_answer_put(a->message, sizeof a->message, text);
	else if (strcmp(last, "/Region") == 0 && !a->region[0])
		s3_answer_put(a->region, sizeof a->region, text);
	else if (strcmp(last, "/RequestId") == 0 && !a->request_id[0])
		s3_answer_put(a->request_id, sizeof a->request_id, text);
	return OK;
}

void s3_answer_words(struct s3_answer *a, struct str body)
{
	if (body.n && s3_xml_read(body, word, a) != OK && !a->code[0] && !a->message[0])
		s3_answer_put(a->message, sizeof a->message, (struct str){ body.p, num_min(body.n, 160) });
}

/* ---- meaning ---- */

static const struct meaning {
	const char *code;
	enum err error;
	enum s3_verdict verdict;
} meanings[] = {
	{ "NoSuchKey", ERR_NOT_FOUND, S3_FINAL },
	{ "NoSuchUpload", ERR_NOT_FOUND, S3_FINAL },
	{ "NoSuchVersion", ERR_NOT_FOUND, S3_FINAL },
	{ "NoSuchBucket", ERR_STORAGE_GONE, S3_FINAL },
	{ "InvalidBucketName", ERR_STORAGE_GONE, S3_FINAL },
	{ "PermanentRedirect", ERR_STORAGE_GONE, S3_FINAL },
	{ "TemporaryRedirect", ERR_STORAGE_GONE, S3_FINAL },
	{ "Redirect", ERR_STORAGE_GONE, S3_FINAL },
	{ "AuthorizationHeaderMalformed", ERR_STORAGE_GONE, S3_FINAL },        /* told of another region */
	{ "IllegalLocationConstraintException", ERR_STORAGE_GONE, S3_FINAL },
	{ "PreconditionFailed", ERR_CHECKPOINT_EXISTS, S3_FINAL },
	{ "ConditionalRequestConflict", ERR_CHECKPOINT_EXISTS, S3_REPEAT },
	{ "OperationAborted", ERR_STORAGE_IO, S3_REPEAT },
	{ "InvalidRange", ERR_RANGE_INVALID, S3_FINAL },
	{ "SlowDown", ERR_STORAGE_STALLED, S3_SLOW },
	{ "SlowDownRead", ERR_STORAGE_STALLED, S3_SLOW },
	{ "SlowDownWrite", ERR_STORAGE_STALLED, S3_SLOW },
	{ "ServiceUnavailable", ERR_STORAGE_STALLED, S3_SLOW },
	{ "Throttling", ERR_STORAGE_STALLED, S3_SLOW },
	{ "ThrottlingException", ERR_STORAGE_STALLED, S3_SLOW },
	{ "RequestLimitExceeded", ERR_STORAGE_STALLED, S3_SLOW },
	{ "TooManyRequests", ERR_STORAGE_STALLED, S3_SLOW },
	{ "RequestTimeout", ERR_STORAGE_STALLED, S3_REPEAT },
	{ "InternalError", ERR_STORAGE_IO, S3_REPEAT },
	{ "ExpiredToken", ERR_FORBIDDEN, S3_RENEW },
	{ "ExpiredTokenException", ERR_FORBIDDEN, S3_RENEW },
	{ "TokenRefreshRequired", ERR_FORBIDDEN, S3_RENEW },
	{ "InvalidToken", ERR_FORBIDDEN, S3_RENEW },
	{ "InvalidAccessKeyId", ERR_FORBIDDEN, S3_RENEW },
	{ "SignatureDoesNotMatch", ERR_FORBIDDEN, S3_RENEW },
	{ "AccessDenied", ERR_FORBIDDEN, S3_FINAL },
	{ "RequestTimeTooSkewed", ERR_FORBIDDEN, S3_FINAL },
	{ "BadDigest", ERR_STORAGE_IO, S3_REPEAT },                            /* these: bytes changed on their way */
	{ "MalformedXML", ERR_STORAGE_IO, S3_REPEAT },
	{ "XAmzContentChecksumMismatch", ERR_STORAGE_IO, S3_REPEAT },
	{ "XAmzContentSHA256Mismatch", ERR_STORAGE_IO, S3_REPEAT },
	{ "IncompleteBody", ERR_STORAGE_IO, S3_REPEAT },
	{ "QuotaExceeded", ERR_STORAGE_FULL, S3_FINAL },
	{ "InsufficientStorage", ERR_STORAGE_FULL, S3_FINAL },
	{ "StorageFull", ERR_STORAGE_FULL, S3_FINAL },
	{ "XMinioStorageFull", ERR_STORAGE_FULL, S3_FINAL },
	{ "EntityTooLarge", ERR_LIMIT_EXCEEDED, S3_FINAL },
	{ "NotImplemented", ERR_UNSUPPORTED, S3_FINAL },
	{ "KeyTooLongError", ERR_NAME_INVALID, S3_FINAL },
};

static struct meaning meaning_of(const struct s3_answer *a)
{
	for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
		if (strcmp(a->code, meanings[i].code) == 0)
			return meanings[i];
	switch (a->status) {
	case 301: case 302: case 303: case 307: case 308: return (struct meaning){ "", ERR_STORAGE_GONE, S3_FINAL };
	case 401: return (struct meaning){ "", ERR_FORBIDDEN, S3_RENEW };
	case 403: return (struct meaning){ "", ERR_FORBIDDEN, S3_FINAL };
	case 404: return (struct meaning){ "", ERR_NOT_FOUND, S3_FINAL };
	case 408: return (struct meaning){ "", ERR_STORAGE_STALLED, S3_REPEAT };
	case 409: return (struct meaning){ "", ERR_CHECKPOINT_EXISTS, S3_REPEAT };
	case 412: return (struct meaning){ "", ERR_CHECKPOINT_EXISTS, S3_FINAL };
	case 416: return (struct meaning){ "", ERR_RANGE_INVALID, S3_FINAL };
	case 429: case 503: return (struct meaning){ "", ERR_STORAGE_STALLED, S3_SLOW };
	case 501: return (struct meaning){ "", ERR_UNSUPPORTED, S3_FINAL };
	case 507: return (struct meaning){ "", ERR_STORAGE_FULL, S3_FINAL };
	}
	return (struct meaning){ "", ERR_STORAGE_IO, a->status >= 500 ? S3_REPEAT : S3_FINAL };
}

enum err s3_answer_error(const struct s3_answer *a, bool reads, enum s3_verdict *verdict_out)
{
	struct meaning m = meaning_of(a);
	char extra[192] = "", status[40] = "";

	if (reads && m.error == ERR_CHECKPOINT_EXISTS) {
		m.error = ERR_CHECKPOINT_REPLACED;
		m.verdict = S3_FINAL;
	}
	if (m.error == ERR_STORAGE_GONE && a->region[0])
		snprintf(extra, sizeof extra, "; the bucket is in the region %s", a->region);
	else if (m.error == ERR_STORAGE_GONE && a->status >= 300 && a->status < 400)
		snprintf(extra, sizeof extra, "; redirects are not followed: configure the endpoint that holds the bucket");
	if (strcmp(a->code, "RequestTimeTooSkewed") == 0) {
		char now[CLOCK_TEXT_MAX];
		snprintf(extra, sizeof extra, "; the server's clock: %s, this host's: %s", a->date[0] ? a->date : "not told",
			 clock_text(clock_wall_ms(), now));
	}
	if (a->status < 200 || a->status >= 300)       /* a success that holds an error is told without its 200 */
		snprintf(status, sizeof status, " %ld", a->status);
	char id[S3_WORD_MAX + 16] = "";
	if (a->request_id[0])
		snprintf(id, sizeof id, " (request %s)", a->request_id);
	*verdict_out = m.verdict;
	err_record(m.error, 0, ERR_PLACE, "the object storage answered%s%s%s%s%s%s%s", status, a->code[0] ? " " : "", a->code,
		   a->message[0] ? ": " : "", a->message, id, extra);
	return m.error;
}
