/* state_dict_impl.h: what the files state_dict*.c share; nobody else includes it. */
#pragma once
#include "os/seg.h"
#include "os/watch.h"
#include "server/journal.h"
#include "server/loop.h"
#include "server/state_dict.h"
#include "base/map.h"

/* The numbers of the states that a crash must not lose are in the journal. */
enum slot_state {
	SLOT_FREE = 0,              /* may be handed out; has a segment if bytes > 0 */
	SLOT_OPEN = 1,              /* a client fills it */
	SLOT_SEALED = 2,
	SLOT_LEAVING = 3,           /* sealed and released, but a job still reads it; free when that ends */
	SLOT_MADE = 4,              /* in the journal only: sealed, and made by a job (slot.made) */
	SLOT_MAKING = 16,           /* its segment is being made */
	SLOT_SEALING = 17,          /* waits for the journal */
	SLOT_FREEING = 18,          /* the same */
	SLOT_FILLING = 19,          /* a job writes what will be the next generation; nobody else sees it */
	SLOT_STATES,
};

struct slot {
	uint64_t bytes, image_bytes;
	int64_t generation;
	int fd;
	uint32_t rank;
	uint16_t number, uses;
	uint8_t state;              /* enum slot_state */
	bool filling;               /* open, or leaving before it was sealed: image_bytes is fixed, its bytes are on their way */
	struct slot_ring ring;      /* while it is filling */
	bool is_written;            /* a worker copies a device's memory into it: it cannot be sealed */
	uint16_t rewriters;         /* jobs that hold it, sealed, to fill it in place */
	uint32_t rewrites;          /* how often such a job began or ended: a copy of its bytes is of one such count */
	bool handed;                /* all of the image has been put into the ring */
	int64_t opened_ms;          /* monotone clock: it was handed out; 0: by an earlier daemon */
	struct watch *filler;       /* of the process that filled it as a ring last; NULL: none */
	bool filler_gone;           /* that process has ended: the segment goes as soon as nobody reads it */
	struct state_dict *filler_sd;
	bool look;                  /* sealed, and its header was not read since */
	bool made;                  /* what it holds was made by a job: nobody releases it but the job that makes the next */
	json_t *problem;            /* why problem_generation is no image; read it by state_dict_slot_problem() */
	int64_t problem_generation;
	char segment[SEG_NAME_MAX];
};

struct rank {
	int64_t expires_ms;         /* service time; 0: no lease */
	int64_t last_generation;    /* sealed by this rank; -1: none */
};

/* A generation whose bytes are a checkpoint's. */
struct slot_memory {
	int64_t generation;
	char job[27], hosts[72];    /* the save, as the checkpoint's manifest names it (state_dict_save) */
	char *storage, *name;       /* of the checkpoint; NULL: the entry is free */
};

/* A version that this run saw published. */
struct feed_version {
	int64_t generation, at_ms, wall_ms;  /* at_ms: monotone clock; 0: the entry is free */
};
enum { FEED_VERSIONS = 16 };

/* The part of a state dict that only publications and subscribers have (state_dict_feed.c). */
struct state_dict_feed {
	bool publishes;             /* else it subscribes */
	json_t *role;               /* {"publish":{…}} or {"subscribe":{…}}, as it was asked for */
	const char *publication;    /* that it subscribes to; in `role` */
	const char *node;           /* … of another node; NULL: of this one */
	struct feed_version versions[FEED_VERSIONS];
	uint32_t version_count;
	/* of a subscriber: */
	int64_t *taken;             /* per rank: the version that it uses; -1: none that this run knows of */
	int64_t applied;            /* the newest that all ranks have taken; -1: none */
	char job[27];               /* the update under way; "": none */
	bool asking;                /* it is being made */
	int64_t retry_ms;           /* service time: no update is asked for before */
	int64_t failed_generation;  /* of the publication, whose update failed; -1: the last one did not */
	json_t *problem;            /* … and why */
	enum err stopped;           /* ERR_PUBLISHER_AWAY, ERR_FORBIDDEN: `problem` is that, and goes when it is over; OK: it is another */
	uint64_t updates, changed_bytes, kept_bytes;   /* how many succeeded; of the last one */
	/* of a subscriber to another node's publication (state_dict_remote.c): */
	int64_t published;          /* the newest version there; -1: none that is known */
	int64_t told;               /* `applied`, as that node knows it */
	int64_t silent_ms;          /* monotone clock: that node has not answered since; 0: it does */
	int64_t ask_ms;             /* monotone clock: it is not asked before */
	bool asks, tells;           /* a request is under way: for the next version, with `applied` alone */
	/* of a publication: */
	struct state_dict_guest *guests;
	bool yields;                /* its slots are about to be taken from readers of older versions */
};

