/* The choice of the checkpoint that a training goes on from, and how often a training should save. */
#include "lib/t.h"

#include <math.h>

#include "server/resume_choice.h"
#include "server/save_interval.h"

enum { NOW = 1000000 };

static size_t choose(const struct resume_candidate *all, size_t n)
{
	return resume_choose(all, n, RESUME_ATTEMPTS, NOW);
}

static void test_newest_that_loads(void **state)
{
	struct resume_candidate all[] = { { .name = "d", .damaged = "a digest is wrong" },
					  { .name = "c", .is_looked_at = true, .unloadable = "a file is missing" },
					  { .name = "b", .unwanted = "not this one" },
					  { .name = "a" } };

	(void)state;
	assert_int_equal(choose(all, 4), 3);
	assert_int_equal(choose(all, 3), 3); /* none */
	assert_int_equal(choose(all, 0), 0);
	assert_int_equal(resume_fate_of(all, 0, 3, NOW), RESUME_DAMAGED);
	assert_int_equal(resume_fate_of(all, 1, 3, NOW), RESUME_UNLOADABLE);
	assert_int_equal(resume_fate_of(all, 2, 3, NOW), RESUME_UNWANTED);
	all[0].damaged = NULL;
	assert_int_equal(choose(all, 4), 0);
}

static void test_attempts_end(void **state)
{
	struct resume_candidate all[] = { { .name = "b", .durable_ms = 2000, .attempts = 2, .attempted_ms = 5000 },
					  { .name = "a", .durable_ms = 1000 } };

	(void)state;
	assert_int_equal(choose(all, 2), 0);
	all[0].attempts = 3;
	assert_int_equal(choose(all, 2), 1);
	assert_int_equal(resume_fate_of(all, 0, 3, NOW), RESUME_EXHAUSTED);
	assert_int_equal(resume_choose(all, 2, 4, NOW), 0);
	assert_int_equal(resume_choose(all, 2, 0, NOW), 0); /* no limit */
	all[1].attempts = 3;
	all[1].attempted_ms = 6000;
	assert_int_equal(choose(all, 2), 2);
}

static void test_progress_forgives(void **state)
{
	struct resume_candidate all[] = { { .name = "c", .durable_ms = 7000, .damaged = "x" },
					  { .name = "b", .durable_ms = 2000, .attempts = 3, .attempted_ms = 5000 },
					  { .name = "a", .durable_ms = 1000, .attempts = 3, .attempted_ms = 6999 } };

	(void)state;
	assert_int_equal(resume_attempts(all, 1, NOW), 0); /* what began at b came to c */
	assert_int_equal(choose(all, 3), 1);
	all[1].attempted_ms = 7000;
	assert_int_equal(resume_attempts(all, 1, NOW), 3);
	assert_int_equal(choose(all, 3), 2);
	all[0].durable_ms = NOW + 1; /* a file of the future */
	assert_int_equal(resume_attempts(all, 2, NOW), 3);
	all[2].durable_ms = NOW; /* its own time is no progress */
	assert_int_equal(resume_attempts(all, 2, NOW), 3);
}

/* ---- how often ---- */

/* Daly 2006, equation 20: the wall time of a second's work, with segments of `tau` and no time to restart. */
static double wall_time(double tau, double cost, double mtbf)
{
	return mtbf * (exp((tau + cost) / mtbf) - 1) / tau;
}

static double best_interval(double cost, double mtbf)
{
	double low = 1e-6 * mtbf, high = 4 * mtbf;

	for (int i = 0; i < 200; i++) {
		double a = low + (high - low) / 3, b = high - (high - low) / 3;
		if (wall_time(a, cost, mtbf) < wall_time(b, cost, mtbf))
			high = b;
		else
			low = a;
	}
	return (low + high) / 2;
}

static void near(double got, double wanted, double part)
{
	if (fabs(got - wanted) > part * fabs(wanted))
		fail_msg("%g, not %g", got, wanted);
}

static void test_young(void **state)
{
	(void)state;
	near(save_interval_young(60, 86400), 3219.938, 1e-6);
	near(save_interval_young(1, 2), 2, 1e-12);
	assert_true(save_interval_young(0, 86400) == 0); /* what costs nothing is done all the time */
}

/* The examples of the paper's figures 3 to 5: dumps of 5 minutes, a failure every 24 h, 6 h, 15 min. */
static void test_daly_as_published(void **state)
{
	(void)state;
	near(save_interval_daly(5, 24 * 60), 117, 0.004);
	near(save_interval_daly(5, 6 * 60), 57, 0.006);
	near(save_interval_daly(5, 15), 9.1, 0.005);
}

static void test_daly_is_the_optimum(void **state)
{
	static const double parts[] = { 0.0001, 0.001, 0.01, 0.1, 0.5, 1.0 };

	(void)state;
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) { /* the model's own, found by search */
		double cost = parts[i] * 3600, found = best_interval(cost, 3600), daly = save_interval_daly(cost, 3600);
		near(daly, found, 0.02);
		near(wall_time(daly, cost, 3600), wall_time(found, cost, 3600), 0.0002);
	}
	assert_true(save_interval_daly(7200, 3600) == 3600);
	assert_true(save_interval_daly(1e6, 3600) == 3600);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_newest_that_loads), cmocka_unit_test(test_attempts_end), cmocka_unit_test(test_progress_forgives),
		cmocka_unit_test(test_young),		  cmocka_unit_test(test_daly_as_published),
		cmocka_unit_test(test_daly_is_the_optimum),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
