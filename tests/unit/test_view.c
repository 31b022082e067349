/* test_view.c: random chains of permute, reshape and crop over cut tensors, against moving the elements. */
#include <string.h>

#include "lib/t.h"

#include "tensor/view.h"

enum { ELEMENTS = 4096, STEPS = 6, ROUNDS = 3000 };

/* A tensor, as its elements in C order and as views of the chunks that it was cut into. */
struct pair {
	uint32_t ndim;
	int64_t shape[NDIM_MAX];
	int32_t element[ELEMENTS];
	struct views views;
};

static uint64_t random_state = 20261122;

static uint64_t rnd(uint64_t n)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % n;
}

static uint64_t numel(const struct pair *p)
{
	uint64_t n = 0;

	T_OK(box_numel(p->ndim, p->shape, &n));
	return n;
}

static uint64_t element_at(const struct pair *p, const int64_t *at)
{
	uint64_t e = 0;

	for (uint32_t d = 0; d < p->ndim; d++)
		e = e * (uint64_t)p->shape[d] + (uint64_t)at[d];
	return e;
}

/* Counts `at` up inside the sizes; false after the last. */
static bool next(uint32_t ndim, const int64_t *sizes, int64_t *at)
{
	for (uint32_t d = ndim; d-- > 0;) {
		if (++at[d] < sizes[d])
			return true;
		at[d] = 0;
	}
	return false;
}

/* Every element is in one view, and the view finds it in the chunk. chunks[v.source][i]: element i of the chunk. */
static void check(const struct pair *p, int32_t (*chunks)[ELEMENTS])
{
	bool seen[ELEMENTS] = { false };
	uint64_t count = 0;

	for (uint64_t i = 0; i < p->views.n; i++) {
		const struct view *v = &p->views.v[i];
		const int64_t *off = v->dims, *size = off + p->ndim, *stride = size + p->ndim;
		int64_t at[NDIM_MAX] = { 0 }, global[NDIM_MAX];
		assert_true(box_inside(p->ndim, off, size, p->shape));
		do {
			int64_t from = v->first;
			for (uint32_t d = 0; d < p->ndim; d++) {
				global[d] = off[d] + at[d];
				from += at[d] * stride[d];
			}
			uint64_t e = element_at(p, global);
			assert_false(seen[e]);
			seen[e] = true;
			count++;
			assert_int_equal(p->element[e], chunks[v->source][from]);
		} while (next(p->ndim, size, at));
	}
	assert_int_equal(count, numel(p));
}

/* The tensor cut in two along a random dim, or whole. */
static void start(struct arena *a, struct pair *p, int32_t (*chunks)[ELEMENTS])
{
	int64_t dims[2][2 * NDIM_MAX] = { { 0 }, { 0 } };
	uint32_t pieces = 1, d = p->ndim ? (uint32_t)rnd(p->ndim) : 0;
	struct view v[2];

	memcpy(dims[0] + p->ndim, p->shape, p->ndim * sizeof *p->shape);
	if (p->ndim && p->shape[d] > 1 && rnd(2)) {
		pieces = 2;
		memcpy(dims[1], dims[0], sizeof dims[1]);
		int64_t cut = 1 + (int64_t)rnd((uint64_t)p->shape[d] - 1);
		dims[0][p->ndim + d] = dims[1][d] = cut;
		dims[1][p->ndim + d] = p->shape[d] - cut;
	}
	T_OK(arena_alloc(a, pieces, sizeof *p->views.v, &p->views.v));
	p->views.n = pieces;
	for (uint32_t i = 0; i < pieces; i++) {
		int64_t at[NDIM_MAX] = { 0 }, global[NDIM_MAX];
		uint64_t n = 0;
		T_OK(view_of_chunk(a, p->ndim, dims[i], i, &v[i]));
		p->views.v[i] = v[i];
		do {
			for (uint32_t k = 0; k < p->ndim; k++)
				global[k] = dims[i][k] + at[k];
			chunks[i][n++] = p->element[element_at(p, global)];
		} while (next(p->ndim, dims[i] + p->ndim, at));
	}
}

static void permute(struct arena *a, struct pair *p)
{
	struct pair old = *p;
	int64_t order[NDIM_MAX], at[NDIM_MAX] = { 0 }, from[NDIM_MAX];

	for (uint32_t d = 0; d < p->ndim; d++)
		order[d] = d;
	for (uint32_t d = p->ndim; d-- > 1;) {
		uint32_t k = (uint32_t)rnd(d + 1);
		int64_t swap = order[d];
		order[d] = order[k];
		order[k] = swap;
	}
	for (uint32_t d = 0; d < p->ndim; d++)
		p->shape[d] = old.shape[order[d]];
	do {
		for (uint32_t d = 0; d < p->ndim; d++)
			from[order[d]] = at[d];
		p->element[element_at(p, at)] = old.element[element_at(&old, from)];
	} while (next(p->ndim, p->shape, at));
	T_OK(views_permute(a, old.views, p->ndim, order, &p->views));
}

