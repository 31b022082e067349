/* dtensor.c: placements → runs of rows per dim (see dtensor.h).
 *
 * Placements are applied from left to right, each to what the one before has left of its dim. Every one of them maps the rows that
 * it leaves, in order, to rows that it was given. So lengths are computed forwards, by a formula each; then the rank's rows, 0 to
 * length - 1, are taken back through the maps, where a _StridedShard may cut a run in several. Runs only become more on that way and
 * never touch, so nothing is held that is not part of the result: PyTorch walks lists of all row numbers here. */
#include "tensor/dtensor.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"

/* One placement at work on one dim. _StridedShard: the rows are cut in pieces of `piece` rows (the last of `rest`), the rank takes
 * `length` rows of each from `start` (of the last: rest_length from rest_start). Shard: one piece. */
struct step {
	int64_t piece, start, length;
	int64_t full;                    /* pieces that have all their rows */
	int64_t rest_start, rest_length;
};

void dtensor_chunk(int64_t size, int64_t n, int64_t i, int64_t *start_out, int64_t *length_out)
{
	uint64_t s = (uint64_t)size, piece = num_div_up(s, (uint64_t)n);
	uint64_t a = num_min((uint64_t)i * piece, s), b = num_min(a + piece, s);

	*start_out = (int64_t)a;
	*length_out = (int64_t)(b - a);
}

/* Cuts *size rows and leaves the rank's share in *size. */
static struct step step_of(const struct placement *p, int64_t n, int64_t i, int64_t *size)
{
	int64_t pieces = p->kind == PLACE_STRIDED_SHARD ? p->split_factor : 1;
	struct step s = { .piece = (int64_t)num_div_up((uint64_t)*size, (uint64_t)pieces), .full = 1 };

	if (s.piece == 0) {
		*size = 0;
		return s;
	}
	s.full = *size / s.piece;
	dtensor_chunk(s.piece, n, i, &s.start, &s.length);
	dtensor_chunk(*size % s.piece, n, i, &s.rest_start, &s.rest_length);
	if (s.length == s.piece) /* each piece whole: all rows, in one */
		s = (struct step){ .piece = *size, .length = *size, .full = 1 };
	*size = s.full * s.length + s.rest_length;
	return s;
}

/* How many runs the rows a..b-1 that a step has left are among the rows that it was given. a < b. */
static uint64_t runs_of(const struct step *s, int64_t a, int64_t b)
{
	int64_t end = s->full * s->length;
	uint64_t n = b > end;

	if (a < end)
		n += (uint64_t)((b < end ? b : end) - 1) / (uint64_t)s->length - (uint64_t)a / (uint64_t)s->length + 1;
	return n;
}

/* Takes one run back through a step. */
static struct dtensor_run *take_back(const struct step *s, struct dtensor_run run, struct dtensor_run *out)
{
	int64_t end = s->full * s->length, pos = run.start, left = run.length, local = run.local;

	while (left > 0) {
		int64_t take, at;
		if (pos < end) {
			int64_t inside = pos % s->length;
			take = (int64_t)num_min((uint64_t)left, (uint64_t)(s->length - inside));
			at = pos / s->length * s->piece + s->start + inside;
		} else {
			take = left;
			at = s->full * s->piece + s->rest_start + (pos - end);
		}
		*out++ = (struct dtensor_run){ at, take, local };
		pos += take;
		left -= take;
		local += take;
	}
	return out;
}

static FALLIBLE enum err too_many(void)
{
	return ERR(LIMIT_EXCEEDED, "a rank would hold more than %d pieces of the tensor", DTENSOR_BOXES_MAX);
}

