/* s3_call.c: a request in S3's terms becomes HTTP requests: address, headers and signature; then repeats, until it is answered.
 *
 * Repeats follow "Exponential backoff and jitter" (full jitter) and the retry quota of AWS's SDKs: each repeat takes from a budget that all
 * calls share, each success gives back. When a storage is down, the budget runs out, and calls fail at once instead of adding load. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/num.h"
#include "store/s3_impl.h"

enum {
	BUDGET = 500, REPEAT_COSTS = 5, SUCCESS_GIVES = 1,
	PAUSE_MS = 50, PAUSE_SLOW_MS = 500, PAUSE_MAX_MS = 20000, NAP_MS = 500,
	SIGNED_BODY_MAX = 64 << 10,    /* larger ones are guarded by their checksum, whose header is signed */
	SLOW_STALL_MS = 120000,
};

/* ---- making an op ---- */

struct s3_op s3_op(struct s3 *s3, const struct s3_call *call, const char *verb, const char *key)
{
	return (struct s3_op){ .s3 = s3, .call = call, .verb = verb, .key = key };
}

void s3_op_query(struct s3_op *op, const char *name, const char *value)
{
	must(op->query_count < S3_QUERY_MAX);
	op->query[op->query_count++] = (struct s3_pair){ name, value };
}

void s3_op_header(struct s3_op *op, const char *name, const char *value)
{
	must(op->header_count < S3_HEADERS_MAX);
	op->headers[op->header_count++] = (struct s3_pair){ name, value };
}

void s3_op_condition(struct s3_op *op, struct s3_condition condition)
{
	op->x.is_once = condition.is != S3_IF_ANY;
	if (condition.is == S3_IF_NONE)
		s3_op_header(op, "if-none-match", "*");
	else if (condition.is == S3_IF_ETAG)
		s3_op_header(op, "if-match", condition.etag);
}

void s3_op_checksum(struct s3_op *op, uint32_t crc32, char room[16])
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(16);
	unsigned char big[4] = { (unsigned char)(crc32 >> 24), (unsigned char)(crc32 >> 16), (unsigned char)(crc32 >> 8),
				 (unsigned char)crc32 };

	buf_base64(&text, big, sizeof big);
	if (buf_status(&text) != OK)           /* no memory: it is sent unchecked */
		return;
	snprintf(room, 16, "%.*s", (int)text.len, (const char *)text.p);
	s3_op_header(op, "x-amz-checksum-crc32", room);
}

FALLIBLE enum err s3_op_etag(const struct s3_op *op, char *etag_out)
{
	if (!op->x.answer.etag[0])
		return ERR(STORAGE_IO, "the object storage's answer lacks an ETag");
	if (etag_out)
		memcpy(etag_out, op->x.answer.etag, S3_ETAG_MAX);
	return OK;
}

/* ---- one try ---- */

static FALLIBLE enum err put_path(const struct s3_op *op, struct buf *path)
{
	const struct s3 *s3 = op->s3;

	if (op->key && strlen(s3->prefix) + strlen(op->key) > S3_KEY_MAX)
		return ERR(NAME_INVALID, "a key of the object storage has more than %d bytes", S3_KEY_MAX);
	buf_puts(path, s3->path);
	if (op->key) {
		s3_sign_encode(path, str_of(s3->prefix), '/');
		s3_sign_encode(path, str_of(op->key), '/');
	}
	buf_putc(path, '\0');
	return buf_status(path);
}

static int header_order(const void *a, const void *b)
{
	return strcmp(((const struct s3_pair *)a)->name, ((const struct s3_pair *)b)->name);
}

static FALLIBLE enum err send_signed(struct s3_op *op, const char *path, const char *query, const struct s3_keys *keys,
				     enum s3_outcome *outcome)
{
	struct s3_pair headers[S3_HEADERS_MAX + 5];
	size_t n = op->header_count;
	char stamp[S3_STAMP_MAX], hash[S3_HASH_HEX], authorization[S3_AUTHORIZATION_MAX];
	struct s3 *s3 = op->s3;

