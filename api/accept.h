/* accept.h: what a client takes (RFC 9110, 12.5), and what it has (13.1.2). */
#pragma once
#include <stdbool.h>

enum { ACCEPT_CERTAIN = 1000 };

/* How much a name is wanted by a list such as "application/x-npy, text/event-stream;q=0.5, *;q=0": 0 (refused, or not in the list) to
 * ACCEPT_CERTAIN. The entry that says most about the name counts: the name itself, then "type/…", then any. list NULL: the header is
 * absent, everything is taken. */
int accept_quality(const char *list, const char *name);
/* If-None-Match, a list of tags or "*"; NULL: absent. A weak tag is as good as a strong one for a GET. */
bool accept_has(const char *tags, const char *etag);
