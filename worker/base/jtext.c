/* jtext.c: see jtext.h.
 *
 * A failed allocation must not return into jansson's reader, so it jumps out of it. Everything that the reader allocated is noted
 * until then, and freed. A block that the reader frees is freed at the end: finding it in the note would take longer. */
#include "base/jtext.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { TEXT_MAX = 1 << 30 };

struct blocks {
	void **p;
	size_t count, room;
};

struct parse {
	jmp_buf out_of_memory;
	struct blocks taken, freed;        /* taken: those in freed, too */
};

static _Thread_local struct parse *parsing;

static bool note(struct blocks *b, void *p)
{
	if (b->count == b->room) {
		size_t room = b->room ? b->room * 2 : 64;
		void **grown = mem_grow(b->p, room, sizeof *grown);
		if (!grown)
			return false;
		b->p = grown;
		b->room = room;
	}
	b->p[b->count++] = p;
	return true;
}

static void *json_alloc(size_t n)
{
	void *p = mem_alloc(n);

	if (parsing && (!p || !note(&parsing->taken, p))) {
		mem_free(p);
		longjmp(parsing->out_of_memory, 1);
	}
	return p;
}

static void json_free(void *p)
{
	if (!parsing || !p)
		mem_free(p);
	else if (!note(&parsing->freed, p))
		longjmp(parsing->out_of_memory, 1);
}

void jtext_init(void)
{
	json_set_alloc_funcs(json_alloc, json_free);
}

static void free_all(const struct blocks *b)
{
	for (size_t i = 0; i < b->count; i++)
		mem_free(b->p[i]);
}

static void end_parse(struct parse *p, const struct blocks *unused)
{
	parsing = NULL;
	free_all(unused);
	mem_free(p->taken.p);
	mem_free(p->freed.p);
}

enum err jtext_parse(struct str text, size_t flags, json_t **out)
{
	struct parse p = { .taken = { 0 } };
	json_error_t why;

	*out = NULL;
	if (setjmp(p.out_of_memory) != 0) {
		end_parse(&p, &p.taken);
		return ERR(NO_MEMORY, "no memory for %zu bytes of JSON", text.n);
	}
	parsing = &p;
	*out = json_loadb(text.p ? text.p : "", text.n, flags, &why);
	end_parse(&p, &p.freed);
	return *out ? OK : ERR(INVALID_JSON, "line %d, column %d: %s", why.line, why.column, why.text);
}

/* 15, 16 or 17: the fewest digits that read back the same. */
static int digits_of(double v, char text[40])
{
	int digits = 15;

	must(isfinite(v));
	for (; digits < 17; digits++) {
		snprintf(text, 40, "%.*g", digits, v);
		if (strtod(text, NULL) == v)
			return digits;
	}
	snprintf(text, 40, "%.*g", digits, v);
	return digits;
}

static size_t digits_in(const json_t *doc)
{
	const json_t *value;
	const char *key;
	size_t digits = 15, i;
	char text[40];

	if (json_is_real(doc))
		return (size_t)digits_of(json_real_value(doc), text);
	json_array_foreach(doc, i, value) {
		size_t of = digits_in(value);
		digits = of > digits ? of : digits;
	}
	json_object_foreach((json_t *)(uintptr_t)doc, key, value) {
		size_t of = digits_in(value);
		digits = of > digits ? of : digits;
	}
	return digits;
}

size_t jtext_real_flags(const json_t *doc)
{
	return JSON_REAL_PRECISION(digits_in(doc));
}

void jtext_put_double(struct buf *b, double v)
{
	char text[40];

	digits_of(v, text);
	buf_puts(b, text);
	if (!strpbrk(text, ".e"))
		buf_puts(b, ".0");
}

static void put_object(struct buf *b, json_t *object)
{
	const char *comma = "", *key;
	json_t *value;

	buf_putc(b, '{');
	json_object_foreach(object, key, value) {
		buf_puts(b, comma);
		buf_json_str(b, str_of(key));
		buf_putc(b, ':');
		jtext_put(b, value);
		comma = ",";
	}
	buf_putc(b, '}');
}

static void put_array(struct buf *b, const json_t *array)
{
	const json_t *value;
	size_t i;

	buf_putc(b, '[');
	json_array_foreach(array, i, value) {
		if (i)
			buf_putc(b, ',');
		jtext_put(b, value);
	}
	buf_putc(b, ']');
}

void jtext_put(struct buf *b, const json_t *doc)
{
	switch (json_typeof(doc)) {
	case JSON_OBJECT:
		put_object(b, (json_t *)(uintptr_t)doc);
		break;
	case JSON_ARRAY:
		put_array(b, doc);
		break;
	case JSON_STRING:
		buf_json_str(b, (struct str){ json_string_value(doc), json_string_length(doc) });
		break;
	case JSON_INTEGER:
		buf_printf(b, "%jd", (intmax_t)json_integer_value(doc));
		break;
	case JSON_REAL:
		jtext_put_double(b, json_real_value(doc));
		break;
	case JSON_TRUE:
	case JSON_FALSE:
		buf_puts(b, json_is_true(doc) ? "true" : "false");
		break;
	case JSON_NULL:
		buf_puts(b, "null");
		break;
	}
}

char *jtext_of(const json_t *doc)
{
	struct buf b = BUF_INIT(TEXT_MAX);

	if (!doc)
		return NULL;
	jtext_put(&b, doc);
	buf_putc(&b, '\0');
	if (buf_status(&b)) {
		buf_free(&b);
		return NULL;
	}
	return (char *)b.p;
}

json_t *jtext_value(struct str s)
{
	return json_stringn(s.p ? s.p : "", s.p ? s.n : 0) ?: json_string("?");
}

json_t *jtext_numbers(const int64_t *v, uint32_t n)
{
	json_t *list = json_array();

	for (uint32_t i = 0; i < n; i++)
		if (json_array_append_new(list, json_integer(v[i])) != 0) {
			json_decref(list);
			return NULL;
		}
	return list;
}
