/* image.c: reads segment images and joins those of all ranks (see image.h). An entry becomes a chunk: which box of which tensor it
 * is. Where the metadata leaves something out there is one sensible meaning: an entry alone is a whole tensor of its name. */
#include "format/image_impl.h"

#include <stdio.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"

void image_free(struct image *im)
{
	if (!im)
		return;
	map_free(&im->by_name);
	map_free(&im->path_of);
	arena_free(im->arena);
	mem_free(im);
}

static void free_ptr(struct image **im)
{
	image_free(*im);
}

/* An entry of raw bytes stands for elements of k bytes. Its shape may be that of the chunk with one more dim of k, that of the
 * chunk with its last dim times k (what a view as bytes gives), or, for a whole tensor, flat. */
static FALLIBLE enum err raw_sizes(struct image *im, struct image_chunk *c, uint32_t *ndim_out)
{
	const struct sft_entry *e = c->entry;
	int64_t k = dtype_bytes(c->dtype), *sizes;
	uint32_t want = c->shape ? c->shape_ndim : e->ndim - (k > 1 && e->ndim ? 1 : 0);
	uint64_t numel = 0, bytes = 0;

	TRY(arena_i64(im->arena, (uint64_t)want + 1, &sizes));
	if (e->ndim == want + 1 && e->shape[want] == k) {
		memcpy(sizes, e->shape, want * sizeof *sizes);
	} else if (e->ndim == want && (k == 1 || (want && e->shape[want - 1] % k == 0))) {
		memcpy(sizes, e->shape, want * sizeof *sizes);
		if (k > 1)
			sizes[want - 1] /= k;
	} else if (e->ndim == 1 && c->shape && !c->offsets) {
		memcpy(sizes, c->shape, want * sizeof *sizes);
		TRY(box_numel(want, sizes, &numel));
		TRY(num_mul(numel, (uint64_t)k, &bytes));
		if (bytes != e->end - e->begin)
			return ERR(FORMAT_IMAGE, "%ju bytes of %s are needed, the entry has %ju", (uintmax_t)bytes,
				   dtype_name(c->dtype), (uintmax_t)(e->end - e->begin));
	} else {
		return ERR(FORMAT_IMAGE, "the entry's bytes are no elements of %s (%jd bytes each) of this shape",
			   dtype_name(c->dtype), (intmax_t)k);
	}
	c->sizes = sizes;
	*ndim_out = want;
	return OK;
}

/* Moves the description of the inner tensor to the outer one. */
static FALLIBLE enum err unnest(struct image *im, struct image_chunk *c)
{
	int64_t *offsets;

	if (!c->boxed)
		return ERR(FORMAT_IMAGE, "outer without a global_shape");
	if (c->outer_shape_ndim != c->ndim || c->outer_offsets_ndim != c->ndim)
		return ERR(FORMAT_IMAGE, "%u dims in the entry, %u in outer.global_shape, %u in outer.offsets", c->ndim,
			   c->outer_shape_ndim, c->outer_offsets_ndim);
	c->outer->sizes = c->shape;
	TRY(box_check(c->ndim, c->outer->offsets, c->outer->sizes, c->outer_shape));
	TRY(arena_i64(im->arena, (uint64_t)c->ndim + 1, &offsets));
	for (uint32_t d = 0; d < c->ndim; d++)
		offsets[d] = c->outer->offsets[d] + c->offsets[d];
	c->offsets = offsets;
	c->shape = c->outer_shape;
	return OK;
}

