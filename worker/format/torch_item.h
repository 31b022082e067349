/* torch_item.h: one item of a `.distcp` file: a complete torch.save archive (dcp.md 2.4) holding one tensor, or (BYTE_IO) one value.
 *
 * Reading goes through a callback, because only a few KiB of a large item are looked at: zip end records, central directory, local
 * headers, data.pkl. Writing: sizes are known beforehand, so the whole file can be laid out before the first byte is there.
 *
 *   large item   [local headers, data.pkl, … FB padding │ payload │ zeros │ central directory, end record ]
 *                 0                              payload_off        tail_off                         length
 *   payload_off and tail_off are multiples of 4096, so that payload goes from shared memory to the disk with O_DIRECT and no copy.
 *   small item   the same with alignment 64 and no zeros. */
#pragma once
#include "base/buf.h"
#include "format/source.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

struct item_tensor {
	enum dtype dtype;
	uint32_t ndim;
	int64_t sizes[NDIM_MAX], strides[NDIM_MAX];  /* in elements */
	uint64_t storage_offset;         /* in elements */
	uint64_t payload_off, payload_bytes;         /* of the storage record in the item, uncompressed size */
	uint64_t stored_bytes;           /* = payload_bytes unless deflated */
	bool deflated, big_endian;
	bool conj, neg;                  /* lazy bits: the stored bytes are those before conjugation / negation */
	bool c_order;                    /* contiguous in C order, so that a box's rows are runs of bytes */
	bool requires_grad;
	uint32_t crc32;
	bool crc_known;                  /* false: stored as 0, "not computed" */
};

/* Parses an item that must hold one dense tensor: zip archives of any prefix and record order, stored or deflated data.pkl, also the
 * pre-1.6 stream format. ERR_FORMAT_ZIP, ERR_FORMAT_PICKLE, ERR_FORMAT_ITEM (offset relative to the item), ERR_DTYPE_UNSUPPORTED.
 * Every element that sizes/strides/offset can address is checked to lie inside the record. */
FALLIBLE enum err item_read_tensor(const struct item_source *src, struct item_tensor *out);

/* Form of a value: JSON text if JSON can say it exactly (None, bool, int64, finite float, str, list, dict with str keys …), raw bytes if
 * it is a Python `bytes`, else opaque with its class name. Nothing is executed. */
enum item_value_kind { ITEM_VALUE_JSON, ITEM_VALUE_BYTES, ITEM_VALUE_OPAQUE };
struct item_value {
	enum item_value_kind kind;
	struct buf text;                 /* JSON text, the bytes, or the class ("numpy.ndarray"); freed with item_value_free */
};
FALLIBLE enum err item_read_value(const struct item_source *src, struct item_value *out);
void item_value_free(struct item_value *v);

/* Do two archives hold the same object, however it was pickled: would loading them call the same with the same? False of what holds
 * storages, and of damaged ones. */
bool item_same_value(const struct item_source *a, const struct item_source *b);

/* CRC32 of every record of the archive that has one, checked against its bytes, payload records excepted when skip_payload.
 * checked_out counts records with a known CRC. */
FALLIBLE enum err item_check_crc(const struct item_source *src, bool skip_payload, uint64_t *checked_out,
				 uint64_t *unknown_out);

/* Writing. */
struct item_layout {
	uint64_t payload_off, payload_bytes, tail_off, length;
};
/* align: 64 or 4096. payload_bytes = numel * dtype bytes, C order. */
FALLIBLE enum err item_layout_tensor(enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align,
				     struct item_layout *out);
/* Appends exactly payload_off bytes. The CRC is in the local header too, so it must be known. */
FALLIBLE enum err item_put_head(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align,
				uint32_t payload_crc32);
/* Appends exactly length - tail_off bytes. */
FALLIBLE enum err item_put_tail(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align,
				uint32_t payload_crc32);

/* A BYTE_IO item: torch.save archive around a pickle stream / a JSON value (ints, floats, str, list, dict … as Python objects) /
 * Python bytes. item_is_archive: does the blob look like such an archive already (then it is stored as it is)? */
FALLIBLE enum err item_put_value_pickle(struct buf *b, const void *pickle, size_t n);
FALLIBLE enum err item_put_value_json(struct buf *b, struct str json);
FALLIBLE enum err item_put_value_bytes(struct buf *b, const void *bytes, size_t n);
bool item_is_archive(const void *blob, size_t n);
