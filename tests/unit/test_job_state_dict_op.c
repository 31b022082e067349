/* Operations on state dicts as the coordinator sees them: what is refused, what becomes of a target on success, failure, cancel and
 * restart, and how the members of a group find each other. */
#include "lib/t_server.h"

#include <string.h>

#include "server/config.h"
#include "server/gang.h"
#include "server/gang_rendezvous.h"
#include "server/job_impl.h"
#include "server/metrics.h"
#include "server/state_dict_impl.h"
#include "server/worker.h"

static struct t_server t;

static int setup(void **state)
{
	static const char *const options[] = { "--shm-limit", "2MiB", "--comm-deadline", "3s", NULL };

	(void)state;
	memset(&t, 0, sizeof t);
	t_server_start(&t, options);
	t_state_dict(&t, "train", 2);
	t_seal_all(&t, "train", 2, 7);
	return 0;
}

static int teardown(void **state)
{
	static const char *const names[] = { "train", "full", "small" };

	(void)state;
	for (size_t i = 0; t.s && i < sizeof names / sizeof *names; i++)
		if (state_dict_exists(t.s->state_dicts, str_of(names[i]))) {
			struct t_answer a = { 0 };
			state_dict_delete(t.s->state_dicts, &t.me, str_of(names[i]), t_done, &a);
			t_server_until(&t, &a.called);
		}
	t_server_remove(&t);
	return 0;
}

#define OP(kind, source, target, more) \
	"{'kind':'" kind "','source':{'state_dict':'" source "'},'target':{'state_dict':'" target "'},'backend':'auto'" more "}"

static enum job_state run(const char *spec)
{
	char id[27];

	t_job(&t, spec, id);
	return t_job_end(&t, id);
}

/* A kind that is appended to the list has the next number. */
static void test_an_appended_kind_is_no_operation_by_its_number(void **state)
{
	struct job j = { .kind = JOB_KIND_COUNT };

	(void)state;
	assert_false(job_state_dict_op_is(&j));
	j.kind = JOB_COMPARE;
	assert_true(job_state_dict_op_is(&j));
	j.kind = JOB_DELETE;
	assert_false(job_state_dict_op_is(&j));
}

static void refused(enum err code, const char *pointer, const char *spec)
{
	struct t_answer a;
	enum err e = t_job_try(&t, spec, &a);

	if (e != code || strcmp(err_last()->pointer, pointer) != 0)
		T_FAIL("%s: got %s at %s (%s)", spec, err_code_name(e), err_last()->pointer, err_last()->text);
}

static uint64_t used(void)
{
	uint64_t limit, used_bytes, left;

	state_dict_shm(t.s->state_dicts, &limit, &used_bytes, &left);
	return used_bytes;
}

static int64_t newest(const char *name)
{
	int64_t generation = -1;
	uint64_t bytes;

	return state_dict_check(t.s->state_dicts, &t.me, str_of(name), -1, &generation, &bytes) == OK ? generation : -1;
}

/* How many slots of rank 0 hold something sealed. */
static unsigned sealed(const char *name)
{
	struct state_dict *sd;
	unsigned n = 0;

	T_OK(state_dict_find(t.s->state_dicts, &t.me, str_of(name), &sd));
	for (uint32_t k = 0; k < sd->slot_count; k++)
		n += state_dict_slot(sd, 0, k)->state == SLOT_SEALED;
	return n;
}

static void test_new_target(void **state)
{
	char id[27];

	(void)state;
	t_job(&t, OP("gather", "train", "full", ",'labels':{'fake':'slow:1500'}"), id);
	t_job_runs(&t, id);
	struct state_dict *sd;
	T_ERR(NOT_FOUND, state_dict_find(t.s->state_dicts, &t.me, STR("full"), &sd)); /* nobody sees it yet */
	refused(ERR_TARGET_BUSY, "", OP("copy", "train", "full", ""));
	refused(ERR_STATE_DICT_BUSY, "", OP("offload", "full", "small", ""));
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	assert_int_equal(newest("full"), 7); /* the source's */
	json_t *doc = t_job_doc(&t, id), *result = json_object_get(doc, "result");
	assert_int_equal(json_integer_value(json_object_get(result, "generation")), 7);
	const json_t *comm = json_object_get(result, "comm");
	assert_int_equal(strlen(json_string_value(json_object_get(comm, "secret"))), 64);
	assert_int_equal(json_integer_value(json_object_get(comm, "deadline_ms")), 3000);
	json_decref(doc);
	struct buf b = BUF_INIT(1 << 20);
	metrics_render(t.s->metrics, false, &b);
	buf_putc(&b, 0);
	assert_non_null(strstr((char *)b.p, "dcpd_comm_bytes_total{kind=\"gather\",backend=\"shm\"} 700\n"));
	buf_free(&b);
}

