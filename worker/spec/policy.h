/* policy.h: a retention policy: which runs of a storage it is for, what it keeps of each, and when the rest goes.
 *
 *     {"storage":"main","match":"run1","keep":{"last":3,"every_steps":1000,"every":"24h","best":{"metric":"loss","mode":"min","count":2},
 *      "ttl":"720h","bytes":1000000000},"verified_only":false,"trash":"72h","paused":false}
 *
 * last, every_steps, every and best keep, for each run by itself. A checkpoint that none of them keeps, of this or another policy, goes
 * when it is older than ttl, or, the oldest first, while the runs of the policy have more than `bytes` together; of a policy with
 * neither of the two it goes at once. What no policy removes whatever it says: retention.h. */
#pragma once
#include "base/jval.h"

enum { POLICY_MATCH_BYTES_MAX = 1024, POLICY_METRIC_BYTES_MAX = 256 };

/* The texts point into the document. A rule that is not given: 0; bytes: -1. */
struct policy {
	struct str name, storage, match;
	int64_t last, every_steps, every_ms;
	struct {
		struct str metric;
		bool max;              /* the highest value is the best one */
		int64_t count;
	} best;
	int64_t ttl_ms, bytes;
	int64_t trash_ms;              /* what goes lies in the trash for so long; 0: it is gone */
	bool verified_only;            /* only verified ones count for what is kept */
	bool is_paused;                /* it removes nothing; what it keeps, it keeps from other policies still */
};

/* Reads the document of a policy without its name. ERR_VALIDATION_FAILED, ERR_UNKNOWN_FIELD with the field's JSON pointer. */
FALLIBLE enum err policy_read(json_t *doc, struct policy *out);
/* Is the run one of those that the policy is for? */
bool policy_matches(const struct policy *p, struct str storage, struct str run);
/* Does the pattern match every run, whatever its name? */
bool policy_matches_all(const struct policy *p);
