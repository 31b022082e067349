/* gpu.c: see gpu.h. The device node tells it: opening libcuda here would map its memory and run its code in the coordinator.
 * A worker that was given the device opens the library, and says what it lacks. */
#include "server/gpu.h"

#include <unistd.h>

const char *gpu_missing(void)
{
	if (access("/dev/nvidiactl", F_OK) == 0)
		return NULL;
	return "this host has no NVIDIA GPU: there is no /dev/nvidiactl";
}

FALLIBLE enum err gpu_put_backends(struct buf *out)
{
	static const char *const names[] = { "auto", "shm", "tcp" };
	const char *missing = gpu_missing();

	buf_putc(out, '{');
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		buf_printf(out, "\"%s\":{\"available\":true},", names[i]);
	buf_printf(out, "\"nccl\":{\"available\":%s", missing ? "false,\"reason\":" : "true");
	if (missing)
		buf_json_str(out, str_of(missing));
	buf_puts(out, "}}");
	return buf_status(out);
}
