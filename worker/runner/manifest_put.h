/* manifest_put.h: the manifest of a finished run. store/manifest.h describes its contents. */
#pragma once
#include "runner/run.h"
#include "store/manifest.h"
#include "store/staging.h"

/* The facts of a save besides the run's results. */
struct manifest_head {
	const char *job, *kind, *created_at, *metadata_name;
	const char *save_id;                   /* the one in the metadata, or "" */
	struct strs hosts;                     /* ids of saves by several hosts; n 0: it is of one */
	uint64_t attempt, generation, world_size, metadata_bytes;
	uint32_t uid;                          /* the checkpoint's owner (owner.h) */
	bool has_generation, unsynced;
	const json_t *record;                  /* store/record.h; NULL: none */
	unsigned char metadata_xxh3[16];
};
/* The manifest of a finished run's target files, as they were staged (NULL: their times are not recorded). */
FALLIBLE enum err manifest_put(struct buf *b, const struct manifest_head *head, const struct run *run, const struct staging *st);