struct slot_waiter;
struct feed_waiter;
struct state_dict_await;

struct state_dict {
	struct state_dict *next;    /* among those that are leaving */
	struct state_dicts *all;
	char name[STATE_DICT_NAME_MAX + 1];
	uid_t uid;
	uint32_t world_size;
	uint32_t slot_count, own_slots;      /* own: those its maker asked for; jobs that write into it may have added more */
	struct rank *ranks;
	struct slot *slots[STATE_DICT_SLOTS_MAX]; /* slots[number][rank]: they stay where they are when more are added */
	int64_t lease_ms, created_ms;
	int64_t orphaned_ms;        /* when all leases were over, by the wall clock, for the record; 0: they are not */
	int64_t orphan_since_ms;    /* the same moment in service time */
	int64_t last_generation;    /* the newest that all ranks sealed; -1: none */
	int64_t lost_generation;    /* the newest whose rings nobody reads any more; -1: none */
	int64_t saved_generation;   /* the newest that a job brought to a storage, as far as this run knows; -1: none */
	struct slot_memory memory[STATE_DICT_SLOTS_MAX];   /* saved generations, as far as they are known */
	json_t *on_owner_death;     /* {"save" or "drop", "generations": {"7": the same for one, …}}; NULL: nothing is asked for */
	char orphan_job[27];        /* the save that on_owner_death asked for */
	int64_t orphan_retry_ms;    /* service time */
	bool orphan_asking;
	struct state_dict_use *uses;
	struct slot_waiter *waiters;
	struct state_dict_await *awaits;     /* jobs that were made before their generation is sealed */
	struct loop_timer *look_timer;       /* until the headers of sealed slots are read */
	bool looking;               /* a worker reads them */
	uint32_t refs;              /* those who will come back from another thread or the journal */
	bool dead;                  /* out of the table; freed with the last ref */
	bool hidden;                /* made by a job that has not ended: nobody sees it, and the journal has no row */
	json_t *replica;            /* {"replica":{"job","storage","name","node","state_dict","part"}}: a neighbour's; NULL: it is none */
	uint64_t replica_bytes;     /* counted in the budget for neighbours */
	int64_t replica_until_ms;   /* service time: it goes then */
	bool spent;                 /* a newer one stands in its place: its warm slots are for the next one, and the journal has no row */
	bool withdrawn;             /* a replica that stands for its checkpoint no more; the journal has no row */
	struct state_dict_feed *feed;   /* NULL: neither a publication nor a subscriber */
};

/* The functions that a slot's changes call for those who wait for it (state_dict_await.c, which stands above state_dict_slot.c). */
struct slot_watch {
	void (*changed)(struct state_dict *sd);      /* something has happened to its slots */
	void (*given_up)(struct state_dict *sd, uint32_t rank, int64_t generation, const char *why);
	void (*filler_gone)(struct state_dict *sd, struct slot *sl);   /* its process has ended, and not all was in the ring */
	void (*deleted)(struct state_dict *sd);
	void (*complete)(struct state_dict *sd, int64_t generation);   /* all ranks have sealed it, for the first time */
};

struct state_dicts {
	struct state_dict_parts parts;
	const struct slot_watch *watch;
	struct map table;
	struct seg_owner owner;     /* this daemon; constant from the start on */
	uint64_t used_bytes;
	uint32_t waiting;               /* requests that wait: for a slot, or for a generation */
	uint32_t subscribers;
	struct feed_waiter *followers;
	struct state_dict *leaving;             /* deleted subscribers of other nodes, until those are told; each with a ref */
	void (*yield)(struct state_dict *sd);   /* state_dict_readings_yield */
	struct events_listener *listener;
	struct seg_maker *maker;
	struct state_dict_reading *readings;
	uint32_t reading_count;
	struct loop_timer *tick, *orphan_tick, *update_tick;
};

