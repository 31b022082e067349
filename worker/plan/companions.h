/* companions.h: tensors that mean something together only: a quantised weight and its scales, zero points and the like, by the names that
 * fp8 checkpoints (DeepSeek, Qwen), compressed-tensors, bitsandbytes, GPTQ and gpt-oss give them. */
#pragma once
#include "base/err.h"
#include "base/str.h"
#include "tensor/dtype.h"

/* The error of a cast of a weight that is quantised: `name` of the tensor that belongs to its codes, or of the type of its blocks. */
enum err companions_no_cast(struct str name);

/* Can elements of this dtype be codes that scales belong to? */
bool companions_dtype(enum dtype d);

enum { COMPANION_NAME_MAX = 1024 };
struct companions {
	struct str main;
	uint32_t next;                 /* row of the table */
	char name[COMPANION_NAME_MAX];
};
/* All names that a companion of `main` may have, one after the other; *name_out lies in `c`. False: no more.
 *     struct companions c = { .main = fqn };   while (companions_next(&c, &name)) … */
bool companions_next(struct companions *c, struct str *name_out);
/* The name that the companion `name` of c->main, the last that companions_next gave, has beside a weight of another name. False: the other
 * name does not end as the row asks. *name_out lies in `room`. */
bool companions_follow(const struct companions *c, struct str main, char room[COMPANION_NAME_MAX], struct str *name_out);
