/* staging.c: see staging.h. */
#include "store/staging.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "store/beside.h"
#include "store/copied.h"
#include "store/fence.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/owner.h"
#include "store/trash.h"

enum { REPLACE_TRIES = 8 };

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

static FALLIBLE enum err lies_in(const struct store *store, const char *path, const char *name, bool *out)
{
	char below[4096 + FORMAT_FILE_MAX];
	struct stat st;

	snprintf(below, sizeof below, "%s/%s", path, name);
	enum err e = store_stat(store_top(store), below, &st);
	*out = !e;
	return e == ERR_NOT_FOUND ? OK : e;
}

/* Is the directory a checkpoint only because files are in it that each are one? No index and no manifest binds them together: one more
 * may be added. */
static FALLIBLE enum err is_loose(const struct store *store, const char *path, enum format format, bool *out)
{
	bool bound = true;

	if (format_is_file(format) && format_metadata(format))
		TRY(lies_in(store, path, format_metadata(format), &bound));
	if (!bound)
		TRY(lies_in(store, path, MANIFEST_NAME, &bound));
	*out = !bound;
	return OK;
}

/* A name beneath a checkpoint is refused: none of its ancestors may be one. */
FALLIBLE enum err staging_check_ancestors(const struct store *store, const char *parent_path, bool is_file)
{
	char path[4096];
	bool loose = false;

	for (size_t i = 0; parent_path[i]; i++) {
		if (parent_path[i + 1] != '/' && parent_path[i + 1] != '\0')
			continue;
		enum format format;
		memcpy(path, parent_path, i + 1);
		path[i + 1] = '\0';
		TRY(checkpoint_recognise(store, path, &format));
		if (format != FORMAT_NONE && is_file)
			TRY(is_loose(store, path, format, &loose));
		if (format != FORMAT_NONE && !(is_file && loose))
			return ERR(NAME_INVALID, "'%s' is a checkpoint, and no checkpoint lies in another", path);
	}
	return OK;
}

/* A file that is called like a part of a larger checkpoint would make one of its folder. */
static FALLIBLE enum err check_file_name(const char *file)
{
	struct format_listing l = { 0 };

	format_listing_add(&l, file);
	enum format format = format_of_listing(&l);
	return format == FORMAT_NONE || format == FORMAT_SAFETENSORS ? OK :
	       ERR(NAME_INVALID, "'%s' is the name of a part of a checkpoint of the format %s", file, format_name(format));
}

/* A file that a save of dcpd's or PyTorch's makes anew. */
static bool is_checkpoint_file(const char *name)
{
	struct format_file file;
	int64_t rank;

	return manifest_is(name, &rank) || notes_is(name) || beside_is(name) || strcmp(name, COPIED_NAME) == 0 ||
	       (format_file(name, &file) && format_makes_folders(file.format));
}

/* A directory that is to be replaced, or one in it, and what its manifest and the page of a copy list; NULL: nothing. */
struct replaced {
	struct store_at dir;
	const struct manifest *manifest, *copied;
	const char *path;              /* of the directory in the checkpoint, with '/' at its end; "": the checkpoint itself */
	unsigned depth;
};

static bool lists(const struct manifest *m, const char *name)
{
	return m && map_get(&m->names, str_of(name)) != MAP_NONE;
}

static enum err check_entry(void *user, const char *name, unsigned char d_type);

/* A copy's own folders are replaced if nothing but what was copied is in them. */
static FALLIBLE enum err check_inside(const struct replaced *r, const char *name, const char *path)
{
	CLEANUP(store_close) struct store_at below = STORE_NOTHING;
	char inside[CONTENTS_PATH_MAX];

	if (snprintf(inside, sizeof inside, "%s/", path) >= (int)sizeof inside)
		return ERR(NOT_A_CHECKPOINT, "a folder with too long a path lies there, too: nothing is replaced");
	TRY(store_enter(r->dir, name, &below));
	return store_list(below, check_entry, &(struct replaced){ below, NULL, r->copied, inside, r->depth + 1 });
}

static enum err check_entry(void *user, const char *name, unsigned char d_type)
{
	const struct replaced *r = user;
	const struct store_at *dir = &r->dir;
	char path[CONTENTS_PATH_MAX];
	struct stat st;

	if (d_type == DT_UNKNOWN) {
		TRY(store_stat(*dir, name, &st));
		d_type = S_ISREG(st.st_mode) ? DT_REG : DT_DIR;
	}
	bool fits = snprintf(path, sizeof path, "%s%s", r->path, name) < (int)sizeof path;
	if (d_type == DT_REG && ((!r->depth && is_checkpoint_file(name)) || lists(r->manifest, name) || (fits && lists(r->copied, path))))
		return OK;
	if (d_type == DT_DIR && r->copied && fits && r->depth < CONTENTS_DEPTH_MAX)
		return check_inside(r, name, path);
	return err_at_file(ERR(NOT_A_CHECKPOINT, "'%s' lies there too, which is no part of a checkpoint: nothing is replaced", name), name,
			   -1);
}

