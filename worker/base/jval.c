/* jval.c: see jval.h.
 *
 * jansson's parser is recursive and allows 2048 levels, so the depth is counted in one pass over the bytes before it runs; its
 * own unpack functions give poor places, so the readers here keep the chain of parents and print it only when they refuse. */
#include "base/jval.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/jtext.h"
#include "base/near.h"

static FALLIBLE enum err check_depth(struct str text)
{
	unsigned depth = 0, line = 1;
	bool quoted = false;

	for (size_t i = 0; i < text.n; i++) {
		char c = text.p[i];
		line += c == '\n';
		if (quoted) {
			if (c == '\\')
				i++;
			else if (c == '"')
				quoted = false;
		} else if (c == '"') {
			quoted = true;
		} else if (c == '[' || c == '{') {
			if (++depth > JVAL_DEPTH_MAX)
				return ERR(INVALID_JSON, "line %u: nested deeper than %d levels", line,
					   JVAL_DEPTH_MAX);
		} else if ((c == ']' || c == '}') && depth > 0) {
			depth--;
		}
	}
	return OK;
}

/* An integer that is written as 7.0 or 7e0; NULL: it is none. A double holds every integer up to 2^53. */
static json_t *integer_of(const json_t *j)
{
	double d = json_real_value(j);

	return json_is_real(j) && d == floor(d) && fabs(d) <= (double)(1ll << 53) ? json_integer((json_int_t)d) : NULL;
}

/* Makes them integers, as JSON Schema has it: to it 7.0 and 7 are one number. */
static void take_integers(json_t *j)
{
	const char *key;
	json_t *value, *made;
	void *next;

	for (size_t i = 0; i < json_array_size(j); i++) {
		value = json_array_get(j, i);
		made = integer_of(value);
		if (!made)
			take_integers(value);
		else
			(void)json_array_set_new(j, i, made);
	}
	json_object_foreach_safe(j, next, key, value) {
		made = integer_of(value);
		if (!made)
			take_integers(value);
		else
			(void)json_object_set_new(j, key, made);
	}
}

FALLIBLE enum err jval_parse(struct str text, json_t **doc_out)
{
	json_t *doc;

	if (text.n == 0)
		return ERR(INVALID_JSON, "the body is empty, a JSON object is needed");
	TRY(check_depth(text));
	enum err e = jtext_parse(text, JSON_REJECT_DUPLICATES, &doc);
	if (e == ERR_INVALID_JSON) /* unless only a number was too large: any size is JSON, and its field says what fits */
		e = jtext_parse(text, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &doc);
	TRY(e);
	if (!json_is_object(doc)) {
		json_decref(doc);
		return ERR(INVALID_JSON, "line 1, column 1: a JSON object is needed, not an array");
	}
	take_integers(doc);
	*doc_out = doc;
	return OK;
}

void jval_drop(json_t **doc)
{
	json_decref(*doc);
	*doc = NULL;
}

FALLIBLE enum err jval_dump(const json_t *doc, struct buf *out)
{
	if (!doc)
		return ERR(NO_MEMORY, "cannot write JSON");
	jtext_put(out, doc);
	return buf_status(out);
}

struct jval jval_get(const struct jval *object, const char *key)
{
	return (struct jval){ object->j ? json_object_get(object->j, key) : NULL, object, key, 0 };
}

struct jval jval_at(const struct jval *array, size_t index)
{
	return (struct jval){ json_array_get(array->j, index), array, NULL, index };
}

static void put_pointer(struct buf *b, const struct jval *v, unsigned left)
{
	if (!v->up || left == 0)
		return;
	put_pointer(b, v->up, left - 1);
	buf_putc(b, '/');
	if (!v->key) {
		buf_printf(b, "%zu", v->index);
		return;
	}
	for (const char *p = v->key; *p; p++) {
		if (*p == '~' || *p == '/')
			buf_puts(b, *p == '~' ? "~0" : "~1");
		else
			buf_putc(b, (unsigned char)*p);
	}
}

enum err jval_fail(const struct jval *v, enum err code, const char *fmt, ...)
{
	CLEANUP(buf_free) struct buf pointer = BUF_INIT(1024);
	char text[512];
	va_list args;

	va_start(args, fmt);
	vsnprintf(text, sizeof text, fmt, args);
	va_end(args);
	put_pointer(&pointer, v, JVAL_DEPTH_MAX + 1);
	if (pointer.len == 0)
		buf_putc(&pointer, '/');
	buf_putc(&pointer, '\0');
	if (buf_status(&pointer) != OK) {
		err_record(code, 0, ERR_PLACE, "%s", text);
		return code;
	}
	err_record(code, 0, ERR_PLACE, "%s: %s", (const char *)pointer.p, text);
	return err_at_pointer(code, (const char *)pointer.p);
}

enum err jval_failed(const struct jval *v, enum err e)
{
	char text[ERR_TEXT_MAX];

	if (!e)
		return OK;
	memcpy(text, err_last()->text, sizeof text);
	return jval_fail(v, e, "%s", text);
}

static const char *type_name(const json_t *j)
{
	static const char *const names[] = { "an object", "an array", "a string", "an integer", "a real number",
					     "true", "false", "null" };

	return j ? names[json_typeof(j)] : "nothing";
}

static enum err wrong_type(const struct jval *v, const char *wanted)
{
	if (!v->j)
		return jval_fail(v, ERR_VALIDATION_FAILED, "the field is missing, it must be %s", wanted);
	return err_expected(jval_fail(v, ERR_VALIDATION_FAILED, "must be %s, not %s", wanted, type_name(v->j)),
			    wanted, type_name(v->j));
}

