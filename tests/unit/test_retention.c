/* Tests of retention: which checkpoints policies remove, and why each other one stays. No random set loses one that may never go. */
#include "lib/t_json.h"

#include <stdlib.h>

#include "base/mem.h"
#include "spec/retention_record.h"

enum { MANY = 40, DAY = 86400000, HOUR = 3600000 };
static const int64_t T0 = 1700000000000;

static struct retention_record records[MANY];
static char names[MANY][32], jobs[MANY][32];
static uint64_t count;
static struct policy policies[4];
static uint32_t policy_count;
static struct retention_now now;
static struct retention result;

static int setup(void **state)
{
	(void)state;
	count = policy_count = 0;
	now = (struct retention_now){ .wall_ms = T0, .is_sane = true };
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	retention_free(&result);
	return 0;
}

/* step-100, step-200 … of a run, an hour apart, the newest an hour old, each of 10 bytes. */
static struct retention_record *add(const char *run, uint64_t i, uint64_t of)
{
	struct retention_record *r = &records[count];
	size_t n = (size_t)snprintf(names[count], sizeof names[0], "%s/step-%ju", run, (uintmax_t)(i + 1) * 100);

	snprintf(jobs[count], sizeof jobs[0], "J%06ju", (uintmax_t)count);
	*r = (struct retention_record){ .storage = STR("main"), .name = { names[count], n }, .run = { names[count], strlen(run) },
					.job = str_of(jobs[count]), .step = (int64_t)(i + 1) * 100, .bytes = 10,
					.durable_ms = T0 - (int64_t)(of - i) * HOUR };
	count++;
	return r;
}

static void add_run(const char *run, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		add(run, i, n);
}

static struct policy *rule(const char *match)
{
	policies[policy_count] = (struct policy){ .name = STR("p"), .storage = STR("main"), .match = str_of(match), .bytes = -1 };
	return &policies[policy_count++];
}

static void evaluate(void)
{
	retention_free(&result);
	T_OK(retention_evaluate(records, count, policies, policy_count, &now, &result));
}

/* 'x': goes, '.': stays; one for each record. */
static void assert_goes(const char *expected)
{
	char got[MANY + 1] = "";

	evaluate();
	for (uint64_t i = 0; i < count; i++)
		got[i] = result.verdicts[i].policy == UINT32_MAX ? '.' : 'x';
	assert_string_equal(got, expected);
	for (uint64_t i = 0; i < count; i++)
		assert_true(result.verdicts[i].policy != UINT32_MAX || !result.verdicts[i].matched || result.verdicts[i].kept);
}

static void assert_why(uint64_t i, unsigned bits)
{
	assert_int_equal(result.verdicts[i].kept, bits);
}

static void test_the_last_ones_stay(void **state)
{
	(void)state;
	add_run("a", 5);
	add_run("b", 3);
	assert_goes("........");
	assert_false(result.verdicts[0].matched);
	rule("a")->last = 2;
	assert_goes("xxx.....");
	assert_why(4, RETAIN_BIT(NEWEST) | RETAIN_BIT(LAST));
	assert_why(3, RETAIN_BIT(LAST));
	assert_int_equal(result.removals[0], 0);
	assert_int_equal(result.sums[0].checkpoints, 5);
	assert_int_equal(result.sums[0].removed_bytes, 30);
	policies[0].match = STR("*");
	assert_goes("xxx..x..");
	rule("a")->last = 4; /* the union of what policies keep */
	assert_goes("x....x..");
}

/* A reshard of an old step is no newer step, and takes no place of one. */
static void test_what_is_made_of_others_takes_no_place(void **state)
{
	(void)state;
	add_run("a", 5);
	rule("a")->last = 2;
	records[4].is_derived = true;
	assert_goes("xx...");
	assert_why(3, RETAIN_BIT(NEWEST) | RETAIN_BIT(LAST));
	records[2].is_derived = true; /* it goes when the step behind it takes the last place */
	assert_goes("x....");
	records[3].is_derived = true;
	assert_goes(".....");
	for (int i = 0; i < 5; i++)
		records[i].is_derived = true; /* nothing else is there */
	assert_goes("xxx..");
}

