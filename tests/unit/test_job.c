/* Jobs from creation to their end, over a gang of fake workers. */
#include "lib/t_trained.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/events.h"
#include "server/storage.h"
#include "server/verdict.h"

static int setup_stalls(void **state)
{
	static const char *const options[] = { "--stall-after", "300ms", NULL };

	(void)state;
	return t_server_train(&t, options);
}

static const char *error_code(json_t *doc)
{
	return json_string_value(json_object_get(json_object_get(doc, "error"), "code"));
}

static void test_save(void **state)
{
	char id[27], path[256];
	struct stat st;

	(void)state;
	t_job(&t, SAVE("run1/step-1", ""), id);
	assert_int_equal(strlen(id), 26);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	snprintf(path, sizeof path, "%s/main/run1/step-1/.dcpd.json", t.dir);
	assert_int_equal(stat(path, &st), 0);
	json_t *doc = t_job_doc(&t, id);
	assert_string_equal(json_string_value(json_object_get(doc, "state")), "succeeded");
	assert_true(json_is_string(json_object_get(json_object_get(doc, "milestones"), "durable")));
	const json_t *source = json_object_get(json_object_get(doc, "spec"), "source");
	assert_int_equal(json_integer_value(json_object_get(source, "generation")), 7);
	assert_int_equal(json_integer_value(json_object_get(json_object_get(doc, "result"), "bytes")), 1000);
	json_decref(doc);
	assert_int_equal(jobs_live(t.s), 0);
}


static void test_refusals(void **state)
{
	struct t_answer a;
	char path[256];

	(void)state;
	T_ERR(NOT_FOUND, t_job_try(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'nowhere','name':'x'}}",
				   &a));
	T_ERR(NOT_FOUND, t_job_try(&t, "{'kind':'save','source':{'state_dict':'none'},'target':{'storage':'main','name':'x'}}", &a));
	T_ERR(NOT_SEALED, t_job_try(&t, "{'kind':'save','source':{'state_dict':'train','generation':8},'target':{'storage':'main',"
				    "'name':'x'}}", &a));
	assert_non_null(strstr(a.info.text, "ranks 0, 1"));
	T_ERR(NOT_FOUND, t_job_try(&t, "{'kind':'verify','source':{'storage':'main','name':'x'}}", &a));
	snprintf(path, sizeof path, "%s/main/junk", t.dir);
	mkdir(path, 0755);
	T_ERR(NOT_A_CHECKPOINT, t_job_try(&t, SAVE("junk", ",'options':{'overwrite':true}"), &a));
	assert_int_equal(jobs_live(t.s), 0);
	json_t *doc;
	struct buf b = BUF_INIT(1 << 20);
	T_OK(state_dict_put(t.s->state_dicts, &t.me, STR("train"), &b)); /* a refused job holds nothing */
	doc = json_loadb((char *)b.p, b.len, 0, NULL);
	char *text = json_dumps(doc, 0);
	assert_null(strstr(text, "\"in_use_by\": [\""));
	free(text);
	json_decref(doc);
	buf_free(&b);
}

