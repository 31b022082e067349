/* build_sources.c: the sources of a run, and the tasks that are driven by them (load, verify). See build.h. */
#include <stdlib.h>

#include "base/num.h"
#include "runner/build.h"
#include "runner/sources.h"
#include "store/checked.h"

enum { GAP_MAX = 64 << 10 };

static FALLIBLE enum err copy_digests(struct run_build *b, struct run_src *s, const struct manifest *m, const struct manifest_item *item)
{
	TRY(vec_reserve(&b->digests, item->digest_count));
	s->digest_at = b->digests.n;
	s->digest_count = item->digest_count;
	if (item->digest_count)
		memcpy(b->digests.v + b->digests.n, m->digests.v + item->digest_at, item->digest_count * sizeof *b->digests.v);
	b->digests.n += item->digest_count;
	return OK;
}

static FALLIBLE enum err add_digests(struct run_build *b, struct run_src *s, const struct manifest *m, struct str file)
{
	const struct manifest_item *item = m ? manifest_find(m, file, s->offset, s->length) : NULL;

	if (!item)
		return OK;
	s->raw_digests = item->raw;
	s->crc_wanted = item->raw && s->kind == RUN_SRC_ITEM ? 0 : item->crc32; /* of its payload */
	return copy_digests(b, s, m, item);
}

enum err build_raw_sources(struct run_build *b, const struct sdict *sd, const struct manifest *m, uint32_t first)
{
	CLEANUP(mem_free_ptr) bool *seen = m ? mem_zalloc(m->items.n, sizeof *seen) : NULL;

	if (!m)
		return OK;
	NEED(seen, "no memory for %ju items", (uintmax_t)m->items.n);
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct sd_loc *loc = &sd->chunks[i].loc;
		struct run_src *s = &b->srcs.v[first + i];
		const struct manifest_item *item = manifest_covering(m, sd->files[loc->file].name, loc->offset, loc->length);
		if (!item || !num_inside(item->offset, item->length, b->files.v[s->file].bytes))
			continue;
		bool *done = &seen[item - m->items.v];
		s->kind = RUN_SRC_RAW;
		s->raw_digests = true;
		s->offset = item->offset;
		s->length = *done ? 0 : item->length;
		s->digest_count = 0;
		if (!*done)
			TRY(copy_digests(b, s, m, item));
		*done = true;
	}
	return OK;
}

/* A record's CRC32 is of all its bytes: a source that is a part of it has nothing to be compared with. */
static void set_record(struct run_src *s, const struct sd_record *r)
{
	s->crc_wanted = r->crc32;
	atomic_store(&s->crc_state, RUN_CRC_KNOWN);
}

enum err build_records(struct run_build *b, const struct sdict *sd, uint32_t first)
{
	CLEANUP(mem_free_ptr) bool *seen = mem_zalloc(sd->record_count + 1, sizeof *seen);
	uint64_t numel;

	NEED(seen, "no memory for %ju records", (uintmax_t)sd->record_count);
	b->record_parts.n = 0;
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct sd_record *r = sdict_record(sd, sd->chunks[i].loc);
		struct run_src *s = &b->srcs.v[first + i];
		if (!r)
			continue;
		bool *done = &seen[r - sd->records];
		TRY(box_numel(s->ndim, b->dims.v + s->dims_at + s->ndim, &numel));
		if (s->length == r->length && numel * dtype_bytes((enum dtype)s->dtype) == r->length) {
			*done = true;
			continue;
		}
		s->kind = RUN_SRC_RAW;
		s->offset = r->offset;
		s->length = *done ? 0 : r->length;
		set_record(s, r);
		*done = true;
	}
	return OK;
}

static FALLIBLE enum err add_src(struct run_build *b, const struct sdict *sd, const uint32_t *file_map,
				 const struct manifest *manifest, struct run_src proto, struct str fqn,
				 struct sd_loc loc)
{
	struct run_src *s;

	TRY(vec_push(&b->srcs, &s));
	*s = proto;
	s->file = file_map[loc.file];
	s->offset = loc.offset;
	s->length = loc.length;
	s->fqn_len = (uint32_t)fqn.n;
	struct sd_origin origin = sd_origin_of(sd, loc);
	s->named_file = file_map[origin.file];
	s->named_at = origin.offset;
	return add_digests(b, s, manifest, sd->files[loc.file].name);
}

