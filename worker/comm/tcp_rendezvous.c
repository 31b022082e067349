/* tcp_rendezvous.c: the members of a group find each other and connect, each to all members of a lower rank.
 *
 * The port is open to anybody, so a connection is nobody's until it has proved that it knows the group's secret: both sides send a
 * nonce and a MAC over all that was said. A connection that does not greet properly and soon is dropped without a word; strangers can
 * neither fail the group nor fill its tables, since the oldest of those that have proved nothing makes room. The port is closed as soon as
 * all members are there. */
#include "comm/tcp_impl.h"

#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/list.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"

enum {
	MS = 1000000,
	STRANGERS_MAX = 256,           /* connections that have proved nothing, beyond those that are awaited */
	ACCEPT_TURN = 64,
	GREET_MS = 2000,               /* for one greeting */
	RETRY_MS = 20,
	CONNECTIONS_ACROSS = 2,        /* between hosts a flow is often bound to one path or queue */
	MANY_MEMBERS = 32,             /* each has so many connections that more of them do not pay */
};

enum stage { CONNECT, AWAIT_CHALLENGE, AWAIT_WELCOME, AWAIT_HELLO, AWAIT_PROOF };

struct rendezvous;

/* A connection that is being greeted. */
struct guest {
	struct rendezvous *in;
	struct guest *next, *prev;
	struct watch *watch;
	enum stage stage;
	uint64_t until_ns;
	uint32_t peer, link;           /* known, or claimed */
	struct tcp_greeting greeting;
	unsigned char got[TCP_CHALLENGE_BYTES];
	uint32_t have, want;
};

/* A link that this member makes. */
struct call {
	uint32_t peer, link;
	uint64_t again_ns;
	bool busy, done;
	int refused;                   /* errno of the latest attempt */
	bool liar;                     /* who answered does not know the secret */
};

struct rendezvous {
	struct tcp_mesh *m;
	const struct comm_spec *spec;
	struct watch *listener;
	struct tcp_card *cards;
	struct call *calls;
	uint32_t call_count, guest_count, guests_max;
	struct guest *first, *last;    /* oldest first */
};

/* ---- guests ---- */

static void dismiss(struct guest *g)
{
	struct rendezvous *t = g->in;

	*(g->prev ? &g->prev->next : &t->first) = g->next;
	*(g->next ? &g->next->prev : &t->last) = g->prev;
	t->guest_count--;
	watch_free(&g->watch);
	mem_free(g);
}

static struct call *call_of(struct rendezvous *t, const struct guest *g)
{
	return &t->calls[(size_t)g->peer * (1 + t->m->data_links) + g->link];
}

/* A call that did not work is made again until the deadline: the other side may have had no room for us. */
static void give_up_guest(struct guest *g, int why)
{
	if (g->stage <= AWAIT_WELCOME) {
		struct call *c = call_of(g->in, g);
		c->busy = false;
		c->refused = why;
		c->again_ns = comm_now_ns() + (uint64_t)RETRY_MS * MS;
	}
	dismiss(g);
}

static bool say(struct guest *g, const void *p, size_t n)
{
	/* It fits into an empty socket, or the peer is not worth waiting for. */
	return send(watch_fd(g->watch), p, n, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)n;
}

static void mark_here(struct tcp_mesh *m, uint32_t peer)
{
	bool all = true;

	for (uint32_t k = 0; k <= m->data_links; k++)
		all = all && tcp_link_of(m, peer, k)->watch;
	m->peers[peer].here = m->peers[peer].here || all;
}

/* The greeting is over: the connection becomes a link. */
static void welcome(struct guest *g)
{
	struct tcp_mesh *m = g->in->m;
	int fd = watch_take(&g->watch);
	uint32_t peer = g->peer, link = g->link;

	if (g->stage == AWAIT_WELCOME)
		call_of(g->in, g)->done = true;
	dismiss(g);
	tcp_tune(fd, m->c->spec.deadline_ms);
	enum err e = tcp_link_open(m, peer, link, fd);
	if (e)
		tcp_fail(m, e);
	else
		mark_here(m, peer);
}

