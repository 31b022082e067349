/* s3_http.c: see s3_http.h. */
#include "store/s3_http.h"

#include <curl/curl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/num.h"
#include "io/copy.h"
#include "os/seg.h"

enum { LOCKS = CURL_LOCK_DATA_LAST, RECEIVE_BYTES = 256 << 10, SEND_BYTES = 256 << 10, WORDS_BYTES = 64 << 10, IDLE_S = 60,
       PROGRESS_BYTES = 64 << 10 };   /* fewer of them within stall_ms are none: a server that drips one byte at a time stalls */

struct connection {
	struct connection *next;
	CURL *easy;
};

struct s3_http {
	struct s3_http_config config;
	char *ca;
	CURLSH *share;                 /* names that were resolved, TLS sessions */
	pthread_mutex_t share_locks[LOCKS];
	pthread_mutex_t lock;
	pthread_cond_t freed;
	struct connection *idle;       /* under the lock, as `count`: the one that was used last is first */
	uint32_t count;
	atomic_uint_fast64_t sent, received, requests, connections;
};

/* ---- a transfer ---- */

struct transfer {
	struct s3_http *http;
	struct s3_exchange *x;
	CURL *easy;
	struct curl_slist *headers;
	size_t sent;
	uint64_t moved, progress;      /* bytes either way: now; when they last counted */
	int64_t progress_ms;
	int64_t stall_ms;
	bool begun, is_stalled, is_refused, is_cancelled;
	enum err failed;               /* of x->begin, or `into` shrank */
	struct err_info info;
	char said[CURL_ERROR_SIZE];
};

static bool is_success(const struct s3_answer *a)
{
	return a->status >= 200 && a->status < 300;
}

static size_t take_header(char *p, size_t size, size_t n, void *user)
{
	struct transfer *t = user;

	s3_answer_header(&t->x->answer, (struct str){ p, size * n });
	return size * n;
}

static void take_text(struct s3_exchange *x, const char *p, size_t n, size_t max)
{
	size_t room = x->text->len < max ? max - x->text->len : 0;

	x->is_long |= n > room;
	buf_put(x->text, p, num_min(n, room));
}

struct piece {
	struct digest_stream *digest;
	void *to;
	const void *from;
	size_t n;
};

static void copy_piece(void *user)
{
	const struct piece *p = user;

	if (p->digest)
		copy_hashed(p->digest, p->to, p->from, p->n);
	else
		memcpy(p->to, p->from, p->n);
}

/* Returns less than it got to end the transfer. */
static size_t take_body(char *p, size_t size, size_t count, void *user)
{
	struct transfer *t = user;
	struct s3_exchange *x = t->x;
	size_t n = size * count;

	if (!t->begun) {
		t->begun = true;
		(void)curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &x->answer.status);
		if (is_success(&x->answer) && x->begin && (t->failed = x->begin(x->user, &x->answer))) {
			t->info = *err_last();
			return 0;
		}
	}
	if (!is_success(&x->answer)) {
		if (x->text)
			take_text(x, p, n, num_min(x->text->max, WORDS_BYTES));
		return n;
	}
	atomic_fetch_add_explicit(&t->http->received, n, memory_order_relaxed);
	if (!x->into) {
		if (x->text)
			take_text(x, p, n, x->text->max);
		return x->is_long || (x->text && x->text->failed) ? 0 : n;
	}
	if (n > x->into_bytes - x->got) {
		x->is_long = true;
		return 0;
	}
	t->failed = seg_guard(copy_piece, &(struct piece){ x->digest, (char *)x->into + x->got, p, n });
	if (t->failed) {
		t->info = *err_last();
		return 0;
	}
	x->got += n;
	return n;
}

static size_t give_body(char *out, size_t size, size_t count, void *user)
{
	struct transfer *t = user;
	size_t n = num_min(size * count, t->x->body_bytes - t->sent);

	memcpy(out, (const char *)t->x->body + t->sent, n);
	t->sent += n;
	atomic_fetch_add_explicit(&t->http->sent, n, memory_order_relaxed);
	return n;
}

