/* file_plan_npz.c: an .npz file as numpy.savez lays it out: a zip of stored members, FQN.npy each.
 *
 * Payloads begin at multiples of 64, so that the file can be mapped. The CRC-32s of the members are put in when the payloads have been
 * written (struct file_plan_crc).
 *
 * dtypes that NumPy lacks (bfloat16, float8_…, complex32) are stored as ml_dtypes' arrays are by numpy.save: as void of their size, which
 * `array.view(ml_dtypes.bfloat16)` gives back. The member's comment in the directory names the dtype, for void has none. */
#include "format/file_plan.h"

#include <isa-l/crc.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/num.h"
#include "format/npy.h"
#include "format/zip.h"
#include "tensor/box.h"

enum { HEAD_MAX = 256 << 10 };

struct planner {
	const struct file_plan_target *t;
	struct file_plan *p;
	struct zip_entry *entries;
	uint64_t offset;
};

static FALLIBLE enum err check_name(const struct sdict *sd, struct str fqn)
{
	if (!str_utf8(fqn) || memchr(fqn.p, '\0', fqn.n) || fqn.n == 0 || fqn.n + 4 > ZIP_NAME_MAX)
		return ERR(NAME_INVALID, "no member of an .npz file can have this name");
	/* numpy.load finds a member by its whole name first: "a.npy" would be the array "a" */
	if (str_ends(fqn, ".npy") && sdict_find(sd, (struct str){ fqn.p, fqn.n - 4 }) != SD_NONE)
		return ERR(NAME_INVALID, "NumPy takes this name for the tensor that is called so without .npy");
	return OK;
}

static FALLIBLE enum err add_item(struct planner *pl, enum file_plan_kind kind, uint32_t index, uint64_t bytes)
{
	struct file_plan_item *it;

	TRY(vec_push(&pl->p->items, &it));
	*it = (struct file_plan_item){ .kind = (uint8_t)kind, .bare = true, .index = index, .offset = pl->offset,
				       .at = { 0, bytes, bytes, bytes } };
	return num_add(pl->offset, bytes, &pl->offset);
}

static FALLIBLE enum err add_text(struct planner *pl, const struct buf *b)
{
	struct str *text;

	TRY(buf_status(b));
	TRY(vec_push(&pl->p->texts, &text));
	TRY(arena_str(pl->p->arena, (struct str){ (char *)b->p, b->len }, text));
	return add_item(pl, FILE_PLAN_TEXT, (uint32_t)(pl->p->texts.n - 1), b->len);
}

static FALLIBLE enum err add_crc(struct planner *pl, uint64_t offset, uint32_t item, uint32_t leading)
{
	struct file_plan_crc *c;

	TRY(vec_push(&pl->p->crcs, &c));
	*c = (struct file_plan_crc){ offset, item, leading };
	return OK;
}

static FALLIBLE enum err name_entry(struct planner *pl, const struct sd_tensor *t, struct zip_entry *e)
{
	struct arena *a = pl->p->arena;
	char *name;

	TRY(arena_alloc(a, t->fqn.n + 4, 1, &name));
	memcpy(name, t->fqn.p, t->fqn.n);
	memcpy(name + t->fqn.n, ".npy", 4);
	e->name = (struct str){ name, t->fqn.n + 4 };
	if (!npy_type(t->dtype))
		e->comment = str_of(dtype_name(t->dtype));
	return OK;
}

/* A member: the local header and the array's head as one text, then the payload. */
static FALLIBLE enum err add_member(struct planner *pl, const struct sd_tensor *t, struct zip_entry *e)
{
	CLEANUP(buf_free) struct buf head = BUF_INIT(HEAD_MAX), b = BUF_INIT(HEAD_MAX);
	const char *type = npy_type(t->dtype);
	uint64_t numel, bytes;
	char opaque[8];

	must(t->chunk_count == 1);
	TRY(check_name(pl->t->sd, t->fqn));
	TRY(name_entry(pl, t, e));
	snprintf(opaque, sizeof opaque, "|V%u", dtype_bytes(t->dtype));
	TRY(npy_put_head(&head, type ? type : opaque, t->ndim, t->shape));
	TRY(box_numel(t->ndim, t->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	TRY(num_add(bytes, head.len, &e->bytes));
	e->crc32 = crc32_gzip_refl(0, head.p, head.len);
	zip_put_local_entry(&b, pl->offset, e, NPY_ALIGN);
	buf_put(&b, head.p, head.len);
	TRY(add_text(pl, &b));
	TRY(add_crc(pl, e->header_off + ZIP_LOCAL_CRC, (uint32_t)pl->p->items.n, e->crc32));
	return add_item(pl, FILE_PLAN_CHUNK, (uint32_t)t->first_chunk, bytes);
}

/* Payloads are every second item. */
static FALLIBLE enum err add_directory(struct planner *pl, uint64_t count)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1u << 30);

	for (uint64_t i = 0; i < count; i++) {
		TRY(add_crc(pl, pl->offset + b.len + ZIP_CENTRAL_CRC, (uint32_t)(2 * i + 1), pl->entries[i].crc32));
		zip_put_central_entry(&b, &pl->entries[i]);
	}
	zip_put_end(&b, count, b.len, pl->offset);
	return add_text(pl, &b);
}

static FALLIBLE enum err place(struct planner *pl)
{
	const struct sdict *sd = pl->t->sd;
	struct file_plan_file *f;

	pl->entries = mem_zalloc(sd->tensor_count, sizeof *pl->entries);
	NEED(pl->entries, "no memory for %ju tensors", (uintmax_t)sd->tensor_count);
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		TRY(err_at_fqn(add_member(pl, t, &pl->entries[i]), t->fqn.p, t->fqn.n));
	}
	TRY(add_directory(pl, sd->tensor_count));
	TRY(vec_push(&pl->p->files, &f));
	*f = (struct file_plan_file){ .name = pl->t->file_name, .item_count = pl->p->items.n, .bytes = pl->offset };
	return OK;
}

enum err file_plan_npz(const struct file_plan_target *t, struct file_plan *out)
{
	struct planner pl = { .t = t, .p = out };

	*out = (struct file_plan){ .stream = true, .trims = true, .arena = arena_new(UINT64_MAX) };
	enum err e = out->arena ? place(&pl) : ERR(NO_MEMORY, "no memory for a plan");
	mem_free(pl.entries);
	return e;
}
