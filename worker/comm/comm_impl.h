/* comm_impl.h: what comm.c and its back ends share; nobody else includes it.
 *
 * A back end is a `struct comm_ops`. comm.c does the rest, so that a back end is only about moving bytes:
 *   - arguments are checked (a rank is below comm_size, bytes[] has no overflow, messages are within limits); empty work too gets to
 *     the back end, since all members have to meet;
 *   - `c->call` says what this member calls. A back end brings it to the others and compares (comm_call_same), so that a mismatch is
 *     found; comm.c changes it before each use of the back end, also for the steps of an operation that it composes itself;
 *   - `c->deadline_ns` is set at the beginning of a collective. A back end that waits calls comm_wait() at least every 50 ms: it runs
 *     the caller's tick, tells whether the deadline is over, and who has to be blamed is the back end's to know;
 *   - an error that a back end returns is settled by comm.c: ops->abort() tells all others and says what the group failed with (the
 *     first failure wins); from then on no back end function but close is called.
 * Members are numbered 0 … size-1 in their group everywhere; only errors carry the rank in the group as it was opened: comm_at().
 *
 * Operations that are NULL in comm_ops are composed here from exchange and all_gather_v. in and out of a back end may be equal where comm.h
 * says so, and `in` of all_gather_v may lie in its place of `out`. */
#pragma once
#include "base/clock.h"
#include "comm/comm.h"

enum comm_kind {
	COMM_BARRIER = 1, COMM_BROADCAST, COMM_ALL_GATHER, COMM_ALL_GATHER_V, COMM_GATHER, COMM_SCATTER, COMM_REDUCE, COMM_ALL_REDUCE,
	COMM_REDUCE_SCATTER, COMM_EXCHANGE, COMM_ALL_TO_ALL, COMM_SPLIT, COMM_KINDS
};

/* A member's call, which every member must make with equal arguments. Plain bytes without holes: equal builds send the struct as it is. */
struct comm_call {
	uint64_t number;               /* counts the calls of a back end */
	uint64_t bytes, digest;        /* of the parts; of bytes[] or the messages: XXH3 */
	uint32_t root;
	uint8_t kind, dtype, op, step; /* step: of a composed operation */
};

struct comm {
	const struct comm_ops *ops;
	void *impl;                    /* the back end's */
	uint32_t rank, size;
	uint32_t *names;               /* size of them: each member's rank in the group that was opened */
	struct comm *root;             /* the group that was opened; itself */
	struct comm *parent;           /* NULL: opened */
	uint32_t children;
	struct comm_spec spec;         /* of the root; hosts, meet and listen are valid during open only */
	struct comm_call call;
	uint64_t deadline_ns, ticked_ns; /* CLOCK_MONOTONIC */
	/* Of an opened group: the one on it whose wait calls the tick; NULL: none. */
	struct comm *waiting;
	/* Of an opened group that is part of another; may be NULL: the one that the member of this rank waits for in the other parts, or
	 * itself, if that one shows no life; else UINT32_MAX. */
	uint32_t (*beyond)(void *user, uint32_t rank);
	struct comm_counts counts;     /* the root's are everybody's */
	bool failed;                   /* the root's too */
	struct err_info failure;
};

struct comm_ops {
	const char *name;
	/* c has rank, size, names, spec and deadline. Sets c->impl; on failure leaves nothing behind. */
	/* spec->meet is called exactly once, or (shm) never. */
	enum err (*open)(struct comm *c, const struct comm_spec *spec);
	/* sub has rank, size, names; ranks: its members' ranks in parent. */
	enum err (*split)(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub);
	void (*close)(struct comm *c);
	/* Tells all members of the whole group (c is the root) that it failed with *f; does not wait. If the group had failed with
	 * something else before, *f becomes that. */
	void (*abort)(struct comm *c, struct err_info *f);
	/* Has the group failed? Does not wait. Called between collectives of another group that this member is in. */
	enum err (*poll)(struct comm *c);
	/* These three may be NULL; they find who is late across the parts of a group. Members are those of the opened group.
	 * The one that shows no life, of those that c waits for; UINT32_MAX: all do. */
	uint32_t (*stalest)(const struct comm *c);
	/* Tells the others that this member waits for that one in another group; UINT32_MAX: it cannot say for whom. */
	void (*show)(struct comm *c, uint32_t member);
	/* Follows the chain of blocked members from this one to the silent member; UINT32_MAX: no member is silent. */
	uint32_t (*silent)(struct comm *c, uint32_t member);
	enum err (*window_add)(struct comm *c, uint64_t key, const void *p, uint64_t bytes);   /* NULL: ignored */

	enum err (*barrier)(struct comm *c);
	enum err (*broadcast)(struct comm *c, void *data, uint64_t bytes, uint32_t root);
	enum err (*all_gather_v)(struct comm *c, const void *in, const uint64_t *bytes, void *out);
	enum err (*exchange)(struct comm *c, const struct comm_exchange *x);

	/* Each of these may be NULL. */
	enum err (*gather)(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
	enum err (*scatter)(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
	enum err (*reduce)(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op, uint32_t root);
	enum err (*all_reduce)(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op);
	enum err (*reduce_scatter)(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op);
};

const struct comm_ops *comm_shm_ops(void);
const struct comm_ops *comm_tcp_ops(void);
const struct comm_ops *comm_nccl_ops(void);
const struct comm_ops *comm_nccl_host_ops(void);   /* of host memory: between hosts, for hier.c */
const struct comm_ops *comm_hier_ops(void);   /* several hosts: an inside and a between back end */

static inline uint64_t comm_now_ns(void) { return (uint64_t)clock_mono_ns(); }
/* The caller's tick if it is due. *late_out: the deadline is over, and it is the back end that says who is missing. */
FALLIBLE enum err comm_wait(struct comm *c, bool *late_out);
bool comm_call_same(const struct comm_call *a, const struct comm_call *b);
/* ERR_COLLECTIVE_MISMATCH: what `member` called and what this one called. */
FALLIBLE enum err comm_mismatch(const struct comm *c, uint32_t member, const struct comm_call *theirs);
/* Adds the rank of `member` (of c) to an error. */
enum err comm_at(const struct comm *c, enum err e, uint32_t member);
/* The next use of the back end is another step of the same call. */
void comm_step(struct comm *c);

/* A group within a group, for hier.c: errors are not settled, the callers do that. `names` is copied. Closed by comm_close. */
FALLIBLE enum err comm_inner_open(const struct comm_ops *ops, const struct comm_spec *spec, const uint32_t *names, struct comm **out);
FALLIBLE enum err comm_inner_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm **out);
const struct comm_ops *comm_backend_ops(enum comm_backend b);   /* NULL: not in this build */

/* generic.c: composed from exchange and all_gather_v. */
FALLIBLE enum err comm_generic_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
FALLIBLE enum err comm_generic_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
FALLIBLE enum err comm_generic_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op,
				      uint32_t root);
FALLIBLE enum err comm_generic_all_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op);
FALLIBLE enum err comm_generic_reduce_scatter(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op);

/* boxes.c: boxes as messages. */
struct comm_boxes;
FALLIBLE enum err comm_boxes_new(uint32_t size, const struct comm_box *boxes, uint64_t count, struct comm_boxes **out);
struct comm_exchange comm_boxes_exchange(struct comm_boxes *b);   /* as long as b is there */
void comm_boxes_free(struct comm_boxes *b);
