/* How a checkpoint becomes visible, is replaced, goes, and what is done about jobs that never ended. */
#include "lib/t_worker.h"

#include <limits.h>
#include <sys/stat.h>
#include <time.h>
#include "store/commit.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/staging.h"

T_WORKER_EACH(t);

/* ---- fsync, linked in the C library's place: fails as EIO for one directory, in passes [first, last], counted from 1 ---- */

static struct {
	ino_t dir;
	unsigned first, last, passes;
} unsynced;

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
	struct stat st;

	if (unsynced.dir && fstat(fd, &st) == 0 && st.st_ino == unsynced.dir && ++unsynced.passes >= unsynced.first &&
	    unsynced.passes <= unsynced.last) {
		errno = EIO;
		return -1;
	}
	return __real_fsync(fd);
}

/* first 0: counts only. */
static void fail_fsync(const char *dir, unsigned first, unsigned last)
{
	struct stat st;

	unsynced.dir = 0;
	T_OK(fs_stat(t.dir.fd, dir, &st));
	unsynced.first = first ? first : UINT_MAX;
	unsynced.last = last;
	unsynced.passes = 0;
	unsynced.dir = st.st_ino;
}

static void pass_fsync(void)
{
	unsynced.dir = 0;
}

static struct store_job job_named(const char *id)
{
	return (struct store_job){ .stores = &t.w.stores, .id = id, .attempt = 1, .uid = geteuid() };
}

static struct ref in_main(const char *name)
{
	return ref_checkpoint("main", name);
}

static struct spec writing(const char *name, bool overwrite, enum in_place in_place)
{
	return (struct spec){ .target = in_main(name), .overwrite = overwrite, .in_place = in_place, .sync_files = true };
}

static enum err open_staging(const char *job, const char *name, bool overwrite, struct staging *s)
{
	struct store_job j = job_named(job);
	struct spec spec = writing(name, overwrite, IN_PLACE_NEVER);

	return staging_open(&j, &spec, s);
}

static void put_manifest(struct staging *s, const char *job)
{
	char text[128];
	int n = snprintf(text, sizeof text, "{\"dcpd\":1,\"job\":\"%s\"}", job);

	T_OK(staging_put_file(s, MANIFEST_NAME, text, (uint64_t)n));
}

/* A whole save of `job`: one data file, .metadata with the job's name in it, the manifest. */
static enum err save(const char *job, const char *name, bool overwrite)
{
	struct staging s;

	enum err e = open_staging(job, name, overwrite, &s);
	if (!e) {
		T_OK(staging_put_file(&s, "__0_0.distcp", "data", 4));
		T_OK(staging_put_file(&s, ".metadata", job, strlen(job)));
		put_manifest(&s, job);
		e = staging_commit(&s, overwrite);
	}
	staging_close(&s);
	return e;
}

static void assert_content(const char *path, const char *want)
{
	void *bytes = NULL;
	uint64_t n = 0;

	T_OK(fs_read_all(t.dir.fd, path, 4096, &bytes, &n));
	assert_int_equal(n, strlen(want));
	assert_memory_equal(bytes, want, n);
	mem_free(bytes);
}

/* Trash is removed behind the job's back. */
static void wait_for_entries(const char *path, int n)
{
	for (int i = 0; i < T_HUNG_MS / 10 && t_worker_entries(&t, path) != n; i++)
		nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
	assert_int_equal(t_worker_entries(&t, path), n);
}

static void test_appears_at_once(void **state)
{
	struct staging s;

	(void)state;
	int fds = t_count_fds();
	T_OK(open_staging("A", "run/step-1", false, &s));
	T_OK(staging_put_file(&s, ".metadata", "m", 1));
	assert_true(t_worker_has(&t, "run/.dcpd-A-1"));
	assert_false(t_worker_has(&t, "run/step-1"));
	T_OK(staging_commit(&s, false));
	staging_close(&s);
	assert_content("run/step-1/.metadata", "m");
	assert_int_equal(t_worker_entries(&t, "run"), 1);
	assert_int_equal(t_count_fds(), fds);
}

