/* fuzz_npz_open.c: any bytes as an .npz file. Each array of a file that is accepted lies inside it, with the bytes that its elements take,
 * and the strides of those in Fortran order stay inside it. */
#include "lib/t_files.h"
#include "tensor/box.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct t_files files = t_files_one("a.npz", data, n);
	struct format_source s = t_files_source(&files);
	struct sdict *sd = NULL;

	if (format_open(FORMAT_NPZ, &s, &sd) == OK)
		for (uint64_t i = 0; i < sd->tensor_count; i++) {
			const struct sd_tensor *t = &sd->tensors[i];
			const struct sd_loc at = sd->chunks[t->first_chunk].loc;
			const struct sd_strided *view = sd_strided_of(sd, at);
			uint64_t numel, last = 0;
			must(t->chunk_count == 1 && num_inside(at.offset, at.length, n) && sdict_find(sd, t->fqn) == i);
			must(box_numel(t->ndim, t->shape, &numel) == OK && numel * dtype_bytes(t->dtype) == at.length);
			for (uint32_t d = 0; view && d < t->ndim; d++)
				last += (uint64_t)view->strides[d] * (uint64_t)(t->shape[d] - 1);
			must(!view || last == numel - 1);
			must(!sdict_record(sd, at) || at.length);
		}
	sdict_free(sd);
	return 0;
}
