/* lookup_tree.h: what a look-up worker knows of a storage from one question to the next: the names in its directories, and of the
 * checkpoints that a search has looked at what can be asked for (lookup_find.c).
 *
 * Names are read again when a directory has changed. Marks are trusted on local file systems. Elsewhere another host's change may not
 * show in them at once, or never: there names are read again after a while, and when a job of this daemon has changed the storage. */
#pragma once
#include "base/map.h"
#include "query/lookup.h"
#include "query/lookup_cache.h"
#include "spec/checkpoint_query.h"

enum { LOOKUP_EXPIRE_MS = 5000, LOOKUP_NAMES_MAX = 1 << 20 /* kept from one question to the next */ };

/* A checkpoint as it was looked at last; all of it is one allocation. */
struct lookup_entry {
	struct lookup_mark mark;       /* of its directory or file, before it was looked at */
	bool settled;                  /* a later change shows in the mark, if the file system is a local one */
	enum format format;
	uint64_t asked, looked;        /* numbers of the questions that looked at the mark, and at all its files, last */
	struct checkpoint_facts facts; /* verified: as far as the tree knew when it was asked for */
	struct str noted;              /* state that its notes tell, of this very content; empty: none */
	struct str etag, time;         /* time: durable_at or modified_at, as text */
	struct str record;             /* JSON: members as in a list, without the braces */
	size_t brief;                  /* bytes of the first of them: those that who decides about checkpoints needs */
	unsigned char told[16];        /* XXH3-128 of what lookup_put_summary() told */
	uint64_t kept_bytes;           /* in the file of what is kept (lookup_kept.h); 0: it is not there */
};

struct lookup_child {
	uint64_t name;                 /* offset in the directory's names */
	struct lookup_dir *dir;        /* NULL: not known to be a directory that is no checkpoint */
	struct lookup_entry *entry;    /* NULL: not known to be a checkpoint */
	int64_t failed_ms;             /* when it could not be looked at; 0: it could */
	bool is_file;
};

/* A directory that is no checkpoint. */
struct lookup_dir {
	struct lookup_mark mark;
	bool settled;                  /* as above */
	int64_t read_ms;
	uint64_t commits;              /* of the question with which it was read */
	struct buf names;              /* zero-terminated */
	struct vec(struct lookup_child) children;      /* sorted: those that may be or hold checkpoints */
	uint64_t looks_from;           /* the child at which the time for looks was up last: the next go on there; 0: it was enough */
	uint64_t quiet_at;             /* the tree's refreshed when all children were settled checkpoints; 0: not all are */
	uint64_t asked, looked;        /* then: the least of theirs */
};

/* A checkpoint and its place in an order. */
struct lookup_choice {
	struct lookup_child *child;
	struct checkpoint_place place;
};

/* The checkpoints that the latest search has sorted; good as long as the tree does not change. */
struct lookup_order {
	struct buf words;              /* the search's, but for the place and size of its page */
	uint64_t changes;              /* the tree's; 0: nothing is kept */
	bool is_whole;                 /* else only the first ones are there */
	struct vec(struct lookup_choice) list;
};

/* A run's checkpoints, summed up. */
struct lookup_sum {
	struct str run;
	uint64_t count, bytes, holds;
	const struct lookup_entry *newest, *verified;
};

/* A job's finding about a checkpoint with that identity; the coordinator tells it (server/verdict.h). */
struct lookup_verdict {
	struct str name, identity;
	const char *state;
};

struct lookup_kept;

struct lookup_tree {
	const struct store *store;
	struct lookup_kept *kept;      /* NULL: nothing is kept elsewhere */
	struct lookup_dir *top;        /* NULL: nothing is known */
	uint64_t names;                /* in all directories */
	uint64_t entries;
	uint64_t questions;            /* searches so far */
	uint64_t changes;              /* grows whenever an entry, names or a verdict become others; never 0 */
	uint64_t refreshed;            /* grows whenever an entry goes, or what was none is a folder; never 0 */
	struct lookup_order order;
	struct vec(struct lookup_sum) sums;    /* by run */
	uint64_t summed_at;            /* changes when sums were made; 0: never */
	struct map verdicts;           /* struct lookup_verdict by name */
	uint64_t verdicts_at;          /* the coordinator's number of the last one */
};

/* A question's look at the tree. */
struct lookup_look {
	struct lookup_tree *tree;
	const struct store *store;
	uint64_t commits;              /* jobs of this daemon that have changed the storage, by now */
	int64_t begun_ms;
	bool trusts_marks;
};

void lookup_tree_free(struct lookup_tree *t);
/* The storage that the question names; a tree of another one, or one that has grown too large, is forgotten. Opens its top folder and
 * brings t->top up to date. */
FALLIBLE enum err lookup_tree_begin(struct lookup_tree *t, const struct worker *w, const json_t *q, struct lookup_look *out,
				    struct store_at *top);
/* Makes *known what the directory holds now, or NULL if it is a checkpoint. The root of a storage is none, whatever lies there. */
FALLIBLE enum err lookup_tree_look(const struct lookup_look *l, struct store_at dir, struct lookup_dir **known, enum format *format);
void lookup_tree_forget(struct lookup_tree *t, struct lookup_child *c);       /* its entry */
const char *lookup_tree_name(const struct lookup_dir *d, uint64_t i);
/* The child of that name; NULL: there is none. */
struct lookup_child *lookup_tree_child(const struct lookup_dir *d, const char *name);

/* Makes the entry of the checkpoint of that format which lies at the path now; mem_free. *out NULL: it is as in `old`. */
FALLIBLE enum err lookup_entry_make(const struct store *store, const char *path, enum format format, const struct lookup_entry *old,
				    struct lookup_entry **out);
/* An entry, with texts of its own, that is as `from` otherwise; mem_free. */
FALLIBLE enum err lookup_entry_pack(const struct lookup_entry *from, struct lookup_entry **out);
/* The child's entry becomes e, which was kept: its folder has had the same mark all the time, its files are to be looked at. */
void lookup_entry_take(const struct lookup_look *l, struct lookup_child *c, struct lookup_entry *e);
/* The child's entry becomes e (NULL: none), which was made after the mark was taken. */
void lookup_entry_put(const struct lookup_look *l, struct lookup_child *c, struct lookup_entry *e, const struct lookup_mark *mark);
/* Looks whether the child's checkpoint is what it was; whole: at its files, too. Its entry is another one then, or none any more. */
FALLIBLE enum err lookup_entry_refresh(const struct lookup_look *l, struct lookup_child *c, bool whole);

/* OK for what is gone meanwhile, or not for us to see. */
enum err lookup_pass_over(enum err e);
bool lookup_starts_with(struct str s, struct str start);
/* Puts "/name" behind the path of `at` bytes. False: it would be too long. */
enum { LOOKUP_PATH_MAX = 4096 };
bool lookup_path_enter(char path[LOOKUP_PATH_MAX], size_t at, const char *name);
