/* state_dict_op_cut.h: the trees of a target that is not there yet: everything the source has, tensors cut by a layout. */
#pragma once
#include "plan/state_dict_op_impl.h"

/* trees: a tree for each member of the group. Tensors are made (no bytes yet), values are the rank's own, else those of the first rank
 * that has them. Ranks may lack keys, but must agree on what a path is. source: the ranks' trees that count. */
FALLIBLE enum err state_dict_op_cut(struct state_dict_op_build *b, struct tree *const *source, struct tree **trees);