/* A damaged page lists nothing. */
static struct manifest *page_of(struct store_at dir, const char *name)
{
	struct manifest *m = NULL;

	if (checkpoint_manifest(dir, name, &m)) {
		err_clear();
		return NULL;
	}
	return m;
}

/* A directory is replaced only if nothing is lost but a checkpoint. */
static FALLIBLE enum err check_replaced(const struct store *store, const char *name)
{
	CLEANUP(manifest_free_ptr) struct manifest *manifest = NULL, *copied = NULL;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;

	TRY(store_enter(store_top(store), name, &dir));
	manifest = page_of(dir, MANIFEST_NAME);
	copied = page_of(dir, COPIED_NAME);
	return store_list(dir, check_entry, &(struct replaced){ dir, manifest, copied, "", 0 });
}

/* A file is replaced only if it is one of its format, and not only called so. */
static FALLIBLE enum err check_replaced_file(const struct store *store, const char *name, enum format format)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	unsigned char first[FORMAT_FIRST_BYTES];
	struct stat st;

	TRY(store_open_file(store_top(store), name, STORE_READ, &file));
	TRY(store_stat(file, "", &st));
	size_t n = (size_t)num_min((uint64_t)st.st_size, sizeof first);
	TRY(store_read(file, first, n, 0, name));
	if (format_denied(format, first, n))
		return ERR(NOT_A_CHECKPOINT, "'%s' is no file of the format %s: nothing is replaced", name, format_name(format));
	return OK;
}

static FALLIBLE enum err check_target(const struct staging *s, const char *name, bool overwrite)
{
	enum format format;
	struct stat st;

	enum err e = store_stat(store_top(s->store), name, &st);
	if (e == ERR_NOT_FOUND)
		return OK;
	TRY(e);
	TRY(checkpoint_recognise(s->store, name, &format));
	if (format != FORMAT_NONE && s->is_file != S_ISREG(st.st_mode))
		return ERR(NAME_INVALID, "'%s' is a checkpoint %s, and no %s replaces it", name, s->is_file ? "directory" : "of one file",
			   s->is_file ? "file" : "directory");
	if (format == FORMAT_NONE || !(s->is_file ? S_ISREG(st.st_mode) : S_ISDIR(st.st_mode)))
		return ERR(NOT_A_CHECKPOINT, "'%s' is there and is no checkpoint %s", name, s->is_file ? "file" : "directory");
	if (!overwrite)
		return ERR(CHECKPOINT_EXISTS, "'%s' exists; overwrite is not set", name);
	TRY(owner_check(&s->by, s->store, name));
	TRY(notes_check_removal(store_top(s->store), name));
	return s->is_file ? check_replaced_file(s->store, name, format) : check_replaced(s->store, name);
}

/* Files of a checkpoint that lies in the directory may be replaced; whatever else is in it is not touched. */
static FALLIBLE enum err check_in_place(const struct staging *s, const char *name)
{
	enum format format;

	if (!s->store->ops->publish_in_place)
		return ERR(UNSUPPORTED, "the storage '%s' publishes no checkpoint between files of others", s->store->name);
	TRY(checkpoint_recognise(s->store, name, &format));
	if (format != FORMAT_NONE)
		TRY(owner_check(&s->by, s->store, name));
	return notes_check_free(store_top(s->store), name);
}

