/* fields.h: fields.def as C: the words that fields take, and a table that checks, fills in and documents every field of a request. */
#pragma once
#include "base/jval.h"
#include "spec/kinds.h"
#include "spec/ref.h"
#include "tensor/dtype.h"

#define WORD(NAME, word) NAME,
#define WORDS(name, ...) enum name { __VA_ARGS__ };
#include "spec/fields.def"
#undef WORD

enum target_format {
#define X(...)
#define TARGET(NAME, ...) TARGET_##NAME,
#include "format/formats.def"
};

struct spec;

enum { SPEC_WORLD_MAX = 65536, SPEC_RULES_MAX = 1024, SPEC_GLOBS_MAX = 1024, SPEC_GLOB_BYTES_MAX = 4096,
       SPEC_RENAMES_MAX = 64, SPEC_SOURCES_MAX = 16, SPEC_SPREAD_MAX = 64 };

/* Lists of a request. The arrays are the spec's, the texts are the document's and end with a NUL. */
struct spec_pairs {
	struct spec_pair { struct str left, right; } *v;         /* a pattern and its replacement; a label's key and value */
	size_t n;
};
struct spec_casts {
	struct spec_cast { struct str glob; enum dtype dtype; bool q8_0; } *v;         /* q8_0: blocks, and no dtype */
	size_t n;
};
struct spec_ranks {
	uint32_t *v;
	size_t n;
};
struct spec_refs {
	struct ref *v;
	size_t n;
};
struct spec_numbers {
	double *v;
	size_t n;
};
struct spec_metrics {
	struct { struct str name; double value; } *v;
	size_t n;
};
/* A save whose ranks are on several hosts (worker/runner/hosts.h): which of them this daemon has. */
struct spec_hosts {
	struct str id;                 /* p NULL: the save is of one host */
	bool part;                     /* of a planned save: the rest is not set */
	uint32_t index;                /* this daemon's */
	struct strs names;             /* of the first hosts */
	struct spec_ranks *ranks;      /* per host */
	size_t count;
	int64_t timeout_s;
};

/* A load for a neighbour (server/neighbours.h): its target is a copy of what this save wrote, or was about to write. */
struct spec_replica {
	struct str job;                /* the save's; p NULL: the load is an ordinary one */
	struct ref of;                 /* its checkpoint */
	bool is_part;                  /* the save is of several hosts: other nodes have the rest */
	struct str hosts;              /* what they call it (spec_hosts.id); n == 0: nothing */
};

/* The condition under which a delete removes its target. */
struct spec_only_if {
	bool is_given;
	struct str etag;               /* of its record; n == 0: any */
	struct strs present;           /* checkpoints that must be there */
	bool unaliased;                /* no alias of its run leads to it */
};

/* In the place of a dtype: ggml's blocks of 32 int8 with a scale. Only a GGUF target has them. */
#define SPEC_Q8_0 "q8_0"

/* The object that a field stands in. Options are made where they are missing; those of the optimizer and of spread may be missing. */
enum field_place { AT_ROOT, AT_SOURCE, AT_TARGET, AT_A, AT_B, AT_BASE, AT_OPTIONS, AT_OPTIMIZER, AT_SPREAD, FIELD_PLACES };

enum field_type {
	FIELD_BOOL, FIELD_INTEGER, FIELD_NUMBER, FIELD_WORD, FIELD_TEXT, FIELD_STATE_DICT, FIELD_CHECKPOINT,
	FIELD_DURATION,                /* text; read as milliseconds */
	FIELD_GLOBS,                   /* list of texts */
	FIELD_RENAMES, FIELD_DTYPES,   /* list of pairs of texts; the second one a dtype */
	FIELD_RANKS,                   /* list of ranks, each once */
	FIELD_NUMBERS, FIELD_CHECKPOINTS,      /* lists of numbers, of references; at most SPEC_SOURCES_MAX */
	FIELD_LABELS,                  /* object of texts */
	FIELD_METRICS,                 /* object of numbers */
	FIELD_LAYOUT,
	FIELD_TRANSFORM, FIELD_VARS,   /* conversion rules, and object of integers: they and */
	FIELD_OTHER,                   /* are read together with other fields, in spec.c */
};

struct field {
	const char *key;
	enum field_place place;
	unsigned kinds;                /* bit k: kind k has it */
	enum field_type type;
	int64_t min, max;              /* of an integer; max: bytes of a text */
	const char *const *words;      /* of a word, then NULL; the value is the index */
	const char *fallback;          /* JSON, or NULL */
	const char *option, *value, *what;  /* see fields.def */
	size_t at;                     /* in struct spec */
};

/* The next row of a kind after `last` (NULL: the first); NULL: there is none. */
const struct field *field_next(enum job_kind kind, const struct field *last);
/* The name of a place's object at the root of a request, such as "options"; NULL: it is the root itself. */
const char *field_place_key(enum field_place place);

/* The word that a member of *spec, an enum of fields.def, stands for. */
const char *field_word(const struct spec *spec, const void *member);

/* The keys of a place that the kind knows, behind those of `first` (NULL-terminated), then NULL. */
enum { FIELD_KEYS_MAX = 32 };
void field_keys(enum job_kind kind, enum field_place place, const char *const *first, const char *keys[FIELD_KEYS_MAX]);
/* Sets every member of *out to the fallback of its field; a list's is empty. */
void field_fallbacks(struct spec *out);
/* Checks the kind's fields of a place, whose object is `at`, fills in what is missing, and reads them into *out. Other keys of the object
 * are none of its matter. ERR_VALIDATION_FAILED, ERR_NAME_INVALID, with the field's JSON pointer. */
FALLIBLE enum err field_read(enum job_kind kind, enum field_place place, const struct jval *at, struct spec *out);
/* Takes fallback_new; it becomes the field's value where there is none. */
FALLIBLE enum err field_put_default(json_t *object, const char *key, json_t *fallback_new);
/* A list of ranks. */
FALLIBLE enum err field_read_ranks(const struct jval *list, struct arena *a, struct spec_ranks *out);
/* `labels`: at most 32 of key → text. */
FALLIBLE enum err field_read_labels(const struct jval *v, struct arena *a, struct spec_pairs *out);
/* `metrics`: at most 64 of name → finite number. */
FALLIBLE enum err field_read_metrics(const struct jval *v, struct arena *a, struct spec_metrics *out);
