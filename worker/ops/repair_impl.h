/* repair_impl.h: what the files of repair share. */
#pragma once
#include "format/item_walk.h"
#include "runner/input.h"
#include "session/job.h"
#include "store/staging.h"

enum { REPAIR_LIST_MAX = 1000, REPAIR_PIECE = 4 << 20, REPAIR_BLOCK_MAX = 64 << 20 };

struct repair {
	struct job *job;
	const struct store *store;
	struct store_at dir;           /* the checkpoint's */
	struct checkpoint_instead instead;     /* what is known better than by the files */
	bool lost_metadata;            /* or damaged */
	bool proven;                   /* the metadata made anew have the digest that the manifest has of the old ones */
	struct buf metadata;           /* made anew */
	struct buf manifest_text;      /* of a manifest that must tell of them; empty: it stays as it is */
	struct checkpoint *from;       /* NULL: none was named */
	json_t *rebuilt, *restored, *unknown;  /* lists of the result */
	uint64_t restored_count, unknown_count;
	struct staging staging;
	bool staged;
	struct vec(char *) files;      /* staged, in the order in which they are replaced */
};

/* The reader of a file from a byte on, as the parsers ask for it. */
struct repair_source {
	struct store_at file;
	uint64_t offset;
};
enum err repair_read(void *user, uint64_t offset, void *into, size_t n);

/* Makes the staging directory unless it is there. */
FALLIBLE enum err repair_stage(struct repair *r);

/* Appends {"fqn", "rank", "file", "offset", "bytes"} and one more member to a list, up to REPAIR_LIST_MAX. */
void repair_list(json_t *list, uint64_t *count, const struct checked_place *place, const char *key, const char *text);

/* repair_metadata.c: makes the metadata of a DCP checkpoint anew, from what its files or the one that is named say, into r->metadata and
 * r->manifest_text. manifest: NULL without a readable one. ERR_CHECKPOINT_INCOMPLETE: says what is not known. */
FALLIBLE enum err repair_dcp_metadata(struct repair *r, const struct manifest *manifest);

/* repair_places.c: for each damaged place, also between items, tries to stage a copy of its file that has what was written. */
FALLIBLE enum err repair_places(struct repair *r, const json_t *damage, const json_t *padding);

enum repair_item_kind { ITEM_CHUNK, ITEM_VALUE, ITEM_INDEX, ITEM_NONE };

/* The stored item that a place is in. */
struct repair_item {
	enum repair_item_kind kind;
	uint64_t index;                /* of the chunk or value in c->sd */
	uint64_t offset, length;
	const struct manifest_item *known;     /* NULL: the manifest does not list it */
	struct str fqn;
	int64_t rank;
};

/* A damaged file, and the item of it in hand. */
struct repair_file {
	struct repair *r;
	struct checkpoint *c;          /* of a rank-local one: what the place's rank wrote */
	struct checkpoint *others;     /* of a rank-local one: what another rank wrote */
	struct checked ignored;
	struct worker reader;          /* as a look-up worker: nobody is told of progress */
	char file[ERR_FILE_MAX];
	struct store_at old, copy;
	uint64_t old_bytes, bytes;     /* as it is; as it should be */
	struct repair_item item;
	unsigned char *block;          /* REPAIR_BLOCK_MAX at most */
	uint64_t block_bytes;
};

/* repair_sources.c. Makes the staged copy, unless it is there: none before there is something to put into it. */
FALLIBLE enum err repair_begin_copy(struct repair_file *f);
FALLIBLE enum err repair_put(struct repair_file *f, const void *bytes, uint64_t n, uint64_t offset);
/* Notes a range of the file in the result. by, detail: see RepairedPlace in openapi.yaml. */
void repair_restored(struct repair_file *f, uint64_t offset, uint64_t bytes, const char *by);
void repair_unknown(struct repair_file *f, uint64_t offset, uint64_t bytes, const char *detail);
/* Reads a range of the file as it is. *there: it has all of the range. */
FALLIBLE enum err repair_read_old(struct repair_file *f, void *into, uint64_t n, uint64_t offset, bool *there);
/* An error that says that a candidate is of no use, and nothing of this job, becomes OK, and *done false. */
FALLIBLE enum err repair_useless(enum err e, bool *done);
/* The tensor of the chunk in hand in another checkpoint; NULL: it has none of this dtype and shape. */
const struct sd_tensor *repair_same_tensor(const struct repair_file *f, const struct checkpoint *other);
/* Bytes [begin, end) of the chunk's payload in C order, as another checkpoint has these elements. *done: it has them. */
FALLIBLE enum err repair_read_elements(struct repair_file *f, const struct checkpoint *other, uint64_t begin, uint64_t end,
				       unsigned char *into, bool *done);
/* Calls fn with each checkpoint that may have the same elements or value, until one has. `by`: as the result names it. */
typedef enum err (*repair_candidate_fn)(struct repair_file *f, const struct checkpoint *other, const char *by, void *user, bool *done);
FALLIBLE enum err repair_each_candidate(struct repair_file *f, repair_candidate_fn fn, void *user, bool *done);

/* repair_blocks.c: the item in hand, which the manifest lists; the index at the end of the file. */
FALLIBLE enum err repair_known(struct repair_file *f);
FALLIBLE enum err repair_index(struct repair_file *f, uint32_t file);
/* repair_archived.c: the item in hand, which it does not. */
FALLIBLE enum err repair_archived(struct repair_file *f);
