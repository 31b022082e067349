/* cluster.c: see cluster.h. Joining is a chain of calls to etcd, and so is each beat after it; a chain that fails ends in fail(), and the
 * next beat begins anew:
 *
 *   join:  lease → which cluster? (make one) → name: claim it, or take one's own over → look
 *   beat:  keep the lease alive → look: what is alive, in one transaction that fails if the name is no longer this node's */
#include "server/cluster.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sodium.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "os/fs.h"
#include "server/cluster_impl.h"
#include "server/config.h"
#include "server/courier.h"
#include "server/journal.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/storage.h"

enum { START_MS = 8000, LEAVE_MS = 1000, PUMP_US = 2000, HEED_MS = 1000, SECRET_BYTES = 32 };

const char *cluster_problem(const struct cluster *c)
{
	return c && c->problem[0] ? c->problem : NULL;
}

const char *cluster_oddity(const struct cluster *c, uint32_t index)
{
	const char *const all[] = { c ? cluster_probe_problem(c) : "", c ? c->apart : "", c ? c->odd : "" };

	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (all[i][0] && index-- == 0)
			return all[i];
	return NULL;
}

/* ---- beats ---- */

static void on_beat(void *user);
static void look(struct cluster *c);

static void plan_beat(struct cluster *c)
{
	int64_t ms = c->server->config->cluster_ttl_ms / 3;

	if (c->waits)
		ms = CLUSTER_HURRY_MS;
	else if (!cluster_heeds(c)) /* a node names no copies until it has heeded */
		ms = num_min(ms, HEED_MS);
	loop_timer_stop(&c->timer);
	loop_timer_start(c->server->loop, ms, on_beat, c, &c->timer);
}

void cluster_hurry(struct cluster *c)
{
	loop_timer_stop(&c->timer);
	loop_timer_start(c->server->loop, 0, on_beat, c, &c->timer);
}

static void end_chain(struct cluster *c)
{
	c->asking = false;
	c->tried = true;
	plan_beat(c);
}

/* This thread's latest error is why. */
static void fail(struct cluster *c)
{
	c->failures++;
	c->told_jobs = -1; /* perhaps not heard: the next look says it again */
	if (strcmp(c->problem, err_last()->text) != 0)
		log_warn("not in the cluster", "node", c->name, "why", err_last()->text, NULL);
	snprintf(c->problem, sizeof c->problem, "%.*s", (int)sizeof c->problem - 1, err_last()->text);
	err_clear();
	end_chain(c);
}

/* etcd answers, and this daemon cannot be the node: fatal at the start; later a person has to look. */
static void refuse(struct cluster *c)
{
	c->refused = true;
	c->joined = false;
	c->lease = 0;
	fail(c);
}

static void ask_txn(struct cluster *c, json_t *compare, json_t *then, json_t *otherwise, etcd_fn fn)
{
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(compare, then, otherwise), fn, c);
}

/* ---- the name ---- */

static json_t *alive_value(const struct cluster *c)
{
	return json_pack("{s:s, s:s, s:I, s:b}", "id", c->id, "advertise", c->server->config->advertise, "jobs", c->told_jobs, "draining",
			 (int)c->told_draining);
}

static json_t *member_value(const struct cluster *c)
{
	const struct server *s = c->server;
	char url[400];

	snprintf(url, sizeof url, "%s://%s", s->config->tls_cert ? "https" : "http", s->config->advertise);
	json_t *storages = json_array();
	for (uint32_t i = 0; i < storage_count(s->storages); i++)
		(void)json_array_append_new(storages, json_string(storage_at(s->storages, i)->name));
	return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:o}", "id", c->id, "mark", c->mark, "advertise", s->config->advertise,
			 "url", url, "place", c->place, "version", DCPD_VERSION, "protocol", CLUSTER_PROTOCOL, "storages", storages);
}

/* Describes this node twice: bound to the lease, and for ever. */
static json_t *put_self(struct cluster *c)
{
	CLEANUP(json_decrefp) json_t *alive = NULL, *member = member_value(c);
	char alive_key[CLUSTER_KEY_MAX], member_key[CLUSTER_KEY_MAX];

	c->told_jobs = jobs_live(c->server);
	c->told_draining = c->drained || c->server->draining;
	alive = alive_value(c);
	return json_pack("[o, o]", etcd_put(cluster_key(c, "alive/", c->name, alive_key), alive, c->lease),
			 etcd_put(cluster_key(c, "members/", c->name, member_key), member, 0));
}

