/* convert_rules.h: a job's conversion rules (`transform`): the checkpoints that they take tensors from, what they make of the source,
 * and where the run finds it. */
#pragma once
#include "plan/convert.h"
#include "runner/build.h"
#include "runner/input.h"

struct convert_rules {
	struct arena *arena;
	struct conversion c;           /* count 0: there are none */
	const struct spec_view *stored;/* the source, as stored */
	struct input *others;          /* checkpoints of `from` rules */
	uint32_t **file_maps;
	struct convert_source *sources;/* the source, then the others */
	uint32_t source_count;
	struct converted made;
};

/* stored: what include, exclude, rename and dtype left of the source; it outlives the rules. of_format: rules that follow those of the
 * request, for the target's sake; may be NULL. *view_out: what is to be written, without
 * rules a view of the same; mem_free its dtypes, the sdict is the rules' or the source's. */
FALLIBLE enum err convert_rules_apply(struct job *j, const struct spec_view *stored, const json_t *of_format, struct convert_rules *out,
				      struct spec_view *view_out);
/* The same rules, for a checkpoint whose tensors and values are those of the first: *out makes of `stored` what the others make of theirs,
 * but for what they take from other checkpoints, which is zeros here. */
FALLIBLE enum err convert_rules_like(const struct convert_rules *first, const struct spec_view *stored, struct convert_rules *out);
/* Adds the sources of what the rules made. first_stored: run source of chunk 0 of `stored`. *first_out: of the view's chunk 0. */
FALLIBLE enum err convert_rules_sources(struct convert_rules *r, struct run_build *b, uint32_t first_stored, uint32_t *first_out);
/* The value of `stored` that value `i` of the view is. */
uint64_t convert_rules_value(const struct convert_rules *r, uint64_t i);
/* Does a made tensor run across the rows of a stored one? */
bool convert_rules_transpose(const struct convert_rules *r);
/* {"before":[{"fqn","shape","dtype"}],"after":[{…,"from":[FQN],"path"?}],"values":[{"fqn","path"?}],"before_count","after_count",
 * "value_count"}; lists are cut to a sane length. view: what is to be written, with its final dtypes. */
FALLIBLE enum err convert_rules_table(const struct convert_rules *r, const struct spec_view *view, json_t **out);
/* Adds {"fqn","from","to"} for each tensor that the rules cast to *list, which is made if it is not there. */
FALLIBLE enum err convert_rules_casts(const struct convert_rules *r, json_t **list);
void convert_rules_free(struct convert_rules *r);
