/* jtext.h: between JSON documents and text, when memory may run out.
 *
 * jansson (2.14) ignores a failed allocation in two places. Its writer leaves the name of a member out, and returns text that is no
 * JSON; and it writes all numbers with 17 digits (0.89800000000000002), or all with fewer than some need. Its reader goes on with a token
 * of which a part is missing, looks for the quote that ends it, and writes beyond its buffer. So records, messages and requests are written
 * and read here; make tidy keeps jansson's own calls out. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

void jtext_init(void);                 /* gives jansson its allocator; before the first document */
/* Values: a text, "?" if it is not UTF-8; a list of numbers. NULL: no memory. */
json_t *jtext_value(struct str s);
json_t *jtext_numbers(const int64_t *v, uint32_t n);
char *jtext_of(const json_t *doc);     /* compact, any value; for mem_free; NULL: no document, or no memory */
/* Appends the same text. All JSON that is written of documents is written here: a number has as few digits as read back the same. */
void jtext_put(struct buf *b, const json_t *doc);
/* For those who have jansson write (dcpctl, with line breaks): as many digits as one of the document's numbers needs. */
size_t jtext_real_flags(const json_t *doc);
/* A finite number as JSON has it: 15 digits, or as many more as read back the same, never without '.' or exponent. */
void jtext_put_double(struct buf *b, double v);
/* flags: jansson's JSON_REJECT_DUPLICATES and the like. ERR_INVALID_JSON with line and column, or ERR_NO_MEMORY: *out is NULL. */
FALLIBLE enum err jtext_parse(struct str text, size_t flags, json_t **out);
