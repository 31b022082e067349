/* lookup_list.h: the names of a storage's directories, kept by a look-up worker from one page of a list to the next. */
#pragma once
#include "query/lookup.h"
#include "query/lookup_cache.h"

struct lookup_dir;

struct lookup_tree {
	const struct store *store;
	struct lookup_dir *top;        /* NULL: nothing is known */
	uint64_t names;                /* in all directories */
};

void lookup_tree_free(struct lookup_tree *t);
