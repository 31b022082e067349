/* show_list.c: lists, in the form of --output and with the columns of --columns. On a terminal a table fits its width: wide columns are
 * cut, since lines that wrap are hard to read; elsewhere nothing is cut. */
#include <ctype.h>
#include <string.h>
#include <strings.h>

#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/jval.h"
#include "base/near.h"
#include "base/str.h"

enum { COLUMNS_MAX = 24, CELL_MAX = 1 << 16, NARROWEST = 24, SPEC_MAX = 160 };

static struct {
	enum show_form form;
	const char *columns;        /* NULL: the command's */
	bool failed;
} wish;

FALLIBLE enum err show_set(const char *form, const char *columns)
{
	static const char *const forms[] = { "table", "json", "ndjson", "csv", NULL };
	char hint[NEAR_HINT_MAX];
	int f = 0;

	while (form && forms[f] && strcmp(forms[f], form) != 0)
		f++;
	if (!forms[f])
		return ERR(INVALID_REQUEST, "--output is table, json, ndjson or csv, not \"%.50s\"%s", form,
			   near_hint(str_of(form), forms, hint));
	if (columns && f == SHOW_JSON)
		return ERR(INVALID_REQUEST, "--columns is for tables, csv and ndjson: with json comes the API's whole object");
	wish.form = (enum show_form)f;
	wish.columns = columns;
	return OK;
}

enum show_form show_form(void)
{
	return wish.form;
}

bool show_columns_failed(void)
{
	return wish.failed;
}

/* ---- columns: "TITLE=key|key:FORM", see show.h ---- */

static bool is_right(const char *column)
{
	const char *form = strrchr(column, ':');

	return form && strcmp(form, ":dims") != 0 && strcmp(form, ":ref") != 0 && strcmp(form, ":verdict") != 0 &&
	       strcmp(form, ":words") != 0;
}

static bool is_named(const char *column, const char *wanted, size_t n)
{
	size_t title = strcspn(column, "=");
	const char *key = column + title + 1;

	return (title == n && strncasecmp(column, wanted, n) == 0) || (strcspn(key, "|:") == n && memcmp(key, wanted, n) == 0);
}

static bool any_has(const json_t *items, const char *path)
{
	const json_t *item;
	size_t i;

	json_array_foreach(items, i, item)
		if (show_at(item, path))
			return true;
	return json_array_size(items) == 0;
}

/* Finds a word of --columns: a column of the command's, else a member that some item has. NULL: neither; that is said. */
static const char *find_column(const json_t *items, const char *const *columns, const char *wanted, size_t n, char spec[SPEC_MAX])
{
	struct near near = near_begin((struct str){ wanted, n });
	char hint[NEAR_HINT_MAX];

	for (size_t c = 0; columns[c]; c++) {
		if (is_named(columns[c], wanted, n))
			return columns[c];
		char title[NEAR_WORD_MAX];
		size_t t = 0;
		for (; t < sizeof title && columns[c][t] != '='; t++)
			title[t] = (char)tolower((unsigned char)columns[c][t]);
		near_try(&near, (struct str){ title, t });
	}
	if (n > 0 && n < SPEC_MAX / 2 && !memchr(wanted, '=', n) && !memchr(wanted, ':', n)) {
		snprintf(spec, SPEC_MAX, "%.*s", (int)n, wanted);
		bool there = any_has(items, spec);
		snprintf(spec, SPEC_MAX, "%.*s=%.*s", (int)n, wanted, (int)n, wanted);
		if (there)
			return spec;
	}
	show_note("dcpctl: --columns: nothing here has \"%.*s\"%s; there are", (int)n, wanted, near_text(&near, hint));
	for (size_t c = 0; columns[c]; c++)
		show_note(" %.*s,", (int)strcspn(columns[c], "="), columns[c]);
	show_note(" and the members of the JSON object\n");
	wish.failed = true;
	return NULL;
}

/* Fills out[COLUMNS_MAX + 1]. False: --columns cannot be followed. */
static bool choose(const json_t *items, const char *const *columns, const char **out, char specs[][SPEC_MAX])
{
	size_t n = 0;

	for (const char *p = wish.columns; p;) {
		size_t len = strcspn(p, ",");
		if (n == COLUMNS_MAX || !(out[n] = find_column(items, columns, p, len, specs[n])))
			return false;
		n++;
		p = p[len] ? p + len + 1 : NULL;
	}
	while (!wish.columns && n < COLUMNS_MAX && columns[n]) {
		out[n] = columns[n];
		n++;
	}
	out[n] = NULL;
	return true;
}