static void test_given_up(void **state)
{
	struct staging s;

	(void)state;
	int fds = t_count_fds();
	T_OK(open_staging("A", "run/step-1", false, &s));
	T_OK(staging_put_file(&s, "__0_0.distcp", "data", 4));
	T_ERR(CHECKPOINT_EXISTS, staging_put_file(&s, "__0_0.distcp", "data", 4));
	assert_string_equal(err_last()->file, "__0_0.distcp");
	staging_close(&s);
	assert_int_equal(err_last()->code, ERR_CHECKPOINT_EXISTS); /* closing does not hide why */
	assert_int_equal(t_worker_entries(&t, "run"), 0);
	assert_int_equal(t_count_fds(), fds);
}

static void test_exists(void **state)
{
	(void)state;
	T_OK(save("A", "x", false));
	T_ERR(CHECKPOINT_EXISTS, save("B", "x", false));
	assert_content("x/.metadata", "A");
	assert_int_equal(t_worker_entries(&t, "."), 1);
}

/* Two jobs, both of which saw no checkpoint when they began. */
static void test_second_comes_too_late(void **state)
{
	struct staging s;

	(void)state;
	T_OK(open_staging("B", "x", false, &s));
	T_OK(staging_put_file(&s, ".metadata", "B", 1));
	T_OK(save("A", "x", false));
	T_ERR(CHECKPOINT_EXISTS, staging_commit(&s, false));
	staging_close(&s);
	assert_content("x/.metadata", "A");
	assert_int_equal(t_worker_entries(&t, "."), 1);
}

static void test_overwrite(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	T_OK(save("B", "run/x", true));
	assert_content("run/x/.metadata", "B");
	wait_for_entries("run", 1);
	T_OK(save("C", "run/new", true)); /* nothing to replace */
	wait_for_entries("run", 2);
}

static void test_never_replaced(void **state)
{
	static const char *const others[] = { "x/notes.txt", "x/sub/.metadata", "x/.hidden" };

	(void)state;
	T_OK(save("A", "x", false));
	for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
		t_worker_put(&t, others[i], "precious", 8);
		T_ERR(NOT_A_CHECKPOINT, save("B", "x", true));
		assert_non_null(strstr(err_last()->text, "lies there too"));
		assert_content(others[i], "precious");
		assert_content("x/.metadata", "A");
		T_OK(fs_remove_tree(t.dir.fd, others[i]));
	}
	assert_int_equal(mkdirat(t.dir.fd, "empty", 0755), 0);
	T_ERR(NOT_A_CHECKPOINT, save("B", "empty", true));
	t_worker_put(&t, "file.pt", "x", 1);
	T_ERR(NAME_INVALID, save("B", "file.pt", true));
}

/* The checkpoint that stood there when the job began is looked at again before the commit replaces it. */
static void test_changed_meanwhile(void **state)
{
	struct staging s;

	(void)state;
	T_OK(save("A", "x", false));
	T_OK(open_staging("B", "x", true, &s));
	T_OK(staging_put_file(&s, ".metadata", "B", 1));
	t_worker_put(&t, "x/notes.txt", "precious", 8);
	T_ERR(NOT_A_CHECKPOINT, staging_commit(&s, true));
	staging_close(&s);
	assert_content("x/notes.txt", "precious");
	assert_int_equal(t_worker_entries(&t, "."), 1);
}

static void test_names(void **state)
{
	static const char *const bad[] = { "..", "../x", "a/..", "a/../../x", "/tmp/x", "a/", "", "a//" };
	struct staging s;

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		enum err e = open_staging("A", bad[i], true, &s);
		staging_close(&s);
		if (e != ERR_NAME_INVALID)
			T_FAIL("'%s' gave %s", bad[i], err_code_name(e));
	}
	assert_int_equal(symlinkat("/tmp", t.dir.fd, "link"), 0);
	T_ERR(NAME_INVALID, open_staging("A", "link/x", false, &s));
	staging_close(&s);
	assert_int_equal(t_worker_entries(&t, "."), 1);
}

static void test_inside_a_checkpoint(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	T_ERR(NAME_INVALID, save("B", "run/x/y", false));
	T_ERR(NAME_INVALID, save("B", "run/x/y/z", false));
	assert_non_null(strstr(err_last()->text, "run/x"));
	assert_int_equal(t_worker_entries(&t, "run/x"), 3);
}

static enum err stage_file(const char *name)
{
	struct store_job j = job_named("F");
	struct spec spec = writing(name, false, IN_PLACE_NEVER);
	struct staging s;

