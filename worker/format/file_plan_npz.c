/* file_plan_npz.c: an .npz file as numpy.savez lays it out: a zip of stored members, FQN.npy each.
 *
 * Payloads begin at multiples of 64, so that the file can be mapped. The CRC-32s of the members are put in when the payloads have been
 * written (struct file_plan_crc).
 *
 * dtypes that NumPy lacks (bfloat16, float8_…, complex32) are stored as ml_dtypes' arrays are by numpy.save: as void of their size, which
 * `array.view(ml_dtypes.bfloat16)` gives back. The member's comment in the directory names the dtype, for void has none. */
#include <stdio.h>

#include "base/arena.h"
#include "base/num.h"
#include "format/npy.h"
#include "format/zip_plan.h"
#include "tensor/box.h"

static FALLIBLE enum err check_name(const struct sdict *sd, struct str fqn)
{
	if (!str_utf8(fqn) || memchr(fqn.p, '\0', fqn.n) || fqn.n == 0 || fqn.n + 4 > ZIP_NAME_MAX)
		return ERR(NAME_INVALID, "no member of an .npz file can have this name");
	/* numpy.load finds a member by its whole name first: "a.npy" would be the array "a" */
	if (str_ends(fqn, ".npy") && sdict_find(sd, (struct str){ fqn.p, fqn.n - 4 }) != SD_NONE)
		return ERR(NAME_INVALID, "NumPy takes this name for the tensor that is called so without .npy");
	return OK;
}

static FALLIBLE enum err name_entry(struct arena *a, const struct sd_tensor *t, struct zip_entry *e)
{
	char *name;

	TRY(arena_alloc(a, t->fqn.n + 4, 1, &name));
	memcpy(name, t->fqn.p, t->fqn.n);
	memcpy(name + t->fqn.n, ".npy", 4);
	e->name = (struct str){ name, t->fqn.n + 4 };
	if (!npy_type(t->dtype))
		e->comment = str_of(dtype_name(t->dtype));
	return OK;
}

/* A member: the array's head, then the payload. */
static FALLIBLE enum err add_member(struct zip_plan *z, const struct sdict *sd, const struct sd_tensor *t)
{
	CLEANUP(buf_free) struct buf head = BUF_INIT(NPY_HEAD_MAX);
	const char *type = npy_type(t->dtype);
	struct zip_entry e = { 0 };
	uint64_t numel, bytes;
	char opaque[8];

	must(t->chunk_count == 1);
	TRY(check_name(sd, t->fqn));
	TRY(name_entry(z->p->arena, t, &e));
	snprintf(opaque, sizeof opaque, "|V%u", dtype_bytes(t->dtype));
	TRY(npy_put_head(&head, type ? type : opaque, t->ndim, t->shape));
	TRY(buf_status(&head));
	TRY(box_numel(t->ndim, t->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	return zip_plan_chunk(z, e, (struct str){ (char *)head.p, head.len }, t->first_chunk, bytes, NPY_ALIGN);
}

static FALLIBLE enum err place(const struct file_plan_target *t, struct zip_plan *z)
{
	for (uint64_t i = 0; i < t->sd->tensor_count; i++)
		TRY(err_at_fqn(add_member(z, t->sd, &t->sd->tensors[i]), t->sd->tensors[i].fqn.p, t->sd->tensors[i].fqn.n));
	return zip_plan_end(z, t->file_name);
}

enum err file_plan_npz(const struct file_plan_target *t, struct file_plan *out)
{
	CLEANUP(zip_plan_free) struct zip_plan z = { .p = out };

	return place(t, &z);
}