static void await(struct guest *g, enum stage stage, uint32_t bytes)
{
	g->stage = stage;
	g->want = bytes;
	g->have = 0;
}

/* ---- the side that listens ---- */

static bool hello_ok(struct guest *g, struct tcp_hello *h)
{
	struct tcp_mesh *m = g->in->m;

	if (tcp_hello_get(&m->id, g->got, h))
		return false;
	if (h->rank <= m->rank || h->rank >= m->size || h->link > m->data_links)
		return false;
	return !tcp_link_of(m, h->rank, h->link)->watch && !m->peers[h->rank].here;
}

static bool on_hello(struct guest *g)
{
	unsigned char answer[TCP_CHALLENGE_BYTES];
	struct tcp_hello h;

	if (!hello_ok(g, &h) || getrandom(g->greeting.nonce, TCP_NONCE_BYTES, 0) != TCP_NONCE_BYTES)
		return false;
	g->peer = h.rank;
	g->link = h.link;
	memcpy(g->greeting.hello, g->got, TCP_HELLO_BYTES);
	g->greeting.listener = g->in->m->rank;
	memcpy(answer, g->greeting.nonce, TCP_NONCE_BYTES);
	tcp_mac(g->in->spec->secret, &g->greeting, TCP_CHALLENGE, answer + TCP_NONCE_BYTES);
	await(g, AWAIT_PROOF, TCP_MAC_BYTES);
	return say(g, answer, sizeof answer);
}

static bool on_proof(struct guest *g)
{
	unsigned char mac[TCP_MAC_BYTES];
	struct tcp_mesh *m = g->in->m;

	if (!tcp_mac_ok(g->in->spec->secret, &g->greeting, TCP_PROOF, g->got))
		return false;
	/* Another connection may have said the same meanwhile. */
	if (tcp_link_of(m, g->peer, g->link)->watch)
		return false;
	tcp_mac(g->in->spec->secret, &g->greeting, TCP_WELCOME, mac);
	if (!say(g, mac, sizeof mac))
		return false;
	welcome(g);
	return true;
}

/* ---- the side that calls ---- */

static bool on_challenge(struct guest *g)
{
	unsigned char mac[TCP_MAC_BYTES];

	memcpy(g->greeting.nonce, g->got, TCP_NONCE_BYTES);
	if (!tcp_mac_ok(g->in->spec->secret, &g->greeting, TCP_CHALLENGE, g->got + TCP_NONCE_BYTES)) {
		/* Told at the deadline, when all others miss that member too: who fails at once is taken for the culprit. */
		call_of(g->in, g)->liar = true;
		return false;
	}
	tcp_mac(g->in->spec->secret, &g->greeting, TCP_PROOF, mac);
	await(g, AWAIT_WELCOME, TCP_MAC_BYTES);
	return say(g, mac, sizeof mac);
}

static bool on_welcome(struct guest *g)
{
	if (!tcp_mac_ok(g->in->spec->secret, &g->greeting, TCP_WELCOME, g->got))
		return false;
	welcome(g);
	return true;
}

static bool on_connected(struct guest *g, int *why)
{
	struct tcp_hello h = { .rank = g->in->m->rank, .link = g->link };
	socklen_t n = sizeof *why;

	if (getsockopt(watch_fd(g->watch), SOL_SOCKET, SO_ERROR, why, &n) < 0 || *why)
		return false;
	if (getrandom(h.nonce, TCP_NONCE_BYTES, 0) != TCP_NONCE_BYTES)
		return false;
	tcp_hello_put(&g->in->m->id, &h, g->greeting.hello);
	g->greeting.listener = g->peer;
	await(g, AWAIT_CHALLENGE, TCP_CHALLENGE_BYTES);
	if (watch_writes(g->watch, false) || watch_reads(g->watch, true))
		return false;
	return say(g, g->greeting.hello, TCP_HELLO_BYTES);
}

