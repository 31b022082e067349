/* repair_blocks.c: damaged items of which the manifest has digests, block by block.
 *
 * Bytes are taken from wherever they may be, and kept if they have the digest of the damaged block:
 *   - an item of the same checkpoint with the same digest: a tied weight, or a replica that another rank wrote;
 *   - the same elements of the tensor in another rank's part, or in the checkpoint that is named, whatever its layout and format;
 *   - the archive around a payload and a file's index, as dcpd writes them, follow from dtype, sizes and digests, and are made again. */
#include "ops/repair_impl.h"

#include "base/num.h"
#include "format/dcp_index.h"
#include "io/digest.h"

/* A block of the item in hand whose digest is known. */
struct block {
	uint64_t payload_off;          /* in the item */
	uint64_t begin, end;           /* in the payload */
	const unsigned char *xxh3_128;
};

static bool has_digest(const struct block *b, const unsigned char *bytes)
{
	unsigned char got[16];

	digest_xxh3(bytes, b->end - b->begin, got);
	return memcmp(got, b->xxh3_128, sizeof got) == 0;
}

static FALLIBLE enum err take(struct repair_file *f, const struct block *b, const char *by, bool *done)
{
	uint64_t offset = f->item.offset + b->payload_off + b->begin;

	*done = has_digest(b, f->block);
	if (!*done)
		return OK;
	TRY(repair_put(f, f->block, b->end - b->begin, offset));
	repair_restored(f, offset, b->end - b->begin, by);
	return OK;
}

static FALLIBLE enum err block_of_other(struct repair_file *f, const struct checkpoint *other, const char *by, void *user, bool *done)
{
	const struct block *b = user;
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;

	*done = false;
	if (f->item.kind == ITEM_CHUNK) {
		TRY(repair_read_elements(f, other, b->begin, b->end, f->block, done));
		return *done ? take(f, b, by, done) : OK;
	}
	const struct sd_value *v = sdict_value(other->sd, f->item.fqn);
	if (!v || v->kind != SD_VALUE_STORED || v->loc.transform || v->loc.length != f->item.length)
		return OK;
	*done = true;
	enum err e = checkpoint_open_file(other, v->loc.file, &file);
	e = e ?: store_read(file, f->block, b->end - b->begin, v->loc.offset + b->begin, "");
	TRY(repair_useless(e, done));
	return *done ? take(f, b, by, done) : OK;
}

/* Finds the payload in an item that dcpd wrote. False: the item is laid out in another way. */
static bool layout_of(const struct checkpoint *c, const struct manifest_item *item, uint64_t chunk, struct item_layout *out)
{
	const struct sd_chunk *k = &c->sd->chunks[chunk];
	const struct sd_tensor *t = &c->sd->tensors[k->tensor];
	uint64_t numel;

	if (item->raw) {
		*out = (struct item_layout){ 0, item->length, item->length, item->length };
		return true;
	}
	if (box_numel(t->ndim, sd_sizes(k, t->ndim), &numel) || numel > item->length / dtype_bytes(t->dtype))
		return false;
	uint32_t align = item->length - numel * dtype_bytes(t->dtype) > 4096 ? 4096 : 64;
	bool is_ours = item_layout_tensor(t->dtype, t->ndim, sd_sizes(k, t->ndim), align, out) == OK && out->length == item->length;
	if (!is_ours)
		err_clear();
	return is_ours;
}

