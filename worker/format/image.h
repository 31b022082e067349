/* image.h: the segment image: one rank's part of a state dict as a safetensors file whose __metadata__ may hold the key `dcpd`
 * (global boxes, values, paths); details for clients: api/image.md. */
#pragma once
#include "format/safetensors.h"
#include "tensor/sdict.h"

enum { IMAGE_ALIGN = 4096 };

/* Parses one rank's header (bytes: the 8 length bytes and the JSON) of an image of image_bytes. Adds nothing to an sdict yet. */
struct image;
FALLIBLE enum err image_parse(const void *header, uint64_t header_bytes, uint64_t image_bytes, uint32_t rank,
			      struct image **out);
void image_free(struct image *im);

/* All ranks' images → what every rank holds (replicas included, as save_plan_make wants it). loc.file = rank (file r is added for
 * rank r), loc.offset = the entry's first byte in the segment. Values are SD_VALUE_INLINE torch.save archives; dict values are
 * flattened by DCP's rules (dcp.md 3.5), lists only where a tensor or mapping is below. Ranks that disagree on dtype, shape or kind
 * of an FQN: ERR_PLAN_INVALID names FQN and rank. */
FALLIBLE enum err image_collect(struct image *const *images, uint32_t count, struct sdict **out);

/* For a target: lays out rank `rank`'s chunks of `sd` as an image and appends the header. Chunk locs of that rank are set:
 * file = rank's file index in sd (added by the caller beforehand as file r), offset in the segment, length. Filler entries align each
 * chunk to 4096. values: JSON where possible, else base64; may be given to every rank or only to rank 0. */
struct image_value {
	struct str fqn;
	struct sd_path path;
	enum { IMAGE_VALUE_JSON, IMAGE_VALUE_BYTES, IMAGE_VALUE_PICKLE } kind;
	struct str bytes;                /* JSON text or raw bytes */
};
FALLIBLE enum err image_build(struct sdict *sd, uint32_t rank, const struct image_value *values, uint64_t value_count,
			      struct buf *header, uint64_t *image_bytes_out);
