/* request.h: from options to the fields of a request. Without the option there is no field: the daemon has the defaults. */
#pragma once
#include "api/cli/args.h"

FALLIBLE enum err request_set(json_t *o, const char *key, json_t *value_new);
json_t *request_child(json_t *o, const char *key);      /* an object inside o, made when it is not there */
FALLIBLE enum err request_integer(const struct args *a, const char *option, json_t *o, const char *key);
FALLIBLE enum err request_real(const struct args *a, const char *option, json_t *o);
FALLIBLE enum err request_text(const struct args *a, const char *option, json_t *o, const char *key);
typedef enum err (*request_reader)(const char *text, json_t **out);
enum err request_plain(const char *text, json_t **out);
/* Every value of a repeated option, as an array. */
FALLIBLE enum err request_list(const struct args *a, const char *option, json_t *o, request_reader read);
/* "0,2,3" */
FALLIBLE enum err request_ranks(const struct args *a, const char *option, json_t *o, const char *key);
FALLIBLE enum err request_labels(const struct args *a, json_t *doc);
FALLIBLE enum err request_ref(json_t *doc, const char *key, const char *text);

/* ---- sdops.c ---- */
bool sdops_is(const char *kind);
/* The fields of operations on state dicts: those that the command's row allows can be there. */
FALLIBLE enum err sdops_fields(const struct args *a, json_t *doc);