static FALLIBLE enum err add_strides(struct run_build *b, const struct sd_strided *view, uint32_t ndim, struct run_src *s)
{
	TRY(vec_reserve(&b->dims, ndim));
	s->strides_at = 1 + b->dims.n;
	s->conj = view->conj;
	s->neg = view->neg;
	s->q8_0 = view->q8_0;
	if (ndim)
		memcpy(b->dims.v + b->dims.n, view->strides, ndim * sizeof *view->strides);
	b->dims.n += ndim;
	return OK;
}

static FALLIBLE enum err add_record_part(struct run_build *b, const struct sd_record *r, struct sd_loc loc, uint32_t file)
{
	struct run_record_part *p;

	TRY(vec_push(&b->record_parts, &p));
	*p = (struct run_record_part){ .src = (uint32_t)b->srcs.n, .file = file, .crc32 = r->crc32, .offset = r->offset,
				       .length = r->length, .begin = loc.offset - r->offset, .end = loc.offset - r->offset + loc.length };
	return OK;
}

static FALLIBLE enum err add_chunk_src(struct run_build *b, const struct sdict *sd, const uint32_t *file_map, const struct manifest *m,
				       struct run_src proto, const struct sd_chunk *c)
{
	const struct sd_record *r = sdict_record(sd, c->loc);
	const struct sd_strided *view = sd_strided_of(sd, c->loc);

	TRY(run_add_dims(b, c->dims, proto.ndim, &proto.dims_at));
	if (b->files.v[file_map[c->loc.file]].kind == RUN_FILE_SPOOL && !(c->loc.transform & SD_SPOOLED))
		proto.kind = RUN_SRC_PLAIN; /* elements, not an item */
	if (view) { /* which bare bytes have, and no archive */
		proto.kind = RUN_SRC_PLAIN;
		TRY(add_strides(b, view, proto.ndim, &proto));
	}
	if (r && r->offset == c->loc.offset && r->length == c->loc.length)
		set_record(&proto, r);
	else if (r && c->loc.length)
		TRY(add_record_part(b, r, c->loc, file_map[c->loc.file]));
	return add_src(b, sd, file_map, m, proto, sd->tensors[c->tensor].fqn, c->loc);
}

enum err build_sources(struct run_build *b, const struct sdict *sd, enum run_src_kind kind, const uint32_t *file_map,
		       const struct manifest *manifest, uint32_t *first_out)
{
	uint64_t fqn_at = 0;
	uint32_t tensor = UINT32_MAX;

	*first_out = (uint32_t)b->srcs.n;
	TRY(vec_reserve(&b->srcs, sd->chunk_count + sd->value_count));
	each(c, sd->chunks, sd->chunk_count) {
		const struct sd_tensor *t = &sd->tensors[c->tensor];
		struct run_src proto = { .kind = (uint8_t)kind, .dtype = (uint8_t)t->dtype, .ndim = t->ndim, .rank = c->rank };
		if (c->tensor != tensor)
			TRY(run_add_string(b, t->fqn, &fqn_at));
		tensor = c->tensor;
		proto.fqn_at = fqn_at;
		TRY(add_chunk_src(b, sd, file_map, manifest, proto, c));
	}
	each(v, sd->values, sd->value_count) {
		struct run_src proto = { .kind = RUN_SRC_RAW, .rank = v->rank };
		if (v->kind != SD_VALUE_STORED)
			continue;
		TRY(run_add_string(b, v->fqn, &proto.fqn_at));
		TRY(add_src(b, sd, file_map, manifest, proto, v->fqn, v->loc));
	}
	return OK;
}

enum err build_other_source(struct run_build *b, uint32_t dir, struct str name, uint64_t bytes, const struct manifest *manifest,
			    uint32_t *src_out)
{
	struct run_src *s;

	*src_out = (uint32_t)b->srcs.n;
	TRY(vec_push(&b->srcs, &s));
	*s = (struct run_src){ .kind = RUN_SRC_RAW, .length = bytes };
	TRY(run_add_file(b, RUN_FILE_SOURCE, dir, name, bytes, &s->file));
	s->named_file = s->file;
	TRY(add_digests(b, s, manifest, name));
	if (!s->digest_count) /* nothing to compare it with: it is not scanned */
		atomic_store(&s->unverified, bytes);
	return OK;
}

