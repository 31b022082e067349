/* webhook_sign.h: how a delivery proves where it comes from, and when it is tried again. */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum { WEBHOOK_SECRET_MIN = 16, WEBHOOK_SECRET_MAX = 4096, WEBHOOK_SIGNATURE_MAX = 96 };

/* Reads the secret `name` of the folder, $STATE/secrets: a regular file of root's or of dcpd's own user that nobody else may read or write
 * (0600). Trailing white space is cut. `out` gets its bytes, *n_out their number. ERR_VALIDATION_FAILED: it says what is wrong. */
FALLIBLE enum err webhook_sign_secret(const char *folder, const char *name, unsigned char out[WEBHOOK_SECRET_MAX], size_t *n_out);
/* "t=UNIX,v1=HEX": HMAC-SHA256 of "UNIX.BODY". */
void webhook_sign(const unsigned char *secret, size_t secret_bytes, int64_t unix_s, struct str body, char out[WEBHOOK_SIGNATURE_MAX]);
/* How long to wait after so many failed attempts (at least 1): twice as long each time, from 1 s to an hour; `random` takes up to half. */
int64_t webhook_sign_backoff_ms(unsigned attempts, uint32_t random);
