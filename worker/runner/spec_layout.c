/* spec_layout.c: the layout of a request, for a world that may be known only now; the checkpoints that its rules name are opened. */
#include "runner/spec.h"

void spec_layout_free(struct spec_layout *l)
{
	for (uint32_t i = 0; i < l->like_count; i++)
		checkpoint_free(l->likes[i]);
	mem_free(l->rules);
	*l = (struct spec_layout){ 0 };
}

static FALLIBLE enum err open_like(struct worker *w, struct layout_rule *rule, struct spec_layout *l)
{
	if (l->like_count == sizeof l->likes / sizeof *l->likes)
		return ERR(LIMIT_EXCEEDED, "more than %u rules with like", l->like_count);
	TRY(checkpoint_open(&w->stores, &rule->like_ref, &l->likes[l->like_count]));
	rule->like = l->likes[l->like_count++]->sd;
	return OK;
}

enum err spec_layout_open(struct worker *w, const struct layout_rules *rules, uint32_t world_size, struct spec_layout *out)
{
	*out = (struct spec_layout){ .rules = mem_alloc((rules->n + 1) * sizeof *out->rules) };
	NEED(out->rules, "no memory for a layout");
	out->layout = (struct layout){ out->rules, rules->n, world_size };
	for (uint32_t i = 0; i < rules->n; i++) {
		out->rules[i] = rules->v[i];
		if (rules->v[i].kind == LAYOUT_LIKE)
			TRY(open_like(w, &out->rules[i], out));
	}
	return OK;
}
