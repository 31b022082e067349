/* placement.c: reading placements as PyTorch prints them and as people shorten them. */
#include "tensor/placement.h"

#include "base/near.h"
#include "base/num.h"

enum { DIM_DIGITS = 6, FACTOR_DIGITS = 18 };

static const char *const reduce_names[REDUCE_OPS] = { "sum", "avg", "min", "max", "product" };

struct cursor {
	const char *p, *end;
};

const char *placement_reduce_name(enum reduce_op op)
{
	return reduce_names[op];
}

static void skip_space(struct cursor *c)
{
	while (c->p < c->end && (*c->p == ' ' || *c->p == '\t'))
		c->p++;
}

static bool eat(struct cursor *c, const char *word)
{
	size_t n = strlen(word);

	skip_space(c);
	if ((size_t)(c->end - c->p) < n || memcmp(c->p, word, n) != 0)
		return false;
	c->p += n;
	return true;
}

static bool eat_integer(struct cursor *c, int digits_max, int64_t *out)
{
	struct str digits = { c->p, 0 };
	uint64_t v;

	while (c->p < c->end && *c->p >= '0' && *c->p <= '9')
		c->p++;
	while (digits.p < c->p - 1 && *digits.p == '0')
		digits.p++;
	digits.n = (size_t)(c->p - digits.p);
	if (digits.n > (size_t)digits_max || !str_to_u64(digits, &v))
		return false;
	*out = (int64_t)v;
	return true;
}

/* "dim=5", "-1" or just "5". */
static bool eat_dim(struct cursor *c, struct placement *out)
{
	int64_t dim;

	if (eat(c, "dim") && !eat(c, "="))
		return false;
	bool minus = eat(c, "-");
	if (!minus)
		skip_space(c);
	if (!eat_integer(c, DIM_DIGITS, &dim))
		return false;
	out->dim = (int32_t)(minus ? -dim : dim);
	return true;
}

/* "sf=2", "split_factor=2" or just "2"; at least 1. */
static bool eat_factor(struct cursor *c, struct placement *out)
{
	if ((eat(c, "split_factor") || eat(c, "sf")) && !eat(c, "="))
		return false;
	skip_space(c);
	return eat_integer(c, FACTOR_DIGITS, &out->split_factor) && out->split_factor >= 1;
}

/* After "Partial": nothing, "()", "(sum)", "(reduce_op='max')". */
static bool eat_reduction(struct cursor *c, struct placement *out)
{
	const char *quote = NULL;

	if (!eat(c, "(") || eat(c, ")"))
		return true;
	if (eat(c, "reduce_op") && !eat(c, "="))
		return false;
	if (eat(c, "'"))
		quote = "'";
	else if (eat(c, "\""))
		quote = "\"";
	for (size_t i = 0; i < REDUCE_OPS; i++)
		if (eat(c, reduce_names[i])) {
			out->reduce = (enum reduce_op)i;
			return (!quote || eat(c, quote)) && eat(c, ")");
		}
	return false;
}

static bool eat_placement(struct cursor *c, struct placement *out)
{
	if (eat(c, "_StridedShard") || eat(c, "_S")) {
		out->kind = PLACE_STRIDED_SHARD;
		return eat(c, "(") && eat_dim(c, out) && eat(c, ",") && eat_factor(c, out) && eat(c, ")");
	}
	if (eat(c, "Shard") || eat(c, "S")) {
		out->kind = PLACE_SHARD;
		return eat(c, "(") && eat_dim(c, out) && eat(c, ")");
	}
	if (eat(c, "_Partial") || eat(c, "Partial") || eat(c, "P")) {
		out->kind = PLACE_PARTIAL;
		return eat_reduction(c, out);
	}
	out->kind = PLACE_REPLICATE;
	if (!eat(c, "Replicate") && !eat(c, "R"))
		return false;
	return !eat(c, "(") || eat(c, ")");
}

enum err placement_parse(struct str text, struct placement *out)
{
	static const char *const names[] = { "Shard", "Replicate", "_StridedShard", "Partial", NULL };
	struct cursor c = { text.p, text.n ? text.p + text.n : text.p };
	const char *paren = text.n ? memchr(text.p, '(', text.n) : NULL;
	struct str word = { text.p, paren ? (size_t)(paren - text.p) : text.n };
	char hint[NEAR_HINT_MAX];

	*out = (struct placement){ 0 };
	bool good = text.n && eat_placement(&c, out);
	skip_space(&c);
	if (good && c.p == c.end)
		return OK;
	return ERR(LAYOUT_INVALID, "\"%.*s\" is no placement: Shard(0), Replicate(), _StridedShard(dim=0, sf=2), in memory also "
		   "Partial(sum)%s", (int)num_min(text.n, 64), text.n ? text.p : "", near_hint(word, names, hint));
}
