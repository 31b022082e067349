/* view.c: see view.h. All but reshape is a change of offsets and strides. Reshape cuts the dims of both shapes into groups of equal
 * products (as torch's view does); in each group a box becomes runs of elements with one stride, and each run boxes of the new dims. */
#include "tensor/view.h"

#include "base/vec.h"
#include "tensor/cast.h"
#include "tensor/linear.h"

/* Room for the dims of a view. */
static FALLIBLE enum err new_view(struct arena *a, uint32_t ndim, const struct view *like, struct view *out)
{
	*out = *like;
	return arena_i64(a, 3ull * ndim + 1, &out->dims);
}

enum err view_of_chunk(struct arena *a, uint32_t ndim, const int64_t *dims, uint32_t source, struct view *out)
{
	int64_t stride = 1;

	TRY(new_view(a, ndim, &(struct view){ .source = source }, out));
	if (ndim)
		memcpy(out->dims, dims, 2 * ndim * sizeof *dims);
	for (uint32_t d = ndim; d-- > 0;) {
		out->dims[2 * ndim + d] = stride;
		stride *= dims[ndim + d] ? dims[ndim + d] : 1; /* a box whose elements were counted */
	}
	return OK;
}

enum err view_of_zeros(struct arena *a, uint32_t ndim, const int64_t *dims, struct view *out)
{
	return view_of_chunk(a, ndim, dims, VIEW_ZEROS, out);
}

static FALLIBLE enum err begin(struct arena *a, struct views in, struct views *out)
{
	*out = (struct views){ 0 };
	return arena_alloc(a, in.n, sizeof *out->v, &out->v);
}

enum err views_permute(struct arena *a, struct views in, uint32_t ndim, const int64_t *order, struct views *out)
{
	TRY(begin(a, in, out));
	for (; out->n < in.n; out->n++) {
		struct view *v = &out->v[out->n];
		TRY(new_view(a, ndim, &in.v[out->n], v));
		for (uint32_t d = 0; d < ndim; d++)
			for (uint32_t k = 0; k < 3; k++)
				v->dims[k * ndim + d] = in.v[out->n].dims[k * ndim + (uint32_t)order[d]];
	}
	return OK;
}

enum err views_crop(struct arena *a, struct views in, uint32_t ndim, const int64_t *offsets, const int64_t *sizes, const int64_t *shift,
		    struct views *out)
{
	int64_t off[NDIM_MAX], size[NDIM_MAX];

	TRY(begin(a, in, out));
	for (uint64_t i = 0; i < in.n; i++) {
		const int64_t *dims = in.v[i].dims, *stride = dims + 2 * ndim;
		if (!box_intersect(ndim, dims, dims + ndim, offsets, sizes, off, size))
			continue;
		struct view *v = &out->v[out->n++];
		TRY(new_view(a, ndim, &in.v[i], v));
		for (uint32_t d = 0; d < ndim; d++) {
			v->first += (off[d] - dims[d]) * stride[d];
			v->dims[d] = off[d] - offsets[d] + (shift ? shift[d] : 0);
			v->dims[ndim + d] = size[d];
			v->dims[2 * ndim + d] = stride[d];
		}
	}
	return OK;
}

enum err views_add_dim(struct arena *a, struct views in, uint32_t ndim, uint32_t dim, int64_t at, struct views *out)
{
	const int64_t new_dim[3] = { at, 1, 0 };

	TRY(begin(a, in, out));
	for (; out->n < in.n; out->n++) {
		struct view *v = &out->v[out->n];
		TRY(new_view(a, ndim + 1, &in.v[out->n], v));
		for (uint32_t k = 0; k < 3; k++) {
			const int64_t *from = in.v[out->n].dims + k * ndim;
			int64_t *to = v->dims + k * (ndim + 1);
			memcpy(to, from, dim * sizeof *to);
			to[dim] = new_dim[k];
			memcpy(to + dim + 1, from + dim, (ndim - dim) * sizeof *to);
		}
	}
	return OK;
}

