/* s3_store_impl.h: what the files of the store on S3 share (s3_store.h says how a checkpoint lies there).
 *
 *   s3_store.c    the table, opening and reading
 *   s3_store_folder.c   which keys are files of a checkpoint, and under which names they are seen
 *   s3_store_part.c     files that are being written
 *   s3_store_hosts.c    where several daemons meet for one save
 *   s3_store_commit.c   marks of attempts, publishing, removing
 *   s3_store_clear.c    files that go with a checkpoint that was replaced or removed
 *   s3_store_recover.c  what attempts that ended left
 *   s3_store_trash.c    removed checkpoints that may come back
 *   s3_store_repair.c   single files that are replaced */
#pragma once
#include <pthread.h>

#include "base/jval.h"
#include "base/map.h"
#include "base/vec.h"
#include "store/commit.h"
#include "store/s3_client.h"
#include "store/s3_store.h"
#include "store/staging.h"

enum {
	S3_PATH_MAX = 1200,            /* keys have S3_KEY_MAX at most, prefix and all */
	S3_ATTEMPT_DIGITS = 10,
	S3_FILES_SHIFT = 16,           /* an attempt's files have numbers from attempt << this on */
	S3_CLAIM_MAX = 8192,           /* bytes of a claim */
	S3_MARK_BYTES_MAX = 8 << 20,   /* of the mark of an attempt */
	S3_NAME_MAX = 256,
	S3_OTHERS_MS = 24 * 3600000,   /* another daemon's that has not changed for so long is given up */
	S3_DEAD_MS = 15 * 60000,       /* after which no request of a process that is gone can be on its way */
};
#define S3_MARKS ".dcpd/"              /* keys below are marks of attempts */
#define S3_MARK_COMMIT "dcpdat"        /* what the mark of a commit's object begins with; then the attempt's digits */
#define S3_MARK_CLAIM "dcpdclaim"

/* ---- s3_store_folder.c ---- */

/* A file or folder of a folder, as it is seen. */
struct s3_entry {
	char *name;                    /* as callers know it */
	char *key;                     /* relative, whole; of a folder with '/' at its end */
	uint64_t bytes;
	int64_t mtime_ms;
	char etag[S3_ETAG_MAX];
};

/* The keys of a folder, as one list showed them. */
struct s3_folder {
	char path[S3_PATH_MAX];
	struct vec(struct s3_entry) v;         /* by name */
	bool is_there;                 /* something of it is seen */
	uint64_t attempt;              /* whose files are the checkpoint's; 0: none has numbers of its own */
	bool is_guess;                 /* the commit has no mark: `attempt` is the one whose files lie there */
	uint64_t given;                /* of a copy: the attempt that its data was saved by; 0: its own, or none */
	struct s3_entry commit;        /* the file whose appearance was the commit; key NULL: none. Owned by `v` */
	char claim_key[S3_PATH_MAX], claim_etag[S3_ETAG_MAX];  /* a commit's place that is claimed; "": none */
	bool all;                      /* files of other attempts are entries too, by their own names */
};

FALLIBLE enum err s3_folder_look(struct s3 *s3, const char *path, bool all, struct s3_folder *out);
void s3_folder_clear(struct s3_folder *f);
void s3_folder_free(struct s3_folder *f);
void s3_folder_free_ptr(struct s3_folder **f);
const struct s3_entry *s3_folder_find(const struct s3_folder *f, const char *name);    /* NULL: not there */
/* Looks up a file by its key. ERR_NOT_FOUND. */
FALLIBLE enum err s3_look_file(struct s3 *s3, const char *key, struct s3_entry *out);   /* s3_entry_free */
void s3_entry_free(struct s3_entry *e);
bool s3_is_folder_entry(const struct s3_entry *e);
void s3_stat_file(const struct s3_entry *e, struct stat *out);
void s3_stat_folder(const struct s3_folder *f, struct stat *out);
/* a, '/' and b, or one of them if the other is "". ERR_NAME_INVALID: too long. */
FALLIBLE enum err s3_join(const char *a, const char *b, char out[S3_PATH_MAX]);
/* The attempt in "__{rank}_{n}.distcp", or in ".dcpd-{attempt}-NAME"; 0: none. *rest: NAME, else the name itself. */
uint64_t s3_attempt_of(const char *name, const char **rest);
/* The same of a key that a server told; 0 too, if it is longer than keys are. */
uint64_t s3_attempt_of_key(struct str key);
/* The attempt that works in the staging of this path. */
uint64_t s3_attempt_at(const char *staging);
void s3_attempt_mark(const char *kind, uint64_t attempt, char out[65]);
/* Is an object's mark the attempt's, by whichever repair it came? */
bool s3_is_commit_of(const char *mark, uint64_t attempt);
/* Is it a file of dcpd's own beside data, that an attempt writes under a key of its own? */
bool s3_is_side(const char *name);

