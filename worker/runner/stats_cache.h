/* stats_cache.h: the figures of tensors that gangs have counted, by the digests of their bytes, in memory and in a file of the daemon's
 * state directory, which outlives both.
 *
 * Steps of one training share frozen tensors, and people ask twice. Equal digests mean equal figures, wherever the bytes lie, so the bytes
 * are not read again. Of tensors whose bytes have no digests (others' files) nothing is kept.
 *
 * The file is appended to by all gangs, an entry with a write, and holds nothing that cannot be counted again: each entry has a digest of
 * its own, and a file is cut where one is damaged, or once it is larger than STATS_CACHE_BYTES. */
#pragma once
#include "base/map.h"
#include "store/manifest.h"
#include "tensor/sdict.h"
#include "tensor/stats.h"

struct stats_cache {
	struct map kept;               /* key → entry */
	uint64_t bytes;                /* at most STATS_CACHE_BYTES: then all are forgotten */
	bool has_file;
	int fd;                        /* of the file, opened with O_APPEND; owned */
	uint64_t read_to;              /* the file's bytes that were read */
};
enum { STATS_CACHE_BYTES = 32 << 20 };

struct stats_key {
	bool known;                    /* all chunks have digests of their payloads */
	unsigned char xxh3_128[16];    /* of dtype and digests, chunk after chunk */
};
void stats_key_of(const struct sdict *sd, const struct sd_tensor *t, const struct manifest *m, struct stats_key *out);

/* From now on, what is put is appended to the file, too. */
void stats_cache_keep_in(struct stats_cache *c, int fd);
/* Takes what other gangs, and daemons before, have appended to the file. */
void stats_cache_read(struct stats_cache *c);
/* False: nothing is known of such bytes. */
bool stats_cache_get(const struct stats_cache *c, const struct stats_key *key, struct stats *out, uint64_t bins[STATS_BINS]);
/* Keeps them if there is memory. */
void stats_cache_put(struct stats_cache *c, const struct stats_key *key, const struct stats *s, const uint64_t bins[STATS_BINS]);
void stats_cache_free(struct stats_cache *c);
