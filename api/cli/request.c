/* request.c: see request.h. */
#include "api/cli/request.h"

#include <stdio.h>
#include <stdlib.h>

FALLIBLE enum err request_set(json_t *o, const char *key, json_t *value_new)
{
	if (json_object_set_new(o, key, value_new) != 0)
		return ERR(INVALID_REQUEST, "--%s is not UTF-8", key);
	return OK;
}

/* An object inside o, made when it is not there. */
json_t *request_child(json_t *o, const char *key)
{
	if (!json_object_get(o, key))
		(void)json_object_set_new(o, key, json_object());
	return json_object_get(o, key);
}

FALLIBLE enum err request_integer(const struct args *a, const char *option, json_t *o, const char *key)
{
	const char *text = args_value(a, option);
	uint64_t n = 0;

	if (!text)
		return OK;
	if (!str_to_u64(str_of(text), &n) || n > INT64_MAX)
		return ERR(INVALID_REQUEST, "--%s must be a number, not \"%.50s\"", option, text);
	return request_set(o, key, json_integer((json_int_t)n));
}

FALLIBLE enum err request_real(const struct args *a, const char *option, json_t *o)
{
	const char *text = args_value(a, option);
	char *end = NULL;
	double n = text ? strtod(text, &end) : 0;

	if (!text)
		return OK;
	if (end == text || *end)
		return ERR(INVALID_REQUEST, "--%s must be a number, not \"%.50s\"", option, text);
	return request_set(o, option, json_real(n));
}

FALLIBLE enum err request_text(const struct args *a, const char *option, json_t *o, const char *key)
{
	const char *text = args_value(a, option);

	return text ? request_set(o, key, json_string(text)) : OK;
}

enum err request_plain(const char *text, json_t **out)
{
	*out = json_string(text);
	return *out ? OK : ERR(INVALID_REQUEST, "an argument is not UTF-8");
}

/* Every value of a repeated option, as an array. */
FALLIBLE enum err request_list(const struct args *a, const char *option, json_t *o, request_reader read)
{
	json_t *list = NULL, *item = NULL;
	const char *text;
	unsigned at = 0;

	while ((text = args_next(a, option, &at))) {
		if (!list) {
			list = json_array();
			TRY(request_set(o, option, list));
		}
		TRY(read(text, &item));
		if (json_array_append_new(list, item) != 0)
			return ERR(NO_MEMORY, "cannot keep --%s", option);
	}
	return OK;
}

FALLIBLE enum err request_ranks(const struct args *a, const char *option, json_t *o, const char *key)
{
	const char *text = args_value(a, option);
	json_t *list;

	if (!text)
		return OK;
	list = json_array();
	TRY(request_set(o, key, list));
	for (;;) {
		size_t n = strcspn(text, ",");
		uint64_t rank = 0;
		if (!str_to_u64((struct str){ text, n }, &rank) || rank > INT32_MAX)
			return ERR(INVALID_REQUEST, "--%s has the form 0,2,3, not \"%.50s\"", option, text);
		if (json_array_append_new(list, json_integer((json_int_t)rank)) != 0)
			return ERR(NO_MEMORY, "cannot keep --%s", option);
		if (!text[n])
			return OK;
		text += n + 1;
	}
}

FALLIBLE enum err request_labels(const struct args *a, json_t *doc)
{
	const char *text;
	unsigned at = 0;

	while ((text = args_next(a, "label", &at))) {
		const char *equals = strchr(text, '=');
		char key[128];
		if (!equals || equals == text || (size_t)(equals - text) >= sizeof key)
			return ERR(INVALID_REQUEST, "--label has the form KEY=VALUE");
		snprintf(key, sizeof key, "%.*s", (int)(equals - text), text);
		TRY(request_set(request_child(doc, "labels"), key, json_string(equals + 1)));
	}
	return OK;
}

FALLIBLE enum err request_ref(json_t *doc, const char *key, const char *text)
{
	json_t *ref = NULL;

	TRY(args_ref(text, &ref));
	return request_set(doc, key, ref);
}