static FALLIBLE enum err add_view(struct run_build *b, const struct view *v, uint32_t ndim, const uint32_t *base)
{
	struct run_src *s;
	int64_t *dims;

	TRY(vec_push(&b->srcs, &s));
	s->zeros = v->source == VIEW_ZEROS;
	s->kind = RUN_SRC_PLAIN;
	if (!s->zeros) {
		*s = b->srcs.v[base[v->source]]; /* its place, dtype, FQN and digests */
		s->view_of = base[v->source] + 1;
	}
	s->ndim = ndim;
	s->cast_count = v->cast_count;
	memcpy(s->casts, v->casts, sizeof s->casts);
	TRY(run_add_dims(b, v->dims, ndim, &s->dims_at));
	s->view_at = b->dims.n;
	TRY(vec_reserve(&b->dims, ndim + 1u));
	dims = b->dims.v + b->dims.n;
	dims[0] = v->first;
	memcpy(dims + 1, v->dims + 2 * ndim, ndim * sizeof *dims);
	b->dims.n += ndim + 1u;
	return OK;
}

enum err build_views(struct run_build *b, const struct sdict *sd, const struct view *views, const uint32_t *base, uint32_t *first_out)
{
	*first_out = (uint32_t)b->srcs.n;
	TRY(vec_reserve(&b->srcs, sd->chunk_count));
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		TRY(add_view(b, &views[i], sd->tensors[sd->chunks[i].tensor].ndim, base));
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- scans */

enum err build_payload_bytes(const struct run_build *b, const struct run_src *s, uint64_t *out)
{
	uint64_t numel;

