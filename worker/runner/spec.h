/* spec.h: a job's request as the engine needs it. The coordinator has checked the form; what depends on the checkpoint is found here. */
#pragma once
#include "plan/layout.h"
#include "session/job.h"
#include "store/checkpoint.h"

/* A request's layout over a world; the checkpoints that its rules name (`like`) are open as long as it is there. */
struct spec_layout {
	struct layout layout;
	struct layout_rule *rules;
	struct checkpoint *likes[16];
	uint32_t like_count;
};
/* Frees nothing of `rules`, whose arrays it uses. After an error, too, the caller frees *out. */
FALLIBLE enum err spec_layout_open(struct worker *w, const struct layout_rules *rules, uint32_t world_size, struct spec_layout *out);
void spec_layout_free(struct spec_layout *l);

/* The world size of a target: given or the meshes' product, else `otherwise`. */
static inline uint32_t spec_world_size(const struct spec *spec, uint32_t otherwise)
{
	return spec->world_size ? (uint32_t)spec->world_size : otherwise;
}

/* include, exclude (source FQNs), rename (PCRE2), dtype (target FQNs) of `spec`: a copy of `source` with what is left, renamed; chunks and
 * locs are the source's. dtypes_out: per tensor of the copy, the dtype it is to have. Nothing asked for: *view_out is a plain copy. */
struct spec_view {
	struct sdict *sd;
	enum dtype *dtypes;            /* mem_free with the view */
	uint64_t skipped;              /* tensors and values left out */
};
FALLIBLE enum err spec_select(const struct spec *spec, const struct sdict *source, struct spec_view *out);
void spec_view_free(struct spec_view *v);
/* Gives an sdict without chunks the files and transforms that another's chunks speak of. */
FALLIBLE enum err spec_copy_files(const struct sdict *from, struct sdict *to);
