/* audit.h: who changed what, for those who must answer for it: deletes, aliases, holds, policies, chains, webhooks, storages, device
 * images. A row is in the journal before the caller hears that the change is done; the newest JOURNAL_AUDIT_MAX are kept. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "server/loop.h"

struct server;

enum { AUDIT_SUBJECT_MAX = 4096, AUDIT_REQUEST_MAX = 2048 };

struct audit_entry {
	uid_t uid;
	const char *token;             /* its name; "": none was shown */
	const char *policy;            /* that did it by itself; "": a caller did */
	const char *action;            /* "checkpoint.delete" */
	const char *subject;           /* "main:run1/step-100", "main:run1@best", "night" */
	const char *job;               /* "": none */
	const json_t *request;         /* its body, not kept if it is long; NULL: none */
};

/* fn may be NULL; it hears ERR_STORAGE_FULL or ERR_JOURNAL. Without fn the row is written when there is space again. */
void audit_add(struct server *s, const struct audit_entry *entry, done_fn fn, void *user);
/* Appends {"audit":[…],"next_page_token"}, newest first. before: a page token; n == 0, or "0": from the newest. ERR_INVALID_REQUEST. */
FALLIBLE enum err audit_list(struct server *s, struct str before, uint32_t limit, struct buf *out);
