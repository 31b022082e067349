/* exec_scan.c: src-driven tasks: read a range of a stored item once, compare its digest while it is hot, and scatter it to all target
 * chunks that need it (load), or count what is in it (verify, stats).
 *
 * No byte is taken unchecked: a scan is a digest block, or all scans of a source make up the record that one CRC32 is of; an item that is
 * neither (deflated, a view of a larger storage) is compared as a whole by blocking reads. Bytes without a digest are counted in their
 * source's `unverified`. Verify notes what is damaged and goes on.
 *
 * The fast path of a load: the range is one run of bytes in one target chunk, so it is read straight into the segment, whose pages are
 * entered into the page tables in one call: a fault for each costs more than the copy of its bytes. What a segment still has of the
 * checkpoint is taken from there (exec_memory.c). What is not in the page cache is read past it (O_DIRECT), through the
 * wave's memory where it lies on no page boundaries. */
#include <stdio.h>

#include "base/num.h"
#include "io/digest.h"
#include "os/fs.h"
#include "runner/content_sums.h"
#include "runner/exec_impl.h"
#include "runner/spread.h"
#include "runner/sums.h"
#include "store/checked.h"
#include "tensor/linear.h"

enum { CACHED_MIN = 64 << 10, POPULATE_MIN = 64 << 10, POPULATE_SPARSE = 8 };

enum err exec_scan_begin(struct slot *s)
{
	const struct run_task *t = &s->x->run->tasks[s->task];
	struct slot_scan *sc;

	read_plan_begin(&s->reads);
	s->scans.n = s->next_scan = s->out_used = 0;
	s->wave.ops.n = s->wave.reads.n = 0;
	for (uint32_t i = 0; i < t->count; i++) {
		TRY(vec_push(&s->scans, &sc));
		sc->scan = t->first + i;
	}
	s->phase = SLOT_FETCH;
	return OK;
}

/* Finds the memory of dst's payload. */
static FALLIBLE enum err dst_memory(struct slot *s, const struct run_dst *d, unsigned char **out)
{
	TRY(files_segment(&s->x->files, d->file, out));
	*out = (unsigned char *)((uintptr_t)*out + d->offset); /* RUN_FILE_MEMORY: NULL, and an address */
	return OK;
}

/* Enters the pages that a box of the target chunk `to` will be copied to, unless they are few, or most bytes of them are not the box's. */
static void populate_box(const struct run *run, const struct run_dst *d, const int64_t *to, const int64_t *off, const int64_t *size,
			 unsigned char *base)
{
	uint64_t item = dtype_bytes((enum dtype)d->dtype), bytes = box_volume(d->ndim, size) * item, first = 0, last = 0;

	if (run->files[d->file].kind != RUN_FILE_SEGMENT || bytes < POPULATE_MIN)
		return;
	for (uint32_t i = 0; i < d->ndim; i++) {
		first = first * (uint64_t)to[d->ndim + i] + (uint64_t)off[i];
		last = last * (uint64_t)to[d->ndim + i] + (uint64_t)(off[i] + size[i] - 1);
	}
	if ((last + 1 - first) * item / POPULATE_SPARSE <= bytes)
		seg_populate(base + first * item, (last + 1 - first) * item, false);
}

/* The range is a part of one run of the only target chunk: it can be read to its place. */
static FALLIBLE enum err find_direct(struct slot *s, const struct run_src *src, const struct src_info *info,
				     const struct run_scan *scan, struct slot_scan *sc)
{
	const struct run *run = s->x->run;
	struct src_row row;
	unsigned char *base;

	if (!exec_fills(run) || src->piece_count != 1)
		return OK;
	const struct run_dst *d = &run->dsts[run->pieces[src->first_piece]];
	if (!sources_row(run, src, info, (enum dtype)d->dtype, run->dims + d->dims_at, &row) || scan->begin < row.from ||
	    scan->end - row.from > row.bytes)
		return OK;
	TRY(dst_memory(s, d, &base));
	sc->direct = true;
	sc->direct_at = base + row.at + (scan->begin - row.from);
	if (run->files[d->file].kind == RUN_FILE_SEGMENT)
		seg_populate(sc->direct_at, scan->end - scan->begin, false);
	return OK;
}

