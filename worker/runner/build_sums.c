/* build_sums.c: which sources of a run need no scan, because the copying itself can compare them (see build.h).
 *
 * CRC32s of ranges add up to that of the whole in any order, but only if the ranges are all of the source and none comes twice. Targets of
 * a checkpoint share no element, so their boxes in one source are apart, and it is enough to count elements. Views (what conversion rules
 * made) may overlap in the chunk that they are views of: several of one chunk must be ranges of it that do not. */
#include <stdlib.h>

#include "base/num.h"
#include "plan/overlap.h"
#include "runner/build.h"
#include "tensor/linear.h"

enum { RUN_BYTES_MIN = 256 };          /* moving a CRC32 to its place costs as much as so many bytes of it */

struct build_sum {
	uint64_t elements;             /* that are taken, of it and of its views */
	bool used;                     /* by a target; a view or not */
	bool viewed;                   /* by a view that is used */
	bool never;
};

/* A view that takes elements: a range of its source. */
struct build_sum_view {
	uint32_t base;
	uint64_t first, end;
};

enum err build_sums_begin(const struct run_build *b, struct build_sums *out)
{
	*out = (struct build_sums){ .srcs = mem_zalloc(b->srcs.n, sizeof *out->srcs), .count = b->srcs.n };
	NEED(out->srcs, "no memory for %ju sources", (uintmax_t)b->srcs.n);
	return OK;
}

void build_sums_free(struct build_sums *s)
{
	mem_free(s->srcs);
	vec_free(&s->views);
}

/* Bytes of the box that follow each other in the source. */
static uint64_t run_bytes(const struct run_build *b, const struct run_src *s, const int64_t *size)
{
	const int64_t *sizes = b->dims.v + s->dims_at + s->ndim, *strides = s->view_of ? b->dims.v + s->view_at + 1 : NULL;
	int64_t stride = 1, run = 1;

	for (uint32_t d = s->ndim; d-- > 0;) {
		if (size[d] != 1 && (strides ? strides[d] : stride) != run)
			break;
		run *= size[d];
		stride *= sizes[d];
	}
	return (uint64_t)run * dtype_bytes((enum dtype)s->dtype);
}

static FALLIBLE enum err note_view(const struct run_build *b, struct build_sums *s, const struct run_src *v)
{
	const int64_t *view = b->dims.v + v->view_at, *sizes = b->dims.v + v->dims_at + v->ndim;
	struct build_sum_view *range;

	s->srcs[v->view_of - 1].viewed = true;
	TRY(vec_push(&s->views, &range));
	*range = (struct build_sum_view){ v->view_of - 1, (uint64_t)view[0], UINT64_MAX };
	if (linear_is_packed(v->ndim, view + 1, sizes))
		range->end = range->first + box_volume(v->ndim, sizes);
	return OK;
}

enum err build_sums_add(const struct run_build *b, struct build_sums *s, uint32_t src, const int64_t *dims)
{
	const struct run_src *v = &b->srcs.v[src];
	uint32_t base = run_src_base(v, src), n = v->ndim;
	const int64_t *box = b->dims.v + v->dims_at;
	int64_t off[NDIM_MAX], size[NDIM_MAX];

	if (v->zeros || !box_intersect(n, box, box + n, dims, dims + n, off, size))
		return OK;
	if (v->view_of && !s->srcs[src].used)
		TRY(note_view(b, s, v));
	s->srcs[src].used = true;
	uint64_t taken = box_volume(n, size), run = run_bytes(b, v, size);
	s->srcs[base].elements += taken;
	if (run < RUN_BYTES_MIN && run < taken * dtype_bytes((enum dtype)v->dtype))
		s->srcs[base].never = true;
	return OK;
}

void build_sums_add_raw(const struct run_build *b, struct build_sums *s, uint32_t src)
{
	struct build_sum *sum = &s->srcs[src];

	sum->never = sum->used;
	sum->used = true;
	sum->elements = b->srcs.v[src].length;
}

static int by_range(const void *a, const void *b)
{
	const struct build_sum_view *x = a, *y = b;

	return num_order(x->base, y->base) ?: num_order(x->first, y->first);
}

/* Views of one chunk that overlap, or may: its bytes may come twice. */
static void find_overlaps(struct build_sums *s)
{
	if (s->views.n)
		qsort(s->views.v, s->views.n, sizeof *s->views.v, by_range);
	for (uint64_t i = 1; i < s->views.n; i++) {
		const struct build_sum_view *a = &s->views.v[i - 1], *b = &s->views.v[i];
		if (a->base == b->base && (a->end > b->first || b->end == UINT64_MAX))
			s->srcs[b->base].never = true;
	}
}

