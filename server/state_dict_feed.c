/* state_dict_feed.c: publications and subscriptions: what those words mean to a state dict's record, its readers and its slots.
 *
 * A publication is a state dict whose sealed generations are versions. The newest version that all ranks sealed stays; older ones are
 * free as soon as no job reads them. A subscriber is a state dict that jobs fill with the newest version (state_dict_update.c), in one
 * slot while its ranks still use the other. A rank says which version it has taken: when all ranks have taken one, the older one is
 * free. Its pages stay warm, and so a rank must not use a version any longer once it has said that it has taken a newer one. */
#include <stdio.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/metrics.h"
#include "server/service_clock.h"
#include "server/state_dict_impl.h"

enum { GUESTS_MAX = 256, GUEST_MS = 60000 };

/* ---- versions ---- */

/* Frees generations older than this one as soon as nobody reads them; their segments stay warm. */
static void retire(struct state_dict *sd, int64_t generation)
{
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		struct slot *sl = state_dict_nth(sd, i);
		if (sl->state != SLOT_SEALED || sl->generation >= generation)
			continue;
		sl->made = false; /* the segment stays, for the next version */
		if (!sl->uses) {
			state_dict_free_slot(sd, sl);
			continue;
		}
		slot_move(sl, SLOT_LEAVING);
		state_dict_slot_write(sd, sl, SLOT_LEAVING, NULL, NULL);
	}
}

void state_dict_feed_complete(struct state_dict *sd, int64_t generation)
{
	struct state_dict_feed *f = sd->feed;

	if (!state_dict_publishes(sd))
		return;
	f->versions[f->version_count++ % FEED_VERSIONS] = (struct feed_version){ generation, clock_mono_ms(), clock_wall_ms() };
	metrics_add(sd->all->parts.metrics, "dcpd_versions_published_total", "", 1);
	retire(sd, generation);
}

static const struct feed_version *version_of(const struct state_dict *sd, int64_t generation)
{
	for (uint32_t i = 0; i < FEED_VERSIONS; i++)
		if (sd->feed->versions[i].at_ms && sd->feed->versions[i].generation == generation)
			return &sd->feed->versions[i];
	return NULL;
}

int64_t state_dict_feed_taken(const struct state_dict *sd)
{
	int64_t least = INT64_MAX;

	for (uint32_t r = 0; r < sd->world_size; r++)
		least = sd->feed->taken[r] < least ? sd->feed->taken[r] : least;
	return least;
}

struct state_dict *state_dict_publication_of(const struct state_dict *sd)
{
	struct state_dict *pub = sd->feed->node ? NULL : map_object(&sd->all->table, str_of(sd->feed->publication));

	return pub && !pub->hidden && state_dict_publishes(pub) ? pub : NULL;
}

int64_t state_dict_published(const struct state_dict *sd)
{
	const struct state_dict *pub = sd->feed->node ? NULL : state_dict_publication_of(sd);

	return pub ? state_dict_newest(pub) : sd->feed->published;
}

void state_dict_learn(struct state_dict *sd, int64_t generation)
{
	struct state_dict_feed *f = sd->feed;

	if (generation > f->published)
		f->versions[f->version_count++ % FEED_VERSIONS] = (struct feed_version){ generation, clock_mono_ms(), clock_wall_ms() };
	f->published = generation;
}

/* When a version of a subscriber's publication was published, or became known here; NULL: this run has not seen it. */
static const struct feed_version *published_version(const struct state_dict *sd, int64_t generation)
{
	const struct state_dict *of = sd->feed->node ? sd : state_dict_publication_of(sd);

	return of ? version_of(of, generation) : NULL;
}

/* All ranks have the version: for this moment the publication's clock is kept. */
static void applied(struct state_dict *sd, int64_t generation)
{
	const struct feed_version *v = published_version(sd, generation);

	sd->feed->applied = generation;
	if (v)
		metrics_observe(sd->all->parts.metrics, "dcpd_version_applied_seconds", "", (double)(clock_mono_ms() - v->at_ms) / 1000);
	retire(sd, generation);
	state_dict_emit(sd, "applied", generation);
}

FALLIBLE enum err state_dict_take(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation)
{
	struct state_dict *sd;

	TRY(state_dict_find(s, who, name, &sd));
	if (!state_dict_subscribes(sd))
		return ERR(STATE_CONFLICT, "state dict \"%s\" subscribes to nothing: nobody waits for what its ranks take", sd->name);
	if (rank < 0 || rank >= sd->world_size)
		return ERR(NOT_FOUND, "state dict \"%s\" has ranks 0 to %u", sd->name, sd->world_size - 1);
	if (generation > state_dict_newest(sd))
		return err_at_rank(ERR(NOT_SEALED, "state dict \"%s\" has no generation %jd that could be taken", sd->name,
				       (intmax_t)generation), rank);
	if (generation <= sd->feed->taken[rank]) /* said before */
		return OK;
	sd->feed->taken[rank] = generation;
	int64_t all = state_dict_feed_taken(sd);
	if (all > sd->feed->applied)
		applied(sd, all);
	return OK;
}

