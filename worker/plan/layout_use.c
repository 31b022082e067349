/* layout_use.c: see layout_use.h. Apart from layout_apply, which cuts one tensor and knows no others. */
#include "plan/layout_use.h"

#include "base/num.h"

enum { ARENA_MAX = 64 << 20, MATCH_SHOWN = 100 };

enum err layout_use_new(const struct layout *l, struct layout_use *out)
{
	*out = (struct layout_use){ .arena = arena_new(ARENA_MAX) };
	NEED(out->arena, "no memory for %u rules", l->rule_count);
	return arena_alloc(out->arena, (uint64_t)l->rule_count + 1, sizeof *out->rules, &out->rules);
}

void layout_use_free(struct layout_use *u)
{
	vec_free(&u->fallbacks);
	arena_free(u->arena);
	*u = (struct layout_use){ 0 };
}

/* The tensor reached the rule and went past it. */
static FALLIBLE enum err note_lacking(struct layout_use *u, const struct sd_tensor *t, uint32_t rule, uint32_t took, bool first)
{
	struct layout_rule_use *r = &u->rules[rule];
	struct layout_fallback *f;
	struct str fqn = { 0 };
	bool keep = first && u->fallbacks.n < LAYOUT_FALLBACKS_KEPT;

	if (keep || r->lacking == 0)
		TRY(arena_str(u->arena, t->fqn, &fqn));
	if (r->lacking++ == 0) {
		r->fqn = fqn;
		r->ndim = t->ndim;
	}
	u->fallback_count += first;
	if (!keep)
		return OK;
	TRY(vec_push(&u->fallbacks, &f));
	*f = (struct layout_fallback){ fqn, rule, took };
	return OK;
}

enum err layout_use_note(struct layout_use *u, const struct layout *l, const struct sd_tensor *t, uint32_t took)
{
	bool first = true;

	u->tensors++;
	for (uint32_t i = 0; i < l->rule_count && i < took; i++) {
		if (layout_has_dims(&l->rules[i], t->ndim) || !str_glob(l->rules[i].match, t->fqn))
			continue;
		TRY(note_lacking(u, t, i, took, first));
		first = false;
	}
	if (took < l->rule_count)
		u->rules[took].took = true;
	return OK;
}

/* The rule may have taken none because earlier rules took the tensors with the dim. */
static bool fits_any(const struct layout_rule *r, const struct sdict *sd)
{
	for (uint64_t i = 0; i < sd->tensor_count; i++)
		if (layout_has_dims(r, sd->tensors[i].ndim) && str_glob(r->match, sd->tensors[i].fqn))
			return true;
	return false;
}

enum err layout_use_check(const struct layout_use *u, const struct layout *l, const struct sdict *sd, struct problems *problems)
{
	for (uint32_t i = 0; i < l->rule_count; i++) {
		const struct layout_rule_use *r = &u->rules[i];
		const struct layout_rule *rule = &l->rules[i];
		if (r->took || r->lacking == 0 || rule->optional || str_is(rule->match, "*") || fits_any(rule, sd))
			continue;
		enum err e = ERR(LAYOUT_INVALID, "rule %u ('%.*s') names a dim that no tensor has that it matches: %ju of them came to it, "
				 "the first has %u %s; if that is meant, give it \"optional\":true, or dcpctl a ? in front", i,
				 (int)num_min(rule->match.n, MATCH_SHOWN), rule->match.n ? rule->match.p : "", (uintmax_t)r->lacking,
				 r->ndim, r->ndim == 1 ? "dim" : "dims");
		e = err_at_fqn(e, r->fqn.p, r->fqn.n);
		TRY(problems ? problems_note(problems, e) : e);
	}
	return OK;
}
