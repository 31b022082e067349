/* cuda_import.c: device memory of another process, by a legacy IPC handle or by the descriptor of a VMM allocation.
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

static FALLIBLE enum err open_vmm(struct cuda_dev *c, const struct device_handle *h, struct device_import *out)
{
	struct CUmemAccessDesc_st access = { { CUDA_LOCATION_DEVICE, c->ordinal }, CUDA_ACCESS_READWRITE };
	cuda_allocation a = 0;
	cuda_ptr p = 0;
	char call[64];

	TRY(cuda_check(cuda.vmm_import(&a, (void *)(uintptr_t)h->fd, CUDA_HANDLE_FD), "cuMemImportFromShareableHandle"));
	out->allocation = a;
	out->has_allocation = true;
	TRY(cuda_check(cuda.vmm_reserve(&p, h->bytes, 0, 0, 0), "cuMemAddressReserve"));
	out->p = (void *)(uintptr_t)p;
	snprintf(call, sizeof call, "cuMemMap of %ju bytes", (uintmax_t)h->bytes);
	TRY(cuda_check(cuda.vmm_map(p, h->bytes, 0, a, 0), call));
	out->is_mapped = true;
	return cuda_check(cuda.vmm_access(p, h->bytes, &access, 1), "cuMemSetAccess");
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

enum err cuda_import(struct device *d, const struct device_handle *h, struct device_import *out)
{
	*out = (struct device_import){ .bytes = h->bytes, .is_vmm = h->fd >= 0 };
	TRY(device_enter(d));
	enum err e = out->is_vmm ? open_vmm((struct cuda_dev *)d, h, out) : open_ipc(h, out);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		if (cuda_import_end(d, out) != OK)
			info.code = ERR_DEVICE_FAILED; /* something is still open: this process must end */
		return info.code;
	}
	return OK;
}