/* ---- state_dict_slot_move.c: the life of a slot ---- */
void slot_move(struct slot *sl, enum slot_state to);     /* which must be legal */
bool slot_may_move(const struct slot *sl, enum slot_state to);
void slot_stop_filling(struct slot *sl);                /* its state stays */
void slot_take_up(struct slot *sl, enum slot_state state);   /* of a new record of the journal's */

/* ---- state_dict_record.c ---- */
FALLIBLE enum err state_dict_find(struct state_dicts *s, const struct principal *who, struct str name, struct state_dict **out);
/* The same, for one of its ranks, whose lease begins anew. */
FALLIBLE enum err state_dict_find_rank(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank,
				       struct state_dict **out);
/* The same for one who will only read it: of a publication its readers, too. */
FALLIBLE enum err state_dict_find_to_read(struct state_dicts *s, const struct principal *who, struct str name, struct state_dict **out);
bool state_dict_may_read(const struct principal *who, const struct state_dict *sd);
FALLIBLE enum err state_dict_alloc(struct state_dicts *s, struct str name, uint32_t world_size, uint32_t slots, uid_t uid,
				   struct state_dict **out);          /* in the table, one ref fewer than none: plain */
void state_dict_free(struct state_dict *sd);
void state_dict_unref(struct state_dict *sd);
FALLIBLE enum err state_dict_add_slots(struct state_dict *sd);   /* one more for each rank; ERR_SLOTS_BUSY at STATE_DICT_SLOTS_MAX */
static inline struct slot *state_dict_slot(const struct state_dict *sd, uint32_t rank, uint32_t number)
{
	return &sd->slots[number][rank];
}
/* A warm segment serves if it is large enough and not twice as large. */
static inline bool state_dict_slot_fits(const struct slot *sl, uint64_t bytes)
{
	return sl->bytes >= bytes && sl->bytes / 2 <= bytes;
}
/* All slots, numbered through. */
static inline uint32_t state_dict_slots(const struct state_dict *sd)
{
	return sd->world_size * sd->slot_count;
}
static inline struct slot *state_dict_nth(const struct state_dict *sd, uint32_t i)
{
	return &sd->slots[i / sd->world_size][i % sd->world_size];
}
void state_dict_slot_row(struct journal_txn *t, const struct state_dict *sd, const struct slot *sl, int state);
void state_dict_row(struct journal_txn *t, const struct state_dict *sd);
void state_dict_write(struct state_dict *sd);    /* its row, in a transaction of its own */
void state_dict_slot_write(struct state_dict *sd, const struct slot *sl, int state, done_fn fn, void *user);   /* the same of a slot */
void state_dict_drop_segment(struct state_dict *sd, struct slot *sl);
bool state_dict_complete(const struct state_dict *sd, int64_t generation);
int64_t state_dict_newest(const struct state_dict *sd);          /* -1: none */
struct slot *state_dict_slot_of(const struct state_dict *sd, uint32_t rank, int64_t generation, enum slot_state state);
/* All that the rank has of this generation is there, or has been put into its ring. */
bool state_dict_given(const struct state_dict *sd, uint32_t rank, int64_t generation);
/* The rank's slot of this generation if it is filling or sealed; else NULL. */
struct slot *state_dict_begun(const struct state_dict *sd, uint32_t rank, int64_t generation);
/* The ranks that lack a sealed slot of this generation (< 0: of any) as text, "1, 3"; how many, and the first. */
uint32_t state_dict_missing(const struct state_dict *sd, int64_t generation, char *ranks, size_t n, int64_t *first_out);
void state_dict_lease_begin(struct state_dict *sd);              /* of all ranks; without a lease: nothing */
int64_t state_dict_lease_wall(const struct state_dict *sd, uint32_t rank);   /* when it ends, for the record; 0: no lease */
void state_dict_emit(struct state_dict *sd, const char *what, int64_t generation);

/* ---- state_dict_memory.c ---- */
void state_dict_memory_note(struct state_dict_use *use, const struct state_dict_save *save);
int64_t state_dict_memory_newest(const struct state_dict *sd);   /* of which some rank still has the bytes; -1: none */
void state_dict_memory_free(struct state_dict *sd);

