/* sources.c: what the header of a stored item says, cached per worker (see sources.h). Headers are never trusted to agree with
 * `.metadata`: dtype, sizes and room are compared each time. */
#include "base/num.h"
#include "runner/sources.h"
#include "store/manifest.h"
#include "tensor/linear.h"
#include "tensor/quant.h"

enum { WINDOW = 4096, PIECE = 256 << 10 };

enum err sources_open(struct run *run, struct files *files, struct sources *out)
{
	struct src_info *cache = mem_zalloc(SRC_CACHE, sizeof *cache);

	NEED(cache, "no memory for item headers");
	for (uint32_t i = 0; i < SRC_CACHE; i++)
		cache[i].src = UINT32_MAX;
	*out = (struct sources){ .run = run, .files = files, .cache = cache };
	return OK;
}

void sources_close(struct sources *s)
{
	mem_free(s->cache);
	s->cache = NULL;
}

enum err sources_at(const struct run *run, uint32_t src, enum err e)
{
	const struct run_src *s = &run->srcs[src];
	struct str fqn = run_src_fqn(run, s);
	char room[ERR_FILE_MAX];
	int64_t offset = err_last()->offset;

	if (e && offset >= 0 && !err_last()->file[0]) { /* so far relative to the item */
		struct err_info info = *err_last();
		info.offset = (s->named_file == s->file ? offset : 0) + (int64_t)s->named_at;
		err_restore(&info);
	}
	e = err_at_file(e, run_file_label(run, s->named_file, room), (int64_t)s->named_at);
	return err_at_rank(err_at_fqn(e, fqn.p, fqn.n), s->rank);
}

/* Dims by stride, largest first; dims of one element do not matter and go first. */
static void sort_dims(struct src_info *info, uint32_t ndim, const int64_t *sizes)
{
	for (uint32_t i = 0; i < ndim; i++)
		info->order[i] = (uint8_t)i;
	for (uint32_t i = 1; i < ndim; i++)
		for (uint32_t k = i; k > 0; k--) {
			uint8_t a = info->order[k - 1], b = info->order[k];
			bool swap = sizes[b] == 1 ? sizes[a] != 1
						  : sizes[a] != 1 && info->strides[b] > info->strides[a];
			if (!swap)
				break;
			info->order[k - 1] = b;
			info->order[k] = a;
		}
	int64_t stride = 1;
	info->dense = info->storage_offset == 0;
	for (uint32_t i = ndim; i-- > 0;) {
		uint8_t d = info->order[i];
		if (sizes[d] == 1)
			continue;
		info->dense = info->dense && info->strides[d] == stride;
		stride *= sizes[d];
	}
	if (!info->dense)
		return;
	for (uint32_t i = 0; i < ndim; i++) /* strides of single-element dims are free: give them sane ones */
		if (sizes[i] == 1)
			info->strides[i] = stride;
}

static void set_strides(struct src_info *info, uint32_t ndim, const int64_t *sizes, const int64_t *strides)
{
	memcpy(info->strides, strides, ndim * sizeof *strides);
	sort_dims(info, ndim, sizes);
}

static FALLIBLE enum err check_item(const struct run_src *s, const int64_t *sizes, const struct item_tensor *t)
{
	char a[96], b[96];

	if (t->dtype != s->dtype)
		return err_expected(ERR(FORMAT_ITEM, "the item's dtype is %s, .metadata says %s",
					dtype_name(t->dtype), dtype_name((enum dtype)s->dtype)),
				    dtype_name((enum dtype)s->dtype), dtype_name(t->dtype));
	bool same = t->ndim == s->ndim;
	for (uint32_t i = 0; same && i < t->ndim; i++)
		same = t->sizes[i] == sizes[i];
	if (!same) {
		box_print(t->ndim, t->sizes, a, sizeof a);
		box_print(s->ndim, sizes, b, sizeof b);
		return err_expected(ERR(FORMAT_ITEM, "the item's size is %s, .metadata says %s", a, b), b, a);
	}
	if (t->big_endian)
		return ERR(FORMAT_ITEM, "the item is big-endian");
	if (t->deflated && t->payload_bytes > SOURCES_INFLATE_MAX)
		return ERR(LIMIT_EXCEEDED, "a deflated record of %ju bytes", (uintmax_t)t->payload_bytes);
	return OK;
}

