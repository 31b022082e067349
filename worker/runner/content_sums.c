/* content_sums.c: see content_sums.h. */
#include "runner/content_sums.h"

#include "base/num.h"
#include "io/content.h"
#include "io/tensor_sum.h"

/* A tensor whose chunks were planned: its size fits. */
static uint64_t bytes_of(const struct sd_tensor *t)
{
	return box_volume(t->ndim, t->shape) * dtype_bytes(t->dtype);
}

static FALLIBLE enum err finish(const struct sdict *sd, const uint64_t *sums, char hex[33])
{
	unsigned char digest[16];

	TRY(content_digest_of_sums(sd, sums, digest));
	digest_hex(digest, hex);
	return OK;
}

/* Adds up the parts of a tensor's chunks. False: one of them was not summed. */
static bool sum_tensor(const struct run *run, const struct build_target *t, const struct sd_tensor *tensor, uint64_t *out)
{
	uint64_t sum = 0;

	for (uint32_t c = tensor->first_chunk; c < tensor->first_chunk + tensor->chunk_count; c++) {
		const struct run_dst *d = &run->dsts[t->chunk_places[c].dst];
		if (!d->shape_at)
			return false;
		for (uint64_t i = 0; i < d->part_count; i++)
			sum ^= run->parts[d->first_part + i].content;
	}
	*out = tensor_sum_finish(sum, bytes_of(tensor));
	return true;
}

enum err content_of_target(const struct run *run, const struct build_target *t, char hex[33])
{
	const struct sdict *sd = t->sd;
	CLEANUP(mem_free_ptr) uint64_t *sums = mem_zalloc(sd->tensor_count, sizeof *sums);
	bool all = !t->delta && !t->given;

	NEED(sums, "no memory for %ju sums", (uintmax_t)sd->tensor_count);
	hex[0] = '\0';
	for (uint64_t i = 0; all && i < sd->tensor_count; i++) {
		if (sd->tensors[i].tied_to)
			sums[i] = sums[sd->tensors[i].tied_to - 1];
		else
			all = sum_tensor(run, t, &sd->tensors[i], &sums[i]);
	}
	return all ? finish(sd, sums, hex) : OK;
}

/* ---- verify ---- */

/* The tensor's chunks have all of its elements, each once, and the tensor's bytes can be counted. */
static bool is_tiled(const struct sdict *sd, const struct sd_tensor *t)
{
	uint64_t numel, bytes, sum = 0;

	if (t->blocks || box_numel(t->ndim, t->shape, &numel) || num_mul(numel, dtype_bytes(t->dtype), &bytes)) {
		err_clear();
		return false;
	}
	for (uint32_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		sum += box_volume(t->ndim, sd_sizes(&sd->chunks[c], t->ndim));
	return sum == numel;
}

enum err content_want(struct run_build *b, const struct sdict *sd, uint32_t first)
{
	each(t, sd->tensors, sd->tensor_count) {
		uint64_t at = 1 + b->dims.n;
		if (!is_tiled(sd, t))
			continue;
		TRY(vec_reserve(&b->dims, t->ndim));
		if (t->ndim)
			memcpy(b->dims.v + b->dims.n, t->shape, t->ndim * sizeof *t->shape);
		b->dims.n += t->ndim;
		for (uint32_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++) {
			struct run_src *s = &b->srcs.v[first + c];
			if (s->kind != RUN_SRC_RAW && tensor_sum_is_cheap(t->ndim, sd->chunks[c].dims, t->shape, dtype_bytes(t->dtype)))
				s->shape_at = at;
		}
	}
	return OK;
}

/* Are the item's bytes the elements of its box in C order, and nothing else? */
static bool is_in_order(const struct run *run, const struct run_src *s, const struct src_info *info)
{
	const int64_t *sizes = run->dims + s->dims_at + s->ndim;
	uint64_t stride = 1;

	if (info->conj || info->neg || info->deflated || info->q8_0 || !info->dense || info->storage_offset || info->dtype != s->dtype)
		return false;
	for (uint32_t d = s->ndim; d-- > 0;) {
		if (sizes[d] != 1 && (uint64_t)info->strides[d] != stride)
			return false;
		stride *= (uint64_t)sizes[d];
	}
	return info->payload_bytes == stride * dtype_bytes((enum dtype)s->dtype);
}

void content_note_scan(struct run *run, struct run_scan *scan, const struct src_info *info, const unsigned char *bytes)
{
	const struct run_src *s = &run->srcs[scan->src];
	struct tensor_sum sum;

	if (!s->shape_at || !info || !is_in_order(run, s, info) ||
	    !tensor_sum_begin(&sum, s->ndim, run->dims + s->dims_at, run->dims + s->shape_at - 1, dtype_bytes((enum dtype)s->dtype),
			      scan->begin))
		return;
	tensor_sum_add(&sum, bytes, scan->end - scan->begin);
	scan->content = tensor_sum_end(&sum);
	scan->is_summed = true;
}

/* Adds up a source's scans. False: some of it was not read, or not in order. */
static bool sum_source(const struct run *run, uint32_t src, uint64_t *sum)
{
	const struct run_src *s = &run->srcs[src];
	uint64_t end = 0, bytes = box_volume(s->ndim, run->dims + s->dims_at + s->ndim) * dtype_bytes((enum dtype)s->dtype);

	for (uint32_t i = 0; s->shape_at && i < s->scan_count; i++) {
		const struct run_scan *scan = &run->scans[s->first_scan + i];
		if (!scan->is_summed || scan->begin != end)
			return false;
		*sum ^= scan->content;
		end = scan->end;
	}
	return s->shape_at && end == bytes;
}

enum err content_of_sources(const struct run *run, const struct sdict *sd, uint32_t first, char hex[33])
{
	CLEANUP(mem_free_ptr) uint64_t *sums = mem_zalloc(sd->tensor_count, sizeof *sums);
	bool all = true;

	NEED(sums, "no memory for %ju sums", (uintmax_t)sd->tensor_count);
	hex[0] = '\0';
	for (uint64_t i = 0; all && i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		uint64_t sum = 0;
		all = t->chunk_count > 0 || is_tiled(sd, t);
		for (uint32_t c = 0; all && c < t->chunk_count; c++)
			all = sum_source(run, first + t->first_chunk + c, &sum);
		if (all)
			sums[i] = tensor_sum_finish(sum, bytes_of(t));
	}
	return all ? finish(sd, sums, hex) : OK;
}