	if (s->kind == RUN_SRC_RAW) {
		*out = s->length;
		return OK;
	}
	TRY(box_numel(s->ndim, b->dims.v + s->dims_at + s->ndim, &numel));
	return num_mul(numel, dtype_bytes((enum dtype)s->dtype), out);
}

static FALLIBLE enum err add_scan(struct run_build *b, uint32_t src, uint64_t begin, uint64_t end)
{
	struct run_scan *scan;

	TRY(vec_push(&b->scans, &scan));
	*scan = (struct run_scan){ .src = src, .begin = begin, .end = end };
	b->srcs.v[src].scan_count++;
	return OK;
}

/* Do the manifest's digest blocks of a payload (of all bytes of a value) fit a task and add up? */
static bool digests_usable(struct run_build *b, const struct run_src *s, uint64_t bytes)
{
	uint64_t at = 0;

	if (s->raw_digests && s->kind == RUN_SRC_ITEM)
		return false;

	if (s->digest_count == 1 && b->digests.v[s->digest_at].end == UINT64_MAX)
		b->digests.v[s->digest_at].end = bytes;
	for (uint32_t i = 0; i < s->digest_count; i++) {
		uint64_t end = b->digests.v[s->digest_at + i].end;
		if (end < at || end - at > BUILD_TASK_BYTES + BUILD_TASK_BYTES / 2)
			return false;
		at = end;
	}
	return s->digest_count > 0 && at == bytes;
}

/* Sets by_blocks: its digests can be compared block by block. Others, unless of a raw item, are dropped. bytes: of its payload. */
static void settle_digests(struct run_build *b, struct run_src *s, uint64_t bytes)
{
	s->by_blocks = digests_usable(b, s, bytes);
	if (!s->by_blocks && !s->raw_digests)
		s->digest_count = 0;
}

bool build_comparable(struct run_build *b, struct run_src *s, uint64_t bytes)
{
	settle_digests(b, s, bytes);
	return s->kind != RUN_SRC_PLAIN || s->digest_count || s->crc_wanted || atomic_load(&s->crc_state) == RUN_CRC_KNOWN;
}

/* Of one scan: less than all of a small ring. */
static uint64_t scan_most(const struct run_build *b, const struct run_src *s)
{
	uint64_t ring = b->files.v[s->file].ring_bytes;

	return ring ? num_min(ring / 4, BUILD_TASK_BYTES) : BUILD_TASK_BYTES;
}

/* Scans over [lo, hi) of source `src`, whole blocks of it. */
static FALLIBLE enum err cut_source(struct run_build *b, uint32_t src, uint64_t lo, uint64_t hi)
{
	struct run_src *s = &b->srcs.v[src];
	uint64_t bytes = 0, at = 0, most = scan_most(b, s);

	TRY(build_payload_bytes(b, s, &bytes));
	TRY(build_room(b->scans.n, bytes / most + 1));
	s->first_scan = b->scans.n;
	s->scan_count = 0;
	settle_digests(b, s, bytes);
	uint32_t blocks = s->by_blocks ? s->digest_count : 0;
	for (uint32_t i = 0; at < bytes || (i == 0 && bytes == 0); i++) {
		uint64_t end = blocks ? b->digests.v[s->digest_at + i].end : num_min(at + most, bytes);
		if ((at < hi && end > lo) || bytes == 0)
			TRY(add_scan(b, src, at, end));
		else
			s->partial = true;
		at = end;
		if (bytes == 0)
			break;
	}
	s->scans_left = s->scan_count;
	return OK;
}

enum err build_scans(struct run_build *b, uint32_t src)
{
	return b->srcs.v[src].scan_count ? OK : cut_source(b, src, 0, UINT64_MAX);
}

struct scan_order {
	uint32_t file, src, rank;
	uint64_t offset, lo, hi;       /* lo, hi: the part of the payload that is needed */
};

static int by_place(const void *a, const void *b)
{
	const struct scan_order *x = a, *y = b;

	return num_order(x->rank, y->rank) ?: num_order(x->file, y->file) ?: num_order(x->offset, y->offset) ?: num_order(x->src, y->src);
}

static FALLIBLE enum err begin_task(struct run_build *b, uint32_t rank, uint64_t first)
{
	struct run_task *t;
	struct run_rank *k;

	if (b->ranks.n == 0 || b->ranks.v[b->ranks.n - 1].rank != rank) {
		TRY(vec_push(&b->ranks, &k));
		k->rank = rank;
		k->first_task = b->tasks.n;
	}
	b->ranks.v[b->ranks.n - 1].task_count++;
	TRY(vec_push(&b->tasks, &t));
	t->first = first;
	t->rank_index = (uint32_t)b->ranks.n - 1;
	return OK;
}

/* Adds one source's scans to the tasks; *filled: bytes in the task being made. */
static FALLIBLE enum err task_scans(struct run_build *b, const struct scan_order *o, uint64_t *filled)
{
	TRY(cut_source(b, o->src, o->lo, o->hi));
	const struct run_src *s = &b->srcs.v[o->src];
	for (uint32_t k = 0; k < s->scan_count; k++) {
		uint64_t scan = s->first_scan + k;
		uint64_t bytes = b->scans.v[scan].end - b->scans.v[scan].begin;
		uint64_t cost = num_max(bytes, s->length <= BUILD_SMALL_BYTES ? s->length : 0) + 8192;
		bool same_rank = b->ranks.n && b->ranks.v[b->ranks.n - 1].rank == o->rank;
		if (!same_rank || s->sparse || *filled == 0 || *filled + cost > BUILD_TASK_BYTES) {
			TRY(begin_task(b, o->rank, scan));
			*filled = 0;
		}
		*filled += s->sparse ? BUILD_TASK_BYTES : cost;
		b->tasks.v[b->tasks.n - 1].count++;
		if (b->opts.mode != RUN_FILL_SEGMENTS || s->piece_count) /* else it is read to be compared */
			b->ranks.v[b->ranks.n - 1].bytes_total += bytes;
	}
	return OK;
}

/* Will the source's scans be all of it, byte by byte? */
static bool is_whole(const struct run_build *b, const struct run_src *s, const struct scan_order *o)
{
	uint64_t most = scan_most(b, s);

	return s->kind == RUN_SRC_PLAIN && !s->strides_at && s->length && o->lo < most && o->hi > (s->length - 1) / most * most;
}

static FALLIBLE enum err sum_records(struct run_build *b, const struct scan_order *order, uint64_t n)
{
	CLEANUP(mem_free_ptr) uint8_t *taken = mem_zalloc(b->srcs.n, sizeof *taken);

	NEED(taken, "no memory for %ju sources", (uintmax_t)b->srcs.n);
	for (uint64_t i = 0; i < n; i++)
		taken[order[i].src] = is_whole(b, &b->srcs.v[order[i].src], &order[i]) ? BUILD_TAKEN_WHOLE : BUILD_TAKEN;
	return build_record_sums(b, taken);
}

/* Scans in the order they lie on the disk, small ones together. */
static FALLIBLE enum err make_scan_tasks(struct run_build *b, const struct scan_order *order, uint64_t n)
{
	uint64_t filled = 0, before = b->srcs.n;

	if (b->opts.verify && b->record_parts.n)
		TRY(sum_records(b, order, n));
	CLEANUP(mem_free_ptr) struct scan_order *all = mem_zalloc(n + b->srcs.n - before + 1, sizeof *all);
	NEED(all, "no memory for %ju sources", (uintmax_t)b->srcs.n);
	if (n)
		memcpy(all, order, n * sizeof *all);
	for (uint64_t i = before; i < b->srcs.n; i++) {
		const struct run_src *s = &b->srcs.v[i];
		if (build_is_rest(s))
			all[n++] = (struct scan_order){ s->file, (uint32_t)i, s->rank, s->offset, 0, UINT64_MAX };
	}
	qsort(all, n, sizeof *all, by_place);
	for (uint64_t i = 0; i < n; i++)
		TRY(task_scans(b, &all[i], &filled));
	return OK;
}

static FALLIBLE enum err add_index(struct run_build *b, const struct manifest *m, const struct manifest_item *item, uint32_t file)
{
	struct run_src *s;

	TRY(vec_push(&b->srcs, &s));
	*s = (struct run_src){ .kind = RUN_SRC_RAW, .raw_digests = true, .file = file, .named_file = file, .rank = b->files.v[file].rank,
			       .offset = item->offset, .length = item->length, .named_at = item->offset };
	return copy_digests(b, s, m, item);
}

enum err build_indexes(struct run_build *b, const struct sdict *sd, const uint32_t *file_map, const struct manifest *m)
{
	CLEANUP(mem_free_ptr) uint64_t *last = mem_zalloc(sd->file_count + 1, sizeof *last);

