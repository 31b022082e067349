/* fuzz_torch_file.c: any bytes as a file of torch.save. What is described lies inside of it, each storage once; values are archives
 * that can be read again. */
#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/format.h"
#include "format/torch_file.h"
#include "tensor/box.h"

static enum err bytes_of(void *user, const char *name, uint64_t *out)
{
	(void)name;
	*out = ((const struct str *)user)->n;
	return OK;
}

static enum err read_at(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	const struct str *file = user;

	(void)name;
	must(num_inside(offset, n, file->n));
	if (n)
		memcpy(into, file->p + offset, n);
	return OK;
}

static void check_chunk(const struct sdict *sd, const struct sd_chunk *c, size_t n)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	uint32_t item = dtype_bytes(t->dtype);
	const struct sd_strided *view = sd_strided_of(sd, c->loc);
	uint64_t numel, last = 0;

	must(num_inside(c->loc.offset, c->loc.length, n) && box_numel(t->ndim, t->shape, &numel) == OK);
	for (uint32_t d = 0; d < t->ndim && view && numel; d++)
		last += (uint64_t)(t->shape[d] - 1) * (uint64_t)view->strides[d];
	must(c->loc.length == (numel == 0 ? 0 : view ? (last + 1) * item : numel * item));
	const struct sd_record *r = sdict_record(sd, c->loc);
	must(!r || num_inside(r->offset, r->length, n));
}

static void check_value(const struct sd_value *v)
{
	struct item_source src = source_memory(&v->bytes);
	struct item_value value = { 0 };

	must(v->kind == SD_VALUE_INLINE && item_is_archive(v->bytes.p, v->bytes.n));
	(void)!item_read_value(&src, &value);
	item_value_free(&value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const char *const name = "x.pt";
	struct str file = { (const char *)data, n };
	struct format_source s = { .user = &file, .payload = &name, .payload_count = 1, .read = read_at, .bytes_of = bytes_of };
	struct sdict *sd = NULL;

	(void)torch_file_is(data, n);
	if (format_open(FORMAT_TORCH, &s, &sd) == OK) {
		for (uint64_t i = 0; i < sd->chunk_count; i++)
			check_chunk(sd, &sd->chunks[i], n);
		for (uint64_t i = 0; i < sd->value_count; i++)
			check_value(&sd->values[i]);
		for (uint64_t i = 1; i < sd->record_count; i++)
			must(sd->records[i - 1].offset + sd->records[i - 1].length <= sd->records[i].offset);
	}
	sdict_free(sd);
	return 0;
}
