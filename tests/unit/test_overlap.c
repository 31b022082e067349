/* test_overlap.c: pairs of boxes that share an element: each once, none left out, and an end even to hostile input. */
#include "lib/t.h"

#include "lib/plan_cases.h"
#include "plan/overlap.h"

struct seen {
	uint8_t times[CASE_CHUNKS][CASE_CHUNKS];
	uint64_t pairs, stop_at;
};

static enum err see(void *ctx, uint32_t a, uint32_t b)
{
	struct seen *s = ctx;

	s->times[a][b]++;
	return ++s->pairs == s->stop_at ? ERR_CANCELLED : OK;
}

static enum err count(void *ctx, uint32_t a, uint32_t b)
{
	(void)a;
	(void)b;
	++*(uint64_t *)ctx;
	return OK;
}

static uint64_t gather(const struct boxes *b, struct overlap_box *out)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < b->count; i++)
		if (case_inside(b, i) && !case_empty(b, i))
			out[n++] = (struct overlap_box){ b->dims[i], i };
	return n;
}

static bool share(const struct boxes *a, uint32_t i, const struct boxes *b, uint32_t j)
{
	int64_t o[CASE_NDIM], s[CASE_NDIM];

	return box_intersect(a->ndim, a->dims[i], a->dims[i] + a->ndim, b->dims[j], b->dims[j] + b->ndim, o, s);
}

/* Many boxes in a few places, so that trees have several levels. */
static void scatter(struct dice *d, struct boxes *b)
{
	b->count = 0;
	while (b->count < CASE_CHUNKS && roll(d, 200)) {
		int64_t dims[2 * CASE_NDIM];
		for (uint32_t k = 0; k < b->ndim; k++) {
			dims[k] = roll(d, b->shape[k]);
			dims[b->ndim + k] = 1 + roll(d, b->shape[k] - dims[k]);
		}
		case_add(b, dims);
	}
}

/* Each dim cut in random places, perhaps with holes; every cell a box, in a random order; one of them perhaps spoilt. */
static void grid(struct dice *d, struct boxes *b)
{
	int64_t starts[CASE_NDIM][CASE_DIM], ends[CASE_NDIM][CASE_DIM], counts[CASE_NDIM], cells = 1;

	for (uint32_t k = 0; k < b->ndim; k++) {
		counts[k] = 0;
		for (int64_t at = roll(d, 2); at < b->shape[k];) {
			int64_t size = 1 + roll(d, 3), end = at + size < b->shape[k] ? at + size : b->shape[k];
			starts[k][counts[k]] = at;
			ends[k][counts[k]++] = end;
			at = end + (roll(d, 4) == 0);
		}
		cells *= counts[k];
	}
	b->count = 0;
	for (int64_t i = 0; i < cells; i++) {
		int64_t rest = i, dims[2 * CASE_NDIM];
		for (uint32_t k = b->ndim; k-- > 0; rest /= counts[k]) {
			dims[k] = starts[k][rest % counts[k]];
			dims[b->ndim + k] = ends[k][rest % counts[k]] - dims[k];
		}
		case_add(b, dims);
	}
	for (uint32_t i = b->count; i-- > 1 && roll(d, 50);) {
		int64_t tmp[2 * CASE_NDIM], j = roll(d, 3) ? i : roll(d, i + 1);
		memcpy(tmp, b->dims[i], sizeof tmp);
		memcpy(b->dims[i], b->dims[j], sizeof tmp);
		memcpy(b->dims[j], tmp, sizeof tmp);
	}
	if (b->count && b->ndim && roll(d, 3) == 0) {
		uint32_t i = (uint32_t)roll(d, b->count);
		int64_t *x = &b->dims[i][roll(d, b->ndim * 2)], was = *x;
		*x += roll(d, 2) ? 1 : -1;
		if (!case_inside(b, i))
			*x = was;
	}
}

