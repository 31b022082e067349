/* nccl_abi.h: the part of NCCL's binary interface that we call, in declarations of our own, so that building needs no NCCL. Where its
 * nccl.h is, tests/abi/nccl_abi.c compares each line with it (NCCL_H_ is that header's guard).
 *
 * The configuration is NCCL 2.14's, the first with non-blocking communicators: newer libraries take it by its size and version. */
#pragma once
#include <stddef.h>

typedef unsigned nccl_result;               /* enum ncclResult_t */
struct ncclComm;
struct CUstream_st;

enum { NCCL_ID_BYTES = 128, NCCL_OLDEST = 21400, NCCL_SHARES_GPUS = 23000, NCCL_NEXT_MAJOR = 30000 };

#ifndef NCCL_H_
typedef struct {
	char internal[NCCL_ID_BYTES];
} ncclUniqueId;
typedef struct {
	size_t size;
	unsigned magic, version;
	int blocking;
} ncclConfig_t;
#endif

enum { NCCL_OK = 0, NCCL_REMOTE_ERROR = 6, NCCL_IN_PROGRESS = 7 };
enum { NCCL_CONFIG_MAGIC = 0xcafebeef };
enum { NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG };
enum { NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64,
       NCCL_BFLOAT16 };

/* X(member, symbol, result, parameters) */
#define NCCL_FUNCTIONS(X)                                                                                                         \
	X(get_version, ncclGetVersion, nccl_result, (int *out))                                                                   \
	X(get_id, ncclGetUniqueId, nccl_result, (ncclUniqueId * out))                                                             \
	X(init, ncclCommInitRankConfig, nccl_result, (struct ncclComm **out, int n, ncclUniqueId id, int rank, ncclConfig_t *how)) \
	X(finalize, ncclCommFinalize, nccl_result, (struct ncclComm *c))                                                          \
	X(destroy, ncclCommDestroy, nccl_result, (struct ncclComm *c))                                                            \
	X(abort, ncclCommAbort, nccl_result, (struct ncclComm *c))                                                                \
	X(async_error, ncclCommGetAsyncError, nccl_result, (struct ncclComm *c, nccl_result *out))                                \
	X(error_string, ncclGetErrorString, const char *, (nccl_result r))                                                        \
	X(last_error, ncclGetLastError, const char *, (struct ncclComm *c))                                                       \
	X(group_start, ncclGroupStart, nccl_result, (void))                                                                       \
	X(group_end, ncclGroupEnd, nccl_result, (void))                                                                           \
	X(send, ncclSend, nccl_result,                                                                                            \
	  (const void *p, size_t n, unsigned type, int peer, struct ncclComm *c, struct CUstream_st *s))                          \
	X(recv, ncclRecv, nccl_result, (void *p, size_t n, unsigned type, int peer, struct ncclComm *c, struct CUstream_st *s))   \
	X(broadcast, ncclBroadcast, nccl_result,                                                                                  \
	  (const void *in, void *out, size_t n, unsigned type, int root, struct ncclComm *c, struct CUstream_st *s))              \
	X(all_gather, ncclAllGather, nccl_result,                                                                                 \
	  (const void *in, void *out, size_t n, unsigned type, struct ncclComm *c, struct CUstream_st *s))                        \
	X(reduce, ncclReduce, nccl_result,                                                                                        \
	  (const void *in, void *out, size_t n, unsigned type, unsigned op, int root, struct ncclComm *c, struct CUstream_st *s)) \
	X(all_reduce, ncclAllReduce, nccl_result,                                                                                 \
	  (const void *in, void *out, size_t n, unsigned type, unsigned op, struct ncclComm *c, struct CUstream_st *s))           \
	X(reduce_scatter, ncclReduceScatter, nccl_result,                                                                         \
	  (const void *in, void *out, size_t n, unsigned type, unsigned op, struct ncclComm *c, struct CUstream_st *s))
