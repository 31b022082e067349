/* torch_item_impl.h: what the files of torch_item share; nobody else includes it. */
#pragma once
#include "format/pickle.h"
#include "format/torch_item.h"
#include "format/zip.h"

enum {
	ITEM_TENSOR_PICKLE_MAX = 1 << 20,
	ITEM_VALUE_PICKLE_MAX = 256 << 20,
	ITEM_INFLATED_PICKLE_MAX = 64 << 20,   /* a thousandth of it may be on the disk; torch.save itself deflates nothing */
};

/* An opened item: a zip archive, or (zip == NULL) a stream of torch before 1.6. */
struct item {
	struct zip *zip;
	struct buf pickle;               /* data.pkl, or the start of the stream from the object's pickle on */
	struct pickle *pk;
	bool big_endian;
	uint64_t data_off;               /* stream: where the storage keys' pickle begins */
};

/* pickle_max bounds data.pkl. */
FALLIBLE enum err item_open(const struct item_source *src, uint64_t pickle_max, struct item *out);
void item_close(struct item *it);
