/* load_plan.c: who feeds whom on a load (see load_plan.h).
 *
 * Per tensor: find the pairs of target and source chunks that meet, then prove that each target chunk is covered. If no two source
 * chunks overlap, the volumes of the intersections must add up and that is all. If some do (rank-local checkpoints hold every
 * replica; a writer may have been careless), equal ones are dropped first; where overlaps remain, chunks are taken largest
 * first and what they cover is cut out of the target's box until nothing is left. */
#include "plan/load_plan.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "plan/overlap.h"
#include "tensor/box.h"

enum {
	PAIRS_MAX = 1 << 25,             /* a plan larger than that does not fit anywhere */
	FEW = 16,                        /* so few pairs are compared one by one */
	CUTS_MAX = 1 << 24,              /* boxes looked at while cutting, in one plan */
};

struct pair {
	uint32_t target, source;         /* chunk indices */
};

struct maker {
	const struct sdict *source, *target;
	uint32_t *found;                 /* for each key of the target what the source's map says */
	uint32_t *counts;                /* pairs per target chunk of the current tensor */
	uint64_t counts_cap;
	struct load_plan plan;           /* `sources` on the heap until it is complete */
	uint64_t sources_cap;
	struct overlap_box *from, *to;   /* of the current tensor */
	uint64_t from_cap, to_cap;
	struct pair *pairs;
	uint64_t pair_count, pairs_cap;
	int64_t *rest, *rest2;           /* boxes not yet covered, while cutting */
	uint64_t rest_cap, rest2_cap, cuts;
	uint64_t pieces_max;
	const struct load_match *match;
};

static void maker_free(struct maker *m)
{
	mem_free(m->found);
	mem_free(m->counts);
	mem_free(m->plan.sources);
	mem_free(m->from);
	mem_free(m->to);
	mem_free(m->pairs);
	mem_free(m->rest);
	mem_free(m->rest2);
}

/* Room for `want` entries in a heap array. */
static FALLIBLE enum err room(void *array_ptr, uint64_t *cap, uint64_t want, size_t bytes)
{
	void *old;

	if (want <= *cap)
		return OK;
	want = num_max(num_max(want, *cap + *cap / 2), 64);
	memcpy(&old, array_ptr, sizeof old);
	void *p = mem_grow(old, want, bytes);
	NEED(p, "no memory to plan %ju reads", (uintmax_t)want);
	memcpy(array_ptr, &p, sizeof p);
	*cap = want;
	return OK;
}

static FALLIBLE enum err tick(const struct maker *m)
{
	return m->match->tick ? m->match->tick(m->match->user) : OK;
}

/* Chunks with elements; each must lie inside the tensor. */
static FALLIBLE enum err collect(const struct sdict *sd, const struct sd_tensor *t, struct overlap_box **out,
				 uint64_t *cap, uint64_t *count_out)
{
	uint64_t n = 0;

	TRY(room(out, cap, t->chunk_count, sizeof **out));
	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++) {
		const int64_t *d = sd->chunks[i].dims;
		if (box_empty(t->ndim, d + t->ndim))
			continue;
		TRY(err_at_rank(err_at_fqn(box_check(t->ndim, d, d + t->ndim, t->shape), t->fqn.p, t->fqn.n), sd->chunks[i].rank));
		(*out)[n++] = (struct overlap_box){ d, (uint32_t)i };
	}
	*count_out = n;
	return OK;
}

static enum err add_pair(void *ctx, uint32_t target, uint32_t source)
{
	struct maker *m = ctx;

	if (m->pair_count + m->plan.source_count >= m->pieces_max)
		return ERR(LIMIT_EXCEEDED, "more than %ju pieces to read", (uintmax_t)m->pieces_max);
	TRY(room(&m->pairs, &m->pairs_cap, m->pair_count + 1, sizeof *m->pairs));
	m->pairs[m->pair_count++] = (struct pair){ target, source };
	return OK;
}

static enum err overlap_seen(void *ctx, uint32_t, uint32_t)
{
	*(bool *)ctx = true;
	return ERR_PLAN_INVALID; /* one is enough */
}

