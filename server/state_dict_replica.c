/* state_dict_replica.c: see state_dict.h, "Replicas". The role of a replica, a column of its row, names the checkpoint that it copies,
 * so that a restart finds it again. Newer means a save with a later id: a training that goes back to an older step saves that one anew.
 *
 * One that a newer one replaces is spent: nobody sees it any more, and its segments wait for the next copy, because new pages cost as much
 * as the bytes that come into them. They count in the budget, and go for whatever needs memory (state_dict_space.c). */
#include "base/jval.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/runs.h"
#include "server/service_clock.h"
#include "server/state_dict_impl.h"

enum { SPENT_MS = 600000 };

static const char *text_of(const struct state_dict *sd, const char *key)
{
	return jval_text(json_object_get(sd->replica, "replica"), key);
}

static bool same(const struct state_dict *a, const struct state_dict *b, const char *key)
{
	return strcmp(text_of(a, key), text_of(b, key)) == 0;
}

/* Are both of one state dict, run and node? */
static bool is_sibling(const struct state_dict *a, const struct state_dict *b)
{
	return a != b && a->replica && b->replica && a->uid == b->uid && same(a, b, "node") && same(a, b, "state_dict") &&
	       same(a, b, "storage") && str_eq(run_of(text_of(a, "name")), run_of(text_of(b, "name")));
}

static bool is_older(const struct state_dict *a, const struct state_dict *b)
{
	return strcmp(text_of(a, "job"), text_of(b, "job")) < 0;
}

static void drop(struct state_dict *sd)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	journal_delete_state_dict(t, sd->name);
	journal_commit(sd->all->parts.journal, t, NULL, NULL);
	state_dict_emit(sd, "deleted", -1);
	state_dict_kill(sd);
}

/* ---- spent ones ---- */

static void on_spent(void *user, enum err e)
{
	struct state_dict *sd = user;

	if (!sd->dead && e) /* a restart would find it: its bytes stay what they are */
		state_dict_kill(sd);
	sd->spent = !e;
	err_clear();
	state_dict_unref(sd);
}

static void spend(struct state_dict *sd)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	sd->hidden = true;
	state_dict_memory_free(sd);
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		slot_move(state_dict_nth(sd, i), SLOT_FREEING);
		slot_move(state_dict_nth(sd, i), SLOT_FREE);
	}
	sd->replica_until_ms = clock_service_ms() + SPENT_MS;
	sd->refs++;
	journal_delete_state_dict(t, sd->name);
	journal_commit(sd->all->parts.journal, t, on_spent, sd);
	state_dict_emit(sd, "deleted", -1);
}

/* A spent one has no row, and is told of already. */
static void end(struct state_dict *sd)
{
	if (sd->spent)
		state_dict_kill(sd);
	else
		drop(sd);
}

/* Can its segments serve another one? */
static bool is_sealed(const struct state_dict *sd)
{
	for (uint32_t i = 0; i < state_dict_slots(sd); i++)
		if (state_dict_nth(sd, i)->state != SLOT_SEALED)
			return false;
	return true;
}

static struct state_dict *find_spent(const struct state_dicts *s, const struct state_dict *sibling)
{
	struct state_dict *sd;

	map_each(&s->table, sd)
		if (sd->spent && (!sibling || is_sibling(sd, sibling)))
			return sd;
	return NULL;
}

/* Takes the segments of a spent sibling that fit; the others go. Returns the bytes. */
static uint64_t adopt(struct state_dict *sd, const struct state_dict_use *use)
{
	struct state_dict *spent = find_spent(sd->all, sd);
	uint64_t sum = 0;

	for (uint32_t r = 0; spent && r < sd->world_size && r < spent->world_size; r++) {
		struct slot *to = state_dict_slot(sd, r, use->ranks[r].slot), *from = state_dict_slot(spent, r, 0);
		if (to->fd >= 0 || from->fd < 0 || !state_dict_slot_fits(from, use->ranks[r].bytes))
			continue;
		to->fd = from->fd;
		to->bytes = from->bytes;
		memcpy(to->segment, from->segment, sizeof to->segment);
		from->fd = -1;
		from->bytes = from->image_bytes = 0;
		from->segment[0] = '\0';
		sum += use->ranks[r].bytes;
	}
	if (spent)
		state_dict_kill(spent);
	return sum;
}

uint64_t state_dict_replica_bytes(const struct state_dicts *s)
{
	const struct state_dict *sd;
	uint64_t sum = 0;

	map_each(&s->table, sd) {
		sum += sd->spent ? 0 : sd->replica_bytes;
		for (uint32_t i = 0; sd->spent && i < state_dict_slots(sd); i++) /* some may be gone */
			sum += state_dict_nth(sd, i)->bytes;
	}
	return sum;
}

/* The oldest that makes room for this one; NULL: there is none. */
static struct state_dict *find_older(const struct state_dict *sd)
{
	struct state_dict *other, *oldest = NULL;

	map_each(&sd->all->table, other)
		if (is_sibling(sd, other) && !other->hidden && !other->uses && is_older(other, sd) && (!oldest || is_older(other, oldest)))
			oldest = other;
	return oldest;
}

