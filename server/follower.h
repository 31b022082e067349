/* follower.h: documents that users keep under names, about checkpoints that come and go: policies, webhooks, chains.
 *
 * Each is JSON, belongs to who set it, and is in the journal; a change counts once it is on disk there. One kind differs from another by a
 * row, struct follower_kind. Webhooks and chains have tasks beside: deliveries, executions. */
#pragma once
#include "base/buf.h"
#include "base/jval.h"
#include "server/journal.h"
#include "server/principal.h"

struct followers;
struct server;

enum { FOLLOWER_NAME_MAX = 64, FOLLOWERS_MAX = 256, FOLLOWER_QUEUE_MAX = 1000, FOLLOWER_KEPT = 1000 };

/* The structs of policies, webhooks and chains begin with it. */
struct follower {
	struct follower *next;         /* by name */
	struct followers *all;
	char name[FOLLOWER_NAME_MAX + 1];
	uid_t uid;                     /* who set it, and as whom its jobs run */
	int64_t created_ms;            /* wall clock; 0: not known */
	json_t *doc;                   /* as it was set */
};

/* Members of a task's record, behind its "id" and "state": ",\"name\":…". */
typedef enum err (*follower_put_fn)(const struct journal_task *row, struct buf *out);

struct follower_kind {
	enum journal_follower_kind number;
	const char *word, *words;      /* "chain", "chains": of messages and paths */
	const char *event;             /* emitted when one is set or removed: "chain.set"; NULL: none */
	size_t size;                   /* of its struct */
	bool is_for_admins;            /* nobody else sees or sets it */
	/* Checks f->doc and reads it into f's own members. is_new: somebody sets it now; else it was in the journal. */
	enum err (*read)(struct server *s, struct follower *f, bool is_new);
	/* Checks the document as follower_set does, which it may be, and keeps it. */
	void (*set)(struct followers *all, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user);
	/* Takes over what fresh has read: old has its document and owner by then. */
	void (*replace)(struct follower *old, struct follower *fresh);
	void (*drop)(struct follower *f);              /* it was removed: frees it, at once or later */
	void (*changed)(struct server *s);             /* one was set or removed; NULL: nobody cares */
	enum err (*put)(const struct follower *f, bool is_listed, struct buf *out);    /* more members: ",\"status\":…"; NULL: none */
	const char *tasks;             /* "executions"; NULL: it has none */
	follower_put_fn put_task;
};

struct followers {
	struct server *server;
	const struct follower_kind *kind;
	struct follower *first;
	uint32_t count, coming;        /* coming: new ones on their way to the journal */
};
/* Walks all, by name, each in turn in `f`, which the body may free. type: the kind's struct. */
#define followers_each(type, f, all)                                                                 \
	for (type *f = (void *)(all)->first, *f##_next = f ? (void *)f->base.next : NULL; f;         \
	     f = f##_next, f##_next = f ? (void *)f->base.next : NULL)

/* Takes up what the journal has, as s->followers[kind->number]. One that cannot be read any more is said, and left out. */
FALLIBLE enum err followers_new(struct server *s, const struct follower_kind *kind);
void followers_free(struct followers *all);    /* with followers; what hangs on them is gone by then */
struct followers *followers_of(const struct server *s, struct str words);      /* NULL: no kind has these */

FALLIBLE enum err follower_check_name(struct str name);        /* [A-Za-z0-9][A-Za-z0-9._-]{0,63}; ERR_NAME_INVALID */
/* Makes one of a copy of the document, which nobody knows yet. */
FALLIBLE enum err follower_new(struct followers *all, uid_t uid, struct str name, const json_t *doc, struct follower **out);
void follower_free(struct follower *f);
struct follower *follower_find(const struct followers *all, struct str name);  /* NULL: there is none */
/* ERR_NOT_FOUND; ERR_FORBIDDEN: who may not see it. */
FALLIBLE enum err follower_need(const struct followers *all, const struct principal *who, struct str name, struct follower **out);

/* Sets one, or one anew, as `who`; both steps of it by themselves: a kind may ask more between. Only admins and who set one may set it
 * anew or remove it: ERR_FORBIDDEN. ERR_LIMIT_EXCEEDED: too many, or too long a document. */
void follower_set(struct followers *all, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user);
FALLIBLE enum err follower_make(struct followers *all, const struct principal *who, struct str name, const json_t *doc,
				struct follower **out);
void follower_keep(struct follower *fresh, const struct principal *who, done_fn fn, void *user);       /* takes it */
void follower_remove(struct followers *all, const struct principal *who, struct str name, done_fn fn, void *user);

/* ---- told ---- */

/* Appends {"name","uid","created_at",…}, the document's members between them. */
FALLIBLE enum err follower_put(const struct followers *all, const struct principal *who, struct str name, struct buf *out);
/* Appends {"chains":[…],"next_page_token"}. size: of the page, which begins behind the name `after` (n == 0: at the start). */
FALLIBLE enum err followers_put(const struct followers *all, const struct principal *who, struct str after, uint32_t size,
			       struct buf *out);

/* The checkpoints of a storage whose runs match a glob. The texts are the document's. */
struct follower_filter {
	const char *storage, *match;   /* NULL: any */
};
/* Reads "storage" and "match" of a document. */
FALLIBLE enum err follower_read_filter(const struct jval *root, struct follower_filter *out);
bool follower_matches(const struct follower_filter *f, const char *storage, const char *name);   /* name NULL: only if f wants any */

/* ---- tasks ---- */

extern const char *const follower_task_states[TASK_STATE_COUNT];       /* "waiting", "running", … */
struct follower_page {
	struct str before_id;
	uint32_t size;
};
/* Appends […], newest first. next: the id that the next page is before; "": there is none. */
FALLIBLE enum err follower_put_list(const struct follower *f, const struct follower_page *page, struct buf *out,
				   char next[TASK_ID_LEN + 1]);
/* Appends {"executions":[…],"next_page_token"}. */
FALLIBLE enum err follower_put_page(const struct follower *f, const struct follower_page *page, struct buf *out);
/* Appends the record of the task `id`. ERR_NOT_FOUND. */
FALLIBLE enum err follower_put_task(const struct follower *f, struct str id, struct buf *out);
