/* staging.c: see staging.h. An error of the rename itself is in doubt, not a failure: recovery looks at the directory and decides. */
#include "store/staging.h"

#include <dirent.h>
#include <endian.h>
#include <fcntl.h>
#include <stdio.h>

#include "base/num.h"
#include "os/fs.h"
#include "store/in_place.h"
#include "store/commit.h"
#include "store/owner.h"
#include "store/trash.h"

enum { STAGED_PATH_MAX = sizeof((struct staging *)0)->name + sizeof((struct staging *)0)->target };

/* Parts with a point in front are ours (staging, trash), or "." and "..": nothing is made before that is known. */
static bool is_plain(const char *name)
{
	for (const char *p = name;; p++) {
		if (*p == '.' || *p == '/' || *p == '\0')
			return false;
		p = strchr(p, '/');
		if (!p)
			return true;
	}
}

enum err staging_divide(const char *name, char *parent, size_t parent_max, char *last, size_t last_max)
{
	const char *slash = strrchr(name, '/');
	struct str p = { name, slash ? (size_t)(slash - name) : 0 };
	const char *rest = slash ? slash + 1 : name;

	if (p.n >= parent_max || strlen(rest) >= last_max || !is_plain(name))
		return ERR(NAME_INVALID, "the name '%s' cannot be used", name);
	memcpy(parent, p.p, p.n);
	parent[p.n] = '\0';
	memcpy(last, rest, strlen(rest) + 1);
	return OK;
}

static FALLIBLE enum err lies_in(int root_fd, const char *path, const char *name, bool *out)
{
	char below[4096 + FORMAT_FILE_MAX];
	struct stat st;

	snprintf(below, sizeof below, "%s/%s", path, name);
	enum err e = fs_stat(root_fd, below, &st);
	*out = !e;
	return e == ERR_NOT_FOUND ? OK : e;
}

/* Is the directory a checkpoint only because files are in it that each are one? No index and no manifest binds them together: one more
 * may be added. */
static FALLIBLE enum err is_loose(const struct roots *roots, uint32_t root, const char *path, enum format format, bool *out)
{
	bool bound = true;

	if (format_is_file(format) && format_metadata(format))
		TRY(lies_in(roots->fds[root], path, format_metadata(format), &bound));
	if (!bound)
		TRY(lies_in(roots->fds[root], path, MANIFEST_NAME, &bound));
	*out = !bound;
	return OK;
}

/* A name beneath a checkpoint is refused: none of its ancestors may be one. */
static FALLIBLE enum err check_ancestors(const struct roots *roots, uint32_t root, const char *parent_path, bool is_file)
{
	char path[4096];
	bool loose = false;

	for (size_t i = 0; parent_path[i]; i++) {
		if (parent_path[i + 1] != '/' && parent_path[i + 1] != '\0')
			continue;
		enum format format;
		memcpy(path, parent_path, i + 1);
		path[i + 1] = '\0';
		TRY(checkpoint_recognise(roots, root, path, &format));
		if (format != FORMAT_NONE && is_file)
			TRY(is_loose(roots, root, path, format, &loose));
		if (format != FORMAT_NONE && !(is_file && loose))
			return ERR(NAME_INVALID, "'%s' is a checkpoint, and no checkpoint lies in another", path);
	}
	return OK;
}

/* A file that a save of dcpd's or PyTorch's makes anew. */
static bool is_checkpoint_file(const char *name)
{
	struct format_file file;
	int64_t rank;

	return manifest_is(name, &rank) || (format_file(name, &file) && format_writes(file.format));
}

static enum err check_entry(void *user, const char *name, unsigned char d_type)
{
	const int *dirfd = user;
	struct stat st;

	if (d_type == DT_UNKNOWN) {
		TRY(fs_stat(*dirfd, name, &st));
		d_type = S_ISREG(st.st_mode) ? DT_REG : DT_DIR;
	}
	if (d_type == DT_REG && is_checkpoint_file(name))
		return OK;
	return err_at_file(ERR(NOT_A_CHECKPOINT, "'%s' lies there too, which is no part of a checkpoint: nothing is replaced", name), name,
			   -1);
}

