/* device_image.c: see device_image.h. */
#include "server/device_image.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/descriptors.h"
#include "server/device_copy.h"
#include "server/devices.h"
#include "server/events.h"
#include "server/state_dict.h"

enum { TICK_MS = 500, ID_BYTES = 8, IMAGES_MAX = 4096, GRANULE = 2 << 20 /* of the driver's allocations */ };

enum image_state { IMAGE_FILLING, IMAGE_KEPT, IMAGE_DROPPED, IMAGE_LOST };

static const char *const state_names[] = { "filling", "kept", "dropped", "lost" };

struct waiter {
	struct waiter *next;
	device_image_fn fn;
	void *user;
};

struct device_image {
	struct device_image *next;
	struct device_images *all;
	char id[2 * ID_BYTES + 1], device[48];
	char *state_dict, *segment;        /* the segment tells a state dict from a later one of its name */
	int64_t rank, generation;
	uint32_t rewrites;                 /* of the slot: a load that fills it in place makes other bytes of the same generation */
	uid_t uid;                         /* the state dict's */
	enum image_state state;
	int fd;                            /* of the memory; -1 unless it is kept */
	uint64_t bytes, image_bytes;
	uint32_t attached;                 /* connections that were given it and are open */
	int64_t ttl_ms, created_ms;        /* created_ms: wall clock */
	int64_t idle_since_ms;             /* monotone clock; of an image without connections */
	char problem[256];                 /* of one that is lost */
	struct waiter *waiters;            /* for one that is being filled */
};

struct device_images {
	struct device_image_parts parts;
	struct loop_timer *tick;
	struct device_image *first;
};

static void emit(const struct device_image *i, const char *what)
{
	events_emit(i->all->parts.events, "device_image.changed", NULL,
		    json_pack("{s:s, s:s, s:s, s:I, s:s}", "device_image", i->id, "what", what, "state_dict", i->state_dict, "rank",
			      (json_int_t)i->rank, "device", i->device));
}

static void *close_fd(void *fd)
{
	close((int)(intptr_t)fd);
	return NULL;
}

/* Closes the last descriptor of the memory, in a thread: the driver takes its time to free gigabytes, and a driver that hangs does not
 * return. The memory counts no more, though the driver may still be freeing it. */
static void let_go(struct device_image *i)
{
	pthread_t thread;

	if (i->fd >= 0 && pthread_create(&thread, NULL, close_fd, (void *)(intptr_t)i->fd) == 0)
		pthread_detach(thread);
	else if (i->fd >= 0)
		close(i->fd);
	i->fd = -1;
}

static void free_image(struct device_image *i)
{
	list_remove(&i->all->first, i);
	let_go(i);
	mem_free(i->state_dict);
	mem_free(i->segment);
	mem_free(i);
}

static void set_state(struct device_image *i, enum image_state to)
{
	static const unsigned legal[] = { [IMAGE_FILLING] = 1 << IMAGE_KEPT, [IMAGE_KEPT] = 1 << IMAGE_DROPPED | 1 << IMAGE_LOST,
					  [IMAGE_DROPPED] = 0, [IMAGE_LOST] = 1 << IMAGE_DROPPED };
	char rank[24];

	must(legal[i->state] & (1u << to));
	i->state = to;
	snprintf(rank, sizeof rank, "%jd", (intmax_t)i->rank);
	log_info("device image", "id", i->id, "state", state_names[to], "state_dict", i->state_dict, "rank", rank, "device", i->device,
		 NULL);
	emit(i, state_names[to]);
}

/* The memory is being freed, or was never filled. */
static void remove_image(struct device_image *i)
{
	emit(i, "removed");
	free_image(i);
}

/* No new engine gets it. Those that have it keep their mappings, and the memory counts until they are gone. */
static void drop(struct device_image *i)
{
	set_state(i, IMAGE_DROPPED);
	let_go(i);
	if (!i->attached)
		remove_image(i);
}

static int64_t ends_ms(const struct device_image *i)
{
	return i->attached || !i->ttl_ms ? INT64_MAX : i->idle_since_ms + i->ttl_ms;
}

static void on_tick(void *user)
{
	struct device_images *d = user;
	int64_t now = clock_mono_ms();

	list_each(i, d->first)
		if ((i->state == IMAGE_KEPT || i->state == IMAGE_LOST) && ends_ms(i) <= now)
			drop(i);
}

static bool holds_any(void *user, const char *device)
{
	const struct device_images *d = user;

	for (const struct device_image *i = d->first; i; i = i->next)
		if (i->state == IMAGE_KEPT && strcmp(i->device, device) == 0)
			return true;
	return false;
}

