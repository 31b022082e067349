/* tcp_run.c: the loop of the tcp back end, and how it ends when something goes wrong.
 *
 * Who is to blame for silence? The member that one waits for may itself wait for another. So a member that waits says so to all, again
 * and again (STATE: in which call, and for whom). When the deadline is over, the chain of who waits for whom is followed to the member that
 * has said nothing for the longest time: that one is stopped, gone or elsewhere. STATE also finds members that wait for each other in
 * different calls.
 *
 * How do all get the same error? Each tells all others what it failed with, then listens for a moment to what they say, and takes the
 * most telling of all: what is said about a member's mistake before a loss, a loss before a timeout, a low rank before a high one. */
#include "comm/tcp_impl.h"


#include "base/num.h"

enum {
	MS = 1000000,
	QUIET_MS = 20,                 /* a call that is over sooner says nothing */
	SAY_MIN_MS = 25, SAY_MAX_MS = 250,
	AWAY_MS = 100,                 /* a turn is over sooner, but where this process is kept from running */
	SUSPECT_MS = 100,              /* a data link broke: link 0 has this long to explain */
	SETTLE_MS = 100,               /* callers are promised 200 */
};

void tcp_fail(struct tcp_mesh *m, enum err e)
{
	if (m->failed)
		return;
	m->failed = e;
	m->failure = *err_last();
	(void)event_base_loopbreak(m->base);
}

enum err tcp_at(struct tcp_mesh *m, enum err e, uint32_t peer)
{
	return comm_at(m->c, e, peer);
}

uint32_t tcp_member(const struct tcp_group *g, uint32_t peer)
{
	if (g->channel == 0)
		return peer < g->size ? peer : TCP_NOBODY;
	for (uint32_t i = 0; i < g->size; i++)
		if (g->peers[i] == peer)
			return i;
	return TCP_NOBODY;
}

/* ---- what others say ---- */

static int weight(enum err code)
{
	return code == ERR_PEER_TIMEOUT ? 2 : code == ERR_PEER_LOST ? 1 : 0;
}

static bool tells_more(const struct err_info *a, const struct err_info *b)
{
	if (weight(a->code) != weight(b->code))
		return weight(a->code) < weight(b->code);
	return a->rank != b->rank ? a->rank < b->rank : a->code < b->code;
}

static void consider(struct tcp_mesh *m, const struct err_info *f)
{
	if (!m->note.code || tells_more(f, &m->note))
		m->note = *f;
}

static void heard_abort(struct tcp_link *l)
{
	struct tcp_mesh *m = l->mesh;
	struct err_info f;
	enum err e = tcp_note_get(l->note, l->in.length, &f);

	if (e) {
		tcp_fail(m, tcp_at(m, e, l->peer));
		return;
	}
	m->peers[l->peer].noted = true;
	consider(m, &f);
	if (!m->failed) {
		err_restore(&f);
		tcp_fail(m, f.code);
	}
}

static void heard_state(struct tcp_link *l)
{
	struct tcp_mesh *m = l->mesh;
	struct tcp_peer *p = &m->peers[l->peer];

	if (l->in.stream >= m->size) {
		tcp_fail(m, tcp_at(m, ERR(COMM_PROTOCOL, "a member waits for member %ju of %u", (uintmax_t)l->in.stream, m->size),
				   l->peer));
		return;
	}
	p->heard_ns = comm_now_ns();
	p->waits_for = (uint32_t)l->in.stream;
	for (const struct tcp_group *g = m->groups; g; g = g->next) {
		const struct comm_call *ours = &g->recent[l->in.call.number % (sizeof g->recent / sizeof *g->recent)];
		uint32_t member = tcp_member(g, l->peer);
		if (g->channel == l->in.channel && member != TCP_NOBODY && ours->kind && ours->number == l->in.call.number &&
		    !comm_call_same(ours, &l->in.call))
			tcp_fail(m, comm_mismatch(g->c, member, &l->in.call));
	}
}

void tcp_heard(struct tcp_link *l)
{
	if (l->in.type == TCP_ABORT)
		heard_abort(l);
	else if (l->in.type == TCP_STATE)
		heard_state(l);
	else if (l->in.type == TCP_BYE)
		l->mesh->peers[l->peer].left = true;
}

/* ---- members that go ---- */

static void lost(struct tcp_mesh *m, uint32_t peer, int sys_errno)
{
	struct tcp_peer *p = &m->peers[peer];

	errno = sys_errno;
	if (p->left)
		tcp_fail(m, tcp_at(m, ERR(PEER_LOST, "a member of the group left before the others were done"), peer));
	else if (sys_errno)
		tcp_fail(m, tcp_at(m, ERR_SYS(PEER_LOST, "the connection to a member of the group broke"), peer));
	else
		tcp_fail(m, tcp_at(m, ERR(PEER_LOST, "a member of the group closed its connection"), peer));
}

static bool needs(const struct tcp_mesh *m, uint32_t peer)
{
	return m->op && m->op->needs(m->op, peer);
}