static FALLIBLE enum err resolve(struct image *im, struct image_chunk *c)
{
	const struct sft_entry *e = c->entry;
	uint32_t ndim = e->ndim;
	int64_t *zeros;

	c->sizes = e->shape;
	c->boxed = c->shape != NULL;
	if (!c->dtype_given)
		c->dtype = e->dtype;
	else if (c->dtype != e->dtype && e->dtype != DT_UINT8)
		return ERR(FORMAT_IMAGE, "the entry is %s, the metadata say %s", dtype_name(e->dtype),
			   dtype_name(c->dtype));
	else if (c->dtype != e->dtype)
		TRY(raw_sizes(im, c, &ndim));
	if (!c->fqn.p)
		c->fqn = e->name;
	c->ndim = ndim;
	if (c->offsets && !c->shape)
		return ERR(FORMAT_IMAGE, "offsets without a global_shape");
	if (!c->offsets) {
		TRY(arena_i64(im->arena, (uint64_t)ndim + 1, &zeros));
		c->offsets = zeros;
		c->offsets_ndim = ndim;
	}
	if (!c->shape) {
		c->shape = c->sizes;
		c->shape_ndim = ndim;
	}
	if (c->shape_ndim != ndim || c->offsets_ndim != ndim)
		return ERR(FORMAT_IMAGE, "%u dims in the entry, %u in global_shape, %u in offsets", ndim,
			   c->shape_ndim, c->offsets_ndim);
	TRY(box_check(ndim, c->offsets, c->sizes, c->shape));
	return c->outer ? unnest(im, c) : OK;
}

static FALLIBLE enum err make_chunks(struct image *im)
{
	if (im->sft.entry_count >= MAP_NONE)
		return ERR(LIMIT_EXCEEDED, "%ju entries", (uintmax_t)im->sft.entry_count);
	TRY(arena_alloc(im->arena, im->sft.entry_count + 1, sizeof *im->chunks, &im->chunks));
	each(e, im->sft.entries, im->sft.entry_count) {
		if (str_starts(e->name, IMAGE_PAD_PREFIX))
			continue;
		im->chunks[im->chunk_count].entry = e;
		TRY(map_put(&im->by_name, e->name, im->chunk_count++));
	}
	return OK;
}

static FALLIBLE enum err parse(struct image *im, const void *header, uint64_t header_bytes, uint64_t image_bytes)
{
	const unsigned char *p = header;
	uint64_t json;

	if (header_bytes < 8)
		return ERR(FORMAT_IMAGE, "an image of %ju bytes has no header", (uintmax_t)header_bytes);
	TRY(sft_header_bytes(p, image_bytes, &json));
	if (header_bytes - 8 < json)
		return ERR(FORMAT_IMAGE, "%ju bytes of a header of %ju", (uintmax_t)header_bytes, (uintmax_t)json);
	TRY(sft_parse((struct str){ (const char *)p + 8, json }, image_bytes, im->arena, &im->sft));
	TRY(make_chunks(im));
	for (uint64_t i = 0; i < im->sft.meta_count; i++)
		if (str_is(im->sft.meta[i].key, "dcpd"))
			TRY(image_read_dcpd(im, im->sft.meta[i].value));
	for (uint32_t i = 0; i < im->chunk_count; i++) {
		enum err e = resolve(im, &im->chunks[i]);
		struct str fqn = im->chunks[i].fqn.p ? im->chunks[i].fqn : im->chunks[i].entry->name;
		if (e)
			return err_at_fqn(e, fqn.p, fqn.n);
	}
	return OK;
}

/* The header is copied once and never looked at in the segment again: its owner could change it meanwhile. */
enum err image_parse(const void *header, uint64_t header_bytes, uint64_t image_bytes, uint32_t rank, struct image **out)
{
	struct image *im CLEANUP(free_ptr) = mem_zalloc(1, sizeof *im);
	unsigned char *copy;

	NEED(im, "no memory for an image");
	if (header_bytes > (uint64_t)SFT_HEADER_MAX + 8)
		header_bytes = (uint64_t)SFT_HEADER_MAX + 8;
	im->rank = rank;
	im->arena = arena_new(image_arena_cap(header_bytes));
	NEED(im->arena, "no memory for an image");
	TRY(arena_alloc(im->arena, header_bytes, 1, &copy));
	memcpy(copy, header, header_bytes);
	TRY(err_at_rank(parse(im, copy, header_bytes, image_bytes), rank));
	*out = move(im);
	return OK;
}

struct sd_path image_path(const struct image *im, struct str fqn, struct sd_path_part *self)
{
	uint32_t i = map_get(&im->path_of, fqn);

	if (i != MAP_NONE)
		return im->paths[i];
	*self = (struct sd_path_part){ .key = fqn.p ? fqn : STR("") };
	return (struct sd_path){ self, 1 };
}

