/* cuda_abi.c: compiles where worker/device/cuda_abi.h says what the toolkit's cuda.h says; it is never run. C takes an enum and its
 * integer type for one, so assigning each function to a pointer of our form compares the forms. */
#include <cuda.h>
#include "fakes/fake_cuda.h"

#define X(member, symbol, params) extern cuda_result(*const check_##member) params; cuda_result(*const check_##member) params = symbol;
CUDA_FUNCTIONS(X)
FAKE_CUDA_EXPORTS(X)
#undef X

#define SAME(theirs, ours) _Static_assert((long long)(theirs) == (long long)(ours), #ours)
SAME(sizeof(CUuuid), CUDA_UUID_BYTES);
SAME(sizeof(CUdeviceptr), sizeof(cuda_ptr));
SAME(sizeof(CUmemGenericAllocationHandle), sizeof(cuda_allocation));
SAME(sizeof(CUipcMemHandle), CUDA_IPC_HANDLE_BYTES);
SAME(sizeof(CUmemLocation), 2 * sizeof(int));
SAME(offsetof(CUmemLocation, id), sizeof(int));
SAME(sizeof(CUmemAccessDesc), 3 * sizeof(int));
SAME(offsetof(CUmemAccessDesc, flags), 2 * sizeof(int));
SAME(sizeof(CUmemAllocationProp), FAKE_CUDA_PROP_BYTES);
SAME(offsetof(CUmemAllocationProp, requestedHandleTypes), FAKE_CUDA_PROP_HANDLE_TYPES);
SAME(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_IPC_LAZY_PEER_ACCESS);
SAME(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_HANDLE_FD);
SAME(CU_MEM_LOCATION_TYPE_DEVICE, CUDA_LOCATION_DEVICE);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ACCESS_READWRITE);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, FAKE_CUDA_ATTRIBUTE_DEVICE);
SAME(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, FAKE_CUDA_ATTRIBUTE_IPC);
SAME(CU_POINTER_ATTRIBUTE_MAPPING_SIZE, FAKE_CUDA_ATTRIBUTE_MAPPING_BYTES);
SAME(CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, FAKE_CUDA_ATTRIBUTE_MAPPING_BASE);
SAME(CUDA_SUCCESS, CUDA_OK);
SAME(CUDA_ERROR_OUT_OF_MEMORY, CUDA_OUT_OF_MEMORY);
SAME(CUDA_ERROR_NO_DEVICE, CUDA_NO_DEVICE);
SAME(CUDA_ERROR_NOT_READY, CUDA_NOT_READY);
SAME(CU_STREAM_NON_BLOCKING, CUDA_STREAM_NON_BLOCKING);
SAME(CU_EVENT_DISABLE_TIMING, CUDA_EVENT_DISABLE_TIMING);
SAME(CU_MEMHOSTREGISTER_PORTABLE, CUDA_HOST_PORTABLE);
SAME(CU_MEMHOSTREGISTER_DEVICEMAP, CUDA_HOST_DEVICEMAP);
