/* Seeded schedules of the protocol by which a job of a cluster changes its node (server/takeover.h, worker/store/fence.h). Four daemons,
 * two of which have one name, etcd and a shared storage are modelled, and act in random order; daemons are stopped between any two acts,
 * for any time, killed and cut off, clocks run fast or slow, etcd goes away, leases run out, etcd's record is pruned, and the checkpoint
 * removed by others. The functions that decide are the daemon's own: takeover_*(), and fence_keeps_out() by the stagings' own names. Each
 * request to the storage or etcd is one act of the model; what a daemon sends beside them (frames between its processes, journal writes) is
 * not modelled.
 *
 * The storage is a file system (a staging is renamed away, the rename is the commit), or an object storage (a mark is set dead, the
 * conditional write is the commit: here nobody removes the checkpoint, for a write that was on its way before would make it anew).
 *
 * A job is committed at most once, no node says that it succeeded if it is not committed, no staging of a later owner is renamed, and once
 * all daemons are back it ends as succeeded. DCPD_SCHEDULES=N runs N schedules, DCPD_SEED=N begins elsewhere. */
#include "lib/t.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/takeover.h"
#include "store/fence.h"
#include "store/staging.h"

enum { NODES = 4, NAMES = 3, TTL = 30, STEPS = 300, SCHEDULES = 20000, STAGINGS = 24, FOR_EVER = 1 << 20 };

static const int name_of[NODES] = { 0, 0, 1, 2 };
static const char *const marks[NODES] = { "AAAAAA", "TTTTTT", "BBBBBB", "CCCCCC" };
#define JOB "01JOBAAAAAA"

/* Acts of a daemon with the job; those of a worker on the storage are single ones, between which anything may happen. */
enum at { IDLE, RECOVERS, FENCES, LOOKS_AT_FENCE, LISTS, RENAMES, LOOKS, STAGES, READS_FENCE, WRITES, GATE, READS_MARK, COMMITS, NOTES_END,
	  ENDED, GIVEN_UP };

struct node {
	enum at at;
	bool is_dead, is_cut, has_row, row_succeeded;   /* row: of its journal */
	int paused;                    /* turns that it sleeps for */
	int64_t token, renewed, fast;  /* fast: its clock gains or loses one in so many; 0: neither */
	uint32_t turn, raised, attempt;
	uint32_t seen;                 /* stagings of its list, by bit */
	int staging;                   /* index of its attempt's */
	bool gives_up, takes;          /* takes: its first recovery raises the fences */
};

struct staging_there {
	bool lies, is_away;            /* is_away: renamed, or its mark is dead */
	int node;
	uint32_t turn, attempt;
};

struct world {
	uint64_t seed;
	bool objects;                  /* an object storage */
	int64_t now, revision;
	int etcd_away;                 /* turns */
	/* etcd */
	bool in_live, has_record, record_ended;
	int owner, holder[NAMES];      /* owner: node; holder: which daemon has the name's lease */
	uint32_t turn;
	int64_t token, lease_end[NAMES];
	/* storage */
	uint32_t fences, staging_count;        /* fences: by bit, of turns */
	struct staging_there stagings[STAGINGS];
	bool target;
	int commits, stolen;           /* stolen: stagings of later owners that were renamed */
	struct node nodes[NODES];
};

static uint32_t draw(struct world *w, uint32_t n)
{
	w->seed ^= w->seed << 13;
	w->seed ^= w->seed >> 7;
	w->seed ^= w->seed << 17;
	return (uint32_t)(w->seed >> 33) % n;
}

static bool hears_etcd(const struct world *w, const struct node *n)
{
	return !n->is_cut && w->etcd_away == 0;
}

static int64_t clock_of(const struct world *w, const struct node *n)
{
	return w->now + (n->fast ? w->now / n->fast : 0);
}

/* ---- etcd ---- */

static bool is_member(const struct world *w, int i)
{
	return w->holder[name_of[i]] == i && w->lease_end[name_of[i]] >= w->now;
}

