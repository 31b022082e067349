/* courier.c: see courier.h. One thread runs libcurl's multi interface. A transfer has a connection of its own, which is not kept unless the
 * parcel says so: what one receiver does to its connection concerns no other transfer, and each address is checked. */
#include "server/courier.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/webhook_sign.h"

enum { ANSWER_MAX = 64 << 10, TURN_MS = 1000, URL_MAX = 2048, NETS_MAX = 64 };

/* A parcel on its way. */
struct transfer {
	struct transfer *next;
	struct courier *sender;
	struct courier_parcel *parcel;
	CURL *easy;
	struct curl_slist *headers;
	uint64_t answer_bytes;
	bool is_full;                          /* the parcel's buffer for the answer is */
	char said[CURL_ERROR_SIZE];
};

struct courier {
	struct loop *loop;
	CURLM *multi;
	pthread_t thread;
	pthread_mutex_t lock;
	struct courier_parcel *first, **last;  /* under the lock: not begun */
	struct transfer *under_way;            /* the thread's */
	bool running, stop;                    /* stop: under the lock */
	char *secrets;
	struct webhook_net nets[NETS_MAX];
	size_t net_count;
};

/* ---- one transfer ---- */

/* Returning 0 ends the transfer. */
static size_t take(struct transfer *t, struct buf *into, const char *p, size_t n)
{
	if (!into) {
		t->answer_bytes += n;
		return t->answer_bytes > ANSWER_MAX ? 0 : n;
	}
	buf_put(into, p, n);
	t->is_full = buf_status(into) != OK;
	return t->is_full ? 0 : n;
}

static size_t take_answer(char *p, size_t bytes, size_t count, void *user)
{
	struct transfer *t = user;

	return take(t, t->parcel->answer, p, bytes * count);
}

static size_t take_head(char *p, size_t bytes, size_t count, void *user)
{
	struct transfer *t = user;

	return take(t, t->parcel->heads, p, bytes * count);
}

static curl_socket_t open_socket(void *user, curlsocktype, struct curl_sockaddr *a)
{
	struct transfer *t = user;

	if (!webhook_address_ok(&a->addr, t->sender->nets, t->sender->net_count)) {
		t->parcel->is_refused = true;
		return CURL_SOCKET_BAD;
	}
	return socket(a->family, a->socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->protocol);
}

static void transfer_free(struct transfer *t)
{
	curl_easy_cleanup(t->easy);
	curl_slist_free_all(t->headers);
	mem_free(t);
}

static void tell(void *user)
{
	struct courier_parcel *p = user;

	p->fn(p);
}

static void parcel_end(struct courier_parcel *p)
{
	loop_post(p->courier->loop, tell, p);
}

static FALLIBLE enum err add_line(struct transfer *t, const char *line)
{
	struct curl_slist *longer = curl_slist_append(t->headers, line);
	NEED(longer, "cannot send a request");
	t->headers = longer;
	return OK;
}

static FALLIBLE enum err add_header(struct transfer *t, const char *name, const char *value)
{
	char line[512];

	snprintf(line, sizeof line, "%s: %s", name, value);
	return add_line(t, line);
}

static FALLIBLE enum err sign(struct transfer *t)
{
	unsigned char secret[WEBHOOK_SECRET_MAX];
	char signature[WEBHOOK_SIGNATURE_MAX];
	size_t n = 0;

	TRY(webhook_sign_secret(t->sender->secrets, t->parcel->secret, secret, &n));
	webhook_sign(secret, n, clock_wall_ms() / 1000, t->parcel->body, signature);
	explicit_bzero(secret, sizeof secret);
	return add_header(t, "Dcpd-Signature", signature);
}

static FALLIBLE enum err add_headers(struct transfer *t)
{
	struct courier_parcel *p = t->parcel;

	TRY(add_header(t, "Content-Type", "application/json"));
	TRY(add_header(t, "Expect", ""));
	for (const char *const *line = p->headers; line && *line; line++)
		TRY(add_line(t, *line));
	if (p->delivery)
		TRY(add_header(t, "Dcpd-Delivery", p->delivery));
	if (p->secret)
		TRY(sign(t));
	return OK;
}

static CURLcode set_tls(CURL *c, const struct courier_tls *tls)
{
	CURLcode bad = tls->ca ? curl_easy_setopt(c, CURLOPT_CAINFO, tls->ca) : CURLE_OK;

	bad = bad ?: tls->cert ? curl_easy_setopt(c, CURLOPT_SSLCERT, tls->cert) : CURLE_OK;
	return bad ?: tls->key ? curl_easy_setopt(c, CURLOPT_SSLKEY, tls->key) : CURLE_OK;
}

