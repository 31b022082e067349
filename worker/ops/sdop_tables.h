/* sdop_tables.h: a planned state-dict operation as tables that all workers share: places are sources, slots of new segments are
 * targets, moves are cut into pieces of a task's size. */
#pragma once
#include "ops/sdop_images.h"
#include "plan/sdop.h"
#include "runner/build.h"

struct sdop_tables {
	const json_t *dicts[SDOP_SIDES];       /* entries of the job's document; NULL: none */
	const json_t *made;                    /* the SEGMENTS document; NULL: compare */
	uint32_t memories;                     /* libdcp: so many processes and no segments; offsets of places and slots are addresses */
	const struct sdop_places *places;
	struct sdop_images *images;            /* NULL: compare */
	const struct sdop_plan *plan;
};
/* What b lacks of options is the caller's. ERR_COVERAGE_HOLE if moves bring a part of a shard only. */
FALLIBLE enum err sdop_tables_make(const struct sdop_tables *t, struct run_build *b);