static void on_holder_ended(void *user, const char *device)
{
	struct device_images *d = user;
	const struct err_info info = *err_last();

	for (struct device_image *i = d->first; i; i = i->next) {
		if (i->state != IMAGE_KEPT || strcmp(i->device, device) != 0)
			continue;
		let_go(i);
		snprintf(i->problem, sizeof i->problem, "the worker that held it has ended: %.200s", info.text);
		set_state(i, IMAGE_LOST);
	}
}

FALLIBLE enum err device_images_new(const struct device_image_parts *parts, struct device_images **out)
{
	struct device_images *d = mem_zalloc(1, sizeof *d);

	NEED(d, "cannot keep device images");
	d->parts = *parts;
	*out = d;
	device_copies_hold(parts->copies, &(struct device_holding){ holds_any, on_holder_ended, d });
	return loop_every(parts->loop, TICK_MS, on_tick, d, &d->tick);
}

void device_images_free(struct device_images *d)
{
	if (d)
		loop_timer_stop(&d->tick);
	list_each(i, d ? d->first : NULL)
		free_image(i);
	mem_free(d);
}

uint64_t device_images_bytes(const struct device_images *d, uint32_t *count_out)
{
	uint64_t bytes = 0;

	*count_out = 0;
	for (const struct device_image *i = d ? d->first : NULL; i; i = i->next) {
		bool has_memory = i->state != IMAGE_LOST || i->attached;
		bytes += has_memory ? i->bytes : 0;
		*count_out += has_memory;
	}
	return bytes;
}

/* ---- records ---- */

static void put(const struct device_image *i, struct buf *out)
{
	char stamp[CLOCK_TEXT_MAX];
	int64_t ends = ends_ms(i);

	buf_printf(out, "{\"id\":\"%s\",\"state\":\"%s\"", i->id, state_names[i->state]);
	buf_json_member(out, ",\"state_dict\":", str_of(i->state_dict));
	buf_printf(out, ",\"rank\":%jd,\"generation\":%jd,\"device\":\"%s\",\"uid\":%u,\"bytes\":%ju,\"image_bytes\":%ju,\"attached\":%u",
		   (intmax_t)i->rank, (intmax_t)i->generation, i->device, (unsigned)i->uid, (uintmax_t)i->bytes, (uintmax_t)i->image_bytes,
		   i->attached);
	buf_printf(out, ",\"created_at\":\"%s\",\"ttl_seconds\":%jd", clock_text(i->created_ms, stamp), (intmax_t)(i->ttl_ms / 1000));
	if (i->state == IMAGE_KEPT && ends != INT64_MAX)
		buf_printf(out, ",\"expires_at\":\"%s\"", clock_text(clock_wall_ms() + ends - clock_mono_ms(), stamp));
	if (i->problem[0])
		buf_json_member(out, ",\"problem\":", str_of(i->problem));
	buf_puts(out, "}");
}

FALLIBLE enum err device_images_list(struct device_images *d, const struct principal *who, struct str state_dict, struct buf *out)
{
	const char *comma = "";

	buf_puts(out, "{\"device_images\":[");
	for (const struct device_image *i = d->first; i; i = i->next) {
		if (!principal_may(who, i->uid) || (state_dict.n && !str_is(state_dict, i->state_dict)))
			continue;
		buf_puts(out, comma);
		put(i, out);
		comma = ",";
	}
	buf_puts(out, "]}");
	return buf_status(out);
}

/* ---- keeping ---- */

static void tell(struct device_image *i, enum err e)
{
	struct buf b = BUF_INIT(4096);
	struct err_info info = *err_last();

	put(i, &b);
	if (!e)
		e = buf_status(&b);
	while (i->waiters) {
		struct waiter *w = i->waiters;
		i->waiters = w->next;
		err_restore(&info);
		w->fn(w->user, e, e ? NULL : &b);
		mem_free(w);
	}
	buf_free(&b);
}

static bool is_same_place(const struct device_image *a, const struct device_image *b)
{
	return a->rank == b->rank && a->uid == b->uid && strcmp(a->device, b->device) == 0 && strcmp(a->state_dict, b->state_dict) == 0;
}

/* The rank's others on this GPU: of other generations, also of another state dict of the name, and what was lost. */
static void supersede(struct device_image *by)
{
	list_each(i, by->all->first)
		if (i != by && (i->state == IMAGE_KEPT || i->state == IMAGE_LOST) && is_same_place(i, by))
			drop(i);
}

/* Bytes that an image takes on the GPU. */
static uint64_t rounded(uint64_t bytes)
{
	return (bytes + GRANULE - 1) / GRANULE * GRANULE;
}

