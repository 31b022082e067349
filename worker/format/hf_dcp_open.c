/* hf_dcp_open.c: what PyTorch's HuggingFaceStorageWriter writes with save_distributed: a safetensors file per rank (and per index of its
 * mapping), shard-{rank + 1}-model-{i}-of-{n}.safetensors, whose __metadata__ says under DCP_SHARDING_INFO where in the whole tensor each
 * entry begins: {FQN: {"saved_offsets": [...]}}. A file without that has whole tensors.
 *
 * No file tells the shape of the whole: as for PyTorch it is as large as the boxes reach. A rank whose file is missing shows as a gap in
 * the numbers, or as elements that no file has; only the last rows of dim 0 could be missed, which nobody knows of. */
#include <string.h>

#include "base/map.h"
#include "base/num.h"
#include "base/vec.h"
#include "format/hf_index.h"
#include "format/jscan.h"
#include "format/safetensors.h"

struct piece {
	uint32_t tensor, file, rank, next; /* next: 1 + the tensor's next piece; 0: the last */
	const int64_t *dims;           /* offsets, then sizes */
	uint64_t at, bytes;
};

struct whole {
	struct str fqn;
	enum dtype dtype;
	uint32_t ndim, first, last;    /* 1 + pieces */
	int64_t *shape;
};

struct opening {
	struct arena *arena;
	struct sdict *sd;
	struct map by_fqn, boxes;      /* boxes: by the tensor's number and the box, to find replicas */
	struct vec(struct piece) pieces;
	struct vec(struct whole) wholes;
};

static FALLIBLE enum err read_numbers(struct jscan *js, uint32_t ndim, int64_t *out)
{
	struct jscan_token t;
	uint32_t n = 0;

	TRY(jscan_expect(js, JSCAN_ARRAY, &t));
	JSCAN_EACH(js, &t) {
		if (n == ndim || !jscan_i64(&t, &out[n]) || out[n] < 0)
			return jscan_bad(js, "saved_offsets that are not the entry's");
		n++;
	}
	return n == ndim ? OK : jscan_bad(js, "saved_offsets that are not the entry's");
}

/* {"saved_offsets":[…]} */
static FALLIBLE enum err read_offsets(struct jscan *js, const struct sft_entry *e, int64_t *out, bool *found)
{
	struct jscan_token t;
	struct str skipped;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	JSCAN_EACH(js, &t) {
		bool offsets = str_is(t.raw, "saved_offsets");
		if (offsets && e) {
			TRY(read_numbers(js, e->ndim, out));
			*found = true;
			continue;
		}
		TRY(jscan_next(js, &t));
		TRY(jscan_skip(js, &t, &skipped));
	}
	return OK;
}

/* Fills offsets[i], of the i-th entry of the header. Zeros where the file does not say. */
static FALLIBLE enum err read_info(struct opening *o, const struct sft *head, int64_t **offsets)
{
	CLEANUP(map_free) struct map names = { 0 };
	struct jscan_token t;
	struct str fqn, text = { NULL, 0 };
	uint32_t at;

	for (uint64_t i = 0; i < head->meta_count; i++)
		if (str_is(head->meta[i].key, "DCP_SHARDING_INFO"))
			text = head->meta[i].value;
	for (uint64_t i = 0; i < head->entry_count; i++) {
		TRY(arena_i64(o->arena, head->entries[i].ndim, &offsets[i]));
		memset(offsets[i], 0, head->entries[i].ndim * sizeof **offsets);
		TRY(map_intern(&names, head->entries[i].name, (uint32_t)i, &at));
	}
	if (!text.p)
		return OK;
	CLEANUP(mem_free_ptr) bool *found = mem_zalloc(head->entry_count + 1, sizeof *found);
	NEED(found, "no memory for %ju entries", (uintmax_t)head->entry_count);
	struct jscan js = jscan_of(text, ERR_FORMAT_SAFETENSORS);
	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&js, &t) {
		TRY(jscan_str(&js, &t, o->arena, &fqn));
		at = map_get(&names, fqn);
		bool mine = at != MAP_NONE;
		TRY(err_at_fqn(read_offsets(&js, mine ? &head->entries[at] : NULL, mine ? offsets[at] : NULL, mine ? &found[at] : NULL),
			       fqn.p, fqn.n));
	}
	TRY(jscan_expect(&js, JSCAN_END, &t));
	for (uint64_t i = 0; i < head->entry_count; i++)
		if (!found[i])
			return err_at_fqn(ERR(FORMAT_SAFETENSORS, "DCP_SHARDING_INFO has no offsets of the entry"),
					  head->entries[i].name.p, head->entries[i].name.n);
	return OK;
}

