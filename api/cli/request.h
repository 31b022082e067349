/* request.h: from options to the fields of a request. Without the option there is no field: the daemon has the defaults. */
#pragma once
#include "api/cli/args.h"
#include "spec/kinds.h"

FALLIBLE enum err request_set(json_t *o, const char *key, json_t *value_new);
FALLIBLE enum err request_ref(json_t *doc, const char *key, const char *text);
/* Every field whose option is given, by its row of fields.def. doc has the kind's references. */
FALLIBLE enum err request_fields(const struct args *a, enum job_kind kind, json_t *doc);
