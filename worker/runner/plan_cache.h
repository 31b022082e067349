/* plan_cache.h: a training saves the same structure again and again; only values such as the step change. The leader keeps what a save
 * that succeeded was made of, the run's tables with it, and a step that matches is not parsed and not planned again: its headers are
 * hashed where they are the same, its values are read and put in the tables.
 *
 * The key holds all that matters: the request (selection, options, the storage), the world, and per rank all of the header but the values
 * (names, dtypes, boxes, places, paths). Values must have the same keys, paths, holders and sizes as stored. Everything else is a miss. */
#pragma once
#include "format/image.h"
#include "runner/replicas.h"
#include "runner/spec.h"
#include "runner/write.h"

enum { PLANS_KEPT = 4, PLAN_KEPT_BYTES = 96 << 20 };

/* Fingerprint of a header when it was parsed. */
struct plan_print {
	uint64_t data_off, begin, tail; /* of the data; of the values; bytes from their end to the end of the JSON */
	unsigned char digest[16];       /* of what is before and behind the values */
	struct image *values;
};
struct plan_prints {
	struct plan_print *v;
	uint32_t count;
	bool failed;                    /* no matter: then nothing is kept */
};
/* For input_images_noted: notes one rank's header. Ranks come in order. */
void plan_prints_note(struct plan_prints *p, const void *header, uint64_t header_bytes, const struct image *im);
void plan_prints_free(struct plan_prints *p);

struct plan_kept {
	unsigned char key[16];
	struct plan_prints prints;
	struct sdict *known;            /* the values of all ranks, before selection */
	struct sdict *plan;
	struct replicas replicas;
	struct write_ready ready;
	uint32_t *segment_files;        /* run file of each rank */
	json_t *casts;
	uint64_t bytes_saved, bytes, used;
};
struct plan_cache {
	struct plan_kept *kept[PLANS_KEPT];
	uint64_t clock;
	uint64_t hits, misses;
};

void plan_cache_free(struct plan_cache *c);
/* The plan of this save if it was made before, else NULL. *values_out: the step's values, selected (spec_view_free). entry: the
 * source's in the job's document. */
struct plan_kept *plan_cache_find(struct job *j, const struct rank_segments *entry, struct spec_view *values_out);
/* Puts this step's places of segments and its values in the tables. */
FALLIBLE enum err plan_kept_renew(struct plan_kept *k, const struct rank_segments *entry, const struct sdict *values);
/* Takes all of *k, which is zeroed. Too large, or its headers not noted: it is dropped at once. */
void plan_cache_keep(struct job *j, struct plan_kept *k);
void plan_cache_drop(struct plan_cache *c, struct plan_kept *k);
