/* args.h: dcpctl's command line: options by table, and the little languages of SURFACES (references, layout rules, renames). */
#pragma once
#include <jansson.h>
#include "base/err.h"
#include "base/str.h"

enum { ARGS_MAX = 256 };

struct args {
	const char *words[ARGS_MAX];       /* what is no option */
	unsigned word_count;
	struct {
		const char *name, *value;  /* "--layout"; value NULL for a flag */
	} options[ARGS_MAX];
	unsigned option_count;
};

/* `allowed`: the command's options, space-separated, "name" for a flag and "name=" for one with a value. The global ones are always
 * allowed. ERR_INVALID_REQUEST says what is wrong. */
extern const char args_global[];
FALLIBLE enum err args_parse(int argc, char *const *argv, const char *allowed, struct args *out);
const char *args_value(const struct args *a, const char *name);     /* the last one; NULL: not given */
bool args_flag(const struct args *a, const char *name);
/* The next value of a repeated option; *at begins at 0. */
const char *args_next(const struct args *a, const char *name, unsigned *at);

/* Reads the JSON file that an option names; the error says option and line. */
FALLIBLE enum err args_file(const char *option, const char *path, json_t **out);
/* "main:run1/a" → {"storage","name"}; "shm:x" → {"state_dict"}. Both return a new object. */
FALLIBLE enum err args_ref(const char *text, json_t **out);
bool args_is_shm(const char *text);
/* 'PATTERN=PLACEMENTS@MESH[:ranks]', or a rule as JSON. */
FALLIBLE enum err args_layout(const char *text, json_t **rule_out);
/* 's/^module\.//' with any delimiter → [pattern, replacement]; \1 becomes PCRE2's $1. */
FALLIBLE enum err args_rename(const char *text, json_t **pair_out);
/* 'GLOB=bfloat16' → [glob, dtype]. */
FALLIBLE enum err args_pair(const char *text, json_t **pair_out);
/* "90", "90s", "500ms", "5m", "2h". */
FALLIBLE enum err args_duration(const char *text, int64_t *ms_out);