	*outcome = S3_IMPOSSIBLE;
	memcpy(headers, op->headers, n * sizeof *headers);
	headers[n++] = (struct s3_pair){ "host", s3->host };
	if (keys->access[0]) {
		s3_sign_stamp(clock_wall_ms(), stamp);
		if (op->x.body_bytes <= SIGNED_BODY_MAX)
			s3_sign_hash(op->x.body ? op->x.body : "", op->x.body_bytes, hash);
		else
			snprintf(hash, sizeof hash, S3_UNSIGNED);
		headers[n++] = (struct s3_pair){ "x-amz-content-sha256", hash };
		headers[n++] = (struct s3_pair){ "x-amz-date", stamp };
		if (keys->token[0])
			headers[n++] = (struct s3_pair){ "x-amz-security-token", keys->token };
		qsort(headers, n, sizeof *headers, header_order);
		const struct s3_to_sign sign = { op->verb, path, query, headers, n, hash, s3->region, "s3", stamp };
		TRY(s3_sign(&sign, keys, authorization));
		headers[n++] = (struct s3_pair){ "authorization", authorization };
	}
	CLEANUP(buf_free) struct buf url = BUF_INIT(16 << 10);
	buf_printf(&url, "%s%s%s%s", s3->base, path, *query ? "?" : "", query);
	buf_putc(&url, '\0');
	TRY(buf_status(&url));
	op->x.verb = op->verb;
	op->x.url = (const char *)url.p;
	op->x.headers = headers;
	op->x.header_count = n;
	op->x.deadline_ms = op->deadline_ms;
	op->x.stall_ms = op->is_slow ? SLOW_STALL_MS : 0;
	op->x.call = op->call;
	return s3_http_do(s3->http, &op->x, outcome);
}

/* ---- repeats ---- */

