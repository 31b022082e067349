/* http.c: libmicrohttpd inside the event loop (see http.h).
 *
 *   listener ──► MHD daemon (epoll fd) ──► loop's read event ──► MHD_run ──► on_request (head, body parts, end) ──► handler
 *                                                                   ▲                                              │ later
 *                                              http_kick ◄── resume ┴───────────────────────── answer made ◄───────┘
 *
 * One MHD daemon per listener, all in one thread: handlers touch the coordinator's state without locks. MHD's timeout counts
 * inactivity only, so each connection has a deadline of its own for head and body, and a sweep once a second ends the late ones;
 * the same sweep runs MHD, because 0.9.75 may skip a ready connection while another is being suspended. */
#include "api/http.h"

#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jval.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/vec.h"
#include "os/watch.h"
#include "server/metrics.h"
#include "server/parts.h"

/* libmicrohttpd clears a connection's memory for each request, so more of it costs speed, and stays while the connection idles: ten
 * thousand dashboards may have one each. A head beyond it is answered by the library itself. */
enum { HEAD_MS = 10000, BODY_MS = 30000, IDLE_S = 15, RUNS_MAX = 16 };

/* How long a client may take to read an answer that unread.h counts: others wait for its room. */
enum { READ_MS = 60000, READ_BYTES_A_MS = 128 };

/* Bodies of all requests together, but for the first BODY_SMALL bytes of each: as parsed JSON they take many times their size. */
enum { BODY_SMALL = 64 << 10, BODIES_MAX = 32 << 20 };

struct listener {
	struct http *http;
	struct MHD_Daemon *daemon;
	struct watch *readable;
	int fd;
	bool is_unix, quiesced;
};

struct conn {
	struct conn *prev, *next;
	struct MHD_Connection *mhd;
	int64_t deadline_ms;               /* 0: none */
	struct caller caller;
};

struct http {
	struct http_options o;
	struct listener *listeners;
	uint32_t listener_count;
	struct event *sweep, *soon;
	struct conn *conns;                /* all open connections */
	struct req *waiting;               /* requests without an answer yet */
	uint64_t bodies;                   /* what BODIES_MAX counts */
	bool draining;
};

/* Runs a daemon until it has nothing more to do, or often enough that the loop should turn first. */
static void run_daemon(struct http *h, struct listener *l)
{
	MHD_UNSIGNED_LONG_LONG timeout = 1;

	for (int i = 0; i < RUNS_MAX; i++) {
		MHD_run(l->daemon);
		if (MHD_get_timeout(l->daemon, &timeout) != MHD_YES || timeout > 0)
			return;
	}
	http_kick(h);
}

static void on_readable(void *user)
{
	struct listener *l = user;

	run_daemon(l->http, l);
}

static void on_soon(evutil_socket_t, short, void *user)
{
	struct http *h = user;

	for (uint32_t i = 0; i < h->listener_count; i++)
		run_daemon(h, &h->listeners[i]);
}

