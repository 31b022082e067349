/* contents.h: all files of a checkpoint's folder, those in folders of it too: what a copy of the whole folder copies.
 *
 * A reader of one format knows the files of that format by their names; a copy takes every file, because config.json, a tokenizer and
 * whatever else people put beside the data belong to the folder. dcpd's notes (a hold is a statement about one copy), pages beside single
 * files (beside.h), stagings and the page of an earlier copy (copied.h) are left out. Nothing but plain files and folders is copied: a
 * link, a FIFO or a device is refused by name, and none is ever opened. */
#pragma once
#include "base/arena.h"
#include "base/vec.h"
#include "store/store.h"

enum { CONTENTS_FILES_MAX = 1 << 20, CONTENTS_DEPTH_MAX = 16, CONTENTS_PATH_MAX = 1024 };

struct contents_file {
	struct str name;               /* path below the folder; ends with a NUL */
	struct stat st;
};

struct contents {
	struct arena *arena;
	struct vec(struct contents_file) files;        /* by name */
	struct vec(struct str) folders;        /* that have files or folders, each behind the one that it is in; end with a NUL */
	uint64_t bytes;
};

/* file: this one alone, else NULL. ERR_NAME_INVALID names what is no plain file or folder; ERR_LIMIT_EXCEEDED. */
FALLIBLE enum err contents_list(struct store_at folder, const char *file, struct contents *out);
void contents_free(struct contents *c);
/* ERR_CHECKPOINT_REPLACED with the first file that came, went, or was written to between two lists. */
FALLIBLE enum err contents_same(const struct contents *before, const struct contents *after);
