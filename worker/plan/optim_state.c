/* optim_state.c: see optim_state.h. */
#include "plan/optim_state.h"

#include <stdio.h>

#include "base/buf.h"

enum { OPTIMIZERS_MAX = 16, NAME_MAX_BYTES = 2 * SD_FQN_MAX };

#define STATE "state."
#define GROUPS "param_groups"
#define PARAMS ".params"

/* Finds the component `word` (with its dot, if one must follow) in an FQN: at the start or behind a dot. -1: it is not there. */
static int64_t component(struct str fqn, const char *word)
{
	size_t n = strlen(word);

	for (size_t i = 0; i + n <= fqn.n; i++)
		if ((i == 0 || fqn.p[i - 1] == '.') && memcmp(fqn.p + i, word, n) == 0)
			return (int64_t)i;
	return -1;
}

static struct str before_last(struct str fqn)
{
	while (fqn.n && fqn.p[fqn.n - 1] != '.')
		fqn.n--;
	fqn.n -= fqn.n > 0;
	return fqn;
}

/* The beginning of an FQN that ends with the parameter whose state it is; n 0: it is none's. The key path says where the parameter ends;
 * without one (or where the path's part is all of "state.a.w.exp_avg") the last component is the state's. */
static struct str param_of(struct str fqn, struct sd_path path)
{
	int64_t at = component(fqn, STATE);
	size_t n = 0;

	if (at < 0)
		return (struct str){ 0 };
	for (uint32_t i = 0; i + 2 < path.count; i++) {
		struct str key = path.parts[i].key, next = path.parts[i + 1].key;
		if (!key.p)
			break; /* the text of a list's position is not known here */
		if (str_is(key, "state") && next.p && n + key.n + 1 + next.n <= fqn.n)
			return (struct str){ fqn.p, n + key.n + 1 + next.n };
		n += key.n + 1;
	}
	struct str param = before_last(fqn);
	return param.n > (size_t)at + strlen(STATE) ? param : (struct str){ 0 };
}

FALLIBLE enum err optim_state_open(const struct sdict *sd, struct optim_state *out)
{
	*out = (struct optim_state){ .sd = sd };
	for (uint64_t i = 0; i < sd->tensor_count + sd->value_count; i++) {
		bool is_tensor = i < sd->tensor_count;
		const struct sd_value *v = is_tensor ? NULL : &sd->values[i - sd->tensor_count];
		struct str param = param_of(v ? v->fqn : sd->tensors[i].fqn, v ? v->path : sd->tensors[i].path);
		if (param.n)
			TRY(map_put(&out->params, param, 0));
	}
	return OK;
}

void optim_state_close(struct optim_state *s)
{
	map_free(&s->params);
}

enum optim_listing optim_state_listing(struct str fqn)
{
	int64_t at = component(fqn, GROUPS);
	size_t i = (size_t)at + strlen(GROUPS) + 1;

	if (at < 0)
		return OPTIM_LISTS_NOTHING;
	if (fqn.n == i - 1)
		return OPTIM_LISTS_GROUPS;
	if (fqn.p[i - 1] != '.')
		return OPTIM_LISTS_NOTHING;
	while (i < fqn.n && fqn.p[i] >= '0' && fqn.p[i] <= '9')
		i++;
	return str_is((struct str){ fqn.p + i, fqn.n - i }, PARAMS) ? OPTIM_LISTS_PARAMS : OPTIM_LISTS_NOTHING;
}

/* ---- a group ---- */

struct group {
	struct buf name;               /* "optim.state.a.w" of the parameter in hand */
	struct buf lacking;            /* the first one without state */
	size_t with, without;
};

static void group_free(struct group *g)
{
	buf_free(&g->name);
	buf_free(&g->lacking);
}

static FALLIBLE enum err group_add(struct group *g, const struct optim_state *s, struct str prefix, struct str param)
{
	g->name.len = 0;
	buf_put(&g->name, prefix.p, prefix.n);
	buf_puts(&g->name, STATE);
	buf_put(&g->name, param.p, param.n);
	TRY(buf_status(&g->name));
	if (map_get(&s->params, (struct str){ (char *)g->name.p, g->name.len }) != MAP_NONE) {
		g->with++;
	} else if (g->without++ == 0) {
		buf_put(&g->lacking, param.p, param.n);
		TRY(buf_status(&g->lacking));
	}
	return OK;
}