	spec.kind = JOB_RESHARD;
	spec.format = TARGET_SAFETENSORS;
	enum err e = staging_open(&j, &spec, &s);
	staging_close(&s);
	return e;
}

static bool is_folder(const char *name)
{
	enum format format;

	return checkpoint_recognise(&t.w.stores.v[0], name, &format) == OK && format == FORMAT_NONE;
}

/* A folder of checkpoints stays one, whoever puts a .safetensors file into it, until an index binds such files together. */
static void test_file_hides_no_checkpoints(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	T_OK(stage_file("run/one.safetensors"));
	t_worker_put(&t, "run/other.safetensors", "x", 1);
	assert_true(is_folder("run") && !is_folder("run/other.safetensors"));
	t_worker_put(&t, "deep/other.safetensors", "x", 1);
	T_ERR(NAME_INVALID, save("B", "deep/a/b/y", false));
	t_worker_put(&t, "deep/a/b/c/.metadata", "x", 1);
	T_OK(save("B", "deep/a/b/y", false));
	t_worker_put(&t, "run/model.safetensors.index.json", "{}", 2);
	assert_false(is_folder("run"));
	T_ERR(NAME_INVALID, stage_file("new/shard-00001-model-00001-of-00001.safetensors"));
}

/* The last look: files have the size they were planned with. */
static void test_sizes(void **state)
{
	struct staging s;
	int fd = -1;

	(void)state;
	T_OK(open_staging("A", "x", false, &s));
	T_OK(staging_add_file(&s, STR("__0_0.distcp"), 5000, 0, 0));
	T_OK(staging_add_file(&s, STR("__1_0.distcp"), 0, 1, 0));
	T_OK(staging_make_files(&s));
	T_OK(fs_open(s.dir.handle, "__0_0.distcp", O_WRONLY, 0, &fd));
	T_OK(staging_put_file(&s, ".metadata", "m", 1));
	assert_int_equal(ftruncate(fd, 4999), 0); /* somebody cut it */
	T_ERR(STORAGE_IO, staging_commit(&s, false));
	assert_string_equal(err_last()->file, "__0_0.distcp");
	assert_int_equal(ftruncate(fd, 5000), 0);
	T_OK(staging_commit(&s, false));
	staging_close(&s);
	fs_drop(&fd);
}
static enum err gone(const struct store_job *by, const struct ref *ref)
{
	return commit_delete(by, ref, &(struct commit_removal){ 0 }, &(struct commit_removed){ 0 });
}

static enum err delete(const char *name, const char *job)
{
	struct ref ref = in_main(name);
	struct store_job j = job_named(job);

	return gone(&j, &ref);
}

static void test_delete(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	t_worker_put(&t, "one.safetensors", "x", 1);
	t_worker_put(&t, "plain/file", "x", 1);
	T_OK(delete("run/x", "D"));
	wait_for_entries("run", 0);
	T_ERR(NOT_FOUND, delete("run/x", "D"));
	T_ERR(NOT_FOUND, delete("no/such", "D"));
	T_ERR(NOT_A_CHECKPOINT, delete("plain", "D"));
	T_ERR(NAME_INVALID, delete("..", "D"));
	T_OK(delete("one.safetensors", "E"));
	assert_false(t_worker_has(&t, "one.safetensors"));
	wait_for_entries(".", 2);
	assert_true(t_worker_has(&t, "plain/file"));
}

static bool recover(const char *name, const char *job, const char *kind)
{
	struct manifest *m = NULL;
	bool committed;
	json_t *q = json_pack("{s:s, s:s, s:s, s:s}", "storage", "main", "name", name, "job", job, "kind", kind);

	T_OK(commit_recover(&t.w.stores, q, &committed, &m, (char[COMMIT_JOB_MAX]){ 0 }));
	json_decref(q);
	manifest_free(m);
	return committed;
}

