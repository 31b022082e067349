/* share.h: bytes of a save that an earlier checkpoint of the same run, its parent, has already: they cost none on the disk.
 *
 *   clones   where the file system has them (FICLONERANGE: XFS, Btrfs): a block of a file that has the digest of a block of the parent's
 *            refers to that block. The layout is that of any save, and whoever changes one of the two files changes that one alone.
 *   links    elsewhere, only if the save asks for it: a file whose bytes all have the digests of the parent's file of the same name
 *            becomes another name of that file. Such saves are cut into smaller files, on tensors' boundaries (file_plan.h). Whoever
 *            writes into the file changes both checkpoints: dcpd never does, and takes the right to write from everybody but root.
 *   copies   in object storage, as links: the server copies the parent's object, and no byte of it is sent. Its files are found by rank
 *            and place, for their names tell the save.
 *
 * Nothing is read back: the parent's digests are in its manifest, and those of the save are made before a byte is written (exec_share.c).
 * A parent is believed if it is the same user's, and its files only if size and time are those that the manifest tells.
 *
 *   share_open()     finds the parent; says what to cut
 *   share_build()    puts what the parent has into the run's tables, once they are built
 *   share_note()     what came of it, for the checkpoint's record
 *   share_report()   … and for the job's result
 */
#pragma once
#include "runner/build.h"
#include "session/job.h"
#include "store/staging.h"

enum share_how { SHARE_NOTHING, SHARE_CLONES, SHARE_LINKS };

struct share {
	enum share_how how;
	bool wanted;                   /* the request asks for it */
	bool cuts;                     /* files are cut for links */
	bool copies;                   /* links are copies within the store */
	uint64_t number, base;         /* of the data files' numbers: where the save's begin, and the parent's; 0: both from 0 on */
	const char *why;               /* how is SHARE_NOTHING: the reason, a string constant */
	char name[CHECKPOINT_NAME_MAX];        /* of the parent; "": there is none */
	struct manifest *manifest;     /* the parent's */
	json_t *previous;              /* the parent as the record lists it */
	bool damaged;                  /* the nearest one is, as its notes say: nothing is shared with the others either */
	bool *usable;                  /* per file of the manifest: it is what was written */
};

/* Tables of a run without what share_build() has added, so that a plan that is kept gets the next step's parent. */
struct share_marks {
	bool set;
	uint64_t dirs, files, digests;
};

/* alone: the staging is this host's alone. Errors are those of memory, and of a parent that the request names and that is not there; all
 * else that keeps a save from sharing is told in `why`. */
FALLIBLE enum err share_open(const struct job *j, const struct staging *st, bool alone, struct share *out);
void share_close(struct share *s);
/* First takes out what an earlier call has put in. Files of the build that may have blocks of the parent's are marked sparse. */
FALLIBLE enum err share_build(struct share *s, const struct staging *st, struct run_build *b, struct share_marks *marks);
/* The run is done, and nothing is published yet: notes in the job, for the record, what it shares. ERR_CHECKPOINT_REPLACED: somebody has
 * written to the parent meanwhile. */
FALLIBLE enum err share_note(const struct share *s, struct job *j, const struct staging *st, const struct run *run);
/* Sets bytes_shared, and of a save that asked for it, or shared any, `incremental`: {"how","parent","reason"}. */
FALLIBLE enum err share_report(const struct share *s, const struct job *j, const struct run *run, json_t *result);
