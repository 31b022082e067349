/* lookup_device_copy.c: copies between the device memory of a trainer and the segment of one of its ranks, which is page-locked; and
 * device images: new memory of the GPU, filled from such a segment, that other processes map.
 *
 * The trainer hands over handles, and a table of pieces, which lies in the segment behind the image: thousands of tensors as JSON would
 * stop the coordinator. Why a worker copies and not the trainer: the trainer's own copy needs page-locked memory that it must make and
 * hold, and its streams; a segment is page-locked here once and used for every step.
 *
 * Small pieces are gathered: one launch of a kernel copies thousands of them (device_gather), where a kernel can be run and the segment
 * is page-locked. Casts are done by a kernel, too, which reads or writes the page-locked slot; where none can be run, pieces that are cast
 * are left out, and the answer says so.
 *
 * All copies are begun on one stream and a mark follows each WINDOW of them, so that the link never waits for us, and a device that does
 * not come on is noticed within STALL_MS. Pieces that touch are one copy. Whoever asked may change its weights when the answer is there:
 * by then the handles are closed. After an error that is not of the request's form something may be in flight or open: the coordinator
 * ends this process. */
#include <endian.h>
#include <stdio.h>

#include "base/num.h"
#include "device/device.h"
#include "os/fs.h"
#include "query/lookup.h"
#include "session/gpu.h"

enum { ALLOCATIONS_MAX = 4096, CASTS_MAX = 64, PIECES_MAX = 1 << 22, WINDOW_BYTES = 64 << 20, WINDOW_COPIES = 512, COPY_BYTES = 16 << 20,
       STALL_MS = 20000, GATHER_BYTES = 64 << 10, GATHER_LEAST = 16,
       CAST_ELEMENTS = 16 << 10 };

/* A row of the table, little-endian. */
struct piece {
	uint64_t at;                   /* in the segment */
	uint64_t bytes;                /* there */
	uint64_t offset;               /* in the allocation */
	uint32_t allocation;           /* index into the question's */
	uint32_t cast;                 /* 1 + index into the question's; 0: bytes are copied as they are */
};

struct cast {
	enum dtype slot, device;
};

struct device_copy {
	struct worker *w;
	bool to_device;
	struct device_handle *handles;
	struct device_import *imports;
	uint32_t count, opened;
	struct gpu_segment segment;
	struct cast *casts;
	uint32_t cast_count;
	uint64_t table_at, table_bytes;
	struct piece *pieces;
	uint64_t piece_count, bytes, copies;
	uint64_t window_bytes, window_copies;
	uint32_t mark;
	char *seen;                    /* the segment as the GPU sees it; NULL: small pieces are copied like large ones */
	struct piece *small;           /* begun with the next gather */
	struct device_piece *ready;    /* the same for device_gather; as many */
	uint32_t small_count;
	uint64_t gathered;
	char not_gathered[160];        /* why kernels do not run */
	struct device_cast *rows;      /* begun with the next launch */
	uint32_t row_count;
	uint64_t rows_bytes, cast;     /* of these in the slot; of those that were begun */
	char not_cast[160];            /* why pieces that are cast are left out */
};

/* ------------------------------------------------------------------------------------------------------ the question */

static uint64_t number(const json_t *o, const char *name)
{
	json_int_t v = json_integer_value(json_object_get(o, name));

	return v > 0 ? (uint64_t)v : 0;
}

static FALLIBLE enum err read_handle(const json_t *one, const int *fds, uint32_t fd_count, struct device_handle *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(DEVICE_IPC_BYTES);
	const char *text = json_string_value(json_object_get(one, "handle"));

	*out = (struct device_handle){ .fd = -1, .bytes = number(one, "bytes") };
	if (text) {
		if (buf_unbase64(&b, str_of(text)) || b.len != sizeof out->ipc)
			return ERR(VALIDATION_FAILED, "a handle is %zu bytes in base64", sizeof out->ipc);
		memcpy(out->ipc, b.p, sizeof out->ipc);
		return OK;
	}
	uint64_t fd = number(one, "descriptor") + 1; /* behind the segment's */
	if (fd >= fd_count)
		return ERR(VALIDATION_FAILED, "there is no descriptor %ju: %u came", (uintmax_t)(fd - 1), fd_count - 1);
	out->fd = fds[fd];
	return OK;
}

