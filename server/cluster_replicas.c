/* cluster_replicas.c: which nodes have copies of a checkpoint, or of those of a run, in their memory (neighbours.h). All that are here are
 * asked at once, this one too; their answers are short, so who is silent for ASK_MS has none: the storage has the checkpoint, or nobody.
 * A caller that has found the checkpoint elsewhere waits GRACE_MS at most, and not for nodes that were silent a moment ago. */
#include <stdio.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/cluster_impl.h"
#include "server/principal.h"
#include "spec/ref.h"

enum { ASK_MS = 3000, GRACE_MS = 1000, SILENT_MS = 10000, PATH_BYTES = 16 << 10, REPLICAS_MAX = 64 };

struct cluster_search {
	struct server *server;
	struct inquiry *inquiries;         /* under way */
	bool begun;                        /* all are under way, or were */
	bool enough;                       /* the caller waits no longer than it must */
	bool told;
	int64_t began_ms;                  /* monotone clock */
	struct loop_timer *grace;
	json_t *list;
	char silent[CLUSTER_NAME_MAX + 1];     /* one of those that did not answer; empty: there is none */
	cluster_replicas_fn fn;
	void *user;
};

struct inquiry {
	struct cluster_errand errand;      /* the first member */
	struct inquiry *next;
	struct cluster_search *search;
	bool was_silent;                   /* the node has not answered the last time */
	struct buf path, caller;
	const char *lines[2];
};

static void inquiry_free(struct inquiry *q)
{
	cluster_errand_free(&q->errand);
	buf_free(&q->path);
	buf_free(&q->caller);
	mem_free(q);
}

/* ---- nodes that do not answer ---- */

static bool is_silent(const struct cluster *c, const char *node)
{
	for (int i = 0; i < CLUSTER_SILENT_MAX; i++)
		if (strcmp(c->silent[i].node, node) == 0)
			return clock_mono_ms() < c->silent[i].until_ms;
	return false;
}

/* until_ms 0: it answers. */
static void note_silent(struct cluster *c, const char *node, int64_t until_ms)
{
	struct cluster_silent *at = &c->silent[0];

	for (int i = 0; i < CLUSTER_SILENT_MAX; i++) {
		struct cluster_silent *one = &c->silent[i];
		if (strcmp(one->node, node) == 0) {
			one->until_ms = until_ms;
			return;
		}
		at = one->until_ms < at->until_ms ? one : at;
	}
	if (until_ms)
		*at = (struct cluster_silent){ .until_ms = until_ms };
	if (until_ms)
		snprintf(at->node, sizeof at->node, "%s", node);
}

/* ---- a search ---- */

/* The list may lack copies that the node has. */
static void lacks(struct cluster_search *s, const char *node)
{
	snprintf(s->silent, sizeof s->silent, "%s", node);
}

static bool is_over(const struct cluster_search *s)
{
	if (!s->begun)
		return false;
	if (!s->inquiries || (s->enough && clock_mono_ms() - s->began_ms >= GRACE_MS))
		return true;
	for (const struct inquiry *q = s->inquiries; q; q = q->next)
		if (!q->was_silent)
			return false;
	return s->enough;
}

/* Tells the caller once; the search itself ends with its last inquiry. */
static void look(struct cluster_search *s)
{
	bool was_told = s->told;

	if (is_over(s) && !was_told) {
		s->told = true;
		loop_timer_stop(&s->grace);
		for (const struct inquiry *q = s->inquiries; q; q = q->next) {
			note_silent(s->server->cluster, q->errand.node, clock_mono_ms() + SILENT_MS);
			lacks(s, q->errand.node);
		}
	}
	char silent[CLUSTER_NAME_MAX + 1];
	memcpy(silent, s->silent, sizeof silent);
	bool tells = s->told && !was_told, ends = s->told && !s->inquiries;
	json_t *list = json_incref(s->list);
	cluster_replicas_fn fn = s->fn;
	void *user = s->user;
	if (ends) {
		json_decref(s->list);
		mem_free(s);
	}
	if (tells)
		fn(user, list, silent[0] ? silent : NULL);
	json_decref(list);
}

static void look_later(void *user, enum err)
{
	struct cluster_search *s = user;

	s->begun = true;
	look(s);
}

static void on_grace_over(void *user)
{
	struct cluster_search *s = user;

	s->grace = NULL;
	look(s);
}

void cluster_replicas_enough(struct cluster_search *s)
{
	int64_t left = s->began_ms + GRACE_MS - clock_mono_ms();
	bool waits = false;

	for (const struct inquiry *q = s->inquiries; q; q = q->next)
		waits = waits || !q->was_silent;
	s->enough = true;
	loop_timer_start(s->server->loop, waits && left > 0 ? left : 0, on_grace_over, s, &s->grace);
}

