/* explain.c: dcpctl explain: what an error's code means and what to do about it: the catalogue (base/err.def), and the table of
 * api/errors.md, which is inside the program so that it needs neither a daemon nor a manual. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/explain.h"
#include "api/cli/show.h"
#include "base/jval.h"
#include "base/near.h"

__asm__(".section .rodata\n"
	"explain_page: .incbin \"api/errors.md\"\n"
	".byte 0\n"
	".previous\n");
extern const char explain_page[];

/* Reads a cell of a row of the page; *p stands behind it afterwards. */
static struct str next_cell(const char **p)
{
	const char *from = *p + strspn(*p, "| "), *end = strchr(from, '|');
	size_t n = end ? (size_t)(end - from) : strcspn(from, "\n");

	*p = from + n;
	while (n > 0 && from[n - 1] == ' ')
		n--;
	return (struct str){ from, n };
}

bool explain_find(const char *code, struct str *what_out, struct str *remedy_out)
{
	char quoted[64];

	if ((size_t)snprintf(quoted, sizeof quoted, "`%s`", code) >= sizeof quoted)
		return false;
	for (const char *line = explain_page; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, "| `", 3) != 0)
			continue;
		const char *p = line;
		struct str codes = next_cell(&p);
		if (!memmem(codes.p, codes.n, quoted, strlen(quoted)))
			continue;
		*what_out = next_cell(&p);
		*remedy_out = next_cell(&p);
		return true;
	}
	return false;
}

static json_t *row_of(enum err e)
{
	struct str what = { "", 0 }, remedy = { "", 0 };

	(void)explain_find(err_code_name(e), &what, &remedy);
	return json_pack("{s:s, s:s, s:i, s:b, s:s%, s:s%}", "code", err_code_name(e), "title", err_title(e), "status", err_http_status(e),
			 "retryable", err_retryable(e), "what", what.p, what.n, "do", remedy.p, remedy.n);
}

static int show_codes(void)
{
	static const char *const columns[] = { "CODE=code", "MEANS=title", "STATUS=status:n", "RETRY=retryable", NULL };
	CLEANUP(jval_drop) json_t *all = json_array();

	for (int e = OK + 1; all && e < ERR_COUNT; e++)
		(void)json_array_append_new(all, row_of((enum err)e));
	if (show_form() == SHOW_JSON)
		show_json(all);
	else
		show_table(all, columns);
	return EXIT_DONE;
}

static int unknown(const char *code)
{
	struct near near = near_begin(str_of(code));
	char hint[NEAR_HINT_MAX];

	for (int e = OK + 1; e < ERR_COUNT; e++)
		near_try(&near, str_of(err_code_name((enum err)e)));
	show_note("dcpctl: there is no code \"%.50s\"%s; dcpctl explain lists them\n", code, near_text(&near, hint));
	return EXIT_NOT_FOUND;
}

int explain_code(const struct command *, struct client *, const struct args *a)
{
	const char *code = a->word_count ? a->words[0] : NULL;
	int e = OK + 1;

	if (!code)
		return show_codes();
	while (e < ERR_COUNT && strcmp(err_code_name((enum err)e), code) != 0)
		e++;
	if (e == ERR_COUNT)
		return unknown(code);
	CLEANUP(jval_drop) json_t *row = row_of((enum err)e);
	if (show_form() == SHOW_JSON)
		show_json(row);
	else if (!show_whole(row))
		show_say("%s: %s (HTTP %d)\n\nwhat happened  %s\nwhat to do     %s\nthe same again %s\n", code, show_text(row, "title"),
			 (int)show_number(row, "status"), show_text(row, "what"), show_text(row, "do"),
			 json_is_true(json_object_get(row, "retryable")) ? "may go well later" : "fails again");
	return EXIT_DONE;
}
