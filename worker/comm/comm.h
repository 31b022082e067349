/* comm.h: collectives between the processes of one group: one interface, three back ends.
 *
 *     shm    processes of one host: a shared arena, sequence counters, futexes; data that lies in shared memory already is read
 *            where it is (comm_window_add), so that each byte moves once
 *     tcp    processes of any hosts: checksummed, pipelined chunks over several connections
 *     nccl   device memory, libnccl.so.2 opened at run time
 *
 * A group whose members are on several hosts is hierarchical: shm inside a host, tcp or nccl between the hosts' first members.
 *
 * The daemon's own jobs use exchange, barrier, all_gather and all_reduce over tcp and nccl: its workers on one host share their
 * segments and need no shm group. The rest serves programs that link the engine (ops/dcp_ops.h and their own use), and the tests.
 *
 * Rules of every collective:
 *   - all members call the same collectives in the same order; a mismatch (kind, bytes, root, dtype) is ERR_COLLECTIVE_MISMATCH on all;
 *   - it returns on every member within the deadline (+ 200 ms), with OK or with the group's one error;
 *   - the first failure aborts the group: everyone gets the same code, with the rank that caused it (err_last()->rank); from then on
 *     every call fails at once with it. A group that failed can only be closed;
 *   - buffers are the caller's, host memory unless the one back end is nccl (between hosts whose members share memory it moves host
 *     memory, through pinned slots); in and out may be equal only where said.
 * One thread per comm. No function keeps a pointer after it returned. */
#pragma once
#include "base/err.h"
#include "tensor/dtype.h"
#include "tensor/placement.h"

enum comm_backend { COMM_SHM, COMM_TCP, COMM_NCCL, COMM_BACKENDS };

enum {
	COMM_RANKS_MAX = 1024,
	COMM_SECRET_BYTES = 32,
	COMM_RENDEZVOUS_BYTES = 512,         /* what a member tells the others to be found */
	COMM_BLOCK_MAX = 1 << 20,      /* of one message of comm_exchange */
};

struct device;

/* Brings every member's `mine` to every member by other means (the coordinator; a pipe in tests): all_out has size * COMM_RENDEZVOUS_BYTES
 * bytes, in rank order. Called while a group is opened, the same number of times by each. */
typedef enum err (*comm_rendezvous_fn)(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out);
/* Called at least every 50 ms while a collective waits; an error of it aborts the group. */
typedef enum err (*comm_tick_fn)(void *user);

struct comm_spec {
	uint32_t rank, size;
	const uint32_t *hosts;         /* size of them: equal numbers are on one host; NULL: all on one */
	enum comm_backend inside, between;   /* inside a host: shm or tcp (or nccl); between hosts: tcp or nccl */
	uint64_t group_id, generation; /* a message of another group or generation is refused */
	unsigned char secret[COMM_SECRET_BYTES]; /* of the group: a stranger cannot join */
	int arena_fd;                  /* shm: of comm_arena_new, the same file in all members of the host; borrowed */
	const char *listen;            /* tcp: address to listen on, "127.0.0.1", "::1", or an interface "eth1"; NULL: 127.0.0.1 */
	struct device *device;         /* nccl: the GPU whose memory the buffers are; borrowed. See nccl.h for what differs there */
	uint32_t connections;          /* tcp: per peer; 0: chosen */
	uint32_t deadline_ms;          /* of one collective; 0: 30 s */
	comm_rendezvous_fn meet;
	comm_tick_fn tick;             /* may be NULL */
	void *user;
};

struct comm;

/* A memfd with room for a group of `members` on one host; pages come as they are used. */
FALLIBLE enum err comm_arena_new(uint32_t members, int *fd_out);

/* All members call it. ERR_PEER_TIMEOUT names the first rank that did not come. */
FALLIBLE enum err comm_open(const struct comm_spec *spec, struct comm **out);
void comm_close(struct comm *c);                      /* accepts NULL; does not wait for anybody */
uint32_t comm_rank(const struct comm *c);
uint32_t comm_size(const struct comm *c);
const char *comm_backend_name(enum comm_backend b);   /* "shm" */