static void test_steps_and_times(void **state)
{
	(void)state;
	add_run("a", 12);
	rule("a")->every_steps = 500;
	assert_goes("xxxx.xxxx.x.");
	records[4].step = 501; /* the first one behind 500 */
	assert_goes("xxxx.xxxx.x.");
	policies[0].every_steps = 0;
	policies[0].every_ms = 4 * (int64_t)HOUR;
	evaluate();
	uint64_t stay = 0;
	for (uint64_t i = 0; i < count; i++)
		stay += result.verdicts[i].kept & RETAIN_BIT(EVERY) ? 1 : 0;
	assert_in_range(stay, 3, 4);
	now.is_sane = false;
	assert_goes("............");
	assert_why(1, RETAIN_BIT(CLOCK));
}

static void test_the_best(void **state)
{
	static const double loss[] = { 3, 1, 2, 1, 9 };
	json_t *metrics[5];

	(void)state;
	add_run("a", 5);
	for (uint64_t i = 0; i < 5; i++)
		records[i].metrics = metrics[i] = json_pack("{s:f}", "loss", loss[i]);
	struct policy *p = rule("a");
	p->best.metric = STR("loss");
	p->best.count = 2;
	assert_goes("x.x..");
	assert_why(1, RETAIN_BIT(BEST));
	p->best.count = 1; /* of equal ones the newest */
	assert_goes("xxx..");
	p->best.max = true;
	assert_goes("xxxx.");
	p->best.metric = STR("accuracy");
	assert_goes("xxxx.");
	for (uint64_t i = 0; i < 5; i++)
		json_decref(metrics[i]);
}

static void test_age(void **state)
{
	(void)state;
	add_run("a", 5);
	rule("a")->ttl_ms = 3 * HOUR;
	assert_goes("xxx..");
	assert_int_equal(result.verdicts[0].why, RETENTION_TTL);
	assert_why(3, RETAIN_BIT(TTL));
	policies[0].last = 3;
	assert_goes("xx...");
	policies[0].ttl_ms = DAY;
	assert_goes(".....");
	now.wall_ms += 365ll * DAY;
	assert_goes("xx...");
	now.is_sane = false;
	assert_goes(".....");
	assert_why(0, RETAIN_BIT(CLOCK));
}

static void test_a_paused_policy_keeps_and_removes_nothing(void **state)
{
	(void)state;
	add_run("a", 5);
	rule("a")->last = 2;
	assert_goes("xxx..");
	policies[0].is_paused = true;
	assert_goes(".....");
	assert_why(0, RETAIN_BIT(PAUSED));
	assert_int_equal(result.sums[0].removals, 0);
	policies[0].ttl_ms = HOUR;
	policies[0].bytes = 10;
	assert_goes(".....");
	assert_int_equal(result.sums[0].over, 0);
	rule("a")->last = 1; /* one that is not paused removes what neither keeps */
	assert_goes("xxx..");
	policies[1].bytes = 0;
	assert_goes("xxx..");
	assert_int_equal(result.verdicts[0].policy, 1);
}

static void test_a_budget(void **state)
{
	(void)state;
	add_run("a", 5);
	add_run("b", 5);
	struct policy *p = rule("*");
	p->bytes = 70;
	assert_goes("xx...x...."); /* the oldest of all of its runs */
	assert_int_equal(result.verdicts[0].why, RETENTION_BYTES);
	assert_why(4, RETAIN_BIT(NEWEST));
	assert_why(3, RETAIN_BIT(BYTES));
	assert_int_equal(result.sums[0].over, 0);
	p->last = 4;
	assert_goes("x....x....");
	assert_int_equal(result.sums[0].over, 10);
	p->last = 0;
	p->bytes = 0;
	assert_goes("xxxx.xxxx.");
	assert_int_equal(result.sums[0].over, 20);
}

