/* Tests of storage_speed: minutes are told once each and forgotten in time; growth is told when it says something. */
#include "lib/t.h"

#include <string.h>

#include "base/clock.h"
#include "server/storage_speed.h"

enum { MINUTE = 60000 };
static const int64_t now0 = 1000 * MINUTE + 5, wall0 = 1763890000000;

static void assert_told(const struct storage_speed *s, int64_t now, const char *expected)
{
	struct buf b = BUF_INIT(1 << 20);

	T_OK(storage_speed_put(s, now, wall0 + now - now0, &b));
	buf_putc(&b, '\0');
	T_OK(buf_status(&b));
	assert_string_equal((char *)b.p, expected);
	buf_free(&b);
}

static void test_minutes(void **state)
{
	struct storage_speed *s = NULL;

	(void)state;
	assert_told(s, now0, "[]");
	storage_speed_space(&s, now0, 7);
	assert_told(s, now0, "[]");
	storage_speed_count(&s, now0, true, 100, 500000000);
	storage_speed_count(&s, now0 + 10, true, 50, 500000000);
	storage_speed_count(&s, now0 + MINUTE, false, 7, 2000);
	assert_told(s, now0 + MINUTE,
		    "[{\"at\":\"2025-11-23T09:26:39.995Z\",\"write\":{\"bytes\":150,\"seconds\":1.000000}},"
		    "{\"at\":\"2025-11-23T09:27:39.995Z\",\"read\":{\"bytes\":7,\"seconds\":0.000002}}]");
	int64_t later = now0 + (int64_t)STORAGE_SPEED_MINUTES * MINUTE;
	assert_told(s, later, "[{\"at\":\"2025-11-23T09:27:39.995Z\",\"read\":{\"bytes\":7,\"seconds\":0.000002}}]");
	assert_told(s, later + MINUTE, "[]");
	storage_speed_count(&s, later, false, 1, 0); /* in the cell of the first one */
	assert_told(s, later + MINUTE, "[{\"at\":\"2025-11-23T15:26:39.995Z\",\"read\":{\"bytes\":1,\"seconds\":0.000000}}]");
	storage_speed_drop(s);
}

static void test_growth(void **state)
{
	struct storage_speed *s = NULL;
	int64_t bytes = 0, ms = 0;

	(void)state;
	assert_false(storage_speed_growth(s, now0, &bytes, &ms));
	storage_speed_space(&s, now0, 1000);
	storage_speed_space(&s, now0 + 9 * MINUTE, 100);
	assert_false(storage_speed_growth(s, now0 + 9 * MINUTE, &bytes, &ms));
	storage_speed_space(&s, now0 + 20 * MINUTE, 400);
	assert_true(storage_speed_growth(s, now0 + 21 * MINUTE, &bytes, &ms));
	assert_true(bytes == 600 && ms == 20 * MINUTE);
	storage_speed_space(&s, now0 + 30 * MINUTE, 1500);
	assert_true(storage_speed_growth(s, now0 + 30 * MINUTE, &bytes, &ms));
	assert_true(bytes == -500 && ms == 30 * MINUTE);
	assert_false(storage_speed_growth(s, now0 + 400 * MINUTE, &bytes, &ms));
	storage_speed_drop(s);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_minutes), cmocka_unit_test(test_growth) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
