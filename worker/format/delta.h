/* delta.h: a delta on disk, in the form that slime writes and SGLang's /pull_weights applies: a directory in Hugging Face's layout whose
 * tensors are the base's changed ones, each a U8 vector with a zstd frame (delta_code.h).
 *
 *   model.safetensors.index.json   {"metadata":{"version":"000007","base_version":"000006","delta_encoding":"xor",
 *                                   "compression_format":"zstd","checksum_format":"xxh3-128"},"weight_map":{FQN:file}}
 *   model-00001-of-00002.safetensors   __metadata__: {FQN: checksum of the tensor's new bytes, hex}
 *
 * dcpd's have two members more, the content digests (io/content.h) of both sides: "base_content_digest" and "content_digest". A tensor that
 * did not change is absent. The form has no place for tensors that were added, removed or reshaped. Values (a step, a learning rate) are a
 * member of the index of dcpd's own, which other readers pass over: all of the new side's, changed or not, as archives of torch.save.
 *
 *   "values": {FQN: {"path": ["optim", "param_groups", 0, "lr"], "archive": base64}} */
#pragma once
#include "base/arena.h"
#include "base/buf.h"
#include "base/vec.h"
#include "format/delta_code.h"
#include "tensor/sdict.h"

enum { DELTA_VALUES_BYTES = 64 << 20 };       /* of all values together: more are left out */

struct delta_value {
	struct str fqn, archive;
	struct sd_path path;
};

enum delta_checksum { DELTA_XXH3_128, DELTA_ADLER32 };

/* A delta that is written. */
struct delta_head {
	enum delta_encoding encoding;
	uint64_t version, base_version;
	unsigned char base_content[16], content[16];
	const struct str *checksums;           /* per tensor of what is written, hex */
	const struct delta_value *values;      /* NULL: they are left out */
	uint64_t value_count;
};

/* The metadata of a delta's index. */
struct delta_index {
	enum delta_encoding encoding;
	enum delta_checksum checksum;
	struct str version, base_version;      /* p NULL: not given */
	struct str base_content, content;      /* 32 hex digits; p NULL: not given */
	bool has_values;
	struct vec(struct delta_value) values; /* vec_free */
};

enum { DELTA_FIRST_BYTES = 4096 };
/* Do the first bytes of an index (DELTA_FIRST_BYTES of them, or all) say that it is a delta's? Its metadata must come first. */
bool delta_index_is(const void *first, size_t n);
/* Reads the index's metadata and values, which are archives with the right CRC32s then; texts point into it or are in `arena`. The caller
 * frees out->values, after an error too. ERR_FORMAT_SAFETENSORS; ERR_FORMAT_ITEM, ERR_DIGEST_MISMATCH: of a value, with its FQN;
 * ERR_FORMAT_UNSUPPORTED: an encoding, compression or checksum that dcpd does not know. */
FALLIBLE enum err delta_index_read(struct str json, struct arena *arena, struct delta_index *out);
/* Appends the member "values", with a comma in front, if there is any. */
void delta_put_values(struct buf *b, const struct delta_head *head);
/* Appends the members of "metadata". */
void delta_put_metadata(struct buf *b, const struct delta_head *head);

const char *delta_encoding_name(enum delta_encoding e);
