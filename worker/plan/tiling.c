/* tiling.c: bounds, overlaps and volume of one tensor's boxes (see tiling.h). If all boxes are inside, no two overlap and the
 * volumes add up to the tensor's, then they tile it: no search for holes is needed. */
#include "plan/tiling.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"
#include "tensor/box.h"

enum { TEXT_MAX = 900, KEY_SHOWN = 200, BOX_SHOWN = 96 };

struct overlaps {
	struct tiling *t;
	struct str key;
	uint32_t ndim;
	const struct overlap_box *boxes;
};

void tiling_init(struct tiling *t)
{
	*t = (struct tiling){ .text = BUF_INIT(TEXT_MAX), .holes_only = true };
}

void tiling_free(struct tiling *t)
{
	buf_free(&t->text);
	mem_free(t->scratch);
}

bool tiling_full(const struct tiling *t)
{
	return t->problems >= TILING_PROBLEMS_MAX;
}

enum err tiling_boxes(struct tiling *t, uint64_t count, struct overlap_box **out)
{
	if (count > t->scratch_cap) {
		struct overlap_box *p = mem_grow(t->scratch, count, sizeof *p);
		NEED(p, "no memory to check %ju chunks", (uintmax_t)count);
		t->scratch = p;
		t->scratch_cap = count;
	}
	*out = t->scratch;
	return OK;
}

/* A text that is full keeps what it has: a message is dropped as a whole. */
static void PRINTF_LIKE(4, 5) problem(struct tiling *t, struct str key, bool hole, const char *fmt, ...)
{
	char line[KEY_SHOWN + 4 * BOX_SHOWN + 64];
	va_list ap;

	if (t->problems++ == 0)
		t->first_key = key;
	t->holes_only = t->holes_only && hole;
	va_start(ap, fmt);
	int n = vsnprintf(line, sizeof line, fmt, ap);
	va_end(ap);
	if (n < 0 || t->text.len + (size_t)n + (size_t)KEY_SHOWN + 16 > TEXT_MAX)
		return;
	buf_printf(&t->text, "%skey:%.*s %s", t->text.len ? "; " : "",
		   (int)(key.n < KEY_SHOWN ? key.n : KEY_SHOWN), key.n ? key.p : "", line);
}

static enum err overlap_found(void *ctx, uint32_t a, uint32_t b)
{
	struct overlaps *o = ctx;
	char text[4][BOX_SHOWN];
	const int64_t *x = o->boxes[a].dims, *y = o->boxes[b].dims;

	problem(o->t, o->key, false, "has overlapping chunks: %s+%s %s+%s",
		box_print(o->ndim, x, text[0], BOX_SHOWN), box_print(o->ndim, x + o->ndim, text[1], BOX_SHOWN),
		box_print(o->ndim, y, text[2], BOX_SHOWN), box_print(o->ndim, y + o->ndim, text[3], BOX_SHOWN));
	return tiling_full(o->t) ? ERR_PLAN_INVALID : OK; /* PLAN_INVALID: enough was found */
}

static void out_of_bounds(struct tiling *t, struct str key, uint32_t ndim, const int64_t *shape, const int64_t *dims)
{
	char text[3][BOX_SHOWN];

	problem(t, key, false, "has out of bounds chunk: tensor-size:%s chunk: %s+%s",
		box_print(ndim, shape, text[0], BOX_SHOWN), box_print(ndim, dims, text[1], BOX_SHOWN),
		box_print(ndim, dims + ndim, text[2], BOX_SHOWN));
}

enum err tiling_check(struct tiling *t, struct str key, uint32_t ndim, const int64_t *shape,
		      struct overlap_box *boxes, uint64_t count)
{
	uint64_t kept = 0, volume, sum = 0;
	uint32_t before = t->problems;

	TRY(box_numel(ndim, shape, &volume));
	for (uint64_t i = 0; i < count; i++) {
		const int64_t *d = boxes[i].dims;
		uint64_t n;

		if (!box_inside(ndim, d, d + ndim, shape)) {
			out_of_bounds(t, key, ndim, shape, d);
			if (tiling_full(t))
				return OK;
			continue;
		}
		TRY(box_numel(ndim, d + ndim, &n));
		if (n == 0)
			continue;
		if (__builtin_add_overflow(sum, n, &sum))
			sum = UINT64_MAX;
		boxes[kept] = (struct overlap_box){ d, (uint32_t)kept };
		kept++;
	}
	struct overlaps o = { t, key, ndim, boxes };
	enum err e = overlap_self(ndim, boxes, kept, overlap_found, &o);
	if (e && !(e == ERR_PLAN_INVALID && tiling_full(t)))
		return err_at_fqn(e, key.p, key.n);
	if (sum != volume && !tiling_full(t))
		problem(t, key, t->problems == before && sum < volume,
			"invalid fill tensor-volume: %ju chunks-volume: %ju", (uintmax_t)volume, (uintmax_t)sum);
	return OK;
}
