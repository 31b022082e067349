/* Figures of tensors that are kept by the digests of their bytes. */
#include "lib/t.h"

#include <string.h>

#include "runner/stats_cache.h"

static struct stats_key key_of(unsigned n)
{
	struct stats_key key = { .known = true };

	memcpy(key.xxh3_128, &n, sizeof n);
	return key;
}

static void test_gives_back_what_was_put(void **state)
{
	struct stats_cache c = { 0 };
	struct stats s = { .count = 9, .min_key = 3, .sums = { .squares = 2.5L } }, got;
	uint64_t bins[STATS_BINS] = { [0] = 1, [7] = 5, [STATS_BINS - 1] = 3 }, got_bins[STATS_BINS];
	struct stats_key one = key_of(1), two = key_of(2), unknown = { 0 };

	(void)state;
	assert_false(stats_cache_get(&c, &one, &got, got_bins));
	stats_cache_put(&c, &one, &s, bins);
	stats_cache_put(&c, &unknown, &s, bins);
	assert_true(stats_cache_get(&c, &one, &got, got_bins));
	assert_true(got.count == 9 && got.min_key == 3 && got.sums.squares == 2.5L);
	assert_memory_equal(bins, got_bins, sizeof bins);
	assert_false(stats_cache_get(&c, &two, &got, got_bins));
	assert_false(stats_cache_get(&c, &unknown, &got, got_bins));
	stats_cache_free(&c);
	assert_false(stats_cache_get(&c, &one, &got, got_bins));
}

static void test_is_bounded(void **state)
{
	struct stats_cache c = { 0 };
	struct stats s = { .count = 1 }, got;
	uint64_t bins[STATS_BINS];

	(void)state;
	for (unsigned b = 0; b < STATS_BINS; b++)
		bins[b] = b + 1;
	for (unsigned i = 0; i < 20000; i++) {
		struct stats_key key = key_of(i);
		stats_cache_put(&c, &key, &s, bins);
		assert_true(c.bytes <= STATS_CACHE_BYTES);
		assert_true(stats_cache_get(&c, &key, &got, bins)); /* the newest is always there */
	}
	stats_cache_free(&c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_gives_back_what_was_put),
		cmocka_unit_test(test_is_bounded),
	};

	return cmocka_run_group_tests_name("stats_cache", tests, NULL, NULL);
}