static void test_exists_and_full(void **state)
{
	struct t_answer a;
	char id[27], path[256];

	(void)state;
	t_job(&t, SAVE("a", ""), id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	T_ERR(CHECKPOINT_EXISTS, t_job_try(&t, SAVE("a", ""), &a));
	T_OK(t_job_try(&t, SAVE("a", ",'options':{'overwrite':true}"), &a));
	assert_int_equal(t_job_end(&t, a.id), JOB_SUCCEEDED);
	snprintf(path, sizeof path, "%s/main/.free", t.dir);
	int fd = open(path, O_CREAT | O_WRONLY, 0644);
	assert_int_equal(write(fd, "17999", 5), 5); /* 2 ranks of 9000 bytes */
	close(fd);
	struct storage *st;
	struct t_answer p = { 0 };
	T_OK(storage_find(t.s->storages, STR("main"), &st));
	storage_probe(t.s->storages, t.s->lookups, st, t_done, &p);
	t_server_until(&t, &p.called);
	T_ERR(STORAGE_FULL, t_job_try(&t, SAVE("b", ""), &a));
	assert_string_equal(a.info.expected, "18000");
	assert_string_equal(a.info.actual, "17999");

	/* Bytes promised to a waiting job are not promised again. */
	fd = open(path, O_WRONLY | O_TRUNC);
	assert_int_equal(write(fd, "35999", 5), 5);
	close(fd);
	t_job(&t, SAVE("running", FAKE("slow:60000")), id);
	t_job_runs(&t, id);
	T_OK(t_job_try(&t, SAVE("c", ""), &a));
	T_ERR(STORAGE_FULL, t_job_try(&t, SAVE("d", ""), &p));
	assert_string_equal(p.info.actual, "17999");
	cancel(id);
	assert_int_equal(t_job_end(&t, a.id), JOB_SUCCEEDED);
	T_OK(t_job_try(&t, SAVE("d", ""), &a));
	assert_int_equal(t_job_end(&t, a.id), JOB_SUCCEEDED);
}

static void test_target_busy_and_cancel(void **state)
{
	struct t_answer a, again = { 0 };
	char id[27];

	(void)state;
	t_job(&t, SAVE("a", FAKE("slow:60000")), id);
	T_ERR(TARGET_BUSY, t_job_try(&t, SAVE("a", ""), &a));
	T_ERR(TARGET_BUSY, t_job_try(&t, SAVE("a/inside", ""), &a));
	t_job_runs(&t, id);
	struct principal other = { .uid = 12345 };
	struct t_answer f = { 0 };
	job_cancel(t.s, &other, str_of(id), t_done, &f);
	t_server_until(&t, &f.called);
	assert_int_equal(f.e, ERR_FORBIDDEN);
	cancel(id);
	json_t *doc = t_job_doc(&t, id);
	assert_string_equal(error_code(doc), "cancelled");
	json_decref(doc);
	job_cancel(t.s, &t.me, str_of(id), t_done, &again);
	t_server_until(&t, &again.called);
	assert_int_equal(again.e, ERR_STATE_CONFLICT);
}

static void test_cancel_waiting_and_lanes(void **state)
{
	char slow[27], waiting[27], verify[27];

	(void)state;
	t_job(&t, SAVE("a", FAKE("slow:60000")), slow);
	t_job(&t, SAVE("b", ""), waiting);
	t_job_runs(&t, slow);
	enum job_state st;
	T_OK(job_state_of(t.s, str_of(waiting), &st));
	assert_int_equal(st, JOB_QUEUED);
	cancel(waiting);
	/* Another storage is another lane: it does not wait for the slow save. */
	t_job(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'other','name':'c'}}", verify);
	assert_int_equal(t_job_end(&t, verify), JOB_SUCCEEDED);
	T_OK(job_state_of(t.s, str_of(slow), &st));
	assert_int_equal(st, JOB_RUNNING);
	cancel(slow);
}

#define PART(name) "{'kind':'save','source':{'state_dict':'train','generation':7,'parts':[{'state_dict':'train','generation':7}]}," \
		   "'target':{'storage':'main','name':'whole'},'hosts':{'id':'part-of-" name "','part':true}" FAKE("slow:60000") "}"

static enum job_state state_of(const char *id)
{
	enum job_state st;

	T_OK(job_state_of(t.s, str_of(id), &st));
	return st;
}

/* The disk would rest while one part ends and the next begins. */
static void test_two_parts_run_side_by_side(void **state)
{
	char parts[3][27], save[27];

	(void)state;
	t_job(&t, PART("rank-0"), parts[0]);
	t_job_runs(&t, parts[0]);
	t_job(&t, PART("rank-1"), parts[1]);
	t_job_runs(&t, parts[1]);
	t_job(&t, PART("rank-2"), parts[2]);
	t_job(&t, SAVE("a", ""), save); /* in a lane of its own */
	assert_int_equal(t_job_end(&t, save), JOB_SUCCEEDED);
	assert_int_equal(state_of(parts[2]), JOB_QUEUED);
	cancel(parts[0]);
	t_job_runs(&t, parts[2]);
	assert_int_equal(state_of(parts[1]), JOB_RUNNING);
	cancel(parts[1]);
	cancel(parts[2]);
}

static void check_attempts(const char *script, enum job_state want, int attempt, const char *code)
{
	char spec[512], id[27], name[32];

	snprintf(name, sizeof name, "%s", script);
	*strchr(name, ':') = '-';
	snprintf(spec, sizeof spec, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'%s'},"
				    "'labels':{'fake':'%s'}}", name, script);
	t_job(&t, spec, id);
	assert_int_equal(t_job_end(&t, id), want);
	json_t *doc = t_job_doc(&t, id);
	assert_int_equal(json_integer_value(json_object_get(doc, "attempt")), attempt);
	if (code)
		assert_string_equal(error_code(doc), code);
	json_decref(doc);
}

