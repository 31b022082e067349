/* node_store.h: sealed state dicts of another node of the cluster, as a store: a generation is a folder of images (format/image_open.c),
 * with their digests as its manifest, at
 *
 *     CALLER/NAME/GENERATION/dcpd-rank-00000-of-00002.safetensors        CALLER: a uid, with "a" behind it: an administrator
 *
 * Bytes come by ranges over HTTP from the node's `…/ranks/{rank}/image` and `…/digests` (api/h_images.c). All of a folder is of one tag: a
 * generation that was replaced meanwhile is ERR_CHECKPOINT_REPLACED, never a mixture. Nothing is written there. */
#pragma once
#include "store/store.h"

extern const struct store_ops node_ops;
