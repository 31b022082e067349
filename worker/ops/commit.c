/* commit.c: see commit.h. An error from the rename on is in doubt, not a failure: recovery looks at the directory and decides. */
#include "ops/commit.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>

#include "base/num.h"
#include "ops/trash.h"
#include "os/fs.h"

enum { SWEEP_DEPTH = 16 };

/* "a/b/c" → "a/b" and "c". */
static FALLIBLE enum err divide(const char *name, char *parent, size_t parent_max, char *last, size_t last_max)
{
	const char *slash = strrchr(name, '/');
	struct str p = { name, slash ? (size_t)(slash - name) : 0 };
	const char *rest = slash ? slash + 1 : name;

	if (p.n >= parent_max || strlen(rest) >= last_max || !*rest)
		return ERR(NAME_INVALID, "the name '%s' cannot be used", name);
	memcpy(parent, p.p, p.n);
	parent[p.n] = '\0';
	memcpy(last, rest, strlen(rest) + 1);
	return OK;
}

/* A name beneath a checkpoint is refused: none of its ancestors may be one. */
static FALLIBLE enum err check_ancestors(struct worker *w, uint32_t root, const char *parent_path)
{
	char path[4096];

	for (size_t i = 0; parent_path[i]; i++) {
		if (parent_path[i + 1] != '/' && parent_path[i + 1] != '\0')
			continue;
		enum checkpoint_format format;
		memcpy(path, parent_path, i + 1);
		path[i + 1] = '\0';
		TRY(checkpoint_recognise(w, root, path, &format));
		if (format != CHECKPOINT_NONE)
			return ERR(NAME_INVALID, "'%s' is a checkpoint, and no checkpoint lies in another", path);
	}
	return OK;
}

static FALLIBLE enum err check_target(struct worker *w, uint32_t root, const char *name, bool overwrite)
{
	enum checkpoint_format format;
	struct stat st;

	enum err e = fs_stat(w->roots[root].fd, name, &st);
	if (e == ERR_NOT_FOUND)
		return OK;
	TRY(e);
	TRY(checkpoint_recognise(w, root, name, &format));
	if (format == CHECKPOINT_NONE || !S_ISDIR(st.st_mode))
		return ERR(NOT_A_CHECKPOINT, "'%s' is there and is no checkpoint directory", name);
	if (!overwrite)
		return ERR(CHECKPOINT_EXISTS, "'%s' exists; overwrite is not set", name);
	return OK;
}

enum err staging_open(struct job *j, const json_t *target, bool overwrite, struct staging *out)
{
	struct worker *w = j->worker;
	const char *name = json_string_value(json_object_get(target, "name"));
	struct staging *s = out;

	*s = (struct staging){ .worker = w, .parent = -1, .dir = -1 };
	TRY(worker_root(w, json_string_value(json_object_get(target, "storage")), &s->root));
	TRY(divide(name, s->parent_path, sizeof s->parent_path, s->target, sizeof s->target));
	TRY(check_ancestors(w, s->root, s->parent_path));
	TRY(check_target(w, s->root, name, overwrite));
	snprintf(s->name, sizeof s->name, ".dcpd-%s-%ju", j->id, (uintmax_t)j->attempt);
	snprintf(s->path, sizeof s->path, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", s->name);
	if (s->parent_path[0])
		TRY(fs_mkdirs(w->roots[s->root].fd, s->parent_path, &s->parent));
	else
		TRY(fs_open_dir(w->roots[s->root].fd, ".", &s->parent));
	TRY(fs_remove_tree(s->parent, s->name));
	TRY(fs_mkdir(s->parent, s->name, 0755));
	TRY(fs_fsync(s->parent, "."));
	TRY(fs_open_dir(s->parent, s->name, &s->dir));
	s->direct = fs_direct_ok(s->dir);
	return OK;
}

enum err staging_make_files(struct staging *s, const struct run *run)
{
	char name[256];

