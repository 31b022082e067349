/* nccl_impl.h: what the files of the nccl back end share. */
#pragma once
#include "comm/comm_impl.h"
#include "comm/nccl_abi.h"
#include "device/device.h"

enum { NCCL_SLOTS = 2, NCCL_SLOT_BYTES = 4 << 20, NCCL_TEXT_MAX = 208, NCCL_WAIT_ALL = -1 };

/* The word that each member sends to all before a collective: its call, or the reason why it makes none. */
struct nccl_word {
	struct comm_call call;
	uint32_t code, spare;
	int64_t rank;
	char text[NCCL_TEXT_MAX];
};

/* A slot of comm_exchange: what goes out and what comes in, on the host and on the device. */
struct nccl_slot {
	unsigned char *host_out, *host_in;
	void *device_out, *device_in;
};

struct nccl {
	struct ncclComm *comm;         /* NULL: aborted */
	struct device *device;
	struct nccl *next;             /* the root's list: all groups that came from it */
	struct nccl_word *words;       /* 1 + size of them, pinned if possible: ours, everybody's */
	void *device_words;
	struct nccl_slot slots[NCCL_SLOTS];
	bool slots_made, pinned, words_pinned;
	bool busy;                     /* something of ours is on the stream */
	bool agreed;                   /* all members know of the error */
	uint32_t size;
};

struct nccl_api {
#define X(member, symbol, result, params) result(*member) params;
	NCCL_FUNCTIONS(X)
#undef X
};
extern const struct nccl_api *const comm_nccl_api;

static inline struct nccl *nccl_of(const struct comm *c)
{
	return c->impl;
}

/* Of one call outside of a group of calls, or of ncclGroupEnd: an error, or waits until NCCL has taken the call. */
FALLIBLE enum err comm_nccl_called(struct comm *c, nccl_result r, const char *call);
/* NCCL has taken a call, or is about to. */
static inline bool comm_nccl_taken(nccl_result r)
{
	return r == NCCL_OK || r == NCCL_IN_PROGRESS;
}

/* Calls that NCCL takes as one. The first error counts, with its call. */
struct nccl_group {
	nccl_result r;
	const char *call;
	bool begun;
};
void comm_nccl_group_begin(struct nccl_group *p);
void comm_nccl_group_add(struct nccl_group *p, nccl_result r, const char *call);
FALLIBLE enum err comm_nccl_group_end(struct comm *c, struct nccl_group *p);

/* Until a mark, or all, of what is on the stream is done. */
FALLIBLE enum err comm_nccl_wait(struct comm *c, int mark);
/* All members call the same, and none has an error: `status` is this one's, told by err_last(). */
FALLIBLE enum err comm_nccl_agree(struct comm *c, enum err status);

struct CUstream_st *comm_nccl_stream(const struct comm *c);

/* nccl_exchange.c */
enum err comm_nccl_exchange(struct comm *c, const struct comm_exchange *x);
void comm_nccl_free_slots(struct nccl *g);
/* nccl_host.c */
enum err comm_nccl_host_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root);
enum err comm_nccl_host_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out);
/* nccl_reduce.c */
enum err comm_nccl_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op, uint32_t root);
enum err comm_nccl_all_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op);
enum err comm_nccl_reduce_scatter(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op);
/* nccl_move.c */
enum err comm_nccl_barrier(struct comm *c);
enum err comm_nccl_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root);
enum err comm_nccl_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out);
enum err comm_nccl_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
enum err comm_nccl_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root);
