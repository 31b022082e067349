/* near.h: the known word that someone most likely meant by an unknown one, for messages such as `did you mean "digest"?`.
 *
 *     struct near n = near_begin(STR("digset"));
 *     near_try(&n, STR("structure")); near_try(&n, STR("digest"));
 *     near_found(&n)                              "digest"; NULL if no word tried is near enough */
#pragma once
#include "base/str.h"

enum { NEAR_WORD_MAX = 48, NEAR_HINT_MAX = NEAR_WORD_MAX + 24 };

struct near {
	struct str word;
	size_t distance;            /* of best; NEAR_WORD_MAX: none yet */
	char best[NEAR_WORD_MAX];
};

struct near near_begin(struct str word);
void near_try(struct near *n, struct str known);
/* As text to append to a message: ` (did you mean "digest"?)`, or "". */
const char *near_text(const struct near *n, char out[NEAR_HINT_MAX]);
/* All of it, over a list that NULL ends. */
const char *near_hint(struct str word, const char *const *known, char out[NEAR_HINT_MAX]);
