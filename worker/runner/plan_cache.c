/* plan_cache.c: see plan_cache.h. It is bounded: PLANS_KEPT plans of PLAN_KEPT_BYTES together, the one unused for longest goes first. */
#include "runner/plan_cache.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/num.h"
#include "os/fs.h"
#include "runner/input.h"
#include "runner/plan_doc.h"

enum { PIECE = 256 << 10, PADDING_MAX = 8 << 10, VALUES_MAX = 16 << 20 };

/* --------------------------------------------------------------------------------------------------------- headers */

void plan_prints_free(struct plan_prints *p)
{
	for (uint32_t i = 0; i < p->count; i++)
		image_free(p->v[i].values);
	mem_free(p->v);
	*p = (struct plan_prints){ 0 };
}

static uint64_t without_padding(const unsigned char *p, uint64_t n)
{
	while (n && p[n - 1] == ' ')
		n--;
	return n;
}

static void digest_two(const unsigned char *p, uint64_t begin, uint64_t end, uint64_t n, unsigned char out[16])
{
	XXH3_state_t x;
	XXH128_canonical_t c;

	XXH3_128bits_reset(&x);
	(void)XXH3_128bits_update(&x, p + 8, begin - 8);
	(void)XXH3_128bits_update(&x, p + end, n - end);
	XXH128_canonicalFromHash(&c, XXH3_128bits_digest(&x));
	memcpy(out, c.digest, 16);
}

static FALLIBLE enum err note(struct plan_prints *p, const unsigned char *header, uint64_t n, const struct image *im)
{
	uint64_t begin, end;

	struct plan_print *more = mem_grow(p->v, (uint64_t)p->count + 1, sizeof *more);
	NEED(more, "no memory to note a header");
	p->v = more;
	TRY(image_values_span(header, n, &begin, &end));
	struct plan_print x = { .data_off = n };
	n = without_padding(header, n);
	x.begin = begin ? begin : n;
	x.tail = n - (begin ? end : n);
	digest_two(header, x.begin, n - x.tail, n, x.digest);
	struct str raw = { (const char *)header + x.begin, begin ? end - begin : 0 };
	TRY(image_parse_values(raw, p->count, im, &x.values));
	p->v[p->count++] = x;
	return OK;
}

void plan_prints_note(struct plan_prints *p, const void *header, uint64_t header_bytes, const struct image *im)
{
	if (!p->failed && note(p, header, header_bytes, im) != OK)
		p->failed = true;
}

struct reader {
	int fd;
	XXH3_state_t x;
	unsigned char *piece;          /* PIECE bytes */
};

static bool hash_range(struct reader *r, uint64_t from, uint64_t to)
{
	while (from < to) {
		size_t n = (size_t)num_min(PIECE, to - from);
		if (fs_pread(r->fd, r->piece, n, from, "segment") != OK)
			return false;
		(void)XXH3_128bits_update(&r->x, r->piece, n);
		from += n;
	}
	return true;
}

/* Offset of the JSON's end: spaces fill the rest up to the data. 0: no end is found, which is a miss. */
static uint64_t json_end(struct reader *r, uint64_t data_off)
{
	uint64_t n = num_min(PADDING_MAX, data_off - 8);

	if (fs_pread(r->fd, r->piece, n, data_off - n, "segment") != OK)
		return 0;
	uint64_t left = without_padding(r->piece, n);
	return left ? data_off - n + left : 0;
}

/* Is the header as it was, values apart? Then they are *values_out. */
static bool same_header(struct reader *r, uint64_t image_bytes, const struct plan_print *p, uint32_t rank, struct image **values_out)
{
	unsigned char first[8];
	XXH128_canonical_t c;
	uint64_t json, end;

	if (image_bytes < sizeof first || fs_pread(r->fd, first, sizeof first, 0, "segment") != OK ||
	    sft_header_bytes(first, image_bytes, &json) != OK || json + 8 != p->data_off)
		return false;
	end = json_end(r, p->data_off);
	if (p->tail == 0 && end != p->begin) /* no values */
		return false;
	if (end < p->begin + p->tail || end - p->begin - p->tail > VALUES_MAX)
		return false;
	XXH3_128bits_reset(&r->x);
	if (!hash_range(r, 8, p->begin) || !hash_range(r, end - p->tail, end))
		return false;
	XXH128_canonicalFromHash(&c, XXH3_128bits_digest(&r->x));
	if (memcmp(c.digest, p->digest, sizeof p->digest) != 0)
		return false;
	uint64_t n = end - p->tail - p->begin;
	CLEANUP(mem_free_ptr) char *raw = mem_alloc(n + 1);
	if (!raw || fs_pread(r->fd, raw, n, p->begin, "segment") != OK)
		return false;
	return image_parse_values((struct str){ raw, n }, rank, p->values, values_out) == OK;
}

