/* test_base.c: errors, strings, buffers, arenas and maps. */
#include "lib/t.h"

#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/near.h"
#include "base/num.h"
#include "base/reader.h"

static FALLIBLE enum err fails(void)
{
	errno = ENOSPC;
	return ERR_SYS(STORAGE_FULL, "cannot write %d bytes", 7);
}

static void test_error_record(void **state)
{
	(void)state;
	enum err e = err_at_file(err_at_fqn(fails(), "model.w", 7), "__0_0.distcp", 4096);
	e = err_at_file(e, "another", 1);
	assert_int_equal(e, ERR_STORAGE_FULL);
	assert_string_equal(err_last()->text, "cannot write 7 bytes: No space left on device");
	assert_string_equal(err_last()->fqn, "model.w");
	assert_string_equal(err_last()->file, "__0_0.distcp");
	assert_int_equal(err_last()->offset, 4096);
	assert_string_equal(err_code_name(e), "storage_full");
	assert_int_equal(err_http_status(e), 507);
	assert_int_equal(err_from_name("storage_full"), ERR_STORAGE_FULL);
	assert_int_equal(err_from_name("no such code"), ERR_INTERNAL);
	e = err_expected(fails(), NULL, "what is there");
	assert_string_equal(err_last()->expected, "");
	assert_string_equal(err_last()->actual, "what is there");
}

static void test_half_an_expectation(void **state)
{
	(void)state;
	assert_int_equal(err_expected(fails(), NULL, "signal 9"), ERR_STORAGE_FULL);
	assert_string_equal(err_last()->expected, "");
	assert_string_equal(err_last()->actual, "signal 9");
}

static void test_checked_arithmetic(void **state)
{
	uint64_t v = 1;

	(void)state;
	T_ERR(LIMIT_EXCEEDED, num_add(UINT64_MAX, 1, &v));
	T_ERR(LIMIT_EXCEEDED, num_mul(1ull << 33, 1ull << 31, &v));
	T_ERR(LIMIT_EXCEEDED, num_align(UINT64_MAX - 5, 4096, &v));
	assert_int_equal(v, 1);
	T_OK(num_align(4097, 4096, &v));
	assert_int_equal(v, 8192);
	assert_true(num_inside(4, 4, 8));
	assert_false(num_inside(UINT64_MAX, 2, 8));
}

static void test_glob(void **state)
{
	(void)state;
	assert_true(str_glob(STR("model.*"), STR("model.layers.0")));
	assert_true(str_glob(STR("*"), STR("")));
	assert_true(str_glob(STR("a*b*c"), STR("a__b_bc")));
	assert_false(str_glob(STR("a*b*c"), STR("a__b_b")));
	assert_false(str_glob(STR("model.*"), STR("optim.model.x")));
	assert_true(str_glob(STR("*.exp_avg*"), STR("optim.state.w.exp_avg_sq")));
}

static void test_natural_order(void **state)
{
	static const char *const sorted[] = { "", "a", "best", "run1/step-0", "run1/step-1", "run1/step-2", "run1/step-09", "run1/step-9",
					      "run1/step-10", "run1/step-10-tp2", "run1/step-99999999999999999999999", "run2", "run10",
					      "step", "step-" };

	(void)state;
	for (size_t i = 0; i < sizeof sorted / sizeof *sorted; i++)
		for (size_t k = 0; k < sizeof sorted / sizeof *sorted; k++) {
			int c = str_cmp_natural(str_of(sorted[i]), str_of(sorted[k]));
			if ((i < k && c >= 0) || (i == k && c != 0) || (i > k && c <= 0))
				T_FAIL("%s, %s: %d", sorted[i], sorted[k], c);
		}
}

