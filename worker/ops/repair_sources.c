/* repair_sources.c: the staged copy of a damaged file, and the checkpoints that may have the same bytes. */
#include "ops/repair_impl.h"

#include <stdio.h>

#include "base/num.h"
#include "runner/part_read.h"
#include "tensor/linear.h"

static FALLIBLE enum err copy_old(struct repair_file *f)
{
	CLEANUP(mem_free_ptr) unsigned char *piece = mem_alloc(REPAIR_PIECE);
	const struct store_ops *ops = f->copy.store->ops;
	uint64_t end = num_min(f->old_bytes, f->bytes);

	if (end && ops->clone && ops->clones(f->r->staging.dir) && ops->clone(f->old, 0, f->copy, 0, end, f->file) == OK)
		return OK;
	err_clear();

	NEED(piece, "no memory to copy a file");
	for (uint64_t at = 0; at < end; at += REPAIR_PIECE) {
		size_t n = (size_t)num_min(REPAIR_PIECE, end - at);
		TRY(job_tick(f->r->job));
		TRY(store_read(f->old, piece, n, at, f->file));
		TRY(ops->write(f->copy, piece, n, at, f->file));
	}
	return OK;
}

enum err repair_begin_copy(struct repair_file *f)
{
	char **at;

	if (f->copy.handle >= 0)
		return OK;
	TRY(repair_stage(f->r));
	TRY(store_open_file(f->r->staging.dir, f->file, STORE_WRITE | STORE_NEW, &f->copy));
	TRY(f->bytes ? f->copy.store->ops->resize(f->copy, f->bytes, f->file) : OK);
	TRY(copy_old(f));
	TRY(vec_push(&f->r->files, &at));
	*at = mem_strdup(f->file);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a file's name");
}

enum err repair_put(struct repair_file *f, const void *bytes, uint64_t n, uint64_t offset)
{
	TRY(repair_begin_copy(f));
	return err_at_file(f->copy.store->ops->write(f->copy, bytes, n, offset, f->file), f->file, (int64_t)offset);
}

void repair_restored(struct repair_file *f, uint64_t offset, uint64_t bytes, const char *by)
{
	struct checked_place p = { f->item.fqn, f->item.rank, str_of(f->file), offset, bytes };

	repair_list(f->r->restored, &f->r->restored_count, &p, "by", by);
}

void repair_unknown(struct repair_file *f, uint64_t offset, uint64_t bytes, const char *detail)
{
	struct checked_place p = { f->item.fqn, f->item.rank, str_of(f->file), offset, bytes };

	repair_list(f->r->unknown, &f->r->unknown_count, &p, "detail", detail);
}

enum err repair_read_old(struct repair_file *f, void *into, uint64_t n, uint64_t offset, bool *there)
{
	*there = num_inside(offset, n, f->old_bytes);
	return *there ? store_read(f->old, into, n, offset, f->file) : OK;
}

/* Errors that say that a candidate is of no use, and nothing of this job. */
static bool is_no_use(enum err e)
{
	return checked_is_damage(e) || e == ERR_COVERAGE_HOLE || e == ERR_NOT_FOUND || e == ERR_SIZE_MISMATCH || e == ERR_KIND_MISMATCH ||
	       e == ERR_STORAGE_IO;
}

enum err repair_useless(enum err e, bool *done)
{
	*done = e == OK && *done;
	if (!e || !is_no_use(e))
		return e;
	err_clear();
	return OK;
}

const struct sd_tensor *repair_same_tensor(const struct repair_file *f, const struct checkpoint *other)
{
	const struct sd_tensor *mine = &f->c->sd->tensors[f->c->sd->chunks[f->item.index].tensor];
	const struct sd_tensor *t = sdict_tensor(other->sd, mine->fqn);

	return t && t->dtype == mine->dtype && box_same_shape(t->ndim, t->shape, mine->ndim, mine->shape) ? t : NULL;
}

enum err repair_read_elements(struct repair_file *f, const struct checkpoint *other, uint64_t begin, uint64_t end, unsigned char *into,
				       bool *done)
{
	const struct sd_chunk *c = &f->c->sd->chunks[f->item.index];
	const struct sd_tensor *t = repair_same_tensor(f, other);
	int64_t off[NDIM_MAX], size[NDIM_MAX], dims[2 * NDIM_MAX];
	struct checked ignored = { 0 };

	*done = false;
	if (!t || begin % dtype_bytes(t->dtype) || end % dtype_bytes(t->dtype))
		return OK;
	uint32_t n = t->ndim, item = dtype_bytes(t->dtype);
	struct linear range = linear_range(n, sd_sizes(c, n), begin / item, end / item);
	while (linear_next(&range, off, size)) {
		for (uint32_t i = 0; i < n; i++) {
			dims[i] = c->dims[i] + off[i];
			dims[n + i] = size[i];
		}
		const struct part_box box = { .checkpoint = other, .tensor = t, .dims = dims, .fd = -1, .memory = into };
		enum err e = part_read_box(&f->reader, &box, &ignored);
		checked_free(&ignored);
		*done = true;
		TRY(repair_useless(e, done));
		if (!*done)
			return OK;
		into += box_volume(n, size) * item;
	}
	*done = true;
	return OK;
}

enum err repair_each_candidate(struct repair_file *f, repair_candidate_fn fn, void *user, bool *done)
{
	const struct ref *from = &f->r->job->spec.from;
	char by[4096 + 64];

	*done = false;
	for (uint64_t i = 0; f->others && i < f->others->rank_count && !*done; i++) {
		if (f->others->ranks[i] == f->item.rank)
			continue;
		TRY(job_tick(f->r->job));
		*done = true;
		TRY(repair_useless(checkpoint_take_rank(f->others, i), done));
		if (*done)
			TRY(fn(f, f->others, "replica", user, done));
	}
	if (*done || !f->r->from)
		return OK;
	snprintf(by, sizeof by, "%s:%s", from->storage.p, from->name.p);
	return fn(f, f->r->from, by, user, done);
}
