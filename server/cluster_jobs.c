/* cluster_jobs.c: the job store of a cluster. Each node tells etcd of its jobs' records, so that others answer for them when it is away,
 * and of those that another node may take over (takeover.h). A job that changes is noted here; what is noted goes to etcd in groups, one
 * transaction at a time, and waits while etcd does not answer: of a job that changed often meanwhile the last record counts. */
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/cluster_impl.h"
#include "server/errdoc.h"
#include "server/job_impl.h"
#include "server/journal.h"
#include "server/service_clock.h"
#include "server/takeover.h"

enum { BATCH = 20, NOTES_MAX = 20000, RECORD_MAX = 48 << 10, BATCH_BYTES = 512 << 10, OWN_PAGE = 500, ASK_PAGE = 50, MARK_MS = 10000 };

struct cluster_note {
	struct cluster_note *next;
	char id[JOB_ID_LEN + 1];
	bool sent, again;              /* on its way; it has changed since */
	bool recalled;                 /* the job ended before this daemon began: what that means to other nodes is told again */
	bool registers, ends;          /* what was sent of it */
};

/* ---- a record ---- */

static bool is_short(const json_t *doc, size_t max)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);

	return text && strlen(text) <= max;
}

static void shorten(json_t *doc, const char *key)
{
	json_t *brief = errdoc_brief(json_object_get(doc, key));

	if (brief)
		(void)json_object_set_new(doc, key, brief);
	else
		(void)json_object_del(doc, key);
}

/* Takes parts out until the record is no longer than etcd should hold. The request of a job that may be taken over stays whole, or the job
 * is not shared: false. */
static bool abridge(json_t *doc, bool needs_spec)
{
	static const char *const lists[] = { "result", "error" };
	static const char *const parts[] = { "stages", "trace", "spec", "labels", "result", "error" };

	(void)json_object_del(json_object_get(doc, "progress"), "ranks");
	if (is_short(doc, RECORD_MAX))
		return true;
	(void)json_object_set_new(doc, "abridged", json_true());
	for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
		if (json_is_object(json_object_get(doc, lists[i])))
			shorten(doc, lists[i]);
	for (size_t i = 0; i < sizeof parts / sizeof *parts && !is_short(doc, RECORD_MAX); i++)
		if (!needs_spec || strcmp(parts[i], "spec") != 0)
			(void)json_object_del(doc, parts[i]);
	return is_short(doc, RECORD_MAX);
}

/* NULL: no memory. *may_share_io: the record has all that another node needs. */
static json_t *record_of(const struct cluster *c, struct job *j, bool *may_share_io)
{
	struct str text;
	json_t *doc;

	if (job_text(c->server, str_of(j->id), &text) || jtext_parse(text, JSON_ALLOW_NUL, &doc)) {
		err_clear();
		return NULL;
	}
	if (!abridge(doc, *may_share_io)) {
		*may_share_io = false;
		(void)abridge(doc, false);
	}
	return json_pack("{s:s, s:o}", "node", c->name, "job", doc);
}

/* ---- notes ---- */

static void drop(struct cluster *c, struct cluster_note *note)
{
	struct cluster_note **at = &c->notes;

	while (*at != note)
		at = &(*at)->next;
	*at = note->next;
	if (!*at)
		c->last_note = at;
	map_remove(&c->note_table, str_of(note->id));
	c->note_count--;
	mem_free(note);
}

static void pump(struct cluster *c);

static void pump_later(void *user, enum err)
{
	pump(user);
}

static void note_id(struct cluster *c, const char *id)
{
	struct cluster_note *note = map_object(&c->note_table, str_of(id));

	c->unmarked = true;
	if (note) {
		note->again = note->sent;
		return;
	}
	if (c->note_count >= NOTES_MAX && !c->notes->sent) { /* etcd is away for long: the newest count */
		drop(c, c->notes);
		c->settled = false; /* what etcd has is gone through anew: a job whose end it never hears of would be taken over */
	}
	note = mem_zalloc(1, sizeof *note);
	if (!note) {
		c->settled = false;
		return;
	}
	memcpy(note->id, id, sizeof note->id);
	if (map_add(&c->note_table, str_of(note->id), note)) {
		err_clear();
		c->settled = false;
		mem_free(note);
		return;
	}
	*c->last_note = note;
	c->last_note = &note->next;
	c->note_count++;
	loop_later(c->server->loop, pump_later, c, OK);
}

