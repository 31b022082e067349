/* file_plan.h: the files of a checkpoint that is to be written: every item's place, before a byte of it is there. All sizes are known, so
 * any worker can write any part of any file at once. */
#pragma once
#include "base/vec.h"
#include "format/dcp_meta.h"
#include "format/torch_item.h"
#include "tensor/sdict.h"

struct gguf_head;
struct delta_head;

enum { FILE_PLAN_PAGE = 4096, FILE_PLAN_SMALL = 128 << 10 /* payloads up to this share blocks with others */,
       FILE_PLAN_CUT_BYTES = 1 << 20, FILE_PLAN_CUT_MAX = 4096 };

enum file_plan_kind {
	FILE_PLAN_CHUNK,
	FILE_PLAN_VALUE,
	FILE_PLAN_TEXT,                /* bytes of the format's own: a file's header */
	FILE_PLAN_OTHER,               /* all of a file that no format knows, which travels along */
};

struct file_plan_item {
	uint8_t kind;
	bool bare;                     /* no archive around the payload */
	bool small;                    /* shares a block with its neighbours */
	bool opens;                    /* small: begins a block, on a page */
	bool q8_0;                     /* float32, written as blocks of ggml's Q8_0 */
	uint32_t index;                /* of the chunk, value or text */
	uint64_t offset;               /* in the file */
	struct item_layout at;         /* in the item */
};

/* A field of the file that holds the CRC-32 (little-endian) of a zip record, known when the record's payload has been written:
 * that of some leading bytes, then of all of an item. */
struct file_plan_crc {
	uint64_t offset;               /* of the field, in the plan's first file */
	uint32_t item;
	uint32_t leading_crc32;        /* 0: there are no leading bytes */
};

struct file_plan_file {
	struct str name;
	uint32_t rank;
	uint64_t bytes;
	uint64_t first_item, item_count;       /* in the order of their offsets, but for values and chunks that are large */
};

struct file_plan {
	/* The whole file is one stream of bytes: blocks may be cut anywhere. Else small items lie in blocks that begin on pages,
	 * and large payloads begin on pages. */
	bool stream;
	struct arena *arena;
	struct vec(struct file_plan_file) files;
	struct vec(struct file_plan_item) items;
	struct vec(struct str) texts;
	struct vec(struct file_plan_crc) crcs;
};

/* Files and items as a client chose them (a planned save). */
struct file_plan_given {
	uint32_t file_count;
	const struct str *names;
	const uint32_t *ranks;         /* per file */
	const bool *exact;             /* per file: it ends where its last item ends, not on a page */
	const uint32_t *chunk_file;    /* per chunk of sd */
	const bool *chunk_raw;         /* … written as it is, without an archive around it */
};

struct file_plan_target {
	const struct sdict *sd;        /* chunks and values with their writer's rank */
	uint32_t world_size, files_per_rank;
	uint64_t number;               /* DCP: of each rank's first file; the others count on from it */
	uint64_t block_bytes;          /* small items share blocks up to this size */
	uint64_t span_bytes;           /* small items of one block lie no farther apart where they come from; 0: anywhere */
	bool cut;                      /* DCP: files that the next save may share, see file_plan_dcp */
	uint64_t max_file_bytes;       /* 0: the format's own limit */
	struct str file_name;          /* the checkpoint is one file of this name; p NULL: a directory of files that the format names */
	const struct file_plan_given *given;   /* NULL: the format chooses */
	const struct gguf_head *gguf;  /* metadata of a GGUF file */
	const struct delta_head *delta;        /* of a delta; else NULL */
	const struct str (*meta)[2];   /* pairs for the files' headers, if the format has such */
	uint64_t meta_count;
};

void file_plan_free(struct file_plan *p);

/* `__{rank}_{i}.distcp`, a torch.save archive per item. Every rank has at least one file. A rank's items are dealt to its files largest
 * first, each to the file with the least bytes so far. Cut: a file for the values, one for each large tensor, and small tensors together in
 * their order, so that files of two steps are equal where their tensors are; a rank has at most FILE_PLAN_CUT_MAX then. */
FALLIBLE enum err file_plan_dcp(const struct file_plan_target *t, struct file_plan *out);
/* Whole tensors back to back in `model-{i}-of-{n}.safetensors`, each of at most max_file_bytes of payload (a larger tensor has a file of
 * its own), or all of them in t->file_name. The format allows no holes: tensors go by element size, largest first, so that every payload
 * begins at a multiple of its element. */
FALLIBLE enum err file_plan_hf(const struct file_plan_target *t, struct file_plan *out);

/* Whole tensors in t->file_name, a zip of FQN.npy as numpy.savez makes it, each payload at a multiple of 64. */
FALLIBLE enum err file_plan_npz(const struct file_plan_target *t, struct file_plan *out);

/* Whole tensors in t->file_name, as GGUF: t->gguf has the metadata. */
FALLIBLE enum err file_plan_gguf(const struct file_plan_target *t, struct file_plan *out);

/* Whole tensors and values in t->file_name, as torch.save writes the nested state dict that their paths describe. Values are
 * SD_VALUE_INLINE. ERR_NAME_INVALID: paths that contradict each other. */
FALLIBLE enum err file_plan_torch(const struct file_plan_target *t, struct file_plan *out);

/* model.safetensors.index.json of what was written: sd's locs say where. With opts->delta it is a delta's. */
FALLIBLE enum err hf_index_write(const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink, void *user);

static inline uint64_t file_plan_page_up(uint64_t n)
{
	return (n + FILE_PLAN_PAGE - 1) & ~(uint64_t)(FILE_PLAN_PAGE - 1);
}
