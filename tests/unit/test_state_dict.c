/* State dicts: slots, generations, leases, quotas, and what a restart finds. */
#include "lib/t_server.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/seg.h"
#include "server/state_dict_impl.h"

static struct t_server t;

static int start(const char *lease)
{
	const char *const options[] = { "--shm-limit", "40MiB", "--lease", lease, NULL };

	memset(&t, 0, sizeof t);
	t_server_start(&t, options);
	return 0;
}

/* No lease ends in a test that is not about leases, however slow the machine. */
static int setup(void **state)
{
	(void)state;
	return start("300s");
}

static int setup_short(void **state)
{
	(void)state;
	return start("2s");
}

static int teardown(void **state)
{
	struct t_answer a = { 0 };
	static const char *const names[] = { "train", "big", "mine", "death" };

	(void)state;
	for (size_t i = 0; t.s && i < sizeof names / sizeof *names; i++)
		if (state_dict_exists(t.s->state_dicts, str_of(names[i]))) {
			a = (struct t_answer){ 0 };
			state_dict_delete(t.s->state_dicts, &t.me, str_of(names[i]), t_done, &a);
			t_server_until(&t, &a.called);
		}
	t_server_remove(&t);
	return 0;
}

static struct t_answer reserve(const char *name, int64_t rank, uint64_t bytes, int64_t generation, int64_t wait_ms)
{
	struct t_answer a = { 0 };

	state_dict_reserve(t.s->state_dicts, &t.me, str_of(name), rank, bytes, generation, wait_ms, t_reserved, &a);
	assert_false(a.called);
	t_server_until(&t, &a.called);
	return a;
}

static enum err seal(const char *name, int64_t rank, int64_t generation, uint64_t bytes)
{
	struct t_answer a = { 0 };

	state_dict_seal(t.s->state_dicts, &t.me, str_of(name), rank, generation, bytes, NULL, NULL, t_done, &a);
	t_server_until(&t, &a.called);
	if (a.e)
		err_restore(&a.info);
	return a.e;
}

static enum err release(const char *name, int64_t rank, int64_t generation)
{
	struct t_answer a = { 0 };

	state_dict_release(t.s->state_dicts, &t.me, str_of(name), rank, generation, NULL, t_done, &a);
	t_server_until(&t, &a.called);
	return a.e;
}