/* A kept connection that turns out to be dead is replaced, and the body sent from its begin. */
static int seek_body(void *user, curl_off_t offset, int origin)
{
	struct transfer *t = user;

	if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > t->x->body_bytes)
		return CURL_SEEKFUNC_FAIL;
	t->sent = (size_t)offset;
	return CURL_SEEKFUNC_OK;
}

static int on_progress(void *user, curl_off_t, curl_off_t down, curl_off_t, curl_off_t up)
{
	struct transfer *t = user;
	const struct s3_call *call = t->x->call;
	uint64_t moved = (uint64_t)down + (uint64_t)up;
	int64_t now = clock_mono_ms();

	t->moved = moved;
	if (moved - t->progress >= PROGRESS_BYTES || (moved && !t->progress)) {
		t->progress = moved;
		t->progress_ms = now;
	}
	t->is_stalled = now - t->progress_ms >= t->stall_ms;
	t->is_cancelled = call && call->go_on && !call->go_on(call->user, moved);
	return t->is_stalled || t->is_cancelled;
}

static curl_socket_t open_socket(void *user, curlsocktype, struct curl_sockaddr *a)
{
	struct transfer *t = user;
	const struct s3_http_config *c = &t->http->config;

	if (c->address_ok && !c->address_ok(c->user, &a->addr)) {
		t->is_refused = true;
		return CURL_SOCKET_BAD;
	}
	t->is_refused = false;
	atomic_fetch_add_explicit(&t->http->connections, 1, memory_order_relaxed);
	return socket(a->family, a->socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->protocol);
}

static FALLIBLE enum err add_header(struct transfer *t, const char *name, const char *value)
{
	CLEANUP(buf_free) struct buf line = BUF_INIT(S3_TOKEN_MAX + 256);

	buf_printf(&line, "%s:%s%s", name, *value ? " " : "", value);
	buf_putc(&line, '\0');
	TRY(buf_status(&line));
	struct curl_slist *longer = curl_slist_append(t->headers, (const char *)line.p);
	NEED(longer, "cannot ask a storage");
	t->headers = longer;
	return OK;
}

static CURLcode set_body(struct transfer *t)
{
	const struct s3_exchange *x = t->x;
	CURL *c = t->easy;
	CURLcode bad = CURLE_OK;

	if (strcmp(x->verb, "HEAD") == 0)
		return curl_easy_setopt(c, CURLOPT_NOBODY, 1L);
	if (strcmp(x->verb, "PUT") == 0) {
		bad = bad ?: curl_easy_setopt(c, CURLOPT_UPLOAD, 1L);
		bad = bad ?: curl_easy_setopt(c, CURLOPT_INFILESIZE_LARGE, (curl_off_t)x->body_bytes);
		bad = bad ?: curl_easy_setopt(c, CURLOPT_UPLOAD_BUFFERSIZE, (long)SEND_BYTES);
		bad = bad ?: curl_easy_setopt(c, CURLOPT_READFUNCTION, give_body);
		bad = bad ?: curl_easy_setopt(c, CURLOPT_READDATA, t);
		bad = bad ?: curl_easy_setopt(c, CURLOPT_SEEKFUNCTION, seek_body);
		return bad ?: curl_easy_setopt(c, CURLOPT_SEEKDATA, t);
	}
	if (strcmp(x->verb, "POST") == 0) {
		bad = bad ?: curl_easy_setopt(c, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)x->body_bytes);
		return bad ?: curl_easy_setopt(c, CURLOPT_POSTFIELDS, x->body ? x->body : "");
	}
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HTTPGET, 1L);
	return bad ?: curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, x->verb);
}

