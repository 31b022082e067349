/* lookup.c: answers about storages and what lies there, cheap ones. Lists, tensors, slices and places are in lookup_list.c,
 * lookup_tensors.c, lookup_slice.c and lookup_locate.c. */
#include "query/lookup.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "base/jval.h"
#include "os/fs.h"
#include "query/lookup_cache.h"
#include "runner/hosts.h"
#include "store/aliases.h"
#include "store/beside.h"
#include "store/commit.h"
#include "store/copied.h"
#include "store/fence.h"
#include "store/identity.h"
#include "store/kept_trash.h"
#include "store/notes.h"
#include "store/owner.h"
#include "store/parts.h"
#include "store/record.h"
#include "store/trash.h"

enum err lookup_room(const json_t *q, uint64_t bytes)
{
	const json_t *granted = json_object_get(q, "room");
	char needed[24];

	if (!granted || bytes <= (uint64_t)json_integer_value(granted))
		return OK;
	snprintf(needed, sizeof needed, "%ju", (uintmax_t)bytes);
	enum err e = ERR(BUSY, "an answer of %s bytes; %jd are granted", needed, (intmax_t)json_integer_value(granted));
	return err_expected(e, NULL, needed);
}

static FALLIBLE enum err store_of(const struct worker *w, const json_t *q, const struct store **out)
{
	const char *storage = json_string_value(json_object_get(q, "storage"));

	return storage ? stores_find(&w->stores, storage, out) : ERR(VALIDATION_FAILED, "a question without a storage");
}

enum { STORAGE_ID_BYTES = 16, STORAGE_ID_PAGE = 256 };
#define STORAGE_ID_NAME ".dcpd-storage-id"

static FALLIBLE enum err read_id(struct store_at top, char id[2 * STORAGE_ID_BYTES + 1])
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t n = 0;

	TRY(store_get(top, STORAGE_ID_NAME, STORAGE_ID_PAGE, &bytes, &n, NULL));
	if (n < 2 * STORAGE_ID_BYTES || strspn(bytes, "0123456789abcdef") < 2 * STORAGE_ID_BYTES)
		return ERR(STORAGE_IO, STORAGE_ID_NAME " is none of dcpd's");
	snprintf(id, 2 * STORAGE_ID_BYTES + 1, "%.*s", 2 * STORAGE_ID_BYTES, (const char *)bytes);
	return OK;
}

/* Nodes of a cluster that see the same id have the same storage, by whatever path. The first one makes it. */
static FALLIBLE enum err find_id(const struct store *store, char id[2 * STORAGE_ID_BYTES + 1])
{
	CLEANUP(store_close) struct store_at lock = STORE_NOTHING;
	const struct store_ops *ops = store->ops;
	unsigned char bytes[STORAGE_ID_BYTES];
	char page[2 * STORAGE_ID_BYTES + 2];

	enum err e = read_id(store_top(store), id);
	if (e != ERR_NOT_FOUND)
		return e;
	if (ops->lock)
		TRY(ops->lock(store_top(store), &lock));
	e = ops->lock ? read_id(store_top(store), id) : ERR_NOT_FOUND;
	if (e != ERR_NOT_FOUND)
		return e;
	if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
		return ERR_SYS(SYSTEM, "no random bytes for a storage's id");
	for (size_t i = 0; i < sizeof bytes; i++)
		snprintf(page + 2 * i, 3, "%02x", bytes[i]);
	page[2 * STORAGE_ID_BYTES] = '\n';
	e = ops->swap ? ops->swap(store_top(store), STORAGE_ID_NAME, page, sizeof page - 1, NULL) :
			ops->put(store_top(store), STORAGE_ID_NAME, page, sizeof page - 1, true);
	if (e && e != ERR_STATE_CONFLICT)
		return e;
	return read_id(store_top(store), id);
}

static FALLIBLE enum err probe(struct worker *w, const json_t *q, struct buf *out)
{
	char id[2 * STORAGE_ID_BYTES + 1] = "";
	struct store_facts f = { 0 };
	const struct store *store;

	TRY(store_of(w, q, &store));
	TRY(store->ops->probe(store, &f));
	if (json_is_true(json_object_get(q, "id")) && find_id(store, id))
		err_clear(); /* it cannot be written, so no job of it is anybody else's */
	buf_puts(out, "{");
	if (id[0])
		buf_printf(out, "\"id\":\"%s\",", id);
	if (f.total_bytes)
		buf_printf(out, "\"free_bytes\":%ju,\"total_bytes\":%ju,", (uintmax_t)f.free_bytes, (uintmax_t)f.total_bytes);
	buf_printf(out, "\"fs\":\"%s\",\"direct_io\":%s,\"rename_noreplace\":%s,\"exchange\":%s,\"writable\":%s}", f.kind,
		   f.direct ? "true" : "false", f.noreplace ? "true" : "false", f.exchange ? "true" : "false",
		   f.writable ? "true" : "false");
	return OK;
}

