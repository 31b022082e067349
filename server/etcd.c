/* etcd.c: see etcd.h. */
#include "server/etcd.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/courier.h"

enum { URLS_MAX = 16, URL_MAX = 300, TOKEN_MAX = 1024, ANSWER_MAX = 16 << 20, KEY_MAX = 1024, CONNECT_MS = 1500, WHOLE_MS = 4000,
       UNAUTHENTICATED = 16 };

/* A question on its way; with a user, a token may have to be asked for before it. */
struct call {
	struct courier_parcel parcel;          /* the first member */
	struct call *prev, *next;
	struct etcd *etcd;
	const char *path;
	char *body;
	char url[URL_MAX + 64], authorization[TOKEN_MAX + 32];
	const char *headers[2];
	struct buf answer;
	uint32_t tried;                        /* servers that did not answer */
	bool asks_token, had_token;            /* asks_token: now; had_token: one was asked for and got */
	etcd_fn fn;
	void *user;
};

struct etcd {
	struct loop *loop;
	struct courier *courier;
	struct courier_tls tls;
	char urls[URLS_MAX][URL_MAX];
	uint32_t url_count, current;
	char *login;                           /* {"name","password"}; NULL: etcd asks for none */
	char token[TOKEN_MAX];                 /* ""; none yet */
	struct call *calls;
};

/* ---- configuration ---- */

/* "USER:PASSWORD" of a file that nobody else reads. */
static FALLIBLE enum err read_login(struct etcd *e, const char *path)
{
	char line[512];
	FILE *f = fopen(path, "re");

	if (!f)
		return ERR_SYS(CONFIG, "cluster-user: cannot read %s", path);
	bool got = fgets(line, sizeof line, f) != NULL;
	fclose(f);
	char *colon = got ? strchr(line, ':') : NULL;
	if (!colon || colon == line)
		return ERR(CONFIG, "cluster-user: the first line of %s is not USER:PASSWORD", path);
	colon[1 + strcspn(colon + 1, "\r\n")] = '\0';
	json_t *doc = json_pack("{s:s%, s:s}", "name", line, (size_t)(colon - line), "password", colon + 1);
	e->login = jtext_of(doc);
	json_decref(doc);
	explicit_bzero(line, sizeof line);
	return e->login ? OK : ERR(CONFIG, "cluster-user: %s is not UTF-8", path);
}

/* config_cluster.c has checked the form. */
static FALLIBLE enum err read_urls(struct etcd *e, const char *text)
{
	while (*text) {
		size_t n = strcspn(text, ",");
		size_t kept = n && text[n - 1] == '/' ? n - 1 : n;
		if (e->url_count == URLS_MAX || kept >= URL_MAX)
			return ERR(CONFIG, "cluster: at most %d servers, of %d bytes each", URLS_MAX, URL_MAX - 1);
		snprintf(e->urls[e->url_count++], URL_MAX, "%.*s", (int)kept, text);
		text += n + (text[n] == ',');
	}
	return OK;
}

FALLIBLE enum err etcd_new(struct loop *loop, struct courier *courier, const struct config *config, struct etcd **out)
{
	struct etcd *e = mem_zalloc(1, sizeof *e);

	NEED(e, "cannot ask etcd");
	*out = e;
	e->loop = loop;
	e->courier = courier;
	e->tls = (struct courier_tls){ config->cluster_ca, config->cluster_cert, config->cluster_key };
	TRY(read_urls(e, config->cluster));
	return config->cluster_user ? read_login(e, config->cluster_user) : OK;
}

static void call_free(struct call *c)
{
	list2_remove(&c->etcd->calls, c);
	buf_free(&c->answer);
	mem_free(c->body);
	mem_free(c);
}

void etcd_free(struct etcd *e)
{
	if (!e)
		return;
	while (e->calls)
		call_free(e->calls);
	mem_free(e->login);
	mem_free(e);
}

/* ---- a call ---- */

static void transmit(struct call *c);