	for (uint64_t i = 0; i < run->files_n; i++) {
		const struct run_file *f = &run->files[i];
		struct str n = run_file_name(run, f);
		int fd = -1;
		if (f->kind != RUN_FILE_TARGET)
			continue;
		must(n.n < sizeof name);
		memcpy(name, n.p, n.n);
		name[n.n] = '\0';
		enum err e = fs_open(s->dir, name, O_CREAT | O_EXCL | O_WRONLY, 0644, &fd);
		if (!e && f->bytes)
			e = fs_allocate(fd, f->bytes, name);
		if (!e && f->bytes == 0)
			e = fs_fsync(fd, name);
		if (!e)
			e = fs_close(&fd);
		fs_drop(&fd);
		if (e)
			return err_at_rank(err_at_file(e, name, -1), f->rank);
	}
	return OK;
}

enum err staging_trim_files(struct staging *s, const struct run *run)
{
	char name[256];
	struct stat st;

	for (uint64_t i = 0; i < run->files_n; i++) {
		const struct run_file *f = &run->files[i];
		struct str n = run_file_name(run, f);
		int fd = -1;
		if (f->kind != RUN_FILE_TARGET)
			continue;
		memcpy(name, n.p, n.n);
		name[n.n] = '\0';
		TRY(fs_stat(s->dir, name, &st));
		if ((uint64_t)st.st_size == f->bytes)
			continue;
		enum err e = fs_open(s->dir, name, O_WRONLY, 0, &fd);
		if (!e)
			e = fs_truncate(fd, f->bytes, name);
		if (!e)
			e = fs_fsync(fd, name);
		if (!e)
			e = fs_close(&fd);
		fs_drop(&fd);
		TRY(err_at_file(e, name, -1));
	}
	return OK;
}

enum err staging_put_file(struct staging *s, const char *name, const void *bytes, uint64_t n)
{
	int fd = -1;

	enum err e = fs_open(s->dir, name, O_CREAT | O_EXCL | O_WRONLY, 0644, &fd);
	if (!e)
		e = fs_pwrite(fd, bytes, n, 0, name);
	if (!e)
		e = fs_fsync(fd, name);
	if (!e)
		e = fs_close(&fd);
	fs_drop(&fd);
	return err_at_file(e, name, -1);
}

/* Each file has the size it was planned with: the last look before it counts. */
static FALLIBLE enum err check_sizes(struct staging *s, const struct run *run)
{
	char name[256];
	struct stat st;

	for (uint64_t i = 0; i < run->files_n; i++) {
		const struct run_file *f = &run->files[i];
		struct str n = run_file_name(run, f);
		if (f->kind != RUN_FILE_TARGET)
			continue;
		memcpy(name, n.p, n.n);
		name[n.n] = '\0';
		TRY(fs_stat(s->dir, name, &st));
		if ((uint64_t)st.st_size != f->bytes)
			return err_at_file(ERR(STORAGE_IO, "the file has %jd bytes, %ju were written", (intmax_t)st.st_size,
					       (uintmax_t)f->bytes), name, -1);
	}
	return OK;
}

static FALLIBLE enum err make_visible(struct staging *s, const char *job, bool overwrite)
{
	char trash[128];

	fs_fault("commit.rename");
	enum err e = fs_rename_noreplace(s->parent, s->name, s->target);
	if (!e || e != ERR_CHECKPOINT_EXISTS || !overwrite) {
		if (!e)
			s->done = true;
		return e;
	}
	TRY(fs_exchange(s->parent, s->name, s->target));
	s->done = true;
	fs_fault("commit.exchanged");
	TRY(fs_fsync(s->parent, "."));
	snprintf(trash, sizeof trash, ".dcpd-trash-%s", job);
	TRY(fs_remove_tree(s->parent, trash));
	TRY(fs_rename(s->parent, s->name, s->parent, trash));
	return trash_remove(s->parent, trash);
}

enum err staging_commit(struct job *j, struct staging *s, const struct run *run, bool overwrite)
{
	TRY(check_sizes(s, run));
	TRY(fs_fsync(s->dir, "."));
	fs_fault("commit.synced");
	TRY(make_visible(s, j->id, overwrite));
	fs_fault("commit.renamed");
	return fs_fsync(s->parent, ".");
}

void staging_close(struct staging *s)
{
	struct err_info info = *err_last();

	if (s->parent >= 0 && s->dir >= 0 && !s->done && fs_remove_tree(s->parent, s->name))
		err_clear(); /* the sweep at the next start takes it */
	fs_drop(&s->dir);
	fs_drop(&s->parent);
	err_restore(&info);
}

/* ------------------------------------------------------------------------------------------------------- delete */

static FALLIBLE enum err open_parent(struct worker *w, uint32_t root, const char *parent_path, int *fd_out)
{
	return fs_open_dir(w->roots[root].fd, parent_path[0] ? parent_path : ".", fd_out);
}

static FALLIBLE enum err delete_in(struct worker *w, uint32_t root, int parent, const char *name, const char *last,
				   const char *job)
{
	enum checkpoint_format format;
	char trash[128];
	struct stat st;

	snprintf(trash, sizeof trash, ".dcpd-trash-%s", job);
	TRY(fs_stat(w->roots[root].fd, name, &st));
	TRY(checkpoint_recognise(w, root, name, &format));
	if (format == CHECKPOINT_NONE)
		return ERR(NOT_A_CHECKPOINT, "'%s' is no checkpoint, and is not deleted", name);
	TRY(fs_rename_noreplace(parent, last, trash));
	TRY(fs_fsync(parent, "."));
	if (S_ISREG(st.st_mode))
		return fs_unlink(parent, trash);
	return trash_remove(parent, trash);
}

enum err commit_delete(struct worker *w, const json_t *ref, const char *job)
{
	const char *name = json_string_value(json_object_get(ref, "name"));
	char parent_path[4096], last[256];
	uint32_t root;
	int parent = -1;

