/* item_walk.h: which items lie in a `.distcp` file whose metadata are lost: torch.save archives, one behind the other, as PyTorch writes
 * them, with zeros between them, as dcpd does.
 *
 * An archive has no length in front. Its end records say how long it is: bytes in the middle of a payload that look like end records do
 * not, for they would have to name their own distance from the item's beginning. */
#pragma once
#include "base/vec.h"
#include "format/source.h"

enum { ITEM_WALK_PIECE = 1 << 20 };

struct item_span {
	uint64_t offset, length;
};
typedef struct vec(struct item_span) item_spans;

/* Appends each item that lies before byte `end` of the file, in order. tick may be NULL: called for each piece that is read, its error ends
 * the walk. ERR_FORMAT_ZIP with the offset of bytes that are no item, or of an item that has no end. */
FALLIBLE enum err item_walk(const struct item_source *file, uint64_t end, enum err (*tick)(void *user), void *user, item_spans *out);
