/* roots.c: see roots.h. */
#include "store/roots.h"

#include <string.h>

enum err roots_find(const struct roots *roots, const char *name, uint32_t *index_out)
{
	for (uint32_t i = 0; i < roots->count; i++) {
		if (strcmp(roots->v[i].name, name) != 0)
			continue;
		if (roots->fds[i] < 0) {
			err_restore(&roots->v[i].error);
			return roots->v[i].error.code;
		}
		*index_out = i;
		return OK;
	}
	return ERR(NOT_FOUND, "this worker has no storage '%s'", name);
}
