/* posix_sweep.c: what jobs that never ended left behind on a file system: found again, put back, or removed (see commit.h). */

#include <dirent.h>
#include <limits.h>
#include <stdio.h>

#include "os/fs.h"
#include "store/beside.h"
#include "store/copied.h"
#include "store/fence.h"
#include "store/notes.h"
#include "store/posix_impl.h"
#include "store/posix_in_place.h"
#include "store/trash.h"

enum { SWEEP_DEPTH = 16, OTHERS_MAX = 1000, CHANGE_MAX = 48 };

enum err posix_open_parent(const struct store *store, const char *name, char last[256], int *fd_out)
{
	char path[4096];

	TRY(staging_divide(name, path, sizeof path, last, 256));
	return fs_open_dir(store->top, path[0] ? path : ".", fd_out);
}

/* ------------------------------------------------------------------------------------------------------ recover */

struct leftovers {
	int dirfd;
	const char *job;               /* NULL: any job that is not kept */
	const char *mark;              /* of a job: what another daemon staged stays; NULL: nothing does */
	uint64_t attempt;              /* of a job: what later attempts staged stays; 0: nothing does */
	const struct store_job *by;    /* of a job that is taken over */
	const struct commit_keep *keep;
	const char *path;              /* of dirfd, below the root, for others' names */
	uint64_t removed;
	struct vec(char *) names;
};

struct restore {
	int parent, to;
	const char *job;
};

/* The job of ".dcpd-{job}-{attempt}" or ".dcpd-trash-{job}". */
static struct str job_of(const char *name)
{
	struct str s = str_of(name);

	if (str_starts(s, TRASH_PREFIX))
		return (struct str){ name + strlen(TRASH_PREFIX), s.n - strlen(TRASH_PREFIX) };
	if (!str_starts(s, ".dcpd-"))
		return (struct str){ NULL, 0 };
	const char *dash = strrchr(name + 6, '-');
	return dash ? (struct str){ name + 6, (size_t)(dash - name - 6) } : (struct str){ NULL, 0 };
}

struct change {
	int dir;
	uint64_t files;
	struct timespec newest;
};

static void note_time(struct change *c, const struct stat *st)
{
	struct timespec t = st->st_mtim;

	if (t.tv_sec > c->newest.tv_sec || (t.tv_sec == c->newest.tv_sec && t.tv_nsec > c->newest.tv_nsec))
		c->newest = t;
}

static enum err look_at_file(void *user, const char *name, unsigned char)
{
	struct change *c = user;
	struct stat st;

	c->files++;
	if (fs_stat(c->dir, name, &st))
		err_clear(); /* gone by now */
	else
		note_time(c, &st);
	return OK;
}

/* A text that is another one whenever something has changed in a staging directory. */
static FALLIBLE enum err last_change(int parent, const char *name, char text[CHANGE_MAX])
{
	struct change c = { .dir = -1 };
	struct stat st;

	TRY(fs_stat(parent, name, &st));
	note_time(&c, &st);
	if (S_ISDIR(st.st_mode)) {
		TRY(fs_open_dir(parent, name, &c.dir));
		enum err e = fs_list(c.dir, look_at_file, &c);
		fs_drop(&c.dir);
		TRY(e);
	}
	snprintf(text, CHANGE_MAX, "%jd.%09ld/%ju", (intmax_t)c.newest.tv_sec, c.newest.tv_nsec, (uintmax_t)c.files);
	return OK;
}

/* Has nothing changed since the coordinator heard of it? Else, and whenever in doubt, it is left alone, and the coordinator hears. */
static bool is_abandoned(const struct leftovers *l, const char *name)
{
	char path[4096 + NAME_MAX + 2], change[CHANGE_MAX];

	if (last_change(l->dirfd, name, change)) {
		err_clear();
		return false;
	}
	snprintf(path, sizeof path, "%s/%s", l->path, name);
	const char *before = json_string_value(json_object_get(l->keep->watched, path));
	if (before && strcmp(before, change) == 0)
		return true;
	if (json_object_size(l->keep->others) < OTHERS_MAX)
		json_object_set_new(l->keep->others, path, json_string(change));
	return false;
}

