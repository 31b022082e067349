/* policy.c: see policy.h. The table of policies, what it is asked, and previews. policy_run.c removes. */
#include "server/policy.h"

#include <stdio.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/catalogue.h"
#include "server/journal.h"
#include "server/parts.h"
#include "server/policy_impl.h"
#include "server/service_clock.h"

enum { RUNS_NAMED = 5, RUNS_COUNTED = 100000, PREVIEW_BYTES_MAX = 256 << 20 };

/* ---- the table ---- */

/* The first entry whose name is not before this one. */
static uint32_t place_of(const struct policies *all, const char *name)
{
	uint32_t i = 0;

	while (i < all->count && strcmp(all->v[i]->name, name) < 0)
		i++;
	return i;
}

struct policy_entry *policy_find(const struct policies *all, const char *name)
{
	uint32_t i = place_of(all, name);

	return i < all->count && strcmp(all->v[i]->name, name) == 0 ? all->v[i] : NULL;
}

static void entry_free(struct policy_entry *p)
{
	if (p)
		json_decref(p->doc);
	mem_free(p);
}

static void entry_drop(struct policy_entry **p)
{
	entry_free(*p);
}

/* Takes doc. */
static FALLIBLE enum err entry_new(const char *name, uid_t uid, json_t *doc, struct policy_entry **out)
{
	CLEANUP(entry_drop) struct policy_entry *p = mem_zalloc(1, sizeof *p);

	if (!p)
		json_decref(doc);
	NEED(p, "cannot keep a policy");
	p->doc = doc;
	p->uid = uid;
	snprintf(p->name, sizeof p->name, "%s", name);
	TRY(policy_check_name(str_of(name)));
	TRY(policy_read(doc, &p->policy));
	p->policy.name = str_of(p->name);
	json_object_del(doc, "confirm");
	*out = p;
	p = NULL;
	return OK;
}

/* Takes the entry, in place of one of its name. */
static FALLIBLE enum err keep(struct policies *all, struct policy_entry *p)
{
	uint32_t i = place_of(all, p->name);

	if (i < all->count && strcmp(all->v[i]->name, p->name) == 0) {
		entry_free(all->v[i]);
		all->v[i] = p;
		return OK;
	}
	if (all->count == POLICIES_MAX) {
		entry_free(p);
		return ERR(LIMIT_EXCEEDED, "there are %d policies already: remove some", POLICIES_MAX);
	}
	memmove(&all->v[i + 1], &all->v[i], (all->count - i) * sizeof *all->v);
	all->v[i] = p;
	all->count++;
	return OK;
}

/* ---- put ---- */

struct putting {
	struct server *server;
	struct policy_entry *entry;
	struct principal who;
	done_fn fn;
	void *user;
	struct map runs;               /* that it matches; the keys are in: */
	struct arena *keys;
	char named[RUNS_NAMED][64];
	uint64_t run_count, checkpoints;
	enum err failed;
};

static void put_end(struct putting *p, enum err e)
{
	struct err_info info = *err_last();

	entry_free(p->entry);
	map_free(&p->runs);
	arena_free(p->keys);
	err_restore(&info);
	p->fn(p->user, e);
	mem_free(p);
}

static void on_matched(void *user, const struct catalogue_item *item)
{
	struct putting *p = user;
	struct str run;

	p->checkpoints++;
	if (p->failed || p->run_count >= RUNS_COUNTED || map_get(&p->runs, item->run) != MAP_NONE)
		return;
	p->failed = arena_str(p->keys, item->run, &run);
	p->failed = p->failed ?: map_put(&p->runs, run, 0);
	if (p->run_count < RUNS_NAMED)
		snprintf(p->named[p->run_count], sizeof p->named[0], "%.*s", (int)(item->run.n < 60 ? item->run.n : 60), item->run.p);
	p->run_count++;
}

static void on_kept(void *user, enum err e)
{
	struct putting *p = user;
	struct policies *all = p->server->policies;
	const struct policy_entry *before = policy_find(all, p->entry->name);

	if (!e) {
		if (before) {
			p->entry->removed = before->removed;
			p->entry->removed_bytes = before->removed_bytes;
		}
		log_info("policy kept", "policy", p->entry->name, NULL);
		e = keep(all, p->entry);
		p->entry = NULL;
		policy_changed(all);
	}
	put_end(p, e);
}