/* Leaves the source to the read plan, box by box: its elements lie in no row, or too few of them are needed. */
static FALLIBLE enum err use_read_plan(struct slot *s, const struct run_src *src, uint32_t index)
{
	const struct run *run = s->x->run;

	for (uint32_t p = 0; exec_fills(run) && p < src->piece_count; p++) {
		uint32_t dst = run->pieces[src->first_piece + p];
		unsigned char *base;
		TRY(dst_memory(s, &run->dsts[dst], &base));
		TRY(read_plan_add_pair(&s->reads, index, dst, base));
	}
	return OK;
}

/* A load's source that lies in a segment of the target stands for a target that conversion rules make (build_fill_views). */
static bool is_made(const struct run *run, const struct run_src *src)
{
	return exec_fills(run) && run->files[src->file].kind == RUN_FILE_SEGMENT && run->files[src->file].writable;
}

/* Leaves a range of such a target to the read plan, which brings what is no zero to it. */
static FALLIBLE enum err make_range(struct slot *s, const struct run_scan *scan)
{
	const struct run *run = s->x->run;
	uint32_t dst = run->pieces[run->srcs[scan->src].first_piece];
	const struct run_dst *d = &run->dsts[dst];
	unsigned char *base;

	TRY(dst_memory(s, d, &base));
	seg_populate(base + scan->begin, scan->end - scan->begin, false);
	if (!exec_is_all_read(run, d))
		memset(base + scan->begin, 0, scan->end - scan->begin);
	return read_plan_add(&s->reads, dst, scan->begin, scan->end, base + scan->begin);
}

/* The first scan of a source also does the work that is done once per source. */
static bool stands_for_all(const struct run_scan *scan)
{
	return scan->begin == 0;
}

/* ------------------------------------------------------------------------------------------------------ checking */

/* Verify lists damage, and goes on with other items; all others fail. `offset`: of the damaged bytes in the file. */
static FALLIBLE enum err fault(struct slot *s, uint32_t index, enum checked_part part, uint64_t offset, uint64_t bytes, enum err e)
{
	struct run *run = s->x->run;

	if (!e || run->head->opts.mode != RUN_VERIFY || !checked_is_damage(e))
		return e;
	err_clear();
	uint64_t at = atomic_fetch_add(&run->head->damage_count, 1);
	if (at < run->damages_n)
		run->damages[at] = (struct run_damage){ index, (uint16_t)e, (uint8_t)part, offset, bytes };
	return OK;
}

/* A value, or a whole file, which has no FQN. */
static enum checked_part raw_part(const struct run_src *src)
{
	return src->fqn_len ? CHECKED_VALUE : CHECKED_FILE;
}

/* Notes or returns damage of a whole item. */
static FALLIBLE enum err item_fault(struct slot *s, uint32_t index, enum err e)
{
	struct run_src *src = &s->x->run->srcs[index];

	if (e && s->x->run->head->opts.mode == RUN_VERIFY && checked_is_damage(e) && atomic_exchange(&src->damaged, 1)) {
		err_clear(); /* noted by another scan of the item */
		return OK;
	}
	return fault(s, index, src->kind == RUN_SRC_RAW ? raw_part(src) : CHECKED_HEAD, src->offset, src->length, e);
}

static FALLIBLE enum err range_fault(struct slot *s, const struct run_scan *scan, uint64_t payload_off, enum err e)
{
	const struct run_src *src = &s->x->run->srcs[scan->src];

	return fault(s, scan->src, src->kind == RUN_SRC_RAW ? raw_part(src) : CHECKED_PAYLOAD, src->offset + payload_off + scan->begin,
		     scan->end - scan->begin, e);
}

