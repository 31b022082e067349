/* content_sums.h: the content digest of a checkpoint (io/content.h), put together of what the tasks of a run have summed up. */
#pragma once
#include "runner/build.h"
#include "runner/sources.h"

/* Of a finished run's target. hex: the digest's 32 digits; "" if some tensor's content was not summed up. */
FALLIBLE enum err content_of_target(const struct run *run, const struct build_target *t, char hex[33]);

/* Items that a client has planned: its metadata, not the list of items, tell which box of which tensor each one is. */
struct content_items {
	const struct sdict *sd;        /* of the metadata; NULL: not known */
	uint32_t *dsts;                /* per chunk of sd; UINT32_MAX: none whose elements are written here; mem_free */
	const char *unknown;           /* why sd is NULL */
};
/* Finds the dst of each chunk of items->sd by its place, before the run is shared, and has its content summed up. t: built. */
FALLIBLE enum err content_want_items(struct run_build *b, const struct build_target *t, struct content_items *items);
/* As content_of_target. */
FALLIBLE enum err content_of_items(const struct run *run, const struct content_items *items, char hex[33]);

/* Verify: the tensors' content is to be summed up from their sources, the chunks of sd from `first` on, where those are read item by
 * item. */
FALLIBLE enum err content_want(struct run_build *b, const struct sdict *sd, uint32_t first);
/* Sums up what a scan has read, if that is wanted, and if the item has its elements in C order. info: NULL: a raw source. */
void content_note_scan(struct run *run, struct run_scan *scan, const struct src_info *info, const unsigned char *bytes);
/* Of a finished run; as content_of_target. */
FALLIBLE enum err content_of_sources(const struct run *run, const struct sdict *sd, uint32_t first, char hex[33]);