static FALLIBLE enum err disjoint(uint32_t ndim, const struct overlap_box *boxes, uint64_t n, bool *out)
{
	bool seen = false;
	enum err e = overlap_self(ndim, boxes, n, overlap_seen, &seen);

	if (e && !seen)
		return e;
	*out = !seen;
	return OK;
}

/* The part of a source chunk that a target chunk needs: offsets, then sizes. */
static bool common(uint32_t ndim, const int64_t *a, const int64_t *b, int64_t *dims_out)
{
	return box_intersect(ndim, a, a + ndim, b, b + ndim, dims_out, dims_out + ndim);
}

static FALLIBLE enum err hole(const struct sd_tensor *t, const struct sd_chunk *c, const int64_t *where)
{
	char o[128], s[128];
	const char *what = t->chunk_count ? "the stored chunks do not cover" : "no stored chunk covers";
	enum err e = ERR(COVERAGE_HOLE, "%s %s+%s of %.*s", what, box_print(t->ndim, where, o, sizeof o),
			 box_print(t->ndim, where + t->ndim, s, sizeof s), (int)num_min(t->fqn.n, 400), t->fqn.p);

	return err_at_rank(err_at_fqn(e, t->fqn.p, t->fqn.n), c->rank);
}

/* Appends box minus hole to m->rest2: at most two pieces per dim. */
static FALLIBLE enum err cut(struct maker *m, uint32_t ndim, const int64_t *box, const int64_t *out, uint64_t *n)
{
	int64_t left[2 * NDIM_MAX];

	memcpy(left, box, ndim * 2 * sizeof *left);
	TRY(room(&m->rest2, &m->rest2_cap, (*n + ndim * 2 + 1) * ndim * 2, sizeof *m->rest2));
	for (uint32_t d = 0; d < ndim; d++) {
		int64_t start = left[d], end = left[d] + left[ndim + d];
		int64_t cut_start = out[d], cut_end = out[d] + out[ndim + d];

		for (int side = 0; side < 2; side++) {
			int64_t a = side ? cut_end : start, b = side ? end : cut_start;
			if (a >= b)
				continue;
			int64_t *piece = m->rest2 + (*n)++ * ndim * 2;
			memcpy(piece, left, ndim * 2 * sizeof *left);
			piece[d] = a;
			piece[ndim + d] = b - a;
		}
		left[d] = cut_start;
		left[ndim + d] = cut_end - cut_start;
	}
	return OK;
}

/* Takes what `source` covers out of m->rest; *used_out: it covered something. */
static FALLIBLE enum err cover(struct maker *m, uint32_t ndim, const int64_t *source, uint64_t *rest_count, bool *used_out)
{
	int64_t part[2 * NDIM_MAX];
	uint64_t n = 0;

	*used_out = false;
	for (uint64_t i = 0; i < *rest_count; i++) {
		const int64_t *box = m->rest + i * ndim * 2;
		if (++m->cuts > CUTS_MAX)
			return ERR(LIMIT_EXCEEDED, "the stored chunks overlap in too many ways");
		if (common(ndim, box, source, part)) {
			*used_out = true;
			TRY(cut(m, ndim, box, part, &n));
		} else {
			TRY(room(&m->rest2, &m->rest2_cap, (n + 1) * ndim * 2, sizeof *m->rest2));
			memcpy(m->rest2 + n++ * ndim * 2, box, ndim * 2 * sizeof *box);
		}
	}
	int64_t *boxes = m->rest;
	uint64_t cap = m->rest_cap;
	m->rest = m->rest2;
	m->rest_cap = m->rest2_cap;
	m->rest2 = boxes;
	m->rest2_cap = cap;
	*rest_count = n;
	return OK;
}

struct piece {
	uint64_t volume;
	uint32_t source;
};

static int largest_first(const void *a, const void *b)
{
	const struct piece *x = a, *y = b;

	if (x->volume != y->volume)
		return x->volume < y->volume ? 1 : -1;
	return (x->source > y->source) - (x->source < y->source);
}