static FALLIBLE enum err exists(struct worker *w, const json_t *q, struct buf *out)
{
	const char *name = json_string_value(json_object_get(q, "name"));
	char led[CHECKPOINT_NAME_MAX];
	enum format format;
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	uid_t owner = 0;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	const struct store *store;
	struct stat st;

	TRY(store_of(w, q, &store));
	enum err e = store_stat(store_top(store), name, &st);
	if (e == ERR_NOT_FOUND) {
		buf_puts(out, "{\"exists\":false,\"what\":\"none\",\"job\":null}");
		return OK;
	}
	TRY(e);
	TRY(checkpoint_follow(store, name, led, &format));
	bool leads = strcmp(led, name) != 0;
	bool is_one = format != FORMAT_NONE && !leads;
	if (is_one && S_ISDIR(st.st_mode) && store_enter(store_top(store), name, &dir) == OK &&
	    checkpoint_manifest(dir, MANIFEST_NAME, &m))
		m = NULL;
	e = owner_find(store, name, (uid_t)json_integer_value(json_object_get(q, "uid")), &owner);
	buf_printf(out, "{\"exists\":true,\"what\":\"%s\",\"leads\":%s,\"owner\":%u,\"job\":", is_one ? "checkpoint" : "other",
		   leads ? "true" : "false", owner);
	if (m)
		buf_json_str(out, str_of(m->job));
	else
		buf_puts(out, "null");
	if (!e && is_one && notes_check_free(store_top(store), name)) {
		buf_puts(out, ",\"held\":");
		buf_json_str(out, str_of(err_last()->text));
		err_clear();
	}
	buf_puts(out, "}");
	return e;
}

/* ------------------------------------------------------------------------------------------------------- summary */

/* A time without a part of a second, as tools set it, is written without one. */
static void put_time(struct buf *b, struct timespec t)
{
	char stamp[40];
	struct tm tm;

	/* whoever owns the file may have set any time: not all have a date */
	if (!gmtime_r(&t.tv_sec, &tm) || strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm) == 0) {
		buf_puts(b, "null");
		return;
	}
	buf_printf(b, "\"%s", stamp);
	if (t.tv_nsec > 0)
		buf_printf(b, ".%03d", (int)(t.tv_nsec / 1000000));
	buf_puts(b, "Z\"");
}

struct summary {
	enum format format;
	uint64_t bytes;
	uint32_t world_size;
	bool dcpd, has_notes, is_copy;
	uint32_t manifests;
	char manifest[MANIFEST_NAME_MAX];      /* that of all ranks, else the lowest rank's */
	int64_t manifest_rank;
	struct timespec newest;        /* file; of a folder its notes, which come and go, do not count */
	struct store_at dir;
	struct identity id;
};

static bool is_later(struct timespec a, struct timespec b)
{
	return a.tv_sec != b.tv_sec ? a.tv_sec > b.tv_sec : a.tv_nsec > b.tv_nsec;
}

/* A file of a checkpoint: its size and, if its name says so, its rank. */
static enum err sum_file(void *user, const char *name, unsigned char)
{
	struct summary *s = user;
	struct format_file file;
	struct stat st;
	int64_t of_rank;

	if (notes_is(name) || strcmp(name, NOTES_NAME "/") == 0) { /* a folder of that name is unreadable notes */
		s->has_notes = true;
		return OK;
	}
	if (beside_is(name))
		return OK; /* of a file of the folder */
	if (strcmp(name, COPIED_NAME) == 0) {
		s->is_copy = true;
		return OK; /* no byte of the checkpoint */
	}
	if (store_stat(s->dir, name, &st) == OK && S_ISREG(st.st_mode)) {
		s->bytes += (uint64_t)st.st_size;
		s->newest = is_later(st.st_mtim, s->newest) ? st.st_mtim : s->newest;
		identity_add(&s->id, name, &st);
	}
	if (manifest_is(name, &of_rank) && strlen(name) < sizeof s->manifest) {
		if (!s->manifests++ || of_rank < s->manifest_rank) {
			snprintf(s->manifest, sizeof s->manifest, "%s", name);
			s->manifest_rank = of_rank;
		}
		s->dcpd = true;
	}
	if (format_file_in(s->format, name, &file) && file.role == FORMAT_PAYLOAD && file.rank >= s->world_size)
		s->world_size = (uint32_t)file.rank + 1;
	return OK;
}

