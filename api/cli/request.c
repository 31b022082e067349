/* request.c: see request.h. */
#include "api/cli/request.h"

#include <stdio.h>
#include <stdlib.h>

#include "spec/fields.h"

FALLIBLE enum err request_set(json_t *o, const char *key, json_t *value_new)
{
	if (json_object_set_new(o, key, value_new) != 0)
		return ERR(INVALID_REQUEST, "--%s is not UTF-8", key);
	return OK;
}

/* An object inside o, made when it is not there. */
static json_t *child(json_t *o, const char *key)
{
	if (key && !json_object_get(o, key))
		(void)json_object_set_new(o, key, json_object());
	return key ? json_object_get(o, key) : o;
}

static FALLIBLE enum err read_integer(const struct field *f, const char *text, json_t **out)
{
	uint64_t n = 0;

	if (!str_to_u64(str_of(text), &n) || n > INT64_MAX)
		return ERR(INVALID_REQUEST, "--%s must be a number, not \"%.50s\"", f->option, text);
	*out = json_integer((json_int_t)n);
	return OK;
}

static FALLIBLE enum err read_real(const struct field *f, const char *text, json_t **out)
{
	char *end = NULL;
	double n = strtod(text, &end);

	if (end == text || *end)
		return ERR(INVALID_REQUEST, "--%s must be a number, not \"%.50s\"", f->option, text);
	*out = json_real(n);
	return OK;
}

/* "0.5,0.5" */
static FALLIBLE enum err read_reals(const struct field *f, const char *text, json_t **out)
{
	json_t *list = *out = json_array();

	for (char *end;; text = end + 1) {
		double n = strtod(text, &end);
		if (end == text || (*end && *end != ',') || json_array_append_new(list, json_real(n)) != 0)
			return ERR(INVALID_REQUEST, "--%s has the form 0.5,0.5, not \"%.50s\"", f->option, text);
		if (!*end)
			return OK;
	}
}

/* "0,2,3" */
static FALLIBLE enum err read_ranks(const struct field *f, const char *text, json_t **out)
{
	json_t *list = json_array();

	*out = list;
	for (;;) {
		size_t n = strcspn(text, ",");
		uint64_t rank = 0;
		if (!str_to_u64((struct str){ text, n }, &rank) || rank > INT32_MAX)
			return ERR(INVALID_REQUEST, "--%s has the form 0,2,3, not \"%.50s\"", f->option, text);
		if (json_array_append_new(list, json_integer((json_int_t)rank)) != 0)
			return ERR(NO_MEMORY, "cannot keep --%s", f->option);
		if (!text[n])
			return OK;
		text += n + 1;
	}
}

/* Takes a value of an option: the field, or an item of the list that the field is. */
static FALLIBLE enum err read_value(const struct field *f, const char *text, json_t **out)
{
	switch (f->type) {
	case FIELD_BOOL:
		*out = json_boolean(!f->fallback || strcmp(f->fallback, "true") != 0);
		return OK;
	case FIELD_INTEGER:
		return read_integer(f, text, out);
	case FIELD_NUMBER:
		return read_real(f, text, out);
	case FIELD_RANKS:
		return read_ranks(f, text, out);
	case FIELD_NUMBERS:
		return read_reals(f, text, out);
	case FIELD_STATE_DICT:
	case FIELD_CHECKPOINT:
		return args_ref(text, out);
	case FIELD_RENAMES:
		return args_rename(text, out);
	case FIELD_DTYPES:
		return args_pair(text, out);
	case FIELD_LAYOUT:
		return args_layout(text, out);
	default:
		*out = json_string(text);
		return OK;
	}
}

/* KEY=VALUE, a member of the object that the field is: a text, or a number. */
static FALLIBLE enum err add_member(const struct field *f, const char *text, json_t *object)
{
	const char *equals = strchr(text, '=');
	json_t *value = NULL;
	char key[128];

	if (!equals || equals == text || (size_t)(equals - text) >= sizeof key)
		return ERR(INVALID_REQUEST, "--%s has the form %s", f->option, f->value);
	snprintf(key, sizeof key, "%.*s", (int)(equals - text), text);
	if (f->type == FIELD_METRICS)
		TRY(read_real(f, equals + 1, &value));
	else
		value = json_string(equals + 1);
	return json_object_set_new(object, key, value) == 0 ? OK : ERR(INVALID_REQUEST, "--%s is not UTF-8, or no number", f->option);
}

static FALLIBLE enum err add_field(const struct args *a, const struct field *f, json_t *at)
{
	bool is_list = f->type == FIELD_GLOBS || f->type == FIELD_RENAMES || f->type == FIELD_DTYPES || f->type == FIELD_LAYOUT;
	json_t *value = NULL, *list = is_list ? json_array() : NULL;
	const char *text;
	unsigned i = 0;

	if (is_list)
		TRY(request_set(at, f->key, list));
	while ((text = args_next(a, f->option, &i))) {
		if (f->type == FIELD_LABELS || f->type == FIELD_METRICS) {
			TRY(add_member(f, text, child(at, f->key)));
			continue;
		}
		enum err e = read_value(f, text, &value);
		if (e) {
			json_decref(value);
			return e;
		}
		if (!is_list)
			TRY(request_set(at, f->key, value));
		else if (json_array_append_new(list, value) != 0)
			return ERR(INVALID_REQUEST, "--%s is not UTF-8", f->option);
		value = NULL;
	}
	return OK;
}

FALLIBLE enum err request_fields(const struct args *a, enum job_kind kind, json_t *doc)
{
	for (const struct field *f = field_next(kind, NULL); f; f = field_next(kind, f))
		if (f->option && args_flag(a, f->option) && f->type != FIELD_TRANSFORM && f->type != FIELD_VARS)
			TRY(add_field(a, f, child(doc, field_place_key(f->place))));
	return OK;
}

FALLIBLE enum err request_ref(json_t *doc, const char *key, const char *text)
{
	json_t *ref = NULL;

	TRY(args_ref(text, &ref));
	return request_set(doc, key, ref);
}
