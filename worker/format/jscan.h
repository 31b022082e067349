/* jscan.h: a strict JSON scanner that gives one token after the other and builds nothing. Headers of safetensors files may have
 * 100 MB; a tree of them would take ten times that, and a scanner needs a bit per level.
 *
 *     struct jscan js = jscan_of(text, ERR_FORMAT_SAFETENSORS);
 *     TRY(jscan_expect(&js, JSCAN_OBJECT, &tok));
 *     for (;;) {
 *             TRY(jscan_next(&js, &tok));                  JSCAN_KEY or JSCAN_OBJECT_END
 *             …
 *     }
 *     TRY(jscan_expect(&js, JSCAN_END, &tok));             nothing but white space behind the value
 *
 * RFC 8259 and nothing more: UTF-8 is checked, numbers have JSON's form, no comments, no NaN, no lone commas. Duplicate keys are
 * for the caller. \ud800 without its other half is kept, as Python does: in UTF-8's three-byte form ("surrogatepass"). */
#pragma once
#include "base/arena.h"
#include "base/buf.h"

enum { JSCAN_DEPTH_MAX = 64 };

enum jscan_kind {
	JSCAN_END,
	JSCAN_OBJECT, JSCAN_OBJECT_END, JSCAN_ARRAY, JSCAN_ARRAY_END,
	JSCAN_KEY,                       /* the colon is behind us */
	JSCAN_STRING, JSCAN_NUMBER, JSCAN_TRUE, JSCAN_FALSE, JSCAN_NULL,
};

struct jscan_token {
	enum jscan_kind kind;
	struct str raw;                  /* as written; of strings and keys what is between the quotes */
	bool escaped;                    /* raw has backslashes */
	bool integer;                    /* a number without '.', 'e', 'E' */
};

struct jscan {
	struct str text;
	size_t at;
	enum err code;                   /* of what is reported */
	uint64_t is_object;              /* a bit per level */
	uint32_t depth;
	enum { JSCAN_WANT_VALUE, JSCAN_WANT_FIRST, JSCAN_WANT_MORE, JSCAN_WANT_MEMBER } want;
};

struct jscan jscan_of(struct str text, enum err code);
FALLIBLE enum err jscan_next(struct jscan *js, struct jscan_token *out);
FALLIBLE enum err jscan_expect(struct jscan *js, enum jscan_kind kind, struct jscan_token *out);
/* For each element of the array, or key of the object, that was begun: its token in *t. The body goes behind its value. */
#define JSCAN_EACH(js, t)                                                                                  \
	while (({                                                                                          \
		TRY(jscan_next((js), (t)));                                                                \
		(t)->kind != JSCAN_OBJECT_END && (t)->kind != JSCAN_ARRAY_END;                             \
	}))
/* Goes on to the end of the value that begins with `first`; *span_out is its text as written. */
FALLIBLE enum err jscan_skip(struct jscan *js, const struct jscan_token *first, struct str *span_out);
/* The character of an escape of a string's raw text, whose form the scanner has checked; *i is at its backslash, then behind it. */
uint32_t jscan_escape(struct str raw, size_t *i);
/* Reads the text of a string or key. Without escapes *out points into the scanned text, else into the arena. */
FALLIBLE enum err jscan_str(const struct jscan *js, const struct jscan_token *t, struct arena *a, struct str *out);
bool jscan_i64(const struct jscan_token *t, int64_t *out); /* an integer that fits */
bool jscan_double(const struct jscan_token *t, double *out); /* finite; rounded as strtod does */
/* Records an error of js->code at the current place. */
FALLIBLE enum err jscan_bad(const struct jscan *js, const char *what);

/* The writing side: with quotes; lone surrogates become \ud800 again. An error for bytes that are no text at all. */
FALLIBLE enum err jscan_put_str(struct buf *b, struct str s);
/* The shortest form that reads back as the same double, never without '.' or exponent. v must be finite. */
void jscan_put_double(struct buf *b, double v);
