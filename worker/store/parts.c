/* parts.c: see parts.h. No format has folders more than DEPTH_MAX deep. */
#include "store/parts.h"

#include <dirent.h>
#include <stdio.h>

#include "format/format.h"

enum { DEPTH_MAX = 2, PATH_BYTES_MAX = 1024 };

struct listing {
	struct store_at at;
	const char *path;              /* of the folder, with '/' at its end; "": the checkpoint itself */
	unsigned depth;
	store_entry_fn fn;
	void *user;
};

static enum err on_entry(void *user, const char *name, unsigned char d_type)
{
	const struct listing *l = user;
	char path[PATH_BYTES_MAX];
	struct stat st;

	if (d_type == DT_UNKNOWN) {
		enum err e = store_stat(l->at, name, &st);
		if (e == ERR_NOT_FOUND || e == ERR_NAME_INVALID)
			return OK;
		TRY(e);
		d_type = S_ISDIR(st.st_mode) ? DT_DIR : DT_REG;
	}
	if (snprintf(path, sizeof path, "%s%s%s", l->path, name, d_type == DT_DIR ? "/" : "") >= (int)sizeof path)
		return ERR(LIMIT_EXCEEDED, "a path of more than %d bytes", PATH_BYTES_MAX);
	TRY(l->fn(l->user, path, d_type));
	if (d_type != DT_DIR || l->depth == DEPTH_MAX || !format_folder(path))
		return OK;
	CLEANUP(store_close) struct store_at below = STORE_NOTHING;
	TRY(store_enter(l->at, name, &below));
	return store_list(below, on_entry, &(struct listing){ below, path, l->depth + 1, l->fn, l->user });
}

enum err parts_list(struct store_at dir, store_entry_fn fn, void *user)
{
	return store_list(dir, on_entry, &(struct listing){ dir, "", 0, fn, user });
}
