/* device_copy.c: see device_copy.h.
 *
 * A copier is a GPU and, while it is used, its worker: started with the first copy, kept for IDLE_MS because a context and page-locked
 * segments take long to make, and ended then because a context takes some hundred MB of the GPU's memory. It does one copy at a time.
 * Another copier of the same GPU, a holder, makes device images, and its worker is kept as long as there is one: a GPU that no process
 * has open may lose what is in its memory.
 *
 * After an error the worker is killed, and only when it has ended the copy has: until then the GPU may go on writing into the segment, and
 * the trainer, told of the error, would copy into the same slot itself. The process that ends takes with it whatever it has open or
 * page-locked, and a context that is lost. */
#include "server/device_copy.h"

#include <stdio.h>

#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/descriptors.h"
#include "server/devices.h"
#include "server/errdoc.h"
#include "server/metrics.h"
#include "server/state_dict.h"
#include "server/worker.h"

enum { IDLE_MS = 600000, START_MS = 60000, END_MS = 2000, SLOWEST_BYTES_A_MS = 64 << 10, QUEUE_MAX = 1024 };

struct copy {
	struct copy *next;
	json_t *question;
	struct state_dict_use *use;
	struct descriptors_park *park;
	uint32_t rank;
	device_copied_fn fn;
	void *user;
};

struct copier {
	struct copier *next;
	struct device_copies *all;
	char uuid[48];
	bool is_holder;
	struct worker *worker;              /* NULL: none runs */
	bool ready, running;                /* the worker has said hello; it does the first copy */
	struct copy *first;
	uint32_t count;                     /* of copies */
	uint64_t number;                    /* of the copy that runs, or ran last */
	struct loop_timer *timer;           /* of the copy that runs; else of the idle worker */
};

struct device_copies {
	struct device_copy_parts parts;
	struct device_holding holding;
	struct copier *first;
	bool ending;
};

FALLIBLE enum err device_copies_new(const struct device_copy_parts *parts, struct device_copies **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot copy device memory");
	(*out)->parts = *parts;
	return OK;
}

static void free_copy(struct copy *c)
{
	state_dict_unuse(&c->use);
	descriptors_drop(&c->park);
	json_decref(c->question);
	mem_free(c);
}

void device_copies_hold(struct device_copies *d, const struct device_holding *h)
{
	d->holding = *h;
}

/* Ends the first copy. fd: the memory of a device image, or -1. */
static void finish_with(struct copier *k, enum err e, const json_t *ok, int *fd)
{
	struct copy *c = k->first;
	struct err_info info = *err_last();

	loop_timer_stop(&k->timer);
	k->running = false;
	k->first = c->next;
	k->count--;
	if (!e && k->is_holder && state_dict_is_rewritten(c->use, c->rank)) {
		e = ERR(STATE_CONFLICT, "state dict \"%s\" was filled anew while rank %u was copied: keep it again", c->use->name, c->rank);
		info = *err_last();
	}
	state_dict_unuse(&c->use); /* first: whoever is told may seal at once */
	metrics_add(k->all->parts.metrics, "dcpd_device_copies_total", e ? "result=\"failed\"" : "result=\"done\"", 1);
	if (e) {
		log_warn("a copy of device memory has failed", "device", k->uuid, "problem", info.text, NULL);
		err_restore(&info);
	} else {
		metrics_add(k->all->parts.metrics, "dcpd_device_copy_bytes_total", "",
			    (double)json_integer_value(json_object_get(ok, "bytes")));
	}
	c->fn(c->user, e, ok, fd);
	free_copy(c);
}

static void finish(struct copier *k, enum err e, const json_t *ok)
{
	finish_with(k, e, ok, &(int){ -1 });
}

static void on_late(void *user)
{
	struct copier *k = user;

	k->timer = NULL;
	worker_kill(k->worker, ERR(DEVICE_FAILED, "GPU %s: the driver has not answered for too long", k->uuid));
}

static bool holds_any(const struct copier *k)
{
	return k->is_holder && k->all->holding.any(k->all->holding.user, k->uuid);
}

static void on_idle(void *user)
{
	struct copier *k = user;

	k->timer = NULL;
	if (holds_any(k)) {
		loop_timer_start(k->all->parts.loop, IDLE_MS, on_idle, k, &k->timer);
		return;
	}
	worker_disown(k->worker);
	k->worker = NULL;
	k->ready = false;
}

