/* plan_cases.h: small random tensors and chunks, and planning by brute force over their elements: what the fast planner must agree
 * with. Shared by unit tests (numbers from a seed) and the fuzzer (numbers from its bytes). */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/load_plan.h"
#include "plan/save_plan.h"
#include "tensor/box.h"

enum { CASE_DIM = 6, CASE_CELLS = CASE_DIM * CASE_DIM * CASE_DIM, CASE_CHUNKS = 64, CASE_NDIM = 3 };

struct dice {
	uint64_t state;
	const uint8_t *bytes;            /* NULL: numbers from state */
	size_t left;
};

struct boxes {
	uint32_t ndim;
	int64_t shape[CASE_NDIM];
	uint32_t count;
	int64_t dims[CASE_CHUNKS][2 * CASE_NDIM];
};

#define CASE_CHECK(cond)                                                                 \
	do {                                                                             \
		if (!(cond)) {                                                           \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond);       \
			abort();                                                         \
		}                                                                        \
	} while (0)

static inline int64_t roll(struct dice *d, int64_t below)
{
	if (d->bytes) {
		if (d->left == 0)
			return 0;
		d->left--;
		return *d->bytes++ % below;
	}
	d->state = d->state * 6364136223846793005u + 1442695040888963407u;
	return (int64_t)((d->state >> 33) % (uint64_t)below);
}

static inline void case_shape(struct dice *d, struct boxes *b)
{
	b->ndim = (uint32_t)roll(d, CASE_NDIM + 1);
	b->count = 0;
	for (uint32_t i = 0; i < b->ndim; i++)
		b->shape[i] = roll(d, 12) ? 1 + roll(d, CASE_DIM) : 0;
}

static inline void case_add(struct boxes *b, const int64_t *dims)
{
	if (b->count < CASE_CHUNKS)
		memcpy(b->dims[b->count++], dims, b->ndim * 2 * sizeof *dims);
}

/* Cuts a box in two, and those again. */
static inline void case_cut(struct dice *d, struct boxes *b, const int64_t *dims, int depth)
{
	int64_t one[2 * CASE_NDIM], two[2 * CASE_NDIM];

	if (b->ndim == 0 || depth == 0 || roll(d, 5) == 0) {
		case_add(b, dims);
		return;
	}
	uint32_t dim = (uint32_t)roll(d, b->ndim);
	int64_t at = roll(d, dims[b->ndim + dim] + 1); /* may leave an empty part */
	memcpy(one, dims, b->ndim * 2 * sizeof *dims);
	memcpy(two, dims, b->ndim * 2 * sizeof *dims);
	one[b->ndim + dim] = at;
	two[dim] += at;
	two[b->ndim + dim] -= at;
	case_cut(d, b, one, depth - 1);
	case_cut(d, b, two, depth - 1);
}

static inline void case_tile(struct dice *d, struct boxes *b)
{
	int64_t all[2 * CASE_NDIM] = { 0 };

	for (uint32_t i = 0; i < b->ndim; i++)
		all[b->ndim + i] = b->shape[i];
	b->count = 0;
	case_cut(d, b, all, 1 + (int)roll(d, 5));
}

/* Drops, doubles, moves and stretches some boxes; with `wild`, out of the tensor too. */
static inline void case_spoil(struct dice *d, struct boxes *b, bool wild)
{
	for (int64_t n = roll(d, 4); n > 0 && b->count; n--) {
		uint32_t i = (uint32_t)roll(d, b->count), dim = b->ndim ? (uint32_t)roll(d, b->ndim) : 0;
		int64_t *x = b->dims[i];

		switch (roll(d, 4)) {
		case 0:
			memcpy(x, b->dims[--b->count], sizeof b->dims[0]);
			break;
		case 1:
			case_add(b, x);
			break;
		case 2:
			if (b->ndim)
				x[dim] += wild ? roll(d, 5) - 2 : -(x[dim] > 0);
			break;
		default:
			if (b->ndim && (wild || x[dim] + x[b->ndim + dim] < b->shape[dim]))
				x[b->ndim + dim] += wild ? roll(d, 5) - 2 : 1;
			break;
		}
	}
}

static inline uint32_t case_numel(const struct boxes *b)
{
	int64_t n = 1;

	for (uint32_t d = 0; d < b->ndim; d++)
		n *= b->shape[d];
	return (uint32_t)n;
}

static inline bool case_holds(uint32_t ndim, const int64_t *shape, const int64_t *dims, uint32_t cell)
{
	for (uint32_t d = ndim; d-- > 0;) {
		int64_t x = cell % shape[d];
		cell = (uint32_t)(cell / shape[d]);
		if (x < dims[d] || x >= dims[d] + dims[ndim + d])
			return false;
	}
	return true;
}

static inline bool case_inside(const struct boxes *b, uint32_t i)
{
	for (uint32_t d = 0; d < b->ndim; d++)
		if (b->dims[i][d] < 0 || b->dims[i][b->ndim + d] < 0 ||
		    b->dims[i][d] + b->dims[i][b->ndim + d] > b->shape[d])
			return false;
	return true;
}