static void test_crashes(void **state)
{
	(void)state;
	check_attempts("crash:planning", JOB_SUCCEEDED, 2, NULL);
	check_attempts("crash:running", JOB_SUCCEEDED, 2, NULL);
	check_attempts("crash:peer", JOB_SUCCEEDED, 2, NULL);
	check_attempts("crash:commit", JOB_SUCCEEDED, 2, NULL);
	check_attempts("crash:committed", JOB_SUCCEEDED, 1, NULL); /* recovered, not run again */
	check_attempts("always:running", JOB_FAILED, 2, "worker_lost");
}

static void test_failures(void **state)
{
	char id[27];
	struct t_answer r = { 0 };

	(void)state;
	t_job(&t, SAVE("a", FAKE("fail:digest_mismatch")), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	json_t *doc = t_job_doc(&t, id), *error = json_object_get(doc, "error");
	assert_string_equal(error_code(doc), "digest_mismatch");
	assert_string_equal(json_string_value(json_object_get(error, "fqn")), "model.w");
	assert_string_equal(json_string_value(json_object_get(error, "file")), "__1_0.distcp");
	assert_int_equal(json_integer_value(json_object_get(error, "rank")), 1);
	assert_int_equal(json_integer_value(json_object_get(error, "offset")), 4096);
	json_decref(doc);
	job_retry(t.s, &t.me, str_of(id), t_done, &r);
	t_server_until(&t, &r.called);
	T_OK(r.e);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	doc = t_job_doc(&t, id);
	assert_int_equal(json_integer_value(json_object_get(doc, "attempt")), 2);
	json_decref(doc);
	t_job(&t, SAVE("g", FAKE("garbage")), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	doc = t_job_doc(&t, id);
	assert_string_equal(error_code(doc), "protocol");
	json_decref(doc);
	t_job(&t, SAVE("ok", ""), id); /* and the daemon goes on */
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
}

/* The lists of a worker's error are in the record, before and after a restart; an event carries the count alone. */
static void test_damage(void **state)
{
	uint64_t after = events_last_id(t.s->events);
	struct event_record r;
	bool lost, told = false;
	char id[27];

	(void)state;
	t_job(&t, SAVE("a", FAKE("damage:1000")), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	for (int i = 0; i < 2; i++) {
		json_t *doc = t_job_doc(&t, id), *error = json_object_get(doc, "error"), *damage = json_object_get(error, "damage");
		assert_string_equal(error_code(doc), "checkpoint_damaged"); /* what a problem says always is not the lists' to change */
		assert_int_equal(json_array_size(damage), 1000);
		assert_int_equal(json_integer_value(json_object_get(json_array_get(damage, 999), "offset")), 4096 * 999);
		assert_int_equal(json_integer_value(json_object_get(error, "damage_count")), 1000);
		assert_string_equal(json_string_value(json_object_get(error, "identity")), "1-a");
		json_decref(doc);
		while (i == 0 && events_next(t.s->events, after, id, &r, &lost)) {
			after = r.id;
			if (strcmp(r.type, "job.state") == 0 && strstr(r.data.p, "checkpoint_damaged"))
				told = strstr(r.data.p, "\"damage_count\":1000") && !strstr(r.data.p, "__0_0.distcp");
		}
		t_server_stop(&t);
		t_server_start(&t, NULL);
	}
	assert_true(told);
}

/* Records may be large: a page of the list ends early then, and the next one goes on. */
static void test_list_of_large_records(void **state)
{
	enum { JOBS = 24 };
	char id[27], token[27] = "";
	uint32_t seen = 0, pages = 0;

	(void)state;
	for (int i = 0; i < JOBS; i++) {
		t_job(&t, SAVE("a", FAKE("damage:1700")), id);
		assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	}
	do {
		struct buf b = BUF_INIT(64 << 20); /* as much as an answer may have */
		T_OK(job_list(t.s, STR(""), 1000, str_of(token), &b));
		json_t *doc = json_loadb((char *)b.p, b.len, 0, NULL), *jobs = json_object_get(doc, "jobs");
		const char *next = json_string_value(json_object_get(doc, "next_page_token"));
		assert_true(b.len < 12 << 20);
		assert_true(json_array_size(jobs) > 0);
		const char *last = json_string_value(json_object_get(json_array_get(jobs, json_array_size(jobs) - 1), "id"));
		assert_true(!next || strcmp(next, last) == 0);
		seen += (uint32_t)json_array_size(jobs);
		pages++;
		snprintf(token, sizeof token, "%s", next ? next : "");
		json_decref(doc);
		buf_free(&b);
	} while (token[0]);
	assert_int_equal(seen, JOBS);
	assert_in_range(pages, 2, 7);
}

static const char *verdict_state(const char *identity)
{
	static char state[32];
	json_t *found = verdict_find(t.s->journal, STR("main"), STR("v"), identity);
	const char *text = json_string_value(json_object_get(found, "state"));

	snprintf(state, sizeof state, "%s", text ? text : "");
	json_decref(found);
	return state;
}

#define VERIFY(script, more) "{'kind':'verify','source':{'storage':'main','name':'v'}" more FAKE(script) "}"

/* Verdicts of jobs on a checkpoint are kept with their end, for the content that they saw, until that is replaced or deleted. */
static void test_verdicts(void **state)
{
	static const struct {
		const char *spec, *verdict;
		enum job_state end;
	} jobs[] = {
		{ VERIFY("identity:1-a", ",'level':'structure'"), "unverified", JOB_SUCCEEDED },
		{ VERIFY("identity:1-a", ",'level':'digest'"), "verified", JOB_SUCCEEDED },
		/* says less than what is known */
		{ VERIFY("identity:1-a", ",'level':'structure'"), "verified", JOB_SUCCEEDED },
		/* no word on the bytes */
		{ VERIFY("fail:storage_io", ""), "verified", JOB_FAILED },
		{ VERIFY("damage:3", ""), "damaged", JOB_FAILED },
		/* a part of it */
		{ VERIFY("identity:1-a", ",'level':'digest','include':['w']"), "damaged", JOB_SUCCEEDED },
		{ VERIFY("identity:1-a", ",'level':'values'"), "verified", JOB_SUCCEEDED },
	};
	char id[27];

	(void)state;
	t_job(&t, SAVE("v", ""), id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
		t_job(&t, jobs[i].spec, id);
		assert_int_equal(t_job_end(&t, id), jobs[i].end);
		assert_string_equal(verdict_state("1-a"), jobs[i].verdict);
		assert_string_equal(verdict_state("1-b"), ""); /* another content */
	}
	t_job(&t, VERIFY("damage:3", ""), id);
	t_job_end(&t, id);
	t_server_stop(&t);
	t_server_start(&t, NULL);
	json_t *found = verdict_find(t.s->journal, STR("main"), STR("v"), "1-a");
	assert_string_equal(json_string_value(json_object_get(found, "level")), "digest");
	assert_string_equal(json_string_value(json_object_get(found, "job")), id);
	assert_int_equal(json_integer_value(json_object_get(found, "damage_count")), 3);
	assert_non_null(json_object_get(found, "at"));
	json_decref(found);
	t_job(&t, SAVE("v", ",'options':{'overwrite':true}"), id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	assert_string_equal(verdict_state("1-a"), "");
}

/* A load of what is known to be damaged says so; of another content, or of one that is not, it does not. */
static void test_load_of_what_is_damaged(void **state)
{
	static const struct {
		const char *identity;
		size_t warnings;
	} loads[] = { { "1-a", 1 }, { "1-b", 0 } };
	char id[27], spec[256];

	(void)state;
	t_job(&t, SAVE("v", ""), id);
	t_job_end(&t, id);
	t_job(&t, VERIFY("damage:3", ""), id);
	t_job_end(&t, id);
	for (size_t i = 0; i < 2; i++) {
		snprintf(spec, sizeof spec, "{'kind':'load','source':{'storage':'main','name':'v'},'target':{'state_dict':'to%zu',"
					    "'world_size':1}" FAKE("identity:%s") "}", i, loads[i].identity);
		t_job(&t, spec, id);
		assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
		json_t *doc = t_job_doc(&t, id), *warnings = json_object_get(json_object_get(doc, "result"), "warnings");
		assert_int_equal(json_array_size(warnings), loads[i].warnings);
		if (loads[i].warnings)
			assert_string_equal(json_string_value(json_object_get(json_array_get(warnings, 0), "code")),
					    "checkpoint_damaged_known");
		json_decref(doc);
	}
}

static bool is_stalled(const char *id)
{
	json_t *doc = t_job_doc(&t, id);
	bool is = strcmp(json_string_value(json_object_get(doc, "stage")), "stalled") == 0;

	json_decref(doc);
	return is;
}

static void test_stall(void **state)
{
	char id[27], hung[27];
	struct storage *st;

	(void)state;
	t_job(&t, SAVE("a", FAKE("idle:7000")), id); /* it says nothing, but does not hang */
	T_UNTIL(&t, is_stalled(id));
	T_OK(storage_find(t.s->storages, STR("main"), &st));
	for (bool ends = false; !ends; ends = !is_stalled(id)) {
		assert_int_equal(st->state, STORAGE_OK);
		t_server_run(&t, 50);
	}
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	t_job(&t, SAVE("b", FAKE("stall:7000")), id);
	T_UNTIL(&t, is_stalled(id));
	T_UNTIL(&t, st->state == STORAGE_STATE_STALLED);
	T_OK(storage_find(t.s->storages, STR("other"), &st));
	assert_int_equal(st->state, STORAGE_OK);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	t.config->stall_deadline_ms = 2000;
	t_job(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'other','name':'h'},'labels':{'fake':'hang'}}",
	      hung);
	assert_int_equal(t_job_end(&t, hung), JOB_FAILED);
	json_t *doc = t_job_doc(&t, hung);
	assert_string_equal(error_code(doc), "storage_stalled");
	json_decref(doc);
}

static enum err create_keyed(const char *name, const char *key, const char *body, struct t_answer *a)
{
	json_t *spec = json_pack("{s:s, s:{s:s}, s:{s:s, s:s}}", "kind", "save", "source", "state_dict", "train", "target", "storage",
				 "main", "name", name);
	struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = t.me, .idem = { str_of(key), str_of(body) } };

	*a = (struct t_answer){ 0 };
	job_create(t.s, &rq, t_created, a);
	json_decref(spec);
	return OK;
}

static void test_idempotency(void **state)
{
	struct t_answer a, b, c;

	(void)state;
	T_OK(create_keyed("k", "key-1", "body", &a));
	T_OK(create_keyed("k", "key-1", "body", &b));
	t_server_until(&t, &a.called);
	t_server_until(&t, &b.called);
	T_OK(a.e);
	assert_int_equal(b.e, ERR_IDEMPOTENCY_IN_FLIGHT);
	assert_int_equal(t_job_end(&t, a.id), JOB_SUCCEEDED);
	T_OK(create_keyed("k", "key-1", "body", &b));
	t_server_until(&t, &b.called);
	T_OK(b.e);
	assert_true(b.existing);
	assert_string_equal(b.id, a.id);
	T_OK(create_keyed("k2", "key-1", "other body", &c));
	t_server_until(&t, &c.called);
	assert_int_equal(c.e, ERR_IDEMPOTENCY_MISMATCH);
	t_server_stop(&t); /* the key survives */
	t_server_start(&t, NULL);
	T_OK(create_keyed("k", "key-1", "body", &b));
	t_server_until(&t, &b.called);
	T_OK(b.e);
	assert_string_equal(b.id, a.id);
}

static void test_restart(void **state)
{
	static const char *const scripts[] = { "slow:1500", "slow:1500", "slow:1", "slow:1" };
	char ids[4][27], spec[256];

	(void)state;
	for (int i = 0; i < 4; i++) {
		snprintf(spec, sizeof spec, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'%s','name':'r%d'},"
					    "'labels':{'fake':'%s'}}", i % 2 ? "other" : "main", i, scripts[i]);
		t_job(&t, spec, ids[i]);
	}
	t_job_runs(&t, ids[0]);
	t_server_crash(&t);
	t_server_start(&t, NULL);
	assert_int_equal(jobs_live(t.s), 4);
	for (int i = 0; i < 4; i++)
		assert_int_equal(t_job_end(&t, ids[i]), JOB_SUCCEEDED);
	/* A job that committed before the crash is not run again. */
	char id[27], path[256];
	t_job(&t, SAVE("done", FAKE("always:committed")), id);
	snprintf(path, sizeof path, "%s/main/done/.dcpd.json", t.dir);
	T_UNTIL(&t, access(path, F_OK) == 0);
	t_server_crash(&t);
	t_server_start(&t, NULL);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	json_t *doc = t_job_doc(&t, id);
	assert_int_equal(json_integer_value(json_object_get(doc, "attempt")), 1);
	assert_true(json_is_true(json_object_get(json_object_get(doc, "result"), "recovered")));
	json_decref(doc);
}

