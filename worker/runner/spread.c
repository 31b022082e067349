/* spread.c: see spread.h. A source's file is a store of its own for the rest of the run: whoever reads it asks here, and is served from a
 * window or, if that does not come, by the file itself. */
#include "runner/spread.h"

#include <assert.h>
#include <time.h>

#include "base/clock.h"
#include "base/num.h"
#include "io/copy.h"
#include "os/seg.h"

enum { WAIT_MS = 100, PAGE = 4096 };

unsigned char *spread_slot(const struct run *run, uint64_t window)
{
	const struct spread_shared *s = spread_shared_of(run);

	return (unsigned char *)run_room(run) + PAGE + window % SPREAD_WINDOWS * s->widest;
}

uint64_t spread_room(const struct spread_plan *p)
{
	static_assert(sizeof(struct spread_shared) <= PAGE);
	return PAGE + num_min(SPREAD_WINDOWS, p->windows.n) * p->widest;
}

void spread_wait(struct spread_shared *s, pthread_cond_t *signal)
{
	const int64_t end = clock_mono_ms() + WAIT_MS;
	const struct timespec until = { .tv_sec = end / 1000, .tv_nsec = end % 1000 * 1000000 };

	pthread_cond_timedwait(signal, &s->lock, &until);
}

/* ---- which windows ---- */

