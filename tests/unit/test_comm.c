/* test_comm.c: what comm.c refuses before any back end is asked. What back ends do: test_comm_shm.c and its like. */
#include "lib/t.h"

#include "comm/comm.h"

static void bad_specs(void **state)
{
	struct comm *c;
	struct comm_spec spec = { .rank = 0, .size = 0 };

	(void)state;
	T_ERR(INVALID_REQUEST, comm_open(&spec, &c));
	spec.size = COMM_RANKS_MAX + 1;
	T_ERR(INVALID_REQUEST, comm_open(&spec, &c));
	spec.size = 2;
	spec.rank = 2;
	T_ERR(INVALID_REQUEST, comm_open(&spec, &c));
	spec.rank = 1;
	spec.inside = COMM_BACKENDS;
	T_ERR(INVALID_REQUEST, comm_open(&spec, &c));
	spec.inside = COMM_SHM;
	T_ERR(BACKEND_UNAVAILABLE, comm_open(&spec, &c)); /* without an arena */
	comm_close(NULL);
}

static void names(void **state)
{
	(void)state;
	assert_string_equal(comm_backend_name(COMM_SHM), "shm");
	assert_string_equal(comm_backend_name(COMM_TCP), "tcp");
	assert_string_equal(comm_backend_name(COMM_NCCL), "nccl");
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(bad_specs), cmocka_unit_test(names) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