static void test_near(void **state)
{
	static const char *const levels[] = { "structure", "digest", "values", NULL };
	static const struct {
		const char *given, *meant;
	} cases[] = { { "digset", "digest" }, { "digest", "digest" }, { "dgest", "digest" },   { "valuse", "values" }, { "struct", "structure" },
		      { "deep", NULL },	      { "", NULL },	      { "structuress", "structure" }, { "x", NULL }, { "vlaeus", "values" } };
	char hint[NEAR_HINT_MAX], wanted[NEAR_HINT_MAX], far[1000];

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		snprintf(wanted, sizeof wanted, cases[i].meant ? " (did you mean \"%s\"?)" : "%s", cases[i].meant ? cases[i].meant : "");
		assert_string_equal(near_hint(str_of(cases[i].given), levels, hint), wanted);
	}
	memset(far, 'd', sizeof far);
	assert_string_equal(near_hint((struct str){ far, sizeof far }, levels, hint), "");
}

static void test_utf8(void **state)
{
	(void)state;
	assert_true(str_utf8(STR("h\xC3\xA9llo \xF0\x9F\x92\xBE")));
	assert_false(str_utf8(STR("\xC0\x80")));
	assert_false(str_utf8(STR("\xED\xA0\x80")));
	assert_false(str_utf8(STR("\xE2\x82")));
}

static void test_base64(void **state)
{
	static const char *const pairs[][2] = { { "", "" }, { "f", "Zg==" }, { "fo", "Zm8=" }, { "foo", "Zm9v" }, { "foobar", "Zm9vYmFy" } };

	(void)state;
	for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
		struct buf b = BUF_INIT(100), back = BUF_INIT(100);
		buf_base64(&b, pairs[i][0], strlen(pairs[i][0]));
		assert_int_equal(b.len, strlen(pairs[i][1]));
		assert_memory_equal(b.p ? (char *)b.p : "", pairs[i][1], b.len);
		T_OK(buf_unbase64(&back, (struct str){ pairs[i][1], strlen(pairs[i][1]) }));
		assert_int_equal(back.len, strlen(pairs[i][0]));
		assert_memory_equal(back.p ? (char *)back.p : "", pairs[i][0], back.len);
		buf_free(&b);
		buf_free(&back);
	}
	struct buf b = BUF_INIT(100);
	T_ERR(VALIDATION_FAILED, buf_unbase64(&b, STR("Zg=")));
	T_ERR(VALIDATION_FAILED, buf_unbase64(&b, STR("====")));
	T_ERR(VALIDATION_FAILED, buf_unbase64(&b, STR("Zg==Zm9v")));
	T_ERR(VALIDATION_FAILED, buf_unbase64(&b, STR("Zm9\n")));
	T_ERR(VALIDATION_FAILED, buf_unbase64(&b, STR("Zh==")));
	T_ERR(VALIDATION_FAILED, buf_unbase64(&b, STR("Z===")));
	buf_free(&b);
}

/* Longer than a piece of the encoder; and hexadecimal, which is exact. */
static void test_bytes_as_text(void **state)
{
	struct buf text = BUF_INIT(40000), back = BUF_INIT(10000);
	unsigned char bytes[10000], got[4];

	(void)state;
	for (size_t i = 0; i < sizeof bytes; i++)
		bytes[i] = (unsigned char)(i * 7 + i / 256);
	for (size_t n = sizeof bytes - 3; n <= sizeof bytes; n++) {
		text.len = back.len = 0;
		buf_base64(&text, bytes, n);
		T_OK(buf_unbase64(&back, (struct str){ (char *)text.p, text.len }));
		assert_int_equal(back.len, n);
		assert_memory_equal(back.p, bytes, n);
	}
	T_OK(buf_unhex(STR("00ff10a9"), got, 4));
	assert_memory_equal(got, "\0\xff\x10\xa9", 4);
	T_ERR(VALIDATION_FAILED, buf_unhex(STR("00ff10a"), got, 4));
	T_ERR(VALIDATION_FAILED, buf_unhex(STR("00ff10a900"), got, 4));
	T_ERR(VALIDATION_FAILED, buf_unhex(STR("00ff10ag"), got, 4));
	T_ERR(VALIDATION_FAILED, buf_unhex(STR("00FF10a9"), got, 4));
	buf_free(&text);
	buf_free(&back);
}

static void test_json_string(void **state)
{
	struct buf b = BUF_INIT(200);

	(void)state;
	buf_json_str(&b, (struct str){ "a\"\\\n\0\xFF\xC3\xA9", 8 });
	buf_putc(&b, 0);
	assert_string_equal((char *)b.p, "\"a\\\"\\\\\\u000a\\u0000\xEF\xBF\xBD\xC3\xA9\"");
	buf_free(&b);
}

