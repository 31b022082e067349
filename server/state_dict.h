/* state_dict.h: state dicts in shared memory: who holds which segment, in which generation, and for how long.
 *
 * A state dict has `world_size` ranks, each `slot_count` slots; a slot is one named segment.
 *
 *   free ──reserve──► open ──seal──► sealed ──release, or lease over──► free
 *                      └─fill─► filling ─┘
 *
 * Filling: the image's header is there and its length is fixed; how much of it is there says a number behind it, which a save that was
 * made with "await_seal" reads while it streams (worker/runner/gate.h). It is known to this run only: a restart finds the slot open.
 * Through a ring: the segment has room for a part of the image, and one save reads it as it goes round. Its seal says that all has been
 * put in, and makes it no generation that outlives anybody: no other job sees it, and what breaks off is lost, on all ranks.
 * A slot in use by a job is never handed out again: a release (or an expired lease) then waits for the job. Generations are
 * chosen by the client, the same on all ranks, and grow. A seal is in the journal before the seal is answered, so that a
 * restart opens the segments again by name. A segment that no row names is removed at start; if the journal that named it was
 * deleted, it becomes a rank of a state dict "orphaned-…" (state_dict_owner.c).
 * Leases are per rank; any call about the rank renews it. A state dict made by a load has
 * none unless the load asks for one: it stays until it is deleted. */
#pragma once
#include "base/buf.h"
#include "base/vec.h"
#include "server/lookup.h"
#include "server/loop.h"
#include "server/principal.h"
#include "spec/ref.h"

struct config;
struct journal;
struct events;
struct metrics;
struct server;
struct state_dicts;

enum { STATE_DICT_NAME_MAX = 200, STATE_DICT_WORLD_MAX = 65536, STATE_DICT_SLOTS_MAX = 16, STATE_DICTS_MAX = 4096,
       STATE_DICT_WAITERS_MAX = 4096, STATE_DICT_SUBSCRIBERS_MAX = 256, STATE_DICT_READERS_MAX = 64 };

struct state_dict_request {
	struct str name;
	int64_t world_size, slots;      /* slots 0: two */
	int64_t lease_ms;               /* 0: the configured one */
	const json_t *role;             /* {"publish":{"readers"}} or {"subscribe":{"publication","layout"}}, checked; NULL: neither */
	const json_t *on_owner_death;   /* {"save":{"storage","name" with {generation}, …}} as SURFACES says, checked; NULL: keep 1 h */
	struct principal who;
	struct idempotency idem;
};
/* ERR_STATE_DICT_EXISTS, ERR_IDEMPOTENCY_…. existing: an earlier request with the same key made it. */
typedef void (*state_dict_created_fn)(void *user, enum err e, const char *name, bool existing);
void state_dict_create(struct state_dicts *s, const struct state_dict_request *rq, state_dict_created_fn fn, void *user);

enum { SLOT_RING_MIN = 1 << 20 };
struct slot_ring {
	uint64_t offset, bytes;         /* multiples of 4096; bytes 0: there is none, the slot holds the whole image */
};
struct reservation {
	const char *segment;            /* "/dcpd-…" */
	uint32_t slot;
	uint64_t bytes;                 /* at least what was asked for */
	int64_t generation, lease_expires_ms;  /* wall clock; 0: no lease */
	bool fresh;                     /* new pages: the first copy will fault them */
};
typedef void (*reserved_fn)(void *user, enum err e, const struct reservation *r);
/* Waits up to wait_ms for a slot, then ERR_SLOTS_BUSY; ERR_BUSY if STATE_DICT_WAITERS_MAX reservations wait already.
 * ERR_GENERATION_STALE, ERR_SHM_EXHAUSTED (needed, free, held by whom).
 * The same rank and generation again gives the same slot back while it is open. */
void state_dict_reserve(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, uint64_t bytes,
			int64_t generation, int64_t wait_ms, reserved_fn fn, void *user);
/* The image's header is written and its length fixed; the rest comes, and then the seal with the same image_bytes. The slot has room for
 * the page behind the image. Once more with the same image_bytes is fine. */
/* ring: the image comes through it; the slot has room for it, and for the page behind it. */
FALLIBLE enum err state_dict_fill(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
				  uint64_t image_bytes, const struct slot_ring *ring);
