/* transform.h: --transform and --set: conversion rules out of files, or ready sets that the daemon has by name. */
#pragma once
#include "api/cli/args.h"
#include "api/cli/client.h"

/* Sets "transform" (the rules of every --transform, one set behind the other) and "vars" (of every --set), where they are given. A word
 * with a slash or the suffix .json is a file: a list of rules, or an object as GET /v1/transforms/NAME has it; anything else is a name. */
FALLIBLE enum err transform_fields(struct client *c, const struct args *a, json_t *doc);