static void test_drain(void **state)
{
	char quick[27], waiting[27];
	struct t_answer a;

	(void)state;
	t_job(&t, SAVE("a", FAKE("slow:1500")), quick);
	t_job(&t, SAVE("b", ""), waiting);
	t_job_runs(&t, quick);
	server_drain(t.s);
	T_ERR(DRAINING, t_job_try(&t, SAVE("c", ""), &a));
	T_UNTIL(&t, server_drained(t.s));
	enum job_state st;
	T_OK(job_state_of(t.s, str_of(quick), &st));
	assert_int_equal(st, JOB_SUCCEEDED);
	T_OK(job_state_of(t.s, str_of(waiting), &st));
	assert_int_equal(st, JOB_QUEUED);
	t_server_stop(&t);
	t_server_start(&t, NULL);
	assert_int_equal(t_job_end(&t, waiting), JOB_SUCCEEDED);
}

static void test_dry_run(void **state)
{
	json_t *spec = json_loads("{\"kind\":\"save\",\"source\":{\"state_dict\":\"train\"},\"target\":{\"storage\":\"main\","
				  "\"name\":\"dry\"}}", 0, NULL);
	struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = t.me };
	struct t_answer a = { 0 };
	struct buf b = BUF_INIT(1 << 20);

	(void)state;
	job_dry_run(t.s, &rq, t_planned, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	assert_int_equal(json_integer_value(json_object_get(a.doc, "files")), 2);
	T_OK(job_list(t.s, STR(""), 10, STR(""), &b));
	assert_memory_equal(b.p, "{\"jobs\":[]}", b.len);
	assert_int_equal(jobs_live(t.s), 0);
	buf_free(&b);
	json_decref(a.doc);
	json_decref(spec);
}

