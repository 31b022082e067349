/* cuda_import.c: device memory that processes share: of another process, by a legacy IPC handle or by the descriptor of a VMM allocation;
 * and new VMM memory for others.
 *
 * A legacy handle names a whole cuMemAlloc allocation and is valid while its exporter lives. A VMM allocation (what PyTorch's expandable
 * segments are made of, which legacy handles cannot name) is a descriptor: importing it takes a reference to the memory itself, which is
 * then mapped at an address range of this process. */
#include <stdio.h>
#include <string.h>

#include "device/cuda_impl.h"

static FALLIBLE enum err open_ipc(const struct device_handle *h, struct device_import *out)
{
	struct CUipcMemHandle_st handle;
	cuda_ptr p = 0, base = 0;
	size_t bytes = 0;

	_Static_assert(sizeof handle == DEVICE_IPC_BYTES && sizeof h->ipc == DEVICE_IPC_BYTES, "the handle's size");
	memcpy(&handle, h->ipc, sizeof handle);
	TRY(cuda_check(cuda.ipc_open(&p, handle, CUDA_IPC_LAZY_PEER_ACCESS), "cuIpcOpenMemHandle"));
	out->p = (void *)(uintptr_t)p;
	/* An access beyond the allocation would poison the context. */
	TRY(cuda_check(cuda.range_of(&base, &bytes, p), "cuMemGetAddressRange"));
	uint64_t room = base + bytes - p;
	if (h->bytes > room)
		return ERR(VALIDATION_FAILED, "an allocation of %ju bytes is said to have %ju", (uintmax_t)room, (uintmax_t)h->bytes);
	return OK;
}

/* Maps out's allocation, all of its bytes. */
static FALLIBLE enum err map_vmm(struct cuda_dev *c, struct device_import *out)
{
	struct CUmemAccessDesc_st access = { { CUDA_LOCATION_DEVICE, c->ordinal }, CUDA_ACCESS_READWRITE };
	cuda_ptr p = 0;
	char call[64];

	out->has_allocation = true;
	TRY(cuda_check(cuda.vmm_reserve(&p, out->bytes, 0, 0, 0), "cuMemAddressReserve"));
	out->p = (void *)(uintptr_t)p;
	snprintf(call, sizeof call, "cuMemMap of %ju bytes", (uintmax_t)out->bytes);
	TRY(cuda_check(cuda.vmm_map(p, out->bytes, 0, out->allocation, 0), call));
	out->is_mapped = true;
	return cuda_check(cuda.vmm_access(p, out->bytes, &access, 1), "cuMemSetAccess");
}

static FALLIBLE enum err open_vmm(struct cuda_dev *c, const struct device_handle *h, struct device_import *out)
{
	TRY(cuda_check(cuda.vmm_import(&out->allocation, (void *)(uintptr_t)h->fd, CUDA_HANDLE_FD), "cuMemImportFromShareableHandle"));
	return map_vmm(c, out);
}

/* Undoes what was done, in the opposite order, as far as it goes: the first error is told. */
enum err cuda_import_end(struct device *d, struct device_import *i)
{
	cuda_ptr p = (cuda_ptr)(uintptr_t)i->p;
	enum err e = device_enter(d);

	if (!e && p && !i->is_vmm)
		e = cuda_check(cuda.ipc_close(p), "cuIpcCloseMemHandle");
	if (!e && i->is_mapped)
		e = cuda_check(cuda.vmm_unmap(p, i->bytes), "cuMemUnmap");
	if (!e && p && i->is_vmm)
		e = cuda_check(cuda.vmm_unreserve(p, i->bytes), "cuMemAddressFree");
	if (!e && i->has_allocation)
		e = cuda_check(cuda.vmm_release(i->allocation), "cuMemRelease");
	*i = (struct device_import){ 0 };
	return e;
}

static FALLIBLE enum err undo(struct device *d, struct device_import *out, enum err e)
{
	CLEANUP(err_restore) struct err_info info = *err_last();

	if (e && cuda_import_end(d, out) != OK)
		info.code = ERR_DEVICE_FAILED; /* something is still open: this process must end */
	return e ? info.code : OK;
}

enum err cuda_import(struct device *d, const struct device_handle *h, struct device_import *out)
{
	*out = (struct device_import){ .bytes = h->bytes, .is_vmm = h->fd >= 0 };
	TRY(device_enter(d));
	return undo(d, out, out->is_vmm ? open_vmm((struct cuda_dev *)d, h, out) : open_ipc(h, out));
}

/* VMM memory in general, and its descriptors: not on a GPU that a hypervisor divides, and not everywhere. */
static FALLIBLE enum err check_vmm(const struct cuda_dev *c)
{
	static const int wanted[] = { CUDA_ATTRIBUTE_VMM, CUDA_ATTRIBUTE_HANDLE_FD };
	int has = 1;

	for (size_t i = 0; has && i < sizeof wanted / sizeof *wanted; i++)
		TRY(cuda_check(cuda.device_attribute(&has, wanted[i], c->ordinal), "cuDeviceGetAttribute"));
	return has ? OK : ERR(BACKEND_UNAVAILABLE, "this GPU's driver cannot share memory by descriptors (cuMemCreate)");
}

static FALLIBLE enum err create_vmm(struct cuda_dev *c, uint64_t bytes, struct device_import *out)
{
	const struct CUmemAllocationProp_st how = { .type = CUDA_ALLOCATION_PINNED, .handle_types = CUDA_HANDLE_FD,
						    .location = { CUDA_LOCATION_DEVICE, c->ordinal } };
	size_t step = 0;
	char call[64];

	TRY(check_vmm(c));
	TRY(cuda_check(cuda.vmm_granularity(&step, &how, CUDA_GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity"));
	if (!step || bytes > UINT64_MAX - step)
		return ERR(DEVICE_FAILED, "cuMemGetAllocationGranularity: %zu, for %ju bytes", step, (uintmax_t)bytes);
	out->bytes = (bytes + step - 1) / step * step;
	snprintf(call, sizeof call, "cuMemCreate of %ju bytes", (uintmax_t)out->bytes);
	TRY(cuda_check(cuda.vmm_create(&out->allocation, out->bytes, &how, 0), call));
	return map_vmm(c, out);
}

enum err cuda_create(struct device *d, uint64_t bytes, struct device_import *out)
{
	*out = (struct device_import){ .is_vmm = true };
	TRY(device_enter(d));
	return undo(d, out, create_vmm((struct cuda_dev *)d, bytes, out));
}

enum err cuda_export(struct device *d, const struct device_import *i, int *fd_out)
{
	int fd = -1;

	TRY(device_enter(d));
	TRY(cuda_check(cuda.vmm_export(&fd, i->allocation, CUDA_HANDLE_FD, 0), "cuMemExportToShareableHandle"));
	*fd_out = fd;
	return OK;
}
