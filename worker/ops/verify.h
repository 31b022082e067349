/* verify.h: the look of verify for other operations. */
#pragma once
#include "runner/input.h"

/* Compares all of a source that was opened with `verifies`, and takes it over. What is damaged is noted in the job's `checked`, and is no
 * error. */
FALLIBLE enum err verify_input(struct job *j, struct input *source);