/* Overlapping sources: keeps those that add something, at the start of list[]; *where: a part that nobody covers, if any. */
static FALLIBLE enum err choose(struct maker *m, uint32_t ndim, const int64_t *target, uint32_t *list, uint64_t *count,
				const int64_t **where)
{
	CLEANUP(mem_free_ptr) struct piece *pieces = mem_zalloc(*count, sizeof *pieces);
	int64_t part[2 * NDIM_MAX];
	uint64_t rest = 1, kept = 0;
	bool used;

	NEED(pieces, "no memory to plan %ju reads", (uintmax_t)*count);
	for (uint64_t i = 0; i < *count; i++) {
		must(common(ndim, target, m->source->chunks[list[i]].dims, part));
		pieces[i] = (struct piece){ box_volume(ndim, part + ndim), list[i] };
	}
	qsort(pieces, *count, sizeof *pieces, largest_first);
	TRY(room(&m->rest, &m->rest_cap, ndim * 2 + 1, sizeof *m->rest));
	memcpy(m->rest, target, ndim * 2 * sizeof *target);
	for (uint64_t i = 0; i < *count && rest; i++) {
		TRY(tick(m));
		TRY(cover(m, ndim, m->source->chunks[pieces[i].source].dims, &rest, &used));
		if (used)
			list[kept++] = pieces[i].source;
	}
	qsort(list, kept, sizeof *list, num_cmp_u32);
	*count = kept;
	*where = rest ? m->rest : NULL;
	return OK;
}

/* The n pairs of one target chunk lie at the end of plan.sources: checks that they cover it. */
static FALLIBLE enum err check_chunk(struct maker *m, const struct sd_tensor *from, uint32_t chunk, uint64_t n,
				     bool is_disjoint)
{
	const struct sd_chunk *c = &m->target->chunks[chunk];
	uint32_t *list = m->plan.sources + m->plan.source_count, ndim = from->ndim;
	int64_t part[2 * NDIM_MAX];
	uint64_t sum = 0;

	if (box_empty(ndim, c->dims + ndim))
		return OK;
	if (!is_disjoint) {
		const int64_t *where;
		TRY(choose(m, ndim, c->dims, list, &n, &where));
		m->plan.source_count += n;
		return where ? hole(from, c, where) : OK;
	}
	for (uint64_t i = 1; i < n; i++) {
		if (list[i - 1] > list[i]) {
			qsort(list, n, sizeof *list, num_cmp_u32);
			break;
		}
	}
	for (uint64_t i = 0; i < n; i++) {
		must(common(ndim, c->dims, m->source->chunks[list[i]].dims, part));
		sum += box_volume(ndim, part + ndim);
	}
	m->plan.source_count += n;
	if (sum == box_volume(ndim, c->dims + ndim))
		return OK;
	m->plan.source_count -= n; /* only to say where the hole is */
	const int64_t *where = c->dims;
	TRY(choose(m, ndim, c->dims, list, &n, &where));
	return hole(from, c, where ? where : c->dims);
}

static FALLIBLE enum err find_pairs(struct maker *m, const struct sd_tensor *from, const struct sd_tensor *to,
				    bool *disjoint_out)
{
	uint64_t a, b;
	uint32_t ndim = from->ndim;
	int64_t part[2 * NDIM_MAX];

	m->pair_count = 0;
	TRY(collect(m->target, to, &m->to, &m->to_cap, &a));
	TRY(collect(m->source, from, &m->from, &m->from_cap, &b));
	*disjoint_out = true;
	if (b > 1) {
		TRY(disjoint(ndim, m->from, b, disjoint_out));
		if (!*disjoint_out) {
			TRY(overlap_drop_equal(ndim, m->from, &b));
			TRY(disjoint(ndim, m->from, b, disjoint_out));
		}
	}
	if (a * b > FEW)
		return overlap_join(ndim, m->to, a, m->from, b, add_pair, m);
	for (uint64_t i = 0; i < a; i++)
		for (uint64_t j = 0; j < b; j++)
			if (common(ndim, m->to[i].dims, m->from[j].dims, part))
				TRY(add_pair(m, m->to[i].id, m->from[j].id));
	return OK;
}

