/* t_server.c: see t_server.h. */
#include "lib/t_server.h"
#include "lib/t_json.h"

#include <libgen.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/journal.h"
#include "server/loop.h"
#include "server/state_dict_impl.h"

static void worker_path(char out[4200])
{
	char self[4096];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

	assert_true(n > 0);
	self[n] = '\0';
	snprintf(out, 4200, "%s/tools/fake_worker", dirname(self));
}

void t_server_start(struct t_server *t, const char *const *options)
{
	char state[128], main_root[128], other_root[128], worker[4200];
	const char *argv[64];
	int argc = 0;

	if (!t->dir[0]) {
		snprintf(t->dir, sizeof t->dir, "/tmp/dcpd-test-XXXXXX");
		assert_non_null(mkdtemp(t->dir));
	}
	snprintf(state, sizeof state, "%s/state", t->dir);
	snprintf(main_root, sizeof main_root, "main=%s/main", t->dir);
	snprintf(other_root, sizeof other_root, "other=%s/other", t->dir);
	mkdir(strchr(main_root, '/'), 0755);
	mkdir(strchr(other_root, '/'), 0755);
	worker_path(worker);
	const char *const fixed[] = { "dcpd", "--state-dir", state, "--storage", main_root, "--storage", other_root, "--worker-path",
				      worker, "--workers", "2" };
	for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
		argv[argc++] = fixed[i];
	for (; options && *options; options++)
		argv[argc++] = *options;
	t->me = (struct principal){ .uid = geteuid(), .admin = true };
	T_OK(config_load(argc, (char *const *)argv, NULL, &t->config));
	t->base = event_base_new();
	assert_non_null(t->base);
	T_OK(server_new(t->config, t->base, &t->s));
}

static void drop(struct t_server *t)
{
	event_base_free(t->base);
	config_free(t->config);
	t->base = NULL;
	t->config = NULL;
}

void t_server_stop(struct t_server *t)
{
	server_free(t->s);
	t->s = NULL;
	drop(t);
}

/* The journal thread may finish what it was handed, as a kernel may: a kill is not a power cut. */
void t_server_crash(struct t_server *t)
{
	t_server_stop(t);
}

/* Segments outlive a daemon by design; without the state dir nobody would ever remove them. */
static void unlink_segments(struct server *s)
{
	const struct state_dict *sd;

	map_each(&s->state_dicts->table, sd)
		for (uint32_t i = 0; i < state_dict_slots(sd); i++)
			if (state_dict_nth(sd, i)->fd >= 0)
				T_OK(seg_unlink(state_dict_nth(sd, i)->segment));
}

void t_server_remove(struct t_server *t)
{
	const char *argv[] = { "rm", "-rf", t->dir, NULL };

	if (t->s) {
		unlink_segments(t->s);
		t_server_stop(t);
	}
	pid_t pid = fork();
	if (pid == 0) {
		execvp("rm", (char *const *)argv);
		_exit(127);
	}
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	t->dir[0] = '\0';
}

void t_server_run(struct t_server *t, int ms)
{
	struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

	event_base_loopexit(t->base, &tv);
	event_base_dispatch(t->base);
}

void t_server_until(struct t_server *t, const bool *flag)
{
	T_UNTIL(t, *flag);
}

static void take(struct t_answer *a, enum err e)
{
	assert_false(a->called);
	a->called = true;
	a->e = e;
	if (e)
		a->info = *err_last();
}

void t_done(void *user, enum err e)
{
	take(user, e);
}

void t_created(void *user, enum err e, const char *id, bool existing)
{
	struct t_answer *a = user;

	take(a, e);
	if (!e)
		snprintf(a->id, sizeof a->id, "%s", id);
	a->existing = existing;
}

void t_reserved(void *user, enum err e, const struct reservation *r)
{
	struct t_answer *a = user;

	take(a, e);
	if (e)
		return;
	a->reserved = *r;
	snprintf(a->segment, sizeof a->segment, "%s", r->segment);
}

void t_planned(void *user, enum err e, const json_t *plan)
{
	struct t_answer *a = user;

	take(a, e);
	a->doc = plan ? json_deep_copy(plan) : NULL;
}

static enum job_kind kind_in(const json_t *doc)
{
	enum job_kind kind;

	assert_true(kind_parse(str_of(json_string_value(json_object_get(doc, "kind"))), &kind));
	return kind;
}

enum err t_job_try(struct t_server *t, const char *spec, struct t_answer *a)
{
	json_t *doc = t_json(spec);
	struct job_request rq = { .kind = kind_in(doc), .spec = doc, .who = t->me };

	*a = (struct t_answer){ 0 };
	job_create(t->s, &rq, t_created, a);
	assert_false(a->called);
	t_server_until(t, &a->called);
	json_decref(doc);
	if (a->e)
		err_restore(&a->info);
	return a->e;
}

void t_job(struct t_server *t, const char *spec, char id[27])
{
	struct t_answer a;

	T_OK(t_job_try(t, spec, &a));
	snprintf(id, 27, "%.26s", a.id);
}

void t_job_runs(struct t_server *t, const char *id)
{
	enum job_state st = JOB_QUEUED;

	T_UNTIL(t, job_state_of(t->s, str_of(id), &st) || st == JOB_RUNNING || job_state_ended(st));
	assert_int_equal(st, JOB_RUNNING);
}

enum job_state t_job_end(struct t_server *t, const char *id)
{
	struct t_answer a = { 0 };
	enum job_state state;

	job_wait(t->s, str_of(id), 15000, t_done, &a);
	t_server_until(t, &a.called);
	T_OK(a.e);
	T_OK(job_state_of(t->s, str_of(id), &state));
	return state;
}

json_t *t_job_doc(struct t_server *t, const char *id)
{
	struct str text;

	T_OK(job_text(t->s, str_of(id), &text));
	json_t *doc = json_loadb(text.p, text.n, 0, NULL);
	assert_non_null(doc);
	return doc;
}

void t_state_dict(struct t_server *t, const char *name, uint32_t world)
{
	struct t_answer a = { 0 };
	struct state_dict_request rq = { .name = str_of(name), .world_size = world, .who = t->me };

	state_dict_create(t->s->state_dicts, &rq, t_created, &a);
	t_server_until(t, &a.called);
	if (a.e)
		T_FAIL("%s", a.info.text);
}

void t_seal_all(struct t_server *t, const char *name, uint32_t world, int64_t generation)
{
	for (uint32_t r = 0; r < world; r++) {
		struct t_answer a = { 0 }, b = { 0 };
		state_dict_reserve(t->s->state_dicts, &t->me, str_of(name), r, 10000, generation, 0, t_reserved, &a);
		t_server_until(t, &a.called);
		if (a.e)
			T_FAIL("%s", a.info.text);
		state_dict_seal(t->s->state_dicts, &t->me, str_of(name), r, generation, 9000, NULL, NULL, t_done, &b);
		t_server_until(t, &b.called);
		if (b.e)
			T_FAIL("%s", b.info.text);
	}
}

int t_server_train(struct t_server *t, const char *const *options)
{
	memset(t, 0, sizeof *t);
	t_server_start(t, options);
	t_state_dict(t, "train", 2);
	t_seal_all(t, "train", 2, 7);
	return 0;
}
