/* guard.h: what is asked of every request before a handler sees it. */
#pragma once
#include "api/http.h"

/* Headers that must be single, Host (DNS rebinding), Origin (other sites' pages), the caller. Does not read the body. */
FALLIBLE enum err guard_head(struct req *r, const char *version);
/* Content-Type and length against what the route takes. */
FALLIBLE enum err guard_body(struct req *r);
/* 401 unless the caller is known; auth.c. */
FALLIBLE enum err auth_need(const struct req *r);
void auth_peer(struct api *a, int fd, bool is_unix, struct caller *out);
/* "Bearer …" against the token, in constant time. */
bool auth_token_ok(const struct api *a, const char *authorization);