static FALLIBLE enum err read_handles(struct device_copy *c, const json_t *q, const int *fds, uint32_t fd_count)
{
	const json_t *list = json_object_get(q, "allocations");
	size_t n = json_array_size(list);

	if (n < 1 || n > ALLOCATIONS_MAX)
		return ERR(VALIDATION_FAILED, "%zu allocations: there must be 1 to %d", n, ALLOCATIONS_MAX);
	c->count = (uint32_t)n;
	c->handles = mem_zalloc(n, sizeof *c->handles);
	c->imports = mem_zalloc(n, sizeof *c->imports);
	NEED(c->handles && c->imports, "no memory for %zu handles", n);
	for (uint32_t i = 0; i < c->count; i++)
		TRY(read_handle(json_array_get(list, i), fds, fd_count, &c->handles[i]));
	return OK;
}

static FALLIBLE enum err read_casts(struct device_copy *c, const json_t *q)
{
	const json_t *list = json_object_get(q, "casts"), *one;
	size_t n = json_array_size(list), i;

	if (n > CASTS_MAX)
		return ERR(VALIDATION_FAILED, "%zu casts: there may be %d", n, CASTS_MAX);
	c->casts = mem_zalloc(n + 1, sizeof *c->casts);
	NEED(c->casts, "no memory for %zu casts", n);
	json_array_foreach(list, i, one) {
		const char *slot = json_string_value(json_object_get(one, "slot"));
		const char *device = json_string_value(json_object_get(one, "device"));
		TRY(dtype_parse(str_of(slot ? slot : ""), &c->casts[i].slot));
		TRY(dtype_parse(str_of(device ? device : ""), &c->casts[i].device));
		if (!device_casts(c->casts[i].slot, c->casts[i].device))
			return ERR(VALIDATION_FAILED, "a GPU does not cast between %s and %s", slot, device);
	}
	c->cast_count = (uint32_t)n;
	return OK;
}

/* Bytes of a piece on the device. */
static uint64_t device_bytes(const struct device_copy *c, const struct piece *p)
{
	const struct cast *how = p->cast ? &c->casts[p->cast - 1] : NULL;

	return how ? p->bytes / dtype_bytes(how->slot) * dtype_bytes(how->device) : p->bytes;
}

static void take_table(void *user)
{
	struct device_copy *c = user;

	memcpy(c->pieces, c->segment.p + c->table_at, c->table_bytes);
}

static FALLIBLE enum err check_piece(const struct device_copy *c, uint64_t i)
{
	const struct piece *p = &c->pieces[i];

	if (p->allocation >= c->count)
		return ERR(VALIDATION_FAILED, "piece %ju is of allocation %u: there are %u", (uintmax_t)i, p->allocation, c->count);
	if (p->cast > c->cast_count)
		return ERR(VALIDATION_FAILED, "piece %ju is of cast %u: there are %u", (uintmax_t)i, p->cast - 1, c->cast_count);
	uint64_t room = c->handles[p->allocation].bytes;
	if (p->at > c->table_at || p->bytes > c->table_at - p->at)
		return ERR(VALIDATION_FAILED, "piece %ju, %ju bytes at %ju of the segment, does not end before the table", (uintmax_t)i,
			   (uintmax_t)p->bytes, (uintmax_t)p->at);
	if (p->cast) {
		uint32_t slot = dtype_bytes(c->casts[p->cast - 1].slot), device = dtype_bytes(c->casts[p->cast - 1].device);
		if (p->at % slot || p->bytes % slot || p->offset % device)
			return ERR(VALIDATION_FAILED, "piece %ju is cast, and does not begin and end with an element", (uintmax_t)i);
	}
	if (p->offset > room || device_bytes(c, p) > room - p->offset)
		return ERR(VALIDATION_FAILED, "piece %ju, %ju bytes at %ju, is beyond the %ju bytes of allocation %ju", (uintmax_t)i,
			   (uintmax_t)p->bytes, (uintmax_t)p->offset, (uintmax_t)room, (uintmax_t)p->allocation);
	return OK;
}

