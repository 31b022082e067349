/* fuzz_dcp_meta.c: any bytes as `.metadata`. What can be read must come back the same after it was written. */
#include "base/buf.h"
#include "format/dcp_meta.h"

static enum err into_buf(void *user, const void *bytes, size_t n)
{
	buf_put(user, bytes, n);
	return OK;
}

static bool same_loc(const struct sdict *a, const struct sd_loc *x, const struct sdict *b, const struct sd_loc *y)
{
	return x->offset == y->offset && x->length == y->length &&
	       str_eq(a->files[x->file].name, b->files[y->file].name) && !x->transform == !y->transform &&
	       (!x->transform || str_eq(a->transforms[x->transform - 1], b->transforms[y->transform - 1]));
}

static void compare(const struct sdict *a, const struct sdict *b)
{
	must(a->tensor_count == b->tensor_count && a->chunk_count == b->chunk_count);
	must(a->value_count == b->value_count && a->has_paths == b->has_paths);
	for (uint64_t i = 0; i < a->tensor_count; i++) {
		const struct sd_tensor *x = &a->tensors[i], *y = &b->tensors[i];
		must(str_eq(x->fqn, y->fqn) && x->dtype == y->dtype && x->ndim == y->ndim);
		must(x->chunk_count == y->chunk_count && x->requires_grad == y->requires_grad);
		must(!x->ndim || memcmp(x->shape, y->shape, x->ndim * sizeof *x->shape) == 0);
	}
	for (uint64_t i = 0; i < a->chunk_count; i++) {
		const struct sd_chunk *x = &a->chunks[i], *y = &b->chunks[i];
		uint32_t ndim = a->tensors[x->tensor].ndim;
		must(x->tensor == y->tensor && x->rank == y->rank && same_loc(a, &x->loc, b, &y->loc));
		must(!ndim || memcmp(x->dims, y->dims, 2 * ndim * sizeof *x->dims) == 0);
	}
	for (uint64_t i = 0; i < a->value_count; i++)
		must(str_eq(a->values[i].fqn, b->values[i].fqn) &&
		     same_loc(a, &a->values[i].loc, b, &b->values[i].loc));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct dcp_meta_opts opts = { .checkpoint_id = "id" };
	struct buf out = BUF_INIT(64 << 20);
	struct sdict *first, *again, *both;

	if (dcp_meta_read(data, size, &first) != OK)
		return 0;
	must(dcp_meta_write(first, &opts, into_buf, &out) == OK && buf_status(&out) == OK);
	must(dcp_meta_read(out.p, out.len, &again) == OK);
	compare(first, again);
	struct sdict *parts[] = { first, again };
	must(dcp_meta_union(parts, 2, &both) == OK);
	compare(first, both);
	sdict_free(both);
	sdict_free(again);
	sdict_free(first);
	buf_free(&out);
	return 0;
}
