/* state_dict_op_delta.c: see state_dict_op_delta.h.
 *
 * The table begins at the first page behind the image. Its head names the structure: a digest of the pieces' FQNs, dtypes, boxes and
 * places, so that a table of another cut, or of a source with other shards, is none. */
#include "ops/state_dict_op_delta.h"

#include "base/num.h"
#include "os/fs.h"
#include "runner/move.h"

enum { PAGE = 4096, DIGEST_BYTES = 16 };
#define DELTA_MAGIC 0x31746c6564706364ull /* "dcpdelt1" */

static uint64_t table_at(uint64_t image_bytes)
{
	return (image_bytes + PAGE - 1) / PAGE * PAGE;
}

static uint64_t pieces_of(const struct state_dict_op_move *m)
{
	const struct tree_tensor *t = &m->from->tensor;
	int64_t dims[2 * NDIM_MAX + 1];
	struct move_cut cut;
	uint64_t n = 0;

	move_cut_begin(&cut, t->ndim, m->dims, num_max(MOVE_PIECE_BYTES / dtype_bytes(t->dtype), 1));
	while (move_cut_next(&cut, dims, dims + t->ndim))
		n++;
	return n;
}

enum err state_dict_op_delta_size(const struct state_dict_op_plan *plan, const struct state_dict_op_images *images,
				  struct state_dict_op_delta *out)
{
	out->bytes = mem_zalloc(images->world_size, sizeof *out->bytes);
	NEED(out->bytes, "no memory for %u ranks", images->world_size);
	for (uint64_t i = 0; i < plan->move_count; i++)
		out->bytes[plan->moves[i].to_rank] += pieces_of(&plan->moves[i]) * DIGEST_BYTES;
	for (uint32_t r = 0; r < images->world_size; r++)
		TRY(num_add(table_at(images->image_bytes[r]) + sizeof(struct delta_head), out->bytes[r], &out->bytes[r]));
	return OK;
}

/* The digest of all that says which bytes a piece is, and where they lie. */
static void add_structure(const struct run_build *b, const struct run_move *m, struct digest_stream *s)
{
	const struct run_dst *d = &b->dsts.v[m->dst];
	struct { uint64_t offset, bytes; uint32_t dtype, ndim; } place = { d->offset, d->payload_bytes, d->dtype, d->ndim };

	digest_add(s, b->strings.v + d->fqn_at, d->fqn_len);
	digest_add(s, &place, sizeof place);
	if (d->ndim)
		digest_add(s, b->dims.v + m->dims_at, 2 * d->ndim * sizeof *b->dims.v);
}

/* Visits the ranks of the run, whose moves lie in a row each. */
static bool next_part(const struct run_build *b, struct state_dict_op_delta_part *p)
{
	struct digest_stream s;
	struct digest digest;
	uint64_t at = p->first + p->head.pieces;

	if (at >= b->moves.n)
		return false;
	*p = (struct state_dict_op_delta_part){ .first = at, .rank = b->dsts.v[b->moves.v[at].dst].rank, .head = { .magic = DELTA_MAGIC } };
	digest_begin_one(&s, DIGEST_XXH3);
	for (; at < b->moves.n && b->dsts.v[b->moves.v[at].dst].rank == p->rank; at++)
		add_structure(b, &b->moves.v[at], &s);
	digest_end(&s, &digest);
	memcpy(p->head.structure, digest.xxh3_128, DIGEST_BYTES);
	p->head.pieces = at - p->first;
	return true;
}

/* Has the segment a table of this head? */
static FALLIBLE enum err read_head(const struct job *j, const struct rank_segment *seg, uint64_t at,
				   const struct state_dict_op_delta_part *p, bool *out)
{
	struct delta_head head;

	*out = false;
	if (at > seg->bytes || sizeof head + p->head.pieces * DIGEST_BYTES > seg->bytes - at)
		return OK;
	TRY(input_segment_error(fs_pread(j->fds[seg->fd], &head, sizeof head, at, "segment")));
	*out = memcmp(&head, &p->head, sizeof head) == 0;
	return OK;
}

static FALLIBLE enum err read_newest(const struct job *j, const struct rank_segment *seg, const struct state_dict_op_delta_part *p,
				     struct run_build *b)
{
	CLEANUP(mem_free_ptr) unsigned char *digests = NULL;
	uint64_t at = table_at(seg->image_bytes);
	bool there;