	NEED(last, "no memory for %ju files", (uintmax_t)sd->file_count);
	/* Per file, where the last chunk or value begins. */
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		last[sd->chunks[i].loc.file] = num_max(last[sd->chunks[i].loc.file], sd->chunks[i].loc.offset);
	for (uint64_t i = 0; i < sd->value_count; i++)
		if (sd->values[i].kind == SD_VALUE_STORED)
			last[sd->values[i].loc.file] = num_max(last[sd->values[i].loc.file], sd->values[i].loc.offset);
	for (uint32_t i = 0; m && i < sd->file_count; i++) {
		uint32_t f = sd->files[i].name.n ? map_get(&m->names, sd->files[i].name) : MAP_NONE;
		if (f == MAP_NONE || m->files.v[f].item_count == 0)
			continue;
		const struct manifest_item *item = &m->items.v[m->files.v[f].first_item + m->files.v[f].item_count - 1];
		if (item->raw && item->offset > last[i] && num_inside(item->offset, item->length, b->files.v[file_map[i]].bytes))
			TRY(add_index(b, m, item, file_map[i]));
	}
	return OK;
}

/* In a file that dcpd wrote there are zeros between an item's end and the next item, or the file's end. */
static void add_gap(struct run_src *s, const struct manifest *m, const struct manifest_item *item, uint64_t file_bytes)
{
	const struct manifest_file *f = &m->files.v[item->file];
	bool last = (uint64_t)(item - m->items.v) + 1 == f->first_item + f->item_count;
	uint64_t end = s->offset + s->length, next = num_min(last ? f->bytes : item[1].offset, file_bytes);

	s->gap = next > end ? (uint32_t)num_min(next - end, GAP_MAX) : 0;
}

static FALLIBLE enum err add_edges(struct run_build *b, struct run_src *s, const struct manifest *m)
{
	const struct run_file *f = &b->files.v[s->file];
	const struct manifest_item *item = manifest_find(m, (struct str){ b->strings.v + f->name_at, f->name_len }, s->offset, s->length);
	struct block_digest *d;

	if (f->kind != RUN_FILE_SOURCE || !item)
		return OK;
	if (m->files.v[item->file].mtime_ns) /* as it is with manifests of this version */
		add_gap(s, m, item, f->bytes);
	if (s->kind != RUN_SRC_ITEM || !item->has_edges)
		return OK;
	TRY(vec_push(&b->digests, &d));
	memcpy(d->xxh3_128, item->edges, sizeof d->xxh3_128);
	s->edges_at = b->digests.n;
	return OK;
}

enum err build_edges(struct run_build *b, const struct manifest *m, uint32_t first)
{
	for (uint64_t i = first; m && i < b->srcs.n; i++)
		TRY(add_edges(b, &b->srcs.v[i], m));
	return OK;
}

enum err build_stats(struct run_build *b, uint32_t first, uint64_t count)
{
	struct run_stats *t;