/* false: another daemon has the name. */
static bool beat(struct world *w, int i)
{
	int name = name_of[i];

	if (w->holder[name] != i && w->lease_end[name] >= w->now)
		return false;
	w->holder[name] = i;
	w->lease_end[name] = w->now + TTL;
	w->nodes[i].renewed = clock_of(w, &w->nodes[i]);
	return true;
}

/* Transactions that make it the next owner. */
static void become_owner(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	w->owner = i;
	w->turn++;
	w->token = ++w->revision;
	*n = (struct node){ .at = RECOVERS, .has_row = true, .token = w->token, .turn = w->turn, .renewed = n->renewed, .fast = n->fast,
			    .attempt = n->attempt + 1, .staging = -1, .takes = true };
}

static void settle(struct world *w, int i)
{
	struct node *n = &w->nodes[i];
	bool is_own = w->has_record && name_of[w->owner] == name_of[i];
	const struct takeover_known known = { .in_live = w->in_live && name_of[w->owner] == name_of[i], .has_record = w->has_record,
					      .record_is_own = is_own, .has_row = n->has_row, .is_moved = n->at == GIVEN_UP,
					      .was_known = n->token || n->turn,
					      .record_turn = w->has_record ? w->turn : 0, .row_turn = n->turn };

	if (!known.in_live && (!n->has_row || n->at == GIVEN_UP || n->at == ENDED))
		return;
	switch (takeover_own(&known)) {
	case TAKEOVER_GO_ON:
		n->token = w->token;
		break;
	case TAKEOVER_REGISTER:
		w->has_record = w->in_live = true;
		w->record_ended = false;
		w->owner = i;
		w->turn = n->turn;
		n->token = w->token = ++w->revision;
		break;
	case TAKEOVER_IS_GONE:
	case TAKEOVER_YIELD:
		n->gives_up = true; /* its workers are ended; what they do until then, the storage fences */
		break;
	case TAKEOVER_TAKE_UP:
		become_owner(w, i);
		break;
	case TAKEOVER_FORGET:
		w->in_live = false;
		w->record_ended = true;
		break;
	}
}

/* The daemon looks at etcd: finds out what is its own, takes over what another had. */
static void look(struct world *w, int i)
{
	if (!hears_etcd(w, &w->nodes[i]) || !beat(w, i))
		return;
	settle(w, i);
	const struct takeover_offer offer = { .owner_is_away = name_of[w->owner] != name_of[i] && w->lease_end[name_of[w->owner]] < w->now,
					      .has_storages = true, .takes_work = is_member(w, i), .has_record = w->has_record };
	if (w->in_live && takeover_may_take(&offer) && (!w->nodes[i].has_row || w->nodes[i].at == GIVEN_UP))
		become_owner(w, i);
}

/* ---- the storage ---- */

static struct store_job job_of(const struct node *n, int i)
{
	return (struct store_job){ .id = JOB, .mark = marks[i], .attempt = n->attempt, .turn = n->turn };
}

static bool is_fenced(const struct world *w, const struct node *n)
{
	return w->fences >> n->turn & 1;
}

static void end(struct node *n, enum takeover_end how)
{
	n->at = how == TAKEOVER_GIVEN_UP ? GIVEN_UP : how == TAKEOVER_SUCCEEDED ? NOTES_END : RECOVERS;
}

static void ask_storage(struct world *w, int i)
{
	struct node *n = &w->nodes[i];
	const struct takeover_outcome o = { .failed = true, .fenced = n->gives_up || is_fenced(w, n), .was_asked = true,
					    .committed = w->target };

	n->takes = false;
	if (!o.fenced && !o.committed) {
		n->at = STAGES;
		n->attempt++;
		return;
	}
	end(n, takeover_end(&o));
}

