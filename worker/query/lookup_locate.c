/* lookup_locate.c: where on the disk the bytes of boxes of tensors lie, and which digests they have: for a client that can open the files
 * itself, and reads them straight into its tensors. Reads are planned as for a load, and told instead of being done.
 *
 * What still lies in a segment, too, is told with its place there (runner/memory.h), in whole digest blocks even where nothing is to be
 * verified: the client compares what it copies from memory.
 *
 * A box that is not wholly made of runs of stored bytes is no error: it is among `others`, and is loaded in the ordinary way. So is what
 * is left when the question has taken a few seconds: storages whose look-ups take longer count as stalled, and neither a huge question
 * nor a spoiled checkpoint may bring that about. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/num.h"
#include "io/digest.h"
#include "os/fs.h"
#include "query/lookup.h"
#include "query/lookup_cache.h"
#include "runner/build.h"
#include "runner/memory.h"
#include "runner/sources.h"
#include "store/checkpoint.h"
#include "store/identity.h"

enum {
	BOXES_MAX = 1 << 20,
	READS_MAX = 1 << 16,             /* in one answer */
	PIECES_MAX = 1 << 20,            /* of the plan: more than can be answered, less than would fill a narrow worker */
	WASTE_FREE = 1 << 20,            /* so many bytes more than are needed do not matter */
	TIME_MAX_MS = 4000,              /* of one question, before its answer is put together */
	CHUNKS_MAX = 1 << 17,            /* stored ones of a tensor: more take seconds to compare if they lie oddly */
	BLOCKS_AT_ONCE = 1 << 12,        /* looked at without a look at the clock */
};

/* Why a box is read in the ordinary way. */
enum why { WHY_NOT, MISSING, KIND, SHAPE, DTYPE, HOLE, TRANSFORMED, DEFLATED, LAZY, LAYOUT, SPARSE, LIMIT, UNCHECKED };
static const char *const why_names[] = { "",		"missing",  "kind", "shape",  "dtype",	"hole",
					 "transformed", "deflated", "lazy", "layout", "sparse", "limit",
					 "unchecked" };

struct place {
	uint32_t box, file;            /* file: of the run */
	uint64_t at, offset, bytes, from, count;
	uint32_t segment;              /* 1 + the run file of a segment that has the unit, too, at segment_at; 0: none */
	uint64_t segment_at;
	enum { NONE, XXH3, CRC32 } digest;
	unsigned char xxh3_128[16];
	uint32_t crc32;
};

struct wanted {
	uint32_t tensor, box;
};

struct locate {
	int64_t end_ms;
	bool late;
	struct checkpoint *checkpoint;
	struct memory memory;          /* what of it lies in segments */
	const json_t *boxes, *list;    /* list: for memory_open, with fds */
	const int *fds;
	uint32_t fd_count;
	unsigned char *why;            /* per box */
	bool verify;
	struct arena *arena;
	struct sdict *target, *used;   /* the boxes; the stored chunks that they need */
	struct vec(struct wanted) wanted;
	struct load_plan plan;
	struct problems problems;
	struct run_build build;
	struct run run;
	struct files files;
	struct sources sources;
	uint32_t *file_map, *shown;    /* of the checkpoint's files: in the run, in the answer */
	struct vec(struct place) places;
};

static bool is_late(struct locate *l)
{
	l->late = l->late || clock_mono_ms() >= l->end_ms;
	return l->late;
}

static enum err in_time(void *user)
{
	return is_late(user) ? ERR(LIMIT_EXCEEDED, "what was asked for takes too long to find") : OK;
}

/* ------------------------------------------------------------------------------------------------------ the boxes */