static json_t *list(const char *filter, uint32_t page, const char *token)
{
	struct buf b = BUF_INIT(1 << 20);

	T_OK(job_list(t.s, str_of(filter), page, str_of(token), &b));
	json_t *doc = json_loadb((char *)b.p, b.len, 0, NULL);
	buf_free(&b);
	assert_non_null(doc);
	return doc;
}

static size_t listed(const char *filter)
{
	json_t *doc = list(filter, 100, "");
	size_t n = json_array_size(json_object_get(doc, "jobs"));

	json_decref(doc);
	return n;
}

static void test_list(void **state)
{
	char id[27], spec[256];
	struct buf b = BUF_INIT(1 << 20);

	(void)state;
	for (int i = 0; i < 5; i++) {
		snprintf(spec, sizeof spec, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'l%d'},"
					    "'labels':{'run':'r%d'%s}}", i, i % 2, i == 3 ? ",'fake':'fail:divergent'" : "");
		t_job(&t, spec, id);
		t_job_end(&t, id);
	}
	assert_int_equal(listed(""), 5);
	assert_int_equal(listed("state=succeeded"), 4);
	assert_int_equal(listed("state=failed AND kind=save"), 1);
	assert_int_equal(listed("labels.run=\"r1\""), 2);
	assert_int_equal(listed("labels.run=r1 AND state=failed"), 1);
	assert_int_equal(listed("kind=load"), 0);
	assert_int_equal(listed("target=main:l2"), 1);
	T_ERR(VALIDATION_FAILED, job_list(t.s, STR("state=odd"), 10, STR(""), &b));
	T_ERR(VALIDATION_FAILED, job_list(t.s, STR("x"), 10, STR(""), &b));
	T_ERR(VALIDATION_FAILED, job_list(t.s, STR("state=failed AND "), 10, STR(""), &b));
	buf_free(&b);
	json_t *first = list("", 3, "");
	const char *token = json_string_value(json_object_get(first, "next_page_token"));
	assert_non_null(token);
	json_t *second = list("", 3, token);
	assert_int_equal(json_array_size(json_object_get(first, "jobs")), 3);
	assert_int_equal(json_array_size(json_object_get(second, "jobs")), 2);
	assert_null(json_object_get(second, "next_page_token"));
	json_decref(first);
	json_decref(second);
}

