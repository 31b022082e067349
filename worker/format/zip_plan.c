/* zip_plan.c: see zip_plan.h. */
#include "format/zip_plan.h"

#include <isa-l/crc.h>

#include "base/arena.h"
#include "base/num.h"

enum { LOCAL_MAX = 256 << 10 };

static FALLIBLE enum err add_item(struct zip_plan *z, enum file_plan_kind kind, uint32_t index, uint64_t bytes)
{
	struct file_plan_item *it;

	TRY(vec_push(&z->p->items, &it));
	*it = (struct file_plan_item){ .kind = (uint8_t)kind, .bare = true, .index = index, .offset = z->offset,
				       .at = { 0, bytes, bytes, bytes } };
	return num_add(z->offset, bytes, &z->offset);
}

static FALLIBLE enum err add_text(struct zip_plan *z, const struct buf *b)
{
	struct str *text;

	TRY(buf_status(b));
	TRY(vec_push(&z->p->texts, &text));
	TRY(arena_str(z->p->arena, (struct str){ (char *)b->p, b->len }, text));
	return add_item(z, FILE_PLAN_TEXT, (uint32_t)(z->p->texts.n - 1), b->len);
}

static FALLIBLE enum err add_crc(struct zip_plan *z, uint64_t offset, uint32_t item, uint32_t leading)
{
	struct file_plan_crc *c;

	TRY(vec_push(&z->p->crcs, &c));
	*c = (struct file_plan_crc){ offset, item, leading };
	return OK;
}

/* The local header and `head` as one text. */
static FALLIBLE enum err add_record(struct zip_plan *z, struct zip_entry *e, struct str head, uint64_t payload_bytes, uint32_t align)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(LOCAL_MAX + head.n);

	TRY(num_add(payload_bytes, head.n, &e->bytes));
	e->crc32 = head.n ? crc32_gzip_refl(0, (const unsigned char *)head.p, head.n) : 0;
	zip_put_local_entry(&b, z->offset, e, align);
	buf_put(&b, head.p, head.n);
	return add_text(z, &b);
}

static FALLIBLE enum err keep_entry(struct zip_plan *z, const struct zip_entry *e, uint32_t of)
{
	struct zip_entry *entry;
	uint32_t *item;

	TRY(vec_push(&z->entries, &entry));
	TRY(vec_push(&z->items, &item));
	*entry = *e;
	*item = of;
	return OK;
}

enum err zip_plan_bytes(struct zip_plan *z, struct str name, struct str bytes)
{
	struct zip_entry e = { .name = name };

	TRY(add_record(z, &e, bytes, 0, 1));
	return keep_entry(z, &e, UINT32_MAX);
}

enum err zip_plan_chunk(struct zip_plan *z, struct zip_entry e, struct str head, uint64_t chunk, uint64_t payload_bytes, uint32_t align)
{
	TRY(add_record(z, &e, head, payload_bytes, align));
	TRY(add_crc(z, e.header_off + ZIP_LOCAL_CRC, (uint32_t)z->p->items.n, e.crc32));
	TRY(keep_entry(z, &e, (uint32_t)z->p->items.n));
	return add_item(z, FILE_PLAN_CHUNK, (uint32_t)chunk, payload_bytes);
}

enum err zip_plan_end(struct zip_plan *z, struct str file_name)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1u << 30);
	struct file_plan_file *f;

	for (uint64_t i = 0; i < z->entries.n; i++) {
		if (z->items.v[i] != UINT32_MAX)
			TRY(add_crc(z, z->offset + b.len + ZIP_CENTRAL_CRC, z->items.v[i], z->entries.v[i].crc32));
		zip_put_central_entry(&b, &z->entries.v[i]);
	}
	zip_put_end(&b, z->entries.n, b.len, z->offset);
	TRY(add_text(z, &b));
	z->p->stream = true;
	TRY(vec_push(&z->p->files, &f));
	*f = (struct file_plan_file){ .name = file_name, .item_count = z->p->items.n, .bytes = z->offset };
	return OK;
}

void zip_plan_free(struct zip_plan *z)
{
	vec_free(&z->entries);
	vec_free(&z->items);
}
