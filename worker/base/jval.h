/* jval.h: JSON from outside: a bounded parser, and typed readers that name the field they refuse by its JSON pointer.
 *
 * A `struct jval` is a borrowed value and where it stands; it lives on the reader's stack:
 *
 *     struct jval root = JVAL_ROOT(doc), target = jval_get(&root, "target");
 *     TRY(jval_only(&target, (const char *const[]){ "storage", "name", NULL }));
 *     TRY(jval_must_text(&target, "name", &name));                 ERR_VALIDATION_FAILED, pointer /target/name
 *
 * null is a value of the wrong type, as is a number with a fraction where an integer is asked for. */
#pragma once
#include <jansson.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

enum { JVAL_DEPTH_MAX = 32 };

struct jval {
	json_t *j;                  /* NULL: the field is absent */
	const struct jval *up;
	const char *key;            /* in an object */
	size_t index;               /* in an array, when key is NULL */
};

#define JVAL_ROOT(doc) ((struct jval){ (doc), NULL, NULL, 0 })

/* ERR_INVALID_JSON with line and column: syntax, NaN, duplicate keys, more than JVAL_DEPTH_MAX levels, not an object. */
FALLIBLE enum err jval_parse(struct str text, json_t **doc_out);
void jval_drop(json_t **doc);                                 /* for CLEANUP(jval_drop) */
FALLIBLE enum err jval_dump(const json_t *doc, struct buf *out);

struct jval jval_get(const struct jval *object, const char *key);
struct jval jval_at(const struct jval *array, size_t index);
/* Records `code` at the value's pointer. */
enum err jval_fail(const struct jval *v, enum err code, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* Adds the value's pointer to the error that was recorded last. */
enum err jval_failed(const struct jval *v, enum err e);

/* The value is an object and has no other keys than these: ERR_VALIDATION_FAILED, ERR_UNKNOWN_FIELD. */
FALLIBLE enum err jval_only(const struct jval *object, const char *const *keys);
FALLIBLE enum err jval_array(const struct jval *v, size_t max, size_t *count_out);
FALLIBLE enum err jval_string(const struct jval *v, struct str *out);
FALLIBLE enum err jval_integer(const struct jval *v, int64_t min, int64_t max, int64_t *out);
FALLIBLE enum err jval_number(const struct jval *v, double min, double *out);

/* A field of an object. `must_text`: it has to be there. The optional ones leave *out alone when it is absent. */
FALLIBLE enum err jval_must_text(const struct jval *object, const char *key, struct str *out);
FALLIBLE enum err jval_opt_integer(const struct jval *object, const char *key, int64_t min, int64_t max, int64_t *out);
FALLIBLE enum err jval_opt_bool(const struct jval *object, const char *key, bool *out);
/* Sets *out to the index of the text in words, a NULL-terminated list. */
FALLIBLE enum err jval_opt_word(const struct jval *object, const char *key, const char *const *words, size_t *out);
/* A list of strings, each of 1 to bytes_max bytes: the array is in `a`, the bytes stay the document's. Absent: none. */
FALLIBLE enum err jval_opt_texts(const struct jval *object, const char *key, size_t count_max, size_t bytes_max, struct arena *a,
				 struct strs *out);

/* Members of a record of dcpd's own. One that is absent, or of another type, is "" or 0. */
const char *jval_text(const json_t *object, const char *key);
struct str jval_str(const json_t *object, const char *key);
json_int_t jval_int(const json_t *object, const char *key);
