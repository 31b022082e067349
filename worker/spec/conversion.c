/* conversion.c: see conversion.h. */
#include "spec/conversion.h"


struct parser {
	struct arena *a;
	struct conversion *c;
};

static FALLIBLE enum err read_text(const struct jval *v, struct str *out)
{
	TRY(jval_string(v, out));
	if (out->n > CONVERSION_TEXT_MAX)
		return jval_fail(v, ERR_VALIDATION_FAILED, "has more than %d bytes", CONVERSION_TEXT_MAX);
	return OK;
}

static FALLIBLE enum err read_texts(const struct parser *p, const struct jval *v, struct str **out, uint32_t *count_out)
{
	size_t n = 0;

	TRY(jval_array(v, CONVERSION_NAMES_MAX, &n));
	if (n == 0)
		return jval_fail(v, ERR_VALIDATION_FAILED, "lists nothing");
	TRY(arena_alloc(p->a, n, sizeof **out, out));
	*count_out = (uint32_t)n;
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(v, i);
		TRY(read_text(&one, &(*out)[i]));
	}
	return OK;
}

/* The text between the braces of "{…}", its names and its syntax checked. */
static FALLIBLE enum err read_worked_out(const struct parser *p, const struct jval *v, struct str text, struct conversion_size *out)
{
	int64_t number = 0;

	if (text.n < 3 || text.p[0] != '{' || text.p[text.n - 1] != '}')
		return jval_fail(v, ERR_VALIDATION_FAILED, "\"%.100s\" is no size: an integer, or \"{name}\" with a name of vars", text.p);
	out->text = (struct str){ text.p + 1, text.n - 2 };
	return jval_failed(v, conversion_size(p->c, out, 0, NULL, &number) ? ERR_VALIDATION_FAILED : OK);
}

static FALLIBLE enum err read_size(const struct parser *p, const struct jval *v, int64_t min, struct conversion_size *out)
{
	struct str text;

	if (!json_is_string(v->j))
		return jval_integer(v, min, INT64_MAX, &out->number);
	TRY(read_text(v, &text));
	return read_worked_out(p, v, text, out);
}

static FALLIBLE enum err read_sizes(const struct parser *p, const struct jval *v, int64_t min, size_t max, struct conversion_rule *r)
{
	size_t n = 0;

	TRY(jval_array(v, max, &n));
	TRY(arena_alloc(p->a, n + 1, sizeof *r->sizes, &r->sizes));
	r->size_count = (uint32_t)n;
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(v, i);
		TRY(read_size(p, &one, min, &r->sizes[i]));
	}
	return OK;
}

static FALLIBLE enum err read_dim(const struct jval *object, struct conversion_rule *r)
{
	struct jval v = jval_get(object, "dim");
	int64_t dim = 0;

	TRY(jval_integer(&v, -NDIM_MAX, NDIM_MAX - 1, &dim));
	r->dim = (int32_t)dim;
	return OK;
}

static FALLIBLE enum err read_name(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	TRY(arena_alloc(p->a, 1, sizeof *r->names, &r->names));
	r->name_count = 1;
	return read_text(v, r->names);
}

/* -------------------------------------------------------------------------------------------- one function a kind of rule */

static FALLIBLE enum err read_rename(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	return read_name(p, v, r);
}

static FALLIBLE enum err read_dtype(const struct parser *, const struct jval *v, struct conversion_rule *r)
{
	struct str name;

	TRY(jval_string(v, &name));
	if (dtype_parse(name, &r->dtype) != OK)
		return jval_fail(v, ERR_VALIDATION_FAILED, "\"%.32s\" is no dtype, such as \"bfloat16\"", name.p);
	return OK;
}

static FALLIBLE enum err read_split(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	struct jval sizes = jval_get(v, "sizes"), parts = jval_get(v, "parts"), into = jval_get(v, "into");

	TRY(jval_only(v, (const char *const[]){ "dim", "sizes", "parts", "into", NULL }));
	TRY(read_dim(v, r));
	TRY(read_texts(p, &into, &r->names, &r->name_count));
	if (!sizes.j == !parts.j)
		return jval_fail(v, ERR_VALIDATION_FAILED, "has sizes or parts, one of the two");
	if (parts.j) {
		TRY(jval_integer(&parts, 1, CONVERSION_NAMES_MAX, &r->parts));
	} else {
		TRY(read_sizes(p, &sizes, 0, CONVERSION_NAMES_MAX, r));
	}
	uint64_t n = parts.j ? (uint64_t)r->parts : r->size_count;
	if (n != r->name_count)
		return jval_fail(&into, ERR_VALIDATION_FAILED, "has %u names for %ju parts", r->name_count, (uintmax_t)n);
	return OK;
}

