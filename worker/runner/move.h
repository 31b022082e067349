/* move.h: one box from a shard in one segment to a shard in another: the geometry beneath the state-dict operations, for those who copy
 * from segment to segment (state_dict_op_run.c) and those who send in between (exchange.c). Shards are dense, in C order. */
#pragma once
#include "runner/files.h"
#include "runner/sources.h"

enum { MOVE_PIECE_BYTES = 512 << 10 };  /* copied between two looks at the clock */

/* Cuts a box into boxes of at most `most` elements each, in C order: the same on every worker. */
struct move_cut {
	uint32_t ndim, walked;         /* dims [0, walked) go one index at a time, dim `walked` in steps */
	int64_t step;
	bool done;
	int64_t off[NDIM_MAX], size[NDIM_MAX], at[NDIM_MAX];
};
/* dims: ndim offsets, then sizes. An empty box gives nothing. */
void move_cut_begin(struct move_cut *c, uint32_t ndim, const int64_t *dims, uint64_t most);
bool move_cut_next(struct move_cut *c, int64_t *off_out, int64_t *size_out);

uint64_t move_bytes(const struct run *run, const struct run_move *m);   /* of its box, in the source's dtype */

/* Offsets are global. Segments are mapped already (move_map): these may run under seg_guard. */
FALLIBLE enum err move_map(struct files *f, const struct run *run, const struct run_move *m, bool from, bool to);
/* A hint, outside of seg_guard: the pages of a piece come into the page tables at once. */
void move_populate(struct files *f, const struct run *run, const struct run_move *m, const int64_t *off, const int64_t *size,
		   bool from, bool to);
/* Straight from segment to segment, cast on the way. */
FALLIBLE enum err move_copy(struct files *f, const struct run *run, const struct run_move *m, const int64_t *off, const int64_t *size);
/* The source's elements, dense, in the source's dtype. */
void move_pack(struct files *f, const struct run *run, uint32_t src, const int64_t *off, const int64_t *size, void *out);
/* The same of a target. */
void move_pack_target(struct files *f, const struct run *run, uint32_t dst, const int64_t *off, const int64_t *size, void *out);
/* Dense elements of `dtype` to their place. */
FALLIBLE enum err move_unpack(struct files *f, const struct run *run, uint32_t dst, enum dtype dtype, const int64_t *off,
			      const int64_t *size, const void *in);
/* Adds the FQN and the rank whose fault it is: of a shrunk segment the one that is smaller. */
enum err move_error(struct files *f, const struct run *run, const struct run_move *m, enum err e);
/* Element `at` of a piece (off, size), as an element of the source's shard. */
uint64_t move_shard_element(const struct run *run, uint32_t src, const int64_t *off, const int64_t *size, uint64_t at);