static void on_sweep(evutil_socket_t fd, short what, void *user)
{
	struct http *h = user;
	int64_t now = clock_mono_ms();

	for (struct conn *c = h->conns; c; c = c->next) {
		if (c->deadline_ms == 0 || now < c->deadline_ms)
			continue;
		const union MHD_ConnectionInfo *i =
			MHD_get_connection_info(c->mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
		if (i)
			shutdown(i->connect_fd, SHUT_RDWR);
		c->deadline_ms = 0;
	}
	on_soon(fd, what, h);
}

void http_kick(struct http *h)
{
	struct timeval now = { 0, 0 };

	if (h->soon && !evtimer_pending(h->soon, NULL))
		evtimer_add(h->soon, &now);
}

static struct conn *conn_of(struct MHD_Connection *mhd)
{
	const union MHD_ConnectionInfo *i = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

	return i ? i->socket_context : NULL;
}

static void on_connection(void *user, struct MHD_Connection *mhd, void **context, enum MHD_ConnectionNotificationCode code)
{
	struct listener *l = user;
	struct http *h = l->http;
	struct conn *c = *context;

	if (code == MHD_CONNECTION_NOTIFY_STARTED) {
		c = mem_zalloc(1, sizeof *c);
		if (!c)
			return;
		c->mhd = mhd;
		c->deadline_ms = clock_mono_ms() + HEAD_MS;
		const union MHD_ConnectionInfo *i = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
		h->o.calls->connected(h->o.api, i ? i->connect_fd : -1, l->is_unix, &c->caller);
		list2_add(&h->conns, c);
		*context = c;
	} else if (c) {
		list2_remove(&h->conns, c);
		mem_free(c);
		*context = NULL;
	}
}

static void uncount_body(struct req *r)
{
	if (r->body_counted)
		r->http->bodies -= r->body_counted;
	r->body_counted = 0;
}

static void on_completed(void *, struct MHD_Connection *mhd, void **context, enum MHD_RequestTerminationCode)
{
	struct req *r = *context;
	struct conn *c = conn_of(mhd);

	if (c)
		c->deadline_ms = clock_mono_ms() + IDLE_S * 1000 + HEAD_MS;
	if (!r)
		return;
	*context = NULL;
	uncount_body(r); /* now: a holder may release the request after HTTP has ended */
	r->finished = true;
	r->conn = NULL;
	r->http->o.calls->ended(r);
}

/* The answer was made while the connection slept. */
void http_wake(struct req *r)
{
	struct http *h = r->http;

	if (!r->suspended)
		return;
	r->suspended = false;
	list2_remove(&h->waiting, r);
	MHD_resume_connection(r->conn);
	http_kick(h);
}

static void put_to_sleep(struct http *h, struct req *r)
{
	MHD_suspend_connection(r->conn);
	r->suspended = r->waited = true;
	list2_add(&h->waiting, r);
	http_kick(h);
}

static enum MHD_Result send_answer(struct req *r)
{
	enum MHD_Result ok = MHD_queue_response(r->conn, r->status, r->answer);
	struct conn *c = conn_of(r->conn);

	if (c && r->send_ms)
		c->deadline_ms = clock_mono_ms() + r->send_ms;
	else if (c && r->unread)
		c->deadline_ms = clock_mono_ms() + READ_MS + (int64_t)(r->unread / READ_BYTES_A_MS);
	r->http->o.calls->sent(r);
	/* A request that waited on purpose (long poll) says nothing about the server's speed. */
	if (!r->waited)
		metrics_observe(r->core->metrics, "dcpd_http_request_duration_seconds", "",
				(double)(clock_mono_ns() - r->began_ns) / 1e9);
	if (!r->answer_kept)
		MHD_destroy_response(r->answer);
	r->answer = NULL;
	if (r->refs == 1)
		http_drop_body(r);
	return ok;
}

static enum MHD_Result refuse(struct req *r, enum err e)
{
	r->http->o.calls->fail(r, e);
	return r->answer ? send_answer(r) : MHD_NO;
}

bool http_body_ends(const struct req *r)
{
	const char *coding = MHD_lookup_connection_value(r->conn, MHD_HEADER_KIND, MHD_HTTP_HEADER_TRANSFER_ENCODING);

	return !coding || strcasecmp(coding, "chunked") == 0;
}

/* An answer before the end of the request makes libmicrohttpd close the connection, and the reset that follows can overtake the
 * answer. So a refusal waits until the body has been read and dropped, but for a client that asked first (Expect). */
static enum MHD_Result keep_refusal(struct req *r)
{
	r->refused = mem_alloc(sizeof *r->refused);
	if (!r->refused)
		return MHD_NO;
	*r->refused = *err_last();
	return MHD_YES;
}

static enum MHD_Result refuse_after_body(struct req *r, enum err e)
{
	const char *expect = MHD_lookup_connection_value(r->conn, MHD_HEADER_KIND, MHD_HTTP_HEADER_EXPECT);

	return expect || !http_body_ends(r) ? refuse(r, e) : keep_refusal(r);
}

/* The head is complete: what can be refused is refused before the body is read. */
static enum MHD_Result begin(struct listener *l, struct MHD_Connection *mhd, const char *url, const char *method,
			     const char *version, void **context)
{
	struct req *r = mem_zalloc(1, sizeof *r);
	struct conn *c = conn_of(mhd);

	if (!r || !c) {
		mem_free(r);
		return MHD_NO;
	}
	r->http = l->http;
	r->api = l->http->o.api;
	r->core = l->http->o.core;
	r->conn = mhd;
	r->method = method;
	r->path = url;
	r->refs = 1;
	r->began_ns = clock_mono_ns();
	r->raw = BUF_INIT(HTTP_BODY_MAX);
	r->caller = c->caller;
	*context = r;
	c->deadline_ms = r->began_ns / 1000000 + BODY_MS;
	enum err e = l->http->o.calls->head(r, version);
	return e ? refuse_after_body(r, e) : MHD_YES;
}

void http_drop_body(struct req *r)
{
	uncount_body(r);
	jval_drop(&r->body);
	buf_free(&r->raw);
}

/* false: other requests' bodies leave no room for this one. */
static bool count_body(struct req *r)
{
	struct http *h = r->http;
	uint64_t more = r->body_bytes > BODY_SMALL ? r->body_bytes - BODY_SMALL - r->body_counted : 0;

	if (more > BODIES_MAX - h->bodies)
		return false;
	h->bodies += more;
	r->body_counted += more;
	return true;
}

/* Too much is read and dropped for a while, so that the client can read the answer; then the connection is cut. */
static enum MHD_Result take_body(struct req *r, const char *data, size_t *n)
{
	size_t size = *n;

	*n = 0;
	r->body_bytes += size;
	if (r->refused || r->body_bytes > HTTP_BODY_MAX)
		return r->body_bytes <= HTTP_DISCARD_MAX ? MHD_YES : MHD_NO;
	if (count_body(r)) {
		buf_put(&r->raw, data, size);
		return MHD_YES;
	}
	(void)ERR(BUSY, "the bodies of other requests leave no room for this one");
	http_drop_body(r);
	return keep_refusal(r);
}

/* libmicrohttpd closes its own descriptor at once and forgets the connection: none of its limits counts it any more, and its end needs
 * not be waited for. */
static void on_upgrade(void *, struct MHD_Connection *, void *context, const char *, size_t early, MHD_socket fd,
		       struct MHD_UpgradeResponseHandle *handle)
{
	struct req *r = context;
	int socket = early ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0); /* bytes before the answer would not have their descriptors any more */

	if (r && socket >= 0)
		r->upgraded(r, &socket);
	if (socket >= 0)
		close(socket);
	(void)MHD_upgrade_action(handle, MHD_UPGRADE_ACTION_CLOSE);
}

