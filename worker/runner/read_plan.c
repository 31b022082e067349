/* read_plan.c: see read_plan.h. */
#include "runner/read_plan.h"

#include <zlib.h>

#include "base/num.h"
#include "runner/sums.h"
#include "tensor/cast.h"
#include "tensor/linear.h"
#include "tensor/quant.h"
#include "tensor/strided.h"

enum {
	CONVERT_RUN = 512, DTYPE_BYTES_MAX = 16, /* elements converted at a time; bytes of the largest */
	COLUMNS_MAX = 32,              /* rows that become columns together: a line of the target or two */
};

void read_plan_free(struct read_plan *g)
{
	vec_free(&g->jobs);
	vec_free(&g->dims);
	vec_free(&g->subs);
	vec_free(&g->sub_dims);
	vec_free(&g->floats);
}

void read_plan_begin(struct read_plan *g)
{
	g->jobs.n = g->dims.n = g->subs.n = g->sub_dims.n = 0;
	g->next_job = 0;
}

/* ------------------------------------------------------------------------------------------------------- jobs */

static FALLIBLE enum err add_job(struct read_plan *g, uint32_t src, uint32_t dst, const int64_t *global_off,
				 const int64_t *size, unsigned char *mem, uint64_t mem_at)
{
	const struct run *run = g->sources->run;
	uint32_t n = run->dsts[dst].ndim;
	const int64_t *src_origin = run->dims + run->srcs[src].dims_at, *dst_origin = run->dims + run->dsts[dst].dims_at;
	struct read_plan_job *j;

	TRY(vec_reserve(&g->dims, 4ull * n));
	TRY(vec_push(&g->jobs, &j));
	*j = (struct read_plan_job){ .src = src, .dst = dst, .dims_at = g->dims.n, .mem = mem, .mem_at = mem_at };
	int64_t *d = g->dims.v + g->dims.n;
	for (uint32_t i = 0; i < n; i++) {
		d[i] = global_off[i] - src_origin[i];
		d[n + i] = global_off[i] - dst_origin[i];
		d[2 * n + i] = size[i];
		d[3 * n + i] = 0;
	}
	g->dims.n += 4ull * n;
	return OK;
}

enum err read_plan_add_pair(struct read_plan *g, uint32_t src, uint32_t dst, unsigned char *mem)
{
	const struct run *run = g->sources->run;
	uint32_t n = run->dsts[dst].ndim;
	const int64_t *a = run->dims + run->srcs[src].dims_at, *b = run->dims + run->dsts[dst].dims_at;
	int64_t off[NDIM_MAX], size[NDIM_MAX];

	if (!box_intersect(n, a, a + n, b, b + n, off, size))
		return OK;
	return add_job(g, src, dst, off, size, mem, 0);
}

enum err read_plan_add(struct read_plan *g, uint32_t dst, uint64_t begin, uint64_t end, unsigned char *mem)
{
	const struct run *run = g->sources->run;
	const struct run_dst *d = &run->dsts[dst];
	const int64_t *origin = run->dims + d->dims_at;
	uint32_t n = d->ndim, item = dtype_bytes((enum dtype)d->dtype);
	struct linear range = linear_range(n, origin + n, begin / item, end / item);
	int64_t box_off[NDIM_MAX], box_size[NDIM_MAX], off[NDIM_MAX], size[NDIM_MAX];

