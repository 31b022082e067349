/* state_dict_op_rules.h: the `layout` of an image: which of a rank's sharded tensors are DTensors, and on which mesh. */
#pragma once
#include "base/map.h"
#include "plan/tree.h"
#include "plan/layout.h"

struct state_dict_op_rules {
	struct str text;               /* what was read: ranks of one state dict mostly say the same */
	json_t *doc;                   /* has the texts of the rules */
	struct arena *arena;
	struct layout layout;
	struct tree_mesh *meshes;      /* per rule */
	struct map exact;              /* patterns without `*`: first rule of that name */
	uint32_t *wild;                /* the others, in order */
	uint32_t wild_count;
};

/* text: a JSON list, or p NULL. Rules without placements are for others and left out. If the text is another, the former contents of `out`
 * are freed. */
FALLIBLE enum err state_dict_op_rules_read(struct str text, uint32_t world_size, struct state_dict_op_rules *out);
/* The first rule that matches; false: none. */
bool state_dict_op_rules_find(const struct state_dict_op_rules *r, struct str fqn, uint32_t ndim, const struct tree_mesh **mesh_out,
			      const struct placement **placements_out);
void state_dict_op_rules_free(struct state_dict_op_rules *r);

/* The writing side: one rule, {"match":…,"mesh":[…],"ranks":[…],"placements":[…]}. */
FALLIBLE enum err state_dict_op_rules_put(struct buf *b, struct str match, const struct tree_mesh *mesh,
					  const struct placement *placements);
