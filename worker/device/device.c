/* device.c: see device.h. The part that CPU and GPU share: the choice between them, and waiting with a deadline.
 *
 * Why polling and not the driver's own wait: that has no deadline, and a collective on the stream may never end. */
#include "device/device.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "device/device_impl.h"

enum { SPINS = 200, NAP_NS = 50000 };

FALLIBLE enum err device_open(int32_t index, struct device **out)
{
	if (index < 0 && index != DEVICE_CPU)
		return ERR(VALIDATION_FAILED, "there is no device %d", index);
	TRY(index == DEVICE_CPU ? device_cpu_new(out) : device_cuda_new((uint32_t)index, out));
	(*out)->index = index;
	return OK;
}

void device_close(struct device *d)
{
	if (d)
		d->ops->close(d);
}

bool device_is_cpu(const struct device *d)
{
	return d->ops->stream == NULL;
}

int32_t device_index(const struct device *d)
{
	return d->index;
}

FALLIBLE enum err device_alloc(struct device *d, uint64_t bytes, void **out)
{
	return d->ops->alloc(d, bytes ? bytes : 1, out);
}

void device_free(struct device *d, void *p)
{
	if (p)
		d->ops->free(d, p);
}

FALLIBLE enum err device_copy(struct device *d, void *to, const void *from, uint64_t bytes, enum device_way way)
{
	return bytes ? d->ops->copy(d, to, from, bytes, way) : OK;
}

FALLIBLE enum err device_done(struct device *d, bool *done_out)
{
	return d->ops->done(d, done_out);
}

static FALLIBLE enum err wait_for(struct device *d, enum err (*ask)(struct device *d, uint32_t mark, bool *done_out), uint32_t mark,
				  uint32_t deadline_ms)
{
	int64_t end = clock_mono_ms() + deadline_ms;
	bool done = false;

	for (uint32_t turn = 0;; turn++) {
		TRY(ask(d, mark, &done));
		if (done)
			return OK;
		if (clock_mono_ms() >= end)
			return ERR(TIMED_OUT, "the device was not done within %u ms", deadline_ms);
		if (turn < SPINS)
			sched_yield();
		else
			nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
	}
}

static enum err ask_all(struct device *d, uint32_t, bool *done_out)
{
	return d->ops->done(d, done_out);
}

static enum err ask_mark(struct device *d, uint32_t mark, bool *done_out)
{
	return d->ops->mark_done(d, mark, done_out);
}

FALLIBLE enum err device_wait(struct device *d, uint32_t deadline_ms)
{
	return wait_for(d, ask_all, 0, deadline_ms);
}

FALLIBLE enum err device_mark_wait(struct device *d, uint32_t mark, uint32_t deadline_ms)
{
	must(mark < DEVICE_MARKS);
	return wait_for(d, ask_mark, mark, deadline_ms);
}

FALLIBLE enum err device_mark(struct device *d, uint32_t mark)
{
	must(mark < DEVICE_MARKS);
	return d->ops->mark(d, mark);
}

FALLIBLE enum err device_mark_done(struct device *d, uint32_t mark, bool *done_out)
{
	must(mark < DEVICE_MARKS);
	return d->ops->mark_done(d, mark, done_out);
}

FALLIBLE enum err device_pin(struct device *d, void *p, uint64_t bytes)
{
	return d->ops->pin(d, p, bytes);
}

FALLIBLE enum err device_unpin(struct device *d, void *p)
{
	return d->ops->unpin(d, p);
}

FALLIBLE enum err device_host_pointer(struct device *d, void *p, void **out)
{
	if (!d->ops->host_pointer)
		return ERR(BACKEND_UNAVAILABLE, "there is no GPU that could see host memory");
	return d->ops->host_pointer(d, p, out);
}

FALLIBLE enum err device_gather(struct device *d, const struct device_piece *pieces, uint32_t n, uint32_t mark)
{
	must(n <= DEVICE_GATHER_MAX && mark < DEVICE_MARKS);
	if (!d->ops->gather)
		return ERR(BACKEND_UNAVAILABLE, "there is no GPU for a kernel");
	return n ? d->ops->gather(d, pieces, n, mark) : OK;
}

FALLIBLE enum err device_cast(struct device *d, const struct device_cast *casts, uint32_t n, uint32_t mark)
{
	must(n <= DEVICE_GATHER_MAX && mark < DEVICE_MARKS);
	if (!d->ops->cast)
		return ERR(BACKEND_UNAVAILABLE, "there is no GPU for a kernel");
	for (uint32_t i = 0; i < n; i++)
		must(device_casts(casts[i].to_dtype, casts[i].from_dtype));
	return n ? d->ops->cast(d, casts, n, mark) : OK;
}

FALLIBLE enum err device_import(struct device *d, const struct device_handle *h, struct device_import *out)
{
	if (!d->ops->import)
		return ERR(BACKEND_UNAVAILABLE, "memory of another process's GPU cannot be opened: there is no GPU");
	return d->ops->import(d, h, out);
}

FALLIBLE enum err device_import_end(struct device *d, struct device_import *i)
{
	return d->ops->import_end ? d->ops->import_end(d, i) : OK;
}

FALLIBLE enum err device_create(struct device *d, uint64_t bytes, struct device_import *out)
{
	if (!d->ops->create)
		return ERR(BACKEND_UNAVAILABLE, "there is no GPU to keep %ju bytes on", (uintmax_t)bytes);
	return d->ops->create(d, bytes, out);
}

FALLIBLE enum err device_export(struct device *d, const struct device_import *i, int *fd_out)
{
	must(i->has_allocation);
	return d->ops->export(d, i, fd_out);
}

FALLIBLE enum err device_cuda_find(const char *uuid, uint32_t *index_out)
{
	struct err_info failed = { 0 };
	struct device_info info;

	TRY(device_cuda_open());
	for (uint32_t i = 0; i < device_cuda_count(); i++) {
		if (device_cuda_info(i, &info) != OK) {
			failed = *err_last(); /* one GPU that fell off does not hide the others */
		} else if (strcmp(info.uuid, uuid) == 0) {
			*index_out = i;
			return OK;
		}
	}
	if (failed.code) {
		err_restore(&failed);
		return failed.code;
	}
	return ERR(NOT_FOUND, "this process sees no GPU %.64s", uuid);
}

FALLIBLE enum err device_enter(struct device *d)
{
	return d->ops->enter(d);
}

void *device_stream(struct device *d)
{
	return d->ops->stream ? d->ops->stream(d) : NULL;
}
