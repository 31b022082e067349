/* t_spec.h: for tests of POST /v1/jobs' body: texts into documents, and what is refused. */
#pragma once
#include "base/jval.h"
#include "spec/spec.h"
#include "lib/t.h"

static inline json_t *t_spec_parse(const char *text)
{
	json_t *doc = NULL;

	T_OK(jval_parse(str_of(text), &doc));
	return doc;
}

/* The check must fail with this code at this JSON pointer. */
static inline void t_spec_refused(enum err code, const char *pointer, const char *text)
{
	json_t *doc = t_spec_parse(text);
	CLEANUP(spec_free) struct spec s = { 0 };
	enum err e = spec_read(doc, &s);

	if (e != code || strcmp(err_last()->pointer, pointer) != 0)
		T_FAIL("%s: got %s at %s (%s)", text, err_code_name(e), err_last()->pointer, err_last()->text);
	json_decref(doc);
}