/* Takes the table over once, for the trainer can write to it, and checks it. */
static FALLIBLE enum err read_table(struct device_copy *c, const json_t *q, uint64_t segment_bytes)
{
	const json_t *table = json_object_get(q, "table");

	c->table_at = number(table, "offset");
	c->piece_count = number(table, "count");
	c->table_bytes = c->piece_count * sizeof *c->pieces;
	if (!c->piece_count || c->piece_count > PIECES_MAX)
		return ERR(VALIDATION_FAILED, "%ju pieces: there must be 1 to %d", (uintmax_t)c->piece_count, PIECES_MAX);
	if (c->table_at > segment_bytes || c->table_bytes > segment_bytes - c->table_at)
		return ERR(VALIDATION_FAILED, "a table of %ju pieces at %ju is beyond the segment's %ju bytes", (uintmax_t)c->piece_count,
			   (uintmax_t)c->table_at, (uintmax_t)segment_bytes);
	c->pieces = mem_alloc(c->table_bytes);
	NEED(c->pieces, "no memory for %ju pieces", (uintmax_t)c->piece_count);
	TRY(seg_guard(take_table, c));
	for (uint64_t i = 0; i < c->piece_count; i++) {
		struct piece *p = &c->pieces[i];
		*p = (struct piece){ le64toh(p->at), le64toh(p->bytes), le64toh(p->offset), le32toh(p->allocation), le32toh(p->cast) };
		TRY(check_piece(c, i));
	}
	return OK;
}

/* ---------------------------------------------------------------------------------------------------------- the copy */

static FALLIBLE enum err open_handles(struct device_copy *c)
{
	for (; c->opened < c->count; c->opened++) {
		enum err e = device_import(c->w->gpu, &c->handles[c->opened], &c->imports[c->opened]);
		if (e) {
			CLEANUP(err_restore) struct err_info info = *err_last();
			snprintf(info.text, sizeof info.text, "allocation %u cannot be opened: %.400s", c->opened, err_last()->text);
			return e;
		}
	}
	return OK;
}

static FALLIBLE enum err close_handles(struct device_copy *c)
{
	enum err e = OK;

	while (!e && c->opened)
		e = device_import_end(c->w->gpu, &c->imports[--c->opened]);
	return e;
}

/* Puts a mark behind what was begun, and waits for the mark whose place the next one takes. */
static FALLIBLE enum err end_window(struct device_copy *c)
{
	c->window_bytes = c->window_copies = 0;
	TRY(device_mark(c->w->gpu, c->mark));
	c->mark = (c->mark + 1) % DEVICE_MARKS;
	return device_mark_wait(c->w->gpu, c->mark, STALL_MS);
}

static FALLIBLE enum err copy_one(struct device_copy *c, const struct piece *p)
{
	for (uint64_t done = 0; done < p->bytes;) {
		uint64_t n = num_min(p->bytes - done, COPY_BYTES);
		unsigned char *host = c->segment.p + p->at + done;
		char *far = (char *)c->imports[p->allocation].p + p->offset + done;
		if (c->to_device)
			TRY(device_copy(c->w->gpu, far, host, n, DEVICE_PUT));
		else
			TRY(device_copy(c->w->gpu, host, far, n, DEVICE_GET));
		done += n;
		c->bytes += n;
		c->copies++;
		c->window_bytes += n;
		if (c->window_bytes >= WINDOW_BYTES || ++c->window_copies >= WINDOW_COPIES)
			TRY(end_window(c));
	}
	return OK;
}

/* No kernel: from here on all pieces are copied like large ones. */
static void gather_not(struct device_copy *c)
{
	c->seen = NULL;
	snprintf(c->not_gathered, sizeof c->not_gathered, "%.*s", (int)sizeof c->not_gathered - 1, err_last()->text);
}

static FALLIBLE enum err launch(struct device_copy *c)
{
	for (uint32_t i = 0; i < c->small_count; i++) {
		const struct piece *p = &c->small[i];
		char *host = c->seen + p->at, *far = (char *)c->imports[p->allocation].p + p->offset;
		c->ready[i] = (struct device_piece){ c->to_device ? far : host, c->to_device ? host : far, p->bytes };
	}
	TRY(device_gather(c->w->gpu, c->ready, c->small_count, c->mark));
	for (uint32_t i = 0; i < c->small_count; i++)
		c->bytes += c->small[i].bytes;
	c->gathered += c->small_count;
	return end_window(c); /* its mark is the gather's */
}

