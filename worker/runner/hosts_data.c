/* hosts_data.c: what hosts tell each other of their data: the structure before the plan, the digests behind it (see hosts.h).
 *
 * Every host builds the tables of the whole run from the same headers, so that an item has the same number on all of them; a digest of
 * the tables goes with the results, in case that they are not the same after all (daemons of two versions). */
#include "runner/hosts_impl.h"

#include <stdio.h>

#include "base/reader.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#define HEADS_MAGIC "dcpd-heads-1"
#define PART_MAGIC  "dcpd-part-3"

enum { HEADS_MAX = 1 << 30 };

struct heads_begin {
	char magic[16], job[64];
};

struct heads_rank {
	uint64_t rank, image_bytes, header_bytes;
};

/* ---- structure ---- */

static const struct rank_segments *local_entry(const struct hosts *h)
{
	return job_state_dict(h->job, &h->job->spec.source);
}

static FALLIBLE enum err put_heads(struct hosts *h, const struct rank_segments *entry, const struct spec_ranks *numbers)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(HEADS_MAX);
	struct heads_begin begin = { .magic = HEADS_MAGIC };

	if (entry->count != numbers->n)
		return ERR(VALIDATION_FAILED, "the state dict has %u ranks, hosts names %zu for host %s", entry->count, numbers->n,
			   hosts_name(h, h->index));
	snprintf(begin.job, sizeof begin.job, "%s", h->job->id);
	buf_put(&b, &begin, sizeof begin);
	for (uint32_t i = 0; i < entry->count; i++) {
		CLEANUP(mem_free_ptr) void *header = NULL;
		struct heads_rank head = { .rank = numbers->v[i], .image_bytes = entry->v[i].image_bytes };
		TRY(input_read_header(&entry->v[i], h->job->fds, &header, &head.header_bytes));
		buf_put(&b, &head, sizeof head);
		buf_put(&b, header, head.header_bytes);
	}
	TRY(buf_status(&b));
	return hosts_put(h, "heads", b.p, b.len, false);
}

static FALLIBLE enum err bad_heads(const struct hosts *h, uint32_t host)
{
	return ERR(FORMAT_IMAGE, "what host %s tells of its ranks cannot be used", hosts_name(h, host));
}

static FALLIBLE enum err parse_heads(struct hosts *h, uint32_t host, const unsigned char *p, uint64_t n, struct image **images)
{
	struct reader r = reader_of(p, n);
	struct heads_begin begin;
	struct heads_rank head;

	reader_copy(&r, &begin, sizeof begin);
	if (r.failed || strncmp(begin.magic, HEADS_MAGIC, sizeof begin.magic) != 0 || !memchr(begin.job, '\0', sizeof begin.job))
		return bad_heads(h, host);
	if (host == 0)
		memcpy(h->leader_job, begin.job, sizeof begin.job);
	while (reader_left(&r)) {
		reader_copy(&r, &head, sizeof head);
		const unsigned char *header = reader_take(&r, head.header_bytes);
		if (!header || head.rank >= h->world || h->host_of[head.rank] != host || images[head.rank])
			return bad_heads(h, host);
		TRY(err_at_rank(image_parse(header, head.header_bytes, head.image_bytes, (uint32_t)head.rank, &images[head.rank]),
				(int64_t)head.rank));
	}
	return OK;
}

static FALLIBLE enum err read_heads(struct hosts *h, uint32_t host, struct image **images)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t n = 0;
	char name[32];

	hosts_file(name, "heads", host);
	TRY(store_get(h->dir, name, HEADS_MAX, &bytes, &n, NULL));
	return parse_heads(h, host, bytes, n, images);
}

enum err hosts_read_leader(struct hosts *h)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	struct heads_begin begin;

	TRY(store_open_file(h->dir, "heads-0", STORE_READ, &file));
	TRY(store_read(file, &begin, sizeof begin, 0, "heads-0"));
	if (strncmp(begin.magic, HEADS_MAGIC, sizeof begin.magic) != 0 || !memchr(begin.job, '\0', sizeof begin.job))
		return bad_heads(h, 0);
	memcpy(h->leader_job, begin.job, sizeof begin.job);
	return OK;
}

