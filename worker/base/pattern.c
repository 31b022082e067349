/* pattern.c: see pattern.h. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/pattern.h"
#include "base/vec.h"

enum { MATCH_LIMIT = 100000, DEPTH_LIMIT = 1000, HEAP_LIMIT_KIB = 1024 };

struct patterns {
	struct vec(pcre2_code *) codes;
	pcre2_match_context *limits;
	pcre2_match_data *match;
	char made[2][PATTERN_NAME_MAX]; /* by turns: a text may be what the call before made */
	bool turn;
};

enum err patterns_open(struct patterns **out)
{
	struct patterns *p = mem_zalloc(1, sizeof *p);

	if (p) {
		p->limits = pcre2_match_context_create(NULL);
		p->match = pcre2_match_data_create(1, NULL);
	}
	*out = p;
	NEED(p && p->limits && p->match, "no memory to match names");
	pcre2_set_match_limit(p->limits, MATCH_LIMIT);
	pcre2_set_depth_limit(p->limits, DEPTH_LIMIT);
	pcre2_set_heap_limit(p->limits, HEAP_LIMIT_KIB);
	return OK;
}

void patterns_free(struct patterns *p)
{
	if (!p)
		return;
	for (uint64_t i = 0; i < p->codes.n; i++)
		pcre2_code_free(p->codes.v[i]);
	vec_free(&p->codes);
	pcre2_match_context_free(p->limits);
	pcre2_match_data_free(p->match);
	mem_free(p);
}

static enum err failed(int number, const char *what, struct str text, size_t at)
{
	PCRE2_UCHAR why[128];

	pcre2_get_error_message(number, why, sizeof why);
	return ERR(VALIDATION_FAILED, "%s '%.*s': %s at %zu", what, (int)(text.n < 400 ? text.n : 400), text.p, (char *)why, at);
}

enum err pattern_add(struct patterns *p, struct str pattern, uint32_t *index_out)
{
	PCRE2_SIZE at = 0;
	int number = 0;
	pcre2_code **code;

	TRY(vec_push(&p->codes, &code));
	*index_out = (uint32_t)p->codes.n - 1;
	*code = pcre2_compile((PCRE2_SPTR)pattern.p, pattern.n, PCRE2_NEVER_BACKSLASH_C, &number, &at, NULL);
	return *code ? OK : failed(number, "pattern", pattern, at);
}

enum err pattern_match(struct patterns *p, uint32_t index, struct str text, bool *matches_out)
{
	int rc = pcre2_match(p->codes.v[index], (PCRE2_SPTR)text.p, text.n, 0, 0, p->match, p->limits);

	*matches_out = rc >= 0;
	return rc >= 0 || rc == PCRE2_ERROR_NOMATCH ? OK : failed(rc, "a pattern on the name", text, 0);
}

static FALLIBLE enum err substitute(struct patterns *p, uint32_t index, struct str text, struct str replacement, uint32_t options,
				    struct str *out)
{
	char *made = p->made[p->turn = !p->turn];
	PCRE2_SIZE n = PATTERN_NAME_MAX;
	int rc = pcre2_substitute(p->codes.v[index], (PCRE2_SPTR)text.p, text.n, 0, options, NULL, p->limits, (PCRE2_SPTR)replacement.p,
				  replacement.n, (PCRE2_UCHAR *)made, &n);

	if (rc < 0)
		return failed(rc, "replacement", replacement, n < PATTERN_NAME_MAX ? n : 0);
	*out = rc == 0 ? text : (struct str){ made, n };
	return OK;
}

enum err pattern_replace(struct patterns *p, uint32_t index, struct str text, struct str replacement, struct str *out)
{
	return substitute(p, index, text, replacement, PCRE2_SUBSTITUTE_GLOBAL, out);
}

enum err pattern_expand(struct patterns *p, uint32_t index, struct str text, struct str replacement, struct str *out)
{
	return substitute(p, index, text, replacement, PCRE2_SUBSTITUTE_REPLACEMENT_ONLY, out);
}