/* Sealing what is sealed already with the same generation and image_bytes is fine. wish: what becomes of this generation when its owner
 * dies, in place of what the state dict says; checked, copied, in the journal with the seal; NULL: nothing is said. */
/* ring: all of the image has been put into the ring that filling began with; NULL: the slot holds it. ERR_RING_LOST: this daemon knows of
 * no such filling. */
void state_dict_seal(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
		     uint64_t image_bytes, const json_t *wish, const struct slot_ring *ring, done_fn fn, void *user);
/* Frees the rank's slot of this generation, once no job uses it; a generation that is not held is fine (it was released before).
 * why: the client's reason, which a job that awaits the seal fails with; may be NULL. */
void state_dict_release(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
			const char *why, done_fn fn, void *user);
/* generation: that it is still being filled is asked, too: ERR_RING_LOST where nobody reads its ring any more; -1: it is not asked.
 * expires_ms_out: wall clock; 0 if it has no lease. */
FALLIBLE enum err state_dict_renew(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
				   int64_t *expires_ms_out);
/* A rank of a subscriber uses this generation from now on, and none before: when all ranks have said so, the one before is free. Once more
 * is fine. ERR_NOT_SEALED: there is none. */
FALLIBLE enum err state_dict_take(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation);
/* Calls back when all ranks of a subscriber have a generation newer than `after`, when an update to one has failed, or after wait_ms.
 * ERR_NOT_FOUND, also when it is deleted meanwhile; ERR_FORBIDDEN; ERR_STATE_CONFLICT: it is no subscriber; ERR_BUSY if
 * STATE_DICT_WAITERS_MAX requests wait. */
void state_dict_follow(struct state_dicts *s, const struct principal *who, struct str name, int64_t after, int64_t wait_ms, done_fn fn,
		       void *user);
/* The same of a publication, for who may read it: a generation newer than `after` is sealed by all ranks. ERR_NOT_FOUND: nothing is
 * published under that name. */
void state_dict_await_version(struct state_dicts *s, const struct principal *who, struct str name, int64_t after, int64_t wait_ms,
			      done_fn fn, void *user);
/* A subscriber on another node, as it says of itself; it is listed as long as it is heard of. ERR_NOT_FOUND, ERR_FORBIDDEN, ERR_BUSY. */
struct state_dict_guest {
	struct state_dict_guest *next;
	char node[65], name[STATE_DICT_NAME_MAX + 1];
	uid_t uid;                      /* the caller's; set when it is noted */
	int64_t world_size, applied;    /* applied -1: nothing yet */
	int64_t seen_ms;                /* monotone clock; set when it is noted */
	bool gone;                      /* it was closed: it is listed no longer */
};
FALLIBLE enum err state_dict_note_guest(struct state_dicts *s, const struct principal *who, struct str name,
					const struct state_dict_guest *guest);
/* ERR_STATE_DICT_BUSY while a job uses it. */
void state_dict_delete(struct state_dicts *s, const struct principal *who, struct str name, done_fn fn, void *user);

/* The record as SURFACES shows it, with "uid", "created_at", "bytes" and each slot's lease; ERR_NOT_FOUND, ERR_FORBIDDEN. */
FALLIBLE enum err state_dict_put(struct state_dicts *s, const struct principal *who, struct str name, struct buf *out);
/* {"state_dicts":[…short records: no ranks…],"next_page_token"?}; those the caller may see. */
FALLIBLE enum err state_dict_list(struct state_dicts *s, const struct principal *who, uint32_t page_size, struct str page_token,
				  struct buf *out);
/* The same list of the replicas of a checkpoint, or of all checkpoints of a run (of->name), all of them. */
FALLIBLE enum err state_dict_list_replicas(struct state_dicts *s, const struct principal *who, const struct ref *of, bool of_run,
					   struct buf *out);
/* {"limit","used","free"} bytes of shared memory, in that order. */
void state_dict_shm(const struct state_dicts *s, uint64_t *limit_out, uint64_t *used_out, uint64_t *free_out);
uint64_t state_dict_orphaned(const struct state_dicts *s);    /* bytes in use of state dicts with "orphaned_at" */

/* ---- for the other modules of server/ ---- */

