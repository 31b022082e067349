/* retention.c: see retention.h.
 *
 * Records are sorted by run; each run is looked at by itself, in both orders. What no rule keeps is wished away, and goes unless a delta
 * that stays needs it: a count per base says how many do, and a base goes once its last delta has. Budgets come last. */
#include "spec/retention.h"

#include <math.h>
#include <stdlib.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/num.h"

enum { FUTURE_MS = 60000, BACK_MS = 3600000 }; /* hosts' clocks differ a little; a job may end long after a later one */

const char *const retention_reasons[RETAIN_COUNT] = {
#define X(NAME, text) text,
	RETENTION_REASONS(X)
#undef X
};
const char *const retention_whys[] = { "not_kept", "ttl", "bytes" };

static const unsigned facts_known = RETAIN_BIT(HELD) | RETAIN_BIT(ALIAS) | RETAIN_BIT(IN_USE) | RETAIN_BIT(IN_FLIGHT) |
				    RETAIN_BIT(UNREADABLE) | RETAIN_BIT(REFUSED);
enum { NONE = UINT32_MAX };

struct evaluation {
	const struct retention_record *records;
	uint32_t n;
	const struct policy *policies;
	uint32_t policy_count;
	struct retention_now now;
	struct retention *out;
	uint32_t *order;               /* records by run, the newest first */
	uint32_t *bases, *needed;      /* per record: the one that it is a delta to; how many deltas that stay need it */
	uint32_t *scratch;             /* room for one run's records */
	bool *in_doubt;
	uint32_t *wished;              /* per record: the policy that wishes it away, and … */
	uint8_t *why;
};

/* ---- orders ---- */

static int by_time(const struct retention_record *a, const struct retention_record *b)
{
	return num_order(b->durable_ms, a->durable_ms) ?: str_cmp(b->job, a->job) ?: num_order(b->step, a->step) ?:
	       str_cmp(b->name, a->name);
}

/* The newest first; those that no job is known of come last. */
static int by_job(const struct retention_record *a, const struct retention_record *b)
{
	return str_cmp(b->job, a->job) ?: by_time(a, b);
}

static int by_run(const struct retention_record *a, const struct retention_record *b)
{
	return str_cmp(a->storage, b->storage) ?: str_cmp(a->run, b->run) ?: by_time(a, b);
}

/* The lowest step first; of equal ones the newest. */
static int by_step(const struct retention_record *a, const struct retention_record *b)
{
	return num_order(a->step, b->step) ?: by_time(a, b);
}

static int oldest_first(const struct retention_record *a, const struct retention_record *b)
{
	return by_time(b, a);
}

typedef int (*compare_fn)(const struct retention_record *a, const struct retention_record *b);

struct sorting {
	const struct retention_record *records;
	compare_fn compare;
};

static int compare(const void *a, const void *b, void *user)
{
	const struct sorting *s = user;

	return s->compare(&s->records[*(const uint32_t *)a], &s->records[*(const uint32_t *)b]);
}

static void sort(const struct evaluation *e, uint32_t *indices, uint64_t n, compare_fn fn)
{
	if (n > 1)
		qsort_r(indices, n, sizeof *indices, compare, &(struct sorting){ e->records, fn });
}

/* ---- a run: order[from … to) ---- */

struct run {
	uint32_t from, to;
	bool is_inverted;              /* times and jobs contradict each other */
	bool is_saved;                 /* some of its checkpoints are not derived */
};

static struct retention_verdict *verdict_at(const struct evaluation *e, uint32_t record)
{
	return &e->out->verdicts[record];
}

static bool is_readable(const struct retention_record *r)
{
	return !(r->facts & RETAIN_BIT(UNREADABLE));
}

/* Copies those of the run whose job is known to scratch, the newest job first. */
static uint32_t take_by_job(const struct evaluation *e, const struct run *run)
{
	uint32_t n = 0;

	for (uint32_t i = run->from; i < run->to; i++)
		if (e->records[e->order[i]].job.n)
			e->scratch[n++] = e->order[i];
	sort(e, e->scratch, n, by_job);
	return n;
}

