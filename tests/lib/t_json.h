/* t_json.h: JSON in a test's text, with ' for ". */
#pragma once
#include <jansson.h>
#include <stdio.h>
#include "lib/t.h"

/* Parses it (json_decref); the test fails if it is none. */
static inline json_t *t_json(const char *text)
{
	char json[8192];
	json_error_t at;

	assert_true((size_t)snprintf(json, sizeof json, "%s", text) < sizeof json);
	for (char *p = json; *p; p++)
		*p = *p == '\'' ? '"' : *p;
	json_t *doc = json_loads(json, JSON_DECODE_ANY, &at);
	if (!doc)
		T_FAIL("%s: %s", json, at.text);
	return doc;
}
