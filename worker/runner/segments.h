/* segments.h: the images of a load's target: their headers, with the values in them. The tensors come by the run. */
#pragma once
#include "runner/input.h"

/* Unusual forms of the images. */
struct segments_form {
	bool values_everywhere;        /* not only on rank 0 */
	const bool *plain;             /* as in image_more; NULL: what is whole is plain */
	const struct sd_outer *const *outers;
	const uint64_t *behind;        /* per rank: bytes that the segment has behind the pages of its image; NULL: none, and */
	uint64_t *image_bytes;         /* … filled in: of its image */
};
/* Lays out every rank's image (sets the target's locs), asks the coordinator for segments and writes the headers. A dry run only lays out;
 * j->result gets "segment_bytes". form NULL: as if all were zero. */
FALLIBLE enum err segments_make(struct job *j, const struct input *source, const struct sdict *view,
				struct sdict *target, uint32_t world_size, const struct segments_form *form);
/* Asks the coordinator for segments of these sizes, by rank. bytes: of each segment, its image and what lies behind; NULL: the image alone.
 * A dry run only says how large they are: "segment_bytes" and "ranks" of j->result. */
FALLIBLE enum err segments_ask(struct job *j, uint32_t world_size, const uint64_t *image_bytes, const uint64_t *bytes);
/* Writes the images' headers into the segments that have come; a dry run has none. */
FALLIBLE enum err segments_put_headers(struct job *j, const struct buf *headers);
/* Puts the checkpoint's values into the headers of a state dict that exists, in place: the header keeps its length. ERR_SHM_EXHAUSTED if
 * they do not fit. */
FALLIBLE enum err segments_set_values(struct job *j, const struct rank_segments *target, const struct input *source,
				      const struct sdict *view);