static CURLcode set_manners(struct transfer *t)
{
	const struct s3_http_config *config = &t->http->config;
	CURL *c = t->easy;
	CURLcode bad = curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");

	bad = bad ?: curl_easy_setopt(c, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_USERAGENT, "dcpd/" DCPD_VERSION);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_PATH_AS_IS, 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_PROXY, "");
	bad = bad ?: curl_easy_setopt(c, CURLOPT_NETRC, (long)CURL_NETRC_IGNORED);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_QUICK_EXIT, 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_TCP_KEEPALIVE, 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_MAXAGE_CONN, (long)IDLE_S);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_BUFFERSIZE, (long)RECEIVE_BYTES);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT_MS, (long)config->connect_ms);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
	if (config->ca_pem.n) {
		struct curl_blob ca = { t->http->ca, config->ca_pem.n, CURL_BLOB_NOCOPY };
		bad = bad ?: curl_easy_setopt(c, CURLOPT_CAINFO_BLOB, &ca);
	}
	return bad;
}

static FALLIBLE enum err set_up(struct transfer *t, int64_t left_ms)
{
	const struct s3_exchange *x = t->x;
	CURL *c = t->easy;

	for (size_t i = 0; i < x->header_count; i++)
		TRY(add_header(t, x->headers[i].name, x->headers[i].value));
	TRY(add_header(t, "Expect", ""));
	TRY(add_header(t, "Accept", ""));
	curl_easy_reset(c);
	CURLcode bad = set_manners(t);
	bad = bad ?: set_body(t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_URL, x->url);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_FRESH_CONNECT, (long)x->is_once);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_FORBID_REUSE, (long)x->is_once);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, (long)left_ms);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HTTPHEADER, t->headers);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_SHARE, t->http->share);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, take_body);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_WRITEDATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, take_header);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HEADERDATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_XFERINFODATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_OPENSOCKETFUNCTION, open_socket);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_OPENSOCKETDATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_ERRORBUFFER, t->said);
	if (!bad)
		return OK;
	return bad == CURLE_OUT_OF_MEMORY ? ERR(NO_MEMORY, "cannot ask a storage") :
					    ERR(SYSTEM, "cannot ask a storage: %s", curl_easy_strerror(bad));
}

/* The text: a storage's host is no secret to who may use the storage. */
static enum err failure(const struct transfer *t, CURLcode code, enum s3_outcome *outcome)
{
	const char *peer = t->http->config.peer;
	const char *said = t->said[0] ? t->said : curl_easy_strerror(code);

	*outcome = S3_IMPOSSIBLE;
	if (t->failed) {
		err_restore(&t->info);
		return t->failed;
	}
	if (t->is_cancelled)
		return ERR(CANCELLED, "the transfer was cancelled");
	if (t->is_refused && code == CURLE_COULDNT_CONNECT)
		return ERR(STORAGE_GONE, "%s has an address that dcpd must not connect to: see its configuration", peer);
	switch (code) {
	case CURLE_OUT_OF_MEMORY:
		return ERR(NO_MEMORY, "cannot ask a storage");
	case CURLE_PEER_FAILED_VERIFICATION: case CURLE_SSL_CACERT_BADFILE: case CURLE_SSL_ISSUER_ERROR:
		return ERR(STORAGE_GONE, "%s's certificate is not trusted: %s", peer, said);
	case CURLE_COULDNT_RESOLVE_HOST: case CURLE_COULDNT_CONNECT:
		*outcome = S3_UNSENT;
		return ERR(STORAGE_GONE, "%s cannot be reached: %s", peer, said);
	case CURLE_SSL_CONNECT_ERROR:
		*outcome = S3_UNSENT;
		return ERR(STORAGE_GONE, "no TLS with %s: %s", peer, said);
	case CURLE_OPERATION_TIMEDOUT:
		*outcome = clock_mono_ms() >= t->x->deadline_ms ? S3_LATE : S3_UNSENT;
		return ERR(STORAGE_STALLED, "%s does not answer in time: %s", peer, said);
	case CURLE_ABORTED_BY_CALLBACK:
		*outcome = S3_STALLED;
		return ERR(STORAGE_STALLED, "almost no bytes moved for %jd s, after %ju bytes: %s stalls", (intmax_t)(t->stall_ms / 1000),
			   (uintmax_t)t->moved, peer);
	default:
		*outcome = S3_BROKEN;
		return ERR(STORAGE_IO, "the connection to %s broke: %s", peer, said);
	}
}

