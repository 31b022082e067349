/* show.h: how dcpctl prints things: aligned tables, sizes, and errors on one line. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "base/err.h"

void show_error(void);                           /* this thread's latest error, on stderr */
void show_problem(const json_t *problem);        /* one in a job record, with its first damages, on stderr */
void show_warning(const char *text);             /* on stderr */
void show_json(const json_t *doc);               /* on stdout, indented */
void show_verdict(struct buf *b, const json_t *verified);       /* "damaged digest 2026-11-21T09:36:08.120Z" */
void show_put_clean(struct buf *b, const char *text);     /* control characters become '?' */
const char *show_bytes(double bytes, char out[32]);     /* "1.2 GiB" */
const char *show_seconds(double s, char out[32]);       /* "1:02:03", "4.2s" */
/* columns: "TITLE=key" or "TITLE=key:FORM" with FORM bytes, dims, count, verdict or ref ("main:a", "shm:x"); keys may be paths,
 * "progress.rate", and one that is absent may have another behind "|". Ends with NULL. */
void show_table(const json_t *items, const char *const *columns);
const json_t *show_at(const json_t *doc, const char *path); /* "progress.bytes_done"; NULL: absent */
const char *show_text(const json_t *doc, const char *path); /* "" if absent or no string */
double show_number(const json_t *doc, const char *path);    /* 0 if absent */