static void test_next_generation(void **state)
{
	struct t_answer a = { 0 };

	(void)state;
	assert_int_equal(run(OP("create", "train", "full", "")), JOB_SUCCEEDED);
	uint64_t after_one = used();
	assert_int_equal(run(OP("copy", "train", "full", "")), JOB_SUCCEEDED);
	assert_int_equal(newest("full"), 8);
	T_UNTIL(&t, sealed("full") == 1 && used() == after_one); /* the one before is released */
	/* Into itself; a job that reads the old generation keeps it until it ends. */
	char slow[27];
	t_job(&t, "{'kind':'save','source':{'state_dict':'full'},'target':{'storage':'main','name':'x'},'labels':{'fake':'slow:500'}}",
	      slow);
	assert_int_equal(run(OP("redistribute", "full", "full", "")), JOB_SUCCEEDED);
	assert_int_equal(newest("full"), 9);
	assert_int_equal(t_job_end(&t, slow), JOB_SUCCEEDED);
	T_UNTIL(&t, used() == after_one);
	/* A generation that a trainer sealed stays, and the trainer's own slots stay free for it. */
	assert_int_equal(run(OP("copy", "full", "train", "")), JOB_SUCCEEDED);
	assert_int_equal(newest("train"), 9);
	assert_int_equal(run(OP("copy", "full", "train", "")), JOB_SUCCEEDED);
	assert_int_equal(newest("train"), 10);
	T_UNTIL(&t, sealed("train") == 2);
	state_dict_reserve(t.s->state_dicts, &t.me, STR("train"), 0, 10000, 10, 0, t_reserved, &a);
	t_server_until(&t, &a.called);
	assert_int_equal(a.e, ERR_GENERATION_STALE);
	t_seal_all(&t, "train", 2, 11);
	assert_int_equal(newest("train"), 11);
	assert_int_equal(sealed("train"), 3);
}

static void test_failures_change_nothing(void **state)
{
	static const char *const scripts[] = { "fail:companion_mismatch", "always:planning", "always:running", "always:peer", "garbage" };
	char spec[512], id[27];

	(void)state;
	assert_int_equal(run(OP("create", "train", "full", "")), JOB_SUCCEEDED);
	uint64_t before = used();
	for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
		for (int fresh = 0; fresh < 2; fresh++) {
			snprintf(spec, sizeof spec, "{'kind':'gather','source':{'state_dict':'train'},'target':{'state_dict':'%s'},"
				 "'backend':'auto','options':{'retries':0},'labels':{'fake':'%s'}}", fresh ? "small" : "full", scripts[i]);
			assert_int_equal(run(spec), JOB_FAILED);
			assert_false(state_dict_exists(t.s->state_dicts, STR("small")));
			assert_int_equal(newest("full"), 7);
			T_UNTIL(&t, used() == before);
		}
	}
	assert_int_equal(run(OP("gather", "train", "full", FAKE("crash:running"))), JOB_SUCCEEDED); /* the second attempt */
	assert_int_equal(newest("full"), 8);
	t_job(&t, OP("gather", "train", "full", FAKE("slow:60000")), id);
	t_job_runs(&t, id);
	struct t_answer a = { 0 };
	job_cancel(t.s, &t.me, str_of(id), t_done, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	assert_int_equal(t_job_end(&t, id), JOB_CANCELLED);
	assert_int_equal(newest("full"), 8);
	T_UNTIL(&t, used() == before);
}

/* The leader dies while its segments are made: large enough for their making to outlast it. */
static void test_leader_dies_while_segments_are_made(void **state)
{
	static const char *const options[] = { "--shm-limit", "400MiB", NULL };

	(void)state;
	t_server_stop(&t);
	t_server_start(&t, options);
	uint64_t before = used();
	assert_int_equal(run(OP("gather", "train", "full", ",'options':{'retries':0},'labels':{'fake':'crash:making','bytes':'60000000'}")),
			 JOB_FAILED);
	assert_false(state_dict_exists(t.s->state_dicts, STR("full"))); /* the name is free at once */
	assert_int_equal(run(OP("gather", "train", "full", ",'labels':{'fake':'crash:making','bytes':'60000000'}")), JOB_SUCCEEDED);
	assert_int_equal(newest("full"), 7);
	T_UNTIL(&t, used() > before + 100000000 && used() < before + 150000000);
	assert_int_equal(run(OP("gather", "train", "full", ",'labels':{'fake':'crash:making','bytes':'60000000'}")), JOB_SUCCEEDED);
	assert_int_equal(newest("full"), 8);
	T_UNTIL(&t, used() < before + 150000000);
	assert_int_equal(run("{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'x'}}"), JOB_SUCCEEDED);
	assert_int_equal(run("{'kind':'load','source':{'storage':'main','name':'x'},'target':{'state_dict':'small','world_size':2},"
			     "'labels':{'fake':'crash:making','bytes':'60000000'}}"), JOB_SUCCEEDED);
}