const struct block_digest *exec_digest_of(const struct run *run, const struct run_scan *scan)
{
	const struct run_src *src = &run->srcs[scan->src];
	uint64_t begin = 0;

	for (uint32_t i = 0; i < src->digest_count; i++) {
		const struct block_digest *d = &run->digests[src->digest_at + i];
		if (begin == scan->begin && d->end == scan->end)
			return d;
		begin = d->end;
	}
	return NULL;
}

static FALLIBLE enum err check_digest(struct slot *s, const struct run_scan *scan, const struct digest *got)
{
	const struct run *run = s->x->run;
	const struct block_digest *d = exec_digest_of(run, scan);
	char want_hex[33], got_hex[33];

	if (!d) {
		atomic_fetch_add(&run->srcs[scan->src].unverified, scan->end - scan->begin);
		return OK;
	}
	if (memcmp(d->xxh3_128, got->xxh3_128, sizeof d->xxh3_128) == 0) {
		atomic_fetch_add(&run->head->verified_bytes, scan->end - scan->begin);
		return OK;
	}
	digest_hex(d->xxh3_128, want_hex);
	digest_hex(got->xxh3_128, got_hex);
	enum err e = ERR(DIGEST_MISMATCH, "bytes %ju to %ju of the payload are not those written", (uintmax_t)scan->begin,
			 (uintmax_t)scan->end);
	return sources_at(run, scan->src, err_expected(e, want_hex, got_hex));
}

/* Compares all of an item, by blocking reads. */
static FALLIBLE enum err check_item(struct slot *s, uint32_t index)
{
	struct run_src *src = &s->x->run->srcs[index];

	if (src->record)
		return OK;
	if (s->x->run->head->opts.verify)
		return sources_check_all(&s->x->sources, index);
	atomic_fetch_add(&src->unverified, src->length);
	return OK;
}

/* The last scan of a source that is not compared block by block: the CRC32 of all of it against the archive's. */
static FALLIBLE enum err check_crc(struct slot *s, uint32_t index)
{
	struct run *run = s->x->run;
	struct run_src *src = &run->srcs[index];
	const struct run_scan *scans = &run->scans[src->first_scan];
	uint32_t crc = scans[0].crc32;
	char want[16], got[16];

	for (uint32_t i = 1; i < src->scan_count; i++)
		crc = digest_crc32_combine(crc, scans[i].crc32, scans[i].end - scans[i].begin);
	if (src->partial || !run->head->opts.verify) {
		for (uint32_t i = 0; i < src->scan_count; i++)
			if (!scans[i].from_memory)
				atomic_fetch_add(&src->unverified, scans[i].end - scans[i].begin);
		return OK;
	}
	if (atomic_load(&src->crc_state) != RUN_CRC_KNOWN)
		return check_item(s, index);
	if (crc == src->crc_wanted) {
		atomic_fetch_add(&run->head->verified_bytes, scans[src->scan_count - 1].end);
		return OK;
	}
	snprintf(want, sizeof want, "%08x", src->crc_wanted);
	snprintf(got, sizeof got, "%08x", crc);
	return sources_at(run, index, err_expected(ERR(DIGEST_MISMATCH, "the payload's CRC32 is wrong"), want, got));
}

/* The one digest that there is something to compare with: ours if the manifest has it, else the archive's CRC32. */
static unsigned which_digest(const struct run *run, const struct run_src *src)
{
	if (!run->head->opts.verify)
		return 0;
	return src->by_blocks ? DIGEST_XXH3 : DIGEST_CRC32;
}