static void all_pairs_once(void **state)
{
	struct dice d = { .state = 99 };
	uint64_t found = 0;

	(void)state;
	for (int round = 0; round < 9000; round++) {
		struct boxes a, b;
		struct overlap_box x[CASE_CHUNKS], y[CASE_CHUNKS];
		struct seen cross = { .pairs = 0 }, self = { .pairs = 0 };

		do
			case_shape(&d, &a);
		while (case_numel(&a) == 0);
		b = a;
		(round % 3 == 1 ? grid : scatter)(&d, &a);
		(round % 3 == 2 ? grid : scatter)(&d, &b);
		uint64_t n = gather(&a, x), m = gather(&b, y);
		T_OK(overlap_join(a.ndim, x, n, y, m, see, &cross));
		T_OK(overlap_self(a.ndim, x, n, see, &self));
		for (uint32_t i = 0; i < a.count; i++) {
			for (uint32_t j = 0; j < b.count; j++)
				assert_int_equal(cross.times[i][j], share(&a, i, &b, j));
			assert_int_equal(self.times[i][i], 0);
			for (uint32_t j = 0; j < i; j++)
				assert_int_equal(self.times[i][j] + self.times[j][i], share(&a, i, &a, j));
		}
		found += cross.pairs + self.pairs;
	}
	assert_true(found > 100000);
}

static void a_visitor_can_stop(void **state)
{
	static const int64_t dims[] = { 0, 4 };
	struct overlap_box boxes[10];
	struct seen s = { .stop_at = 3 };

	(void)state;
	for (uint32_t i = 0; i < 10; i++)
		boxes[i] = (struct overlap_box){ dims, i };
	assert_int_equal(overlap_self(1, boxes, 10, see, &s), ERR_CANCELLED);
	assert_int_equal(s.pairs, 3);
	s = (struct seen){ .stop_at = 0 };
	T_OK(overlap_join(1, boxes, 0, boxes, 10, see, &s));
	T_OK(overlap_self(1, boxes, 1, see, &s));
	assert_int_equal(s.pairs, 0);
}

static void equal_boxes_are_dropped(void **state)
{
	static const int64_t a[] = { 0, 0, 2, 2 }, b[] = { 0, 2, 2, 2 }, c[] = { 0, 0, 2, 2 }, d[] = { 0, 0, 2, 3 };
	struct overlap_box boxes[] = { { a, 5 }, { b, 6 }, { c, 7 }, { d, 8 }, { b, 9 } };
	uint64_t n = 5;

	(void)state;
	T_OK(overlap_drop_equal(2, boxes, &n));
	assert_int_equal(n, 3);
	assert_int_equal(boxes[0].id, 5);
	assert_int_equal(boxes[1].id, 6);
	assert_int_equal(boxes[2].id, 8);
	n = 2;
	T_OK(overlap_drop_equal(0, boxes, &n)); /* scalars are all equal */
	assert_int_equal(n, 1);
}

/* Orders that spoil naive quicksorts: sorted, reversed, organ pipe, all starts equal but the ends; in one and two dims. */
static void unlucky_orders_do_not_matter(void **state)
{
	enum { N = 60000 };
	int64_t *dims = calloc(N, 4 * sizeof *dims);
	struct overlap_box *boxes = calloc(N, sizeof *boxes);

	(void)state;
	assert_non_null(dims);
	assert_non_null(boxes);
	for (int order = 0; order < 5; order++) {
		for (uint32_t ndim = 1; ndim <= 2; ndim++) {
			uint64_t pairs = 0;
			for (int64_t i = 0; i < N; i++) {
				int64_t *x = dims + i * 4, at = order == 0 ? i : order == 1 ? N - i : i % 2 ? i : 2 * N - i;
				at = order == 4 ? i * 1237 % 60013 : at; /* scattered, each once */
				x[0] = order == 3 && ndim == 2 ? 0 : at;
				x[ndim] = 1;
				if (ndim == 2) {
					x[1] = at;
					x[2] = x[3] = 1;
				}
				boxes[i] = (struct overlap_box){ x, (uint32_t)i };
			}
			T_OK(overlap_self(ndim, boxes, N, count, &pairs));
			assert_int_equal(pairs, 0);
		}
	}
	free(dims);
	free(boxes);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_pairs_once),
		cmocka_unit_test(a_visitor_can_stop),
		cmocka_unit_test(equal_boxes_are_dropped),
		cmocka_unit_test(unlucky_orders_do_not_matter),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
