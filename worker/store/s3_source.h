/* s3_source.h: where keys come from: one fetch. */
#pragma once
#include "store/s3_http.h"

struct s3_source;

FALLIBLE enum err s3_source_new(const struct s3_config *config, const char *region, struct s3_http *http, struct s3_source **out);
void s3_source_free(struct s3_source *s);      /* NULL is fine */
/* expires_ms_out: by the wall clock, 0: never. keys->access "": requests are not signed. */
FALLIBLE enum err s3_source_fetch(struct s3_source *s, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out);
