/* device_image.h: images of sealed state dicts in the memory of a GPU, for processes that map them: an inference engine that starts again
 * has its weights at once. See api/engines.md for the contract.
 *
 *   filling ──► kept ──dropped, superseded, or over──► dropped ──its last user has gone──► (removed)
 *                 └─────────its worker has ended─────► lost
 *
 * The memory is a VMM allocation, which has no owner but its references: the descriptor here, and the mappings of those who were given
 * one. So it outlives every engine. A legacy IPC handle is good only while its exporter lives; none is taken or made here.
 *
 * An image is one rank's generation on one GPU. The next generation of the same rank that is kept, once it is whole, supersedes the
 * image. While an engine has it (a connection that was given the descriptor is open) it stays; without one it goes after its time. Nothing
 * is in the journal: the memory ends with the daemon, whose host tier, the sealed state dict in shared memory, does not. */
#pragma once
#include "base/buf.h"
#include "server/loop.h"
#include "server/principal.h"

struct config;
struct descriptors;
struct device_copies;
struct device_images;
struct devices;
struct events;
struct metrics;
struct state_dicts;

struct device_image_parts {
	const struct config *config;
	struct loop *loop;
	struct events *events;
	struct devices *devices;
	struct descriptors *descriptors;
	struct device_copies *copies;
	struct state_dicts *state_dicts;
};

FALLIBLE enum err device_images_new(const struct device_image_parts *parts, struct device_images **out);
void device_images_free(struct device_images *d);      /* after device_copies_end and descriptors_free */

struct device_image_request {
	struct principal who;
	struct str state_dict;
	int64_t rank, generation;       /* generation -1: the newest that all ranks sealed */
	const char *device;             /* "GPU-…"; NULL: the only one */
	int64_t ttl_ms;                 /* how long it stays without an engine; 0: until it is dropped; -1: as long as keep-sealed says */
};
/* record: of the image, as device_images_list has it; NULL with an error. */
typedef void (*device_image_fn)(void *user, enum err e, const struct buf *record);
/* Calls fn when the image is there. If it is there already, *record gets its record, and fn is not called. *change_out: the image is new,
 * or has another time. ERR_DEVICE_FULL: over the limit, or the GPU has no room; ERR_NOT_FOUND, ERR_FORBIDDEN, ERR_NOT_SEALED,
 * ERR_STATE_CONFLICT of the state dict; ERR_BACKEND_UNAVAILABLE: no driver, or one that shares no memory. */
FALLIBLE enum err device_image_keep(struct device_images *d, const struct device_image_request *rq, device_image_fn fn, void *user,
				    struct buf *record, bool *change_out);
/* {"device_images":[…]}: those that the caller may use; state_dict: of this one alone, if n > 0. */
FALLIBLE enum err device_images_list(struct device_images *d, const struct principal *who, struct str state_dict, struct buf *out);
/* Of one: its record. ERR_NOT_FOUND, ERR_FORBIDDEN, as of the calls below. */
FALLIBLE enum err device_image_put(struct device_images *d, const struct principal *who, struct str id, struct buf *out);
/* Gives the image's memory to the client of the token (server/descriptors.h), whose connection stays open as long as it uses it. */
FALLIBLE enum err device_image_attach(struct device_images *d, const struct principal *who, struct str id, struct str token,
				      struct buf *record);
FALLIBLE enum err device_image_drop(struct device_images *d, const struct principal *who, struct str id);
/* Bytes of device memory, also of images that only engines hold. */
uint64_t device_images_bytes(const struct device_images *d, uint32_t *count_out);