/* A directory is replaced only if nothing is lost but a checkpoint. */
static FALLIBLE enum err check_replaced(const struct roots *roots, uint32_t root, const char *name)
{
	int dirfd = -1;

	TRY(fs_open_dir(roots->fds[root], name, &dirfd));
	enum err e = fs_list(dirfd, check_entry, &dirfd);
	fs_drop(&dirfd);
	return e;
}

static FALLIBLE enum err check_target(const struct staging *s, const char *name, bool overwrite)
{
	const struct roots *roots = s->by.roots;
	enum format format;
	uint32_t root = s->root;
	struct stat st;

	enum err e = fs_stat(roots->fds[root], name, &st);
	if (e == ERR_NOT_FOUND)
		return OK;
	TRY(e);
	TRY(checkpoint_recognise(roots, root, name, &format));
	if (format == FORMAT_NONE || !(s->is_file ? S_ISREG(st.st_mode) : S_ISDIR(st.st_mode)))
		return ERR(NOT_A_CHECKPOINT, "'%s' is there and is no checkpoint %s", name, s->is_file ? "file" : "directory");
	if (!overwrite)
		return ERR(CHECKPOINT_EXISTS, "'%s' exists; overwrite is not set", name);
	TRY(owner_check(&s->by, root, name));
	return s->is_file ? OK : check_replaced(roots, root, name);
}

/* Files of a checkpoint that lies in the directory may be replaced; whatever else is in it is not touched. */
static FALLIBLE enum err check_in_place(const struct staging *s, const char *name)
{
	enum format format;

	TRY(checkpoint_recognise(s->by.roots, s->root, name, &format));
	return format == FORMAT_NONE ? OK : owner_check(&s->by, s->root, name);
}

