/* exact_load.h: a load of a state dict that lies in another node's memory, into one that is not there: as it is, rank for rank. Headers
 * come byte for byte: values, paths and layout rules are those of each rank. Each chunk comes from the same rank, replicas too. */
#pragma once
#include "plan/load_plan.h"
#include "runner/input.h"

/* Is the load one such? Nothing is asked for but the source's own form. */
bool exact_load_is(const struct job *j, const struct rank_segments *existing);
/* Sets *out, the target, whose files are its ranks, and the plan, in the arena: chunk i comes from chunk i. */
FALLIBLE enum err exact_load_plan(const struct sdict *source, uint32_t world_size, struct arena *arena, struct sdict **out,
				  struct load_plan *plan);
/* Asks for segments as large as the images, and writes the headers there, compared with the digests. */
FALLIBLE enum err exact_load_headers(struct job *j, const struct input *source);