	for (uint64_t i = first; i < first + count; i++) {
		if (i == first || b->srcs.v[i].fqn_at != b->srcs.v[i - 1].fqn_at)
			TRY(vec_push(&b->stats, &t));
		b->srcs.v[i].stats = (uint32_t)b->stats.n - 1;
	}
	return OK;
}

/* Elements that lie in no row (in an item the head says whether they do, unless dcpd wrote it) come by a target of the source's own box. */
static FALLIBLE enum err add_gather(struct run_build *b, uint32_t src)
{
	struct run_src *s = &b->srcs.v[src];
	struct item_layout l;
	struct run_dst *d;

	if (s->kind == RUN_SRC_PLAIN ? !s->strides_at : sources_layout(s, b->dims.v + s->dims_at + s->ndim, &l))
		return OK;
	TRY(vec_reserve(&b->pieces, 2));
	s->first_piece = b->pieces.n;
	s->piece_count = 1;
	b->pieces.v[b->pieces.n++] = (uint32_t)b->dsts.n;
	TRY(vec_push(&b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = s->dtype, .bare = true, .ndim = s->ndim, .rank = s->rank, .file = s->file,
			       .fqn_at = s->fqn_at, .fqn_len = s->fqn_len, .dims_at = s->dims_at, .first_piece = b->pieces.n,
			       .piece_count = 1 };
	b->pieces.v[b->pieces.n++] = src;
	return OK;
}

enum err build_all_stats(struct run_build *b, uint32_t first)
{
	uint64_t count = b->srcs.n - first;

	TRY(build_stats(b, first, count));
	for (uint64_t i = 0; i < count; i++)
		TRY(add_gather(b, first + (uint32_t)i));
	TRY(build_verify(b, first));
	TRY(vec_reserve(&b->sums, b->scans.n));
	TRY(vec_reserve(&b->bins, b->stats.n * STATS_BINS));
	b->sums.n = b->scans.n;
	b->bins.n = b->stats.n * STATS_BINS;
	memset(b->sums.v, 0, b->sums.n * sizeof *b->sums.v);
	memset(b->bins.v, 0, b->bins.n * sizeof *b->bins.v);
	return OK;
}

static FALLIBLE enum err add_damages(struct run_build *b)
{
	struct run_damage *d;

	for (uint32_t i = 0; i < CHECKED_LISTED; i++)
		TRY(vec_push(&b->damages, &d));
	return OK;
}

enum err build_verify(struct run_build *b, uint32_t first_src)
{
	uint64_t n = b->srcs.n - first_src;
	CLEANUP(mem_free_ptr) struct scan_order *order = mem_zalloc(n, sizeof *order);

	NEED(order, "no memory for %ju sources", (uintmax_t)n);
	TRY(add_damages(b));
	for (uint64_t i = 0; i < n; i++) {
		const struct run_src *s = &b->srcs.v[first_src + i];
		order[i] = (struct scan_order){ s->file, (uint32_t)(first_src + i), s->rank, s->offset, 0, UINT64_MAX };
	}
	return make_scan_tasks(b, order, n);
}

/* ------------------------------------------------------------------------------------------------------- fill */

/* Widens [lo, hi), the range of source chunk s's payload (C order) that target chunk t needs, and counts its elements. */
static void widen(const struct sd_chunk *s, const struct sd_chunk *t, uint32_t n, uint64_t *lo, uint64_t *hi,
		  uint64_t *needed)
{
	int64_t off[NDIM_MAX], size[NDIM_MAX];
	uint64_t first = 0, last = 0, numel = 1;

	if (!box_intersect(n, s->dims, s->dims + n, t->dims, t->dims + n, off, size))
		return;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t pitch = (uint64_t)s->dims[n + i], at = (uint64_t)(off[i] - s->dims[i]);
		first = first * pitch + at;
		last = last * pitch + at + (uint64_t)size[i] - 1;
		numel *= (uint64_t)size[i];
	}
	*lo = num_min(*lo, first);
	*hi = num_max(*hi, last + 1);
	*needed += numel;
}

/* Turns "target chunk → sources" round into "source → target chunks" (pieces of the run). */
static FALLIBLE enum err invert(struct run_build *b, uint64_t chunk_count, uint32_t first_src, uint32_t first_dst,
				const struct load_plan *plan, uint64_t source_chunks)
{
	TRY(vec_reserve(&b->pieces, plan->source_count));
	for (uint64_t k = 0; k < plan->source_count; k++)
		b->srcs.v[first_src + plan->sources[k]].piece_count++;
	uint64_t at = b->pieces.n;
	for (uint64_t i = 0; i < source_chunks; i++) {
		struct run_src *s = &b->srcs.v[first_src + i];
		s->first_piece = at;
		at += s->piece_count;
		s->piece_count = 0;
	}
	b->pieces.n = at;
	for (uint64_t i = 0; i < chunk_count; i++)
		for (uint64_t k = plan->first[i]; k < plan->first[i + 1]; k++) {
			struct run_src *s = &b->srcs.v[first_src + plan->sources[k]];
			b->pieces.v[s->first_piece + s->piece_count++] = (uint32_t)(first_dst + i);
		}
	return OK;
}

static FALLIBLE enum err add_segment_dst(struct run_build *b, const struct sdict *target, uint64_t chunk,
					 const uint32_t *segment_files)
{
	const struct sd_chunk *c = &target->chunks[chunk];
	const struct sd_tensor *t = &target->tensors[c->tensor];
	struct run_dst *d;

	TRY(vec_push(&b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)t->dtype, .bare = true, .ndim = t->ndim,
			       .rank = c->rank, .file = segment_files[c->loc.file], .offset = c->loc.offset,
			       .payload_bytes = c->loc.length, .length = c->loc.length,
			       .fqn_len = (uint32_t)t->fqn.n };
	if (chunk > t->first_chunk)
		d->fqn_at = b->dsts.v[b->dsts.n - 2].fqn_at;
	else
		TRY(run_add_string(b, t->fqn, &d->fqn_at));
	return run_add_dims(b, c->dims, t->ndim, &d->dims_at);
}

/* Is a part of the payload a range of bytes that can be told from metadata, and be checked by itself? Other items are read whole: their
 * strides are in their heads, and one CRC32 is of all. */
static bool can_cut(struct run_build *b, const struct run_src *s)
{
	const int64_t *sizes = b->dims.v + s->dims_at + s->ndim;
	struct item_layout l;

	if (s->kind != RUN_SRC_ITEM)
		return s->kind == RUN_SRC_PLAIN && !s->strides_at;
	return sources_layout(s, sizes, &l) && digests_usable(b, s, l.payload_bytes);
}

static uint64_t numel_of(const struct sd_chunk *c, uint32_t ndim)
{
	uint64_t n = 0;

	return box_numel(ndim, sd_sizes(c, ndim), &n) ? 0 : n;
}

enum err build_fill(struct run_build *b, const struct sdict *target, const uint32_t *segment_files,
		    const struct sdict *source, uint32_t first_src, const struct load_plan *plan)
{
	uint32_t first_dst = (uint32_t)b->dsts.n;
	uint64_t n = 0;
	CLEANUP(mem_free_ptr) struct scan_order *order = mem_zalloc(source->chunk_count, sizeof *order);

	NEED(order, "no memory for %ju sources", (uintmax_t)source->chunk_count);
	for (uint64_t i = 0; i < target->chunk_count; i++)
		TRY(add_segment_dst(b, target, i, segment_files));
	TRY(invert(b, target->chunk_count, first_src, first_dst, plan, source->chunk_count));
	for (uint64_t i = 0; i < source->chunk_count; i++) {
		struct run_src *s = &b->srcs.v[first_src + i];
		uint64_t lo = UINT64_MAX, hi = 0, needed = 0, item = dtype_bytes((enum dtype)s->dtype);
		for (uint32_t k = 0; k < s->piece_count; k++)
			widen(&source->chunks[i], &target->chunks[b->pieces.v[s->first_piece + k] - first_dst], s->ndim,
			      &lo, &hi, &needed);
		if (s->piece_count == 0)
			continue;
		uint64_t numel = numel_of(&source->chunks[i], s->ndim), span = hi - lo;
		bool cuttable = can_cut(b, s);
		s->sparse = !b->opts.verify && ((needed * 2 < span && span * item > BUILD_SMALL_BYTES) ||
						(span < numel && !cuttable && numel * item > BUILD_SMALL_BYTES));
		bool all = s->sparse || !cuttable;
		order[n++] = (struct scan_order){ s->file, (uint32_t)(first_src + i), s->rank, s->offset, all ? 0 : lo * item,
						  all ? UINT64_MAX : hi * item };
	}
	return make_scan_tasks(b, order, n);
}

/* The views of one target chunk: what the read plan brings to it. */
static FALLIBLE enum err add_views(struct run_build *b, struct run_dst *d, uint32_t first_src, const struct load_plan *plan,
				   uint64_t chunk)
{
	uint64_t n = plan->first[chunk + 1] - plan->first[chunk];

	d->first_piece = b->pieces.n;
	d->piece_count = (uint32_t)n;
	TRY(vec_reserve(&b->pieces, n + 1)); /* and one for the source that stands for the target */
	for (uint64_t k = plan->first[chunk]; k < plan->first[chunk + 1]; k++)
		b->pieces.v[b->pieces.n++] = first_src + plan->sources[k];
	return OK;
}

/* A source that stands for a target chunk: its scans are the ranges that the read plan fills, next to those that compare its first view. */
static FALLIBLE enum err add_made(struct run_build *b, uint32_t dst, struct scan_order *out)
{
	const struct run_dst d = b->dsts.v[dst];
	struct run_src *s;

	*out = (struct scan_order){ d.file, (uint32_t)b->srcs.n, d.rank, d.offset, 0, UINT64_MAX };
	for (uint32_t k = d.piece_count; k-- > 0;) {
		const struct run_src *from = &b->srcs.v[b->pieces.v[d.first_piece + k]];
		if (!from->zeros) {
			out->file = from->file;
			out->rank = from->rank;
			out->offset = from->offset;
		}
	}
	TRY(vec_push(&b->srcs, &s));
	*s = (struct run_src){ .kind = RUN_SRC_PLAIN, .dtype = d.dtype, .ndim = d.ndim, .rank = d.rank, .file = d.file, .offset = d.offset,
			       .named_file = d.file, .named_at = d.offset, .length = d.length, .fqn_at = d.fqn_at, .fqn_len = d.fqn_len,
			       .dims_at = d.dims_at, .first_piece = b->pieces.n, .piece_count = 1 };
	b->pieces.v[b->pieces.n++] = dst;
	return OK;
}

/* The stored source behind a view is read to be compared, unless it is summed: compared as it is copied. Without checks, or without
 * anything to compare it with, it is counted as unverified. *n: of `order`. */
static FALLIBLE enum err add_compared(struct run_build *b, uint32_t view, bool *seen, struct scan_order *order, uint64_t *n)
{
	uint32_t src = run_src_base(&b->srcs.v[view], view);
	struct run_src *s = &b->srcs.v[src];
	uint64_t bytes = 0;

	if (s->zeros || s->summed || seen[src])
		return OK;
	seen[src] = true;
	TRY(build_payload_bytes(b, s, &bytes));
	bool comparable = build_comparable(b, s, bytes) || b->record_parts.n;
	if (!b->opts.verify || !comparable)
		atomic_store(&s->unverified, s->length);
	else
		order[(*n)++] = (struct scan_order){ s->file, src, s->rank, s->offset, 0, UINT64_MAX };
	return OK;
}

enum err build_fill_views(struct run_build *b, const struct sdict *target, const uint32_t *segment_files, uint32_t first_src,
			  const struct load_plan *plan)
{
	uint64_t n = 0;
	uint32_t srcs = (uint32_t)b->srcs.n;
	CLEANUP(mem_free_ptr) bool *seen = mem_zalloc(srcs, sizeof *seen);
	CLEANUP(mem_free_ptr) struct scan_order *order = mem_zalloc(srcs + target->chunk_count, sizeof *order);

	NEED(order && seen, "no memory for %u sources", srcs);
	if (b->opts.verify && !b->record_parts.n)
		TRY(build_load_sums(b, target, first_src, plan));
	for (uint64_t i = 0; i < target->chunk_count; i++) {
		uint32_t dst = (uint32_t)b->dsts.n;
		TRY(add_segment_dst(b, target, i, segment_files));
		TRY(add_views(b, &b->dsts.v[dst], first_src, plan, i));
		for (uint64_t k = plan->first[i]; k < plan->first[i + 1]; k++)
			TRY(add_compared(b, first_src + plan->sources[k], seen, order, &n));
		if (b->dsts.v[dst].length)
			TRY(add_made(b, dst, &order[n++]));
	}
	return make_scan_tasks(b, order, n);
}

enum err build_source_files(struct run_build *b, const struct checkpoint *c, uint32_t **file_map_out)
{
	const char *slash = c->single ? strrchr(c->name, '/') : NULL;
	struct str path = { c->name, slash ? (size_t)(slash - c->name) : c->single ? 0 : strlen(c->name) };
	uint32_t dir;

	TRY(run_add_dir(b, c->store->index, path, &dir));
	b->dirs.v[dir].is_source = true;
	uint32_t *map = mem_zalloc(c->sd->file_count, sizeof *map);
	*file_map_out = map;
	NEED(map, "no memory for %ju files", (uintmax_t)c->sd->file_count);
	for (uint64_t i = 0; i < c->sd->file_count; i++) {
		const struct sd_file *f = &c->sd->files[i];
		bool spool = f->name.n == 0; /* the last one, see spool.h */
		TRY(run_add_file(b, spool ? RUN_FILE_SPOOL : RUN_FILE_SOURCE, dir, f->name, c->file_bytes[i], &map[i]));
		b->files.v[map[i]].rank = f->rank;
		if (spool)
			b->files.v[map[i]].fd_index = f->rank;
	}
	return OK;
}
