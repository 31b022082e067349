/* Owners of a job are kept from each other on a file system (store/fence.h). Three daemons of marks AAAAAA, BBBBBB and CCCCCC, each of
 * which may be stopped between any two acts and go on a month later. Here they act in the orders that have gone wrong. */
#include "lib/t_worker.h"

#include <sys/stat.h>
#include "store/commit.h"
#include "store/copied.h"
#include "store/fence.h"
#include "store/staging.h"

T_WORKER_EACH(t);

#define JOB "01JOBAAAAAA"

static const char *const marks[] = { "AAAAAA", "BBBBBB", "CCCCCC" };

static struct store_job owner(uint32_t turn)
{
	return (struct store_job){ .stores = &t.w.stores, .id = JOB, .attempt = turn + 1, .uid = geteuid(), .mark = marks[turn],
				   .turn = turn };
}

static const struct store *main_store(void)
{
	return &t.w.stores.v[0];
}

static enum err begin(uint32_t turn, struct staging *s)
{
	struct store_job j = owner(turn);
	struct spec spec = { .target = ref_checkpoint("main", "run/x"), .sync_files = true };

	return staging_open(&j, &spec, s);
}

static void fill(struct staging *s, const char *content)
{
	T_OK(staging_put_file(s, ".metadata", content, strlen(content)));
}

static enum err raise_fence(uint32_t turn)
{
	struct store_job j = owner(turn);

	return fence_raise(&j, main_store(), "run/x", false);
}

static void rename_others(uint32_t turn)
{
	struct store_job j = owner(turn);

	T_OK(main_store()->ops->fence(&j, main_store(), "run/x"));
}

static void assert_kept_out(uint32_t turn)
{
	struct store_job j = owner(turn);

	T_ERR(JOB_MOVED, fence_check(&j, main_store(), "run/x"));
}

/* ---- the C library's, as the linker has put them in its place ---- */

static struct {
	ino_t unsynced;                /* fsync of this directory fails once */
	bool commits;                  /* the first removal of a file lets the stopped owner go on: it renames its staging */
	int committed;                 /* what came of it */
} world;

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
	struct stat st;

	if (world.unsynced && fstat(fd, &st) == 0 && st.st_ino == world.unsynced) {
		world.unsynced = 0;
		errno = EIO;
		return -1;
	}
	return __real_fsync(fd);
}

int __real_unlinkat(int dir, const char *name, int flags);
int __wrap_unlinkat(int dir, const char *name, int flags);
int __wrap_unlinkat(int dir, const char *name, int flags)
{
	int done = __real_unlinkat(dir, name, flags), saved = errno;

	if (world.commits && done == 0 && !flags) {
		world.commits = false;
		world.committed = renameat(t.dir.fd, "run/.dcpd-" JOB "-1", t.dir.fd, "run/x");
		errno = saved;
	}
	return done;
}

static int clear(void **state)
{
	memset(&world, 0, sizeof world);
	return setup(state);
}

/* ---- ---- */

static void a_late_fence_lets_no_earlier_owner_in(void **)
{
	T_OK(raise_fence(1));
	T_OK(raise_fence(2));
	T_ERR(JOB_MOVED, raise_fence(1)); /* stopped before it wrote its own */
	assert_kept_out(0);
	assert_kept_out(1);
	struct store_job c = owner(2), alone = { .id = JOB };
	T_OK(fence_check(&c, main_store(), "run/x"));
	T_OK(fence_check(&alone, main_store(), "run/x")); /* of no cluster */
}