static void on_guest(void *user)
{
	static bool (*const steps[])(struct guest *) = {
		[AWAIT_CHALLENGE] = on_challenge, [AWAIT_WELCOME] = on_welcome, [AWAIT_HELLO] = on_hello, [AWAIT_PROOF] = on_proof,
	};
	struct guest *g = user;
	int why = 0;

	if (g->stage == CONNECT) {
		if (!on_connected(g, &why))
			give_up_guest(g, why);
		return;
	}
	ssize_t n = recv(watch_fd(g->watch), g->got + g->have, g->want - g->have, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		give_up_guest(g, n < 0 ? errno : ECONNRESET);
		return;
	}
	g->have += (uint32_t)n;
	if (g->have == g->want && !steps[g->stage](g))
		give_up_guest(g, ECONNREFUSED);
}

static struct guest *admit(struct rendezvous *t, int fd, enum stage stage, uint32_t bytes)
{
	struct guest *g = mem_zalloc(1, sizeof *g);

	if (!g || watch_new(t->m->base, &fd, on_guest, on_guest, g, &g->watch)) {
		close(fd);
		mem_free(g);
		return NULL;
	}
	g->in = t;
	g->until_ns = comm_now_ns() + (uint64_t)GREET_MS * MS;
	await(g, stage, bytes);
	g->prev = t->last;
	*(t->last ? &t->last->next : &t->first) = g;
	t->last = g;
	t->guest_count++;
	return g;
}

static void drop_oldest_stranger(struct rendezvous *t)
{
	for (struct guest *g = t->first; g; g = g->next)
		if (g->stage >= AWAIT_HELLO) {
			dismiss(g);
			return;
		}
}

