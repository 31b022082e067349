/* spec.h: the body of POST /v1/jobs as C: every field of every kind checked, defaults filled in, read once.
 *
 * The checked request is the "spec" of a worker's job (worker/ctl/README.md): every optional field that has a default is filled in, but for
 * `generation` (the coordinator picks the newest sealed one) and `world_size` where only the source's metadata knows it. Checks that need
 * the state dicts (is that rank in the group?) are in server/job_state_dict_op.c. */
#pragma once
#include "spec/conversion.h"
#include "spec/fields.h"
#include "spec/layout_rules.h"

struct spec {
	enum job_kind kind;
	struct ref source, target;      /* kind 0 where the job has none */
	struct ref a, b;                /* of a diff or a compare */
	struct ref base;                /* of a delta, and of what it is applied to */
	bool may_share;                 /* a save: incremental, or nothing is said of that */
	struct arena *arena;            /* has the lists; spec_free */
#define FIELD(member, c_type, ...) c_type member;
#include "spec/fields.def"
};

/* Changes doc in place; *out, zeroed or read before, points into it, and is the caller's (spec_free). A field that the kind has not is as
 * in a request without it. ERR_UNKNOWN_KIND, ERR_UNKNOWN_FIELD, ERR_VALIDATION_FAILED, ERR_NAME_INVALID, ERR_LAYOUT_INVALID,
 * ERR_WORLD_MISMATCH, with the field's JSON pointer. */
FALLIBLE enum err spec_read(json_t *doc, struct spec *out);
void spec_free(struct spec *s);
/* Returns the wishes of a checked request apart from its subject: its JSON without references, hosts, labels and metrics
 * (mem_free). NULL: no memory. */
char *spec_wishes(const json_t *doc);

/* Has it include, exclude, rename or dtype? */
bool spec_has_rules(const struct spec *s);
/* Is the target one file? So it is where the format has but that form, and where a safetensors target's name ends so. */
bool spec_target_is_file(const struct spec *s);

/* `format` of the target of a save: "dcp". */
FALLIBLE enum err spec_check_save_format(const struct jval *target);
/* The target of a save to come, with "options", "labels" and "metrics" beside storage, name and format; defaults are filled in. */
FALLIBLE enum err spec_check_save_wish(const struct jval *save);