uint32_t image_part_count(const struct image *im)
{
	return im->chunk_count;
}

struct image_part image_part_at(const struct image *im, uint32_t i)
{
	const struct image_chunk *c = &im->chunks[i];

	must(i < im->chunk_count);
	return (struct image_part){ .fqn = c->fqn, .dtype = c->dtype, .boxed = c->boxed, .ndim = c->ndim, .shape = c->shape,
				    .offsets = c->offsets, .sizes = c->sizes, .outer = c->outer,
				    .offset = im->sft.data_off + c->entry->begin,
				    .bytes = c->entry->end - c->entry->begin };
}

uint32_t image_text_count(const struct image *im)
{
	return im->value_count;
}

struct image_text image_text_at(const struct image *im, uint32_t i)
{
	must(i < im->value_count);
	return im->values[i];
}

uint32_t image_tuple_count(const struct image *im)
{
	return im->tuple_count;
}

struct sd_path image_tuple_at(const struct image *im, uint32_t i)
{
	must(i < im->tuple_count);
	return im->tuples[i];
}

struct str image_layout(const struct image *im)
{
	return im->layout;
}

/* A tensor while the images are joined. */
struct slot {
	const struct image *im;          /* the first that has it */
	const struct image_chunk *chunk;
	uint64_t first, count;
};

struct ref {
	const struct image *im;
	const struct image_chunk *chunk;
};

struct join {
	struct slot *slots;
	struct ref *refs;                /* sorted by tensor, then rank, then place */
	struct map by_fqn;
	uint32_t count;
	uint64_t total;
};

static void drop_join(struct join *j)
{
	mem_free(j->slots);
	mem_free(j->refs);
	map_free(&j->by_fqn);
}

static FALLIBLE enum err check_same(const struct slot *s, const struct image *im, const struct image_chunk *c)
{
	const struct image_chunk *first = s->chunk;
	char a[128], b[128];

	if (first->dtype != c->dtype)
		return err_expected(ERR(PLAN_INVALID, "rank %u has dtype %s, rank %u %s", s->im->rank,
					dtype_name(first->dtype), im->rank, dtype_name(c->dtype)),
				    dtype_name(first->dtype), dtype_name(c->dtype));
	if (box_same_shape(first->ndim, first->shape, c->ndim, c->shape))
		return OK;
	box_print(first->ndim, first->shape, a, sizeof a);
	box_print(c->ndim, c->shape, b, sizeof b);
	return err_expected(ERR(PLAN_INVALID, "rank %u has shape %s, rank %u %s", s->im->rank, a, im->rank, b), a, b);
}

static FALLIBLE enum err join_tensors(struct join *j, struct image *const *images, uint32_t count)
{
	for (uint32_t r = 0; r < count; r++)
		j->total += images[r]->chunk_count;
	if (j->total >= SD_VALUE_BIT)
		return ERR(LIMIT_EXCEEDED, "%ju chunks", (uintmax_t)j->total);
	j->slots = mem_zalloc(j->total + 1, sizeof *j->slots);
	j->refs = mem_zalloc(j->total + 1, sizeof *j->refs);
	NEED(j->slots && j->refs, "no memory for %ju chunks", (uintmax_t)j->total);
	for (uint32_t r = 0; r < count; r++) {
		each(c, images[r]->chunks, images[r]->chunk_count) {
			uint32_t s;
			TRY(map_intern(&j->by_fqn, c->fqn, j->count, &s));
			if (s == j->count)
				j->slots[j->count++] = (struct slot){ .im = images[r], .chunk = c };
			TRY(err_at_rank(err_at_fqn(check_same(&j->slots[s], images[r], c), c->fqn.p, c->fqn.n), r));
			j->slots[s].count++;
		}
	}
	uint64_t at = 0;
	for (uint32_t s = 0; s < j->count; s++) {
		j->slots[s].first = at;
		at += j->slots[s].count;
		j->slots[s].count = 0;
	}
	for (uint32_t r = 0; r < count; r++) {
		for (uint32_t i = 0; i < images[r]->chunk_count; i++) {
			struct slot *s = &j->slots[map_get(&j->by_fqn, images[r]->chunks[i].fqn)];
			j->refs[s->first + s->count++] = (struct ref){ images[r], &images[r]->chunks[i] };
		}
	}
	return OK;
}

