/* spread_plan.c: see spread.h. All hosts compute the same from the same ranges, so nothing but these needs to be told. */
#include <stdlib.h>

#include "base/num.h"
#include "runner/spread.h"

enum { UNITS_MAX = 1 << 24,            /* of all files together: 16 TiB */
       LOOKS_MAX = 2 * UNITS_MAX,    /* at units, for one host: its ranges may overlap */
       PAGE = 4096 };

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);
}

/* Finds units by their places. */
struct finder {
	const uint64_t *files;         /* bytes of each */
	uint64_t file_count;
	uint64_t *first;               /* of each file: its first entry of `index` */
	uint32_t *index;               /* 1 + the unit; 0: none yet */
	uint64_t looks;                /* at units, for the current host */
};

static FALLIBLE enum err open_finder(const uint64_t *files, uint64_t file_count, struct finder *out)
{
	uint64_t n = 0;

	*out = (struct finder){ files, file_count, mem_zalloc(file_count + 1, sizeof *out->first), NULL, 0 };
	NEED(out->first, "no memory for %ju files", (uintmax_t)file_count);
	for (uint64_t i = 0; i < file_count; i++) {
		out->first[i] = n;
		n += files[i] / SPREAD_UNIT + 1;
		if (n > UNITS_MAX)
			return ERR(LIMIT_EXCEEDED, "a checkpoint of more than %ju bytes is not spread", (uintmax_t)UNITS_MAX * SPREAD_UNIT);
	}
	out->index = mem_zalloc(n + 1, sizeof *out->index);
	NEED(out->index, "no memory for %ju units", (uintmax_t)n);
	return OK;
}

static void close_finder(struct finder *f)
{
	mem_free(f->first);
	mem_free(f->index);
}

static FALLIBLE enum err add_unit(struct spread_plan *p, struct finder *f, uint32_t host, const struct spread_range *r, uint64_t number)
{
	uint64_t lo = num_max(r->begin & ~(uint64_t)(PAGE - 1), number * SPREAD_UNIT);
	uint64_t hi = num_min(whole_pages(r->end), num_min((number + 1) * SPREAD_UNIT, f->files[r->file]));
	uint32_t *at = &f->index[f->first[r->file] + number];
	struct spread_unit *u;

	if (*at == 0) {
		TRY(vec_push(&p->units, &u));
		*u = (struct spread_unit){ .file = r->file, .number = number, .lo = lo, .hi = hi };
		*at = (uint32_t)p->units.n;
	}
	u = &p->units.v[*at - 1];
	u->lo = num_min(u->lo, lo);
	u->hi = num_max(u->hi, hi);
	u->needers |= 1ull << host;
	return OK;
}

static FALLIBLE enum err add_range(struct spread_plan *p, struct finder *f, uint32_t host, const struct spread_range *r)
{
	if (r->file >= f->file_count || r->begin >= r->end || r->end > f->files[r->file])
		return ERR(COMM_PROTOCOL, "host %u needs bytes %ju to %ju of file %ju of %ju, which cannot be", host, (uintmax_t)r->begin,
			   (uintmax_t)r->end, (uintmax_t)r->file, (uintmax_t)f->file_count);
	uint64_t first = r->begin / SPREAD_UNIT, end = num_div_up(r->end, SPREAD_UNIT);
	f->looks += end - first;
	if (f->looks > LOOKS_MAX)
		return ERR(LIMIT_EXCEEDED, "what host %u needs overlaps too often", host);
	for (uint64_t n = first; n < end; n++)
		TRY(add_unit(p, f, host, r, n));
	return OK;
}

static uint32_t nth_host(uint64_t hosts, uint32_t n)
{
	for (; n; n--)
		hosts &= hosts - 1;
	return (uint32_t)__builtin_ctzll(hosts);
}

/* Drops what one host alone needs, and deals the rest out. */
static void deal(struct spread_plan *p)
{
	uint64_t kept = 0;

	each(u, p->units.v, p->units.n)
		if (u->needers & (u->needers - 1)) {
			u->owner = nth_host(u->needers, (uint32_t)(kept % (uint32_t)__builtin_popcountll(u->needers)));
			p->units.v[kept++] = *u;
		}
	p->units.n = kept;
}

static int by_owner(const void *a, const void *b)
{
	const struct spread_unit *x = a, *y = b;

	return num_order(x->owner, y->owner) ?: num_order(x->file, y->file) ?: num_order(x->number, y->number);
}

static FALLIBLE enum err cut(struct spread_plan *p, uint64_t all)
{
	struct spread_window *w = NULL;

	for (uint64_t i = 0; i < p->units.n; i++) {
		bool is_all = p->units.v[i].needers == all;
		if (!w || w->count == SPREAD_WINDOW_UNITS || w->all != is_all) {
			TRY(vec_push(&p->windows, &w));
			*w = (struct spread_window){ .first = i, .all = is_all };
		}
		w->count++;
	}
	for (uint64_t i = 0; i < p->windows.n; i++) {
		w = &p->windows.v[i];
		struct spread_unit *units = p->units.v + w->first;
		qsort(units, w->count, sizeof *units, by_owner);
		for (uint32_t k = 0; k < w->count; k++) {
			units[k].window = (uint32_t)i;
			units[k].at = w->bytes;
			w->bytes += whole_pages(units[k].hi - units[k].lo);
		}
		p->widest = num_max(p->widest, w->bytes);
	}
	return OK;
}

enum err spread_plan_make(const struct spread_range *const *ranges, const uint64_t *counts, uint32_t hosts, const uint64_t *files,
			  uint64_t file_count, struct spread_plan *out)
{
	CLEANUP(close_finder) struct finder finder = { 0 };

	*out = (struct spread_plan){ 0 };
	TRY(open_finder(files, file_count, &finder));
	for (uint32_t h = 0; h < hosts; h++, finder.looks = 0)
		for (uint64_t i = 0; i < counts[h]; i++)
			TRY(err_at_rank(add_range(out, &finder, h, &ranges[h][i]), h));
	deal(out);
	return cut(out, hosts == SPREAD_HOSTS_MAX ? UINT64_MAX : (1ull << hosts) - 1);
}

void spread_plan_free(struct spread_plan *p)
{
	vec_free(&p->units);
	vec_free(&p->windows);
}