/* n numbers that are not negative. */
static FALLIBLE enum err read_ints(const json_t *list, int64_t *into, uint32_t *n_out)
{
	size_t n = json_array_size(list);

	if (!json_is_array(list) || n > NDIM_MAX)
		return ERR(VALIDATION_FAILED, "a box has lists of at most %d numbers", NDIM_MAX);
	for (size_t i = 0; i < n; i++) {
		const json_t *v = json_array_get(list, i);
		if (!json_is_integer(v) || json_integer_value(v) < 0)
			return ERR(VALIDATION_FAILED, "a box is made of numbers that are not negative");
		into[i] = json_integer_value(v);
	}
	*n_out = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err want_box(struct locate *l, uint32_t index)
{
	const json_t *box = json_array_get(l->boxes, index), *fqn = json_object_get(box, "fqn");
	struct str dtype = str_of(json_string_value(json_object_get(box, "dtype")) ? json_string_value(json_object_get(box, "dtype")) : "");
	uint32_t found = sdict_find(l->checkpoint->sd, (struct str){ json_string_value(fqn), json_string_length(fqn) }), n;
	int64_t shape[NDIM_MAX];
	struct wanted *w;

	TRY(read_ints(json_object_get(box, "shape"), shape, &n));
	if (found == SD_NONE || (found & SD_VALUE_BIT)) {
		l->why[index] = found == SD_NONE ? MISSING : KIND;
		return OK;
	}
	const struct sd_tensor *t = &l->checkpoint->sd->tensors[found];
	if (str_starts(dtype, "torch."))
		dtype = (struct str){ dtype.p + 6, dtype.n - 6 };
	if (!box_same_shape(t->ndim, t->shape, n, shape)) {
		l->why[index] = SHAPE;
	} else if (!str_is(dtype, dtype_name(t->dtype))) {
		l->why[index] = DTYPE;
	} else if (t->chunk_count > CHUNKS_MAX) {
		l->why[index] = LIMIT;
	} else {
		TRY(vec_push(&l->wanted, &w));
		*w = (struct wanted){ found, index };
	}
	return OK;
}

static int by_tensor(const void *a, const void *b)
{
	const struct wanted *x = a, *y = b;

	return num_order(x->tensor, y->tensor) ?: num_order(x->box, y->box);
}

/* A target's chunks of one tensor must be in a row: chunk i is box wanted[i]. */
static FALLIBLE enum err make_target(struct locate *l)
{
	const struct sdict *sd = l->checkpoint->sd;
	int64_t dims[2 * NDIM_MAX];
	uint32_t n, m, at = 0;

	TRY(sdict_new(UINT64_MAX, &l->target));
	sdict_borrow(l->target, sd);
	if (l->wanted.n)
		qsort(l->wanted.v, l->wanted.n, sizeof *l->wanted.v, by_tensor);
	for (uint64_t i = 0; i < l->wanted.n; i++) {
		const struct wanted *w = &l->wanted.v[i];
		const struct sd_tensor *t = &sd->tensors[w->tensor];
		const json_t *box = json_array_get(l->boxes, w->box);
		TRY(read_ints(json_object_get(box, "offsets"), dims, &n));
		if (n != t->ndim)
			return ERR(VALIDATION_FAILED, "box %u has %u offsets, its tensor %u dims", w->box, n, t->ndim);
		TRY(read_ints(json_object_get(box, "sizes"), dims + n, &m));
		if (m != n)
			return ERR(VALIDATION_FAILED, "box %u has %u sizes, its tensor %u dims", w->box, m, n);
		TRY(err_at_fqn(box_check(n, dims, dims + n, t->shape), t->fqn.p, t->fqn.n));
		if (i == 0 || w[-1].tensor != w->tensor)
			TRY(sdict_add_tensor_of(l->target, t, &at));
		TRY(sdict_add_chunk(l->target, at, dims, 0, (struct sd_loc){ .file = SD_NO_FILE }));
	}
	return OK;
}

/* ----------------------------------------------------------------------------------------------------- the sources */

/* Only a hole leaves a box to others; what else is wrong is wrong with the checkpoint. */
static FALLIBLE enum err check_problems(const struct locate *l)
{
	for (uint64_t i = 0; i < l->problems.list.n; i++)
		if (l->problems.list.v[i].code != ERR_COVERAGE_HOLE)
			return problems_raise(&l->problems);
	return OK;
}

/* The chunks that the plan needs, and the plan's sources as their numbers. A checkpoint may have a million others. */
static FALLIBLE enum err keep_used(struct locate *l)
{
	const struct sdict *sd = l->checkpoint->sd;
	CLEANUP(mem_free_ptr) uint32_t *number = mem_zalloc(sd->chunk_count, sizeof *number);
	uint32_t tensor = UINT32_MAX, at = 0;

	NEED(number, "no memory for %ju chunks", (uintmax_t)sd->chunk_count);
	TRY(sdict_new(UINT64_MAX, &l->used));
	sdict_borrow(l->used, sd);
	TRY(sdict_copy_files(l->used, sd));
	for (uint64_t i = 0; i < l->plan.source_count; i++)
		number[l->plan.sources[i]] = 1;
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		if (!number[i])
			continue;
		if (sd->chunks[i].tensor != tensor)
			TRY(sdict_add_tensor_of(l->used, &sd->tensors[sd->chunks[i].tensor], &at));
		tensor = sd->chunks[i].tensor;
		number[i] = (uint32_t)l->used->chunk_count;
		TRY(sdict_add_chunk_of(l->used, at, &sd->chunks[i]));
	}
	for (uint64_t i = 0; i < l->plan.source_count; i++)
		l->plan.sources[i] = number[l->plan.sources[i]];
	return OK;
}

