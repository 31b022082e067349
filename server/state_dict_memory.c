/* state_dict_memory.c: which checkpoints still lie in segments. A slot keeps its bytes when it is released, until it is handed out again or
 * its memory is needed; a load of the checkpoint that was saved from them copies them instead of reading the disk.
 *
 * Nothing is held for that. The coordinator only says which segments are worth a look: by the target's name and the id of the save, which
 * the checkpoint's manifest has too. Workers compare all that they copy with the manifest's digests, and read from the storage what is not
 * equal: a slot that was handed out meanwhile, or a segment that its owner spoiled or shrank, costs time and nothing else. After a restart
 * the newest saves of the journal say it. */
#include <stdio.h>

#include "base/mem.h"
#include "server/state_dict_impl.h"

static void forget(struct slot_memory *m)
{
	mem_free(m->storage);
	mem_free(m->name);
	*m = (struct slot_memory){ .generation = -1 };
}

void state_dict_memory_free(struct state_dict *sd)
{
	for (uint32_t i = 0; i < STATE_DICT_SLOTS_MAX; i++)
		forget(&sd->memory[i]);
}

/* The entry of the generation, else a free one, else the oldest. */
static struct slot_memory *entry_for(struct state_dict *sd, int64_t generation)
{
	struct slot_memory *best = &sd->memory[0];

	for (uint32_t i = 0; i < sd->slot_count; i++) {
		struct slot_memory *m = &sd->memory[i];
		if (m->storage && m->generation == generation)
			return m;
		if (best->storage && (!m->storage || m->generation < best->generation))
			best = m;
	}
	return best;
}

static void fill(struct slot_memory *m, int64_t generation, const struct state_dict_save *save)
{
	forget(m);
	m->generation = generation;
	snprintf(m->job, sizeof m->job, "%s", save->job);
	snprintf(m->hosts, sizeof m->hosts, "%s", save->hosts ? save->hosts : "");
	m->storage = mem_strdup(save->checkpoint.storage.p);
	m->name = mem_strdup(save->checkpoint.name.p);
	if (!m->storage || !m->name)
		forget(m);
}

void state_dict_memory_note(struct state_dict_use *use, const struct state_dict_save *save)
{
	fill(entry_for(use->owner, use->generation), use->generation, save);
}

void state_dict_recall(struct state_dicts *s, const struct ref *source, const struct state_dict_save *save)
{
	struct state_dict *sd = map_object(&s->table, source->name);
	struct slot_memory *m = sd && sd->slot_count ? entry_for(sd, source->generation) : NULL;

	if (m && !m->storage)
		fill(m, source->generation, save);
}

/* The rank's segment with the bytes of this generation, whether the slot is still held or not; NULL: they are gone. */
static const struct slot *find(const struct state_dict *sd, uint32_t rank, int64_t generation)
{
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		const struct slot *sl = state_dict_slot(sd, rank, k);
		bool whole = sl->state == SLOT_SEALED || sl->state == SLOT_LEAVING || sl->state == SLOT_FREEING || sl->state == SLOT_FREE;
		if (whole && sl->generation == generation && sl->fd >= 0 && sl->image_bytes && !sl->filling)
			return sl;
	}
	return NULL;
}

int64_t state_dict_memory_newest(const struct state_dict *sd)
{
	int64_t newest = -1;

	for (uint32_t i = 0; i < STATE_DICT_SLOTS_MAX; i++) {
		const struct slot_memory *m = &sd->memory[i];
		for (uint32_t r = 0; m->storage && m->generation > newest && r < sd->world_size; r++)
			if (find(sd, r, m->generation))
				newest = m->generation;
	}
	return newest;
}

static bool is_of(const struct slot_memory *m, const struct ref *checkpoint)
{
	return m->storage && str_is(checkpoint->storage, m->storage) && str_is(checkpoint->name, m->name);
}

static FALLIBLE enum err add(const struct state_dict *sd, const struct slot_memory *m, struct state_dict_memory *out)
{
	json_t *ranks = json_array();
	json_t *entry = json_pack("{s:s, s:i, s:I, s:o}", "job", m->job, "world_size", (int)sd->world_size, "generation",
				  (json_int_t)m->generation, "ranks", ranks);

	if (entry && m->hosts[0])
		(void)json_object_set_new(entry, "hosts", json_string(m->hosts));
	if (!entry || (!out->list && !(out->list = json_array())) || json_array_append_new(out->list, entry) != 0)
		return ERR(NO_MEMORY, "cannot describe segments");
	TRY(vec_reserve(&out->fds, sd->world_size));
	for (uint32_t r = 0; r < sd->world_size; r++) {
		const struct slot *sl = find(sd, r, m->generation);
		if (!sl)
			continue;
		if (json_array_append_new(ranks, json_pack("{s:i, s:I, s:s, s:I, s:I}", "rank", (int)r, "fd",
							   (json_int_t)(out->first_fd + out->fds.n), "segment", sl->segment, "bytes",
							   (json_int_t)sl->bytes, "image_bytes", (json_int_t)sl->image_bytes)) != 0)
			return ERR(NO_MEMORY, "cannot describe segments");
		out->fds.v[out->fds.n++] = sl->fd;
	}
	return OK;
}

enum err state_dict_memory_find(const struct state_dicts *s, const struct ref *checkpoint, struct state_dict_memory *out)
{
	const struct state_dict *sd;

	map_each(&s->table, sd) {
		if (sd->hidden)
			continue;
		for (uint32_t i = 0; i < STATE_DICT_SLOTS_MAX; i++)
			if (is_of(&sd->memory[i], checkpoint) && out->fds.n + sd->world_size <= STATE_DICT_WORLD_MAX)
				TRY(add(sd, &sd->memory[i], out));
	}
	return OK;
}

void state_dict_memory_drop(struct state_dict_memory *m)
{
	json_decref(m->list);
	m->list = NULL;
	vec_free(&m->fds);
}
