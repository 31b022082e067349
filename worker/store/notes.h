/* notes.h: what is said of a checkpoint later than it was made, kept beside its bytes: a hold, with owner and reason (nothing of dcpd's
 * removes or replaces a held checkpoint), and what the latest verify of all of it found out.
 *
 * The notes are a small JSON file in the checkpoint's folder, or beside a checkpoint that is one file: they are copied and moved with it,
 * every daemon on the storage sees them, and a lost journal loses none. Readers of the formats look up files by name and never see it.
 * A notes file that cannot be read counts as a hold: a mistake in it must not cost the checkpoint.
 *
 *     {"version":1,"hold":{"owner":1000,"reason":"the paper's weights","since":"2026-11-22T23:00:00.000Z"},
 *      "verified":{"state":"verified","level":"digest","at":…,"job":…,…,"identity":…,"made":JOB}}
 *
 * `verified` is about one content: the identity (identity.h) that the job read. A copied folder has another identity and the same maker's
 * job in its record: there it is told as `unverified`, `copied`, since nobody has read the copy. */
#pragma once
#include <jansson.h>

#include "store/checkpoint.h"

#define NOTES_NAME ".dcpd-notes.json"

enum { NOTES_BYTES_MAX = 1 << 16, HOLD_REASON_MAX = 1000 };

/* Is that the name of a notes file, of one that is being written, or of the notes of a file beside it? */
bool notes_is(const char *name);
/* ERR_CHECKPOINT_HELD if what lies at `name` below the folder, or a folder above it, is held. Nothing there: OK. */
FALLIBLE enum err notes_check_free(struct store_at folder, const char *name);
/* The same, for a removal or a replacement of all: files and folders in the folder `name` count, too. */
FALLIBLE enum err notes_check_removal(struct store_at folder, const char *name);
/* Appends `,"hold":{"owner","reason","since"}` if the checkpoint is held, else nothing; of unreadable notes owner and since are null. */
void notes_put_hold(struct store_at folder, const char *name, bool is_dir, struct buf *out);
/* Holds the checkpoint (hold: an object as above), or lifts its hold (NULL); on OK it survives a power cut. Overwrites and removals are
 * kept out meanwhile; a save beside other files looks last right before it moves the first one. ERR_FORBIDDEN: the checkpoint, or the
 * hold that is there, is another user's. */
FALLIBLE enum err notes_set_hold(const struct store_job *by, const struct store *store, const char *name, json_t *hold);

/* A store without lock() keeps holds out of a removal or a replacement by a word in the notes: the jobs that are at it, whose names only
 * they, or a sweep behind them, take out again. Until then no hold is set; one that was set before is ERR_CHECKPOINT_HELD here. Several may
 * be at it: whose condition holds takes the checkpoint. */
FALLIBLE enum err notes_seal(struct store_at folder, const char *name, bool is_dir, const char *job);
FALLIBLE enum err notes_unseal(struct store_at folder, const char *name, bool is_dir, const char *job);
/* Removes the notes, after their checkpoint, while the job's name is in them. */
FALLIBLE enum err notes_drop(struct store_at folder, const char *name, bool is_dir);

/* A verdict on the checkpoint with this identity, which the job `made` has made. */
struct notes_verdict {
	const char *identity, *made;
	json_t *doc;                   /* `verified` of a record */
};
/* Keeps it with a checkpoint that a job has made; nothing where the checkpoint is another one by now, or its notes cannot be read. */
FALLIBLE enum err notes_set_verified(const struct store *store, const char *name, const struct notes_verdict *v);
/* Appends ,"verified":{…} if the notes of a checkpoint with this identity and this maker know one. at: its open directory (file: NULL), or
 * the folder that the file is in. */
void notes_put_verified(struct store_at at, const char *file, const char *identity, const char *made, struct buf *out);
/* Do they say that it is damaged, or a copy of one that is? */
bool notes_tell_damage(struct store_at dir, const char *identity, const char *made);