static void journal_it(struct putting *p)
{
	struct journal_txn *t = journal_txn_new(p->server->journal);
	char *text = jtext_of(p->entry->doc);

	if (text)
		journal_put_policy(t, &(struct journal_policy){ p->entry->name, p->entry->uid, str_of(text) });
	else
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot keep a policy"));
	mem_free(text);
	journal_commit(p->server->journal, t, on_kept, p);
}

/* Says what the pattern matches now, to whoever has to say it twice. */
static FALLIBLE enum err refuse(const struct putting *p)
{
	const struct policy *q = &p->entry->policy;
	char named[RUNS_NAMED * 66] = "";
	size_t n = 0;

	for (uint64_t i = 0; i < p->run_count && i < RUNS_NAMED; i++)
		n += (size_t)snprintf(named + n, sizeof named - n, "%s%s", i ? ", " : "", p->named[i]);
	if (p->run_count == 0)
		return ERR(VALIDATION_FAILED, "\"%.200s\" matches no run of storage %s: if that is meant, say \"confirm\": true",
			   q->match.p, q->storage.p);
	return ERR(VALIDATION_FAILED,
		   "\"%.200s\" matches every run of storage %s, now %ju with %ju checkpoints (%s%s): "
		   "if that is meant, say \"confirm\": true",
		   q->match.p, q->storage.p, (uintmax_t)p->run_count, (uintmax_t)p->checkpoints, named,
		   p->run_count > RUNS_NAMED ? ", …" : "");
}

static FALLIBLE enum err check_owner(const struct putting *p)
{
	const struct policy_entry *before = policy_find(p->server->policies, p->entry->name);

	if (before && !principal_may(&p->who, before->uid))
		return ERR(FORBIDDEN, "policy %s belongs to uid %u", before->name, before->uid);
	return OK;
}

static void on_all_matched(void *user, enum err e)
{
	struct putting *p = user;

	e = e ?: p->failed;
	if (!e && (p->run_count == 0 || policy_matches_all(&p->entry->policy)))
		e = refuse(p);
	e = e ?: check_owner(p); /* somebody may have put one of its name meanwhile */
	if (e)
		put_end(p, e);
	else
		journal_it(p);
}

