/* layout_use.h: what became of the rules of a layout: which ones took tensors, which tensors went past a rule because they lack a dim
 * that it names, and whether a rule is a slip.
 *
 *     layout_use_new(&l, &use)
 *     for each tensor: layout_apply(…, &took); layout_use_note(&use, &l, tensor, took)
 *     layout_use_check(&use, &l, sd, problems)     a rule whose pattern fits no tensor that has its dim is an error
 *
 * Shard(7) on a model of matrices must not end in Shard(0) without a word. But `*` speaks of everything, scalars too, and a rule whose
 * tensors earlier rules took does no harm: those are warnings, for the caller to show. */
#pragma once
#include "base/vec.h"
#include "plan/layout.h"
#include "plan/problems.h"

enum { LAYOUT_FALLBACKS_KEPT = 1000 };

struct layout_rule_use {
	uint64_t lacking;              /* tensors that reached the rule, match its pattern, and lack a dim that it names */
	bool took;                     /* it cut a tensor */
	struct str fqn;                /* the first one that lacks a dim */
	uint32_t ndim;
};

/* A tensor that went past a rule. */
struct layout_fallback {
	struct str fqn;
	uint32_t rule, took;           /* took UINT32_MAX: the default, Shard(0) or one copy */
};

struct layout_use {
	struct arena *arena;
	struct layout_rule_use *rules; /* as many as the layout has */
	struct vec(struct layout_fallback) fallbacks; /* the first LAYOUT_FALLBACKS_KEPT */
	uint64_t fallback_count, tensors;
};

FALLIBLE enum err layout_use_new(const struct layout *l, struct layout_use *out);
void layout_use_free(struct layout_use *u);
/* took: layout_apply's matched_out. */
FALLIBLE enum err layout_use_note(struct layout_use *u, const struct layout *l, const struct sd_tensor *t, uint32_t took);
/* ERR_LAYOUT_INVALID for the first rule that is a slip; with problems, each is noted there. sd: all the tensors. */
FALLIBLE enum err layout_use_check(const struct layout_use *u, const struct layout *l, const struct sdict *sd, struct problems *problems);