static FALLIBLE enum err check_room(const struct device_images *d, const char *device, uint64_t bytes)
{
	uint64_t limit = d->parts.config->device_limit, used = 0;

	for (const struct device_image *i = d->first; i; i = i->next)
		used += strcmp(i->device, device) == 0 && (i->state != IMAGE_LOST || i->attached) ? i->bytes : 0;
	if (!limit || (used <= limit && bytes <= limit - used))
		return OK;
	return ERR(DEVICE_FULL, "device images on GPU %s have %ju bytes; with %ju more they are beyond device-limit, %ju: drop some "
		   "(dcpctl kept shows them), or raise it", device, (uintmax_t)used, (uintmax_t)bytes, (uintmax_t)limit);
}

static void on_made(void *user, enum err e, const json_t *ok, int *fd)
{
	struct device_image *i = user;

	i->fd = *fd; /* also of a copy that failed: whoever closes it frees the memory */
	*fd = -1;
	if (!e && i->fd < 0)
		e = ERR(PROTOCOL, "a holder has made a device image without a descriptor");
	uint64_t allocated = e ? 0 : (uint64_t)json_integer_value(json_object_get(ok, "allocated"));
	if (!e && allocated > i->bytes) /* the driver allocates in larger steps */
		e = check_room(i->all, i->device, allocated - i->bytes);
	if (e) {
		tell(i, e);
		remove_image(i);
		return;
	}
	i->bytes = allocated;
	i->idle_since_ms = clock_mono_ms();
	set_state(i, IMAGE_KEPT);
	supersede(i);
	tell(i, OK);
}

static FALLIBLE enum err new_image(struct device_images *d, const struct device_image_request *rq, const struct state_dict_use *use,
				   const char *device, struct device_image **out)
{
	const struct state_dict_rank_use *u = &use->ranks[rq->rank];
	unsigned char random[ID_BYTES];

	if (getrandom(random, sizeof random, 0) != sizeof random)
		return ERR_SYS(SYSTEM, "cannot name a device image");
	struct device_image *i = mem_zalloc(1, sizeof *i);
	NEED(i, "cannot keep a device image");
	*i = (struct device_image){ .all = d, .rank = rq->rank, .generation = use->generation, .uid = use->uid, .fd = -1,
				    .rewrites = u->rewrites,
				    .bytes = rounded(u->image_bytes), .image_bytes = u->image_bytes, .created_ms = clock_wall_ms(),
				    .ttl_ms = rq->ttl_ms < 0 ? d->parts.config->keep_sealed_ms : rq->ttl_ms,
				    .state_dict = mem_strdup(use->name), .segment = mem_strdup(u->segment) };
	for (int k = 0; k < ID_BYTES; k++)
		snprintf(i->id + 2 * k, 3, "%02x", random[k]);
	snprintf(i->device, sizeof i->device, "%s", device);
	i->next = d->first;
	d->first = i;
	if (i->state_dict && i->segment) {
		emit(i, state_names[IMAGE_FILLING]);
		*out = i;
		return OK;
	}
	free_image(i);
	return ERR(NO_MEMORY, "cannot keep a device image");
}

static FALLIBLE enum err add_waiter(struct device_image *i, device_image_fn fn, void *user)
{
	struct waiter *w = mem_zalloc(1, sizeof *w);

	NEED(w, "cannot wait for a device image");
	*w = (struct waiter){ i->waiters, fn, user };
	i->waiters = w;
	return OK;
}

/* The same image, which is there or on its way. */
static struct device_image *twin_of(const struct device_images *d, const struct state_dict_use *use, uint32_t rank, const char *device)
{
	for (struct device_image *i = d->first; i; i = i->next)
		if (i->state <= IMAGE_KEPT && i->rank == rank && i->generation == use->generation && i->uid == use->uid &&
		    i->rewrites == use->ranks[rank].rewrites &&
		    strcmp(i->device, device) == 0 && strcmp(i->state_dict, use->name) == 0 &&
		    strcmp(i->segment, use->ranks[rank].segment) == 0)
			return i;
	return NULL;
}

static FALLIBLE enum err begin(struct device_images *d, const struct device_image_request *rq, const char *device,
			       struct state_dict_use **use, device_image_fn fn, void *user)
{
	uint32_t rank = (uint32_t)rq->rank, count = 0;
	struct device_image *i;

