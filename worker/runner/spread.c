/* spread.c: see spread.h. A source's file is a store of its own for the rest of the run: whoever reads it asks here, and is served from a
 * window or, if that does not come, by the file itself. */
#include "runner/spread.h"

#include <assert.h>
#include <time.h>

#include "base/clock.h"
#include "base/num.h"

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

void spread_wait(struct spread_shared *s)
{
	const int64_t end = clock_mono_ms() + WAIT_MS;
	const struct timespec until = { .tv_sec = end / 1000, .tv_nsec = end % 1000 * 1000000 };

	pthread_cond_timedwait(&s->change, &s->lock, &until);
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
	struct run_spread_window *w = &((struct run *)user)->spread_windows[window];

	w->left -= w->left > 0;
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
	pthread_cond_broadcast(&s->change);
	pthread_mutex_unlock(&s->lock);
}

/* ---- reading ---- */

/* Copies bytes of a unit once its window is here. False: the window will not come, or is gone already. */
static bool copy_unit(struct run *run, const struct run_spread_unit *u, void *into, uint64_t n, uint64_t offset)
{
	struct spread_shared *s = spread_shared_of(run);
	struct run_spread_window *w = &run->spread_windows[u->window];

	pthread_mutex_lock(&s->lock);
	s->waiting++;
	while (w->state == SPREAD_COMING && !s->broken && !atomic_load(&run->head->cancelled))
		spread_wait(s);
	s->waiting--;
	bool here = w->state == SPREAD_HERE;
	w->readers += here;
	pthread_mutex_unlock(&s->lock);
	if (!here)
		return false;
	memcpy(into, spread_slot(run, u->window) + u->at + (offset - u->lo), n);
	atomic_fetch_add(&s->served_bytes, n);
	pthread_mutex_lock(&s->lock);
	if (--w->readers == 0)
		pthread_cond_broadcast(&s->change);
	pthread_mutex_unlock(&s->lock);
	return true;
}

static FALLIBLE enum err read_stored(const struct files *f, uint32_t file, void *into, uint64_t n, uint64_t offset, const char *name)
{
	return n ? store_read(f->under[file], into, n, offset, name) : OK;
}

static enum err read_spread(struct store_at at, void *into, size_t n, uint64_t offset, const char *name)
{
	const struct files *f = at.store->own;
	struct run *run = f->run;
	uint32_t file = (uint32_t)at.handle;
	uint64_t end = offset + n, done = offset;      /* [offset, done) is in memory */
	unsigned char *p = into;

	for (uint64_t i = find(run->spread_units, run->spread_units_n, file, offset);
	     i < run->spread_units_n && run->spread_units[i].file == file && run->spread_units[i].lo < end; i++) {
		const struct run_spread_unit *u = &run->spread_units[i];
		uint64_t lo = num_max(u->lo, offset), hi = num_min(u->hi, end);
		if (!copy_unit(run, u, p + (lo - offset), hi - lo, lo))
			continue;
		TRY(read_stored(f, file, p + (done - offset), lo - done, done, name));
		done = hi;
	}
	return read_stored(f, file, p + (done - offset), end - done, done, name);
}

static void close_spread(struct store_at *at)
{
	const struct files *f = at->store->own;

	if (at->handle >= 0)
		store_close(&f->under[at->handle]);
	at->handle = -1;
}

static const struct store_ops ops = { .read = read_spread, .close = close_spread };

void spread_wrap(struct files *f, uint32_t file, struct store_at *out)
{
	f->spread.ops = &ops;
	f->spread.own = f;
	f->under[file] = *out;
	*out = (struct store_at){ &f->spread, (int)file };
}
