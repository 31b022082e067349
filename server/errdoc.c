/* errdoc.c: see errdoc.h. A worker's words are taken as data: wrong types are left out, not refused, because the job has failed
 * already and its owner should see as much of the reason as there is. */
#include "server/errdoc.h"

#include <stdio.h>
#include <string.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"

static json_t *spare;

static void put_text(json_t *o, const char *key, const char *text)
{
	if (!text[0])
		return;
	json_t *v = json_string(text);
	if (!v)
		v = json_string("(not UTF-8)");
	json_object_set_new(o, key, v);
}

static void put_details(json_t *o, const struct err_info *info)
{
	put_text(o, "detail", info->text);
	if (info->rank >= 0)
		json_object_set_new(o, "rank", json_integer(info->rank));
	put_text(o, "fqn", info->fqn);
	put_text(o, "file", info->file);
	if (info->offset >= 0)
		json_object_set_new(o, "offset", json_integer(info->offset));
	put_text(o, "expected", info->expected);
	put_text(o, "actual", info->actual);
	put_text(o, "pointer", info->pointer);
}

json_t *errdoc_of(enum err e)
{
	const struct err_info *info = err_last();
	uint64_t failures = mem_failures();
	json_t *o = json_object();
	char type[128];
	snprintf(type, sizeof type, "urn:dcpd:problem:%s", err_code_name(e));
	put_text(o, "type", type);
	put_text(o, "code", err_code_name(e));
	put_text(o, "title", err_title(e));
	json_object_set_new(o, "status", json_integer(err_http_status(e)));
	json_object_set_new(o, "retryable", json_boolean(err_retryable(e)));
	if (info->code == e)
		put_details(o, info);
	if (mem_failures() == failures)
		return o;
	json_decref(o);
	return NULL;
}

json_t *errdoc_sure(enum err e)
{
	json_t *o = errdoc_of(e);

	return o ? o : json_incref(spare);
}

enum err errdoc_init(void)
{
	if (!spare)
		spare = errdoc_of(ERR(NO_MEMORY, "no memory was left to say what went wrong"));
	return spare ? OK : ERR(NO_MEMORY, "cannot set memory aside");
}

static void take_text(const json_t *problem, const char *key, char *into, size_t cap)
{
	const char *text = json_string_value(json_object_get(problem, key));

	if (!text)
		return;
	size_t n = strnlen(text, cap - 1);
	while (n > 0 && text[n] != '\0' && ((unsigned char)text[n] & 0xc0) == 0x80)
		n--; /* never half a character */
	memcpy(into, text, n);
	into[n] = '\0';
}

static int64_t take_number(const json_t *problem, const char *key)
{
	const json_t *v = json_object_get(problem, key);

	return json_is_integer(v) && json_integer_value(v) >= 0 ? json_integer_value(v) : -1;
}

enum err errdoc_restore(const json_t *problem)
{
	struct err_info info = { .rank = -1, .offset = -1, .place = "worker" };
	const char *code = json_string_value(json_object_get(problem, "code"));

	info.code = code ? err_from_name(code) : ERR_PROTOCOL;
	info.rank = take_number(problem, "rank");
	info.offset = take_number(problem, "offset");
	info.in_doubt = json_is_true(json_object_get(problem, "in_doubt"));
	take_text(problem, "detail", info.text, sizeof info.text);
	take_text(problem, "fqn", info.fqn, sizeof info.fqn);
	take_text(problem, "file", info.file, sizeof info.file);
	take_text(problem, "expected", info.expected, sizeof info.expected);
	take_text(problem, "actual", info.actual, sizeof info.actual);
	take_text(problem, "pointer", info.pointer, sizeof info.pointer);
	if (!info.text[0])
		snprintf(info.text, sizeof info.text, "%s", err_title(info.code));
	err_restore(&info);
	return info.code;
}

/* The longest list of an object, NULL: all are empty. */
static json_t *longest_list(json_t *o)
{
	json_t *longest = NULL, *v;
	const char *key;

	json_object_foreach(o, key, v)
		if (json_is_array(v) && json_array_size(v) > json_array_size(longest))
			longest = v;
	return longest;
}

/* SIZE_MAX: too many, or no memory. */
static size_t bytes_of(const json_t *doc)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);

	return text ? strlen(text) : SIZE_MAX;
}

json_t *errdoc_more(const json_t *problem)
{
	json_t *more = json_object_get(problem, "more"), *list;

	if (!json_is_object(more) || !(more = json_deep_copy(more)))
		return NULL;
	while (bytes_of(more) > ERRDOC_MORE_MAX) {
		list = longest_list(more);
		if (!list) {
			json_decref(more);
			return NULL;
		}
		for (size_t n = json_array_size(list), keep = n / 2; n > keep; n--)
			json_array_remove(list, n - 1);
	}
	return more;
}

void errdoc_add(json_t *doc, const json_t *more)
{
	if (doc && doc != spare && more && json_object_update_missing(doc, (json_t *)(uintptr_t)more) != 0)
		log_warn("no memory for all that an error says", NULL);
}

void errdoc_set(json_t *doc, const char *key, json_t *value)
{
	if (doc == spare)
		json_decref(value);
	else if (json_object_set_new(doc, key, value) != 0)
		log_warn("no memory for all that an error says", NULL);
}

void errdoc_warn(json_t *result, const char *code, const char *detail)
{
	json_t *warnings = json_object_get(result, "warnings");

	if (!json_is_array(warnings) && json_object_set_new(result, "warnings", warnings = json_array()) != 0)
		return;
	(void)json_array_append_new(warnings, json_pack("{s:s, s:s}", "code", code, "detail", detail));
}

json_t *errdoc_brief(const json_t *doc)
{
	json_t *brief = json_copy((json_t *)(uintptr_t)doc), *v;
	const char *key;
	void *next;

	json_object_foreach_safe(brief, next, key, v)
		if (json_is_array(v))
			json_object_del(brief, key);
	return brief;
}