/* A job's hold on one generation of a state dict: its slots are not handed out before state_dict_unuse. */
struct state_dict_rank_use {
	uint32_t rank, slot;
	int fd;                         /* the slot's own: do not close */
	const char *segment;
	uint64_t bytes, image_bytes;
	bool filling;                   /* not sealed yet: see state_dict_await */
	uint32_t rewrites;              /* of the slot, when the use began: see state_dict_is_rewritten */
	struct slot_ring ring;
};
struct state_dict_use {
	char *name;
	uint32_t world_size;
	uid_t uid;                           /* whose state dict it is */
	int64_t generation;
	struct state_dict_rank_use *ranks;   /* world_size of them */
	char job[27];
	bool makes, numbered;                /* of state_dict_make: not yet announced; its generation is known */
	bool writes;                         /* of state_dict_use_rank: into the slot */
	bool rewrites;                       /* state_dict_rewrite was called */
	struct state_dict_use *next;         /* all uses of one state dict */
	struct state_dict *owner;
};
/* generation -1: the newest that all ranks sealed. ERR_NOT_SEALED names the ranks that lack it. job: its id, or "" for a look-up. */
FALLIBLE enum err state_dict_use(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation,
				 const char *job, struct state_dict_use **out);
/* The same of a generation that may have been released meanwhile, as long as others hold it. */
FALLIBLE enum err state_dict_use_held(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation,
				      struct state_dict_use **out);
/* Checks without holding: what state_dict_use would give, and its bytes. */
FALLIBLE enum err state_dict_check(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation,
				   int64_t *generation_out, uint64_t *image_bytes_out);
/* A hold on one rank's slot alone, of which the other ranks of the use have nothing: to write into it, as long as it is open (seal and
 * fill are refused meanwhile; a ring that is being filled may be written to), or to read from it, once it is sealed. ERR_STATE_CONFLICT. */
FALLIBLE enum err state_dict_use_rank(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
				      bool to_write, struct state_dict_use **out);
/* The use's job fills the sealed slots in place, from now to the end of the use. A second call changes nothing. */
void state_dict_rewrite(struct state_dict_use *use);
/* Whether a job fills the rank's slot in place now, or has done so since the use began: then what was read of it meanwhile may be torn. */
bool state_dict_is_rewritten(const struct state_dict_use *use, uint32_t rank);
void state_dict_unuse(struct state_dict_use **use);
/* No newer generation has taken the first rank's slot of this one, and its process is not known to have ended. */
bool state_dict_is_latest(const struct state_dicts *s, struct str name, int64_t generation);
bool state_dict_use_has_ring(const struct state_dict_use *use);  /* it can be read once */

/* A look-up about what a state dict holds: {"tensors", "prefix"?, "page_size", "page_token"?} of its newest generation sealed by all
 * ranks (generation -1) or of this one. `more` (taken) holds the op and the members beside those that name the segments. The segments
 * are kept from reuse until the answer. */
void state_dict_ask(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation, json_t *more, lookup_fn fn,
		    void *user);

/* ---- Images: the bytes of a sealed generation, for readers that are no workers of this daemon ----
 * A reading holds the generation: its slots are not handed out before all its readers have ended. What a node reads (lingers) is held for
 * some seconds more, because the next range is on its way. */
enum { STATE_DICT_ETAG_MAX = 64 };
struct state_dict_reading;
struct state_dict_reader {
	struct principal who;
	struct str name;
	int64_t generation;             /* -1: the newest that all ranks sealed */
	bool lingers;
};
/* ERR_NOT_FOUND, ERR_FORBIDDEN, ERR_NOT_SEALED, ERR_BUSY. */
FALLIBLE enum err state_dict_read_begin(struct state_dicts *s, const struct state_dict_reader *r, struct state_dict_reading **out);
void state_dict_read_end(struct state_dict_reading **reading);  /* NULL inside is fine */
/* All nodes that were to read the generation have it: nothing lingers. A further node that is between two ranges finds out when the slot is
 * handed out (ERR_CHECKPOINT_REPLACED there). */
void state_dict_read_over(const struct state_dict_use *use);
struct state_dict_image {
	int fd;
	uint64_t bytes;
	int64_t generation;
	const char *etag;               /* with its quotes; one for all of the generation. The reading's */
};
/* A rank's image: out->fd is the caller's. */
FALLIBLE enum err state_dict_read_image(const struct state_dict_reading *g, int64_t rank, struct state_dict_image *out);
/* The manifest of all images, as query/lookup_digests.c makes it, which reads all bytes, unless headers_only; its fd is borrowed. The
 * reading must last until fn was called. ERR_TIMED_OUT: they are not there after wait_ms (< 0: no limit), and still being computed. */