static void finish(struct call *c, enum err e, const json_t *answer)
{
	etcd_fn fn = c->fn;
	void *user = c->user;

	if (!answer && e == OK)
		e = ERR(CLUSTER_UNAVAILABLE, "etcd has not answered");
	call_free(c);
	fn(user, e, answer);
}

static void finish_later(void *user, enum err e)
{
	finish(user, e, NULL);
}

static void on_token(struct call *c, const json_t *doc)
{
	const char *token = json_string_value(json_object_get(doc, "token"));

	if (!token || strlen(token) >= sizeof c->etcd->token) {
		finish(c, ERR(CLUSTER_UNAVAILABLE, "etcd at %s gives no token to its user", c->etcd->urls[c->etcd->current]), NULL);
		return;
	}
	snprintf(c->etcd->token, sizeof c->etcd->token, "%s", token);
	c->had_token = true;
	transmit(c);
}

/* Another server may do better: this one cannot be reached, or has no leader. */
static bool try_next(struct call *c)
{
	struct etcd *e = c->etcd;

	e->current = (e->current + 1) % e->url_count;
	if (++c->tried >= e->url_count)
		return false;
	transmit(c);
	return true;
}

/* A token that etcd has forgotten (it keeps them for minutes, and not over a restart), or one of before users or roles were changed. */
static bool is_token_over(const json_t *doc, const char *said)
{
	return etcd_number(doc, "code") == UNAUTHENTICATED ||
	       (said && (strstr(said, "revision of auth store is old") || strstr(said, "user name is empty")));
}

static void on_refused(struct call *c, const json_t *doc)
{
	struct etcd *e = c->etcd;
	const char *said = json_string_value(json_object_get(doc, "error")), *url = e->urls[e->current];
	long status = c->parcel.status;

	if (e->login && !c->asks_token && !c->had_token && is_token_over(doc, said)) {
		e->token[0] = '\0';
		transmit(c);
		return;
	}
	enum err failed = said ? ERR(CLUSTER_UNAVAILABLE, "etcd at %s: %.200s", url, said) :
				 ERR(CLUSTER_UNAVAILABLE, "%s answers with HTTP %ld: it is no etcd with the JSON gateway", url, status);
	if ((status == 503 || status == 504) && try_next(c))
		return;
	finish(c, failed, NULL);
}

static void on_answer(struct courier_parcel *p)
{
	struct call *c = (struct call *)p;
	struct etcd *e = c->etcd;
	CLEANUP(json_decrefp) json_t *doc = NULL;
	struct str text = { (const char *)c->answer.p, c->answer.len };

	if (p->status == 0) {
		enum err failed = ERR(CLUSTER_UNAVAILABLE, "etcd at %s cannot be reached: %s", e->urls[e->current], p->error);
		if (!try_next(c))
			finish(c, failed, NULL);
		return;
	}
	if (jtext_parse(text, 0, &doc) != OK)
		err_clear();
	if (p->status != 200)
		on_refused(c, doc);
	else if (!json_is_object(doc))
		finish(c, ERR(CLUSTER_UNAVAILABLE, "what %s answers is no JSON: it is no etcd", e->urls[e->current]), NULL);
	else if (c->asks_token)
		on_token(c, doc);
	else
		finish(c, OK, doc);
}

static void transmit(struct call *c)
{
	struct etcd *e = c->etcd;
	const char *body = c->body;

	c->asks_token = e->login && !e->token[0];
	snprintf(c->url, sizeof c->url, "%s%s", e->urls[e->current], c->asks_token ? "/v3/auth/authenticate" : c->path);
	if (c->asks_token)
		body = e->login;
	snprintf(c->authorization, sizeof c->authorization, "Authorization: %s", e->token);
	c->headers[0] = e->token[0] ? c->authorization : NULL;
	buf_free(&c->answer);
	c->answer = BUF_INIT(ANSWER_MAX);
	c->parcel = (struct courier_parcel){ .url = c->url, .headers = c->headers, .body = str_of(body), .tls = &e->tls,
					     .connect_ms = CONNECT_MS, .whole_ms = WHOLE_MS, .may_reuse = true, .answer = &c->answer,
					     .fn = on_answer };
	courier_send(e->courier, &c->parcel);
}