/* Ranks that save without collectives have a manifest each: the lowest one's job stands for all, and none of them tells when all had
 * ended. */
static FALLIBLE enum err read_record(const struct summary *s, struct record *out)
{
	if (!s->manifests)
		return OK;
	TRY(record_of_dir(s->dir, s->manifest, out));
	if (s->manifests > 1)
		(void)json_object_del(out->doc, "durable_at");
	return OK;
}

/* Members of a summary besides sizes and times. */
struct told {
	struct record record;
	struct buf source, verified;   /* members, a comma in front */
};

static void told_free(struct told *t)
{
	record_free(&t->record);
	buf_free(&t->source);
	buf_free(&t->verified);
}

/* at: the open directory of the checkpoint; file: it is that one of the folder `at`. */
static void put_notes(struct told *t, const struct summary *s, struct store_at at, const char *file)
{
	const char *made = json_string_value(json_object_get(json_object_get(t->record.doc, "made_by"), "job"));
	char id[IDENTITY_MAX];

	identity_text(&s->id, id);
	if (made)
		notes_put_verified(at, file, id, made, &t->verified);
}

static FALLIBLE enum err sum_folder(struct summary *s, const struct store *store, const char *path, struct told *t)
{
	TRY(store_enter(store_top(store), path, &s->dir));
	enum err e = parts_list(s->dir, sum_file, s);
	e = e ?: read_record(s, &t->record);
	if (!e && s->is_copy)
		copied_put_source(s->dir, COPIED_NAME, &t->source);
	if (!e && s->has_notes)
		put_notes(t, s, s->dir, NULL);
	store_close(&s->dir);
	return e;
}

/* Of a checkpoint that is one file all pages lie beside it. */
static FALLIBLE enum err sum_single(struct summary *s, const struct store *store, const char *path, struct told *t)
{
	char page[BESIDE_MAX];

	s->has_notes = true; /* perhaps */
	TRY(record_of(store_top(store), path, &t->record));
	s->dcpd = json_object_size(t->record.doc) > 0;
	if (s->dcpd && beside_path(path, MANIFEST_NAME, page))
		copied_put_source(store_top(store), page, &t->source);
	put_notes(t, s, store_top(store), path);
	return OK;
}

enum err lookup_put_summary(const struct store *store, const char *path, enum format format, struct buf *out)
{
	CLEANUP(told_free) struct told told = { .source = BUF_INIT(64 << 10), .verified = BUF_INIT(NOTES_BYTES_MAX) };
	struct summary s = { .format = format, .world_size = 1 };
	char id[IDENTITY_MAX];
	struct stat st;

	TRY(store_stat(store_top(store), path, &st));
	identity_begin(&s.id, &st);
	if (!S_ISDIR(st.st_mode))
		s.bytes = (uint64_t)st.st_size;
	TRY((S_ISDIR(st.st_mode) ? sum_folder : sum_single)(&s, store, path, &told));
	buf_json_member(out, "\"name\":", str_of(path));
	buf_printf(out, ",\"format\":\"%s\",\"bytes\":%ju,\"modified_at\":", format_name(format), (uintmax_t)s.bytes);
	put_time(out, s.newest.tv_sec || s.newest.tv_nsec ? s.newest : st.st_mtim);
	identity_text(&s.id, id);
	buf_printf(out, ",\"world_size\":%u,\"dcpd\":%s,\"etag\":\"%s\"", s.world_size, s.dcpd ? "true" : "false", id);
	if (s.has_notes)
		notes_put_hold(store_top(store), path, S_ISDIR(st.st_mode), out);
	buf_put(out, told.source.p, told.source.len);
	buf_put(out, told.verified.p, told.verified.len);
	return record_put_members(out, &told.record, path);
}

/* ---------------------------------------------------------------------------------------------------------- show */

static FALLIBLE enum err count_files(const struct checkpoint *c, uint64_t *out);