enum err views_drop_dim(struct arena *a, struct views in, uint32_t ndim, uint32_t dim, struct views *out)
{
	TRY(begin(a, in, out));
	for (; out->n < in.n; out->n++) {
		struct view *v = &out->v[out->n];
		TRY(new_view(a, ndim - 1, &in.v[out->n], v));
		for (uint32_t k = 0; k < 3; k++) {
			const int64_t *from = in.v[out->n].dims + k * ndim;
			int64_t *to = v->dims + k * (ndim - 1);
			memcpy(to, from, dim * sizeof *to);
			memcpy(to + dim, from + dim + 1, (ndim - 1 - dim) * sizeof *to);
		}
	}
	return OK;
}

enum err views_cast(struct arena *a, struct views in, enum dtype from, enum dtype to, struct views *out)
{
	TRY(cast_check(to, from));
	TRY(begin(a, in, out));
	for (; out->n < in.n; out->n++) {
		struct view *v = &out->v[out->n];
		*v = in.v[out->n];
		if (v->cast_count == VIEW_CASTS_MAX)
			return ERR(LIMIT_EXCEEDED, "more than %d casts of one tensor", VIEW_CASTS_MAX);
		v->casts[v->cast_count++] = (uint8_t)to;
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ reshape */

/* Dims [from, from_end) of the old shape hold the elements of dims [to, to_end) of the new one. */
struct group {
	uint32_t from, from_end, to, to_end;
};

/* Boxes of a group's new dims, each so many numbers in a row: what is added to `first`, then offsets, sizes and strides. */
struct parts vec(int64_t);

static uint32_t part_numbers(const struct group *g)
{
	return 1 + 3 * (g->to_end - g->to);
}

struct reshape {
	struct arena *a;
	uint32_t ndim, to_ndim, group_count;
	const int64_t *shape, *to_shape;
	uint64_t max;
	struct group groups[2 * NDIM_MAX];
	struct parts parts[2 * NDIM_MAX]; /* of the view at hand, by group */
	struct vec(struct view) made;
};

static void find_groups(struct reshape *r)
{
	uint32_t i = 0, k = 0;

	while (i < r->ndim || k < r->to_ndim) {
		struct group *g = &r->groups[r->group_count++];
		int64_t old = 1, new = 1;
		*g = (struct group){ i, i, k, k };
		if (i < r->ndim)
			old = r->shape[i++];
		if (k < r->to_ndim)
			new = r->to_shape[k++];
		while (old != new) /* both products divide the number of elements: the smaller one has dims left */
			if (old < new)
				old *= r->shape[i++];
			else
				new *= r->to_shape[k++];
		g->from_end = i;
		g->to_end = k;
	}
}

/* A run of `n` elements of a group, from element `begin` on, that lie `stride` apart: as boxes of the new dims. */
static FALLIBLE enum err add_run(struct reshape *r, uint32_t group, uint64_t begin, uint64_t n, int64_t stride, int64_t delta)
{
	const struct group *g = &r->groups[group];
	uint32_t dims = g->to_end - g->to;
	const int64_t *shape = r->to_shape + g->to;
	struct linear run = linear_range(dims, shape, begin, begin + n);
	struct parts *parts = &r->parts[group];

	while (run.at < run.end) {
		if (parts->n / part_numbers(g) >= r->max)
			return ERR(LIMIT_EXCEEDED, "the reshape cuts a stored chunk into more than %ju pieces", (uintmax_t)r->max);
		TRY(vec_reserve(parts, part_numbers(g)));
		int64_t *p = parts->v + parts->n, pitch = stride;
		parts->n += part_numbers(g);
		p[0] = delta + (int64_t)(run.at - begin) * stride;
		(void)linear_next(&run, p + 1, p + 1 + dims);
		for (uint32_t d = dims; d-- > 0;) {
			p[1 + 2 * dims + d] = pitch;
			pitch *= shape[d];
		}
	}
	return OK;
}

/* The inner dims of a box whose elements, in order, lie one stride apart: dims [*walked, ndim) become one run. */
static void find_run(uint32_t ndim, const int64_t *shape, const int64_t *size, const int64_t *stride, uint32_t *walked, uint64_t *n,
		     int64_t *step)
{
	int64_t whole = 1;             /* elements of the shape's dims so far */

	*n = 1;
	*step = 0;
	for (*walked = ndim; *walked > 0; --*walked) {
		uint32_t d = *walked - 1;
		if ((int64_t)*n != whole && size[d] != 1)
			return;
		if (*n > 1 && size[d] > 1 && stride[d] != *step * whole)
			return;
		if (*n == 1 && size[d] > 1)
			*step = stride[d];
		*n *= (uint64_t)size[d];
		whole *= shape[d];
	}
}

static FALLIBLE enum err reshape_group(struct reshape *r, uint32_t group, const struct view *v)
{
	const struct group *g = &r->groups[group];
	uint32_t ndim = g->from_end - g->from, walked;
	const int64_t *shape = r->shape + g->from, *off = v->dims + g->from, *size = off + r->ndim, *stride = size + r->ndim;
	int64_t at[NDIM_MAX] = { 0 }, step;
	uint64_t n;

	r->parts[group].n = 0;
	find_run(ndim, shape, size, stride, &walked, &n, &step);
	for (;;) {
		uint64_t begin = 0;
		int64_t delta = 0;
		for (uint32_t d = 0; d < ndim; d++) {
			begin = begin * (uint64_t)shape[d] + (uint64_t)(off[d] + at[d]);
			delta += at[d] * stride[d];
		}
		TRY(add_run(r, group, begin, n, step, delta));
		uint32_t d = walked;
		while (d > 0 && ++at[d - 1] == size[d - 1])
			at[--d] = 0;
		if (d == 0)
			return OK;
	}
}

/* Every combination of the groups' parts is a view. */
static FALLIBLE enum err combine(struct reshape *r, const struct view *v)
{
	uint64_t at[2 * NDIM_MAX] = { 0 };
	struct view *out;

	for (;;) {
		if (r->made.n >= r->max)
			return ERR(LIMIT_EXCEEDED, "the reshape cuts a tensor into more than %ju pieces", (uintmax_t)r->max);
		TRY(vec_push(&r->made, &out));
		TRY(new_view(r->a, r->to_ndim, v, out));
		for (uint32_t g = 0; g < r->group_count; g++) {
			const struct group *k = &r->groups[g];
			uint32_t n = k->to_end - k->to;
			const int64_t *p = r->parts[g].v + at[g] * part_numbers(k);
			out->first += p[0];
			for (uint32_t i = 0; i < 3 && n; i++)
				memcpy(out->dims + i * r->to_ndim + k->to, p + 1 + i * n, n * sizeof *p);
		}
		uint32_t g = r->group_count;
		while (g > 0 && ++at[g - 1] == r->parts[g - 1].n / part_numbers(&r->groups[g - 1]))
			at[--g] = 0;
		if (g == 0)
			return OK;
	}
}

static FALLIBLE enum err reshape_all(struct reshape *r, struct views in, struct views *out)
{
	for (uint64_t i = 0; i < in.n; i++) {
		if (box_empty(r->ndim, in.v[i].dims + r->ndim))
			continue;
		for (uint32_t g = 0; g < r->group_count; g++)
			TRY(reshape_group(r, g, &in.v[i]));
		TRY(combine(r, &in.v[i]));
	}
	TRY(arena_alloc(r->a, r->made.n, sizeof *out->v, &out->v));
	out->n = r->made.n;
	if (out->n)
		memcpy(out->v, r->made.v, out->n * sizeof *out->v);
	return OK;
}

enum err views_reshape(struct arena *a, struct views in, uint32_t ndim, const int64_t *shape, uint32_t to_ndim, const int64_t *to_shape,
		       uint64_t max, struct views *out)
{
	CLEANUP(mem_free_ptr) struct reshape *r = mem_zalloc(1, sizeof *r);

	*out = (struct views){ 0 };
	NEED(r, "no memory to reshape");
	if (box_empty(ndim, shape)) /* no elements: nothing to view */
		return OK;
	r->a = a;
	r->ndim = ndim;
	r->shape = shape;
	r->to_ndim = to_ndim;
	r->to_shape = to_shape;
	r->max = max;
	find_groups(r);
	enum err e = reshape_all(r, in, out);
	for (uint32_t g = 0; g < r->group_count; g++)
		vec_free(&r->parts[g]);
	vec_free(&r->made);
	return e;
}