static enum err judge(struct transfer *t, CURLcode code, enum s3_outcome *outcome)
{
	struct s3_exchange *x = t->x;

	if (x->text && x->text->failed == ERR_NO_MEMORY)
		return ERR(NO_MEMORY, "cannot read a storage's answer");
	if (code == CURLE_WRITE_ERROR && x->is_long && !t->failed)
		code = CURLE_OK;               /* the caller says what a body that is too long means */
	if (code != CURLE_OK)
		return failure(t, code, outcome);
	(void)curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &x->answer.status);
	if (!t->begun && is_success(&x->answer) && x->begin)   /* an empty body */
		TRY(x->begin(x->user, &x->answer));
	*outcome = S3_ANSWERED;
	return OK;
}

/* ---- connections ---- */

static FALLIBLE enum err take_connection(struct s3_http *h, int64_t deadline_ms, struct connection **out)
{
	struct timespec until = clock_mono_in(num_max(1, (uint64_t)(deadline_ms - clock_mono_ms())));
	struct connection *c = NULL;
	int waited = 0;

	pthread_mutex_lock(&h->lock);
	while (!h->idle && h->count >= h->config.connections && waited == 0)
		waited = pthread_cond_timedwait(&h->freed, &h->lock, &until);
	c = h->idle;
	if (c)
		h->idle = c->next;
	bool more = !c && h->count < h->config.connections;
	h->count += more;
	pthread_mutex_unlock(&h->lock);
	if (more) {
		c = mem_zalloc(1, sizeof *c);
		if (c)
			c->easy = curl_easy_init();
		if (!c || !c->easy) {
			mem_free(c);
			pthread_mutex_lock(&h->lock);
			h->count--;
			pthread_cond_signal(&h->freed);
			pthread_mutex_unlock(&h->lock);
			return ERR(NO_MEMORY, "cannot ask a storage");
		}
	}
	if (!c)
		return ERR(STORAGE_STALLED, "all %u connections to %s are in use", h->config.connections, h->config.peer);
	*out = c;
	return OK;
}

static void give_connection(struct s3_http *h, struct connection *c)
{
	pthread_mutex_lock(&h->lock);
	c->next = h->idle;
	h->idle = c;
	pthread_cond_signal(&h->freed);
	pthread_mutex_unlock(&h->lock);
}

enum err s3_http_do(struct s3_http *h, struct s3_exchange *x, enum s3_outcome *outcome)
{
	struct transfer t = { .http = h, .x = x, .stall_ms = x->stall_ms ? x->stall_ms : h->config.stall_ms };
	struct connection *c = NULL;

	*outcome = S3_LATE;
	if (clock_mono_ms() >= x->deadline_ms)
		return ERR(STORAGE_STALLED, "there was no time left to ask the object storage");
	TRY(take_connection(h, x->deadline_ms, &c));
	*outcome = S3_IMPOSSIBLE;
	x->answer = (struct s3_answer){ 0 };
	x->got = 0;
	x->is_long = false;
	t.easy = c->easy;
	t.progress_ms = clock_mono_ms();
	enum err e = set_up(&t, (int64_t)num_max(1, (uint64_t)(x->deadline_ms - t.progress_ms)));
	if (!e) {
		atomic_fetch_add_explicit(&h->requests, 1, memory_order_relaxed);
		e = judge(&t, curl_easy_perform(c->easy), outcome);
	}
	(void)curl_easy_setopt(c->easy, CURLOPT_HTTPHEADER, NULL);
	(void)curl_easy_setopt(c->easy, CURLOPT_ERRORBUFFER, NULL);
	curl_slist_free_all(t.headers);
	give_connection(h, c);
	return e;
}