/* ---- tables ---- */

/* Words that states are told by: good news and bad news differ at a glance. */
static enum term_colour colour_of(const char *cell, size_t n)
{
	static const struct {
		const char *word;
		enum term_colour colour;
	} words[] = {
		{ "succeeded", TERM_GREEN }, { "ok", TERM_GREEN }, { "verified", TERM_GREEN },
		{ "failed", TERM_RED }, { "damaged", TERM_RED }, { "stalled", TERM_RED },
		{ "gone", TERM_RED }, { "cancelled", TERM_YELLOW }, { "queued", TERM_YELLOW }, { "planning", TERM_CYAN },
		{ "running", TERM_CYAN }, { "committing", TERM_CYAN }, { "busy", TERM_CYAN }, { "idle", TERM_DIM },
	};
	size_t first = 0;

	while (first < n && cell[first] != ' ')
		first++;
	for (size_t i = 0; i < sizeof words / sizeof *words; i++)
		if (strlen(words[i].word) == first && memcmp(words[i].word, cell, first) == 0)
			return words[i].colour;
	return TERM_PLAIN;
}

static void put_column(struct buf *cell, const json_t *item, const char *column)
{
	if (item)
		show_put_cell(cell, item, column, false);
	else
		buf_put(cell, column, strcspn(column, "="));
}

static void measure(const json_t *item, const char *const *columns, size_t *widths)
{
	for (size_t c = 0; columns[c]; c++) {
		CLEANUP(buf_free) struct buf cell = BUF_INIT(CELL_MAX);
		put_column(&cell, item, columns[c]);
		size_t w = buf_status(&cell) == OK ? term_width((char *)cell.p, cell.len) : 0;
		widths[c] = w > widths[c] ? w : widths[c];
	}
}

/* Narrows the widest of the columns that line up on the left, but for the first, which names the item; then leaves out the last columns. */
static size_t fit(const char *const *columns, size_t n, size_t *widths, size_t most)
{
	for (;;) {
		size_t all = 0, widest = 0;
		for (size_t c = 0; c < n; c++) {
			all += widths[c] + (c ? 2 : 0);
			if (c && !is_right(columns[c]) && widths[c] > NARROWEST && (!widest || widths[c] > widths[widest]))
				widest = c;
		}
		if (all <= most || n < 2)
			return n;
		if (widest)
			widths[widest]--;
		else
			n--;
	}
}

static void print_cell(FILE *out, const struct buf *cell, size_t width, bool right, bool last, enum term_colour colour)
{
	const char *on = colour == TERM_PLAIN ? "" : term_colour(out, colour), *off = on[0] ? term_colour(out, TERM_PLAIN) : "";
	size_t w = term_width((char *)cell->p, cell->len);
	bool cut = w > width;
	size_t n = cut ? term_cut((char *)cell->p, cell->len, width - 1) : cell->len;
	size_t shown = cut ? term_width((char *)cell->p, n) + 1 : w;
	int pad = (int)(width - shown);

	fprintf(out, "%*s%s%.*s%s%s%*s", right ? pad : 0, "", on, (int)n, cell->p ? (char *)cell->p : "",
		!cut ? "" : term_utf8() ? "…" : "~", off, right || last ? 0 : pad, "");
}

static void print_row(FILE *out, const json_t *item, const char *const *columns, size_t n, const size_t *widths)
{
	for (size_t c = 0; c < n; c++) {
		CLEANUP(buf_free) struct buf cell = BUF_INIT(CELL_MAX);
		put_column(&cell, item, columns[c]);
		if (buf_status(&cell) != OK)
			continue;
		fputs(c ? "  " : "", out);
		print_cell(out, &cell, widths[c], is_right(columns[c]), c + 1 == n, item ? colour_of((char *)cell.p, cell.len) : TERM_BOLD);
	}
	fputc('\n', out);
}

