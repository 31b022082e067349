/* load_delta.c: see load_delta.h.
 *
 * Why not the digests of the target's own bytes, as redistribute has them (state_dict_op_delta.h): the source's blocks are known by digest
 * before any of them is read, and a block that is cut over several ranks has no digest on any of them. */
#include "ops/load_delta.h"

#include "base/map.h"
#include "base/num.h"
#include "os/fs.h"
#include "runner/build.h"
#include "runner/gang_run.h"
#include "runner/move.h"

enum { PAGE = 4096 };
#define DELTA_MAGIC 0x33746c6564706364ull /* "dcpdelt3" */

static void cut_begin(struct move_cut *cut, const struct sdict *sd, const struct sd_chunk *c)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];

	move_cut_begin(cut, t->ndim, c->dims, num_max(MOVE_PIECE_BYTES / dtype_bytes(t->dtype), 1));
}

enum err load_delta_size(const struct sdict *target, uint32_t world_size, struct load_delta *out)
{
	int64_t off[NDIM_MAX], size[NDIM_MAX];
	struct move_cut cut;

	*out = (struct load_delta){ .target = target, .world_size = world_size };
	out->first = mem_zalloc((uint64_t)world_size + 1, sizeof *out->first);
	out->behind = mem_zalloc(world_size, sizeof *out->behind);
	out->image_bytes = mem_zalloc(world_size, sizeof *out->image_bytes);
	NEED(out->first && out->behind && out->image_bytes, "no memory for %u ranks", world_size);
	each(c, target->chunks, target->chunk_count) {
		cut_begin(&cut, target, c);
		while (move_cut_next(&cut, off, size))
			out->first[c->rank + 1]++;
	}
	for (uint32_t r = 0; r < world_size; r++) {
		out->behind[r] = sizeof(struct load_delta_head) + out->first[r + 1] * sizeof(struct delta_entry);
		TRY(num_add(out->first[r], out->first[r + 1], &out->first[r + 1]));
	}
	return build_room(out->first[world_size], 0);
}

/* ---- pieces ---- */

/* Adds the pieces of a chunk to an sdict that has its tensor as `tensor`: each is a run of the chunk's bytes. */
static FALLIBLE enum err add_pieces(const struct sdict *from, const struct sd_chunk *c, struct sdict *to, uint32_t tensor)
{
	uint32_t n = from->tensors[c->tensor].ndim;
	uint64_t bytes, at = c->loc.offset;
	int64_t dims[2 * NDIM_MAX + 1];
	struct move_cut cut;

	cut_begin(&cut, from, c);
	while (move_cut_next(&cut, dims, dims + n)) {
		bytes = box_volume(n, dims + n) * dtype_bytes(from->tensors[c->tensor].dtype);
		TRY(sdict_add_chunk(to, tensor, dims, c->rank, (struct sd_loc){ .file = c->loc.file, .offset = at, .length = bytes }));
		at += bytes;
	}
	return OK;
}

static FALLIBLE enum err new_like(const struct sdict *from, struct sdict **out)
{
	uint32_t index;

	TRY(sdict_new(UINT64_MAX, out));
	each(f, from->files, from->file_count)
		TRY(sdict_add_file(*out, f->name, f->rank, &index));
	return OK;
}

static FALLIBLE enum err cut_all(struct load_delta *d)
{
	const struct sdict *sd = d->target;
	uint32_t tensor;

	TRY(new_like(sd, &d->pieces));
	each(t, sd->tensors, sd->tensor_count) {
		TRY(sdict_add_tensor(d->pieces, t->fqn, t->dtype, t->ndim, t->shape, &tensor));
		each(c, sd->chunks + t->first_chunk, t->chunk_count)
			TRY(add_pieces(sd, c, d->pieces, tensor));
	}
	must(d->pieces->chunk_count == d->first[d->world_size]);
	return OK;
}

