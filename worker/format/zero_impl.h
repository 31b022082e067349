/* zero_impl.h: the parts that DeepSpeed's two layouts share. A ZeRO checkpoint has
 *
 *     *_model_states.pt   module, buffer_names, param_shapes [{FQN: torch.Size}] by parameter group, frozen_param_shapes and _fragments,
 *                         shared_params {FQN: FQN}, and what the training told DeepSpeed to keep (step, scheduler, client state)
 *     *_optim_states.pt   a data parallel rank's partitions: flat tensors, which are runs of many parameters' elements
 *
 * A universal checkpoint has the former, and a file for each parameter and state. FQNs are those of the model: a bare one is the fp32
 * master, `optim.KEY.FQN` its optimizer state KEY, `optim.…` what the optimizer has besides.
 *
 * The judge of the layouts is DeepSpeed's own reader (deepspeed/utils/zero_to_fp32.py). */
#pragma once
#include "base/map.h"
#include "base/vec.h"
#include "format/torch_file.h"

struct zero_param {
	struct str fqn;
	const int64_t *shape;
	uint32_t ndim, group;
	uint64_t numel;
	uint64_t at;                     /* element at which it begins in its stream */
};

/* A parameter that is another one, under a second name. */
struct zero_alias {
	struct str fqn, of;
};

/* A flat tensor of a rank's file. Those of one stream stand for one long row of elements, in which parameters follow each other. */
struct zero_flat {
	uint32_t state, stream, group, rank, file;
	enum dtype dtype;
	uint64_t offset, numel;          /* byte of the file; elements that belong to the stream */
	uint64_t start;                  /* in the stream */
};
enum { ZERO_FROZEN = UINT16_MAX };

struct zero_model {
	const struct format_source *s;
	struct sdict *sd;
	struct arena *arena;
	const char *name;                /* of the file that params were read from */
	bool sliced;                     /* stage 3: each parameter is cut over the ranks */
	uint64_t group_count;
	struct vec(struct zero_param) params, frozen;  /* params: in the order of the partitions */
	struct vec(struct zero_alias) aliases;
	struct vec(struct zero_flat) fragments;        /* stage 3: of frozen parameters; stream: index into frozen */
	struct map known;                /* FQN → index into params, ZERO_OTHER + index into frozen, or ZERO_OTHER: shared */
};
enum { ZERO_OTHER = 1 << 30 };

/* All of a checkpoint. */
struct zero {
	struct zero_model model;
	uint32_t world_size, group_count;              /* of the optimizer's files */
	struct vec(struct str) states;                 /* names; the first, "", is that of the masters */
	struct map by_state;
	struct vec(struct zero_flat) masters;          /* rank by rank, group by group */
	struct vec(struct zero_flat) flats;            /* those of other states; zero_put adds masters and fragments, and sorts them */
	struct vec(uint64_t) paddings;                 /* elements behind each parameter; empty: none */
	uint64_t copies;                               /* numbers of groups, one for each parameter */
};

/* Adds to the sdict each parameter and its states, as chunks of flat tensors, frozen ones and those that are shared.
 * ERR_CHECKPOINT_INCOMPLETE; ERR_FORMAT_METADATA: the partitions are not as long as param_shapes say. */
FALLIBLE enum err zero_put(struct zero *z);
/* A number that a group has, such as its step, becomes one of each of the group's parameters: optim.KEY.FQN. */
bool zero_is_number(const struct zero *z, const struct torch_leaf *leaf);
FALLIBLE enum err zero_put_number(struct zero *z, const struct torch_file *f, uint32_t file, const struct torch_leaf *leaf, uint32_t group,
				  struct str key);
void zero_free(struct zero *z);

/* Reads the model states of a rank. Of rank 0 (`first`): parameters, and into the sdict all tensors and values but parameters that `known`
 * has; of others, frozen fragments alone. ERR_FORMAT_METADATA, ERR_FORMAT_UNSUPPORTED, those of torch_file.h. */
FALLIBLE enum err zero_model_read(struct zero_model *m, const char *name, uint32_t rank, bool first);
/* Adds shared parameters: their chunks are those of the tensors that they are. */
FALLIBLE enum err zero_model_share(const struct zero_model *m);
void zero_model_free(struct zero_model *m);

/* The file of model states that speaks for all ranks: the first of model parallel rank 0. NULL: none. Files of layers, of experts and, if
 * not `merged`, of other model parallel ranks are ERR_FORMAT_UNSUPPORTED. */
FALLIBLE enum err zero_model_find(const struct format_source *s, bool merged, const char **out);

/* A flat tensor's place, if the leaf is one: one dim, its elements one behind the other. */
bool zero_flat_of(const struct torch_file *f, const struct torch_leaf *leaf, struct zero_flat *out);
/* The path part's number, of a list or of a dict whose keys are ints; UINT32_MAX: it is none. */
uint32_t zero_index(const struct sd_path_part *part);
/* FQN and path of a parameter's state: `optim.KEY.FQN`; KEY "": the parameter itself. */
FALLIBLE enum err zero_name(struct arena *a, struct str key, struct str param, struct str *fqn_out, struct sd_path *path_out);
/* Keeps leaves of the optimizer's state dict that are neither partitions nor say how these lie, as `optim.…`. skip: parts of the path in
 * front of the optimizer's keys. False: the leaf is none of these. */
FALLIBLE enum err zero_optim_leaf(struct torch_file *f, struct torch_leaf *leaf, uint32_t skip, bool *keep_out);