	for (i = d->first; i; i = i->next)
		count++;
	if (count >= IMAGES_MAX)
		return ERR(BUSY, "there are %d device images: drop some (dcpctl kept)", IMAGES_MAX);
	TRY(check_room(d, device, rounded((*use)->ranks[rank].image_bytes)));
	TRY(new_image(d, rq, *use, device, &i));
	enum err e = add_waiter(i, fn, user);
	e = e ?: device_copy_image(d->parts.copies, device, rank, use, on_made, i);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		mem_free(i->waiters);
		remove_image(i);
	}
	return e;
}

FALLIBLE enum err device_image_keep(struct device_images *d, const struct device_image_request *rq, device_image_fn fn, void *user,
				    struct buf *record, bool *change_out)
{
	const char *missing = devices_missing(d->parts.devices, "cuda"), *device = rq->device ?: devices_only(d->parts.devices);
	struct state_dict_use *use = NULL;
	int64_t generation = rq->generation;
	uint64_t bytes;

	*change_out = false;
	if (missing)
		return ERR(BACKEND_UNAVAILABLE, "%s", missing);
	if (!device)
		return ERR(VALIDATION_FAILED, "this host has several GPUs: \"device\" names one by its uuid, as nvidia-smi -L prints it");
	if (generation < 0)
		TRY(state_dict_check(d->parts.state_dicts, &rq->who, rq->state_dict, -1, &generation, &bytes));
	TRY(state_dict_use_rank(d->parts.state_dicts, &rq->who, rq->state_dict, rq->rank, generation, false, &use));
	struct device_image *twin = twin_of(d, use, (uint32_t)rq->rank, device);
	enum err e;
	*change_out = !twin || (rq->ttl_ms >= 0 && rq->ttl_ms != twin->ttl_ms);
	if (state_dict_is_rewritten(use, (uint32_t)rq->rank))
		e = ERR(STATE_CONFLICT, "a job is filling state dict \"%s\" in place: keep it when that has ended", use->name);
	else if (!twin)
		e = begin(d, rq, device, &use, fn, user);
	else if (twin->state == IMAGE_FILLING) {
		twin->ttl_ms = rq->ttl_ms < 0 ? twin->ttl_ms : rq->ttl_ms;
		e = add_waiter(twin, fn, user);
	}
	else {
		twin->ttl_ms = rq->ttl_ms < 0 ? twin->ttl_ms : rq->ttl_ms;
		twin->idle_since_ms = clock_mono_ms();
		put(twin, record);
		e = buf_status(record);
	}
	state_dict_unuse(&use);
	return e;
}

/* ---- who uses them ---- */

static FALLIBLE enum err find(struct device_images *d, const struct principal *who, struct str id, struct device_image **out)
{
	struct device_image *i = d->first;

	while (i && !str_is(id, i->id))
		i = i->next;
	if (!i)
		return ERR(NOT_FOUND, "there is no device image %.*s: it was dropped, its time is over, or dcpd was started again since",
			   (int)(id.n < 2 * ID_BYTES ? id.n : 2 * ID_BYTES), id.p);
	if (!principal_may(who, i->uid))
		return ERR(FORBIDDEN, "device image %s belongs to uid %u", i->id, (unsigned)i->uid);
	*out = i;
	return OK;
}

FALLIBLE enum err device_image_put(struct device_images *d, const struct principal *who, struct str id, struct buf *out)
{
	struct device_image *i;

	TRY(find(d, who, id, &i));
	put(i, out);
	return buf_status(out);
}

static void on_detached(void *user)
{
	struct device_image *i = user;

	i->idle_since_ms = clock_mono_ms();
	if (--i->attached == 0 && i->state == IMAGE_DROPPED)
		remove_image(i);
	else
		emit(i, "detached");
}

FALLIBLE enum err device_image_attach(struct device_images *d, const struct principal *who, struct str id, struct str token,
				      struct buf *record)
{
	struct device_image *i;

	TRY(find(d, who, id, &i));
	if (i->state == IMAGE_LOST)
		return ERR(NOT_FOUND, "device image %s is lost: %s. Keep it again (dcpd.keep, POST /v1/device-images)", i->id, i->problem);
	if (i->state != IMAGE_KEPT)
		return ERR(STATE_CONFLICT, "device image %s is %s", i->id, state_names[i->state]);
	TRY(descriptors_give(d->parts.descriptors, who, token, i->fd, on_detached, i));
	i->attached++;
	emit(i, "attached");
	put(i, record);
	return buf_status(record);
}

FALLIBLE enum err device_image_drop(struct device_images *d, const struct principal *who, struct str id)
{
	struct device_image *i;

	TRY(find(d, who, id, &i));
	if (i->state == IMAGE_FILLING)
		return ERR(BUSY, "device image %s is being filled: drop it when it is there", i->id);
	if (i->state != IMAGE_DROPPED)
		drop(i);
	return OK;
}
