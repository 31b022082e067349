/* convert_join.c: concat and stack: tensors whose new name is the same become one. See convert.h. */
#include <stdlib.h>

#include "base/num.h"
#include "plan/convert_impl.h"

struct member {
	uint32_t group, tensor, rank;  /* rank: place in rule->order */
	struct str fqn;
};

struct group {
	struct str into;
	uint64_t first, count;         /* in members, sorted */
};

struct join {
	struct converter *v;
	struct vec(struct member) members;
	struct vec(struct group) groups;
	struct map names;              /* into → group */
};

static int by_order(const void *a, const void *b)
{
	const struct member *x = a, *y = b;

	return num_order(x->group, y->group) ?: num_order(x->rank, y->rank) ?: str_cmp_natural(x->fqn, y->fqn);
}

/* Finds the one entry of rule->order that the name contains; none or two is an error. */
static FALLIBLE enum err find_rank(const struct conversion_rule *r, struct member *m)
{
	uint32_t found = 0;

	for (uint32_t i = 0; i < r->order_count; i++)
		if (r->order[i].n && memmem(m->fqn.p, m->fqn.n, r->order[i].p, r->order[i].n)) {
			m->rank = i;
			found++;
		}
	if (r->order_count && found != 1)
		return err_at_fqn(ERR(VALIDATION_FAILED, "%u texts of order are in the name, and not one", found), m->fqn.p, m->fqn.n);
	return OK;
}