static void test_buf_limit(void **state)
{
	struct buf b = BUF_INIT(10);

	(void)state;
	buf_puts(&b, "0123456789");
	T_OK(buf_status(&b));
	buf_putc(&b, 'x');
	assert_int_equal(buf_status(&b), ERR_LIMIT_EXCEEDED);
	assert_int_equal(b.len, 10);
	buf_free(&b);
}

static void test_arena(void **state)
{
	CLEANUP(arena_free_ptr) struct arena *a = arena_new(1 << 20);
	char *p = NULL;
	struct str s;

	(void)state;
	T_OK(arena_alloc(a, 100, 3, &p));
	assert_int_equal(p[299], 0);
	T_OK(arena_printf(a, &s, "%0600d", 7));
	assert_int_equal(s.n, 600);
	T_ERR(LIMIT_EXCEEDED, arena_alloc(a, 1, 2 << 20, &p));
	T_ERR(LIMIT_EXCEEDED, arena_alloc(a, UINT64_MAX / 2, 4, &p));
	for (int i = 0; i < 1000; i++)
		T_OK(arena_str(a, STR("hello"), &s));
	mem_fail_at(1);
	T_ERR(NO_MEMORY, arena_alloc(a, 1, 500000, &p));
}

static void test_huge_buffers(void **state)
{
	const size_t bytes = MEM_HUGE_PAGE + 4096;

	(void)state;
	unsigned char *space = mem_space(bytes);
	assert_non_null(space);
	assert_int_equal((uintptr_t)space % MEM_HUGE_PAGE, 0);
	assert_int_equal(munmap(space, bytes), 0);
	unsigned char *p = mem_huge(bytes);
	assert_non_null(p);
	assert_true(mem_is_zero(p, bytes));
	memset(p, 7, bytes);
	mem_huge_free(p, bytes);
	mem_huge_free(NULL, bytes);
	mem_fail_at(1);
	assert_null(mem_huge(bytes));
}

static void test_map(void **state)
{
	struct map m = { 0 };
	char keys[2000][8];
	uint32_t found;

	(void)state;
	assert_int_equal(map_get(&m, STR("x")), MAP_NONE);
	for (uint32_t i = 0; i < 2000; i++) {
		snprintf(keys[i], sizeof keys[i], "k%u", i);
		T_OK(map_put(&m, str_of(keys[i]), i));
	}
	for (uint32_t i = 0; i < 2000; i++)
		assert_int_equal(map_get(&m, str_of(keys[i])), i);
	T_OK(map_intern(&m, STR("k5"), 99, &found));
	assert_int_equal(found, 5);
	T_OK(map_put(&m, STR("k5"), 99));
	assert_int_equal(map_get(&m, STR("k5")), 99);
	assert_int_equal(m.raw.count, 2000);
	map_free(&m);
}

/* A map whose keys come and go takes no more room than its largest population, and loses no key that stays. */
static void test_map_churn(void **state)
{
	static char keys[20000][8];
	struct map m = { 0 };
	uint32_t seen = 0;
	char *key;

	(void)state;
	for (int i = 0; i < 20000; i++) {
		snprintf(keys[i], sizeof keys[i], "k%d", i);
		T_OK(map_add(&m, str_of(keys[i]), keys[i]));
		if (i >= 100 && (i - 100) % 10)
			map_remove(&m, str_of(keys[i - 100]));
	}
	assert_true(m.raw.mask < 8192);
	for (int i = 0; i < 20000; i++)
		assert_ptr_equal(map_object(&m, str_of(keys[i])), i >= 19900 || i % 10 == 0 ? keys[i] : NULL);
	map_each(&m, key) {
		map_remove(&m, str_of(key));
		seen++;
	}
	assert_int_equal(seen, 1990 + 100);
	assert_null(map_object(&m, STR("k0")));
	map_free(&m);
}