static void test_recover_save(void **state)
{
	struct staging s;

	(void)state;
	T_OK(save("A", "run/x", false));
	assert_true(recover("run/x", "A", "save"));
	T_OK(open_staging("B", "run/x", true, &s)); /* died before its commit */
	put_manifest(&s, "B");
	store_close(&s.dir);
	store_close(&s.parent);
	t_worker_put(&t, "run/.dcpd-BB-1/other", "", 0);
	assert_false(recover("run/x", "B", "save"));
	assert_false(t_worker_has(&t, "run/.dcpd-B-1"));
	assert_true(t_worker_has(&t, "run/.dcpd-BB-1/other")); /* another job's */
	assert_content("run/x/.metadata", "A");
	assert_false(recover("no/such", "B", "save"));
	t_worker_put(&t, "run/x/" MANIFEST_NAME, "{", 1);
	assert_false(recover("run/x", "A", "save"));
	t_worker_put(&t, "run/file", "x", 1);
	assert_false(recover("run/file", "A", "save"));
	T_OK(save("C", "run/y", false)); /* moved in beside other things: its metadata come last */
	T_OK(fs_unlink(t.w.stores.v[0].top, "run/y/.metadata"));
	assert_false(recover("run/y", "C", "save"));
}

/* Each rank's save without collectives is a job, with a manifest of its own. */
static void test_recover_rank_local(void **state)
{
	(void)state;
	t_worker_put(&t, "x/.dcpd.0.json", "{\"job\":\"A\"}", 11);
	t_worker_put(&t, "x/__0.metadata", "m", 1);
	t_worker_put(&t, "x/.dcpd.11.json", "{\"job\":\"B\"}", 11);
	t_worker_put(&t, "x/.dcpd.2.json", "{", 1);
	assert_true(recover("x", "A", "save"));
	assert_false(recover("x", "B", "save")); /* its metadata had not come yet */
	t_worker_put(&t, "x/__11.metadata", "m", 1);
	assert_true(recover("x", "B", "save"));
	assert_false(recover("x", "C", "save"));
}

/* Died between the exchange and the old one's removal. */
static void test_recover_exchanged(void **state)
{
	(void)state;
	T_OK(save("B", "run/x", false));
	t_worker_put(&t, "run/.dcpd-B-1/.metadata", "old", 3);
	t_worker_put(&t, "run/.dcpd-trash-B/.metadata", "old", 3);
	assert_true(recover("run/x", "B", "save"));
	assert_content("run/x/.metadata", "B");
	assert_int_equal(t_worker_entries(&t, "run"), 1);
}

static void test_recover_delete(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	assert_false(recover("run/x", "D", "delete"));
	T_OK(fs_rename(t.dir.fd, "run/x", t.dir.fd, "run/.dcpd-trash-D"));
	assert_true(recover("run/x", "D", "delete"));
	assert_int_equal(t_worker_entries(&t, "run"), 0);
	assert_true(recover("run/x", "D", "delete")); /* the trash was gone already */
	assert_true(recover("gone/x", "D", "delete"));
}

