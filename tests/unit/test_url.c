/* test_url.c: paths are split before they are decoded, each part once. */
#include "lib/t.h"

#include <string.h>

#include "api/url.h"

static struct str parts[4];
static uint32_t count;

/* Splits a copy: the parts point into it. */
static enum err split(const char *text)
{
	static char copy[256];

	snprintf(copy, sizeof copy, "%s", text);
	return url_split(copy, parts, 4, &count);
}

static void test_split(void **state)
{
	(void)state;
	T_OK(split("/"));
	assert_int_equal(count, 0);
	T_OK(split("/v1/checkpoints/main/run1%2Fstep%2d1"));
	assert_int_equal(count, 4);
	assert_true(str_is(parts[3], "run1/step-1"));
	T_OK(split("/a%252Fb"));
	assert_true(str_is(parts[0], "a%2Fb"));
	T_OK(split("/%E2%82%AC"));
	assert_true(str_is(parts[0], "\xe2\x82\xac"));
	T_OK(split("/.."));
	assert_true(str_is(parts[0], ".."));
	T_ERR(NOT_FOUND, split("//v1"));
	T_ERR(NOT_FOUND, split("/v1/"));
	T_ERR(NOT_FOUND, split("/a/b/c/d/e"));
	T_ERR(INVALID_REQUEST, split("v1"));
	T_ERR(INVALID_REQUEST, split(""));
}

static void test_escapes(void **state)
{
	static const char *const bad[] = { "/%", "/%4", "/%zz", "/%4z", "/%00", "/a%", "/a%2" };

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		T_ERR(INVALID_REQUEST, split(bad[i]));
	T_OK(split("/%41"));
	assert_true(str_is(parts[0], "A"));
	T_OK(split("/%0a"));
	assert_true(str_is(parts[0], "\n"));
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_split), cmocka_unit_test(test_escapes) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