/* Stagings that the node would rename, by their names. */
static uint32_t list(const struct world *w, int i)
{
	const struct store_job by = job_of(&w->nodes[i], i);
	uint32_t seen = 0;
	char name[STAGING_NAME_MAX];

	for (uint32_t k = 0; k < w->staging_count; k++) {
		const struct staging_there *s = &w->stagings[k];
		const struct store_job made_by = { .id = JOB, .mark = marks[s->node], .attempt = s->attempt, .turn = s->turn };
		if (!s->lies || s->is_away)
			continue;
		staging_name(&made_by, name);
		if (fence_keeps_out(name, STR(JOB), &by))
			seen |= 1u << k;
	}
	return seen;
}

/* Node i begins a staging; earlier stagings of node i are removed. */
static void stage(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	for (uint32_t k = 0; k < w->staging_count; k++)
		w->stagings[k].lies &= w->stagings[k].node != i;
	n->staging = w->staging_count < STAGINGS ? (int)w->staging_count++ : STAGINGS - 1;
	w->stagings[n->staging] = (struct staging_there){ .lies = true, .node = i, .turn = n->turn, .attempt = n->attempt };
}

static void rename_one(struct world *w, struct node *n)
{
	int k = __builtin_ctz(n->seen);

	n->seen &= n->seen - 1;
	if (!w->stagings[k].lies)
		return;
	w->stagings[k].is_away = true;
	w->stolen += w->stagings[k].turn >= n->turn;
}

/* The rename, or the conditional write: nothing is there, and nothing else keeps it from being done twice. */
static void commit(struct world *w, struct node *n)
{
	struct staging_there *s = &w->stagings[n->staging];
	bool done = !w->target && s->lies && (w->objects || !s->is_away);

	n->at = done ? NOTES_END : RECOVERS;
	w->commits += done;
	w->target = w->target || done;
	s->lies = s->lies && !done;
}

static void worker_step(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	switch (n->at) {
	case RECOVERS:
		n->raised = 0;
		n->at = n->takes ? FENCES : LOOKS;
		break;
	case FENCES:
		if (n->raised < n->turn)
			w->fences |= 1u << n->raised++;
		n->at = n->raised < n->turn ? FENCES : LOOKS_AT_FENCE;
		break;
	case LOOKS_AT_FENCE:
		n->at = is_fenced(w, n) ? GIVEN_UP : LISTS;
		break;
	case LISTS:
		n->seen = list(w, i);
		n->at = RENAMES;
		break;
	case RENAMES:
		if (n->seen)
			rename_one(w, n);
		n->at = n->seen ? RENAMES : LOOKS;
		break;
	case LOOKS:
		ask_storage(w, i);
		break;
	case STAGES:
		stage(w, i);
		n->at = READS_FENCE;
		break;
	case READS_FENCE:
		n->at = is_fenced(w, n) ? RECOVERS : WRITES;
		break;
	case WRITES:
		n->at = GATE;
		break;
	case READS_MARK:
		n->at = !w->objects || !w->stagings[n->staging].is_away ? COMMITS : RECOVERS;
		break;
	case COMMITS:
		commit(w, n);
		break;
	default:
		break;
	}
}

/* ---- a daemon ---- */

/* Before a commit and before an end. */
static void gate(struct world *w, int i, enum at then)
{
	struct node *n = &w->nodes[i];
	enum takeover_gate g = takeover_gate(n->token, n->renewed, TTL, clock_of(w, n));

	if (g == TAKEOVER_ASK)
		g = takeover_after(!hears_etcd(w, n) ? TAKEOVER_SILENT : w->in_live && w->token == n->token ? TAKEOVER_OWN :
												       TAKEOVER_OTHERS);
	n->at = g == TAKEOVER_MOVED ? GIVEN_UP : then;
}