	while (linear_next(&range, box_off, box_size)) {
		for (uint32_t i = 0; i < n; i++)
			box_off[i] += origin[i];
		for (uint32_t p = 0; p < d->piece_count; p++) {
			uint32_t src = run->pieces[d->first_piece + p];
			const int64_t *s = run->dims + run->srcs[src].dims_at;
			if (!run->srcs[src].zeros && box_intersect(n, box_off, box_size, s, s + n, off, size))
				TRY(add_job(g, src, dst, off, size, mem, begin));
		}
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ copying */

static uint64_t dst_element(const struct run *run, const struct run_dst *d, const int64_t *off)
{
	const int64_t *sizes = run->dims + d->dims_at + d->ndim;
	uint64_t e = 0;

	for (uint32_t i = 0; i < d->ndim; i++)
		e = e * (uint64_t)sizes[i] + (uint64_t)off[i];
	return e;
}

/* Do elements change on their way? */
static bool converts(const struct src_info *info, enum dtype to)
{
	return info->dtype != to || info->conj || info->neg || info->cast_count || info->q8_0;
}

/* Through every dtype of the source's casts to the target's. */
static FALLIBLE enum err cast_all(const struct src_info *info, enum dtype to, uint64_t n, const unsigned char *from, unsigned char *into)
{
	unsigned char room[2][CONVERT_RUN * DTYPE_BYTES_MAX];
	enum dtype dtype = (enum dtype)info->dtype;

	if (info->cast_count == 0)
		return cast_run(into, to, from, dtype, n);
	for (uint32_t i = 0; i < info->cast_count; i++) {
		TRY(cast_run(room[i & 1], (enum dtype)info->casts[i], from, dtype, n));
		from = room[i & 1];
		dtype = (enum dtype)info->casts[i];
	}
	return cast_run(into, to, from, dtype, n);
}

/* One run of elements: cast, then the lazy bits. inner: the source's stride in elements. */
static FALLIBLE enum err place_run(const struct src_info *info, enum dtype to, uint64_t n, int64_t inner, const unsigned char *from,
				   unsigned char *into)
{
	unsigned char row[CONVERT_RUN * DTYPE_BYTES_MAX];
	uint32_t from_bytes = dtype_bytes((enum dtype)info->dtype), to_bytes = dtype_bytes(to);
	struct strided gather;

	for (uint64_t at = 0, some; at < n; at += some) {
		const unsigned char *in = from + (int64_t)at * inner * from_bytes;
		some = num_min(n - at, CONVERT_RUN);
		if (inner != 1 && some > 1) {
			strided_init(&gather, 1, &(int64_t){ (int64_t)some }, &(int64_t){ from_bytes }, &(int64_t){ inner * from_bytes },
				     from_bytes);
			strided_copy(&gather, row, in);
			in = row;
		} else if (inner == 1 && info->cast_count == 0) {
			some = n; /* straight through */
		}
		unsigned char *out = into + at * to_bytes;
		TRY(cast_all(info, to, some, in, out));
		if (info->conj)
			TRY(cast_conj(out, to, some));
		if (info->neg)
			TRY(cast_neg(out, to, some));
	}
	return OK;
}

/* The slow way: run by run of the innermost dim, with a cast, conjugation or negation. */
static FALLIBLE enum err place_converted(const struct src_info *info, enum dtype to, uint32_t n, const int64_t *size,
					 const int64_t *to_strides, const unsigned char *from, unsigned char *into)
{
	int64_t at[NDIM_MAX] = { 0 };
	uint32_t from_bytes = dtype_bytes((enum dtype)info->dtype), to_bytes = dtype_bytes(to);

	for (;;) {
		int64_t f = 0, t = 0;
		for (uint32_t i = 0; i + 1 < n; i++) {
			f += at[i] * info->strides[i];
			t += at[i] * to_strides[i];
		}
		TRY(place_run(info, to, n ? (uint64_t)size[n - 1] : 1, n ? info->strides[n - 1] : 1, from + f * from_bytes,
			      into + t * to_bytes));
		uint32_t i = n > 1 ? n - 1 : 0;
		while (i > 0 && ++at[i - 1] == size[i - 1])
			at[--i] = 0;
		if (i == 0)
			return OK;
	}
}

enum err read_plan_place(const struct run *run, const struct src_info *info, uint32_t dst, const int64_t *dst_off,
		      const int64_t *size, const unsigned char *from, unsigned char *dst_mem, uint64_t mem_at)
{
	const struct run_dst *d = &run->dsts[dst];
	const int64_t *sizes = run->dims + d->dims_at + d->ndim;
	uint32_t n = d->ndim, to_bytes = dtype_bytes((enum dtype)d->dtype);
	int64_t to[NDIM_MAX + 1], from_strides[NDIM_MAX + 1], stride = 1;
	struct strided copy;

	for (uint32_t i = n; i-- > 0;) {
		to[i] = stride;
		stride *= sizes[i];
	}
	unsigned char *into = dst_mem + (dst_element(run, d, dst_off) * to_bytes - mem_at);
	if (converts(info, (enum dtype)d->dtype))
		return place_converted(info, (enum dtype)d->dtype, n, size, to, from, into);
	for (uint32_t i = 0; i < n; i++) {
		to[i] *= to_bytes;
		from_strides[i] = info->strides[i] * to_bytes;
	}
	strided_init(&copy, n, size, to, from_strides, to_bytes);
	strided_copy(&copy, into, from);
	return OK;
}

/* ---------------------------------------------------------------------------------------------------- splitting */

/* Chooses the dims to walk: those whose gaps are worth not reading, then as many as it takes to fit `limit`. */
static void decide_split(const struct src_info *info, uint32_t n, const int64_t *size, uint64_t limit,
			 struct read_plan_job *j)
{
	uint32_t k = 0, item = dtype_bytes((enum dtype)info->dtype);

	for (; k < n; k++) {
		uint8_t d = info->order[k];
		uint64_t inner = sources_span(info, n, size, k + 1);
		uint64_t pitch = (uint64_t)info->strides[d] * item;
		if (size[d] > 1 && !(pitch > inner && pitch - inner >= READ_PLAN_HOLE))
			break;
	}
	while (k < n && sources_span(info, n, size, k + 1) > limit)
		k++;
	j->split = k;
	j->step = 1;
	if (k == n)
		return;
	uint8_t d = info->order[k];
	uint64_t inner = sources_span(info, n, size, k + 1), pitch = (uint64_t)info->strides[d] * item;
	uint64_t fit = pitch ? (limit - inner) / pitch + 1 : (uint64_t)size[d];
	j->step = (int64_t)num_min(fit, (uint64_t)size[d]);
}

/* The next sub-box of a job: offsets in the job's box and sizes. False when the job is done. */
static bool next_sub(struct read_plan *g, struct read_plan_job *j, const struct src_info *info, uint32_t n, int64_t *off,
		     int64_t *size)
{
	int64_t *box = g->dims.v + j->dims_at + 2 * n, *at = g->dims.v + j->dims_at + 3 * n;

	if (j->done)
		return false;
	for (uint32_t i = 0; i < n; i++) {
		off[i] = at[i];
		size[i] = box[i];
	}
	for (uint32_t i = 0; i < j->split; i++)
		size[info->order[i]] = 1;
	if (j->split < n) {
		uint8_t d = info->order[j->split];
		size[d] = (int64_t)num_min((uint64_t)j->step, (uint64_t)(box[d] - at[d]));
	}
	/* the counter: innermost of the walked dims first */
	uint32_t last = j->split < n ? j->split + 1 : n, i = last;
	while (i > 0) {
		uint8_t d = info->order[i - 1];
		at[d] += i - 1 == j->split ? j->step : 1;
		if (at[d] < box[d])
			return true;
		at[d] = 0;
		i--;
	}
	j->done = true;
	return true;
}

/* ------------------------------------------------------------------------------------------------------- reading */

static uint64_t element_offset(const struct src_info *info, uint32_t n, const int64_t *a, const int64_t *b)
{
	uint64_t e = info->storage_offset;

	for (uint32_t i = 0; i < n; i++)
		e += (uint64_t)(a[i] + b[i]) * (uint64_t)info->strides[i];
	return e;
}

/* May this sub-box be read straight to its place? Then `into` is that place. */
static unsigned char *direct_place(struct read_plan *g, const struct read_plan_job *j, const struct src_info *info,
				   uint64_t span, const int64_t *off, const int64_t *size)
{
	const struct run *run = g->sources->run;
	const struct run_dst *d = &run->dsts[j->dst];
	const int64_t *dst_off = g->dims.v + j->dims_at + d->ndim;
	int64_t at[NDIM_MAX];
	uint64_t numel = 1, first;

	if (span < READ_PLAN_DIRECT_MIN || converts(info, (enum dtype)d->dtype))
		return NULL;
	for (uint32_t i = 0; i < d->ndim; i++) {
		numel *= (uint64_t)size[i];
		at[i] = dst_off[i] + off[i];
		if (info->order[i] != i && size[i] != 1)
			return NULL;
	}
	uint32_t item = dtype_bytes((enum dtype)d->dtype);
	if (numel * item != span || !linear_is_run(d->ndim, run->dims + d->dims_at + d->ndim, at, size, &first))
		return NULL;
	return j->mem + (first * item - j->mem_at);
}

static FALLIBLE enum err push_sub(struct read_plan *g, uint32_t job, bool whole_item, bool direct, uint32_t n,
				  const int64_t *off, const int64_t *size, struct read_plan_sub **out)
{
	TRY(vec_reserve(&g->sub_dims, 2ull * n));
	TRY(vec_push(&g->subs, out));
	**out = (struct read_plan_sub){ .job = job, .whole_item = whole_item, .direct = direct, .dims_at = g->sub_dims.n };
	for (uint32_t i = 0; i < n && !whole_item; i++) {
		g->sub_dims.v[g->sub_dims.n + i] = off[i];
		g->sub_dims.v[g->sub_dims.n + n + i] = size[i];
	}
	g->sub_dims.n += whole_item ? 0 : 2ull * n;
	return OK;
}

/* The whole item is read: small, not yet known, or deflated. */
static FALLIBLE enum err fill_whole(struct read_plan *g, struct wave *w, uint32_t job, bool *full_out)
{
	struct read_plan_job *j = &g->jobs.v[job];
	const struct run_src *s = &g->sources->run->srcs[j->src];
	struct read_plan_sub *sub;
	uint32_t read;

	if (s->length > w->bytes)
		return sources_at(g->sources->run, j->src,
				  ERR(LIMIT_EXCEEDED, "a deflated item of %ju bytes", (uintmax_t)s->length));
	TRY(wave_add(w, s->file, s->offset, s->length, NULL, &read, full_out));
	if (*full_out)
		return OK;
	TRY(push_sub(g, job, true, false, 0, NULL, NULL, &sub));
	sub->read = read;
	j->done = true;
	return OK;
}

enum { BLOCK_FLOATS = QUANT_Q8_0_FLOATS * sizeof(float) };

/* Stored bytes of elements that begin at byte `first` of them all: whole blocks, if they lie in such. */
static void stored_range(const struct src_info *info, uint64_t first, uint64_t span, uint64_t *offset, uint64_t *bytes)
{
	uint64_t block = first / BLOCK_FLOATS, end = num_div_up(first + span, BLOCK_FLOATS);

	*offset = info->q8_0 ? block * QUANT_Q8_0_BYTES : first;
	*bytes = info->q8_0 ? (end - block) * QUANT_Q8_0_BYTES : span;
}

/* The elements of a sub-box that was read: *out, which is good until the next call. */
static FALLIBLE enum err elements_of(struct read_plan *g, const struct src_info *info, const struct read_plan_sub *sub,
				     const unsigned char *stored, const unsigned char **out)
{
	uint64_t offset, bytes;

	*out = stored;
	if (!info->q8_0)
		return OK;
	stored_range(info, sub->first, sub->span, &offset, &bytes);
	uint64_t blocks = bytes / QUANT_Q8_0_BYTES;
	TRY(vec_reserve(&g->floats, blocks * QUANT_Q8_0_FLOATS));
	quant_q8_0_floats(g->floats.v, stored, blocks);
	*out = (unsigned char *)g->floats.v + sub->first % BLOCK_FLOATS;
	return OK;
}

static FALLIBLE enum err fill_spans(struct read_plan *g, struct wave *w, uint32_t job, const struct src_info *info,
				    bool *full_out)
{
	const struct run *run = g->sources->run;
	struct read_plan_job *j = &g->jobs.v[job];
	const struct run_src *s = &run->srcs[j->src];
	uint32_t n = s->ndim, item = dtype_bytes((enum dtype)s->dtype);
	int64_t off[NDIM_MAX], size[NDIM_MAX], saved[NDIM_MAX];

	if (j->step == 0)
		decide_split(info, n, g->dims.v + j->dims_at + 2 * n, w->bytes / 2, j);
	for (*full_out = false; !*full_out;) {
		if (n)
			memcpy(saved, g->dims.v + j->dims_at + 3 * n, n * sizeof *saved);
		if (!next_sub(g, j, info, n, off, size))
			return OK;
		uint64_t first = element_offset(info, n, g->dims.v + j->dims_at, off) * item;
		uint64_t span = sources_span(info, n, size, 0);
		struct read_plan_sub *sub;
		uint32_t read;
		if (!num_inside(first, span, info->payload_bytes))
			return sources_at(run, j->src, ERR(FORMAT_ITEM, "the item's record is too short"));
		unsigned char *into = direct_place(g, j, info, span, off, size);
		uint64_t offset, bytes;
		stored_range(info, first, span, &offset, &bytes);
		TRY(wave_add(w, s->file, s->offset + info->payload_off + offset, bytes, into, &read, full_out));
		if (*full_out) { /* once more in the next wave */
			if (n)
				memcpy(g->dims.v + j->dims_at + 3 * n, saved, n * sizeof *saved);
			j->done = false;
			return OK;
		}
		TRY(push_sub(g, job, false, into != NULL, n, off, size, &sub));
		sub->read = read;
		sub->first = first;
		sub->span = span;
	}
	return OK;
}

static FALLIBLE enum err copy_from_segment(struct read_plan *g, struct read_plan_job *j, const struct src_info *info)
{
	const struct run *run = g->sources->run;
	const struct run_src *s = &run->srcs[j->src];
	static const int64_t zeros[NDIM_MAX];
	const int64_t *d = g->dims.v + j->dims_at;
	unsigned char *p;

	uint64_t first = element_offset(info, s->ndim, d, zeros) * dtype_bytes((enum dtype)s->dtype);
	TRY(files_at(g->sources->files, s->file, s->offset + first, &p));
	j->done = true;
	return read_plan_place(run, info, j->dst, d + s->ndim, d + 2 * s->ndim, p, j->mem, j->mem_at);
}

static FALLIBLE enum err fill_job(struct read_plan *g, struct wave *w, uint32_t job, bool *full_out)
{
	struct read_plan_job *j = &g->jobs.v[job];
	const struct run *run = g->sources->run;
	const struct run_src *s = &run->srcs[j->src];
	struct src_info *info;

	*full_out = false;
	if (s->kind == RUN_SRC_ITEM && !sources_known(g->sources, j->src) && s->length <= READ_PLAN_SMALL_ITEM)
		return fill_whole(g, w, job, full_out);
	TRY(sources_info(g->sources, j->src, &info));
	if (run->files[s->file].kind == RUN_FILE_SEGMENT)
		return copy_from_segment(g, j, info);
	if (info->deflated)
		return fill_whole(g, w, job, full_out);
	return fill_spans(g, w, job, info, full_out);
}

enum err read_plan_fill(struct read_plan *g, struct wave *w)
{
	bool full = false;

	g->subs.n = g->sub_dims.n = 0;
	while (g->next_job < g->jobs.n && !full) {
		TRY(fill_job(g, w, (uint32_t)g->next_job, &full));
		if (!full)
			g->next_job++;
	}
	return OK;
}

static FALLIBLE enum err inflate_record(const unsigned char *from, uint64_t n, uint64_t want, unsigned char **out)
{
	unsigned char *into = mem_alloc(want);
	z_stream z = { .next_in = (unsigned char *)(uintptr_t)from, .avail_in = (uInt)n, .next_out = into,
		       .avail_out = (uInt)want };

	NEED(into, "no memory for %ju bytes", (uintmax_t)want);
	if (inflateInit2(&z, -MAX_WBITS) != Z_OK) {
		mem_free(into);
		return ERR(NO_MEMORY, "no memory to inflate");
	}
	int rc = inflate(&z, Z_FINISH);
	inflateEnd(&z);
	if (rc != Z_STREAM_END || z.total_out != want) {
		mem_free(into);
		return ERR(FORMAT_ZIP, "a deflated record does not give %ju bytes", (uintmax_t)want);
	}
	*out = into;
	return OK;
}

/* Adds bytes that were read to the CRC32 of a source that is compared as it is copied. */
static FALLIBLE enum err sum_sub(struct read_plan *g, const struct read_plan_sub *sub, const unsigned char *bytes)
{
	const struct read_plan_job *j = &g->jobs.v[sub->job];
	uint32_t n = g->sources->run->dsts[j->dst].ndim;
	const int64_t *box = g->sub_dims.v + sub->dims_at;
	int64_t off[NDIM_MAX];

	for (uint32_t d = 0; d < n; d++)
		off[d] = g->dims.v[j->dims_at + d] + box[d];
	return sums_add(g->sources, j->src, off, box + n, bytes);
}

static FALLIBLE enum err copy_whole(struct read_plan *g, const struct read_plan_job *j, const unsigned char *item)
{
	const struct run *run = g->sources->run;
	const struct run_src *s = &run->srcs[j->src];
	static const int64_t zeros[NDIM_MAX];
	const int64_t *d = g->dims.v + j->dims_at;
	unsigned char *inflated = NULL;
	struct src_info *info;

	TRY(sources_parse(g->sources, j->src, item, &info));
	const unsigned char *payload = item + info->payload_off;
	if (info->deflated) {
		if (!num_inside(info->payload_off, info->stored_bytes, s->length))
			return sources_at(run, j->src, ERR(FORMAT_ZIP, "a record beyond the item's end"));
		enum err bad = inflate_record(payload, info->stored_bytes, info->payload_bytes, &inflated);
		if (bad)
			return sources_at(run, j->src, bad);
		payload = inflated;
	}
	uint64_t first = element_offset(info, s->ndim, d, zeros) * dtype_bytes((enum dtype)s->dtype);
	enum err e = read_plan_place(run, info, j->dst, d + s->ndim, d + 2 * s->ndim, payload + first, j->mem, j->mem_at);
	e = e ?: sums_add(g->sources, j->src, d, d + 2 * s->ndim, payload + first);
	mem_free(inflated);
	return e;
}

/* Rows of a source that become columns: one row at a time would fetch a line of the target for every element. */
struct columns {
	const unsigned char *row[COLUMNS_MAX];
	uint32_t count, dim;           /* dim: the one that the rows run along */
};

#define COLUMNS(type)                                                                         \
	for (int64_t c = 0; c < n; c++)                                                       \
		for (uint32_t r = 0; r < k->count; r++)                                       \
			memcpy(into + c * step + r * sizeof(type), k->row[r] + c * (int64_t)sizeof(type), sizeof(type)); \
	return

static void copy_columns(const struct columns *k, unsigned char *into, int64_t step, uint32_t item, int64_t n)
{
	switch (item) {
	case 1: COLUMNS(uint8_t);
	case 2: COLUMNS(uint16_t);
	case 4: COLUMNS(uint32_t);
	default: COLUMNS(uint64_t);
	}
}

/* Does the sub-box have one row, along a dim that is not the target's innermost, whose elements follow each other in the source? */
static bool is_row(const struct read_plan *g, const struct read_plan_sub *sub, const struct src_info *info, uint32_t n, uint32_t *dim)
{
	const int64_t *size = g->sub_dims.v + sub->dims_at + n;
	uint32_t rows = 0;

	if (sub->direct || sub->whole_item || n < 2 || size[n - 1] != 1)
		return false;
	for (uint32_t d = 0; d < n; d++)
		if (size[d] > 1) {
			rows++;
			*dim = d;
		}
	return rows == 1 && info->strides[*dim] == 1;
}

/* The rows from sub `i` on that lie side by side in the target, as far as they can be copied together: how many; 0: they cannot. */
static uint64_t copy_rows(struct read_plan *g, struct wave *w, uint64_t i, const struct src_info *info)
{
	const struct read_plan_sub *first = &g->subs.v[i];
	const struct read_plan_job *j = &g->jobs.v[first->job];
	const struct run_dst *d = &g->sources->run->dsts[j->dst];
	const int64_t *sizes = g->sources->run->dims + d->dims_at + d->ndim;
	uint32_t n = d->ndim, item = dtype_bytes((enum dtype)d->dtype);
	int64_t at[NDIM_MAX], step = item;
	struct columns k = { .count = 0 };

	if (item > 8 || converts(info, (enum dtype)d->dtype) || !is_row(g, first, info, n, &k.dim))
		return 0;
	const int64_t *off = g->sub_dims.v + first->dims_at;
	for (; k.count < COLUMNS_MAX && i + k.count < g->subs.n; k.count++) {
		const struct read_plan_sub *sub = &g->subs.v[i + k.count];
		const int64_t *here = g->sub_dims.v + sub->dims_at;
		if (sub->job != first->job || sub->direct || sub->whole_item || memcmp(here + n, off + n, n * sizeof *off) != 0 ||
		    memcmp(here, off, (n - 1) * sizeof *off) != 0 || here[n - 1] != off[n - 1] + k.count)
			break;
		k.row[k.count] = wave_data(w, sub->read);
	}
	for (uint32_t x = 0; x < n; x++)
		at[x] = g->dims.v[j->dims_at + n + x] + off[x];
	for (uint32_t x = n; x-- > k.dim + 1;)
		step *= sizes[x];
	copy_columns(&k, j->mem + (dst_element(g->sources->run, d, at) * item - j->mem_at), step, item, off[n + k.dim]);
	return k.count;
}

enum err read_plan_copy(struct read_plan *g, struct wave *w)
{
	const struct run *run = g->sources->run;

	for (uint64_t i = 0; i < g->subs.n; i++) {
		const struct read_plan_sub *sub = &g->subs.v[i];
		const struct read_plan_job *j = &g->jobs.v[sub->job];
		uint32_t n = run->dsts[j->dst].ndim;
		int64_t at[NDIM_MAX];
		struct src_info *info;

		if (sub->whole_item) {
			TRY(copy_whole(g, j, wave_data(w, sub->read)));
			continue;
		}
		TRY(sum_sub(g, sub, wave_data(w, sub->read)));
		if (sub->direct)
			continue;
		TRY(sources_info(g->sources, j->src, &info));
		uint64_t together = copy_rows(g, w, i, info);
		if (together) {
			for (uint64_t k = 1; k < together; k++)
				TRY(sum_sub(g, &g->subs.v[i + k], wave_data(w, g->subs.v[i + k].read)));
			i += together - 1;
			continue;
		}
		for (uint32_t d = 0; d < n; d++)
			at[d] = g->dims.v[j->dims_at + n + d] + g->sub_dims.v[sub->dims_at + d];
		const unsigned char *elements;
		TRY(elements_of(g, info, sub, wave_data(w, sub->read), &elements));
		TRY(read_plan_place(run, info, j->dst, at, g->sub_dims.v + sub->dims_at + n, elements, j->mem, j->mem_at));
	}
	return OK;
}
