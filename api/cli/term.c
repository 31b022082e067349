/* term.c: see term.h. Widths are those of wcwidth() in a UTF-8 locale: names are UTF-8 whatever the user's locale is. */
#include "api/cli/term.h"

#include <langinfo.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

static bool utf8, colours;
static FILE *stands_for_stdout;

void term_start(void)
{
	const char *none = getenv("NO_COLOR"), *term = getenv("TERM");

	utf8 = setlocale(LC_CTYPE, "") && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
	if (!utf8)
		(void)setlocale(LC_CTYPE, "C.UTF-8");
	colours = !(none && none[0]) && term && term[0] && strcmp(term, "dumb") != 0;
}

void term_stands_for_stdout(FILE *f)
{
	stands_for_stdout = f;
}

static int fd_of(FILE *f)
{
	return f == stands_for_stdout ? STDOUT_FILENO : fileno(f);
}

bool term_is(FILE *f)
{
	return isatty(fd_of(f));
}

bool term_utf8(void)
{
	return utf8;
}

unsigned term_columns(FILE *f)
{
	struct winsize w;

	return ioctl(fd_of(f), TIOCGWINSZ, &w) == 0 && w.ws_col > 20 ? w.ws_col : 80;
}

unsigned term_rows(FILE *f)
{
	struct winsize w;

	return ioctl(fd_of(f), TIOCGWINSZ, &w) == 0 && w.ws_row > 3 ? w.ws_row : 24;
}

const char *term_colour(FILE *f, enum term_colour c)
{
	static const char *const codes[] = { "\033[0m", "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[36m" };

	return colours && term_is(f) ? codes[c] : "";
}

/* The next character of a text: its bytes; *width_out is what wcwidth says of it, -1 for a control character or no character. */
static size_t next(const char *p, size_t n, int *width_out, wchar_t *out)
{
	mbstate_t state = { 0 };
	size_t bytes = mbrtowc(out, p, n, &state);

	if (bytes == 0 || bytes > n) { /* NUL, no character, or a part of one */
		*width_out = -1;
		return 1;
	}
	*width_out = wcwidth(*out);
	return bytes;
}

size_t term_width(const char *p, size_t n)
{
	size_t columns = 0;
	wchar_t c;
	int w;

	for (size_t i = 0; i < n;) {
		i += next(p + i, n - i, &w, &c);
		columns += w > 0 ? (size_t)w : 0;
	}
	return columns;
}

size_t term_cut(const char *p, size_t n, size_t columns)
{
	size_t i = 0, used = 0;
	wchar_t c;
	int w;

	while (i < n) {
		size_t bytes = next(p + i, n - i, &w, &c);
		used += w > 0 ? (size_t)w : 0;
		if (used > columns)
			break;
		i += bytes;
	}
	return i;
}

/* Marks that change the direction of what follows: a name with one shows as another. */
static bool turns(wchar_t c)
{
	return c == 0x061c || c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

void term_clean(struct buf *out, const char *text, size_t n, bool lines)
{
	for (size_t i = 0; i < n;) {
		wchar_t c = 0;
		int w;
		size_t bytes = next(text + i, n - i, &w, &c);
		bool keeps = lines && (text[i] == '\n' || text[i] == '\t');
		bool bad = w < 0 || turns(c) || c == 0x2028 || c == 0x2029;
		if (bad && !keeps)
			buf_putc(out, '?');
		else
			buf_put(out, text + i, bytes);
		i += bytes;
	}
}