/* ---- who waits for a generation ---- */

struct feed_waiter {
	struct feed_waiter *next;
	struct state_dict *sd;          /* with a ref */
	int64_t after;
	done_fn fn;
	void *user;
	struct loop_timer *timer;
};

static bool has_news(const struct state_dict *sd, int64_t after)
{
	return sd->dead || state_dict_newest(sd) > after || (sd->feed && sd->feed->problem && sd->feed->failed_generation > after);
}

static void answer(struct feed_waiter *w)
{
	enum err e = w->sd->dead ? ERR(NOT_FOUND, "state dict \"%s\" was deleted", w->sd->name) : OK;

	list_remove(&w->sd->all->followers, w);
	w->sd->all->waiting--;
	loop_timer_stop(&w->timer);
	loop_later(w->sd->all->parts.loop, w->fn, w->user, e);
	state_dict_unref(w->sd);
	mem_free(w);
}

static void on_wait_over(void *user)
{
	struct feed_waiter *w = user;

	w->timer = NULL;
	answer(w);
}

void state_dict_feed_look(struct state_dicts *s)
{
	list_each(w, s->followers)
		if (has_news(w->sd, w->after))
			answer(w);
}

void state_dict_feed_end(struct state_dicts *s)
{
	while (s->followers)
		answer(s->followers);
	list_each(sd, s->leaving)
		state_dict_unref(sd);
	s->leaving = NULL;
}

static void follow(struct state_dict *sd, enum err e, int64_t after, int64_t wait_ms, done_fn fn, void *user, struct state_dicts *s)
{
	if (!e && s->waiting == STATE_DICT_WAITERS_MAX)
		e = ERR(BUSY, "%d requests are waiting for state dicts", STATE_DICT_WAITERS_MAX);
	if (e || has_news(sd, after)) {
		loop_later(s->parts.loop, fn, user, e);
		return;
	}
	struct feed_waiter *w = mem_sure(sizeof *w);
	*w = (struct feed_waiter){ .next = s->followers, .sd = sd, .after = after, .fn = fn, .user = user };
	sd->refs++;
	s->waiting++;
	s->followers = w;
	loop_timer_start(s->parts.loop, wait_ms, on_wait_over, w, &w->timer);
}

void state_dict_follow(struct state_dicts *s, const struct principal *who, struct str name, int64_t after, int64_t wait_ms, done_fn fn,
		       void *user)
{
	struct state_dict *sd = NULL;
	enum err e = state_dict_find(s, who, name, &sd);

	if (!e && !state_dict_subscribes(sd))
		e = ERR(STATE_CONFLICT, "state dict \"%s\" subscribes to nothing: there is no version to wait for", sd->name);
	follow(sd, e, after, wait_ms, fn, user, s);
}

static FALLIBLE enum err find_publication(struct state_dicts *s, const struct principal *who, struct str name, struct state_dict **out)
{
	TRY(state_dict_find_to_read(s, who, name, out));
	return state_dict_publishes(*out) ? OK : ERR(NOT_FOUND, "state dict \"%s\" publishes nothing", (*out)->name);
}

void state_dict_await_version(struct state_dicts *s, const struct principal *who, struct str name, int64_t after, int64_t wait_ms,
			      done_fn fn, void *user)
{
	struct state_dict *sd = NULL;
	enum err e = find_publication(s, who, name, &sd);

	follow(sd, e, after, wait_ms, fn, user, s);
}

/* ---- subscribers on other nodes ---- */

/* Drops those that were not heard of for so long, and counts the others. */
static uint32_t drop_silent(struct state_dict_feed *f)
{
	uint32_t count = 0;

	list_each(g, f->guests) {
		count++;
		if (clock_mono_ms() - g->seen_ms < GUEST_MS)
			continue;
		list_remove(&f->guests, g);
		mem_free(g);
		count--;
	}
	return count;
}