/* Begins the pieces in `small`. */
static FALLIBLE enum err gather(struct device_copy *c)
{
	enum err e = ERR_BACKEND_UNAVAILABLE;

	if (c->small_count >= GATHER_LEAST) {
		e = launch(c);
		if (e == ERR_BACKEND_UNAVAILABLE)
			gather_not(c);
	}
	for (uint32_t i = 0; e == ERR_BACKEND_UNAVAILABLE && i < c->small_count; i++)
		TRY(copy_one(c, &c->small[i]));
	c->small_count = 0;
	return e == ERR_BACKEND_UNAVAILABLE ? OK : e;
}

/* No kernel, or no slot that it could reach: nothing has been cast, and nothing will be. */
static void cast_not(struct device_copy *c, const char *why)
{
	snprintf(c->not_cast, sizeof c->not_cast, "%.*s", (int)sizeof c->not_cast - 1, why);
}

/* Begins the casts in `rows`. */
static FALLIBLE enum err launch_casts(struct device_copy *c)
{
	if (!c->row_count)
		return OK;
	enum err e = device_cast(c->w->gpu, c->rows, c->row_count, c->mark);
	c->row_count = 0;
	if (e == ERR_BACKEND_UNAVAILABLE) {
		cast_not(c, err_last()->text);
		return OK;
	}
	TRY(e);
	c->bytes += c->rows_bytes;
	c->cast += c->rows_bytes;
	c->rows_bytes = 0;
	return end_window(c); /* its mark is the launch's */
}

static FALLIBLE enum err cast(struct device_copy *c, const struct piece *p)
{
	const struct cast *how = &c->casts[p->cast - 1];
	uint64_t slot = dtype_bytes(how->slot), device = dtype_bytes(how->device), n;

	if (!c->seen && !c->not_cast[0])
		cast_not(c, c->segment.not_pinned ? c->segment.not_pinned : c->not_gathered);
	for (uint64_t done = 0, count = p->bytes / slot; done < count && !c->not_cast[0]; done += n) {
		char *host = c->seen + p->at + done * slot, *far = (char *)c->imports[p->allocation].p + p->offset + done * device;
		n = num_min(count - done, CAST_ELEMENTS);
		c->rows[c->row_count++] = c->to_device ? (struct device_cast){ far, host, n, how->device, how->slot }
						       : (struct device_cast){ host, far, n, how->slot, how->device };
		c->rows_bytes += n * slot;
		if (c->row_count == DEVICE_GATHER_MAX)
			TRY(launch_casts(c));
	}
	return OK;
}

static FALLIBLE enum err copy(struct device_copy *c, const struct piece *p)
{
	if (p->cast)
		return cast(c, p);
	if (!c->seen || p->bytes > GATHER_BYTES)
		return copy_one(c, p);
	c->small[c->small_count++] = *p;
	return c->small_count == DEVICE_GATHER_MAX ? gather(c) : OK;
}

/* Whether small pieces are gathered. A driver that does not map page-locked memory for its GPU is no error. */
static FALLIBLE enum err prepare_gather(struct device_copy *c)
{
	void *seen;

	if (c->segment.not_pinned || (c->piece_count < GATHER_LEAST && !c->cast_count))
		return OK;
	c->small = mem_alloc(DEVICE_GATHER_MAX * sizeof *c->small);
	c->ready = mem_alloc(DEVICE_GATHER_MAX * sizeof *c->ready);
	c->rows = c->cast_count ? mem_alloc(DEVICE_GATHER_MAX * sizeof *c->rows) : NULL;
	NEED(c->small && c->ready && (c->rows || !c->cast_count), "no memory for small pieces");
	if (device_host_pointer(c->w->gpu, c->segment.p, &seen) == OK)
		c->seen = seen;
	else
		gather_not(c);
	return OK;
}

static FALLIBLE enum err copy_all(struct device_copy *c)
{
	struct piece now = c->pieces[0];

	for (uint64_t i = 1; i < c->piece_count; i++) {
		const struct piece *p = &c->pieces[i];
		if (p->allocation == now.allocation && p->cast == now.cast && p->at == now.at + now.bytes &&
		    p->offset == now.offset + device_bytes(c, &now)) {
			now.bytes += p->bytes;
			continue;
		}
		TRY(copy(c, &now));
		now = *p;
	}
	TRY(copy(c, &now));
	TRY(gather(c));
	TRY(launch_casts(c));
	return device_wait(c->w->gpu, STALL_MS);
}

