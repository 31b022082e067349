/* repair_archived.c: damaged items of which no manifest tells: each archive has the CRC32s of its own records.
 *
 * The CRC32 of a payload stands for all of it. So a candidate is read twice: compared first, written afterwards. */
#include "ops/repair_impl.h"

#include "base/num.h"
#include "format/zip.h"
#include "io/digest.h"

/* The payload of the damaged item, whose CRC32 its archive has. */
struct archived {
	struct item_tensor tensor;
	bool has_tensor;
	struct zip *zip;               /* of the damaged item; NULL: its directory is damaged, too */
};

/* Compares (writes: puts) all elements of the payload as the other checkpoint has them. */
static FALLIBLE enum err pass(struct repair_file *f, const struct checkpoint *other, const struct archived *a, bool writes, bool *done)
{
	uint32_t crc = 0;

	*done = true;
	for (uint64_t at = 0; at < a->tensor.payload_bytes && *done; at += REPAIR_PIECE) {
		uint64_t end = num_min(at + REPAIR_PIECE, a->tensor.payload_bytes);
		TRY(job_tick(f->r->job));
		TRY(repair_read_elements(f, other, at, end, f->block, done));
		if (*done)
			crc = digest_crc32(crc, f->block, end - at);
		if (*done && writes)
			TRY(repair_put(f, f->block, end - at, f->item.offset + a->tensor.payload_off + at));
	}
	*done = *done && crc == a->tensor.crc32;
	return OK;
}

static FALLIBLE enum err payload_of_other(struct repair_file *f, const struct checkpoint *other, const char *by,
					    const struct archived *a, bool *done)
{
	TRY(pass(f, other, a, false, done));
	if (!*done)
		return OK;
	TRY(pass(f, other, a, true, done));
	if (!*done)
		return ERR(CHECKPOINT_REPLACED, "%s was changed while it was read", by);
	repair_restored(f, f->item.offset + a->tensor.payload_off, a->tensor.payload_bytes, by);
	return OK;
}

/* Do both archives hold records of the same names, sizes and CRC32s, in the same places? */
static bool same_directory(const struct zip *a, const struct zip *b)
{
	if (a->count != b->count)
		return false;
	for (uint64_t i = 0; i < a->count; i++) {
		const struct zip_record *x = &a->records[i], *y = &b->records[i];
		if (!str_eq(x->name, y->name) || x->bytes != y->bytes || x->packed_bytes != y->packed_bytes ||
		    x->header_off != y->header_off ||
		    x->deflated != y->deflated || x->crc32 != y->crc32 || (x->bytes && !x->crc32))
			return false;
	}
	return true;
}

/* The item of the other checkpoint that has the same value, or the same box of the tensor. */
static bool find_same_item(const struct repair_file *f, const struct checkpoint *other, struct sd_loc *out)
{
	if (f->item.kind == ITEM_VALUE) {
		const struct sd_value *v = sdict_value(other->sd, f->item.fqn);
		if (!v || v->kind != SD_VALUE_STORED)
			return false;
		*out = v->loc;
		return !v->loc.transform && v->loc.length == f->item.length;
	}
	const struct sd_chunk *mine = &f->c->sd->chunks[f->item.index];
	const struct sd_tensor *t = repair_same_tensor(f, other);
	for (uint64_t i = t ? t->first_chunk : 0; t && i < t->first_chunk + t->chunk_count; i++) {
		const struct sd_chunk *c = &other->sd->chunks[i];
		*out = c->loc;
		if (!c->loc.transform && c->loc.length == f->item.length &&
		    box_equal(t->ndim, c->dims, c->dims + t->ndim, mine->dims, mine->dims + t->ndim))
			return true;
	}
	return false;
}

static FALLIBLE enum err copy_item(struct repair_file *f, struct store_at from, uint64_t offset)
{
	for (uint64_t at = 0; at < f->item.length; at += REPAIR_PIECE) {
		uint64_t n = num_min(REPAIR_PIECE, f->item.length - at);
		TRY(job_tick(f->r->job));
		TRY(store_read(from, f->block, n, offset + at, ""));
		TRY(repair_put(f, f->block, n, f->item.offset + at));
	}
	return OK;
}

/* All of the item, if the other's archive has the same records by its directory, and is whole. */
static FALLIBLE enum err item_of_other(struct repair_file *f, const struct checkpoint *other, const char *by,
					 const struct archived *a, bool *done)
{
	struct repair_source at = { STORE_NOTHING, 0 };
	struct item_source src = { repair_read, &at, f->item.length };
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	uint64_t compared, unsure = 0;
	struct sd_loc loc;

	*done = false;
	if (!a->zip || !find_same_item(f, other, &loc))
		return OK;
	*done = true;
	at.offset = loc.offset;
	enum err e = checkpoint_open_file(other, loc.file, &at.file);
	e = e ?: zip_open(&src, &z);
	e = e ?: item_check_crc(&src, false, &compared, &unsure);
	e = repair_useless(e, done);
	*done = *done && !unsure && same_directory(z, a->zip);
	if (!e && *done)
		e = copy_item(f, at.file, loc.offset);
	store_close(&at.file);
	if (!e && *done)
		repair_restored(f, f->item.offset, f->item.length, by);
	return e;
}

static FALLIBLE enum err archived_of_other(struct repair_file *f, const struct checkpoint *other, const char *by, void *user, bool *done)
{
	const struct archived *a = user;

	TRY(item_of_other(f, other, by, a, done));
	return *done || !a->has_tensor ? OK : payload_of_other(f, other, by, a, done);
}

enum err repair_archived(struct repair_file *f)
{
	struct repair_source at = { f->old, f->item.offset };
	struct item_source src = { repair_read, &at, f->item.length };
	struct archived a = { .has_tensor = false };
	bool done = false;

	if (!num_inside(f->item.offset, f->item.length, f->old_bytes)) {
		repair_unknown(f, f->item.offset, f->item.length, "the file ends in front of it, and nothing tells what its bytes were");
		return OK;
	}
	if (f->block_bytes < REPAIR_PIECE) {
		mem_free(f->block);
		f->block = mem_alloc(REPAIR_PIECE);
		f->block_bytes = f->block ? REPAIR_PIECE : 0;
		NEED(f->block, "no memory for a block");
	}
	bool opened = true;
	TRY(repair_useless(zip_open(&src, &a.zip), &opened));
	a.has_tensor = opened && f->item.kind == ITEM_CHUNK;
	TRY(a.has_tensor ? repair_useless(item_read_tensor(&src, &a.tensor), &a.has_tensor) : OK);
	const struct item_tensor *t = &a.tensor;
	uint64_t numel = a.has_tensor ? box_volume(t->ndim, t->sizes) : 0;
	a.has_tensor = a.has_tensor && t->crc_known && !t->deflated && t->c_order && !t->big_endian && !t->conj && !t->neg &&
		       t->storage_offset == 0 && t->payload_bytes == numel * dtype_bytes(t->dtype);
	enum err e = repair_each_candidate(f, archived_of_other, &a, &done);
	zip_free(a.zip);
	if (!e && !done)
		repair_unknown(f, f->item.offset, f->item.length,
			opened ? "no bytes with the CRC32 that the item has were found"
			       : "the item's own directory, which has its CRC32s, is damaged");
	return e;
}