/* ---- s3_store_part.c ---- */

struct s3_parts vec(struct s3_part);
void s3_parts_free(struct s3_parts *p);

struct s3_piece {
	unsigned char *p;              /* NULL: nothing has come, or it is sent */
	uint64_t have;
	bool sent;
};

/* A file while it is written: by one process, from its first byte to its end. */
struct s3_upload {
	struct s3_upload *next;
	struct s3_own *own;
	pthread_mutex_t lock;
	char staging[S3_PATH_MAX], name[S3_NAME_MAX], key[S3_PATH_MAX];
	uint32_t handles;
	bool late, waits;              /* waits: its object is made by the commit, not before */
	bool repairs;                  /* it replaces an object of a checkpoint, */
	struct s3_entry base;          /* whose bytes it has where nothing is written; key NULL: zeros */
	bool is_sized, is_finished;
	bool is_spent;                 /* its parts have become its object, or are left to whoever goes on with the commit */
	bool unsure;                   /* its object may be there, or have been there, whatever s3_part_complete() returned */
	uint64_t bytes, piece_bytes;
	char id[S3_UPLOAD_ID_MAX];     /* "": no upload was begun */
	char mark[65];                 /* of its object; "": any */
	struct vec(struct s3_piece) pieces;
	struct vec(struct s3_part) parts;
};

/* ---- the store ---- */

enum s3_kind { S3_THING_FOLDER, S3_THING_MADE, S3_THING_STAGING, S3_THING_FILE, S3_THING_PART };

/* Things that handles stand for. */
struct s3_thing {
	enum s3_kind kind;
	char path[S3_PATH_MAX];        /* of the folder or the staging, below the storage */
	char target[S3_PATH_MAX];      /* of a staging: the folder that files lie in */
	bool is_file;                  /* … of one file */
	bool repairs;                  /* … whose files replace those of a checkpoint */
	bool meets;                    /* of a folder: a meeting place, in which files are written, too */
	uint64_t attempt;              /* … of its files: its own, or that of the checkpoint that it repairs */
	struct s3_folder *folder;      /* of a folder: what was seen as it was entered; of a staging: the target's keys */
	struct s3_entry file;
	struct s3_upload *upload;
};

struct s3_own {
	struct s3 *client;
	pthread_mutex_t lock;          /* of what follows */
	struct vec(struct s3_thing *) things;  /* by handle; 0 is the top */
	struct s3_upload *uploads;
	uint64_t late_bytes;           /* atomic */
	uint64_t counted[2];
	bool conditions_hold;          /* the server was seen to heed them */
	char readable[4][1024];        /* of struct store */
};

static inline struct s3_own *s3_own(const struct store *s)
{
	return s->own;
}

struct s3_thing *s3_thing_at(struct store_at at);
FALLIBLE enum err s3_thing_open(const struct store *s, struct s3_thing **thing, struct store_at *out);  /* takes *thing */
FALLIBLE enum err s3_missing(const char *name);
FALLIBLE enum err s3_check_conditions(const struct store *s);
/* A file of credentials as the sandbox lets it in: the file, or its directory if Kubernetes mounted it. There a new file comes by renaming
 * the link `..data` beside it, and Landlock's rules are about inodes. False: too long. */
bool s3_readable_of(const char *path, char *out, size_t max);

