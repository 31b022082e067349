/* content.h: the content digest of a state dict: equal for equal tensors, whatever the layout, world size and format they are stored in.
 *
 * It is the root of a Merkle tree whose leaves are tensors. A leaf is the XXH3-128 of the tensor's elements in C order, little-endian: the
 * checksum that a delta has of a tensor, too. A node is the XXH3-128 of
 *
 *     u64 bytes of the FQN, FQN, u64 bytes of the dtype's name, name ("bfloat16"), u64 ndim, i64 shape[ndim], leaf
 *
 * (integers little-endian), and the root that of all nodes in the order of their FQNs' bytes. Values have no part in it: formats store
 * them in different ways, and some not at all.
 *
 * That leaf needs the whole tensor in a row, as a delta reads it. Checkpoints' records have a tree of the same form with leaves of 8 bytes:
 * the tensor's CRC-64/XZ (tensor_sum.h), little-endian, which any cut of the tensor can add up. */
#pragma once
#include "io/digest.h"
#include "tensor/sdict.h"

/* leaves: 16 bytes per tensor of sd, in its order. ERR_NO_MEMORY. */
FALLIBLE enum err content_digest(const struct sdict *sd, const unsigned char (*leaves)[16], unsigned char out[16]);
/* The digest of a record; sums: CRC-64/XZ per tensor. */
FALLIBLE enum err content_digest_of_sums(const struct sdict *sd, const uint64_t *sums, unsigned char out[16]);
