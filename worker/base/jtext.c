/* jtext.c: see jtext.h.
 *
 * A failed allocation must not return into jansson's reader, so it jumps out of it. Everything that the reader allocated is noted
 * until then, and freed. A block that the reader frees is freed at the end: finding it in the note would take longer. */
#include "base/jtext.h"

#include <setjmp.h>

#include "base/mem.h"

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

char *jtext_of(const json_t *doc)
{
	uint64_t failures = mem_failures();
	char *text = doc ? json_dumps(doc, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;

	if (text && mem_failures() != failures) {
		mem_free(text);
		return NULL;
	}
	return text;
}
