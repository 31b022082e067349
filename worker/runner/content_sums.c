/* content_sums.c: see content_sums.h. */
#include "runner/content_sums.h"

#include <stdlib.h>

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

/* Adds up the parts of a tensor's chunks, whose dsts these are. False: one of them was not summed. */
static bool sum_tensor(const struct run *run, const struct sd_tensor *tensor, const uint32_t *dsts, uint64_t *out)
{
	uint64_t sum = 0;

	for (uint32_t c = tensor->first_chunk; c < tensor->first_chunk + tensor->chunk_count; c++) {
		const struct run_dst *d = dsts[c] == UINT32_MAX ? NULL : &run->dsts[dsts[c]];
		if (!d || !d->shape_at)
			return false;
		for (uint64_t i = 0; i < d->part_count; i++)
			sum ^= run->parts[d->first_part + i].content;
	}
	*out = tensor_sum_finish(sum, bytes_of(tensor));
	return true;
}

static FALLIBLE enum err content_of(const struct run *run, const struct sdict *sd, const uint32_t *dsts, char hex[33])
{
	CLEANUP(mem_free_ptr) uint64_t *sums = mem_zalloc(sd->tensor_count, sizeof *sums);
	bool all = true;

	NEED(sums, "no memory for %ju sums", (uintmax_t)sd->tensor_count);
	for (uint64_t i = 0; all && i < sd->tensor_count; i++) {
		if (sd->tensors[i].tied_to)
			sums[i] = sums[sd->tensors[i].tied_to - 1];
		else
			all = sum_tensor(run, &sd->tensors[i], dsts, &sums[i]);
	}
	return all ? finish(sd, sums, hex) : OK;
}

enum err content_of_target(const struct run *run, const struct build_target *t, char hex[33])
{
	CLEANUP(mem_free_ptr) uint32_t *dsts = mem_alloc(t->sd->chunk_count * sizeof *dsts + 1);

	NEED(dsts, "no memory for %ju chunks", (uintmax_t)t->sd->chunk_count);
	hex[0] = '\0';
	for (uint64_t i = 0; i < t->sd->chunk_count; i++)
		dsts[i] = t->chunk_places[i].dst;
	return t->delta || t->given ? OK : content_of(run, t->sd, dsts, hex);
}

/* ---- items that a client has planned ---- */

struct item_place {
	struct str file;
	uint64_t offset, length;
	uint32_t dst;
};

static int by_place(const void *a, const void *b)
{
	const struct item_place *x = a, *y = b;

	return str_cmp(x->file, y->file) ?: num_order(x->offset, y->offset) ?: num_order(x->length, y->length);
}

static FALLIBLE enum err sort_places(const struct run_build *b, const struct build_target *t, struct item_place **out)
{
	uint64_t n = t->sd->chunk_count;
	struct item_place *all = mem_zalloc(n, sizeof *all);

	NEED(all, "no memory for %ju places", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++) {
		const struct build_place *p = &t->chunk_places[i];
		const struct run_file *f = &b->files.v[p->file];
		all[i] = (struct item_place){ { b->strings.v + f->name_at, f->name_len }, p->offset, p->length, p->dst };
	}
	if (n)
		qsort(all, n, sizeof *all, by_place);
	*out = all;
	return OK;
}

/* Is the item the chunk's elements, as far as its list tells? The metadata are the client's, too: nothing in them is believed. */
static bool is_chunk(const struct run_build *b, const struct run_dst *d, const struct sd_tensor *t, const struct sd_chunk *c)
{
	const int64_t *offsets = c->dims, *sizes = sd_sizes(c, t->ndim);

	if (d->kind != RUN_DST_TENSOR || d->bare || d->dtype != (uint8_t)t->dtype || d->ndim != t->ndim || d->shape_at)
		return false;
	for (uint32_t i = 0; i < t->ndim; i++)
		if (b->dims.v[d->dims_at + t->ndim + i] != sizes[i] || offsets[i] < 0 || offsets[i] > t->shape[i] - sizes[i])
			return false;
	return tensor_sum_is_cheap(t->ndim, c->dims, t->shape, dtype_bytes(t->dtype));
}

static FALLIBLE enum err want_item(struct run_build *b, struct run_dst *d, const struct sd_tensor *t, const struct sd_chunk *c)
{
	TRY(run_add_dims(b, c->dims, t->ndim, &d->box_at));
	d->shape_at = 1 + b->dims.n;
	TRY(vec_reserve(&b->dims, t->ndim));
	if (t->ndim)
		memcpy(b->dims.v + b->dims.n, t->shape, t->ndim * sizeof *t->shape);
	b->dims.n += t->ndim;
	return OK;
}

enum err content_want_items(struct run_build *b, const struct build_target *t, struct content_items *items)
{
	CLEANUP(mem_free_ptr) struct item_place *all = NULL;
	const struct sdict *sd = items->sd;

	items->dsts = mem_alloc(sd->chunk_count * sizeof *items->dsts + 1);
	NEED(items->dsts, "no memory for %ju chunks", (uintmax_t)sd->chunk_count);
	memset(items->dsts, 0xFF, sd->chunk_count * sizeof *items->dsts);
	TRY(sort_places(b, t, &all));
	each(tensor, sd->tensors, sd->tensor_count) {
		if (!is_tiled(sd, tensor))
			continue;
		for (uint32_t i = tensor->first_chunk; i < tensor->first_chunk + tensor->chunk_count; i++) {
			const struct sd_chunk *c = &sd->chunks[i];
			struct item_place key = { sd->files[c->loc.file].name, c->loc.offset, c->loc.length, 0 };
			const struct item_place *p = t->sd->chunk_count
				? bsearch(&key, all, t->sd->chunk_count, sizeof *all, by_place) : NULL;
			struct run_dst *d = p ? &b->dsts.v[p->dst] : NULL;
			if (!d || (t->local && !t->local[d->rank]) || !is_chunk(b, d, tensor, c))
				continue;
			TRY(want_item(b, d, tensor, c));
			items->dsts[i] = p->dst;
		}
	}
	return OK;
}

enum err content_of_items(const struct run *run, const struct content_items *items, char hex[33])
{
	hex[0] = '\0';
	return items->dsts ? content_of(run, items->sd, items->dsts, hex) : OK;
}

/* ---- verify ---- */

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

	for (uint32_t i = 0; s->shape_at && bytes && i < s->scan_count; i++) { /* an item without bytes has nothing to read */
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
