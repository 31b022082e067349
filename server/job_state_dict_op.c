/* job_state_dict_op.c: operations on state dicts: what only who knows the state dicts can check, what their workers get beside the request,
 * and what is left in the record and the metrics. The form of the request was checked by spec/spec.c. */
#include <stdio.h>
#include <sodium.h>
#include <sys/random.h>

#include "server/config.h"
#include "server/devices.h"
#include "server/job_impl.h"
#include "server/parts.h"

enum { SECRET_BYTES = 32 };

bool job_state_dict_op_is(const struct job *j)
{
	return kind_is(j->kind, KIND_OPERATES);
}

bool job_state_dict_op_network(const struct job *j)
{
	return job_state_dict_op_is(j) && (j->spec.backend == OP_BACKEND_TCP || j->spec.backend == OP_BACKEND_NCCL);
}

bool job_state_dict_op_device(const struct job *j)
{
	return job_state_dict_op_is(j) && !devices_missing(j->server->devices, j->spec.backend == OP_BACKEND_NCCL ? "nccl" : "cuda") &&
	       (j->spec.backend == OP_BACKEND_NCCL || j->spec.device == RESULT_CUDA || j->spec.pin_memory);
}

/* ---- ranks ---- */

static FALLIBLE enum err refuse(const char *pointer, json_int_t rank, json_int_t end, const char *of)
{
	return err_at_pointer(ERR(VALIDATION_FAILED, "%jd is not between 0 and %jd: %s has %jd ranks", (intmax_t)rank,
				  (intmax_t)end - 1, of, (intmax_t)end), pointer);
}

static FALLIBLE enum err check_list(const struct spec_ranks *list, const char *key, json_int_t end, const char *of)
{
	char pointer[64];

	for (size_t i = 0; i < list->n; i++) {
		snprintf(pointer, sizeof pointer, "/%s/%zu", key, i);
		if (list->v[i] >= end)
			return refuse(pointer, list->v[i], end, of);
	}
	return OK;
}

static json_int_t larger(json_int_t a, json_int_t b)
{
	return a > b ? a : b;
}

/* The world of an operation is as large as the larger of its state dicts; so a target cannot be smaller than its source. */
static FALLIBLE enum err check_world(const struct job *j, json_int_t *world_out)
{
	const struct ref *ref = &j->spec.target;
	json_int_t asked = j->spec.world_size;
	json_int_t there = ref->kind == REF_STATE_DICT ? (json_int_t)state_dict_world(j->server->state_dicts, ref->name) : 0;
	json_int_t source = j->source_use ? (json_int_t)j->source_use->world_size : 0;
	json_int_t other = j->other_use ? (json_int_t)j->other_use->world_size : 0;

	if (asked && there && asked != there)
		return err_at_pointer(ERR(WORLD_MISMATCH, "state dict \"%s\" has %jd ranks, not %jd", ref->name.p, (intmax_t)there,
					  (intmax_t)asked), "/target/world_size");
	bool shrinks = j->kind == JOB_REDISTRIBUTE;
	if (there && there < source && !shrinks)
		return err_at_pointer(ERR(WORLD_MISMATCH, "the source has %jd ranks, state dict \"%s\" only %jd", (intmax_t)source,
					  ref->name.p, (intmax_t)there), "/target");
	if (asked && asked < source && !shrinks)
		return err_at_pointer(ERR(WORLD_MISMATCH, "the source has %jd ranks, the target cannot have %jd: ranks of a mesh may be "
					  "listed, the others then hold nothing", (intmax_t)source, (intmax_t)asked), "/target/world_size");
	*world_out = larger(larger(source, other), larger(there, asked));
	return OK;
}

/* create makes what is not there, copy fills what is. */
static FALLIBLE enum err check_target(const struct job *j)
{
	const struct ref *ref = &j->spec.target;
	bool there = ref->kind == REF_STATE_DICT && state_dict_exists(j->server->state_dicts, ref->name);

	if (kind_is(j->kind, KIND_TARGET_NEW) && there)
		return err_at_pointer(ERR(STATE_DICT_EXISTS, "state dict \"%s\" exists", ref->name.p), "/target");
	if (kind_is(j->kind, KIND_TARGET_THERE) && !there)
		return err_at_pointer(ERR(NOT_FOUND, "there is no state dict \"%s\" to copy into: create makes one", ref->name.p),
				      "/target");
	return OK;
}

FALLIBLE enum err job_state_dict_op_check(const struct job *j)
{
	json_int_t world = 0, members;
	bool nccl = j->spec.backend == OP_BACKEND_NCCL;
	const char *missing = nccl || j->spec.device == RESULT_CUDA ? devices_missing(j->server->devices, nccl ? "nccl" : "cuda") : NULL;

	if (!job_state_dict_op_is(j))
		return OK;
	if (j->spec.delta && job_state_dict_op_network(j))
		return err_at_pointer(ERR(VALIDATION_FAILED, "a delta is made in shared memory"), "/backend");
	if (missing)
		return err_at_pointer(ERR(BACKEND_UNAVAILABLE, "%s", missing), nccl ? "/backend" : "/device");
	TRY(check_target(j));
	TRY(check_world(j, &world));
	TRY(check_list(&j->spec.group, "group", world, "the world"));
	members = (json_int_t)j->spec.group.n;
	members = members ? members : world;
	TRY(check_list(&j->spec.ranks_only, "ranks_only", members, "the group"));
	return j->spec.root < members ? OK : refuse("/root", j->spec.root, members, "the group");
}

/* ---- an attempt ---- */

json_t *job_state_dict_op_comm(const struct job *j, uint64_t group_id)
{
	unsigned char secret[SECRET_BYTES];
	char text[2 * SECRET_BYTES + 1];

	must(getrandom(secret, sizeof secret, 0) == (ssize_t)sizeof secret);
	sodium_bin2hex(text, sizeof text, secret, sizeof secret);
	return json_pack("{s:I, s:s, s:i}", "group_id", (json_int_t)(group_id & INT64_MAX), "secret", text, "deadline_ms",
			 (json_int_t)j->server->config->comm_deadline_ms);
}

void job_state_dict_op_note_result(struct job *j)
{
	if (job_spec_makes_next(j) && j->made_use && j->made_use->numbered)
		json_object_set_new(j->result, "generation", json_integer(j->made_use->generation));
}
