/* state_dict_op_rules.c: see state_dict_op_rules.h. A state dict of thousands of DTensors has as many rules, each for one FQN: those are
 * found by a map, and only patterns are tried one by one. */
#include "ops/state_dict_op_rules.h"
#include "base/jtext.h"
#include "base/mem.h"

enum { ARENA_MAX = 64 << 20, RULES_MAX = 10000 };

void state_dict_op_rules_free(struct state_dict_op_rules *r)
{
	arena_free(r->arena);
	json_decref(r->doc);
	map_free(&r->exact);
	mem_free(r->wild);
	*r = (struct state_dict_op_rules){ 0 };
}

/* The rules that name placements; `like` and boxes are nothing that an image may ask for. */
static FALLIBLE enum err mesh_rules(struct str text, json_t **out)
{
	json_t *all, *some = json_array(), *rule;
	enum err e = jtext_parse(text, JSON_ALLOW_NUL, &all);
	size_t i;

	if (e && e != ERR_NO_MEMORY)
		e = ERR(FORMAT_IMAGE, "the layout is not JSON");
	if (!some)
		e = ERR(NO_MEMORY, "no memory for a layout");
	json_array_foreach(all, i, rule) {
		bool good = json_is_string(json_object_get(rule, "match")) && json_is_array(json_object_get(rule, "placements")) &&
			    !json_object_get(rule, "like") && !json_object_get(rule, "boxes") && !json_object_get(rule, "chunks");
		if (!e && good && json_array_append(some, rule) < 0)
			e = ERR(NO_MEMORY, "no memory for a layout");
	}
	json_decref(all);
	if (e)
		json_decref(some);
	else
		*out = some;
	return e;
}

static FALLIBLE enum err make_mesh(struct arena *a, const struct layout_rule *rule, uint32_t world_size, struct tree_mesh *out)
{
	uint64_t n = 1;
	int64_t *sizes;
	uint32_t *ranks;

	out->ndim = rule->mesh_ndim ? rule->mesh_ndim : 1;
	out->names = rule->dim_names;
	TRY(arena_i64(a, out->ndim, &sizes));
	for (uint32_t i = 0; i < out->ndim; i++) {
		sizes[i] = rule->mesh_ndim ? rule->mesh[i] : rule->ranks ? rule->rank_count : world_size;
		n *= (uint64_t)sizes[i]; /* its product was checked against the ranks */
	}
	TRY(arena_alloc(a, n, sizeof *ranks, &ranks));
	for (uint64_t i = 0; i < n; i++)
		ranks[i] = rule->ranks ? rule->ranks[i] : (uint32_t)i;
	out->sizes = sizes;
	out->ranks = ranks;
	return OK;
}

static FALLIBLE enum err index_rules(struct state_dict_op_rules *r)
{
	const struct layout *l = &r->layout;
	uint32_t found;

	TRY(arena_alloc(r->arena, (uint64_t)l->rule_count + 1, sizeof *r->meshes, &r->meshes));
	r->wild = mem_zalloc((uint64_t)l->rule_count + 1, sizeof *r->wild);
	NEED(r->wild, "no memory for a layout");
	for (uint32_t i = 0; i < l->rule_count; i++) {
		TRY(make_mesh(r->arena, &l->rules[i], l->world_size, &r->meshes[i]));
		if (l->rules[i].match.n && memchr(l->rules[i].match.p, '*', l->rules[i].match.n))
			r->wild[r->wild_count++] = i;
		else
			TRY(map_intern(&r->exact, l->rules[i].match, i, &found));
	}
	return OK;
}

static FALLIBLE enum err read_rules(struct str text, uint32_t world_size, struct state_dict_op_rules *out)
{
	struct layout_rules rules;

	out->arena = arena_new(ARENA_MAX);
	NEED(out->arena, "no memory for a layout");
	TRY(mesh_rules(text, &out->doc));
	enum err e = layout_rules_read(&JVAL_ROOT(out->doc), RULES_MAX, out->arena, &rules);
	if (e == ERR_VALIDATION_FAILED || e == ERR_UNKNOWN_FIELD) {
		struct err_info was = *err_last();
		return ERR(LAYOUT_INVALID, "the image's layout, %s", was.text);
	}
	TRY(e);
	out->layout = (struct layout){ rules.v, rules.n, world_size };
	TRY(layout_check_in_memory(&out->layout));
	return index_rules(out);
}

enum err state_dict_op_rules_read(struct str text, uint32_t world_size, struct state_dict_op_rules *out)
{
	if (out->text.p && str_eq(out->text, text))
		return OK;
	state_dict_op_rules_free(out);
	if (!text.p)
		return OK;
	TRY(read_rules(text, world_size, out));
	out->text = text;
	return OK;
}

bool state_dict_op_rules_find(const struct state_dict_op_rules *r, struct str fqn, uint32_t ndim, const struct tree_mesh **mesh_out,
			      const struct placement **placements_out)
{
	const struct layout *l = &r->layout;
	uint32_t best = map_get(&r->exact, fqn);

	if (best != MAP_NONE && !layout_has_dims(&l->rules[best], ndim))
		best = MAP_NONE;
	for (uint32_t i = 0; i < r->wild_count && r->wild[i] < best; i++)
		if (str_glob(l->rules[r->wild[i]].match, fqn) && layout_has_dims(&l->rules[r->wild[i]], ndim))
			best = r->wild[i];
	if (best == MAP_NONE)
		return false;
	*mesh_out = &r->meshes[best];
	*placements_out = l->rules[best].placements;
	return true;
}

/* ------------------------------------------------------------------------------------------------------ writing */

static void put_placement(struct buf *b, const struct placement *p)
{
	if (p->kind == PLACE_SHARD)
		buf_printf(b, "\"Shard(%d)\"", p->dim);
	else if (p->kind == PLACE_STRIDED_SHARD)
		buf_printf(b, "\"_StridedShard(dim=%d, sf=%jd)\"", p->dim, (intmax_t)p->split_factor);
	else if (p->kind == PLACE_PARTIAL)
		buf_printf(b, "\"Partial(%s)\"", placement_reduce_name(p->reduce));
	else
		buf_puts(b, "\"Replicate()\"");
}

enum err state_dict_op_rules_put(struct buf *b, struct str match, const struct tree_mesh *mesh, const struct placement *placements)
{
	uint64_t n = 1;

	buf_json_member(b, "{\"match\":", match);
	buf_puts(b, ",\"mesh\":[");
	for (uint32_t i = 0; i < mesh->ndim; i++) {
		buf_printf(b, "%s%jd", i ? "," : "", (intmax_t)mesh->sizes[i]);
		n *= (uint64_t)mesh->sizes[i];
	}
	buf_puts(b, "],\"ranks\":[");
	for (uint64_t i = 0; i < n; i++)
		buf_printf(b, "%s%u", i ? "," : "", mesh->ranks[i]);
	buf_puts(b, "]");
	for (uint32_t i = 0; mesh->names && i < mesh->ndim; i++) {
		buf_puts(b, i ? "," : ",\"dim_names\":[");
		buf_json_str(b, mesh->names[i]);
	}
	buf_puts(b, mesh->names ? "],\"placements\":[" : ",\"placements\":[");
	for (uint32_t i = 0; i < mesh->ndim; i++) {
		if (i)
			buf_putc(b, ',');
		put_placement(b, &placements[i]);
	}
	buf_puts(b, "]}");
	return buf_status(b);
}