void cluster_note_job(const struct job *j)
{
	struct cluster *c = j->server->cluster;

	if (c && !j->dry_run && j->in_journal && !j->moved)
		note_id(c, j->id);
}

uint64_t cluster_untold(const struct server *s)
{
	return s->cluster ? s->cluster->note_count : 0;
}

/* Jobs that end are noted once their end is on disk: one that is ending may have ended before the mark. Nodes that must still be told of
 * an end are told by the next daemon, if this one ends first: the mark waits for them. */
void cluster_mark_noted(struct cluster *c)
{
	if (!c->loaded || !c->unmarked || c->notes || cluster_has_words(c))
		return;
	for (const struct job *j = c->server->jobs->live; j; j = j->live_next)
		if (j->step == STEP_ENDING)
			return;
	struct journal_txn *t = journal_txn_new(c->server->journal);
	journal_put_noted(t, clock_service_ms());
	journal_commit(c->server->journal, t, NULL, NULL);
	c->unmarked = false;
	c->mark_ms = clock_mono_ms() + MARK_MS;
}

static enum err on_ended(void *user, const struct journal_job *row)
{
	struct cluster *c = user;

	note_id(c, row->id);
	struct cluster_note *note = map_object(&c->note_table, str_of(row->id));
	if (note)
		note->recalled = true;
	return OK;
}

/* Of jobs that ended behind the last mark etcd may not have heard before this daemon's last stop. */
static void recall(struct cluster *c)
{
	int64_t since = journal_noted_ms(c->server->journal);

	c->unmarked = true;
	if (!since)
		cluster_mark_noted(c);
	else if (journal_read_ended(c->server->journal, since, NOTES_MAX / 2, on_ended, c)) {
		log_err("jobs whose end etcd may lack cannot be read", "why", err_last()->text, NULL);
		err_clear();
	}
}

bool cluster_has_told(const struct cluster *c)
{
	return !c->notes || !cluster_is_in(c) || !c->settled;
}

/* ---- to etcd ---- */

struct batch {
	json_t *compare, *then, *otherwise;
	uint32_t count;
	size_t bytes;
};

static void add(json_t *list, json_t *one)
{
	(void)json_array_append_new(list, one); /* NULL makes the transaction one without memory, which etcd_txn() tells */
}

/* NULL: the journal lacks it. An ended job may have left memory before etcd has heard of its end: its row does not say that others may
 * have it, and without that the end would be written over a new owner's. */
static struct job *find_job(struct cluster *c, const char *id)
{
	struct job *j;

	if (job_find(c->server, str_of(id), &j)) {
		err_clear();
		return NULL;
	}
	j->shared = j->shared || job_may_be_shared(j);
	return j;
}

/* Not at the start: other nodes are known by now. */
static void tell_recalled(struct cluster_note *note, struct job *j)
{
	if (note->recalled && job_state_ended(j->state))
		j->server->hooks->job_recalled(j);
	note->recalled = false;
}

/* etcd's part of one note. false: the job is gone. */
static bool put_note(struct cluster *c, struct cluster_note *note, struct batch *b)
{
	char jobs[CLUSTER_KEY_MAX], live[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + JOB_ID_LEN + 2];
	CLEANUP(json_decrefp) json_t *ids = NULL, *value = NULL;
	struct job *j = find_job(c, note->id);

	if (!j || j->moved)
		return false;
	tell_recalled(note, j);
	bool ended = job_state_ended(j->state), may_share = j->shared && !ended;
	cluster_key(c, "jobs/", j->id, jobs);
	snprintf(name, sizeof name, "%s/%s", c->name, j->id);
	cluster_key(c, "live/", name, live);
	value = record_of(c, j, &may_share);
	ids = may_share && !j->token ? job_storage_ids(j) : NULL;
	note->registers = ids != NULL;
	note->ends = ended && j->shared;
	note->sent = true;
	note->again = false;
	b->bytes += j->text.len;
	add(b->then, etcd_put(jobs, value, 0));
	if (j->shared)
		add(b->compare, etcd_changed_at(jobs, j->noted));
	if (note->registers) {
		CLEANUP(json_decrefp) json_t *about = json_pack("{s:O}", "storages", ids);
		add(b->then, etcd_put(live, about, 0));
	} else if (note->ends) {
		add(b->then, etcd_delete(live));
	}
	if (b->count++ == 0) { /* looked at if it was alone */
		add(b->otherwise, etcd_get(live));
		add(b->otherwise, etcd_get(jobs));
	}
	return true;
}

