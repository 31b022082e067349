/* image_impl.h: what the files of image share; nobody else includes it. */
#pragma once
#include "base/map.h"
#include "format/image.h"
#include "format/jscan.h"

#define IMAGE_PAD_PREFIX "__dcpd_pad__/"
#define IMAGE_OWN_PREFIX "__dcpd_"

/* Memory that headers of so many bytes may take. An entry has at least 60 bytes of JSON and takes some 250; a value, `"a":{"json":1}`,
 * becomes an archive of 400 bytes and an entry of 150, so that half a million small ones fit IMAGE_SDICT_BYTES_MIN. */
enum { IMAGE_TIMES = 6, IMAGE_ARENA_BYTES_MIN = 64 << 20, IMAGE_SDICT_BYTES_MIN = 256 << 20 };
static inline uint64_t image_arena_cap(uint64_t header_bytes) { return IMAGE_ARENA_BYTES_MIN + IMAGE_TIMES * header_bytes; }
uint64_t image_sdict_cap(struct image *const *images, uint32_t count);

/* A tensor's chunk on this rank: a safetensors entry, with what the dcpd metadata says of it. */
struct image_chunk {
	const struct sft_entry *entry;
	struct str fqn;
	enum dtype dtype;
	uint32_t ndim;
	bool listed, boxed;
	const int64_t *shape, *offsets, *sizes;
	uint32_t shape_ndim, offsets_ndim;       /* as given; ndim once resolved */
	bool dtype_given;
	struct sd_outer *outer;                  /* NULL: not nested. sizes: once resolved */
	const int64_t *outer_shape;
	uint32_t outer_shape_ndim, outer_offsets_ndim;
};

struct image {
	struct arena *arena;
	struct sft sft;
	uint32_t rank;
	struct image_chunk *chunks;              /* in data order, filler left out */
	uint32_t chunk_count;
	struct map by_name;                      /* entry name → chunk */
	struct image_text *values;
	uint32_t value_count;
	struct sd_path *paths;
	uint32_t path_count;
	struct map path_of;                      /* fqn → path */
	struct sd_path *tuples;
	uint32_t tuple_count;
	struct str layout;
};

FALLIBLE enum err image_read_values(struct image *im, struct str text); /* an object of values, nothing behind it */
FALLIBLE enum err image_read_dcpd(struct image *im, struct str text);
/* While the values of all ranks are joined: per value of the sdict what its first rank wrote, and who had it last. */
struct image_seen {
	struct { struct image_text text; uint32_t rank; } *v;
	uint64_t cap;
};
FALLIBLE enum err image_add_values(struct sdict *sd, const struct image *im, struct image_seen *seen);
void image_seen_free(struct image_seen *seen);
