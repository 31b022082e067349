/* shm_impl.h: the arena that the members of a group on one host share, for shm*.c only.
 *
 * The arena is a memfd of fixed size (sealed, so that nobody can cut it under us) with one head and many regions; a group or subgroup
 * takes one. A region has a head, a page for each member, small buffers and blocks; a member writes to its own page and blocks, and to
 * counters. All of it may be written by a peer that has gone mad: what is read from it is an offset that is checked, a count that is
 * waited for with a deadline, or data; never a pointer, a length that is trusted, or a loop's end.
 *
 * Life: each member holds a robust futex in the last bytes of its page until it leaves. When it dies, however, the kernel marks the
 * word. The futex is a pthread_mutex_t that lies across two pages of this process's map: its word in the shared page, all that the C
 * library links and believes in the private one behind it. */
#pragma once
#include <stdatomic.h>
#include "comm/comm_impl.h"

enum {
	SHM_PAGE = 4096,
	SHM_REGIONS = 256,
	SHM_INLINE = 16 << 10,         /* a part up to this size travels with the call itself; one buffer for even, one for odd calls */
	SHM_SLOTS = 4,
	SHM_SLOT_BYTES = COMM_BLOCK_MAX,
	SHM_BLOCK = 256 << 10,         /* what is copied at a time: stays in the cache between writer and readers */
	SHM_SLICE_MS = 10,             /* longest sleep before looking who died */
	SHM_STALE_MS = 100,            /* a member that waits shows itself more often */
	SHM_TEXT = 400,
	SHM_FQN = 256,
};

#define SHM_MAGIC UINT64_C(0x31304d4853706364)

struct shm_arena_head {
	uint64_t magic, stride, file_bytes;
	uint32_t members;
	_Alignas(64) _Atomic uint32_t changes;      /* futex: keys[] changed */
	_Alignas(64) _Atomic uint64_t keys[SHM_REGIONS]; /* 0: free */
};

struct shm_head {
	_Alignas(64) _Atomic uint64_t abort;        /* of the opened group's region: see shm_abort */
	_Alignas(64) _Atomic uint64_t arrived;      /* members, over all rounds */
	_Alignas(64) _Atomic uint32_t round;        /* futex: the last round that all have reached */
	_Atomic uint32_t sleepers;
	_Alignas(64) _Atomic uint32_t left;         /* members that closed */
};

enum shm_mode { SHM_NOTHING, SHM_INLINED, SHM_WINDOW, SHM_STAGED };

/* A member's post of a round. */
struct shm_post {
	struct comm_call call;
	uint32_t mode;
	uint64_t key, offset;                       /* SHM_WINDOW */
};

struct shm_slot {
	_Alignas(64) _Atomic uint64_t filled;       /* 1 + the number of the block that is in it */
	_Atomic uint32_t left;                      /* readers that have not read it yet */
};

struct shm_member {
	_Alignas(64) _Atomic uint32_t joined;
	_Atomic uint32_t round;                     /* reached by this member */
	_Atomic uint64_t beat;                      /* when it last waited or moved a block anywhere, ns; in the opened group's region */
	_Alignas(64) _Atomic uint32_t bell;         /* futex: something happened that it waits for */
	_Atomic uint32_t asleep;
	struct shm_post posts[2];
	struct shm_slot slots[SHM_SLOTS];
	int64_t offset;                             /* the error it reports */
	char text[SHM_TEXT], fqn[SHM_FQN], file[SHM_FQN];
};

enum { SHM_LIFE = SHM_PAGE - 8 };
_Static_assert(sizeof(struct shm_member) <= SHM_LIFE, "a member's page holds its life word too");
_Static_assert(sizeof(struct shm_head) <= SHM_PAGE && sizeof(struct shm_arena_head) <= SHM_PAGE, "a head is a page");

struct shm_window {
	uint64_t key, bytes;
	const unsigned char *p;
};

/* Splits with the same list of members: how many there were. */
struct shm_split_count {
	uint64_t list, count;
};

struct shm {
	struct comm *c;
	struct shm_arena_head *arena;
	unsigned char *region;
	uint64_t stride;
	uint32_t arena_members, index;              /* of the region */
	uint64_t key;
	void *life;                                 /* two pages: ours, shared, and a private one */
	uint32_t round;                             /* that this member has reached */
	uint32_t spins, yields;
	uint32_t *in_root;                          /* of each member: which one it is in the group that was opened */
	uint64_t *blocks;                           /* of each member: how many it has sent */
	unsigned char *scratch;                     /* a message to ourselves */
	struct shm_window *windows;
	uint32_t window_count;
	struct shm_split_count *splits;
	uint32_t split_count;
};

static inline struct shm_head *shm_head(const struct shm *s)
{
	return (struct shm_head *)s->region;
}

static inline struct shm_member *shm_member(const struct shm *s, uint32_t r)
{
	return (struct shm_member *)(s->region + SHM_PAGE * (1 + (uint64_t)r));
}

static inline unsigned char *shm_inline(const struct shm *s, uint32_t r, uint32_t round)
{
	return s->region + SHM_PAGE * (1 + (uint64_t)s->arena_members) + SHM_INLINE * (2 * (uint64_t)r + (round & 1));
}

static inline unsigned char *shm_slot_bytes(const struct shm *s, uint32_t r, uint64_t block)
{
	return s->region + SHM_PAGE * (1 + (uint64_t)s->arena_members) + 2 * (uint64_t)SHM_INLINE * s->arena_members +
	       SHM_SLOT_BYTES * ((uint64_t)SHM_SLOTS * r + block % SHM_SLOTS);
}

/* shm_wait.c */
void shm_futex_wake(_Atomic uint32_t *word);
/* Sleeps while *word is `seen`, for a slice at most. Fails when the group has, or the tick does; *late_out: the deadline is over. */
FALLIBLE enum err shm_sleep(struct shm *s, _Atomic uint32_t *word, uint32_t seen, bool *late_out);
/* For loops that move much: shows that this member is there, and fails as shm_sleep does, or when it is late. */
FALLIBLE enum err shm_alive(struct shm *s);
/* ERR_PEER_LOST when `member` died or left. */
FALLIBLE enum err shm_lost(const struct shm *s, uint32_t member);
uint32_t shm_stalest(const struct comm *c);
/* ERR_PEER_TIMEOUT for the member that has not shown itself for the longest time, be it one that the others of this group wait for
 * elsewhere, or for `suspect` if all do. */
FALLIBLE enum err shm_late(const struct shm *s, uint32_t suspect);
/* Brings `post` (its call is set here) to all, waits until all have come, and compares. */
FALLIBLE enum err shm_arrive(struct shm *s, const struct shm_post *post);
FALLIBLE enum err shm_life_begin(struct shm *s, int fd, uint64_t page_offset);
void shm_life_end(struct shm *s);
void shm_ring(struct shm *s, uint32_t member);
void shm_abort(struct comm *root, struct err_info *f);
enum err shm_poll(struct comm *c);

/* shm_flow.c: blocks from members to members through their slots. to may be SHM_ALL: every other member. Between two rounds. */
#define SHM_ALL UINT32_MAX
FALLIBLE enum err shm_flow(struct shm *s, const struct comm_exchange *x);
enum err shm_exchange(struct comm *c, const struct comm_exchange *x);

/* shm_move.c */
enum err shm_barrier(struct comm *c);
enum err shm_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root);
enum err shm_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out);
enum err shm_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
enum err shm_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