/* To a random shape of as many elements: the factors of the number, dealt out. */
static void reshape(struct arena *a, struct pair *p)
{
	struct pair old = *p;
	uint64_t n = numel(p);

	p->ndim = n == 1 ? (uint32_t)rnd(3) : 1 + (uint32_t)rnd(5);
	for (uint32_t d = 0; d < p->ndim; d++)
		p->shape[d] = 1;
	for (uint64_t f = 2; n > 1; f++)
		for (; n % f == 0; n /= f)
			p->shape[rnd(p->ndim)] *= (int64_t)f;
	T_OK(views_reshape(a, old.views, old.ndim, old.shape, p->ndim, p->shape, 1 << 20, &p->views));
}

static void crop(struct arena *a, struct pair *p)
{
	struct pair old = *p;
	int64_t off[NDIM_MAX], at[NDIM_MAX] = { 0 }, from[NDIM_MAX];

	for (uint32_t d = 0; d < p->ndim; d++) {
		off[d] = (int64_t)rnd((uint64_t)old.shape[d]) / 3;
		p->shape[d] = old.shape[d] - off[d] - (int64_t)rnd((uint64_t)(old.shape[d] - off[d])) / 3;
	}
	do {
		for (uint32_t d = 0; d < p->ndim; d++)
			from[d] = off[d] + at[d];
		p->element[element_at(p, at)] = old.element[element_at(&old, from)];
	} while (next(p->ndim, p->shape, at));
	T_OK(views_crop(a, old.views, p->ndim, off, p->shape, NULL, &p->views));
}

static void test_random_chains(void **state)
{
	static int32_t chunks[2][ELEMENTS];
	static struct pair p;

	(void)state;
	for (int round = 0; round < ROUNDS; round++) {
		struct arena *a = arena_new(UINT64_MAX);
		uint64_t left = 512;
		assert_non_null(a);
		p.ndim = (uint32_t)rnd(5);
		for (uint32_t d = 0; d < p.ndim; d++) {
			p.shape[d] = 1 + (int64_t)rnd(left < 9 ? left : 9);
			left /= (uint64_t)p.shape[d];
		}
		for (uint32_t i = 0; i < numel(&p); i++)
			p.element[i] = (int32_t)i;
		start(a, &p, chunks);
		check(&p, chunks);
		for (int step = 0; step < STEPS; step++) {
			(step % 3 == 0 ? reshape : step % 3 == 1 ? permute : crop)(a, &p);
			check(&p, chunks);
		}
		arena_free(a);
	}
}

/* Dims that were split or permuted back cost no pieces, nor do the whole heads of a grouped projection more than one a group. */
static void test_pieces_are_few(void **state)
{
	struct arena *a = arena_new(UINT64_MAX);
	const int64_t whole[] = { 0, 0, 48, 10 }, flat[] = { 48, 10 }, split[] = { 4, 3, 4, 10 }, order[] = { 1, 0, 2, 3 };
	const int64_t part[] = { 4, 2, 4, 10 }, merged[] = { 32, 10 }, zeros[] = { 0, 0, 0, 0 }, turned[] = { 3, 4, 4, 10 };
	struct view v;
	struct views heads, back, some, rows;

	(void)state;
	T_OK(view_of_chunk(a, 2, whole, 0, &v));
	T_OK(views_reshape(a, (struct views){ &v, 1 }, 2, flat, 4, split, 100, &heads));
	assert_int_equal(heads.n, 1);
	T_OK(views_reshape(a, heads, 4, split, 2, flat, 100, &back));
	assert_int_equal(back.n, 1);
	T_OK(views_crop(a, heads, 4, zeros, part, NULL, &some));
	T_OK(views_reshape(a, some, 4, part, 2, merged, 100, &rows));
	assert_int_equal(rows.n, 4);
	T_OK(views_permute(a, heads, 4, order, &some));
	T_ERR(LIMIT_EXCEEDED, views_reshape(a, some, 4, turned, 2, flat, 11, &rows));
	T_OK(views_reshape(a, some, 4, turned, 2, flat, 12, &rows));
	assert_int_equal(rows.n, 12);
	arena_free(a);
}

static void test_no_elements(void **state)
{
	struct arena *a = arena_new(UINT64_MAX);
	struct views out;

	(void)state;
	T_OK(views_reshape(a, (struct views){ NULL, 0 }, 2, (int64_t[]){ 0, 5 }, 1, (int64_t[]){ 0 }, 1, &out));
	assert_int_equal(out.n, 0);
	arena_free(a);
}

static void test_casts(void **state)
{
	struct arena *a = arena_new(UINT64_MAX);
	struct view v;
	struct views all;

	(void)state;
	T_OK(view_of_chunk(a, 0, NULL, 0, &v));
	all = (struct views){ &v, 1 };
	T_ERR(DTYPE_UNSUPPORTED, views_cast(a, all, DT_FLOAT4_E2M1FN_X2, DT_FLOAT32, &all));
	for (int i = 0; i < VIEW_CASTS_MAX; i++)
		T_OK(views_cast(a, all, DT_FLOAT32, DT_FLOAT16, &all));
	T_ERR(LIMIT_EXCEEDED, views_cast(a, all, DT_FLOAT32, DT_FLOAT16, &all));
	arena_free(a);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_random_chains), cmocka_unit_test(test_pieces_are_few),
					    cmocka_unit_test(test_no_elements), cmocka_unit_test(test_casts) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
