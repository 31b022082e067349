/* posix_beside.c: the pages beside a checkpoint that is one file (beside.h), on a file system: they go where the file goes.
 *
 * No rename takes two files. A commit and a removal move the file first: killed behind that they leave a page that counts for nothing, and
 * the recovery of the job finishes the move. An undelete, which nothing recovers, moves the pages first. */
#include <stdio.h>

#include "base/log.h"
#include "os/fs.h"
#include "store/beside.h"
#include "store/notes.h"
#include "store/posix_impl.h"

static const char *const pages[] = { MANIFEST_NAME, NOTES_NAME };

enum err posix_beside_move(const struct store *store, const char *from, const char *to)
{
	char old[BESIDE_MAX], new[BESIDE_MAX];

	for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
		if (!beside_path(from, pages[i], old) || !beside_path(to, pages[i], new))
			continue;
		fs_fault("beside.move");
		enum err e = fs_rename(store->top, old, store->top, new);
		if (e && e != ERR_NOT_FOUND)
			return e;
	}
	err_clear();
	return OK;
}

enum err posix_beside_drop(const struct store *store, const char *name)
{
	char path[BESIDE_MAX];

	for (size_t i = 0; i < sizeof pages / sizeof *pages; i++)
		if (beside_path(name, pages[i], path))
			TRY(fs_remove_tree(store->top, path));
	return OK;
}

enum err posix_beside_follow(const struct store *store, const char *name, const char *to)
{
	struct stat st;

	enum err e = fs_stat(store->top, name, &st);
	if (e != ERR_NOT_FOUND)
		return e;
	err_clear();
	return to ? posix_beside_move(store, name, to) : posix_beside_drop(store, name);
}

void posix_beside_keep_receipt(int parent, const char *staging, const char *file)
{
	char from[BESIDE_MAX], page[BESIDE_MAX];

	if (!beside_path(file, MANIFEST_NAME, page))
		return;
	snprintf(from, sizeof from, "%s/" MANIFEST_NAME, staging);
	fs_fault("commit.page");
	if (fs_rename(parent, from, parent, page) || fs_fsync(parent, ".")) {
		log_warn("a checkpoint of one file has no record", "name", file, "why", err_last()->text, NULL);
		err_clear();
	}
}
