/* torch_item_graph.h: the inside of anything that torch.save wrote: its pickle as a graph, and the tensors that nodes of it describe. For
 * torch_item, which wants one tensor or value, and torch_file, which wants all of them. */
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

/* Do the first bytes say that this is a stream of torch before 1.6? */
bool item_is_stream(const unsigned char *first, size_t n);
/* pickle_max bounds data.pkl. */
FALLIBLE enum err item_open(const struct item_source *src, uint64_t pickle_max, struct item *out);
void item_close(struct item *it);

/* A storage as its persistent id names it: ('storage', class, key, location, count[, view]). */
struct item_storage {
	enum dtype dtype;
	struct str key;                  /* in the pickle */
	uint64_t bytes;
};

/* Does the node say that it is a tensor, of whatever kind? */
bool item_is_tensor(const struct pickle *pk, pnode n);
/* The dense tensor that a node describes, but for where its storage lies: payload_off, stored_bytes, deflated, big_endian and CRC32 stay 0.
 * Every element that sizes, strides and offset address is checked to lie inside the storage. ERR_FORMAT_ITEM, ERR_DTYPE_UNSUPPORTED. */
FALLIBLE enum err item_tensor_of(const struct pickle *pk, pnode n, struct item_tensor *out, struct item_storage *storage_out);
/* The storage that a persistent id names; ERR_FORMAT_ITEM of another id. quantised: such elements are wanted too, as the integers they are;
 * else ERR_DTYPE_UNSUPPORTED. */
FALLIBLE enum err item_storage_of(const struct pickle *pk, pnode n, bool quantised, struct item_storage *out);
/* Checks that a record is as long as the storage that it holds, and where its bytes lie: sets what item_tensor_of left out. */
FALLIBLE enum err item_take_record(const struct zip *z, const struct zip_record *r, const struct item_storage *s, struct item_tensor *t);
/* Appends the opcodes that leave a contiguous tensor on the stack, of the storage `key`. */
FALLIBLE enum err item_put_tensor(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes, const char *key,
				  bool requires_grad);