static void who_takes_over_leaves_the_staging_of_a_later_owner(void **)
{
	struct staging a, b, c;

	T_OK(begin(0, &a));
	fill(&a, "A");
	T_OK(raise_fence(1));
	T_OK(raise_fence(2));
	rename_others(2);
	T_OK(begin(2, &c));
	fill(&c, "C");
	rename_others(1); /* it had looked at the fence before it was stopped */
	T_ERR(JOB_MOVED, begin(1, &b));
	staging_close(&b);
	T_ERR(JOB_MOVED, staging_commit(&a, false));
	T_ERR(NOT_FOUND, main_store()->ops->publish(&a, NULL)); /* it had looked at the fence, too */
	T_OK(staging_commit(&c, false));
	staging_close(&a);
	staging_close(&c);
	assert_true(t_worker_has(&t, "run/x/.metadata"));
}

static void a_fence_outlives_every_sweep(void **)
{
	json_t *others = json_object(), *watched;
	struct commit_keep keep = { .before = "01Z", .mark = "CCCCCC", .others = others };
	struct store_swept swept;
	struct staging a;

	T_OK(raise_fence(1));
	for (int hours = 0; hours < 3; hours++) {
		T_OK(main_store()->ops->sweep(main_store(), &keep, NULL, NULL, &swept));
		watched = keep.others;
		keep.others = json_object();
		json_decref((json_t *)(uintptr_t)keep.watched);
		keep.watched = watched;
	}
	json_decref((json_t *)(uintptr_t)keep.watched);
	json_decref(keep.others);
	T_ERR(JOB_MOVED, begin(0, &a)); /* its queue was long, and etcd cannot be reached from there */
	staging_close(&a);
}

static void a_former_owner_removes_its_own_fence(void **)
{
	T_OK(raise_fence(2));
	T_OK(fence_drop(main_store(), "run/x", JOB, 0));
	T_OK(fence_drop(main_store(), "run/x", JOB, 0));
	T_OK(fence_drop(main_store(), "away/x", JOB, 0));
	assert_false(t_worker_has(&t, "run/.dcpd-" JOB "-fence+0"));
	assert_kept_out(1);
}

static void the_sweep_of_a_former_owner_leaves_the_new_owners_staging(void **)
{
	struct store_swept swept;
	struct staging b;

	T_OK(raise_fence(1));
	T_OK(begin(1, &b));
	fill(&b, "B");
	t_worker_put(&t, "run/.dcpd-" JOB "-1/left", "", 0);
	T_OK(main_store()->ops->sweep(main_store(), &(struct commit_keep){ .mark = "AAAAAA" }, "run/x", JOB, &swept));
	assert_int_equal(swept.removed, 1);
	T_OK(staging_commit(&b, false));
	staging_close(&b);
	assert_true(t_worker_has(&t, "run/x/.metadata"));
}

/* A daemon is stopped before its rename for longer than another one waits. */
static void nothing_is_committed_while_a_sweep_removes_it(void **)
{
	json_t *before = json_object();
	struct commit_keep keep = { .before = "01Z", .mark = "CCCCCC", .others = before };
	struct store_swept swept;

	t_worker_put(&t, "run/.dcpd-" JOB "-1/.metadata", "A", 1);
	t_worker_put(&t, "run/.dcpd-" JOB "-1/__0_0.distcp", "A", 1);
	T_OK(main_store()->ops->sweep(main_store(), &keep, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 0);
	keep = (struct commit_keep){ .before = "01Z", .mark = "CCCCCC", .watched = before, .others = json_object() };
	world.commits = true;
	T_OK(main_store()->ops->sweep(main_store(), &keep, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 1);
	assert_false(world.commits);
	assert_int_equal(world.committed, -1);
	assert_false(t_worker_has(&t, "run/x"));
	assert_int_equal(t_worker_entries(&t, "run"), 0);
	json_decref(before);
	json_decref(keep.others);
}

/* Whoever takes the job over may have said that it has succeeded. */
static void a_commit_that_another_node_may_have_seen_is_not_taken_back(void **)
{
	struct staging a;
	struct stat st;

	T_OK(begin(0, &a));
	fill(&a, "A");
	T_OK(fs_stat(t.dir.fd, "run", &st));
	world.unsynced = st.st_ino;
	T_ERR(NOT_DURABLE, staging_commit(&a, false));
	staging_close(&a);
	assert_true(t_worker_has(&t, "run/x/.metadata"));
}

/* Another node takes over what its former owner had committed before it died, and is itself killed and begins anew. */
static void a_job_that_its_former_owner_has_committed_has_succeeded(void **)
{
	static const char manifest[] = "{\"dcpd\":1,\"job\":\"" JOB "\"}";
	json_t *q = json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:b}", "storage", "main", "name", "run/x", "job", JOB, "kind", "reshard",
			      "mark", marks[1], "turn", 1, "takes", 1);
	char other[COMMIT_JOB_MAX];
	struct staging a;

	T_OK(begin(0, &a));
	fill(&a, "A");
	T_OK(staging_put_file(&a, MANIFEST_NAME, manifest, strlen(manifest)));
	T_OK(staging_commit(&a, false));
	staging_close(&a);
	for (int i = 0; i < 2; i++) {
		struct manifest *m = NULL;
		bool committed = false;
		T_OK(commit_recover(&t.w.stores, q, &committed, &m, other));
		assert_true(committed && t_worker_has(&t, "run/x/.metadata") && t_worker_has(&t, "run/.dcpd-" JOB "-fence+0"));
		manifest_free(m);
	}
	json_decref(q);
}