/* Sorts the pairs into plan.sources by target chunk. While at it, first[i + 1] is where the next source of chunk i goes. */
static FALLIBLE enum err plan_tensor(struct maker *m, const struct sd_tensor *from, const struct sd_tensor *to)
{
	uint64_t *first = m->plan.first, begin = m->plan.source_count, end = to->first_chunk + to->chunk_count;
	uint64_t at = begin;
	bool is_disjoint;

	TRY(tick(m));
	TRY(find_pairs(m, from, to, &is_disjoint));
	TRY(room(&m->plan.sources, &m->sources_cap, begin + m->pair_count + 1, sizeof *m->plan.sources));
	for (uint64_t i = to->first_chunk; i < end; i++)
		first[i + 1] = 0;
	for (uint64_t i = 0; i < m->pair_count; i++)
		first[m->pairs[i].target + 1]++;
	TRY(room(&m->counts, &m->counts_cap, to->chunk_count, sizeof *m->counts));
	for (uint64_t i = to->first_chunk; i < end; i++) {
		m->counts[i - to->first_chunk] = (uint32_t)first[i + 1];
		at += first[i + 1];
		first[i + 1] = at - first[i + 1];
	}
	for (uint64_t i = 0; i < m->pair_count; i++)
		m->plan.sources[first[m->pairs[i].target + 1]++] = m->pairs[i].source;
	for (uint64_t i = to->first_chunk; i < end; i++) {
		uint64_t n = m->counts[i - to->first_chunk], was = first[i + 1] - n;
		/* lists before may have become shorter: close the gap */
		memmove(m->plan.sources + m->plan.source_count, m->plan.sources + was, n * sizeof *m->plan.sources);
		TRY(check_chunk(m, from, (uint32_t)i, n, is_disjoint));
		first[i + 1] = m->plan.source_count;
	}
	return OK;
}

static FALLIBLE enum err check_same(const struct sd_tensor *from, const struct sd_tensor *to)
{
	char a[256], b[256];

	if (box_same_shape(from->ndim, from->shape, to->ndim, to->shape))
		return OK;
	box_print(from->ndim, from->shape, a, sizeof a);
	box_print(to->ndim, to->shape, b, sizeof b);
	enum err e = ERR(SIZE_MISMATCH, "Size mismatch between saved %s and current: %s for %.*s", a, b,
			 (int)num_min(to->fqn.n, 400), to->fqn.p);
	return err_expected(err_at_fqn(e, to->fqn.p, to->fqn.n), a, b);
}

static FALLIBLE enum err kind_mismatch(struct str fqn, bool saved_is_tensor)
{
	enum err e = ERR(KIND_MISMATCH, "%.*s is a %s in the checkpoint, a %s in the target",
			 (int)num_min(fqn.n, 400), fqn.p, saved_is_tensor ? "tensor" : "value",
			 saved_is_tensor ? "value" : "tensor");

	return err_expected(err_at_fqn(e, fqn.p, fqn.n), saved_is_tensor ? "tensor" : "value",
			    saved_is_tensor ? "value" : "tensor");
}

static struct str fqn_of(const struct sdict *sd, uint64_t item)
{
	return item < sd->tensor_count ? sd->tensors[item].fqn : sd->values[item - sd->tensor_count].fqn;
}

/* Looks every key of the target up once, tensors first; `found` says where it is in the source. */
static FALLIBLE enum err find_keys(const struct maker *m, struct load_match *match, struct arena *arena)
{
	const struct sdict *to = m->target, *from = m->source;
	uint64_t to_count = to->tensor_count + to->value_count, from_count = from->tensor_count + from->value_count, n = 0;

	match->missing_count = match->unexpected_count = 0;
	for (uint64_t i = 0; i < to_count; i++) {
		m->found[i] = sdict_find(from, fqn_of(to, i));
		match->missing_count += m->found[i] == SD_NONE;
	}
	TRY(arena_alloc(arena, match->missing_count, sizeof *match->missing, &match->missing));
	for (uint64_t i = 0; i < to_count && n < match->missing_count; i++)
		if (m->found[i] == SD_NONE)
			match->missing[n++] = fqn_of(to, i);
	if (match->a_part || from->names.raw.count + match->missing_count <= to->names.raw.count)
		return OK; /* all of the source was found */
	for (int pass = 0; pass < 2; pass++) {
		n = 0;
		for (uint64_t i = 0; i < from_count; i++) {
			if (sdict_find(to, fqn_of(from, i)) != SD_NONE)
				continue;
			if (pass == 1)
				match->unexpected[n] = fqn_of(from, i);
			n++;
		}
		if (pass == 0)
			TRY(arena_alloc(arena, n, sizeof *match->unexpected, &match->unexpected));
		match->unexpected_count = n;
	}
	return OK;
}