void show_grid(FILE *out, const json_t *items, size_t n, const char *const *columns)
{
	size_t widths[COLUMNS_MAX + 1] = { 0 }, count = 0;

	measure(NULL, columns, widths);
	for (size_t i = 0; i < n; i++)
		measure(json_array_get(items, i), columns, widths);
	while (columns[count])
		count++;
	if (term_is(out))
		count = fit(columns, count, widths, term_columns(out));
	print_row(out, NULL, columns, count, widths);
	for (size_t i = 0; i < n; i++)
		print_row(out, json_array_get(items, i), columns, count, widths);
}

/* ---- for programs ---- */

/* RFC 4180. On a terminal there is nothing in it that steers it. */
static void print_csv_cell(const char *p, size_t n)
{
	CLEANUP(buf_free) struct buf clean = BUF_INIT(CELL_MAX);
	bool quoted = false;

	term_clean(&clean, p ? p : "", n, true);
	if (term_is(stdout)) {
		p = (char *)clean.p;
		n = clean.len;
	}
	for (size_t i = 0; i < n; i++)
		quoted = quoted || strchr(",\"\r\n", p[i]) || (i == 0 && p[i] == ' ');
	if (!quoted) {
		fwrite(p ? p : "", 1, n, stdout);
		return;
	}
	putchar('"');
	for (size_t i = 0; i < n; i++) {
		if (p[i] == '"')
			putchar('"');
		putchar(p[i]);
	}
	putchar('"');
}

/* "REL L2" is rel_l2 in a program. */
static void put_title(struct buf *b, const char *column)
{
	for (const char *p = column; *p && *p != '='; p++)
		buf_putc(b, *p == ' ' ? '_' : *p >= 'A' && *p <= 'Z' ? (unsigned char)(*p | 0x20) : (unsigned char)*p);
}

static void print_csv_row(const json_t *item, const char *const *columns)
{
	for (size_t c = 0; columns[c]; c++) {
		CLEANUP(buf_free) struct buf cell = BUF_INIT(CELL_MAX);
		if (item)
			show_put_cell(&cell, item, columns[c], true);
		else
			put_title(&cell, columns[c]);
		fputs(c ? "," : "", stdout);
		if (buf_status(&cell) == OK)
			print_csv_cell((char *)cell.p, cell.len);
	}
	fputs("\r\n", stdout);
}

/* The item, or those of its members that --columns names. */
static void print_ndjson(const json_t *item, const char *const *columns)
{
	json_t *some = json_object();

	for (size_t c = 0; wish.columns && some && columns[c]; c++) {
		const char *key = strchr(columns[c], '=') + 1;
		char path[64];
		const json_t *v = NULL;
		snprintf(path, sizeof path, "%.*s", (int)strcspn(key, "|:"), key);
		v = show_at(item, path);
		(void)json_object_set_new(some, path, v ? json_incref((json_t *)(uintptr_t)v) : json_null());
	}
	show_line(wish.columns ? some : item);
	json_decref(some);
}

void show_table(const json_t *items, const char *const *columns)
{
	static char specs[COLUMNS_MAX + 1][SPEC_MAX];
	const char *chosen[COLUMNS_MAX + 1];
	const json_t *item;
	size_t i;

	if (!choose(items, columns, chosen, specs))
		return;
	if (wish.form == SHOW_TABLE || wish.form == SHOW_JSON) {
		show_grid(stdout, items, json_array_size(items), chosen);
		return;
	}
	if (wish.form == SHOW_CSV)
		print_csv_row(NULL, chosen);
	json_array_foreach(items, i, item) {
		if (wish.form == SHOW_CSV)
			print_csv_row(item, chosen);
		else
			print_ndjson(item, chosen);
	}
}

bool show_whole(const json_t *doc)
{
	const char *key;
	json_t *value;

	if (wish.form == SHOW_TABLE)
		return false;
	if (wish.form != SHOW_CSV) {
		show_line(doc);
		return true;
	}
	fputs("key,value\r\n", stdout);
	json_object_foreach((json_t *)(uintptr_t)doc, key, value) {
		CLEANUP(buf_free) struct buf text = BUF_INIT(CELL_MAX);
		if (json_is_string(value))
			buf_puts(&text, json_string_value(value));
		else if (jval_dump(value, &text))
			continue;
		print_csv_cell(key, strlen(key));
		putchar(',');
		print_csv_cell((char *)text.p, text.len);
		fputs("\r\n", stdout);
	}
	return true;
}
