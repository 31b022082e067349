/* test_tiling.c: problems of a tensor's boxes are counted, worded and bounded. */
#include "lib/t.h"

#include "plan/tiling.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })

static enum err check(struct tiling *t, const char *key, int64_t size, uint64_t count, const int64_t *const *dims)
{
	struct overlap_box *boxes;

	T_OK(tiling_boxes(t, count, &boxes));
	for (uint64_t i = 0; i < count; i++)
		boxes[i].dims = dims[i];
	return tiling_check(t, str_of(key), 1, &size, boxes, count);
}

static void problems_add_up_over_tensors(void **state)
{
	CLEANUP(tiling_free) struct tiling t;

	(void)state;
	tiling_init(&t);
	T_OK(check(&t, "good", 8, 2, (const int64_t *const[]){ V(4, 4), V(0, 4) }));
	assert_int_equal(t.problems, 0);
	T_OK(check(&t, "empty pieces", 8, 3, (const int64_t *const[]){ V(0, 8), V(8, 0), V(3, 0) }));
	assert_int_equal(t.problems, 0);
	T_OK(check(&t, "hole", 8, 1, (const int64_t *const[]){ V(0, 7) }));
	assert_int_equal(t.problems, 1);
	assert_true(t.holes_only);
	assert_true(str_is(t.first_key, "hole"));
	T_OK(check(&t, "twice", 8, 2, (const int64_t *const[]){ V(0, 8), V(0, 8) }));
	assert_int_equal(t.problems, 3); /* the overlap, and the volume */
	assert_false(t.holes_only);
	assert_true(str_is(t.first_key, "hole"));
	T_OK(check(&t, "nothing", 8, 0, NULL));
	assert_int_equal(t.problems, 4);
}

static void enough_is_enough(void **state)
{
	CLEANUP(tiling_free) struct tiling t;
	const int64_t *same[100];
	static const int64_t whole[] = { 0, 8 }, outside[] = { 7, INT64_MAX };

	(void)state;
	tiling_init(&t);
	for (int i = 0; i < 100; i++)
		same[i] = whole;
	T_OK(check(&t, "w", 8, 100, same));
	assert_true(tiling_full(&t));
	assert_int_equal(t.problems, TILING_PROBLEMS_MAX);
	assert_true(t.text.len <= 900);
	tiling_free(&t);
	tiling_init(&t);
	for (int i = 0; i < 100; i++)
		same[i] = outside;
	T_OK(check(&t, "w", 8, 100, same));
	assert_int_equal(t.problems, TILING_PROBLEMS_MAX);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(problems_add_up_over_tensors),
		cmocka_unit_test(enough_is_enough),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