/* The same bytes in another item of the checkpoint, which its digest tells. */
static FALLIBLE enum err block_of_twin(struct repair_file *f, const struct checkpoint *c, const struct block *b, uint64_t chunk, bool *done)
{
	const struct sd_loc loc = c->sd->chunks[chunk].loc;
	const struct manifest_item *item = manifest_find(c->manifest, c->sd->files[loc.file].name, loc.offset, loc.length);
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	struct item_layout l;
	uint64_t begin = 0;

	*done = false;
	if (!item || item == f->item.known || !layout_of(c, item, chunk, &l))
		return OK;
	for (uint32_t i = 0; i < item->digest_count && !*done; i++) {
		const struct block_digest *d = &c->manifest->digests.v[item->digest_at + i];
		uint64_t end = num_min(d->end, l.payload_bytes);
		bool same = begin <= end && end - begin == b->end - b->begin && memcmp(d->xxh3_128, b->xxh3_128, sizeof d->xxh3_128) == 0;
		if (same) {
			*done = true;
			enum err e = file.handle >= 0 ? OK : checkpoint_open_file(c, loc.file, &file);
			e = e ?: store_read(file, f->block, end - begin, loc.offset + l.payload_off + begin, "");
			TRY(repair_useless(e, done));
			TRY(*done ? take(f, b, "replica", done) : OK);
		}
		begin = end;
	}
	return OK;
}

static FALLIBLE enum err restore_block(struct repair_file *f, const struct block *b)
{
	uint64_t offset = f->item.offset + b->payload_off + b->begin, n = b->end - b->begin;
	bool there = false, done = false;

	TRY(job_tick(f->r->job));
	TRY(repair_read_old(f, f->block, n, offset, &there));
	if (there && has_digest(b, f->block))
		return OK;
	for (uint64_t i = 0; i < f->c->sd->chunk_count && f->item.kind == ITEM_CHUNK && !done; i++)
		TRY(block_of_twin(f, f->c, b, i, &done));
	if (!done)
		TRY(repair_each_candidate(f, block_of_other, (void *)(uintptr_t)b, &done));
	if (!done)
		repair_unknown(f, offset, n, f->r->from ? "the bytes are in no replica, and the named checkpoint has others"
						 : "the bytes are in no replica, and no other checkpoint was named");
	return OK;
}

/* The archive around a payload. */
static FALLIBLE enum err restore_edges(struct repair_file *f, const struct item_layout *l)
{
	const struct manifest_item *item = f->item.known;
	const struct sd_chunk *c = &f->c->sd->chunks[f->item.index];
	const struct sd_tensor *t = &f->c->sd->tensors[c->tensor];
	uint64_t tail_bytes = l->length - l->payload_off - l->payload_bytes, tail_at = l->payload_off + l->payload_bytes;
	uint32_t align = l->length - l->payload_bytes > 4096 ? 4096 : 64;
	CLEANUP(buf_free) struct buf made = BUF_INIT(1 << 20);
	CLEANUP(mem_free_ptr) unsigned char *was = mem_alloc(l->payload_off + tail_bytes + 1);
	unsigned char got[16];
	bool head = false, tail = false;

	NEED(was, "no memory for an item's head");
	TRY(item_put_head(&made, t->dtype, t->ndim, sd_sizes(c, t->ndim), align, item->crc32));
	buf_fill(&made, 0, l->tail_off - tail_at);
	TRY(item_put_tail(&made, t->dtype, t->ndim, sd_sizes(c, t->ndim), align, item->crc32));
	TRY(buf_status(&made));
	TRY(repair_read_old(f, was, l->payload_off, f->item.offset, &head));
	TRY(repair_read_old(f, was + l->payload_off, tail_bytes, f->item.offset + tail_at, &tail));
	if (head && tail && made.len == l->payload_off + tail_bytes && memcmp(was, made.p, made.len) == 0)
		return OK;
	digest_xxh3(was, l->payload_off + tail_bytes, got);
	if (head && tail && (!item->has_edges || memcmp(got, item->edges, sizeof got) == 0))
		return OK;
	digest_xxh3(made.p, made.len, got);
	if (made.len != l->payload_off + tail_bytes || (item->has_edges && memcmp(got, item->edges, sizeof got) != 0)) {
		repair_unknown(f, f->item.offset, f->item.length, "the archive around the payload is not one that this version writes");
		return OK;
	}
	TRY(repair_put(f, made.p, l->payload_off, f->item.offset));
	TRY(repair_put(f, made.p + l->payload_off, tail_bytes, f->item.offset + tail_at));
	repair_restored(f, f->item.offset, made.len, "items");
	return OK;
}