/* Nothing beyond the end is read, and the first field that is cut off is the one that the offset names. */
static void test_reader(void **state)
{
	static const unsigned char bytes[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 0xFF, 0xFE, 'a', 'b' };
	struct reader r = reader_of(bytes, sizeof bytes);
	char copy[4] = "xyz";

	(void)state;
	assert_int_equal(reader_u8(&r), 1);
	assert_int_equal(reader_u64(&r), 0x0908070605040302);
	assert_int_equal(reader_u16(&r), 0xFEFF);
	assert_int_equal(reader_left(&r), 2);
	assert_int_equal(reader_u32(&r), 0);
	assert_true(r.failed);
	assert_int_equal(r.at, 11);
	assert_int_equal(reader_u8(&r), 0); /* although a byte is left */
	assert_null(reader_take(&r, 0));
	reader_copy(&r, copy, 4);
	assert_int_equal(copy[0], 0);
	assert_int_equal(r.at, 11);
	r = reader_of(bytes + 11, 2);
	assert_true(str_is(reader_str(&r, 2), "ab"));
	assert_false(r.failed);
	assert_int_equal(reader_str(&r, UINT64_MAX).n, 0);
	assert_true(r.failed);
}

/* An allocation that cannot fail takes from the reserve; the others do not, and what is taken comes back. */
static void test_reserve(void **state)
{
	enum { MANY = MEM_RESERVE_BLOCKS / 4 };
	static void *taken[MANY];
	uint64_t failures = mem_failures();

	(void)state;
	T_OK(mem_reserve());
	T_OK(mem_reserve());
	for (int turn = 0; turn < 3; turn++) {
		for (int i = 0; i < MANY; i++) {
			assert_false(mem_is_short());
			mem_fail_at(1);
			taken[i] = mem_sure(MEM_SURE_MAX);
			assert_int_equal(((char *)taken[i])[MEM_SURE_MAX - 1], 0);
			memset(taken[i], 0xff, MEM_SURE_MAX);
		}
		assert_true(mem_is_short());
		for (int i = 0; i < MANY; i++)
			mem_free_ptr(&taken[i]);
		assert_false(mem_is_short());
	}
	assert_int_equal(mem_failures() - failures, 3 * MANY);
	mem_fail_at(1);
	assert_null(mem_alloc(10));
	void *plain = mem_sure(10);
	assert_int_equal(mem_failures() - failures, 3 * MANY + 1);
	mem_free(plain);
}

/* A caller who knows the hash function could choose keys that all fall into one place of a table. */
static void test_hash_is_seeded(void **state)
{
	(void)state;
	assert_true(str_hash(STR("layers.0.weight")) == str_hash(STR("layers.0.weight")));
	assert_true(str_hash(STR("layers.0.weight")) != str_hash(STR("layers.1.weight")));
	assert_true(str_hash(STR("layers.0.weight")) != XXH3_64bits("layers.0.weight", strlen("layers.0.weight")));
}

static void test_deadlines(void **state)
{
	static const int64_t waits[] = { 0, 1, 999, 1000, 2999, 86400000 };

	(void)state;
	for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
		int64_t before = clock_mono_ns();
		struct timespec t = clock_mono_in(waits[i]);
		int64_t after = clock_mono_ns(), at = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec - waits[i] * 1000000;

		assert_in_range(t.tv_nsec, 0, 999999999);
		assert_true(before <= at && at <= after);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_deadlines), cmocka_unit_test(test_hash_is_seeded),
		cmocka_unit_test(test_error_record), cmocka_unit_test(test_half_an_expectation),
		cmocka_unit_test(test_checked_arithmetic),
		cmocka_unit_test(test_glob),	     cmocka_unit_test(test_natural_order), cmocka_unit_test(test_near), cmocka_unit_test(test_utf8),
		cmocka_unit_test(test_base64),	     cmocka_unit_test(test_bytes_as_text),	     cmocka_unit_test(test_json_string),
		cmocka_unit_test(test_buf_limit),    cmocka_unit_test(test_arena),        cmocka_unit_test(test_huge_buffers),
		cmocka_unit_test(test_map), cmocka_unit_test(test_map_churn), cmocka_unit_test(test_reader),	     cmocka_unit_test(test_reserve),
	};

	return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