void etcd_ask(struct etcd *e, const char *path, json_t *body, etcd_fn fn, void *user)
{
	struct call *c = mem_sure(sizeof *c);

	*c = (struct call){ .etcd = e, .path = path, .body = jtext_of(body), .fn = fn, .user = user, .answer = BUF_INIT(ANSWER_MAX) };
	json_decref(body);
	list2_add(&e->calls, c);
	if (c->body)
		transmit(c);
	else
		loop_later(e->loop, finish_later, c, ERR(NO_MEMORY, "cannot ask etcd"));
}

/* ---- transactions ---- */

static json_t *base64(const void *p, size_t n)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64 << 20);

	buf_base64(&b, p, n);
	return buf_status(&b) == OK ? json_stringn((const char *)b.p, b.len) : NULL;
}

static json_t *key_of(const char *key)
{
	return base64(key, strlen(key));
}

static FALLIBLE enum err decode(const json_t *row, const char *member, struct buf *out)
{
	const json_t *text = json_object_get(row, member);

	return buf_unbase64(out, (struct str){ json_string_value(text), json_string_length(text) });
}

/* A 64-bit number as etcd's gateway takes it. */
static json_t *number(int64_t n)
{
	char text[24];

	snprintf(text, sizeof text, "%jd", (intmax_t)n);
	return json_string(text);
}

static json_t *compare(const char *key, const char *target, const char *member, const char *result, int64_t revision)
{
	return json_pack("{s:o, s:s, s:s, s:o}", "key", key_of(key), "target", target, "result", result, member, number(revision));
}

json_t *etcd_absent(const char *key)
{
	return compare(key, "CREATE", "create_revision", "EQUAL", 0);
}

json_t *etcd_present(const char *key)
{
	return compare(key, "CREATE", "create_revision", "GREATER", 0);
}

json_t *etcd_made_at(const char *key, int64_t revision)
{
	return compare(key, "CREATE", "create_revision", "EQUAL", revision);
}

json_t *etcd_changed_at(const char *key, int64_t revision)
{
	return compare(key, "MOD", "mod_revision", "EQUAL", revision);
}

json_t *etcd_get(const char *key)
{
	return json_pack("{s:{s:o}}", "request_range", "key", key_of(key));
}

/* The first key behind all of them: a prefix ends in '/'. */
static void end_of(const char *prefix, char end[KEY_MAX])
{
	size_t n = strlen(prefix);

	must(n > 0 && n < KEY_MAX);
	memcpy(end, prefix, n + 1);
	end[n - 1]++;
}

json_t *etcd_range(const char *prefix, uint32_t limit)
{
	return etcd_range_behind(prefix, NULL, limit);
}

json_t *etcd_range_behind(const char *prefix, const json_t *row, uint32_t limit)
{
	CLEANUP(buf_free) struct buf key = BUF_INIT(ANSWER_MAX);
	char end[KEY_MAX];

	end_of(prefix, end);
	if (!row)
		buf_puts(&key, prefix);
	else if (decode(row, "key", &key) == OK)
		buf_putc(&key, '\0'); /* the next key */
	bool bad = buf_status(&key) != OK || key.len == 0;
	err_clear();
	return bad ? NULL : json_pack("{s:{s:o, s:o, s:o}}", "request_range", "key", base64(key.p, key.len), "range_end", key_of(end),
				      "limit", number(limit));
}

json_t *etcd_range_before(const char *prefix, const char *before, uint32_t limit)
{
	char end[KEY_MAX];

	end_of(prefix, end);
	if (before[0])
		snprintf(end, sizeof end, "%s%s", prefix, before);
	return json_pack("{s:{s:o, s:o, s:o, s:s, s:s}}", "request_range", "key", key_of(prefix), "range_end", key_of(end), "limit",
			 number(limit), "sort_order", "DESCEND", "sort_target", "KEY");
}

