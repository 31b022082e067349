/* inspect.c: what would loading a checkpoint have run? Every pickle in it is followed by a machine that runs nothing (format/inspect.h):
 * those of `.metadata`, of each item that the metadata name, and of every other file that a loader would unpickle.
 *
 * The checkpoint need not be one that dcpd reads, nor be whole: what cannot be looked into is listed, and is not called safe. Nothing is
 * compared with digests: the question is what the bytes do, whoever wrote them. */
#include <dirent.h>
#include <stdio.h>

#include "format/inspect.h"
#include "base/jtext.h"
#include "runner/input.h"
#include "store/posix.h"

enum { DEPTH_MAX = 8, FILES_MAX = 1000000, PATH_BYTES_MAX = 4096 };

struct inspection {
	struct job *job;
	struct inspect in;
	uint64_t files;
};

/* Lists a file that cannot be read for its contents; a fault of the storage fails the job instead. */
static FALLIBLE enum err noted(struct inspection *t, const struct inspect_file *f, enum err e)
{
	if (e == OK || (!checked_is_damage(e) && e != ERR_NOT_A_CHECKPOINT && e != ERR_DUPLICATE_KEY && e != ERR_NAME_INVALID))
		return e;
	return inspect_note_broken(&t->in, f);
}

static FALLIBLE enum err one_file(struct inspection *t, struct store_at folder, const char *name, const char *path, bool is_pickle)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	struct inspect_file f = { .name = str_of(path), .is_pickle = is_pickle };
	struct stat st;

	t->files++;
	TRY(err_at_file(store_open_file(folder, name, STORE_READ, &file), path, -1));
	TRY(err_at_file(store_stat(file, "", &st), path, -1));
	struct store_span s = { .file = file };
	return err_at_file(inspect_file(&t->in, &f, &(struct item_source){ store_read_span, &s, (uint64_t)st.st_size }), path, -1);
}

/* ------------------------------------------------------------------------------------------------------- folders */

struct folder {
	struct inspection *t;
	struct store_at at;
	const char *path;              /* below the checkpoint; "" its own */
	unsigned depth;
};

static FALLIBLE enum err walk(struct inspection *t, struct store_at at, const char *path, unsigned depth);

static FALLIBLE enum err enter(const struct folder *f, const char *name, const char *path)
{
	CLEANUP(store_close) struct store_at below = STORE_NOTHING;

	if (f->depth >= DEPTH_MAX)
		return noted(f->t, &(struct inspect_file){ .name = str_of(path) },
			     ERR(LIMIT_EXCEEDED, "folders in folders, %d deep", DEPTH_MAX));
	TRY(store_enter(f->at, name, &below));
	return walk(f->t, below, path, f->depth + 1);
}

static enum err on_entry(void *user, const char *name, unsigned char d_type)
{
	const struct folder *f = user;
	struct inspect_file file = { 0 };
	struct format_file is;
	char path[PATH_BYTES_MAX];
	struct stat st;

	TRY(job_tick(f->t->job));
	if (snprintf(path, sizeof path, "%s%s%s", f->path, f->path[0] ? "/" : "", name) >= (int)sizeof path || f->t->files >= FILES_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d files, or paths of more than %d bytes", FILES_MAX, PATH_BYTES_MAX);
	file.name = str_of(path);
	if (str_starts(str_of(name), ".dcpd"))
		return OK;
	if (d_type != DT_REG && d_type != DT_DIR) {
		enum err e = store_stat(f->at, name, &st);
		if (e == ERR_NAME_INVALID) /* a link: nothing here follows it, but others may */
			return noted(f->t, &file, e);
		TRY(e);
		d_type = S_ISDIR(st.st_mode) ? DT_DIR : DT_REG;
	}
	if (d_type == DT_DIR)
		return enter(f, name, path);
	if (format_file(name, &is) && is.role == FORMAT_PAYLOAD && (is.format == FORMAT_DCP || is.format == FORMAT_DCP_RANK_LOCAL))
		return f->depth == 0 ? OK :
		       noted(f->t, &file, ERR(NOT_A_CHECKPOINT, "a part of the checkpoint in its folder: inspect that"));
	return noted(f->t, &file, one_file(f->t, f->at, name, path, inspect_expects(str_of(name))));
}

static FALLIBLE enum err walk(struct inspection *t, struct store_at at, const char *path, unsigned depth)
{
	struct folder f = { t, at, path, depth };

	return store_list(at, on_entry, &f);
}

/* --------------------------------------------------------------------------------------------------------- items */

/* A header of safetensors, as PyTorch's HuggingFaceStorageWriter has it instead of an archive: its length, then JSON. */
static bool is_safetensors(const struct item_source *src)
{
	unsigned char first[9];

	if (source_read(src, 0, first, sizeof first)) {
		err_clear();
		return false;
	}
	return first[8] == '{';
}

static FALLIBLE enum err one_item(struct inspection *t, const struct input *source, struct sd_loc loc, struct str fqn)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	const struct sd_file *f = &source->sd->files[loc.file];
	struct sd_origin origin = sd_origin_of(source->sd, loc);
	struct inspect_file named = { .name = source->sd->files[origin.file].name, .fqn = fqn, .offset = origin.offset };
	struct store_span s = { .offset = loc.offset };
	struct item_source src = { store_read_span, &s, loc.length };

