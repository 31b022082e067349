/* http.h: requests and answers, for the handlers (h_*.c).
 *
 * libmicrohttpd runs inside the coordinator's event loop (external epoll), so handlers run in its one thread and must not block.
 *
 *     static FALLIBLE enum err get_thing(struct req *r)
 *     {
 *             TRY(core_find(r->core, r->parts[2], &thing));          an error becomes a problem+json answer
 *             …
 *             return req_json(r, 200, &b);                           the answer; the buffer is taken
 *     }
 *
 * A handler that cannot answer at once takes a reference (req_hold), returns OK without an answer, and later, from the loop, calls
 * one of the answering functions and req_release. The connection sleeps meanwhile. An answer after the request was given up (drain)
 * is dropped, so whoever holds a reference may always answer. A client that goes away is noticed only when its answer is sent:
 * every wait therefore has a deadline. */
#pragma once
#include <jansson.h>
#include <microhttpd.h>
#include <sys/types.h>
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

enum { HTTP_BODY_MAX = 1 << 20, HTTP_DISCARD_MAX = 64 << 20, HTTP_PARTS_MAX = 8, HTTP_CONNECTIONS_MAX = 12000 };
enum { HTTP_CONNECTION_BYTES = 14 << 10 }; /* of a connection: the heads of a request and of its answer */

struct http;

enum { TOKEN_NAME_MAX = 64 };
#define TOKEN_OWN_NAME "token"           /* the state directory's */

/* Rights of a caller: each includes those before it. A route without one of its own needs READ for GET, else SUBMIT. */
enum scope { SCOPE_BY_METHOD, SCOPE_READ, SCOPE_SUBMIT, SCOPE_ADMIN };

struct caller {
	uid_t uid;
	bool known;                  /* proved by the Unix socket or by the token */
	bool admin;                  /* root, dcpd's own uid or the holder of a token of that scope */
	bool over_unix;
	bool is_node;                /* another node of the cluster, for a caller of its own */
	bool images_only;            /* a worker of that node: it may read images, nothing else */
	enum scope scope;            /* of the token; all without one */
	char token[TOKEN_NAME_MAX + 1]; /* its name; "": none was shown */
	pid_t pid;                   /* over the Unix socket, if it can be seen from here; else 0 */
};

struct req;
struct form;

/* A row of the table of what can be asked (routes.c). */
enum route_body { ROUTE_NO_BODY, ROUTE_BODY, ROUTE_BODY_MAY };

struct route {
	const char *method;
	const char *path;            /* "/v1/jobs/{id}:cancel" */
	enum err (*handler)(struct req *r);
	enum route_body body;
	bool open;                   /* needs no token */
	bool changes;                /* refused while the daemon drains, or cannot write its journal */
	const char *const *query;    /* the names that its query may have; a NULL ends them. NULL: it is not looked at */
	enum scope scope;            /* that it needs */
	const char *audit;           /* what it changes, for server/audit.h; NULL: nothing of note */
	bool image;                  /* of sealed images: a worker of another node may ask it */
	const char *list;            /* the member of the answer that holds its rows; NULL: it is no list */
};

enum { REQUEST_ID_MAX = 128, REQUEST_ID_OWN = 16 };
#define REQUEST_ID_HEAD "X-Request-Id"

struct req {
	struct http *http;
	struct api *api;
	struct server *core;
	struct MHD_Connection *conn;
	const struct route *route;   /* NULL: OPTIONS, or none */
	uint32_t row;                /* of its route in the counts of answers; 0: none */
	const char *method, *path;   /* path as it was sent, without the query */
	char id[REQUEST_ID_MAX + 1]; /* X-Request-Id of the answer: the caller's, or one of REQUEST_ID_OWN hex digits */
	bool id_is_sent;             /* the caller's */
	bool is_http_1_1;
	struct caller caller;
	struct str parts[HTTP_PARTS_MAX]; /* the path's components, each percent-decoded once */
	uint32_t part_count;
	struct str verb;             /* of "/v1/jobs/{id}:cancel" */
	char *decoded;               /* holds the parts */
	json_t *body;                /* NULL for requests without one */
	struct buf raw;              /* the body's bytes */
	const char *audit;           /* what it has changed once its answer is no error: the route's, or the handler's */
	char audit_job[27];          /* of the job that does it */
	char audit_subject[224];     /* what is changed, where neither path nor body say it; else "" */
	json_t *note;                /* what a handler keeps for its later half */
	struct state_dict_reading *reading;     /* what its answer is read from; NULL: nothing. It ends with the request */
	int64_t send_ms;             /* time that the client has to read the answer; 0: as `unread` has it */
	const char *served_from;     /* storage whose copy answers instead of the one asked for (h_ask_either); NULL: none */
	/* the life of the request; http.c only */
	struct MHD_Response *answer;
	unsigned status, refs;
	bool reads_only;             /* it has changed nothing that its answer must tell of: there may be no room for that */
	bool suspended, waited, answered, answer_kept, finished, begun;
	bool awaits_audit;           /* it has an answer, which is sent once the audit's row is on disk */
	struct req *prev, *next;     /* requests that are being waited for */
	struct err_info *refused;    /* the answer, once the body has been read and dropped */
	uint64_t body_bytes, body_counted;
	uint64_t unread;             /* bytes of the answer that unread.h counts */
	int64_t began_ns;            /* head complete */
	void (*upgraded)(struct req *r, int *socket);
	char allow[64];              /* of a 405 */
	uint64_t range_of;           /* of a 416: 1 + the bytes that there are; 0: it is about a slice */
};

