/* errdoc.h: errors inside job records and control messages: the members of a problem (code, detail, rank, fqn, file, offset,
 * expected, actual) as a JSON object. The HTTP form, with type and instance, is api's. */
#pragma once
#include <jansson.h>
#include "base/err.h"

enum { ERRDOC_MORE_MAX = 1 << 20 };

/* The latest error of this thread. NULL when out of memory, also if that was so for a part of it. */
json_t *errdoc_of(enum err e);
/* The same, never NULL: without memory the document made at start, which says so. Only errdoc_* may change what they return: they leave
 * that one alone. */
json_t *errdoc_sure(enum err e);
FALLIBLE enum err errdoc_init(void);
/* Members of a worker's problem beyond those above ("more": its lists of damage and the like): at most ERRDOC_MORE_MAX bytes of
 * JSON, for which lists lose their last entries. A new object; NULL: there is nothing. */
json_t *errdoc_more(const json_t *problem);
/* Adds those to an error's document; what it says already stays as it is. */
void errdoc_add(json_t *doc, const json_t *more);
/* Sets one member of it; takes value. */
void errdoc_set(json_t *doc, const char *key, json_t *value);
/* Adds {"code", "detail"} to the `warnings` of a result. */
void errdoc_warn(json_t *result, const char *code, const char *detail);
/* A copy without lists, for events and lists of jobs. */
json_t *errdoc_brief(const json_t *doc);
/* A worker's problem as this thread's latest error; unknown members are ignored, texts are cut to their limits. */
enum err errdoc_restore(const json_t *problem);