/* ---- the pool ---- */

static void share_lock(CURL *, curl_lock_data which, curl_lock_access, void *user)
{
	pthread_mutex_lock(&((struct s3_http *)user)->share_locks[which]);
}

static void share_unlock(CURL *, curl_lock_data which, void *user)
{
	pthread_mutex_unlock(&((struct s3_http *)user)->share_locks[which]);
}

static FALLIBLE enum err new_share(struct s3_http *h)
{
	h->share = curl_share_init();
	NEED(h->share, "cannot use a storage");
	CURLSHcode bad = curl_share_setopt(h->share, CURLSHOPT_LOCKFUNC, share_lock);
	bad = bad ?: curl_share_setopt(h->share, CURLSHOPT_UNLOCKFUNC, share_unlock);
	bad = bad ?: curl_share_setopt(h->share, CURLSHOPT_USERDATA, h);
	bad = bad ?: curl_share_setopt(h->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_DNS);
	bad = bad ?: curl_share_setopt(h->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
	return bad ? ERR(SYSTEM, "libcurl cannot be used: %s", curl_share_strerror(bad)) : OK;
}

static void once(void)
{
	(void)curl_global_init(CURL_GLOBAL_DEFAULT);
}

FALLIBLE enum err s3_http_new(const struct s3_http_config *config, struct s3_http **out)
{
	static pthread_once_t at_first = PTHREAD_ONCE_INIT;
	struct s3_http *h = mem_zalloc(1, sizeof *h);
	pthread_condattr_t attr;
	enum err e;

	NEED(h, "cannot use a storage");
	pthread_once(&at_first, once);
	h->config = *config;
	h->config.peer = config->peer ? config->peer : "the object storage";
	pthread_mutex_init(&h->lock, NULL);
	for (int i = 0; i < LOCKS; i++)
		pthread_mutex_init(&h->share_locks[i], NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&h->freed, &attr);
	pthread_condattr_destroy(&attr);
	h->ca = mem_strndup(config->ca_pem.n ? config->ca_pem.p : "", config->ca_pem.n);
	e = h->ca ? new_share(h) : ERR(NO_MEMORY, "cannot use a storage");
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		s3_http_free(h);
		return e;
	}
	*out = h;
	return OK;
}

void s3_http_free(struct s3_http *h)
{
	if (!h)
		return;
	while (h->idle) {
		struct connection *c = h->idle;
		h->idle = c->next;
		curl_easy_cleanup(c->easy);
		mem_free(c);
	}
	(void)curl_share_cleanup(h->share);
	for (int i = 0; i < LOCKS; i++)
		pthread_mutex_destroy(&h->share_locks[i]);
	pthread_cond_destroy(&h->freed);
	pthread_mutex_destroy(&h->lock);
	mem_free(h->ca);
	mem_free(h);
}

void s3_http_count(const struct s3_http *h, struct s3_counts *out)
{
	out->sent_bytes = atomic_load(&h->sent);
	out->received_bytes = atomic_load(&h->received);
	out->requests = atomic_load(&h->requests);
	out->connections = atomic_load(&h->connections);
}

uint16_t s3_http_port(const char *endpoint)
{
	const char *host = strstr(endpoint, "://"), *colon;
	uint64_t port;

	host = host ? host + 3 : endpoint;
	colon = strchr(host[0] == '[' && strchr(host, ']') ? strchr(host, ']') : host, ':');
	if (colon && str_to_u64((struct str){ colon + 1, strspn(colon + 1, "0123456789") }, &port) && port && port <= UINT16_MAX)
		return (uint16_t)port;
	return str_starts(str_of(endpoint), "http://") ? 80 : 443;
}