FALLIBLE enum err req_json(struct req *r, unsigned status, struct buf *b);          /* takes b */
FALLIBLE enum err req_json_doc(struct req *r, unsigned status, const json_t *doc);
FALLIBLE enum err req_bytes(struct req *r, unsigned status, const char *content_type, struct buf *b); /* takes b */
FALLIBLE enum err req_page(struct req *r, const char *content_type, struct buf *b); /* takes b; may run scripts of ours */
/* A file of ours that stays; bytes are coded as the form says, and empty if the client has it. */
FALLIBLE enum err req_static(struct req *r, const char *content_type, struct str bytes, const struct form *form);
/* Takes fd, and `held` bytes of unread.h: the request gives them back. etag: a GET may have it already, or ask for a range of it; NULL:
 * neither. ERR_RANGE_INVALID. */
FALLIBLE enum err req_fd(struct req *r, const char *content_type, int fd, uint64_t bytes, uint64_t held, const char *etag);
FALLIBLE enum err req_empty(struct req *r, unsigned status);
/* Sends a response made earlier, headers and all, which stays the caller's. Only from within the handler, and not to a request that brought
 * an id of its own: req_dress has made room for one of ours. */
FALLIBLE enum err req_ready(struct req *r, unsigned status, struct MHD_Response *response);
/* The headers that every answer has; for responses that are kept (req_ready). page: scripts and styles of our own may run. id: r->id. */
FALLIBLE enum err req_dress(struct MHD_Response *m, const char *content_type, bool page, const char *id);
/* A problem+json answer of this thread's latest error. */
void req_fail(struct req *r, enum err code, const char *job);
/* Adds a header to the answer that was just made. */
/* 101: the connection is another protocol's from now on. fn gets its socket, which it may take (set to -1), after the head is sent; the
 * request lives until it returns. Unix sockets only. */
FALLIBLE enum err http_upgrade(struct req *r, const char *protocol, void (*fn)(struct req *r, int *socket));
FALLIBLE enum err req_header(struct req *r, const char *name, const char *value);
/* An endless answer, produced by `read` (see sse.c). `done` runs once, when the client is gone or the stream ended. */
FALLIBLE enum err req_stream(struct req *r, const char *content_type, MHD_ContentReaderCallback read, void *user,
			     MHD_ContentReaderFreeCallback done);

void req_hold(struct req *r);
void req_release(struct req *r);
void req_done(struct req *r, enum err e);      /* fails the request if e is an error; releases */

/* ?key=value, decoded in place: ask once for a key. Absent: false. ERR_INVALID_REQUEST for bad escapes. */
FALLIBLE enum err req_query(struct req *r, const char *key, struct str *out, bool *there_out);
FALLIBLE enum err req_query_u64(struct req *r, const char *key, uint64_t max, uint64_t *out); /* absent: left alone */
FALLIBLE enum err req_query_bool(struct req *r, const char *key, bool *out);
FALLIBLE enum err req_query_wait(struct req *r, unsigned *ms_out);    /* ?wait=30s, 500ms, 2m; absent: 0; at most 60 s */
/* Any other query key is ERR_UNKNOWN_FIELD. keys: NULL-terminated. */
FALLIBLE enum err req_query_only(struct req *r, const char *const *keys);
const char *req_head(const struct req *r, const char *name);          /* NULL: absent */

/* The functions of higher layers that http.c calls (dispatch.c sets them). */
struct http_calls {
	void (*connected)(struct api *api, int fd, bool is_unix, struct caller *out);     /* who is it? */
	/* The head is complete: finds r->route, or refuses before the body is read. */
	enum err (*head)(struct req *r, const char *version);
	enum err (*handle)(struct req *r);        /* the body is there: answers, now or later */
	void (*fail)(struct req *r, enum err e);  /* answers with this thread's latest error */
	void (*sent)(const struct req *r);        /* an answer is on its way */
	void (*ended)(struct req *r);             /* HTTP lets go of the request */
};

struct event_base;
struct http_listener {
	int fd;
	bool is_unix, tls;
	bool is_given;               /* a service manager's: its file stays when the daemon ends */
	char url[256];
};
struct http_options {
	const struct http_calls *calls;
	struct api *api;
	struct server *core;
	struct http_listener *listeners;
	uint32_t listener_count;
	const char *tls_cert_pem, *tls_key_pem;
};
FALLIBLE enum err http_start(struct event_base *base, const struct http_options *o, struct http **out);
void http_drain(struct http *h);
bool http_drained(const struct http *h);
bool http_draining(const struct http *h);
void http_free(struct http *h);
void http_wake(struct req *r);                                         /* its answer is there */
bool http_body_ends(const struct req *r);                              /* false: a coding of which only the connection's end shows it */
void http_drop_body(struct req *r);                                    /* nobody looks at it any more */
void http_kick(struct http *h);                                        /* something was resumed: run soon */
uint32_t http_listeners(const struct http *h);
unsigned http_connections(const struct http *h);
