/* spec_own.h: what the files spec*.c share; nobody else includes it. */
#pragma once
#include "spec/spec.h"

/* Takes fallback_new; it becomes the field's value where there is none. */
FALLIBLE enum err spec_put_default(json_t *object, const char *key, json_t *fallback_new);
/* options: those of `keys` are allowed; each has one meaning wherever it is. */
FALLIBLE enum err spec_check_options(const struct jval *doc, const char *const *keys);

/* ---- spec_sdops.c: operations on state dicts ---- */
typedef enum err spec_check_fn(const struct jval *doc, struct spec *s);
spec_check_fn spec_check_create, spec_check_copy, spec_check_offload, spec_check_gather, spec_check_broadcast, spec_check_distribute,
	spec_check_compare, spec_check_redistribute;