static FALLIBLE enum err number(struct load_delta *d)
{
	uint64_t n = d->pieces->chunk_count;
	CLEANUP(mem_free_ptr) uint64_t *next = mem_alloc((d->world_size + 1) * sizeof *next);

	d->entry_of = mem_zalloc(n + 1, sizeof *d->entry_of);
	d->piece_of = mem_zalloc(n + 1, sizeof *d->piece_of);
	d->was = mem_zalloc(n + 1, sizeof *d->was);
	d->now = mem_zalloc(n + 1, sizeof *d->now);
	d->kept = mem_zalloc(n + 1, sizeof *d->kept);
	d->heads = mem_zalloc(d->world_size, sizeof *d->heads);
	NEED(next && d->entry_of && d->piece_of && d->was && d->now && d->kept && d->heads, "no memory for %ju pieces", (uintmax_t)n);
	memcpy(next, d->first, (d->world_size + 1) * sizeof *next);
	for (uint64_t i = 0; i < n; i++) {
		d->entry_of[i] = (uint32_t)next[d->pieces->chunks[i].rank]++;
		d->piece_of[d->entry_of[i]] = (uint32_t)i;
	}
	return OK;
}

static const struct sd_chunk *piece_at(const struct load_delta *d, uint64_t entry)
{
	return &d->pieces->chunks[d->piece_of[entry]];
}

static const struct sd_tensor *tensor_of(const struct load_delta *d, const struct sd_chunk *piece)
{
	return &d->pieces->tensors[piece->tensor];
}

/* The digest of all that says which bytes a piece is, and where they lie. */
static void describe(struct load_delta *d)
{
	struct digest_stream s;
	struct digest digest;

	for (uint32_t r = 0; r < d->world_size; r++) {
		digest_begin_one(&s, DIGEST_XXH3);
		for (uint64_t i = d->first[r]; i < d->first[r + 1]; i++) {
			const struct sd_chunk *c = piece_at(d, i);
			const struct sd_tensor *t = tensor_of(d, c);
			struct { uint64_t offset, bytes; uint32_t dtype, ndim; } place = { c->loc.offset, c->loc.length,
											   (uint32_t)t->dtype, t->ndim };
			digest_add(&s, t->fqn.p, t->fqn.n);
			digest_add(&s, &place, sizeof place);
			if (t->ndim)
				digest_add(&s, c->dims, 2 * (size_t)t->ndim * sizeof *c->dims);
		}
		digest_end(&s, &digest);
		d->heads[r] = (struct load_delta_head){ .magic = DELTA_MAGIC, .pieces = d->first[r + 1] - d->first[r] };
		memcpy(d->heads[r].structure, digest.xxh3_128, sizeof d->heads[r].structure);
	}
}

/* ---- tags ---- */

/* Adds what a piece takes of a source chunk: its dtype, of which the same bytes are other numbers, its box, and the digests of the blocks
 * from the piece's first byte there to its last one. False: no digests are known. */
static bool add_source(const struct checkpoint *from, const struct sd_chunk *s, const struct sd_chunk *piece, uint32_t n, enum dtype dtype,
		       struct digest_stream *out)
{
	const struct manifest_item *listed = from->manifest ? manifest_find(from->manifest, from->sd->files[s->loc.file].name,
									     s->loc.offset, s->loc.length) : NULL;
	int64_t off[NDIM_MAX], size[NDIM_MAX];
	uint64_t first = 0, last = 0, begin = 0, item = dtype_bytes(dtype);
	const uint32_t stored_as = (uint32_t)dtype;

	if (!listed || s->loc.transform)
		return false;
	if (!box_intersect(n, s->dims, s->dims + n, piece->dims, piece->dims + n, off, size))
		return true;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t pitch = (uint64_t)s->dims[n + i], at = (uint64_t)(off[i] - s->dims[i]);
		first = first * pitch + at;
		last = last * pitch + at + (uint64_t)size[i] - 1;
	}
	digest_add(out, &stored_as, sizeof stored_as);
	if (n)
		digest_add(out, s->dims, 2 * (size_t)n * sizeof *s->dims);
	for (uint32_t i = 0; i < listed->digest_count; i++) {
		const struct block_digest *block = &from->manifest->digests.v[listed->digest_at + i];
		if (block->end > first * item && begin < (last + 1) * item)
			digest_add(out, block->xxh3_128, sizeof block->xxh3_128);
		begin = block->end;
	}
	return true;
}