/* ---- state_dict_use.c ---- */
FALLIBLE enum err state_dict_new_use(struct state_dict *sd, int64_t generation, const char *job, struct state_dict_use **out);
/* A use of a generation that all ranks have sealed, or are filling. */
FALLIBLE enum err state_dict_hold(struct state_dict *sd, int64_t generation, const char *job, struct state_dict_use **out);

/* ---- state_dict_replica.c: copies of what neighbours saved (see state_dict.h) ---- */
/* Makes it one, with so many bytes to come. Older replicas of the run go for that; *adopted_out: bytes of segments that it has got from a
 * spent one. ERR_SHM_EXHAUSTED: the budget has no room. */
FALLIBLE enum err state_dict_replica_admit(struct state_dict *sd, const json_t *role, const struct state_dict_use *use, uint64_t bytes,
					   uint64_t *adopted_out);
void state_dict_replica_kept(struct state_dict *sd);     /* it is whole: those that it replaces go, and loads of the checkpoint find it */
/* Of a journal's row, whose slots come later. Takes the role. */
FALLIBLE enum err state_dict_replica_take(struct state_dict *sd, json_t *role);
void state_dict_replicas_recall(struct state_dicts *s);  /* once the slots are there */
bool state_dict_is_replica(const struct state_dict *sd, const struct ref *of, bool of_run);
void state_dict_replica_put(const struct state_dict *sd, struct buf *out);

/* ---- state_dict_ask.c ---- */
/* state_dict_ask() of what is held already: the caller keeps the use until the answer. */
void state_dict_ask_use(struct state_dicts *s, const struct state_dict_use *use, json_t *more, lookup_fn fn, void *user);

/* ---- state_dict_image.c ---- */
void state_dict_readings_free(struct state_dicts *s);
/* A publisher waits for a slot: soon, its readers on other nodes let go of versions that are not the newest. */
void state_dict_readings_yield(struct state_dict *sd);

/* ---- state_dict_update.c, state_dict_remote.c ---- */
/* No update until state_dict_update_goes_on(): `why` is this thread's latest error. Ends the waits of its ranks, once. */
void state_dict_update_stopped(struct state_dict *sd, enum err why);
void state_dict_update_goes_on(struct state_dict *sd);
void state_dict_remote_look(struct server *s, struct state_dict *sd);  /* asks and tells the publication's node what is due */
void state_dict_remote_goodbyes(struct server *s);                      /* tells it of subscribers that were deleted */

/* ---- state_dict_await.c ---- */
void state_dict_await_look(struct state_dict *sd);               /* something has happened to its slots or leases */
void state_dict_await_deleted(struct state_dict *sd);
extern const struct slot_watch state_dict_await_watch;
bool state_dict_await_uses(const struct state_dict *sd, const struct state_dict_use *u);   /* one that it has given, and watches */

/* ---- state_dict_view.c ---- */
void state_dict_put_head(const struct state_dict *sd, struct buf *out);   /* its short record, open at the end: "}" is the caller's */

/* ---- state_dict_space.c: accounting, and threads that make segments ---- */
struct seg_wanted {
	struct state_dict *sd;          /* gets a ref for the time being */
	struct slot *slot;
	uint64_t bytes;
	void (*fn)(void *user, enum err e);   /* the slot has its segment (state unchanged), or e says why not */
	void *user;
};
FALLIBLE enum err state_dict_space_new(struct state_dicts *s);
void state_dict_space_free(struct state_dicts *all);
/* Free bytes for a promise, from slots that nobody holds if need be; ERR_SHM_EXHAUSTED, and then nothing was dropped. */
FALLIBLE enum err state_dict_space_clear(struct state_dicts *s, uint64_t bytes);
/* Checks the quota, counts the bytes, and makes the segment on a helper thread. On error nothing was counted. */
FALLIBLE enum err state_dict_space_make(struct state_dicts *s, const struct seg_wanted *w);
uint64_t state_dict_space_round(uint64_t bytes);