static void step(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	if (n->gives_up && n->at != ENDED && n->at != GIVEN_UP && draw(w, 3) == 0) {
		n->at = GIVEN_UP;
		return;
	}
	if (n->at == GATE) {
		gate(w, i, READS_MARK);
	} else if (n->at == NOTES_END) {
		gate(w, i, ENDED);
		n->row_succeeded = n->at == ENDED;
	} else if (n->at == ENDED) {
		if (hears_etcd(w, n) && is_member(w, i)) {
			bool own = !w->has_record || (w->owner == i && w->turn == n->turn);
			n->at = own ? ENDED : GIVEN_UP; /* its end gives way to the new owner's */
			w->record_ended |= own && w->has_record;
			w->in_live &= !own;
		}
	} else {
		worker_step(w, i);
	}
}

static void disturb(struct world *w)
{
	struct node *n = &w->nodes[draw(w, NODES)];

	switch (draw(w, 7)) {
	case 0:
		n->paused = draw(w, 4) ? (int)draw(w, 3 * TTL) : FOR_EVER;
		break;
	case 1:
		n->is_cut = !n->is_cut;
		break;
	case 2:
		w->etcd_away = w->etcd_away ? 0 : (int)draw(w, 2 * TTL);
		break;
	case 3: /* killed: what it did on the storage stays, and its journal */
		n->is_dead = true;
		break;
	case 4:
		w->has_record &= !w->record_ended; /* pruned */
		break;
	case 5: /* others, who have heard of the end */
		w->target &= !w->record_ended || w->objects;
		break;
	default: /* started again: all workers of the killed daemon are gone; or it goes on */
		n->paused = 0;
		if (!n->is_dead)
			break;
		n->is_dead = n->gives_up = false;
		if (n->has_row && n->at != ENDED && n->at != GIVEN_UP)
			n->at = RECOVERS;
		break;
	}
}

static void turn(struct world *w, bool calm)
{
	w->now++;
	w->etcd_away -= w->etcd_away > 0;
	if (!calm && draw(w, 10) == 0)
		disturb(w);
	int i = (int)draw(w, NODES);
	struct node *n = &w->nodes[i];
	if (n->is_dead || n->paused > 0) {
		n->paused -= n->paused > 0;
		return;
	}
	if (draw(w, 4) == 0)
		look(w, i);
	else if (n->has_row)
		step(w, i);
}

static void check(const struct world *w, uint64_t seed)
{
	bool bad = w->commits > 1 || w->stolen;

	for (int i = 0; i < NODES; i++)
		bad |= w->nodes[i].row_succeeded && w->commits == 0;
	if (bad)
		print_error("seed %ju: %d commits, %d stagings of later owners renamed\n", (uintmax_t)seed, w->commits, w->stolen);
	assert_false(bad);
}

/* Everybody is back, but the second daemon of one name, which cannot be. */
static void calm_down(struct world *w)
{
	for (int i = 0; i < NODES; i++) {
		struct node *n = &w->nodes[i];
		if (n->is_dead && n->has_row && n->at != ENDED && n->at != GIVEN_UP)
			n->at = RECOVERS;
		n->gives_up = n->gives_up && !n->is_dead;
		n->is_cut = false;
		n->is_dead = i == 1;
		n->paused = 0;
	}
	w->etcd_away = 0;
}

static void run(uint64_t seed)
{
	struct world w = { .seed = seed * 0x9e3779b97f4a7c15u | 1, .objects = seed & 1, .revision = 1, .token = 1, .in_live = true,
			   .has_record = true, .holder = { 0, 2, 3 }, .lease_end = { TTL, TTL, TTL } };

	w.nodes[0] = (struct node){ .at = STAGES, .has_row = true, .token = 1, .renewed = 1, .attempt = 1 };
	for (int i = 0; i < NODES; i++)
		w.nodes[i].fast = draw(&w, 3) * 8; /* an eighth is what a third of the lease is for */
	for (int k = 0; k < STEPS; k++) {
		turn(&w, false);
		check(&w, seed);
	}
	calm_down(&w);
	for (int k = 0; k < 60 * STEPS && !w.record_ended; k++)
		turn(&w, true);
	check(&w, seed);
	if (!w.record_ended || w.commits != 1)
		print_error("seed %ju: %d commits, owner %d, turn %u\n", (uintmax_t)seed, w.commits, w.owner, w.turn);
	assert_true(w.record_ended && w.commits == 1);
}

