/* job_lane.c: lanes: the queues of jobs. job_queue.c starts what is first.
 *
 * A lane runs one job at a time, in order; it is named by what kind of work it is and which storages it touches. So a save waits
 * for saves to the same storage only, never for a long reshard, and a storage that hangs holds up its own lane.
 *
 * The parts of a planned save (worker/runner/hosts.h) have PART_LANES lanes of their own. In a single lane the disk rests while one part
 * syncs its files and the next one begins. More lanes would run a gang for each of them, whose workers share the same processors. */
#include <stdio.h>

#include "base/mem.h"
#include "server/job_impl.h"
#include "server/parts.h"

enum { PART_LANES = 2 };

/* Returns the lane of that key, NULL if there is none. */
static struct lane *find(struct jobs *all, const char *key)
{
	struct lane *l = all->lanes;

	while (l && strcmp(l->key, key) != 0)
		l = l->next;
	return l;
}

static uint32_t length(const struct lane *l)
{
	uint32_t n = l && l->running;

	for (const struct job *j = l ? l->first : NULL; j; j = j->lane_next)
		n++;
	return n;
}

/* Appends the number of the part lane with the fewest jobs to the key, n bytes so far. */
static void choose_part_lane(struct jobs *all, char key[JOB_LANE_MAX], size_t n)
{
	uint32_t best = 0, fewest = UINT32_MAX;

	for (uint32_t i = 0; i < PART_LANES && fewest; i++) {
		snprintf(key + n, JOB_LANE_MAX - n, "#%u", i);
		uint32_t here = length(find(all, key));
		if (here < fewest) {
			best = i;
			fewest = here;
		}
	}
	snprintf(key + n, JOB_LANE_MAX - n, "#%u", best);
}

FALLIBLE enum err job_lane_of(struct job *j, struct lane **out)
{
	struct jobs *all = j->server->jobs;
	char key[JOB_LANE_MAX];
	size_t n = (size_t)snprintf(key, sizeof key, "%s:", j->dry_run ? "plan" : kind_of(j->kind)->lane);

	for (uint32_t i = 0; i < j->storage_count && n < sizeof key; i++)
		n += (size_t)snprintf(key + n, sizeof key - n, "%s,", j->storages[i]);
	/* Saves by several hosts wait for each other's parts: those of two trainings in one lane could wait for ever. */
	if (j->spec.source.kind == REF_STATE_DICT && j->spec.hosts.count && n < sizeof key)
		snprintf(key + n, sizeof key - n, "@%s", j->spec.source.name.p);
	if (j->spec.hosts.part && !j->dry_run && n < sizeof key)
		choose_part_lane(all, key, n);
	*out = find(all, key);
	if (*out)
		return OK;
	struct lane *l = mem_zalloc(1, sizeof *l);
	NEED(l, "cannot make a lane");
	memcpy(l->key, key, sizeof key);
	l->server = j->server;
	l->last = &l->first;
	l->next = all->lanes;
	all->lanes = l;
	*out = l;
	return OK;
}

void job_lanes_free(struct jobs *all)
{
	for (struct lane *l = all->lanes, *next; l; l = next) {
		next = l->next;
		loop_timer_stop(&l->timer);
		mem_free(l);
	}
}

static bool waits(const struct job *j)
{
	return j->lane && j->step == STEP_WAITING && j->lane->running != j;
}

uint64_t job_lane_moves(const struct job *j)
{
	return waits(j) ? j->lane->moves : 0;
}

void job_lane_put(const struct job *j, struct buf *out)
{
	uint32_t ahead = 0;

	if (!waits(j))
		return;
	const struct job *next = j->lane->running ? j->lane->running : j->lane->first;
	for (const struct job *other = j->lane->first; other && other != j; other = other->lane_next)
		ahead++;
	ahead += j->lane->running != NULL;
	if (ahead == 0)
		return;
	buf_printf(out, ",\"waits_for\":{\"job\":\"%s\",\"kind\":\"%s\"", next->id, kind_of(next->kind)->name);
	if (next->target && next->target[0]) {
		buf_json_member(out, ",\"target\":", str_of(next->target));
	}
	buf_printf(out, ",\"ahead\":%u}", ahead);
}

void job_lane_take_out(struct job *j)
{
	struct lane *l = j->lane;

	l->moves++;
	for (struct job **at = &l->first; *at; at = &(*at)->lane_next)
		if (*at == j) {
			*at = j->lane_next;
			if (!*at)
				l->last = at;
			j->lane_next = NULL;
			j->lane = NULL;
			return;
		}
}