typedef void (*state_dict_digests_fn)(void *user, enum err e, const struct state_dict_image *digests);
void state_dict_read_digests(struct state_dict_reading *g, bool headers_only, int64_t wait_ms, state_dict_digests_fn fn,
			     void *user);

/* A job may be made before its generation is sealed. fn is told of each seal (NEWS_MORE); that all ranks are filling or sealed, with the
 * use, which is the receiver's (NEWS_FILLING); and in the end that all ranks have sealed, with the use unless it was given before, or with
 * ERR_NOT_SEALED that this will not come: released, deleted, a rank's lease over, a rank gone on to a newer generation, timeout. After
 * these two the await is gone. A use that was given is let go of after the await. */
enum state_dict_news { NEWS_MORE, NEWS_FILLING, NEWS_SEALED, NEWS_LOST };
typedef void (*state_dict_news_fn)(void *user, enum state_dict_news news, struct state_dict_use *use, enum err e);
struct state_dict_wish {
	const struct principal *who;
	struct str name;
	int64_t generation, timeout_ms;
	const char *job;
	state_dict_news_fn fn;          /* NEWS_FILLING may come before state_dict_await has returned, the others not */
	void *user;
};
struct state_dict_await;
/* All sealed already: *use_out, and no await. ERR_NOT_SEALED if it is certain that it does not come. */
FALLIBLE enum err state_dict_await(struct state_dicts *s, const struct state_dict_wish *w, struct state_dict_use **use_out,
				   struct state_dict_await **out);
void state_dict_await_stop(struct state_dict_await **await);      /* NULL inside is fine */
/* "awaiting seals of ranks 1, 3" */
void state_dict_await_missing(const struct state_dict_await *a, char *text, size_t n);
bool state_dict_exists(const struct state_dicts *s, struct str name);
uint32_t state_dict_world(const struct state_dicts *s, struct str name);   /* 0: there is none */

/* The target of a job: the segments of a new state dict, or of the next generation of one that exists, are made off the loop; then
 * fn gets the use. They become visible to others, all at once and as a sealed generation, with state_dict_keep and then, when the
 * transaction is on disk, state_dict_announce; or they go away with state_dict_drop, and nothing has changed.
 * Their generation is the state dict's last + 1, or `at_least` where that is larger; use->generation has it after state_dict_keep.
 * A generation that a job made is released when its last user is gone; one that a trainer sealed stays until the trainer releases it. */
enum { STATE_DICT_MADE_FIRST = 1 };      /* the generation that a job fills when it makes the state dict, too */
struct state_dict_make {
	struct str name;
	uint32_t world_size;
	bool next_generation;           /* of a state dict that may exist; else ERR_STATE_DICT_EXISTS */
	int64_t at_least;
	const uint64_t *bytes, *image_bytes; /* world_size of each; copied */
	struct principal who;
	const char *job;
	int64_t lease_ms;                /* 0: it stays until it is deleted; else it is dropped when nobody renews it */
	/* {"replica":{"job","storage","name","node","state_dict","part"}}: for a neighbour; copied. NULL: it is no replica */
	const json_t *replica;
};
typedef void (*made_fn)(void *user, enum err e, struct state_dict_use *use);   /* use: owned by the receiver */
void state_dict_make(struct state_dicts *s, const struct state_dict_make *m, made_fn fn, void *user);
/* Nobody wants what is being made: if it is a new state dict, its name is free from now on. fn is called all the same. */
void state_dict_make_stop(struct state_dicts *s, struct str name);
struct journal_txn;
/* A save, as the manifest of its checkpoint names it. */
struct state_dict_save {
	const char *job;                /* of a save by several hosts: this one's, which the manifest may not name */
	const char *hosts;              /* what they call the save; NULL: it is of one host */
	struct ref checkpoint;
};
/* The save of what is used has succeeded: its owner's death need not keep it any longer, and as long as the bytes
 * are in its segments they are the checkpoint's. */
