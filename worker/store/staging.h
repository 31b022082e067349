/* staging.h: makes a finished job's checkpoint visible, exactly once.
 *
 *   staging directory ──► files, fsync each ──► .metadata, manifest, fsync each ──► fsync(staging)
 *        ──► rename (the commit point) ──► fsync(parent) ──► "durable"
 *
 * Everything before the commit may be thrown away; what is behind it is never modified. This module has what the saves of all stores
 * have in common: what may be replaced, by whom, and that every file is as long as planned. The acts are the store's (store.h); the picture
 * shows a file system's (posix_commit.c), where an overwrite exchanges the two directories in one step and then moves the old one to
 * trash. Staging and trash lie beside the target, so that they are on its file system.
 *
 * A target that is one file has the target's name in the staging directory and is renamed out of it. The manifest that stays is the
 * receipt: the file itself has no place for the job's id. Right behind the commit it becomes the page beside the file (beside.h); a
 * recovery finds it in either place, and finishes the move. The sweep after the job removes the directory. */
#pragma once
#include "base/vec.h"
#include "spec/spec.h"
#include "store/checkpoint.h"

#define HOSTS_PREFIX ".dcpd-hosts-"   /* the directory in which several daemons meet for one save */

enum { STAGING_BESIDE_MAX = 4600 };

struct staging_file {
	char *name;
	uint64_t bytes;
	uint32_t rank;
	unsigned how;                  /* STAGING_… */
};

struct staging {
	struct store_job by;
	const struct store *store;
	struct store_at parent, dir;   /* what is beside the target, if the store has such; the staged files */
	struct store_at repaired;      /* the checkpoint whose files are replaced, as its caller has opened it */
	char parent_path[4096];        /* of the target; "": the top */
	char target[256];              /* last component */
	/* Both may be set by the store for a staging of several hosts (store.h). */
	char name[128];                /* ".dcpd-{job}-{attempt}" */
	char path[STAGING_BESIDE_MAX];               /* by which all workers enter the staged files, from the top */
	uint64_t number;               /* set by the store: data files are to have numbers from here on; 0: from 0 on */
	bool direct;                   /* O_DIRECT works here, and is of use */
	bool in_memory;                /* tmpfs */
	bool is_part;                  /* another daemon's save has the target, and publishes (staging_open_part) */
	bool made, done;               /* set by the store: it is to be removed; it is published */
	bool leaves;                   /* set by the store: published, and a sweep is to remove what it replaced */
	bool is_file;                  /* the target is the one staged file of its name; the manifest becomes the page beside it */
	bool in_place;                   /* the target stays, with whatever else is in it: files are moved into it one by one */
	bool no_sync;                  /* data files and metadata are not fsynced */
	struct vec(struct staging_file) files;   /* of the checkpoint, but for metadata and manifest */
	struct vec(char *) folders;    /* in it, each behind the one that it is in: publish() makes their entries durable, too */
	const bool *local;             /* per rank: its files are made here; NULL: all of them (hosts.h) */
};

/* Checks the spec's target (ERR_CHECKPOINT_EXISTS unless overwrite; ERR_FORBIDDEN if it is another's; ERR_NOT_A_CHECKPOINT if it is
 * something else or holds something else too; no checkpoint in a checkpoint) and makes the staging directory. */