static void test_no_room(void **state)
{
	char id[27];

	(void)state;
	assert_int_equal(run(OP("create", "train", "full", "")), JOB_SUCCEEDED);
	uint64_t before = used();
	uint32_t workers = workers_count(t.s->workers, "gang", NULL);
	t_job(&t, OP("copy", "train", "full", ",'labels':{'bytes':'1500000'}"), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	json_t *doc = t_job_doc(&t, id);
	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "error"), "code")), "shm_exhausted");
	json_decref(doc);
	assert_true(used() == before);
	assert_int_equal(newest("full"), 7);
	assert_int_equal(workers_count(t.s->workers, "gang", "idle"), workers); /* no worker's fault */
	t_state_dict(&t, "small", 1); /* a target of a smaller world */
	refused(ERR_WORLD_MISMATCH, "/target", OP("gather", "train", "small", ""));
}

static void test_restart(void **state)
{
	char id[27];

	(void)state;
	assert_int_equal(run(OP("create", "train", "full", "")), JOB_SUCCEEDED);
	assert_int_equal(run(OP("copy", "full", "train", "")), JOB_SUCCEEDED); /* in slots added to a trainer's */
	T_UNTIL(&t, sealed("train") == 2);
	uint64_t before = used();
	t_job(&t, OP("gather", "train", "full", FAKE("slow:1500")), id);
	t_job_runs(&t, id);
	t_server_crash(&t);
	t_server_start(&t, NULL);
	assert_int_equal(newest("full"), 7);
	assert_int_equal(newest("train"), 8);
	assert_int_equal(sealed("train"), 2);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	assert_int_equal(newest("full"), 8);
	T_UNTIL(&t, used() == before);
	t_server_stop(&t);
	t_server_start(&t, NULL);
	assert_int_equal(newest("full"), 8);
	assert_int_equal(sealed("full"), 1);
	/* Known as made by a job also after a restart. */
	assert_int_equal(run(OP("copy", "full", "train", "")), JOB_SUCCEEDED);
	T_UNTIL(&t, sealed("train") == 2 && used() == before);
}

static void test_refusals(void **state)
{
	(void)state;
	refused(ERR_NOT_FOUND, "", OP("offload", "nothing", "full", ""));
	refused(ERR_NOT_FOUND, "/target", OP("copy", "train", "full", ""));
	refused(ERR_STATE_DICT_EXISTS, "/target", OP("create", "train", "train", ""));
	refused(ERR_VALIDATION_FAILED, "/ranks_only/1", OP("gather", "train", "full", ",'ranks_only':[0,2]"));
	refused(ERR_VALIDATION_FAILED, "/group/0", OP("gather", "train", "full", ",'group':[2]"));
	refused(ERR_VALIDATION_FAILED, "/root", OP("broadcast", "train", "full", ",'root':2"));
	refused(ERR_VALIDATION_FAILED, "/root", OP("broadcast", "train", "full", ",'root':1,'group':[1]"));
	refused(ERR_WORLD_MISMATCH, "/target/world_size", "{'kind':'distribute','source':{'state_dict':'train'},'target':"
		"{'state_dict':'full','world_size':1},'backend':'auto'}");
	refused(ERR_WORLD_MISMATCH, "/target/world_size",
		OP("distribute", "train", "full", ",'layout':[{'match':'*','mesh':[1],'placements':['R']}]"));
	refused(ERR_BACKEND_UNAVAILABLE, "/backend", /* the fake worker's probe finds nothing */
		"{'kind':'gather','source':{'state_dict':'train'},'target':{'state_dict':'full'},'backend':'nccl'}");
	refused(ERR_BACKEND_UNAVAILABLE, "/device", OP("gather", "train", "full", ",'device':'cuda'"));
	T_ERR(STATE_DICT_EXISTS, ({
		      struct t_answer a = { 0 };
		      struct state_dict_request rq = { .name = STR("train"), .world_size = 1, .who = t.me };
		      state_dict_create(t.s->state_dicts, &rq, t_created, &a);
		      t_server_until(&t, &a.called);
		      a.e;
	      }));
	assert_int_equal(run("{'kind':'compare','a':{'state_dict':'train'},'b':{'state_dict':'train'},'backend':'auto'}"), JOB_SUCCEEDED);
	assert_int_equal(jobs_live(t.s), 0);
}