static void on_accept(void *user)
{
	struct rendezvous *t = user;

	for (int i = 0; i < ACCEPT_TURN; i++) {
		int new = accept4(watch_fd(t->listener), NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (new < 0) {
			if (errno == EMFILE || errno == ENFILE)
				drop_oldest_stranger(t);
			return;
		}
		if (t->guest_count >= t->guests_max)
			drop_oldest_stranger(t);
		struct guest *g = admit(t, new, AWAIT_HELLO, TCP_HELLO_BYTES);
		if (g && watch_reads(g->watch, true))
			dismiss(g);
	}
}

/* ---- the meeting ---- */

static void make_call(struct rendezvous *t, struct call *c)
{
	int fd;

	c->busy = true;
	enum err e = tcp_connect(&t->cards[c->peer].at, &fd);
	if (e) {
		c->busy = false;
		c->refused = err_last()->sys_errno;
		c->again_ns = comm_now_ns() + (uint64_t)RETRY_MS * MS;
		return;
	}
	struct guest *g = admit(t, fd, CONNECT, 0);
	if (!g) {
		tcp_fail(t->m, ERR(NO_MEMORY, "no memory for a connection"));
		return;
	}
	g->peer = c->peer;
	g->link = c->link;
	if (watch_writes(g->watch, true))
		give_up_guest(g, ENOMEM);
}

static void tend(struct rendezvous *t)
{
	uint64_t now = comm_now_ns();

	list_each(g, t->first)
		if (now > g->until_ns)
			give_up_guest(g, ETIMEDOUT);
	for (uint32_t i = 0; i < t->call_count; i++)
		if (!t->calls[i].busy && !t->calls[i].done && now >= t->calls[i].again_ns)
			make_call(t, &t->calls[i]);
}

static uint32_t first_missing(const struct tcp_mesh *m)
{
	for (uint32_t i = 0; i < m->size; i++)
		if (i != m->rank && !m->peers[i].here)
			return i;
	return TCP_NOBODY;
}

static void missing(struct rendezvous *t, uint32_t peer)
{
	struct tcp_mesh *m = t->m;

	each(c, t->calls, t->call_count) {
		if (c->peer != peer || c->done || !c->refused)
			continue;
		errno = c->refused;
		tcp_fail(m, tcp_at(m, c->liar ? ERR(COMM_PROTOCOL, "what listens there does not know the group's secret") :
						ERR_SYS(PEER_TIMEOUT, "no connection to a member of the group"), peer));
		return;
	}
	tcp_fail(m, tcp_at(m, ERR(PEER_TIMEOUT, "a member of the group did not come"), peer));
}

static void gather_all(struct rendezvous *t)
{
	struct tcp_mesh *m = t->m;
	bool late = false;

	while (!m->failed && first_missing(m) != TCP_NOBODY) {
		tend(t);
		if (m->failed)
			return;
		(void)event_base_loop(m->base, EVLOOP_ONCE);
		if (m->failed)
			return;
		enum err e = comm_wait(m->c, &late);
		if (e)
			tcp_fail(m, e);
		else if (late && first_missing(m) != TCP_NOBODY)
			missing(t, first_missing(m));
	}
}

static FALLIBLE enum err plan_calls(struct rendezvous *t)
{
	struct tcp_mesh *m = t->m;

	m->data_links = TCP_LINKS_MAX;
	for (uint32_t i = 0; i < m->size; i++) {
		if (t->cards[i].failed)
			return tcp_at(m, ERR(PEER_LOST, "a member of the group cannot listen"), i);
		m->data_links = (uint32_t)num_min(m->data_links, t->cards[i].connections);
	}
	uint32_t per = 1 + m->data_links;
	t->calls = mem_zalloc((size_t)m->rank * per + 1, sizeof *t->calls);
	NEED(t->calls, "no memory for the connections of a group");
	for (uint32_t i = 0; i < m->rank * per; i++)
		t->calls[i] = (struct call){ .peer = i / per, .link = i % per };
	t->call_count = m->rank * per;
	t->guests_max = STRANGERS_MAX + m->size * per;
	for (uint32_t i = 0; i < m->size; i++) {
		if (i == m->rank)
			continue;
		m->peers[i].links = mem_zalloc(per, sizeof *m->peers[i].links);
		NEED(m->peers[i].links, "no memory for the connections of a group");
	}
	return OK;
}

/* All cards, even if this member has none: the others must not wait for it. */
static FALLIBLE enum err swap_cards(struct rendezvous *t, enum err own, const struct tcp_card *card)
{
	unsigned char mine[COMM_RENDEZVOUS_BYTES];
	unsigned char *all = mem_alloc((size_t)t->m->size * COMM_RENDEZVOUS_BYTES);
	struct err_info why = *err_last();
	enum err e = OK;

	t->cards = mem_zalloc(t->m->size, sizeof *t->cards);
	if (!all || !t->cards) {
		mem_free(all);
		return ERR(NO_MEMORY, "no memory for the addresses of a group");
	}
	tcp_card_put(card, mine);
	e = t->spec->meet(t->spec->user, mine, all);
	for (uint32_t i = 0; !e && i < t->m->size; i++) {
		e = tcp_card_get(all + (size_t)i * COMM_RENDEZVOUS_BYTES, &t->cards[i]);
		if (e)
			e = tcp_at(t->m, e, i);
	}
	mem_free(all);
	if (own)
		err_restore(&why);
	return own ? own : e;
}

static uint32_t choose_connections(const struct comm_spec *spec)
{
	if (spec->connections)
		return (uint32_t)num_min(spec->connections, TCP_LINKS_MAX);
	for (uint32_t i = 1; spec->hosts && i < spec->size && spec->size <= MANY_MEMBERS; i++)
		if (spec->hosts[i] != spec->hosts[0])
			return CONNECTIONS_ACROSS;
	return 1;
}

static void end_rendezvous(struct rendezvous *t)
{
	while (t->first)
		dismiss(t->first);
	watch_free(&t->listener);
	mem_free(t->cards);
	mem_free(t->calls);
}

enum err tcp_rendezvous(struct tcp_mesh *m, const struct comm_spec *spec)
{
	struct rendezvous t = { .m = m, .spec = spec };
	struct tcp_card card = { .connections = choose_connections(spec) };
	uint32_t backlog = (uint32_t)num_min(4096, 64 + m->size * (1 + card.connections));

	int fd = -1;
	enum err e = tcp_listen(spec->listen, backlog, &fd, &card.at);
	e = e ?: watch_new(m->base, &fd, on_accept, NULL, &t, &t.listener);
	if (fd >= 0)
		close(fd);
	card.failed = e != OK;
	e = swap_cards(&t, e, &card);
	e = e ?: plan_calls(&t);
	e = e ?: watch_reads(t.listener, true);
	if (!e) {
		gather_all(&t);
		e = m->failed;
		if (e)
			err_restore(&m->failure);
	}
	end_rendezvous(&t);
	return e;
}
