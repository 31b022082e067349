/* memory.h: what of a checkpoint still lies in segments, in the state dicts that it was saved from: a copy of those bytes costs a memcpy,
 * where the storage may have to be asked. A source of a run gets the place of its payload in a segment beside the one in its file.
 *
 * The coordinator names segments by what it remembers of saves, and keeps nobody from writing to them. Two checks make that safe: the
 * manifest must name the same save (by its job, or by what hosts that saved together call it), and whoever copies compares each block with
 * the manifest's digest, whether or not the job compares what it reads from files; a block that is not equal is read from its file. So only
 * payloads with digests of their blocks have a place. Images that cannot be read are as good as gone. */
#pragma once
#include <jansson.h>

#include "base/map.h"
#include "base/vec.h"
#include "format/image.h"
#include "runner/run.h"
#include "session/rank_segments.h"
#include "store/checkpoint.h"
#include "store/manifest.h"
#include "tensor/sdict.h"

struct memory_part {
	struct image_part part;
	uint32_t segment, next;        /* next: of the same FQN; UINT32_MAX: none */
};

struct memory_segment {
	struct rank_segment segment;
	struct image *image;
	const struct checkpoint *far;  /* in whose place it is a file of this one, of another node's memory; NULL: it is none */
	uint32_t far_file;
	uint32_t file;                 /* of the run; UINT32_MAX: not in it yet */
};

struct memory {
	struct vec(struct memory_segment) segments;
	struct vec(struct memory_part) parts;
	struct map first[2];           /* FQN → one of its parts, of this host; of other nodes */
	struct vec(struct rank_segments) lists;
	struct vec(struct checkpoint *) far;
};

/* Names the segments that may have bytes of the checkpoint. */
struct memory_lists {
	/* [{"job","hosts","world_size","generation","ranks":[…]}] of JOB or of a question, which must outlive `out`; and, of what other
	 * nodes have, {"storage","name"} of a generation of images (store/node_store.h). NULL: nothing */
	const json_t *list;
	const int *fds;                /* that its ranks name */
	uint32_t fd_count;
	const struct stores *stores;   /* NULL: other nodes are not asked */
};

/* Of this host's only what the save that the manifest names was made of is taken; if anything goes wrong, nothing: the files have all. */
void memory_open(const struct memory_lists *lists, const struct manifest *manifest, struct memory *out);
/* Sets run_src.memory of those of the sources from `first` on, the chunks of sd, whose payloads lie in a segment in one run. */
FALLIBLE enum err memory_place(struct memory *m, struct run_build *b, const struct sdict *sd, uint32_t first);
void memory_close(struct memory *m);
