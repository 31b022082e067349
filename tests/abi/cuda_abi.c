/* cuda_abi.c: compiles where worker/device/cuda_abi.h says what the toolkit's cuda.h says; it is never run. C takes an enum and its
 * integer type for one, so assigning each function to a pointer of our form compares the forms. */
#include <cuda.h>
#include "device/cuda_abi.h"

#define X(member, symbol, params) extern cuda_result(*const check_##member) params; cuda_result(*const check_##member) params = symbol;
CUDA_FUNCTIONS(X)
#undef X

#define SAME(theirs, ours) _Static_assert((long long)(theirs) == (long long)(ours), #ours)
SAME(sizeof(CUuuid), CUDA_UUID_BYTES);
SAME(sizeof(CUdeviceptr), sizeof(cuda_ptr));
SAME(CUDA_SUCCESS, CUDA_OK);
SAME(CUDA_ERROR_OUT_OF_MEMORY, CUDA_OUT_OF_MEMORY);
SAME(CUDA_ERROR_NO_DEVICE, CUDA_NO_DEVICE);
SAME(CUDA_ERROR_NOT_READY, CUDA_NOT_READY);
SAME(CU_STREAM_NON_BLOCKING, CUDA_STREAM_NON_BLOCKING);
SAME(CU_EVENT_DISABLE_TIMING, CUDA_EVENT_DISABLE_TIMING);
SAME(CU_MEMHOSTREGISTER_PORTABLE, CUDA_HOST_PORTABLE);
