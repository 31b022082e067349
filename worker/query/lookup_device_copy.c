/* lookup_device_copy.c: copies between the device memory of a trainer and the segment of one of its ranks, which is page-locked.
 *
 * The trainer hands over handles, and a table of pieces, which lies in the segment behind the image: thousands of tensors as JSON would
 * stop the coordinator. Why a worker copies and not the trainer: the trainer's own copy needs page-locked memory that it must make and
 * hold, and its streams; a segment is page-locked here once and used for every step.
 *
 * Small pieces are gathered: one launch of a kernel copies thousands of them (device_gather), where a kernel can be run and the segment
 * is page-locked.
 *
 * All copies are begun on one stream and a mark follows each WINDOW of them, so that the link never waits for us, and a device that does
 * not come on is noticed within STALL_MS. Pieces that touch are one copy. Whoever asked may change its weights when the answer is there:
 * by then the handles are closed. After an error that is not of the request's form something may be in flight or open: the coordinator
 * ends this process. */
#include <endian.h>
#include <stdio.h>

#include "base/num.h"
#include "device/device.h"
#include "query/lookup.h"
#include "session/gpu.h"

enum { ALLOCATIONS_MAX = 4096, PIECES_MAX = 1 << 22, WINDOW_BYTES = 64 << 20, WINDOW_COPIES = 512, COPY_BYTES = 16 << 20,
       STALL_MS = 20000, GATHER_BYTES = 64 << 10, GATHER_LEAST = 16 };

/* A row of the table, little-endian. */
struct piece {
	uint64_t at;                   /* in the segment */
	uint64_t bytes;
	uint64_t offset;               /* in the allocation */
	uint64_t allocation;           /* index into the question's */
};

struct device_copy {
	struct worker *w;
	bool to_device;
	struct device_handle *handles;
	struct device_import *imports;
	uint32_t count, opened;
	struct gpu_segment segment;
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

static void take_table(void *user)
{
	struct device_copy *c = user;

	memcpy(c->pieces, c->segment.p + c->table_at, c->table_bytes);
}

static FALLIBLE enum err check_piece(const struct device_copy *c, uint64_t i)
{
	const struct piece *p = &c->pieces[i];

	if (p->allocation >= c->count)
		return ERR(VALIDATION_FAILED, "piece %ju is of allocation %ju: there are %u", (uintmax_t)i, (uintmax_t)p->allocation,
			   c->count);
	uint64_t room = c->handles[p->allocation].bytes;
	if (p->at > c->table_at || p->bytes > c->table_at - p->at)
		return ERR(VALIDATION_FAILED, "piece %ju, %ju bytes at %ju of the segment, does not end before the table", (uintmax_t)i,
			   (uintmax_t)p->bytes, (uintmax_t)p->at);
	if (p->offset > room || p->bytes > room - p->offset)
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
		*p = (struct piece){ le64toh(p->at), le64toh(p->bytes), le64toh(p->offset), le64toh(p->allocation) };
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
		char *there = (char *)c->imports[p->allocation].p + p->offset + done;
		if (c->to_device)
			TRY(device_copy(c->w->gpu, there, host, n, DEVICE_PUT));
		else
			TRY(device_copy(c->w->gpu, host, there, n, DEVICE_GET));
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
		char *host = c->seen + p->at, *there = (char *)c->imports[p->allocation].p + p->offset;
		c->ready[i] = (struct device_piece){ c->to_device ? there : host, c->to_device ? host : there, p->bytes };
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

static FALLIBLE enum err copy(struct device_copy *c, const struct piece *p)
{
	if (!c->seen || p->bytes > GATHER_BYTES)
		return copy_one(c, p);
	c->small[c->small_count++] = *p;
	return c->small_count == DEVICE_GATHER_MAX ? gather(c) : OK;
}

/* Whether small pieces are gathered. A driver that does not map page-locked memory for its GPU is no error. */
static FALLIBLE enum err prepare_gather(struct device_copy *c)
{
	void *seen;

	if (c->segment.not_pinned || c->piece_count < GATHER_LEAST)
		return OK;
	c->small = mem_alloc(DEVICE_GATHER_MAX * sizeof *c->small);
	c->ready = mem_alloc(DEVICE_GATHER_MAX * sizeof *c->ready);
	NEED(c->small && c->ready, "no memory for small pieces");
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
		if (p->allocation == now.allocation && p->at == now.at + now.bytes && p->offset == now.offset + now.bytes) {
			now.bytes += p->bytes;
			continue;
		}
		TRY(copy(c, &now));
		now = *p;
	}
	TRY(copy(c, &now));
	TRY(gather(c));
	return device_wait(c->w->gpu, STALL_MS);
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
	TRY(read_table(c, q, segment_bytes));
	TRY(open_handles(c));
	TRY(prepare_gather(c));
	enum err e = copy_all(c);
	if (e == ERR_TIMED_OUT) /* the process is of no use any more, as after any other error here */
		return ERR(DEVICE_FAILED, "GPU %.48s: nothing was copied for %d s; look at nvidia-smi and dmesg for Xid errors", uuid,
			   STALL_MS / 1000);
	return e;
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
	if (c.not_gathered[0])
		buf_json_member(out, ",\"gather_problem\":", str_of(c.not_gathered));
	buf_puts(out, "}");
	return buf_status(out);
}
