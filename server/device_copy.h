/* device_copy.h: copies between the device memory of a trainer and the segments of its ranks, by a worker for each GPU. See
 * api/device-memory.md for the contract, worker/query/lookup_device_copy.c for the copy.
 *
 * Why no job: a copy belongs to one rank, takes as long as a trainer stands still for it, and nothing of it may be done again by anybody
 * else: the memory is the trainer's. It fills a slot that the trainer then seals, as it would seal its own copy; a save knows nothing of
 * GPUs. Why no gang's worker: a copy must not wait for a job, and a driver that fails must take nothing with it but the copy. */
#pragma once
#include <jansson.h>
#include "server/principal.h"
#include "server/loop.h"

struct config;
struct descriptors;
struct devices;
struct metrics;
struct state_dict_use;
struct state_dicts;
struct workers;

struct device_copy_request {
	struct principal who;
	struct str name;                    /* of the state dict */
	int64_t rank, generation;
	const char *device;                 /* "GPU-…" */
	bool to_device;                     /* from a sealed segment; else into an open one */
	json_t *allocations, *table, *casts;    /* as they came, checked; borrowed; casts may be NULL */
	struct str descriptors;             /* a token; n 0: none */
};
/* ok: {"bytes","copies","pinned",…}, as api/device-memory.md has it. After an error nothing writes to the segment any more. fd: of a device
 * image, its memory, which the callback takes by setting *fd = -1; else -1. */
typedef void (*device_copied_fn)(void *user, enum err e, const json_t *ok, int *fd);

struct device_copy_parts {
	struct loop *loop;
	struct workers *workers;
	struct devices *devices;
	struct descriptors *descriptors;
	struct state_dicts *state_dicts;
	struct metrics *metrics;
};
struct device_copies;

FALLIBLE enum err device_copies_new(const struct device_copy_parts *parts, struct device_copies **out);
/* Fails what is under way. */
void device_copies_end(struct device_copies *d);
void device_copies_free(struct device_copies *d);
/* An error of its own is the caller's, and fn is not called. */
FALLIBLE enum err device_copy_start(struct device_copies *d, const struct device_copy_request *rq, device_copied_fn fn, void *user);

/* Makes a device image of one rank of `use`, which it takes: new memory of the GPU that holds the rank's image. The GPU's holder does it, a
 * worker that does nothing else, so that no trainer's copy takes images with it. ok: {"bytes","allocated"}. ERR_DEVICE_FULL: the GPU has
 * no room. */
FALLIBLE enum err device_copy_image(struct device_copies *d, const char *device, uint32_t rank, struct state_dict_use **use,
				    device_copied_fn fn, void *user);
/* The keeper of device images (device_image.c) is asked whether the GPU has any, as its holder then stays, and told that the holder has
 * ended: err_last() says how. */
struct device_holding {
	bool (*any)(void *user, const char *device);
	void (*ended)(void *user, const char *device);
	void *user;
};
void device_copies_hold(struct device_copies *d, const struct device_holding *h);
