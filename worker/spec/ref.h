/* ref.h: the names that people give to things, and the two forms of a reference (SURFACES "References and layouts"). */
#pragma once
#include "base/jval.h"

enum { REF_COMPONENTS_MAX = 16, REF_COMPONENT_BYTES_MAX = 200, REF_STORAGE_BYTES_MAX = 32, REF_ALIAS_BYTES_MAX = 64 };

FALLIBLE enum err ref_check_storage(struct str name);      /* [a-z][a-z0-9_-]{0,31}, not "shm" */
FALLIBLE enum err ref_check_name(struct str name);         /* a checkpoint: 1 to 16 components */
/* A reference's name of a checkpoint: also "-@best", an alias of checkpoints whose names have one component (their run is "-"). */
FALLIBLE enum err ref_check_meant(struct str name);
FALLIBLE enum err ref_check_alias(struct str alias);       /* [A-Za-z0-9][A-Za-z0-9._-]{0,63}, none that dcpd computes */
FALLIBLE enum err ref_check_state_dict(struct str name);   /* one component, without '/' or ':' */

/* The run of a checkpoint's name: all but the last component, "-" for a name of one component. */
struct str ref_run(const char *name);

enum ref_kind { REF_CHECKPOINT = 1, REF_STATE_DICT = 2, REF_REMOTE = 4 };    /* REF_REMOTE: a state dict of another node */

struct ref {
	enum ref_kind kind;            /* 0: there is none */
	struct str storage, name;      /* each ends with a NUL */
	struct str node;               /* of a remote state dict; the same */
	int64_t generation;            /* of a state dict, where the field is known; -1: not given */
};

static inline struct ref ref_checkpoint(const char *storage, const char *name)
{
	return (struct ref){ REF_CHECKPOINT, str_of(storage), str_of(name), { 0 }, -1 };
}

static inline bool ref_same(const struct ref *a, const struct ref *b)
{
	return a->kind == b->kind && str_eq(a->storage, b->storage) && str_eq(a->name, b->name) && str_eq(a->node, b->node);
}

/* The step of a checkpoint: the number at the end of its name (step-100, step-100.pt), else `generation`; -1: neither is one. */
int64_t ref_step(const char *name, int64_t generation);
/* The object {"storage","name"}, {"state_dict"} or {"state_dict","node","generation"?}; `kinds` is a set of ref_kind. Keys beside them must
 * be in `more`. */
FALLIBLE enum err ref_read(const struct jval *v, unsigned kinds, const char *const *more, struct ref *out);
/* The object: a new one; NULL: no memory. */
json_t *ref_doc(const struct ref *ref);
/* The text "main:run1/step-100", as in a layout's "like"; "shm:NAME". */
FALLIBLE enum err ref_parse(struct str text, struct ref *out);
