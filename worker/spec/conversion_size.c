/* conversion_size.c: sizes of conversion rules that are worked out: "{heads/groups}". See conversion.h. */
#include "base/num.h"
#include "spec/conversion.h"

enum { PARENTHESES_MAX = 16 };

struct reader {
	const struct conversion *c;
	struct str rest;
	uint32_t ndim, depth;
	const int64_t *shape;          /* NULL: no tensor yet: only names and syntax are checked */
};

/* The next character after spaces, 0 at the end. */
static char peek(struct reader *r)
{
	while (r->rest.n && *r->rest.p == ' ')
		r->rest = (struct str){ r->rest.p + 1, r->rest.n - 1 };
	return r->rest.n ? *r->rest.p : '\0';
}

/* Takes the character if it comes next. */
static bool take(struct reader *r, char c)
{
	if (peek(r) != c)
		return false;
	r->rest = (struct str){ r->rest.p + 1, r->rest.n - 1 };
	return true;
}

static bool in_word(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static FALLIBLE enum err read_word(struct reader *r, int64_t *out)
{
	struct str word = { r->rest.p, 0 };
	char name[64];
	uint64_t n = 0;

	while (word.n < r->rest.n && in_word(word.p[word.n]))
		word.n++;
	if (word.n == 0 || word.n >= sizeof name)
		return ERR(VALIDATION_FAILED, "a number or a name is missing before \"%.*s\"", (int)num_min(r->rest.n, 40), r->rest.p);
	r->rest = (struct str){ word.p + word.n, r->rest.n - word.n };
	memcpy(name, word.p, word.n);
	name[word.n] = '\0';
	if (str_to_u64(word, &n)) {
		*out = (int64_t)n;
		return n <= INT64_MAX ? OK : NUM_OVERFLOW();
	}
	if (str_starts(word, "dim") && str_to_u64((struct str){ word.p + 3, word.n - 3 }, &n)) {
		if (n >= (r->shape ? r->ndim : NDIM_MAX))
			return ERR(VALIDATION_FAILED, "{%s} of a tensor of %u dims", name, r->ndim);
		*out = r->shape ? r->shape[n] : 1;
		return OK;
	}
	const json_t *v = json_object_get(r->c->vars, name);
	if (!v)
		return ERR(VALIDATION_FAILED, "nothing sets {%s}: give it in vars (dcpctl: --set %s=N)", name, name);
	*out = json_integer_value(v);
	return OK;
}

static FALLIBLE enum err read_sum(struct reader *r, int64_t *out);

static FALLIBLE enum err read_factor(struct reader *r, int64_t *out)
{
	if (!take(r, '('))
		return read_word(r, out);
	if (++r->depth > PARENTHESES_MAX)
		return ERR(VALIDATION_FAILED, "more than %d parentheses in one another", PARENTHESES_MAX);
	TRY(read_sum(r, out));
	r->depth--;
	return take(r, ')') ? OK : ERR(VALIDATION_FAILED, "a ) is missing");
}

static FALLIBLE enum err read_product(struct reader *r, int64_t *out)
{
	int64_t more = 0;

	TRY(read_factor(r, out));
	for (char op = peek(r); op == '*' || op == '/'; op = peek(r)) {
		(void)take(r, op);
		TRY(read_factor(r, &more));
		if (op == '*' && __builtin_mul_overflow(*out, more, out))
			return NUM_OVERFLOW();
		if (op == '*')
			continue;
		if (more == 0 || (more == -1 && *out == INT64_MIN))
			return r->shape ? ERR(VALIDATION_FAILED, "%jd is divided by %jd", (intmax_t)*out, (intmax_t)more) : OK;
		if (r->shape && *out % more)
			return ERR(VALIDATION_FAILED, "%jd is not a multiple of %jd", (intmax_t)*out, (intmax_t)more);
		*out /= more;
	}
	return OK;
}

static enum err read_sum(struct reader *r, int64_t *out)
{
	int64_t more = 0;

	TRY(read_product(r, out));
	for (char op = peek(r); op == '+' || op == '-'; op = peek(r)) {
		(void)take(r, op);
		TRY(read_product(r, &more));
		if (op == '+' ? __builtin_add_overflow(*out, more, out) : __builtin_sub_overflow(*out, more, out))
			return NUM_OVERFLOW();
	}
	return OK;
}

static FALLIBLE enum err read_all(struct reader *r, int64_t *out)
{
	TRY(read_sum(r, out));
	return peek(r) == '\0' && r->rest.n == 0 ? OK : ERR(VALIDATION_FAILED, "\"%.*s\" is no part of a size",
								(int)num_min(r->rest.n, 40), r->rest.p);
}

enum err conversion_size(const struct conversion *c, const struct conversion_size *s, uint32_t ndim, const int64_t *shape, int64_t *out)
{
	struct reader r = { .c = c, .rest = s->text, .ndim = ndim, .shape = shape };

	*out = s->number;
	return s->text.p ? read_all(&r, out) : OK;
}
