/* store.h: the one face of a place where checkpoints live. A row of stores.def, a table of functions, and nobody above this folder knows
 * which store it is.
 *
 * Every store guarantees:
 *
 *   visibility   A staging is seen only by callers that name it: neither a list nor a look shows it. publish() is the
 *                commit: all files of the checkpoint appear at once, or none. How is the store's own act: a file system renames a
 *                directory, an object store writes one object, the checkpoint's page, under a condition. No caller emulates one by another.
 *   condition    publish() replaces nothing, or exactly the checkpoint whose identity it was told. Of several that publish one name under
 *                one condition at a time one wins; the others get ERR_CHECKPOINT_EXISTS, and their stagings stay as they were.
 *   durability   OK of publish() and remove() means: it survives a power cut. If that cannot be said, the act is taken back, and its error
 *                is returned; if not even that can be said, ERR_NOT_DURABLE, and nothing is removed (commit.h).
 *   permanence   A published file is never modified. A reader that has it open goes on reading the same bytes, whatever is published or
 *   removed. identity     stat() tells contents apart: st_ino and st_ctim differ whenever a name leads to other bytes than before, st_size
 *   is exact,
 *                st_mtim is when the bytes were written, st_uid whose they are (an object store puts its ETag's digest in st_ino).
 *                identity.h makes a checkpoint's identity of this, and the law of reads trusts it.
 *   leftovers    Whoever dies between stage() and publish() leaves nothing but the staging; recover() and sweep() find it by its job.
 *
 * Names are paths below the folder given, with '/' between parts and none of "..". Errors name the file, never where the store is: of a
 * name that is not there ERR_NOT_FOUND, of one that is no plain file or folder ERR_NAME_INVALID, of a store that cannot be reached
 * ERR_STORAGE_GONE or ERR_STORAGE_STALLED, of one that is full ERR_STORAGE_FULL. Functions may be called from any thread. */
#pragma once
#include <jansson.h>
#include <sys/stat.h>

#include "base/err.h"
#include "io/digest.h"

enum { STORES_MAX = 64, STORE_NAME_MAX = 66, STORE_PORTS_MAX = 4, STORE_READABLE_MAX = 6 };

struct manifest;
struct staging;
struct commit_keep;

/* How a checkpoint goes. */
struct store_removal {
	/* Asked while commits that replace, other removals and holds are kept out, right before the name goes; its error stops that. */
	enum err (*check)(void *user);
	void *user;
	const char *about;             /* a JSON object: it lies in the trash, with this beside it, under the job's id. NULL: it is gone */
};

/* One storage of a worker, open for its whole life. */
struct store {
	char name[STORE_NAME_MAX];
	uint32_t index;                /* in struct stores: the same in all workers of a gang */
	const struct store_ops *ops;
	int top;                       /* handle of the top folder; -1: could not be opened */
	void *own;                     /* of the ops */
	uint16_t ports[STORE_PORTS_MAX];       /* TCP ports that it connects to: its sandbox lets these through */
	uint32_t port_count;
	const char *readable[STORE_READABLE_MAX];      /* files that it reads beside: credentials. They live as long as it; NULL behind */
	struct err_info error;         /* why it could not be opened */
};

struct stores {
	struct store v[STORES_MAX];
	uint32_t count;
};

/* A folder or file, open: a folder is a directory or a prefix of keys. */
struct store_at {
	const struct store *store;
	int handle;                    /* the ops' number; of stores with fd_of a descriptor; -1: nothing is open */
};
#define STORE_NOTHING ((struct store_at){ NULL, -1 })

/* In whose name something is changed. The id names staging and trash; the uid owns what is published; an admin may replace everything. */
struct store_job {
	const struct stores *stores;
	const char *id;
	uint64_t attempt;
	uid_t uid;
	bool admin;
	/* Of a job that another node may take over (fence.h); mark NULL: of none such. */
	const char *mark;              /* of the daemon that it runs on now */
	uint32_t turn;                 /* owners that it had before */
};

