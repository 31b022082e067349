/* Filters and orders of checkpoints: what the words mean, and what is said of words that mean nothing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lib/t.h"
#include "spec/checkpoint_query.h"

static const struct checkpoint_metric metrics[] = { { STR("loss"), 1.5 }, { STR("eval/acc"), -0.25 }, { STR("bad"), NAN } };
static const struct checkpoint_label labels[] = { { STR("team"), STR("vision models") }, { STR("run"), STR("r1") } };

static struct checkpoint_facts one(void)
{
	return (struct checkpoint_facts){ .name = STR("run1/step-100"), .run = STR("run1"), .format = STR("dcp"), .digest = STR("ab12"),
					  .step = 100, .at_ms = 1795253768120, .bytes = 4096, .world_size = 8, .is_held = true,
					  .verified = "verified", .metrics = metrics, .labels = labels, .metric_count = 3,
					  .label_count = 2 };
}

static bool matches(const char *filter, const struct checkpoint_facts *f)
{
	struct checkpoint_query q;

	T_OK(checkpoint_query_read(str_of(filter), STR(""), &q));
	return checkpoint_query_matches(&q, f);
}

static void test_words_that_match(void **state)
{
	static const char *const yes[] = {
		"", "name=run1/*", "name=*100", "name!=run2/*", "run=run*", "format=dcp", "format!=torch", "content_digest=ab12",
		"verified=verified", "verified!=none", "held=true", "dcpd=false", "step=100", "step!=99", "step>99.5", "step>=100",
		"step<1e3", "step<=100", "bytes>4095",
		"world_size=8", "time>2026-11-21", "time<=2026-11-21T09:36:08.120Z", "time!=2026-11-21",
		"labels.team=\"vision models\"", "labels.team=vision models", "labels.run!=r2", "labels.none!=x", "metrics.loss<1.6",
		"metrics.loss=1.5", "metrics.eval/acc<0", "metrics.eval/acc>=-.25",
		"step>=100 AND step<200 AND metrics.loss<2 AND labels.team=\"vision models\" AND held=true",
	};
	static const char *const no[] = {
		"name=run1", "name=run2/*", "run!=run1", "format=dc", "content_digest!=ab12", "verified=none", "verified=damaged",
		"held=false", "dcpd=true", "step!=100", "step>100", "bytes<4096", "time<2026-11-21", "time=2026-11-21",
		"labels.team=vision", "labels.none=x", "metrics.none<1", "metrics.none!=1", "metrics.bad!=1", "metrics.bad>=0",
		"metrics.loss<1.5", "step=100 AND held=false", "held=false AND step=100",
		"labels.team=\"vision models AND held=false\"",
	};
	struct checkpoint_facts f = one();

	(void)state;
	struct checkpoint_query all;
	T_OK(checkpoint_query_read((struct str){ 0 }, (struct str){ 0 }, &all));
	assert_true(checkpoint_query_matches(&all, &f));
	for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
		assert_true(matches(yes[i], &f) || (fprintf(stderr, "%s\n", yes[i]), false));
	for (size_t i = 0; i < sizeof no / sizeof *no; i++)
		assert_false(matches(no[i], &f) && fprintf(stderr, "%s\n", no[i]));
	f = (struct checkpoint_facts){ .name = STR("x"), .run = STR("-"), .format = STR("gguf"), .step = -1, .verified = "" };
	assert_true(matches("run=- AND verified=none AND step!=0", &f) == false);
	assert_true(matches("run=- AND verified=none AND bytes=0", &f));
	assert_false(matches("time<2100-01-01", &f));
}

static void test_words_without_a_meaning(void **state)
{
	static const struct { const char *filter, *sort, *says; } bad[] = {
		{ "stp>5", "", "filter, character 1: \"stp\" is none of name, run" },
		{ "stp>5", "", "(did you mean \"step\"?)" },
		{ "step>=1 AND lables.a=b", "", "filter, character 13: \"lables.a\" is none of" },
		{ "step", "", "character 1: \"step\" is followed by none of = != <" },
		{ "step >5", "", "\"step\" is followed by none of" },
		{ "step>", "", "character 6: \"\" is no number" },
		{ "step=five", "", "character 6: \"five\" is no number" },
		{ "step=0x10", "", "\"0x10\" is no number" },
		{ "bytes<inf", "", "\"inf\" is no number" },
		{ "bytes<1e999", "", "\"1e999\" is no number" },
		{ "step=5 AND", "", "character 6: \"5 AND\" is no number" },
		{ "step=5 AND ", "", "character 12: \"\" is none of" },
		{ "name<a", "", "character 5: \"<\" stands where only = and != can" },
		{ "held!=true", "", "character 5: \"!=\" stands where only = can" },
		{ "held=yes", "", "character 6: \"yes\" is neither true nor false" },
		{ "verified=verifed", "", "\"verifed\" is none of verified, damaged, unverified, none (did you mean \"verified\"?)" },
		{ "time>yesterday", "", "character 6: \"yesterday\" is no time such as" },
		{ "labels.=a", "", "\"labels.\" is none of" },
		{ "name=\"a", "", "character 6: \"\"a\" has no second quote" },
		{ "name=\"a\"b", "", "character 9: \"b\" stands behind a quote" },
		{ "name=\xff", "", "filter is not UTF-8" },
		{ "", "stp", "sort, character 1: \"stp\" is none of name, step, bytes, time, metrics.KEY (did you mean \"step\"?)" },
		{ "", "-run", "sort, character 2: \"run\" is none of" },
		{ "", "-", "sort, character 2: \"\" is none of" },
		{ "", "metrics.", "\"metrics.\" is none of" },
	};
	struct checkpoint_query q;
	CLEANUP(buf_free) struct buf many = BUF_INIT(4096);

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		T_ERR(VALIDATION_FAILED, checkpoint_query_read(str_of(bad[i].filter), str_of(bad[i].sort), &q));
		if (!strstr(err_last()->text, bad[i].says))
			fprintf(stderr, "%s: %s\n", bad[i].says, err_last()->text);
		assert_non_null(strstr(err_last()->text, bad[i].says));
	}
	for (int i = 1; i < CHECKPOINT_QUERY_TERMS; i++)
		buf_puts(&many, i > 1 ? " AND step>0" : "step>0 AND step>0");
	T_OK(checkpoint_query_read((struct str){ (const char *)many.p, many.len }, STR(""), &q));
	buf_puts(&many, " AND step>0");
	T_ERR(VALIDATION_FAILED, checkpoint_query_read((struct str){ (const char *)many.p, many.len }, STR(""), &q));
	char *long_one = malloc(CHECKPOINT_QUERY_BYTES + 1);
	memset(long_one, 'a', CHECKPOINT_QUERY_BYTES + 1);
	T_ERR(VALIDATION_FAILED, checkpoint_query_read((struct str){ long_one, CHECKPOINT_QUERY_BYTES + 1 }, STR(""), &q));
	free(long_one);
}

static struct checkpoint_place place(const struct checkpoint_query *q, const char *name, int64_t step, int64_t at_ms, double loss)
{
	struct checkpoint_metric metric = { STR("loss"), loss };
	struct checkpoint_facts f = { .name = str_of(name), .step = step, .at_ms = at_ms, .bytes = (uint64_t)(step + 1), .verified = "",
				      .metrics = &metric, .metric_count = 1 };

	return checkpoint_query_place(q, &f);
}

static void in_order(const char *sort, const struct checkpoint_place *(*places)(const struct checkpoint_query *q, size_t *n))
{
	CLEANUP(buf_free) struct buf token = BUF_INIT(1 << 16);
	struct checkpoint_query q;
	struct checkpoint_place back;
	size_t n;

	T_OK(checkpoint_query_read(STR(""), str_of(sort), &q));
	const struct checkpoint_place *p = places(&q, &n);
	for (size_t i = 0; i < n; i++) {
		for (size_t k = 0; k < n; k++)
			assert_int_equal(checkpoint_query_compare(&q, &p[i], &p[k]) < 0, i < k);
		token.len = 0;
		checkpoint_query_put_token(&q, &p[i], &token);
		struct str text = { (const char *)token.p, token.len };
		T_OK(checkpoint_query_read_token(&q, text, &back));
		assert_int_equal(checkpoint_query_compare(&q, &p[i], &back), 0);
		for (size_t cut = 0; cut < 12; cut++)
			T_ERR(INVALID_REQUEST, checkpoint_query_read_token(&q, (struct str){ text.p, cut }, &back));
	}
}

static const struct checkpoint_place *by_metric(const struct checkpoint_query *q, size_t *n)
{
	static const double loss[] = { -INFINITY, -1e300, -1.5, -1e-300, 0, 1e-300, 1.5, 1e300, INFINITY, NAN, NAN };
	static const char *const names[] = { "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k" };
	static struct checkpoint_place places[11];

	for (*n = 0; *n < 11; ++*n)
		places[*n] = place(q, names[*n], 1, 1, loss[*n]);
	return places;
}

static const struct checkpoint_place *by_time(const struct checkpoint_query *q, size_t *n)
{
	static struct checkpoint_place places[6];

	*n = 6;
	places[0] = place(q, "b", 3, 2000, 0);
	places[1] = place(q, "z", 2, 2000, 0);
	places[2] = place(q, "y", 2, 2000, 0);
	places[3] = place(q, "c", -1, 2000, 0);
	places[4] = place(q, "a", 9, 1000, 0);
	places[5] = place(q, "d", 9, 0, 0);
	return places;
}

static const struct checkpoint_place *by_step(const struct checkpoint_query *q, size_t *n)
{
	static struct checkpoint_place places[4];

	*n = 4;
	places[0] = place(q, "a", 0, 0, 0);
	places[1] = place(q, "b", 0, 0, 0);
	places[2] = place(q, "a", INT64_MAX - 1, 0, 0);
	places[3] = place(q, "a", -1, 0, 0);
	return places;
}

static const struct checkpoint_place *by_name(const struct checkpoint_query *q, size_t *n)
{
	static struct checkpoint_place places[3];

	*n = 3;
	places[0] = place(q, "a", 2, 2, 2);
	places[1] = place(q, "a-b", 1, 1, 1);
	places[2] = place(q, "a/b", 0, 0, 0);
	return places;
}

static void test_orders(void **state)
{
	struct checkpoint_query q, other;
	struct checkpoint_place back;

	(void)state;
	in_order("metrics.loss", by_metric);
	in_order("-time", by_time);
	in_order("step", by_step);
	in_order("", by_name);
	T_OK(checkpoint_query_read(STR(""), STR("metrics.loss"), &q));
	struct checkpoint_place a = place(&q, "a", 1, 1, 0.0), b = place(&q, "a", 1, 1, -0.0);
	assert_int_equal(checkpoint_query_compare(&q, &a, &b), 0);
	T_OK(checkpoint_query_read(STR(""), STR("-metrics.loss"), &other));
	CLEANUP(buf_free) struct buf token = BUF_INIT(1 << 16);
	checkpoint_query_put_token(&q, &a, &token);
	T_ERR(INVALID_REQUEST, checkpoint_query_read_token(&other, (struct str){ (const char *)token.p, token.len }, &back));
	T_ERR(INVALID_REQUEST, checkpoint_query_read_token(&other, STR("x"), &back));
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_words_that_match), cmocka_unit_test(test_words_without_a_meaning),
					    cmocka_unit_test(test_orders) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
