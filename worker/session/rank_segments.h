/* rank_segments.h: the segments of a state dict by rank, as messages name them: of JOB's state_dicts, of SEGMENTS, of a question. */
#pragma once
#include <jansson.h>

#include "base/err.h"

struct rank_segment {
	uint32_t rank, fd;             /* fd: index into the descriptors of the job, or of the question */
	const char *name;              /* of the segment; points into the document */
	uint64_t bytes, image_bytes;   /* of the segment; of the image in it */
	bool filling;                  /* its rank still writes it: runner/gate.h */
	uint64_t ring_at, ring_bytes;  /* … through a ring; 0 bytes: there is none */
};

struct rank_segments {
	struct rank_segment *v;        /* NULL: none were read */
	uint32_t count, world_size;
	uint64_t generation;
};

/* Reads {"world_size"?,"generation"?,"ranks":[{"rank","fd","segment"?,"bytes","image_bytes"?,"filling"?,"ring"?:{"offset","bytes"}}]};
 * all fd are below fd_count and then counted from first_fd on. The document must outlive it. ERR_PROTOCOL. */
FALLIBLE enum err rank_segments_read(const json_t *entry, uint32_t first_fd, uint32_t fd_count, struct rank_segments *out);
void rank_segments_free(struct rank_segments *s);
