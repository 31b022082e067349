/* fuzz_hf_dcp_open.c: any bytes as the files of a HuggingFaceStorageWriter's ranks. The boxes of a tensor that is accepted lie inside
 * it, no two are equal, and each has the bytes that its elements take, inside its rank's file.
 *
 * Bits 0 and 1 of byte 0 are the number of files, less one; bit 2 says whether the ranks of the last two are one. Then the files: two bytes
 * of length, and the bytes; the last one has what is left. */
#include <stdio.h>

#include "lib/t_files.h"
#include "tensor/box.h"

enum { SHARDS_MAX = 4 };

static void check_tensor(const struct sdict *sd, uint64_t i)
{
	const struct sd_tensor *t = &sd->tensors[i];

	must(t->chunk_count && sdict_find(sd, t->fqn) == i);
	for (uint64_t k = t->first_chunk; k < t->first_chunk + t->chunk_count; k++) {
		const struct sd_chunk *c = &sd->chunks[k];
		must(c->tensor == i && box_inside(t->ndim, c->dims, sd_sizes(c, t->ndim), t->shape));
		must(k == t->first_chunk || memcmp(c->dims, c[-1].dims, 2 * t->ndim * sizeof *c->dims) != 0);
		must(c->loc.length == box_volume(t->ndim, sd_sizes(c, t->ndim)) * dtype_bytes(t->dtype));
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	char names[SHARDS_MAX][64];
	struct t_files files = { .closed = true };
	struct sdict *sd = NULL;

	if (n == 0)
		return 0;
	uint32_t count = 1 + data[0] % SHARDS_MAX;
	const uint8_t *at = data + 1;
	size_t left = n - 1;
	for (uint32_t i = 0; i < count; i++) {
		uint32_t rank = i && i + 1 == count && data[0] & 4 ? i : i + 1;
		snprintf(names[i], sizeof names[i], "shard-%05u-model-%05u-of-%05u.safetensors", rank, i + 1, count);
		t_files_take(&files, names[i], &at, &left, i + 1 == count);
	}
	struct format_source s = t_files_source(&files);
	if (format_open(FORMAT_HF_DCP, &s, &sd) == OK) {
		t_files_check_inside(&files, sd);
		for (uint64_t i = 0; i < sd->tensor_count; i++)
			check_tensor(sd, i);
	}
	sdict_free(sd);
	return 0;
}
