/* copy.h: copies of large payloads. */
#pragma once
#include "io/digest.h"

/* Copies n bytes and adds them to the digest (s->which 0: none). Bytes are hashed as they are written to `to`, even if a peer changes
 * `from` meanwhile. The copy bypasses the CPU's caches where the CPU can: for targets that nobody reads soon. Either may be in a segment or
 * a file's mapping that shrinks: call it inside seg_guard (os/seg.h). */
void copy_hashed(struct digest_stream *s, void *to, const void *from, size_t n);