static FALLIBLE enum err settle(struct run_build *b, struct run_src *s, const struct build_sum *sum, uint8_t *taken)
{
	uint64_t bytes = 0, item = s->kind == RUN_SRC_RAW ? 1 : dtype_bytes((enum dtype)s->dtype);

	TRY(build_payload_bytes(b, s, &bytes));
	*taken = BUILD_TAKEN;
	if (!build_comparable(b, s, bytes))
		atomic_store(&s->unverified, s->length);
	bool has_crc = s->crc_wanted || atomic_load(&s->crc_state) == RUN_CRC_KNOWN;
	if (sum->never || (sum->used && sum->viewed) || s->strides_at || !bytes || sum->elements * item != bytes ||
	    (s->kind != RUN_SRC_ITEM && s->length != bytes))
		return OK;
	*taken = BUILD_TAKEN_WHOLE;
	if (!has_crc && (s->kind != RUN_SRC_ITEM || s->digest_count)) /* else its head has one */
		return OK;
	if (has_crc)
		atomic_store(&s->crc_state, RUN_CRC_KNOWN);
	atomic_store(&s->sum_left, bytes);
	s->summed = true;
	return OK;
}

static bool is_stored(const struct run_build *b, const struct run_src *s)
{
	enum run_file_kind kind = (enum run_file_kind)b->files.v[s->file].kind;

	return !s->zeros && !s->view_of && (kind == RUN_FILE_SOURCE || kind == RUN_FILE_SPOOL);
}

enum err build_sums_end(struct run_build *b, struct build_sums *s)
{
	CLEANUP(mem_free_ptr) uint8_t *taken = mem_zalloc(s->count + 1, sizeof *taken);

	NEED(taken, "no memory for %ju sources", (uintmax_t)s->count);
	find_overlaps(s);
	for (uint64_t i = 0; i < s->count; i++)
		if ((s->srcs[i].used || s->srcs[i].viewed) && is_stored(b, &b->srcs.v[i]))
			TRY(settle(b, &b->srcs.v[i], &s->srcs[i], &taken[i]));
	return build_record_sums(b, taken);
}

static enum err overlap_seen(void *seen, uint32_t, uint32_t)
{
	*(bool *)seen = true;
	return ERR_PLAN_INVALID; /* one is enough */
}

/* Do no two chunks of the target tensor have an element in common, as replicas have? */
static FALLIBLE enum err are_apart(const struct sdict *target, const struct sd_tensor *t, bool *out)
{
	CLEANUP(mem_free_ptr) struct overlap_box *boxes = mem_zalloc(t->chunk_count + 1, sizeof *boxes);
	struct err_info before = *err_last();
	bool seen = false;
	uint64_t n = 0;

	NEED(boxes, "no memory for %ju chunks", (uintmax_t)t->chunk_count);
	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++)
		if (!box_empty(t->ndim, target->chunks[i].dims + t->ndim))
			boxes[n++] = (struct overlap_box){ target->chunks[i].dims, (uint32_t)i };
	*out = n < 2 || overlap_self(t->ndim, boxes, n, overlap_seen, &seen) == OK;
	if (!*out)
		err_restore(&before);
	return OK;
}

static FALLIBLE enum err add_loaded(const struct run_build *b, struct build_sums *s, const struct sdict *target, const struct sd_tensor *t,
				    uint32_t first_src, const struct load_plan *plan)
{
	bool apart;

	TRY(are_apart(target, t, &apart));
	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++)
		for (uint64_t k = plan->first[i]; k < plan->first[i + 1]; k++) {
			uint32_t src = first_src + plan->sources[k], base = run_src_base(&b->srcs.v[src], src);
			TRY(build_sums_add(b, s, src, target->chunks[i].dims));
			s->srcs[base].never = s->srcs[base].never || !apart;
		}
	return OK;
}

enum err build_load_sums(struct run_build *b, const struct sdict *target, uint32_t first_src, const struct load_plan *plan)
{
	struct build_sums s;
	enum err e = build_sums_begin(b, &s);

	for (uint64_t i = 0; !e && i < target->tensor_count; i++)
		e = add_loaded(b, &s, target, &target->tensors[i], first_src, plan);
	e = e ?: build_sums_end(b, &s);
	build_sums_free(&s);
	return e;
}