FALLIBLE enum err s3_part_open(struct store_at staging, const char *name, unsigned flags, struct store_at *out);
/* An object becomes the file `name` of a staging, copied on the server. */
FALLIBLE enum err s3_part_adopt(struct store_at staging, const char *name, struct s3_entry *from);      /* takes *from */
enum err s3_part_write(struct store_at file, const void *from, size_t n, uint64_t offset, const char *name);
enum err s3_part_resize(struct store_at file, uint64_t bytes, const char *name);
enum err s3_part_finish(struct store_at *file, bool durable, const char *name);
void s3_part_close(struct s3_upload *u);
enum err s3_part_link(struct store_at of, const char *of_name, const struct stat *is, struct store_at to, const char *name);
/* Copies an object on the server, of any size, if it is the one that `from` tells. mark: as of s3_copy(), for small ones that are copied
 * without a condition; else NULL is a random one. */
FALLIBLE enum err s3_copy_object(struct s3 *s3, const struct s3_entry *from, const char *to, const char *mark,
				   struct s3_condition condition);
/* Uploads of a staging, by this process; NULL beyond the last. after: NULL at first. */
struct s3_upload *s3_part_next(struct s3_own *own, const char *staging, struct s3_upload *after);
struct s3_upload *s3_part_find(struct s3_own *own, const char *staging, const char *name);
/* Sends what a finished one has kept in memory: its object can be made by whoever has its id. Empty ones have none. */
FALLIBLE enum err s3_part_park(struct s3_upload *u);
/* Makes the object of a finished one that waits. */
FALLIBLE enum err s3_part_complete(struct s3_upload *u, struct s3_condition condition);
/* From now on the uploads of `staging` are of whoever finds the attempt's mark: they are not aborted here. */
void s3_part_leave(struct s3_own *own, const char *staging);
/* Forgets the uploads of `staging`, or, if `others`, those of all but it that nobody has open. */
void s3_part_forget(struct s3_own *own, const char *staging, bool others);

/* ---- s3_store_commit.c ---- */

/* The page of an attempt: S3_MARKS and its staging's name. */
struct s3_mark {
	char key[S3_PATH_MAX], etag[S3_ETAG_MAX];
	char staging[S3_PATH_MAX], target[S3_PATH_MAX], job[65];
	bool is_file, removes, is_dead;
	bool trash;                    /* a removal: into the trash */
	bool repairs;                  /* it replaces files of the checkpoint of the attempt `of`; 0: that has no number */
	uint64_t of;
	char meets[S3_PATH_MAX];       /* key of the meeting place of the hosts that write it; "": it is of one host */
	bool goes_on;                  /* once its claim lies there, whoever finds it makes the uploads that it lists the checkpoint */
	int64_t mtime_ms;
	uint64_t attempt;
	/* Attempts whose files go, which nobody sees once the claim, or what replaces them, is there; 0: none. */
	uint64_t removed[2];
};
FALLIBLE enum err s3_mark_read(struct s3 *s3, const char *key, struct s3_mark *out);
/* The uploads of a commit that replaces files: [[key, id], …], that of the commit last; id "": an empty file. NULL: none. */
FALLIBLE enum err s3_mark_uploads(struct s3 *s3, const struct s3_mark *m, json_t **out);
FALLIBLE enum err s3_mark_of_staging(struct s3 *s3, const char *path, struct s3_mark *out);
void s3_receipt_key(const struct s3_mark *m, char out[S3_PATH_MAX]);
/* From now on the attempt cannot be published; one that goes on still does, if its claim lies there or comes late. */
FALLIBLE enum err s3_mark_dead(struct s3 *s3, struct s3_mark *m);
enum err s3_stage(struct staging *s, bool keep);
/* meets: as of struct s3_mark. */
FALLIBLE enum err s3_stage_attempt(struct staging *s, const char *meets);
enum err s3_publish(struct staging *s, const char *replaces);
void s3_discard(struct staging *s);
enum err s3_remove(const struct store_job *by, const struct store *s, const char *name, const struct store_removal *how);
/* Puts a claim in a commit's place. files: NULL, or names that are put there next. *lies_out: it may lie there, now or later, whatever is
 * returned: the attempt's mark, by which a sweep finds it, must stay. NULL: not wanted. */
FALLIBLE enum err s3_claim(struct s3 *s3, const char *key, struct s3_condition condition, const struct s3_mark *mark, const json_t *files,
			   char etag_out[S3_ETAG_MAX], bool *lies_out);

