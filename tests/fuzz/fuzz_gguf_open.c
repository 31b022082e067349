/* fuzz_gguf_open.c: any bytes as a GGUF file. Each tensor of a file that is accepted lies inside it, and shares bytes with none. */
#include "lib/t_files.h"
#include "tensor/box.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct t_files files = t_files_one("a.gguf", data, n);
	struct format_source s = t_files_source(&files);
	struct sdict *sd = NULL;

	if (format_open(FORMAT_GGUF, &s, &sd) == OK)
		for (uint64_t i = 0; i < sd->tensor_count; i++) {
			const struct sd_tensor *t = &sd->tensors[i];
			const struct sd_loc at = sd->chunks[t->first_chunk].loc;
			uint64_t numel;
			must(t->chunk_count == 1 && num_inside(at.offset, at.length, n) && sdict_find(sd, t->fqn) == i);
			must(box_numel(t->ndim, t->shape, &numel) == OK);
			must(at.length == (sd_strided_of(sd, at) ? numel / 32 * 34 : numel * dtype_bytes(t->dtype)));
			for (uint64_t k = 0; k < i && i < 64; k++) {
				const struct sd_loc other = sd->chunks[sd->tensors[k].first_chunk].loc;
				must(at.length == 0 || other.length == 0 || at.offset + at.length <= other.offset ||
				     other.offset + other.length <= at.offset);
			}
		}
	sdict_free(sd);
	return 0;
}