/* concat and stack. */
static FALLIBLE enum err read_join(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	struct jval into = jval_get(v, "into"), order = jval_get(v, "order");

	TRY(jval_only(v, (const char *const[]){ "dim", "into", "order", NULL }));
	TRY(read_dim(v, r));
	TRY(read_name(p, &into, r));
	return order.j ? read_texts(p, &order, &r->order, &r->order_count) : OK;
}

static FALLIBLE enum err read_unstack(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	struct jval into = jval_get(v, "into");

	TRY(jval_only(v, (const char *const[]){ "dim", "into", NULL }));
	TRY(read_dim(v, r));
	TRY(read_name(p, &into, r));
	if (!memmem(r->names->p, r->names->n, "{i}", 3))
		return jval_fail(&into, ERR_VALIDATION_FAILED, "has no {i} for the number of the part");
	return OK;
}

static FALLIBLE enum err read_permute(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	uint64_t seen = 0;

	TRY(read_sizes(p, v, -NDIM_MAX, NDIM_MAX, r));
	for (uint32_t i = 0; i < r->size_count; i++) {
		struct jval one = jval_at(v, i);
		int64_t d = r->sizes[i].number < 0 ? r->sizes[i].number + r->size_count : r->sizes[i].number;
		if (r->sizes[i].text.p || d < 0 || d >= (int64_t)r->size_count || seen >> d & 1)
			return jval_fail(&one, ERR_VALIDATION_FAILED, "the dims are 0 to %u, each once", r->size_count - 1);
		seen |= (uint64_t)1 << d;
		r->sizes[i].number = d;
	}
	return OK;
}

static FALLIBLE enum err read_reshape(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	bool rest = false;

	TRY(read_sizes(p, v, -1, NDIM_MAX, r));
	for (uint32_t i = 0; i < r->size_count; i++) {
		struct jval one = jval_at(v, i);
		if (r->sizes[i].text.p || r->sizes[i].number >= 0)
			continue;
		if (rest)
			return jval_fail(&one, ERR_VALIDATION_FAILED, "only one size can be -1, what is left");
		rest = true;
	}
	return OK;
}

static FALLIBLE enum err read_pad(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	struct jval to = jval_get(v, "to");

	TRY(jval_only(v, (const char *const[]){ "dim", "to", NULL }));
	TRY(read_dim(v, r));
	TRY(arena_alloc(p->a, 1, sizeof *r->sizes, &r->sizes));
	r->size_count = 1;
	return read_size(p, &to, 0, r->sizes);
}

/* One side of "0:{vocab}". */
static FALLIBLE enum err read_bound(const struct parser *p, const struct jval *v, struct str text, struct conversion_size *out)
{
	bool minus = text.n > 1 && *text.p == '-';
	uint64_t n = 0;

	out->number = CONVERSION_OPEN;
	if (text.n == 0)
		return OK;
	if (*text.p == '{')
		return read_worked_out(p, v, text, out);
	if (!str_to_u64((struct str){ text.p + minus, text.n - minus }, &n) || n >= INT64_MAX)
		return jval_fail(v, ERR_VALIDATION_FAILED, "is no slice such as \"0:8\", \"-2:\" or \":\"");
	out->number = minus ? -(int64_t)n : (int64_t)n;
	return OK;
}

static FALLIBLE enum err read_slice(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	size_t n = 0;

	TRY(jval_array(v, NDIM_MAX, &n));
	TRY(arena_alloc(p->a, 2 * n + 1, sizeof *r->sizes, &r->sizes));
	r->size_count = (uint32_t)(2 * n);
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(v, i);
		struct str text;
		TRY(read_text(&one, &text));
		const char *colon = memchr(text.p, ':', text.n);
		if (!colon)
			return jval_fail(&one, ERR_VALIDATION_FAILED, "is no slice such as \"0:8\", \"-2:\" or \":\"");
		size_t left = (size_t)(colon - text.p);
		TRY(read_bound(p, &one, (struct str){ text.p, left }, &r->sizes[2 * i]));
		TRY(read_bound(p, &one, (struct str){ colon + 1, text.n - left - 1 }, &r->sizes[2 * i + 1]));
	}
	return OK;
}