static CURLcode set_method(CURL *c, const struct courier_parcel *p)
{
	const char *method = p->method ? p->method : "POST";

	if (strcmp(method, "GET") == 0)
		return curl_easy_setopt(c, CURLOPT_HTTPGET, 1L);
	CURLcode bad = curl_easy_setopt(c, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)p->body.n);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_POSTFIELDS, p->body.p ? p->body.p : "");
	return bad ?: curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, method);
}

static FALLIBLE enum err set_up(struct transfer *t)
{
	struct courier_parcel *p = t->parcel;
	CURL *c = t->easy;

	TRY(add_headers(t));
	CURLcode bad = curl_easy_setopt(c, CURLOPT_URL, p->url);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
	bad = bad ?: set_method(c, p);
	bad = bad ?: p->tls ? set_tls(c, p->tls) : CURLE_OK;
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HTTPHEADER, t->headers);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_USERAGENT, "dcpd/" DCPD_VERSION);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_PROXY, "");
	bad = bad ?: curl_easy_setopt(c, CURLOPT_NETRC, (long)CURL_NETRC_IGNORED);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT_MS, p->connect_ms ? p->connect_ms : COURIER_CONNECT_MS);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, p->whole_ms ? p->whole_ms : COURIER_WHOLE_MS);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_FRESH_CONNECT, p->may_reuse ? 0L : 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_FORBID_REUSE, p->may_reuse ? 0L : 1L);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_QUICK_EXIT, 1L); /* a resolver that hangs is not waited for */
	bad = bad ?: curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, take_answer);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_WRITEDATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, take_head);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_HEADERDATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_OPENSOCKETFUNCTION, open_socket);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_OPENSOCKETDATA, t);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_ERRORBUFFER, t->said);
	bad = bad ?: curl_easy_setopt(c, CURLOPT_PRIVATE, t);
	if (!bad && curl_multi_add_handle(t->sender->multi, c) == CURLM_OK)
		return OK;
	return bad == CURLE_OUT_OF_MEMORY ? ERR(NO_MEMORY, "cannot send a request") :
					    ERR(SYSTEM, "cannot send a request: %s", curl_easy_strerror(bad));
}

static void begin(struct courier *s, struct courier_parcel *p)
{
	struct transfer *t = mem_zalloc(1, sizeof *t);
	enum err e = OK;

	if (t) {
		*t = (struct transfer){ .sender = s, .parcel = p, .easy = curl_easy_init() };
		e = t->easy ? set_up(t) : ERR(NO_MEMORY, "cannot send a request");
	} else {
		e = ERR(NO_MEMORY, "cannot send a request");
	}
	if (!e) {
		t->next = s->under_way;
		s->under_way = t;
		return;
	}
	snprintf(p->error, sizeof p->error, "%.*s", (int)sizeof p->error - 1, err_last()->text);
	if (t)
		transfer_free(t);
	parcel_end(p);
}

/* An answer counts by its status, even if it was longer than what is read of one. */
static void end(struct courier *s, struct transfer *t, CURLcode code)
{
	struct courier_parcel *p = t->parcel;
	struct transfer **at = &s->under_way;

	while (*at != t)
		at = &(*at)->next;
	*at = t->next;
	(void)curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &p->status);
	if (code == CURLE_WRITE_ERROR && p->status >= 200 && !t->is_full)
		code = CURLE_OK;
	if (code == CURLE_OK) {
		p->is_refused = false;
	} else {
		p->status = 0;
		p->is_refused = p->is_refused && code == CURLE_COULDNT_CONNECT;
		snprintf(p->error, sizeof p->error, "%s", p->is_refused ? "the address is not a public one: see dcpd's --webhook-allow" :
			 t->said[0] ? t->said : curl_easy_strerror(code));
	}
	(void)curl_multi_remove_handle(s->multi, t->easy);
	transfer_free(t);
	parcel_end(p);
}

/* ---- the thread ---- */

static struct courier_parcel *take_all(struct courier *s, bool *stop_out)
{
	pthread_mutex_lock(&s->lock);
	struct courier_parcel *p = s->first;
	s->first = NULL;
	s->last = &s->first;
	*stop_out = s->stop;
	pthread_mutex_unlock(&s->lock);
	return p;
}

static void *sender_thread(void *user)
{
	struct courier *s = user;
	bool stop = false;
	int n, left;

	for (;;) {
		for (struct courier_parcel *p = take_all(s, &stop), *next; p; p = next) {
			next = p->next;
			if (!stop)
				begin(s, p);
		}
		if (stop)
			break;
		(void)curl_multi_perform(s->multi, &n);
		for (CURLMsg *m; (m = curl_multi_info_read(s->multi, &left));) {
			struct transfer *t = NULL;
			if (m->msg == CURLMSG_DONE && curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&t) == CURLE_OK && t)
				end(s, t, m->data.result);
		}
		(void)curl_multi_poll(s->multi, NULL, 0, TURN_MS, NULL);
	}
	while (s->under_way) {
		struct transfer *t = s->under_way;
		s->under_way = t->next;
		(void)curl_multi_remove_handle(s->multi, t->easy);
		transfer_free(t);
	}
	return NULL;
}

