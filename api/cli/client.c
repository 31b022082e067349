/* client.c: see client.h. */
#include "api/cli/client.h"

#include <curl/curl.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/mem.h"
#include "base/str.h"

enum { ANSWER_MAX = 1 << 30, CONNECT_S = 5, QUIET_S = 120 };

struct client {
	CURL *curl;
	char *socket;               /* NULL: TCP */
	char base[512], shown[512], token[512], why[CURL_ERROR_SIZE];
	bool unreachable;
	long limit_ms;              /* of a request; 0: none */
	json_t *problem;
};

volatile int client_stop;
bool client_json;

static bool socket_there(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && S_ISSOCK(st.st_mode);
}

/* $XDG_STATE_HOME/dcpd/dcpd.sock, the service's, and that of a daemon that root started by hand. */
static const char *find_socket(char *out, size_t n)
{
	static const char *const others[] = { "/run/dcpd/dcpd.sock", "/var/lib/dcpd/dcpd.sock", NULL };
	const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");

	if (state && state[0] == '/')
		snprintf(out, n, "%s/dcpd/dcpd.sock", state);
	else
		snprintf(out, n, "%s/.local/state/dcpd/dcpd.sock", home ? home : "");
	if (socket_there(out))
		return out;
	for (size_t i = 0; others[i]; i++)
		if (socket_there(others[i]))
			return others[i];
	return others[0];
}

static FALLIBLE enum err read_token(struct client *c)
{
	const char *token = getenv("DCPD_TOKEN"), *path = getenv("DCPD_TOKEN_FILE");
	char text[sizeof c->token] = "";

	if (!token && path) {
		FILE *f = fopen(path, "re");
		if (!f || !fgets(text, sizeof text, f)) {
			enum err e = ERR_SYS(INVALID_REQUEST, "cannot read DCPD_TOKEN_FILE %s", path);
			if (f)
				fclose(f);
			return e;
		}
		fclose(f);
		token = text;
	}
	snprintf(c->token, sizeof c->token, "%.*s", token ? (int)strcspn(token, " \t\r\n") : 0, token ? token : "");
	return OK;
}

static FALLIBLE enum err set_url(struct client *c, const char *url)
{
	char path[480];
	size_t n;

	if (!url)
		url = getenv("DCPD_URL");
	if (!url || !url[0]) {
		const char *found = find_socket(path, sizeof path);
		snprintf(c->shown, sizeof c->shown, "unix://%s", found);
	} else {
		snprintf(c->shown, sizeof c->shown, "%s", url);
	}
	if (str_starts(str_of(c->shown), "unix://")) {
		c->socket = mem_strdup(c->shown + 7);
		snprintf(c->base, sizeof c->base, "http://localhost");
		return c->socket ? OK : ERR(NO_MEMORY, "cannot keep the URL");
	}
	if (!str_starts(str_of(c->shown), "http://") && !str_starts(str_of(c->shown), "https://"))
		return ERR(INVALID_REQUEST, "DCPD_URL must be http://…, https://… or unix:///path, not %s", c->shown);
	snprintf(c->base, sizeof c->base, "%s", c->shown);
	/* The page's address may be given as it was printed: #token=… is the token. */
	char *hash = strchr(c->base, '#');
	if (hash && strncmp(hash, "#token=", 7) == 0)
		snprintf(c->token, sizeof c->token, "%s", hash + 7);
	if (hash)
		*hash = '\0';
	for (n = strlen(c->base); n > 0 && c->base[n - 1] == '/'; n--)
		c->base[n - 1] = '\0';
	return OK;
}

FALLIBLE enum err client_new(const char *url, struct client **out)
{
	struct client *c = mem_zalloc(1, sizeof *c);

	NEED(c, "cannot start");
	*out = c;
	if (curl_global_init(CURL_GLOBAL_DEFAULT) != 0 || !(c->curl = curl_easy_init()))
		return ERR(SYSTEM, "libcurl does not start");
	TRY(read_token(c));
	return set_url(c, url);
}

void client_free(struct client *c)
{
	if (!c)
		return;
	if (c->curl)
		curl_easy_cleanup(c->curl);
	json_decref(c->problem);
	mem_free(c->socket);
	memset(c->token, 0, sizeof c->token);
	mem_free(c);
}