/* A member that said goodbye closes all its links; what it sent before may still be in one of them. */
static bool nothing_more(const struct tcp_mesh *m, uint32_t peer)
{
	for (uint32_t k = 1; k <= m->data_links; k++) {
		const struct tcp_link *l = &m->peers[peer].links[k];
		if (l->watch && !l->parked)
			return false;
	}
	return true;
}

void tcp_broken(struct tcp_link *l, int sys_errno)
{
	struct tcp_mesh *m = l->mesh;
	struct tcp_peer *p = &m->peers[l->peer];
	uint32_t index = l->index;

	tcp_link_close(l);
	if (index == 0) {
		p->gone = true;
		if (!p->left && !p->noted)
			lost(m, l->peer, sys_errno);
		return;
	}
	if (p->suspect_ns == 0)
		p->suspect_ns = comm_now_ns();
	if (p->left && needs(m, l->peer) && nothing_more(m, l->peer))
		lost(m, l->peer, 0);
}

/* now may be older than what is looked at: a link may break between the two. */
static bool suspect_long(const struct tcp_peer *p, uint64_t now)
{
	return !p->gone && !p->noted && now > p->suspect_ns && now - p->suspect_ns > (uint64_t)SUSPECT_MS * MS;
}

static void check_peers(struct tcp_mesh *m, uint64_t now)
{
	for (uint32_t i = 0; i < m->size && !m->failed; i++) {
		const struct tcp_peer *p = &m->peers[i];
		if (!p->suspect_ns)
			continue;
		/* We may have been away for so long: what it said may be here. */
		if (!p->left && suspect_long(p, now))
			tcp_link_drain(tcp_link_of(m, i, 0));
		if (!m->failed && (p->left ? needs(m, i) && nothing_more(m, i) : suspect_long(p, now)))
			lost(m, i, 0);
	}
}

/* ---- who waits for whom ---- */

static uint64_t say_ns(const struct tcp_mesh *m)
{
	uint64_t ms = num_max(SAY_MIN_MS, num_min(SAY_MAX_MS, m->c->spec.deadline_ms / 8));

	/* In large groups, all saying so to all is work. */
	return ms * MS * num_max(1, m->size / 64);
}

static uint32_t first_awaited(const struct tcp_mesh *m, uint32_t from)
{
	for (uint32_t i = from; i < m->size; i++)
		if (i != m->rank && m->op && m->op->awaits(m->op, i))
			return i;
	return TCP_NOBODY;
}

static void say(struct tcp_mesh *m, const struct tcp_head *h, uint64_t now)
{
	if (now - m->said_ns < say_ns(m))
		return;
	m->said_ns = now;
	for (uint32_t i = 0; i < m->size; i++)
		if (i != m->rank)
			tcp_link_tell(tcp_link_of(m, i, 0), h, NULL);
}

static void say_state(struct tcp_mesh *m, uint64_t now)
{
	uint32_t whom = first_awaited(m, 0);
	const struct tcp_head h = { .type = TCP_STATE, .channel = m->op->g->channel, .call = m->op->c->call, .stream = whom };

	if (whom != TCP_NOBODY && now - m->began_ns >= (uint64_t)QUIET_MS * MS)
		say(m, &h, now);
}

/* No call has the number 0, so this one is compared with none. For nobody in particular: for itself. */
void tcp_show(struct comm *c, uint32_t member)
{
	struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;
	const struct tcp_head h = { .type = TCP_STATE, .stream = member < m->size ? member : m->rank };

	if (!m->op && !m->failed)
		say(m, &h, comm_now_ns());
}

/* As long as this, who waits is silent at most. */
static uint64_t fresh_ns(const struct tcp_mesh *m)
{
	return say_ns(m) * 5 / 2 + (uint64_t)QUIET_MS * MS;
}

struct silent {
	uint64_t now, oldest;
	uint32_t peer;                 /* the one that has been silent the longest; TCP_NOBODY: none is */
};

/* All that a chain leads to are looked at, also behind a silent one: on a busy host a member that waits may be silent for a while, but
 * not for as long as the one that it waits for. Messages from before this deadline tell nothing. */
static void follow(const struct tcp_mesh *m, uint32_t at, struct silent *z)
{
	uint64_t patience = (uint64_t)m->c->spec.deadline_ms * MS;

	for (uint32_t steps = 0; at != m->rank && steps < m->size; steps++) {
		const struct tcp_peer *p = &m->peers[at];
		if (p->heard_ns + fresh_ns(m) <= z->now && (p->heard_ns < z->oldest || (p->heard_ns == z->oldest && at < z->peer))) {
			z->oldest = p->heard_ns;
			z->peer = at;
		}
		if (p->heard_ns == 0 || p->heard_ns + patience < z->now || p->waits_for == at)
			return;
		at = p->waits_for;
	}
}

uint32_t tcp_silent(struct comm *c, uint32_t member)
{
	const struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;
	struct silent z = { .now = comm_now_ns(), .oldest = UINT64_MAX, .peer = TCP_NOBODY };

	follow(m, member, &z);
	return z.peer;
}