/* The first unit that ends behind `at` in the file, or is of a later file. */
static uint64_t find(const struct run_spread_unit *units, uint64_t n, uint32_t file, uint64_t at)
{
	uint64_t lo = 0, hi = n;

	while (lo < hi) {
		uint64_t mid = lo + (hi - lo) / 2;
		if (units[mid].file < file || (units[mid].file == file && units[mid].hi <= at))
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

void spread_each_window(const struct run_spread_unit *units, uint64_t n, uint32_t file, uint64_t lo, uint64_t hi,
			void (*fn)(void *user, uint32_t window), void *user)
{
	uint32_t last = UINT32_MAX;

	for (uint64_t i = find(units, n, file, lo); i < n && units[i].file == file && units[i].lo < hi; i++) {
		if (units[i].window != last)
			fn(user, units[i].window);
		last = units[i].window;
	}
}

void spread_scan_span(const struct run_src *src, const struct run_scan *scan, uint64_t *lo_out, uint64_t *hi_out)
{
	uint64_t end = src->length + src->gap;

	*lo_out = src->offset + num_min(scan->begin, end);
	*hi_out = src->offset + num_min(end, num_min(scan->end, end) + SPREAD_SLACK);
}

static void take_one(void *user, uint32_t window)
{
	struct run *run = user;
	struct run_spread_window *w = &run->spread_windows[window];

	if (w->left && --w->left == 0)
		pthread_cond_broadcast(&spread_shared_of(run)->change);
}

void spread_taken(struct run *run, uint64_t scan)
{
	struct spread_shared *s = spread_shared_of(run);
	const struct run_src *src = &run->srcs[run->scans[scan].src];
	uint64_t lo, hi;

	if (!run->spread_windows_n || !run->files[src->file].spread)
		return;
	spread_scan_span(src, &run->scans[scan], &lo, &hi);
	pthread_mutex_lock(&s->lock);
	s->taken++;
	spread_each_window(run->spread_units, run->spread_units_n, src->file, lo, hi, take_one, run);
	pthread_mutex_unlock(&s->lock);
}

/* ---- reading ---- */

/* Waits until the unit's window is here, and keeps it. False: the window will not come, or is gone already, or its bytes are in doubt. */
static bool hold_unit(struct run *run, const struct run_spread_unit *u)
{
	struct spread_shared *s = spread_shared_of(run);
	struct run_spread_window *w = &run->spread_windows[u->window];

	pthread_mutex_lock(&s->lock);
	s->waiting++;
	while (w->state == SPREAD_COMING && !s->broken && !u->doubted && !atomic_load(&run->head->cancelled))
		spread_wait(s, &s->came[u->window % SPREAD_WINDOWS]);
	s->waiting--;
	bool here = w->state == SPREAD_HERE && !u->doubted;
	w->readers += here;
	pthread_mutex_unlock(&s->lock);
	return here;
}

static void release_unit(struct run *run, const struct run_spread_unit *u, uint64_t served)
{
	struct spread_shared *s = spread_shared_of(run);
	struct run_spread_window *w = &run->spread_windows[u->window];

	atomic_fetch_add(&s->served_bytes, served);
	pthread_mutex_lock(&s->lock);
	if (--w->readers == 0 && w->left == 0)
		pthread_cond_broadcast(&s->change);
	pthread_mutex_unlock(&s->lock);
}

/* A read on its way: [offset, done) of the file are at `into`. */
struct taking {
	unsigned char *into;
	uint64_t offset, done;
	struct digest_stream *stream;  /* NULL: `into` is memory of our own, and nothing is hashed */
	const unsigned char *from;     /* the piece that is copied next */
	size_t n;
};

static void copy_piece(void *user)
{
	const struct taking *t = user;

	copy_hashed(t->stream, t->into + (t->done - t->offset), t->from, t->n);
}

static FALLIBLE enum err take_piece(struct taking *t, const unsigned char *from, uint64_t n)
{
	t->from = from;
	t->n = n;
	if (t->stream)
		TRY(seg_guard(copy_piece, t));
	else
		memcpy(t->into + (t->done - t->offset), from, n);
	t->done += n;
	return OK;
}

/* Reads up to `end` from the storage; into a segment by way of memory of our own. */
static FALLIBLE enum err take_stored(struct taking *t, struct store_at under, uint64_t end, const char *name)
{
	uint64_t n = end - t->done, at = t->done;

	if (!n)
		return OK;
	t->done += t->stream ? 0 : n;
	if (!t->stream)
		return store_read(under, t->into + (at - t->offset), n, at, name);
	CLEANUP(mem_free_ptr) unsigned char *bytes = mem_alloc(n);
	NEED(bytes, "no memory for a transfer");
	TRY(store_read(under, bytes, n, at, name));
	return take_piece(t, bytes, n);
}

static FALLIBLE enum err take_all(struct store_at at, struct taking *t, uint64_t n, const char *name)
{
	const struct files *f = at.store->own;
	struct run *run = f->run;
	uint32_t file = (uint32_t)at.handle;
	uint64_t end = t->offset + n;

	for (uint64_t i = find(run->spread_units, run->spread_units_n, file, t->offset);
	     i < run->spread_units_n && run->spread_units[i].file == file && run->spread_units[i].lo < end; i++) {
		const struct run_spread_unit *u = &run->spread_units[i];
		uint64_t lo = num_max(u->lo, t->offset), bytes = num_min(u->hi, end) - lo;
		if (!hold_unit(run, u))
			continue;
		enum err e = take_stored(t, f->under[file], lo, name);
		e = e ?: take_piece(t, spread_slot(run, u->window) + u->at + (lo - u->lo), bytes);
		release_unit(run, u, e ? 0 : bytes);
		TRY(e);
	}
	return take_stored(t, f->under[file], end, name);
}

static enum err read_spread(struct store_at at, void *into, size_t n, uint64_t offset, const char *name)
{
	return take_all(at, &(struct taking){ .into = into, .offset = offset, .done = offset }, n, name);
}

static enum err take_spread(struct store_at at, void *into, size_t n, uint64_t offset, unsigned which, struct digest *out)
{
	struct digest_stream stream;

	digest_begin_one(&stream, which);
	TRY(take_all(at, &(struct taking){ .into = into, .offset = offset, .done = offset, .stream = &stream }, n, ""));
	if (which)
		digest_end(&stream, out);
	return OK;
}

bool spread_doubt(struct run *run, uint32_t file, uint64_t lo, uint64_t hi)
{
	struct spread_shared *s = spread_shared_of(run);
	bool foreign = false;

	if (!run->spread_windows_n || !run->files[file].spread)
		return false;
	pthread_mutex_lock(&s->lock);
	for (uint64_t i = find(run->spread_units, run->spread_units_n, file, lo);
	     i < run->spread_units_n && run->spread_units[i].file == file && run->spread_units[i].lo < hi; i++) {
		run->spread_units[i].doubted = true;
		foreign = foreign || !run->spread_units[i].own;
	}
	if (foreign && !s->doubted) {
		s->doubted = true;
		s->doubted_file = file;
		s->doubted_lo = lo;
		s->doubted_hi = hi;
	}
	pthread_mutex_unlock(&s->lock);
	return foreign;
}

static void close_spread(struct store_at *at)
{
	const struct files *f = at->store->own;

	if (at->handle >= 0)
		store_close(&f->under[at->handle]);
	at->handle = -1;
}

static const struct store_ops ops = { .read = read_spread, .take = take_spread, .close = close_spread };

void spread_wrap(struct files *f, uint32_t file, struct store_at *out)
{
	if (!f->spread.ops) /* later on I/O threads read through the store */
		f->spread = (struct store){ .ops = &ops, .own = f };
	f->under[file] = *out;
	*out = (struct store_at){ &f->spread, (int)file };
}