const char *client_url(const struct client *c)
{
	return c->shown;
}

void client_limit(struct client *c, long ms)
{
	c->limit_ms = ms;
}

const json_t *client_problem(const struct client *c)
{
	return c->problem;
}

bool client_unreachable(const struct client *c)
{
	return c->unreachable;
}

void client_drop(struct answer *a)
{
	buf_free(&a->body);
	json_decref(a->json);
	*a = (struct answer){ 0 };
}

static void put_part(struct buf *b, const char *text)
{
	for (; *text; text++) {
		unsigned char c = (unsigned char)*text;
		bool plain = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || strchr("-._~", c);
		if (plain)
			buf_putc(b, c);
		else
			buf_printf(b, "%%%02X", c);
	}
}

void client_put(struct buf *b, const char *format, ...)
{
	size_t begin = b->len;
	va_list ap;

	va_start(ap, format);
	for (; *format; format++) {
		const char *text = *format == '%' ? va_arg(ap, const char *) : "";
		if (!text) {
			b->len = begin;
			break;
		}
		if (*format == '%')
			put_part(b, text);
		else
			buf_putc(b, (unsigned char)*format);
	}
	va_end(ap);
}

FALLIBLE enum err client_end(struct buf *b)
{
	buf_putc(b, '\0');
	return buf_status(b);
}

FALLIBLE enum err client_get_at(struct client *c, struct buf *path, struct answer *out)
{
	TRY(client_end(path));
	return client_get(c, (char *)path->p, out);
}

static size_t on_body(char *p, size_t size, size_t n, void *user)
{
	struct buf *b = user;

	buf_put(b, p, size * n);
	return buf_status(b) == OK ? size * n : 0;
}

static void take_head(const char *line, size_t n, const char *name, char *to, size_t max)
{
	size_t k = strlen(name);

	if (n <= k || strncasecmp(line, name, k) != 0)
		return;
	while (k < n && line[k] == ' ')
		k++;
	while (n > k && (line[n - 1] == '\r' || line[n - 1] == '\n'))
		n--;
	snprintf(to, max, "%.*s", (int)(n - k), line + k);
}

static size_t on_head(char *p, size_t size, size_t n, void *user)
{
	struct answer *a = user;

	take_head(p, size * n, "X-Dcpd-Dtype:", a->dtype, sizeof a->dtype);
	take_head(p, size * n, "X-Dcpd-Shape:", a->shape, sizeof a->shape);
	return size * n;
}

static int on_time(void *user, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
	(void)user, (void)a, (void)b, (void)c, (void)d;
	return client_stop;
}

/* The daemon's problem as this thread's latest error. */
static enum err take_problem(const json_t *p, long status)
{
	const json_t *rank = json_object_get(p, "rank"), *offset = json_object_get(p, "offset");
	enum err e = err_from_name(jval_text(p, "code"));

	if (!json_is_object(p))
		return ERR(PROTOCOL, "the daemon answered HTTP %ld and no problem+json", status);
	err_record(e, 0, ERR_PLACE, "%s", jval_text(p, "detail"));
	if (json_is_integer(rank))
		(void)err_at_rank(e, json_integer_value(rank));
	if (jval_text(p, "fqn")[0])
		(void)err_at_fqn(e, jval_text(p, "fqn"), strlen(jval_text(p, "fqn")));
	if (jval_text(p, "file")[0])
		(void)err_at_file(e, jval_text(p, "file"), json_is_integer(offset) ? json_integer_value(offset) : -1);
	return err_expected(e, jval_text(p, "expected"), jval_text(p, "actual"));
}