static FALLIBLE enum err stalled(enum err e, const char *uuid)
{
	if (e == ERR_TIMED_OUT) /* the process is of no use any more, as after any other error of the copy */
		return ERR(DEVICE_FAILED, "GPU %.48s: nothing was copied for %d s; look at nvidia-smi and dmesg for Xid errors", uuid,
			   STALL_MS / 1000);
	return e;
}

static FALLIBLE enum err run(struct device_copy *c, const json_t *q, const int *fds, uint32_t fd_count)
{
	const char *uuid = json_string_value(json_object_get(q, "device"));
	uint64_t segment_bytes = number(q, "segment_bytes");

	if (!uuid || fd_count < 1 || !segment_bytes)
		return ERR(PROTOCOL, "a copy without device or segment");
	gpu_sweep(c->w);
	TRY(gpu_open_by_uuid(c->w, uuid));
	TRY(read_handles(c, q, fds, fd_count));
	TRY(gpu_map_segment(c->w, fds[0], segment_bytes, &c->segment));
	TRY(read_casts(c, q));
	TRY(read_table(c, q, segment_bytes));
	TRY(open_handles(c));
	TRY(prepare_gather(c));
	return stalled(copy_all(c), uuid);
}

/* Adds the first call that failed. A device that is lost shows in calls that a copy can do without; the copy then fails in another. */
static void name_first(const struct device_copy *c, struct err_info *info)
{
	const char *first = c->segment.not_pinned ? c->segment.not_pinned : c->not_gathered;
	size_t n = strlen(info->text);

	if (info->code == ERR_DEVICE_FAILED && first[0])
		snprintf(info->text + n, sizeof info->text - n, "; before that: %s", first);
}

enum err lookup_device_copy(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out)
{
	struct device_copy c = { .w = w, .to_device = json_is_true(json_object_get(q, "to_device")) };

	enum err e = run(&c, q, fds, fd_count);
	struct err_info info = *err_last();
	enum err closed = e == OK || e == ERR_VALIDATION_FAILED ? close_handles(&c) : OK; /* after others copies may be in flight */
	mem_free(c.handles);
	mem_free(c.imports);
	mem_free(c.pieces);
	mem_free(c.small);
	mem_free(c.ready);
	mem_free(c.casts);
	mem_free(c.rows);
	if (closed)
		return closed;
	if (e) {
		name_first(&c, &info);
		err_restore(&info);
		return e;
	}
	buf_printf(out, "{\"bytes\":%ju,\"copies\":%ju,\"gathered\":%ju,\"pinned\":%s", (uintmax_t)c.bytes, (uintmax_t)c.copies,
		   (uintmax_t)c.gathered, c.segment.not_pinned ? "false" : "true");
	if (c.segment.not_pinned)
		buf_json_member(out, ",\"pin_problem\":", str_of(c.segment.not_pinned));
	if (c.cast_count)
		buf_printf(out, ",\"cast\":%ju", (uintmax_t)c.cast);
	if (c.not_cast[0])
		buf_json_member(out, ",\"cast_problem\":", str_of(c.not_cast));
	if (c.not_gathered[0])
		buf_json_member(out, ",\"gather_problem\":", str_of(c.not_gathered));
	buf_puts(out, "}");
	return buf_status(out);
}

/* -------------------------------------------------------------------------------------------------------- device images */

/* Clears the memory behind the image, which may have another user's bytes from before. */
static FALLIBLE enum err clear_tail(struct device_copy *c, uint64_t image_bytes)
{
	static const char zeros[64 << 10];
	const struct device_import *made = &c->imports[0];

	for (uint64_t at = image_bytes, n; at < made->bytes; at += n) {
		n = num_min(made->bytes - at, sizeof zeros);
		TRY(device_copy(c->w->gpu, (char *)made->p + at, zeros, n, DEVICE_PUT));
	}
	return OK;
}

struct part {
	unsigned char *to;
	const unsigned char *from;
	uint64_t bytes;
};

static void take_part(void *user)
{
	struct part *p = user;

	memcpy(p->to, p->from, p->bytes);
}

