/* verdict.h: whether a checkpoint's bytes are known to be whole or damaged, remembered from one job to the next and over restarts.
 *
 * A verdict is about one content of a checkpoint: the identity (worker/store/identity.h) that the job told which had read it. Look-ups
 * tell the identity of what lies there now as `etag`; where the two differ the verdict is void. The coordinator compares texts and looks
 * at no file. In a record:
 *
 *     "verified": {"state":"verified"|"damaged"|"unverified", "level":"digest", "at":RFC 3339, "job":ID,
 *                  "unverifiable":n?, "unverified_bytes":n?, "content_digest":hex?, "damage_count":n? of a damaged one} | null
 *
 * verified: a verify with level digest or values succeeded over all of it. unverified: it succeeded, but there was nothing to compare
 * with, or the level was structure. damaged: a verify, or another job that read it, failed because of what is stored. */
#pragma once
#include <jansson.h>
#include "server/journal.h"

struct journal;

struct job;

/* Does an error of a job that read a checkpoint tell that what is stored may be damaged? */
bool verdict_is_damage(enum err e);

/* With the job's end, in the same transaction: notes what the job found out of the checkpoint that it read, by that one's own name, and
 * forgets what its target was if it changed that. Returns the verdict's state, NULL: there is no new one. */
const char *verdict_note(struct journal_txn *t, const struct job *j);
/* The name of the checkpoint that a job has read. */
const char *verdict_name_read(const struct job *j);
/* Sets `verified` of the record of a checkpoint that a look-up told, whose notes (worker/store/notes.h) may tell one too: the later one
 * counts. Sets the content digest that a verify made, if the record has none. */
void verdict_put(struct journal *known, const char *storage, json_t *record);
/* The `verified` of a checkpoint with this identity, NULL: none. The caller frees it. */
json_t *verdict_find(struct journal *known, struct str storage, struct str name, const char *identity);
enum { VERDICT_DETAIL_MAX = 256 };
#define VERDICT_WARNING "checkpoint_damaged_known"
/* Is this content known to be damaged? detail: what to tell who reads it. */
bool verdict_warns(struct journal *known, struct str storage, struct str name, const char *identity, char detail[VERDICT_DETAIL_MAX]);
/* A job that has read a checkpoint known to be damaged: the warning goes into its result. */
void verdict_warn(struct job *j);
