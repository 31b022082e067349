/* cpu.c: host memory as a device, so that who moves bytes needs no second path: a copy is done when it has begun. */
#include <string.h>

#include "base/mem.h"
#include "device/device_impl.h"

static void cpu_close(struct device *d)
{
	mem_free(d);
}

static enum err cpu_alloc(struct device *, uint64_t bytes, void **out)
{
	*out = mem_alloc(bytes);
	return *out ? OK : ERR(NO_MEMORY, "no memory for %ju bytes", (uintmax_t)bytes);
}

static void cpu_free(struct device *, void *p)
{
	mem_free(p);
}

static enum err cpu_copy(struct device *, void *to, const void *from, uint64_t bytes, enum device_way)
{
	memmove(to, from, bytes);
	return OK;
}

static enum err cpu_done(struct device *, bool *done_out)
{
	*done_out = true;
	return OK;
}

static enum err cpu_mark(struct device *, uint32_t)
{
	return OK;
}

static enum err cpu_mark_done(struct device *d, uint32_t, bool *done_out)
{
	return cpu_done(d, done_out);
}

static enum err cpu_pin(struct device *, void *, uint64_t bytes)
{
	return ERR(BACKEND_UNAVAILABLE, "%ju bytes cannot be pinned: that needs a GPU", (uintmax_t)bytes);
}

static enum err cpu_unpin(struct device *d, void *p)
{
	return cpu_pin(d, p, 0);
}

static enum err cpu_enter(struct device *)
{
	return OK;
}

FALLIBLE enum err device_cpu_new(struct device **out)
{
	static const struct device_ops ops = {
		.close = cpu_close, .alloc = cpu_alloc, .free = cpu_free, .copy = cpu_copy, .done = cpu_done, .mark = cpu_mark,
		.mark_done = cpu_mark_done, .pin = cpu_pin, .unpin = cpu_unpin, .enter = cpu_enter,
	};
	struct device *d = mem_zalloc(1, sizeof *d);

	NEED(d, "no memory for a device");
	d->ops = &ops;
	*out = d;
	return OK;
}
