/* part_read.h: reads one box of one tensor, or one value, of an opened checkpoint into memory: what slices over HTTP and libdcp share.
 *
 * Bytes are compared as a load compares them: by whole digest blocks, or wholly where an item has one digest or CRC32 only. The checkpoint
 * is not changed: threads may read parts of one checkpoint at a time, each with a worker of its own, whose I/O engine serves one call at
 * a time and which is a look-up worker: nobody is told of progress. */
#pragma once
#include "runner/input.h"

struct part_box {
	const struct checkpoint *checkpoint;
	const struct sd_tensor *tensor;/* of the checkpoint's sd */
	const int64_t *dims;           /* ndim offsets, then sizes, inside the tensor */
	bool verify;                   /* false: nothing is compared, and all is counted as unverified */
	int fd;                        /* a memfd that has room for the box at byte `at`; or -1: the box goes to `memory` */
	uint64_t at;
	void *memory;
};

/* Writes the box's elements in C order. Adds what was compared and what could not be to `checked`. An error leaves the target with some of
 * the bytes. ERR_DIGEST_MISMATCH, ERR_COVERAGE_HOLE, ERR_FORMAT_…, ERR_STORAGE_…: with file, offset, rank and FQN where known. */
FALLIBLE enum err part_read_box(struct worker *w, const struct part_box *box, struct checked *checked);
/* The value, compared; out: item_value_free. */
FALLIBLE enum err part_read_value(struct worker *w, const struct checkpoint *c, const struct sd_value *v, struct checked *checked,
				  struct item_value *out);
