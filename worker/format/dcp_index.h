/* dcp_index.h: the end of a `.distcp` file that dcpd writes: which tensors and values the file's items are of.
 *
 * Only `.metadata` says that otherwise, and a copy that leaves hidden files behind (a shell's `*`) has none. With the indexes of all files,
 * `.metadata` can be made again. PyTorch finds items by offset, and never looks at an index.
 *
 *   {"dcpd_index":1,"tensors":T,"chunks":C,"values":V,"paths":true,                 of the whole checkpoint
 *    "t":[[number,"FQN",["path",0,["int key"]],"float32",requires_grad,[shape…],[number,offset,length,offsets…,sizes…,number,…]],…],
 *    "v":[[number,"FQN",["path"],offset,length],…]
 *    ,"bytes":        4096,"crc32":"01234567"}
 *
 * Numbers are places in `.metadata`: of a tensor or value among its kind, of a chunk among all chunks. Lengths of paths, shapes and chunks
 * differ; a text in an array of its own is a dict key that was an int. `bytes` is the length of all of it, a multiple of 4096, which spaces
 * fill; the CRC32 is of everything in front of `,"bytes"`. The index ends the file. */
#pragma once
#include "format/file_plan.h"
#include "format/source.h"

enum { DCP_INDEX_MAX = 1 << 30 };

/* Appends the index of a file with these items of sd, in any order. */
FALLIBLE enum err dcp_index_put(struct buf *b, const struct sdict *sd, const struct file_plan_item *items, uint64_t count);

/* Finds where a file's index begins: its end without one. ERR_CHECKPOINT_DAMAGED: the index is not what was written. *text_out: it,
 * if that is not NULL (mem_free). */
FALLIBLE enum err dcp_index_find(const struct item_source *file, uint64_t *begin_out, char **text_out);

/* The indexes of a checkpoint's files, put together. */
struct dcp_indexes;
FALLIBLE enum err dcp_indexes_new(struct dcp_indexes **out);
void dcp_indexes_free_ptr(struct dcp_indexes **all);
/* An index (dcp_index_find) of the file `name`, n bytes long in all. ERR_FORMAT_METADATA. */
FALLIBLE enum err dcp_indexes_add(struct dcp_indexes *all, struct str name, uint32_t rank, uint64_t n, struct str text);
/* Makes the sdict that `.metadata` described. ERR_CHECKPOINT_INCOMPLETE: so many chunks or values are in none of the files. */
FALLIBLE enum err dcp_indexes_join(struct dcp_indexes *all, struct sdict **out);