static FALLIBLE enum err collect(struct join *j)
{
	struct converter *v = j->v;
	struct member *m;
	struct group *g;

	for (uint32_t i = 0; i < v->now.n; i++) {
		const struct convert_tensor *t = &v->now.v[i];
		struct str into;
		uint32_t found;
		if (!t->matches)
			continue;
		TRY(convert_name(v, t, 0, -1, &into));
		TRY(map_intern(&j->names, into, (uint32_t)j->groups.n, &found));
		if (found == j->groups.n) {
			TRY(vec_push(&j->groups, &g));
			g->into = into;
		}
		TRY(vec_push(&j->members, &m));
		*m = (struct member){ .group = found, .tensor = i, .fqn = t->fqn };
		TRY(find_rank(v->rule, m));
	}
	if (j->members.n)
		qsort(j->members.v, j->members.n, sizeof *j->members.v, by_order);
	for (uint64_t i = 0; i < j->members.n; i++) {
		g = &j->groups.v[j->members.v[i].group];
		if (g->count++ == 0)
			g->first = i;
	}
	return OK;
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* Two names that differ in numbers alone: how many differ, and the values of the last that does. False: in something else. */
static bool differ(struct str a, struct str b, uint32_t *count_out, uint64_t *x, uint64_t *y)
{
	size_t i = 0, k = 0;

	*count_out = 0;
	while (i < a.n && k < b.n) {
		size_t n = 0, m = 0;
		while (i + n < a.n && is_digit(a.p[i + n]))
			n++;
		while (k + m < b.n && is_digit(b.p[k + m]))
			m++;
		if (!n != !m || (!n && a.p[i] != b.p[k]))
			return false;
		if (n && !str_eq((struct str){ a.p + i, n }, (struct str){ b.p + k, m })) {
			if (!str_to_u64((struct str){ a.p + i, n }, x) || !str_to_u64((struct str){ b.p + k, m }, y))
				return false;
			++*count_out;
		}
		i += n ? n : 1;
		k += n ? m : 1;
	}
	return i == a.n && k == b.n;
}

/* The parts have an order that their names tell, and none is missing between two. */
static FALLIBLE enum err check_order(const struct join *j, const struct group *g)
{
	const struct member *m = &j->members.v[g->first];
	const struct conversion_rule *r = j->v->rule;
	uint64_t x = 0, y = 0;
	uint32_t numbers = 0;

	for (uint64_t i = 0; i < r->order_count; i++)
		if (i >= g->count || m[i].rank != i)
			return ERR(VALIDATION_FAILED, "%.*s would have no part, or more than one, with \"%.*s\" in its name",
				   (int)num_min(g->into.n, 300), g->into.p, (int)r->order[i].n, r->order[i].p);
	if (r->order_count && g->count > r->order_count)
		return ERR(VALIDATION_FAILED, "two parts of %.*s have the same text of order", (int)num_min(g->into.n, 300), g->into.p);
	for (uint64_t i = 1; i < g->count && !r->order_count; i++) {
		if (!differ(m[i - 1].fqn, m[i].fqn, &numbers, &x, &y))
			return ERR(VALIDATION_FAILED, "%.*s and %.*s differ in more than numbers: give their order",
				   (int)num_min(m[i - 1].fqn.n, 300), m[i - 1].fqn.p, (int)num_min(m[i].fqn.n, 300), m[i].fqn.p);
		if (numbers == 1 && y != x + 1)
			return ERR(MISSING_KEY, "of the parts of %.*s number %ju is missing", (int)num_min(g->into.n, 300), g->into.p,
				   (uintmax_t)x + 1);
	}
	return OK;
}

/* Equal dtypes, and equal sizes in every dim but `free_dim`. */
static FALLIBLE enum err check_alike(const struct convert_tensor *a, const struct convert_tensor *b, uint32_t free_dim)
{
	char x[128], y[128];
	bool same = a->ndim == b->ndim;

	if (a->dtype != b->dtype)
		return err_expected(ERR(DTYPE_UNSUPPORTED, "%.*s is %s, %.*s is %s: cast one of them first", (int)num_min(a->fqn.n, 300),
					a->fqn.p, dtype_name(a->dtype), (int)num_min(b->fqn.n, 300), b->fqn.p, dtype_name(b->dtype)),
				    dtype_name(a->dtype), dtype_name(b->dtype));
	for (uint32_t d = 0; same && d < a->ndim; d++)
		same = d == free_dim || a->shape[d] == b->shape[d];
	if (same)
		return OK;
	box_print(a->ndim, a->shape, x, sizeof x);
	box_print(b->ndim, b->shape, y, sizeof y);
	return err_expected(ERR(SIZE_MISMATCH, "%.*s has the shape %s, %.*s has %s", (int)num_min(a->fqn.n, 300), a->fqn.p, x,
				(int)num_min(b->fqn.n, 300), b->fqn.p, y), x, y);
}

/* A part of what becomes `out`: its views, from index `at` of dim `d` on. */
static FALLIBLE enum err add_part(struct join *j, struct convert_tensor *out, const struct convert_tensor *part, uint32_t d, int64_t at,
				  bool stacks)
{
	struct converter *v = j->v;
	int64_t zeros[NDIM_MAX] = { 0 }, shift[NDIM_MAX] = { 0 };
	struct views moved;

	shift[d] = at;
	if (stacks)
		TRY(views_add_dim(v->a, part->views, part->ndim, d, at, &moved));
	else
		TRY(views_crop(v->a, part->views, part->ndim, zeros, part->shape, shift, &moved));
	if (moved.n)
		memcpy(out->views.v + out->views.n, moved.v, moved.n * sizeof *moved.v);
	out->views.n += moved.n;
	return OK;
}

static FALLIBLE enum err join_group(struct join *j, const struct group *g)
{
	struct converter *v = j->v;
	const struct member *m = &j->members.v[g->first];
	bool stacks = v->rule->kind == CONVERT_STACK;
	struct convert_tensor out = v->now.v[m->tensor];
	const struct convert_tensor *first = &v->now.v[m->tensor];
	uint64_t views = 0;
	int64_t at = 0, *shape;
	uint32_t d;

	TRY(check_order(j, g));
	TRY(convert_dim(v, first, first->ndim + stacks, &d));
	for (uint64_t i = 0; i < g->count; i++) {
		TRY(check_alike(first, &v->now.v[m[i].tensor], stacks ? NDIM_MAX : d));
		views += v->now.v[m[i].tensor].views.n;
	}
	out.fqn = g->into;
	out.views.n = 0;
	TRY(arena_alloc(v->a, views, sizeof *out.views.v, &out.views.v));
	for (uint64_t i = 0; i < g->count; i++) {
		const struct convert_tensor *part = &v->now.v[m[i].tensor];
		TRY(add_part(j, &out, part, d, at, stacks));
		if (__builtin_add_overflow(at, stacks ? 1 : part->shape[d], &at))
			return NUM_OVERFLOW();
	}
	if (stacks) {
		TRY(arena_i64(v->a, first->ndim + 1u, &shape));
		memcpy(shape, first->shape, d * sizeof *shape);
		memcpy(shape + d + 1, first->shape + d, (first->ndim - d) * sizeof *shape);
		out.ndim++;
		out.shape = shape;
	}
	TRY(convert_resized(v, &out, d, at, &shape));
	out.shape = shape;
	return convert_push(v, &out);
}

/* Each group stands where its first tensor stood. */
static FALLIBLE enum err join_all(struct join *j)
{
	struct converter *v = j->v;
	CLEANUP(mem_free_ptr) uint32_t *group_of = mem_alloc((v->now.n + 1) * sizeof *group_of);

	NEED(group_of, "no memory to join tensors");
	TRY(collect(j));
	for (uint64_t i = 0; i < j->members.n; i++)
		group_of[j->members.v[i].tensor] = j->members.v[i].group;
	for (uint32_t i = 0; i < v->now.n; i++) {
		struct group *g = v->now.v[i].matches ? &j->groups.v[group_of[i]] : NULL;
		if (!g) {
			TRY(convert_push(v, &v->now.v[i]));
			continue;
		}
		TRY(err_at_fqn(g->count ? join_group(j, g) : OK, g->into.p, g->into.n));
		g->count = 0; /* done */
	}
	return OK;
}

enum err convert_join(struct converter *v)
{
	struct join j = { .v = v };

	enum err e = join_all(&j);
	vec_free(&j.members);
	vec_free(&j.groups);
	map_free(&j.names);
	return e;
}