	TRY(read_head(j, seg, at, p, &there));
	if (!there)
		return OK;
	digests = mem_alloc(p->head.pieces * DIGEST_BYTES);
	NEED(digests, "no memory for %ju digests", (uintmax_t)p->head.pieces);
	TRY(input_segment_error(fs_pread(j->fds[seg->fd], digests, p->head.pieces * DIGEST_BYTES, at + sizeof p->head, "segment")));
	for (uint64_t i = 0; i < p->head.pieces; i++) {
		struct block_digest *d = &b->digests.v[2 * (p->first + i)];
		memcpy(d->xxh3_128, digests + i * DIGEST_BYTES, DIGEST_BYTES);
		d->end = 1;
	}
	return OK;
}

enum err state_dict_op_delta_begin(const struct job *j, const struct rank_segments *newest, const struct state_dict_op_images *images,
				   struct run_build *b, struct state_dict_op_delta *d)
{
	struct state_dict_op_delta_part p = { .rank = 0 }, *kept;
	bool warm;

	while (next_part(b, &p)) {
		const struct rank_segment *made = &j->segments.v[p.rank];
		uint64_t at = table_at(images->image_bytes[p.rank]), nothing = 0;
		if (newest && p.rank < newest->count)
			TRY(err_at_rank(read_newest(j, &newest->v[p.rank], &p, b), p.rank));
		TRY(err_at_rank(read_head(j, made, at, &p, &warm), p.rank));
		for (uint64_t i = 0; warm && i < p.head.pieces; i++)
			b->moves.v[p.first + i].warm = true;
		TRY(err_at_rank(fs_pwrite(j->fds[made->fd], &nothing, sizeof nothing, at, "segment"), p.rank));
		TRY(vec_push(&d->parts, &kept));
		*kept = p;
	}
	return OK;
}

/* Counts a rank's pieces, and gathers their digests. Reductions have none: their pieces count as changed. */
static FALLIBLE enum err count(const struct run *run, const struct state_dict_op_delta_part *p, unsigned char *digests,
			       struct map *changed, struct state_dict_op_delta *d)
{
	uint32_t last = UINT32_MAX;

	for (uint64_t i = 0; i < p->head.pieces; i++) {
		const struct run_move *m = &run->moves[p->first + i];
		const struct block_digest *was = &run->digests[2 * (p->first + i)], *now = was + 1;
		bool same = was->end && now->end && memcmp(was->xxh3_128, now->xxh3_128, DIGEST_BYTES) == 0;
		memcpy(digests + i * DIGEST_BYTES, now->xxh3_128, DIGEST_BYTES);
		*(same ? &d->kept_bytes : &d->changed_bytes) += move_bytes(run, m);
		if (same || m->dst == last)
			continue;
		last = m->dst;
		TRY(map_put(changed, run_dst_fqn(run, &run->dsts[last]), 1));
	}
	return OK;
}

enum err state_dict_op_delta_end(const struct job *j, const struct state_dict_op_images *images, const struct run *run,
				 struct state_dict_op_delta *d)
{
	CLEANUP(map_free) struct map changed = { 0 };

	each(p, d->parts.v, d->parts.n) {
		CLEANUP(mem_free_ptr) unsigned char *digests = mem_alloc(p->head.pieces * DIGEST_BYTES + 1);
		uint64_t at = table_at(images->image_bytes[p->rank]);
		int fd = j->fds[j->segments.v[p->rank].fd];
		NEED(digests, "no memory for %ju digests", (uintmax_t)p->head.pieces);
		TRY(count(run, p, digests, &changed, d));
		TRY(fs_pwrite(fd, digests, p->head.pieces * DIGEST_BYTES, at + sizeof p->head, "segment"));
		TRY(fs_pwrite(fd, &p->head, sizeof p->head, at, "segment"));
	}
	d->changed_tensors = changed.raw.count;
	return OK;
}

void state_dict_op_delta_free(struct state_dict_op_delta *d)
{
	mem_free(d->bytes);
	vec_free(&d->parts);
	*d = (struct state_dict_op_delta){ 0 };
}
