/* contents.c: see contents.h. */
#include "store/contents.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/num.h"
#include "store/beside.h"
#include "store/copied.h"
#include "store/notes.h"

struct walk {
	struct contents *out;
	struct store_at at;
	const char *path;              /* of the folder, with '/' at its end; "": the top */
	unsigned depth;
};

static bool is_left_out(const char *name, mode_t mode)
{
	return notes_is(name) || beside_is(name) || strcmp(name, COPIED_NAME) == 0 || (S_ISDIR(mode) && str_starts(str_of(name), ".dcpd-"));
}

static const char *what_is(mode_t mode)
{
	return S_ISLNK(mode) ? "a symbolic link" : S_ISFIFO(mode) ? "a FIFO" : S_ISSOCK(mode) ? "a socket" : "a device";
}

static FALLIBLE enum err check_name(const char *name)
{
	for (const unsigned char *p = (const unsigned char *)name; *p; p++)
		if (*p < ' ' || *p == 127)
			return ERR(NAME_INVALID, "a file of the checkpoint has a name with control characters");
	return str_utf8(str_of(name)) ? OK : ERR(NAME_INVALID, "a file of the checkpoint has a name that is no UTF-8");
}

static FALLIBLE enum err add_file(struct contents *c, const char *path, const struct stat *st)
{
	struct contents_file *f;

	if (c->files.n >= CONTENTS_FILES_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d files in a checkpoint", CONTENTS_FILES_MAX);
	TRY(num_add(c->bytes, (uint64_t)st->st_size, &c->bytes));
	TRY(vec_push(&c->files, &f));
	f->st = *st;
	return arena_str(c->arena, str_of(path), &f->name);
}

static enum err add_entry(void *user, const char *name, unsigned char);

static FALLIBLE enum err add_folder(const struct walk *w, const char *name, const char *path)
{
	CLEANUP(store_close) struct store_at below = STORE_NOTHING;
	char inside[CONTENTS_PATH_MAX];
	struct str *folder;

	if (w->depth >= CONTENTS_DEPTH_MAX || snprintf(inside, sizeof inside, "%s/", path) >= (int)sizeof inside)
		return ERR(LIMIT_EXCEEDED, "folders more than %d deep in a checkpoint", CONTENTS_DEPTH_MAX);
	if (w->out->folders.n >= CONTENTS_FILES_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d folders in a checkpoint", CONTENTS_FILES_MAX);
	TRY(vec_push(&w->out->folders, &folder));
	TRY(arena_str(w->out->arena, str_of(path), folder));
	TRY(store_enter(w->at, name, &below));
	return store_list(below, add_entry, &(struct walk){ w->out, below, inside, w->depth + 1 });
}

static FALLIBLE enum err add_any(const struct walk *w, const char *name, const char *path)
{
	struct stat st;

	enum err e = store_stat(w->at, name, &st);
	if (e == ERR_NOT_FOUND)
		return ERR(CHECKPOINT_REPLACED, "the file went while the folder was listed");
	TRY(e);
	if (is_left_out(name, st.st_mode))
		return OK;
	TRY(check_name(name));
	if (S_ISREG(st.st_mode))
		return add_file(w->out, path, &st);
	if (S_ISDIR(st.st_mode))
		return add_folder(w, name, path);
	return ERR(NAME_INVALID, "%s: only plain files and folders are copied; put the file itself there, or take it away",
		   what_is(st.st_mode));
}

static enum err add_entry(void *user, const char *name, unsigned char)
{
	const struct walk *w = user;
	char path[CONTENTS_PATH_MAX];

	if (snprintf(path, sizeof path, "%s%s", w->path, name) >= (int)sizeof path)
		return ERR(LIMIT_EXCEEDED, "a path of more than %d bytes in a checkpoint", CONTENTS_PATH_MAX);
	return err_at_file(add_any(w, name, path), path, -1);
}

static int by_name(const void *a, const void *b)
{
	return str_cmp(((const struct contents_file *)a)->name, ((const struct contents_file *)b)->name);
}

enum err contents_list(struct store_at folder, const char *file, struct contents *out)
{
	struct walk top = { out, folder, "", 0 };

	*out = (struct contents){ .arena = arena_new(UINT64_MAX) };
	NEED(out->arena, "no memory for a list of files");
	TRY(file ? add_entry(&top, file, DT_REG) : store_list(folder, add_entry, &top));
	if (out->files.n)
		qsort(out->files.v, out->files.n, sizeof *out->files.v, by_name);
	return OK;
}

void contents_free(struct contents *c)
{
	vec_free(&c->files);
	vec_free(&c->folders);
	arena_free(c->arena);
	*c = (struct contents){ 0 };
}

/* A hard link to a file (of a save that shares it) changes its ctime, and nothing else of it. */
static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_ino == b->st_ino && a->st_size == b->st_size && clock_same(a->st_mtim, b->st_mtim) &&
	       (a->st_nlink != b->st_nlink || clock_same(a->st_ctim, b->st_ctim));
}

enum err contents_same(const struct contents *before, const struct contents *after)
{
	uint64_t n = num_max(before->files.n, after->files.n);

	for (uint64_t i = 0; i < n; i++) {
		const struct contents_file *a = i < before->files.n ? &before->files.v[i] : NULL;
		const struct contents_file *b = i < after->files.n ? &after->files.v[i] : NULL;
		int order = !a ? 1 : !b ? -1 : str_cmp(a->name, b->name);
		if (order == 0 && same_file(&a->st, &b->st))
			continue;
		enum err e = ERR(CHECKPOINT_REPLACED, "the file %s while the checkpoint was copied: nothing is kept of the copy",
				 order < 0 ? "went" : order > 0 ? "came" : "changed");
		return err_at_file(e, (order > 0 ? b : a)->name.p, -1);
	}
	return OK;
}
