/* state_dict_owner.c: whose segments are whose.
 *
 * Several daemons of one user may run on a host, and a daemon that is down wants its segments back at its next start. So a segment's
 * name says which state directory and which journal the segment belongs to, and a daemon leaves all others alone. Locks say only whether
 * a segment is in use just now: a live daemon holds one on each of its own.
 *
 *   state directory and journal match   a row names the segment: taken up. No row does: a crash came before the row; removed
 *   only one of the two matches         the journal was deleted, or the state directory moved, so no other daemon will ask for the segment:
 *                                       a rank of a state dict "orphaned-…", counted and listed until somebody deletes that
 *   neither matches                     another daemon's
 *
 * An extended attribute would not do: tmpfs has user.* since Linux 6.6 only, and a segment would be there before its mark. A registry
 * beside the segments could be lost by itself. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/log.h"
#include "base/map.h"
#include "base/vec.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/state_dict_impl.h"

struct found {
	int fd;
	uint64_t bytes, journal;
	char name[SEG_NAME_MAX];
};

struct sweep {
	const struct seg_owner *owner;
	struct map known;               /* names that rows have */
	struct vec(struct found) orphans;
	unsigned removed;
	enum err e;
};

FALLIBLE enum err state_dict_owner_new(struct state_dicts *s)
{
	char path[PATH_MAX];

	if (!realpath(s->parts.config->state_dir, path))
		return ERR_SYS(CONFIG, "cannot resolve %s", s->parts.config->state_dir);
	s->owner = (struct seg_owner){ .place = journal_digest(str_of(path)) & SEG_OWNER_BITS,
						    .journal = journal_id(s->parts.journal) & SEG_OWNER_BITS };
	return OK;
}

void state_dict_owner_hold(int fd)
{
	(void)flock(fd, LOCK_SH | LOCK_NB);
}

static bool in_use(int fd)
{
	return flock(fd, LOCK_EX | LOCK_NB) != 0;
}

/* Of a state directory that was moved or copied: moved, if nobody uses its segments. A worker of the daemon before may hold a lock for a
 * moment longer than that daemon, so in the same place a lock says nothing. */
FALLIBLE enum err state_dict_owner_take(struct state_dicts *s, const char *segment, int fd)
{
	struct seg_owner owner;
	bool is_here = seg_owner_of(segment, &owner) && owner.place == s->owner.place;

	if (!is_here && in_use(fd))
		return ERR(STATE_CONFLICT, "segment %s is in use by the daemon of another state directory; is %s a copy?", segment,
			   s->parts.config->state_dir);
	state_dict_owner_hold(fd);
	return OK;
}

/* ---- at start ---- */

static void sweep_one(void *user, const char *name, uint64_t bytes)
{
	struct sweep *sw = user;
	struct seg_owner owner;
	struct found *f;
	int fd;

	if (map_get(&sw->known, str_of(name)) != MAP_NONE || !seg_owner_of(name, &owner))
		return;
	bool same_place = owner.place == sw->owner->place, same_journal = owner.journal == sw->owner->journal;
	if ((!same_place && !same_journal) || seg_open(name, bytes, &fd) != OK)
		return;
	if (in_use(fd)) {
		close(fd);
	} else if (same_place && same_journal) {
		sw->removed += seg_unlink(name) == OK;
		close(fd);
	} else if (vec_push(&sw->orphans, &f) == OK) {
		*f = (struct found){ .fd = fd, .bytes = bytes, .journal = owner.journal };
		snprintf(f->name, sizeof f->name, "%s", name);
		state_dict_owner_hold(fd);
	} else {
		sw->e = ERR_NO_MEMORY;
		close(fd);
	}
}

static FALLIBLE enum err list_known(struct state_dicts *s, struct map *known)
{
	const struct state_dict *sd;

	map_each(&s->table, sd) {
		for (uint32_t i = 0; i < state_dict_slots(sd); i++)
			if (state_dict_nth(sd, i)->fd >= 0)
				TRY(map_put(known, str_of(state_dict_nth(sd, i)->segment), 1));
	}
	return OK;
}

/* One state dict of these segments, a rank each, which nobody has sealed and no lease ends. Their descriptors are its own from then on. */
static FALLIBLE enum err adopt(struct state_dicts *s, const struct found *f, uint32_t n)
{
	char name[64], segments[16], bytes[24];
	struct state_dict *sd;
	uint64_t sum = 0;

	snprintf(name, sizeof name, "orphaned-%012jx", (uintmax_t)f->journal);
	for (int i = 2; state_dict_exists(s, str_of(name)); i++)
		snprintf(name, sizeof name, "orphaned-%012jx-%d", (uintmax_t)f->journal, i);
	TRY(state_dict_alloc(s, str_of(name), n, 1, geteuid(), &sd));
	sd->orphaned_ms = clock_wall_ms();
	struct journal_txn *t = journal_txn_new(s->parts.journal);
	state_dict_row(t, sd);
	for (uint32_t r = 0; r < n; r++) {
		struct slot *sl = state_dict_slot(sd, r, 0);
		*sl = (struct slot){ .fd = f[r].fd, .bytes = f[r].bytes, .rank = r, .made = true };
		slot_take_up(sl, SLOT_OPEN);
		memcpy(sl->segment, f[r].name, sizeof sl->segment);
		state_dict_slot_row(t, sd, sl, SLOT_OPEN);
		sum += f[r].bytes;
	}
	journal_commit(s->parts.journal, t, NULL, NULL);
	s->used_bytes += sum;
	snprintf(segments, sizeof segments, "%u", n);
	snprintf(bytes, sizeof bytes, "%ju", (uintmax_t)sum);
	log_warn("segments of a deleted journal are kept until this state dict is removed", "state_dict", name, "segments", segments,
		 "bytes", bytes, NULL);
	return OK;
}

static int by_journal(const void *a, const void *b)
{
	const struct found *x = a, *y = b;

	return x->journal != y->journal ? (x->journal > y->journal) - (x->journal < y->journal) : strcmp(x->name, y->name);
}

/* Segments that find no place stay where they are, for the next start. */
static void adopt_all(struct state_dicts *s, struct sweep *sw)
{
	uint64_t n = sw->orphans.n, end;
	struct found *f = sw->orphans.v;

	if (n)
		qsort(f, n, sizeof *f, by_journal);
	for (uint64_t at = 0; at < n; at = end) {
		for (end = at + 1; end < n && f[end].journal == f[at].journal && end - at < STATE_DICT_WORLD_MAX;)
			end++;
		if (adopt(s, f + at, (uint32_t)(end - at)) == OK)
			continue;
		log_err("segments of a deleted journal cannot be taken up", "segment", f[at].name, NULL);
		for (uint64_t i = at; i < end; i++)
			close(f[i].fd);
	}
}

FALLIBLE enum err state_dict_owner_sweep(struct state_dicts *s)
{
	struct sweep sw = { .owner = &s->owner };
	enum err e = list_known(s, &sw.known);
	char text[16];

	e = e ?: seg_list(sweep_one, &sw);
	snprintf(text, sizeof text, "%u", sw.removed);
	if (sw.removed)
		log_warn("left-over segments removed", "count", text, NULL);
	adopt_all(s, &sw);
	map_free(&sw.known);
	vec_free(&sw.orphans);
	return e ? e : sw.e;
}