static bool is_future(const struct evaluation *e, const struct retention_record *r)
{
	return r->durable_ms > e->now.wall_ms + FUTURE_MS;
}

static void look_at_clocks(struct evaluation *e, struct run *run)
{
	int64_t latest = INT64_MIN;
	uint32_t n = take_by_job(e, run);

	for (uint32_t i = n; i-- > 0;) {
		const struct retention_record *r = &e->records[e->scratch[i]];
		run->is_inverted = run->is_inverted || (i > 0 && e->records[e->scratch[i - 1]].durable_ms < r->durable_ms);
		if (is_future(e, r))
			continue;
		e->in_doubt[e->scratch[i]] = latest != INT64_MIN && r->durable_ms < latest - BACK_MS;
		latest = r->durable_ms > latest ? r->durable_ms : latest;
	}
	for (uint32_t i = run->from; i < run->to; i++) {
		const struct retention_record *r = &e->records[e->order[i]];
		e->in_doubt[e->order[i]] = e->in_doubt[e->order[i]] || is_future(e, r) || r->durable_ms < 0;
	}
}

static bool counts(const struct retention_record *r, bool verified_only)
{
	return is_readable(r) && (!verified_only || r->is_verified);
}

static bool takes_place(const struct run *run, const struct retention_record *r)
{
	return !r->is_derived || !run->is_saved;
}

/* The newest `count` that count, by either order, and those of them that were not made in the future: a host whose clock was ahead leaves
 * checkpoints that stay the newest by both orders once its journal is lost and its clock is right. */
static void keep_newest(const struct evaluation *e, const struct run *run, int64_t count, bool verified_only, unsigned bit)
{
	int64_t left = count, left_now = count;

	for (uint32_t i = run->from; i < run->to && left_now > 0; i++) {
		const struct retention_record *r = &e->records[e->order[i]];
		if (!counts(r, verified_only))
			continue;
		if (left > 0 || !is_future(e, r))
			verdict_at(e, e->order[i])->kept |= bit;
		left -= left > 0 && takes_place(run, r);
		left_now -= !is_future(e, r) && takes_place(run, r);
	}
	uint32_t n = run->is_inverted ? take_by_job(e, run) : 0;
	left = count;
	for (uint32_t i = 0; i < n && left > 0; i++)
		if (counts(&e->records[e->scratch[i]], verified_only)) {
			verdict_at(e, e->scratch[i])->kept |= bit;
			left -= takes_place(run, &e->records[e->scratch[i]]);
		}
}

/* ---- the rules of a policy ---- */

static uint32_t take_counting(const struct evaluation *e, const struct run *run, const struct policy *p)
{
	uint32_t n = 0;

	for (uint32_t i = run->from; i < run->to; i++)
		if (counts(&e->records[e->order[i]], p->verified_only))
			e->scratch[n++] = e->order[i];
	return n;
}

/* The first one at or behind each multiple of `every_steps`, and step 0. */
static void keep_every_steps(const struct evaluation *e, const struct run *run, const struct policy *p)
{
	uint32_t n = take_counting(e, run, p);
	int64_t last = -1;

	sort(e, e->scratch, n, by_step);
	for (uint32_t i = 0; i < n; i++) {
		int64_t step = e->records[e->scratch[i]].step, part = step / p->every_steps;
		if (step < 0 || part == last)
			continue;
		if (part > 0 || step == 0)
			verdict_at(e, e->scratch[i])->kept |= RETAIN_BIT(EVERY_STEPS);
		last = part > 0 || step == 0 ? part : last;
	}
}