static FALLIBLE enum err expand(struct dtensor_part *p, uint32_t d, const struct step *s)
{
	const struct dtensor_run *from = p->runs[d] ? p->runs[d] : &p->whole[d];
	uint64_t n = 0;

	for (uint32_t i = 0; i < p->run_count[d]; i++) {
		n += runs_of(s, from[i].start, from[i].start + from[i].length);
		if (n > DTENSOR_BOXES_MAX)
			return too_many();
	}
	if (n == 1) { /* then there was one before */
		take_back(s, p->whole[d], &p->whole[d]);
		return OK;
	}
	struct dtensor_run *to = mem_alloc(n * sizeof *to), *end = to;
	NEED(to, "no memory for %ju pieces of a tensor", (uintmax_t)n);
	for (uint32_t i = 0; i < p->run_count[d]; i++)
		end = take_back(s, from[i], end);
	must(end == to + n);
	mem_free(p->runs[d]);
	p->runs[d] = to;
	p->run_count[d] = (uint32_t)n;
	return OK;
}

/* The dim of the tensor that a placement cuts; ndim: none. */
static uint32_t dim_of(const struct placement *p, uint32_t ndim)
{
	return placement_cuts(p) ? (uint32_t)(p->dim < 0 ? p->dim + (int64_t)ndim : p->dim) : ndim;
}

/* The runs of a dim. Of a part without elements only the place of the first row is told. */
static FALLIBLE enum err cut_dim(struct dtensor_part *p, uint32_t d, int64_t size, uint32_t count, const struct step *steps)
{
	int64_t left = p->sizes[d];

	p->run_count[d] = 1;
	p->whole[d] = (struct dtensor_run){ 0, p->empty && left ? 1 : left, 0 };
	if (left == 0)
		p->whole[d].start = size; /* PyTorch pins empty shards to the end, so that they are all alike */
	while (left && count-- > 0)
		TRY(expand(p, d, &steps[count]));
	return OK;
}

enum err dtensor_part_make(uint32_t ndim, const int64_t *shape, uint32_t mesh_ndim, const int64_t *mesh,
			   const int64_t *coord, const struct placement *placements, struct dtensor_part *out)
{
	struct step steps[MESH_DIMS_MAX], of_dim[MESH_DIMS_MAX];

	must(ndim <= NDIM_MAX && mesh_ndim <= MESH_DIMS_MAX);
	dtensor_part_free(out);
	out->ndim = ndim;
	out->empty = false;
	out->count = 1;
	if (ndim)
		memcpy(out->sizes, shape, ndim * sizeof *shape);
	for (uint32_t m = 0; m < mesh_ndim; m++) {
		uint32_t d = dim_of(&placements[m], ndim);
		if (!placement_cuts(&placements[m]))
			continue;
		if (d >= ndim)
			return ERR(LAYOUT_INVALID, "Shard(%d) of a tensor of %u dims", placements[m].dim, ndim);
		steps[m] = step_of(&placements[m], mesh[m], coord[m], &out->sizes[d]);
	}
	out->empty = box_empty(ndim, out->sizes);
	for (uint32_t d = 0; d < ndim; d++) {
		uint32_t n = 0;
		for (uint32_t m = 0; m < mesh_ndim; m++)
			if (dim_of(&placements[m], ndim) == d)
				of_dim[n++] = steps[m];
		TRY(cut_dim(out, d, shape[d], n, of_dim));
		out->count *= out->run_count[d];
		if (out->count > DTENSOR_BOXES_MAX)
			return too_many();
	}
	return OK;
}

void dtensor_part_box(const struct dtensor_part *p, uint64_t i, int64_t *dims_out, int64_t *local_out)
{
	for (uint32_t d = p->ndim; d-- > 0;) {
		const struct dtensor_run *r = p->runs[d] ? &p->runs[d][i % p->run_count[d]] : &p->whole[d];
		i /= p->run_count[d];
		dims_out[d] = r->start;
		dims_out[p->ndim + d] = p->empty ? p->sizes[d] : r->length;
		if (local_out)
			local_out[d] = r->local;
	}
}

void dtensor_part_free(struct dtensor_part *p)
{
	for (uint32_t d = 0; d < p->ndim; d++) {
		mem_free(p->runs[d]);
		p->runs[d] = NULL;
	}
}
