/* retention.h: which checkpoints the policies of a storage remove, and why each other one stays. A pure function of records, policies and
 * the time: nothing here looks at a storage.
 *
 * The order of checkpoints is that in which they became durable; where clocks contradict the ids of the jobs that made them, which grow
 * whatever a clock does, both orders count, and what is the newest by either is treated as that. A time that lies in the future, or
 * long before that of a checkpoint made earlier, is in doubt: neither ttl nor every nor bytes removes what has it.
 *
 * What was made of other checkpoints of its run takes none of the places of the newest ones, and stays as long as those beside which it was
 * made: else the reshard of an old step would be the newest, and remove a step that a training has saved. A run of such alone is one of
 * ordinary ones.
 *
 * A delta cannot be read without its base: while the delta stays, so does the base, whatever policy is for it. Of a chain the youngest
 * delta goes first, and what `removals` lists is in an order in which no base goes before its deltas. */
#pragma once
#include "spec/policy.h"

/* Why a checkpoint stays. Those up to CLOCK hold against every policy; the policies' own rules follow. */
#define RETENTION_REASONS(X)                                                                  \
	X(NEWEST, "newest_durable")      /* of its run */                                     \
	X(NEWEST_VERIFIED, "newest_verified")                                                 \
	X(HELD, "held")                                                                       \
	X(ALIAS, "alias")                /* one leads to it, or the run's aliases cannot be read */ \
	X(BASE, "base_of_kept")          /* of a delta that stays */                          \
	X(IN_USE, "in_use")              /* a job uses it, a chain or a tier will */ \
	X(IN_FLIGHT, "in_flight")        /* younger than a job that still makes one of its run */ \
	X(UNREADABLE, "unreadable")      /* damaged, or dcpd does not know what it is */      \
	X(REFUSED, "refused")            /* its removal failed for a reason that lasts */     \
	X(CLOCK, "clock")                /* its time, or the host's, is in doubt */           \
	X(LAST, "last")                                                                       \
	X(EVERY_STEPS, "every_steps")                                                         \
	X(EVERY, "every")                                                                     \
	X(BEST, "best")                                                                       \
	X(TTL, "ttl")                    /* kept by no rule, but not that old yet */          \
	X(BYTES, "bytes")                /* kept by no rule, but within the budget */         \
	X(PAUSED, "paused")              /* kept by no rule, but its policy is paused */

enum retention_reason {
#define X(NAME, text) RETAIN_##NAME,
	RETENTION_REASONS(X)
#undef X
	RETAIN_COUNT
};
#define RETAIN_BIT(NAME) (1u << RETAIN_##NAME)

extern const char *const retention_reasons[RETAIN_COUNT];

/* A checkpoint. Texts are the caller's. */
struct retention_record {
	struct str storage, name, run;
	struct str job;                /* id of the job that made it; n == 0: not known */
	struct str base_storage, base; /* of a delta; base.n == 0: none */
	int64_t step;                  /* -1: none */
	int64_t durable_ms;            /* wall clock; -1: not known */
	uint64_t bytes;                /* that its removal frees */
	uint64_t shared;               /* further ones, which it shares with the checkpoint that this job has made, */
	struct str shared_with;        /* in its storage; n == 0: nothing */
	const json_t *metrics;         /* NULL: none */
	unsigned facts;                /* RETAIN_BIT of HELD, ALIAS, IN_USE, IN_FLIGHT, UNREADABLE and REFUSED, as they are known */
	bool is_verified;
	bool is_derived;               /* made of others of its run (derived.h) */
	bool is_delta;                 /* without `base`: of an unknown one, and all of its run stays */
};

enum retention_why { RETENTION_NOT_KEPT, RETENTION_TTL, RETENTION_BYTES };
extern const char *const retention_whys[];       /* "not_kept" "ttl" "bytes" */

struct retention_verdict {
	unsigned kept;                 /* RETAIN_BITs; 0: it goes, or no policy is for it */
	uint32_t policy;               /* that removes it; UINT32_MAX: it stays */
	enum retention_why why;
	bool matched;                  /* a policy is for its run */
};

/* Of one policy. */
struct retention_sum {
	uint64_t checkpoints, bytes;           /* that it is for */
	uint64_t removals, removed_bytes;      /* of them that go, whichever policy removes them */
	uint64_t over;                         /* bytes that the budget is exceeded by although all that may go goes */
};

struct retention_now {
	int64_t wall_ms;
	bool is_sane;                  /* the wall clock has not jumped lately */
};

struct retention {
	struct retention_verdict *verdicts;    /* per record */
	uint32_t *removals;                    /* indices of records, in the order in which they may go */
	uint64_t removal_count;
	struct retention_sum *sums;            /* per policy */
};

/* The policies may be of several storages; records of storages without any are needed for the deltas among them. */
FALLIBLE enum err retention_evaluate(const struct retention_record *records, uint64_t n, const struct policy *policies,
				     uint32_t policy_count, const struct retention_now *now, struct retention *out);
void retention_free(struct retention *r);      /* for CLEANUP too */