static FALLIBLE enum err group_check(const struct group *g)
{
	int n = (int)(g->lacking.len < 200 ? g->lacking.len : 200);

	if (g->with == 0 || g->without == 0)
		return OK;
	enum err e = ERR(CHECKPOINT_INCOMPLETE, "the optimizer has no state of '%.*s', though of %zu of the %zu parameters of its group: "
						"it was saved in part", n, (char *)g->lacking.p, g->with, g->with + g->without);
	return err_at_fqn(e, (char *)g->lacking.p, g->lacking.len);
}

static FALLIBLE enum err check_params(const struct optim_state *s, struct str prefix, const json_t *params)
{
	CLEANUP(group_free) struct group g = { BUF_INIT(NAME_MAX_BYTES), BUF_INIT(NAME_MAX_BYTES), 0, 0 };
	const json_t *one;
	char number[24];
	size_t i;

	json_array_foreach(params, i, one) {
		struct str param = { json_string_value(one), json_string_length(one) };
		if (json_is_integer(one))
			param = (struct str){ number,
					      (size_t)snprintf(number, sizeof number, "%jd", (intmax_t)json_integer_value(one)) };
		if (param.p)
			TRY(group_add(&g, s, prefix, param));
	}
	return group_check(&g);
}

FALLIBLE enum err optim_state_check_listed(const struct optim_state *s, struct str fqn, const json_t *value)
{
	int64_t at = component(fqn, GROUPS);
	const json_t *group;
	size_t i;

	if (at < 0)
		return OK;
	struct str prefix = { fqn.p, (size_t)at };
	if (optim_state_listing(fqn) == OPTIM_LISTS_PARAMS)
		return check_params(s, prefix, value);
	json_array_foreach(value, i, group)
		TRY(check_params(s, prefix, json_object_get(group, "params")));
	return OK;
}

/* ---- groups that are keys alone ---- */

struct optimizer {
	struct str prefix, last;       /* last: the parameter that was added last; its keys stand in a row */
	struct group group;
};

struct optimizers {
	struct optimizer v[OPTIMIZERS_MAX];
	uint32_t n;
};

static void optimizers_free(struct optimizers *all)
{
	for (uint32_t i = 0; i < all->n; i++)
		group_free(&all->v[i].group);
}

/* NULL: there are too many. */
static struct optimizer *optimizer_of(struct optimizers *all, struct str prefix)
{
	for (uint32_t i = 0; i < all->n; i++)
		if (str_eq(all->v[i].prefix, prefix))
			return &all->v[i];
	if (all->n == OPTIMIZERS_MAX)
		return NULL;
	all->v[all->n] = (struct optimizer){ .prefix = prefix, .group = { BUF_INIT(NAME_MAX_BYTES), BUF_INIT(NAME_MAX_BYTES), 0, 0 } };
	return &all->v[all->n++];
}

/* Is that "0.lr", of a list of groups? What stands behind param_groups for a parameter has more components, or no number in front. */
static bool is_of_list(struct str rest)
{
	size_t i = 0;

	while (i < rest.n && rest.p[i] >= '0' && rest.p[i] <= '9')
		i++;
	return i > 0 && i < rest.n && rest.p[i] == '.' && !memchr(rest.p + i + 1, '.', rest.n - i - 1);
}

static FALLIBLE enum err add_key(struct optimizers *all, const struct optim_state *s, struct str fqn)
{
	int64_t at = component(fqn, GROUPS ".");
	struct optimizer *o;

	if (at < 0)
		return OK;
	size_t from = (size_t)at + strlen(GROUPS ".");
	struct str rest = { fqn.p + from, fqn.n - from }, param = before_last(rest);
	if (param.n == 0 || is_of_list(rest) || !(o = optimizer_of(all, (struct str){ fqn.p, (size_t)at })) || str_eq(o->last, param))
		return OK;
	o->last = param;
	return group_add(&o->group, s, o->prefix, param);
}

FALLIBLE enum err optim_state_check_keys(const struct optim_state *s)
{
	CLEANUP(optimizers_free) struct optimizers all = { .n = 0 };

	for (uint64_t i = 0; i < s->sd->tensor_count; i++)
		TRY(add_key(&all, s, s->sd->tensors[i].fqn));
	for (uint64_t i = 0; i < s->sd->value_count; i++)
		TRY(add_key(&all, s, s->sd->values[i].fqn));
	for (uint32_t i = 0; i < all.n; i++)
		TRY(group_check(&all.v[i].group));
	return OK;
}
