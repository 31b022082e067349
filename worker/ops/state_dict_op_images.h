/* state_dict_op_images.h: the trees that an operation makes → the images of the target's segments: headers with values, paths and layout,
 * and where each shard's bytes go. The bytes come by the run. */
#pragma once
#include "base/map.h"
#include "ops/state_dict_op_trees.h"

/* A target shard: where its bytes go. */
struct state_dict_op_slot {
	struct str fqn;
	enum dtype dtype;
	uint32_t ndim, rank;
	const int64_t *dims;
	uint64_t offset, bytes;        /* in the rank's new segment */
	uint64_t keeps;                /* the place whose bytes it has before anything moves; UINT64_MAX: none, zeros */
	uint64_t covered;              /* elements that moves bring; for state_dict_op_tables.c */
};

struct state_dict_op_images {
	uint32_t world_size;
	struct buf *headers;           /* world_size */
	uint64_t *image_bytes;
	struct vec(struct state_dict_op_slot) slots;
	struct map first_slot;         /* rank and tree node → its first shard's slot */
	uint64_t tensors, values;      /* distinct per rank, summed up */
};

/* trees: world_size; NULL: an image without anything. Kept memory lives in `a`. from: the state dicts they were made from, which say
 * what lists of values are written as one; NULL: none. */
FALLIBLE enum err state_dict_op_images_make(struct tree *const *trees, uint32_t world_size, const struct state_dict_op_trees *from,
					    struct arena *a,
				   struct state_dict_op_images *out);
/* The slot of a shard of a tensor of `rank`'s tree; UINT64_MAX: no such. */
uint64_t state_dict_op_images_slot(const struct state_dict_op_images *im, uint32_t rank, const struct tree *node, uint32_t shard);
void state_dict_op_images_free(struct state_dict_op_images *im);