/* info: of the item; NULL: it has no head. `known`: the digest of these bytes, if they were hashed as they came; else NULL. */
static FALLIBLE enum err check_range(struct slot *s, struct run_scan *scan, const struct src_info *info, const unsigned char *bytes,
				     const struct digest *known)
{
	struct run *run = s->x->run;
	struct run_src *src = &run->srcs[scan->src];
	uint64_t index = (uint64_t)(scan - run->scans);
	struct digest_stream own;
	struct digest digest;

	content_note_scan(run, scan, info, bytes);
	if (run->head->opts.verify) {
		if (known) {
			digest = *known;
		} else {
			digest_begin_one(&own, which_digest(run, src));
			digest_add(&own, bytes, scan->end - scan->begin);
			digest_end(&own, &digest);
		}
		scan->crc32 = digest.crc32;
		if (src->by_blocks)
			TRY(range_fault(s, scan, info ? info->payload_off : 0, check_digest(s, scan, &digest)));
		else if (src->summed)
			TRY(sums_add_bytes(&s->x->sources, scan->src, scan->begin, scan->end - scan->begin, digest.crc32));
	}
	if (!run->head->opts.values || src->kind == RUN_SRC_RAW)
		return OK;
	return exec_count(run, index, info, bytes);
}

/* ---- heads, for verify: loads know dcpd's items by their layout, and check what they take from others' ---- */

static FALLIBLE enum err check_gap(struct slot *s, uint32_t index, const unsigned char *gap)
{
	const struct run_src *src = &s->x->run->srcs[index];
	uint32_t first = 0, end = src->gap;

	while (first < end && gap[first] == 0)
		first++;
	while (end > first && gap[end - 1] == 0)
		end--;
	if (first == end)
		return OK;
	return fault(s, index, CHECKED_PADDING, src->offset + src->length + first, end - first,
		     ERR(DIGEST_MISMATCH, "bytes behind the item are not zeros"));
}

/* Behind an item that is not read as a whole, and has no archive around it (a value). */
static FALLIBLE enum err read_gap(struct slot *s, uint32_t index)
{
	const struct run_src *src = &s->x->run->srcs[index];
	CLEANUP(mem_free_ptr) unsigned char *gap = mem_alloc(src->gap + 1);

	NEED(gap, "no memory to check a gap");
	TRY(sources_read(&s->x->sources, index, src->length, gap, src->gap));
	return check_gap(s, index, gap);
}

/* head: the item's bytes before the payload; tail: the item's bytes behind the payload, then the gap. */
static FALLIBLE enum err check_edges(struct slot *s, uint32_t index, const struct src_info *info, const unsigned char *head,
				     const unsigned char *tail)
{
	const struct run *run = s->x->run;
	const struct run_src *src = &run->srcs[index];
	uint64_t tail_bytes = src->length - info->payload_off - info->payload_bytes;
	struct digest_stream stream;
	struct digest got;

	digest_begin_one(&stream, DIGEST_XXH3);
	digest_add(&stream, head, info->payload_off);
	digest_add(&stream, tail, tail_bytes);
	digest_end(&stream, &got);
	if (memcmp(got.xxh3_128, run->digests[src->edges_at - 1].xxh3_128, sizeof got.xxh3_128) != 0) {
		enum err e = ERR(DIGEST_MISMATCH, "the archive around the payload is not what was written");
		TRY(fault(s, index, CHECKED_HEAD, src->offset, src->length, sources_at(run, index, e))); /* its payload is checked too */
	}
	return check_gap(s, index, tail + tail_bytes);
}

/* The head and tail of a large item. */
static FALLIBLE enum err check_head(struct slot *s, uint32_t index, const struct src_info *info)
{
	const struct run *run = s->x->run;
	const struct run_src *src = &run->srcs[index];
	bool known;

	if (run->head->opts.mode != RUN_VERIFY || src->kind != RUN_SRC_ITEM)
		return OK;
	if (!src->edges_at)
		return item_fault(s, index, sources_check_item(&s->x->sources, index, false, &known));
	uint64_t behind = info->payload_off + info->payload_bytes, tail_bytes = src->length - behind + src->gap;
	CLEANUP(mem_free_ptr) unsigned char *bytes = mem_alloc(info->payload_off + tail_bytes + 1);
	NEED(bytes, "no memory for an item's head");
	TRY(sources_read(&s->x->sources, index, 0, bytes, info->payload_off));
	TRY(sources_read(&s->x->sources, index, behind, bytes + info->payload_off, tail_bytes));
	return check_edges(s, index, info, bytes, bytes + info->payload_off);
}