/* One rank may own several chunks of a tensor, but not the same one twice. Only such tensors cost anything here. */
static FALLIBLE enum err check_twice(const struct join *j, const struct slot *s)
{
	CLEANUP(map_free) struct map seen = { 0 };
	uint32_t ndim = s->chunk->ndim;

	for (uint64_t i = 1; i < s->count; i++) {
		const struct ref *a = &j->refs[s->first + i - 1], *b = a + 1;
		uint32_t found;
		if (a->im != b->im) {
			map_free(&seen);
			continue;
		}
		struct str ka = { (const char *)a->chunk->offsets, ndim * sizeof(int64_t) };
		struct str kb = { (const char *)b->chunk->offsets, ndim * sizeof(int64_t) };
		if (seen.raw.count == 0)
			TRY(map_put(&seen, ka, 0));
		TRY(map_intern(&seen, kb, (uint32_t)i, &found));
		if (found != (uint32_t)i)
			return ERR(DUPLICATE_KEY, "two entries of one rank are the same chunk");
	}
	return OK;
}

static FALLIBLE enum err add_tensor(struct sdict *sd, const struct join *j, const struct slot *s)
{
	const struct image_chunk *c = s->chunk;
	struct sd_path_part self;
	uint32_t t;

	TRY(check_twice(j, s));
	TRY(sdict_add_tensor(sd, c->fqn, c->dtype, c->ndim, c->shape, &t));
	TRY(sdict_copy_path(sd, image_path(s->im, c->fqn, &self), &sd->tensors[t].path));
	for (uint64_t i = 0; i < s->count; i++) {
		const struct ref *r = &j->refs[s->first + i];
		int64_t dims[2 * NDIM_MAX];
		memcpy(dims, r->chunk->offsets, c->ndim * sizeof *dims);
		memcpy(dims + c->ndim, r->chunk->sizes, c->ndim * sizeof *dims);
		const struct sft_entry *e = r->chunk->entry;
		struct sd_loc loc = { .file = r->im->rank, .offset = r->im->sft.data_off + e->begin,
				      .length = e->end - e->begin };
		TRY(sdict_add_chunk(sd, t, dims, r->im->rank, loc));
	}
	return OK;
}

static FALLIBLE enum err collect(struct image *const *images, uint32_t count, struct join *j, struct sdict *sd)
{
	CLEANUP(image_seen_free) struct image_seen seen = { 0 };
	char name[16];
	uint32_t index;

	sd->has_paths = true;
	for (uint32_t r = 0; r < count; r++) {
		must(images[r]->rank == r);
		snprintf(name, sizeof name, "%u", r);
		TRY(sdict_add_file(sd, str_of(name), r, &index));
	}
	TRY(join_tensors(j, images, count));
	for (uint32_t s = 0; s < j->count; s++) {
		struct str fqn = j->slots[s].chunk->fqn;
		TRY(err_at_rank(err_at_fqn(add_tensor(sd, j, &j->slots[s]), fqn.p, fqn.n), j->slots[s].im->rank));
	}
	for (uint32_t r = 0; r < count; r++)
		TRY(image_add_values(sd, images[r], &seen));
	return OK;
}

uint64_t image_sdict_cap(struct image *const *images, uint32_t count)
{
	uint64_t cap = IMAGE_SDICT_BYTES_MIN;

	for (uint32_t r = 0; r < count; r++)
		cap += images[r]->sft.data_off * IMAGE_TIMES;
	return cap;
}

enum err image_collect(struct image *const *images, uint32_t count, struct sdict **out)
{
	struct sdict *sd CLEANUP(sdict_free_ptr) = NULL;
	CLEANUP(drop_join) struct join j = { 0 };

	TRY(sdict_new(image_sdict_cap(images, count), &sd));
	TRY(collect(images, count, &j, sd));
	*out = move(sd);
	return OK;
}
