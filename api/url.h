/* url.h: percent-decoding, once, and the components of a path. */
#pragma once
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

/* Decodes in place. ERR_INVALID_REQUEST for a bad escape and for %00. */
FALLIBLE enum err url_decode(char *text, size_t n, size_t *n_out);
/* Appends the text with an escape for every byte that is not a letter, a digit or one of -._~ */
void url_encode(struct buf *b, struct str text);
/* Splits "/a/b%2Fc" at its raw slashes; text is changed. Empty components (but one at the end) are an error. */
FALLIBLE enum err url_split(char *text, struct str *parts, uint32_t max, uint32_t *count_out);
