/* show.h: how dcpctl prints things: lists in the form that --output says, sizes, and errors on one line. */
#pragma once
#include <jansson.h>
#include <stdio.h>
#include "base/buf.h"
#include "base/err.h"

/* --output. TABLE is for people: aligned columns, and sentences around them. */
enum show_form { SHOW_TABLE, SHOW_JSON, SHOW_NDJSON, SHOW_CSV };

/* form: NULL: a table; columns: NULL: those that the command has. */
FALLIBLE enum err show_set(const char *form, const char *columns);
enum show_form show_form(void);
bool show_columns_failed(void);                  /* --columns named what no list has; it was said */

/* Text with what the daemon sent: nothing in it steers the terminal. say: on stdout, for people only (SHOW_TABLE); out: on stdout, in every
 * form; note: on stderr. */
void show_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void show_out(const char *format, ...) __attribute__((format(printf, 1, 2)));
void show_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints one object in a form that is for programs: a line of JSON, or KEY,VALUE lines. False: SHOW_TABLE, it is the caller's to print. */
bool show_whole(const json_t *doc);

void show_error(void);                           /* this thread's latest error, on stderr */
void show_problem(const json_t *problem);        /* one in a job record, with its first damages, on stderr */
void show_warning(const char *text);             /* on stderr */
void show_json(const json_t *doc);               /* on stdout, indented */
void show_line(const json_t *doc);               /* on stdout, one line */
void show_verdict(struct buf *b, const json_t *verified);       /* "damaged digest 2026-11-21T09:36:08.120Z" */
void show_put_clean(struct buf *b, const char *text);     /* see term_clean */
/* Appends a column's cell of an item; raw: as --output csv has it, with numbers as they are. */
void show_put_cell(struct buf *b, const json_t *item, const char *column, bool raw);
const char *show_bytes(double bytes, char out[32]);     /* "1.2 GiB" */
const char *show_seconds(double s, char out[32]);       /* "1:02:03", "4.2s" */
/* columns: "TITLE=key" or "TITLE=key:FORM" with FORM bytes, dims, count, words, verdict or ref ("main:a", "shm:x"); keys may be paths,
 * "progress.rate", and one that is absent may have another behind "|". Ends with NULL. */
void show_table(const json_t *items, const char *const *columns);     /* show_list.c */
/* Prints the first n of them as a table, whatever --output says. */
void show_grid(FILE *out, const json_t *items, size_t n, const char *const *columns);
const json_t *show_at(const json_t *doc, const char *path); /* "progress.bytes_done"; NULL: absent */
const char *show_text(const json_t *doc, const char *path); /* "" if absent or no string */
double show_number(const json_t *doc, const char *path);    /* 0 if absent */