/* Place of a storage, and how it is opened. */
struct store_place {
	const char *location;          /* "SCHEME://…", or a path; for the ops what stands behind the scheme */
	mode_t mode;                   /* of what is made there, */
	gid_t group;                   /* and whose it is; -1: as the place gives it */
	const json_t *options;         /* what the configuration says about this storage: texts by their names; may be NULL */
};

/* The outcome of a sweep. */
struct store_swept {
	uint64_t removed;
	int64_t later_ms;              /* something of the job stays until it is older by so much: another sweep then. 0: nothing does */
};

struct store_facts {
	uint64_t free_bytes, total_bytes;      /* 0, both: it has no end that can be told */
	const char *kind;              /* "ext4", "nfs", …, "other" */
	bool writable, direct, noreplace, exchange;
};

/* NEW: ERR_CHECKPOINT_EXISTS if it is there. LATE, beside NEW: see parts. */
enum { STORE_READ = 0, STORE_WRITE = 1, STORE_NEW = 2, STORE_DIRECT = 4, STORE_LATE = 8 };

typedef enum err (*store_trash_fn)(void *user, const char *id, const char *about);
typedef enum err (*store_entry_fn)(void *user, const char *name, unsigned char d_type);   /* DT_REG, DT_DIR or, not known, DT_UNKNOWN */

struct store_ops {
	/* ---- the storage ---- */
	enum err (*open)(struct store *s, const struct store_place *place);    /* sets s->top, s->own */
	enum err (*check)(const struct store *s);      /* ERR_STORAGE_GONE: it was removed since */
	enum err (*probe)(const struct store *s, struct store_facts *out);
	uint64_t (*count)(const struct store *s, bool written);        /* bytes that this process moved since the last call */
	enum err (*scratch)(const struct store *s, int *fd_out);       /* a descriptor of a nameless file there. NULL: none */

	/* ---- reading ---- */
	enum err (*enter)(struct store_at folder, const char *path, struct store_at *out);     /* a folder; "" or ".": the same */
	enum err (*list)(struct store_at folder, store_entry_fn fn, void *user);       /* fn's error stops the walk */
	enum err (*stat)(struct store_at at, const char *path, struct stat *out);      /* "": of what is open */
	/* Watch: does whatever changes a folder's entries change its stat() at once, whoever did it? If not, lists are asked anew. */
	bool (*watch)(struct store_at folder);
	enum err (*open_file)(struct store_at folder, const char *name, unsigned flags, struct store_at *out);
	enum err (*read)(struct store_at file, void *into, size_t n, uint64_t offset, const char *name);       /* all n or an error */
	/* A whole small file, mem_free; ERR_LIMIT_EXCEEDED beyond max. st_out: what it was, before it was read; may be NULL.
	 * The op NULL: open_file, stat and read do it. */
	enum err (*get)(struct store_at folder, const char *name, uint64_t max, void **bytes_out, uint64_t *n_out, struct stat *st_out);
	void (*close)(struct store_at *at);            /* errors do not matter any more; twice is fine */
	/* The descriptor that moves an open file's bytes, for the I/O engine. NULL: there is none; threads of the engine call read(),
	 * write() and, for an fsync, finish(). */
	int (*fd_of)(struct store_at file);

	/* ---- parts: files of a staging, or of a meeting place ----
	 * A part begins when it is opened as NEW, and is there for all readers when one of its writers calls finish(), after all have
	 * written. Meanwhile any process of the gang opens it with STORE_WRITE and closes it again, which keeps what it wrote, and nobody
	 * reads it. Each byte is written once, and none behind finish(); bytes that nobody writes are zeros. Of a part that began as LATE
	 * bytes are written again before finish(): a store that sends parts on while they are written keeps this one back until then. */
	enum err (*write)(struct store_at file, const void *from, size_t n, uint64_t offset, const char *name);        /* in any order */
	/* Of a part, before or after it is written: reserves room, or cuts off what is beyond. */
	enum err (*resize)(struct store_at file, uint64_t bytes, const char *name);
	/* Ends the writing; durable: OK means that it survives a power cut. The handle is closed whatever comes of it. */
	enum err (*finish)(struct store_at *file, bool durable, const char *name);

