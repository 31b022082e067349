/* optim_load.c: see optim_load.h. Only the headers of the model's images are read. A nested tensor says so itself (`outer`); a DTensor says
 * it by its rule in the image's `layout`, if a mesh dim has the name "tp". */
#include "ops/optim_load.h"

#include "ops/state_dict_op_rules.h"

void optim_load_free(struct optim_load *l)
{
	for (uint32_t r = 0; l->images && r < l->world_size; r++)
		image_free(l->images[r]);
	mem_free(l->images);
	sdict_free(l->plan.sd);
	optim_model_free(l->model);
	arena_free(l->arena);
	*l = (struct optim_load){ 0 };
}

static FALLIBLE enum err add_entry(struct optim_load *l, const struct image *im, uint32_t rank, uint32_t i,
				   const struct state_dict_op_rules *rules)
{
	struct image_part p = image_part_at(im, i);
	const struct tree_mesh *mesh;
	const struct placement *placements;
	struct sd_path_part self;
	struct sd_path path = image_path(im, p.fqn, &self);

	bool dtensor = p.boxed && state_dict_op_rules_find(rules, p.fqn, p.ndim, &mesh, &placements);
	if (dtensor && !p.outer) {
		TRY(optim_mesh_slice(mesh, placements, rank, p.ndim, p.shape, l->arena, &p.outer));
	} else if (dtensor) {
		struct sd_outer *o;
		TRY(arena_alloc(l->arena, 1, sizeof *o, &o));
		*o = *p.outer;
		o->inner_dtensor = true;
		p.outer = o;
	}
	return optim_model_add(l->model, rank, p.fqn, path, p.ndim, p.shape, p.outer);
}

static FALLIBLE enum err add_rank(struct job *j, struct optim_load *l, const struct rank_segment *segment, uint32_t rank,
				  struct state_dict_op_rules *rules)
{
	TRY(input_read_image(segment, j->fds, &l->images[rank]));
	const struct image *im = l->images[rank];

	TRY(state_dict_op_rules_read(image_layout(im), l->world_size, rules));
	for (uint32_t i = 0; i < image_part_count(im); i++) {
		enum err e = add_entry(l, im, rank, i, rules);
		struct str fqn = image_part_at(im, i).fqn;
		if (e)
			return err_at_fqn(e, fqn.p, fqn.n);
	}
	return job_tick(j);
}

enum err optim_load_plan(struct job *j, const struct spec_view *view, struct optim_load *out)
{
	const struct rank_segments *model = job_state_dict(j, &j->spec.optimizer_model);
	struct state_dict_op_rules rules = { 0 };
	enum err e = OK;

	*out = (struct optim_load){ .world_size = model ? model->count : 0, .arena = arena_new(UINT64_MAX) };
	if (out->world_size == 0)
		return ERR(NOT_FOUND, "there is no state dict '%s'", j->spec.optimizer_model.name.p);
	out->images = mem_zalloc(out->world_size, sizeof *out->images);
	NEED(out->images && out->arena, "no memory for a model of %u ranks", out->world_size);
	TRY(optim_model_new(out->world_size, &out->model));
	for (uint32_t r = 0; !e && r < out->world_size; r++)
		e = err_at_rank(add_rank(j, out, &model->v[r], r, &rules), r);
	state_dict_op_rules_free(&rules);
	TRY(e);
	TRY(optim_model_done(out->model));
	TRY(optim_plan_make(view->sd, view->dtypes, out->model, j->spec.optimizer_key, out->arena, &out->plan));
	json_object_set_new(j->result, "unmatched", json_integer((json_int_t)out->plan.unmatched));
	return OK;
}
