/* optim_load.h: the target of a load with `optimizer`: what plan/optim.h makes of the model's segments. */
#pragma once
#include "plan/optim.h"
#include "runner/input.h"
#include "runner/spec.h"

struct optim_load {
	struct optim_model *model;
	struct image **images;         /* of the model; the plan points into them */
	uint32_t world_size;
	struct arena *arena;
	struct optim_plan plan;
};

/* Of the job's optimizer_key and optimizer_model. result: gets "unmatched", how many tensors are of no parameter of a 2-D
 * model. out->plan.sd is the caller's to take. */
FALLIBLE enum err optim_load_plan(struct job *j, const struct spec_view *view, struct optim_load *out);
void optim_load_free(struct optim_load *l);
