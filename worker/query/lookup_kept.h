/* lookup_kept.h: what look-up workers have found out about a storage's checkpoints, in a file of the daemon's state directory, which
 * outlives them and the daemon. The truth lies beside the checkpoints: a checkpoint is what the file says only if its folder has the very
 * mark that it had; whatever else is in the file is no more than a checkpoint that has to be looked at.
 *
 * One worker at a time appends, an entry for each checkpoint that it has looked at. Each entry has a digest of its own. The file is cut
 * where one is damaged, and written anew once most of it is old. */
#pragma once
#include "query/lookup_tree.h"

struct lookup_kept {
	bool has_file, was_read;
	int fd;                        /* opened with O_APPEND; owned */
	uint64_t bytes, wasted;        /* of the file, of entries that are not those of checkpoints any more */
	struct map known;              /* struct lookup_entry by name: read, and not met yet */
	struct buf news;               /* entries to be appended */
};

void lookup_kept_in(struct lookup_kept *k, int fd);
void lookup_kept_free(struct lookup_kept *k);

/* Reads the file, unless it was. A failure of the file is one that knows less. */
void lookup_kept_read(struct lookup_kept *k);
/* Is there an entry of that name? */
bool lookup_kept_has(const struct lookup_kept *k, const char *name);
/* The entry, which the caller owns from now on; NULL: its folder had another mark. It is there. */
struct lookup_entry *lookup_kept_take(struct lookup_kept *k, const char *name, const struct lookup_mark *mark);
/* All checkpoints were met: the entries that are left are of none. */
void lookup_kept_drop(struct lookup_kept *k);
/* The file is to be read anew. */
void lookup_kept_forget(struct lookup_kept *k);
/* The entry is to be appended; an older one of it is wasted. */
void lookup_kept_put(struct lookup_kept *k, struct lookup_entry *e);
/* The tree's entry goes. */
void lookup_kept_waste(struct lookup_kept *k, const struct lookup_entry *e);
/* Appends what was put, at the end of a question. */
void lookup_kept_flush(struct lookup_kept *k, const struct lookup_tree *t);