void cluster_add_replica(json_t *list, const char *node, const json_t *record)
{
	const json_t *replica = json_object_get(record, "replica"), *generation = json_object_get(record, "generation");
	const char *job = jval_text(replica, "job"), *name = jval_text(record, "name");
	size_t at = 0;

	if (!job_id_ok(str_of(job)) || !json_is_integer(generation) || json_integer_value(generation) < 0 ||
	    ref_check_state_dict(str_of(name))) {
		err_clear();
		return;
	}
	while (at < json_array_size(list) && strcmp(jval_text(json_array_get(list, at), "job"), job) > 0)
		at++;
	(void)json_array_insert_new(list, at, json_pack("{s:s, s:s, s:O, s:s, s:I, s:b, s:s, s:s}", "node", node, "state_dict", name,
							"generation", generation, "job", job, "uid", jval_int(record, "uid"), "part",
							json_is_true(json_object_get(replica, "part")), "name",
							jval_text(replica, "name"), "created_at", jval_text(record, "created_at")));
	if (json_array_size(list) > REPLICAS_MAX)
		(void)json_array_remove(list, REPLICAS_MAX);
}

static void on_answer(struct cluster_errand *x, enum err e)
{
	struct inquiry *q = (struct inquiry *)x;
	struct cluster_search *s = q->search;
	CLEANUP(json_decrefp) json_t *doc = NULL;
	const json_t *one;
	enum err bad = e;
	size_t i;

	if (!e && x->status == 200)
		bad = jtext_parse((struct str){ (const char *)x->answer.p, x->answer.len }, 0, &doc);
	if (bad || x->status >= 500)
		lacks(s, x->node);
	if (bad)
		err_clear();
	if (!s->told)
		json_array_foreach(json_object_get(doc, "state_dicts"), i, one)
			cluster_add_replica(s->list, x->node, one);
	if (!e || e == ERR_CLUSTER_UNAVAILABLE)
		note_silent(s->server->cluster, x->node, e ? clock_mono_ms() + SILENT_MS : 0);
	list_remove(&s->inquiries, q);
	inquiry_free(q);
	look(s);
}

void cluster_put_ref(struct buf *b, const struct ref *ref)
{
	for (size_t i = 0; i < ref->storage.n; i++)
		buf_printf(b, "%%%02X", (unsigned char)ref->storage.p[i]);
	buf_puts(b, "%3A");
	for (size_t i = 0; i < ref->name.n; i++)
		buf_printf(b, "%%%02X", (unsigned char)ref->name.p[i]);
}

static FALLIBLE enum err inquire(struct cluster_search *s, const char *node, const struct ref *of, bool of_run, const struct principal *who)
{
	struct inquiry *q = mem_zalloc(1, sizeof *q);

	NEED(q, "cannot ask a node");
	q->search = s;
	q->path = BUF_INIT(PATH_BYTES);
	q->caller = BUF_INIT(128);
	q->errand.url = BUF_INIT(PATH_BYTES + 512);
	buf_printf(&q->path, "/v1/state-dicts?%s=", of_run ? "replica_of_run" : "replica_of");
	cluster_put_ref(&q->path, of);
	buf_putc(&q->path, '\0');
	buf_printf(&q->caller, CLUSTER_CALLER_HEAD ": %u 1 %d -", (unsigned)who->uid, who->admin);
	buf_putc(&q->caller, '\0');
	if (buf_status(&q->path) || buf_status(&q->caller)) {
		inquiry_free(q);
		return ERR(NO_MEMORY, "cannot ask a node");
	}
	q->lines[0] = (const char *)q->caller.p;
	q->errand.method = "GET";
	q->errand.path = (const char *)q->path.p;
	q->errand.headers = q->lines;
	q->errand.whole_ms = ASK_MS;
	q->errand.fn = on_answer;
	q->was_silent = is_silent(s->server->cluster, node);
	q->next = s->inquiries;
	s->inquiries = q;
	cluster_send(s->server->cluster, node, &q->errand);
	return OK;
}

struct cluster_search *cluster_find_replicas(struct server *server, const struct ref *of, bool of_run, const struct principal *who,
					     cluster_replicas_fn fn, void *user)
{
	const struct cluster *c = server->cluster;
	struct cluster_search *s = mem_sure(sizeof *s);

	*s = (struct cluster_search){ .server = server, .began_ms = clock_mono_ms(), .list = json_array(), .fn = fn, .user = user };
	for (uint64_t i = 0; c && i < c->nodes.n; i++)
		if (c->nodes.v[i].state != CLUSTER_AWAY && inquire(s, c->nodes.v[i].name, of, of_run, who)) {
			lacks(s, c->nodes.v[i].name);
			err_clear();
		}
	loop_later(server->loop, look_later, s, OK);
	return s;
}
