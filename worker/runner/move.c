/* move.c: see move.h. */
#include "runner/move.h"

#include <sys/stat.h>

#include "base/num.h"
#include "runner/read_plan.h"
#include "tensor/linear.h"
#include "tensor/strided.h"

enum { POPULATE_MIN = 64 << 10 };

uint64_t move_bytes(const struct run *run, const struct run_move *m)
{
	const struct run_src *s = &run->srcs[m->src];

	return box_volume(s->ndim, run->dims + m->dims_at + s->ndim) * dtype_bytes((enum dtype)s->dtype);
}

void move_cut_begin(struct move_cut *c, uint32_t ndim, const int64_t *dims, uint64_t most)
{
	uint64_t inner = 1;

	c->ndim = ndim;
	c->done = false;
	for (uint32_t i = 0; i < ndim; i++) {
		c->off[i] = dims[i];
		c->size[i] = dims[ndim + i];
		c->at[i] = 0;
		c->done = c->done || c->size[i] == 0;
	}
	c->walked = ndim;
	while (c->walked > 0 && !c->done && inner * (uint64_t)c->size[c->walked - 1] <= most)
		inner *= (uint64_t)c->size[--c->walked];
	/* dims behind `walked` fit whole; that one is taken in steps */
	c->step = 1;
	if (c->walked > 0) {
		c->walked--;
		c->step = (int64_t)num_max(most / inner, 1);
	} else {
		c->walked = UINT32_MAX;
	}
}

bool move_cut_next(struct move_cut *c, int64_t *off_out, int64_t *size_out)
{
	if (c->done)
		return false;
	for (uint32_t i = 0; i < c->ndim; i++) {
		bool whole = c->walked == UINT32_MAX || i > c->walked;
		off_out[i] = c->off[i] + c->at[i];
		size_out[i] = whole ? c->size[i] : i < c->walked ? 1 : (int64_t)num_min((uint64_t)c->step,
											(uint64_t)(c->size[i] - c->at[i]));
	}
	c->done = true;
	for (uint32_t i = c->walked == UINT32_MAX ? 0 : c->walked + 1; i-- > 0;) {
		c->at[i] += i == c->walked ? c->step : 1;
		if (c->at[i] < c->size[i]) {
			c->done = false;
			break;
		}
		c->at[i] = 0;
	}
	return true;
}

/* The address of the element at global offsets `off` of a dense shard at p. */
static uint64_t element_at(uint32_t ndim, const int64_t *shard, const int64_t *off, int64_t *strides)
{
	uint64_t at = 0;
	int64_t stride = 1;

	for (uint32_t i = ndim; i-- > 0;) {
		strides[i] = stride;
		at += (uint64_t)((off[i] - shard[i]) * stride);
		stride *= shard[ndim + i];
	}
	return at;
}

enum err move_map(struct files *f, const struct run *run, const struct run_move *m, bool from, bool to)
{
	unsigned char *p;

	if (from)
		TRY(files_segment(f, run->srcs[m->src].file, &p));
	return to ? files_segment(f, run->dsts[m->dst].file, &p) : OK;
}

static unsigned char *byte_at(struct files *f, uint32_t file, uint64_t offset)
{
	if (f->run->files[file].kind == RUN_FILE_MEMORY)
		return (unsigned char *)(uintptr_t)offset;
	must(f->maps[file].p);
	return f->maps[file].p + offset;
}

enum err move_unpack(struct files *f, const struct run *run, uint32_t dst, enum dtype dtype, const int64_t *off,
		     const int64_t *size, const void *in)
{
	const struct run_dst *d = &run->dsts[dst];
	const int64_t *shard = run->dims + d->dims_at;
	int64_t rel[NDIM_MAX], stride = 1;
	struct src_info info = { .dtype = (uint8_t)dtype };

	for (uint32_t i = d->ndim; i-- > 0;) {
		info.strides[i] = stride;
		stride *= size[i];
		rel[i] = off[i] - shard[i];
	}
	return read_plan_place(run, &info, dst, rel, size, in, byte_at(f, d->file, d->offset), 0);
}

enum err move_copy(struct files *f, const struct run *run, const struct run_move *m, const int64_t *off, const int64_t *size)
{
	const struct run_src *s = &run->srcs[m->src];
	const struct run_dst *d = &run->dsts[m->dst];
	const int64_t *to = run->dims + d->dims_at;
	struct src_info info = { .dtype = s->dtype };
	int64_t rel[NDIM_MAX];

