/* state_dict_op_report.h: what a state-dict operation says of itself: notes of the plan, differences, bytes. */
#pragma once
#include "ops/state_dict_op_tables.h"

FALLIBLE enum err state_dict_op_report_plan(struct job *j, const struct state_dict_op_request *rq, const struct state_dict_op_plan *plan);
FALLIBLE enum err state_dict_op_report_run(struct job *j, const struct run *run, const struct state_dict_op_places *places, bool compare);
