/* coding.h: answers compressed on their way (Content-Encoding). */
#pragma once
#include "base/buf.h"

enum coding { CODING_NONE, CODING_GZIP, CODING_ZSTD, CODING_COUNT };
extern const char *const coding_names[CODING_COUNT];      /* of Content-Encoding; NULL for none */

/* The coding of an answer for this Accept-Encoding; NULL: none. */
enum coding coding_choose(const char *list);
/* Appends the coded bytes. small: as few as can be, for what is kept; else quickly, for what is sent once. */
FALLIBLE enum err coding_apply(enum coding coding, bool small, struct str bytes, struct buf *out);