/* ---- state_dict_owner.c: whose segments are whose ---- */
FALLIBLE enum err state_dict_owner_new(struct state_dicts *s);        /* before any segment is opened or made */
void state_dict_owner_hold(int fd);                              /* while it is open, other daemons see that it is in use */
/* The same for a segment that a row names. ERR_STATE_CONFLICT: the daemon of another state directory holds it. */
FALLIBLE enum err state_dict_owner_take(struct state_dicts *s, const char *segment, int fd);
/* After all rows have been taken up: removes segments that a crash left behind, and makes state dicts of those whose journal is gone. */
FALLIBLE enum err state_dict_owner_sweep(struct state_dicts *s);

/* ---- state_dict_slot.c ---- */
void state_dict_free_slot(struct state_dict *sd, struct slot *sl);   /* through the journal, then whoever waits */
void state_dict_kill(struct state_dict *sd);                     /* out of the table, segments unlinked; freed when unreferenced */
void state_dict_serve_waiters(struct state_dict *sd);
void state_dict_fail_waiters(struct state_dict *sd);
/* A slot that was not sealed and will not be, while a job reads it: free when that ends. */
void state_dict_abandon_slot(struct state_dict *sd, struct slot *sl);

/* ---- state_dict_feed.c: publications and subscribers ---- */
FALLIBLE enum err state_dict_feed_new(struct state_dict *sd, const json_t *role);
void state_dict_feed_free(struct state_dict *sd);
void state_dict_feed_leave(struct state_dict *sd);               /* it is dead: its publication's node will be told */
bool state_dict_publishes(const struct state_dict *sd);
bool state_dict_subscribes(const struct state_dict *sd);
void state_dict_feed_complete(struct state_dict *sd, int64_t generation);      /* all ranks have sealed it */
int64_t state_dict_feed_taken(const struct state_dict *sd);      /* the oldest version that a rank uses; -1: of some rank it is not known */
struct state_dict *state_dict_publication_of(const struct state_dict *subscriber);     /* NULL: there is none now */
int64_t state_dict_published(const struct state_dict *subscriber);      /* the newest version of its publication; -1: none is known */
void state_dict_learn(struct state_dict *subscriber, int64_t generation);       /* … of another node's, which has just said so */
void state_dict_put_guests(struct state_dict *pub, const char *comma, struct buf *out);
void state_dict_feed_look(struct state_dicts *s);                /* answers those who wait for what has come */
void state_dict_feed_end(struct state_dicts *s);                 /* answers all */
void state_dict_feed_put(const struct state_dict *sd, struct buf *out);

/* ---- state_dict_ring.c: slots that an image goes through. */
/* The ring lies in its slot, and the slot is being filled from now on. pid: of who fills it; 0: unknown. */
FALLIBLE enum err state_dict_ring_begin(struct state_dict *sd, struct slot *sl, const struct slot_ring *ring, pid_t pid);
/* Gives a ring's memory back, for the process that filled it has ended; nobody reads it. */
void state_dict_ring_drop(struct state_dict *sd, struct slot *sl);
/* All has been put in. sl NULL: the rank has no such slot. */
FALLIBLE enum err state_dict_ring_seal(struct slot *sl, const struct slot_ring *ring, const json_t *wish);
/* Rings of this generation and those before are read no more: ranks that still fill them are told when they ask. */
void state_dict_lose_rings(struct state_dict *sd, int64_t generation);
FALLIBLE enum err state_dict_ring_check(const struct state_dict *sd, uint32_t rank, int64_t generation);

/* ---- state_dict_look.c: whether sealed slots hold images ---- */
void state_dict_look_at(struct state_dict *sd, struct slot *sl);  /* soon: the slot was sealed just now */
void state_dict_look_at_all(struct state_dicts *s);                   /* at all sealed slots, after a start */
const json_t *state_dict_slot_problem(const struct slot *sl);    /* why the slot's generation is no image; borrowed; NULL: none known */

/* ---- state_dict_lease.c ---- */
FALLIBLE enum err state_dict_lease_start(struct state_dicts *s);

/* ---- state_dict_wish.c: what is to become of a generation ---- */
FALLIBLE enum err state_dict_wish_set(struct state_dict *sd, int64_t generation, const json_t *wish);   /* without a row; wish is copied */
const json_t *state_dict_wish_of(const struct state_dict *sd, int64_t generation);   /* NULL: nothing was said */