void staging_target_name(const struct staging *s, char *out, size_t max)
{
	snprintf(out, max, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", s->target);
}

static FALLIBLE enum err check_options(struct staging *s, const struct spec *spec)
{
	const char *name = spec->target.name.p;

	s->in_place = spec->in_place == IN_PLACE_ALWAYS;
	if (s->in_place)
		return check_in_place(s, name);
	enum err e = check_target(s, name, spec->overwrite);
	if (e != ERR_NOT_A_CHECKPOINT || spec->in_place != IN_PLACE_NEEDED)
		return e;
	err_clear();
	s->in_place = true;
	return check_in_place(s, name);
}

enum err staging_beside(const char *name, const char *own, char path[STAGING_BESIDE_MAX])
{
	char parent[4096], last[256];

	TRY(staging_divide(name, parent, sizeof parent, last, sizeof last));
	snprintf(path, STAGING_BESIDE_MAX, "%s%s%s", parent, parent[0] ? "/" : "", own);
	return OK;
}

void staging_name(const struct store_job *by, char out[STAGING_NAME_MAX])
{
	int n = snprintf(out, STAGING_NAME_MAX, ".dcpd-%.64s-%ju", by->id, (uintmax_t)by->attempt);

	if (by->mark && by->turn) /* it was taken over: see fence.h */
		snprintf(out + n, STAGING_NAME_MAX - (size_t)n, "+%u.%.6s", by->turn, by->mark);
}

bool staging_is_later(const char *name, uint64_t attempt)
{
	const char *dash = strrchr(name, '-');
	char *end = NULL;

	unsigned long long of = attempt && dash && !str_starts(str_of(name), TRASH_PREFIX) ? strtoull(dash + 1, &end, 10) : 0;
	return of > attempt && (*end == '\0' || *end == '+' || *end == '.');
}

static FALLIBLE enum err set_place(struct staging *s, const struct store_job *by, const struct spec *spec, const char *name_given)
{
	const char *name = spec->target.name.p;

	*s = (struct staging){ .by = *by, .no_sync = !spec->sync_files, .is_file = spec_target_is_file(spec) };
	TRY(stores_find(by->stores, spec->target.storage.p, &s->store));
	TRY(staging_divide(name, s->parent_path, sizeof s->parent_path, s->target, sizeof s->target));
	if (name_given)
		snprintf(s->name, sizeof s->name, "%s", name_given);
	else
		staging_name(by, s->name);
	return staging_beside(name, s->name, s->path);
}

enum err staging_open(const struct store_job *by, const struct spec *spec, struct staging *out)
{
	return staging_open_as(by, spec, NULL, out);
}

static FALLIBLE enum err check_place(const struct staging *s)
{
	TRY(staging_check_ancestors(s->store, s->parent_path, s->is_file));
	return s->is_file ? check_file_name(s->target) : OK;
}

/* The fence is read behind the making of the staging (fence.h). */
static FALLIBLE enum err stage(struct staging *s, const struct spec *spec, bool keep)
{
	TRY(s->store->ops->stage(s, keep));
	return fence_check(&s->by, s->store, spec->target.name.p);
}

enum err staging_open_as(const struct store_job *by, const struct spec *spec, const char *name_given, struct staging *out)
{
	TRY(set_place(out, by, spec, name_given));
	TRY(check_place(out));
	TRY(check_options(out, spec));
	return stage(out, spec, name_given != NULL);
}

enum err staging_open_copy(const struct store_job *by, const struct spec *spec, bool is_file, struct staging *out)
{
	TRY(set_place(out, by, spec, NULL));
	out->is_file = is_file;
	TRY(check_place(out));
	TRY(check_options(out, spec));
	return stage(out, spec, false);
}

enum err staging_add_folder(struct staging *s, const char *path)
{
	CLEANUP(store_close) struct store_at made = STORE_NOTHING;
	char **folder;

	TRY(vec_push(&s->folders, &folder));
	*folder = mem_strdup(path);
	NEED(*folder, "no memory for a folder's name");
	return err_at_file(s->store->ops->make(s->dir, path, &made), path, -1);
}

enum err staging_open_part(const struct store_job *by, const struct spec *spec, const char *name_given, struct staging *out)
{
	TRY(set_place(out, by, spec, name_given));
	out->is_part = true;
	return out->store->ops->stage(out, true);
}

enum err staging_open_repair(const struct store_job *by, const struct spec *spec, struct store_at of, struct staging *out)
{
	TRY(set_place(out, by, spec, NULL));
	out->is_file = false;
	out->repaired = of;
	if (!out->store->ops->replace)
		return ERR(UNSUPPORTED, "the storage '%s' replaces no single files of a checkpoint", out->store->name);
	TRY(owner_check(by, out->store, spec->target.name.p));
	return out->store->ops->stage(out, false);
}

enum err staging_replace(struct staging *s, const char *name)
{
	return s->store->ops->replace(s, name);
}

enum err staging_add_file(struct staging *s, struct str name, uint64_t bytes, uint32_t rank, unsigned how)
{
	struct staging_file *f;

	TRY(vec_push(&s->files, &f));
	*f = (struct staging_file){ .name = mem_strndup(name.p, name.n), .bytes = bytes, .rank = rank, .how = how };
	return f->name ? OK : ERR(NO_MEMORY, "no memory for a file's name");
}

/* Files of other ranks than the local ones are made by other hosts, and some only when they must be. */
static bool is_made_here(const struct staging *s, const struct staging_file *f)
{
	return !(f->how & STAGING_UNMADE) && (!s->local || s->local[f->rank]);
}

/* Ends the writing of a part, unless it has failed (e). */
static FALLIBLE enum err end_part(struct store_at *file, enum err e, bool durable, const char *name)
{
	e = e ?: file->store->ops->finish(file, durable, name);
	store_close(file);
	return err_at_file(e, name, -1);
}

static FALLIBLE enum err make_file(struct staging *s, const struct staging_file *f)
{
	struct store_at file;

	if (s->local) /* an earlier attempt's, in a directory that is kept */
		TRY(store_drop(s->dir, f->name));
	TRY(store_open_file(s->dir, f->name, STORE_WRITE | STORE_NEW | (f->how & STAGING_LATE ? STORE_LATE : 0), &file));
	if (f->bytes == 0)
		return end_part(&file, OK, !s->no_sync, f->name);
	const struct store_ops *ops = file.store->ops;
	enum err e = f->how & STAGING_SPARSE && ops->extend ? ops->extend(file, f->bytes, f->name) : ops->resize(file, f->bytes, f->name);
	store_close(&file);
	return err_at_file(e, f->name, -1);
}

enum err staging_make_files(struct staging *s)
{
	each(f, s->files.v, s->files.n)
		TRY(err_at_rank(err_at_file(is_made_here(s, f) ? make_file(s, f) : OK, f->name, -1), f->rank));
	return OK;
}

enum err staging_end_late(struct staging *s, uint64_t i, const struct staging_field *fields, uint64_t count)
{
	const struct staging_file *f = &s->files.v[i];
	struct store_at file;

	TRY(store_open_file(s->dir, f->name, STORE_WRITE, &file));
	enum err e = file.store->ops->resize(file, f->bytes, f->name);
	for (uint64_t k = 0; k < count && !e; k++) {
		uint32_t le = htole32(fields[k].value);
		e = file.store->ops->write(file, &le, sizeof le, fields[k].offset, f->name);
	}
	return end_part(&file, e, !s->no_sync, f->name);
}

enum err staging_put_file(struct staging *s, const char *name, const void *bytes, uint64_t n)
{
	struct store_at file;

	TRY(store_open_file(s->dir, name, STORE_WRITE | STORE_NEW, &file));
	return end_part(&file, file.store->ops->write(file, bytes, n, 0, name), !s->no_sync, name);
}

/* Each file has the size it was planned with: the last look before it counts. */
static FALLIBLE enum err check_sizes(const struct staging *s)
{
	each(f, s->files.v, s->files.n) {
		struct stat st;
		TRY(store_stat(s->dir, f->name, &st));
		if ((uint64_t)st.st_size != f->bytes)
			return err_at_file(ERR(STORAGE_IO, "the file has %jd bytes, %ju were written", (intmax_t)st.st_size,
					       (uintmax_t)f->bytes), f->name, -1);
	}
	return OK;
}

/* A former owner's commit may have been on its way to an object storage when the job was taken over, and have come true since: the job's
 * own checkpoint is not replaced by itself. Recovery finds it. */
static FALLIBLE enum err check_not_own(const struct staging *s, const char *name)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;

	if (s->is_file)
		return OK;
	TRY(store_enter(store_top(s->store), name, &dir));
	m = page_of(dir, COPIED_NAME);
	m = m ? m : page_of(dir, MANIFEST_NAME);
	return m && strcmp(m->job, s->by.id) == 0 ? ERR(JOB_MOVED, "'%s' was committed by an earlier owner of job %s", name, s->by.id) : OK;
}

