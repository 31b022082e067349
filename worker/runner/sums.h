/* sums.h: sources that are compared while they are copied: the CRC32 of a payload put together of the ranges that are copied, in any order,
 * by any worker, and compared when the last of them is there. No byte is read for the comparison alone, nor taken without it: what is
 * compared are the bytes that are written.
 *
 * The build decides which sources these are (run_src.summed, build_sums.c). Those that are parts of a record add to its CRC32
 * (build_records.c); in loads and statistics, scans add what they read. A CRC32 that is wrong is looked into by the digests of the
 * item's blocks, which name the damaged one. */
#pragma once
#include "runner/sources.h"

/* Adds a box of source `src`, which may be a view: `from` has its elements as info.strides lay them out, the first one first. offsets: in
 * the source's box. Each element comes once. ERR_DIGEST_MISMATCH from the call that completes the payload. */
FALLIBLE enum err sums_add(struct sources *s, uint32_t src, const int64_t *offsets, const int64_t *sizes, const unsigned char *from);
/* Adds bytes of a source in C order, or of a raw one, whose CRC32 is known. */
FALLIBLE enum err sums_add_bytes(struct sources *s, uint32_t src, uint64_t at, uint64_t bytes, uint32_t crc32);
/* ERR_INTERNAL if any source of a finished run was not compared. */
FALLIBLE enum err sums_done(const struct run *run);
