/* transform.h: undoing what a writer did to a stored byte stream: a raw deflate record of a zip archive, or DCP's stream
 * transforms (`stream.zstd/1`, dcp.md 2.6). Pull style: give it what is there, take what comes out, in memory that does not
 * depend on the input.
 *
 *     struct transform *t CLEANUP(transform_free_ptr) = NULL;
 *     TRY(transform_new(STR("stream.zstd/1"), &t));
 *     while (!transform_done(t)) {
 *             if (in.n == 0)
 *                     in = the next piece; if there is none: TRY(transform_end(t))
 *             TRY(transform_feed(t, &in, out, sizeof out, &out_n));     takes from `in`, gives out_n bytes
 *     }
 *
 * A call may give nothing and still want more input; it never does neither. Bytes behind the end of the stream are left in `in`. */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum { TRANSFORM_STAGES_MAX = 4 };

struct transform;

/* Descriptors joined by ' ' in stored order. The names that are known: stream.zstd of major version 1. Several of them are
 * undone one after the other, which is what PyTorch's reader does. ERR_FORMAT_TRANSFORM names one that is not known. */
FALLIBLE enum err transform_new(struct str descriptors, struct transform **out);
FALLIBLE enum err transform_new_deflate(struct transform **out);
void transform_free_ptr(struct transform **t);

FALLIBLE enum err transform_feed(struct transform *t, struct str *in, void *out, size_t out_cap, size_t *out_n);
bool transform_done(const struct transform *t);
/* Call it when the input is at its end: an error unless the stream is too. */
FALLIBLE enum err transform_end(const struct transform *t);