enum err staging_commit(struct staging *s, bool overwrite)
{
	char name[sizeof s->parent_path + sizeof s->target + 1], identity[IDENTITY_MAX];

	staging_target_name(s, name, sizeof name);
	TRY(check_sizes(s));
	for (int tries = 0;; tries++) {
		enum err e = overwrite ? identity_of(store_top(s->store), name, identity) : ERR_NOT_FOUND;
		if (e && e != ERR_NOT_FOUND)
			return e;
		bool replaces = !e;
		err_clear();
		TRY(fence_check(&s->by, s->store, name));
		if (replaces) /* what is there now need not be what was there when the job began */
			TRY(check_target(s, name, true));
		if (replaces && s->by.mark)
			TRY(check_not_own(s, name));
		e = s->store->ops->publish(s, replaces ? identity : NULL);
		if (e != ERR_CHECKPOINT_EXISTS || !overwrite || tries == REPLACE_TRIES)
			return e;
	}
}

enum err staging_commit_in_place(struct staging *s, const char *metadata)
{
	char name[sizeof s->parent_path + sizeof s->target + 1];

	staging_target_name(s, name, sizeof name);
	TRY(check_sizes(s));
	TRY(check_in_place(s, name));
	return s->store->ops->publish_in_place(s, metadata);
}

void staging_close(struct staging *s)
{
	CLEANUP(err_restore) struct err_info info = *err_last();

	if (s->store)
		s->store->ops->discard(s);
	for (uint64_t i = 0; i < s->files.n; i++)
		mem_free(s->files.v[i].name);
	vec_free(&s->files);
	for (uint64_t i = 0; i < s->folders.n; i++)
		mem_free(s->folders.v[i]);
	vec_free(&s->folders);
}