static void unsend(struct cluster *c)
{
	for (struct cluster_note *n = c->notes; n; n = n->next)
		n->sent = false;
}

static void take_note(struct cluster *c, struct cluster_note *note, int64_t revision)
{
	struct job *j = find_job(c, note->id);

	if (!j) {
		drop(c, note);
		return;
	}
	j->noted = j->shared ? revision : 0;
	if (note->registers || note->ends) {
		j->token = note->registers ? revision : 0;
		job_changed(j);
		if (note->registers && j->step != STEP_ENDING && j->step != STEP_NONE)
			job_write(j, NULL, NULL); /* after a restart its record may be pruned: etcd has had one */
	}
	note->sent = false;
	if (!note->again)
		drop(c, note);
}

static struct takeover_known known_of(const struct cluster *c, const struct job *j, bool in_live, const json_t *value)
{
	return (struct takeover_known){ .in_live = in_live, .has_record = value,
					.record_is_own = strcmp(jval_text(value, "node"), c->name) == 0, .has_row = j,
					.is_moved = j && j->moved, .was_known = j && (j->token || j->taken),
					.record_turn = json_array_size(json_object_get(json_object_get(value, "job"), "taken_over")),
					.row_turn = j ? json_array_size(j->taken) : 0 };
}

/* etcd has not what this node thought: it has changed it before it was restarted, or another node has. */
static void examine(struct cluster *c, struct cluster_note *note, const json_t *answer)
{
	const json_t *live = json_array_get(etcd_rows(answer, 0), 0), *row = json_array_get(etcd_rows(answer, 1), 0);
	CLEANUP(json_decrefp) json_t *value = NULL;
	struct job *j = find_job(c, note->id);

	note->sent = false;
	if (!j || (row && etcd_value(row, &value))) {
		err_clear();
		drop(c, note);
		return;
	}
	const struct takeover_known known = known_of(c, j, live, value);
	enum takeover_own own = takeover_own(&known);
	if (own == TAKEOVER_IS_GONE || own == TAKEOVER_YIELD) {
		drop(c, note);
		c->settled = c->settled && own == TAKEOVER_IS_GONE;
		job_give_up(j, jval_text(value, "node"));
		return;
	}
	j->token = live ? etcd_number(live, "mod_revision") : 0;
	j->noted = row ? etcd_number(row, "mod_revision") : 0;
}

static void on_noted(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;
	uint32_t sent = 0;

	c->noting = false;
	if (e) { /* the next look finds out why, and sends them again */
		err_clear();
		unsend(c);
		return;
	}
	for (struct cluster_note *n = c->notes; n && n->sent; n = n->next)
		sent++;
	c->alone -= c->alone && sent == 1;
	if (etcd_succeeded(answer)) {
		int64_t revision = etcd_number(json_object_get(answer, "header"), "revision");
		for (struct cluster_note *n = c->notes, *next; n && sent-- > 0; n = next) {
			next = n->next;
			take_note(c, n, revision);
		}
	} else if (sent == 1) {
		examine(c, c->notes, answer);
	} else {
		c->alone = sent;
		unsend(c);
	}
	pump(c);
}

static void pump(struct cluster *c)
{
	struct batch b = { 0 };

	if (c->noting || !cluster_is_in(c) || !c->settled || !c->notes || c->leaving)
		return;
	b = (struct batch){ json_array(), json_array(), json_array(), 0, 0 };
	for (struct cluster_note *n = c->notes, *next; n && b.count < (c->alone ? 1 : BATCH) && b.bytes < BATCH_BYTES; n = next) {
		next = n->next;
		if (!put_note(c, n, &b))
			drop(c, n);
	}
	c->noting = b.count > 0;
	if (b.count) {
		etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(b.compare, b.then, b.otherwise), on_noted, c);
		return;
	}
	json_decref(b.compare);
	json_decref(b.then);
	json_decref(b.otherwise);
}

/* ---- which jobs are this node's? ---- */

