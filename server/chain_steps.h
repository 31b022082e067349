/* chain_steps.h: the steps of a chain: {"verify":{…}}, {"export":{…}}, {"copy":{…}}, {"delete":{…}}, and the requests that they become.
 *
 * A step's object has the fields of its kind of job (worker/spec/fields.def): of the target, of the root and options, side by side. Of the
 * steps that write, "storage" and "name" say where to: in a name, {run}, {name}, {step} and {storage} stand for what the checkpoint's name
 * consists of ({name}: its last component). */
#pragma once
#include "base/jval.h"
#include "spec/kinds.h"

enum { CHAIN_STEPS_MAX = 16 };

/* The step's word: "export". NULL: it has none. */
const char *chain_step_word(const json_t *step);
/* Makes the request of a step about a checkpoint; *kind_out is its kind. The chain's name goes into its labels. ERR_UNSUPPORTED: this build
 * has no such kind; ERR_UNKNOWN_FIELD, ERR_VALIDATION_FAILED name the field by its pointer in the step. */
FALLIBLE enum err chain_step_request(const struct jval *step, const char *chain, const char *storage, const char *name,
				     enum job_kind *kind_out, json_t **out);
/* Checks the list of steps as its requests would be checked, with a checkpoint whose run `match` matches. Pointers are into the list. */
FALLIBLE enum err chain_steps_check(const struct jval *steps, const char *storage, const char *match);
/* Finds the checkpoints that a step may make of those in `storage` whose runs match a glob. *run_out: a glob for their runs (mem_free);
 * NULL: it makes none. */
FALLIBLE enum err chain_step_makes(const json_t *step, const char *storage, const char *match, const char **storage_out, char **run_out);
/* Is there a text that both globs match? Of two that differ late, and are long, the answer is yes. */
bool chain_steps_meet(const char *a, const char *b);
