/* lookup_cache.h: the checkpoint that a look-up worker was asked about last, kept parsed for the next question.
 *
 * Many questions are of one checkpoint: the pages of its tensors, slice after slice, all ranks asking where their boxes lie. Parsing a
 * million chunks, or the headers of 100,000 tensors, takes as long as hundreds of answers. */
#pragma once
#include "session/job.h"
#include "store/checkpoint.h"

/* Of one file: changes with whatever is done to it. */
struct lookup_mark {
	dev_t dev;
	ino_t ino;
	off_t size;
	struct timespec changed, written;
};

struct lookup_mark lookup_mark_of(const struct stat *st);
bool lookup_mark_same(const struct lookup_mark *a, const struct lookup_mark *b);
bool lookup_mark_settled(const struct lookup_mark *m);  /* so old that a later change gives another one */

/* Of all files that opening a checkpoint may look at. */
struct lookup_state {
	uint64_t sum[2];
	int64_t newest;                                /* when the last of them was changed, in seconds */
};

struct lookup_cache {
	struct checkpoint *checkpoint;                 /* NULL: none; dir is closed between questions */
	struct lookup_state state;
};

/* As checkpoint_open, and freed in the same way; never one that has changed since. */
FALLIBLE enum err lookup_checkpoint(struct worker *w, const json_t *q, struct checkpoint **out);
/* The question is answered: nothing of the storage is held open any longer. */
void lookup_cache_rest(struct lookup_cache *k);
void lookup_cache_free(struct lookup_cache *k);