FALLIBLE enum err staging_open(const struct store_job *by, const struct spec *spec, struct staging *out);
/* The same with another name for the staging directory, beside the target; it may be there already. */
FALLIBLE enum err staging_open_as(const struct store_job *by, const struct spec *spec, const char *name_given, struct staging *out);
/* A staging directory of that name, kept if it is there, for a part of a save whose target another daemon checks and publishes. */
FALLIBLE enum err staging_open_part(const struct store_job *by, const struct spec *spec, const char *name_given, struct staging *out);
/* A staging directory beside a checkpoint, which stays open as `of`, whose single files are replaced: ERR_FORBIDDEN if it is another's. */
FALLIBLE enum err staging_open_repair(const struct store_job *by, const struct spec *spec, struct store_at of, struct staging *out);
/* As staging_open, for a copy of a checkpoint that is one file, or is not: the target's name does not tell. */
FALLIBLE enum err staging_open_copy(const struct store_job *by, const struct spec *spec, bool is_file, struct staging *out);
/* A folder of the staged files, beside or in those that are there. */
FALLIBLE enum err staging_add_folder(struct staging *s, const char *path);
/* The staged file takes the place of the target's of that name, if it has one, in one step. OK: it survives a power cut.
 * ERR_CHECKPOINT_REPLACED: the target's name leads to another checkpoint by now, or to none. */
FALLIBLE enum err staging_replace(struct staging *s, const char *name);
/* LATE: fields of it are known only when the rest is written (staging_end_late). SPARSE: no room is taken beforehand. UNMADE: whoever
 * writes it makes it. */
enum { STAGING_LATE = 1, STAGING_SPARSE = 2, STAGING_UNMADE = 4 };
FALLIBLE enum err staging_add_file(struct staging *s, struct str name, uint64_t bytes, uint32_t rank, unsigned how);
/* Makes the files at their full sizes, for others to write and to end (store.h: parts). Empty ones are ended here. */
FALLIBLE enum err staging_make_files(struct staging *s);
struct staging_field {
	uint64_t offset;
	uint32_t value;                /* written as little-endian */
};
/* Writes the fields into the i-th file, which is late and else complete, and ends it. */
FALLIBLE enum err staging_end_late(struct staging *s, uint64_t i, const struct staging_field *fields, uint64_t count);
/* A small file, written and fsynced. */
FALLIBLE enum err staging_put_file(struct staging *s, const char *name, const void *bytes, uint64_t n);
/* A file whose bytes `source` gives to a sink, piece by piece; written, hashed and fsynced. */
struct staging_digest {
	uint64_t bytes;
	unsigned char xxh3_128[16];
};
typedef enum err (*staging_sink)(void *user, const void *bytes, size_t n);
typedef enum err (*staging_source)(void *from, staging_sink sink, void *user);
FALLIBLE enum err staging_put_stream(struct staging *s, const char *name, staging_source source, void *from, struct staging_digest *out);
/* When the file was last written, in ns since 1970; 0: the time does not fit. */
FALLIBLE enum err staging_mtime(const struct staging *s, const char *name, int64_t *ns_out);
FALLIBLE enum err staging_commit(struct staging *s, bool overwrite);
/* Moves all into a directory that may hold other things: its old metadata goes first, the new comes last. */
FALLIBLE enum err staging_commit_in_place(struct staging *s, const char *metadata);
/* Removes the staging directory unless it was committed. */
void staging_close(struct staging *s);

/* The name of the staging of an attempt. */
enum { STAGING_NAME_MAX = 128 };
void staging_name(const struct store_job *by, char out[STAGING_NAME_MAX]);
/* Was the staging of that name made by an attempt after this one? 0: no. */
bool staging_is_later(const char *name, uint64_t attempt);
/* The path of something of dcpd's own beside the checkpoint `name`. */
FALLIBLE enum err staging_beside(const char *name, const char *own, char path[STAGING_BESIDE_MAX]);
/* The name of the checkpoint that is staged, below the storage's root. */
void staging_target_name(const struct staging *s, char *out, size_t max);
/* ERR_NOT_A_CHECKPOINT and the like: a folder on the way to a target is a checkpoint itself. */
FALLIBLE enum err staging_check_ancestors(const struct store *store, const char *parent_path, bool is_file);
/* "a/b/c" → "a/b" and "c"; ERR_NAME_INVALID. */
FALLIBLE enum err staging_divide(const char *name, char *parent, size_t parent_max, char *last, size_t last_max);
