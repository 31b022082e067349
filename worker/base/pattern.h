/* pattern.h: regular expressions of users (PCRE2), with limits on steps, depth and memory, and without JIT: a hostile pattern ends in an
 * error, never in a hang.
 *
 *     struct patterns *p;
 *     TRY(patterns_open(&p));                        one for many patterns: it owns them and the room for what they make
 *     TRY(pattern_add(p, "^module\\.", &i));
 *     TRY(pattern_replace(p, i, fqn, "", &name));    every match is replaced, as s/^module\.//g does */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum { PATTERN_NAME_MAX = 64 << 10 };    /* bytes of what pattern_replace and pattern_expand make */

struct patterns;

FALLIBLE enum err patterns_open(struct patterns **out);
void patterns_free(struct patterns *p);
/* ERR_VALIDATION_FAILED with PCRE2's words and the place in the pattern. */
FALLIBLE enum err pattern_add(struct patterns *p, struct str pattern, uint32_t *index_out);
/* Does the pattern match anywhere in the text? ERR_VALIDATION_FAILED: it exceeds the limits. */
FALLIBLE enum err pattern_match(struct patterns *p, uint32_t index, struct str text, bool *matches_out);
/* *out: the text with each match replaced; $1 and ${name} in the replacement are groups of the match. *out is the text itself where nothing
 * matches, else it lies in `p` until the call after the next. */
FALLIBLE enum err pattern_replace(struct patterns *p, uint32_t index, struct str text, struct str replacement, struct str *out);
/* *out: the replacement alone, with the groups of the first match in it; in `p` until the call after the next. The pattern
 * matches the text. */
FALLIBLE enum err pattern_expand(struct patterns *p, uint32_t index, struct str text, struct str replacement, struct str *out);