static FALLIBLE enum err start_thread(struct courier *s)
{
	if (s->running)
		return OK;
	if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) /* not at the daemon's start: most send none */
		return ERR(SYSTEM, "libcurl cannot be used");
	s->multi = s->multi ? s->multi : curl_multi_init();
	NEED(s->multi, "cannot send requests");
	if (pthread_create(&s->thread, NULL, sender_thread, s) != 0)
		return ERR(SYSTEM, "cannot start the thread that sends requests");
	s->running = true;
	return OK;
}

void courier_send(struct courier *s, struct courier_parcel *p)
{
	p->courier = s;
	p->next = NULL;
	p->status = 0;
	p->is_refused = false;
	p->error[0] = '\0';
	if (start_thread(s)) {
		snprintf(p->error, sizeof p->error, "%.*s", (int)sizeof p->error - 1, err_last()->text);
		parcel_end(p);
		return;
	}
	pthread_mutex_lock(&s->lock);
	*s->last = p;
	s->last = &p->next;
	pthread_mutex_unlock(&s->lock);
	(void)curl_multi_wakeup(s->multi);
}

FALLIBLE enum err courier_new(struct loop *loop, const char *secrets, const char *const *allowed, size_t count,
				     struct courier **out)
{
	struct courier *s = mem_zalloc(1, sizeof *s);
	enum err e = OK;

	NEED(s, "cannot send requests");
	*s = (struct courier){ .loop = loop, .secrets = mem_strdup(secrets) };
	s->last = &s->first;
	pthread_mutex_init(&s->lock, NULL);
	if (!s->secrets)
		e = ERR(NO_MEMORY, "cannot send requests");
	for (size_t i = 0; i < count && i < NETS_MAX && !e; i++)
		e = webhook_address_parse(allowed[i], &s->nets[s->net_count++]);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		courier_free(s);
		return e;
	}
	*out = s;
	return OK;
}

FALLIBLE enum err courier_new_anywhere(struct loop *loop, struct courier **out)
{
	static const char *const anywhere[] = { "0.0.0.0/0", "::/0" };

	return courier_new(loop, "", anywhere, sizeof anywhere / sizeof *anywhere, out);
}

void courier_free(struct courier *s)
{
	if (!s)
		return;
	if (s->running) {
		pthread_mutex_lock(&s->lock);
		s->stop = true;
		pthread_mutex_unlock(&s->lock);
		(void)curl_multi_wakeup(s->multi);
		pthread_join(s->thread, NULL);
	}
	if (s->multi)
		curl_multi_cleanup(s->multi);
	pthread_mutex_destroy(&s->lock);
	mem_free(s->secrets);
	mem_free(s);
}

static FALLIBLE enum err check_parts(CURLU *u, struct str url)
{
	static const struct {
		CURLUPart part;
		const char *what;
	} none[] = { { CURLUPART_USER, "a user" }, { CURLUPART_PASSWORD, "a password" }, { CURLUPART_FRAGMENT, "a fragment" } };
	char *text = NULL;

	if (curl_url_set(u, CURLUPART_URL, url.p, CURLU_NON_SUPPORT_SCHEME) != CURLUE_OK)
		return ERR(VALIDATION_FAILED, "is no URL");
	if (curl_url_get(u, CURLUPART_SCHEME, &text, 0) != CURLUE_OK)
		return ERR(VALIDATION_FAILED, "is no URL");
	bool known = strcmp(text, "http") == 0 || strcmp(text, "https") == 0;
	curl_free(text);
	if (!known)
		return ERR(VALIDATION_FAILED, "must begin with http:// or https://");
	for (size_t i = 0; i < sizeof none / sizeof *none; i++)
		if (curl_url_get(u, none[i].part, &text, 0) == CURLUE_OK) {
			curl_free(text);
			return ERR(VALIDATION_FAILED, "must not have %s", none[i].what);
		}
	return OK;
}

FALLIBLE enum err courier_check_url(struct str url)
{
	if (url.n == 0 || url.n > URL_MAX || strlen(url.p) != url.n)
		return ERR(VALIDATION_FAILED, "must have 1 to %d bytes", URL_MAX);
	for (size_t i = 0; i < url.n; i++)
		if ((unsigned char)url.p[i] <= ' ' || (unsigned char)url.p[i] >= 0x7f)
			return ERR(VALIDATION_FAILED, "must be of printable ASCII without spaces: encode other bytes as %%XX");
	CURLU *u = curl_url();
	NEED(u, "cannot look at a URL");
	enum err e = check_parts(u, url);
	curl_url_cleanup(u);
	return e;
}
