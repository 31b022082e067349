/* exec_share.c: blocks and files of a save that an earlier checkpoint has already (share.h): found out between the hash and the write.
 *
 * A clone is made block by block, and a block that cannot be cloned is written. A link is of a whole file, and whether it can be made is
 * known when its last byte is hashed. Until then equal blocks are deferred: most tensors that change do so in their first block. If one
 * differs, the worker that finds it claims all that was deferred until then, and writes that from memory; what is deferred by another
 * worker a moment later is claimed by either of the two, once:
 *
 *     the one that differs:  sets differs, makes the file, then claims what is DEFERRED
 *     the one that is equal: DEFERRED, then looks at differs, and claims if it is set
 *
 * A claimed block counts in its file's blocks_left until it is written, so that the file does not end before. */
#include <time.h>

#include "runner/exec_impl.h"

enum { PAGE = 4096, REST_NS = 50000 };

/* ---- links ---- */

static bool is_equal(const struct run *run, const unsigned char digest[16], uint32_t base)
{
	return base && memcmp(digest, run->digests[base - 1].xxh3_128, 16) == 0;
}

static bool claim(_Atomic uint32_t *state)
{
	uint32_t deferred = RUN_DEFERRED;

	return atomic_compare_exchange_strong(state, &deferred, RUN_CLAIMED);
}

/* Another worker is making the file: a moment. */
static FALLIBLE enum err wait_made(const struct slot *s, const struct run_file *f)
{
	while (atomic_load(&f->differs) == RUN_MAKING) {
		if (atomic_load(&s->x->run->head->cancelled))
			return ERR(CANCELLED, "another worker of the job has failed");
		nanosleep(&(struct timespec){ .tv_nsec = REST_NS }, NULL);
	}
	return OK;
}

/* True: it need not be written, or somebody else does it. */
static bool defer(const struct run_file *f, _Atomic uint32_t *state)
{
	atomic_store(state, RUN_DEFERRED);
	return atomic_load(&f->differs) == RUN_UNDECIDED || !claim(state);
}

static FALLIBLE enum err write_after_all(struct slot *s, struct run_file *f, uint64_t index, bool edges)
{
	struct slot_redo *r;

	TRY(vec_push(&s->x->redo, &r));
	*r = (struct slot_redo){ index, s->task, edges };
	atomic_fetch_add(&f->blocks_left, 1);
	return OK;
}

static FALLIBLE enum err set_differs(struct slot *s, uint32_t file)
{
	struct run *run = s->x->run;
	struct run_file *f = &run->files[file];

	uint32_t undecided = RUN_UNDECIDED;
	if (!atomic_compare_exchange_strong(&f->differs, &undecided, RUN_MAKING))
		return wait_made(s, f);
	TRY(files_make(&s->x->files, file));
	atomic_store(&f->differs, RUN_DIFFERS);
	for (uint64_t i = 0; i < f->block_count; i++) {
		uint64_t block = run->file_blocks[f->first_block + i];
		if (claim(&run->blocks[block].deferred))
			TRY(write_after_all(s, f, block, false));
	}
	for (uint32_t i = f->first_dst; i < f->first_dst + f->dst_count; i++)
		if (claim(&run->dsts[i].edges_deferred))
			TRY(write_after_all(s, f, i, true));
	return OK;
}

static FALLIBLE enum err share_linked(struct slot *s, struct run_block *b, struct slot_block *sb)
{
	const struct run *run = s->x->run;
	const struct run_file *f = &run->files[b->file];
	bool equal = true;

	if (s->redo || atomic_load(&f->differs) != RUN_UNDECIDED)
		return wait_made(s, f);
	for (uint32_t i = 0; i < b->part_count && equal; i++) {
		const struct run_part *p = &run->parts[run->block_parts[b->first_part + i]];
		const struct run_dst *d = &run->dsts[p->dst];
		equal = is_equal(run, p->xxh3_128, p->base) && (!d->small || !d->edges_base || is_equal(run, d->edges_xxh3, d->edges_base));
	}
	if (!equal)
		return set_differs(s, b->file);
	sb->shared = defer(f, &b->deferred);
	return sb->shared ? OK : wait_made(s, f);
}

