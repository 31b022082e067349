/* cluster_images.c: state dicts of other nodes as sources of this node's jobs. A worker reads them over HTTP (worker/store/node_store.h),
 * with a key that is made of the cluster's secret and opens images alone: the secret itself stays in the coordinators. */
#include <assert.h>
#include <sodium.h>
#include <stdio.h>

#include "base/jtext.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/cluster_impl.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/parts.h"
#include "server/storage.h"

enum { KEY_BYTES = 32, KEY_TEXT = 2 * KEY_BYTES + 1, ASK_MS = 15000, PATH_BYTES = 1024 };

/* A key that tells nothing of the secret. what: n bytes. */
static void derive(const struct cluster *c, const char *what, size_t n, char out[KEY_TEXT])
{
	unsigned char key[KEY_BYTES];

	crypto_generichash(key, sizeof key, (const unsigned char *)what, n, (const unsigned char *)c->secret,
			   num_min(strlen(c->secret), crypto_generichash_KEYBYTES_MAX));
	sodium_bin2hex(out, KEY_TEXT, key, sizeof key);
	sodium_memzero(key, sizeof key);
}

static void make_key(const struct cluster *c, char out[KEY_TEXT])
{
	static const char what[] = "dcpd: images of sealed generations";

	derive(c, what, sizeof what, out);
}

FALLIBLE enum err cluster_make_secret(const struct cluster *c, const char *id, char out[CLUSTER_GROUP_SECRET_TEXT])
{
	static const char what[] = "dcpd: a load by several nodes: ";
	CLEANUP(buf_free) struct buf text = BUF_INIT(1024);

	static_assert((int)KEY_TEXT == (int)CLUSTER_GROUP_SECRET_TEXT);
	if (!c || !c->secret[0])
		return ERR(CLUSTER_UNAVAILABLE, "%s", c ? c->problem : "this daemon is in no cluster");
	buf_printf(&text, "%s%s", what, id);
	TRY(buf_status(&text));
	derive(c, (const char *)text.p, text.len, out);
	return OK;
}

bool cluster_is_reader(const struct cluster *c, const char *authorization)
{
	static const char scheme[] = "Bearer ";
	char key[KEY_TEXT];

	if (!c || !c->secret[0] || strncmp(authorization, scheme, sizeof scheme - 1) != 0 ||
	    strlen(authorization + sizeof scheme - 1) != KEY_TEXT - 1)
		return false;
	make_key(c, key);
	bool same = sodium_memcmp(authorization + sizeof scheme - 1, key, KEY_TEXT - 1) == 0;
	sodium_memzero(key, sizeof key);
	return same;
}

static FALLIBLE enum err find_node(const struct cluster *c, const char *name, const struct cluster_node **out)
{
	*out = NULL;
	if (!c)
		return ERR(NOT_FOUND, "there is no node \"%s\": this daemon is in no cluster", name);
	each(n, c->nodes.v, c->nodes.n)
		if (strcmp(n->name, name) == 0)
			*out = n;
	if (*out)
		return OK;
	return c->problem[0] ? ERR(CLUSTER_UNAVAILABLE, "%s", c->problem) : ERR(NOT_FOUND, "the cluster has no node \"%s\"", name);
}

/* The place is told apart by the key too: workers that were made with an older one are of no use. */
static FALLIBLE enum err describe(const struct cluster *c, const struct cluster_node *n, char place[512], json_t **options_out)
{
	const char *url = json_string_value(json_object_get(n->member, "url"));
	char key[KEY_TEXT];

	if (!url)
		return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" has no address", n->name);
	TRY(cluster_may_send(c, n));
	make_key(c, key);
	snprintf(place, 512, "node://%.400s#%.8s", url, key);
	*options_out = json_pack("{s:s, s:s, s:s, s:s*}", "node", n->name, "url", url, "reader", key, "ca", c->tls.ca);
	sodium_memzero(key, sizeof key);
	NEED(*options_out, "cannot name a node");
	return OK;
}