/* Nobody knows any more where it belongs, and it may be the only one: for a person to look at. */
static bool holds_old(int parent, const char *name)
{
	CLEANUP(fs_drop) int dir = -1;

	if (fs_open_dir(parent, name, &dir)) {
		err_clear(); /* a file, or a link: nothing was put away in it */
		return false;
	}
	return posix_in_place_holds_old(dir);
}

static bool is_kept(const struct leftovers *l, struct str job, const char *name)
{
	const struct commit_keep *k = l->keep;

	if (!k)
		return false;
	if (fence_is(name)) /* the owner that it keeps out may have been stopped for any time */
		return true;
	if (k->before && str_cmp(job, str_of(k->before)) >= 0)
		return true;
	for (size_t i = 0; i < json_array_size(k->jobs); i++)
		if (str_is(job, json_string_value(json_array_get(k->jobs, i))))
			return true;
	bool trash = str_starts(str_of(name), TRASH_PREFIX); /* given up, whatever is in it */
	return (k->mark && !fence_is_of(name, job, k->mark) && !is_abandoned(l, name)) || (!trash && holds_old(l->dirfd, name));
}

static enum err find_leftover(void *user, const char *name, unsigned char)
{
	struct leftovers *l = user;
	struct str job = job_of(name);
	bool meeting = str_starts(str_of(name), HOSTS_PREFIX); /* of several daemons: each takes it for another's */
	char **at;

	if ((!job.p && !meeting) || notes_is(name) || beside_is(name)) /* ".dcpd-x.dcpd-notes.json": of a file "dcpd-x" */
		return OK;
	if (l->job && (fence_is(name) || (l->mark && !fence_is_of(name, job, l->mark)) || staging_is_later(name, l->attempt)))
		return OK;
	if (meeting ? l->job || !l->keep || !is_abandoned(l, name) : (l->job && !str_is(job, l->job)) || is_kept(l, job, name))
		return OK;
	TRY(vec_push(&l->names, &at));
	*at = mem_strdup(name);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a name");
}

/* Another daemon's, which may only have been stopped, is renamed first: what is removed file by file must not be committed meanwhile. */
static FALLIBLE enum err remove_one(const struct leftovers *l, const char *name)
{
	const char *mark = l->keep ? l->keep->mark : NULL;
	char mine[NAME_MAX + 1];

	if (!mark || fence_is_of(name, job_of(name), mark))
		return fs_remove_tree(l->dirfd, name);
	if (snprintf(mine, sizeof mine, "%s.%.6s", name, mark) > NAME_MAX)
		return ERR(NAME_INVALID, "the name '%s' is too long", name);
	enum err e = fs_rename(l->dirfd, name, l->dirfd, mine);
	return e == ERR_NOT_FOUND ? OK : e ? e : fs_remove_tree(l->dirfd, mine);
}

static FALLIBLE enum err remove_leftovers(struct leftovers *l)
{
	enum err e = fs_list(l->dirfd, find_leftover, l), one;

	for (uint64_t i = 0; i < l->names.n; i++) { /* one that stays does not keep the others */
		one = remove_one(l, l->names.v[i]);
		l->removed += !one;
		e = e ? e : one;
		mem_free(l->names.v[i]);
	}
	vec_free(&l->names);
	return e;
}

enum err posix_clear(int parent, const struct store_job *by)
{
	struct leftovers l = { .dirfd = parent, .job = by->id, .mark = by->mark };

	return remove_leftovers(&l);
}

/* ---- fence ---- */

static enum err find_others(void *user, const char *name, unsigned char)
{
	struct leftovers *l = user;
	struct str job = job_of(name);
	char **at;