static void tag_all(struct load_delta *d, const struct checkpoint *from, const struct sdict *view)
{
	struct digest_stream s;
	struct digest digest;

	for (uint64_t i = 0; i < d->pieces->chunk_count; i++) {
		const struct sd_chunk *c = &d->pieces->chunks[i];
		bool known = true;
		digest_begin_one(&s, DIGEST_XXH3);
		for (uint64_t k = d->plan.first[i]; known && k < d->plan.first[i + 1]; k++) {
			const struct sd_chunk *source = &view->chunks[d->plan.sources[k]];
			known = add_source(from, source, c, tensor_of(d, c)->ndim, view->tensors[source->tensor].dtype, &s);
		}
		digest_end(&s, &digest);
		if (known)
			memcpy(d->now[d->entry_of[i]].tag, digest.xxh3_128, sizeof digest.xxh3_128);
	}
}

/* ---- tables ---- */

/* Of any generation of that structure: images of one structure have one size. */
static uint64_t table_at(const struct load_delta *d, uint32_t rank)
{
	return (d->image_bytes[rank] + PAGE - 1) / PAGE * PAGE;
}

/* Has a segment of the rank a table of these pieces? */
static FALLIBLE enum err read_head(const struct job *j, const struct rank_segment *s, const struct load_delta *d, uint32_t rank, bool *out)
{
	const struct load_delta_head *of = &d->heads[rank];
	uint64_t at = table_at(d, rank);
	struct load_delta_head head;

	*out = false;
	if (at > s->bytes || sizeof head + of->pieces * sizeof(struct delta_entry) > s->bytes - at)
		return OK;
	TRY(input_segment_error(fs_pread(j->fds[s->fd], &head, sizeof head, at, "segment")));
	*out = memcmp(&head, of, sizeof head) == 0;
	return OK;
}

/* The source's digests are not known: it lies in this node's own memory. */
static bool is_untagged(const struct delta_entry *e)
{
	return mem_is_zero(e->tag, sizeof e->tag);
}

static FALLIBLE enum err read_newest(const struct job *j, const struct rank_segment *s, struct load_delta *d, uint32_t rank)
{
	uint64_t first = d->first[rank], n = d->first[rank + 1] - first;
	bool there;

	TRY(read_head(j, s, d, rank, &there));
	if (!there || n == 0)
		return OK;
	TRY(input_segment_error(fs_pread(j->fds[s->fd], d->was + first, n * sizeof *d->was, table_at(d, rank) + sizeof *d->heads,
				     "segment")));
	for (uint64_t i = first; i < first + n; i++)
		d->kept[i] = memcmp(d->was[i].tag, d->now[i].tag, sizeof d->now->tag) == 0 && !is_untagged(&d->now[i]);
	return OK;
}

/* ---- what is kept: moves from the newest generation to the one that is made, by digest (state_dict_op_run.c) ---- */

struct keeping {
	struct load_delta *d;
	struct run_build *b;
	uint32_t from, to;             /* run files of the rank in hand */
	bool warm;                     /* the made segment may hold the same bytes */
	uint64_t filled;               /* of the task being made */
};

static FALLIBLE enum err begin_rank(struct keeping *k, uint32_t rank)
{
	struct run_rank *r;

	TRY(vec_push(&k->b->ranks, &r));
	*r = (struct run_rank){ .rank = rank, .first_task = k->b->tasks.n };
	k->filled = BUILD_TASK_BYTES;
	return OK;
}

static FALLIBLE enum err add_task(struct keeping *k, uint64_t bytes)
{
	struct run_rank *r = &k->b->ranks.v[k->b->ranks.n - 1];
	struct run_task *task;

	r->bytes_total += bytes;
	k->filled += bytes;
	if (k->filled > BUILD_TASK_BYTES) {
		TRY(vec_push(&k->b->tasks, &task));
		*task = (struct run_task){ .first = k->b->moves.n, .rank_index = (uint32_t)k->b->ranks.n - 1 };
		r->task_count++;
		k->filled = bytes;
	}
	k->b->tasks.v[k->b->tasks.n - 1].count++;
	return OK;
}

