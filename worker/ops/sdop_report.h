/* sdop_report.h: what a state-dict operation says of itself: notes of the plan, differences, bytes. */
#pragma once
#include "ops/sdop_tables.h"

FALLIBLE enum err sdop_report_plan(struct job *j, const struct sdop_request *rq, const struct sdop_plan *plan);
FALLIBLE enum err sdop_report_run(struct job *j, const struct run *run, const struct sdop_places *places, bool compare);