FALLIBLE enum err state_dict_note_guest(struct state_dicts *s, const struct principal *who, struct str name,
					const struct state_dict_guest *guest)
{
	struct state_dict *sd;

	TRY(find_publication(s, who, name, &sd));
	uint32_t count = drop_silent(sd->feed);
	struct state_dict_guest *g = sd->feed->guests;
	while (g && (strcmp(g->name, guest->name) != 0 || strcmp(g->node, guest->node) != 0))
		g = g->next;
	if (guest->gone) {
		if (g)
			list_remove(&sd->feed->guests, g);
		mem_free(g);
		return OK;
	}
	if (!g && count == GUESTS_MAX)
		return ERR(BUSY, "%d subscribers of other nodes are known", GUESTS_MAX);
	if (!g) {
		g = mem_zalloc(1, sizeof *g);
		NEED(g, "cannot note a subscriber");
		g->next = sd->feed->guests;
		sd->feed->guests = g;
	}
	struct state_dict_guest *next = g->next;
	*g = *guest;
	g->next = next;
	g->uid = who->uid;
	g->seen_ms = clock_mono_ms();
	return OK;
}

void state_dict_put_guests(struct state_dict *pub, const char *comma, struct buf *out)
{
	int64_t newest = state_dict_newest(pub);
	const struct feed_version *v = version_of(pub, newest);

	(void)drop_silent(pub->feed);
	for (const struct state_dict_guest *g = pub->feed->guests; g; g = g->next, comma = ",") {
		char applied[24] = "null", published[24] = "null";
		if (g->applied >= 0)
			snprintf(applied, sizeof applied, "%jd", (intmax_t)g->applied);
		if (newest >= 0)
			snprintf(published, sizeof published, "%jd", (intmax_t)newest);
		buf_puts(out, comma);
		buf_json_member(out, "{\"name\":", str_of(g->name));
		buf_json_member(out, ",\"node\":", str_of(g->node));
		buf_printf(out, ",\"uid\":%u", g->uid);
		buf_json_member(out, ",\"subscribe\":{\"publication\":", str_of(pub->name));
		buf_printf(out, "},\"world_size\":%jd,\"generation\":%s,\"subscription\":{\"applied\":%s,\"published\":%s,\"lag_s\":%.3f}}",
			   (intmax_t)g->world_size, applied, applied, published,
			   v && g->applied < newest ? (double)(clock_mono_ms() - v->at_ms) / 1000 : 0);
	}
}

/* ---- as the API shows them ---- */

/* For how long it has lacked the newest version, in seconds. A version that an earlier run of the daemon saw counts from nothing. */
static double lag_of(const struct state_dict *sd)
{
	int64_t newest = state_dict_published(sd);
	const struct feed_version *v = newest > sd->feed->applied ? published_version(sd, newest) : NULL;

	return v ? (double)(clock_mono_ms() - v->at_ms) / 1000 : 0;
}

uint32_t state_dict_subscribers(const struct state_dicts *s, double *lag_out)
{
	struct state_dict *sd;

	*lag_out = 0;
	if (!s->subscribers)
		return 0;
	map_each(&s->table, sd) {
		double lag = state_dict_subscribes(sd) ? lag_of(sd) : 0;
		*lag_out = lag > *lag_out ? lag : *lag_out;
	}
	return s->subscribers;
}

static void put_subscription(const struct state_dict *sd, struct buf *out)
{
	const struct state_dict_feed *f = sd->feed;
	int64_t newest = state_dict_published(sd);
	CLEANUP(mem_free_ptr) char *problem = jtext_of(f->problem);

	buf_printf(out, ",\"subscription\":{\"applied\":");
	buf_printf(out, f->applied >= 0 ? "%jd" : "null", (intmax_t)f->applied);
	buf_puts(out, ",\"published\":");
	buf_printf(out, newest >= 0 ? "%jd" : "null", (intmax_t)newest);
	buf_printf(out, ",\"lag_s\":%.3f", lag_of(sd));
	buf_printf(out, ",\"updates\":%ju,\"changed_bytes\":%ju,\"kept_bytes\":%ju", (uintmax_t)f->updates, (uintmax_t)f->changed_bytes,
		   (uintmax_t)f->kept_bytes);
	if (f->job[0])
		buf_printf(out, ",\"job\":\"%s\"", f->job);
	if (problem)
		buf_printf(out, ",\"problem\":%s", problem);
	buf_puts(out, "}");
}

void state_dict_feed_put(const struct state_dict *sd, struct buf *out)
{
	CLEANUP(mem_free_ptr) char *role = sd->feed ? jtext_of(sd->feed->role) : NULL;
	char stamp[CLOCK_TEXT_MAX];

	if (!sd->feed)
		return;
	if (!role) {
		out->failed = ERR(NO_MEMORY, "cannot show a publication");
		return;
	}
	buf_putc(out, ',');
	buf_put(out, role + 1, strlen(role) - 2); /* its one member */
	if (!sd->feed->publishes) {
		put_subscription(sd, out);
		return;
	}
	const struct feed_version *v = version_of(sd, state_dict_newest(sd));
	if (v)
		buf_printf(out, ",\"published_at\":\"%s\"", clock_text(v->wall_ms, stamp));
}