struct cluster_settling {
	struct cluster *cluster;
	/* revision: of the live key; left: of the key that says that the job was taken from here. 0: there is none */
	struct vec(struct own_key { char id[JOB_ID_LEN + 1]; int64_t revision; int64_t left; }) own;
	struct vec(struct own_key) ask;
	bool reads_left;                       /* the live keys have been read */
	uint64_t asked;                        /* of ask */
	bool again;                            /* a job that is being given up is to be taken up behind that */
	json_t *last;                          /* row of the last key that was read; NULL: none yet */
};

static void settled(struct cluster *c, enum err e)
{
	c->settling = false;
	c->settled = !e;
	if (e)
		log_warn("etcd does not say which jobs are this node's", "why", err_last()->text, NULL);
	err_clear();
	/* without an answer they go on, too: the storage's fence keeps those from committing that are another node's by now */
	for (struct job *j = c->server->jobs->live, *next; j; j = next) {
		next = j->live_next;
		if (j->held)
			job_resume(j);
	}
	pump(c);
}

static void settling_end(struct cluster_settling *s, enum err e)
{
	struct cluster *c = s->cluster;
	bool again = s->again;

	vec_free(&s->own);
	vec_free(&s->ask);
	json_decref(s->last);
	mem_free(s);
	settled(c, e);
	c->settled = c->settled && !again;
}

static void on_dropped(void *, enum err, const json_t *)
{
	err_clear(); /* the next time */
}

static void drop_key(struct cluster *c, const char *folder, const char *id, int64_t revision)
{
	char key[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + JOB_ID_LEN + 2];

	snprintf(name, sizeof name, "%s/%s", c->name, id);
	cluster_key(c, folder, name, key);
	json_t *same = json_pack("[o]", etcd_changed_at(key, revision)), *drops = json_pack("[o]", etcd_delete(key));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(same, drops, json_array()), on_dropped, NULL);
}

static void settle_one(struct cluster_settling *s, const struct own_key *k, const json_t *row)
{
	struct cluster *c = s->cluster;
	CLEANUP(json_decrefp) json_t *value = NULL;
	struct job *j = find_job(c, k->id);

	if (row && etcd_value(row, &value))
		err_clear();
	if (!k->revision && (!j || j->moved)) {
		if (k->left) /* this node knows */
			drop_key(c, "left/", k->id, k->left);
		return;
	}
	const struct takeover_known known = known_of(c, j, k->revision, value);
	enum takeover_own own = takeover_own(&known);
	switch (own) {
	case TAKEOVER_GO_ON:
	case TAKEOVER_REGISTER:
		j->token = k->revision;
		j->noted = row ? etcd_number(row, "mod_revision") : 0;
		job_resume(j);
		cluster_note_job(j);
		break;
	case TAKEOVER_YIELD:
		s->again = true;
		job_give_up(j, jval_text(value, "node"));
		break;
	case TAKEOVER_IS_GONE:
		job_give_up(j, jval_text(value, "node"));
		break;
	case TAKEOVER_TAKE_UP:
		if (j && j->step != STEP_NONE)
			s->again = true; /* its workers are still being ended */
		else if (cluster_take_up(c, k->id, value, k->revision, row ? etcd_number(row, "mod_revision") : 0))
			log_err("a job of this node cannot be taken up", "job", k->id, NULL);
		break;
	case TAKEOVER_FORGET:
		drop_key(c, "live/", k->id, k->revision);
		break;
	}
	if (k->left && own != TAKEOVER_IS_GONE)
		drop_key(c, "left/", k->id, k->left);
	else if (k->left)
		s->again = true; /* once this node knows, the key goes */
}

static void ask_records(struct cluster_settling *s);

static void on_records(void *user, enum err e, const json_t *answer)
{
	struct cluster_settling *s = user;

	for (size_t i = 0; !e && i < ASK_PAGE && s->asked < s->ask.n; i++, s->asked++)
		settle_one(s, &s->ask.v[s->asked], json_array_get(etcd_rows(answer, i), 0));
	if (e || s->asked == s->ask.n)
		settling_end(s, e);
	else
		ask_records(s);
}

static void ask_records(struct cluster_settling *s)
{
	json_t *gets = json_array();
	char key[CLUSTER_KEY_MAX];

	for (uint64_t i = s->asked; i < s->ask.n && i < s->asked + ASK_PAGE; i++)
		add(gets, etcd_get(cluster_key(s->cluster, "jobs/", s->ask.v[i].id, key)));
	etcd_ask(s->cluster->etcd, "/v3/kv/txn", etcd_txn(json_array(), gets, json_array()), on_records, s);
}