static inline bool case_empty(const struct boxes *b, uint32_t i)
{
	for (uint32_t d = 0; d < b->ndim; d++)
		if (b->dims[i][b->ndim + d] == 0)
			return true;
	return false;
}

/* The verdict of save_plan_validate on boxes as a plan. */
static inline enum err case_validate(const struct boxes *b)
{
	bool hole = false, wrong = false;

	for (uint32_t i = 0; i < b->count; i++)
		wrong = wrong || !case_inside(b, i);
	for (uint32_t cell = 0; cell < case_numel(b); cell++) {
		uint32_t times = 0;
		for (uint32_t i = 0; i < b->count; i++)
			times += case_inside(b, i) && case_holds(b->ndim, b->shape, b->dims[i], cell);
		wrong = wrong || times > 1;
		hole = hole || times == 0;
	}
	return wrong ? ERR_PLAN_INVALID : hole ? ERR_COVERAGE_HOLE : OK;
}

/* A state dict of one tensor "w" with these chunks, and some ranks. */
static inline struct sdict *case_sdict(const struct boxes *b, const uint32_t *ranks)
{
	const struct sd_loc nowhere = { .file = SD_NO_FILE };
	struct sdict *sd = NULL;
	uint32_t t;

	CASE_CHECK(sdict_new(1 << 20, &sd) == OK);
	CASE_CHECK(sdict_add_tensor(sd, STR("w"), DT_INT16, b->ndim, b->shape, &t) == OK);
	for (uint32_t i = 0; i < b->count; i++)
		CASE_CHECK(sdict_add_chunk(sd, t, b->dims[i], ranks ? ranks[i] : i % 4, nowhere) == OK);
	return sd;
}

static inline enum err case_cover(const struct boxes *from, const struct boxes *to)
{
	for (uint32_t i = 0; i < to->count; i++)
		if (!case_empty(to, i) && !case_inside(to, i))
			return ERR_PLAN_INVALID;
	for (uint32_t i = 0; i < from->count && to->count; i++) /* nobody asks: not looked at */
		if (!case_empty(from, i) && !case_inside(from, i))
			return ERR_PLAN_INVALID;
	for (uint32_t cell = 0; cell < case_numel(to); cell++) {
		bool wanted = false, there = false;
		for (uint32_t i = 0; i < to->count; i++)
			wanted = wanted || case_holds(to->ndim, to->shape, to->dims[i], cell);
		for (uint32_t i = 0; i < from->count; i++)
			there = there || case_holds(to->ndim, to->shape, from->dims[i], cell);
		if (wanted && !there)
			return ERR_COVERAGE_HOLE;
	}
	return OK;
}

/* The sources of target chunk i: each meets it, together they cover it, and where none overlap none is left out. */
static inline void case_check_chunk(const struct boxes *from, const struct boxes *to, uint32_t i,
				    const uint32_t *list, uint64_t n)
{
	bool overlaps = case_validate(from) == ERR_PLAN_INVALID;

	for (uint64_t j = 0; j < n; j++) {
		int64_t o[CASE_NDIM], s[CASE_NDIM];
		const int64_t *a = to->dims[i], *b = from->dims[list[j]];
		CASE_CHECK(list[j] < from->count && (j == 0 || list[j - 1] < list[j]));
		CASE_CHECK(box_intersect(to->ndim, a, a + to->ndim, b, b + to->ndim, o, s));
	}
	for (uint32_t cell = 0; cell < case_numel(to); cell++) {
		uint32_t times = 0;
		if (!case_holds(to->ndim, to->shape, to->dims[i], cell))
			continue;
		for (uint64_t j = 0; j < n; j++)
			times += case_holds(to->ndim, to->shape, from->dims[list[j]], cell);
		CASE_CHECK(times == 1 || (overlaps && times > 1));
	}
}

static inline void case_load(const struct boxes *from, const struct boxes *to)
{
	struct sdict *source = case_sdict(from, NULL), *target = case_sdict(to, NULL);
	struct arena *arena = arena_new(1 << 20);
	struct load_match match = { .strict = true };
	struct load_plan plan;
	enum err expect = case_cover(from, to), e = load_plan_make(source, target, &match, arena, &plan);

	if (e != expect)
		fprintf(stderr, "got %s (%s), expected %s\n", err_code_name(e), err_last()->text, err_title(expect));
	CASE_CHECK(e == expect);
	for (uint32_t i = 0; e == OK && i < to->count; i++)
		case_check_chunk(from, to, i, plan.sources + plan.first[i], plan.first[i + 1] - plan.first[i]);
	CASE_CHECK(e || plan.first[to->count] == plan.source_count);
	arena_free(arena);
	sdict_free(source);
	sdict_free(target);
}

static inline void case_plan(const struct boxes *b)
{
	struct sdict *sd = case_sdict(b, NULL);

	CASE_CHECK(save_plan_validate(sd) == case_validate(b));
	sdict_free(sd);
}
