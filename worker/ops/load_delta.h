/* load_delta.h: a load with `delta`: the next generation of a state dict out of another node's memory, of which only changed blocks come
 * over the network; or out of this node's own, where every piece is loaded, and compared with the newest generation's to be counted.
 *
 * The target is cut into pieces of at most MOVE_PIECE_BYTES. Behind each image lies a table with an entry per piece: a tag, which is a
 * digest of the source's block digests that the piece was made of, and the digest of the piece itself. A piece whose tag is the same as in
 * the newest generation is copied from there and compared with its digest; all others are loaded. Both tables are the subscriber's own
 * memory: a piece that does not have its digest any more is loaded, too. */
#pragma once
#include "plan/load_plan.h"
#include "runner/input.h"

struct load_delta {
	const struct sdict *target;    /* the caller's; its locs are set before load_delta_begin */
	uint64_t *behind;              /* per rank: bytes of the table behind its image */
	uint64_t *image_bytes;         /* per rank; the caller fills it in before load_delta_begin */
	uint32_t world_size;
	/* load_delta_begin */
	struct sdict *pieces;
	struct load_plan plan;         /* of the pieces */
	uint64_t *first;               /* per rank: its first entry; world_size + 1 */
	uint32_t *entry_of;            /* per piece: its entry */
	uint32_t *piece_of;            /* per entry: its piece */
	struct delta_entry {
		unsigned char tag[16], digest[16];
	} *was, *now;                  /* in the newest generation, in the one that is made; a tag of zeros: none */
	bool *kept;                    /* per entry: copied from the newest generation */
	struct load_delta_head {
		uint64_t magic, pieces;
		unsigned char structure[16];
	} *heads;                      /* per rank */
	/* results: bytes of pieces that were loaded (of a source in this node's memory: that differ from the newest generation's), and of
	 * the others; FQNs of the former */
	uint64_t changed_bytes, kept_bytes, changed_tensors;
};

/* Counts the pieces of a target that is cut, but has no places yet. */
FALLIBLE enum err load_delta_size(const struct sdict *target, uint32_t world_size, struct load_delta *out);
/* With the made segments there: copies what the newest generation (NULL: there is none) holds, and takes the tables of the made segments
 * away until load_delta_end. *rest_out: what is to be loaded, the caller's; its plan is allocated in `arena`. */
FALLIBLE enum err load_delta_begin(struct job *j, const struct input *source, const struct sdict *view,
				   const struct rank_segments *newest, struct arena *arena, struct load_delta *d, struct sdict **rest_out,
				   struct load_plan *rest_plan);
/* After the rest was loaded: writes the tables, and counts. */
FALLIBLE enum err load_delta_end(struct job *j, struct load_delta *d);
void load_delta_free(struct load_delta *d);