/* A clock that was a year ahead, and a journal that was lost: by times and by ids the old ones are newer than what is saved now. */
static void test_what_was_saved_in_the_future_is_not_alone_the_newest(void **state)
{
	(void)state;
	add_run("a", 6);
	records[4].durable_ms += 365ll * DAY;
	records[5].durable_ms += 365ll * DAY;
	records[5].is_verified = records[2].is_verified = true;
	rule("a")->last = 1;
	assert_goes("xx..x."); /* of each of the two the newest, and the newest verified */
	assert_why(3, RETAIN_BIT(NEWEST) | RETAIN_BIT(LAST));
	assert_why(2, RETAIN_BIT(NEWEST_VERIFIED));
}

static void test_clocks_that_jump(void **state)
{
	(void)state;
	add_run("a", 6);
	rule("a")->last = 2;
	records[5].durable_ms -= 3650ll * DAY; /* saved while the clock was far back */
	assert_goes("xxx...");
	assert_true(result.verdicts[5].kept & RETAIN_BIT(NEWEST));
	policies[0] = (struct policy){ .storage = STR("main"), .match = STR("a"), .ttl_ms = 5 * HOUR / 2, .bytes = -1 };
	add("a", 6, 6);
	records[6].durable_ms = T0;
	assert_goes("xxxx...");
	assert_why(5, RETAIN_BIT(CLOCK));
	policies[0].bytes = 0;
	assert_goes("xxxxx..");
	records[2].durable_ms = T0 + DAY; /* it was ahead, once */
	records[3].durable_ms = -1;
	assert_goes("xx..x..");
	assert_why(3, RETAIN_BIT(CLOCK));
}

static void test_what_holds_against_every_policy(void **state)
{
	(void)state;
	add_run("a", 9);
	rule("a")->last = 1;
	records[0].facts = RETAIN_BIT(HELD);
	records[1].facts = RETAIN_BIT(ALIAS);
	records[2].facts = RETAIN_BIT(IN_USE);
	records[3].facts = RETAIN_BIT(IN_FLIGHT);
	records[4].facts = RETAIN_BIT(REFUSED);
	records[5].is_verified = true;
	assert_goes("......xx.");
	assert_why(5, RETAIN_BIT(NEWEST_VERIFIED));
	records[8].facts = RETAIN_BIT(UNREADABLE); /* then the one before is the newest that can be read */
	assert_goes("......x..");
	assert_why(7, RETAIN_BIT(NEWEST) | RETAIN_BIT(LAST));
	assert_why(8, RETAIN_BIT(UNREADABLE));
}

static void test_only_verified_ones_count(void **state)
{
	(void)state;
	add_run("a", 6);
	rule("a")->last = 2;
	policies[0].verified_only = true;
	records[1].is_verified = records[2].is_verified = records[3].is_verified = true;
	assert_goes("xx..x.");
	assert_why(5, RETAIN_BIT(NEWEST));
}

static void base(uint64_t of, uint64_t is)
{
	records[of].is_delta = true;
	records[of].base_storage = records[is].storage;
	records[of].base = records[is].name;
}

static void test_deltas_and_their_bases(void **state)
{
	(void)state;
	add_run("a", 5);
	add_run("other", 1);
	rule("a")->last = 1;
	base(2, 0);
	base(4, 2);
	assert_goes(".x.x..");
	assert_why(0, RETAIN_BIT(BASE));
	assert_why(2, RETAIN_BIT(BASE));
	records[4].base.n = 0;
	records[4].is_delta = false;
	assert_goes("xxxx..");
	for (uint64_t i = 0; i < 4; i++) /* a base never goes before its delta */
		assert_true(result.removals[i] != 0 || i > 0);
	base(5, 1); /* in another run, which no policy is for */
	assert_goes("x.xx..");
	base(0, 2); /* a circle, such as nobody can make */
	assert_goes("...x..");
	records[2].is_delta = true;
	records[2].base.n = 0; /* of an unknown base: any of its run */
	assert_goes("......");
}