static FALLIBLE enum err collect(struct hosts *h, struct image **images, struct sdict **out)
{
	for (uint32_t k = 0; k < h->count; k++)
		TRY(read_heads(h, k, images));
	for (uint32_t r = 0; r < h->world; r++)
		if (!images[r])
			return err_at_rank(ERR(FORMAT_IMAGE, "host %s tells nothing of its rank", hosts_name(h, h->host_of[r])), r);
	return image_collect(images, h->world, out);
}

/* The state dict as if all ranks were here. Ranks of other hosts have no bytes here, and no work. */
static FALLIBLE enum err whole_entry(struct hosts *h, const struct rank_segments *entry, const struct spec_ranks *numbers)
{
	h->whole = (struct rank_segments){ .count = h->world, .world_size = h->world, .generation = entry->generation,
					   .v = mem_zalloc(h->world, sizeof *h->whole.v) };
	NEED(h->whole.v, "no memory for %u ranks", h->world);
	for (uint32_t r = 0; r < h->world; r++)
		h->whole.v[r] = (struct rank_segment){ .rank = r, .name = "elsewhere" };
	for (size_t i = 0; i < numbers->n; i++) {
		h->whole.v[numbers->v[i]] = entry->v[i];
		h->whole.v[numbers->v[i]].rank = numbers->v[i];
	}
	return OK;
}

enum err hosts_input(struct hosts *h, struct input *out)
{
	const struct rank_segments *entry = local_entry(h);
	const struct spec_ranks *numbers = &h->spec->ranks[h->index];

	*out = (struct input){ .job = h->job };
	if (!entry)
		return ERR(NOT_FOUND, "a save by several hosts needs a state dict");
	TRY(put_heads(h, entry, numbers));
	TRY(whole_entry(h, entry, numbers));
	TRY(hosts_wait_all(h, "heads"));
	struct image **images = mem_zalloc(h->world, sizeof *images);
	enum err e = images ? collect(h, images, &out->images) : ERR(NO_MEMORY, "no memory for %u ranks", h->world);
	for (uint32_t r = 0; images && r < h->world; r++)
		image_free(images[r]);
	mem_free(images);
	out->state_dict = &h->whole;
	out->sd = out->images;
	out->world_size = h->world;
	return e;
}

/* ---- digests ---- */

struct part_begin {
	char magic[16];
	uint64_t count;
	unsigned char tables[16];      /* digest of the tables that the numbers mean */
};

struct part_item {
	uint64_t content;
	uint32_t crc32;
	unsigned char xxh3_128[16], edges[16];
};

/* Places of one result in the tables. NULL: the result has no such digest. */
struct result {
	uint32_t *crc32;
	unsigned char *xxh3_128, *edges;
	uint64_t *content;
};

static void tables_digest(const struct run *run, unsigned char out[16])
{
	XXH3_state_t *x = XXH3_createState();
	XXH128_canonical_t canonical;

	must(x);
	XXH3_128bits_reset(x);
	each(d, run->dsts, run->dsts_n) {
		const struct run_file *f = &run->files[d->file];
		uint64_t v[] = { d->rank, d->offset, d->length, d->part_count, f->bytes, f->rank };
		struct str fqn = run_dst_fqn(run, d), name = run_file_name(run, f);
		XXH3_128bits_update(x, v, sizeof v);
		XXH3_128bits_update(x, fqn.p, fqn.n);
		XXH3_128bits_update(x, name.p, name.n);
	}
	for (uint64_t i = 0; i < run->parts_n; i++) {
		uint64_t v[] = { run->parts[i].dst, run->parts[i].begin, run->parts[i].end };
		XXH3_128bits_update(x, v, sizeof v);
	}
	for (uint64_t i = 0; i < run->scans_n; i++) {
		uint64_t v[] = { run->scans[i].begin, run->scans[i].end, run->srcs[run->scans[i].src].rank };
		XXH3_128bits_update(x, v, sizeof v);
	}
	XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(x));
	memcpy(out, canonical.digest, 16);
	XXH3_freeState(x);
}

/* The results of one host, one by one in an order that all share: *at becomes UINT64_MAX behind the last. */
struct walk {
	const struct hosts *h;
	struct run *run;
	uint32_t host;
	uint64_t at;
};

static bool of_host(const struct walk *w, uint32_t rank)
{
	return rank < w->h->world && w->h->host_of[rank] == w->host;
}