static void test_owner(void **state)
{
	json_t *spec = json_loads("{\"kind\":\"copy\",\"source\":{\"state_dict\":\"train\"},"
				  "\"target\":{\"state_dict\":\"full\"}}", 0, NULL);
	struct job_request rq = { .kind = JOB_COPY, .spec = spec, .who = { .uid = 4242 } };
	struct t_answer a = { 0 };

	(void)state;
	job_create(t.s, &rq, t_created, &a);
	t_server_until(&t, &a.called);
	assert_int_equal(a.e, ERR_FORBIDDEN);
	json_decref(spec);
}

static void test_slot_limit(void **state)
{
	struct t_answer a = { 0 };
	struct state_dict_request rq = { .name = STR("small"), .world_size = 2, .slots = STATE_DICT_SLOTS_MAX, .who = t.me };

	(void)state;
	state_dict_create(t.s->state_dicts, &rq, t_created, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	for (int g = 1; g < STATE_DICT_SLOTS_MAX; g++)
		t_seal_all(&t, "small", 2, g);
	assert_int_equal(run(OP("copy", "train", "small", "")), JOB_SUCCEEDED); /* the last free slot */
	assert_int_equal(newest("small"), 16);
	char id[27];
	t_job(&t, OP("copy", "train", "small", ""), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	json_t *doc = t_job_doc(&t, id);
	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "error"), "code")), "slots_busy");
	json_decref(doc);
	assert_int_equal(newest("small"), 16);
}

static void test_meeting(void **state)
{
	char id[27];

	(void)state;
	assert_int_equal(run(OP("gather", "train", "full", FAKE("meet"))), JOB_SUCCEEDED);
	t_job(&t, OP("gather", "train", "full", ",'options':{'retries':0},'labels':{'fake':'meet-alone'}"), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	json_t *doc = t_job_doc(&t, id), *error = json_object_get(doc, "error");
	assert_string_equal(json_string_value(json_object_get(error, "code")), "peer_timeout");
	assert_int_equal(json_integer_value(json_object_get(error, "rank")), 1);
	json_decref(doc);
	t_job(&t, OP("gather", "train", "full", ",'options':{'retries':0},'labels':{'fake':'meet-twice'}"), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	doc = t_job_doc(&t, id);
	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "error"), "code")), "protocol");
	json_decref(doc);
	assert_int_equal(newest("full"), 7);
}

static enum err meet(struct gang_rendezvous *m, uint32_t index, const char *text, json_t **all)
{
	json_t *body = json_loads(text, 0, NULL);
	enum err e = gang_rendezvous_take(m, index, 3, body, all);

	json_decref(body);
	return e;
}

static void test_rendezvous_rules(void **state)
{
	struct gang_rendezvous m = { 0 };
	json_t *all = NULL;

	(void)state;
	T_ERR(PROTOCOL, meet(&m, 0, "{}", &all));
	T_ERR(PROTOCOL, meet(&m, 0, "{\"round\":0,\"size\":4,\"data\":\"x\"}", &all));
	T_ERR(PROTOCOL, meet(&m, 2, "{\"round\":0,\"size\":2,\"data\":\"x\"}", &all));
	T_ERR(PROTOCOL, meet(&m, 0, "{\"round\":0,\"size\":2,\"data\":7}", &all));
	assert_int_equal(gang_rendezvous_missing(&m), -1);
	T_OK(meet(&m, 1, "{\"round\":3,\"size\":2,\"data\":\"one\"}", &all));
	assert_null(all);
	assert_int_equal(gang_rendezvous_missing(&m), 0);
	T_ERR(PROTOCOL, meet(&m, 1, "{\"round\":3,\"size\":2,\"data\":\"one\"}", &all));
	T_ERR(PROTOCOL, meet(&m, 0, "{\"round\":4,\"size\":2,\"data\":\"nil\"}", &all));
	T_ERR(PROTOCOL, meet(&m, 0, "{\"round\":3,\"size\":1,\"data\":\"nil\"}", &all));
	T_OK(meet(&m, 0, "{\"round\":3,\"size\":2,\"data\":\"nil\"}", &all));
	assert_string_equal(json_string_value(json_array_get(json_object_get(all, "all"), 1)), "one");
	assert_int_equal(json_integer_value(json_object_get(all, "round")), 3);
	json_decref(all);
	gang_rendezvous_drop(&m);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
int main(void)
{
	const struct CMUnitTest tests[] = {
		T(test_new_target), T(test_next_generation), T(test_failures_change_nothing), T(test_no_room), T(test_restart),
		T(test_refusals),   T(test_owner),	     T(test_slot_limit),		  T(test_meeting),
		T(test_leader_dies_while_segments_are_made),
		cmocka_unit_test(test_rendezvous_rules), cmocka_unit_test(test_an_appended_kind_is_no_operation_by_its_number),
	};

	return cmocka_run_group_tests_name("job_state_dict_op", tests, NULL, NULL);
}
