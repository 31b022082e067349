/* conversion.h: the conversion rules of a request (`transform`, and `vars`) as C. Here stands what is wrong with a rule whatever the
 * tensors are; plan/convert.h applies rules to tensors. The manual of the rules is api/transforms.md. */
#pragma once
#include "base/arena.h"
#include "spec/ref.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

enum { CONVERSION_RULES_MAX = 1024, CONVERSION_NAMES_MAX = 4096, CONVERSION_VARS_MAX = 64, CONVERSION_TEXT_MAX = 4096 };

enum conversion_kind {
	CONVERT_RENAME, CONVERT_DTYPE, CONVERT_SPLIT, CONVERT_CONCAT, CONVERT_STACK, CONVERT_UNSTACK, CONVERT_PERMUTE, CONVERT_RESHAPE,
	CONVERT_PAD, CONVERT_SLICE, CONVERT_DROP, CONVERT_FROM, CONVERT_TIE,
};

/* A number, or the text between the braces of "{heads/groups}", which is worked out for each tensor. */
struct conversion_size {
	struct str text;               /* p NULL: */
	int64_t number;
};

struct conversion_rule {
	enum conversion_kind kind;
	const char *word;              /* "split": the key that says what the rule does */
	struct str match;              /* PCRE2 */
	bool optional;                 /* the rule may match nothing */
	int32_t dim;                   /* split, concat, stack, unstack, pad: may be negative, counted from the end */
	enum dtype dtype;
	int64_t parts;                 /* split without sizes: into so many equal ones; else 0 */
	struct conversion_size *sizes; /* split: sizes; reshape: the shape; permute: dims; pad: one; slice: start and stop by turns */
	uint32_t size_count;
	struct str *names;             /* into, rename, tie: replacements ($1); from: the other's FQN (none: the same) */
	uint32_t name_count;
	struct str *order;             /* concat, stack: what each part has in its name, in the order of the parts; none: by number */
	uint32_t order_count;
	struct ref from;
};

struct conversion {
	struct conversion_rule *rules;
	uint32_t count;
	const json_t *vars;            /* name → integer */
};

/* slice: the end of the dim, or its begin where the text before the colon is empty. */
#define CONVERSION_OPEN INT64_MAX

/* transform and vars: the fields of the request, either may be absent. Everything lies in `a` or in the documents. ERR_VALIDATION_FAILED,
 * ERR_UNKNOWN_FIELD, ERR_NAME_INVALID with the JSON pointer of what is wrong. Regular expressions are not compiled here. */
FALLIBLE enum err conversion_read(const struct jval *transform, const struct jval *vars, struct arena *a, struct conversion *out);

/* A size for a tensor of this shape, whose sizes are dim0, dim1, …: + - * / and parentheses over integers; a division must leave nothing.
 * ERR_VALIDATION_FAILED: syntax, a name that vars lack, an inexact division, overflow. */
FALLIBLE enum err conversion_size(const struct conversion *c, const struct conversion_size *s, uint32_t ndim, const int64_t *shape,
				  int64_t *out);
