/* Jobs that are being created: what is refused leaves nothing, and nobody finds what is not yet in the journal. */
#include "server/job_impl.h"

#include "lib/t_trained.h"

#include <stdlib.h>
#include <unistd.h>

static size_t listed(void)
{
	struct buf b = BUF_INIT(1 << 20);

	T_OK(job_list(t.s, STR(""), 10, STR(""), &b));
	json_t *doc = json_loadb((const char *)b.p, b.len, 0, NULL);
	size_t n = json_array_size(json_object_get(doc, "jobs"));
	json_decref(doc);
	buf_free(&b);
	return n;
}

/* Of a daemon's first job, each allocation fails once: in check-full. Else every 97th does, beginning anywhere. */
static void test_a_job_that_is_refused_is_in_no_list(void **state)
{
	json_t *spec = json_pack("{s:s, s:{s:s}, s:{s:s, s:s}}", "kind", "save", "source", "state_dict", "train", "target", "storage",
				 "main", "name", "r");
	size_t refused = 0, whole = 0; /* whole: in a row; the journal's thread takes some of them unseen */
	const uint64_t step = getenv("DCPD_FULL") ? 1 : 97;

	for (uint64_t n = 1 + (uint64_t)getpid() % step; whole < 3; n += step) {
		struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = t.me };
		struct t_answer a = { 0 };
		uint64_t failures = mem_failures();
		mem_fail_at(n);
		job_create(t.s, &rq, t_created, &a);
		t_server_until(&t, &a.called);
		mem_fail_at(0);
		whole = mem_failures() == failures ? whole + 1 : 0;
		refused += a.e != OK;
		if (!a.e)
			(void)t_job_end(&t, a.id); /* what could not be begun fails */
		assert_int_equal(listed(), !a.e);
		assert_true(!a.e || a.e == ERR_NO_MEMORY);
		if (!a.e) { /* the next one is a first job again */
			teardown(state);
			setup(state);
		}
	}
	assert_true(refused > 0);
	json_decref(spec);
}

static enum err count_row(void *user, const struct journal_job *row)
{
	(void)row;
	++*(int *)user;
	return OK;
}

/* A refusal by the journal would free the job under those that wait for it; a cancel would end it before it is queued. */
static void test_a_job_whose_row_is_on_its_way_is_found_by_nobody(void **state)
{
	json_t *spec = json_pack("{s:s, s:{s:s}, s:{s:s, s:s}}", "kind", "save", "source", "state_dict", "train", "target", "storage",
				 "main", "name", "r");
	struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = t.me };
	struct t_answer a = { 0 }, cancelled = { 0 };

	(void)state;
	job_create(t.s, &rq, t_created, &a);
	char id[JOB_ID_LEN + 1];
	memcpy(id, t.s->jobs->live->id, sizeof id);
	while (!a.called && !map_object(&t.s->jobs->table, str_of(id))) /* the row is written by another thread, and told in a later turn */
		event_base_loop(t.base, EVLOOP_ONCE);
	assert_false(a.called);
	const struct journal_filter all = { .state = -1, .kind = -1 };
	for (int rows = 0; rows == 0; usleep(1000)) /* until it is written, and still not told */
		T_OK(journal_read_jobs(t.s->journal, &all, 10, count_row, &rows));
	assert_int_equal(listed(), 0);
	job_cancel(t.s, &t.me, str_of(id), t_done, &cancelled);
	t_server_until(&t, &cancelled.called);
	assert_int_equal(cancelled.e, ERR_NOT_FOUND);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	assert_int_equal(t_job_end(&t, a.id), JOB_SUCCEEDED);
	json_decref(spec);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = { T(test_a_job_that_is_refused_is_in_no_list),
					    T(test_a_job_whose_row_is_on_its_way_is_found_by_nobody) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
