/* t_store.h: one store that is tested, of each kind, and checkpoints of a few bytes in it. For one test program: test_store.c. */
#pragma once
#include "lib/t_worker.h"

#include "lib/t_objects.h"
#include "store/notes.h"

static struct t_worker t;
static struct store *store;            /* the one that is tested: "main" of t */

static enum err gone_if(const struct store_job *by, const struct ref *ref, const struct commit_removal *how)
{
	struct commit_removed removed;

	enum err e = commit_delete(by, ref, how, &removed);
	mem_free(removed.about);
	return e;
}

static enum err gone(const struct store_job *by, const struct ref *ref)
{
	return gone_if(by, ref, &(struct commit_removal){ 0 });
}

static int setup_posix(void **state)
{
	(void)state;
	t_worker_make(&t);
	store = &t.w.stores.v[0];
	return 0;
}

static int setup_objects(void **state)
{
	(void)setup_posix(state);
	close(store->top);
	store->ops = &objects_ops;
	T_OK(store->ops->open(store, NULL));
	return 0;
}

static int teardown_posix(void **state)
{
	(void)state;
	t_worker_remove(&t);
	return 0;
}

static int teardown_objects(void **state)
{
	objects_free(store);
	store->top = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* t_worker closes one */
	return teardown_posix(state);
}

/* A server of object storage that the environment names: DCPD_TEST_S3 is its endpoint, and a bucket "tests" is there. */
static int setup_s3(void **state)
{
	CLEANUP(json_decrefp) json_t *options = json_pack("{s:s*}", "endpoint", getenv("DCPD_TEST_S3"));
	static unsigned turn;
	char location[64];

	(void)setup_posix(state);
	close(store->top);
	snprintf(location, sizeof location, "s3://tests/conform-%d-%u", (int)getpid(), turn++);
	T_OK(store_open(store, &(struct store_place){ location, 0600, (gid_t)-1, options }));
	return 0;
}

static int teardown_s3(void **state)
{
	store->top = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return teardown_posix(state);
}

/* ---- helpers ---- */

static enum err open_attempt(const char *job, uint64_t attempt, const char *name, bool overwrite, struct staging *s)
{
	struct store_job by = { .stores = &t.w.stores, .id = job, .attempt = attempt, .uid = geteuid() };
	struct spec spec = { .target = ref_checkpoint("main", name), .overwrite = overwrite, .sync_files = true };

	return staging_open(&by, &spec, s);
}

static enum err open_as(const char *job, const char *name, bool overwrite, struct staging *s)
{
	return open_attempt(job, 1, name, overwrite, s);
}

/* Fills a staging with a checkpoint: one data file that holds the job's id, .metadata, and a manifest. */
static void fill(struct staging *s)
{
	char manifest[128], data[FORMAT_FILE_MAX];
	int n = snprintf(manifest, sizeof manifest, "{\"dcpd\":1,\"job\":\"%s\"}", s->by.id);

	format_dcp_payload(0, s->number, data);
	T_OK(staging_put_file(s, data, s->by.id, strlen(s->by.id)));
	T_OK(staging_put_file(s, DCP_METADATA, s->by.id, strlen(s->by.id))); /* names its files: no two are equal */
	T_OK(staging_put_file(s, MANIFEST_NAME, manifest, (uint64_t)n));
}

static enum err save(const char *job, const char *name, bool overwrite)
{
	struct staging s = { .name = "" };

	enum err e = open_as(job, name, overwrite, &s);
	if (!e) {
		fill(&s);
		e = staging_commit(&s, overwrite);
	}
	staging_close(&s);
	return e;
}

static bool is_there(const char *name)
{
	struct stat st;

	enum err e = store_stat(store_top(store), name, &st);
	assert_true(!e || e == ERR_NOT_FOUND);
	err_clear();
	return !e;
}

static enum err take_data(void *user, const char *name, unsigned char d_type)
{
	(void)d_type;
	if (strncmp(name, "__0_", 4) == 0)
		snprintf(user, FORMAT_FILE_MAX, "%s", name);
	return OK;
}

static void assert_job(const char *name, const char *job)
{
	char data[FORMAT_FILE_MAX] = "";
	struct store_at dir;
	void *bytes = NULL;
	uint64_t n = 0;

	T_OK(store_enter(store_top(store), name, &dir));
	T_OK(store_list(dir, take_data, data));
	T_OK(store_get(dir, data, 64, &bytes, &n, NULL));
	assert_int_equal(n, strlen(job));
	assert_memory_equal(bytes, job, n);
	mem_free(bytes);
	store_close(&dir);
}

/* Names of a folder that a user sees, sorted, each with a blank behind it. A folder that cannot be entered, for there is nothing in it that
 * is published, is none. */
struct names {
	char text[256];
	bool all;
	struct store_at at;
};

static enum err add_name(void *user, const char *name, unsigned char d_type)
{
	struct names *v = user;
	char rest[256], *at = v->text;
	struct store_at below;

	if (name[0] == '.' && !v->all)
		return OK;
	if (d_type == DT_DIR && store_enter(v->at, name, &below) == ERR_NOT_FOUND)
		return OK;
	if (d_type == DT_DIR)
		store_close(&below);
	while (*at && strcmp(at, name) < 0)
		at += strcspn(at, " ") + 1;
	snprintf(rest, sizeof rest, "%s", at);
	snprintf(at, sizeof v->text - (size_t)(at - v->text), "%.60s %.180s", name, rest);
	return OK;
}

static void assert_names(const char *folder, bool all, const char *want)
{
	struct names v = { .all = all };
	struct store_at at;

	T_OK(store_enter(store_top(store), folder, &at));
	v.at = at;
	T_OK(store_list(at, add_name, &v));
	store_close(&at);
	assert_string_equal(v.text, want);
}

static void identity(const char *name, char out[IDENTITY_MAX])
{
	T_OK(identity_of(store_top(store), name, out));
}
