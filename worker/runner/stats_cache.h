/* stats_cache.h: the figures of tensors that a warm gang has counted, by the digests of their bytes.
 *
 * Steps of one training share frozen tensors, and people ask twice. Equal digests mean equal figures, wherever the bytes lie, so the bytes
 * are not read again. Of tensors whose bytes have no digests (others' files) nothing is kept. */
#pragma once
#include "base/map.h"
#include "store/manifest.h"
#include "tensor/sdict.h"
#include "tensor/stats.h"

struct stats_cache {
	struct map kept;               /* key → entry */
	uint64_t bytes;                /* at most STATS_CACHE_BYTES: then all are forgotten */
};
enum { STATS_CACHE_BYTES = 32 << 20 };

struct stats_key {
	bool known;                    /* all chunks have digests of their payloads */
	unsigned char xxh3_128[16];    /* of dtype and digests, chunk after chunk */
};
void stats_key_of(const struct sdict *sd, const struct sd_tensor *t, const struct manifest *m, struct stats_key *out);

/* False: nothing is known of such bytes. */
bool stats_cache_get(const struct stats_cache *c, const struct stats_key *key, struct stats *out, uint64_t bins[STATS_BINS]);
/* Keeps them if there is memory. */
void stats_cache_put(struct stats_cache *c, const struct stats_key *key, const struct stats *s, const uint64_t bins[STATS_BINS]);
void stats_cache_free(struct stats_cache *c);
