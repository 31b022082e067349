/* job_body.c: what the workers of an attempt are told: the request, and the segments that it reads and fills, with their descriptors. */
#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "server/job_impl.h"
#include "server/parts.h"

static FALLIBLE enum err add_use(json_t *dicts, const struct state_dict_use *u, int *fds, uint32_t *fd_count)
{
	json_t *ranks = json_array();

	for (uint32_t r = 0; r < u->world_size; r++) {
		const struct state_dict_rank_use *k = &u->ranks[r];
		json_t *one = json_pack("{s:i, s:i, s:s, s:I, s:I}", "rank", (int)r, "fd", (int)*fd_count, "segment", k->segment,
					"bytes", (json_int_t)k->bytes, "image_bytes", (json_int_t)k->image_bytes);
		json_t *ring = k->ring.bytes ? json_pack("{s:I, s:I}", "offset", (json_int_t)k->ring.offset, "bytes",
							 (json_int_t)k->ring.bytes) : NULL;
		if ((k->filling && json_object_set_new(one, "filling", json_true()) != 0) ||
		    (k->ring.bytes && json_object_set_new(one, "ring", ring) != 0) || json_array_append_new(ranks, one) != 0) {
			json_decref(ranks);
			return ERR(NO_MEMORY, "cannot describe a job");
		}
		fds[(*fd_count)++] = k->fd;
	}
	json_t *one = json_pack("{s:i, s:I, s:o}", "world_size", (int)u->world_size, "generation", (json_int_t)u->generation, "ranks",
				ranks);
	char key[STATE_DICT_NAME_MAX + 32];
	bool again = json_object_get(dicts, u->name) != NULL; /* another generation of it */
	snprintf(key, sizeof key, again ? "%s:%ju" : "%s", u->name, (uintmax_t)u->generation);
	if (!one || json_object_set_new(dicts, key, one) != 0)
		return ERR(NO_MEMORY, "cannot describe a job");
	return OK;
}

/* Of a load: the segments that its checkpoint may still lie in. */
static FALLIBLE enum err find_memory(struct job *j, struct state_dict_memory *out)
{
	bool reads = j->kind == JOB_LOAD && !j->dry_run && j->spec.source.kind == REF_CHECKPOINT;

	return reads ? state_dict_memory_find(j->server->state_dicts, &j->spec.source, out) : OK;
}

/* Adds them to the document and its descriptors. */
static FALLIBLE enum err add_memory(const struct state_dict_memory *m, json_t *body, int *fds, uint32_t *fd_count)
{
	if (!m->list)
		return OK;
	if (json_object_set(body, "memory", m->list) != 0)
		return ERR(NO_MEMORY, "cannot describe a job");
	memcpy(fds + *fd_count, m->fds.v, m->fds.n * sizeof *fds);
	*fd_count += (uint32_t)m->fds.n;
	return OK;
}

json_int_t job_turn(const struct job *j)
{
	return (json_int_t)json_array_size(j->taken);
}

/* The same of segments of other nodes, which workers read as they read a checkpoint's files. */
static FALLIBLE enum err add_copies(const struct job *j, json_t *body)
{
	struct principal who = job_owner(j);
	json_t *list = json_object_get(body, "memory");
	char name[STATE_DICT_NAME_MAX + 64];
	const json_t *one;
	size_t i;

	if (!list && json_array_size(j->copies) && json_object_set_new(body, "memory", list = json_array()) != 0)
		return ERR(NO_MEMORY, "cannot describe a job");
	json_array_foreach(j->copies, i, one) {
		if (job_copy_is_own(j, one))
			continue;
		if (j->server->hooks->is_away(j->server, jval_text(one, "node")))
			continue;
		snprintf(name, sizeof name, "%u%s/%s/%jd+copy", (unsigned)who.uid, who.admin ? "a" : "", jval_text(one, "state_dict"),
			 (intmax_t)jval_int(one, "generation"));
		if (json_array_append_new(list, json_pack("{s:s+, s:s}", "storage", "@", jval_text(one, "node"), "name", name)) != 0)
			return ERR(NO_MEMORY, "cannot describe a job");
	}
	return OK;
}

/* For the fence of its storage (worker/store/fence.h). */
static FALLIBLE enum err add_owner(const struct job *j, json_t *doc)
{
	char mark[JOB_MARK_LEN + 1];

	job_id_mark(j->server->journal, mark);
	json_t *owner = json_pack("{s:s, s:I}", "mark", mark, "turn", job_turn(j));
	return json_object_set_new(doc, "owner", owner) == 0 ? OK : ERR(NO_MEMORY, "cannot describe a job");
}

static FALLIBLE enum err add_spread(struct job *j, json_t *body)
{
	json_t *doc = NULL;

	TRY(j->server->hooks->spread_start(j, &doc));
	return !doc || json_object_set_new(body, "spread", doc) == 0 ? OK : ERR(NO_MEMORY, "cannot describe a job");
}

enum err job_body(struct job *j, uint64_t group_id, json_t **body_out, int **fds_out, uint32_t *fd_count_out)
{
	const struct state_dict_use *const uses[] = { j->source_use, j->other_use, j->target_use };
	CLEANUP(state_dict_memory_drop) struct state_dict_memory memory = { 0 };
	uint32_t most = 0, n = 0;

	for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++)
		most += uses[i] ? uses[i]->world_size : 0;
	for (uint32_t i = 0; i < j->part_count; i++)
		most += j->part_uses[i] ? j->part_uses[i]->world_size : 0;
	memory.first_fd = most;
	TRY(find_memory(j, &memory));
	int *fds = mem_zalloc(most + memory.fds.n, sizeof *fds);
	json_t *dicts = json_object();
	enum err e = fds && dicts ? OK : ERR(NO_MEMORY, "cannot describe a job");

	for (size_t i = 0; !e && i < sizeof uses / sizeof uses[0]; i++)
		if (uses[i])
			e = add_use(dicts, uses[i], fds, &n);
	for (uint32_t i = 0; !e && i < j->part_count; i++)
		e = add_use(dicts, j->part_uses[i], fds, &n);
	struct principal who = job_owner(j);
	json_t *body = e ? NULL : json_pack("{s:s, s:i, s:s, s:b, s:I, s:b, s:O, s:O}", "job", j->id, "attempt", j->attempt, "kind",
					    kind_of(j->kind)->name, "dry_run", j->dry_run, "uid", (json_int_t)who.uid, "admin", who.admin,
					    "spec", j->request, "state_dicts", dicts);
	json_decref(dicts);
	if (!e && (!body || (job_state_dict_op_is(j) && json_object_set_new(body, "comm", job_state_dict_op_comm(j, group_id)) != 0)))
		e = ERR(NO_MEMORY, "cannot describe a job");
	if (!e)
		e = add_memory(&memory, body, fds, &n);
	if (!e)
		e = add_copies(j, body);
	if (!e && j->shared)
		e = add_owner(j, body);
	if (!e)
		e = add_spread(j, body);
	if (e) {
		json_decref(body);
		mem_free(fds);
		return e;
	}
	*body_out = body;
	*fds_out = fds;
	*fd_count_out = n;
	return OK;
}
