/* convert_impl.h: what convert.c, convert_join.c and convert_shape.c share: the tensors between two rules. */
#pragma once
#include "base/buf.h"
#include "base/map.h"
#include "base/pattern.h"
#include "base/vec.h"
#include "plan/convert.h"

enum { CONVERT_PIECES_MAX = 1 << 20 };   /* views of a tensor */

struct convert_tensor {
	struct str fqn;
	struct str stored;             /* FQN that `path` belongs to */
	struct sd_path path;
	const int64_t *shape;
	struct views views;
	enum dtype dtype;
	uint16_t ndim;
	bool requires_grad, matches;   /* matches: the rule that is being applied */
	const char *blocks;            /* see sd_tensor */
};

struct convert_value {
	struct str fqn;
	uint32_t index;                /* in source 0 */
	bool matches;
};

struct convert_tensors vec(struct convert_tensor);

struct converter {
	const struct conversion *c;
	const struct convert_source *sources;
	struct arena *a;
	struct patterns *patterns;     /* of the rules, in their order */
	struct convert_tensors now, next; /* before and after the rule */
	struct vec(struct convert_value) values;
	struct map names;              /* FQN → index in `now`, before the rule */
	const struct conversion_rule *rule;
	uint32_t index;                /* of the rule */
};

/* Adds a tensor to those after the rule. */
FALLIBLE enum err convert_push(struct converter *v, const struct convert_tensor *t);
/* The rule's name number `i` for a tensor that it matches; `number` fills {i} in (-1: there is none). */
FALLIBLE enum err convert_name(struct converter *v, const struct convert_tensor *t, uint32_t i, int64_t number, struct str *out);
/* A dim of the rule, counted from the front. count: dims there are. */
FALLIBLE enum err convert_dim(const struct converter *v, const struct convert_tensor *t, uint32_t count, uint32_t *out);
/* A shape with dim `d` changed, its elements counted. */
FALLIBLE enum err convert_resized(struct converter *v, const struct convert_tensor *t, uint32_t d, int64_t size, int64_t **out);

/* One rule on one tensor that it matches: adds what comes of it. */
FALLIBLE enum err convert_shape(struct converter *v, const struct convert_tensor *t);
/* concat and stack: all that matches, and what does not. */
FALLIBLE enum err convert_join(struct converter *v);