static void test_sweep(void **state)
{
	static const char *const made[] = { ".dcpd-01A-1/f", ".dcpd-trash-01B/f", "deep/er/.dcpd-01C-2/f", ".dcpd-01K-1/f",
					    ".dcpd-01Z-1/f", "x/.dcpd-01A-1/f", ".other/f", "deep/.dcpd-01A/f" };
	json_t *keep = json_pack("[s]", "01K");
	struct store_swept swept;

	(void)state;
	T_OK(save("A", "x", false));
	for (size_t i = 0; i < sizeof made / sizeof *made; i++)
		t_worker_put(&t, made[i], "", 0);
	T_OK(posix_ops.sweep(&t.w.stores.v[0], &(struct commit_keep){ .jobs = keep, .before = "01Y" }, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 3);
	assert_false(t_worker_has(&t, ".dcpd-01A-1") || t_worker_has(&t, ".dcpd-trash-01B") || t_worker_has(&t, "deep/er/.dcpd-01C-2"));
	assert_true(t_worker_has(&t, ".dcpd-01K-1"));     /* runs */
	assert_true(t_worker_has(&t, ".dcpd-01Z-1"));     /* began after the question */
	assert_true(t_worker_has(&t, "x/.dcpd-01A-1"));   /* nobody looks into checkpoints */
	assert_true(t_worker_has(&t, ".other/f") && t_worker_has(&t, "deep/.dcpd-01A"));
	T_OK(posix_ops.sweep(&t.w.stores.v[0], NULL, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 2);
	json_decref(keep);
}

/* The old checkpoint of a save beside other files, whose job nobody knows any more. */
static void test_sweep_keeps_what_was_put_away(void **state)
{
	struct commit_keep keep = { .before = "01Y" };
	struct store_swept swept;

	(void)state;
	t_worker_put(&t, ".dcpd-01A-1/.old/.metadata", "old", 3);
	t_worker_put(&t, ".dcpd-01B-1/.old/__0_0.distcp", "x", 1); /* its metadata was put back */
	t_worker_put(&t, ".dcpd-trash-01C/.old/x.metadata", "gone", 4); /* of a checkpoint that was deleted */
	T_OK(posix_ops.sweep(&t.w.stores.v[0], &keep, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 2);
	assert_false(t_worker_has(&t, ".dcpd-trash-01C"));
	assert_true(t_worker_has(&t, ".dcpd-01A-1/.old/.metadata"));
}

/* ---- whose it is ---- */

static enum err as(uid_t uid, bool admin, enum err (*what)(const struct store_job *j, const struct ref *ref), const char *name)
{
	static unsigned last;
	char id[16];
	struct store_job j = job_named(id);
	struct ref ref = in_main(name);

	snprintf(id, sizeof id, "D%u", ++last);
	j.uid = uid;
	j.admin = admin;
	return what(&j, &ref);
}

static enum err overwrite(const struct store_job *j, const struct ref *ref)
{
	struct spec spec = writing(ref->name.p, true, IN_PLACE_NEVER);
	struct staging s;

	enum err e = staging_open(j, &spec, &s);
	if (!e)
		e = staging_commit(&s, true);
	staging_close(&s);
	return e;
}

static enum err write_in_place(const struct store_job *j, const struct ref *ref)
{
	struct spec spec = writing(ref->name.p, true, IN_PLACE_ALWAYS);
	struct staging s;

	enum err e = staging_open(j, &spec, &s);
	staging_close(&s);
	return e;
}

static void put_owned(const char *name, const char *manifest, unsigned uid)
{
	char path[128], text[256];
	int n = snprintf(text, sizeof text, "{\"dcpd\":1,\"job\":\"A\",\"uid\":%u,\"metadata\":{\"uid\":7}}", uid);

	snprintf(path, sizeof path, "%s/%s", name, manifest);
	t_worker_put(&t, path, text, (size_t)n);
}

static void test_owner(void **state)
{
	enum { OWNER = 4001, OTHER = 4002 };
	enum err (*const acts[])(const struct store_job *, const struct ref *) = { gone, overwrite, write_in_place };

	(void)state;
	t_worker_put(&t, "x/.metadata", "m", 1);
	put_owned("x", MANIFEST_NAME, OWNER);
	t_worker_put(&t, "local/__0.metadata", "m", 1);
	put_owned("local", ".dcpd.0.json", OWNER);
	put_owned("local", ".dcpd.1.json", OTHER);
	t_worker_put(&t, "torch/.metadata", "m", 1); /* PyTorch's: the directory says whose it is */
	t_worker_put(&t, "one.safetensors", "x", 1);
	for (size_t i = 0; i < sizeof acts / sizeof *acts; i++) {
		T_ERR(FORBIDDEN, as(OTHER, false, acts[i], "x"));
		T_ERR(FORBIDDEN, as(OWNER, false, acts[i], "local")); /* who has a part of it has not the rest */
		T_ERR(FORBIDDEN, as(OTHER, false, acts[i], "local"));
		T_ERR(FORBIDDEN, as(OWNER, false, acts[i], "torch"));
	}
	T_ERR(FORBIDDEN, as(OWNER, false, gone, "one.safetensors"));
	assert_int_equal(t_worker_entries(&t, "."), 4);
	T_OK(as(OWNER, false, overwrite, "x"));
	T_OK(as(OTHER, true, gone, "local"));
	T_OK(as(geteuid(), false, gone, "torch"));
	T_OK(as(geteuid(), false, gone, "one.safetensors"));
	if (geteuid() != 0)
		return;
	t_worker_put(&t, "theirs/.metadata", "m", 1);
	put_owned("theirs", MANIFEST_NAME, OTHER); /* put there by root, in a directory of OWNER's */
	assert_int_equal(fchownat(t.dir.fd, "theirs", OWNER, (gid_t)-1, 0), 0);
	T_ERR(FORBIDDEN, as(OTHER, false, gone, "theirs"));
	T_OK(as(OWNER, false, gone, "theirs"));
}

/* Exchanged by another's while the job wrote. */
static void test_owner_at_the_commit(void **state)
{
	struct store_job j = job_named("B");
	struct staging s;
	struct spec spec = writing("x", true, IN_PLACE_NEVER);

	(void)state;
	j.uid = 4001;
	T_OK(staging_open(&j, &spec, &s));
	T_OK(staging_put_file(&s, ".metadata", "B", 1));
	T_OK(save("A", "x", false));
	T_ERR(FORBIDDEN, staging_commit(&s, true));
	staging_close(&s);
	assert_content("x/.metadata", "A");
}

/* ---- a directory that could not be fsynced: what a second fsync says proves nothing ---- */

/* The staging directory takes the parent's first fsync, the commit its second, taking the commit back its third. */
static void test_unsynced_commit_is_taken_back(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	fail_fsync("run", 2, 2);
	T_ERR(STORAGE_IO, save("B", "run/new", false));
	assert_int_equal(t_worker_entries(&t, "run"), 1);
	fail_fsync("run", 2, 2);
	T_ERR(STORAGE_IO, save("C", "run/x", true));
	pass_fsync();
	assert_content("run/x/.metadata", "A");
	assert_int_equal(t_worker_entries(&t, "run"), 1);
	assert_false(recover("run/x", "C", "save"));
	T_OK(save("D", "run/new", false));
}

/* Neither the commit nor its undoing is known to be on the disk: both directories stay whole. */
static void test_unsynced_commit_in_doubt(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	fail_fsync("run", 2, 3);
	T_ERR(NOT_DURABLE, save("B", "run/x", true));
	pass_fsync();
	assert_content("run/x/.metadata", "A");
	assert_content("run/.dcpd-B-1/.metadata", "B");
	assert_false(err_retryable(ERR_NOT_DURABLE)); /* or the coordinator would ask the recovery again */
}

static void test_unsynced_recovery(void **state)
{
	struct manifest *m = NULL;
	bool committed = false;
	json_t *q = json_pack("{s:s, s:s, s:s, s:s}", "storage", "main", "name", "run/x", "job", "A", "kind", "save");

	(void)state;
	T_OK(save("A", "run/x", false));
	t_worker_put(&t, "run/.dcpd-A-1/.metadata", "old", 3);
	fail_fsync("run", 1, 1);
	T_ERR(NOT_DURABLE, commit_recover(&t.w.stores, q, &committed, &m, (char[COMMIT_JOB_MAX]){ 0 }));
	pass_fsync();
	assert_content("run/.dcpd-A-1/.metadata", "old"); /* may be the only one after a power cut */
	manifest_free(m);
	json_decref(q);
}

static void test_unsynced_delete(void **state)
{
	(void)state;
	T_OK(save("A", "run/x", false));
	fail_fsync("run", 1, 1);
	T_ERR(STORAGE_IO, delete("run/x", "D"));
	assert_content("run/x/.metadata", "A");
	assert_false(recover("run/x", "D", "delete"));
	fail_fsync("run", 1, 2);
	T_ERR(NOT_DURABLE, delete("run/x", "E"));
	pass_fsync();
	T_OK(delete("run/x", "F"));
}

/* A directory on the way whose entry may be lost is not built upon; one that is there already may have been made by a job that died
 * before its fsync. */
static void test_unsynced_directories(void **state)
{
	struct staging s;

	(void)state;
	fail_fsync(".", 1, 1);
	T_ERR(STORAGE_IO, save("A", "run/deep/x", false));
	pass_fsync();
	assert_false(t_worker_has(&t, "run"));
	assert_int_equal(mkdirat(t.dir.fd, "run", 0755), 0);
	fail_fsync(".", 0, 0);
	T_OK(open_staging("A", "run/x", false, &s));
	assert_true(unsynced.passes >= 1);
	pass_fsync();
	staging_close(&s);
}

/* ---- beside other files ---- */

static void open_in_place(struct staging *s, const char *job)
{
	struct store_job j = job_named(job);
	struct spec spec = writing("x", true, IN_PLACE_ALWAYS);

	T_OK(staging_open(&j, &spec, s));
	T_OK(staging_add_file(s, STR("__0_0.distcp"), 4, 0, 0));
	T_OK(staging_put_file(s, "__0_0.distcp", job, 4));
	T_OK(staging_put_file(s, ".metadata", job, 4));
	put_manifest(s, job);
}

/* The target's fsyncs: the old files away, the manifest in, the metadata in: the commit; then two more to put the old back. */
static void test_unsynced_in_place(void **state)
{
	struct staging s;

	(void)state;
	t_worker_put(&t, "x/config.json", "{}", 2);
	t_worker_put(&t, "x/.metadata", "old1", 4); /* PyTorch's: without a manifest */
	t_worker_put(&t, "x/__0_0.distcp", "old1", 4);
	open_in_place(&s, "JOB1");
	fail_fsync("x", 3, 3);
	T_ERR(STORAGE_IO, staging_commit_in_place(&s, ".metadata"));
	pass_fsync();
	staging_close(&s);
	assert_content("x/.metadata", "old1");
	assert_content("x/__0_0.distcp", "old1");
	assert_false(t_worker_has(&t, "x/" MANIFEST_NAME)); /* it would speak of other bytes */
	assert_false(recover("x", "JOB1", "save"));
	assert_int_equal(t_worker_entries(&t, "."), 1);
	open_in_place(&s, "JOB2");
	fail_fsync("x", 3, UINT_MAX);
	T_ERR(NOT_DURABLE, staging_commit_in_place(&s, ".metadata"));
	pass_fsync();
	staging_close(&s);
	assert_true(t_worker_has(&t, ".dcpd-JOB2-1"));
}

/* ---- held ---- */

static void set_hold(const char *name, uid_t uid, bool holds)
{
	struct store_job j = job_named("HOLD");
	json_t *hold = json_pack("{s:i, s:s, s:s}", "owner", (int)uid, "reason", "kept", "since", "now");

	j.admin = true;
	T_OK(notes_set_hold(&j, &t.w.stores.v[0], name, holds ? hold : NULL));
	json_decref(hold);
}

/* The hold comes between the first look and the commit. */
static void test_held_before_the_commit(void **state)
{
	struct staging s;

	(void)state;
	T_OK(save("A", "x", false));
	T_OK(open_staging("B", "x", true, &s));
	T_OK(staging_put_file(&s, ".metadata", "B", 1));
	set_hold("x", geteuid(), true);
	T_ERR(CHECKPOINT_HELD, staging_commit(&s, true));
	char identity[IDENTITY_MAX];
	T_OK(identity_of(store_top(s.store), "x", identity));
	T_ERR(CHECKPOINT_HELD, s.store->ops->publish(&s, identity));
	T_ERR(CHECKPOINT_HELD, s.store->ops->remove(&s.by, s.store, "x", &(struct store_removal){ 0 }));
	staging_close(&s);
	assert_content("x/.metadata", "A");
	set_hold("x", 0, false);
	open_in_place(&s, "JOB3");
	set_hold("x", geteuid(), true);
	T_ERR(CHECKPOINT_HELD, staging_commit_in_place(&s, ".metadata"));
	T_ERR(CHECKPOINT_HELD, s.store->ops->publish_in_place(&s, ".metadata"));
	staging_close(&s);
	assert_content("x/.metadata", "A");
}

/* Another daemon on the same storage may be at it. */
static void test_sweep_leaves_others_alone(void **state)
{
	static const char *const made[] = { ".dcpd-01AOURS-1/f", ".dcpd-01ATHEIRS-1/f", ".dcpd-trash-01BTHEIRS/f", ".dcpd-01COLD-1/f",
					    ".dcpd-01DBEGUN-1/f", "run/.dcpd-hosts-00000001/beat-0", "run/.dcpd-hosts-00000002/f" };
	json_t *before = json_object(), *after = json_object();
	struct commit_keep keep = { .before = "01Y", .mark = "OURS", .others = before };
	struct timespec old[2] = { { .tv_sec = time(NULL) - 90000 }, { .tv_sec = time(NULL) - 90000 } };
	struct store_swept swept;

	(void)state;
	for (size_t i = 0; i < sizeof made / sizeof *made; i++)
		t_worker_put(&t, made[i], "", 0);
	assert_int_equal(utimensat(t.dir.fd, ".dcpd-01COLD-1/f", old, 0), 0);
	assert_int_equal(utimensat(t.dir.fd, ".dcpd-01COLD-1", old, 0), 0);
	assert_int_equal(utimensat(t.dir.fd, ".dcpd-01DBEGUN-1", old, 0), 0); /* its file is new */
	T_OK(posix_ops.sweep(&t.w.stores.v[0], &keep, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 1);
	assert_false(t_worker_has(&t, ".dcpd-01AOURS-1"));
	for (size_t i = 1; i < sizeof made / sizeof *made; i++)
		assert_true(t_worker_has(&t, made[i])); /* however old it looks */
	assert_int_equal(json_object_size(before), 6);
	/* In an hour, two have gone on, one of them with a file that looks old, and somebody came. */
	t_worker_put(&t, ".dcpd-01DBEGUN-1/f", "x", 1);
	t_worker_put(&t, "run/.dcpd-hosts-00000001/beat-0", "2", 1);
	t_worker_put(&t, ".dcpd-01ATHEIRS-1/more", "", 0);
	assert_int_equal(utimensat(t.dir.fd, ".dcpd-01ATHEIRS-1/more", old, 0), 0);
	t_worker_put(&t, ".dcpd-01ENEW-1/f", "", 0);
	keep.watched = before;
	keep.others = after;
	T_OK(posix_ops.sweep(&t.w.stores.v[0], &keep, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 3);
	assert_false(t_worker_has(&t, ".dcpd-01COLD-1") || t_worker_has(&t, ".dcpd-trash-01BTHEIRS"));
	assert_false(t_worker_has(&t, "run/.dcpd-hosts-00000002"));
	assert_true(t_worker_has(&t, ".dcpd-01DBEGUN-1/f") && t_worker_has(&t, "run/.dcpd-hosts-00000001/beat-0"));
	assert_true(t_worker_has(&t, ".dcpd-01ATHEIRS-1/f") && t_worker_has(&t, ".dcpd-01ENEW-1/f"));
	assert_int_equal(json_object_size(after), 4);
	json_decref(before);
	json_decref(after);
}

static void test_sweep_follows_no_link(void **state)
{
	struct store_swept swept;

	(void)state;
	t_worker_put(&t, "outside/.dcpd-01A-1/f", "x", 1);
	assert_int_equal(mkdirat(t.dir.fd, "in", 0755), 0);
	assert_int_equal(symlinkat("../outside", t.dir.fd, "in/link"), 0);
	assert_int_equal(symlinkat("../outside", t.dir.fd, "in/.dcpd-01B-1"), 0);
	T_OK(fs_rename(t.dir.fd, "outside", t.dir.fd, ".outside")); /* the sweep itself does not go there */
	T_OK(posix_ops.sweep(&t.w.stores.v[0], NULL, NULL, NULL, &swept));
	assert_true(t_worker_has(&t, ".outside/.dcpd-01A-1/f"));
	assert_true(t_worker_has(&t, "in/link"));
}

/* A coordinator that was killed may not know that an attempt had begun, or had exchanged the two directories already. */
static void test_earlier_attempts_are_cleared(void **state)
{
	struct staging s;

	(void)state;
	T_OK(fs_mkdir(t.dir.fd, ".dcpd-JOB-7", 0755));
	T_OK(fs_mkdir(t.dir.fd, ".dcpd-trash-JOB", 0755));
	T_OK(fs_mkdir(t.dir.fd, ".dcpd-OTHER-1", 0755));
	T_OK(open_staging("JOB", "step", false, &s));
	wait_for_entries(".", 2); /* another job's, and this attempt's */
	staging_close(&s);
	wait_for_entries(".", 1);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_earlier_attempts_are_cleared), T(test_appears_at_once), T(test_given_up), T(test_exists),
		T(test_second_comes_too_late), T(test_overwrite), T(test_never_replaced), T(test_changed_meanwhile), T(test_names),
		T(test_inside_a_checkpoint), T(test_sizes), T(test_file_hides_no_checkpoints), T(test_delete), T(test_recover_save),
		T(test_recover_rank_local), T(test_recover_exchanged), T(test_recover_delete), T(test_sweep),
		T(test_sweep_leaves_others_alone), T(test_sweep_keeps_what_was_put_away), T(test_sweep_follows_no_link), T(test_owner),
		T(test_owner_at_the_commit), T(test_held_before_the_commit), T(test_unsynced_commit_is_taken_back),
		T(test_unsynced_commit_in_doubt), T(test_unsynced_recovery), T(test_unsynced_delete), T(test_unsynced_directories),
		T(test_unsynced_in_place),
	};

	return cmocka_run_group_tests_name("commit", tests, NULL, NULL);
}