/* The first one of each period since 1970, and what has a time in doubt. */
static void keep_every(const struct evaluation *e, const struct run *run, const struct policy *p)
{
	uint32_t n = take_counting(e, run, p);
	int64_t last = -1;

	for (uint32_t i = n; i-- > 0;) {
		uint32_t at = e->scratch[i];
		if (e->in_doubt[at] || !e->now.is_sane) {
			verdict_at(e, at)->kept |= RETAIN_BIT(CLOCK);
			continue;
		}
		int64_t part = e->records[at].durable_ms / p->every_ms;
		if (part != last)
			verdict_at(e, at)->kept |= RETAIN_BIT(EVERY);
		last = part;
	}
}

static bool metric_of(const struct retention_record *r, struct str metric, double *out)
{
	const json_t *v = r->metrics ? json_object_getn(r->metrics, metric.p, metric.n) : NULL;

	*out = json_number_value(v);
	return json_is_number(v) && isfinite(*out);
}

/* The lowest value first; of equal ones the newest, which stands first in the list. */
struct valued {
	double value;
	uint32_t place, record;
};

static int by_value(const void *a, const void *b)
{
	const struct valued *x = a, *y = b;

	return num_order(x->value, y->value) ?: num_order(x->place, y->place);
}

static FALLIBLE enum err keep_best(const struct evaluation *e, const struct run *run, const struct policy *p)
{
	uint32_t n = take_counting(e, run, p), count = 0;
	CLEANUP(mem_free_ptr) struct valued *all = mem_zalloc(n, sizeof *all);
	double value;

	NEED(all, "no memory to look at %u checkpoints", n);
	for (uint32_t i = 0; i < n; i++)
		if (metric_of(&e->records[e->scratch[i]], p->best.metric, &value))
			all[count++] = (struct valued){ p->best.max ? -value : value, i, e->scratch[i] };
	if (count > 1)
		qsort(all, count, sizeof *all, by_value);
	for (uint32_t i = 0; i < count && i < p->best.count; i++)
		verdict_at(e, all[i].record)->kept |= RETAIN_BIT(BEST);
	return OK;
}

static FALLIBLE enum err keep_of_policy(const struct evaluation *e, const struct run *run, const struct policy *p)
{
	if (p->last)
		keep_newest(e, run, p->last, p->verified_only, RETAIN_BIT(LAST));
	if (p->every_steps)
		keep_every_steps(e, run, p);
	if (p->every_ms)
		keep_every(e, run, p);
	return p->best.count ? keep_best(e, run, p) : OK;
}

/* ---- what goes ---- */

static void wish_away(const struct evaluation *e, uint32_t record, uint32_t policy, enum retention_why why)
{
	if (e->wished[record] == NONE) {
		e->wished[record] = policy;
		e->why[record] = (uint8_t)why;
	}
}

/* Of a record that no rule keeps: does the policy wish it away by itself, its budget apart? If not, *stays gets why. */
static void ask_policy(const struct evaluation *e, uint32_t record, uint32_t policy, unsigned *stays)
{
	const struct policy *p = &e->policies[policy];
	const struct retention_record *r = &e->records[record];

	if (p->is_paused)
		*stays |= RETAIN_BIT(PAUSED);
	else if (!p->ttl_ms && p->bytes < 0)
		wish_away(e, record, policy, RETENTION_NOT_KEPT);
	else if (p->ttl_ms && (e->in_doubt[record] || !e->now.is_sane))
		*stays |= RETAIN_BIT(CLOCK);
	else if (p->ttl_ms && e->now.wall_ms - r->durable_ms >= p->ttl_ms)
		wish_away(e, record, policy, RETENTION_TTL);
	else if (p->ttl_ms)
		*stays |= RETAIN_BIT(TTL);
}

