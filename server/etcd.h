/* etcd.h: questions to etcd, through its JSON gateway (etcd 3.4 and later, `/v3`), without blocking the loop.
 *
 * One call is one transaction, or one request about a lease. It has a deadline of its own, since etcd without a quorum lets callers hang;
 * servers are tried in turn until one answers. etcd leaves out what is false or 0 and writes 64-bit numbers as strings: the readers below
 * know that.
 *
 *     json_t *make = etcd_txn(json_pack("[o]", etcd_absent(key)), json_pack("[o]", etcd_put(key, value, lease)), json_array());
 *     etcd_ask(etcd, "/v3/kv/txn", make, on_made, user);              a part that lacked memory makes all of it NULL: ERR_NO_MEMORY */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "server/loop.h"

struct config;
struct courier;
struct etcd;

FALLIBLE enum err etcd_new(struct loop *loop, struct courier *courier, const struct config *config, struct etcd **out);
void etcd_free(struct etcd *e);           /* calls that are under way are dropped, without a callback; after the courier */

/* ERR_CLUSTER_UNAVAILABLE says which server was asked last, and what it said. */
typedef void (*etcd_fn)(void *user, enum err e, const json_t *answer);
/* Takes the body. */
void etcd_ask(struct etcd *e, const char *path, json_t *body, etcd_fn fn, void *user);

/* ---- parts of a transaction: NULL without memory ---- */
json_t *etcd_absent(const char *key);
json_t *etcd_present(const char *key);
json_t *etcd_made_at(const char *key, int64_t revision);       /* its create_revision */
json_t *etcd_changed_at(const char *key, int64_t revision);    /* its mod_revision */
json_t *etcd_get(const char *key);
json_t *etcd_range(const char *prefix, uint32_t limit);       /* all keys that begin so, in their order; limit 0: all */
json_t *etcd_range_behind(const char *prefix, const json_t *row, uint32_t limit);      /* those behind a row's key; row NULL: all */
json_t *etcd_range_before(const char *prefix, const char *before, uint32_t limit);     /* the last ones, newest first; before "": of all */
json_t *etcd_oldest(const char *prefix, uint32_t limit);       /* those that were made first */
json_t *etcd_count(const char *prefix);
json_t *etcd_delete_all(const char *prefix);
json_t *etcd_put(const char *key, const json_t *value, int64_t lease);      /* value: as JSON text; lease 0: none */
json_t *etcd_touch(const char *key);                           /* puts its value again: only its mod_revision changes */
json_t *etcd_delete(const char *key);
/* Takes all three, arrays; if all comparisons hold `then` is done, else `otherwise`. */
json_t *etcd_txn(json_t *compare, json_t *then, json_t *otherwise);

/* ---- its answer ---- */
bool etcd_succeeded(const json_t *answer);
int64_t etcd_number(const json_t *object, const char *key);    /* absent: 0 */
const json_t *etcd_rows(const json_t *answer, size_t index);   /* of the index-th request: rows of its range */
bool etcd_has_more(const json_t *answer, size_t index);           /* the limit has cut its range */
int64_t etcd_counted(const json_t *answer, size_t index);
/* The value of a row. ERR_CLUSTER_UNAVAILABLE: it is no JSON object, so none of dcpd's. */
FALLIBLE enum err etcd_value(const json_t *row, json_t **out);
/* Appends its key behind `prefix`. */
FALLIBLE enum err etcd_key(const json_t *row, const char *prefix, struct buf *out);