static FALLIBLE enum err remember(struct sources *s, uint32_t src, const struct item_source *item, struct src_info **out)
{
	struct run_src *rs = &s->run->srcs[src];
	const int64_t *sizes = s->run->dims + rs->dims_at + rs->ndim;
	struct src_info *info = &s->cache[src & (SRC_CACHE - 1)];
	struct item_tensor t;

	enum err e = item_read_tensor(item, &t);
	e = e ?: check_item(rs, sizes, &t);
	if (e)
		return sources_at(s->run, src, e);
	*info = (struct src_info){ .src = src, .conj = t.conj, .neg = t.neg, .deflated = t.deflated,
				   .dtype = rs->dtype, .payload_off = t.payload_off,
				   .payload_bytes = t.payload_bytes, .stored_bytes = t.stored_bytes,
				   .storage_offset = t.storage_offset };
	set_strides(info, t.ndim, sizes, t.strides);
	info->dense = info->dense && !t.deflated;
	rs->crc_wanted = t.crc32;
	atomic_store(&rs->crc_state, t.crc_known ? RUN_CRC_KNOWN : RUN_CRC_UNKNOWN);
	*out = info;
	return OK;
}

/* An archive is looked at in a dozen places, all of them near its begin or its end: a read for each of the two. */
struct reader {
	struct store_at *file;
	uint64_t offset, length;
	struct window {
		bool read;
		unsigned char bytes[WINDOW];
	} head, tail;
};

static FALLIBLE enum err read_window(struct reader *r, struct window *w, uint64_t at, uint64_t offset, void *into, size_t n)
{
	if (!w->read)
		TRY(store_read(*r->file, w->bytes, (size_t)num_min(WINDOW, r->length), r->offset + at, ""));
	w->read = true;
	memcpy(into, w->bytes + (offset - at), n);
	return OK;
}

static enum err read_file(void *user, uint64_t offset, void *into, size_t n)
{
	struct reader *r = user;
	uint64_t tail = r->length - num_min(WINDOW, r->length);

	if (num_inside(offset, n, num_min(WINDOW, r->length)))
		return read_window(r, &r->head, 0, offset, into, n);
	if (offset >= tail && num_inside(offset, n, r->length))
		return read_window(r, &r->tail, tail, offset, into, n);
	return store_read(*r->file, into, n, r->offset + offset, "");
}

static void c_order(struct src_info *info, uint32_t ndim, const int64_t *sizes)
{
	int64_t stride = 1;

	for (uint32_t i = ndim; i-- > 0;) {
		info->strides[i] = stride;
		info->order[i] = (uint8_t)i;
		stride *= sizes[i];
	}
}

uint64_t sources_span(const struct src_info *info, uint32_t ndim, const int64_t *size, uint32_t k)
{
	uint64_t span = 1;

	for (uint32_t i = k; i < ndim; i++)
		span += (uint64_t)(size[info->order[i]] - 1) * (uint64_t)info->strides[info->order[i]];
	return span * dtype_bytes((enum dtype)info->dtype);
}

bool sources_layout(const struct run_src *src, const int64_t *sizes, struct item_layout *out)
{
	uint32_t item = dtype_bytes((enum dtype)src->dtype);
	uint64_t numel;

	if (src->kind != RUN_SRC_ITEM || src->digest_count == 0 || src->raw_digests || box_numel(src->ndim, sizes, &numel) ||
	    numel > src->length / item)
		return false;
	return item_layout_tensor((enum dtype)src->dtype, src->ndim, sizes, src->length - numel * item > 4096 ? 4096 : 64, out) == OK &&
	       out->length == src->length;
}

static void set_plain(struct src_info *info, const struct run_src *rs, uint32_t src, const int64_t *sizes, uint64_t payload_off,
		      uint64_t payload_bytes)
{
	*info = (struct src_info){ .src = src, .dtype = rs->dtype, .payload_off = payload_off, .payload_bytes = payload_bytes,
				   .stored_bytes = payload_bytes, .dense = true };
	c_order(info, rs->ndim, sizes);
}

/* Element `first` of a box in C order, and strides over such elements, as an element and strides of a storage in which the box's dims lie
 * with other strides. Each of the view's dims must stay within one dim of the box. */
