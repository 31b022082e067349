/* cluster_probe.c: a node asks itself by the address that it advertises, where the others look for it. Else a wrong --advertise would show
 * when the node is needed, and on another host than the one that is configured wrongly.
 *
 * The daemon itself notices whether the question reached it: the question has a number that nobody else knows, and comes in as any other
 * request does. No secret goes to whoever listens there. A failure is told, and nothing else: an address may lead nowhere from within its
 * own host, and to the node from others. */
#include <sodium.h>
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "server/cluster_impl.h"

enum { FIRST_MS = 500, AGAIN_MS = 30000, CONNECT_MS = 3000, WHOLE_MS = 10000, NUMBER_BYTES = 16 };

struct cluster_probe {
	struct courier_parcel parcel;          /* the first member */
	struct cluster *cluster;
	struct loop_timer *timer;
	bool asking, found;
	char number[2 * NUMBER_BYTES + 1], line[64], url[400], problem[700];
	const char *lines[2];
};

static void plan(struct cluster_probe *p, int64_t ms);

static void on_answer(struct courier_parcel *parcel)
{
	struct cluster_probe *p = (struct cluster_probe *)parcel;
	char problem[sizeof p->problem] = "";

	p->asking = false;
	if (!p->found) {
		char other[64];
		snprintf(other, sizeof other, "another server answers, with status %ld", parcel->status);
		const char *why = parcel->status ? other : parcel->error;
		snprintf(problem, sizeof problem, "this node does not find itself at %.200s, where the others look for it: %s "
			 "(--advertise)", p->cluster->server->config->advertise, why);
		plan(p, AGAIN_MS);
	}
	if (problem[0] && strcmp(problem, p->problem) != 0)
		log_warn("other nodes may not reach this one", "why", problem, NULL);
	memcpy(p->problem, problem, sizeof problem);
}

static void on_time(void *user)
{
	struct cluster_probe *p = user;
	const struct server *s = p->cluster->server;

	p->timer = NULL;
	if (p->asking || p->found || s->draining)
		return;
	if (!s->ready) {
		plan(p, FIRST_MS);
		return;
	}
	p->asking = true;
	p->parcel = (struct courier_parcel){ .url = p->url, .method = "GET", .headers = p->lines, .tls = &p->cluster->tls,
					     .connect_ms = CONNECT_MS, .whole_ms = WHOLE_MS, .fn = on_answer };
	courier_send(p->cluster->courier, &p->parcel);
}

static void plan(struct cluster_probe *p, int64_t ms)
{
	loop_timer_start(p->cluster->server->loop, ms, on_time, p, &p->timer);
}

void cluster_probe_heard(struct cluster *c, const char *head)
{
	if (!c || !head || strcmp(head, c->probe->number) != 0)
		return;
	c->probe->found = true;
	c->probe->problem[0] = '\0'; /* the question may arrive after its time-out: the node is found all the same */
}

const char *cluster_probe_problem(const struct cluster *c)
{
	return c->probe ? c->probe->problem : "";
}

void cluster_probe_begin(struct cluster *c)
{
	if (!c->probe->timer && !c->probe->found && !c->probe->asking)
		plan(c->probe, FIRST_MS);
}

FALLIBLE enum err cluster_probe_new(struct cluster *c)
{
	const struct config *config = c->server->config;
	struct cluster_probe *p = c->probe = mem_zalloc(1, sizeof *p);
	unsigned char number[NUMBER_BYTES];

	NEED(p, "cannot join the cluster");
	p->cluster = c;
	randombytes_buf(number, sizeof number);
	sodium_bin2hex(p->number, sizeof p->number, number, sizeof number);
	snprintf(p->line, sizeof p->line, CLUSTER_PROBE_HEAD ": %s", p->number);
	snprintf(p->url, sizeof p->url, "%s://%s/livez", config->tls_cert ? "https" : "http", config->advertise);
	p->lines[0] = p->line;
	return OK;
}

void cluster_probe_free(struct cluster *c)
{
	if (!c->probe)
		return;
	loop_timer_stop(&c->probe->timer);
	mem_free(c->probe);
	c->probe = NULL;
}