static void test_load_makes_state_dict(void **state)
{
	char id[27];
	struct buf b = BUF_INIT(1 << 20);

	(void)state;
	t_job(&t, SAVE("src", ""), id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	t_job(&t, "{'kind':'load','source':{'storage':'main','name':'src'},'target':{'state_dict':'serve','world_size':3}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	T_OK(state_dict_put(t.s->state_dicts, &t.me, STR("serve"), &b));
	t_server_stop(&t); /* it survives, and can be saved from */
	t_server_start(&t, NULL);
	t_job(&t, "{'kind':'save','source':{'state_dict':'serve'},'target':{'storage':'main','name':'again'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	/* A failed load leaves nothing behind. */
	t_job(&t, "{'kind':'load','source':{'storage':'main','name':'src'},'target':{'state_dict':'bad'},"
		  "'labels':{'fake':'always:running'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	assert_false(state_dict_exists(t.s->state_dicts, STR("bad")));
	/* Into one that exists: filled in place. */
	t_job(&t, "{'kind':'load','source':{'storage':'main','name':'src'},'target':{'state_dict':'train'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	buf_free(&b);
}

static void test_delete(void **state)
{
	char id[27], path[256];
	struct t_answer a;

	(void)state;
	T_ERR(NOT_FOUND, t_job_try(&t, "{'kind':'delete','target':{'storage':'main','name':'gone'}}", &a));
	t_job(&t, SAVE("gone", ""), id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	t_job(&t, "{'kind':'delete','target':{'storage':'main','name':'gone'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	snprintf(path, sizeof path, "%s/main/gone", t.dir);
	assert_int_equal(access(path, F_OK), -1);
}

static void test_events(void **state)
{
	char id[27];
	struct event_record r;
	uint64_t after = events_last_id(t.s->events), first_boot = after;
	bool lost, committed = false, succeeded = false;

	(void)state;
	t_job(&t, SAVE("e", FAKE("slow:100")), id);
	t_job_end(&t, id);
	uint32_t progress = 0;
	while (events_next(t.s->events, after, id, &r, &lost)) {
		assert_true(r.id > after);
		assert_false(lost);
		after = r.id;
		progress += strcmp(r.type, "job.progress") == 0;
		committed |= strcmp(r.type, "checkpoint.committed") == 0;
		succeeded |= strcmp(r.type, "job.state") == 0 && strstr(r.data.p, "succeeded");
	}
	assert_true(committed && succeeded && progress > 0);
	t_server_stop(&t);
	t_server_start(&t, NULL);
	assert_true(events_last_id(t.s->events) > after);
	t_state_dict(&t, "second", 1);
	assert_true(events_next(t.s->events, first_boot, NULL, &r, &lost));
	assert_true(lost); /* those of the last start are gone, and it says so */
}

/* A worker of another build is refused, and says why. */
static void test_other_build(void **state)
{
	char id[27];

	(void)state;
	setenv("DCPD_FAKE_BUILD", "ancient", 1);
	t_job(&t, SAVE("build", ",'options':{'retries':0}"), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	unsetenv("DCPD_FAKE_BUILD");
	json_t *doc = t_job_doc(&t, id);
	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "error"), "actual")), "ancient");
	json_decref(doc);
}

#define WITH(begin, fn) cmocka_unit_test_setup_teardown(fn, begin, teardown)
#define T(fn) WITH(setup, fn)
int main(void)
{
	const struct CMUnitTest tests[] = {
		T(test_save),	  T(test_refusals), T(test_exists_and_full), T(test_target_busy_and_cancel),
		T(test_crashes),  T(test_failures), T(test_damage), T(test_list_of_large_records),      T(test_verdicts),
		T(test_load_of_what_is_damaged), WITH(setup_stalls, test_stall),
		T(test_restart),  T(test_drain),    T(test_dry_run),	     T(test_cancel_waiting_and_lanes),
		T(test_two_parts_run_side_by_side),
		T(test_list),	  T(test_delete),   T(test_events),	     T(test_load_makes_state_dict),
		T(test_idempotency), T(test_other_build),
	};

	return cmocka_run_group_tests_name("job", tests, NULL, NULL);
}