static FALLIBLE enum err plan(struct locate *l)
{
	struct load_match match = { .problems = &l->problems, .a_part = true, .pieces_max = PIECES_MAX, .tick = in_time, .user = l };
	uint32_t first;

	TRY(load_plan_make(l->checkpoint->sd, l->target, &match, l->arena, &l->plan));
	TRY(check_problems(l));
	TRY(keep_used(l));
	TRY(build_source_files(&l->build, l->checkpoint, &l->file_map));
	TRY(build_sources(&l->build, l->used, build_kind(l->checkpoint), l->file_map, l->checkpoint->manifest, &first));
	memory_open(&(struct memory_lists){ l->list, l->fds, l->fd_count, NULL }, l->checkpoint->manifest, &l->memory);
	TRY(memory_place(&l->memory, &l->build, l->used, first));
	for (uint32_t i = 0; i < l->build.srcs.n; i++)
		if (l->build.srcs.v[i].digest_count)
			TRY(build_scans(&l->build, i)); /* from here on its digests are known to add up */
	l->build.opts = (struct run_options){ .mode = RUN_FILL_SEGMENTS, .task_bytes = BUILD_TASK_BYTES, .verify = l->verify };
	return run_share(&l->build, &l->run);
}

/* ------------------------------------------------------------------------------------------------------ the places */

static FALLIBLE enum err add_place(struct locate *l, struct place one)
{
	struct place *p;

	TRY(vec_push(&l->places, &p));
	*p = one;
	return OK;
}

/* The digest blocks that the row is in, whole ones. */
static FALLIBLE enum err add_blocks(struct locate *l, const struct run_src *src, struct place base, const struct src_row *row)
{
	const struct block_digest *d = &l->run.digests[src->digest_at];
	uint64_t lo = 0, hi = src->digest_count, end = row->from + row->bytes;

	while (lo < hi) { /* the first that ends behind the row's begin */
		uint64_t mid = lo + (hi - lo) / 2;
		if (d[mid].end <= row->from)
			lo = mid + 1;
		else
			hi = mid;
	}
	for (uint64_t i = lo; i < src->digest_count && l->places.n <= READS_MAX; i++) {
		uint64_t begin = i ? d[i - 1].end : 0, from = num_max(begin, row->from);
		if (begin >= end || ((i - lo + 1) % BLOCKS_AT_ONCE == 0 && is_late(l)))
			break; /* there may be a million of no bytes */
		struct place one = base;
		one.offset += begin;
		one.bytes = d[i].end - begin;
		one.from = from - begin;
		one.count = num_min(d[i].end, end) - from;
		one.at = row->at + (from - row->from);
		one.digest = XXH3;
		one.segment = src->memory;
		one.segment_at = src->memory_at + begin;
		memcpy(one.xxh3_128, d[i].xxh3_128, sizeof one.xxh3_128);
		if (one.count)
			TRY(add_place(l, one));
	}
	return OK;
}

static FALLIBLE enum err add_row(struct locate *l, uint32_t box, const struct run_src *src, const struct src_info *info,
				 const struct src_row *row)
{
	struct place base = { .box = box, .file = src->file, .offset = src->offset + info->payload_off };

	if ((l->verify || src->memory) && src->by_blocks)
		return add_blocks(l, src, base, row);
	base.at = row->at;
	base.count = row->bytes;
	if (l->verify && atomic_load(&src->crc_state) == RUN_CRC_KNOWN) {
		base.bytes = info->payload_bytes;
		base.from = row->from;
		base.digest = CRC32;
		base.crc32 = src->crc_wanted;
	} else {
		base.offset += row->from;
		base.bytes = row->bytes;
	}
	return add_place(l, base);
}

/* One stored chunk that a box needs something of. */
static FALLIBLE enum err add_source(struct locate *l, const struct sd_chunk *chunk, uint32_t box, uint32_t index,
				    enum why *why_out)
{
	const struct run_src *src = &l->run.srcs[index];
	struct src_info *info;
	struct src_row row;

