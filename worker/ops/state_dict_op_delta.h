/* state_dict_op_delta.h: redistribute with `delta`: what a target has already is not written again.
 *
 * A move is one piece of at most MOVE_PIECE_BYTES. Behind each image of such a target lies a table with the XXH3-128 of every piece, which
 * says what the generation holds; the next one is compared with it. The table is not trusted with bytes: a piece that is left as it is
 * was read, and has the digest of the source's. */
#pragma once
#include "ops/state_dict_op_tables.h"

/* The moves of one rank of the run, and the head that its table has. */
struct state_dict_op_delta_part {
	uint64_t first;
	uint32_t rank;
	struct delta_head {
		uint64_t magic, pieces;
		unsigned char structure[16];
	} head;
};

struct state_dict_op_delta {
	uint64_t *bytes;               /* per rank: of a segment with its table */
	struct vec(struct state_dict_op_delta_part) parts;
	/* results: bytes of pieces that the newest generation lacks, and of the others; FQNs of the former */
	uint64_t changed_bytes, kept_bytes, changed_tensors;
};

/* Counts the pieces, and what each rank's segment needs. */
FALLIBLE enum err state_dict_op_delta_size(const struct state_dict_op_plan *plan, const struct state_dict_op_images *images,
					   struct state_dict_op_delta *out);
/* After state_dict_op_tables_make, before the headers are written: fills the run's entries with what the newest generation (NULL: there is
 * none) holds, marks moves whose segment may hold the same bytes, and takes the tables of the made segments away until
 * state_dict_op_delta_end. */
FALLIBLE enum err state_dict_op_delta_begin(const struct job *j, const struct rank_segments *newest,
					    const struct state_dict_op_images *images, struct run_build *b, struct state_dict_op_delta *d);
/* After the run: writes the tables, and counts. */
FALLIBLE enum err state_dict_op_delta_end(const struct job *j, const struct state_dict_op_images *images, const struct run *run,
					  struct state_dict_op_delta *d);
void state_dict_op_delta_free(struct state_dict_op_delta *d);