static FALLIBLE enum err look_at_run(struct evaluation *e, struct run *run)
{
	const struct retention_record *first = &e->records[e->order[run->from]];
	CLEANUP(mem_free_ptr) uint32_t *matching = mem_zalloc(e->policy_count, sizeof *matching);
	uint32_t count = 0;

	NEED(matching, "no memory for policies");
	for (uint32_t k = 0; k < e->policy_count; k++)
		if (policy_matches(&e->policies[k], first->storage, first->run))
			matching[count++] = k;
	if (count == 0)
		return OK;
	look_at_clocks(e, run);
	for (uint32_t i = run->from; i < run->to; i++)
		run->is_saved = run->is_saved || !e->records[e->order[i]].is_derived;
	keep_newest(e, run, 1, false, RETAIN_BIT(NEWEST));
	keep_newest(e, run, 1, true, RETAIN_BIT(NEWEST_VERIFIED));
	for (uint32_t k = 0; k < count; k++)
		TRY(keep_of_policy(e, run, &e->policies[matching[k]]));
	for (uint32_t i = run->from; i < run->to; i++) {
		struct retention_verdict *v = verdict_at(e, e->order[i]);
		unsigned stays = 0;
		v->matched = true;
		v->kept |= e->records[e->order[i]].facts & facts_known;
		for (uint32_t k = 0; k < count && !v->kept; k++)
			ask_policy(e, e->order[i], matching[k], &stays);
		v->kept |= e->wished[e->order[i]] == NONE ? stays : 0;
	}
	return OK;
}

static FALLIBLE enum err look_at_runs(struct evaluation *e)
{
	for (uint32_t i = 0, end; i < e->n; i = end) {
		const struct retention_record *first = &e->records[e->order[i]];
		for (end = i + 1; end < e->n; end++) {
			const struct retention_record *r = &e->records[e->order[end]];
			if (!str_eq(r->run, first->run) || !str_eq(r->storage, first->storage))
				break;
		}
		TRY(look_at_run(e, &(struct run){ .from = i, .to = end }));
	}
	return OK;
}

/* ---- bases ---- */

static FALLIBLE enum err put_key(struct buf *b, struct str storage, struct str name)
{
	b->len = 0;
	buf_put(b, storage.p, storage.n);
	buf_putc(b, ':');
	buf_put(b, name.p, name.n);
	return buf_status(b);
}

struct names {
	struct map by_name;
	struct buf keys, one;
};

static void names_free(struct names *names)
{
	map_free(&names->by_name);
	buf_free(&names->keys);
	buf_free(&names->one);
}

/* Only where there are deltas are names looked for. */
static FALLIBLE enum err find_bases(struct evaluation *e)
{
	CLEANUP(names_free) struct names names = { .keys = BUF_INIT(UINT32_MAX), .one = BUF_INIT(1 << 20) };
	CLEANUP(mem_free_ptr) uint64_t *at = mem_zalloc((uint64_t)e->n + 1, sizeof *at);
	bool any = false;

	NEED(at, "no memory for names");
	for (uint32_t i = 0; i < e->n; i++) {
		e->bases[i] = NONE;
		any = any || e->records[i].base.n;
	}
	for (uint32_t i = 0; i < e->n && any; i++) {
		TRY(put_key(&names.one, e->records[i].storage, e->records[i].name));
		buf_put(&names.keys, names.one.p, names.one.len);
		at[i + 1] = names.keys.len;
	}
	TRY(buf_status(&names.keys));
	for (uint32_t i = 0; i < e->n && any; i++)
		TRY(map_put(&names.by_name, (struct str){ (char *)names.keys.p + at[i], at[i + 1] - at[i] }, i));
	for (uint32_t i = 0; i < e->n && any; i++) {
		const struct retention_record *r = &e->records[i];
		if (!r->base.n)
			continue;
		TRY(put_key(&names.one, r->base_storage, r->base));
		e->bases[i] = map_get(&names.by_name, (struct str){ (char *)names.one.p, names.one.len });
		if (e->bases[i] != MAP_NONE)
			e->needed[e->bases[i]]++;
	}
	return OK;
}

/* All of the run of a delta whose base is not known may be that base. */
static void keep_for_unknown(const struct evaluation *e)
{
	for (uint32_t i = 0, end; i < e->n; i = end) {
		const struct retention_record *first = &e->records[e->order[i]];
		bool unknown = false;
		for (end = i; end < e->n; end++) {
			const struct retention_record *r = &e->records[e->order[end]];
			if (!str_eq(r->run, first->run) || !str_eq(r->storage, first->storage))
				break;
			unknown = unknown || (r->is_delta && !r->base.n);
		}
		for (uint32_t k = i; k < end && unknown; k++)
			verdict_at(e, e->order[k])->kept |= verdict_at(e, e->order[k])->matched ? RETAIN_BIT(BASE) : 0;
	}
}

