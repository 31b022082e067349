/* fuzz_torch_ranks_open.c: any bytes as a folder of what each rank saved. The boxes of a tensor that is accepted lie inside it, no two are
 * equal, and their elements add up; each lies inside its rank's file.
 *
 * Bits 0 and 1 of byte 0 are the number of ranks, less one; bits 2 and 3 say what their files are called. Then the files: two bytes of
 * length, and the bytes; the last one has what is left. */
#include <stdio.h>

#include "lib/t_files.h"
#include "tensor/box.h"

enum { RANKS_MAX = 4 };

static uint64_t span_of(const struct sdict *sd, const struct sd_chunk *c)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	const struct sd_strided *view = sd_strided_of(sd, c->loc);
	const int64_t *sizes = sd_sizes(c, t->ndim);
	uint64_t numel = box_volume(t->ndim, sizes), last = 0;

	for (uint32_t d = 0; d < t->ndim && view && numel; d++)
		last += (uint64_t)(sizes[d] - 1) * (uint64_t)view->strides[d];
	return numel == 0 ? 0 : (view ? last + 1 : numel) * dtype_bytes(t->dtype);
}

static void check_tensor(const struct sdict *sd, uint64_t i)
{
	const struct sd_tensor *t = &sd->tensors[i];
	uint64_t sum = 0, numel;

	must(box_numel(t->ndim, t->shape, &numel) == OK && sdict_find(sd, t->fqn) == i);
	for (uint64_t k = t->first_chunk; k < t->first_chunk + t->chunk_count; k++) {
		const struct sd_chunk *c = &sd->chunks[k];
		must(box_inside(t->ndim, c->dims, sd_sizes(c, t->ndim), t->shape));
		must(k == t->first_chunk || t->ndim == 0 || memcmp(c->dims, c[-1].dims, 2 * t->ndim * sizeof *c->dims) != 0);
		must(c->loc.length == span_of(sd, c));
		sum += box_volume(t->ndim, sd_sizes(c, t->ndim));
	}
	must(sum == numel);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	char names[RANKS_MAX][64];
	struct t_files files = { 0 };
	struct sdict *sd = NULL;

	if (n == 0)
		return 0;
	uint32_t count = 1 + data[0] % RANKS_MAX;
	const uint8_t *at = data + 1;
	size_t left = n - 1;
	for (uint32_t i = 0; i < count; i++) {
		const char *family = data[0] & 4 ? "optim_" : "model_";
		if (data[0] & 8)
			snprintf(names[i], sizeof names[i], "%srank_%u.pt", family, i);
		else
			snprintf(names[i], sizeof names[i], "%sworld_size_%u_rank_%u.pt", family, count, i);
		t_files_take(&files, names[i], &at, &left, i + 1 == count);
	}
	struct format_source s = t_files_source(&files);
	if (format_open(FORMAT_TORCH_RANKS, &s, &sd) == OK) {
		t_files_check_inside(&files, sd);
		for (uint64_t i = 0; i < sd->tensor_count; i++)
			check_tensor(sd, i);
	}
	sdict_free(sd);
	return 0;
}
