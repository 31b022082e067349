/* fuzz_hf_open.c: any bytes as a directory of safetensors files, with or without an index. Each tensor of a directory that is accepted has
 * one chunk, all of it, which lies inside its file.
 *
 * Byte 0 is the number of payload files, less one (bits 0 and 1), and whether there is an index (bit 7). Then the index and the files: two
 * bytes of length, and the bytes; the last one has what is left. */
#include "lib/t_files.h"
#include "tensor/box.h"

enum { FILES_MAX = 4 };

static void check(const struct t_files *f, const struct sdict *sd)
{
	t_files_check_inside(f, sd);
	must(sd->chunk_count == sd->tensor_count && sd->value_count == 0);
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct sd_chunk *c = &sd->chunks[i];
		const struct sd_tensor *t = &sd->tensors[c->tensor];
		uint64_t numel;
		must(c->tensor == i && t->chunk_count == 1 && sdict_find(sd, t->fqn) == i);
		must(box_numel(t->ndim, t->shape, &numel) == OK && numel * dtype_bytes(t->dtype) == c->loc.length);
		for (uint32_t k = 0; k < t->ndim; k++)
			must(c->dims[k] == 0 && c->dims[t->ndim + k] == t->shape[k]);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const char *const names[FILES_MAX] = { "a.safetensors", "b.safetensors", "c.safetensors", "d.safetensors" };
	struct t_files files = { 0 };
	struct sdict *sd = NULL;

	if (n == 0)
		return 0;
	uint32_t count = 1 + data[0] % FILES_MAX;
	const uint8_t *at = data + 1;
	size_t left = n - 1;
	files.metadata_count = data[0] >> 7;
	if (files.metadata_count)
		t_files_take(&files, HF_INDEX, &at, &left, false);
	for (uint32_t i = 0; i < count; i++)
		t_files_take(&files, names[i], &at, &left, i + 1 == count);
	struct format_source s = t_files_source(&files);
	if (format_open(FORMAT_SAFETENSORS, &s, &sd) == OK)
		check(&files, sd);
	sdict_free(sd);
	return 0;
}