	if (sd_is_transformed(l->used->chunks[index].loc)) {
		*why_out = TRANSFORMED;
		return OK;
	}
	TRY(sources_info(&l->sources, index, &info));
	if (!sources_row(&l->run, src, info, (enum dtype)src->dtype, chunk->dims, &row)) {
		*why_out = info->deflated ? DEFLATED : info->conj || info->neg ? LAZY : LAYOUT;
		return OK;
	}
	/* an item's header was checked to lie in the item; a manifest's blocks may be of more than there is */
	if (!num_inside(row.from, row.bytes, info->payload_bytes) ||
	    (src->by_blocks && l->run.digests[src->digest_at + src->digest_count - 1].end > info->payload_bytes))
		return sources_at(&l->run, index, ERR(FORMAT_ITEM, "the item's record is too short"));
	if (l->verify && src->raw_digests && atomic_load(&src->crc_state) != RUN_CRC_KNOWN) {
		*why_out = UNCHECKED; /* a job compares the whole item with its digest */
		return OK;
	}
	return add_row(l, box, src, info, &row);
}

static FALLIBLE enum err place_box(struct locate *l, uint64_t i)
{
	const struct sd_chunk *chunk = &l->target->chunks[i];
	const struct sd_tensor *t = &l->target->tensors[chunk->tensor];
	uint64_t first = l->places.n, numel, read = 0, needed;
	uint32_t box = l->wanted.v[i].box;
	enum why why = WHY_NOT;

	TRY(box_numel(t->ndim, chunk->dims + t->ndim, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &needed));
	if (numel && l->plan.first[i] == l->plan.first[i + 1])
		why = HOLE;
	for (uint64_t k = l->plan.first[i]; k < l->plan.first[i + 1] && !why; k++) {
		if (!is_late(l)) /* it may read an item's head from a slow disk */
			TRY(add_source(l, chunk, box, l->plan.sources[k], &why));
		if (!why && (l->late || l->places.n > READS_MAX))
			why = LIMIT;
	}
	for (uint64_t k = first; k < l->places.n; k++)
		read += l->places.v[k].bytes;
	if (!why && read > WASTE_FREE && (read - WASTE_FREE) / 2 > needed)
		why = SPARSE;
	l->why[box] = (unsigned char)why;
	if (why)
		l->places.n = first;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ the answer */

static int by_box(const void *a, const void *b)
{
	const struct place *x = a, *y = b;

	return num_order(x->box, y->box) ?: num_order(x->at, y->at);
}

/* Writes the checkpoint's id and version. Other checkpoints may be saved to the same directory, file by file (posix_in_place.h): their
 * .metadata is a new file and goes last; one that was put away and is put back has another ctime. The id is empty if ranks have metadata
 * of their own: no single file would tell. */
static FALLIBLE enum err put_id(const struct checkpoint *c, struct buf *out)
{
	char id[IDENTITY_VERSION_MAX] = "";
	struct stat st;

	TRY(store_stat(c->dir, "", &st));
	if (format_is_dcp(c->format))
		identity_version(&st, &c->metadata, id);
	buf_printf(out, "{\"id\":\"%s\"", id);
	return OK;
}

/* Names a file of the run, once; *n: so many were named before. */
static void put_name(struct locate *l, struct buf *out, uint32_t file, uint32_t *n)
{
	if (l->shown[file])
		return;
	buf_puts(out, *n ? "," : "");
	buf_json_str(out, run_file_name(&l->run, &l->run.files[file]));
	l->shown[file] = ++*n;
}

static FALLIBLE enum err put_head(struct locate *l, struct buf *out)
{
	uint32_t files = 0, segments = 0;

	TRY(put_id(l->checkpoint, out));
	l->shown = mem_zalloc(l->run.files_n, sizeof *l->shown);
	NEED(l->shown, "no memory for %ju files", (uintmax_t)l->run.files_n);
	buf_puts(out, ",\"files\":[");
	for (uint64_t i = 0; i < l->places.n; i++)
		put_name(l, out, l->places.v[i].file, &files);
	buf_puts(out, "],\"segments\":[");
	for (uint64_t i = 0; i < l->places.n; i++)
		if (l->places.v[i].segment)
			put_name(l, out, l->places.v[i].segment - 1, &segments);
	return OK;
}

static void put_place(struct buf *out, const struct locate *l, const struct place *p)
{
	char hex[33];

	buf_printf(out, "{\"box\":%u,\"at\":%ju,\"file\":%u,\"offset\":%ju,\"bytes\":%ju,\"from\":%ju,\"count\":%ju", p->box,
		   (uintmax_t)p->at, l->shown[p->file] - 1, (uintmax_t)p->offset, (uintmax_t)p->bytes, (uintmax_t)p->from,
		   (uintmax_t)p->count);
	if (p->digest == XXH3) {
		digest_hex(p->xxh3_128, hex);
		buf_printf(out, ",\"xxh3\":\"%s\"", hex);
	} else if (p->digest == CRC32) {
		buf_printf(out, ",\"crc32\":\"%08x\"", p->crc32);
	}
	if (p->segment)
		buf_printf(out, ",\"segment\":%u,\"segment_offset\":%ju", l->shown[p->segment - 1] - 1, (uintmax_t)p->segment_at);
	buf_puts(out, "}");
}

static FALLIBLE enum err put_answer(struct locate *l, struct buf *out)
{
	uint64_t bytes = 0, n = 0;

	if (l->places.n)
		qsort(l->places.v, l->places.n, sizeof *l->places.v, by_box);
	TRY(put_head(l, out));
	buf_puts(out, "],\"reads\":[");
	for (uint64_t i = 0; i < l->places.n; i++) {
		buf_puts(out, i ? "," : "");
		put_place(out, l, &l->places.v[i]);
		bytes += l->places.v[i].count;
	}
	buf_puts(out, "],\"others\":[");
	for (uint64_t i = 0; i < json_array_size(l->boxes); i++)
		if (l->why[i])
			buf_printf(out, "%s{\"box\":%ju,\"why\":\"%s\"}", n++ ? "," : "", (uintmax_t)i, why_names[l->why[i]]);
	buf_printf(out, "],\"bytes\":%ju}", (uintmax_t)bytes);
	return buf_status(out);
}

/* The text goes in a memfd, as a slice's bytes do: it may be long, and the coordinator need not look into it. */
static FALLIBLE enum err answer(struct locate *l, const json_t *q, struct buf *out, int *fd_out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(FRAME_JSON_MAX);
	char identity[IDENTITY_MAX];

	TRY(put_answer(l, &text));
	TRY(lookup_room(q, text.len));
	*fd_out = memfd_create("dcpd-located", MFD_CLOEXEC);
	if (*fd_out < 0)
		return ERR_SYS(SYSTEM, "cannot make a memfd for an answer");
	if (identity_of(store_top(l->checkpoint->store), l->checkpoint->name, identity)) { /* gone by now: the client sees that by the id */
		identity[0] = '\0';
		err_clear();
	}
	buf_printf(out, "{\"bytes\":%zu,\"etag\":\"%s\"}", text.len, identity);
	return fs_pwrite(*fd_out, text.p, text.len, 0, "answer");
}

/* The time is up before anything has its place. */
static void give_up(struct locate *l)
{
	err_clear();
	for (uint64_t i = 0; i < l->wanted.n; i++)
		l->why[l->wanted.v[i].box] = LIMIT;
}

static FALLIBLE enum err place(struct locate *l, const struct worker *w)
{
	TRY(files_open(&l->run, &w->stores, NULL, 0, &l->files));
	TRY(sources_open(&l->run, &l->files, &l->sources));
	for (uint64_t i = 0; i < l->wanted.n; i++)
		TRY(place_box(l, i));
	return OK;
}

static FALLIBLE enum err locate(struct locate *l, struct worker *w, const json_t *q, struct buf *out, int *fd_out)
{
	size_t n = json_array_size(l->boxes);

	if (n > BOXES_MAX)
		return ERR(LIMIT_EXCEEDED, "%zu boxes at once", n);
	l->why = mem_zalloc(n, sizeof *l->why);
	l->arena = arena_new(UINT64_MAX);
	NEED(l->why && l->arena, "no memory for %zu boxes", n);
	l->problems.arena = l->arena;
	TRY(lookup_checkpoint(w, q, &l->checkpoint));
	TRY(checkpoint_check_whole(l->checkpoint));
	for (uint32_t i = 0; i < n; i++)
		TRY(want_box(l, i));
	TRY(make_target(l));
	enum err e = plan(l);
	if (e && !l->late)
		return e;
	if (l->late)
		give_up(l);
	else
		TRY(place(l, w));
	return answer(l, q, out, fd_out);
}

enum err lookup_locate(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out)
{
	struct locate l = { .boxes = json_object_get(q, "boxes"), .verify = !json_is_false(json_object_get(q, "verify")),
			    .list = json_object_get(q, "memory"), .fds = fds, .fd_count = fd_count,
			    .run = { .fd = -1 }, .end_ms = clock_mono_ms() + TIME_MAX_MS };

	enum err e = locate(&l, w, q, out, fd_out);
	if (e)
		fs_drop(fd_out);
	sources_close(&l.sources);
	if (l.files.run)
		files_close(&l.files);
	run_detach(&l.run);
	run_build_free(&l.build);
	memory_close(&l.memory);
	vec_free(&l.places);
	vec_free(&l.wanted);
	sdict_free(l.used);
	sdict_free(l.target);
	problems_free(&l.problems);
	arena_free(l.arena);
	checkpoint_free(l.checkpoint);
	mem_free(l.file_map);
	mem_free(l.shown);
	mem_free(l.why);
	return e;
}