FALLIBLE enum err http_upgrade(struct req *r, const char *protocol, void (*fn)(struct req *r, int *socket))
{
	struct MHD_Response *m = MHD_create_response_for_upgrade(on_upgrade, NULL);

	NEED(m, "cannot make an answer");
	if (MHD_add_response_header(m, MHD_HTTP_HEADER_UPGRADE, protocol) != MHD_YES) {
		MHD_destroy_response(m);
		return ERR(NO_MEMORY, "cannot make an answer");
	}
	r->upgraded = fn;
	r->answered = true;
	r->answer = m;
	r->status = MHD_HTTP_SWITCHING_PROTOCOLS;
	return OK;
}

static FALLIBLE enum err handle(struct req *r)
{
	if (r->refused) {
		err_restore(r->refused);
		return r->refused->code;
	}
	if (mem_is_short()) /* the reserve is for what was accepted before */
		return ERR(NO_MEMORY, "the daemon has no memory left for new requests");
	if (r->body_bytes > HTTP_BODY_MAX)
		return ERR(PAYLOAD_TOO_LARGE, "a body has at most %d bytes", HTTP_BODY_MAX);
	TRY(buf_status(&r->raw));
	return r->http->o.calls->handle(r);
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *mhd, const char *url, const char *method,
				  const char *version, const char *data, size_t *n, void **context)
{
	struct listener *l = user;
	struct req *r = *context;
	struct conn *c = conn_of(mhd);

	if (!r)
		return begin(l, mhd, url, method, version, context);
	if (*n > 0)
		return take_body(r, data, n);
	if (r->answer)
		return send_answer(r);
	if (r->begun)
		return MHD_NO;
	r->begun = true;
	if (c)
		c->deadline_ms = 0;
	enum err e = handle(r);
	if (e)
		return refuse(r, e);
	if (r->answer && !r->awaits_audit)
		return send_answer(r);
	if (r->answered && !r->answer) /* there was no memory for any answer */
		return MHD_NO;
	must(r->refs > 1);
	put_to_sleep(l->http, r);
	return MHD_YES;
}

/* Escapes are undone by us, part by part, so that %2F and %00 are seen for what they are. */
static size_t keep_escapes(void *, struct MHD_Connection *, char *text)
{
	return strlen(text);
}

static void on_log(void *, const char *fmt, va_list args)
{
	char text[512];

	vsnprintf(text, sizeof text, fmt, args);
	log_debug("http", "text", text, NULL);
}

static void on_panic(void *, const char *file, unsigned line, const char *why)
{
	char place[256];

	snprintf(place, sizeof place, "%s:%u", file, line);
	must_failed(why ? why : "libmicrohttpd", place);
}

/* Segments and workers need descriptors, too: connections of all listeners take at most half of them. */
static unsigned connections_max(const struct http *h)
{
	struct rlimit files;
	rlim_t most = HTTP_CONNECTIONS_MAX;

	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur / 2 / h->o.listener_count < most)
		most = files.rlim_cur / 2 / h->o.listener_count;
	return (unsigned)most;
}

