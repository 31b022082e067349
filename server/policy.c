/* policy.c: see policy.h: what policies are, and previews. policy_run.c removes. */
#include "server/policy.h"

#include <stdio.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/num.h"
#include "server/catalogue.h"
#include "server/parts.h"
#include "server/policy_impl.h"
#include "server/service_clock.h"

enum { RUNS_NAMED = 5, RUNS_COUNTED = 100000, PREVIEW_BYTES_MAX = 256 << 20 };

static enum err read_policy(struct server *s, struct follower *f, bool is_new)
{
	struct policy_entry *p = policy_of(f);
	struct storage *st;

	TRY(policy_read(f->doc, &p->policy));
	p->policy.name = str_of(f->name);
	json_object_del(f->doc, "confirm");
	return is_new ? storage_find(s->storages, p->policy.storage, &st) : OK;
}

/* Removals by the policy still count; figures of the last look do not. */
static void replace(struct follower *old, struct follower *fresh)
{
	struct policy_entry *p = policy_of(old);

	p->policy = policy_of(fresh)->policy;
	p->policy.name = str_of(old->name);
	p->sum = (struct retention_sum){ 0 };
	p->looked_ms = 0;
	p->failed = 0;
}

/* ---- put ---- */

struct putting {
	struct follower *fresh;
	struct principal who;
	done_fn fn;
	void *user;
	struct map runs;               /* that it matches; the keys are in: */
	struct arena *keys;
	char named[RUNS_NAMED][64];
	uint64_t run_count, checkpoints;
	enum err failed;
};

/* e: it is not kept. */
static void put_end(void *user, enum err e)
{
	struct putting *p = user;
	struct err_info info = *err_last();

	map_free(&p->runs);
	arena_free(p->keys);
	if (!e) {
		follower_keep(p->fresh, &p->who, p->fn, p->user);
	} else {
		follower_free(p->fresh);
		err_restore(&info);
		p->fn(p->user, e);
	}
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

/* Says what the pattern matches now, to whoever has to say it twice. */
static FALLIBLE enum err refuse(const struct putting *p)
{
	const struct policy *q = &policy_of(p->fresh)->policy;
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

static void on_all_matched(void *user, enum err e)
{
	struct putting *p = user;

	e = e ?: p->failed;
	if (!e && (p->run_count == 0 || policy_matches_all(&policy_of(p->fresh)->policy)))
		e = refuse(p);
	put_end(p, e);
}

static void policy_set(struct followers *all, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user)
{
	struct putting *p = mem_sure(sizeof *p);

	*p = (struct putting){ .who = *who, .fn = fn, .user = user };
	if (who->admin && who->uid) /* the token's holder is dcpd's own user */
		p->who.uid = geteuid();
	enum err e = follower_make(all, &p->who, name, doc, &p->fresh);
	if (!e && !(p->keys = arena_new(64 << 20)))
		e = ERR(NO_MEMORY, "cannot keep a policy");
	if (e || json_is_true(json_object_get(doc, "confirm")))
		loop_later(all->server->loop, put_end, p, e);
	else
		catalogue_each(all->server, policy_of(p->fresh)->policy.storage.p, policy_of(p->fresh)->policy.match.p, on_matched,
			       on_all_matched, p);
}

/* ---- told ---- */

static enum err put_status(const struct follower *f, bool, struct buf *out)
{
	const struct policy_entry *p = (const void *)f;
	const char *problem = f->all->server->policies->problem;
	const struct retention_sum *sum = &p->sum;
	char stamp[CLOCK_TEXT_MAX];

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
	if (problem[0])
		buf_json_str(out, str_of(problem));
	else
		buf_puts(out, "null");
	buf_putc(out, '}');
	return buf_status(out);
}

/* ---- preview ---- */

struct preview {
	struct server *server;
	char name[FOLLOWER_NAME_MAX + 1];
	struct follower *fresh;        /* as it would be; NULL: as it is */
	policy_preview_fn fn;
	void *user;
};

static void preview_end(struct preview *p, enum err e, struct buf *out)
{
	struct err_info info = *err_last();

	follower_free(p->fresh);
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
	struct policy policies[FOLLOWERS_MAX + 1];
	struct retention_now now = { clock_wall_ms(), clock_wall_is_sane() };
	CLEANUP(retention_free) struct retention result = { 0 };
	uint32_t n = 0, own = UINT32_MAX;

	followers_each(const struct policy_entry, one, p->server->policies->list) {
		bool is_own = strcmp(one->base.name, p->name) == 0;
		if (is_own && p->fresh)
			continue;
		own = is_own ? n : own;
		policies[n++] = one->policy;
	}
	if (p->fresh) {
		own = n;
		policies[n++] = policy_of(p->fresh)->policy;
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

void policy_preview(struct server *s, const struct principal *who, struct str name, const json_t *doc, policy_preview_fn fn,
		    void *user)
{
	struct followers *all = s->policies->list;
	struct preview *p = mem_sure(sizeof *p);
	struct follower *as_is;

	*p = (struct preview){ .server = s, .fn = fn, .user = user };
	enum err e = doc ? follower_new(all, who->uid, name, doc, &p->fresh) : follower_need(all, who, name, &as_is);
	snprintf(p->name, sizeof p->name, "%.*s", (int)num_min(name.n, FOLLOWER_NAME_MAX), name.p);
	if (e)
		loop_later(s->loop, preview_end_later, p, e);
	else
		policy_records_gather(&(struct policy_gathering){ s, on_records, policy_removal_failed, p });
}

/* ---- start and end ---- */

static const struct follower_kind policy_kind = {
	.number = JOURNAL_POLICY, .word = "policy", .words = "policies", .size = sizeof(struct policy_entry),
	.read = read_policy, .set = policy_set, .replace = replace, .drop = follower_free, .changed = policy_changed, .put = put_status,
};

FALLIBLE enum err policy_all_new(struct server *s)
{
	s->policies = mem_zalloc(1, sizeof *s->policies);
	NEED(s->policies, "cannot keep policies");
	s->policies->server = s;
	enum err e = followers_new(s, &policy_kind);
	s->policies->list = s->followers[JOURNAL_POLICY];
	return e;
}

void policy_all_free(struct server *s)
{
	if (s->policies)
		policy_all_stop(s->policies);
	mem_free(s->policies);
	followers_free(s->followers[JOURNAL_POLICY]);
}
