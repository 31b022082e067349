/* load_plan.h: which stored chunks feed which target chunks: PyTorch's create_read_items_for_chunk_list, with the coverage check
 * that PyTorch lacks. */
#pragma once
#include "plan/problems.h"
#include "tensor/sdict.h"

/* For target chunk i, source chunks are sources[first[i]] .. sources[first[i + 1] - 1] (indices into source->chunks); the box to
 * copy is their intersection. Overlapping source chunks (replicas) are dropped where another one already covers the box. */
struct load_plan {
	uint64_t *first;                 /* target->chunk_count + 1 entries */
	uint32_t *sources;
	uint64_t source_count;
};

struct load_match {
	bool strict;                     /* a target key missing in the source is an error */
	bool a_part;                     /* the target is a part of what is wanted: what else the source has is not looked for */
	uint64_t pieces_max;             /* 0: as many as fit anywhere */
	enum err (*tick)(void *user);    /* called now and then if not NULL; its error ends it all */
	void *user;
	struct problems *problems;       /* what does not fit is noted here, and no error; NULL: an error that lists all */
	/* filled in: FQNs only one side has */
	struct str *missing, *unexpected;
	uint64_t missing_count, unexpected_count;
};

/* target: the sdict to fill; its FQNs are looked up in source. Sizes must be equal (ERR_SIZE_MISMATCH, PyTorch's words), a tensor
 * never meets a value (ERR_KIND_MISMATCH). Every element of every target chunk must be covered (ERR_COVERAGE_HOLE). Entries noted in
 * match->problems take no part in the plan. O(n log n). Everything is allocated in `arena`. */
FALLIBLE enum err load_plan_make(const struct sdict *source, const struct sdict *target, struct load_match *match,
				 struct arena *arena, struct load_plan *out);
