/* term.h: the terminal that dcpctl speaks to: its size, its colours, how wide a text is there, and what must never reach it. */
#pragma once
#include <stdio.h>
#include "base/buf.h"

enum term_colour { TERM_PLAIN, TERM_BOLD, TERM_DIM, TERM_RED, TERM_GREEN, TERM_YELLOW, TERM_CYAN };

void term_start(void);                      /* reads locale and environment: once, before all others */
bool term_is(FILE *f);
bool term_utf8(void);                       /* may boxes be drawn? */
unsigned term_columns(FILE *f);             /* 80 if f is no terminal */
unsigned term_rows(FILE *f);                /* 24 */
void term_stands_for_stdout(FILE *f);       /* a memory stream that is to look as stdout would; NULL: none */
/* The escape sequence, or "" where colours are not wanted: no terminal, NO_COLOR is set, or TERM is dumb. */
const char *term_colour(FILE *f, enum term_colour c);
size_t term_width(const char *p, size_t n);                     /* columns that a clean text takes */
size_t term_cut(const char *p, size_t n, size_t columns);       /* bytes of it that fit into so many */
/* Appends a text of others with '?' for each control character (C0, DEL, C1), change of the writing direction, and byte that is no UTF-8.
 * Newlines stay if lines is true. */
void term_clean(struct buf *out, const char *text, size_t n, bool lines);