/* The next result. False: no more. */
static bool next(struct walk *w, struct result *out)
{
	struct run *r = w->run;

	for (; w->at < r->dsts_n; w->at++)
		if (of_host(w, r->dsts[w->at].rank)) {
			struct run_dst *d = &r->dsts[w->at++];
			*out = (struct result){ &d->crc32, d->xxh3_128, d->edges_xxh3, NULL };
			return true;
		}
	for (; w->at - r->dsts_n < r->parts_n; w->at++) {
		struct run_part *p = &r->parts[w->at - r->dsts_n];
		if (of_host(w, r->dsts[p->dst].rank)) {
			*out = (struct result){ &p->crc32, p->xxh3_128, NULL, &p->content };
			w->at++;
			return true;
		}
	}
	for (; w->at - r->dsts_n - r->parts_n < r->scans_n; w->at++) {
		struct run_scan *s = &r->scans[w->at - r->dsts_n - r->parts_n];
		if (of_host(w, r->srcs[s->src].rank)) {
			*out = (struct result){ &s->crc32, NULL, NULL, NULL };
			w->at++;
			return true;
		}
	}
	return false;
}

static FALLIBLE enum err put_part(struct hosts *h, struct run *run)
{
	uint64_t max = (run->dsts_n + run->parts_n + run->scans_n) * sizeof(struct part_item) + 4096;
	CLEANUP(buf_free) struct buf b = BUF_INIT(max);
	struct walk w = { .h = h, .run = run, .host = h->index };
	struct part_begin begin = { .magic = PART_MAGIC };
	struct result result;

	tables_digest(run, begin.tables);
	while (next(&w, &result))
		begin.count++;
	buf_put(&b, &begin, sizeof begin);
	for (w.at = 0; next(&w, &result);) {
		struct part_item item = { .crc32 = *result.crc32 };
		if (result.xxh3_128)
			memcpy(item.xxh3_128, result.xxh3_128, sizeof item.xxh3_128);
		if (result.edges)
			memcpy(item.edges, result.edges, sizeof item.edges);
		if (result.content)
			item.content = *result.content;
		buf_put(&b, &item, sizeof item);
	}
	TRY(buf_status(&b));
	return hosts_put(h, "part", b.p, b.len, true);
}

static FALLIBLE enum err take_part(struct hosts *h, struct run *run, uint32_t host, const struct part_begin *mine)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	struct walk w = { .h = h, .run = run, .host = host };
	struct part_begin begin;
	struct part_item item;
	struct result result;
	uint64_t n = 0;
	char name[32];

	hosts_file(name, "part", host);
	TRY(store_get(h->dir, name, (run->dsts_n + run->parts_n + run->scans_n) * sizeof item + 4096, &bytes, &n, NULL));
	struct reader r = reader_of(bytes, n);
	reader_copy(&r, &begin, sizeof begin);
	if (r.failed)
		return ERR(STORAGE_IO, "the part of host %s has %ju bytes", hosts_name(h, host), (uintmax_t)n);
	if (memcmp(begin.magic, mine->magic, sizeof begin.magic) != 0 || memcmp(begin.tables, mine->tables, sizeof begin.tables) != 0)
		return ERR(PLAN_INVALID, "host %s made another plan: are all daemons of one version?", hosts_name(h, host));
	while (next(&w, &result)) {
		reader_copy(&r, &item, sizeof item);
		if (r.failed)
			return ERR(STORAGE_IO, "the part of host %s is cut off at byte %ju", hosts_name(h, host), (uintmax_t)r.at);
		*result.crc32 = item.crc32;
		if (result.xxh3_128)
			memcpy(result.xxh3_128, item.xxh3_128, sizeof item.xxh3_128);
		if (result.edges)
			memcpy(result.edges, item.edges, sizeof item.edges);
		if (result.content)
			*result.content = item.content;
	}
	return OK;
}

enum err hosts_exchange(struct hosts *h, struct run *run)
{
	struct part_begin mine = { .magic = PART_MAGIC };

	TRY(put_part(h, run));
	if (!h->leads)
		return OK;
	TRY(job_state(h->job, "running", "waiting for the other hosts", NULL, 0));
	TRY(hosts_wait_all(h, "part"));
	tables_digest(run, mine.tables);
	for (uint32_t k = 1; k < h->count; k++)
		TRY(take_part(h, run, k, &mine));
	return OK;
}
