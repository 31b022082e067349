/* lookup_loadable.c: could a training go on from this checkpoint? Everything that a load would find wrong before it reads a tensor: the
 * format, files and their sizes, metadata and manifest, holes and overlaps, a layout that cannot be cut, optimizer state that is there in
 * part (plan/optim_state.h). Tensors are not read: that is verify's work, and the load compares digests anyway. */
#include "base/jtext.h"
#include "base/jval.h"
#include "plan/layout_use.h"
#include "plan/optim_state.h"
#include "plan/save_plan.h"
#include "query/lookup.h"
#include "query/lookup_cache.h"
#include "runner/input.h"
#include "runner/spec.h"

enum {
	RULES_MAX = 10000,
	CUT_MAX = 1 << 24,             /* chunks that are cut on trial: what comes after is not looked at */
	CUT_AT_ONCE = 1 << 16,
	LISTING_MAX = 64 << 20,        /* bytes of a value: a longer list of parameters is not looked at */
};

/* ---- layout ---- */

struct trial {
	const struct sdict *sd;
	struct spec_layout l;
	struct layout_use use;
	struct sdict *cut;             /* of the tensors in hand */
	uint64_t done;                 /* chunks before */
};

static FALLIBLE enum err cut_one(struct trial *t, const struct sd_tensor *tensor)
{
	uint32_t index, took;

	if (t->cut && t->cut->chunk_count >= CUT_AT_ONCE) {
		t->done += t->cut->chunk_count;
		sdict_free(t->cut);
		t->cut = NULL;
	}
	if (!t->cut)
		TRY(sdict_new(UINT64_MAX, &t->cut));
	TRY(sdict_add_tensor(t->cut, tensor->fqn, tensor->dtype, tensor->ndim, tensor->shape, &index));
	TRY(err_at_fqn(layout_apply(&t->l.layout, t->cut, index, &took), tensor->fqn.p, tensor->fqn.n));
	return layout_use_note(&t->use, &t->l.layout, tensor, took);
}

static FALLIBLE enum err cut_all(struct trial *t)
{
	TRY(layout_check(&t->l.layout));
	TRY(layout_use_new(&t->l.layout, &t->use));
	for (uint64_t i = 0; i < t->sd->tensor_count; i++) {
		if (t->done >= CUT_MAX)
			return OK;
		TRY(cut_one(t, &t->sd->tensors[i]));
	}
	return layout_use_check(&t->use, &t->l.layout, t->sd, NULL);
}

static FALLIBLE enum err check_layout(struct worker *w, const json_t *q, const struct sdict *sd, int64_t world)
{
	struct arena *arena = arena_new(UINT64_MAX);
	struct jval root = JVAL_ROOT((json_t *)(uintptr_t)q), layout = jval_get(&root, "layout");
	struct layout_rules rules = { 0 };
	struct trial t = { .sd = sd };

	NEED(arena, "no memory for a layout");
	enum err e = layout_rules_read(&layout, RULES_MAX, arena, &rules);
	if (!e && rules.n)
		e = spec_layout_open(w, &rules, (uint32_t)world, &t.l);
	if (!e && rules.n)
		e = cut_all(&t);
	sdict_free(t.cut);
	layout_use_free(&t.use);
	spec_layout_free(&t.l);
	arena_free(arena);
	return e;
}

/* ---- optimizer state ---- */

static FALLIBLE enum err check_listed(const struct optim_state *s, const struct input *source, const struct sd_value *v)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	CLEANUP(jval_drop) json_t *list = NULL;
	struct item_value value;
	uint64_t n = 0;

	if (v->unread.n || (v->kind == SD_VALUE_STORED && (v->loc.length > LISTING_MAX || sd_is_transformed(v->loc))))
		return OK;
	TRY(input_value(source, v, &bytes, &n));
	TRY(input_at_value(source, v, input_item_value(bytes, n, &value)));
	enum err e = OK;
	if (value.kind == ITEM_VALUE_JSON && jtext_parse((struct str){ (char *)value.text.p, value.text.len }, JSON_ALLOW_NUL, &list))
		err_clear(); /* text that is no array or object */
	item_value_free(&value);
	if (list)
		e = optim_state_check_listed(s, v->fqn, list);
	return e;
}

static FALLIBLE enum err check_optimizer(const struct checkpoint *c, struct checked *checked)
{
	CLEANUP(optim_state_close) struct optim_state s = { 0 };
	struct input source = { .checkpoint = (struct checkpoint *)(uintptr_t)c, .sd = c->sd, .checked = checked };

	TRY(optim_state_open(c->sd, &s));
	for (uint64_t i = 0; i < c->sd->value_count; i++)
		if (optim_state_listing(c->sd->values[i].fqn) != OPTIM_LISTS_NOTHING)
			TRY(check_listed(&s, &source, &c->sd->values[i]));
	return optim_state_check_keys(&s);
}

enum err lookup_loadable(struct worker *w, const json_t *q, struct buf *out)
{
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = NULL;
	int64_t world = json_integer_value(json_object_get(q, "world_size"));
	struct checked checked = { 0 };

	TRY(lookup_checkpoint(w, q, &c));
	TRY(checkpoint_check_whole(c));
	TRY(save_plan_validate(c->sd));
	world = world ? world : c->world_size;
	TRY(check_layout(w, q, c->sd, world));
	enum err e = json_is_true(json_object_get(q, "any_optimizer")) ? OK : check_optimizer(c, &checked);
	checked_free(&checked);
	buf_printf(out, "{\"world_size\":%jd}", (intmax_t)world);
	return e;
}
