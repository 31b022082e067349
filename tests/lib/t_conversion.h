/* t_conversion.h: conversion rules from a test's text. */
#pragma once
#include "lib/t_json.h"
#include "spec/conversion.h"

/* Reads {'transform':[…],'vars':…}; *doc, which they point into, takes the place of the one before. */
static inline enum err t_conversion(const char *text, json_t **doc, struct arena *arena, struct conversion *out)
{
	json_decref(*doc);
	*doc = t_json(text);
	struct jval root = JVAL_ROOT(*doc), transform = jval_get(&root, "transform"), vars = jval_get(&root, "vars");
	return conversion_read(&transform, &vars, arena, out);
}
