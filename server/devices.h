/* devices.h: the GPUs and communication back ends of this host, as a worker of the role "probe" found them at start. The coordinator
 * itself opens no driver: one that hangs or crashes takes a worker with it, and is a reason that /v1/capabilities shows. */
#pragma once
#include <jansson.h>
#include "base/buf.h"

struct devices;
struct workers;

FALLIBLE enum err devices_new(struct workers *workers, struct devices **out);      /* starts the probe; its answer comes through the loop */
void devices_probe(struct devices *d);                 /* once more, if none is under way: a driver may have come */
void devices_note(struct devices *d, const json_t *hello);    /* what a probe said */
/* Members of a JSON object: "backends":{…},"devices":[…] */
FALLIBLE enum err devices_put(const struct devices *d, struct buf *out);
/* NULL: "cuda" or "nccl" is there; else why not, valid until the loop goes on. */
const char *devices_missing(const struct devices *d, const char *backend);
/* The first probe is still under way: what is missing is not known. */
bool devices_pending(const struct devices *d);
const char *devices_only(const struct devices *d);               /* the uuid of the host's GPU, if it has one; else NULL. Valid as long */
const json_t *devices_found(const struct devices *d);            /* the probe's "devices"; NULL: not known. Valid as long */
bool devices_has(const struct devices *d, const char *uuid);     /* a GPU */
/* Its version as the probe told it, "2.21.5"; NULL: none was told. Valid as long. */
const char *devices_version(const struct devices *d, const char *backend);
void devices_free(struct devices *d);