static FALLIBLE enum err check_put(struct putting *p, const struct principal *who, const char *name, json_t *doc, bool *confirmed)
{
	const struct policy_entry *before;
	uid_t uid = who->admin && who->uid ? geteuid() : who->uid; /* the token's holder is dcpd's own user */
	struct storage *st;

	*confirmed = json_is_true(json_object_get(doc, "confirm"));
	TRY(entry_new(name, uid, doc, &p->entry));
	TRY(storage_find(p->server->storages, p->entry->policy.storage, &st));
	before = policy_find(p->server->policies, name);
	TRY(check_owner(p));
	if (!before && p->server->policies->count == POLICIES_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d policies already: remove some", POLICIES_MAX);
	p->keys = arena_new(64 << 20);
	return p->keys ? OK : ERR(NO_MEMORY, "cannot keep a policy");
}

static void put_end_later(void *user, enum err e)
{
	put_end(user, e);
}

void policy_put(struct server *s, const struct principal *who, const char *name, json_t *doc, done_fn fn, void *user)
{
	struct putting *p = mem_sure(sizeof *p);
	bool confirmed;

	*p = (struct putting){ .server = s, .who = *who, .fn = fn, .user = user };
	enum err e = check_put(p, who, name, doc, &confirmed);
	if (e)
		loop_later(s->loop, put_end_later, p, e);
	else if (confirmed)
		journal_it(p);
	else
		catalogue_each(s, p->entry->policy.storage.p, p->entry->policy.match.p, on_matched, on_all_matched, p);
}

/* ---- delete ---- */

void policy_delete(struct server *s, const struct principal *who, const char *name, done_fn fn, void *user)
{
	struct policies *all = s->policies;
	struct policy_entry *p = policy_find(all, name);
	enum err e = !p ? ERR(NOT_FOUND, "there is no policy %.64s", name)
			: principal_may(who, p->uid) ? OK : ERR(FORBIDDEN, "policy %s belongs to uid %u", name, p->uid);

	if (e) {
		loop_later(s->loop, fn, user, e);
		return;
	}
	struct journal_txn *t = journal_txn_new(s->journal);
	uint32_t i = place_of(all, name);
	journal_delete_policy(t, name);
	memmove(&all->v[i], &all->v[i + 1], (all->count - i - 1) * sizeof *all->v);
	all->count--;
	log_info("policy removed", "policy", p->name, NULL);
	entry_free(p);
	policy_changed(all);
	journal_commit(s->journal, t, fn, user);
}

/* ---- shown ---- */

static FALLIBLE enum err put_entry(const struct policies *all, const struct policy_entry *p, struct buf *out)
{
	char stamp[CLOCK_TEXT_MAX];
	const struct retention_sum *sum = &p->sum;

	buf_json_member(out, "{\"name\":", str_of(p->name));
	buf_printf(out, ",\"uid\":%u,", p->uid);
	size_t at = out->len;
	TRY(jval_dump(p->doc, out));
	TRY(buf_status(out));
	memmove(out->p + at, out->p + at + 1, out->len - at - 1); /* its members are ours */
	out->len -= 2;
	buf_puts(out, ",\"status\":{\"evaluated_at\":");
	if (p->looked_ms)
		buf_json_str(out, str_of(clock_text(p->looked_ms, stamp)));
	else
		buf_puts(out, "null");
	buf_printf(out, ",\"checkpoints\":%ju,\"bytes\":%ju,\"to_remove\":%ju,\"to_remove_bytes\":%ju,\"over_bytes\":%ju",
		   (uintmax_t)sum->checkpoints, (uintmax_t)sum->bytes, (uintmax_t)sum->removals, (uintmax_t)sum->removed_bytes,
		   (uintmax_t)sum->over);
	buf_printf(out, ",\"removed\":%ju,\"removed_bytes\":%ju,\"failed\":%ju,\"problem\":", (uintmax_t)p->removed,
		   (uintmax_t)p->removed_bytes, (uintmax_t)p->failed);
	if (all->problem[0])
		buf_json_str(out, str_of(all->problem));
	else
		buf_puts(out, "null");
	buf_puts(out, "}}");
	return buf_status(out);
}

FALLIBLE enum err policy_show(const struct server *s, const char *name, struct buf *out)
{
	const struct policy_entry *p = policy_find(s->policies, name);

	return p ? put_entry(s->policies, p, out) : ERR(NOT_FOUND, "there is no policy %.64s", name);
}

FALLIBLE enum err policy_list(const struct server *s, struct buf *out)
{
	buf_puts(out, "{\"policies\":[");
	for (uint32_t i = 0; i < s->policies->count; i++) {
		buf_puts(out, i ? "," : "");
		TRY(put_entry(s->policies, s->policies->v[i], out));
	}
	buf_puts(out, "]}");
	return buf_status(out);
}

/* ---- preview ---- */

struct preview {
	struct server *server;
	char name[POLICY_NAME_BYTES_MAX + 1];
	struct policy_entry *entry;    /* as it would be; NULL: as it is */
	policy_preview_fn fn;
	void *user;
};

static void preview_end(struct preview *p, enum err e, struct buf *out)
{
	struct err_info info = *err_last();

	entry_free(p->entry);
	err_restore(&info);
	p->fn(p->user, e, out);
	mem_free(p);
}

static void put_removal(const struct retention_record *r, const struct retention_verdict *v, const struct policy *by, struct buf *out)
{
	buf_json_member(out, "{\"name\":", r->name);
	buf_printf(out, ",\"bytes\":%ju", (uintmax_t)r->bytes);
	buf_json_member(out, ",\"policy\":", by->name);
	buf_printf(out, ",\"why\":\"%s\"}", retention_whys[v->why]);
}

static void put_stay(const struct retention_record *r, const struct retention_verdict *v, struct buf *out)
{
	const char *comma = "";

	buf_json_member(out, "{\"name\":", r->name);
	buf_printf(out, ",\"bytes\":%ju,\"why\":[", (uintmax_t)r->bytes);
	for (int i = 0; i < RETAIN_COUNT; i++)
		if (v->kept >> i & 1) {
			buf_printf(out, "%s\"%s\"", comma, retention_reasons[i]);
			comma = ",";
		}
	buf_puts(out, "]}");
}

static FALLIBLE enum err put_preview(const struct policy_records *records, const struct retention *r, const struct policy *policies,
				     uint32_t own, struct buf *out)
{
	const struct policy *p = &policies[own];
	const char *comma = "";
	uint64_t bytes = 0;

	buf_puts(out, "{\"remove\":[");
	for (uint64_t i = 0; i < r->removal_count; i++) {
		const struct retention_record *one = &records->list.v[r->removals[i]];
		const struct retention_verdict *v = &r->verdicts[r->removals[i]];
		if (!policy_matches(p, one->storage, one->run))
			continue;
		buf_puts(out, comma);
		put_removal(one, v, &policies[v->policy], out);
		bytes += one->bytes;
		comma = ",";
	}
	buf_puts(out, "],\"keep\":[");
	comma = "";
	for (uint64_t i = 0; i < records->list.n; i++) {
		const struct retention_record *one = &records->list.v[i];
		if (!r->verdicts[i].matched || r->verdicts[i].policy != UINT32_MAX || !policy_matches(p, one->storage, one->run))
			continue;
		buf_puts(out, comma);
		put_stay(one, &r->verdicts[i], out);
		comma = ",";
	}
	buf_printf(out, "],\"remove_bytes\":%ju,\"over_bytes\":%ju}", (uintmax_t)bytes, (uintmax_t)r->sums[own].over);
	return buf_status(out);
}

static FALLIBLE enum err preview(const struct preview *p, const struct policy_records *records, struct buf *out)
{
	const struct policies *all = p->server->policies;
	struct policy policies[POLICIES_MAX + 1];
	struct retention_now now = { clock_wall_ms(), clock_wall_is_sane() };
	CLEANUP(retention_free) struct retention result = { 0 };
	uint32_t n = 0, own = UINT32_MAX;

	for (uint32_t i = 0; i < all->count; i++) {
		bool is_own = strcmp(all->v[i]->name, p->name) == 0;
		if (is_own && p->entry)
			continue;
		own = is_own ? n : own;
		policies[n++] = all->v[i]->policy;
	}
	if (p->entry) {
		own = n;
		policies[n++] = p->entry->policy;
	}
	if (own == UINT32_MAX)
		return ERR(NOT_FOUND, "there is no policy %s", p->name);
	TRY(retention_evaluate(records->list.v, records->list.n, policies, n, &now, &result));
	return put_preview(records, &result, policies, own, out);
}

static void on_records(void *user, enum err e, const struct policy_records *records)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(PREVIEW_BYTES_MAX);

	e = e ?: preview(user, records, &out);
	preview_end(user, e, e ? NULL : &out);
}

