/* principal.h: who asks, and whether that one has asked before. */
#pragma once
#include <stdbool.h>
#include <sys/types.h>
#include "base/str.h"

/* The caller, as the socket or the token has proved it. Root, the daemon's own uid and the token's holder are `admin`. */
struct principal {
	uid_t uid;
	bool admin;
	pid_t pid;                      /* the process; 0: it is not known, or cannot be seen from here */
};

/* The key of a POST that creates, and the bytes that must be the same when it comes again. key.n == 0: none was sent. */
struct idempotency {
	struct str key, body;
};

/* The owner of a job, a state dict or a chain, for what is asked for in that owner's name. */
struct principal principal_of(uid_t uid);
bool principal_may(const struct principal *p, uid_t owner);