/* Whether the worker goes on after an error that it has answered. Images would be lost with a holder, whose errors leave nothing in flight,
 * but for those of the device. Without images a new worker is the better one: this one may remember that it found no driver. */
static bool goes_on(const struct copier *k, enum err e)
{
	return e == ERR_VALIDATION_FAILED || (holds_any(k) && e != ERR_DEVICE_FAILED && e != ERR_PROTOCOL);
}

static void run_next(struct copier *k);

static void on_ready(struct worker *w, enum err e, const json_t *)
{
	struct copier *k = w->owner;

	k->ready = e == OK;
	if (e)
		worker_kill(w, e);
	else
		run_next(k);
}

static void on_frame(struct worker *w, const struct frame *f, const json_t *body)
{
	struct copier *k = w->owner;
	const json_t *ok = json_object_get(body, "ok");

	if (f->type == FRAME_IO)
		return;
	if (f->type != FRAME_ANSWER || f->generation != k->number || !k->running) {
		worker_kill(w, ERR(PROTOCOL, "a device worker sent a message of type %u", f->type));
		return;
	}
	enum err e = json_is_object(ok) ? OK : errdoc_restore(json_object_get(body, "problem"));
	if (e && !goes_on(k, e)) {
		worker_kill(w, e);
		return;
	}
	finish_with(k, e, ok, f->fd_count && k->is_holder ? &f->fds[0] : &(int){ -1 });
	run_next(k);
}

static void on_ended(struct worker *w, enum err e)
{
	struct copier *k = w->owner;
	struct err_info info = *err_last();
	bool started = k->ready;

	k->worker = NULL;
	k->ready = false;
	loop_timer_stop(&k->timer);
	if (k->is_holder)
		k->all->holding.ended(k->all->holding.user, k->uuid);
	err_restore(&info);
	if (k->running) {
		finish(k, e, NULL);
	} else if (!started) { /* the next one would not start either */
		while (k->first) {
			err_restore(&info);
			finish(k, e, NULL);
		}
	}
	run_next(k);
}

static FALLIBLE enum err start_worker(struct copier *k)
{
	static const struct worker_ops ops = { .ready = on_ready, .frame = on_frame, .ended = on_ended };
	struct worker_spec spec = { .role = k->is_holder ? "holder" : "device", .count = 1, .device = true, .ops = &ops, .owner = k };

	return worker_start(k->all->parts.workers, &spec, &k->worker);
}

static void send_first(struct copier *k)
{
	struct copy *c = k->first;
	const struct state_dict_rank_use *u = &c->use->ranks[c->rank];
	CLEANUP(mem_free_ptr) int *fds = NULL;
	uint32_t n = 0;
	const int *more = descriptors_of(c->park, &n);

	fds = mem_alloc((n + 1ull) * sizeof *fds);
	if (!fds) {
		finish(k, ERR(NO_MEMORY, "cannot ask for a copy"), NULL);
		return;
	}
	fds[0] = u->fd;
	if (n)
		memcpy(fds + 1, more, n * sizeof *fds);
	k->running = true;
	k->number++;
	loop_timer_stop(&k->timer);
	loop_timer_start(k->all->parts.loop, START_MS + (int64_t)(u->bytes / SLOWEST_BYTES_A_MS), on_late, k, &k->timer);
	worker_set(k->worker, "busy", NULL);
	worker_send(k->worker, FRAME_LOOKUP, k->number, c->question, fds, n + 1);
}

static void run_next(struct copier *k)
{
	while (!k->running && k->first && !k->all->ending) {
		if (!k->worker) {
			enum err e = start_worker(k);
			if (e)
				finish(k, e, NULL);
			continue;
		}
		if (!k->ready || k->worker->killed)
			return;
		send_first(k);
	}
	if (k->worker && k->ready && !k->running && !k->worker->killed) {
		worker_set(k->worker, "idle", NULL);
		loop_timer_stop(&k->timer);
		loop_timer_start(k->all->parts.loop, IDLE_MS, on_idle, k, &k->timer);
	}
}

