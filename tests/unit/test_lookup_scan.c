/* A search looks at some of many checkpoints that are known: at each in its turn, however long the storage takes to answer. */
#include "lib/t_worker.h"

#include <time.h>

#include "query/lookup_scan.h"
#include "query/lookup_tree.h"

enum { COUNT = 200, RUN = 50, QUESTIONS = 300, SLOW_NS = 200000 };

T_WORKER_EACH(t);

static bool is_slow;

/* Checkpoints that were written just now are looked at with every question: here all are an hour old. */
static enum err slow_stat(struct store_at at, const char *path, struct stat *out)
{
	enum err e = posix_ops.stat(at, path, out);

	if (is_slow)
		nanosleep(&(struct timespec){ .tv_nsec = SLOW_NS }, NULL);
	out->st_mtim.tv_sec -= 3600;
	out->st_ctim.tv_sec -= 3600;
	return e;
}

static void make_checkpoints(void)
{
	static const char source[] = "tests/fixtures/torch-2.15.0/plain/checkpoint/.metadata";
	char path[48], bytes[1 << 16];
	int from = open(source, O_RDONLY | O_CLOEXEC);
	ssize_t n = read(from, bytes, sizeof bytes);

	close(from);
	assert_true(n > 0 && (size_t)n < sizeof bytes);
	for (int i = 0; i < COUNT; i++) {
		snprintf(path, sizeof path, "run-%d", i / RUN);
		assert_int_equal(i % RUN ? 0 : mkdirat(t.dir.fd, path, 0700), 0);
		snprintf(path, sizeof path, "run-%d/step-%d", i / RUN, i);
		assert_int_equal(mkdirat(t.dir.fd, path, 0700), 0);
		snprintf(path, sizeof path, "run-%d/step-%d/.metadata", i / RUN, i);
		int to = openat(t.dir.fd, path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
		assert_int_equal(write(to, bytes, (size_t)n), n);
		close(to);
	}
}

static void ask(struct lookup_tree *tree)
{
	CLEANUP(json_decrefp) json_t *q = json_pack("{s:s}", "storage", "main");
	CLEANUP(store_close) struct store_at top = STORE_NOTHING;
	struct lookup_look look;
	bool more = true;

	while (more) {
		T_OK(lookup_tree_begin(tree, &t.w, q, &look, &top));
		tree->questions = tree->questions ? tree->questions + 1 : UINT64_C(1) << 32; /* as lookup_find.c counts */
		T_OK(lookup_scan(&look, top, STR(""), &more));
		store_close(&top);
	}
}

static void check(const struct lookup_dir *run, uint64_t known_at)
{
	assert_int_equal(run->children.n, RUN);
	each(c, run->children.v, run->children.n) {
		if (c->entry->asked <= known_at || c->entry->looked <= known_at)
			fail_msg("%s was looked at last by question %ju, at its files by %ju: those before were asked by %ju",
				 c->entry->facts.name.p, (uintmax_t)c->entry->asked, (uintmax_t)c->entry->looked, (uintmax_t)known_at);
	}
}

static void test_each_has_its_turn(void **state)
{
	struct store_ops ops = posix_ops;
	struct lookup_tree tree = { 0 };

	(void)state;
	ops.stat = slow_stat;
	t.w.stores.v[0].ops = &ops;
	make_checkpoints();
	is_slow = false;
	ask(&tree);
	assert_int_equal(tree.entries, COUNT);
	uint64_t known_at = tree.questions;
	is_slow = true;
	for (int i = 0; i < QUESTIONS; i++)
		ask(&tree);
	each(run, tree.top->children.v, tree.top->children.n)
		check(run->dir, known_at);
	lookup_tree_free(&tree);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_each_has_its_turn, setup, teardown),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
