/* policy.c: see policy.h. */
#include "spec/policy.h"

#include "spec/ref.h"

enum { COUNT_MAX = 1000000 };

static FALLIBLE enum err opt_duration(const struct jval *object, const char *key, int64_t *ms_out)
{
	struct jval v = jval_get(object, key);
	struct str text;

	if (!v.j)
		return OK;
	TRY(jval_string(&v, &text));
	if (!str_to_ms(text, ms_out) || *ms_out <= 0)
		return jval_fail(&v, ERR_VALIDATION_FAILED, "is no time, such as \"24h\"");
	return OK;
}

/* A text of the document with so many bytes at most, and at least one. */
static FALLIBLE enum err must_text(const struct jval *object, const char *key, size_t max, struct str *out)
{
	struct jval v = jval_get(object, key);

	TRY(jval_must_text(object, key, out));
	if (out->n == 0 || out->n > max)
		return jval_fail(&v, ERR_VALIDATION_FAILED, "has 1 to %zu bytes", max);
	return OK;
}

static FALLIBLE enum err read_best(const struct jval *keep, struct policy *out)
{
	static const char *const modes[] = { "min", "max", NULL };
	struct jval best = jval_get(keep, "best");
	size_t mode = 0;

	if (!best.j)
		return OK;
	TRY(jval_only(&best, (const char *const[]){ "metric", "mode", "count", NULL }));
	TRY(must_text(&best, "metric", POLICY_METRIC_BYTES_MAX, &out->best.metric));
	TRY(jval_opt_word(&best, "mode", modes, &mode));
	out->best.count = 1;
	TRY(jval_opt_integer(&best, "count", 1, COUNT_MAX, &out->best.count));
	out->best.max = mode == 1;
	return OK;
}

static FALLIBLE enum err read_keep(const struct jval *root, struct policy *out)
{
	struct jval keep = jval_get(root, "keep");

	if (!keep.j)
		return jval_fail(&keep, ERR_VALIDATION_FAILED, "says what stays, and when the rest goes: it is needed");
	TRY(jval_only(&keep, (const char *const[]){ "last", "every_steps", "every", "best", "ttl", "bytes", NULL }));
	if (json_object_size(keep.j) == 0)
		return jval_fail(&keep, ERR_VALIDATION_FAILED, "needs a rule: last, every_steps, every, best, ttl or bytes");
	TRY(jval_opt_integer(&keep, "last", 1, COUNT_MAX, &out->last));
	TRY(jval_opt_integer(&keep, "every_steps", 1, INT64_MAX, &out->every_steps));
	TRY(opt_duration(&keep, "every", &out->every_ms));
	TRY(read_best(&keep, out));
	TRY(opt_duration(&keep, "ttl", &out->ttl_ms));
	return jval_opt_integer(&keep, "bytes", 0, INT64_MAX, &out->bytes);
}

FALLIBLE enum err policy_read(json_t *doc, struct policy *out)
{
	struct jval root = JVAL_ROOT(doc), storage = jval_get(&root, "storage");
	bool confirm = false;

	*out = (struct policy){ .bytes = -1 };
	TRY(jval_only(&root, (const char *const[]){ "storage", "match", "keep", "verified_only", "trash", "paused", "confirm", NULL }));
	TRY(jval_must_text(&root, "storage", &out->storage));
	TRY(jval_failed(&storage, ref_check_storage(out->storage)));
	TRY(must_text(&root, "match", POLICY_MATCH_BYTES_MAX, &out->match));
	TRY(read_keep(&root, out));
	TRY(jval_opt_bool(&root, "verified_only", &out->verified_only));
	TRY(opt_duration(&root, "trash", &out->trash_ms));
	TRY(jval_opt_bool(&root, "paused", &out->is_paused));
	return jval_opt_bool(&root, "confirm", &confirm);
}

bool policy_matches(const struct policy *p, struct str storage, struct str run)
{
	return str_eq(p->storage, storage) && str_glob(p->match, run);
}

bool policy_matches_all(const struct policy *p)
{
	for (size_t i = 0; i < p->match.n; i++)
		if (p->match.p[i] != '*')
			return false;
	return true;
}