static FALLIBLE enum err prepare(struct client *c, const char *method, const char *path, struct curl_slist **heads)
{
	char url[16384], auth[600];
	CURL *h = c->curl;

	if ((size_t)snprintf(url, sizeof url, "%s%s", c->base, path) >= sizeof url)
		return ERR(INVALID_REQUEST, "the name is too long");
	curl_easy_reset(h);
	json_decref(c->problem);
	c->problem = NULL;
	curl_easy_setopt(h, CURLOPT_URL, url);
	curl_easy_setopt(h, CURLOPT_CUSTOMREQUEST, method);
	if (c->socket)
		curl_easy_setopt(h, CURLOPT_UNIX_SOCKET_PATH, c->socket);
	curl_easy_setopt(h, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(h, CURLOPT_PATH_AS_IS, 1L);
	curl_easy_setopt(h, CURLOPT_PROXY, "");
	curl_easy_setopt(h, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
	curl_easy_setopt(h, CURLOPT_TIMEOUT_MS, c->limit_ms);
	curl_easy_setopt(h, CURLOPT_ERRORBUFFER, c->why);
	curl_easy_setopt(h, CURLOPT_XFERINFOFUNCTION, on_time);
	curl_easy_setopt(h, CURLOPT_NOPROGRESS, 0L);
	snprintf(auth, sizeof auth, "Authorization: Bearer %s", c->token);
	if (c->token[0])
		*heads = curl_slist_append(*heads, auth);
	return OK;
}

static void put_key(struct curl_slist **heads)
{
	unsigned char random[16] = { 0 };
	char line[64] = "Idempotency-Key: ";

	if (getrandom(random, sizeof random, 0) != sizeof random)
		return;
	for (size_t i = 0; i < sizeof random; i++)
		snprintf(line + strlen(line), sizeof line - strlen(line), "%02x", random[i]);
	*heads = curl_slist_append(*heads, line);
}

static enum err transport_error(struct client *c, CURLcode code)
{
	if (client_stop)
		return ERR(CANCELLED, "interrupted");
	c->unreachable = true;
	return ERR(SYSTEM, "no daemon answers at %s: %s", c->shown, curl_easy_strerror(code));
}

static FALLIBLE enum err perform(struct client *c, const char *text, struct curl_slist **heads, struct answer *out)
{
	CURL *h = c->curl;

	if (text) {
		curl_easy_setopt(h, CURLOPT_POSTFIELDS, text);
		*heads = curl_slist_append(*heads, "Content-Type: application/json");
		put_key(heads);
	}
	*heads = curl_slist_append(*heads, "Accept: application/json, */*;q=0.5");
	curl_easy_setopt(h, CURLOPT_HTTPHEADER, *heads);
	curl_easy_setopt(h, CURLOPT_WRITEFUNCTION, on_body);
	curl_easy_setopt(h, CURLOPT_WRITEDATA, &out->body);
	curl_easy_setopt(h, CURLOPT_HEADERFUNCTION, on_head);
	curl_easy_setopt(h, CURLOPT_HEADERDATA, out);
	curl_easy_setopt(h, CURLOPT_LOW_SPEED_LIMIT, 1L);
	curl_easy_setopt(h, CURLOPT_LOW_SPEED_TIME, (long)QUIET_S);
	c->why[0] = '\0';
	c->unreachable = false;
	CURLcode code = curl_easy_perform(h);
	if (code != CURLE_OK)
		return transport_error(c, code);
	curl_easy_getinfo(h, CURLINFO_RESPONSE_CODE, &out->status);
	out->json = json_loadb(out->body.p ? (char *)out->body.p : "", out->body.len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
	c->problem = out->status >= 400 ? json_incref(out->json) : NULL;
	return out->status >= 400 ? take_problem(out->json, out->status) : OK;
}

FALLIBLE enum err client_call(struct client *c, const char *method, const char *path, const json_t *body, struct answer *out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(16 << 20);
	struct curl_slist *heads = NULL;

	if (body) {
		jtext_put(&text, body);
		buf_putc(&text, '\0');
		TRY(buf_status(&text));
	}
	*out = (struct answer){ .body = BUF_INIT(ANSWER_MAX) };
	enum err e = prepare(c, method, path, &heads);
	if (e == OK)
		e = perform(c, body ? (char *)text.p : NULL, &heads, out);
	curl_slist_free_all(heads);
	if (e) {
		CLEANUP(err_restore) struct err_info why = *err_last();
		client_drop(out);
	}
	return e;
}

FALLIBLE enum err client_get(struct client *c, const char *path, struct answer *out)
{
	return client_call(c, "GET", path, NULL, out);
}

struct saving {
	CURL *curl;
	int fd;
	struct buf problem;
	long status;
	enum err failed;
};

static size_t on_bytes(char *p, size_t size, size_t n, void *user)
{
	struct saving *s = user;

	curl_easy_getinfo(s->curl, CURLINFO_RESPONSE_CODE, &s->status);
	if (s->status >= 400) {
		buf_put(&s->problem, p, size * n);
		return size * n;
	}
	for (size_t at = 0; at < size * n;) {
		ssize_t done = write(s->fd, p + at, size * n - at);
		if (done < 0 && errno != EINTR) {
			s->failed = ERR_SYS(SYSTEM, "cannot write what comes");
			return 0;
		}
		at += done > 0 ? (size_t)done : 0;
	}
	return size * n;
}

FALLIBLE enum err client_save(struct client *c, const char *path, int fd)
{
	struct saving s = { .curl = c->curl, .fd = fd, .problem = BUF_INIT(1 << 20) };
	struct curl_slist *heads = NULL;
	enum err e = prepare(c, "GET", path, &heads);

	if (e == OK) {
		curl_easy_setopt(c->curl, CURLOPT_WRITEFUNCTION, on_bytes);
		curl_easy_setopt(c->curl, CURLOPT_WRITEDATA, &s);
		curl_easy_setopt(c->curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
		curl_easy_setopt(c->curl, CURLOPT_LOW_SPEED_TIME, (long)QUIET_S);
		CURLcode code = curl_easy_perform(c->curl);
		e = s.failed;
		if (!e && code != CURLE_OK)
			e = transport_error(c, code);
		if (!e && s.status >= 400) {
			json_t *p = json_loadb(s.problem.p ? (char *)s.problem.p : "", s.problem.len, JSON_ALLOW_NUL, NULL);
			e = take_problem(p, s.status);
			json_decref(p);
		}
	}
	curl_slist_free_all(heads);
	buf_free(&s.problem);
	return e;
}

struct lines {
	bool (*fn)(void *user, const char *line);
	void *user;
	struct buf rest;
	long status;
	bool ended;
	CURL *curl;
};

static size_t on_lines(char *p, size_t size, size_t n, void *user)
{
	struct lines *l = user;

	curl_easy_getinfo(l->curl, CURLINFO_RESPONSE_CODE, &l->status);
	for (size_t i = 0; i < size * n; i++) {
		if (p[i] != '\n' || l->status >= 400) {
			buf_putc(&l->rest, (unsigned char)p[i]);
			continue;
		}
		buf_putc(&l->rest, '\0');
		if (buf_status(&l->rest) != OK || (l->rest.len > 1 && !l->fn(l->user, (char *)l->rest.p))) {
			l->ended = true;
			return 0;
		}
		l->rest.len = 0;
	}
	return size * n;
}

FALLIBLE enum err client_lines(struct client *c, const char *path, bool (*fn)(void *user, const char *line), void *user)
{
	struct lines l = { .fn = fn, .user = user, .rest = BUF_INIT(1 << 20), .curl = c->curl };
	struct curl_slist *heads = NULL;
	enum err e = prepare(c, "GET", path, &heads);

	if (e == OK) {
		heads = curl_slist_append(heads, "Accept: application/x-ndjson");
		curl_easy_setopt(c->curl, CURLOPT_HTTPHEADER, heads);
		curl_easy_setopt(c->curl, CURLOPT_WRITEFUNCTION, on_lines);
		curl_easy_setopt(c->curl, CURLOPT_WRITEDATA, &l);
		curl_easy_setopt(c->curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
		curl_easy_setopt(c->curl, CURLOPT_LOW_SPEED_TIME, (long)QUIET_S);
		c->why[0] = '\0';
		c->unreachable = false;
		CURLcode code = curl_easy_perform(c->curl);
		if (code != CURLE_OK && !l.ended)
			e = transport_error(c, code);
		if (e == OK && l.status >= 400) {
			json_t *p = json_loadb(l.rest.p ? (char *)l.rest.p : "", l.rest.len, JSON_ALLOW_NUL, NULL);
			e = take_problem(p, l.status);
			json_decref(p);
		}
	}
	curl_slist_free_all(heads);
	buf_free(&l.rest);
	return e;
}
