/* host.h: does a request come to us under our own name, and from our own page? */
#pragma once
#include "base/err.h"
#include "base/str.h"

/* "localhost:8427", "127.0.0.1", "[::1]:80", or one of the allowed names, with or without a port. */
bool host_ok(struct str host_and_port, const char *const *allowed, uint32_t allowed_count);
/* A page may call us only from where it was loaded: "scheme://" and the same host and port as in Host. */
bool host_is_origin(const char *origin, const char *host);