static void test_a_budget_takes_deltas_before_their_bases(void **state)
{
	(void)state;
	add_run("a", 4);
	rule("a")->bytes = 20;
	base(2, 0);
	assert_goes(".xx.");
	policies[0].bytes = 10;
	assert_goes("xxx.");
	assert_int_equal(result.removals[2], 0);
}

/* ---- random sets ---- */

static uint32_t seed;

static uint32_t draw(uint32_t below)
{
	seed = seed * 1664525 + 1013904223;
	return (seed >> 8) % below;
}

static void draw_set(void)
{
	(void)setup(NULL);
	for (uint64_t i = draw(MANY); i-- > 0;) {
		struct retention_record *r = add(draw(2) ? "a" : "b", draw(12), 12);
		snprintf(names[count - 1] + r->run.n, sizeof names[0] - r->run.n, "/s%ju", (uintmax_t)count);
		r->name.n = strlen(names[count - 1]);
		r->bytes = draw(100);
		r->facts = draw(4) ? 0 : 1u << draw(RETAIN_CLOCK);
		r->facts &= ~(RETAIN_BIT(NEWEST) | RETAIN_BIT(NEWEST_VERIFIED) | RETAIN_BIT(BASE));
		r->is_verified = draw(3) == 0;
		r->durable_ms += draw(5) ? 0 : ((int64_t)draw(100) - 50) * DAY;
		r->job.n = draw(6) ? r->job.n : 0;
		if (count > 1 && draw(5) == 0)
			base(count - 1, draw((uint32_t)count - 1));
	}
	for (uint32_t k = 1 + draw(3); k-- > 0;) {
		struct policy *p = rule(draw(2) ? "*" : "a");
		p->last = draw(3);
		p->every_steps = draw(3) ? 0 : 300;
		p->every_ms = draw(4) ? 0 : 5 * HOUR;
		p->ttl_ms = draw(3) ? 0 : 1 + (int64_t)draw(20) * HOUR;
		p->bytes = draw(3) ? -1 : (int64_t)draw(500);
		p->verified_only = draw(4) == 0;
		p->is_paused = draw(6) == 0;
	}
	now.is_sane = draw(4) > 0;
	now.wall_ms += draw(6) ? 0 : ((int64_t)draw(1000) - 500) * DAY;
}

static bool goes(uint64_t i)
{
	return result.verdicts[i].policy != UINT32_MAX;
}

static bool is_newer(uint64_t a, uint64_t b, bool by_job)
{
	return by_job ? str_cmp(records[a].job, records[b].job) > 0 : records[a].durable_ms > records[b].durable_ms;
}

/* Do times and jobs contradict each other in the run? */
static bool is_inverted(struct str run)
{
	for (uint64_t i = 0; i < count; i++)
		for (uint64_t k = 0; k < count; k++)
			if (str_eq(records[i].run, run) && str_eq(records[k].run, run) && records[i].job.n && records[k].job.n &&
			    is_newer(i, k, true) && is_newer(k, i, false))
				return true;
	return false;
}

/* Of those of i's run that can be read (and are verified), none is newer. */
static bool is_newest(uint64_t i, bool verified, bool by_job)
{
	if (records[i].facts & RETAIN_BIT(UNREADABLE) || (verified && !records[i].is_verified) ||
	    (by_job && (!records[i].job.n || !is_inverted(records[i].run))))
		return false;
	for (uint64_t k = 0; k < count; k++)
		if (k != i && str_eq(records[k].run, records[i].run) && !(records[k].facts & RETAIN_BIT(UNREADABLE)) &&
		    (!verified || records[k].is_verified) && !is_newer(i, k, by_job))
			return false;
	return true;
}