static FALLIBLE enum err add_kept(struct keeping *k, uint64_t entry)
{
	const struct sd_chunk *c = piece_at(k->d, entry);
	const struct sd_tensor *t = tensor_of(k->d, c);
	struct block_digest *was, *now;
	struct run_move *m;
	struct run_src *s;
	struct run_dst *to;

	TRY(add_task(k, c->loc.length));
	TRY(vec_push(&k->b->srcs, &s));
	*s = (struct run_src){ .kind = RUN_SRC_PLAIN, .dtype = (uint8_t)t->dtype, .ndim = t->ndim, .rank = c->rank, .file = k->from,
			       .offset = c->loc.offset, .length = c->loc.length, .fqn_len = (uint32_t)t->fqn.n };
	TRY(run_add_string(k->b, t->fqn, &s->fqn_at));
	TRY(run_add_dims(k->b, c->dims, t->ndim, &s->dims_at));
	TRY(vec_push(&k->b->dsts, &to));
	*to = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = s->dtype, .bare = true, .ndim = s->ndim, .rank = c->rank, .file = k->to,
				.offset = s->offset, .payload_bytes = s->length, .length = s->length, .fqn_len = s->fqn_len,
				.fqn_at = s->fqn_at, .dims_at = s->dims_at };
	TRY(vec_push(&k->b->moves, &m));
	*m = (struct run_move){ .src = (uint32_t)k->b->srcs.n - 1, .dst = (uint32_t)k->b->dsts.n - 1, .dims_at = s->dims_at,
				.warm = k->warm };
	TRY(vec_reserve(&k->b->digests, 2));
	TRY(vec_push(&k->b->digests, &was));
	TRY(vec_push(&k->b->digests, &now));
	was->end = 1;
	memcpy(was->xxh3_128, k->d->was[entry].digest, sizeof was->xxh3_128);
	return OK;
}

static FALLIBLE enum err build_kept(struct job *j, const struct rank_segments *newest, struct load_delta *d, struct run_build *b)
{
	struct keeping k = { .d = d, .b = b };
	uint64_t nothing = 0;

	b->opts = (struct run_options){ .mode = RUN_MOVE_BOXES, .task_bytes = BUILD_TASK_BYTES };
	for (uint32_t r = 0; r < d->world_size; r++) {
		const struct rank_segment *made = &j->segments.v[r];
		if (newest)
			TRY(err_at_rank(read_newest(j, &newest->v[r], d, r), r));
		TRY(err_at_rank(read_head(j, made, d, r, &k.warm), r));
		TRY(err_at_rank(fs_pwrite(j->fds[made->fd], &nothing, sizeof nothing, table_at(d, r), "segment"), r));
		if (!newest)
			continue;
		TRY(input_add_segment(b, &newest->v[r], r, false, &k.from));
		TRY(input_add_segment(b, made, r, true, &k.to));
		TRY(begin_rank(&k, r));
		for (uint64_t i = d->first[r]; i < d->first[r + 1]; i++)
			if (d->kept[i])
				TRY(add_kept(&k, i));
	}
	return OK;
}

static FALLIBLE enum err keep(struct job *j, const struct rank_segments *newest, struct load_delta *d)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };
	CLEANUP(run_build_free) struct run_build b = { 0 };
	uint64_t at = 0;

	TRY(build_kept(j, newest, d, &b));
	if (b.moves.n == 0)
		return OK;
	TRY(gang_run_built(j, &b, "copy", NULL, &run));
	for (uint64_t i = 0; i < d->first[d->world_size]; i++) {
		if (!d->kept[i])
			continue;
		const struct block_digest *was = &run.digests[2 * at++], *now = was + 1;
		d->kept[i] = memcmp(was->xxh3_128, now->xxh3_128, sizeof now->xxh3_128) == 0;
		memcpy(d->now[i].digest, now->xxh3_128, sizeof now->xxh3_128);
	}
	return OK;
}

/* ---- the rest ---- */

/* A chunk of which nothing is kept is loaded as one. */
static FALLIBLE enum err add_rest(const struct load_delta *d, const struct sd_chunk *c, uint64_t *piece, struct sdict *rest,
				  uint32_t tensor)
{
	const struct sdict *sd = d->pieces;
	uint64_t first = *piece, kept = 0;

	for (; *piece < sd->chunk_count && sd->chunks[*piece].loc.file == c->loc.file &&
	       num_inside(sd->chunks[*piece].loc.offset - c->loc.offset, sd->chunks[*piece].loc.length, c->loc.length); ++*piece)
		kept += d->kept[d->entry_of[*piece]];
	if (kept == 0)
		return *piece == first ? OK : sdict_add_chunk(rest, tensor, c->dims, c->rank, c->loc);
	for (uint64_t i = first; i < *piece; i++)
		if (!d->kept[d->entry_of[i]])
			TRY(sdict_add_chunk(rest, tensor, sd->chunks[i].dims, sd->chunks[i].rank, sd->chunks[i].loc));
	return OK;
}

