/* convert_shape.c: rules that change one tensor at a time: split, unstack, permute, reshape, pad, slice, dtype. See convert.h. */

#include "plan/convert_impl.h"

static enum err misfit(const struct convert_tensor *t, const char *why)
{
	char shape[192];

	return ERR(SIZE_MISMATCH, "%s: the tensor's shape is %s", why, box_print(t->ndim, t->shape, shape, sizeof shape));
}

static FALLIBLE enum err size_of(const struct converter *v, const struct convert_tensor *t, uint32_t i, int64_t *out)
{
	return conversion_size(v->c, &v->rule->sizes[i], t->ndim, t->shape, out);
}

/* The part [begin, begin + size) of dim `d`, as a tensor of the rule's name number `name`. */
static FALLIBLE enum err push_part(struct converter *v, const struct convert_tensor *t, uint32_t d, int64_t begin, int64_t size,
				   uint32_t name)
{
	int64_t off[NDIM_MAX] = { 0 }, *shape;
	struct convert_tensor part = *t;

	TRY(convert_name(v, t, name, -1, &part.fqn));
	TRY(convert_resized(v, t, d, size, &shape));
	off[d] = begin;
	part.shape = shape;
	TRY(views_crop(v->a, t->views, t->ndim, off, shape, NULL, &part.views));
	return convert_push(v, &part);
}

static FALLIBLE enum err split(struct converter *v, const struct convert_tensor *t)
{
	const struct conversion_rule *r = v->rule;
	int64_t at = 0, size = 0;
	uint32_t d;

	TRY(convert_dim(v, t, t->ndim, &d));
	if (r->parts && t->shape[d] % r->parts)
		return misfit(t, "the dim cannot be split into equal parts");
	for (uint32_t i = 0; i < r->name_count; i++) {
		size = r->parts ? t->shape[d] / r->parts : 0;
		if (!r->parts)
			TRY(size_of(v, t, i, &size));
		if (size < 0 || size > t->shape[d] - at)
			return misfit(t, "the parts are larger than the dim");
		TRY(push_part(v, t, d, at, size, i));
		at += size;
	}
	return at == t->shape[d] ? OK : misfit(t, "the parts are smaller than the dim");
}

static FALLIBLE enum err unstack(struct converter *v, const struct convert_tensor *t)
{
	int64_t off[NDIM_MAX] = { 0 }, *one, *shape;
	uint32_t d;

	TRY(convert_dim(v, t, t->ndim, &d));
	if (t->shape[d] > CONVERSION_NAMES_MAX)
		return misfit(t, "the dim has too many indices to unstack");
	TRY(convert_resized(v, t, d, 1, &one));
	TRY(arena_i64(v->a, t->ndim, &shape));
	memcpy(shape, one, d * sizeof *shape);
	memcpy(shape + d, one + d + 1, (t->ndim - d - 1) * sizeof *shape);
	for (int64_t i = 0; i < t->shape[d]; i++) {
		struct convert_tensor part = *t;
		struct views at;
		TRY(convert_name(v, t, 0, i, &part.fqn));
		off[d] = i;
		TRY(views_crop(v->a, t->views, t->ndim, off, one, NULL, &at));
		TRY(views_drop_dim(v->a, at, t->ndim, d, &part.views));
		part.ndim--;
		part.shape = shape;
		TRY(convert_push(v, &part));
	}
	return OK;
}

static FALLIBLE enum err permute(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor out = *t;
	int64_t order[NDIM_MAX], *shape;

	if (v->rule->size_count != t->ndim)
		return misfit(t, "the rule permutes another number of dims");
	TRY(arena_i64(v->a, t->ndim + 1u, &shape));
	for (uint32_t d = 0; d < t->ndim; d++) {
		order[d] = v->rule->sizes[d].number;
		shape[d] = t->shape[order[d]];
	}
	out.shape = shape;
	TRY(views_permute(v->a, t->views, t->ndim, order, &out.views));
	return convert_push(v, &out);
}

