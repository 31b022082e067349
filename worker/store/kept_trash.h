/* kept_trash.h: the trash of a storage: checkpoints that were deleted and may come back for a time. Each has the words of the one who
 * deleted it:
 *
 *     {"version":1,"name":"run1/step-100","format":"dcp","bytes":N,"uid":1000,"job":ID,"policy":NAME|null,"why":TEXT|null,
 *      "deleted_at":RFC 3339,"until":RFC 3339}
 *
 * Its time is judged by the coordinator, which knows whether the clock can be trusted. A store without a trash refuses by name. */
#pragma once
#include <jansson.h>

#include "base/buf.h"
#include "store/store.h"

enum { KEPT_TRASH_MAX = 100000 };

struct ref;

/* Makes the words about the checkpoint (mem_free) in the name of the job that deletes it; policy and why may be NULL. */
struct kept_trash_words {
	int64_t keep_ms;
	uint64_t bytes;
	const char *policy, *why;
};
FALLIBLE enum err kept_trash_describe(const struct store_job *by, const struct store *store, const char *name,
				      const struct kept_trash_words *words, char **about_out);
/* The bytes of a checkpoint's files. */
FALLIBLE enum err kept_trash_size(const struct store *store, const char *name, uint64_t *out);
/* Appends {"entries":[{"id","name",…}],"checkpoints":N,"bytes":N}, the newest first: of checkpoints deleted under `name`, or, NULL, of all.
 * An entry whose page cannot be read is listed with "problem", and stays. */
FALLIBLE enum err kept_trash_list(const struct store *store, const char *name, struct buf *out);
/* Brings back the newest checkpoint that was deleted under `name`, or the one of that id. id_out holds 65 bytes. ERR_NOT_FOUND,
 * ERR_CHECKPOINT_EXISTS: something has the name; ERR_FORBIDDEN. */
FALLIBLE enum err kept_trash_restore(const struct store_job *by, const struct store *store, const char *name, const char *id,
				     char id_out[65]);
/* Removes for good checkpoints that are beyond their time at `now_ms` (-1: none), one at least, as many as there is time for, and counts
 * the others. Of a store without a trash: 0. */
struct kept_trash_sum {
	uint64_t checkpoints, bytes, removed;
	int64_t next_ms;               /* wall clock at which the next one's time is over; INT64_MAX: there is none */
};
FALLIBLE enum err kept_trash_sweep(const struct store *store, int64_t now_ms, struct kept_trash_sum *out);