static bool segment_exists(const char *name)
{
	int fd = shm_open(name, O_RDONLY, 0);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static void test_slots(void **state)
{
	(void)state;
	t_state_dict(&t, "train", 1);
	struct t_answer a = reserve("train", 0, 10000, 1, 0);
	T_OK(a.e);
	assert_true(a.reserved.fresh);
	assert_true(a.reserved.bytes >= 10000);
	assert_true(segment_exists(a.segment));
	struct t_answer same = reserve("train", 0, 9000, 1, 0);
	assert_string_equal(same.segment, a.segment); /* asked twice, given once */
	T_OK(seal("train", 0, 1, 9000));
	T_OK(seal("train", 0, 1, 9000));
	assert_int_equal(seal("train", 0, 1, 9001), ERR_STATE_CONFLICT);
	assert_int_equal(reserve("train", 0, 10000, 1, 0).e, ERR_GENERATION_STALE);
	struct t_answer b = reserve("train", 0, 10000, 2, 0);
	T_OK(b.e);
	assert_string_not_equal(b.segment, a.segment);
	T_OK(seal("train", 0, 2, 9000));
	assert_int_equal(reserve("train", 0, 10000, 3, 0).e, ERR_SLOTS_BUSY);
	assert_int_equal(reserve("train", 0, 10000, 3, 50).e, ERR_SLOTS_BUSY);
	T_OK(release("train", 0, 1));
	struct t_answer c = reserve("train", 0, 10000, 3, 0);
	T_OK(c.e);
	assert_string_equal(c.segment, a.segment); /* warm */
	assert_false(c.reserved.fresh);
	T_OK(release("train", 0, 99)); /* not held: fine */
}

static void test_wait_for_slot(void **state)
{
	struct t_answer w = { 0 };

	(void)state;
	t_state_dict(&t, "train", 1);
	t_seal_all(&t, "train", 1, 1);
	t_seal_all(&t, "train", 1, 2);
	state_dict_reserve(t.s->state_dicts, &t.me, STR("train"), 0, 10000, 3, 60000, t_reserved, &w);
	t_server_run(&t, 50);
	assert_false(w.called);
	T_OK(release("train", 0, 1));
	t_server_until(&t, &w.called);
	T_OK(w.e);
}

struct counted {
	uint32_t answers, busy, gone;
};

static void count_answer(void *user, enum err e, const struct reservation *r)
{
	struct counted *c = user;

	(void)r;
	c->answers++;
	c->busy += e == ERR_BUSY;
	c->gone += e == ERR_NOT_FOUND;
}

/* Clients that wait for a slot and never get one must not fill the memory. */
static void test_waiting_reservations_are_bounded(void **state)
{
	struct counted few = { 0 }, beyond = { 0 };
	struct t_answer a = { 0 };

	(void)state;
	t_state_dict(&t, "train", 1);
	t_state_dict(&t, "mine", 1);
	t_seal_all(&t, "train", 1, 1);
	t_seal_all(&t, "train", 1, 2);
	for (int i = 0; i < STATE_DICT_WAITERS_MAX; i++)
		state_dict_reserve(t.s->state_dicts, &t.me, STR("train"), 0, 10000, 3, 60000, count_answer, &few);
	state_dict_reserve(t.s->state_dicts, &t.me, STR("train"), 0, 10000, 3, 60000, count_answer, &beyond);
	t_server_run(&t, 20);
	assert_int_equal(few.answers, 0);
	assert_int_equal(beyond.answers, 1);
	assert_int_equal(beyond.busy, 1);
	assert_int_equal(reserve("train", 0, 10000, 3, 0).e, ERR_SLOTS_BUSY);
	T_OK(reserve("mine", 0, 10000, 3, 60000).e); /* who needs not wait gets its slot */
	state_dict_delete(t.s->state_dicts, &t.me, STR("train"), t_done, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	t_server_run(&t, 20);
	assert_int_equal(few.gone, STATE_DICT_WAITERS_MAX);
	t_state_dict(&t, "train", 1);
	t_seal_all(&t, "train", 1, 1);
	t_seal_all(&t, "train", 1, 2);
	assert_int_equal(reserve("train", 0, 10000, 3, 20).e, ERR_SLOTS_BUSY); /* there is room to wait again */
}

static void test_bad_requests(void **state)
{
	struct principal other = { .uid = 4242 };
	struct t_answer a = { 0 };
	int64_t expires;

	(void)state;
	t_state_dict(&t, "mine", 2);
	assert_int_equal(reserve("none", 0, 100, 1, 0).e, ERR_NOT_FOUND);
	assert_int_equal(reserve("mine", 2, 100, 1, 0).e, ERR_NOT_FOUND);
	assert_int_equal(reserve("mine", -1, 100, 1, 0).e, ERR_NOT_FOUND);
	assert_int_equal(reserve("mine", 0, 0, 1, 0).e, ERR_VALIDATION_FAILED);
	assert_int_equal(reserve("mine", 0, 100, -1, 0).e, ERR_VALIDATION_FAILED);
	assert_int_equal(seal("mine", 0, 5, 100), ERR_STATE_CONFLICT);
	T_OK(reserve("mine", 0, 100, 5, 0).e);
	assert_int_equal(seal("mine", 0, 5, 5000000), ERR_VALIDATION_FAILED);
	T_ERR(FORBIDDEN, state_dict_renew(t.s->state_dicts, &other, STR("mine"), 0, -1, &expires));
	state_dict_delete(t.s->state_dicts, &other, STR("mine"), t_done, &a);
	t_server_until(&t, &a.called);
	assert_int_equal(a.e, ERR_FORBIDDEN);
	struct t_answer again = { 0 }, bad = { 0 };
	struct state_dict_request rq = { .name = STR("mine"), .world_size = 1, .who = t.me };
	state_dict_create(t.s->state_dicts, &rq, t_created, &again);
	t_server_until(&t, &again.called);
	assert_int_equal(again.e, ERR_STATE_DICT_EXISTS);
	rq.name = STR("../x");
	state_dict_create(t.s->state_dicts, &rq, t_created, &bad);
	t_server_until(&t, &bad.called);
	assert_int_equal(bad.e, ERR_NAME_INVALID);
}

static void test_different_generations(void **state)
{
	struct t_answer a;

	(void)state;
	t_state_dict(&t, "train", 2);
	T_OK(reserve("train", 0, 100, 3, 0).e);
	T_OK(seal("train", 0, 3, 100));
	T_OK(reserve("train", 1, 100, 4, 0).e);
	T_OK(seal("train", 1, 4, 100));
	T_ERR(NOT_SEALED, t_job_try(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'x'}}", &a));
	assert_non_null(strstr(a.info.text, "different generations"));
}

static void test_quota(void **state)
{
	uint64_t limit, used, free_bytes;

	(void)state;
	t_state_dict(&t, "big", 1);
	T_OK(reserve("big", 0, 30 << 20, 1, 0).e);
	T_OK(seal("big", 0, 1, 1000));
	struct t_answer a = reserve("big", 0, 20 << 20, 2, 0);
	assert_int_equal(a.e, ERR_SHM_EXHAUSTED);
	assert_non_null(strstr(a.info.text, "held by big"));
	assert_string_equal(a.info.expected, "20971520");
	assert_string_equal(a.info.actual, "10485760");
	T_OK(reserve("big", 0, 9 << 20, 2, 0).e); /* the refusal cost nothing */
	state_dict_shm(t.s->state_dicts, &limit, &used, &free_bytes);
	assert_int_equal(used, 39 << 20);
	struct t_answer d = { 0 };
	state_dict_delete(t.s->state_dicts, &t.me, STR("big"), t_done, &d);
	t_server_until(&t, &d.called);
	state_dict_shm(t.s->state_dicts, &limit, &used, &free_bytes);
	assert_int_equal(used, 0);
}

/* A warm slot that nobody holds makes room, but only where that is enough. */
static void test_warm_slots_make_room(void **state)
{
	uint64_t limit, used, free_bytes;

	(void)state;
	t_state_dict(&t, "big", 1);
	t_state_dict(&t, "mine", 1);
	T_OK(reserve("big", 0, 20 << 20, 1, 0).e);
	T_OK(seal("big", 0, 1, 1000));
	T_OK(release("big", 0, 1));
	assert_int_equal(reserve("mine", 0, 41 << 20, 1, 0).e, ERR_SHM_EXHAUSTED);
	state_dict_shm(t.s->state_dicts, &limit, &used, &free_bytes);
	assert_int_equal(used, 20 << 20);
	T_OK(reserve("mine", 0, 30 << 20, 1, 0).e);
	state_dict_shm(t.s->state_dicts, &limit, &used, &free_bytes);
	assert_int_equal(used, 30 << 20);
	/* Nobody takes a sealed generation. */
	T_OK(seal("mine", 0, 1, 1000));
	assert_int_equal(reserve("big", 0, 20 << 20, 2, 0).e, ERR_SHM_EXHAUSTED);
}

static void test_release_while_used(void **state)
{
	char id[27];
	struct t_answer d = { 0 };

	(void)state;
	t_state_dict(&t, "train", 1);
	t_seal_all(&t, "train", 1, 1);
	t_seal_all(&t, "train", 1, 2);
	t_job(&t, "{'kind':'save','source':{'state_dict':'train','generation':1},'target':{'storage':'main','name':'u'},"
		  "'labels':{'fake':'slow:400'}}", id);
	T_OK(release("train", 0, 1));
	assert_int_equal(reserve("train", 0, 100, 3, 0).e, ERR_SLOTS_BUSY);
	state_dict_delete(t.s->state_dicts, &t.me, STR("train"), t_done, &d);
	t_server_until(&t, &d.called);
	assert_int_equal(d.e, ERR_STATE_DICT_BUSY);
	struct t_answer w = reserve("train", 0, 100, 3, 5000);
	T_OK(w.e);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
}

/* A slot that was released while a device's memory was copied into it is no generation, for a job either. */
static void test_release_while_a_device_writes(void **state)
{
	struct state_dict_use *copy, *use = NULL;

	(void)state;
	t_state_dict(&t, "train", 1);
	struct t_answer a = reserve("train", 0, 1000, 1, 0);
	T_OK(a.e);
	T_OK(state_dict_use_rank(t.s->state_dicts, &t.me, STR("train"), 0, 1, true, &copy));
	assert_int_equal(seal("train", 0, 1, 1000), ERR_STATE_CONFLICT);
	T_OK(release("train", 0, 1));
	assert_int_equal(state_dict_use(t.s->state_dicts, &t.me, STR("train"), 1, "job", &use), ERR_NOT_SEALED);
	struct t_answer b = reserve("train", 0, 1000, 1, 0);
	T_OK(b.e);
	assert_string_not_equal(b.segment, a.segment);
	T_OK(seal("train", 0, 1, 1000));
	T_OK(state_dict_use(t.s->state_dicts, &t.me, STR("train"), 1, "job", &use));
	assert_string_equal(use->ranks[0].segment, b.segment);
	state_dict_unuse(&use);
	state_dict_unuse(&copy);
}

static void test_restart_and_sweep(void **state)
{
	static const struct seg_owner somebody = { 1, 2 };
	char name[SEG_NAME_MAX], strange[SEG_NAME_MAX], kept[80], id[27];
	int fd;

	(void)state;
	t_state_dict(&t, "train", 1);
	struct t_answer a = reserve("train", 0, 10000, 1, 0);
	T_OK(seal("train", 0, 1, 9000));
	memcpy(kept, a.segment, sizeof kept);
	T_OK(seg_create(&t.s->state_dicts->owner, 4096, name, &fd));
	close(fd);
	T_OK(seg_create(&somebody, 4096, strange, &fd));
	close(fd);
	t_server_crash(&t);
	t_server_start(&t, NULL);
	assert_false(segment_exists(name)); /* no row names it */
	assert_true(segment_exists(strange));
	T_OK(seg_unlink(strange));
	assert_true(segment_exists(kept));
	assert_int_equal(reserve("train", 0, 10000, 1, 0).e, ERR_GENERATION_STALE);
	t_job(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'r'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	/* Another daemon's segments are not ours to sweep, whether it lives or not. */
	struct t_server other = { 0 };
	t_server_start(&other, NULL);
	assert_true(segment_exists(kept));
	t_server_stop(&t);
	t_server_stop(&other);
	t_server_start(&other, NULL);
	assert_true(segment_exists(kept));
	t_server_remove(&other);
	t_server_start(&t, NULL);
	assert_true(state_dict_exists(t.s->state_dicts, STR("train")));
	/* A segment that vanished while we were away costs its slot only. */
	t_server_stop(&t);
	assert_int_equal(shm_unlink(kept), 0);
	t_server_start(&t, NULL);
	assert_true(state_dict_exists(t.s->state_dicts, STR("train")));
	T_OK(reserve("train", 0, 10000, 2, 0).e);
}

/* Does a rank still fill a slot? */
static bool is_held(const char *name)
{
	struct state_dict *sd;

	T_OK(state_dict_find(t.s->state_dicts, &t.me, str_of(name), &sd));
	for (uint32_t k = 0; k < sd->slot_count; k++)
		if (state_dict_slot(sd, 0, k)->state == SLOT_OPEN)
			return true;
	return false;
}

static void test_lease(void **state)
{
	int64_t expires;

	(void)state;
	t_state_dict(&t, "train", 1);
	T_OK(reserve("train", 0, 10000, 1, 0).e);
	for (int i = 0; i < 9; i++) {
		t_server_run(&t, 500);
		T_OK(state_dict_renew(t.s->state_dicts, &t.me, STR("train"), 0, -1, &expires));
	}
	T_OK(seal("train", 0, 1, 9000)); /* renewed: still there after two leases */
	T_OK(reserve("train", 0, 10000, 2, 0).e);
	T_UNTIL(&t, !is_held("train"));
	assert_true(state_dict_exists(t.s->state_dicts, STR("train"))); /* sealed: kept */
	assert_int_equal(seal("train", 0, 2, 9000), ERR_STATE_CONFLICT); /* open: dropped */
	t_state_dict(&t, "mine", 1);
	T_OK(reserve("mine", 0, 10000, 1, 0).e);
	T_UNTIL(&t, !state_dict_exists(t.s->state_dicts, STR("mine"))); /* nothing sealed: gone */
}

static bool is_sealed(const char *name)
{
	struct state_dict *sd;

	T_OK(state_dict_find(t.s->state_dicts, &t.me, str_of(name), &sd));
	return state_dict_newest(sd) >= 0;
}

static void test_owner_death(void **state)
{
	json_t *wish = json_pack("{s:{s:s, s:s}}", "save", "storage", "main", "name", "saved/step-{generation}");
	struct state_dict_request rq = { .name = STR("death"), .world_size = 2, .on_owner_death = wish, .who = t.me };
	struct t_answer a = { 0 };
	char path[256];

	(void)state;
	state_dict_create(t.s->state_dicts, &rq, t_created, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	json_decref(wish);
	t_seal_all(&t, "death", 2, 41);
	snprintf(path, sizeof path, "%s/main/saved/step-41/.dcpd.json", t.dir);
	T_UNTIL(&t, !is_sealed("death")); /* saved, so released; its bytes are kept for loads */
	assert_int_equal(access(path, F_OK), 0);
	assert_true(state_dict_exists(t.s->state_dicts, STR("death")));
	struct t_answer d = { 0 };
	state_dict_delete(t.s->state_dicts, &t.me, STR("death"), t_done, &d);
	t_server_until(&t, &d.called);
	T_OK(d.e);
}

static void test_list(void **state)
{
	struct principal other = { .uid = 4242 };
	struct buf b = BUF_INIT(1 << 20);

	(void)state;
	t_state_dict(&t, "train", 1);
	t_state_dict(&t, "mine", 3);
	T_OK(state_dict_list(t.s->state_dicts, &t.me, 1, STR(""), &b));
	buf_putc(&b, 0);
	assert_non_null(strstr((char *)b.p, "\"name\":\"mine\""));
	assert_non_null(strstr((char *)b.p, "\"next_page_token\":\"mine\""));
	buf_free(&b);
	b = BUF_INIT(1 << 20);
	T_OK(state_dict_list(t.s->state_dicts, &t.me, 10, STR("mine"), &b));
	buf_putc(&b, 0);
	assert_non_null(strstr((char *)b.p, "\"name\":\"train\""));
	assert_null(strstr((char *)b.p, "next_page_token"));
	buf_free(&b);
	b = BUF_INIT(1 << 20);
	T_OK(state_dict_list(t.s->state_dicts, &other, 10, STR(""), &b));
	assert_memory_equal(b.p, "{\"state_dicts\":[]}", b.len);
	T_ERR(FORBIDDEN, state_dict_put(t.s->state_dicts, &other, STR("mine"), &b));
	buf_free(&b);
}

/* A journal that cannot be asked about a key says nothing about the state dict that has the name. */
static void test_failed_creation_leaves_the_one_of_that_name(void **state)
{
	struct state_dict_request rq = { .name = STR("train"), .world_size = 1, .who = t.me,
					 .idem = { .key = STR("k"), .body = STR("{}") } };
	struct t_answer a = { 0 };
	char path[128];
	sqlite3 *db;

	(void)state;
	t_state_dict(&t, "train", 1);
	snprintf(path, sizeof path, "%s/state/journal.db", t.dir);
	assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
	sqlite3_busy_timeout(db, 10000);
	assert_int_equal(sqlite3_exec(db, "DROP TABLE keys", NULL, NULL, NULL), SQLITE_OK);
	sqlite3_close(db);
	state_dict_create(t.s->state_dicts, &rq, t_created, &a);
	t_server_until(&t, &a.called);
	assert_int_equal(a.e, ERR_JOURNAL);
	assert_true(state_dict_exists(t.s->state_dicts, STR("train")));
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
#define T_SHORT(fn) cmocka_unit_test_setup_teardown(fn, setup_short, teardown)
int main(void)
{
	const struct CMUnitTest tests[] = {
		T(test_slots),		    T(test_wait_for_slot),
		T(test_waiting_reservations_are_bounded),
		T(test_bad_requests),	    T(test_different_generations),
		T(test_quota),		    T(test_warm_slots_make_room),
		T(test_release_while_used), T(test_restart_and_sweep),
		T_SHORT(test_lease),	    T_SHORT(test_owner_death),
		T(test_list),		    T(test_release_while_a_device_writes),
		T(test_failed_creation_leaves_the_one_of_that_name),
	};

	return cmocka_run_group_tests_name("state_dict", tests, NULL, NULL);
}