static FALLIBLE enum err read_drop(const struct parser *, const struct jval *v, struct conversion_rule *)
{
	return json_is_true(v->j) ? OK : jval_fail(v, ERR_VALIDATION_FAILED, "can only be true");
}

static FALLIBLE enum err read_from(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	struct jval fqn = jval_get(v, "fqn");

	TRY(ref_read(v, REF_CHECKPOINT, (const char *const[]){ "fqn", NULL }, &r->from));
	return fqn.j ? read_name(p, &fqn, r) : OK;
}

static const struct {
	const char *key;
	enum err (*read)(const struct parser *p, const struct jval *v, struct conversion_rule *r);
} kinds[] = {
	[CONVERT_RENAME] = { "rename", read_rename },    [CONVERT_DTYPE] = { "dtype", read_dtype },
	[CONVERT_SPLIT] = { "split", read_split },       [CONVERT_CONCAT] = { "concat", read_join },
	[CONVERT_STACK] = { "stack", read_join },        [CONVERT_UNSTACK] = { "unstack", read_unstack },
	[CONVERT_PERMUTE] = { "permute", read_permute }, [CONVERT_RESHAPE] = { "reshape", read_reshape },
	[CONVERT_PAD] = { "pad", read_pad },             [CONVERT_SLICE] = { "slice", read_slice },
	[CONVERT_DROP] = { "drop", read_drop },          [CONVERT_FROM] = { "from", read_from },
	[CONVERT_TIE] = { "tie", read_rename },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static FALLIBLE enum err read_rule(const struct parser *p, const struct jval *v, struct conversion_rule *r)
{
	struct jval match = jval_get(v, "match"), what;
	const char *keys[KINDS + 3] = { "match", "optional" };
	uint32_t found = 0;

	for (int k = 0; k < KINDS; k++)
		keys[2 + k] = kinds[k].key;
	TRY(jval_only(v, keys));
	TRY(read_text(&match, &r->match));
	if (r->match.n == 0)
		return jval_fail(&match, ERR_VALIDATION_FAILED, "is empty");
	TRY(jval_opt_bool(v, "optional", &r->optional));
	for (int k = 0; k < KINDS; k++) {
		if (!jval_get(v, kinds[k].key).j)
			continue;
		r->kind = (enum conversion_kind)k;
		found++;
	}
	if (found != 1)
		return jval_fail(v, ERR_VALIDATION_FAILED, "has %u of rename, dtype, split, concat, stack, unstack, permute, reshape, pad, "
				 "slice, drop, from and tie: a rule has one", found);
	r->word = kinds[r->kind].key;
	what = jval_get(v, r->word);
	return kinds[r->kind].read(p, &what, r);
}

static FALLIBLE enum err check_vars(const struct jval *vars)
{
	const char *key;
	json_t *value;

	if (!vars->j)
		return OK;
	if (!json_is_object(vars->j))
		return jval_only(vars, (const char *const[]){ NULL });
	if (json_object_size(vars->j) > CONVERSION_VARS_MAX)
		return jval_fail(vars, ERR_VALIDATION_FAILED, "more than %d names", CONVERSION_VARS_MAX);
	json_object_foreach(vars->j, key, value) {
		struct jval one = { value, vars, key, 0 };
		int64_t number = 0;
		size_t n = strlen(key);
		if (n == 0 || n > 32 || strspn(key, "abcdefghijklmnopqrstuvwxyz0123456789_") != n || (*key >= '0' && *key <= '9') ||
		    strncmp(key, "dim", 3) == 0)
			return jval_fail(&one, ERR_VALIDATION_FAILED, "a name has a-z, 0-9 and _, and begins with neither a digit nor dim");
		TRY(jval_integer(&one, 0, INT64_MAX, &number));
	}
	return OK;
}

enum err conversion_read(const struct jval *transform, const struct jval *vars, struct arena *a, struct conversion *out)
{
	struct parser p = { a, out };
	size_t n = 0;

	*out = (struct conversion){ .vars = vars->j };
	TRY(check_vars(vars));
	if (!transform->j)
		return OK;
	TRY(jval_array(transform, CONVERSION_RULES_MAX, &n));
	TRY(arena_alloc(a, n + 1, sizeof *out->rules, &out->rules));
	out->count = (uint32_t)n;
	for (size_t i = 0; i < n; i++) {
		struct jval rule = jval_at(transform, i);
		TRY(read_rule(&p, &rule, &out->rules[i]));
	}
	return OK;
}
