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

/* A rank's image, part by part, for callers who want that rank's own state dict and not the union of all. Parts live as long as the
 * image. */
struct image_part {
	struct str fqn;
	enum dtype dtype;
	bool boxed;                      /* it has a global_shape: a part of a sharded tensor, else a plain tensor */
	uint32_t ndim;
	const int64_t *shape, *offsets, *sizes;
	const struct sd_outer *outer;    /* NULL: none. shape and offsets are those in the whole tensor nevertheless */
	uint64_t offset, bytes;          /* in the segment */
};
enum image_text_kind { IMAGE_TEXT_JSON, IMAGE_TEXT_BYTES, IMAGE_TEXT_PICKLE };
struct image_text {
	struct str fqn, text;            /* JSON as written, or base64 */
	enum image_text_kind kind;
};
uint32_t image_part_count(const struct image *im);
struct image_part image_part_at(const struct image *im, uint32_t i);
uint32_t image_text_count(const struct image *im);
struct image_text image_text_at(const struct image *im, uint32_t i);
/* paths[fqn], or one part: the FQN itself (*self gives it room). */
struct sd_path image_path(const struct image *im, struct str fqn, struct sd_path_part *self);
uint32_t image_tuple_count(const struct image *im);
struct sd_path image_tuple_at(const struct image *im, uint32_t i); /* a container that is a tuple, not a list */
struct str image_layout(const struct image *im);                   /* the list of rules as JSON text; p NULL: none */

/* All ranks' images → what every rank holds (replicas included, as save_plan_make wants it). loc.file = rank (file r is added for
 * rank r), loc.offset = the entry's first byte in the segment. Values are SD_VALUE_INLINE torch.save archives; dict values are
 * flattened by DCP's rules (dcp.md 3.5), lists only where a tensor or mapping is below. Ranks that disagree on dtype, shape or kind
 * of an FQN: ERR_PLAN_INVALID names FQN and rank. A value is the lowest rank's; what other ranks have instead is in sd->differing. */
FALLIBLE enum err image_collect(struct image *const *images, uint32_t count, struct sdict **out);

/* Steps of a training differ in values only. Where they lie in a header (8 length bytes and JSON) that was parsed: an object, escaped as it
 * is inside a string; begin == end == 0: there are none. A header that is the same before `begin` and from `end` on, and has one object
 * of values between, parses to the same but for the values. */
FALLIBLE enum err image_values_span(const void *header, uint64_t header_bytes, uint64_t *begin_out, uint64_t *end_out);
/* An image that has but values: those of `raw`, which is such a span, or empty. Key paths are those of `like`. */
FALLIBLE enum err image_parse_values(struct str raw, uint32_t rank, const struct image *like, struct image **out);
bool image_same_values(const struct image *a, const struct image *b); /* the same keys and kinds in the same order */
FALLIBLE enum err image_collect_values(struct image *const *images, uint32_t count, struct sdict **out);

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
/* Properties that only a state dict in memory has. `plain`: per tensor of sd, the tensor is no part of a sharded one, whatever other
 * ranks have; `outers`: per chunk of sd, the shard that the chunk is a part of. Either may be NULL. */
struct image_more {
	const bool *plain;
	const struct sd_outer *const *outers;
	const struct sd_path *tuples;
	uint64_t tuple_count;
	struct str layout;               /* JSON text; n 0: none */
};
FALLIBLE enum err image_build_more(struct sdict *sd, uint32_t rank, const struct image_value *values, uint64_t value_count,
				   const struct image_more *more, struct buf *header, uint64_t *image_bytes_out);
