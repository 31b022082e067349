/* Seeded schedules of the protocol by which a job of a cluster changes its node (server/takeover.h). Two nodes, etcd and a shared folder
 * are modelled, and act in random order; nodes are paused, killed and cut off anywhere, etcd goes away, leases run out. The daemon's own
 * functions decide who may do what. A job is committed at most once, no node says that it succeeded if it is not committed, and once all
 * nodes are back it ends as succeeded. DCPD_SCHEDULES=N runs N schedules, DCPD_SEED=N begins elsewhere. */
#include "lib/t.h"

#include <stdlib.h>

#include "base/clock.h"
#include "server/takeover.h"

enum { NODES = 2, TTL = 30, STEPS = 400, SCHEDULES = 20000 };

/* Steps of a node with the job; a worker's acts on the storage are single steps, between which anything may happen. */
enum at { IDLE, RECOVERS, FENCES, RENAMES, LOOKS, STAGES, READS_FENCE, WRITES, GATE, COMMITS, NOTES_END, ENDED, GIVEN_UP };

struct node {
	enum at at;
	bool is_dead, is_cut, has_row, row_succeeded;   /* row: of its journal */
	int paused;                    /* turns that it sleeps for */
	int64_t token, renewed, attempt;
	bool fenced, takes;            /* takes: its first recovery raises the fence */
};