	uint64_t at = element_at(s->ndim, run->dims + s->dims_at, off, info.strides) * dtype_bytes((enum dtype)s->dtype);
	for (uint32_t i = 0; i < s->ndim; i++)
		rel[i] = off[i] - to[i];
	return read_plan_place(run, &info, m->dst, rel, size, byte_at(f, s->file, s->offset + at), byte_at(f, d->file, d->offset), 0);
}

static void pack(const unsigned char *shard_bytes, uint32_t ndim, uint32_t item, const int64_t *shard, const int64_t *off,
		 const int64_t *size, void *out)
{
	int64_t from[NDIM_MAX], to[NDIM_MAX];
	struct strided copy;

	uint64_t at = element_at(ndim, shard, off, from) * item;
	for (uint32_t i = 0; i < ndim; i++)
		from[i] *= item;
	strided_c_order(ndim, size, item, to);
	strided_init(&copy, ndim, size, to, from, item);
	strided_copy(&copy, out, shard_bytes + at);
}

void move_pack(struct files *f, const struct run *run, uint32_t src, const int64_t *off, const int64_t *size, void *out)
{
	const struct run_src *s = &run->srcs[src];

	pack(byte_at(f, s->file, s->offset), s->ndim, dtype_bytes((enum dtype)s->dtype), run->dims + s->dims_at, off, size, out);
}

void move_pack_target(struct files *f, const struct run *run, uint32_t dst, const int64_t *off, const int64_t *size, void *out)
{
	const struct run_dst *d = &run->dsts[dst];

	pack(byte_at(f, d->file, d->offset), d->ndim, dtype_bytes((enum dtype)d->dtype), run->dims + d->dims_at, off, size, out);
}

/* One call instead of a fault for every page, where the box is one run of bytes. */
static void populate(struct files *f, uint32_t file, uint64_t offset, uint32_t ndim, const int64_t *shard, uint32_t item,
		     const int64_t *off, const int64_t *size, bool writable)
{
	uint64_t bytes = box_volume(ndim, size) * item, first;
	int64_t rel[NDIM_MAX];

	if (bytes < POPULATE_MIN || f->run->files[file].kind != RUN_FILE_SEGMENT)
		return;
	for (uint32_t i = 0; i < ndim; i++)
		rel[i] = off[i] - shard[i];
	if (linear_is_run(ndim, shard + ndim, rel, size, &first))
		seg_populate(byte_at(f, file, offset + first * item), bytes, writable);
}

void move_populate(struct files *f, const struct run *run, const struct run_move *m, const int64_t *off, const int64_t *size,
		   bool from, bool to)
{
	const struct run_src *s = &run->srcs[m->src];

	if (from)
		populate(f, s->file, s->offset, s->ndim, run->dims + s->dims_at, dtype_bytes((enum dtype)s->dtype), off, size, false);
	if (to && run->head->opts.mode == RUN_MOVE_BOXES) {
		const struct run_dst *d = &run->dsts[m->dst];
		populate(f, d->file, d->offset, d->ndim, run->dims + d->dims_at, dtype_bytes((enum dtype)d->dtype), off, size, true);
	}
}

static bool shrunk(const struct files *f, uint32_t file)
{
	const struct run_file *rf = &f->run->files[file];
	struct stat st;

	return rf->fd_index < f->fd_count && fstat(f->fds[rf->fd_index], &st) == 0 && (uint64_t)st.st_size < rf->bytes;
}

enum err move_error(struct files *f, const struct run *run, const struct run_move *m, enum err e)
{
	const struct run_src *s = &run->srcs[m->src];
	struct str fqn = run_src_fqn(run, s);
	bool boxes = run->head->opts.mode == RUN_MOVE_BOXES;
	uint32_t rank = boxes ? run->dsts[m->dst].rank : run->srcs[m->dst].rank;

	if (e == ERR_SEGMENT_SHRUNK && shrunk(f, s->file))
		rank = s->rank;
	return err_at_rank(err_at_fqn(e, fqn.p, fqn.n), rank);
}

uint64_t move_shard_element(const struct run *run, uint32_t src, const int64_t *off, const int64_t *size, uint64_t at)
{
	const struct run_src *s = &run->srcs[src];
	const int64_t *shard = run->dims + s->dims_at;
	uint64_t element = 0, pitch = 1;

	for (uint32_t i = s->ndim; i-- > 0;) {
		uint64_t index = (uint64_t)(off[i] - shard[i]) + at % (uint64_t)size[i];
		at /= (uint64_t)size[i];
		element += index * pitch;
		pitch *= (uint64_t)shard[s->ndim + i];
	}
	return element;
}
