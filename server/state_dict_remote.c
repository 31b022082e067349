/* state_dict_remote.c: subscribers to publications of other nodes: how they learn of versions.
 *
 * Each has one request with the publication's node, which that node answers when there is a newer version, or after WAIT_S: a version is
 * known there within a round trip, and a node that dies is noticed as soon as its connection breaks. The same request says which version is
 * in use, so that the publisher can see its subscribers; a change of that, and the end of a subscriber, are told at once, by a request of
 * their own. The bytes come by jobs (state_dict_update.c). A node that is silent for --cluster-ttl ends the waits of the subscriber's
 * ranks, with ERR_PUBLISHER_AWAY. */
#include <stdio.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/parts.h"
#include "server/state_dict_impl.h"

enum { WAIT_S = 20, ANSWER_MS = 10000, RETRY_MS = 1000, PATH_BYTES = 1024 };

struct errand {
	struct cluster_errand sent;        /* the first member */
	struct server *server;
	struct state_dict *sd;             /* with a ref */
	bool waits;
	int64_t applied;
	char caller[64];
	const char *lines[2];
	struct buf path;
	char *body;
};

static void errand_free(struct errand *x)
{
	cluster_errand_free(&x->sent);
	buf_free(&x->path);
	mem_free(x->body);
	state_dict_unref(x->sd);
	mem_free(x);
}

/* ---- answers ---- */

static void no_answer(struct server *s, struct state_dict *sd, const char *why)
{
	struct state_dict_feed *f = sd->feed;
	int64_t now = clock_mono_ms();

	f->ask_ms = now + RETRY_MS;
	if (!f->silent_ms)
		f->silent_ms = now;
	if (now - f->silent_ms < s->config->cluster_ttl_ms)
		return;
	state_dict_update_stopped(sd, ERR(PUBLISHER_AWAY, "publication \"%s\": %s; the subscription goes on when the node is back",
					  f->publication, why));
}

static void take_answer(struct state_dict *sd, const struct errand *x)
{
	char why[64];
	CLEANUP(json_decrefp) json_t *doc = NULL;
	struct state_dict_feed *f = sd->feed;
	enum err e = jtext_parse((struct str){ (const char *)x->sent.answer.p, x->sent.answer.len }, 0, &doc);
	const json_t *generation = json_object_get(doc, "generation");

	if (x->sent.status != 200 && x->sent.status != 403 && x->sent.status != 404) { /* it is of another version, say */
		snprintf(why, sizeof why, "its node answers with status %ld", x->sent.status);
		no_answer(x->server, sd, why);
		return;
	}
	f->silent_ms = 0;
	if (x->sent.status != 403)
		state_dict_update_goes_on(sd);
	if (x->sent.status == 200 && !e) {
		int64_t newest = json_is_integer(generation) ? json_integer_value(generation) : -1, was = f->published;
		f->told = x->applied > f->told ? x->applied : f->told;
		state_dict_learn(sd, newest);
		if (newest != was)
			state_dict_emit(sd, "published", newest);
		return;
	}
	f->ask_ms = clock_mono_ms() + RETRY_MS;
	state_dict_learn(sd, -1);
	if (x->sent.status == 403)
		state_dict_update_stopped(sd, ERR(FORBIDDEN, "node \"%s\": %s", f->node, jval_text(doc, "detail")));
}

static void on_answer(struct cluster_errand *sent, enum err e)
{
	struct errand *x = (struct errand *)sent;
	struct state_dict *sd = x->sd;

	*(x->waits ? &sd->feed->asks : &sd->feed->tells) = false;
	if (sd->dead)
		;
	else if (e == ERR_CLUSTER_UNAVAILABLE)
		no_answer(x->server, sd, err_last()->text);
	else if (e || x->sent.status >= 500)
		sd->feed->ask_ms = clock_mono_ms() + RETRY_MS;
	else
		take_answer(sd, x);
	if (!sd->dead && !x->server->draining)
		state_dict_remote_look(x->server, sd);
	errand_free(x);
}

/* ---- questions ---- */

static FALLIBLE enum err build(struct errand *x, const char *own_node)
{
	const struct state_dict *sd = x->sd;
	CLEANUP(json_decrefp) json_t *doc = json_pack("{s:{s:s, s:s, s:I}}", "subscriber", "node", own_node, "name", sd->name, "world_size",
						     (json_int_t)sd->world_size);

	if (doc && sd->feed->published >= 0)
		json_object_set_new(doc, "after", json_integer(sd->feed->published));
	if (doc && x->applied >= 0)
		json_object_set_new(json_object_get(doc, "subscriber"), "applied", json_integer(x->applied));
	if (doc && sd->dead)
		json_object_set_new(json_object_get(doc, "subscriber"), "gone", json_true());
	x->body = jtext_of(doc);
	NEED(x->body, "cannot ask a node");
	buf_puts(&x->path, "/v1/publications/");
	for (const unsigned char *p = (const unsigned char *)sd->feed->publication; *p; p++)
		buf_printf(&x->path, "%%%02X", *p);
	buf_printf(&x->path, ":follow?wait=%ds", x->waits ? WAIT_S : 0);
	buf_putc(&x->path, '\0');
	snprintf(x->caller, sizeof x->caller, CLUSTER_CALLER_HEAD ": %u 1 %d -", (unsigned)sd->uid, principal_of(sd->uid).admin);
	return buf_status(&x->path);
}

static void send_errand(struct server *s, struct state_dict *sd, bool waits)
{
	struct errand *x = mem_sure(sizeof *x);

	*x = (struct errand){ .server = s, .sd = sd, .waits = waits, .applied = sd->feed->applied };
	x->path = BUF_INIT(PATH_BYTES);
	x->sent.url = BUF_INIT(PATH_BYTES + 512);
	sd->refs++;
	enum err e = build(x, s->config->node);
	if (e) {
		sd->feed->ask_ms = clock_mono_ms() + RETRY_MS;
		errand_free(x);
		return;
	}
	*(waits ? &sd->feed->asks : &sd->feed->tells) = true;
	x->lines[0] = x->caller;
	x->sent.method = "POST";
	x->sent.path = (const char *)x->path.p;
	x->sent.headers = x->lines;
	x->sent.body = str_of(x->body);
	x->sent.whole_ms = ANSWER_MS + (waits ? 1000 * WAIT_S : 0);
	x->sent.fn = on_answer;
	cluster_send(s->cluster, sd->feed->node, &x->sent);
}

void state_dict_remote_look(struct server *s, struct state_dict *sd)
{
	struct state_dict_feed *f = sd->feed;

	if (sd->hidden || sd->orphaned_ms || clock_mono_ms() < f->ask_ms)
		return;
	if (!s->cluster) {
		no_answer(s, sd, "this daemon is in no cluster");
		return;
	}
	if (!f->asks)
		send_errand(s, sd, true);
	else if (!f->tells && f->told != f->applied)
		send_errand(s, sd, false);
}

/* The last word about a subscriber follows all others: one that is under way is waited for. */
void state_dict_remote_goodbyes(struct server *s)
{
	list_each(sd, s->state_dicts->leaving) {
		if (sd->feed->tells)
			continue;
		list_remove(&s->state_dicts->leaving, sd);
		if (s->cluster)
			send_errand(s, sd, false);
		state_dict_unref(sd);
	}
}