	TRY(worker_root(w, json_string_value(json_object_get(ref, "storage")), &root));
	TRY(divide(name, parent_path, sizeof parent_path, last, sizeof last));
	enum err e = open_parent(w, root, parent_path, &parent);
	if (!e)
		e = delete_in(w, root, parent, name, last, job);
	if (e == ERR_NOT_FOUND)
		e = ERR(NOT_FOUND, "there is no checkpoint '%s'", name);
	fs_drop(&parent);
	return e;
}

/* ------------------------------------------------------------------------------------------------------ recover */

struct leftovers {
	int dirfd;
	const char *job;               /* NULL: any job that is not in keep */
	const json_t *keep;
	uint64_t removed;
	struct vec(char *) names;
};

/* The job of ".dcpd-{job}-{attempt}" or ".dcpd-trash-{job}". */
static struct str job_of(const char *name)
{
	struct str s = str_of(name);

	if (str_starts(s, ".dcpd-trash-"))
		return (struct str){ name + 12, s.n - 12 };
	if (!str_starts(s, ".dcpd-"))
		return (struct str){ NULL, 0 };
	const char *dash = strrchr(name + 6, '-');
	return dash ? (struct str){ name + 6, (size_t)(dash - name - 6) } : (struct str){ NULL, 0 };
}

static enum err find_leftover(void *user, const char *name, unsigned char d_type)
{
	struct leftovers *l = user;
	struct str job = job_of(name);
	char **at;