/* ---- s3_store_clear.c ---- */

/* An object by which the caller has the target: its commit, or its claim. */
struct s3_hold {
	const char *key, *mark;
};
/* Removes what lies in the folder, but for files of attempts under way and the claim; objects that came behind the look at `f` stay, as far
 * as ETags tell. hold: as soon as this object has gone, the rest is left to whoever took its place; *held_out: it was there to the end.
 * stay: keys that stay; NULL: none. */
FALLIBLE enum err s3_clear_folder(struct s3 *s3, const struct s3_folder *f, const struct map *stay, struct s3_hold hold, bool *held_out);
/* Does the object lie there? */
FALLIBLE enum err s3_check_hold(struct s3 *s3, struct s3_hold hold, bool *held);

/* ---- s3_store_hosts.c ---- */

/* The key of the meeting place that a path names ("…/.dcpd-hosts-{id}"). False: it names none. */
bool s3_meeting_key(const char *path, char out[S3_PATH_MAX]);
FALLIBLE enum err s3_meeting_make(struct s3 *s3, const char *key);
FALLIBLE enum err s3_meeting_look(struct s3 *s3, const char *key);      /* ERR_NOT_FOUND */
FALLIBLE enum err s3_meeting_drop(struct s3 *s3, const char *key);
FALLIBLE enum err s3_meeting_sweep(struct s3 *s3, struct store_swept *out);
FALLIBLE enum err s3_meeting_stage(struct staging *s);
enum err s3_adopt(struct staging *s, struct store_at from, const char *name);

/* ---- s3_store_recover.c ---- */
/* Takes the attempt's job out of the target's notes, which kept holds out (notes_seal), and notes without a checkpoint away. */
FALLIBLE enum err s3_unseal(const struct store *s, const struct s3_mark *m);
enum err s3_fence(const struct store_job *by, const struct store *s, const char *name);
enum err s3_recover(const struct store_job *by, const struct store *s, const char *name, bool removes, bool *done_out,
		    struct manifest **out);
enum err s3_sweep(const struct store *s, const struct commit_keep *keep, const char *name, const char *job, struct store_swept *out);
/* Removes keys of an attempt in the target's folder, unless they are the checkpoint's that is there. */
FALLIBLE enum err s3_drop_data(struct s3 *s3, const char *target, uint64_t attempt);
/* Before a checkpoint's data is hidden for a while: marks that its commit left go, so that no sweep takes it for something given up. */
FALLIBLE enum err s3_settle_attempt(const struct store *s, const char *target, uint64_t attempt);
/* Removes the keys of an attempt that nobody sees, and its mark. */
FALLIBLE enum err s3_drop_attempt(struct s3 *s3, const struct s3_mark *m);

/* ---- s3_store_trash.c ---- */

/* Before the removal's claim: copies what that hides, or what cannot stay where it is, into an entry that nobody is told of yet. */
FALLIBLE enum err s3_trash_begin(const struct store *s, const struct s3_mark *m, const struct s3_folder *f, const struct s3_entry *commit,
				 uid_t owner, const char *about);
/* Behind the claim: the entry counts, and what was copied goes from its place. */
FALLIBLE enum err s3_trash_end(const struct store *s, const struct s3_mark *m);
/* Has the removal begun an entry that does not count? */
FALLIBLE enum err s3_trash_is_open(struct s3 *s3, const char *job, bool *out);
/* Removes such an entry. */
FALLIBLE enum err s3_trash_undo(struct s3 *s3, const char *job);
enum err s3_trash_list(const struct store *s, store_trash_fn fn, void *user);
enum err s3_trash_restore(const struct store_job *by, const struct store *s, const char *id, const char *name);
enum err s3_trash_empty(const struct store *s, const char *id);
FALLIBLE enum err s3_trash_sweep(const struct store *s, struct store_swept *out);

/* ---- s3_store_repair.c ---- */
enum err s3_replace(struct staging *s, const char *name);
bool s3_clones(struct store_at folder);
enum err s3_clone(struct store_at from, uint64_t from_offset, struct store_at to, uint64_t offset, uint64_t bytes, const char *name);
