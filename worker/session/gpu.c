/* gpu.c: see gpu.h. */
#include "session/gpu.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/device.h"
#include "os/fs.h"
#include "os/seg.h"

struct gpu_pin {
	struct seg_map map;
	int fd;                        /* tells whether the segment still has a name */
	dev_t dev;
	ino_t ino;
	bool is_pinned;
	char why[160];                 /* the driver does not page-lock it */
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

enum err gpu_open_by_uuid(struct worker *w, const char *uuid)
{
	uint32_t index;

	if (w->gpu)
		return OK;
	TRY(device_cuda_find(uuid, &index));
	return device_open((int32_t)index, &w->gpu);
}

static void drop(struct worker *w, struct gpu_pin *p)
{
	/* what the driver will not let go stays mapped: it may still write there */
	if (p->map.p && (!p->is_pinned || device_unpin(w->gpu, p->map.p) == OK))
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

/* A mapping of its own, page-locked or not; the caller drops it on errors. */
static FALLIBLE enum err map(int fd, uint64_t bytes, struct gpu_pin *out)
{
	struct stat st;

	*out = (struct gpu_pin){ .fd = dup(fd) };
	if (out->fd < 0 || fstat(fd, &st) < 0)
		return ERR_SYS(SYSTEM, "cannot keep a segment");
	out->dev = st.st_dev;
	out->ino = st.st_ino;
	return seg_map(fd, bytes, true, &out->map);
}

static FALLIBLE enum err keep(struct worker *w, struct gpu_pin *one)
{
	struct gpu_pin *p;

	TRY(vec_push(&w->pins, &p));
	*p = *one;
	return OK;
}

static FALLIBLE enum err pin(struct worker *w, int fd, uint64_t bytes)
{
	struct gpu_pin one;

	enum err e = map(fd, bytes, &one);
	e = e ?: device_pin(w->gpu, one.map.p, one.map.bytes);
	one.is_pinned = !e;
	e = e ?: keep(w, &one);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		drop(w, &one);
	}
	return e;
}

enum err gpu_map_segment(struct worker *w, int fd, uint64_t bytes, struct gpu_segment *out)
{
	struct gpu_pin one, *p = NULL;
	struct stat st;

	if (fstat(fd, &st) < 0)
		return ERR_SYS(SYSTEM, "cannot look at a segment");
	each(at, w->pins.v, w->pins.n)
		if (at->dev == st.st_dev && at->ino == st.st_ino && at->map.bytes >= bytes)
			p = at;
	if (!p) {
		enum err e = map(fd, bytes, &one);
		if (!e && device_pin(w->gpu, one.map.p, one.map.bytes) != OK)
			snprintf(one.why, sizeof one.why, "%.*s", (int)sizeof one.why - 1, err_last()->text);
		one.is_pinned = !e && !one.why[0];
		e = e ?: keep(w, &one);
		if (e) {
			CLEANUP(err_restore) struct err_info info = *err_last();
			drop(w, &one);
			return e;
		}
		p = &w->pins.v[w->pins.n - 1];
	}
	*out = (struct gpu_segment){ p->map.p, p->is_pinned ? NULL : p->why };
	return OK;
}

void gpu_let_go(struct worker *w, uint64_t before)
{
	while (w->pins.n > before)
		drop(w, &w->pins.v[--w->pins.n]);
}

enum err gpu_pin_made(struct job *j)
{
	struct worker *w = j->worker;
	uint64_t before = w->pins.n;
	enum err e = gpu_open(w);

	for (uint32_t i = 0; !e && i < j->segments.count; i++)
		e = err_at_rank(pin(w, j->fds[j->segments.v[i].fd], j->segments.v[i].bytes), i);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		gpu_let_go(w, before);
	}
	return e;
}