/* Room for the largest block, whose ends are checked on the way: a manifest may say anything. */
static FALLIBLE enum err check_blocks(struct repair_file *f, uint64_t payload_bytes, bool *usable)
{
	const struct manifest_item *item = f->item.known;
	uint64_t begin = 0, most = 0;

	*usable = false;
	for (uint32_t i = 0; i < item->digest_count; i++) {
		uint64_t end = f->c->manifest->digests.v[item->digest_at + i].end;
		end = end == UINT64_MAX ? payload_bytes : end;
		if (end < begin || end > payload_bytes || end - begin > REPAIR_BLOCK_MAX)
			return OK;
		most = num_max(most, end - begin);
		begin = end;
	}
	*usable = begin == payload_bytes;
	if (!*usable || most <= f->block_bytes)
		return OK;
	mem_free(f->block);
	f->block = mem_alloc(most);
	f->block_bytes = f->block ? most : 0;
	NEED(f->block, "no memory for a block of %ju bytes", (uintmax_t)most);
	return OK;
}

enum err repair_known(struct repair_file *f)
{
	const struct manifest_item *item = f->item.known;
	struct item_layout l = { 0, item->length, item->length, item->length };
	uint64_t begin = 0;
	bool usable = false;

	if (f->item.kind == ITEM_CHUNK && !layout_of(f->c, item, f->item.index, &l)) {
		repair_unknown(f, f->item.offset, f->item.length, "the item is laid out in another way than dcpd's");
		return OK;
	}
	TRY(check_blocks(f, l.payload_bytes, &usable));
	if (!usable) {
		repair_unknown(f, f->item.offset, f->item.length, "the blocks in the manifest cannot be those of the item");
		return OK;
	}
	for (uint32_t i = 0; i < item->digest_count; i++) {
		const struct block_digest *d = &f->c->manifest->digests.v[item->digest_at + i];
		const struct block b = { l.payload_off, begin, num_min(d->end, l.payload_bytes), d->xxh3_128 };
		TRY(restore_block(f, &b));
		begin = b.end;
	}
	return f->item.kind == ITEM_CHUNK && !item->raw ? restore_edges(f, &l) : OK;
}

/* --------------------------------------------------------------------------------------------------------- indexes */

/* The index of a file follows from the metadata. */
enum err repair_index(struct repair_file *f, uint32_t file)
{
	const struct sdict *sd = f->c->sd;
	CLEANUP(buf_free) struct buf text = BUF_INIT(DCP_INDEX_MAX);
	struct vec(struct file_plan_item) items = { 0 };
	struct file_plan_item *it;
	unsigned char got[16];
	enum err e = OK;

	for (uint64_t i = 0; !e && i < sd->chunk_count + sd->value_count; i++) {
		bool is_chunk = i < sd->chunk_count;
		const struct sd_loc *loc = is_chunk ? &sd->chunks[i].loc : &sd->values[i - sd->chunk_count].loc;
		if (loc->file != file || (e = vec_push(&items, &it)))
			continue;
		*it = (struct file_plan_item){ .kind = is_chunk ? FILE_PLAN_CHUNK : FILE_PLAN_VALUE, .offset = loc->offset,
					       .index = (uint32_t)(is_chunk ? i : i - sd->chunk_count), .at = { .length = loc->length } };
	}
	e = e ?: dcp_index_put(&text, sd, items.v, items.n);
	vec_free(&items);
	TRY(e);
	digest_xxh3(text.p, text.len, got);
	const struct block_digest *d = &f->c->manifest->digests.v[f->item.known->digest_at];
	if (text.len != f->item.length || f->item.known->digest_count != 1 || memcmp(got, d->xxh3_128, sizeof got) != 0) {
		repair_unknown(f, f->item.offset, f->item.length, "the file's index is not one that follows from the metadata");
		return OK;
	}
	TRY(repair_put(f, text.p, text.len, f->item.offset));
	repair_restored(f, f->item.offset, f->item.length, "items");
	return OK;
}
