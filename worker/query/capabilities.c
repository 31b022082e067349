/* capabilities.c: see capabilities.h. */
#include "query/capabilities.h"

#include "comm/nccl.h"
#include "device/device.h"

static void put_reason(struct buf *out, enum err e)
{
	buf_puts(out, e ? "{\"available\":false,\"reason\":" : "{\"available\":true");
	if (e)
		buf_json_str(out, str_of(err_last()->text));
}

static void put_devices(struct buf *out)
{
	struct device_info d;

	buf_puts(out, "\"devices\":[");
	for (uint32_t i = 0; i < device_cuda_count(); i++) {
		buf_printf(out, "%s{\"index\":%u,", i ? "," : "", i);
		if (device_cuda_info(i, &d) == OK) {
			buf_json_member(out, "\"name\":", str_of(d.name));
			buf_printf(out, ",\"uuid\":\"%s\",\"memory_bytes\":%ju}", d.uuid, (uintmax_t)d.memory_bytes);
		} else {
			buf_json_member(out, "\"problem\":", str_of(err_last()->text));
			buf_putc(out, '}');
		}
	}
	buf_putc(out, ']');
}

void capabilities_put(struct buf *out)
{
	int version = 0;
	enum err e = device_cuda_open();

	buf_puts(out, "\"backends\":{\"shm\":{\"available\":true},\"tcp\":{\"available\":true},\"cuda\":");
	put_reason(out, e);
	buf_puts(out, "},\"nccl\":");
	/* Without a GPU its library is of no use: the first reason is the one to act on. */
	e = e ?: comm_nccl_available(&version);
	put_reason(out, e);
	if (!e)
		buf_printf(out, ",\"version\":\"%d.%d.%d\"", version / 10000, version / 100 % 100, version % 100);
	buf_puts(out, "}},");
	put_devices(out);
}
