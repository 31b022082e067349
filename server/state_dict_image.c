/* state_dict_image.c: sealed images that others read as bytes: over HTTP, and from other nodes (see state_dict.h, "Images").
 *
 * A reading is the hold on one generation that all its readers share. It goes with the last of them, or, if a node reads, a while later:
 * a node asks for range after range, and between two of them the slot must not be handed out again. The digests of a generation are
 * computed once for each reading, by a look-up worker: the coordinator maps no segment. */
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <unistd.h>

#include "base/list.h"
#include "base/mem.h"
#include "os/fs.h"
#include "server/state_dict_impl.h"
#include "server/unread.h"

enum { READINGS_MAX = 256, READERS_MAX = 1024, LINGER_MS = 5000, ID_BYTES = 16 };

struct waiter {
	struct waiter *next;
	struct digests *of;
	struct loop_timer *over;       /* NULL: it waits until they are there */
	state_dict_digests_fn fn;
	void *user;
};

/* Digests that a worker computes: of all bytes, or of headers alone. */
struct digests {
	struct state_dict_reading *of;
	struct waiter *waiters;
	bool asked;                    /* a worker computes them */
	int fd;                        /* -1: they are not there */
	uint64_t bytes, room;          /* room: of unread.h, taken for the memfd */
};

struct state_dict_reading {
	struct state_dict_reading *next;
	struct state_dicts *all;
	struct state_dict_use *use;
	uint32_t readers;              /* who holds it, a look-up too */
	bool lingers;                  /* a node reads */
	struct loop_timer *linger;
	bool gave_way;                 /* to a publisher: `use` is gone, and only what is being sent still comes */
	char etag[STATE_DICT_ETAG_MAX];
	struct digests all_bytes, headers;
};

/* Names of segments are random, and a slot's generations grow: whoever makes a state dict of the same name anew makes another tag. */
static void make_etag(const struct state_dict_use *use, char out[STATE_DICT_ETAG_MAX])
{
	unsigned char id[ID_BYTES];
	char hex[2 * ID_BYTES + 1];
	crypto_generichash_state h;

	crypto_generichash_init(&h, NULL, 0, sizeof id);
	for (uint32_t r = 0; r < use->world_size; r++)
		crypto_generichash_update(&h, (const unsigned char *)use->ranks[r].segment, strlen(use->ranks[r].segment) + 1);
	crypto_generichash_final(&h, id, sizeof id);
	sodium_bin2hex(hex, sizeof hex, id, sizeof id);
	snprintf(out, STATE_DICT_ETAG_MAX, "\"%s-%jd\"", hex, (intmax_t)use->generation);
}

static void digests_drop(struct digests *d)
{
	list_each(w, d->waiters) { /* the daemon ends */
		loop_timer_stop(&w->over);
		mem_free(w);
	}
	unread_give(d->of->all->parts.unread, d->room);
	fs_drop(&d->fd);
}

static void reading_free(struct state_dict_reading *g)
{
	list_remove(&g->all->readings, g);
	g->all->reading_count--;
	loop_timer_stop(&g->linger);
	digests_drop(&g->all_bytes);
	digests_drop(&g->headers);
	state_dict_unuse(&g->use);
	mem_free(g);
}

static void on_lingered(void *user)
{
	struct state_dict_reading *g = user;

	g->linger = NULL;
	reading_free(g);
}

void state_dict_read_end(struct state_dict_reading **reading)
{
	struct state_dict_reading *g = *reading;

	*reading = NULL;
	if (!g || --g->readers)
		return;
	if (g->lingers && !g->gave_way)
		loop_timer_start(g->all->parts.loop, LINGER_MS, on_lingered, g, &g->linger);
	else
		reading_free(g);
}

/* The reading of the use's generation, which takes the use: one that is there, or a new one. */
static FALLIBLE enum err take_reading(struct state_dicts *s, struct state_dict_use *use, struct state_dict_reading **out)
{
	for (struct state_dict_reading *g = s->readings; g; g = g->next) {
		if (g->gave_way || g->use->owner != use->owner || g->use->generation != use->generation)
			continue;
		state_dict_unuse(&use);
		if (g->readers >= READERS_MAX)
			return ERR(BUSY, "%u others read this generation", g->readers);
		*out = g;
		return OK;
	}
	struct state_dict_reading *g = s->reading_count < READINGS_MAX ? mem_zalloc(1, sizeof *g) : NULL;
	if (!g) {
		bool full = s->reading_count >= READINGS_MAX;
		state_dict_unuse(&use);
		return full ? ERR(BUSY, "images of %d generations are being read", READINGS_MAX) : ERR(NO_MEMORY, "cannot read an image");
	}
	*g = (struct state_dict_reading){ .next = s->readings, .all = s, .use = use, .all_bytes = { .of = g, .fd = -1 },
					  .headers = { .of = g, .fd = -1 } };
	make_etag(use, g->etag);
	s->readings = g;
	s->reading_count++;
	*out = g;
	return OK;
}

FALLIBLE enum err state_dict_read_begin(struct state_dicts *s, const struct state_dict_reader *r, struct state_dict_reading **out)
{
	struct state_dict_use *use = NULL;

	if (r->lingers && r->generation >= 0)
		TRY(state_dict_use_held(s, &r->who, r->name, r->generation, &use));
	else
		TRY(state_dict_use(s, &r->who, r->name, r->generation, "", &use));
	TRY(take_reading(s, use, out));
	loop_timer_stop(&(*out)->linger);
	(*out)->lingers = (*out)->lingers || r->lingers;
	(*out)->readers++;
	return OK;
}

