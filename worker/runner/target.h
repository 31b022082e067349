/* target.h: how the tensors of a source are to be cut: the target's structure before anything has a place. */
#pragma once
#include "plan/layout_use.h"
#include "plan/load_plan.h"
#include "plan/save_plan.h"
#include "runner/spec.h"
#include "tensor/box.h"
#include "tensor/view.h"

/* Tensors of `view` cut by the layout over `world_size` ranks, replicas included; values on rank 0, pointing where they are. Result
 * gets what target_report_rules says. Tensors that cannot be cut so, and rules that are slips, are noted in `problems`, and such tensors
 * have no chunks; NULL: an error. */
FALLIBLE enum err target_cut(struct worker *w, const struct spec_view *view, const struct layout_rules *rules, uint32_t world_size,
			     struct problems *problems, struct sdict **out, json_t *result);
/* Sets "unmatched_rules" (patterns of rules that took no tensor), and "fell_back" with "fell_back_count" (tensors that went past a rule,
 * for they lack a dim that it names), where there are any. */
FALLIBLE enum err target_report_rules(json_t *result, const struct layout *l, const struct layout_use *use);
/* The tensors that a target is made of. */
struct target_ties {
	const struct spec_view *stored; /* the source */
	const struct spec_view *view;   /* what is written: the same, or what conversion rules made of it; dtypes: of the first source */
	const struct view *views;       /* of each chunk of `view`, into chunks of `stored` and what is beyond; NULL: there are no rules */
};
/* For a target that can share bytes: notes in `target` (target_whole) the tensors that are one (tied weights, in the source or by a rule):
 * the same stored bytes, read in the same way. An average is tied if it is so in each of the `n` sources; all else is the first one's.
 * averages: per tensor of the first one's view; NULL: there are none. */
FALLIBLE enum err target_tie(const struct target_ties *ties, uint32_t n, const bool *averages, struct sdict *target);
/* Every tensor whole, on rank 0. */
FALLIBLE enum err target_whole(const struct spec_view *view, struct sdict **out);
/* A JSON array of {"fqn","from","to"} for tensors whose dtype changes; NULL: none. Tensors that cannot be cast: as in target_cut. */
FALLIBLE enum err target_casts(const struct sdict *source, const struct sdict *target, struct problems *problems, json_t **out);

/* plan->sources[i] == i: every target chunk is one source chunk. */
FALLIBLE enum err target_identity(uint64_t chunks, struct arena *a, struct load_plan *out);

/* options.dedup: who writes what several ranks hold. */

/* FQN lists as JSON, cut to a sane length. */
json_t *target_names(const struct str *names, uint64_t n);