static enum err count_file(void *user, const char *name, unsigned char d_type)
{
	*(uint64_t *)user += name[0] != '.' && d_type != DT_DIR;
	return OK;
}

static FALLIBLE enum err count_files(const struct checkpoint *c, uint64_t *out)
{
	*out = c->single;
	return c->single ? OK : parts_list(c->dir, count_file, out);
}

static void put_manifest(struct buf *out, const struct manifest *m)
{
	if (!m) {
		buf_puts(out, "null");
		return;
	}
	buf_json_member(out, "{\"job\":", str_of(m->job));
	buf_json_member(out, ",\"kind\":", str_of(m->kind));
	buf_json_member(out, ",\"created_at\":", str_of(m->created_at));
	if (m->has_uid)
		buf_printf(out, ",\"uid\":%ju", (uintmax_t)m->uid);
	if (m->has_generation)
		buf_printf(out, ",\"generation\":%ju", (uintmax_t)m->generation);
	buf_printf(out, ",\"bytes\":%ju}", (uintmax_t)m->bytes);
}

static FALLIBLE enum err show_dcp(struct worker *w, const json_t *q, struct buf *out)
{
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = NULL;
	uint64_t files = 0;

	TRY(lookup_checkpoint(w, q, &c));
	TRY(count_files(c, &files));
	buf_printf(out, ",\"files\":%ju,\"tensors\":%ju,\"values\":%ju,\"chunks\":%ju,\"version\":\"1.0.0\",\"manifest\":",
		   (uintmax_t)files, (uintmax_t)c->sd->tensor_count, (uintmax_t)c->sd->value_count,
		   (uintmax_t)c->sd->chunk_count);
	put_manifest(out, c->manifest);
	return OK;
}

/* The checkpoint that a question names. */
static FALLIBLE enum err find(const struct worker *w, const json_t *q, const struct store **store, char name[CHECKPOINT_NAME_MAX],
			      enum format *format)
{
	TRY(store_of(w, q, store));
	TRY(checkpoint_follow(*store, json_string_value(json_object_get(q, "name")), name, format));
	return *format == FORMAT_NONE ? ERR(NOT_FOUND, "there is no checkpoint '%s'", name) : OK;
}

/* Holds a checkpoint, or lifts its hold. */
static FALLIBLE enum err hold(struct worker *w, const json_t *q, struct buf *out)
{
	struct store_job by = { .stores = &w->stores, .id = "hold", .uid = (uid_t)json_integer_value(json_object_get(q, "uid")),
				.admin = json_is_true(json_object_get(q, "admin")) };
	json_t *how = json_object_get(q, "hold");
	char name[CHECKPOINT_NAME_MAX];
	const struct store *store;
	enum format format;

	TRY(find(w, q, &store, name, &format));
	TRY(notes_set_hold(&by, store, name, json_is_object(how) ? how : NULL));
	buf_puts(out, "{\"name\":");
	buf_json_str(out, str_of(name));
	buf_puts(out, ",\"hold\":");
	TRY(jval_dump(how ? how : json_null(), out));
	buf_puts(out, "}");
	return OK;
}

/* The run's own aliases; with `alias` one of them is moved, or goes (name null), if it leads to `if` by now. */
static FALLIBLE enum err aliases(struct worker *w, const json_t *q, struct buf *out)
{
	struct store_job by = { .stores = &w->stores, .id = "alias", .uid = (uid_t)json_integer_value(json_object_get(q, "uid")),
				.admin = json_is_true(json_object_get(q, "admin")) };
	const char *run = json_string_value(json_object_get(q, "run"));
	struct alias_move move = { .alias = json_string_value(json_object_get(q, "alias")),
				   .name = json_string_value(json_object_get(q, "name")), .has_condition = json_object_get(q, "if"),
				   .condition = json_string_value(json_object_get(q, "if")) };
	CLEANUP(jval_drop) json_t *all = NULL;
	const struct store *store;

	if (!run)
		return ERR(VALIDATION_FAILED, "a question without a run");
	TRY(store_of(w, q, &store));
	if (move.alias)
		TRY(aliases_move(&by, store, run, &move));
	TRY(aliases_read(store, run, &all));
	buf_puts(out, "{\"aliases\":");
	TRY(jval_dump(all, out));
	buf_puts(out, "}");
	return OK;
}