	if (!str_is(job, l->job) || str_starts(str_of(name), TRASH_PREFIX) || !fence_keeps_out(name, job, l->by))
		return OK;
	TRY(vec_push(&l->names, &at));
	*at = mem_strdup(name);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a name");
}

/* Each gets a name that is this daemon's. One that is gone by now was committed, or removed by its own daemon. */
enum err posix_fence(const struct store_job *by, const struct store *store, const char *target)
{
	struct leftovers l = { .dirfd = -1, .job = by->id, .by = by };
	char last[256], mine[NAME_MAX + 1];

	enum err e = posix_open_parent(store, target, last, &l.dirfd);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	e = fs_list(l.dirfd, find_others, &l);
	for (uint64_t i = 0; i < l.names.n; i++) {
		snprintf(mine, sizeof mine, "%s.%.6s", l.names.v[i], by->mark);
		enum err one = e ? OK : fs_rename(l.dirfd, l.names.v[i], l.dirfd, mine);
		e = e ? e : one == ERR_NOT_FOUND ? OK : one;
		mem_free(l.names.v[i]);
	}
	vec_free(&l.names);
	e = e ? e : fs_fsync(l.dirfd, ".");
	fs_drop(&l.dirfd);
	return e;
}

struct own {
	int dir;
	const char *job;
	struct manifest *manifest;     /* of the job, once found */
};

/* A job that ended while it moved its files into a directory that others use: what was there before is put back. */
static enum err restore_leftover(void *user, const char *name, unsigned char)
{
	struct restore *r = user;
	CLEANUP(fs_drop) int staging = -1;

	if (!str_is(job_of(name), r->job) || fence_is(name) || str_starts(str_of(name), TRASH_PREFIX))
		return OK;
	TRY(fs_open_dir(r->parent, name, &staging));
	return posix_in_place_restore(staging, r->to);
}

static FALLIBLE enum err restore(int parent, const char *last, const char *job)
{
	struct restore r = { .parent = parent, .to = -1, .job = job };

	enum err e = fs_open_dir(parent, last, &r.to);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	e = fs_list(parent, restore_leftover, &r);
	fs_drop(&r.to);
	return e;
}

/* Files that are moved into a directory one by one have the manifest before the metadata: without that nothing is committed. */
static FALLIBLE enum err has_metadata(int dir, int64_t rank, bool *out)
{
	char own[FORMAT_FILE_MAX] = "";
	struct stat st;

	*out = false;
	if (rank >= 0)
		format_dcp_metadata((uint32_t)rank, own);
	for (enum format f = FORMAT_NONE; f < FORMAT_COUNT && !*out; f++) {
		const char *name = rank < 0 ? format_metadata(f) : f == FORMAT_NONE ? own : NULL;
		enum err e = name ? fs_stat(dir, name, &st) : ERR_NOT_FOUND;
		if (e && e != ERR_NOT_FOUND)
			return e;
		*out = e == OK;
	}
	return OK;
}

static enum err look_for_own(void *user, const char *name, unsigned char)
{
	struct own *o = user;
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	int64_t rank;
	bool whole;

	if (o->manifest || !manifest_is(name, &rank))
		return OK;
	enum err e = checkpoint_manifest(posix_at(o->dir), name, &m);
	if (e == ERR_FORMAT_MANIFEST || e == ERR_LIMIT_EXCEEDED) {
		err_clear(); /* not one that we finished */
		return OK;
	}
	TRY(e);
	if (!m || strcmp(m->job, o->job) != 0)
		return OK;
	TRY(has_metadata(o->dir, rank, &whole));
	if (whole)
		o->manifest = move(m);
	return OK;
}

/* A copy of a checkpoint has the manifests of its source, and a page of its own. It comes by one rename, and is whole. */
static FALLIBLE enum err look_at_copied(struct own *o)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;

	enum err e = checkpoint_manifest(posix_at(o->dir), COPIED_NAME, &m);
	if (e == ERR_FORMAT_MANIFEST || e == ERR_LIMIT_EXCEEDED || e == ERR_CHECKPOINT_DAMAGED) {
		err_clear();
		return OK;
	}
	TRY(e);
	if (m && strcmp(m->job, o->job) == 0)
		o->manifest = move(m);
	return OK;
}

