/* gather.cu: the kernels that copy many small pieces, and that cast. `make gpu-code` makes gather.ptx and gather.fatbin of it, which are part
 * of the source: a build needs neither a toolkit nor a clang that knows GPUs. */
#pragma clang force_cuda_host_device begin
#include "device/gather.h"
#include "device/gather_cast.h"
#pragma clang force_cuda_host_device end

extern "C" __attribute__((global)) void dcpd_gather(const struct gather_row *rows, uint32_t count)
{
	uint32_t thread = (uint32_t)__nvvm_read_ptx_sreg_tid_x(), threads = (uint32_t)__nvvm_read_ptx_sreg_ntid_x();

	for (uint32_t i = (uint32_t)__nvvm_read_ptx_sreg_ctaid_x(); i < count; i += (uint32_t)__nvvm_read_ptx_sreg_nctaid_x())
		gather_part((unsigned char *)rows[i].to, (const unsigned char *)rows[i].from, rows[i].bytes, thread, threads);
}

extern "C" __attribute__((global)) void dcpd_cast(const struct gather_cast_row *rows, uint32_t count)
{
	uint32_t thread = (uint32_t)__nvvm_read_ptx_sreg_tid_x(), threads = (uint32_t)__nvvm_read_ptx_sreg_ntid_x();

	for (uint32_t i = (uint32_t)__nvvm_read_ptx_sreg_ctaid_x(); i < count; i += (uint32_t)__nvvm_read_ptx_sreg_nctaid_x())
		gather_cast_part((unsigned char *)rows[i].to, (const unsigned char *)rows[i].from, &rows[i], thread, threads);
}