static void preview_end_later(void *user, enum err e)
{
	preview_end(user, e, NULL);
}

static FALLIBLE enum err check_preview(struct preview *p, const char *name, json_t *doc)
{
	struct storage *st;

	if (!doc)
		return policy_find(p->server->policies, name) ? OK : ERR(NOT_FOUND, "there is no policy %.64s", name);
	TRY(entry_new(name, geteuid(), doc, &p->entry));
	return storage_find(p->server->storages, p->entry->policy.storage, &st);
}

void policy_preview(struct server *s, const char *name, json_t *doc, policy_preview_fn fn, void *user)
{
	struct preview *p = mem_sure(sizeof *p);

	*p = (struct preview){ .server = s, .fn = fn, .user = user };
	snprintf(p->name, sizeof p->name, "%s", name);
	enum err e = check_preview(p, name, doc);
	if (e)
		loop_later(s->loop, preview_end_later, p, e);
	else
		policy_records_gather(&(struct policy_gathering){ s, on_records, policy_removal_failed, p });
}

/* ---- start and end ---- */

/* A policy that cannot be read any more must not keep the daemon down, nor remove anything. */
static enum err take_row(void *user, const struct journal_policy *row)
{
	struct policies *all = user;
	struct policy_entry *p = NULL;
	json_t *doc = NULL;

	enum err e = jval_parse(row->doc, &doc);
	e = e ?: entry_new(row->name, row->uid, doc, &p);
	e = e ?: keep(all, p);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e)
		log_err("a policy cannot be taken up", "policy", row->name, NULL);
	return OK;
}

FALLIBLE enum err policy_all_new(struct server *s, struct policies **out)
{
	struct policies *all = *out = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep policies");
	all->server = s;
	return journal_read_policies(s->journal, take_row, all);
}

void policy_all_free(struct policies *all)
{
	if (!all)
		return;
	policy_all_stop(all);
	for (uint32_t i = 0; i < all->count; i++)
		entry_free(all->v[i]);
	mem_free(all);
}