	/* ---- commit (staging.h, commit.h) ---- */
	/* Makes the staging `s->name` for `s->target` below s->parent_path, removes what earlier attempts of the job left, and sets s->dir,
	 * s->made and what is known of the place. keep: it may be there, with what is in it: the staging of several hosts, in their meeting
	 * place. */
	enum err (*stage)(struct staging *s, bool keep);
	/* replaces: identity of the one checkpoint that may be there; NULL: nothing may be. Sets s->done. */
	enum err (*publish)(struct staging *s, const char *replaces);
	/* Publishes between files of others, which stay; the file `metadata` makes the rest a checkpoint. NULL: the store cannot. */
	enum err (*publish_in_place)(struct staging *s, const char *metadata);
	/* The staged file `name` takes the place of the target's, if it has one, in one step. OK: it survives a power cut. NULL: the store
	 * cannot. Who has the old one open goes on reading it. */
	enum err (*replace)(struct staging *s, const char *name);
	void (*discard)(struct staging *s);            /* closes it, and removes it unless it is done */
	enum err (*remove)(const struct store_job *by, const struct store *s, const char *name, const struct store_removal *how);
	/* Of a job that is taken over, before recover(): no attempt that another daemon has begun commits from now on. */
	enum err (*fence)(const struct store_job *by, const struct store *s, const char *name);
	/* After a crash: has the job published (or removed) `name`? Takes back what it did by halves, removes what it left. by: stores, id
	 * and, if the job may be another node's, mark: then only that daemon's attempts are touched. */
	enum err (*recover)(const struct store_job *by, const struct store *s, const char *name, bool removes, bool *done_out,
			    struct manifest **out);
	/* Removes stagings that nobody continues. name, job: of that job alone, beside that name, and, with keep->mark, of that daemon.
	 * NULL: of all that keep lets go. */
	enum err (*sweep)(const struct store *s, const struct commit_keep *keep, const char *name, const char *job,
			  struct store_swept *out);

	/* ---- trash: removed checkpoints that may come back (store/kept_trash.h) ---- NULL, all of them: the store has none ---- */
	/* about: what was told when it came here; NULL: it cannot be read. */
	enum err (*trash_list)(const struct store *s, store_trash_fn fn, void *user);
	/* Takes the checkpoint out of the trash, under a name that nothing has (ERR_CHECKPOINT_EXISTS). Of several that want one entry
	 * one gets it, the others ERR_NOT_FOUND. */
	enum err (*trash_restore)(const struct store_job *by, const struct store *s, const char *id, const char *name);
	/* Removes an entry for good. */
	enum err (*trash_empty)(const struct store *s, const char *id);

	/* ---- meeting places: small pages that several daemons write and read beside a target ---- */
	enum err (*make)(struct store_at folder, const char *path, struct store_at *out);      /* with all above it; may be there */
	enum err (*put)(struct store_at folder, const char *name, const void *bytes, uint64_t n, bool durable);  /* appears whole */
	enum err (*adopt)(struct staging *s, struct store_at from, const char *name);   /* a part written there becomes one of s */
	enum err (*drop)(struct store_at folder, const char *path);    /* a file, or a folder with all in it. Nothing there is fine */
	/* Keeps commits that replace, removals and other locks of the folder's entries out, of other daemons too, until it is closed.
	 * ERR_STORAGE_STALLED: somebody has it for too long. NULL: the store cannot. */
	enum err (*lock)(struct store_at folder, struct store_at *out);