static int by_id(const void *a, const void *b)
{
	return strcmp(((const struct own_key *)a)->id, ((const struct own_key *)b)->id);
}

static bool is_in_own(const struct cluster_settling *s, const char *id)
{
	struct own_key sought;

	memcpy(sought.id, id, sizeof sought.id);
	return s->own.n && bsearch(&sought, s->own.v, s->own.n, sizeof sought, by_id);
}

/* All keys are there: asks about the jobs that have one, and about those that are thought to. */
static FALLIBLE enum err collect(struct cluster_settling *s)
{
	struct own_key *k;

	each(one, s->own.v, s->own.n) {
		TRY(vec_push(&s->ask, &k));
		*k = *one;
	}
	for (struct job *j = s->cluster->server->jobs->live; j; j = j->live_next) {
		if (!j->shared || is_in_own(s, j->id))
			continue;
		TRY(vec_push(&s->ask, &k));
		*k = (struct own_key){ .revision = 0 };
		memcpy(k->id, j->id, sizeof k->id);
	}
	return OK;
}

static void ask_own(struct cluster_settling *s);

static FALLIBLE enum err take_own(struct cluster_settling *s, const json_t *rows)
{
	char prefix[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + 2];
	const json_t *row;
	size_t i;

	snprintf(name, sizeof name, "%s/", s->cluster->name);
	cluster_key(s->cluster, s->reads_left ? "left/" : "live/", name, prefix);
	json_decref(s->last);
	s->last = json_incref(json_array_get(rows, json_array_size(rows) - 1));
	json_array_foreach(rows, i, row) {
		CLEANUP(buf_free) struct buf id = BUF_INIT(CLUSTER_KEY_MAX);
		struct own_key *k;
		if (etcd_key(row, prefix, &id) || !job_id_ok((struct str){ (char *)id.p, id.len })) {
			err_clear(); /* none of dcpd's */
			continue;
		}
		struct own_key one = { .revision = 0 };
		memcpy(one.id, id.p, JOB_ID_LEN);
		*(s->reads_left ? &one.left : &one.revision) = etcd_number(row, "mod_revision");
		if (s->reads_left && is_in_own(s, one.id)) { /* it came back */
			drop_key(s->cluster, "left/", one.id, one.left);
			continue;
		}
		TRY(s->reads_left ? vec_push(&s->ask, &k) : vec_push(&s->own, &k));
		*k = one;
	}
	return OK;
}

static void on_own(void *user, enum err e, const json_t *answer)
{
	struct cluster_settling *s = user;

	e = e ?: take_own(s, etcd_rows(answer, 0));
	if (!e && etcd_has_more(answer, 0) && s->last) {
		ask_own(s);
		return;
	}
	if (!e && !s->reads_left) {
		s->reads_left = true;
		json_decref(s->last);
		s->last = NULL;
		ask_own(s);
		return;
	}
	e = e ?: collect(s);
	if (e || s->ask.n == 0)
		settling_end(s, e);
	else
		ask_records(s);
}

static void ask_own(struct cluster_settling *s)
{
	char prefix[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + 2];

	snprintf(name, sizeof name, "%s/", s->cluster->name);
	cluster_key(s->cluster, s->reads_left ? "left/" : "live/", name, prefix);
	json_t *range = etcd_range_behind(prefix, s->last, OWN_PAGE);
	etcd_ask(s->cluster->etcd, "/v3/kv/txn", etcd_txn(json_array(), json_pack("[o]", range), json_array()), on_own, s);
}

static void settle(struct cluster *c)
{
	struct cluster_settling *s = mem_sure(sizeof *s);

	*s = (struct cluster_settling){ .cluster = c };
	c->settling = true;
	ask_own(s);
}

void cluster_jobs_loaded(struct server *s)
{
	struct cluster *c = s->cluster;

	if (!c)
		return;
	c->loaded = true;
	recall(c);
	if (cluster_is_in(c)) {
		settle(c);
		cluster_withdraw_looked(c);
	} else {
		settled(c, ERR(CLUSTER_UNAVAILABLE, "%s", c->problem));
	}
}

/* ---- is a job still this node's? ---- */

struct confirming {
	done_fn fn;
	void *user;
};