static FALLIBLE enum err copier_of(struct device_copies *d, const char *uuid, bool is_holder, struct copier **out)
{
	const char *missing = devices_missing(d->parts.devices, "cuda");
	struct copier *k = d->first;

	if (missing)
		return ERR(BACKEND_UNAVAILABLE, "%s", missing);
	if (!devices_has(d->parts.devices, uuid))
		return ERR(NOT_FOUND, "dcpd sees no GPU %.60s: NVIDIA_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES may leave it out", uuid);
	while (k && (strcmp(k->uuid, uuid) != 0 || k->is_holder != is_holder))
		k = k->next;
	if (!k) {
		k = mem_zalloc(1, sizeof *k);
		NEED(k, "cannot copy device memory");
		snprintf(k->uuid, sizeof k->uuid, "%s", uuid);
		k->is_holder = is_holder;
		k->all = d;
		k->next = d->first;
		d->first = k;
	}
	if (k->count >= QUEUE_MAX)
		return ERR(BUSY, "%d copies of GPU %s wait", QUEUE_MAX, uuid);
	*out = k;
	return OK;
}

static void begin(void *user, enum err)
{
	run_next(user);
}

static void enqueue(struct copier *k, struct copy *c)
{
	struct copy **at = &k->first;

	while (*at)
		at = &(*at)->next;
	*at = c;
	k->count++;
	loop_later(k->all->parts.loop, begin, k, OK);
}

FALLIBLE enum err device_copy_start(struct device_copies *d, const struct device_copy_request *rq, device_copied_fn fn, void *user)
{
	struct copier *k;

	TRY(copier_of(d, rq->device, false, &k));
	struct copy *c = mem_zalloc(1, sizeof *c);
	NEED(c, "cannot copy device memory");
	c->rank = (uint32_t)rq->rank;
	c->fn = fn;
	c->user = user;
	enum err e = rq->descriptors.n ? descriptors_hold(d->parts.descriptors, &rq->who, rq->descriptors, &c->park) : OK;
	e = e ?: state_dict_use_rank(d->parts.state_dicts, &rq->who, rq->name, rq->rank, rq->generation, !rq->to_device, &c->use);
	if (!e) {
		json_int_t bytes = (json_int_t)c->use->ranks[rq->rank].bytes;
		c->question = json_pack("{s:s, s:s, s:b, s:I, s:O, s:O, s:O*}", "op", "device_copy", "device", rq->device, "to_device",
					rq->to_device, "segment_bytes", bytes, "table", rq->table, "allocations", rq->allocations,
					"casts", rq->casts);
		if (!c->question)
			e = ERR(NO_MEMORY, "cannot ask for a copy");
	}
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		free_copy(c);
		return e;
	}
	enqueue(k, c);
	return OK;
}

FALLIBLE enum err device_copy_image(struct device_copies *d, const char *device, uint32_t rank, struct state_dict_use **use,
				    device_copied_fn fn, void *user)
{
	const struct state_dict_rank_use *u = &(*use)->ranks[rank];
	struct copy *c = mem_zalloc(1, sizeof *c);
	struct copier *k;

	json_t *question = json_pack("{s:s, s:s, s:I, s:I}", "op", "device_image", "device", device, "segment_bytes", (json_int_t)u->bytes,
				     "image_bytes", (json_int_t)u->image_bytes);
	enum err e = c && question ? copier_of(d, device, true, &k) : ERR(NO_MEMORY, "cannot make a device image");
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		state_dict_unuse(use);
		json_decref(question);
		mem_free(c);
		return e;
	}
	*c = (struct copy){ .question = question, .use = *use, .rank = rank, .fn = fn, .user = user };
	*use = NULL;
	enqueue(k, c);
	return OK;
}

void device_copies_end(struct device_copies *d)
{
	if (!d)
		return;
	d->ending = true;
	list_each(k, d->first) {
		if (k->worker)
			worker_disown(k->worker);
		/* else the worker writes into a slot that its client, who is told of the end, fills anew */
		if (k->worker && k->running && !worker_await_end(k->worker, END_MS))
			log_err("a device worker does not end", "device", k->uuid, NULL);
		k->worker = NULL;
		while (k->first)
			finish(k, ERR(DRAINING, "the daemon is shutting down"), NULL);
		loop_timer_stop(&k->timer);
	}
}

void device_copies_free(struct device_copies *d)
{
	list_each(k, d ? d->first : NULL)
		mem_free(k);
	mem_free(d);
}
