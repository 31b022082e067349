/* posix_in_place.c: see posix_in_place.h. */
#include "store/posix_in_place.h"

#include "base/mem.h"
#include "base/vec.h"
#include "os/fs.h"
#include "store/commit.h"
#include "store/manifest.h"

static const char old_dir[] = ".old";

/* `from`'s, if it is there. */
static FALLIBLE enum err move_one(int from, int to, const char *name)
{
	enum err e = fs_rename(from, name, to, name);

	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return err_at_file(e, name, -1);
}

static FALLIBLE enum err move_files(const struct staging *s, int from, int to)
{
	for (uint64_t i = 0; i < s->files.n; i++)
		TRY(move_one(from, to, s->files.v[i].name));
	return OK;
}

static FALLIBLE enum err put_away(const struct staging *s, int to, int old, const char *metadata, const char *manifest)
{
	TRY(move_one(to, old, metadata));
	TRY(fs_fsync(old, old_dir));
	TRY(fs_fsync(to, "."));
	TRY(move_one(to, old, manifest));
	return move_files(s, to, old);
}

/* The commit could not be fsynced: undoes it (commit.h). */
static FALLIBLE enum err take_back(const struct staging *s, int to, const char *metadata)
{
	struct err_info info = *err_last();

	enum err e = fs_rename(to, metadata, s->dir.handle, metadata);
	e = e ?: move_files(s, to, s->dir.handle);
	e = e ?: posix_in_place_restore(s->dir.handle, to);
	e = e ?: fs_fsync(to, ".");
	if (e)
		return commit_in_doubt("was moved to its directory", metadata);
	err_restore(&info);
	return info.code;
}

enum err posix_in_place_move(const struct staging *s, int to, const char *metadata)
{
	char manifest[MANIFEST_NAME_MAX];
	int staging = s->dir.handle, old = -1;

	manifest_name(metadata, manifest);
	enum err e = fs_mkdir(staging, old_dir, 0755);
	if (e == ERR_CHECKPOINT_EXISTS) { /* an earlier attempt's, in a staging directory that is kept */
		err_clear();
		TRY(posix_in_place_restore(staging, to));
		TRY(fs_remove_tree(staging, old_dir));
		e = fs_mkdir(staging, old_dir, 0755);
	}
	TRY(e);
	TRY(fs_open_dir(staging, old_dir, &old));
	e = put_away(s, to, old, metadata, manifest);
	fs_drop(&old);
	TRY(e);
	TRY(move_files(s, staging, to));
	TRY(err_at_file(fs_rename(staging, manifest, to, manifest), manifest, -1));
	TRY(fs_fsync(to, "."));
	fs_fault("commit.in_place");
	TRY(err_at_file(fs_rename(staging, metadata, to, metadata), metadata, -1));
	return fs_fsync(to, ".") ? take_back(s, to, metadata) : OK;
}

/* ---- back ---- */

struct put_back {
	struct vec(char *) names;
	const char *metadata;          /* one of them */
};

static enum err collect(void *user, const char *name, unsigned char)
{
	struct put_back *p = user;
	struct format_file file;
	char **at;

	TRY(vec_push(&p->names, &at));
	*at = mem_strdup(name);
	NEED(*at, "no memory for a name");
	if (format_file(name, &file) && file.role == FORMAT_METADATA)
		p->metadata = *at;
	return OK;
}

/* The broken-off save's manifest, where the old checkpoint has none to take its place: it speaks of other bytes. */
static FALLIBLE enum err drop_manifest(const struct put_back *p, int to)
{
	char manifest[MANIFEST_NAME_MAX];

	manifest_name(p->metadata, manifest);
	for (uint64_t i = 0; i < p->names.n; i++)
		if (strcmp(p->names.v[i], manifest) == 0)
			return OK;
	enum err e = fs_unlink(to, manifest);
	if (e != ERR_NOT_FOUND)
		return e;
	err_clear();
	return OK;
}

static FALLIBLE enum err put_back(const struct put_back *p, int old, int to)
{
	struct stat st;

	enum err e = p->metadata ? fs_stat(to, p->metadata, &st) : OK;
	if (!e) /* there was none that could be loaded, or there is a newer one */
		return OK;
	if (e != ERR_NOT_FOUND)
		return e;
	err_clear();
	TRY(drop_manifest(p, to));
	for (uint64_t i = 0; i < p->names.n; i++)
		if (p->names.v[i] != p->metadata)
			TRY(err_at_file(fs_rename(old, p->names.v[i], to, p->names.v[i]), p->names.v[i], -1));
	TRY(fs_fsync(to, "."));
	TRY(err_at_file(fs_rename(old, p->metadata, to, p->metadata), p->metadata, -1));
	return fs_fsync(to, ".");
}

static void drop_names(struct put_back *p)
{
	for (uint64_t i = 0; i < p->names.n; i++)
		mem_free(p->names.v[i]);
	vec_free(&p->names);
}

bool posix_in_place_holds_old(int staging)
{
	struct put_back p = { .metadata = NULL };
	int old = -1;

	enum err e = fs_open_dir(staging, old_dir, &old);
	bool holds = e && e != ERR_NOT_FOUND;
	if (!e)
		holds = fs_list(old, collect, &p) || p.metadata;
	fs_drop(&old);
	drop_names(&p);
	err_clear();
	return holds;
}

enum err posix_in_place_restore(int staging, int to)
{
	struct put_back p = { .metadata = NULL };
	CLEANUP(fs_drop) int old = -1;

	enum err e = fs_open_dir(staging, old_dir, &old);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	e = fs_list(old, collect, &p);
	e = e ?: put_back(&p, old, to);
	drop_names(&p);
	return e;
}