static void check_set(void)
{
	CLEANUP(mem_free_ptr) uint64_t *place = mem_zalloc(MANY, sizeof *place);
	uint64_t removed = 0;

	for (uint64_t i = 0; i < count; i++)
		removed += goes(i);
	assert_int_equal(removed, result.removal_count);
	for (uint64_t i = 0; i < result.removal_count; i++) {
		assert_true(goes(result.removals[i]));
		place[result.removals[i]] = i + 1;
	}
	for (uint64_t i = 0; i < count; i++) {
		if (!goes(i))
			continue;
		assert_int_equal(records[i].facts, 0);
		assert_false(policies[result.verdicts[i].policy].is_paused);
		assert_int_equal(result.verdicts[i].kept, 0);
		for (int k = 0; k < 4; k++)
			assert_false(is_newest(i, k & 1, k & 2));
		for (uint64_t d = 0; d < count; d++) /* a delta to it has gone before */
			assert_true(!records[d].base.n || !str_eq(records[d].base, records[i].name) || (goes(d) && place[d] < place[i]));
		if (result.verdicts[i].why == RETENTION_TTL)
			assert_true(now.is_sane && now.wall_ms - records[i].durable_ms >= policies[result.verdicts[i].policy].ttl_ms);
	}
}

static void test_random_sets(void **state)
{
	(void)state;
	for (uint32_t i = 0; i < 20000; i++) {
		seed = i;
		draw_set();
		evaluate();
		check_set();
	}
}

static void test_no_memory(void **state)
{
	(void)state;
	add_run("a", 5);
	base(3, 1);
	rule("a")->last = 1;
	policies[0].best.metric = STR("loss");
	policies[0].best.count = 1;
	for (uint64_t nth = 1;; nth++) {
		mem_fail_at(nth);
		enum err e = retention_evaluate(records, count, policies, policy_count, &now, &result);
		mem_fail_at(0);
		if (!e)
			break;
		assert_int_equal(e, ERR_NO_MEMORY);
		assert_null(result.verdicts);
	}
}

/* ---- their forms ---- */

static struct policy read_ok(json_t *doc)
{
	struct policy p;

	T_OK(policy_read(doc, &p));
	assert_int_equal(policy_matches_all(&p), str_is(p.match, "*"));
	json_decref(doc);
	return p;
}

static void read_fails(json_t *doc, enum err expected)
{
	struct policy p;

	assert_non_null(doc);
	assert_int_equal(policy_read(doc, &p), expected);
	err_clear();
	json_decref(doc);
}

static void test_the_form_of_a_policy(void **state)
{
	(void)state;
	struct policy p = read_ok(json_pack("{s:s, s:s, s:{s:i, s:i, s:s, s:{s:s, s:s, s:i}, s:s, s:i}, s:b, s:s, s:b}", "storage", "main",
					    "match", "run*", "keep", "last", 3, "every_steps", 1000, "every", "24h", "best", "metric",
					    "loss", "mode", "max", "count", 2, "ttl", "30d", "bytes", 7, "verified_only", 1, "trash",
					    "72h", "paused", 1));
	assert_true(p.last == 3 && p.every_steps == 1000 && p.every_ms == DAY && p.best.max && p.best.count == 2);
	assert_true(p.ttl_ms == 30ll * DAY && p.bytes == 7 && p.verified_only && p.is_paused && p.trash_ms == 3ll * DAY);
	p = read_ok(json_pack("{s:s, s:s, s:{s:{s:s}}}", "storage", "main", "match", "*", "keep", "best", "metric", "loss"));
	assert_true(p.best.count == 1 && !p.best.max && p.bytes == -1 && !p.last);
	read_fails(json_pack("{s:s, s:s}", "storage", "main", "match", "*"), ERR_VALIDATION_FAILED);
	read_fails(json_pack("{s:s, s:s, s:{}}", "storage", "main", "match", "*", "keep"), ERR_VALIDATION_FAILED);
	read_fails(json_pack("{s:s, s:s, s:{s:i}}", "storage", "main", "match", "", "keep", "last", 1), ERR_VALIDATION_FAILED);
	read_fails(json_pack("{s:s, s:s, s:{s:i}}", "storage", "main", "match", "a", "keep", "last", 0), ERR_VALIDATION_FAILED);
	read_fails(json_pack("{s:s, s:s, s:{s:s}}", "storage", "main", "match", "a", "keep", "ttl", "soon"), ERR_VALIDATION_FAILED);
	read_fails(json_pack("{s:s, s:s, s:{s:i}}", "storage", "main", "match", "a", "keep", "bytes", -1), ERR_VALIDATION_FAILED);
	read_fails(json_pack("{s:s, s:s, s:{s:i}}", "storage", "main", "match", "a", "keep", "newest", 1), ERR_UNKNOWN_FIELD);
}

