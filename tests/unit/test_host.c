/* test_host.c: whose Host and Origin headers are ours. */
#include "lib/t.h"

#include "api/host.h"

static const char *const names[] = { "gpu7.example", "dcpd" };

static void test_hosts(void **state)
{
	static const char *const good[] = { "localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:8427", "10.1.2.3", "[::1]",
					    "[::1]:80", "gpu7.example", "GPU7.example:8427", "dcpd" };
	static const char *const bad[] = { "", ":", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.1",
					   "127.0.0.1:80:80", "127.0.0.1:8x", "::1", "[::1", "[::1]x", "localhost:evil",
					   "notdcpd", "dcpd.", "0x7f000001" };

	(void)state;
	for (size_t i = 0; i < sizeof good / sizeof *good; i++)
		if (!host_ok(str_of(good[i]), names, 2))
			T_FAIL("%s is refused", good[i]);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		if (host_ok(str_of(bad[i]), names, 2))
			T_FAIL("%s is let through", bad[i]);
	assert_false(host_ok(STR("dcpd"), NULL, 0));
}

static void test_origins(void **state)
{
	(void)state;
	assert_true(host_is_origin("http://127.0.0.1:8427", "127.0.0.1:8427"));
	assert_true(host_is_origin("https://DCPD:1", "dcpd:1"));
	assert_false(host_is_origin("http://127.0.0.1", "127.0.0.1:8427"));
	assert_false(host_is_origin("null", "127.0.0.1:8427"));
	assert_false(host_is_origin("http://evil@127.0.0.1:8427", "127.0.0.1:8427"));
	assert_false(host_is_origin("http://x", NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_hosts), cmocka_unit_test(test_origins) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