enum err exec_share_edges(struct slot *s, uint32_t dst, bool *shared_out)
{
	struct run *run = s->x->run;
	struct run_dst *d = &run->dsts[dst];
	const struct run_file *f = &run->files[d->file];

	*shared_out = false;
	if (!f->base)
		return OK;
	if (s->redo || atomic_load(&f->differs) != RUN_UNDECIDED)
		return wait_made(s, f);
	if (!is_equal(run, d->edges_xxh3, d->edges_base))
		return set_differs(s, d->file);
	*shared_out = defer(f, &d->edges_deferred);
	return *shared_out ? OK : wait_made(s, f);
}

enum err exec_share_file(struct slot *s, uint32_t file)
{
	struct run *run = s->x->run;
	struct run_file *f = &run->files[file];

	enum err e = files_link(&s->x->files, f->base - 1, file);
	if (!e) {
		atomic_fetch_add(&run->head->shared_bytes, f->bytes);
		return OK;
	}
	if (e == ERR_CANCELLED || e == ERR_NO_MEMORY)
		return e;
	err_clear();
	return set_differs(s, file);
}

/* ---- clones ---- */

static const struct run_base *find_base(const struct run *run, const struct run_part *p)
{
	uint64_t lo = 0, hi = run->bases_n;

	while (lo < hi) { /* the first one that is not less */
		uint64_t mid = lo + (hi - lo) / 2;
		if (memcmp(run->bases[mid].xxh3_128, p->xxh3_128, sizeof p->xxh3_128) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	for (; lo < run->bases_n && memcmp(run->bases[lo].xxh3_128, p->xxh3_128, sizeof p->xxh3_128) == 0; lo++)
		if (!run->bases[lo].bytes || run->bases[lo].bytes == p->end - p->begin)
			return &run->bases[lo];
	return NULL;
}

static FALLIBLE enum err clone_block(struct slot *s, const struct run_block *b, const struct run_base *from)
{
	struct files *files = &s->x->files;
	struct store_at *base, *to;

	TRY(files_pin(files, from->file, &base));
	enum err e = files_pin(files, b->file, &to);
	if (!e) {
		e = to->store->ops->clone(*base, from->offset, *to, b->offset, b->bytes, "");
		files_unpin(files, b->file);
	}
	files_unpin(files, from->file);
	return e;
}

/* A clone of a page costs as much as one of a gigabyte: small items are written. */
static FALLIBLE enum err share_cloned(struct slot *s, const struct run_block *b, struct slot_block *sb)
{
	struct run *run = s->x->run;
	const struct run_part *p = &run->parts[run->block_parts[b->first_part]];
	const struct run_dst *d = &run->dsts[p->dst];
	bool whole = b->part_count == 1 && !d->small && b->offset == d->offset + d->payload_off + p->begin && b->offset % PAGE == 0 &&
		     b->bytes % PAGE == 0;
	const struct run_base *from = whole ? find_base(run, p) : NULL;

	if (!from)
		return OK;
	enum err e = clone_block(s, b, from);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e) { /* the parent was removed, or the two are not of one file system after all */
		err_clear();
		return OK;
	}
	sb->shared = true;
	atomic_fetch_add(&run->head->shared_bytes, p->end - p->begin);
	return OK;
}

enum err exec_share_block(struct slot *s, struct slot_block *sb)
{
	struct run *run = s->x->run;
	struct run_block *b = &run->blocks[sb->block];

	if (run->head->opts.mode != RUN_WRITE_FILES || run->files[b->file].kind != RUN_FILE_TARGET)
		return OK;
	if (run->files[b->file].base)
		return share_linked(s, b, sb);
	return run->bases_n ? share_cloned(s, b, sb) : OK;
}