json_t *etcd_oldest(const char *prefix, uint32_t limit)
{
	char end[KEY_MAX];

	end_of(prefix, end);
	return json_pack("{s:{s:o, s:o, s:o, s:s, s:s}}", "request_range", "key", key_of(prefix), "range_end", key_of(end), "limit",
			 number(limit), "sort_order", "ASCEND", "sort_target", "CREATE");
}

json_t *etcd_count(const char *prefix)
{
	char end[KEY_MAX];

	end_of(prefix, end);
	return json_pack("{s:{s:o, s:o, s:b}}", "request_range", "key", key_of(prefix), "range_end", key_of(end), "count_only", 1);
}

json_t *etcd_delete_all(const char *prefix)
{
	char end[KEY_MAX];

	end_of(prefix, end);
	return json_pack("{s:{s:o, s:o}}", "request_delete_range", "key", key_of(prefix), "range_end", key_of(end));
}

json_t *etcd_put(const char *key, const json_t *value, int64_t lease)
{
	CLEANUP(mem_free_ptr) char *text = value ? jtext_of(value) : NULL;

	return json_pack("{s:{s:o, s:o, s:o}}", "request_put", "key", key_of(key), "value", text ? base64(text, strlen(text)) : NULL,
			 "lease", number(lease));
}

json_t *etcd_touch(const char *key)
{
	return json_pack("{s:{s:o, s:b, s:b}}", "request_put", "key", key_of(key), "ignore_value", 1, "ignore_lease", 1);
}

json_t *etcd_delete(const char *key)
{
	return json_pack("{s:{s:o}}", "request_delete_range", "key", key_of(key));
}

json_t *etcd_txn(json_t *comparisons, json_t *then, json_t *otherwise)
{
	return json_pack("{s:o, s:o, s:o}", "compare", comparisons, "success", then, "failure", otherwise);
}

/* ---- answers ---- */

bool etcd_succeeded(const json_t *answer)
{
	return json_is_true(json_object_get(answer, "succeeded"));
}

int64_t etcd_number(const json_t *object, const char *key)
{
	const json_t *value = json_object_get(object, key);
	uint64_t n = 0;

	if (json_is_integer(value))
		return json_integer_value(value);
	const char *text = json_string_value(value);
	return text && str_to_u64(str_of(text), &n) && n <= INT64_MAX ? (int64_t)n : 0;
}

static const json_t *range_at(const json_t *answer, size_t index)
{
	return json_object_get(json_array_get(json_object_get(answer, "responses"), index), "response_range");
}

const json_t *etcd_rows(const json_t *answer, size_t index)
{
	return json_object_get(range_at(answer, index), "kvs");
}

bool etcd_has_more(const json_t *answer, size_t index)
{
	return json_is_true(json_object_get(range_at(answer, index), "more"));
}

int64_t etcd_counted(const json_t *answer, size_t index)
{
	return etcd_number(range_at(answer, index), "count");
}

FALLIBLE enum err etcd_value(const json_t *row, json_t **out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	CLEANUP(json_decrefp) json_t *doc = NULL;

	TRY(decode(row, "value", &b));
	enum err e = jtext_parse((struct str){ (const char *)b.p, b.len }, JSON_ALLOW_NUL, &doc);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e || !json_is_object(doc))
		return ERR(CLUSTER_UNAVAILABLE, "etcd holds a value that is none of dcpd's: choose another --cluster-prefix");
	*out = move(doc);
	return OK;
}

FALLIBLE enum err etcd_key(const json_t *row, const char *prefix, struct buf *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(KEY_MAX);

	TRY(decode(row, "key", &b));
	struct str key = { (const char *)b.p, b.len };
	if (key.n == 0 || !str_starts(key, prefix)) /* etcd has no key without bytes */
		return ERR(CLUSTER_UNAVAILABLE, "etcd answers with a key that was not asked for");
	buf_put(out, key.p + strlen(prefix), key.n - strlen(prefix));
	return buf_status(out);
}
