/* Figures of tensors that are kept by the digests of their bytes. */
#include "lib/t.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

static int new_file(void)
{
	char path[] = "/tmp/dcpd-test-stats-XXXXXX";
	int fd = mkostemp(path, O_APPEND | O_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(unlink(path), 0);
	return fd;
}

static uint64_t bytes_of(int fd)
{
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	return (uint64_t)st.st_size;
}

/* As another gang, or the next daemon: what of the entries 0 … n is known. */
static unsigned known(int fd, unsigned n, uint64_t mask[])
{
	struct stats_cache c = { 0 };
	uint64_t bins[STATS_BINS];
	struct stats got;
	unsigned count = 0;

	stats_cache_keep_in(&c, dup(fd));
	stats_cache_read(&c);
	for (unsigned i = 0; i < n; i++) {
		struct stats_key key = key_of(i);
		bool there = stats_cache_get(&c, &key, &got, bins);
		if (there)
			assert_true(got.count == i && bins[i % STATS_BINS] == i + 1);
		if (mask)
			mask[i] = there;
		count += there;
	}
	stats_cache_free(&c);
	return count;
}

static void put(struct stats_cache *c, unsigned i)
{
	struct stats_key key = key_of(i);
	struct stats s = { .count = i };
	uint64_t bins[STATS_BINS] = { 0 };

	bins[i % STATS_BINS] = i + 1;
	stats_cache_put(c, &key, &s, bins);
}

static void test_the_file_outlives_the_cache(void **state)
{
	struct stats_cache a = { 0 }, b = { 0 };
	struct stats got;
	uint64_t bins[STATS_BINS];
	int fd = new_file();

	(void)state;
	stats_cache_keep_in(&a, dup(fd));
	stats_cache_keep_in(&b, dup(fd));
	put(&a, 0);
	put(&b, 1);
	put(&a, 2);
	put(&a, 2);
	stats_cache_read(&b); /* and its own, which it has */
	for (unsigned i = 0; i < 3; i++) {
		struct stats_key key = key_of(i);
		assert_true(stats_cache_get(&b, &key, &got, bins));
	}
	stats_cache_free(&a);
	stats_cache_free(&b);
	assert_int_equal(known(fd, 4, NULL), 3);
	close(fd);
}

/* Each byte of the second of three entries, and each length of the file. */
static void test_damage_is_forgotten(void **state)
{
	struct stats_cache c = { 0 };
	unsigned char *all, bad;
	uint64_t bytes, one, mask[3];
	int fd = new_file();

	(void)state;
	stats_cache_keep_in(&c, dup(fd));
	for (unsigned i = 0; i < 3; i++)
		put(&c, i);
	stats_cache_free(&c);
	bytes = bytes_of(fd);
	one = bytes / 3;
	all = mem_alloc(bytes);
	assert_int_equal(pread(fd, all, bytes, 0), bytes);
	for (uint64_t at = one; at < 2 * one; at++) {
		bad = all[at] ^ 0x40;
		int copy = new_file();
		assert_int_equal(write(copy, all, at), at);
		assert_int_equal(write(copy, &bad, 1), 1);
		assert_int_equal(write(copy, all + at + 1, bytes - at - 1), bytes - at - 1);
		assert_int_equal(known(copy, 3, mask), 1);
		assert_true(mask[0] && bytes_of(copy) == one); /* what is behind is counted again, and appended */
		close(copy);
	}
	for (uint64_t at = 0; at <= bytes; at++) {
		int copy = new_file();
		assert_int_equal(write(copy, all, at), at);
		assert_int_equal(known(copy, 3, NULL), at / one);
		close(copy);
	}
	mem_free(all);
	close(fd);
}

static void test_the_file_is_bounded(void **state)
{
	struct stats_cache c = { 0 };
	int fd = new_file();

	(void)state;
	assert_int_equal(ftruncate(fd, STATS_CACHE_BYTES - 100), 0);
	stats_cache_keep_in(&c, dup(fd));
	put(&c, 5); /* unread: there is no room, so it begins anew */
	assert_true(bytes_of(fd) < 4096);
	assert_int_equal(known(fd, 6, NULL), 1);
	stats_cache_free(&c);
	close(fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_gives_back_what_was_put),
		cmocka_unit_test(test_is_bounded),
		cmocka_unit_test(test_the_file_outlives_the_cache),
		cmocka_unit_test(test_damage_is_forgotten),
		cmocka_unit_test(test_the_file_is_bounded),
	};

	return cmocka_run_group_tests_name("stats_cache", tests, NULL, NULL);
}
