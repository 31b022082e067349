/* test_placement.c: placements as PyTorch prints them, as people type them, and as they must not be. */
#include "lib/t.h"

#include "tensor/placement.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static void placements_are_read(void **state)
{
	static const struct {
		const char *text;
		enum placement_kind kind;
		int32_t dim;
		int64_t split_factor;
	} good[] = {
		{ "Shard(0)", PLACE_SHARD, 0, 0 }, { "Shard(dim=1)", PLACE_SHARD, 1, 0 }, { "S(-2)", PLACE_SHARD, -2, 0 },
		{ " S ( dim = 3 ) ", PLACE_SHARD, 3, 0 }, { "Replicate()", PLACE_REPLICATE, 0, 0 }, { "R", PLACE_REPLICATE, 0, 0 },
		{ "_StridedShard(dim=0, sf=2)", PLACE_STRIDED_SHARD, 0, 2 }, { "_S(1, 4)", PLACE_STRIDED_SHARD, 1, 4 },
		{ "_StridedShard(dim=-1, split_factor=1099511627776)", PLACE_STRIDED_SHARD, -1, 1LL << 40 },
		{ "Replicate ( )", PLACE_REPLICATE, 0, 0 }, { "Shard(-999999)", PLACE_SHARD, -999999, 0 }, { "S(007)", PLACE_SHARD, 7, 0 },
		{ "_S(0, 00000000000000000000000000000000000000000000000000000000000000000002)", PLACE_STRIDED_SHARD, 0, 2 },
	};
	static const struct {
		const char *text;
		enum reduce_op reduce;
	} partial[] = {
		{ "Partial()", REDUCE_SUM }, { "Partial", REDUCE_SUM }, { "P", REDUCE_SUM }, { "Partial(sum)", REDUCE_SUM },
		{ "P(avg)", REDUCE_AVG }, { "Partial( 'min' )", REDUCE_MIN }, { "_Partial(reduce_op=max)", REDUCE_MAX },
		{ "Partial(product)", REDUCE_PRODUCT },
	};
	static const char *const bad[] = { "", "Shard", "Shard()", "Shard(x)", "Shard(0", "Shard 0)", "Shard(0))", "Shard(1.5)",
		"Replicate(1)", "S(99999999999)", "_S(0)", "_S(0,0)", "_S(0,-1)", "_S(0,99999999999999999999)", "(", "()", ")",
		"Shard(--1)", "Shard(dim=)", "R(", "shard(0)", "Partial(band)", "Partial(sum,max)", "P(')", "Partial(SUM)",
		"S h a r d(0)", "Shard(1 2)",
		"Shard(1000000)", "Shard(- 1)", "Shard(di m=1)",
		"Partial(reduce_op='sum\")", "_S(0, 9000000000000000000)" };
	char huge[300];
	struct placement p;

	(void)state;
	for (size_t i = 0; i < COUNT(good); i++) {
		T_OK(placement_parse(str_of(good[i].text), &p));
		assert_int_equal(p.kind, good[i].kind);
		assert_int_equal(p.dim, good[i].dim);
		assert_true(p.split_factor == good[i].split_factor);
	}
	for (size_t i = 0; i < COUNT(partial); i++) {
		T_OK(placement_parse(str_of(partial[i].text), &p));
		assert_int_equal(p.kind, PLACE_PARTIAL);
		assert_int_equal(p.reduce, partial[i].reduce);
	}
	for (size_t i = 0; i < COUNT(bad); i++)
		T_ERR(LAYOUT_INVALID, placement_parse(str_of(bad[i]), &p));
	memset(huge, 'S', sizeof huge);
	T_ERR(LAYOUT_INVALID, placement_parse((struct str){ huge, sizeof huge }, &p));
	T_ERR(LAYOUT_INVALID, placement_parse((struct str){ NULL, 0 }, &p));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(placements_are_read),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