static void joined(struct cluster *c, int64_t made)
{
	c->made = made;
	c->joined = true;
	c->refused = false;
	c->settled = false;
	c->renewed_ms = c->renewing_ms;
	log_info("joined the cluster", "node", c->name, NULL);
	cluster_probe_begin(c);
	look(c);
}

static void on_taken_over(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;

	if (!e && !etcd_succeeded(answer))
		e = ERR(CLUSTER_UNAVAILABLE, "node \"%s\" was claimed by two daemons at once", c->name);
	if (e)
		fail(c);
	else
		joined(c, c->made);
}

static void on_claimed(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;
	CLEANUP(json_decrefp) json_t *other = NULL;
	char key[CLUSTER_KEY_MAX];

	if (!e && etcd_succeeded(answer)) {
		joined(c, etcd_number(json_object_get(answer, "header"), "revision"));
		return;
	}
	const json_t *row = json_array_get(etcd_rows(answer, 0), 0);
	e = e ?: etcd_value(row, &other);
	if (e) {
		fail(c);
		return;
	}
	const char *id = json_string_value(json_object_get(other, "id")), *at = json_string_value(json_object_get(other, "advertise"));
	if (id && strcmp(id, c->id) == 0) { /* this daemon, before it was killed or paused */
		c->made = etcd_number(row, "create_revision");
		cluster_key(c, "alive/", c->name, key);
		json_t *same = etcd_changed_at(key, etcd_number(row, "mod_revision"));
		ask_txn(c, json_pack("[o]", same), put_self(c), json_array(), on_taken_over);
		return;
	}
	(void)!ERR(CONFIG, "node \"%s\" of the cluster is another daemon, which is alive at %.200s: choose another --node, or stop that "
		   "one", c->name, at ? at : "an unknown address");
	refuse(c);
}

static void claim(struct cluster *c)
{
	char key[CLUSTER_KEY_MAX];

	cluster_key(c, "alive/", c->name, key);
	ask_txn(c, json_pack("[o]", etcd_absent(key)), put_self(c), json_pack("[o]", etcd_get(key)), on_claimed);
}

/* ---- the cluster ---- */

static void ask_cluster(struct cluster *c);

static void on_founded(void *user, enum err e, const json_t *)
{
	struct cluster *c = user;

	if (e)
		fail(c);
	else
		ask_cluster(c); /* whoever has made it */
}

/* The first node makes the cluster, and the secret. */
static void found(struct cluster *c)
{
	unsigned char bytes[SECRET_BYTES];
	char key[CLUSTER_KEY_MAX], secret_key[CLUSTER_KEY_MAX], hex[2 * SECRET_BYTES + 1];
	CLEANUP(json_decrefp) json_t *cluster = NULL, *secret = NULL;
	int64_t id;

	randombytes_buf(bytes, sizeof bytes);
	sodium_bin2hex(hex, sizeof hex, bytes, sizeof bytes);
	randombytes_buf(&id, sizeof id);
	cluster = json_pack("{s:I, s:i}", "id", (json_int_t)(id & INT64_MAX) | 1, "protocol", CLUSTER_PROTOCOL);
	secret = json_pack("{s:s}", "secret", hex);
	json_t *puts = json_pack("[o, o]", etcd_put(cluster_key(c, "cluster", "", key), cluster, 0),
				 etcd_put(cluster_key(c, "secret", "", secret_key), secret, 0));
	sodium_memzero(hex, sizeof hex);
	ask_txn(c, json_pack("[o]", etcd_absent(key)), puts, json_array(), on_founded);
}

/* The state directory belongs to one cluster for ever: its jobs are known there. */
static FALLIBLE enum err check_cluster(struct cluster *c, const json_t *doc)
{
	int64_t id = etcd_number(doc, "id"), before = c->cluster ? c->cluster : journal_cluster(c->server->journal);

	if (id <= 0)
		return ERR(CONFIG, "%s/cluster in etcd is none of dcpd's: choose another --cluster-prefix",
			   c->server->config->cluster_prefix);
	if (etcd_number(doc, "protocol") > CLUSTER_PROTOCOL)
		return ERR(CONFIG, "the cluster speaks a newer protocol than this dcpd: update it");
	if (before && before != id)
		return ERR(CONFIG, "etcd holds another cluster than the one that this state directory belongs to: was its data lost, or is "
			   "--cluster another's?");
	if (!before) {
		struct journal_txn *t = journal_txn_new(c->server->journal);
		journal_put_cluster(t, id);
		journal_commit(c->server->journal, t, NULL, NULL);
	}
	c->cluster = id;
	return OK;
}