/* --------------------------------------------------------------------------------------------------------- plans */

static void plan_kept_free(struct plan_kept *k)
{
	plan_prints_free(&k->prints);
	sdict_free(k->known);
	sdict_free(k->plan);
	replicas_free(&k->replicas);
	write_ready_free(&k->ready);
	mem_free(k->segment_files);
	json_decref(k->casts);
	*k = (struct plan_kept){ 0 };
}

void plan_cache_drop(struct plan_cache *c, struct plan_kept *k)
{
	for (uint32_t i = 0; i < PLANS_KEPT; i++) {
		if (c->kept[i] != k || !k)
			continue;
		plan_kept_free(k);
		mem_free(k);
		c->kept[i] = NULL;
	}
}

void plan_cache_free(struct plan_cache *c)
{
	for (uint32_t i = 0; i < PLANS_KEPT; i++)
		plan_cache_drop(c, c->kept[i]);
}

/* All of the request that a plan depends on; where in the storage it goes and which generation is saved do not matter. */
static bool make_key(const struct job *j, const struct rank_segments *entry, unsigned char key[16])
{
	CLEANUP(mem_free_ptr) char *wishes = spec_wishes(j->request);
	CLEANUP(buf_free) struct buf b = BUF_INIT(SIZE_MAX);
	XXH128_canonical_t c;

	buf_printf(&b, "%s:%s:%jd:%s", j->spec.source.name.p, j->spec.target.storage.p,
		   (intmax_t)entry->world_size, wishes ? wishes : "");
	for (uint32_t i = 0; i < entry->count; i++) /* small items share other blocks where they come through a ring */
		if (entry->v[i].ring_bytes)
			buf_printf(&b, ":%u=%ju", i, (uintmax_t)entry->v[i].ring_bytes);
	if (!wishes || buf_status(&b) != OK)
		return false;
	XXH128_canonicalFromHash(&c, XXH3_128bits(b.p, b.len));
	memcpy(key, c.digest, 16);
	return true;
}

static bool same_path(struct sd_path a, struct sd_path b)
{
	bool same = a.count == b.count;

	for (uint32_t i = 0; same && i < a.count; i++) {
		bool key = a.parts[i].key.p != NULL;
		same = key == (b.parts[i].key.p != NULL) &&
		       (key ? str_eq(a.parts[i].key, b.parts[i].key) : a.parts[i].index == b.parts[i].index);
	}
	return same;
}

/* Do the same ranks hold the same keys, and take the archives as many bytes? */
static bool same_places(const struct sdict *a, const struct sdict *b)
{
	bool same = a->value_count == b->value_count;

	for (uint64_t i = 0; same && i < a->value_count; i++) {
		const struct sd_value *x = &a->values[i], *y = &b->values[i];
		same = x->rank == y->rank && x->bytes.n == y->bytes.n && str_eq(x->fqn, y->fqn) && same_path(x->path, y->path);
	}
	return same;
}

static bool read_step(struct job *j, const struct rank_segments *entry, const struct plan_kept *k, struct reader *r, struct image **images)
{
	bool same = entry->count == k->prints.count;

	for (uint32_t i = 0; same && i < k->prints.count; i++) {
		const struct rank_segment *x = &entry->v[i];
		r->fd = j->fds[x->fd];
		same = x->rank == i && same_header(r, x->image_bytes, &k->prints.v[i], i, &images[i]) &&
		       image_same_values(images[i], k->prints.v[i].values);
	}
	return same;
}

static bool matches(struct job *j, const struct rank_segments *entry, const struct plan_kept *k, struct spec_view *values_out)
{
	CLEANUP(mem_free_ptr) struct image **images = mem_zalloc(k->prints.count, sizeof(struct image *));
	CLEANUP(mem_free_ptr) struct reader *r = mem_zalloc(1, sizeof *r);
	CLEANUP(mem_free_ptr) unsigned char *piece = mem_alloc(PIECE);
	CLEANUP(sdict_free_ptr) struct sdict *values = NULL;

	if (!images || !r || !piece)
		return false;
	r->piece = piece;
	bool same = read_step(j, entry, k, r, images) && image_collect_values(images, k->prints.count, &values) == OK &&
		    same_places(values, k->known) && spec_select(&j->spec, values, values_out) == OK;
	for (uint32_t i = 0; i < k->prints.count; i++)
		image_free(images[i]);
	return same;
}

