/* fuzz_image.c: any bytes as the images of two ranks. Chunks that are accepted lie inside of their tensor and of the segment; what
 * was accepted can be built again. */
#include <stdint.h>

#include "format/image.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(struct sdict *sd, size_t n)
{
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		for (uint64_t k = t->first_chunk; k < t->first_chunk + t->chunk_count; k++) {
			const struct sd_chunk *c = &sd->chunks[k];
			must(box_check(t->ndim, sd_offsets(c), sd_sizes(c, t->ndim), t->shape) == OK);
			must(c->loc.offset + c->loc.length <= n);
		}
	}
	struct buf header = BUF_INIT(16 << 20);
	uint64_t bytes;
	(void)!image_build(sd, 0, NULL, 0, &header, &bytes);
	buf_free(&header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct image *images[2] = { 0 };
	struct sdict *sd = NULL;

	for (uint32_t r = 0; r < 2; r++) {
		if (image_parse(data, n, n, r, &images[r]) != OK)
			images[r] = NULL;
	}
	if (images[0] && images[1] && image_collect(images, 2, &sd) == OK)
		check(sd, n);
	sdict_free(sd);
	image_free(images[0]);
	image_free(images[1]);
	return 0;
}
