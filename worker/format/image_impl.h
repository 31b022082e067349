/* image_impl.h: what the files of image share; nobody else includes it. */
#pragma once
#include "base/map.h"
#include "format/image.h"
#include "format/jscan.h"

#define IMAGE_PAD_PREFIX "__dcpd_pad__/"
#define IMAGE_OWN_PREFIX "__dcpd_"

/* A tensor's chunk on this rank: a safetensors entry, with what the dcpd metadata says of it. */
struct image_chunk {
	const struct sft_entry *entry;
	struct str fqn;
	enum dtype dtype;
	uint32_t ndim;
	bool listed;
	const int64_t *shape, *offsets, *sizes;
	uint32_t shape_ndim, offsets_ndim;       /* as given; ndim once resolved */
	bool dtype_given;
};

enum image_value_form { IMAGE_JSON, IMAGE_BASE64_BYTES, IMAGE_BASE64_PICKLE };
struct image_item {
	struct str fqn, text;                    /* JSON text, or base64 */
	enum image_value_form form;
};

struct image {
	struct arena *arena;
	struct sft sft;
	uint32_t rank;
	struct image_chunk *chunks;              /* in data order, filler left out */
	uint32_t chunk_count;
	struct map by_name;                      /* entry name → chunk */
	struct image_item *values;
	uint32_t value_count;
	struct sd_path *paths;
	uint32_t path_count;
	struct map path_of;                      /* fqn → path */
};

FALLIBLE enum err image_read_dcpd(struct image *im, struct str text);
FALLIBLE enum err image_add_values(struct sdict *sd, const struct image *im);
/* paths[fqn], or one part: the FQN itself (*self gives it room). */
struct sd_path image_path(const struct image *im, struct str fqn, struct sd_path_part *self);
