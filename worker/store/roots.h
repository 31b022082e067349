/* roots.h: the storage roots of a worker, opened once for its whole life, and the job in whose name something is changed beneath them. */
#pragma once
#include <stdbool.h>
#include <sys/types.h>

#include "base/err.h"

enum { ROOTS_MAX = 64, ROOT_NAME_MAX = 33 };

struct root {
	char name[ROOT_NAME_MAX];
	struct err_info error;         /* why the root could not be opened */
};

struct roots {
	struct root v[ROOTS_MAX];
	int fds[ROOTS_MAX];            /* -1: could not be opened */
	uint32_t count;
};

/* The id names staging and trash; the uid owns what is committed; an admin may remove and replace everything. */
struct store_job {
	const struct roots *roots;
	const char *id;
	uint64_t attempt;
	uid_t uid;
	bool admin;
};

/* ERR_NOT_FOUND: the worker has no such storage; else the error that opening the root ended with. */
FALLIBLE enum err roots_find(const struct roots *roots, const char *name, uint32_t *index_out);