static FALLIBLE enum err lookup_show(struct worker *w, const json_t *q, struct buf *out)
{
	char name[CHECKPOINT_NAME_MAX];
	const struct store *store;
	enum format format;

	TRY(find(w, q, &store, name, &format));
	buf_puts(out, "{");
	TRY(lookup_put_summary(store, name, format, out));
	if (format_reads(format))
		TRY(show_dcp(w, q, out));
	else
		buf_puts(out, ",\"manifest\":null");
	buf_puts(out, "}");
	return OK;
}

struct file_list {
	struct buf *out;
	const struct manifest *manifest;
	struct store_at dir;
	uint64_t count;
};

static enum err put_file(void *user, const char *name, unsigned char)
{
	struct file_list *l = user;
	struct stat st;

	enum err e = store_stat(l->dir, name, &st);
	if (e || !S_ISREG(st.st_mode))
		return e == ERR_NOT_FOUND ? OK : e;
	buf_puts(l->out, l->count++ ? ",{\"name\":" : "{\"name\":");
	buf_json_str(l->out, str_of(name));
	buf_printf(l->out, ",\"bytes\":%jd,\"xxh3_128\":", (intmax_t)st.st_size);
	if (l->manifest && strcmp(name, l->manifest->metadata_name) == 0) {
		char hex[33];
		digest_hex(l->manifest->metadata_xxh3, hex);
		buf_printf(l->out, "\"%s\"}", hex);
	} else {
		buf_puts(l->out, "null}");
	}
	return OK;
}

static FALLIBLE enum err lookup_files(struct worker *w, const json_t *q, struct buf *out)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	char name[CHECKPOINT_NAME_MAX];
	const struct store *store;
	enum format format;
	const char *file;

	TRY(find(w, q, &store, name, &format));
	TRY(checkpoint_open_dir(store, name, &dir, &file));
	if (file || checkpoint_manifest(dir, MANIFEST_NAME, &m))
		m = NULL;
	struct file_list l = { .out = out, .manifest = m, .dir = dir };
	buf_puts(out, "{\"files\":[");
	enum err e = file ? put_file(&l, file, DT_REG) : parts_list(dir, put_file, &l);
	buf_puts(out, "]}");
	return e;
}

enum { FILE_BYTES_MAX = 1 << 30 };

/* Bytes of a memfd, which the caller fills. */
static FALLIBLE enum err map_answer(uint64_t n, int *fd_out, void **out)
{
	*out = NULL;
	*fd_out = memfd_create("dcpd-file", MFD_CLOEXEC);
	if (*fd_out < 0 || ftruncate(*fd_out, (off_t)n) < 0)
		return ERR_SYS(NO_MEMORY, "no memory for %ju bytes of a file", (uintmax_t)n);
	void *p = n ? mmap(NULL, n, PROT_WRITE, MAP_SHARED, *fd_out, 0) : NULL;
	if (p == MAP_FAILED)
		return ERR_SYS(NO_MEMORY, "no memory for %ju bytes of a file", (uintmax_t)n);
	*out = p;
	return OK;
}

static FALLIBLE enum err read_file(const json_t *q, struct store_at dir, struct buf *out, int *fd_out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	const char *name = json_string_value(json_object_get(q, "file"));
	const json_t *bytes = json_object_get(q, "bytes");
	uint64_t offset = (uint64_t)json_integer_value(json_object_get(q, "offset"));
	struct stat st;
	void *p;

	TRY(store_open_file(dir, name, STORE_READ, &file));
	TRY(store_stat(file, "", &st));
	if (!S_ISREG(st.st_mode))
		return ERR(NOT_FOUND, "'%s' is no file", name);
	if (offset > (uint64_t)st.st_size)
		return ERR(RANGE_INVALID, "'%s' has %jd bytes, and none at %ju", name, (intmax_t)st.st_size, (uintmax_t)offset);
	uint64_t n = (uint64_t)st.st_size - offset;
	n = bytes && (uint64_t)json_integer_value(bytes) < n ? (uint64_t)json_integer_value(bytes) : n;
	if (n > FILE_BYTES_MAX)
		return ERR(PAYLOAD_TOO_LARGE, "%ju bytes of '%s'; at most %d at once", (uintmax_t)n, name, FILE_BYTES_MAX);
	TRY(lookup_room(q, n));
	TRY(map_answer(n, fd_out, &p));
	enum err e = n ? store_read(file, p, n, offset, name) : OK;
	if (p)
		munmap(p, n);
	TRY(e);
	buf_printf(out, "{\"bytes\":%ju,\"unverified_bytes\":%ju}", (uintmax_t)n, (uintmax_t)n);
	return OK;
}