static void let_go(const struct evaluation *e, uint32_t record)
{
	struct retention *out = e->out;

	out->verdicts[record].policy = e->wished[record];
	out->verdicts[record].why = e->why[record];
	out->removals[out->removal_count++] = record;
}

static bool may_go(const struct evaluation *e, uint32_t record)
{
	const struct retention_verdict *v = verdict_at(e, record);

	return v->matched && !v->kept && e->wished[record] != NONE && v->policy == NONE && e->needed[record] == 0;
}

/* Lets the record go, and the bases behind it that were waiting for that. */
static void let_go_chain(const struct evaluation *e, uint32_t record)
{
	while (record != NONE && may_go(e, record)) {
		let_go(e, record);
		record = e->bases[record];
		if (record != NONE)
			e->needed[record]--;
	}
}

static void let_go_all(const struct evaluation *e)
{
	for (uint32_t i = e->n; i-- > 0;)
		let_go_chain(e, e->order[i]);
}

/* ---- budgets ---- */

static uint64_t add(uint64_t sum, uint64_t more)
{
	return sum > UINT64_MAX - more ? UINT64_MAX : sum + more;
}

/* Is the policy for the run of this record? Asked of records by run, each run is compared once. */
struct matching {
	const struct policy *policy;
	const struct retention_record *last;
	bool matches;
};

static bool is_for(struct matching *m, const struct retention_record *r)
{
	if (!m->last || !str_eq(m->last->run, r->run) || !str_eq(m->last->storage, r->storage))
		m->matches = policy_matches(m->policy, r->storage, r->run);
	m->last = r;
	return m->matches;
}

static uint64_t left_of(const struct evaluation *e, const struct policy *p, uint32_t *candidates, uint32_t *count)
{
	struct matching m = { .policy = p };
	uint64_t bytes = 0;

	*count = 0;
	for (uint32_t i = e->n; i-- > 0;) {
		uint32_t at = e->order[i];
		const struct retention_record *r = &e->records[at];
		const struct retention_verdict *v = verdict_at(e, at);
		if (!v->matched || v->policy != NONE || !is_for(&m, r))
			continue;
		bytes = add(bytes, r->bytes);
		if (!(v->kept & ~(RETAIN_BIT(TTL) | RETAIN_BIT(PAUSED))) && !e->in_doubt[at])
			candidates[(*count)++] = at;
	}
	return bytes;
}

/* The oldest go until the rest is within the budget; bases, in a further pass, once their deltas have gone. */
static void keep_budget(const struct evaluation *e, uint32_t policy)
{
	const struct policy *p = &e->policies[policy];
	uint32_t count, gone;
	uint64_t bytes = left_of(e, p, e->scratch, &count);

	sort(e, e->scratch, count, oldest_first);
	do {
		gone = 0;
		for (uint32_t i = 0; i < count && bytes > (uint64_t)p->bytes; i++) {
			uint32_t at = e->scratch[i];
			struct retention_verdict *v = verdict_at(e, at);
			if (v->policy != NONE || e->needed[at])
				continue;
			v->kept = 0;
			e->wished[at] = policy;
			e->why[at] = RETENTION_BYTES;
			let_go(e, at);
			if (e->bases[at] != NONE)
				e->needed[e->bases[at]]--;
			bytes -= e->records[at].bytes;
			gone++;
		}
	} while (gone && bytes > (uint64_t)p->bytes);
	e->out->sums[policy].over = bytes > (uint64_t)p->bytes ? bytes - (uint64_t)p->bytes : 0;
}

/* ---- the end ---- */