/* The former owner's overwrite, or removal, was through, and nobody heard of it; then somebody saved the name anew, whose clock may be
 * behind. A copy's own page names its job, and not the manifests that it has from its source. */
static void what_another_job_saved_is_named(void **)
{
	static const char *const kinds[] = { "save", "delete" };
	char id[] = JOB, manifest[128], other[COMMIT_JOB_MAX];
	struct staging a;

	for (int later = -1; later <= 1; later += 2)
		for (int copied = 0; copied < 2; copied++) {
			id[sizeof id - 2] = (char)(JOB[sizeof id - 2] + later);
			T_OK(begin(0, &a));
			fill(&a, "A");
			int n = snprintf(manifest, sizeof manifest, "{\"dcpd\":1,\"job\":\"%s\"}", copied ? "01ZZZAAAAAA" : id);
			T_OK(staging_put_file(&a, MANIFEST_NAME, manifest, (uint64_t)n));
			n = snprintf(manifest, sizeof manifest, "{\"dcpd\":1,\"job\":\"%s\"}", id);
			if (copied)
				T_OK(staging_put_file(&a, COPIED_NAME, manifest, (uint64_t)n));
			T_OK(staging_commit(&a, false));
			staging_close(&a);
			for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
				json_t *q = json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:b}", "storage", "main", "name", "run/x", "job",
						      JOB, "kind", kinds[i], "mark", marks[1], "turn", 1, "takes", 1);
				struct manifest *m = NULL;
				bool committed = true;
				T_OK(commit_recover(&t.w.stores, q, &committed, &m, other));
				assert_string_equal(other, id);
				assert_true(!committed && t_worker_has(&t, "run/x/.metadata"));
				json_decref(q);
				manifest_free(m);
			}
			teardown(NULL);
			clear(NULL);
		}
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, clear, teardown)
	const struct CMUnitTest tests[] = {
		T(a_late_fence_lets_no_earlier_owner_in),
		T(who_takes_over_leaves_the_staging_of_a_later_owner),
		T(a_fence_outlives_every_sweep),
		T(a_former_owner_removes_its_own_fence),
		T(a_job_that_its_former_owner_has_committed_has_succeeded),
		T(what_another_job_saved_is_named),
		T(the_sweep_of_a_former_owner_leaves_the_new_owners_staging),
		T(nothing_is_committed_while_a_sweep_removes_it),
		T(a_commit_that_another_node_may_have_seen_is_not_taken_back),
	};

	return cmocka_run_group_tests_name("fence", tests, NULL, NULL);
}