	(void)d_type;
	if (!job.p || (l->job && !str_is(job, l->job)))
		return OK;
	for (size_t i = 0; i < json_array_size(l->keep); i++)
		if (str_is(job, json_string_value(json_array_get(l->keep, i))))
			return OK;
	TRY(vec_push(&l->names, &at));
	*at = mem_strdup(name);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a name");
}

static FALLIBLE enum err remove_leftovers(struct leftovers *l)
{
	enum err e = fs_list(l->dirfd, find_leftover, l);

	for (uint64_t i = 0; i < l->names.n; i++) {
		if (!e)
			e = fs_remove_tree(l->dirfd, l->names.v[i]);
		l->removed += !e;
		mem_free(l->names.v[i]);
	}
	vec_free(&l->names);
	return e;
}

static FALLIBLE enum err manifest_job(int parent, const char *last, const char *job, bool *ours, struct manifest **out)
{
	int dir = -1;

	*ours = false;
	enum err e = fs_open_dir(parent, last, &dir);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	e = checkpoint_manifest(dir, out);
	fs_drop(&dir);
	if (e == ERR_FORMAT_MANIFEST)
		return OK; /* not one that we finished */
	if (!e && *out)
		*ours = strcmp((*out)->job, job) == 0;
	return e;
}

enum err commit_recover(struct worker *w, const json_t *question, bool *committed_out, struct manifest **manifest_out)
{
	const char *name = json_string_value(json_object_get(question, "name"));
	const char *job = json_string_value(json_object_get(question, "job"));
	const char *kind = json_string_value(json_object_get(question, "kind"));
	char parent_path[4096], last[256];
	struct stat st;
	uint32_t root;
	int parent = -1;

	*committed_out = false;
	TRY(worker_root(w, json_string_value(json_object_get(question, "storage")), &root));
	TRY(divide(name, parent_path, sizeof parent_path, last, sizeof last));
	enum err e = open_parent(w, root, parent_path, &parent);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	struct leftovers l = { .dirfd = parent, .job = job };
	if (kind && strcmp(kind, "delete") == 0) {
		char trash[128];
		snprintf(trash, sizeof trash, ".dcpd-trash-%s", job);
		e = fs_stat(parent, trash, &st);
		*committed_out = !e;
		if (e == ERR_NOT_FOUND)
			e = OK;
	} else {
		e = manifest_job(parent, last, job, committed_out, manifest_out);
	}
	if (!e && *committed_out)
		e = fs_fsync(parent, ".");
	if (!e)
		e = remove_leftovers(&l);
	fs_drop(&parent);
	return e;
}

/* -------------------------------------------------------------------------------------------------------- sweep */

struct sweep {
	struct worker *w;
	uint32_t root;
	const json_t *keep;
	int dirfd;
	char path[4096];
	uint32_t depth;
	uint64_t removed;
};

static enum err sweep_entry(void *user, const char *name, unsigned char d_type);

static FALLIBLE enum err sweep_dir(struct sweep *s)
{
	struct leftovers l = { .keep = s->keep };

	TRY(fs_open_dir(s->w->roots[s->root].fd, s->path[0] ? s->path : ".", &l.dirfd));
	enum err e = remove_leftovers(&l);
	s->removed += l.removed;
	s->dirfd = l.dirfd;
	if (!e && s->depth < SWEEP_DEPTH)
		e = fs_list(l.dirfd, sweep_entry, s);
	fs_drop(&l.dirfd);
	return e;
}

static enum err sweep_entry(void *user, const char *name, unsigned char d_type)
{
	struct sweep *s = user;
	size_t at = strlen(s->path), n = strlen(name);
	enum checkpoint_format format;
	int dirfd = s->dirfd;

	if (name[0] == '.' || (d_type != DT_DIR && d_type != DT_UNKNOWN) || at + n + 2 > sizeof s->path)
		return OK;
	snprintf(s->path + at, sizeof s->path - at, "%s%s", at ? "/" : "", name);
	enum err e = checkpoint_recognise(s->w, s->root, s->path, &format);
	if (!e && format == CHECKPOINT_NONE) {
		s->depth++;
		e = sweep_dir(s);
		s->depth--;
	}
	s->path[at] = '\0';
	s->dirfd = dirfd;
	return e == ERR_NOT_FOUND || e == ERR_FORBIDDEN ? OK : e;
}

enum err commit_sweep(struct worker *w, uint32_t root, const json_t *keep, uint64_t *removed_out)
{
	struct sweep s = { .w = w, .root = root, .keep = keep };

	enum err e = sweep_dir(&s);
	*removed_out = s.removed;
	return e;
}
