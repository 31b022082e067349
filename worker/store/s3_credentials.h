/* s3_credentials.h: the keys that requests are signed with: from the environment, files, or services that hand out temporary ones. They
 * are fetched when first needed and again before they expire, by one thread at a time; while old ones are valid nobody waits. Keys and
 * tokens are in no error, log or file of ours. */
#pragma once
#include "store/s3_http.h"

struct s3_credentials;

FALLIBLE enum err s3_credentials_new(const struct s3_config *config, const char *region, struct s3_http *http, struct s3_credentials **out);
void s3_credentials_free(struct s3_credentials *c);    /* NULL is fine */
/* keys->access is "" if requests are not to be signed. ERR_FORBIDDEN: there are none, with the reason of each source. */
FALLIBLE enum err s3_credentials_get(struct s3_credentials *c, int64_t deadline_ms, struct s3_keys *out);
/* The server refused these keys: they are fetched anew when next asked for, if that was not done a moment ago. Are there newer ones? */
bool s3_credentials_renew(struct s3_credentials *c, const struct s3_keys *refused);
