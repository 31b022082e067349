/* build_stream.c: the tables of a run that reads tensors as streams (see build.h). */
#include "base/num.h"
#include "runner/build.h"

enum err build_stream_tensor(struct run_build *b, const struct sdict *plan, uint64_t tensor, uint32_t first_src, uint32_t *dst_out)
{
	const struct sd_tensor *t = &plan->tensors[tensor];
	const struct run_src *src = &b->srcs.v[first_src + t->first_chunk];
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint64_t bytes, dims_at;
	struct run_dst *d;

	TRY(box_numel(t->ndim, t->shape, &bytes));
	TRY(num_mul(bytes, dtype_bytes(t->dtype), &bytes));
	for (uint32_t i = 0; i < t->ndim; i++)
		dims[t->ndim + i] = t->shape[i];
	TRY(run_add_dims(b, dims, t->ndim, &dims_at));
	*dst_out = (uint32_t)b->dsts.n;
	TRY(vec_push(&b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)t->dtype, .bare = true, .file = src->file, .ndim = t->ndim,
			       .payload_bytes = bytes, .length = bytes, .fqn_at = src->fqn_at, .fqn_len = src->fqn_len, .dims_at = dims_at,
			       .first_piece = b->pieces.n, .piece_count = t->chunk_count };
	TRY(vec_reserve(&b->pieces, t->chunk_count));
	for (uint32_t i = 0; i < t->chunk_count; i++)
		b->pieces.v[b->pieces.n++] = first_src + t->first_chunk + i;
	return OK;
}

static FALLIBLE enum err add_task(struct run_build *b, uint64_t first, bool scan)
{
	struct run_task *task;

	TRY(vec_push(&b->tasks, &task));
	*task = (struct run_task){ .first = first, .count = 1, .scan = scan };
	return OK;
}

/* Sources are checked just before they are read as streams. Segments have nothing to be compared with. */
static FALLIBLE enum err scan_sources(struct run_build *b, uint32_t dst)
{
	const struct run_dst *d = &b->dsts.v[dst];

	for (uint32_t i = 0; b->opts.verify && i < d->piece_count; i++) {
		uint32_t src = b->pieces.v[d->first_piece + i];
		uint64_t first = b->scans.n;
		if (b->files.v[b->srcs.v[src].file].kind == RUN_FILE_SEGMENT)
			continue;
		TRY(build_scans(b, src));
		for (uint64_t k = first; k < b->scans.n; k++)
			TRY(add_task(b, k, true));
	}
	return OK;
}

enum err build_streams(struct run_build *b)
{
	struct run_rank *rank;

	b->opts.mode = RUN_STREAMS;
	b->opts.task_bytes = BUILD_STREAM_BYTES;
	TRY(vec_push(&b->ranks, &rank));
	for (uint64_t i = 0; i < b->streams.n; i++) {
		const struct run_stream *s = &b->streams.v[i];
		TRY(scan_sources(b, s->base));
		if (s->kind == RUN_STREAM_ENCODE)
			TRY(scan_sources(b, s->now));
		TRY(add_task(b, i, false));
		TRY(num_add(b->ranks.v[0].bytes_total, s->bytes, &b->ranks.v[0].bytes_total));
	}
	b->ranks.v[0].task_count = b->tasks.n;
	return OK;
}