/* The list as text for a message, "a, b, c"; empty if there is no memory for it. */
static const char *join(const char *const *words, char *out, size_t max)
{
	size_t n = 0;

	out[0] = '\0';
	for (size_t i = 0; words[i] && n < max; i++)
		n += (size_t)snprintf(out + n, max - n, "%s%s", i ? ", " : "", words[i]);
	return out;
}

static enum err unknown_field(const struct jval *v, const char *const *keys)
{
	char hint[NEAR_HINT_MAX], list[384];

	near_hint(str_of(v->key), keys, hint);
	if (!keys[0])
		return jval_fail(v, ERR_UNKNOWN_FIELD, "this field is not known here: no field is");
	return err_expected(jval_fail(v, ERR_UNKNOWN_FIELD, "this field is not known here%s; known are: %s", hint,
				      join(keys, list, sizeof list)), list, v->key);
}

FALLIBLE enum err jval_only(const struct jval *object, const char *const *keys)
{
	const char *key;
	json_t *value;

	if (!json_is_object(object->j))
		return wrong_type(object, "an object");
	json_object_foreach(object->j, key, value) {
		size_t i = 0;
		while (keys[i] && strcmp(keys[i], key) != 0)
			i++;
		if (!keys[i]) {
			struct jval v = { value, object, key, 0 };
			return unknown_field(&v, keys);
		}
	}
	return OK;
}

FALLIBLE enum err jval_array(const struct jval *v, size_t max, size_t *count_out)
{
	if (!json_is_array(v->j))
		return wrong_type(v, "an array");
	if (json_array_size(v->j) > max)
		return jval_fail(v, ERR_VALIDATION_FAILED, "has %zu items, %zu are allowed",
				 json_array_size(v->j), max);
	*count_out = json_array_size(v->j);
	return OK;
}

FALLIBLE enum err jval_string(const struct jval *v, struct str *out)
{
	if (!json_is_string(v->j))
		return wrong_type(v, "a string");
	*out = (struct str){ json_string_value(v->j), json_string_length(v->j) };
	return OK;
}

FALLIBLE enum err jval_integer(const struct jval *v, int64_t min, int64_t max, int64_t *out)
{
	if (!json_is_integer(v->j))
		return wrong_type(v, "an integer");
	int64_t n = json_integer_value(v->j);
	if (n < min || n > max)
		return jval_fail(v, ERR_VALIDATION_FAILED, "%jd is not between %jd and %jd", (intmax_t)n,
				 (intmax_t)min, (intmax_t)max);
	*out = n;
	return OK;
}

FALLIBLE enum err jval_number(const struct jval *v, double min, double *out)
{
	if (!json_is_number(v->j))
		return wrong_type(v, "a number");
	double n = json_number_value(v->j);
	if (!isfinite(n) || n < min)
		return jval_fail(v, ERR_VALIDATION_FAILED, "%g is less than %g", n, min);
	*out = n;
	return OK;
}

FALLIBLE enum err jval_must_text(const struct jval *object, const char *key, struct str *out)
{
	struct jval v = jval_get(object, key);

	return jval_string(&v, out);
}

FALLIBLE enum err jval_opt_integer(const struct jval *object, const char *key, int64_t min, int64_t max, int64_t *out)
{
	struct jval v = jval_get(object, key);

	return v.j ? jval_integer(&v, min, max, out) : OK;
}

FALLIBLE enum err jval_opt_bool(const struct jval *object, const char *key, bool *out)
{
	struct jval v = jval_get(object, key);

	if (!v.j)
		return OK;
	if (!json_is_boolean(v.j))
		return wrong_type(&v, "true or false");
	*out = json_is_true(v.j);
	return OK;
}

FALLIBLE enum err jval_opt_word(const struct jval *object, const char *key, const char *const *words, size_t *out)
{
	struct jval v = jval_get(object, key);
	struct str word = { 0 };
	char hint[NEAR_HINT_MAX], list[384];

	if (!v.j)
		return OK;
	TRY(jval_string(&v, &word));
	for (size_t i = 0; words[i]; i++)
		if (str_is(word, words[i])) {
			*out = i;
			return OK;
		}
	return jval_fail(&v, ERR_VALIDATION_FAILED, "\"%.64s\" is none of: %s%s", word.p, join(words, list, sizeof list),
			 near_hint(word, words, hint));
}

FALLIBLE enum err jval_opt_texts(const struct jval *object, const char *key, size_t count_max, size_t bytes_max, struct arena *a,
				 struct strs *out)
{
	struct jval list = jval_get(object, key);
	size_t n = 0;

	if (list.j)
		TRY(jval_array(&list, count_max, &n));
	if (n)
		TRY(arena_alloc(a, n, sizeof *out->v, &out->v));
	for (out->n = 0; out->n < n; out->n++) {
		struct jval v = jval_at(&list, out->n);
		struct str *s = &out->v[out->n];
		TRY(jval_string(&v, s));
		if (s->n == 0 || s->n > bytes_max)
			return jval_fail(&v, ERR_VALIDATION_FAILED, "must have 1 to %zu bytes", bytes_max);
	}
	return OK;
}

const char *jval_text(const json_t *object, const char *key)
{
	return json_string_value(json_object_get(object, key)) ?: "";
}

struct str jval_str(const json_t *object, const char *key)
{
	const json_t *text = json_object_get(object, key);

	return json_is_string(text) ? (struct str){ json_string_value(text), json_string_length(text) } : STR("");
}

json_int_t jval_int(const json_t *object, const char *key)
{
	return json_integer_value(json_object_get(object, key));
}
