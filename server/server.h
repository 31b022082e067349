/* server.h: the coordinator as a whole: one event loop's thread, opened, drained, ended.
 *
 * Law: it maps no tensor memory, parses no checkpoint file and never touches checkpoint storage. A worker process does all that may hang
 * or meet hostile bytes. */
#pragma once
#include <stdbool.h>
#include "base/err.h"

struct event_base;
struct config;
struct server;

/* Opens the journal, takes up what it holds and sweeps left-overs. Work starts as soon as the loop runs. */
FALLIBLE enum err server_new(const struct config *config, struct event_base *base, struct server **out);
/* Refuses new work from now on; running jobs get config->drain_ms to end, then they are kept as queued for the next start. */
void server_measure(struct server *s);       /* sets the gauges to what is now: before metrics_render */
void server_drain(struct server *s);
bool server_drained(const struct server *s);
/* SIGHUP: takes the new storages and the log's form over from a configuration read again; the old one stays valid. */
FALLIBLE enum err server_reload(struct server *s, const struct config *fresh);
void server_free(struct server *s);          /* accepts NULL; ends all workers, commits the journal */