static FALLIBLE enum err reshape(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor out = *t;
	uint32_t n = v->rule->size_count, rest = n;
	uint64_t have, known = 1;
	int64_t *shape;

	TRY(arena_i64(v->a, n + 1u, &shape));
	TRY(box_numel(t->ndim, t->shape, &have));
	for (uint32_t i = 0; i < n; i++) {
		TRY(size_of(v, t, i, &shape[i]));
		if (shape[i] < (v->rule->sizes[i].text.p ? 0 : -1))
			return misfit(t, "a size of the new shape is negative");
		if (shape[i] == -1)
			rest = i;
		else if (__builtin_mul_overflow(known, (uint64_t)shape[i], &known))
			return misfit(t, "the new shape has too many elements");
	}
	if (rest < n && known == 0)
		return misfit(t, "-1 beside a size of 0 can be any size");
	if (rest < n) {
		shape[rest] = (int64_t)(have / known);
		known *= (uint64_t)shape[rest];
	}
	if (known != have)
		return misfit(t, "the new shape has another number of elements");
	out.shape = shape;
	out.ndim = (uint16_t)n;
	TRY(views_reshape(v->a, t->views, t->ndim, t->shape, n, shape, CONVERT_PIECES_MAX, &out.views));
	return convert_push(v, &out);
}

static FALLIBLE enum err pad(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor out = *t;
	int64_t to, dims[2 * NDIM_MAX] = { 0 }, *shape;
	uint64_t zeros;
	uint32_t d;

	TRY(convert_dim(v, t, t->ndim, &d));
	TRY(size_of(v, t, 0, &to));
	if (to < t->shape[d])
		return misfit(t, "the dim is larger than what it is padded to (slice makes it smaller)");
	TRY(convert_resized(v, t, d, to, &shape));
	out.shape = shape;
	memcpy(dims + t->ndim, shape, t->ndim * sizeof *shape);
	dims[d] = t->shape[d];
	dims[t->ndim + d] = to - t->shape[d];
	TRY(box_numel(t->ndim, dims + t->ndim, &zeros));
	if (zeros) { /* not where another dim is of size 0 */
		TRY(arena_alloc(v->a, t->views.n + 1, sizeof *out.views.v, &out.views.v));
		memcpy(out.views.v, t->views.v, t->views.n * sizeof *out.views.v);
		TRY(view_of_zeros(v->a, t->ndim, dims, &out.views.v[out.views.n++]));
	}
	return convert_push(v, &out);
}

static FALLIBLE enum err slice(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor out = *t;
	int64_t off[NDIM_MAX] = { 0 }, bound[2], *shape;
	uint32_t n = v->rule->size_count / 2;

	if (n > t->ndim)
		return misfit(t, "the rule slices more dims");
	TRY(arena_i64(v->a, t->ndim + 1u, &shape));
	memcpy(shape, t->shape, t->ndim * sizeof *shape);
	for (uint32_t d = 0; d < n; d++) {
		for (uint32_t k = 0; k < 2; k++) {
			TRY(size_of(v, t, 2 * d + k, &bound[k]));
			if (bound[k] == CONVERSION_OPEN)
				bound[k] = k ? t->shape[d] : 0;
			else if (bound[k] < 0)
				bound[k] += t->shape[d];
		}
		if (bound[0] < 0 || bound[0] > bound[1] || bound[1] > t->shape[d])
			return misfit(t, "the slice is not inside the tensor");
		off[d] = bound[0];
		shape[d] = bound[1] - bound[0];
	}
	out.shape = shape;
	TRY(views_crop(v->a, t->views, t->ndim, off, shape, NULL, &out.views));
	return convert_push(v, &out);
}

static FALLIBLE enum err cast(struct converter *v, const struct convert_tensor *t)
{
	struct convert_tensor out = *t;

	out.dtype = v->rule->dtype;
	if (out.dtype != t->dtype)
		TRY(views_cast(v->a, t->views, t->dtype, out.dtype, &out.views));
	return convert_push(v, &out);
}

enum err convert_shape(struct converter *v, const struct convert_tensor *t)
{
	switch (v->rule->kind) {
	case CONVERT_DTYPE:
		return cast(v, t);
	case CONVERT_SPLIT:
		return split(v, t);
	case CONVERT_UNSTACK:
		return unstack(v, t);
	case CONVERT_PERMUTE:
		return permute(v, t);
	case CONVERT_RESHAPE:
		return reshape(v, t);
	case CONVERT_PAD:
		return pad(v, t);
	case CONVERT_SLICE:
		return slice(v, t);
	default: /* drop: nothing comes of it */
		return OK;
	}
}