FALLIBLE enum err state_dict_replica_admit(struct state_dict *sd, const json_t *role, const struct state_dict_use *use, uint64_t bytes,
					   uint64_t *adopted_out)
{
	uint64_t budget = sd->all->parts.config->neighbour_memory, used = 0;
	struct state_dict *older;

	if (!budget)
		return ERR(SHM_EXHAUSTED, "this node keeps no copies of its neighbours' checkpoints: it has no --neighbour-memory");
	sd->replica = json_deep_copy(role);
	NEED(sd->replica, "cannot make a replica");
	*adopted_out = adopt(sd, use);
	used = state_dict_replica_bytes(sd->all);
	while (bytes <= budget && used > budget - bytes && (older = find_spent(sd->all, NULL) ?: find_older(sd)) != NULL) {
		end(older);
		used = state_dict_replica_bytes(sd->all);
	}
	if (bytes > budget || used > budget - bytes)
		return ERR(SHM_EXHAUSTED, "%ju bytes are needed for a neighbour's checkpoint, %ju of --neighbour-memory's %ju are free",
			   (uintmax_t)bytes, (uintmax_t)(used < budget ? budget - used : 0), (uintmax_t)budget);
	sd->replica_bytes = bytes;
	return OK;
}

static bool is_replaced(const struct state_dict *sd)
{
	const struct state_dict *other;

	map_each(&sd->all->table, other)
		if (is_sibling(sd, other) && !other->hidden && is_older(sd, other))
			return true;
	return false;
}

/* The next one that is over; NULL: there is none. */
static struct state_dict *find_over(struct state_dicts *s, bool (*is_gone)(const void *user, const char *node), const void *user)
{
	int64_t now = clock_service_ms();
	struct state_dict *sd;

	map_each(&s->table, sd)
		if (sd->replica && (!sd->hidden || sd->spent) && !sd->uses &&
		    (sd->withdrawn || now >= sd->replica_until_ms || (!sd->spent && is_replaced(sd)) ||
		     (is_gone && is_gone(user, text_of(sd, "node")))))
			return sd;
	return NULL;
}

void state_dict_replicas_sweep(struct state_dicts *s, bool (*is_gone)(const void *user, const char *node), const void *user)
{
	struct state_dict *over;

	while ((over = find_over(s, is_gone, user)) != NULL)
		if (!over->spent && !over->withdrawn && is_replaced(over) && is_sealed(over))
			spend(over);
		else
			end(over);
}

bool state_dict_is_withdrawn(const char *save, const struct replica_withdrawal *w)
{
	int order = str_cmp(str_of(save), w->job);

	return w->is_exact ? order == 0 : order < 0;
}

void state_dict_replicas_withdraw(struct state_dicts *s, const struct replica_withdrawal *w)
{
	struct journal_txn *t = journal_txn_new(s->parts.journal);
	struct state_dict *sd;

	map_each(&s->table, sd) {
		if (!sd->replica || sd->withdrawn || !str_is(w->of.storage, text_of(sd, "storage")) ||
		    !str_is(w->of.name, text_of(sd, "name")) || !state_dict_is_withdrawn(text_of(sd, "job"), w))
			continue;
		sd->withdrawn = true;
		state_dict_memory_free(sd);
		journal_delete_state_dict(t, sd->name);
	}
	journal_commit(s->parts.journal, t, NULL, NULL);
	state_dict_replicas_sweep(s, NULL, NULL);
}

/* Loads of the checkpoint on this host find its bytes. */
static void recall(struct state_dict *sd)
{
	const struct ref self = { .name = str_of(sd->name), .generation = sd->last_generation };
	const struct state_dict_save save = { .job = text_of(sd, "job"), .hosts = text_of(sd, "hosts"), .checkpoint = {
		.storage = str_of(text_of(sd, "storage")), .name = str_of(text_of(sd, "name")) } };

	sd->replica_until_ms = clock_service_ms() + sd->all->parts.config->neighbour_keep_ms;
	state_dict_recall(sd->all, &self, &save);
}

void state_dict_replica_kept(struct state_dict *sd)
{
	if (!sd->withdrawn)
		recall(sd);
	state_dict_replicas_sweep(sd->all, NULL, NULL);
}

FALLIBLE enum err state_dict_replica_take(struct state_dict *sd, json_t *role)
{
	static const char *const keys[] = { "job", "storage", "name", "node", "state_dict" };

	sd->replica = role;
	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
		if (!text_of(sd, keys[i])[0])
			return ERR(JOURNAL, "the journal has a replica that cannot be");
	return OK;
}

void state_dict_replicas_recall(struct state_dicts *s)
{
	struct state_dict *sd;

	map_each(&s->table, sd) {
		for (uint32_t i = 0; sd->replica && i < state_dict_slots(sd); i++)
			sd->replica_bytes += state_dict_nth(sd, i)->bytes;
		if (sd->replica)
			recall(sd);
	}
}

/* ---- shown ---- */

bool state_dict_is_for_neighbour(const struct state_dicts *s, struct str name)
{
	const struct state_dict *sd = map_object(&s->table, name);

	return sd && sd->replica;
}

bool state_dict_is_replica(const struct state_dict *sd, const struct ref *of, bool of_run)
{
	struct str name = of_run ? ref_run(text_of(sd, "name")) : str_of(text_of(sd, "name"));

	return sd->replica && !sd->hidden && !sd->withdrawn && str_is(of->storage, text_of(sd, "storage")) && str_eq(of->name, name);
}

void state_dict_replica_put(const struct state_dict *sd, struct buf *out)
{
	if (!sd->replica)
		return;
	buf_json_member(out, ",\"replica\":{\"job\":", str_of(text_of(sd, "job")));
	buf_json_member(out, ",\"storage\":", str_of(text_of(sd, "storage")));
	buf_json_member(out, ",\"name\":", str_of(text_of(sd, "name")));
	buf_json_member(out, ",\"from\":", str_of(text_of(sd, "node")));
	buf_json_member(out, ",\"from_state_dict\":", str_of(text_of(sd, "state_dict")));
	buf_printf(out, ",\"part\":%s}", json_is_true(json_object_get(json_object_get(sd->replica, "replica"), "part")) ? "true" : "false");
}