static FALLIBLE enum err make_rest(const struct load_delta *d, struct sdict **out)
{
	const struct sdict *sd = d->target;
	uint64_t piece = 0;
	uint32_t tensor;

	TRY(new_like(sd, out));
	each(t, sd->tensors, sd->tensor_count) {
		TRY(sdict_add_tensor(*out, t->fqn, t->dtype, t->ndim, t->shape, &tensor));
		each(c, sd->chunks + t->first_chunk, t->chunk_count)
			TRY(add_rest(d, c, &piece, *out, tensor));
	}
	return OK;
}

enum err load_delta_begin(struct job *j, const struct input *source, const struct sdict *view, const struct rank_segments *newest,
			  struct arena *arena, struct load_delta *d, struct sdict **rest_out, struct load_plan *rest_plan)
{
	struct load_match match = { .strict = true, .a_part = true };

	must(!newest || newest->count == d->world_size);
	TRY(cut_all(d));
	TRY(number(d));
	describe(d);
	TRY(load_plan_make(view, d->pieces, &match, arena, &d->plan));
	if (source->checkpoint)
		tag_all(d, source->checkpoint, view);
	TRY(keep(j, newest, d));
	TRY(make_rest(d, rest_out));
	match = (struct load_match){ .strict = true, .a_part = true };
	return load_plan_make(view, *rest_out, &match, arena, rest_plan);
}

static FALLIBLE enum err digest_piece(const struct job *j, const struct sd_chunk *c, unsigned char *buf, unsigned char out[16])
{
	int fd = j->fds[j->segments.v[c->rank].fd];

	must(c->loc.length <= MOVE_PIECE_BYTES);
	TRY(input_segment_error(fs_pread(fd, buf, c->loc.length, c->loc.offset, "segment")));
	digest_xxh3(buf, c->loc.length, out);
	return OK;
}

static FALLIBLE enum err end_rank(struct job *j, struct load_delta *d, uint32_t rank, unsigned char *buf, struct map *changed)
{
	const struct rank_segment *made = &j->segments.v[rank];
	uint64_t first = d->first[rank], n = d->first[rank + 1] - first;
	int fd = j->fds[made->fd];

	for (uint64_t i = first; i < first + n; i++) {
		const struct sd_chunk *c = piece_at(d, i);
		bool same = d->kept[i];
		if (!same) {
			TRY(job_tick(j));
			TRY(digest_piece(j, c, buf, d->now[i].digest));
			same = is_untagged(&d->now[i]) && memcmp(d->was[i].digest, d->now[i].digest, sizeof d->now[i].digest) == 0;
		}
		*(same ? &d->kept_bytes : &d->changed_bytes) += c->loc.length;
		if (!same)
			TRY(map_put(changed, tensor_of(d, c)->fqn, 1));
	}
	TRY(fs_pwrite(fd, d->now + first, n * sizeof *d->now, table_at(d, rank) + sizeof *d->heads, "segment"));
	return fs_pwrite(fd, &d->heads[rank], sizeof *d->heads, table_at(d, rank), "segment");
}

enum err load_delta_end(struct job *j, struct load_delta *d)
{
	CLEANUP(map_free) struct map changed = { 0 };
	CLEANUP(mem_free_ptr) unsigned char *buf = mem_alloc(MOVE_PIECE_BYTES);

	NEED(buf, "no memory for a piece");
	for (uint32_t r = 0; r < d->world_size; r++)
		TRY(err_at_rank(end_rank(j, d, r, buf, &changed), r));
	d->changed_tensors = changed.raw.count;
	json_object_set_new(j->result, "changed_bytes", json_integer((json_int_t)d->changed_bytes));
	json_object_set_new(j->result, "kept_bytes", json_integer((json_int_t)d->kept_bytes));
	json_object_set_new(j->result, "changed_tensors", json_integer((json_int_t)d->changed_tensors));
	return OK;
}

void load_delta_free(struct load_delta *d)
{
	sdict_free(d->pieces);
	mem_free(d->behind);
	mem_free(d->image_bytes);
	mem_free(d->first);
	mem_free(d->entry_of);
	mem_free(d->piece_of);
	mem_free(d->was);
	mem_free(d->now);
	mem_free(d->kept);
	mem_free(d->heads);
	*d = (struct load_delta){ 0 };
}
