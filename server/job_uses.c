/* job_uses.c: the state dicts that a job holds: what it reads, compares and fills. */
#include "base/mem.h"
#include "base/num.h"
#include "server/job_impl.h"
#include "server/parts.h"

uint64_t job_use_bytes(const struct state_dict_use *u)
{
	uint64_t sum = 0;

	for (uint32_t r = 0; u && r < u->world_size; r++)
		if (num_add(sum, u->ranks[r].image_bytes, &sum) != OK) /* through a ring, an image may be said to have any size */
			return UINT64_MAX;
	return sum;
}

/* Of a load: what it fills. Of what makes a next generation: the newest one, if anything is sealed; the source itself is none. */
FALLIBLE enum err job_use_target(struct job *j)
{
	struct principal who = job_owner(j);
	const struct ref *source = &j->spec.source, *target = &j->spec.target;

	if (target->kind != REF_STATE_DICT || j->target_use || !state_dict_exists(j->server->state_dicts, target->name))
		return OK;
	if (state_dict_is_for_neighbour(j->server->state_dicts, target->name)) /* loads of its checkpoint would get the new values */
		return ERR(STATE_DICT_EXISTS, "state dict \"%s\" is the copy of a checkpoint for a neighbour: nothing else is put there",
			   target->name.p);
	if (j->spec.optimizer_model.name.p)
		return ERR(STATE_DICT_EXISTS, "state dict \"%s\" exists: a load of optimizer state makes its own", target->name.p);
	if (job_state_dict_op_is(j) && ref_same(source, target))
		return OK;
	enum err e = state_dict_use(j->server->state_dicts, &who, target->name, -1, j->id, &j->target_use);
	if (!e && j->spec.create_only) {
		state_dict_unuse(&j->target_use);
		return ERR(STATE_DICT_EXISTS, "state dict \"%s\" exists: it is not loaded into", target->name.p);
	}
	return e == ERR_NOT_SEALED && job_spec_makes_next(j) && !kind_is(j->kind, KIND_TARGET_THERE) ? OK : e;
}

static FALLIBLE enum err take_parts(struct job *j, const struct principal *who)
{
	const struct spec_refs *parts = &j->spec.parts;

	if (parts->n == 0)
		return OK;
	j->part_uses = mem_zalloc(parts->n, sizeof *j->part_uses);
	NEED(j->part_uses, "cannot use %zu state dicts", parts->n);
	for (size_t i = 0; i < parts->n; i++) {
		for (size_t k = 0; k < i; k++)
			if (str_eq(parts->v[k].name, parts->v[i].name))
				return ERR(VALIDATION_FAILED, "part %zu names a state dict that another part names", i);
		TRY(state_dict_use(j->server->state_dicts, who, parts->v[i].name, parts->v[i].generation, j->id, &j->part_uses[i]));
		j->part_count++;
	}
	return OK;
}

FALLIBLE enum err job_use_list(struct job *j)
{
	struct principal who = job_owner(j);
	const struct ref *source = &j->spec.source;

	j->part_uses = mem_zalloc(1, sizeof *j->part_uses);
	NEED(j->part_uses, "cannot use a state dict");
	j->part_count = 1;
	return state_dict_use(j->server->state_dicts, &who, source->name, source->generation, j->id, &j->source_use);
}

FALLIBLE enum err job_use_sources(struct job *j)
{
	struct principal who = job_owner(j);
	const struct ref *source = &j->spec.source;

	if (source->kind != REF_STATE_DICT)
		return OK;
	TRY(state_dict_use(j->server->state_dicts, &who, source->name, source->generation, j->id, &j->source_use));
	j->spec.source.generation = j->source_use->generation;
	if (json_object_set_new(json_object_get(j->request, "source"), "generation", json_integer(j->source_use->generation)) != 0)
		return ERR(NO_MEMORY, "cannot keep a job");
	return take_parts(j, &who);
}

/* Takes the base's generation into use; base and source may be generations of one state dict. */
static FALLIBLE enum err use_base(struct job *j, const struct principal *who)
{
	struct ref *base = &j->spec.base;

	if (base->kind != REF_STATE_DICT)
		return OK;
	TRY(state_dict_use(j->server->state_dicts, who, base->name, base->generation, j->id, &j->other_use));
	base->generation = j->other_use->generation;
	if (json_object_set_new(json_object_get(j->request, "base"), "generation", json_integer(base->generation)) != 0)
		return ERR(NO_MEMORY, "cannot keep a job");
	return OK;
}

FALLIBLE enum err job_use_others(struct job *j)
{
	struct principal who = job_owner(j);

	if (j->spec.optimizer_model.name.p)
		TRY(state_dict_use(j->server->state_dicts, &who, str_of(j->spec.optimizer_model.name.p), -1, j->id, &j->other_use));
	if (job_spec_compares(j)) {
		const struct ref *a = &j->spec.a, *b = &j->spec.b;
		if (a->kind == REF_STATE_DICT)
			TRY(state_dict_use(j->server->state_dicts, &who, a->name, a->generation, j->id, &j->source_use));
		if (b->kind == REF_STATE_DICT && !ref_same(a, b))
			TRY(state_dict_use(j->server->state_dicts, &who, b->name, b->generation, j->id, &j->other_use));
	}
	TRY(use_base(j, &who));
	return job_use_target(j);
}

void job_drop_sources(struct job *j)
{
	state_dict_await_stop(&j->await);
	state_dict_unuse(&j->target_use);
	state_dict_unuse(&j->source_use);
	state_dict_unuse(&j->other_use);
	for (uint32_t i = 0; i < j->part_count; i++)
		state_dict_unuse(&j->part_uses[i]);
	mem_free(j->part_uses);
	j->part_uses = NULL;
	j->part_count = 0;
}

void job_drop_uses(struct job *j)
{
	if (j->made_use)
		state_dict_drop(&j->made_use);
	job_drop_sources(j);
}
