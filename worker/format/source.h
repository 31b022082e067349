/* source.h: where the bytes of one stored item come from. Parsers in format/ make no system calls: they ask for a range,
 * and the caller answers from a file, from shared memory or from what a transform gave back. */
#pragma once
#include "base/err.h"
#include "base/str.h"

struct item_source {
	/* Reads exactly n bytes at `offset` of the item, or fails. */
	enum err (*read)(void *user, uint64_t offset, void *into, size_t n);
	void *user;
	uint64_t length;                 /* of the item */
};

/* The item is in memory; *bytes must stay as long as the source is used. */
struct item_source source_memory(const struct str *bytes);

/* As src->read, but never asks for a range that the item does not have. */
FALLIBLE enum err source_read(const struct item_source *src, uint64_t offset, void *into, size_t n);
