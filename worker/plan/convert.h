/* convert.h: conversion rules (spec/conversion.h) applied to the structure of checkpoints. The result is a state dict as any other,
 * whose chunks are views of stored chunks (tensor/view.h): layouts cut it and load plans read it as if it were stored so. No tensor byte is
 * looked at. */
#pragma once
#include "spec/conversion.h"
#include "tensor/sdict.h"
#include "tensor/view.h"

/* A checkpoint that rules take tensors from: number 0 is the one that is converted, then those of `from` rules, as they are first named. */
struct convert_source {
	const struct sdict *sd;
	const enum dtype *dtypes;      /* what its tensors are cast to before the first rule; NULL: as stored */
	uint32_t first_chunk;          /* number of its chunk 0 in views */
};

struct converted {
	struct sdict *sd;              /* its values point where the source's do; locs of chunks are not set */
	struct view *views;            /* of each chunk */
	uint32_t *value_from;          /* of each value: its index in source 0 */
	struct arena *arena;           /* has all but sd */
};

/* The number of a `from` rule's source. */
uint32_t convert_source_of(const struct conversion *c, uint32_t rule);

/* sources: one, and one more for each checkpoint that `from` names. The rules run in order. Errors name the rule (JSON pointer) and the
 * FQN: ERR_VALIDATION_FAILED (a rule that matches nothing, a pattern), ERR_SIZE_MISMATCH (a shape that does not fit), ERR_DUPLICATE_KEY,
 * ERR_MISSING_KEY (`from`), ERR_DTYPE_UNSUPPORTED (a cast that does not exist, or one of a quantised weight), ERR_LIMIT_EXCEEDED. */
FALLIBLE enum err convert(const struct conversion *c, const struct convert_source *sources, struct converted *out);
void convert_free(struct converted *c);