static bool take_budget(struct s3 *s3)
{
	int now = __atomic_load_n(&s3->budget, __ATOMIC_RELAXED);

	while (now >= REPEAT_COSTS)
		if (__atomic_compare_exchange_n(&s3->budget, &now, now - REPEAT_COSTS, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return true;
	return false;
}

static void give_budget(struct s3 *s3)
{
	int now = __atomic_load_n(&s3->budget, __ATOMIC_RELAXED);

	while (now < BUDGET)
		if (__atomic_compare_exchange_n(&s3->budget, &now, now + SUCCESS_GIVES, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return;
}

/* False: no time for it, or the caller does not want to go on. */
static bool pause_before(const struct s3_op *op, uint32_t try, bool slow, uint64_t retry_after_s)
{
	uint64_t most = num_min(PAUSE_MAX_MS, (uint64_t)(slow ? PAUSE_SLOW_MS : PAUSE_MS) << num_min(try, 12)), random = 0;

	(void)!getrandom(&random, sizeof random, GRND_NONBLOCK);
	uint64_t ms = num_max(random % (most + 1), num_min(retry_after_s, 60) * 1000);
	int64_t until = clock_mono_ms() + (int64_t)ms;
	if (until >= op->deadline_ms)
		return false;
	for (int64_t left; (left = until - clock_mono_ms()) > 0;) {
		int64_t nap = left < NAP_MS ? left : NAP_MS;
		struct timespec t = { nap / 1000, nap % 1000 * 1000000 };
		(void)nanosleep(&t, NULL);
		if (op->call && op->call->go_on && !op->call->go_on(op->call->user, 0))
			return false;
	}
	return true;
}

/* An answer that is a success in its status line only: CompleteMultipartUpload and copies report errors in the body. */
static bool is_success(const struct s3_op *op)
{
	const struct s3_answer *a = &op->x.answer;

	return a->status >= 200 && a->status < 300 && !a->code[0];
}

static enum err judge(struct s3_op *op, enum s3_outcome outcome, enum err e, enum s3_verdict *verdict)
{
	struct s3_answer *a = &op->x.answer;
	struct buf *text = op->x.text;

	*verdict = S3_FINAL;
	if (outcome != S3_ANSWERED) {
		if (outcome == S3_UNSENT || outcome == S3_BROKEN || outcome == S3_STALLED)
			*verdict = S3_REPEAT;
		op->is_ambiguous |= outcome != S3_UNSENT && outcome != S3_IMPOSSIBLE;
		return e;
	}
	if (a->date_ms)
		__atomic_store_n(&op->s3->clock_ms, a->date_ms - clock_mono_ms(), __ATOMIC_RELAXED);
	if (op->is_slow || !is_success(op))
		s3_answer_words(a, text && text->len ? (struct str){ (const char *)text->p, text->len } : (struct str){ "", 0 });
	if (is_success(op) && op->x.is_long)
		return op->x.into ? ERR(STORAGE_IO, "the object storage sent more bytes than were asked for") :
				    ERR(LIMIT_EXCEEDED, "the object storage sent more than %zu bytes", text ? text->max : 0);
	if (is_success(op) && op->x.into && op->x.got != op->x.into_bytes) {
		*verdict = S3_REPEAT;
		return ERR(STORAGE_IO, "the object storage sent %zu bytes where %zu were asked for", op->x.got, op->x.into_bytes);
	}
	if (is_success(op))
		return OK;
	op->is_ambiguous |= a->status >= 500 || a->status < 300;
	return s3_answer_error(a, op->reads, verdict);
}

int64_t s3_now_ms(const struct s3 *s3)
{
	int64_t ahead = __atomic_load_n(&s3->clock_ms, __ATOMIC_RELAXED);

	return ahead ? clock_mono_ms() + ahead : clock_wall_ms();
}

enum err s3_run(struct s3_op *op)
{
	struct s3 *s3 = op->s3;
	CLEANUP(buf_free) struct buf path = BUF_INIT(4 * S3_KEY_MAX + 256), query = BUF_INIT(16 << 10), words = BUF_INIT(64 << 10);
	size_t begin = 0;
	struct s3_keys keys;
	enum err e = OK;
	bool renewed = false;

	TRY(put_path(op, &path));
	s3_sign_query(&query, op->query, op->query_count);
	buf_putc(&query, '\0');
	TRY(buf_status(&query));
	if (!op->deadline_ms)
		op->deadline_ms = op->call && op->call->deadline_ms ? op->call->deadline_ms : clock_mono_ms() + s3->call_ms;
	if (!op->x.text)
		op->x.text = &words;   /* for the words of an error */
	begin = op->x.text->len;
	for (uint32_t try = 0;; try++) {
		enum s3_outcome outcome;
		enum s3_verdict verdict;
		op->x.text->len = begin;
		e = s3_credentials_get(s3->credentials, op->deadline_ms, &keys);
		if (e)
			break;
		e = send_signed(op, (const char *)path.p, (const char *)query.p, &keys, &outcome);
		e = judge(op, outcome, e, &verdict);
		if (!e) {
			give_budget(s3);
			break;
		}
		if (verdict == S3_RENEW && !renewed) {
			renewed = true;
			if (!s3_credentials_renew(s3->credentials, &keys))
				break;
			continue;
		}
		if (op->is_once || verdict == S3_FINAL || verdict == S3_RENEW || try + 1 >= s3->tries || !take_budget(s3))
			break;
		struct err_info info = *err_last();
		bool on = pause_before(op, try, verdict == S3_SLOW, op->x.answer.retry_after_s);
		err_restore(&info);
		if (!on)
			break;
		__atomic_add_fetch(&s3->repeats, 1, __ATOMIC_RELAXED);
	}
	explicit_bzero(&keys, sizeof keys);
	op->is_ambiguous |= e && op->x.answer.status == 409; /* what it conflicts with may be an earlier try of its own */
	if (op->is_ambiguous && op->call && op->call->unsure_out)
		*op->call->unsure_out = true;
	if (op->x.text == &words)
		op->x.text = NULL;
	return e;
}