	TRY(job_tick(t->job));
	if (loc.length == 0)
		return OK;
	if (f->name.n)
		TRY(checkpoint_open_file(source->checkpoint, loc.file, &file));
	s.file = f->name.n ? file : posix_at(t->job->fds[f->rank]);	/* a spool */
	named.is_pickle = !is_safetensors(&src);
	return noted(t, &named, inspect_file(&t->in, &named, &src));
}

/* The items of one set of metadata. An item that holds several tensors is looked into once. */
static FALLIBLE enum err all_items(struct inspection *t, struct input *source)
{
	struct sd_loc last = { .file = SD_NO_FILE };

	TRY(input_undo_transforms(t->job, source, false));
	const struct sdict *sd = source->sd = source->checkpoint->sd;
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		struct sd_loc loc = sd->chunks[i].loc;
		if (loc.file != last.file || loc.offset != last.offset)
			TRY(one_item(t, source, loc, sd->tensors[sd->chunks[i].tensor].fqn));
		last = loc;
	}
	for (uint64_t i = 0; i < sd->value_count; i++)
		if (sd->values[i].kind == SD_VALUE_STORED)
			TRY(one_item(t, source, sd->values[i].loc, sd->values[i].fqn));
	return OK;
}

static FALLIBLE enum err items(struct inspection *t, struct input *source)
{
	TRY(input_open(t->job, &t->job->spec.source, source));
	if (source->checkpoint->format == FORMAT_DCP_RANK_LOCAL) {
		for (uint64_t i = 0; i < source->checkpoint->rank_count; i++) {
			TRY(checkpoint_take_rank(source->checkpoint, i));
			TRY(all_items(t, source));
		}
		return OK;
	}
	return all_items(t, source);
}

/* ------------------------------------------------------------------------------------------------------- the report */

static void put_place(json_t *doc, const struct inspect_place *p)
{
	json_object_set_new(doc, "file", jtext_value(p->file));
	json_object_set_new(doc, "offset", json_integer((json_int_t)p->offset));
	if (p->record.n)
		json_object_set_new(doc, "record", jtext_value(p->record));
	if (p->fqn.n)
		json_object_set_new(doc, "fqn", jtext_value(p->fqn));
}

static void put_globals(const struct inspect *in, bool runs, json_t *list)
{
	each(g, in->globals.v, in->globals.n) {
		if ((g->changed || !g->is_data) != runs)
			continue;
		json_t *doc = json_pack("{s:o, s:o, s:b, s:I, s:I}", "module", jtext_value(g->module), "name", jtext_value(g->name), "runs",
					runs, "imports", (json_int_t)g->imports, "calls", (json_int_t)g->calls);
		if (g->changed)
			json_object_set_new(doc, "changed", json_true());
		put_place(doc, &g->first);
		json_array_append_new(list, doc);
	}
}

static void report(const struct inspection *t)
{
	const struct inspect *in = &t->in;
	json_t *r = t->job->result, *globals = json_array(), *broken = json_array();

	put_globals(in, true, globals);
	put_globals(in, false, globals);
	for (uint64_t i = 0; i < in->broken.n; i++) {
		json_t *doc = json_pack("{s:o}", "detail", jtext_value(in->broken.v[i].why));
		put_place(doc, &in->broken.v[i].place);
		json_array_append_new(broken, doc);
	}
	json_object_set_new(r, "safe", json_boolean(inspect_is_safe(in)));
	json_object_set_new(r, "files", json_integer((json_int_t)t->files));
	json_object_set_new(r, "pickles", json_integer((json_int_t)in->pickles));
	json_object_set_new(r, "globals", globals);
	json_object_set_new(r, "broken", broken);
	json_object_set_new(r, "broken_count", json_integer((json_int_t)in->broken_count));
}

static FALLIBLE enum err inspection(struct inspection *t, struct store_at *at, struct input *source)
{
	const struct ref *ref = &t->job->spec.source;
	const struct store *store;
	const char *single;
	enum format format;

	t->job->result = json_object();
	NEED(t->job->result, "no memory for the result");
	TRY(inspect_begin(&t->in));
	TRY(job_state(t->job, "planning", "metadata", NULL, 0));
	TRY(stores_find(&t->job->worker->stores, ref->storage.p, &store));
	TRY(checkpoint_open_dir(store, ref->name.p, at, &single));
	if (t->job->dry_run)
		return OK;
	TRY(job_state(t->job, "running", "read", NULL, 0));
	if (single) {
		enum err e = one_file(t, *at, single, single, inspect_expects(str_of(single)));
		TRY(noted(t, &(struct inspect_file){ .name = str_of(single) }, e));
	} else {
		TRY(walk(t, *at, "", 0));
		TRY(checkpoint_format_of_dir(*at, &format));
		if (format_is_dcp(format) || format == FORMAT_DCP_RANK_LOCAL)
			TRY(noted(t, &(struct inspect_file){ .name = STR(DCP_METADATA) }, items(t, source)));
	}
	report(t);
	return OK;
}

enum err inspect_job(struct job *j)
{
	struct inspection t = { .job = j, .in = { .tick = job_tick, .user = j } };
	struct store_at at = STORE_NOTHING;
	CLEANUP(input_close) struct input source = { 0 };

	enum err e = inspection(&t, &at, &source);
	store_close(&at);
	inspect_end(&t.in);
	return e;
}