struct plan_kept *plan_cache_find(struct job *j, const struct rank_segments *entry, struct spec_view *values_out)
{
	struct plan_cache *c = j->worker->plans;
	unsigned char key[16];

	if (!c || j->dry_run || !make_key(j, entry, key))
		return NULL;
	for (uint32_t i = 0; i < PLANS_KEPT; i++) {
		struct plan_kept *k = c->kept[i];
		if (!k || memcmp(k->key, key, sizeof key) != 0)
			continue;
		if (matches(j, entry, k, values_out)) {
			k->used = ++c->clock;
			c->hits++;
			return k;
		}
		spec_view_free(values_out);
		break;
	}
	c->misses++;
	err_clear();
	return NULL;
}

/* The strings of the step before are cut off: they came behind those of the plan. */
enum err plan_kept_renew(struct plan_kept *k, const struct rank_segments *entry, const struct sdict *values)
{
	struct run_build *b = &k->ready.build;

	b->strings.n = k->ready.strings_n;
	for (uint32_t r = 0; r < k->prints.count; r++) {
		const struct rank_segment *x = &entry->v[r];
		struct run_file *f = &b->files.v[k->segment_files[r]];
		TRY(input_set_segment(b, x, f));
	}
	for (uint64_t i = 0; i < values->value_count; i++) {
		const struct sd_value *v = &values->values[i], *p = sdict_value(k->plan, v->fqn);
		if (!p)
			return err_at_fqn(ERR(INTERNAL, "a value that the plan lacks"), v->fqn.p, v->fqn.n);
		const struct run_dst *d = &b->dsts.v[k->ready.target.value_places[p - k->plan->values].dst];
		if (d->inline_len != v->bytes.n)
			return err_at_fqn(ERR(INTERNAL, "a value of another size than planned"), v->fqn.p, v->fqn.n);
		memcpy(b->strings.v + d->inline_at, v->bytes.p, v->bytes.n);
	}
	return OK;
}

static uint64_t bytes_of(const struct plan_kept *k)
{
	uint64_t n = plan_sdict_bytes(k->known) + plan_sdict_bytes(k->plan) + plan_sdict_bytes(k->replicas.sd);

#define X(type, name) n += k->ready.build.name.cap * sizeof(type);
	RUN_TABLES(X)
#undef X
	return n + k->plan->chunk_count * sizeof(struct build_place) + k->prints.count * (uint64_t)(64 << 10);
}

static struct plan_kept *oldest(const struct plan_cache *c)
{
	struct plan_kept *old = NULL;

	for (uint32_t i = 0; i < PLANS_KEPT; i++)
		if (c->kept[i] && (!old || c->kept[i]->used < old->used))
			old = c->kept[i];
	return old;
}

static uint64_t total_bytes(const struct plan_cache *c)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < PLANS_KEPT; i++)
		n += c->kept[i] ? c->kept[i]->bytes : 0;
	return n;
}

/* A free place, made by dropping what has been unused for longest; NULL: it would not fit. */
static struct plan_kept **place(struct plan_cache *c, uint64_t bytes)
{
	if (bytes > PLAN_KEPT_BYTES)
		return NULL;
	while (total_bytes(c) + bytes > PLAN_KEPT_BYTES)
		plan_cache_drop(c, oldest(c));
	for (int pass = 0; pass < 2; pass++) {
		for (uint32_t i = 0; i < PLANS_KEPT; i++)
			if (!c->kept[i])
				return &c->kept[i];
		plan_cache_drop(c, oldest(c));
	}
	return NULL;
}

void plan_cache_keep(struct job *j, struct plan_kept *k)
{
	const struct rank_segments *entry = job_state_dict(j, &j->spec.source);
	struct plan_cache *c = j->worker->plans;
	bool good = c && k->plan && k->known && !k->prints.failed && make_key(j, entry, k->key);

	for (uint32_t i = 0; good && i < PLANS_KEPT; i++)
		if (c->kept[i] && memcmp(c->kept[i]->key, k->key, sizeof k->key) == 0)
			plan_cache_drop(c, c->kept[i]);
	k->bytes = good ? bytes_of(k) : 0;
	struct plan_kept **at = good ? place(c, k->bytes) : NULL, *copy = at ? mem_alloc(sizeof *copy) : NULL;
	if (!copy) {
		plan_kept_free(k);
		return;
	}
	k->used = ++c->clock;
	*copy = *k;
	*k = (struct plan_kept){ 0 };
	*at = copy;
}