/* Nobody silent: all wait, so the one that we wait for is too slow. */
static uint32_t find_late(const struct tcp_mesh *m)
{
	struct silent z = { .now = comm_now_ns(), .oldest = UINT64_MAX, .peer = TCP_NOBODY };

	for (uint32_t i = first_awaited(m, 0); i != TCP_NOBODY; i = first_awaited(m, i + 1))
		follow(m, i, &z);
	return z.peer != TCP_NOBODY ? z.peer : first_awaited(m, 0);
}

/* A member that was descheduled reads all messages of that time at once and cannot tell who has been silent since: it listens on. */
static bool listens_on(struct tcp_mesh *m)
{
	uint64_t now = comm_now_ns();

	m->late_ns = m->late_ns ? m->late_ns : now;
	return m->back_ns && now - m->back_ns < fresh_ns(m) && now - m->late_ns < 4 * fresh_ns(m);
}

static void give_up(struct tcp_mesh *m)
{
	uint32_t whom = find_late(m);

	if (whom == TCP_NOBODY)
		tcp_fail(m, ERR(PEER_TIMEOUT, "the deadline of %u ms is over", m->c->spec.deadline_ms));
	else
		tcp_fail(m, tcp_at(m, ERR(PEER_TIMEOUT, "a member of the group did not answer within %u ms", m->c->spec.deadline_ms),
				   whom));
}

/* ---- the loop ---- */

static FALLIBLE enum err failure(struct tcp_mesh *m)
{
	if (m->failed)
		err_restore(&m->failure);
	return m->failed;
}

static void begin(struct tcp_op *op, struct comm *c)
{
	struct tcp_group *g = c->impl;
	struct tcp_mesh *m = g->mesh;

	op->c = c;
	op->g = g;
	m->op = op;
	m->began_ns = m->turned_ns = comm_now_ns();
	m->back_ns = m->late_ns = 0;
	g->recent[c->call.number % (sizeof g->recent / sizeof *g->recent)] = c->call;
	for (uint32_t i = 0; i < g->size; i++) {
		if (g->peers[i] == m->rank)
			continue;
		for (uint32_t k = 1; k <= m->data_links; k++)
			tcp_link_resume(tcp_link_of(m, g->peers[i], k));
		for (uint32_t k = 1; k <= m->data_links; k++)
			tcp_link_kick(tcp_link_of(m, g->peers[i], k));
	}
	check_peers(m, m->began_ns);
}

static void turn(struct tcp_mesh *m, struct tcp_op *op, bool more)
{
	bool late = false;

	(void)event_base_loop(m->base, more ? EVLOOP_NONBLOCK : EVLOOP_ONCE);
	if (m->failed)
		return;
	uint64_t now = comm_now_ns();
	if (now - m->turned_ns > (uint64_t)AWAY_MS * MS)
		m->back_ns = now;
	m->turned_ns = now;
	enum err e = comm_wait(op->c, &late);
	if (e) {
		tcp_fail(m, e);
		return;
	}
	if (m->beaten) {
		m->beaten = false;
		check_peers(m, comm_now_ns());
		if (!m->failed)
			say_state(m, comm_now_ns());
	}
	if (late && !m->failed && !op->done(op) && !listens_on(m))
		give_up(m);
}

enum err tcp_run(struct tcp_op *op, struct comm *c)
{
	struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;

	TRY(failure(m));
	begin(op, c);
	while (!m->failed) {
		bool more = false;
		enum err e = op->idle ? op->idle(op, &more) : OK;
		if (e)
			tcp_fail(m, e);
		if (m->failed || op->done(op))
			break;
		turn(m, op, more);
	}
	m->op = NULL;
	return failure(m);
}

enum err tcp_poll(struct comm *c)
{
	struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;

	if (!m->failed)
		(void)event_base_loop(m->base, EVLOOP_NONBLOCK);
	if (!m->failed)
		check_peers(m, comm_now_ns());
	return failure(m);
}

/* ---- agreement ---- */

/* NULL: this member itself, or one that never came, or is over. */
static struct tcp_link *control(struct tcp_mesh *m, uint32_t peer)
{
	struct tcp_link *l = peer == m->rank || !m->peers[peer].links ? NULL : tcp_link_of(m, peer, 0);

	return l && l->watch ? l : NULL;
}

static bool all_heard(struct tcp_mesh *m)
{
	for (uint32_t i = 0; i < m->size; i++)
		if (control(m, i) && !m->peers[i].noted && !m->peers[i].left)
			return false;
	return true;
}

void tcp_abort(struct comm *c, struct err_info *f)
{
	struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;
	unsigned char note[TCP_NOTE_MAX];
	struct tcp_head h = { .type = TCP_ABORT };

	if (m->noted) {
		*f = m->note;
		return;
	}
	m->noted = true;
	consider(m, f);
	err_restore(&m->note);
	tcp_fail(m, m->note.code);
	h.length = tcp_note_put(&m->note, note);
	for (uint32_t i = 0; i < m->size; i++)
		if (control(m, i))
			tcp_link_tell(control(m, i), &h, note);
	for (uint64_t end = comm_now_ns() + (uint64_t)SETTLE_MS * MS; !all_heard(m) && comm_now_ns() < end;)
		(void)event_base_loop(m->base, EVLOOP_ONCE);
	*f = m->note;
}
