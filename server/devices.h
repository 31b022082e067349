/* devices.h: the GPUs and communication back ends of this host, as a worker of the role "probe" found them at start. The coordinator
 * itself opens no driver: one that hangs or crashes takes a worker with it, and is a reason that /v1/capabilities shows. */
#pragma once
#include <jansson.h>
#include "base/buf.h"

struct server;
struct devices;

FALLIBLE enum err devices_new(struct server *s);      /* starts the probe; its answer comes through the loop */
void devices_probe(struct server *s);                 /* once more, if none is under way: a driver may have come */
void devices_note(struct server *s, const json_t *hello);    /* what a probe said */
/* Members of a JSON object: "backends":{…},"devices":[…] */
FALLIBLE enum err devices_put(struct server *s, struct buf *out);
/* NULL: "cuda" or "nccl" is there; else why not, valid until the loop goes on. */
const char *devices_missing(const struct server *s, const char *backend);
void devices_free(struct devices *d);