static FALLIBLE enum err start_listener(struct event_base *base, struct http *h, const struct http_listener *from,
					struct listener *l)
{
	unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (from->is_unix ? MHD_ALLOW_UPGRADE : 0);
	struct MHD_OptionItem more[] = {
		{ MHD_OPTION_CONNECTION_LIMIT, (intptr_t)connections_max(h), NULL },
		{ MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S, NULL },
		{ MHD_OPTION_CONNECTION_MEMORY_LIMIT, HTTP_CONNECTION_BYTES, NULL },
		{ MHD_OPTION_STRICT_FOR_CLIENT, 1, NULL },
		{ MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, NULL }, /* else it sends no file by sendfile(), but by 4 KiB */
		{ from->tls ? MHD_OPTION_HTTPS_MEM_CERT : MHD_OPTION_END, 0, (void *)(uintptr_t)h->o.tls_cert_pem },
		{ from->tls ? MHD_OPTION_HTTPS_MEM_KEY : MHD_OPTION_END, 0, (void *)(uintptr_t)h->o.tls_key_pem },
		{ MHD_OPTION_END, 0, NULL },
	};

	l->http = h;
	l->is_unix = from->is_unix;
	l->fd = from->fd;
	l->daemon = MHD_start_daemon(flags | (from->tls ? MHD_USE_TLS : 0), 0, NULL, NULL, on_request, l,
				     MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET, from->fd,
				     MHD_OPTION_NOTIFY_CONNECTION, on_connection, l, MHD_OPTION_NOTIFY_COMPLETED,
				     on_completed, l, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, NULL, MHD_OPTION_ARRAY,
				     more, MHD_OPTION_END);
	if (!l->daemon)
		return ERR(CONFIG, "cannot serve %s%s", from->url,
			   from->tls ? " (are certificate and key a pair?)" : "");
	const union MHD_DaemonInfo *info = MHD_get_daemon_info(l->daemon, MHD_DAEMON_INFO_EPOLL_FD);
	if (!info)
		return ERR(INTERNAL, "libmicrohttpd has no epoll descriptor");
	int fd = fcntl(info->epoll_fd, F_DUPFD_CLOEXEC, 0); /* libmicrohttpd closes its own when it likes */
	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot watch %s", from->url);
	enum err e = watch_new(base, &fd, on_readable, NULL, l, &l->readable);
	if (e)
		close(fd);
	return e ? e : watch_reads(l->readable, true);
}

FALLIBLE enum err http_start(struct event_base *base, const struct http_options *o, struct http **out)
{
	struct timeval second = { 1, 0 };
	struct http *h = mem_zalloc(1, sizeof *h);
	enum err e = OK;

	NEED(h, "cannot start HTTP");
	MHD_set_panic_func(on_panic, NULL);
	h->o = *o;
	*out = h;
	h->listeners = mem_zalloc(o->listener_count, sizeof *h->listeners);
	h->sweep = event_new(base, -1, EV_PERSIST, on_sweep, h);
	h->soon = evtimer_new(base, on_soon, h);
	if (!h->listeners || !h->sweep || !h->soon || event_add(h->sweep, &second) != 0)
		return ERR(NO_MEMORY, "cannot start HTTP");
	for (uint32_t i = 0; i < o->listener_count && e == OK; i++) {
		h->listener_count++;
		e = start_listener(base, h, &o->listeners[i], &h->listeners[i]);
	}
	return e;
}

static unsigned open_connections(const struct listener *l)
{
	const union MHD_DaemonInfo *i =
		l->daemon ? MHD_get_daemon_info(l->daemon, MHD_DAEMON_INFO_CURRENT_CONNECTIONS) : NULL;

	return i ? i->num_connections : 0;
}

void http_drain(struct http *h)
{
	h->draining = true;
	each(l, h->listeners, h->listener_count) {
		if (l->daemon && !l->quiesced) {
			MHD_quiesce_daemon(l->daemon);
			l->quiesced = true;
		}
	}
	while (h->waiting) {
		struct req *r = h->waiting;
		h->o.calls->fail(r, ERR(DRAINING, "the daemon is shutting down"));
		http_wake(r); /* its answer may be there, and wait for the audit */
	}
	http_kick(h);
}

bool http_draining(const struct http *h)
{
	return h->draining;
}

unsigned http_connections(const struct http *h)
{
	unsigned n = 0;

	for (uint32_t i = 0; i < h->listener_count; i++)
		n += open_connections(&h->listeners[i]);
	return n;
}

bool http_drained(const struct http *h)
{
	return http_connections(h) == 0;
}

void http_free(struct http *h)
{
	if (!h)
		return;
	http_drain(h);
	each(l, h->listeners, h->listener_count) {
		if (l->daemon) {
			run_daemon(h, l);
			watch_free(&l->readable);
			MHD_stop_daemon(l->daemon);
		}
		if (l->quiesced)
			close(l->fd);
	}
	if (h->sweep)
		event_free(h->sweep);
	if (h->soon)
		event_free(h->soon);
	mem_free(h->listeners);
	mem_free(h);
}

uint32_t http_listeners(const struct http *h)
{
	return h->listener_count;
}