static void test_the_form_of_a_record(void **state)
{
	CLEANUP(arena_free_ptr) struct arena *a = arena_new(1 << 20);
	struct retention_record r;
	struct str etag;

	(void)state;
	json_t *doc = json_pack("{s:s, s:s, s:i, s:i, s:s, s:s, s:s, s:{s:f}, s:{s:s}, s:[{s:s, s:s, s:s}], s:{s:s}, s:{s:i}}",
				"name", "x/run1/step-70", "format", "delta", "bytes", 100, "bytes_shared", 60,
				"modified_at", "2023-11-14T22:13:20Z", "durable_at", "2023-11-14T22:13:20.500Z", "etag", "E",
				"metrics", "loss", 1.5, "made_by", "job", "J1", "parents", "role", "base", "storage", "fast", "name", "b",
				"verified", "state", "verified", "hold", "owner", 0);
	T_OK(retention_record_read(doc, STR("main"), a, &r, &etag));
	assert_true(str_is(r.run, "x/run1") && r.step == 70 && r.bytes == 40 && r.durable_ms == T0 + 500 && str_is(r.job, "J1"));
	assert_true(str_is(r.base, "b") && str_is(r.base_storage, "fast") && r.is_delta && r.is_verified && r.metrics && str_is(etag, "E"));
	assert_int_equal(r.facts, RETAIN_BIT(HELD));
	json_object_set_new(json_object_get(doc, "hold"), "owner", json_null());
	json_object_del(doc, "durable_at");
	T_OK(retention_record_read(doc, STR("main"), a, &r, &etag));
	assert_true(r.facts == (RETAIN_BIT(HELD) | RETAIN_BIT(UNREADABLE)) && r.durable_ms == T0);
	json_object_set_new(doc, "name", json_string("loose.pt"));
	json_object_del(doc, "modified_at");
	T_OK(retention_record_read(doc, STR("main"), a, &r, &etag));
	assert_true(str_is(r.run, "-") && r.step == -1 && r.durable_ms == -1);
	json_decref(doc);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		TEST(test_the_last_ones_stay), TEST(test_what_is_made_of_others_takes_no_place),
		TEST(test_steps_and_times), TEST(test_the_best), TEST(test_age), TEST(test_a_budget),
		TEST(test_a_paused_policy_keeps_and_removes_nothing),
		TEST(test_clocks_that_jump), TEST(test_what_was_saved_in_the_future_is_not_alone_the_newest),
		TEST(test_what_holds_against_every_policy), TEST(test_only_verified_ones_count),
		TEST(test_deltas_and_their_bases), TEST(test_a_budget_takes_deltas_before_their_bases), TEST(test_random_sets),
		TEST(test_no_memory), TEST(test_the_form_of_a_policy), TEST(test_the_form_of_a_record),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
