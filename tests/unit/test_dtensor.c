/* test_dtensor.c: parts of tensors, held against walking the placements row by row; and that nobody is made to count to 2^40. */
#include "lib/t.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/dtensor.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })
#define P(...) ((const struct placement[]){ __VA_ARGS__ })
#define COUNT(a) (sizeof(a) / sizeof *(a))
#define SHARD(d) { .kind = PLACE_SHARD, .dim = (d) }
#define STRIDED(d, sf) { .kind = PLACE_STRIDED_SHARD, .dim = (d), .split_factor = (sf) }

enum { ROWS = 64 };

/* expect: offsets, sizes and local offsets of each box */
static void part_is(uint32_t ndim, const int64_t *shape, uint32_t mesh_ndim, const int64_t *mesh, const int64_t *coord,
		    const struct placement *p, uint64_t count, const int64_t *expect)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	int64_t dims[2 * NDIM_MAX], local[NDIM_MAX];

	T_OK(dtensor_part_make(ndim, shape, mesh_ndim, mesh, coord, p, &part));
	assert_int_equal(part.count, count);
	for (uint64_t i = 0; i < count; i++, expect += ndim * 3) {
		dtensor_part_box(&part, i, dims, local);
		assert_memory_equal(dims, expect, ndim * 2 * sizeof *dims);
		assert_memory_equal(local, expect + ndim * 2, ndim * sizeof *local);
	}
}

static void strided_parts_are_several_boxes(void **state)
{
	(void)state;
	part_is(1, V(8), 1, V(2), V(1), P(STRIDED(0, 2)), 2, V(2, 2, 0, 6, 2, 2));
	/* FSDP2 over column-wise TP: one run each */
	part_is(2, V(8, 3), 2, V(2, 2), V(0, 1), P(STRIDED(0, 2), SHARD(0)), 1, V(4, 0, 2, 3, 0, 0));
	part_is(2, V(10, 3), 2, V(2, 2), V(1, 1), P(STRIDED(-2, 2), SHARD(0)), 1, V(8, 0, 2, 3, 0, 0));
	/* in two dims: a grid of boxes, the last dim fastest */
	part_is(2, V(4, 6), 2, V(2, 3), V(1, 0), P(STRIDED(0, 2), STRIDED(1, 2)), 4,
		V(1, 0, 1, 1, 0, 0, 1, 3, 1, 1, 0, 1, 3, 0, 1, 1, 1, 0, 3, 3, 1, 1, 1, 1));
	/* pieces of 4 and 3 rows over 3 ranks: the third gets nothing of the first, a row of the second */
	part_is(1, V(7), 1, V(3), V(2), P(STRIDED(0, 2)), 1, V(6, 1, 0));
	/* more pieces than rows: the first rank has them all, in one */
	part_is(1, V(7), 1, V(3), V(0), P(STRIDED(0, 1000)), 1, V(0, 7, 0));
	part_is(1, V(7), 1, V(3), V(1), P(STRIDED(0, 1000)), 1, V(7, 0, 0));
	part_is(1, V(7), 1, V(1), V(0), P(STRIDED(0, 3)), 1, V(0, 7, 0));
	/* empty in one dim: one box, pinned there, where PyTorch says it is in the others */
	part_is(2, V(2, 8), 2, V(4, 2), V(3, 1), P(SHARD(0), STRIDED(1, 2)), 1, V(2, 2, 0, 4, 0, 0));
	part_is(0, NULL, 1, V(2), V(1), P({ .kind = PLACE_REPLICATE }), 1, V(0));
}

static int64_t roll(unsigned *seed, int64_t n)
{
	*seed = *seed * 1103515245 + 12345;
	return (int64_t)(*seed >> 8) % n;
}

/* rows[] as PyTorch would keep them: cut in `pieces`, each cut in n, of each the i-th. */
static int64_t naive(int64_t *rows, int64_t count, int64_t pieces, int64_t n, int64_t i)
{
	int64_t start, length, begin, own, kept = 0;

	for (int64_t k = 0; k < pieces; k++) {
		dtensor_chunk(count, pieces, k, &start, &length);
		dtensor_chunk(length, n, i, &begin, &own);
		for (int64_t r = 0; r < own; r++)
			rows[kept++] = rows[start + begin + r];
	}
	return kept;
}