/* All of them; the keys that do not fit are as if they were not there. */
static FALLIBLE enum err note_missing(const struct load_match *match, struct problems *p)
{
	for (uint64_t i = 0; i < match->missing_count; i++) {
		struct str s = match->missing[i];
		enum err e = ERR(MISSING_KEY, "Missing key in checkpoint state_dict: %.*s", (int)num_min(s.n, 500), s.p);
		TRY(problems_note(p, err_at_fqn(e, s.p, s.n)));
	}
	return OK;
}

static FALLIBLE enum err match_keys(struct maker *m, struct load_match *match, struct arena *arena, struct problems *p)
{
	const struct sdict *to = m->target;
	enum err e = OK;

	m->found = mem_zalloc(to->tensor_count + to->value_count, sizeof *m->found);
	NEED(m->found, "no memory to match %ju keys", (uintmax_t)(to->tensor_count + to->value_count));
	TRY(find_keys(m, match, arena));
	if (match->strict)
		TRY(note_missing(match, p));
	for (uint64_t i = 0; i < to->tensor_count + to->value_count; i++) {
		bool tensor = i < to->tensor_count;
		if (m->found[i] == SD_NONE)
			continue;
		if (tensor == !!(m->found[i] & SD_VALUE_BIT))
			e = kind_mismatch(fqn_of(to, i), !tensor);
		else
			e = tensor ? check_same(&m->source->tensors[m->found[i]], &to->tensors[i]) : OK;
		if (e)
			m->found[i] = SD_NONE;
		TRY(problems_note(p, e));
	}
	return OK;
}

static void plan_nothing(struct maker *m, const struct sd_tensor *to, uint64_t sources)
{
	m->plan.source_count = sources;
	for (uint64_t j = to->first_chunk; j < to->first_chunk + to->chunk_count; j++)
		m->plan.first[j + 1] = sources;
}

static FALLIBLE enum err plan_all(struct maker *m, struct load_match *match, struct arena *arena, struct problems *p)
{
	TRY(match_keys(m, match, arena, p));
	TRY(arena_alloc(arena, m->target->chunk_count + 1, sizeof *m->plan.first, &m->plan.first));
	for (uint64_t i = 0; i < m->target->chunk_count;) {
		const struct sd_tensor *to = &m->target->tensors[m->target->chunks[i].tensor];
		uint32_t from = m->found[m->target->chunks[i].tensor];
		uint64_t before = m->plan.source_count;
		enum err e = from != SD_NONE ? plan_tensor(m, &m->source->tensors[from], to) : OK;

		if (e || from == SD_NONE)
			plan_nothing(m, to, before);
		TRY(problems_note(p, err_at_fqn(e, to->fqn.p, to->fqn.n)));
		i += to->chunk_count;
	}
	return OK;
}

enum err load_plan_make(const struct sdict *source, const struct sdict *target, struct load_match *match,
			struct arena *arena, struct load_plan *out)
{
	CLEANUP(maker_free) struct maker m = { .source = source, .target = target, .pieces_max = PAIRS_MAX, .match = match };
	CLEANUP(problems_free) struct problems own = { .arena = arena };
	uint32_t *sources;

	if (match->pieces_max)
		m.pieces_max = match->pieces_max;
	TRY(plan_all(&m, match, arena, match->problems ? match->problems : &own));
	TRY(problems_raise(&own));
	TRY(arena_alloc(arena, m.plan.source_count, sizeof *sources, &sources));
	if (m.plan.source_count)
		memcpy(sources, m.plan.sources, m.plan.source_count * sizeof *sources);
	*out = (struct load_plan){ m.plan.first, sources, m.plan.source_count };
	return OK;
}