/* ------------------------------------------------------------------------------------------------------ scatter */

enum err exec_scatter(struct slot *s, const struct run_scan *scan, const struct src_info *info, const unsigned char *bytes)
{
	const struct run *run = s->x->run;
	const struct run_src *src = &run->srcs[scan->src];
	uint32_t n = src->ndim, item = dtype_bytes((enum dtype)src->dtype);
	const int64_t *so = run->dims + src->dims_at;
	int64_t psizes[NDIM_MAX], poff[NDIM_MAX], psize[NDIM_MAX], off[NDIM_MAX], size[NDIM_MAX], io[NDIM_MAX], is[NDIM_MAX];

	for (uint32_t i = 0; i < n; i++)
		psizes[i] = so[n + info->order[i]];
	struct linear range = linear_range(n, psizes, scan->begin / item, scan->end / item);
	while (linear_next(&range, poff, psize)) {
		for (uint32_t i = 0; i < n; i++) {
			off[info->order[i]] = poff[i] + so[info->order[i]];
			size[info->order[i]] = psize[i];
		}
		for (uint32_t p = 0; p < src->piece_count; p++) {
			uint32_t dst = run->pieces[src->first_piece + p];
			const struct run_dst *d = &run->dsts[dst];
			const int64_t *to = run->dims + d->dims_at;
			unsigned char *base;
			if (!box_intersect(n, off, size, to, to + n, io, is))
				continue;
			uint64_t e = 0;
			for (uint32_t i = 0; i < n; i++) {
				e += (uint64_t)(io[i] - so[i]) * (uint64_t)info->strides[i];
				io[i] -= to[i];
			}
			TRY(dst_memory(s, d, &base));
			populate_box(run, d, to, io, is, base);
			TRY(read_plan_place(run, info, dst, io, is, bytes + (e * item - scan->begin), base, 0));
		}
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- reading */

/* Tries the page cache; *done_out: the scan is complete. */
static FALLIBLE enum err take_cached(struct slot *s, struct slot_scan *sc, const struct src_info *info, uint64_t offset,
				     bool *done_out)
{
	struct run *run = s->x->run;
	struct run_scan *scan = &run->scans[sc->scan];
	const struct run_src *src = &run->srcs[scan->src];
	uint64_t bytes = scan->end - scan->begin;
	unsigned char *into = sc->direct ? sc->direct_at : s->in;
	struct digest_stream stream;
	struct digest digest;
	struct store_at *at;
	bool got = false;

	*done_out = false;
	if (bytes < CACHED_MIN || run->files[src->file].kind == RUN_FILE_SEGMENT)
		return OK;
	TRY(files_pin(&s->x->files, src->file, &at));
	int fd = store_fd(*at);
	enum err e = fd < 0 ? OK : exec_read_cached(s, sc, fd, offset, which_digest(run, src), &stream, &got);
	files_unpin(&s->x->files, src->file);
	if (e || !got)
		return e;
	s->wave.read_bytes += bytes;
	if (run->head->opts.verify)
		digest_end(&stream, &digest);
	TRY(check_range(s, scan, info, into, &digest));
	if (exec_fills(run) && info && !sc->direct)
		TRY(exec_scatter(s, scan, info, into));
	sc->read = UINT32_MAX;
	*done_out = true;
	return OK;
}

/* Leaves the elements of a scan to the read plan, to be counted when they are there. */
static FALLIBLE enum err gather(struct slot *s, struct slot_scan *sc)
{
	const struct run *run = s->x->run;
	const struct run_scan *scan = &run->scans[sc->scan];
	const struct run_src *src = &run->srcs[scan->src];

	must(src->piece_count == 1 && scan->end - scan->begin <= s->x->out_bytes - s->out_used);
	sc->gathered = s->out + s->out_used;
	s->out_used += scan->end - scan->begin;
	return read_plan_add(&s->reads, run->pieces[src->first_piece], scan->begin, scan->end, sc->gathered);
}

/* Takes an item whose elements lie in no row: compares all of it, then leaves it to the read plan. */
static FALLIBLE enum err take_odd(struct slot *s, struct slot_scan *sc)
{
	const struct run *run = s->x->run;
	const struct run_scan *scan = &run->scans[sc->scan];

	sc->skip = true;
	if (run->head->opts.mode == RUN_STATS && run->srcs[scan->src].kind != RUN_SRC_RAW)
		TRY(gather(s, sc));
	if (!stands_for_all(scan))
		return OK;
	TRY(item_fault(s, scan->src, check_item(s, scan->src)));
	return use_read_plan(s, &run->srcs[scan->src], scan->src);
}

static FALLIBLE enum err too_short(struct slot *s, struct slot_scan *sc)
{
	const struct run *run = s->x->run;
	uint32_t index = run->scans[sc->scan].src;

	sc->skip = true;
	return item_fault(s, index, sources_at(run, index, ERR(FORMAT_ITEM, "the item's record is too short")));
}

/* Reads the item's head. *go_out: the scan's range lies in a row. */
static FALLIBLE enum err find_payload(struct slot *s, struct slot_scan *sc, const struct run_src *src, struct src_info **info_out,
				      bool *go_out)
{
	struct run *run = s->x->run;
	const struct run_scan *scan = &run->scans[sc->scan];

	*go_out = false;
	enum err e = sources_info(&s->x->sources, scan->src, info_out);
	if (e) {
		sc->skip = true;
		return item_fault(s, scan->src, e);
	}
	const struct src_info *info = *info_out;
	if (!info->dense)
		return take_odd(s, sc);
	if (!num_inside(scan->begin, scan->end - scan->begin, info->payload_bytes))
		return too_short(s, sc);
	if (stands_for_all(scan))
		TRY(check_head(s, scan->src, info));
	TRY(find_direct(s, src, info, scan, sc));
	*go_out = true;
	return OK;
}

/* An item that is read as a whole: a small one whose head is not known, or is checked. */
static bool reads_whole(struct slot *s, const struct run_src *src, uint32_t index)
{
	if (src->kind != RUN_SRC_ITEM || src->length > READ_PLAN_SMALL_ITEM)
		return false;
	return s->x->run->head->opts.mode == RUN_VERIFY ? src->edges_at != 0 : !sources_known(&s->x->sources, index);
}

/* Adds the scan's bytes to the wave. What would be read past the page cache, but lies on no page boundaries, or is small, goes to the
 * wave's memory first: with its neighbours, in whole pages. */
static FALLIBLE enum err read_scan(struct slot *s, struct slot_scan *sc, uint64_t offset, bool *full_out)
{
	const struct run_scan *scan = &s->x->run->scans[sc->scan];
	const struct run_src *src = &s->x->run->srcs[scan->src];
	uint64_t bytes = scan->end - scan->begin;
	unsigned char *into = sc->direct ? sc->direct_at : NULL;

	sc->bounced = into && s->x->past_cache && (bytes < CACHED_MIN || !exec_is_aligned(into, offset, bytes));
	if (into)
		seg_populate(into, bytes, false);
	TRY(wave_add(&s->wave, src->file, offset, bytes, sc->bounced ? NULL : into, &sc->read, full_out));
	if (!*full_out && s->x->run->head->opts.verify)
		s->wave.reads.v[sc->read].which = (uint8_t)which_digest(s->x->run, src);
	return OK;
}

static FALLIBLE enum err add_scan(struct slot *s, struct slot_scan *sc, bool *full_out)
{
	struct run *run = s->x->run;
	const struct run_scan *scan = &run->scans[sc->scan];
	const struct run_src *src = &run->srcs[scan->src];
	struct src_info *info = NULL;
	uint64_t payload_off = 0;
	bool go;

	*full_out = false;
	if (is_made(run, src)) {
		sc->skip = true;
		return make_range(s, scan);
	}
	if (src->sparse) {
		sc->skip = true;
		return stands_for_all(scan) ? use_read_plan(s, src, scan->src) : OK;
	}
	if (atomic_load(&src->damaged)) {
		sc->skip = true;
		return OK;
	}
	if (src->kind == RUN_SRC_RAW && src->gap && stands_for_all(scan))
		TRY(read_gap(s, scan->src));
	if (src->kind == RUN_SRC_RAW && !src->by_blocks && atomic_load(&src->crc_state) != RUN_CRC_KNOWN)
		return take_odd(s, sc);
	if (reads_whole(s, src, scan->src)) {
		sc->whole_item = true;
		return wave_add(&s->wave, src->file, src->offset, src->length + src->gap, NULL, &sc->read, full_out);
	}
	if (src->kind != RUN_SRC_RAW) {
		TRY(find_payload(s, sc, src, &info, &go));
		if (!go)
			return OK;
		payload_off = info->payload_off;
	}
	if (run->files[src->file].kind == RUN_FILE_SEGMENT) {
		unsigned char *at;
		TRY(files_at(&s->x->files, src->file, src->offset + scan->begin, &at));
		sc->read = UINT32_MAX;
		return exec_fills(run) ? exec_scatter(s, scan, info, at) : check_range(s, &run->scans[sc->scan], info, at, NULL);
	}
	bool done;
	TRY(exec_take_memory(s, sc, info, &done, full_out));
	if (!done)
		TRY(take_cached(s, sc, info, src->offset + payload_off + scan->begin, &done));
	if (done)
		return OK;
	return read_scan(s, sc, src->offset + payload_off + scan->begin, full_out);
}

static enum err fill_wave(struct slot *s)
{
	bool full = false;

	wave_begin(&s->wave, s->in, s->x->in_bytes);
	s->wave.pages = s->x->past_cache;
	while (s->next_scan < s->scans.n && !full) {
		struct slot_scan *sc = &s->scans.v[s->next_scan];
		uint64_t scan = sc->scan;
		*sc = (struct slot_scan){ .scan = scan, .doubted = sc->doubted };
		TRY(add_scan(s, sc, &full));
		if (!full)
			s->next_scan++;
	}
	return OK;
}

/* The item is in memory. *info_out: NULL if the scan is done, or its item damaged. */
static FALLIBLE enum err take_whole(struct slot *s, struct slot_scan *sc, const unsigned char *item, struct src_info **info_out)
{
	struct run *run = s->x->run;
	struct run_scan *scan = &run->scans[sc->scan];
	bool known = sources_known(&s->x->sources, scan->src);
	struct src_info *info = NULL;

	*info_out = NULL;
	enum err e = known ? sources_info(&s->x->sources, scan->src, &info) : sources_parse(&s->x->sources, scan->src, item, &info);
	if (e) {
		sc->skip = true;
		return item_fault(s, scan->src, e);
	}
	if (!info->dense)
		return take_odd(s, sc);
	if (scan->end > info->payload_bytes)
		return too_short(s, sc);
	if (run->srcs[scan->src].edges_at && stands_for_all(scan))
		TRY(check_edges(s, scan->src, info, item, item + info->payload_off + info->payload_bytes));
	*info_out = info;
	return OK;
}

static FALLIBLE enum err take_scan(struct slot *s, struct slot_scan *sc)
{
	struct run *run = s->x->run;
	struct run_scan *scan = &run->scans[sc->scan];
	struct run_src *src = &run->srcs[scan->src];
	struct src_info *info = NULL;

	if (sc->skip)
		return OK;
	const unsigned char *bytes = wave_data(&s->wave, sc->read);
	if (sc->whole_item) {
		TRY(take_whole(s, sc, bytes, &info));
		if (!info)
			return OK;
		bytes += info->payload_off + scan->begin;
	} else if (src->kind != RUN_SRC_RAW) {
		TRY(sources_info(&s->x->sources, scan->src, &info));
	}
	TRY(check_range(s, scan, info, bytes, wave_digest(&s->wave, wave_op(&s->wave, sc->read))));
	if (sc->bounced)
		memcpy(sc->direct_at, bytes, scan->end - scan->begin);
	else if (exec_fills(run) && info && !sc->direct)
		TRY(exec_scatter(s, scan, info, bytes));
	return OK;
}

static enum err take_wave(struct slot *s)
{
	for (uint64_t i = 0; i < s->scans.n; i++) {
		struct slot_scan *sc = &s->scans.v[i];
		if (i >= s->next_scan || sc->skip || sc->read == UINT32_MAX)
			continue;
		TRY(sc->far ? exec_take_far(s, i) : exec_doubt(s, i, take_scan(s, sc)));
		s->scans.v[i].read = UINT32_MAX;
	}
	return OK;
}

/* The last of a source's scans is done. */
static FALLIBLE enum err end_source(struct slot *s, uint32_t index)
{
	struct run *run = s->x->run;
	struct run_src *src = &run->srcs[index];

	if (run->files[src->file].kind == RUN_FILE_SEGMENT || atomic_load(&src->damaged))
		return OK;
	if ((src->by_blocks && run->head->opts.verify) || src->summed || src->record)
		return OK;
	return fault(s, index, CHECKED_PAYLOAD, src->offset, src->length, check_crc(s, index));
}

static FALLIBLE enum err count_scans(struct slot *s)
{
	struct run *run = s->x->run;
	enum run_mode mode = run->head->opts.mode;

	for (uint64_t i = 0; i < s->scans.n; i++) {
		const struct run_scan *scan = &run->scans[s->scans.v[i].scan];
		struct run_src *src = &run->srcs[scan->src];
		if (s->scans.v[i].again)
			continue;
		/* there, progress is what was written, compared or filled */
		if (mode != RUN_WRITE_FILES && mode != RUN_DIFF && mode != RUN_STREAMS && (mode != RUN_FILL_SEGMENTS || src->piece_count))
			atomic_fetch_add(&run->ranks[run->tasks[s->task].rank_index].bytes_done, scan->end - scan->begin);
		if (src->sparse && stands_for_all(scan))
			atomic_fetch_add(&src->unverified, src->length);
		spread_taken(run, s->scans.v[i].scan);
		if (atomic_fetch_sub(&src->scans_left, 1) == 1 && !s->scans.v[i].skip)
			TRY(end_source(s, scan->src));
	}
	return OK;
}

static enum err fill_reads(struct slot *s)
{
	wave_begin(&s->wave, s->in, s->x->in_bytes);
	return read_plan_fill(&s->reads, &s->wave);
}

static enum err copy_reads(struct slot *s)
{
	return read_plan_copy(&s->reads, &s->wave);
}

static enum err count_gathered(struct slot *s)
{
	for (uint64_t i = 0; i < s->scans.n; i++)
		if (s->scans.v[i].gathered)
			TRY(exec_count(s->x->run, s->scans.v[i].scan, NULL, s->scans.v[i].gathered));
	return OK;
}

/* First all scans in waves; then what they left to the read plan. */
enum err exec_scan_advance(struct slot *s)
{
	if (s->phase == SLOT_FETCH) {
		if (s->wave.ops.n)
			TRY(exec_guarded(s, take_wave));
		if (s->next_scan < s->scans.n) {
			TRY(exec_guarded(s, fill_wave));
			if (s->wave.reads.n)
				return exec_queue_wave(s);
			return OK;
		}
		s->phase = SLOT_FINISH;
		s->wave.ops.n = s->wave.reads.n = 0;
	}
	if (s->wave.ops.n)
		TRY(exec_guarded(s, copy_reads));
	if (read_plan_more(&s->reads)) {
		TRY(exec_guarded(s, fill_reads));
		return s->wave.reads.n ? exec_queue_wave(s) : OK;
	}
	TRY(count_gathered(s));
	s->phase = SLOT_IDLE;
	return count_scans(s);
}