static FALLIBLE enum err place_view(const struct run_src *box, const int64_t *sizes, const struct src_info *stored, uint32_t ndim,
				    const int64_t *view_sizes, int64_t first, struct src_info *view)
{
	int64_t pitch[NDIM_MAX], at[NDIM_MAX], run = 1;
	uint64_t offset = stored->storage_offset;

	for (uint32_t d = box->ndim; d-- > 0;) {
		pitch[d] = run;
		run *= sizes[d];
		at[d] = first / pitch[d] % sizes[d];
		offset += (uint64_t)at[d] * (uint64_t)stored->strides[d];
	}
	for (uint32_t k = 0; k < ndim; k++) {
		uint32_t d = 0;
		if (view_sizes[k] == 1)
			continue;
		while (d < box->ndim && (pitch[d] > view->strides[k] || sizes[d] == 1))
			d++;
		if (d == box->ndim || view->strides[k] % pitch[d])
			return ERR(FORMAT_UNSUPPORTED, "the item does not lie in C order, and the rules change the order of its elements");
		int64_t step = view->strides[k] / pitch[d];
		at[d] += step * (view_sizes[k] - 1);
		if (at[d] >= sizes[d])
			return ERR(FORMAT_UNSUPPORTED, "the item does not lie in C order, and the rules join dims of it");
		view->strides[k] = step * stored->strides[d];
	}
	view->storage_offset = offset;
	return OK;
}

/* The info of a view, from that of what it is a view of. */
static FALLIBLE enum err remember_view(struct sources *s, uint32_t src, const struct src_info *stored, struct src_info **out)
{
	const struct run_src *rs = &s->run->srcs[src], *base = &s->run->srcs[run_src_base(rs, src)];
	const int64_t *view = s->run->dims + rs->view_at, *sizes = s->run->dims + rs->dims_at + rs->ndim;
	const int64_t *box = s->run->dims + base->dims_at + base->ndim;
	struct src_info of = *stored, info = *stored; /* both may have one place in the cache */

	info.src = src;
	info.cast_count = rs->cast_count;
	memcpy(info.casts, rs->casts, sizeof info.casts);
	memcpy(info.strides, view + 1, rs->ndim * sizeof *info.strides);
	if (linear_is_packed(base->ndim, of.strides, box))
		info.storage_offset += (uint64_t)view[0];
	else
		TRY(sources_at(s->run, src, place_view(base, box, &of, rs->ndim, sizes, view[0], &info)));
	sort_dims(&info, rs->ndim, sizes);
	info.dense = info.dense && !info.q8_0;
	*out = &s->cache[src & (SRC_CACHE - 1)];
	**out = info;
	return OK;
}

static void set_view(const struct run *run, struct src_info *info, uint32_t src, const int64_t *sizes)
{
	const struct run_src *rs = &run->srcs[src];

	set_plain(info, rs, src, sizes, 0, rs->length);
	if (!rs->strides_at)
		return;
	info->conj = rs->conj;
	info->neg = rs->neg;
	set_strides(info, rs->ndim, sizes, run->dims + rs->strides_at - 1);
	info->q8_0 = rs->q8_0;
	if (!info->q8_0)
		return;
	info->dense = false;
	info->payload_bytes = rs->length / QUANT_Q8_0_BYTES * QUANT_Q8_0_FLOATS * sizeof(float);
}

bool sources_known(struct sources *s, uint32_t src)
{
	struct src_info *info = &s->cache[src & (SRC_CACHE - 1)];
	const struct run_src *rs = &s->run->srcs[src];
	const int64_t *sizes = s->run->dims + rs->dims_at + rs->ndim;
	struct item_layout l;

	if (info->src == src)
		return true;
	if (rs->view_of)
		return sources_known(s, rs->view_of - 1);
	if (rs->kind != RUN_SRC_ITEM)
		set_view(s->run, info, src, sizes);
	else if (sources_layout(rs, sizes, &l))
		set_plain(info, rs, src, sizes, l.payload_off, l.payload_bytes);
	return info->src == src;
}

enum err sources_info(struct sources *s, uint32_t src, struct src_info **out)
{
	struct run_src *rs = &s->run->srcs[src];
	struct reader r = { .offset = rs->offset, .length = rs->length };

	*out = &s->cache[src & (SRC_CACHE - 1)];
	if ((*out)->src == src)
		return OK;
	if (rs->view_of) {
		struct src_info *stored;
		TRY(sources_info(s, rs->view_of - 1, &stored));
		return remember_view(s, src, stored, out);
	}
	if (sources_known(s, src))
		return OK;
	enum err e = files_pin(s->files, rs->file, &r.file);
	if (e)
		return sources_at(s->run, src, e);
	e = remember(s, src, &(struct item_source){ read_file, &r, rs->length }, out);
	files_unpin(s->files, rs->file);
	return e;
}

