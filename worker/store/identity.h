/* identity.h: a short text that tells one content of a checkpoint from another, made of what stat() says: two equal identities of a
 * name are the same checkpoint, untouched. Nobody need read a byte for it, so that a list of thousands has one for each.
 *
 * The directory's inode number and, of each file of the checkpoint, name, inode number, size and time of writing; of metadata and
 * manifests the time of change too, for these alone say what the rest must be. The device number is left out: it may be another one after
 * the host was started anew, and a verdict on a checkpoint must survive that. Other files in the directory do not count. */
#pragma once
#include <stdint.h>
#include <sys/stat.h>

#include "base/err.h"

enum { IDENTITY_MAX = 64, IDENTITY_VERSION_MAX = 96 };

struct store_at;

struct identity {
	uint64_t top;                  /* inode number of the directory, or of a checkpoint that is one file */
	uint64_t sum[2];               /* of its files' digests: a directory has no order */
};

void identity_begin(struct identity *id, const struct stat *top);
/* A file of the directory; ignored if its name is not one that a checkpoint's files have. */
void identity_add(struct identity *id, const char *name, const struct stat *st);
void identity_text(const struct identity *id, char out[IDENTITY_MAX]);

/* The same, of what lies at `name` of the folder now. ERR_NOT_FOUND. */
FALLIBLE enum err identity_of(struct store_at folder, const char *name, char out[IDENTITY_MAX]);

/* Names the version of a checkpoint with one .metadata: "device:inode:inode of .metadata:its ctime in ns", which a client that opens the
 * directory can make by itself. "" if the time does not fit. */
void identity_version(const struct stat *dir, const struct stat *metadata, char out[IDENTITY_VERSION_MAX]);