/* The tensor that an entry is a part of. */
static FALLIBLE enum err find_whole(struct opening *o, const struct sft_entry *e, uint32_t *index)
{
	struct whole *w;
	struct str fqn;

	*index = map_get(&o->by_fqn, e->name);
	if (*index != MAP_NONE) {
		w = &o->wholes.v[*index];
		return w->dtype == e->dtype && w->ndim == e->ndim ? OK : ERR(FORMAT_SAFETENSORS, "another dtype or number of dims than in "
									     "the file before");
	}
	*index = (uint32_t)o->wholes.n;
	TRY(vec_push(&o->wholes, &w));
	TRY(arena_str(o->arena, e->name, &fqn));
	*w = (struct whole){ .fqn = fqn, .dtype = e->dtype, .ndim = e->ndim };
	TRY(arena_i64(o->arena, e->ndim, &w->shape));
	memset(w->shape, 0, e->ndim * sizeof *w->shape);
	return map_put(&o->by_fqn, fqn, *index);
}

static FALLIBLE enum err add_piece(struct opening *o, const struct sft *head, const struct sft_entry *e, const int64_t *offsets,
				   uint32_t file)
{
	struct piece *p;
	int64_t *box, *dims;
	uint32_t index, found, number = (uint32_t)o->pieces.n;

	TRY(find_whole(o, e, &index));
	TRY(arena_i64(o->arena, 1 + 2 * e->ndim, &box));
	box[0] = index;
	dims = box + 1;
	struct whole *w = &o->wholes.v[index];
	for (uint32_t d = 0; d < e->ndim; d++) {
		int64_t end;
		dims[d] = offsets[d];
		dims[e->ndim + d] = e->shape[d];
		if (__builtin_add_overflow(dims[d], dims[e->ndim + d], &end))
			return ERR(FORMAT_SAFETENSORS, "saved_offsets beyond any tensor");
		w->shape[d] = end > w->shape[d] ? end : w->shape[d];
	}
	TRY(map_intern(&o->boxes, (struct str){ (char *)box, (1 + 2 * e->ndim) * sizeof *box }, number, &found));
	if (found != number) /* a replica */
		return OK;
	TRY(vec_push(&o->pieces, &p));
	*p = (struct piece){ .tensor = index, .file = file, .rank = o->sd->files[file].rank, .dims = dims,
			     .at = head->data_off + e->begin, .bytes = e->end - e->begin };
	if (w->first)
		o->pieces.v[w->last - 1].next = (uint32_t)o->pieces.n;
	else
		w->first = (uint32_t)o->pieces.n;
	w->last = (uint32_t)o->pieces.n;
	return OK;
}

static FALLIBLE enum err read_file(struct opening *o, const struct format_source *s, const char *name)
{
	CLEANUP(arena_free_ptr) struct arena *arena = arena_new(UINT64_MAX);
	CLEANUP(mem_free_ptr) int64_t **offsets = NULL;
	CLEANUP(mem_free_ptr) void *text = NULL;
	struct format_file is;
	struct sft head;
	uint32_t file;

	NEED(arena, "no memory for a header");
	must(format_file_in(FORMAT_HF_DCP, name, &is));
	TRY(sdict_add_file(o->sd, str_of(name), (uint32_t)is.rank, &file));
	TRY(hf_open_header(s, name, arena, &head, &text));
	offsets = mem_zalloc(head.entry_count + 1, sizeof *offsets);
	NEED(offsets, "no memory for %ju entries", (uintmax_t)head.entry_count);
	TRY(read_info(o, &head, offsets));
	for (uint64_t i = 0; i < head.entry_count; i++)
		TRY(err_at_fqn(add_piece(o, &head, &head.entries[i], offsets[i], file), head.entries[i].name.p, head.entries[i].name.n));
	return OK;
}

static FALLIBLE enum err read_files(struct opening *o, const struct format_source *s)
{
	uint32_t before = UINT32_MAX;

	for (uint64_t i = 0; i < s->payload_count; i++) { /* sorted by rank */
		TRY(err_at_file(read_file(o, s, s->payload[i]), s->payload[i], -1));
		uint32_t rank = o->sd->files[i].rank;
		if (rank != before && rank != before + 1)
			return err_at_file(ERR(CHECKPOINT_INCOMPLETE, "no file of shard %u lies before this one", rank), s->payload[i], -1);
		before = rank;
	}
	return OK;
}

static FALLIBLE enum err add_tensors(struct opening *o)
{
	each(w, o->wholes.v, o->wholes.n) {
		uint32_t tensor;
		TRY(err_at_fqn(sdict_add_tensor(o->sd, w->fqn, w->dtype, w->ndim, w->shape, &tensor), w->fqn.p, w->fqn.n));
		for (uint32_t k = w->first; k; k = o->pieces.v[k - 1].next) {
			const struct piece *p = &o->pieces.v[k - 1];
			const struct sd_loc loc = { .file = p->file, .offset = p->at, .length = p->bytes };
			TRY(err_at_fqn(sdict_add_chunk(o->sd, tensor, p->dims, p->rank, loc), w->fqn.p, w->fqn.n));
		}
	}
	return OK;
}

enum err format_open_hf_dcp(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	struct opening o = { .arena = scratch };

	TRY(sdict_new(UINT64_MAX, out));
	o.sd = *out;
	enum err e = read_files(&o, s);
	e = e ?: add_tensors(&o);
	map_free(&o.by_fqn);
	map_free(&o.boxes);
	vec_free(&o.pieces);
	vec_free(&o.wholes);
	return e;
}
