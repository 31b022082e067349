/* retention_record.h: a checkpoint's record as JSON (GET /v1/checkpoints/…) read for retention. */
#pragma once
#include "base/arena.h"
#include "spec/retention.h"

/* Texts are copied into the arena; metrics stay the record's. A record without a name, or one that cannot be made out, is
 * ERR_VALIDATION_FAILED. Aliases, jobs and removals that failed are not in it: their facts are the caller's to set. */
FALLIBLE enum err retention_record_read(const json_t *record, struct str storage, struct arena *a, struct retention_record *out,
					struct str *etag_out);
/* Whether others still have what a checkpoint shares. Bytes that are shared with one that is gone are its own: they count in `bytes` now.
 * Of all records of their storages; keys lie in the arena. */
FALLIBLE enum err retention_records_share(struct retention_record *all, uint64_t n, struct arena *a);
