/* state_dict_op_run.h: one worker's part of a run of moves (RUN_MOVE_BOXES, RUN_COMPARE_BOXES) where all segments are on this host: takes
 * tasks until none is left and copies straight from segment to segment, each byte once. */
#pragma once
#include "runner/exec.h"

FALLIBLE enum err state_dict_op_run(const struct exec_spec *spec);