static void parts_are_those_of_a_walk_by_rows(void **state)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	unsigned seed = 7;

	(void)state;
	for (int round = 0; round < 20000; round++) {
		int64_t size = roll(&seed, ROWS + 1), rows[ROWS + 1] = { 0 }, count = size, mesh[4], coord[4], dims[2], local, seen = 0;
		struct placement p[4];
		uint32_t n = (uint32_t)roll(&seed, 5);

		for (int64_t r = 0; r < size; r++)
			rows[r] = r;
		for (uint32_t m = 0; m < n; m++) {
			mesh[m] = 1 + roll(&seed, 5);
			coord[m] = roll(&seed, mesh[m]);
			p[m] = (struct placement){ .kind = (enum placement_kind)roll(&seed, 4), .dim = (int32_t)-roll(&seed, 2),
						   .split_factor = 1 + roll(&seed, 9) };
			if (placement_cuts(&p[m]))
				count = naive(rows, count, p[m].kind == PLACE_SHARD ? 1 : p[m].split_factor, mesh[m], coord[m]);
		}
		T_OK(dtensor_part_make(1, &size, n, mesh, coord, p, &part));
		assert_int_equal(part.sizes[0], count);
		for (uint64_t i = 0; i < part.count; i++) {
			dtensor_part_box(&part, i, dims, &local);
			assert_true(count == 0 ? dims[0] == size : local == seen && dims[1] > 0);
			assert_true(i == 0 || dims[0] > rows[seen - 1] + 1); /* no two touch */
			for (int64_t r = 0; r < dims[1]; r++)
				assert_int_equal(dims[0] + r, rows[seen++]);
		}
		assert_int_equal(seen, count);
	}
}

static void nothing_is_taken_for_what_cannot_be(void **state)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	const int64_t huge = 1LL << 40;

	(void)state;
	T_ERR(LIMIT_EXCEEDED, dtensor_part_make(1, &huge, 1, V(2), V(0), P(STRIDED(0, 1LL << 39)), &part));
	T_ERR(LIMIT_EXCEEDED, dtensor_part_make(2, V(1 << 12, 1 << 12), 2, V(2, 2), V(0, 0), P(STRIDED(0, 1 << 11), STRIDED(1, 1 << 11)),
						&part));
	T_ERR(LIMIT_EXCEEDED, dtensor_part_make(1, &huge, 2, V(2, 2), V(0, 0), P(STRIDED(0, 1 << 19), STRIDED(0, 1LL << 38)), &part));
	part_is(1, &huge, 1, V(2), V(0), P(STRIDED(0, huge)), 1, V(0, huge, 0));
	part_is(1, V(INT64_MAX), 1, V(65535), V(65534), P(STRIDED(0, INT64_MAX)), 1, V(INT64_MAX, 0, 0));
	/* a large factor that a Shard undoes, as with FSDP2 over TP, costs what it leaves */
	part_is(1, &huge, 2, V(2, 1 << 16), V(1, 5), P(STRIDED(0, 1 << 16), SHARD(0)), 1,
		V(5 * (huge >> 16) + (huge >> 17), huge >> 17, 0));
	part_is(2, V(0, 1LL << 40), 1, V(2), V(0), P(STRIDED(1, 1LL << 39)), 1, V(0, 0, 0, 1LL << 39, 0, 0));
	T_ERR(LAYOUT_INVALID, dtensor_part_make(1, V(4), 1, V(2), V(0), P(SHARD(1)), &part));
	T_ERR(LAYOUT_INVALID, dtensor_part_make(1, V(4), 1, V(2), V(0), P(SHARD(-2)), &part));
	T_ERR(LAYOUT_INVALID, dtensor_part_make(0, NULL, 1, V(2), V(0), P(STRIDED(0, 1)), &part));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(strided_parts_are_several_boxes),
		cmocka_unit_test(parts_are_those_of_a_walk_by_rows),
		cmocka_unit_test(nothing_is_taken_for_what_cannot_be),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