/* The receipt of a target that is one file: a manifest of this job, in a staging directory or beside the file, that tells of the file that
 * is there now, by size and time, which a rename does not change. */
struct receipt {
	struct own own;
	int parent;
	const char *last;
	struct stat file;
};

static FALLIBLE enum err look_at_receipt(struct receipt *r, int dir, const char *page)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;

	enum err e = checkpoint_manifest(posix_at(dir), page, &m);
	if (e == ERR_FORMAT_MANIFEST || e == ERR_LIMIT_EXCEEDED || e == ERR_CHECKPOINT_DAMAGED) {
		err_clear(); /* it had not come to the rename */
		return OK;
	}
	TRY(e);
	if (m && strcmp(m->job, r->own.job) == 0 && m->files.n == 1 && manifest_is_of(&m->files.v[0], &r->file))
		r->own.manifest = move(m);
	return OK;
}

/* A page that the commit had not yet put beside its file goes there. */
static enum err look_for_receipt(void *user, const char *name, unsigned char)
{
	struct receipt *r = user;
	CLEANUP(fs_drop) int dir = -1;

	if (r->own.manifest || !str_is(job_of(name), r->own.job) || str_starts(str_of(name), TRASH_PREFIX))
		return OK;
	TRY(fs_open_dir(r->parent, name, &dir));
	TRY(look_at_receipt(r, dir, MANIFEST_NAME));
	if (r->own.manifest)
		posix_beside_keep_receipt(r->parent, name, r->last);
	return OK;
}

static FALLIBLE enum err file_job(int parent, const char *last, const struct stat *file, const char *job, bool *ours, struct manifest **out)
{
	struct receipt r = { .own = { .job = job }, .parent = parent, .last = last, .file = *file };
	char page[BESIDE_MAX];

	enum err e = beside_path(last, MANIFEST_NAME, page) ? look_at_receipt(&r, parent, page) : OK;
	if (!e && !r.own.manifest)
		e = fs_list(parent, look_for_receipt, &r);
	*ours = !e && r.own.manifest;
	*out = r.own.manifest;
	return e;
}

static FALLIBLE enum err manifest_job(int parent, const char *last, const char *job, bool *ours, struct manifest **out)
{
	struct own o = { .dir = -1, .job = job };

	*ours = false;
	enum err e = fs_open_dir(parent, last, &o.dir);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	e = look_at_copied(&o);
	if (!e && !o.manifest)
		e = fs_list(o.dir, look_for_own, &o);
	fs_drop(&o.dir);
	*ours = !e && o.manifest;
	*out = o.manifest;
	return e;
}

/* Its trash is there, or neither trash nor checkpoint: then the trash was removed already. */
static FALLIBLE enum err deleted(int parent, const char *last, const char *job, bool *out)
{
	char trash[128];
	struct stat st;

	snprintf(trash, sizeof trash, TRASH_PREFIX "%s", job);
	*out = true;
	enum err e = fs_stat(parent, trash, &st);
	if (e == ERR_NOT_FOUND) {
		e = fs_stat(parent, last, &st);
		*out = e == ERR_NOT_FOUND;
	}
	return e == ERR_NOT_FOUND ? OK : e;
}

enum err posix_recover(const struct store_job *by, const struct store *store, const char *name, bool removes, bool *done_out,
		       struct manifest **out)
{
	const char *job = by->id;
	char last[256];
	struct stat st;
	CLEANUP(fs_drop) int parent = -1;