/* Says of checkpoints that stay although no rule keeps them why: as a base, within a budget, or for their time. */
static void say_why(const struct evaluation *e)
{
	for (uint32_t i = 0; i < e->n; i++) {
		struct retention_verdict *v = verdict_at(e, i);
		if (!v->matched || v->policy != NONE)
			continue;
		if (e->needed[i])
			v->kept |= RETAIN_BIT(BASE);
		else if (!v->kept)
			v->kept = e->in_doubt[i] ? RETAIN_BIT(CLOCK) : RETAIN_BIT(BYTES);
	}
}

static void sum_up(const struct evaluation *e, uint32_t policy)
{
	struct matching m = { .policy = &e->policies[policy] };
	struct retention_sum *sum = &e->out->sums[policy];

	for (uint32_t i = 0; i < e->n; i++) {
		const struct retention_record *r = &e->records[e->order[i]];
		const struct retention_verdict *v = verdict_at(e, e->order[i]);
		if (!v->matched || !is_for(&m, r))
			continue;
		sum->checkpoints++;
		sum->bytes = add(sum->bytes, r->bytes);
		sum->removals += v->policy != NONE;
		sum->removed_bytes = add(sum->removed_bytes, v->policy != NONE ? r->bytes : 0);
	}
}

static FALLIBLE enum err evaluate(struct evaluation *e)
{
	for (uint32_t i = 0; i < e->n; i++) {
		e->order[i] = i;
		e->wished[i] = NONE;
		e->out->verdicts[i].policy = NONE;
	}
	sort(e, e->order, e->n, by_run);
	TRY(look_at_runs(e));
	TRY(find_bases(e));
	keep_for_unknown(e);
	let_go_all(e);
	for (uint32_t k = 0; k < e->policy_count; k++)
		if (e->policies[k].bytes >= 0 && !e->policies[k].is_paused)
			keep_budget(e, k);
	say_why(e);
	for (uint32_t k = 0; k < e->policy_count; k++)
		sum_up(e, k);
	return OK;
}

static void evaluation_free(struct evaluation *e)
{
	mem_free(e->order);
	mem_free(e->bases);
	mem_free(e->needed);
	mem_free(e->scratch);
	mem_free(e->in_doubt);
	mem_free(e->wished);
	mem_free(e->why);
}

FALLIBLE enum err retention_evaluate(const struct retention_record *records, uint64_t n, const struct policy *policies,
				     uint32_t policy_count, const struct retention_now *now, struct retention *out)
{
	CLEANUP(evaluation_free) struct evaluation e = { .records = records, .n = (uint32_t)n, .policies = policies,
							 .policy_count = policy_count, .now = *now, .out = out };

	*out = (struct retention){ 0 };
	if (n >= NONE)
		return ERR(LIMIT_EXCEEDED, "too many checkpoints");
	out->verdicts = mem_zalloc(n, sizeof *out->verdicts);
	out->removals = mem_zalloc(n, sizeof *out->removals);
	out->sums = mem_zalloc(policy_count, sizeof *out->sums);
	e.order = mem_zalloc(n, sizeof *e.order);
	e.bases = mem_zalloc(n, sizeof *e.bases);
	e.needed = mem_zalloc(n, sizeof *e.needed);
	e.scratch = mem_zalloc(n, sizeof *e.scratch);
	e.in_doubt = mem_zalloc(n, sizeof *e.in_doubt);
	e.wished = mem_zalloc(n, sizeof *e.wished);
	e.why = mem_zalloc(n, sizeof *e.why);
	bool bad = !out->verdicts || !out->removals || !out->sums || !e.order || !e.bases || !e.needed || !e.scratch || !e.in_doubt ||
		   !e.wished || !e.why;
	enum err err = bad ? ERR(NO_MEMORY, "no memory to look at %ju checkpoints", (uintmax_t)n) : evaluate(&e);
	if (err)
		retention_free(out);
	return err;
}

void retention_free(struct retention *r)
{
	mem_free(r->verdicts);
	mem_free(r->removals);
	mem_free(r->sums);
	*r = (struct retention){ 0 };
}