static void on_confirmed(void *user, enum err e, const json_t *answer)
{
	struct confirming w = *(struct confirming *)user;
	enum takeover_answer said = e ? TAKEOVER_SILENT : etcd_succeeded(answer) ? TAKEOVER_OWN : TAKEOVER_OTHERS;

	mem_free(user);
	err_clear();
	w.fn(w.user, takeover_after(said) == TAKEOVER_MOVED ? ERR(JOB_MOVED, "another node has the job") : OK);
}

static int64_t boot_ms(void)
{
	return clock_read_ns(CLOCK_BOOTTIME) / 1000000;
}

void cluster_confirm(struct job *j, done_fn fn, void *user)
{
	struct cluster *c = j->server->cluster;
	char live[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + JOB_ID_LEN + 2];
	int64_t renewed_ms = c && c->settled ? c->renewed_ms : 0; /* others may have had it before a lease that has just begun */

	if (!c || c->leaving ||
	    takeover_gate(j->token, renewed_ms, j->server->config->cluster_ttl_ms, boot_ms()) == TAKEOVER_GO) {
		loop_later(j->server->loop, fn, user, OK);
		return;
	}
	struct confirming *w = mem_sure(sizeof *w);
	*w = (struct confirming){ fn, user };
	snprintf(name, sizeof name, "%s/%s", c->name, j->id);
	json_t *same = etcd_changed_at(cluster_key(c, "live/", name, live), j->token);
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_pack("[o]", same), json_array(), json_array()), on_confirmed, w);
}

/* ---- records of others ---- */

struct reading {
	struct cluster *cluster;
	cluster_record_fn fn;
	void *user;
};

static void on_record(void *user, enum err e, const json_t *answer)
{
	struct reading r = *(struct reading *)user;
	CLEANUP(json_decrefp) json_t *value = NULL;
	const json_t *row = json_array_get(etcd_rows(answer, 0), 0);

	mem_free(user);
	if (!e && row)
		e = etcd_value(row, &value);
	r.fn(r.user, e, value);
}

void cluster_record(struct cluster *c, struct str id, cluster_record_fn fn, void *user)
{
	struct reading *r = mem_sure(sizeof *r);
	char key[CLUSTER_KEY_MAX], name[JOB_ID_LEN + 1];

	*r = (struct reading){ c, fn, user };
	snprintf(name, sizeof name, "%.*s", (int)id.n, id.p);
	json_t *get = etcd_get(cluster_key(c, "jobs/", name, key));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), json_pack("[o]", get), json_array()), on_record, r);
}

static void on_page(void *user, enum err e, const json_t *answer)
{
	struct reading r = *(struct reading *)user;
	CLEANUP(json_decrefp) json_t *page = json_pack("{s:[], s:b}", "records", "more", (int)etcd_has_more(answer, 0));
	const json_t *row;
	size_t i;

	mem_free(user);
	if (!page && !e)
		e = ERR(NO_MEMORY, "cannot list jobs");
	json_array_foreach(etcd_rows(answer, 0), i, row) {
		json_t *value = NULL;
		e = e ?: etcd_value(row, &value);
		if (value && json_array_append_new(json_object_get(page, "records"), value) != 0)
			e = ERR(NO_MEMORY, "cannot list jobs");
	}
	r.fn(r.user, e, page);
}

void cluster_records(struct cluster *c, const char *before, uint32_t limit, cluster_record_fn fn, void *user)
{
	struct reading *r = mem_sure(sizeof *r);
	char key[CLUSTER_KEY_MAX];

	*r = (struct reading){ c, fn, user };
	json_t *range = etcd_range_before(cluster_key(c, "jobs/", "", key), before, limit);
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), json_pack("[o]", range), json_array()), on_page, r);
}

/* ---- ---- */

void cluster_jobs_looked(struct cluster *c)
{
	if (!c->loaded || c->leaving)
		return;
	if (!c->settled && !c->settling) {
		settle(c);
		return;
	}
	/* storages whose ids were not known when their jobs began */
	for (struct job *j = c->server->jobs->live; j; j = j->live_next)
		if (j->shared && !j->token && !j->held)
			cluster_note_job(j);
	pump(c);
	if (clock_mono_ms() >= c->mark_ms)
		cluster_mark_noted(c);
	cluster_prune(c);
}

void cluster_jobs_free(struct cluster *c)
{
	while (c->notes)
		drop(c, c->notes);
	map_free(&c->note_table);
}