/* Bytes of a file as they lie, for a client that reads the format itself and has no path to the storage. Nothing compares them here: all
 * are told as unverified, and the client has the manifest. */
static FALLIBLE enum err lookup_file(struct worker *w, const json_t *q, const int *, uint32_t, struct buf *out, int *fd_out)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	const char *wanted = json_string_value(json_object_get(q, "file")), *file;
	char name[CHECKPOINT_NAME_MAX];
	const struct store *store;
	enum format format;

	TRY(find(w, q, &store, name, &format));
	TRY(checkpoint_open_dir(store, name, &dir, &file));
	if (!wanted || !wanted[0] || strchr(wanted, '/') || strcmp(wanted, ".") == 0 || strcmp(wanted, "..") == 0 || strlen(wanted) > 255 ||
	    (file && strcmp(file, wanted) != 0))
		return ERR(NOT_FOUND, "'%s' has no file '%.300s'", name, wanted ? wanted : "");
	enum err e = read_file(q, dir, out, fd_out);
	if (e)
		fs_drop(fd_out);
	return e;
}

/* ------------------------------------------------------------------------------------------------------- recover */

static FALLIBLE enum err recover(struct worker *w, const json_t *q, struct buf *out)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	char other[COMMIT_JOB_MAX];
	bool committed = false;

	TRY(commit_recover(&w->stores, q, &committed, &m, other));
	buf_printf(out, "{\"committed\":%s", committed ? "true" : "false");
	if (other[0])
		buf_json_member(out, ",\"other\":", str_of(other));
	if (committed) {
		buf_puts(out, ",\"result\":{\"checkpoint\":{\"storage\":");
		buf_json_str(out, str_of(json_string_value(json_object_get(q, "storage"))));
		buf_json_member(out, ",\"name\":", str_of(json_string_value(json_object_get(q, "name"))));
		buf_puts(out, "}");
		if (m)
			buf_printf(out, ",\"bytes\":%ju,\"world_size\":%ju,\"files\":%ju", (uintmax_t)m->bytes,
				   (uintmax_t)m->world_size, (uintmax_t)m->files.n);
		if (m && m->has_generation)
			buf_printf(out, ",\"generation\":%ju", (uintmax_t)m->generation);
		buf_puts(out, ",\"recovered\":true}");
	}
	buf_puts(out, "}");
	return OK;
}

static FALLIBLE enum err sweep(struct worker *w, const json_t *q, struct buf *out)
{
	struct commit_keep keep = { .jobs = json_object_get(q, "keep"), .before = json_string_value(json_object_get(q, "before")),
				    .mark = json_string_value(json_object_get(q, "mark")),
				    .attempt = (uint64_t)jval_int(q, "attempt"), .watched = json_object_get(q, "watched") };
	const char *name = json_string_value(json_object_get(q, "name")), *job = json_string_value(json_object_get(q, "job"));
	const char *path, *comma = "";
	const struct store *store;
	struct store_swept swept;
	json_t *state;

	TRY(store_of(w, q, &store));
	if (name && job) {
		const char *part = json_string_value(json_object_get(q, "part"));
		struct ref target = ref_checkpoint(json_string_value(json_object_get(q, "storage")), name);
		TRY(store->ops->sweep(store, &keep, name, job, &swept));
		TRY(part ? hosts_part_remove(&w->stores, &target, part) : OK);
		TRY(json_object_get(q, "moved_from") ? fence_drop(store, name, job, (uint32_t)jval_int(q, "moved_from")) : OK);
		buf_printf(out, "{\"removed\":%ju,\"later_ms\":%jd}", (uintmax_t)swept.removed, (intmax_t)swept.later_ms);
		return OK;
	}
	keep.others = json_object();
	enum err e = store->ops->sweep(store, &keep, NULL, NULL, &swept);
	buf_printf(out, "{\"removed\":%ju,\"others\":{", (uintmax_t)swept.removed);
	json_object_foreach(keep.others, path, state) {
		buf_puts(out, comma);
		buf_json_str(out, str_of(path));
		buf_putc(out, ':');
		buf_json_str(out, str_of(json_string_value(state)));
		comma = ",";
	}
	buf_puts(out, "}}");
	json_decref(keep.others);
	return e;
}