/* Nodes know each other by it. */
static FALLIBLE enum err take_secret(struct cluster *c, const json_t *row)
{
	CLEANUP(json_decrefp) json_t *doc = NULL;

	TRY(etcd_value(row, &doc));
	const char *secret = json_string_value(json_object_get(doc, "secret"));
	if (!secret || strlen(secret) < SECRET_BYTES || strlen(secret) >= sizeof c->secret)
		return ERR(CLUSTER_UNAVAILABLE, "%s/secret in etcd is none of dcpd's", c->server->config->cluster_prefix);
	snprintf(c->secret, sizeof c->secret, "%s", secret);
	return OK;
}

static void on_cluster(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;
	CLEANUP(json_decrefp) json_t *doc = NULL;
	const json_t *row = json_array_get(etcd_rows(answer, 0), 0);

	if (!e && etcd_succeeded(answer) && !row) {
		found(c);
		return;
	}
	if (!e && etcd_succeeded(answer)) {
		(void)!ERR(CONFIG, "etcd holds keys below %s/ that are no dcpd cluster's: choose another --cluster-prefix",
			   c->server->config->cluster_prefix);
		refuse(c);
		return;
	}
	e = e ?: etcd_value(row, &doc);
	e = e ?: check_cluster(c, doc);
	e = e ?: take_secret(c, json_array_get(etcd_rows(answer, 1), 0));
	if (e == ERR_CONFIG)
		refuse(c);
	else if (e)
		fail(c);
	else
		claim(c);
}

static void ask_cluster(struct cluster *c)
{
	char key[CLUSTER_KEY_MAX], all[CLUSTER_KEY_MAX], secret[CLUSTER_KEY_MAX];

	cluster_key(c, "cluster", "", key);
	ask_txn(c, json_pack("[o]", etcd_absent(key)), json_pack("[o]", etcd_range(cluster_key(c, "", "", all), 1)),
		json_pack("[o, o]", etcd_get(key), etcd_get(cluster_key(c, "secret", "", secret))), on_cluster);
}

/* ---- the lease ---- */

static void on_granted(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;

	c->lease = e ? 0 : etcd_number(answer, "ID");
	if (!e && c->lease <= 0)
		e = ERR(CLUSTER_UNAVAILABLE, "etcd gives no lease");
	if (e)
		fail(c);
	else
		ask_cluster(c);
}

static int64_t boot_ms(void)
{
	return clock_read_ns(CLOCK_BOOTTIME) / 1000000;
}

static void join(struct cluster *c)
{
	c->joined = false;
	c->renewing_ms = boot_ms();
	etcd_ask(c->etcd, "/v3/lease/grant", json_pack("{s:I}", "TTL", (json_int_t)(c->server->config->cluster_ttl_ms / 1000)), on_granted,
		 c);
}

static void on_looked(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;

	e = e ?: cluster_take(c, answer, 0);
	if (!e && !etcd_succeeded(answer)) { /* the lease was over for a moment */
		c->joined = false;
		e = ERR(CLUSTER_UNAVAILABLE, "etcd has not heard of this node for longer than --cluster-ttl: it joins again");
	}
	if (!e && !cluster_is_described(c)) {
		c->joined = false;
		e = ERR(CLUSTER_UNAVAILABLE, "what this node says of itself in etcd was removed or overwritten: it joins again");
	}
	if (e) {
		fail(c);
		return;
	}
	if (c->problem[0])
		log_info("in the cluster again", "node", c->name, NULL);
	c->problem[0] = '\0';
	c->looks++;
	end_chain(c);
	cluster_looked(c);
	cluster_jobs_looked(c);
	cluster_take_looked(c);
	cluster_withdraw_looked(c);
}

static json_t *all_ranges(const struct cluster *c)
{
	char members[CLUSTER_KEY_MAX], alive[CLUSTER_KEY_MAX], drained[CLUSTER_KEY_MAX], gone[CLUSTER_KEY_MAX];

	return json_pack("[o, o, o, o]", etcd_range(cluster_key(c, "members/", "", members), 0),
			 etcd_range(cluster_key(c, "alive/", "", alive), 0),
			 etcd_range(cluster_key(c, "drained/", "", drained), 0),
			 etcd_get(cluster_key(c, "gone", "", gone)));
}

