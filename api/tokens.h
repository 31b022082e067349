/* tokens.h: who may ask over TCP, and how much: the token of the state directory, whose holder may all, and those of $STATE/tokens, a
 * line each:
 *
 *     NAME SCOPE SHA256        NAME: [A-Za-z0-9][A-Za-z0-9._-]{0,63}; SCOPE: read, submit, admin; SHA256 of the token, in hex
 *
 * The file has no secret: a token is known by its digest. Each token has a bucket of requests, if the configuration limits them. */
#pragma once
#include "api/http.h"

struct tokens;
struct config;

/* Reads both files; makes the state directory's token if it has none. *out is replaced only if both are right. ERR_CONFIG names the
 * line. */
FALLIBLE enum err tokens_read(const struct config *c, struct tokens **out);
void tokens_free(struct tokens *t);                    /* accepts NULL */
bool tokens_have_own(const struct tokens *t);          /* false: the state directory had no space for a token */
/* Finds the token of "Bearer …", in the same time for any guess of one length; sets what its holder may, and takes a request from its
 * bucket. None of them: *out stays as it is. ERR_TOO_MANY_REQUESTS: its bucket is empty. */
FALLIBLE enum err tokens_find(struct tokens *t, const char *authorization, struct caller *out);