/* A directory of that name beside the target: made here, or by another daemon, if the storage is the same. */
static FALLIBLE enum err meet(struct worker *w, const json_t *q, struct buf *out)
{
	const char *action = json_string_value(json_object_get(q, "action"));
	const struct store *store;
	bool seen = false;

	TRY(store_of(w, q, &store));
	TRY(hosts_token(store_top(store), json_string_value(json_object_get(q, "name")),
			json_string_value(json_object_get(q, "token")), action ? action : "look", &seen));
	buf_printf(out, "{\"seen\":%s}", seen ? "true" : "false");
	return OK;
}

/* Lists the storage's trash. With `restore`, a name: the checkpoint of that name comes back. With `now`: one whose time is over goes. */
static FALLIBLE enum err trash(struct worker *w, const json_t *q, struct buf *out)
{
	struct store_job by = { .stores = &w->stores, .id = "undelete", .uid = (uid_t)json_integer_value(json_object_get(q, "uid")),
				.admin = json_is_true(json_object_get(q, "admin")) };
	const char *name = json_string_value(json_object_get(q, "restore")), *id = json_string_value(json_object_get(q, "id"));
	const json_t *now = json_object_get(q, "now");
	const struct store *store;
	struct kept_trash_sum sum;
	char restored[65];

	TRY(store_of(w, q, &store));
	if (name) {
		TRY(kept_trash_restore(&by, store, name, id, restored));
		buf_json_member(out, "{\"name\":", str_of(name));
		buf_json_member(out, ",\"id\":", str_of(restored));
		buf_puts(out, "}");
		return OK;
	}
	if (!now)
		return kept_trash_list(store, json_string_value(json_object_get(q, "name")), out);
	TRY(kept_trash_sweep(store, json_integer_value(now), &sum));
	buf_printf(out, "{\"checkpoints\":%ju,\"bytes\":%ju,\"removed\":%ju,\"next_ms\":%jd,\"busy_ms\":%jd}", (uintmax_t)sum.checkpoints,
		   (uintmax_t)sum.bytes, (uintmax_t)sum.removed, (intmax_t)sum.next_ms, (intmax_t)trash_ms());
	return OK;
}

/* Each op has one of the functions: of plain questions, of those answered by a memfd, of those about segments. */
static const struct question {
	const char *op;
	enum err (*plain)(struct worker *w, const json_t *q, struct buf *out);
	enum err (*bytes)(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out);
	enum err (*segments)(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out);
} questions[] = {
	{ "probe", .plain = probe },		{ "exists", .plain = exists },	     { "list", .plain = lookup_list },
	{ "show", .plain = lookup_show },	{ "files", .plain = lookup_files },  { "file", .bytes = lookup_file },
	{ "tensors", .segments = lookup_tensors },
	{ "images", .segments = lookup_images }, { "locate", .bytes = lookup_locate }, { "slice", .bytes = lookup_slice },
	{ "digests", .bytes = lookup_digests },
	{ "recover", .plain = recover },	{ "meet", .plain = meet },	     { "sweep", .plain = sweep },
	{ "hold", .plain = hold },		{ "aliases", .plain = aliases },     { "find", .plain = lookup_find },
	{ "loadable", .plain = lookup_loadable },		     { "runs", .plain = lookup_runs },
	{ "trash", .plain = trash },		{ "device_copy", .segments = lookup_device_copy },
	{ "device_image", .bytes = lookup_device_image },
	{ NULL },
};

enum err lookup_answer(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *answer, int *fd_out)
{
	const char *op = json_string_value(json_object_get(q, "op"));
	enum err e;

	*fd_out = -1;
	if (!op)
		return ERR(PROTOCOL, "a question without an op");
	buf_puts(answer, "{\"ok\":");
	const struct question *k = questions;
	while (k->op && strcmp(k->op, op) != 0)
		k++;
	if (k->plain)
		e = k->plain(w, q, answer);
	else if (k->bytes)
		e = k->bytes(w, q, fds, fd_count, answer, fd_out);
	else if (k->segments)
		e = k->segments(w, q, fds, fd_count, answer);
	else
		e = ERR(PROTOCOL, "a question '%s'", op);
	if (w->kept)
		lookup_cache_rest(w->kept);
	TRY(e);
	buf_puts(answer, "}");
	return buf_status(answer);
}
