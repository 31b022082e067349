/* webhook.h: webhooks: URLs that are told what happens to checkpoints, jobs and chains, by signed POSTs.
 *
 * What is to be told is in the journal with the change that it tells of, in one transaction: one delivery, with an id of its own, for each
 * event and webhook, whatever dies when. A delivery that is not answered with 2xx is tried again, with the same id, for a day of service
 * time (service_clock.h); the receiver may get it more than once and knows it by its id. Each webhook has a queue of its own.
 *
 *     POST URL
 *     Dcpd-Delivery: ID
 *     Dcpd-Signature: t=UNIX,v1=HEX        HMAC-SHA256 of "UNIX.BODY" with the secret
 *
 *     {"id","event","webhook","time","checkpoint":{record},"job","error","chain","execution"}
 *
 * A webhook's document: {"url","secret","events","storage"?,"match"?}; admins only, for a URL may hold a token. */
#pragma once
#include "server/events.h"
#include "server/follower.h"
#include "server/principal.h"

struct server;

FALLIBLE enum err webhooks_new(struct server *s);
void webhooks_free(struct server *s);
/* Puts a delivery to each webhook that subscribes to it into the transaction. */
void webhooks_note(struct server *s, struct journal_txn *t, const struct happening *h);
/* Once that is on disk: sends what is due. */
void webhooks_wake(struct server *s);

/* id: of the delivery. */
typedef void (*webhook_fn)(void *user, enum err e, const char *id);
/* A delivery that has ended, or waits for its time, is due now, for another day. */
void webhook_retry(struct server *s, const struct principal *who, struct str name, struct str id, webhook_fn fn, void *user);
/* Makes a delivery of the event webhook.test. */
void webhook_test(struct server *s, const struct principal *who, struct str name, webhook_fn fn, void *user);
