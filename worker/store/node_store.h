/* node_store.h: sealed state dicts of another node of the cluster, as a store: a generation is a folder of images (format/image_open.c),
 * with their digests as its manifest, at
 *
 *     CALLER/NAME/GENERATION/dcpd-rank-00000-of-00002.safetensors        CALLER: a uid, with "a" behind it: an administrator
 *
 * Bytes come by ranges over HTTP from the node's `…/ranks/{rank}/image` and `…/digests` (api/h_images.c). All of a folder is of one tag: a
 * generation that was replaced meanwhile is ERR_CHECKPOINT_REPLACED, never a mixture. Nothing is written there.
 *
 * GENERATION with NODE_STORE_COPY behind it is for readers that have the same bytes, with digests, elsewhere too (runner/memory.h): of its
 * manifest only the digests of headers are there, which cost the node nothing, and a node that is silent fails the call within seconds. */
#pragma once
#include "store/store.h"

#define NODE_STORE_COPY "+copy"

extern const struct store_ops node_ops;