FALLIBLE enum err cluster_storage(struct server *s, const char *node, const char **storage_out)
{
	char name[STORAGE_NAME_MAX + 1], place[512];
	const struct cluster_node *n;
	json_t *options = NULL;
	struct storage *st;

	TRY(find_node(s->cluster, node, &n));
	TRY(describe(s->cluster, n, place, &options));
	snprintf(name, sizeof name, "@%s", node);
	TRY(storage_of_node(s->storages, name, place, options, &st));
	*storage_out = st->name;
	return OK;
}

/* ---- is it there? ---- */

struct question {
	struct cluster_errand errand;      /* the first member */
	struct buf path, caller;
	const char *lines[3];
	cluster_image_fn fn;
	void *user;
};

static void question_free(struct question *q)
{
	cluster_errand_free(&q->errand);
	buf_free(&q->path);
	buf_free(&q->caller);
	mem_free(q);
}

static void question_end(struct question *q, enum err e, int64_t generation)
{
	struct err_info info = *err_last();
	cluster_image_fn fn = q->fn;
	void *user = q->user;

	question_free(q);
	if (e)
		err_restore(&info);
	fn(user, e, generation);
}

/* Returns the node's own error, with its name. */
static FALLIBLE enum err said(const struct cluster_errand *x)
{
	CLEANUP(json_decrefp) json_t *doc = NULL;

	enum err bad = jtext_parse((struct str){ (const char *)x->answer.p, x->answer.len }, 0, &doc);
	if (bad || !json_object_get(doc, "code"))
		return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" answers with status %ld", x->node, x->status);
	enum err e = errdoc_restore(doc);
	struct err_info was = *err_last();
	err_record(e, 0, was.place, "node \"%s\": %s", x->node, was.text);
	return e;
}

static void on_answer(struct cluster_errand *x, enum err e)
{
	struct question *q = (struct question *)x;
	struct str text = cluster_errand_head(x, "Dcpd-Generation");
	uint64_t generation = 0;

	if (!e && x->status != 200 && x->status != 206)
		e = said(x);
	else if (!e && (!str_to_u64(text, &generation) || generation > INT64_MAX))
		e = ERR(CLUSTER_UNAVAILABLE, "node \"%s\" does not say which generation it has", x->node);
	question_end(q, e, (int64_t)generation);
}

static void put_name(struct buf *b, const char *name)
{
	for (const unsigned char *p = (const unsigned char *)name; *p; p++)
		buf_printf(b, "%%%02X", *p);
}

static FALLIBLE enum err build(struct question *q, const struct ref *ref, const struct principal *who)
{
	buf_puts(&q->path, "/v1/state-dicts/");
	put_name(&q->path, ref->name.p);
	buf_puts(&q->path, "/ranks/0/image");
	if (ref->generation >= 0)
		buf_printf(&q->path, "?generation=%jd", (intmax_t)ref->generation);
	buf_putc(&q->path, '\0');
	buf_printf(&q->caller, CLUSTER_CALLER_HEAD ": %u 1 %d -", (unsigned)who->uid, who->admin);
	buf_putc(&q->caller, '\0');
	TRY(buf_status(&q->path));
	return buf_status(&q->caller);
}

static void fail_later(void *user, enum err e)
{
	question_end(user, e, -1);
}

void cluster_ask_image(struct server *s, const struct ref *ref, const struct principal *who, cluster_image_fn fn, void *user)
{
	struct question *q = mem_sure(sizeof *q);
	const struct cluster_node *n;

	*q = (struct question){ .fn = fn, .user = user };
	q->errand.url = BUF_INIT(PATH_BYTES + 512);
	q->path = BUF_INIT(PATH_BYTES);
	q->caller = BUF_INIT(128);
	enum err e = find_node(s->cluster, ref->node.p, &n);
	e = e ? e : build(q, ref, who);
	if (e) {
		loop_later(s->loop, fail_later, q, e);
		return;
	}
	q->lines[0] = (const char *)q->caller.p;
	q->lines[1] = "Range: bytes=0-7";
	q->errand.method = "GET";
	q->errand.path = (const char *)q->path.p;
	q->errand.headers = q->lines;
	q->errand.whole_ms = ASK_MS;
	q->errand.fn = on_answer;
	cluster_send(s->cluster, n->name, &q->errand);
}