void state_dict_read_over(const struct state_dict_use *use)
{
	for (struct state_dict_reading *g = use->owner->all->readings, *next; g; g = next) {
		next = g->next;
		if (!g->gave_way && g->use->owner == use->owner && g->use->generation == use->generation && g->readers == 0)
			reading_free(g);
	}
}

FALLIBLE enum err state_dict_read_image(const struct state_dict_reading *g, int64_t rank, struct state_dict_image *out)
{
	const struct state_dict_use *use = g->use;

	if (rank < 0 || rank >= (int64_t)use->world_size)
		return ERR(NOT_FOUND, "state dict \"%s\" has ranks 0 to %u", use->name, use->world_size - 1);
	const struct state_dict_rank_use *k = &use->ranks[rank];
	int fd = fcntl(k->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot read an image");
	*out = (struct state_dict_image){ .fd = fd, .bytes = k->image_bytes, .generation = use->generation, .etag = g->etag };
	return OK;
}

/* ---- a publisher waits for a slot ---- */

/* Ends the hold. Answers under way send out of descriptors of the segments: these are unlinked, and the slots get others. */
static void give_way(struct state_dict_reading *g)
{
	struct state_dict *sd = g->use->owner;

	for (uint32_t r = 0; g->readers && r < g->use->world_size; r++)
		state_dict_drop_segment(sd, state_dict_slot(sd, r, g->use->ranks[r].slot));
	g->gave_way = true;
	if (g->readers)
		state_dict_unuse(&g->use);
	else
		reading_free(g);
}

/* Is this reading all that holds its version? A job that reads it, too, ends soon. */
static bool holds_alone(const struct state_dict_reading *g)
{
	for (uint32_t r = 0; r < g->use->world_size; r++)
		if (state_dict_slot(g->use->owner, r, g->use->ranks[r].slot)->uses != 1)
			return false;
	return true;
}

static void yield_now(void *user, enum err)
{
	struct state_dict *sd = user;
	int64_t newest = state_dict_newest(sd);

	sd->feed->yields = false;
	list_each(g, sd->all->readings)
		if (!sd->dead && !g->gave_way && g->use->owner == sd && g->use->generation < newest && !g->all_bytes.asked &&
		    !g->headers.asked && holds_alone(g))
			give_way(g);
	state_dict_unref(sd);
}

void state_dict_readings_yield(struct state_dict *sd)
{
	if (sd->feed->yields)
		return;
	sd->feed->yields = true;
	sd->refs++;
	loop_later(sd->all->parts.loop, yield_now, sd, OK);
}

/* ---- digests ---- */

static void tell(struct digests *d, enum err e)
{
	struct state_dict_reading *g = d->of;
	struct err_info info = *err_last();
	struct waiter *first = d->waiters;
	const struct state_dict_image digests = { .fd = d->fd, .bytes = d->bytes, .generation = g->use->generation, .etag = g->etag };

	d->waiters = NULL;
	d->asked = false;
	list_each(w, first) {
		loop_timer_stop(&w->over);
		err_restore(&info);
		w->fn(w->user, e, e ? NULL : &digests);
		mem_free(w);
	}
	state_dict_read_end(&g);
}

static void on_digests(void *user, enum err e, const json_t *ok, int *fd)
{
	struct digests *d = user;
	json_int_t bytes = json_integer_value(json_object_get(ok, "bytes"));

	if (!e && (*fd < 0 || bytes <= 0 || (uint64_t)bytes > lookup_fd_bytes(*fd)))
		e = ERR(PROTOCOL, "the look-up's answer has not the bytes that it announces");
	if (!e) {
		d->room = lookup_fd_bytes(*fd);
		d->fd = *fd;
		d->bytes = (uint64_t)bytes;
		*fd = -1;
	}
	tell(d, e);
}

static void tell_later(void *user, enum err e)
{
	tell(user, e);
}

/* The computation goes on: whoever asks again finds it further on, or done. */
static void on_wait_over(void *user)
{
	struct waiter w = *(struct waiter *)user;

	list_remove(&w.of->waiters, (struct waiter *)user);
	mem_free(user);
	w.fn(w.user, ERR(TIMED_OUT, "the digests are still being computed"), NULL);
}

void state_dict_read_digests(struct state_dict_reading *g, bool headers_only, int64_t wait_ms, state_dict_digests_fn fn, void *user)
{
	struct digests *d = headers_only ? &g->headers : &g->all_bytes;
	struct waiter *w = mem_sure(sizeof *w);

	*w = (struct waiter){ .next = d->waiters, .of = d, .fn = fn, .user = user };
	d->waiters = w;
	if (wait_ms >= 0 && d->fd < 0)
		loop_timer_start(g->all->parts.loop, wait_ms, on_wait_over, w, &w->over);
	if (d->asked)
		return;
	d->asked = true;
	g->readers++;
	json_t *more = json_pack("{s:s, s:b}", "op", "digests", "headers_only", headers_only);
	if (d->fd >= 0 || !more)
		loop_later(g->all->parts.loop, tell_later, d, more ? OK : ERR(NO_MEMORY, "cannot ask for digests"));
	else
		state_dict_ask_use(g->all, g->use, json_incref(more), on_digests, d);
	json_decref(more);
}

void state_dict_readings_free(struct state_dicts *s)
{
	while (s->readings)
		reading_free(s->readings);
}
