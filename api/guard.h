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
/* Another node sends the request: its caller is whom that node says (CLUSTER_CALLER_HEAD). ERR_INVALID_REQUEST. */
FALLIBLE enum err auth_of_node(struct req *r);
void auth_put_caller(const struct req *r, struct buf *b);       /* appends that line of a request's caller, for another node */
extern const char *const auth_scope_names[];                    /* by enum scope */
FALLIBLE enum err auth_route(const struct req *r);              /* 403 unless the caller's scope is enough for the route */
FALLIBLE enum err auth_scope(const struct req *r, enum scope least);
