/* checkpoint_query.h: which checkpoints of a storage are wanted, and in which order: the words of `filter`, `sort` and `page_token`.
 *
 *     filter   TERM AND TERM …      TERM is KEY, one of = != < <= > >=, and a value, with no space between; the value may be in "…"
 *         name run                  globs: `*` matches any run of characters. = !=
 *         format content_digest labels.KEY                  texts. = !=
 *         verified                  verified, damaged, unverified, none. = !=
 *         held dcpd                 true, false. =
 *         step bytes world_size metrics.KEY                 numbers. All six
 *         time                      RFC 3339 in UTC, or only the date: when it became durable, else was written. All six
 *     sort     name time step bytes metrics.KEY, with a '-' in front the greatest first. Those without such a number come last
 *
 * A checkpoint without the number matches no comparison of it; without the label it matches labels.KEY!=… only.
 * The coordinator checks the words, look-up workers apply them. */
#pragma once
#include "base/buf.h"

enum { CHECKPOINT_QUERY_TERMS = 16, CHECKPOINT_QUERY_BYTES = 4096 };

struct checkpoint_metric {
	struct str key;
	double value;
};

struct checkpoint_label {
	struct str key, value;
};

/* The facts of a checkpoint that questions can be about. */
struct checkpoint_facts {
	struct str name, run, format, digest;  /* digest: of the contents; empty: not known */
	int64_t step, at_ms;                   /* -1: none; 0: not known */
	int64_t of_ms;                         /* the time of the contents (derived.h); else at_ms */
	uint64_t bytes, world_size;
	bool is_held, is_dcpd;
	const char *verified;                  /* "": nothing is known */
	const struct checkpoint_metric *metrics;
	const struct checkpoint_label *labels;
	uint32_t metric_count, label_count;
};

enum checkpoint_op { OP_EQ, OP_NE, OP_LT, OP_LE, OP_GT, OP_GE };
enum checkpoint_key {
	KEY_NAME, KEY_RUN, KEY_FORMAT, KEY_DIGEST, KEY_VERIFIED, KEY_HELD, KEY_DCPD, KEY_STEP, KEY_BYTES, KEY_WORLD_SIZE, KEY_TIME,
	KEY_LABEL, KEY_METRIC
};

struct checkpoint_term {
	enum checkpoint_key key;
	enum checkpoint_op op;
	struct str member;                     /* of labels. and metrics. */
	struct str text;
	double number;
};

struct checkpoint_query {
	struct checkpoint_term terms[CHECKPOINT_QUERY_TERMS];
	uint32_t term_count;
	enum checkpoint_key sort;              /* KEY_NAME unless said */
	struct str sort_member;
	bool falls;                            /* the greatest first */
	bool of_run;                           /* time: that of the contents */
	uint32_t sort_mark;                    /* of the words of `sort`: pages of one order do not go on in another */
};

/* A checkpoint's place in the order. */
struct checkpoint_place {
	bool is_known;
	int64_t value, step;
	struct str name;
};

/* Both texts may be empty. What is read points into them. ERR_VALIDATION_FAILED names the word and the character where it stands. */
FALLIBLE enum err checkpoint_query_read(struct str filter, struct str sort, struct checkpoint_query *out);
bool checkpoint_query_matches(const struct checkpoint_query *q, const struct checkpoint_facts *f);
struct checkpoint_place checkpoint_query_place(const struct checkpoint_query *q, const struct checkpoint_facts *f);
/* As for qsort; 0: the same checkpoint at the same place. */
int checkpoint_query_compare(const struct checkpoint_query *q, const struct checkpoint_place *a, const struct checkpoint_place *b);
void checkpoint_query_put_token(const struct checkpoint_query *q, const struct checkpoint_place *last, struct buf *out);
/* ERR_INVALID_REQUEST: it is none of this order's. */
FALLIBLE enum err checkpoint_query_read_token(const struct checkpoint_query *q, struct str token, struct checkpoint_place *out);
