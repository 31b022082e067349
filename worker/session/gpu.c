/* gpu.c: see gpu.h. */
#include "session/gpu.h"

#include <sys/stat.h>
#include <unistd.h>

#include "device/device.h"
#include "os/fs.h"
#include "os/seg.h"

struct gpu_pin {
	struct seg_map map;
	int fd;                        /* tells whether the segment still has a name */
};

enum err gpu_open(struct worker *w)
{
	if (w->gpu)
		return OK;
	if (!w->device)
		return ERR(BACKEND_UNAVAILABLE, "this gang was started without a GPU");
	TRY(device_cuda_open());
	uint32_t n = device_cuda_count();
	return device_open((int32_t)(n ? w->index % n : 0), &w->gpu);
}

static void drop(struct worker *w, struct gpu_pin *p)
{
	/* what the driver will not let go stays mapped: it may still write there */
	if (p->map.p && device_unpin(w->gpu, p->map.p) == OK)
		seg_unmap(&p->map);
	fs_drop(&p->fd);
}

void gpu_sweep(struct worker *w)
{
	uint64_t kept = 0;
	struct stat st;

	each(p, w->pins.v, w->pins.n) {
		if (fstat(p->fd, &st) < 0 || st.st_nlink == 0)
			drop(w, p);
		else
			w->pins.v[kept++] = *p;
	}
	w->pins.n = kept;
}

void gpu_close(struct worker *w)
{
	for (uint64_t i = 0; i < w->pins.n; i++)
		drop(w, &w->pins.v[i]);
	vec_free(&w->pins);
	device_close(w->gpu);
	w->gpu = NULL;
}

static FALLIBLE enum err pin(struct worker *w, int fd, uint64_t bytes)
{
	struct gpu_pin one = { .fd = dup(fd) }, *p;

	if (one.fd < 0)
		return ERR_SYS(SYSTEM, "cannot keep a segment");
	enum err e = seg_map(fd, bytes, true, &one.map);
	e = e ?: device_pin(w->gpu, one.map.p, one.map.bytes);
	e = e ?: vec_push(&w->pins, &p);
	if (e) {
		seg_unmap(&one.map);
		fs_drop(&one.fd);
		return e;
	}
	*p = one;
	return OK;
}

enum err gpu_pin_made(struct job *j)
{
	struct worker *w = j->worker;
	uint64_t before = w->pins.n;
	enum err e = gpu_open(w);

	for (uint32_t i = 0; !e && i < j->segments.count; i++)
		e = err_at_rank(pin(w, j->fds[j->segments.v[i].fd], j->segments.v[i].bytes), i);
	struct err_info info = *err_last();
	while (e && w->pins.n > before)
		drop(w, &w->pins.v[--w->pins.n]);
	if (e)
		err_restore(&info);
	return e;
}