struct world {
	uint64_t seed;
	int64_t now, revision;
	int etcd_away;                 /* turns */
	int owner;                     /* in etcd */
	int64_t token, lease_end[NODES];
	bool record_ended;
	int64_t fence;                 /* the storage's */
	bool staged[NODES];            /* its staging lies there under its own name */
	int commits;
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

static void beat(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	if (!hears_etcd(w, n))
		return;
	n->renewed = w->now;
	w->lease_end[i] = w->now + TTL;
}

/* The node's daemon looks at etcd: takes over what another had, finds out what is its own. */
static void look(struct world *w, int i)
{
	struct node *n = &w->nodes[i];
	int other = w->owner;

	beat(w, i);
	if (!hears_etcd(w, n))
		return;
	if (n->has_row && n->at != GIVEN_UP) {
		const struct takeover_known known = { .in_live = w->owner == i && !w->record_ended, .has_record = true,
						      .record_is_own = w->owner == i };
		if (takeover_own(&known) == TAKEOVER_IS_GONE)
			n->fenced = true; /* its workers are ended; what they do until then, the storage fences */
		else if (n->token == 0 && known.in_live)
			n->token = w->token;
		return;
	}
	const struct takeover_offer offer = { .owner_is_away = other != i && w->lease_end[other] < w->now, .has_storages = true,
					      .takes_work = w->lease_end[i] >= w->now, .has_record = true };
	if (w->record_ended || !takeover_may_take(&offer))
		return;
	w->owner = i;
	w->token = ++w->revision;
	*n = (struct node){ .at = RECOVERS, .has_row = true, .token = w->token, .renewed = n->renewed, .attempt = n->attempt + 1,
			    .takes = true };
}

static void end(struct world *w, struct node *n, enum takeover_end how)
{
	(void)w;
	n->at = how == TAKEOVER_GIVEN_UP ? GIVEN_UP : how == TAKEOVER_SUCCEEDED ? NOTES_END : RECOVERS;
}

static bool is_fenced(const struct world *w, const struct node *n)
{
	return w->fence > n->token;
}

static void ask_storage(struct world *w, int i)
{
	struct node *n = &w->nodes[i];
	struct takeover_outcome o = { .failed = true, .fenced = n->fenced || is_fenced(w, n), .was_asked = true,
				      .committed = w->commits > 0 };

	if (!o.fenced && !o.committed) {
		n->at = STAGES;
		n->attempt++;
		return;
	}
	end(w, n, takeover_end(&o));
}

static void worker_step(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	switch (n->at) {
	case RECOVERS:
		n->at = n->takes ? FENCES : LOOKS;
		break;
	case FENCES:
		if (is_fenced(w, n)) {
			end(w, n, TAKEOVER_GIVEN_UP);
			break;
		}
		w->fence = n->token;
		n->at = RENAMES;
		break;
	case RENAMES:
		for (int k = 0; k < NODES; k++)
			w->staged[k] = w->staged[k] && k == i;
		n->at = LOOKS;
		break;
	case LOOKS:
		n->takes = false;
		ask_storage(w, i);
		break;
	case STAGES:
		w->staged[i] = true;
		n->at = READS_FENCE;
		break;
	case READS_FENCE:
		n->at = is_fenced(w, n) ? RECOVERS : WRITES;
		break;
	case WRITES:
		n->at = GATE;
		break;
	case COMMITS:
		if (w->staged[i])
			w->commits++; /* the rename; the target is not looked at: nothing else may keep it from being done twice */
		n->at = w->staged[i] ? NOTES_END : RECOVERS;
		w->staged[i] = false;
		break;
	default:
		break;
	}
}

/* Before a commit and before an end. */
static void gate(struct world *w, int i, enum at then)
{
	struct node *n = &w->nodes[i];
	enum takeover_gate g = takeover_gate(n->token, n->renewed, TTL, w->now);

	if (g == TAKEOVER_ASK)
		g = takeover_after(!hears_etcd(w, n) ? TAKEOVER_SILENT : w->owner == i && w->token == n->token ? TAKEOVER_OWN :
											   TAKEOVER_OTHERS);
	n->at = g == TAKEOVER_MOVED ? GIVEN_UP : then;
}

static void step(struct world *w, int i)
{
	struct node *n = &w->nodes[i];

	if (n->fenced && n->at != ENDED && n->at != GIVEN_UP && draw(w, 3) == 0) {
		n->at = GIVEN_UP;
		return;
	}
	if (n->at == GATE) {
		gate(w, i, COMMITS);
	} else if (n->at == NOTES_END) {
		gate(w, i, ENDED);
		n->row_succeeded = n->at == ENDED;
	} else if (n->at == ENDED) {
		if (hears_etcd(w, n) && w->owner != i)
			n->at = GIVEN_UP; /* its end gives way to the new owner's */
		else if (hears_etcd(w, n))
			w->record_ended = true;
	} else {
		worker_step(w, i);
	}
}

static void disturb(struct world *w)
{
	struct node *n = &w->nodes[draw(w, NODES)];

	switch (draw(w, 5)) {
	case 0:
		n->paused = (int)draw(w, 3 * TTL);
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
	default: /* started again: all workers of the killed daemon are gone */
		if (!n->is_dead)
			break;
		n->is_dead = n->fenced = false;
		if (n->has_row && n->at != ENDED && n->at != GIVEN_UP)
			n->at = RECOVERS;
		break;
	}
}

static void turn(struct world *w, bool calm)
{
	w->now++;
	w->etcd_away -= w->etcd_away > 0;
	if (!calm && draw(w, 12) == 0)
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

static void run(uint64_t seed)
{
	struct world w = { .seed = seed * 0x9e3779b97f4a7c15u | 1, .revision = 1, .token = 1, .lease_end = { TTL, TTL } };
	bool succeeded = false;

	w.nodes[0] = (struct node){ .at = STAGES, .has_row = true, .token = 1, .renewed = 1, .attempt = 1 };
	for (int k = 0; k < STEPS; k++) {
		turn(&w, false);
		if (w.commits > 1)
			print_error("seed %ju: committed twice\n", (uintmax_t)seed);
		assert_true(w.commits <= 1);
		for (int i = 0; i < NODES; i++)
			assert_true(!w.nodes[i].row_succeeded || w.commits == 1);
	}
	for (int i = 0; i < NODES; i++) {
		struct node *n = &w.nodes[i];
		if (n->is_dead && n->has_row && n->at != ENDED && n->at != GIVEN_UP)
			n->at = RECOVERS;
		n->is_cut = n->is_dead = n->fenced = false;
		n->paused = 0;
	}
	w.etcd_away = 0;
	for (int k = 0; k < 40 * STEPS && !w.record_ended; k++)
		turn(&w, true);
	for (int i = 0; i < NODES; i++)
		succeeded |= w.owner == i && w.nodes[i].row_succeeded;
	if (!succeeded || w.commits != 1)
		print_error("seed %ju: %d commits, owner %d\n", (uintmax_t)seed, w.commits, w.owner);
	assert_true(succeeded && w.commits == 1);
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_gate_asks_when_the_lease_may_be_over),
		cmocka_unit_test(nothing_is_committed_twice_and_nothing_is_lost),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
