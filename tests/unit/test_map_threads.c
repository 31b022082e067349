/* test_map_threads.c: threads that are the first in their process to hash agree on the hash: a map that one of them fills, another one
 * reads. A process of its own each time, for the seed is chosen once. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/map.h"
#include "lib/t.h"

enum { PROCESSES = 100, THREADS = 4 };

static atomic_uint ready;
static uint32_t hashes[THREADS];

static void *hash_together(void *arg)
{
	uint32_t *out = arg;

	atomic_fetch_add(&ready, 1);
	while (atomic_load(&ready) < THREADS)
		;
	*out = table_hash(STR("model.w"));
	return NULL;
}

static int agree(void)
{
	pthread_t ids[THREADS];
	int bad = 0;

	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&ids[i], NULL, hash_together, &hashes[i]) != 0)
			return 2;
	for (int i = 0; i < THREADS; i++) {
		pthread_join(ids[i], NULL);
		bad = bad || hashes[i] != table_hash(STR("model.w"));
	}
	return bad;
}

static void test_first_hashes_agree(void **state)
{
	int differ = 0;

	(void)state;
	for (int i = 0; i < PROCESSES; i++) {
		int status = 0;
		pid_t pid = fork();
		assert_true(pid >= 0);
		if (pid == 0)
			_exit(agree());
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
		differ += WEXITSTATUS(status);
	}
	assert_int_equal(differ, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_first_hashes_agree) };

	return cmocka_run_group_tests_name("map_threads", tests, NULL, NULL);
}
