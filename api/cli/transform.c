/* transform.c: see transform.h. */
#include "api/cli/transform.h"

#include <stdio.h>

#include "api/cli/request.h"
#include "base/str.h"

static FALLIBLE enum err ask(struct client *c, const char *name, json_t **out)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(8192);
	struct answer got = { 0 };

	client_put(&path, "/v1/transforms/%", name);
	TRY(client_get_at(c, &path, &got));
	*out = json_incref(got.json);
	client_drop(&got);
	return *out ? OK : ERR(PROTOCOL, "the daemon has no JSON for the rules %s", name);
}

static FALLIBLE enum err add_rules(struct client *c, const char *text, json_t *list)
{
	CLEANUP(jval_drop) json_t *set = NULL;

	TRY(strchr(text, '/') || str_ends(str_of(text), ".json") ? args_file("transform", text, &set) : ask(c, text, &set));
	json_t *rules = json_is_object(set) ? json_object_get(set, "transform") : set;
	if (!json_is_array(rules))
		return ERR(INVALID_REQUEST, "--transform %s: is neither a list of rules nor an object with one in \"transform\"", text);
	return json_array_extend(list, rules) == 0 ? OK : ERR(NO_MEMORY, "cannot keep the rules");
}

static FALLIBLE enum err add_var(const char *text, json_t *vars)
{
	const char *equals = strchr(text, '=');
	char name[128];
	uint64_t n = 0;

	if (!equals || equals == text || (size_t)(equals - text) >= sizeof name || !str_to_u64(str_of(equals + 1), &n) || n > INT64_MAX)
		return ERR(INVALID_REQUEST, "--set has the form NAME=N, not \"%.100s\"", text);
	snprintf(name, sizeof name, "%.*s", (int)(equals - text), text);
	return request_set(vars, name, json_integer((json_int_t)n));
}

enum err transform_fields(struct client *c, const struct args *a, json_t *doc)
{
	json_t *rules = NULL, *vars = NULL;
	const char *text;

	for (unsigned i = 0; (text = args_next(a, "transform", &i));) {
		if (!rules)
			TRY(request_set(doc, "transform", rules = json_array()));
		TRY(add_rules(c, text, rules));
	}
	for (unsigned i = 0; (text = args_next(a, "set", &i));) {
		if (!vars)
			TRY(request_set(doc, "vars", vars = json_object()));
		TRY(add_var(text, vars));
	}
	return OK;
}