	enum err e = removes ? posix_trash_has(store, job, done_out) : OK;
	if (!e && removes && *done_out)
		return posix_trash_follow(store, job, name) || posix_trash_sync(store, job) ? commit_in_doubt("is deleted", name) : OK;
	posix_trash_end(store, job);
	e = e ?: posix_open_parent(store, name, last, &parent);
	if (e == ERR_NOT_FOUND) {
		*done_out = removes;
		return OK;
	}
	TRY(e);
	struct leftovers l = { .dirfd = parent, .job = job, .mark = by->mark };
	if (removes) {
		e = deleted(parent, last, job, done_out);
		e = e ?: *done_out ? posix_beside_follow(store, name, NULL) : OK;
	} else if ((e = fs_stat(parent, last, &st)) == OK && S_ISREG(st.st_mode)) {
		e = file_job(parent, last, &st, job, done_out, out);
	} else if (!e || e == ERR_NOT_FOUND) {
		e = restore(parent, last, job);
		e = e ?: manifest_job(parent, last, job, done_out, out);
	}
	if (!e && *done_out && fs_fsync(parent, "."))
		e = commit_in_doubt(removes ? "is deleted" : "is there and whole", name);
	return e ?: remove_leftovers(&l);
}

/* -------------------------------------------------------------------------------------------------------- sweep */

struct sweep {
	const struct store *store;
	const struct commit_keep *keep;
	int dirfd;
	char path[4096];
	uint32_t depth;
	uint64_t removed;
};

static enum err sweep_entry(void *user, const char *name, unsigned char d_type);

static FALLIBLE enum err sweep_dir(struct sweep *s)
{
	struct leftovers l = { .keep = s->keep, .path = s->path };

	TRY(fs_open_dir(s->store->top, s->path[0] ? s->path : ".", &l.dirfd));
	enum err e = remove_leftovers(&l);
	s->removed += l.removed;
	s->dirfd = l.dirfd;
	if (s->depth < SWEEP_DEPTH) { /* deeper, even if something stayed here */
		enum err below = fs_list(l.dirfd, sweep_entry, s);
		e = e ? e : below;
	}
	fs_drop(&l.dirfd);
	return e;
}

static enum err sweep_entry(void *user, const char *name, unsigned char d_type)
{
	struct sweep *s = user;
	size_t at = strlen(s->path), n = strlen(name);
	enum format format;
	int dirfd = s->dirfd;

	if (name[0] == '.' || (d_type != DT_DIR && d_type != DT_UNKNOWN) || at + n + 2 > sizeof s->path)
		return OK;
	snprintf(s->path + at, sizeof s->path - at, "%s%s", at ? "/" : "", name);
	enum err e = checkpoint_recognise(s->store, s->path, &format);
	if (!e && format == FORMAT_NONE) {
		s->depth++;
		e = sweep_dir(s);
		s->depth--;
	}
	s->path[at] = '\0';
	s->dirfd = dirfd;
	return e == ERR_NOT_FOUND || e == ERR_FORBIDDEN || e == ERR_NAME_INVALID ? OK : e;
}

/* Of one job, beside its target: what is another daemon's is not told apart. */
static FALLIBLE enum err sweep_job(const struct store *store, const struct commit_keep *keep, const char *name, const char *job,
				   uint64_t *removed_out)
{
	struct leftovers l = { .dirfd = -1, .job = job, .mark = keep->mark, .attempt = keep->attempt,
			       .keep = &(struct commit_keep){ .jobs = NULL } };
	char last[256];

	enum err e = posix_open_parent(store, name, last, &l.dirfd);
	e = e ?: remove_leftovers(&l);
	fs_drop(&l.dirfd);
	*removed_out = l.removed;
	return e == ERR_NOT_FOUND ? OK : e;
}

enum err posix_sweep(const struct store *store, const struct commit_keep *keep, const char *name, const char *job,
		     struct store_swept *out)
{
	struct sweep s = { .store = store, .keep = keep };

	*out = (struct store_swept){ 0 };
	if (name)
		return sweep_job(store, keep ?: &(struct commit_keep){ .jobs = NULL }, name, job, &out->removed);
	enum err e = sweep_dir(&s);
	e = e ?: posix_trash_sweep(store, keep, &s.removed);
	out->removed = s.removed;
	return e;
}
