/* s3_fetch.h: temporary keys from services beside the object storage, and the small files and variables that name them. */
#pragma once
#include "store/s3_http.h"

/* A variable of the environment; NULL if it is not set, or empty. */
const char *s3_variable(const char *name);
/* Appends a small file, by the configuration's read_file or from the file system. ERR_NOT_FOUND, ERR_LIMIT_EXCEEDED beyond out's max. */
FALLIBLE enum err s3_read_file(const struct s3_config *config, const char *path, struct buf *out);

/* ERR_NOT_FOUND: its variables are not set, or there is no such service. */
FALLIBLE enum err s3_fetch_web_identity(struct s3_http *http, const struct s3_config *config, const char *region, int64_t deadline_ms,
					struct s3_keys *out, int64_t *expires_ms_out);
FALLIBLE enum err s3_fetch_container(struct s3_http *http, const struct s3_config *config, int64_t deadline_ms, struct s3_keys *out,
				     int64_t *expires_ms_out);
FALLIBLE enum err s3_fetch_instance(struct s3_http *http, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out);
