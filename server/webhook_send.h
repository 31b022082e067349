/* webhook_send.h: posts signed bodies to URLs, many at a time, by a thread of its own.
 *
 * Why a thread beside the loop: libcurl's resolver and TLS may block for longer than the loop may, and a delivery needs nothing of the
 * coordinator's but bytes. A receiver that hangs takes one transfer's time and nobody else's. */
#pragma once
#include "server/loop.h"
#include "server/webhook_address.h"

struct webhook_sender;

struct webhook_parcel {
	struct webhook_parcel *next;   /* the sender's */
	struct webhook_sender *sender;
	/* set by the caller; borrowed until the callback */
	const char *url, *secret;      /* secret: its name; NULL: the body is not signed */
	const char *delivery;          /* its id, or NULL */
	struct str body;
	void (*fn)(struct webhook_parcel *p);  /* from the loop, exactly once, unless the sender is freed before */
	/* the outcome */
	long status;                   /* of the answer; 0: there was none */
	bool is_refused;               /* the address is not one to connect to */
	char error[256];               /* "": there was an answer */
};

/* allowed: networks beside the public ones, "CIDR" each. secrets: the folder. Starts no thread before the first parcel. */
FALLIBLE enum err webhook_sender_new(struct loop *loop, const char *secrets, const char *const *allowed, size_t count,
				     struct webhook_sender **out);
void webhook_sender_free(struct webhook_sender *s);     /* what is under way is given up, without a callback */
void webhook_send(struct webhook_sender *s, struct webhook_parcel *p);
/* Checks a URL's form: http or https, a host, no user, no password, no fragment. ERR_VALIDATION_FAILED. */
FALLIBLE enum err webhook_send_check_url(struct str url);
