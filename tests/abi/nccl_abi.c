/* nccl_abi.c: compiles where worker/comm/nccl_abi.h says what NCCL's nccl.h says; it is never run. See cuda_abi.c. */
#include <nccl.h>
#include "comm/nccl_abi.h"

#define X(member, symbol, result, params) extern result(*const check_##member) params; result(*const check_##member) params = symbol;
NCCL_FUNCTIONS(X)
#undef X

#define SAME(theirs, ours) _Static_assert((long long)(theirs) == (long long)(ours), #ours)
SAME(sizeof(ncclUniqueId), NCCL_ID_BYTES);
SAME(offsetof(ncclConfig_t, size), 0);
SAME(offsetof(ncclConfig_t, magic), 8);
SAME(offsetof(ncclConfig_t, version), 12);
SAME(offsetof(ncclConfig_t, blocking), 16);
SAME(NCCL_VERSION(2, 14, 0), NCCL_OLDEST);
SAME(ncclSuccess, NCCL_OK);
SAME(ncclRemoteError, NCCL_REMOTE_ERROR);
SAME(ncclInProgress, NCCL_IN_PROGRESS);
SAME(ncclSum, NCCL_SUM);
SAME(ncclProd, NCCL_PROD);
SAME(ncclMax, NCCL_MAX);
SAME(ncclMin, NCCL_MIN);
SAME(ncclAvg, NCCL_AVG);
SAME(ncclInt8, NCCL_INT8);
SAME(ncclUint8, NCCL_UINT8);
SAME(ncclInt32, NCCL_INT32);
SAME(ncclUint32, NCCL_UINT32);
SAME(ncclInt64, NCCL_INT64);
SAME(ncclUint64, NCCL_UINT64);
SAME(ncclFloat16, NCCL_FLOAT16);
SAME(ncclFloat32, NCCL_FLOAT32);
SAME(ncclFloat64, NCCL_FLOAT64);
SAME(ncclBfloat16, NCCL_BFLOAT16);