static void target_name(const struct staging *s, char *out, size_t max)
{
	snprintf(out, max, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", s->target);
}

static FALLIBLE enum err check_options(struct staging *s, const struct spec *spec)
{
	const char *name = spec->target.name.p;

	s->no_sync = !spec->sync_files;
	s->is_file = spec_target_is_file(spec);
	s->in_place = spec->beside == BESIDE_ALWAYS;
	if (s->in_place)
		return check_in_place(s, name);
	enum err e = check_target(s, name, spec->overwrite);
	if (e != ERR_NOT_A_CHECKPOINT || spec->beside != BESIDE_NEEDED)
		return e;
	err_clear();
	s->in_place = true;
	return check_in_place(s, name);
}

static FALLIBLE enum err make_dir(struct staging *s, bool may_exist)
{
	enum err e = fs_mkdir(s->parent, s->name, 0755);

	if (e == ERR_CHECKPOINT_EXISTS && may_exist)
		err_clear();
	else if (e)
		return e;
	s->made = true;
	TRY(fs_fsync(s->parent, "."));
	TRY(fs_open_dir(s->parent, s->name, &s->dir));
	s->in_memory = fs_in_memory(s->dir);
	s->direct = !s->in_memory && fs_direct_ok(s->dir);
	return OK;
}

enum err staging_open(const struct store_job *by, const struct spec *spec, struct staging *out)
{
	return staging_open_as(by, spec, NULL, out);
}

enum err staging_open_as(const struct store_job *by, const struct spec *spec, const char *staging_name, struct staging *out)
{
	const struct roots *roots = by->roots;
	struct staging *s = out;

	*s = (struct staging){ .by = *by, .parent = -1, .dir = -1 };
	TRY(roots_find(roots, spec->target.storage.p, &s->root));
	TRY(staging_divide(spec->target.name.p, s->parent_path, sizeof s->parent_path, s->target, sizeof s->target));
	TRY(check_ancestors(roots, s->root, s->parent_path, spec_target_is_file(spec)));
	TRY(check_options(s, spec));
	if (staging_name)
		snprintf(s->name, sizeof s->name, "%s", staging_name);
	else
		snprintf(s->name, sizeof s->name, ".dcpd-%s-%ju", by->id, (uintmax_t)by->attempt);
	snprintf(s->path, sizeof s->path, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", s->name);
	if (s->parent_path[0])
		TRY(fs_mkdirs(roots->fds[s->root], s->parent_path, &s->parent));
	else
		TRY(fs_open_dir(roots->fds[s->root], ".", &s->parent));
	TRY(commit_clear(s->parent, by->id)); /* a coordinator that was killed may not know of an attempt */
	return make_dir(s, staging_name != NULL);
}

static FALLIBLE enum err unlink_old(int dir, const char *name)
{
	enum err e = fs_unlink(dir, name);

	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return err_at_file(e, name, -1);
}

enum err staging_add_file(struct staging *s, struct str name, uint64_t bytes, uint32_t rank)
{
	struct staging_file *f;

	TRY(vec_push(&s->files, &f));
	*f = (struct staging_file){ .name = mem_strndup(name.p, name.n), .bytes = bytes, .rank = rank };
	return f->name ? OK : ERR(NO_MEMORY, "no memory for a file's name");
}

/* Files of other ranks than the local ones are made by other hosts. */
static bool is_made_here(const struct staging *s, const struct staging_file *f)
{
	return !s->local || s->local[f->rank];
}

static FALLIBLE enum err make_file(struct staging *s, const struct staging_file *f)
{
	int fd = -1;

	if (s->local) /* an earlier attempt's, in a directory that is kept */
		TRY(unlink_old(s->dir, f->name));
	enum err e = fs_open(s->dir, f->name, O_CREAT | O_EXCL | O_WRONLY, 0644, &fd);
	if (!e && f->bytes)
		e = fs_allocate(fd, f->bytes, f->name);
	if (!e && f->bytes == 0 && !s->no_sync)
		e = fs_fsync(fd, f->name);
	if (!e)
		e = fs_close(&fd);
	fs_drop(&fd);
	return e;
}

enum err staging_make_files(struct staging *s)
{
	for (uint64_t i = 0; i < s->files.n; i++) {
		const struct staging_file *f = &s->files.v[i];
		enum err e = is_made_here(s, f) ? make_file(s, f) : OK;
		if (e)
			return err_at_rank(err_at_file(e, f->name, -1), f->rank);
	}
	return OK;
}

static FALLIBLE enum err trim_file(struct staging *s, const struct staging_file *f)
{
	struct stat st;
	int fd = -1;

	TRY(fs_stat(s->dir, f->name, &st));
	if ((uint64_t)st.st_size <= f->bytes) /* too short is for check_sizes() to say */
		return OK;
	enum err e = fs_open(s->dir, f->name, O_WRONLY, 0, &fd);
	if (!e)
		e = fs_truncate(fd, f->bytes, f->name);
	if (!e && !s->no_sync)
		e = fs_fsync(fd, f->name);
	if (!e)
		e = fs_close(&fd);
	fs_drop(&fd);
	return err_at_file(e, f->name, -1);
}

enum err staging_trim_files(struct staging *s)
{
	for (uint64_t i = 0; i < s->files.n; i++)
		if (is_made_here(s, &s->files.v[i]))
			TRY(trim_file(s, &s->files.v[i]));
	return OK;
}

static FALLIBLE enum err put_patches(int fd, const struct staging_patch *patches, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		uint32_t le = htole32(patches[i].value);
		TRY(fs_pwrite(fd, &le, sizeof le, patches[i].offset, ""));
	}
	return OK;
}

enum err staging_patch(struct staging *s, uint64_t i, const struct staging_patch *patches, uint64_t count)
{
	const char *name = s->files.v[i].name;
	int fd = -1;

	enum err e = fs_open(s->dir, name, O_WRONLY, 0, &fd);
	if (!e)
		e = put_patches(fd, patches, count);
	if (!e && !s->no_sync)
		e = fs_fsync(fd, name);
	if (!e)
		e = fs_close(&fd);
	fs_drop(&fd);
	return err_at_file(e, name, -1);
}

enum err staging_put_file(struct staging *s, const char *name, const void *bytes, uint64_t n)
{
	int fd = -1;

	enum err e = fs_open(s->dir, name, O_CREAT | O_EXCL | O_WRONLY, 0644, &fd);
	if (!e)
		e = fs_pwrite(fd, bytes, n, 0, name);
	if (!e && !s->no_sync)
		e = fs_fsync(fd, name);
	if (!e)
		e = fs_close(&fd);
	fs_drop(&fd);
	return err_at_file(e, name, -1);
}

/* Each file has the size it was planned with: the last look before it counts. */
static FALLIBLE enum err check_sizes(const struct staging *s)
{
	for (uint64_t i = 0; i < s->files.n; i++) {
		const struct staging_file *f = &s->files.v[i];
		struct stat st;
		TRY(fs_stat(s->dir, f->name, &st));
		if ((uint64_t)st.st_size != f->bytes)
			return err_at_file(ERR(STORAGE_IO, "the file has %jd bytes, %ju were written", (intmax_t)st.st_size,
					       (uintmax_t)f->bytes), f->name, -1);
	}
	return OK;
}

/* The path beneath the parent that the target is renamed from. */
static void staged_path(const struct staging *s, char out[STAGED_PATH_MAX])
{
	snprintf(out, STAGED_PATH_MAX, "%s%s%s", s->name, s->is_file ? "/" : "", s->is_file ? s->target : "");
}

/* The new one is durable: whatever goes wrong with the old one is no matter of this job, and the next sweep takes what is left. */
static void drop_old(struct staging *s)
{
	char trash[128], old[STAGED_PATH_MAX];

	staged_path(s, old);
	snprintf(trash, sizeof trash, TRASH_PREFIX "%s", s->by.id);
	if (fs_remove_tree(s->parent, trash) || fs_rename(s->parent, old, s->parent, trash) || trash_remove(s->parent, trash))
		err_clear();
}

static FALLIBLE enum err make_visible(struct staging *s, bool overwrite, bool *exchanged_out)
{
	char name[sizeof s->parent_path + sizeof s->target + 1], staged[STAGED_PATH_MAX];

	*exchanged_out = false;
	staged_path(s, staged);
	fs_fault("commit.rename");
	enum err e = fs_rename_noreplace(s->parent, staged, s->target);
	if (!e)
		s->done = true;
	if (e != ERR_CHECKPOINT_EXISTS || !overwrite)
		return e;
	/* what is there now need not be what was there when the job began */
	target_name(s, name, sizeof name);
	TRY(check_target(s, name, true));
	TRY(fs_exchange(s->parent, staged, s->target));
	s->done = *exchanged_out = true;
	return OK;
}

/* Undoes a commit whose fsync failed (commit.h). While the undoing is not on the disk either, both directories stay as they are: after a
 * power cut the target's name may lead to each of them. */
static FALLIBLE enum err take_back(struct staging *s, bool exchanged)
{
	struct err_info info = *err_last();
	char staged[STAGED_PATH_MAX];

	staged_path(s, staged);
	enum err e = exchanged ? fs_exchange(s->parent, staged, s->target) : fs_rename_noreplace(s->parent, s->target, staged);
	if (e)
		return commit_in_doubt("is there and whole", s->target);
	if (fs_fsync(s->parent, "."))
		return commit_in_doubt("was taken back", s->target);
	s->done = false;
	err_restore(&info);
	return info.code;
}

enum err staging_commit(struct staging *s, bool overwrite)
{
	bool exchanged;

	TRY(check_sizes(s));
	TRY(fs_fsync(s->dir, "."));
	fs_fault("commit.synced");
	TRY(make_visible(s, overwrite, &exchanged));
	fs_fault("commit.renamed");
	if (fs_fsync(s->parent, "."))
		return take_back(s, exchanged);
	if (exchanged)
		drop_old(s);
	return OK;
}

enum err staging_commit_in_place(struct staging *s, const char *metadata)
{
	char name[sizeof s->parent_path + sizeof s->target + 1];
	int to = -1;

	target_name(s, name, sizeof name);
	TRY(check_sizes(s));
	TRY(fs_fsync(s->dir, "."));
	TRY(check_in_place(s, name));
	TRY(fs_mkdirs(s->parent, s->target, &to));
	s->done = true; /* if it breaks off, the recovery puts back what lies in there */
	enum err e = in_place_move(s, to, metadata);
	if (!e)
		s->done = false; /* staging_close() takes what is left of it */
	fs_drop(&to);
	return e;
}

void staging_close(struct staging *s)
{
	struct err_info info = *err_last();

	if (s->made && !s->done && fs_remove_tree(s->parent, s->name))
		err_clear(); /* the sweep at the next start takes it */
	fs_drop(&s->dir);
	fs_drop(&s->parent);
	for (uint64_t i = 0; i < s->files.n; i++)
		mem_free(s->files.v[i].name);
	vec_free(&s->files);
	err_restore(&info);
}