	/* Writes a page if it is the one that get() told of as `was`, NULL: if there is none. ERR_STATE_CONFLICT: it is another one by now.
	 * Of several one wins. NULL: lock() is there. */
	enum err (*swap)(struct store_at folder, const char *name, const void *bytes, uint64_t n, const struct stat *was);

	/* ---- bytes that two files have in common (runner/share.h) ---- */
	bool (*clones)(struct store_at folder);        /* Can parts in this folder have blocks of published files? NULL: clone is too */
	enum err (*clone)(struct store_at from, uint64_t from_offset, struct store_at to, uint64_t offset, uint64_t bytes,
			  const char *name);
	/* The part `name` of the staging becomes the published file `of_name`, which is not written to by either name, ever. `is`: size
	 * and time of that file, else ERR_CHECKPOINT_REPLACED. Any other error: what is small, or else, is written instead. NULL: the store
	 * cannot. */
	enum err (*link)(struct store_at of, const char *of_name, const struct stat *is, struct store_at to, const char *name);
	/* Of a part: the times of another file. NULL beside link and clone. */
	enum err (*stamp)(struct store_at file, const struct stat *times, const char *name);
	/* Of a part: its size, without room for it. NULL: resize() takes none. */
	enum err (*extend)(struct store_at file, uint64_t bytes, const char *name);
	/* link() makes a copy within the store, which has bytes and a time of its own: none that `is` does not tell. */
	bool link_copies;

	/* read() into memory that may shrink (os/seg.h): ERR_SEGMENT_SHRUNK. Computes the digests `which` (io/digest.h; 0: none) as the
	 * bytes come. NULL: the store cannot; its read() gets memory of its own. */
	enum err (*take)(struct store_at file, void *into, size_t n, uint64_t offset, unsigned which, struct digest *out);
};

/* s->name and s->index are the caller's. ERR_CONFIG: no such scheme. */
FALLIBLE enum err store_open(struct store *s, const struct store_place *place);
/* ERR_NOT_FOUND: the worker has no such storage; else the error that opening it ended with. */
FALLIBLE enum err stores_find(const struct stores *stores, const char *name, const struct store **out);

static inline struct store_at store_top(const struct store *s)
{
	return (struct store_at){ s, s->top };
}

static inline void store_close(struct store_at *at)
{
	if (at->store && at->handle >= 0)
		at->store->ops->close(at);
	at->handle = -1;
}

FALLIBLE static inline enum err store_enter(struct store_at folder, const char *path, struct store_at *out)
{
	return folder.store->ops->enter(folder, path, out);
}

FALLIBLE static inline enum err store_list(struct store_at folder, store_entry_fn fn, void *user)
{
	return folder.store->ops->list(folder, fn, user);
}

FALLIBLE static inline enum err store_stat(struct store_at at, const char *path, struct stat *out)
{
	return at.store->ops->stat(at, path, out);
}

FALLIBLE static inline enum err store_open_file(struct store_at folder, const char *name, unsigned flags, struct store_at *out)
{
	return folder.store->ops->open_file(folder, name, flags, out);
}

FALLIBLE static inline enum err store_read(struct store_at file, void *into, size_t n, uint64_t offset, const char *name)
{
	return file.store->ops->read(file, into, n, offset, name);
}

/* An open file from a byte on, as parsers ask for it: `user` of store_read_span. */
struct store_span {
	struct store_at file;
	uint64_t offset;
};
enum err store_read_span(void *user, uint64_t offset, void *into, size_t n);

FALLIBLE enum err store_get(struct store_at folder, const char *name, uint64_t max, void **bytes_out, uint64_t *n_out,
			    struct stat *st_out);

FALLIBLE static inline enum err store_drop(struct store_at folder, const char *path)
{
	return folder.store->ops->drop(folder, path);
}

/* The descriptor of an open file; -1: its store has none. */
static inline int store_fd(struct store_at file)
{
	return file.store->ops->fd_of ? file.store->ops->fd_of(file) : -1;
}
