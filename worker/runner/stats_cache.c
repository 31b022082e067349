/* stats_cache.c: see stats_cache.h. Entries leave out empty bins, and so take a few hundred bytes each. */
#include "runner/stats_cache.h"

#include "base/mem.h"
#include "io/digest.h"

struct stats_kept {
	unsigned char key[16];
	struct stats stats;
	uint32_t bin_count;
	struct bin {
		uint64_t index, count;
	} bins[];                      /* those that are not empty */
};

void stats_key_of(const struct sdict *sd, const struct sd_tensor *t, const struct manifest *m, struct stats_key *out)
{
	unsigned char dtype = (unsigned char)t->dtype;
	struct digest_stream stream;
	struct digest got;

	out->known = m != NULL;
	digest_begin_one(&stream, DIGEST_XXH3);
	digest_add(&stream, &dtype, 1);
	for (uint64_t i = t->first_chunk; out->known && i < t->first_chunk + t->chunk_count; i++) {
		const struct sd_loc *loc = &sd->chunks[i].loc;
		const struct manifest_item *item = manifest_find(m, sd->files[loc->file].name, loc->offset, loc->length);
		out->known = item && !item->raw && item->digest_count;
		if (out->known)
			digest_add(&stream, m->digests.v + item->digest_at, item->digest_count * sizeof *m->digests.v);
	}
	digest_end(&stream, &got);
	memcpy(out->xxh3_128, got.xxh3_128, sizeof out->xxh3_128);
}

static struct str key_str(const unsigned char key[16])
{
	return (struct str){ (const char *)key, 16 };
}

bool stats_cache_get(const struct stats_cache *c, const struct stats_key *key, struct stats *out, uint64_t bins[STATS_BINS])
{
	const struct stats_kept *k = key->known ? map_object(&c->kept, key_str(key->xxh3_128)) : NULL;

	if (!k)
		return false;
	*out = k->stats;
	memset(bins, 0, STATS_BINS * sizeof *bins);
	for (uint32_t b = 0; b < k->bin_count; b++)
		bins[k->bins[b].index] = k->bins[b].count;
	return true;
}

static struct stats_kept *kept_new(const struct stats_key *key, const struct stats *s, const uint64_t *bins, uint64_t *bytes_out)
{
	uint32_t count = 0;

	for (unsigned b = 0; b < STATS_BINS; b++)
		count += bins[b] != 0;
	*bytes_out = sizeof(struct stats_kept) + count * sizeof(struct bin);
	struct stats_kept *k = mem_zalloc(1, *bytes_out);
	if (!k)
		return NULL;
	memcpy(k->key, key->xxh3_128, sizeof k->key);
	k->stats = *s;
	for (unsigned b = 0; b < STATS_BINS; b++)
		if (bins[b])
			k->bins[k->bin_count++] = (struct bin){ b, bins[b] };
	return k;
}

void stats_cache_put(struct stats_cache *c, const struct stats_key *key, const struct stats *s, const uint64_t bins[STATS_BINS])
{
	uint64_t bytes;

	if (!key->known || map_object(&c->kept, key_str(key->xxh3_128)))
		return;
	struct stats_kept *k = kept_new(key, s, bins, &bytes);
	if (c->bytes + bytes > STATS_CACHE_BYTES)
		stats_cache_free(c);
	if (!k || map_add(&c->kept, key_str(k->key), k)) {
		err_clear();
		mem_free(k);
		return;
	}
	c->bytes += bytes;
}

void stats_cache_free(struct stats_cache *c)
{
	struct stats_kept *k;

	map_each(&c->kept, k)
		mem_free(k);
	map_free(&c->kept);
	c->bytes = 0;
}