enum err sources_read(struct sources *s, uint32_t src, uint64_t offset, void *into, uint64_t n)
{
	const struct run_src *rs = &s->run->srcs[src];
	struct store_at *file;

	enum err e = files_pin(s->files, rs->file, &file);
	if (e)
		return sources_at(s->run, src, e);
	e = store_read(*file, into, n, rs->offset + offset, "");
	files_unpin(s->files, rs->file);
	s->read_bytes += n;
	return sources_at(s->run, src, e);
}

/* The bytes from `from` in the item on, which its digests are of. */
static FALLIBLE enum err check_digests(struct sources *s, uint32_t src, uint64_t from, uint64_t bytes)
{
	const struct run_src *rs = &s->run->srcs[src];
	CLEANUP(mem_free_ptr) unsigned char *piece = mem_alloc(PIECE);
	struct manifest_check check;

	NEED(piece, "no memory to check an item");
	manifest_check_begin(&check, s->run->digests + rs->digest_at, rs->digest_count);
	for (uint64_t at = 0, n; at < bytes; at += n) {
		n = num_min(PIECE, bytes - at);
		TRY(sources_read(s, src, from + at, piece, n));
		TRY(sources_at(s->run, src, manifest_check_add(&check, piece, n, at + n == bytes)));
	}
	return OK;
}

enum err sources_check_blocks(struct sources *s, uint32_t src, const struct src_info *info)
{
	return check_digests(s, src, info->payload_off, info->payload_bytes);
}

/* Would a load understand it? */
static FALLIBLE enum err parse_value(const struct item_source *item)
{
	struct item_value value;

	TRY(item_read_value(item, &value));
	item_value_free(&value);
	return OK;
}

enum err sources_check_item(struct sources *s, uint32_t src, bool payload, bool *known_out)
{
	const struct run_src *rs = &s->run->srcs[src];
	struct reader r = { .offset = rs->offset, .length = rs->length };
	uint64_t checked = 0, unknown = 0;

	*known_out = rs->kind != RUN_SRC_PLAIN || rs->digest_count;
	if (!*known_out) /* bare bytes have no CRC32 */
		return OK;
	if (rs->raw_digests && rs->digest_count)
		return check_digests(s, src, 0, rs->length);
	s->read_bytes += rs->length;
	TRY(sources_at(s->run, src, files_pin(s->files, rs->file, &r.file)));
	struct item_source item = { read_file, &r, rs->length };
	enum err e = item_check_crc(&item, !payload, &checked, &unknown);
	if (!e && rs->kind == RUN_SRC_RAW)
		e = parse_value(&item);
	files_unpin(s->files, rs->file);
	*known_out = checked && !unknown;
	return sources_at(s->run, src, e);
}

enum err sources_check_all(struct sources *s, uint32_t src)
{
	struct run_src *rs = &s->run->srcs[src];
	bool known;

	TRY(sources_check_item(s, src, true, &known));
	atomic_fetch_add(known ? &s->run->head->verified_bytes : &rs->unverified, rs->length);
	return OK;
}

enum err sources_parse(struct sources *s, uint32_t src, const unsigned char *item, struct src_info **out)
{
	struct str all = { (const char *)item, s->run->srcs[src].length };
	struct item_source from = source_memory(&all);
	uint32_t base = run_src_base(&s->run->srcs[src], src);

	TRY(remember(s, base, &from, out));
	return base == src ? OK : remember_view(s, src, *out, out);
}

bool sources_row(const struct run *run, const struct run_src *src, const struct src_info *info, enum dtype dtype,
		 const int64_t *dims, struct src_row *out)
{
	const int64_t *so = run->dims + src->dims_at;
	uint64_t from = info->storage_offset, numel = 1, first;
	int64_t off[NDIM_MAX], size[NDIM_MAX];
	uint32_t n = src->ndim, item = dtype_bytes(dtype);

	if (src->dtype != dtype || info->deflated || info->q8_0 || info->conj || info->neg ||
	    !box_intersect(n, so, so + n, dims, dims + n, off, size) || !linear_is_packed(n, info->strides, size))
		return false;
	for (uint32_t i = 0; i < n; i++) {
		from += (uint64_t)(off[i] - so[i]) * (uint64_t)info->strides[i];
		numel *= (uint64_t)size[i];
		off[i] -= dims[i];
	}
	if (!linear_is_run(n, dims + n, off, size, &first))
		return false;
	*out = (struct src_row){ from * item, numel * item, first * item };
	return true;
}
