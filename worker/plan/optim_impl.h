/* optim_impl.h: what the files of optim share; nobody else includes it. */
#pragma once
#include "plan/optim.h"

#include "base/map.h"
#include "base/vec.h"

#define OPTIM_NONE UINT32_MAX

/* A tensor of the model. */
struct optim_param {
	struct str fqn;
	const int64_t *shape;
	uint32_t ndim, rank;           /* rank: the last that had it */
	bool nested_here;              /* … and whether it was nested there */
	const struct sd_outer **outers;/* per rank; NULL: nested nowhere */
};

struct optim_group {
	const uint32_t *ranks;
	uint32_t count, place;         /* place: of the rank whose group it is */
};

struct optim_model {
	struct arena *arena;
	uint32_t world_size;
	struct vec(struct optim_param) params;
	struct map by_name, by_tail;   /* FQN, and the FQN without the first part of its path ("model.w": "w") → param */
	struct optim_group *groups;    /* per rank; count 0: nothing is nested there, it cuts over the world */
	bool nested;
};

/* The model's tensor of that name, or OPTIM_NONE. */
FALLIBLE enum err optim_model_find(const struct optim_model *m, struct str name, uint32_t *out);