/* Of memory that is not page-locked the driver takes a copy itself. Its owner may shrink the segment meanwhile, and all users' images would
 * end with this process: so each part is taken under a guard, COPY_BYTES into `taken`. */
static FALLIBLE enum err copy_guarded(struct device_copy *c, unsigned char *taken, uint64_t bytes)
{
	for (uint64_t done = 0, n; done < bytes; done += n) {
		n = num_min(bytes - done, COPY_BYTES);
		struct part part = { taken, c->segment.p + done, n };
		TRY(seg_guard(take_part, &part));
		TRY(device_copy(c->w->gpu, (char *)c->imports[0].p + done, taken, n, DEVICE_PUT));
		TRY(device_wait(c->w->gpu, STALL_MS));
		c->bytes += n;
		c->copies++;
	}
	return OK;
}

/* Fills new memory with the image and exports it. ERR_DEVICE_FAILED means that the process must end: copies may be in flight. */
static FALLIBLE enum err fill_image(struct device_copy *c, unsigned char *taken, const char *uuid, uint64_t image_bytes, int *fd_out)
{
	const struct piece all = { .bytes = image_bytes };
	enum err e = c->segment.not_pinned ? copy_guarded(c, taken, image_bytes) : copy_one(c, &all);

	if (e == ERR_SEGMENT_SHRUNK) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		if (device_import_end(c->w->gpu, &c->imports[0]) != OK)
			info.code = ERR_DEVICE_FAILED;
		return info.code;
	}

	e = e ?: clear_tail(c, image_bytes);
	e = stalled(e ?: device_wait(c->w->gpu, STALL_MS), uuid);
	e = e ?: device_export(c->w->gpu, &c->imports[0], fd_out);
	e = e ?: device_import_end(c->w->gpu, &c->imports[0]);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		fs_drop(fd_out);
		info.code = ERR_DEVICE_FAILED;
		return info.code;
	}
	return OK;
}

static FALLIBLE enum err no_room(const char *uuid, uint64_t image_bytes)
{
	const struct err_info why = *err_last();

	return ERR(DEVICE_FULL, "GPU %.48s has no room for a device image of %ju bytes beside what else is in its memory: drop others "
		   "(dcpctl kept), or end other processes (nvidia-smi), then ask again (%.200s)", uuid, (uintmax_t)image_bytes, why.text);
}

static FALLIBLE enum err make_image(struct device_copy *c, const char *uuid, uint64_t image_bytes, struct buf *out, int *fd_out)
{
	CLEANUP(mem_free_ptr) unsigned char *taken = c->segment.not_pinned ? mem_alloc(num_min(image_bytes, COPY_BYTES)) : NULL;

	NEED(taken || !c->segment.not_pinned, "no memory to copy an image through");
	enum err e = device_create(c->w->gpu, image_bytes, &c->imports[0]);

	if (e == ERR_NO_MEMORY)
		return no_room(uuid, image_bytes);
	TRY(e);
	uint64_t bytes = c->imports[0].bytes;
	TRY(fill_image(c, taken, uuid, image_bytes, fd_out));
	buf_printf(out, "{\"bytes\":%ju,\"allocated\":%ju}", (uintmax_t)c->bytes, (uintmax_t)bytes);
	return buf_status(out);
}

enum err lookup_device_image(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out)
{
	const char *uuid = json_string_value(json_object_get(q, "device"));
	uint64_t segment_bytes = number(q, "segment_bytes"), image_bytes = number(q, "image_bytes");
	struct device_import made;
	struct device_copy c = { .w = w, .to_device = true, .imports = &made };

	if (!uuid || fd_count < 1 || !image_bytes || image_bytes > segment_bytes)
		return ERR(PROTOCOL, "a device image without device or segment");
	gpu_sweep(w);
	enum err e = gpu_open_by_uuid(w, uuid);
	if (e == ERR_NO_MEMORY) /* for a context */
		return no_room(uuid, image_bytes);
	TRY(e);
	uint64_t pins = w->pins.n;
	TRY(gpu_map_segment(w, fds[0], segment_bytes, &c.segment));
	e = make_image(&c, uuid, image_bytes, out, fd_out);
	if (e != ERR_DEVICE_FAILED) { /* then this process ends, and copies may still read the segment */
		CLEANUP(err_restore) struct err_info info = *err_last();
		gpu_let_go(w, pins);
	}
	return e;
}