/* A subgroup: `ranks` (of the parent, growing or not, each once) in the order they are to have in it. Every member of `ranks` calls it
 * with the same list; others do not. Owned by the caller; closed before its parent. It fails with its parent and the other way round. */
FALLIBLE enum err comm_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm **out);
/* The subgroup of one dim of a mesh over the group: the members that differ from this one in that dim's coordinate only.
 * mesh: sizes, their product is comm_size; row-major. */
FALLIBLE enum err comm_split_mesh(struct comm *parent, const int64_t *mesh, uint32_t mesh_ndim, uint32_t dim, struct comm **out);

/* The group's error, or what its back end has heard of since the last collective. Does not wait. */
FALLIBLE enum err comm_check(struct comm *c);
/* Fails the group from outside or because of `e` (err_last() tells the rest), at any time. */
void comm_abort(struct comm *c, enum err e);

/* shm: [p, p + bytes) here is shared memory that every member has mapped, known by `key` (the same in all). Source buffers inside a
 * window are read by the others where they are. p: where this process has it. Other back ends ignore it. */
FALLIBLE enum err comm_window_add(struct comm *c, uint64_t key, const void *p, uint64_t bytes);

FALLIBLE enum err comm_barrier(struct comm *c);
FALLIBLE enum err comm_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root);
/* out: size * bytes. in may lie in its place of out. */
FALLIBLE enum err comm_all_gather(struct comm *c, const void *in, uint64_t bytes, void *out);
/* bytes[r] from rank r, the same array in all; out: their sum, in rank order. */
FALLIBLE enum err comm_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out);
/* out is used at the root only; bytes as above. */
FALLIBLE enum err comm_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
FALLIBLE enum err comm_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
/* Elementwise over `count` elements; f16, bf16 and fp8 are summed in float32, AVG of integers truncates as torch.distributed's does.
 * ERR_DTYPE_UNSUPPORTED for dtypes without that operation. in == out is fine. reduce: out is used at the root only. */
FALLIBLE enum err comm_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype dtype,
			  enum reduce_op op, uint32_t root);
FALLIBLE enum err comm_all_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype dtype, enum reduce_op op);
/* in: size * count elements; out: count. */
FALLIBLE enum err comm_reduce_scatter(struct comm *c, const void *in, void *out, uint64_t count, enum dtype dtype, enum reduce_op op);

/* The primitive beneath state-dict operations: many messages between any members, pipelined, in bounded memory. Every member passes the
 * same list (from, to, bytes in the same order); pack is called at `from` and unpack at `to`, in list order per pair of members.
 * from == to is allowed: packed and unpacked here. An error of a callback aborts the group with this member's rank. */
struct comm_message {
	uint32_t from, to, bytes;      /* bytes <= COMM_BLOCK_MAX */
};
struct comm_exchange {
	const struct comm_message *messages;
	uint64_t count;
	enum err (*pack)(void *user, uint64_t index, void *out);
	enum err (*unpack)(void *user, uint64_t index, const void *in);
	void *user;
};
FALLIBLE enum err comm_exchange(struct comm *c, const struct comm_exchange *x);

/* All-to-all of boxes: strided boxes of elements between members' memories, over comm_exchange. */
struct comm_box {
	uint32_t from, to;
	uint32_t ndim, item_bytes;
	const int64_t *sizes;                      /* in elements */
	const int64_t *src_strides, *dst_strides;  /* in bytes */
	const void *src;               /* first element; used at `from` only */
	void *dst;                     /* used at `to` only */
};
FALLIBLE enum err comm_all_to_all(struct comm *c, const struct comm_box *boxes, uint64_t count);

/* Traffic of this member since it was opened, subgroups included. */
struct comm_counts {
	uint64_t copied_bytes;         /* inside a host, from another member's memory */
	uint64_t sent_bytes, received_bytes; /* over tcp or nccl: payload */
	uint64_t collectives;
};
struct comm_counts comm_counts(const struct comm *c);
