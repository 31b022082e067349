/* test_comm_shm.c: groups of real processes over shared memory: every collective, and every way to be a bad member. */
#include "lib/t_collectives.h"

static void every_collective(void **state)
{
	static const uint32_t sizes[] = { 1, 2, 3, 4, 6 };

	(void)state;
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		t_group_run(COMM_SHM, sizes[i], t_every_collective, NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(every_collective) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
