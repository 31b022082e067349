/* courier.h: HTTP requests that the daemon makes, many at a time, by a thread of its own: webhooks, spans, etcd, other nodes.
 *
 * Why a thread beside the loop: libcurl's resolver and TLS may block for longer than the loop may, and a request needs nothing of the
 * coordinator's but bytes. A receiver that hangs takes one transfer's time and nobody else's. */
#pragma once
#include "base/buf.h"
#include "server/loop.h"
#include "server/webhook_address.h"

struct courier;

/* Files for https, in PEM; NULL: the system's authorities, no certificate of our own. */
struct courier_tls {
	const char *ca, *cert, *key;
};

struct courier_parcel {
	struct courier_parcel *next;   /* the courier's */
	struct courier *courier;
	/* set by the caller; borrowed until the callback */
	const char *url, *secret;      /* secret: its name; NULL: the body is not signed */
	const char *delivery;          /* its id, or NULL */
	const char *method;            /* NULL: POST */
	const char *const *headers;    /* "Name: value", beside those of the courier; a NULL ends them. NULL: none */
	struct str body;
	const struct courier_tls *tls; /* NULL: as the system has it */
	long connect_ms, whole_ms;     /* 0: COURIER_CONNECT_MS, COURIER_WHOLE_MS */
	bool may_reuse;                /* the connection is kept for the next request to that host */
	struct buf *answer, *heads;    /* the answer's body, its header lines; full: the transfer fails. NULL: not kept */
	void (*fn)(struct courier_parcel *p);  /* from the loop, exactly once, unless the courier is freed before */
	/* the outcome */
	long status;                   /* of the answer; 0: there was none */
	bool is_refused;               /* the address is not one to connect to */
	char error[256];               /* "": there was an answer */
};

enum { COURIER_CONNECT_MS = 5000, COURIER_WHOLE_MS = 15000 };

/* allowed: networks beside the public ones, "CIDR" each. secrets: the folder. Starts no thread before the first parcel. */
FALLIBLE enum err courier_new(struct loop *loop, const char *secrets, const char *const *allowed, size_t count,
			      struct courier **out);
/* The same, to any address: for receivers that whoever runs dcpd has named. */
FALLIBLE enum err courier_new_anywhere(struct loop *loop, struct courier **out);
void courier_free(struct courier *s);    /* what is under way is given up, without a callback */
void courier_send(struct courier *s, struct courier_parcel *p);
/* Checks a URL's form: http or https, a host, no user, no password, no fragment. ERR_VALIDATION_FAILED. */
FALLIBLE enum err courier_check_url(struct str url);