static void look(struct cluster *c)
{
	json_t *then = all_ranges(c);
	char key[CLUSTER_KEY_MAX];
	bool draining = c->drained || c->server->draining;

	cluster_key(c, "alive/", c->name, key);
	if (c->told_jobs != jobs_live(c->server) || c->told_draining != draining) {
		c->told_jobs = jobs_live(c->server);
		c->told_draining = draining;
		CLEANUP(json_decrefp) json_t *value = alive_value(c);
		if (json_array_append_new(then, etcd_put(key, value, c->lease)) != 0)
			c->told_jobs = -1; /* the next look says it */
	}
	ask_txn(c, json_pack("[o]", etcd_made_at(key, c->made)), then, all_ranges(c), on_looked);
}

static void on_kept(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;

	if (e)
		fail(c);
	else if (etcd_number(json_object_get(answer, "result"), "TTL") <= 0) {
		join(c); /* the lease is over */
	} else {
		c->renewed_ms = c->renewing_ms;
		look(c);
	}
}

static void on_beat(void *user)
{
	struct cluster *c = user;

	c->timer = NULL;
	if (c->asking || c->leaving)
		return;
	c->asking = true;
	c->renewing_ms = boot_ms();
	if (c->joined)
		etcd_ask(c->etcd, "/v3/lease/keepalive", json_pack("{s:I}", "ID", (json_int_t)c->lease), on_kept, c);
	else
		join(c);
}

/* ---- start and end ---- */

/* Before the loop runs, and after: what the courier's thread posts is run here. */
static void pump(const struct cluster *c, const bool *until, int64_t ms)
{
	int64_t end = clock_mono_ms() + ms;

	while (!*until && clock_mono_ms() < end) {
		loop_run_posted(c->server->loop);
		usleep(PUMP_US);
	}
}

/* Nodes of one place reach each other by loopback. */
static void note_place(struct cluster *c)
{
	CLEANUP(fs_drop) int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	char boot[37] = "";
	struct stat ns;

	if (fd >= 0 && read(fd, boot, sizeof boot - 1) == sizeof boot - 1 && stat("/proc/self/ns/net", &ns) == 0)
		snprintf(c->place, sizeof c->place, "%s/%ju", boot, (uintmax_t)ns.st_ino);
}

FALLIBLE enum err cluster_new(struct server *s, struct cluster **out)
{
	struct cluster *c = s->config->cluster ? mem_zalloc(1, sizeof *c) : NULL;
	char id[JOB_ID_LEN + 1];

	if (!s->config->cluster)
		return OK;
	NEED(c, "cannot join the cluster");
	*out = c;
	c->server = s;
	c->name = s->config->node;
	c->told_jobs = -1;
	c->last_note = &c->notes;
	c->tls.ca = s->config->cluster_ca;
	snprintf(c->id, sizeof c->id, "%016" PRIx64, journal_id(s->journal));
	job_new_id(s->journal, id);
	memcpy(c->mark, id + JOB_ID_LEN - JOB_MARK_LEN, sizeof c->mark);
	note_place(c);
	TRY(courier_new_anywhere(s->loop, &c->courier));
	TRY(cluster_probe_new(c));
	TRY(etcd_new(s->loop, c->courier, s->config, &c->etcd));
	on_beat(c);
	pump(c, &c->tried, START_MS);
	return c->refused ? ERR(CONFIG, "%s", c->problem) : OK;
}

static void on_left(void *user, enum err e, const json_t *)
{
	struct cluster *c = user;

	if (e)
		err_clear();
	c->tried = true;
}

void cluster_leave(struct cluster *c)
{
	if (!c)
		return;
	for (int64_t end = clock_mono_ms() + LEAVE_MS; !cluster_has_told(c) && clock_mono_ms() < end; usleep(PUMP_US))
		loop_run_posted(c->server->loop);
	c->leaving = true;
	cluster_mark_noted(c);
	if (!c->joined || c->problem[0])
		return;
	c->tried = false;
	etcd_ask(c->etcd, "/v3/lease/revoke", json_pack("{s:I}", "ID", (json_int_t)c->lease), on_left, c);
	pump(c, &c->tried, LEAVE_MS);
}

void cluster_free(struct cluster *c)
{
	if (!c)
		return;
	loop_timer_stop(&c->timer);
	courier_free(c->courier);
	cluster_probe_free(c);
	cluster_errands_end(c);
	etcd_free(c->etcd);
	cluster_take_free(c);
	cluster_withdraw_free(c);
	cluster_jobs_free(c);
	cluster_nodes_free(c);
	mem_free(c);
}
