/* notes.h: what people say of a checkpoint, kept beside its bytes: so far a hold, with owner and reason. Nothing of dcpd's removes or
 * replaces a held checkpoint.
 *
 * The notes are a small JSON file in the checkpoint's folder, or beside a checkpoint that is one file: they are copied and moved with it,
 * every daemon on the storage sees them, and a lost journal loses none. Readers of the formats look up files by name and never see it.
 * A notes file that cannot be read counts as a hold: a mistake in it must not cost the checkpoint.
 *
 *     {"version":1,"hold":{"owner":1000,"reason":"the paper's weights","since":"2026-11-22T23:00:00.000Z"}} */
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