void state_dict_saved(struct state_dict_use *use, const struct state_dict_save *save);
/* After a restart: an earlier run saved this generation. Saves are told from the newest on. */
void state_dict_recall(struct state_dicts *s, const struct ref *source, const struct state_dict_save *save);
/* When the first of the use's slots was handed out (monotone clock); 0: not known. */
int64_t state_dict_begun_ms(const struct state_dict_use *use);
/* Is there such a state dict, with a trainer that lives? */
bool state_dict_lives(const struct state_dicts *s, struct str name);
/* The segments that hold, as far as their daemon knows, what a checkpoint of this name was saved from: a list for a worker
 * (worker/runner/memory.h), whose descriptors are numbered from first_fd on. They are borrowed, and nothing keeps them from reuse: the
 * worker compares digests. Set first_fd, else zeros; state_dict_memory_drop. */
struct state_dict_memory {
	uint32_t first_fd;
	json_t *list;                   /* NULL: there are none */
	struct vec(int) fds;
};
FALLIBLE enum err state_dict_memory_find(const struct state_dicts *s, const struct ref *checkpoint, struct state_dict_memory *out);
void state_dict_memory_drop(struct state_dict_memory *m);
/* ---- Replicas: copies of what a save of another node sealed, made by loads out of its memory. They have no lease: one goes when a newer
 * one of the same state dict, run and node is whole, after --neighbour-keep, when its node is gone from the cluster, or when it is deleted.
 * Their bytes are limited by --neighbour-memory. A load of the checkpoint takes them for what they are (state_dict_memory_find). ---- */
/* Drops those that are over, unless they are in use. is_gone: has the cluster no such node any more? NULL: it is not known. */
void state_dict_replicas_sweep(struct state_dicts *s, bool (*is_gone)(const void *user, const char *node), const void *user);
uint64_t state_dict_replica_bytes(const struct state_dicts *s);
/* The copies of a checkpoint that a save made, or all saves before a job. They are copies of nothing from then on, and go as soon as
 * nobody reads them. */
struct replica_withdrawal {
	struct ref of;
	struct str job;
	bool is_exact;                 /* of the save `job` alone; else of those with a smaller id */
};
bool state_dict_is_withdrawn(const char *save, const struct replica_withdrawal *w);
void state_dict_replicas_withdraw(struct state_dicts *s, const struct replica_withdrawal *w);
bool state_dict_is_for_neighbour(const struct state_dicts *s, struct str name);

/* Adds its rows to the transaction that ends the job; again, if that one fails. */
FALLIBLE enum err state_dict_keep(struct state_dict_use *use, struct journal_txn *txn);
void state_dict_announce(struct state_dict_use *use);
void state_dict_drop(struct state_dict_use **use);

/* The parts below that state dicts use. */
struct state_dict_parts {
	const struct config *config;
	struct loop *loop;
	struct journal *journal;
	struct events *events;
	struct metrics *metrics;
	struct lookups *lookups;
	struct unread *unread;
	const bool *draining;          /* new generations are refused */
};
FALLIBLE enum err state_dicts_new(const struct state_dict_parts *parts, struct state_dicts **out);
FALLIBLE enum err state_dict_orphans_start(struct server *s);    /* saves and drops what dead trainers left; after jobs_new */
/* Keeps subscribers at their publication's newest version; after jobs_new. */
FALLIBLE enum err state_dict_updates_start(struct server *s);
/* A job that redistributed with `delta` has ended. */
struct state_dict_updated {
	struct str name;                /* of its target */
	int64_t generation;             /* of its source */
	bool succeeded;
	const json_t *error, *result;   /* error NULL: it was cancelled */
};
void state_dict_update_ended(struct server *s, const struct state_dict_updated *u);
/* The request of an update, without defaults; NULL: no memory. layout: the subscriber's rules, or NULL. */
json_t *state_dict_update_request(const json_t *subscribe, const char *subscriber, json_int_t world_size, int64_t generation);
/* {"publications":[…]}: records with their "subscribers"; name: of one, as that record alone. Those that the caller may read. */
FALLIBLE enum err state_dict_publications(struct state_dicts *s, const struct principal *who, struct str name, struct buf *out);
void state_dicts_settle(struct state_dicts *s);       /* after the journal's jobs took up what they use */
void state_dicts_free(struct state_dicts *sd);
uint32_t state_dict_count(const struct state_dicts *s);
uint32_t state_dict_subscribers(const struct state_dicts *s, double *lag_out);   /* lag: of the one that is furthest behind, in seconds */