static void nothing_is_committed_twice_and_nothing_is_lost(void **)
{
	const char *count = getenv("DCPD_SCHEDULES"), *first = getenv("DCPD_SEED");
	uint64_t n = count ? strtoull(count, NULL, 10) : SCHEDULES, seed = first ? strtoull(first, NULL, 10) : 1;

	for (uint64_t i = 0; i < n; i++)
		run(seed + i);
}

static void the_gate_asks_when_the_lease_may_be_over(void **)
{
	assert_int_equal(takeover_gate(0, 0, 9000, 5), TAKEOVER_GO); /* nobody else knows the job */
	assert_int_equal(takeover_gate(7, 0, 9000, 5), TAKEOVER_ASK);
	assert_int_equal(takeover_gate(7, 1000, 9000, 6999), TAKEOVER_GO);
	assert_int_equal(takeover_gate(7, 1000, 9000, 7000), TAKEOVER_ASK);
	assert_int_equal(takeover_after(TAKEOVER_SILENT), TAKEOVER_GO);
	assert_int_equal(takeover_after(TAKEOVER_OTHERS), TAKEOVER_MOVED);
}

/* etcd has it as this node's, at a turn that the journal does not know: another daemon had the node's name. */
static void a_job_of_a_former_daemon_of_this_name_is_taken_up_as_the_next_owner(void **)
{
	struct takeover_known k = { .in_live = true, .has_record = true, .record_is_own = true };

	assert_int_equal(takeover_own(&k), TAKEOVER_TAKE_UP);
	k.has_row = true;
	assert_int_equal(takeover_own(&k), TAKEOVER_GO_ON);
	k.is_moved = true;
	assert_int_equal(takeover_own(&k), TAKEOVER_FORGET);
	k.record_turn = 1;
	assert_int_equal(takeover_own(&k), TAKEOVER_TAKE_UP);
	k.is_moved = false;
	assert_int_equal(takeover_own(&k), TAKEOVER_YIELD);
	k.in_live = k.record_is_own = false;
	assert_int_equal(takeover_own(&k), TAKEOVER_IS_GONE);
	k.record_is_own = true; /* … and has ended the job */
	assert_int_equal(takeover_own(&k), TAKEOVER_IS_GONE);
	k.row_turn = 1;
	assert_int_equal(takeover_own(&k), TAKEOVER_REGISTER);
	k.has_record = false;
	assert_int_equal(takeover_own(&k), TAKEOVER_REGISTER);
	k.was_known = true;
	assert_int_equal(takeover_own(&k), TAKEOVER_IS_GONE);
}

/* Clocks of nodes may be minutes apart: etcd's order counts, and a job that may have been there at the same time is not undone. */
static void a_job_that_was_there_before_is_told_from_a_later_one(void **)
{
	struct takeover_found f = { .id_is_later = true };

	assert_true(takeover_is_later(&f));
	f = (struct takeover_found){ .has_records = true, .other_ended = true, .own_made = 7, .other_changed = 6, .id_is_later = true };
	assert_false(takeover_is_later(&f));
	f.id_is_later = false;
	f.other_changed = 8;
	assert_true(takeover_is_later(&f));
	f.by_one_daemon = true;
	assert_false(takeover_is_later(&f));
	f = (struct takeover_found){ .has_records = true, .own_made = 7, .other_changed = 6 };
	assert_true(takeover_is_later(&f)); /* its end is not known: it may come behind this job's commit */
	f.has_records = false;
	assert_false(takeover_is_later(&f));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_gate_asks_when_the_lease_may_be_over),
		cmocka_unit_test(a_job_that_was_there_before_is_told_from_a_later_one),
		cmocka_unit_test(a_job_of_a_former_daemon_of_this_name_is_taken_up_as_the_next_owner),
		cmocka_unit_test(nothing_is_committed_twice_and_nothing_is_lost),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
