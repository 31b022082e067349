/* segments.h: the images of a load's target: their headers, with the values in them. The tensors come by the run. */
#pragma once
#include "ops/input.h"

/* Lays out every rank's image (sets the target's locs), asks the coordinator for segments and writes the headers. A dry run only lays out;
 * j->result gets "segment_bytes". Values go to rank 0. */
FALLIBLE enum err segments_make(struct job *j, const struct input *source, const struct sdict *view,
				struct sdict *target, uint32_t world_size);
/* Puts the checkpoint's values into the headers of a state dict that exists, in place: the header keeps its length. ERR_SHM_EXHAUSTED if
 * they do not fit. */
FALLIBLE enum err segments_set_values(struct job *j, const json_t *entry, const struct input *source,
				      const struct sdict *view);
