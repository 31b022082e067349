/* checkpoint.c: see checkpoint.h. A file that metadata names is looked at (its size) before anything is planned, so that a truncated
 * checkpoint fails at once and by name. */
#include "store/checkpoint.h"

#include <stdio.h>

#include "base/num.h"
#include "format/dcp_meta.h"
#include "format/torch_item.h"
#include "io/digest.h"
#include "store/parts.h"
#include "tensor/box.h"

enum { METADATA_MAX = 1 << 30, PAYLOAD_SMALL = 64 << 20, DEFLATE_MOST = 1100, SAMPLES = 8, SAMPLE_MAX = 16 << 20 };

void checkpoint_free(struct checkpoint *c)
{
	if (!c)
		return;
	if (c->shares) {
		c->shares--;
		return;
	}
	store_close(&c->dir);
	sdict_free(c->sd);
	manifest_free(c->manifest);
	mem_free(c->file_bytes);
	mem_free(c->ranks);
	mem_free(c);
}

enum err checkpoint_lose(struct checkpoint *c, struct sd_loc *loc, enum checked_part part, enum err e)
{
	if (!e || !c->verifies || !checked_is_damage(e))
		return e;
	checked_damage(c->verifies, part, loc->length);
	if (!c->keeps_lost)
		loc->length = 0;
	return OK;
}

struct checkpoint *checkpoint_share(struct checkpoint *c)
{
	c->shares++;
	return c;
}

void checkpoint_free_ptr(struct checkpoint **c)
{
	checkpoint_free(*c);
}

/* --------------------------------------------------------------------------------------------------------- read */

enum err checkpoint_manifest(struct store_at dir, const char *name, struct manifest **out)
{
	void *bytes = NULL;
	uint64_t n = 0;

	*out = NULL;
	enum err e = store_get(dir, name, MANIFEST_MAX, &bytes, &n, NULL);
	if (e == ERR_NOT_FOUND)
		return OK;
	e = e ?: manifest_parse(bytes, n, out);
	mem_free(bytes);
	return err_at_file(e, name, -1);
}

static FALLIBLE enum err raw_is_same(const struct manifest *m, const struct manifest_item *item, struct store_at file)
{
	CLEANUP(mem_free_ptr) void *bytes = item->length <= SAMPLE_MAX ? mem_alloc(item->length + 1) : NULL;
	struct manifest_check check;

	NEED(bytes, "no memory for an item");
	TRY(store_read(file, bytes, item->length, item->offset, ""));
	manifest_check_begin(&check, m->digests.v + item->digest_at, item->digest_count);
	return manifest_check_add(&check, bytes, item->length, true);
}

/* Is the item the one that was written? Of a payload's digest only the CRC32 in its archive is looked at. */
static bool item_is_same(const struct manifest *m, const struct manifest_item *item, struct store_at file)
{
	struct store_span at = { file, item->offset };
	struct item_source src = { store_read_span, &at, item->length };
	struct item_tensor t;

	enum err e = item->raw ? raw_is_same(m, item, file) : item_read_tensor(&src, &t);
	bool same = !e && (item->raw || !t.crc_known || t.crc32 == item->crc32);
	if (e)
		err_clear();
	return same;
}

/* Samples of the file's items are what was written. A file that cannot be read is not. */
static bool content_is_same(const struct checkpoint *c, const struct manifest *m, const struct manifest_file *f, const char *name)
{
	struct store_at file;
	bool same = true;

	if (store_open_file(c->dir, name, STORE_READ, &file)) {
		err_clear();
		return false;
	}
	for (uint64_t i = 0; same && i < SAMPLES && i < f->item_count; i++)
		same = item_is_same(m, &m->items.v[f->first_item + i * f->item_count / num_min(SAMPLES, f->item_count)], file);
	store_close(&file);
	return same;
}

/* Is the file the one that the manifest tells of: not written to since; or, where times say nothing (`by_content`: the checkpoint may have
 * been copied), of the same content? */
static FALLIBLE enum err file_is_same(const struct checkpoint *c, const struct manifest *m, const struct manifest_file *f,
				      bool by_content, bool *out)
{
	char name[ERR_FILE_MAX];
	struct stat st;

	*out = false;
	if (f->name.n >= sizeof name)
		return OK;
	memcpy(name, f->name.p, f->name.n);
	name[f->name.n] = '\0';
	enum err e = store_stat(c->dir, name, &st);
	if (e == ERR_NOT_FOUND || (!e && !S_ISREG(st.st_mode)))
		return OK;
	TRY(err_at_file(e, name, -1));
	*out = by_content ? (uint64_t)st.st_size == f->bytes && content_is_same(c, m, f, name) : manifest_is_of(f, &st);
	return OK;
}

static bool is_data(const struct manifest_file *f)
{
	char name[ERR_FILE_MAX];
	struct format_file is;

	snprintf(name, sizeof name, "%.*s", (int)num_min(f->name.n, sizeof name - 1), f->name.p);
	return format_file(name, &is);
}

/* PyTorch saves over a checkpoint file by file, and leaves a manifest that it does not know. So the manifest of metadata that differ is
 * outdated if every file that it lists was written since, and if the metadata are of another save; where they do not tell, if no file has
 * the content that the manifest tells. Anything less is damage. Metadata of another save beside files of this one's content are damage
 * too: a copy has new times, and its metadata were hit or exchanged. */
static FALLIBLE enum err is_outdated(const struct checkpoint *c, const struct manifest *m, const void *metadata, uint64_t n, bool *out)
{
	char save_id[MANIFEST_SAVE_ID];
	bool same = false, all_same = true;
	uint64_t items = 0;

	manifest_save_id(metadata, n, save_id);
	bool tells = save_id[0] && m->save_id[0];
	*out = !tells || strcmp(save_id, m->save_id) != 0;
	for (uint64_t i = 0; i < m->files.n && *out; i++) {
		if (!is_data(&m->files.v[i])) /* an asset, which PyTorch leaves as it is */
			continue;
		TRY(file_is_same(c, m, &m->files.v[i], false, &same));
		*out = !same;
		if (*out && (all_same || !tells))
			TRY(file_is_same(c, m, &m->files.v[i], true, &same));
		all_same = all_same && same;
		items += m->files.v[i].item_count;
		*out = *out && (!same || tells);
	}
	*out = *out && m->files.n && !(all_same && items);
	return OK;
}

static FALLIBLE enum err damaged(const struct manifest *m, const void *bytes, uint64_t n, const char *metadata)
{
	unsigned char xxh3[16];
	char want[33], got[33];

	digest_xxh3(bytes, n, xxh3);
	digest_hex(xxh3, got);
	digest_hex(m->metadata_xxh3, want);
	enum err e = ERR(CHECKPOINT_DAMAGED, "the metadata is not what was written (if it was replaced on purpose, remove the manifest)");
	return err_at_file(err_expected(e, want, got), metadata, 0);
}

/* The metadata's own page is looked at no more: its manifest may be of those that are lost, and speaks for all other files. */
static FALLIBLE enum err read_instead(struct checkpoint *c, void **out, uint64_t *n_out)
{
	struct str bytes = c->instead->bytes;

	if (!c->instead->no_manifest && !c->manifest)
		TRY(checkpoint_manifest(c->dir, MANIFEST_NAME, &c->manifest));
	if (!bytes.p)
		return OK;
	*out = mem_alloc(bytes.n);
	NEED(*out, "no memory for %zu bytes of metadata", bytes.n);
	memcpy(*out, bytes.p, bytes.n);
	*n_out = bytes.n;
	return OK;
}

static bool is_instead(const struct checkpoint *c, const char *name)
{
	return c->instead && c->instead->metadata && strcmp(c->instead->metadata, name) == 0;
}

/* A manifest speaks for the metadata that it was written with, and these for all else. */
static FALLIBLE enum err read_manifest(struct checkpoint *c, const char *metadata, const void *bytes, uint64_t n)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	char name[MANIFEST_NAME_MAX];
	unsigned char xxh3[16];
	bool outdated;

	manifest_name(metadata, name);
	if (!c->instead || !c->instead->no_manifest)
		TRY(checkpoint_manifest(c->dir, name, &m));
	if (!m || !m->metadata_name[0]) {
		c->unchecked_bytes += n;
	} else {
		digest_xxh3(bytes, n, xxh3);
		if (strcmp(m->metadata_name, metadata) != 0 || n != m->metadata_bytes || memcmp(xxh3, m->metadata_xxh3, sizeof xxh3) != 0) {
			TRY(is_outdated(c, m, bytes, n, &outdated));
			if (!outdated)
				return damaged(m, bytes, n, metadata);
			c->unchecked_bytes += n;
			if (!c->outdated[0])
				snprintf(c->outdated, sizeof c->outdated, "%s", metadata);
			return OK;
		}
	}
	if (m && c->manifest)
		return manifest_join(c->manifest, m);
	if (m)
		c->manifest = move(m);
	return OK;
}

static FALLIBLE enum err read_bytes(struct checkpoint *c, const char *name, bool manifest, void **out, uint64_t *n_out)
{
	if (is_instead(c, name))
		return read_instead(c, out, n_out);

	enum err e = store_get(c->dir, name, METADATA_MAX, out, n_out, &c->metadata);

	if (e == ERR_NOT_FOUND)
		e = ERR(CHECKPOINT_INCOMPLETE, "the checkpoint has no %s", name);
	if (!e && manifest) /* first: damaged metadata may say anything */
		e = read_manifest(c, name, *out, *n_out);
	c->metadata_bytes += *n_out;
	if (!e && c->metadata_bytes > METADATA_MAX)
		e = ERR(LIMIT_EXCEEDED, "more than %d bytes of metadata in all", METADATA_MAX);
	return err_at_file(e, name, -1);
}

/* Links are common in caches of Hugging Face's hub, so their error says what to do. */
static FALLIBLE enum err check_regular(const struct stat *st)
{
	if (S_ISLNK(st->st_mode))
		return ERR(FORMAT_METADATA, "a symbolic link, which is not followed: put the file itself there");
	return S_ISREG(st->st_mode) ? OK : ERR(FORMAT_METADATA, "not a regular file");
}

/* The functions of struct format_source (format.h). */
static enum err source_read_all(void *user, const char *name, void **out, uint64_t *n_out)
{
	return read_bytes(user, name, true, out, n_out);
}

static enum err source_bytes_of(void *user, const char *name, uint64_t *out)
{
	const struct checkpoint *c = user;
	struct stat st;

	enum err e = store_stat(c->dir, name, &st);
	if (e == ERR_NOT_FOUND)
		e = ERR(CHECKPOINT_INCOMPLETE, "the file is missing");
	e = e ?: check_regular(&st);
	if (!e)
		*out = (uint64_t)st.st_size;
	return err_at_file(e, name, -1);
}

/* Keeps the file open that is read: the directory of an archive is looked at in many places. */
static enum err read_part(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	struct checkpoint *c = user;

	if (c->reading.handle < 0 || strcmp(c->reading_name, name) != 0) {
		if (strlen(name) >= sizeof c->reading_name)
			return ERR(FORMAT_METADATA, "a file name of %zu bytes", strlen(name));
		store_close(&c->reading);
		TRY(err_at_file(store_open_file(c->dir, name, STORE_READ, &c->reading), name, -1));
		memcpy(c->reading_name, name, strlen(name) + 1);
	}
	return err_at_file(store_read(c->reading, into, n, offset, name), name, (int64_t)offset);
}

/* A head that the manifest does not list has nothing to be compared with, and is counted as that. */
static enum err source_read_head(void *user, const char *name, uint64_t n, void **out)
{
	struct checkpoint *c = user;
	const struct manifest_item *item = c->manifest ? manifest_find(c->manifest, str_of(name), 0, n) : NULL;
	struct manifest_check check;

	*out = mem_alloc(n);
	NEED(*out, "no memory for %ju bytes of a header", (uintmax_t)n);
	TRY(read_part(user, name, 0, *out, n));
	if (!item || !item->raw) {
		c->unchecked_bytes += n;
		return OK;
	}
	manifest_check_begin(&check, c->manifest->digests.v + item->digest_at, item->digest_count);
	return err_at_file(manifest_check_add(&check, *out, n, true), name, 0);
}

static void source_unchecked(void *user, uint64_t n)
{
	struct checkpoint *c = user;

	c->unchecked_bytes += n;
}

enum err checkpoint_check_whole(const struct checkpoint *c)
{
	if (c->format != FORMAT_DELTA)
		return OK;
	return ERR(FORMAT_UNSUPPORTED, "%s:%s is a delta, which is no state dict without its base: apply it first (dcpctl apply BASE DELTA "
		   "OUT)", c->store->name, c->name);
}

void checkpoint_note(const struct checkpoint *c, bool several, struct checked *checked)
{
	const char *heads = format_heads(c->format);
	char file[sizeof c->name + 64], text[sizeof file + 256];

	if (c->single)
		heads = strrchr(c->name, '/') ? strrchr(c->name, '/') + 1 : c->name;
	snprintf(file, sizeof file, "%s%s%s", c->name, c->single ? "" : "/", c->single ? "" : heads);
	checked_nothing(checked, &(struct checked_place){
		.rank = -1, .file = str_of(several ? file : heads), .bytes = c->unchecked_bytes });
	if (!c->outdated[0])
		return;
	snprintf(text, sizeof text, "%s%s%s was saved over after dcpd had written the checkpoint: the digests in its manifest are not used",
		 several ? c->name : "", several ? "/" : "", c->outdated);
	checked_warn(checked, "manifest_outdated", text);
}

/* The names of a format's files in the directory. */
struct found {
	char *name;
	int64_t rank;
};

struct listing {
	struct checkpoint *c;
	struct vec(struct found) metadata, payload;
};

static enum err note_file(void *user, const char *name, unsigned char)
{
	struct listing *l = user;
	struct format_file file;
	struct found *f;

	if (!format_file_in(l->c->format, name, &file) || file.role == FORMAT_FOLDER || file.role == FORMAT_MARK)
		return OK;
	if (file.role == FORMAT_PAYLOAD && file.rank >= l->c->world_size) /* a file that holds nothing is named by no item */
		l->c->world_size = (uint32_t)file.rank + 1;
	bool named = file.role == FORMAT_PAYLOAD && format_holds(file.format, FORMAT_CHUNKS); /* by the metadata */
	if (file.format != l->c->format || file.role == FORMAT_TEMPORARY || named || is_instead(l->c, name))
		return OK;
	TRY(file.role == FORMAT_METADATA ? vec_push(&l->metadata, &f) : vec_push(&l->payload, &f));
	*f = (struct found){ mem_strdup(name), file.rank };
	return f->name ? OK : ERR(NO_MEMORY, "no memory for a file's name");
}

static int by_rank(const void *a, const void *b)
{
	const struct found *x = a, *y = b;

	return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : strcmp(x->name, y->name);
}

static FALLIBLE enum err open_listed(struct checkpoint *c, struct listing *l)
{
	uint64_t m = l->metadata.n, p = l->payload.n;
	CLEANUP(mem_free_ptr) const char **names = mem_zalloc(m + p + 1, sizeof *names);
	struct format_source source = { .user = c, .metadata = names, .metadata_count = m, .payload_count = p,
					.read_all = source_read_all, .read = read_part, .read_head = source_read_head,
					.bytes_of = source_bytes_of, .unchecked = source_unchecked };

	c->ranks = mem_zalloc(m + 1, sizeof *c->ranks);
	NEED(names && c->ranks, "no memory for %ju files", (uintmax_t)(m + p));
	source.payload = names + m;
	if (m)
		qsort(l->metadata.v, m, sizeof *l->metadata.v, by_rank);
	if (p)
		qsort(l->payload.v, p, sizeof *l->payload.v, by_rank);
	for (uint64_t i = 0; i < m; i++) {
		names[i] = l->metadata.v[i].name;
		c->ranks[i] = (uint32_t)l->metadata.v[i].rank;
	}
	for (uint64_t i = 0; i < p; i++)
		names[m + i] = l->payload.v[i].name;
	c->rank_count = m;
	return format_open(c->format, &source, &c->sd);
}

static FALLIBLE enum err note_single(struct listing *l, const char *name)
{
	struct found *f;

	TRY(vec_push(&l->payload, &f));
	*f = (struct found){ mem_strdup(name), -1 };
	return f->name ? OK : ERR(NO_MEMORY, "no memory for a file's name");
}

static FALLIBLE enum err open_format(struct checkpoint *c, const char *single)
{
	struct listing l = { .c = c };

	enum err e = single ? note_single(&l, single) : parts_list(c->dir, note_file, &l);
	if (!e && c->format == FORMAT_IMAGE) /* no metadata file names it */
		e = checkpoint_manifest(c->dir, MANIFEST_NAME, &c->manifest);
	e = e ?: open_listed(c, &l);
	store_close(&c->reading);
	for (uint64_t i = 0; i < l.metadata.n; i++)
		mem_free(l.metadata.v[i].name);
	for (uint64_t i = 0; i < l.payload.n; i++)
		mem_free(l.payload.v[i].name);
	vec_free(&l.metadata);
	vec_free(&l.payload);
	return e;
}

/* Every file that metadata names: there, a regular file, and its size. */
static FALLIBLE enum err stat_files(struct checkpoint *c)
{
	char name[4096];
	struct stat st;

	c->file_bytes = mem_zalloc(c->sd->file_count, sizeof *c->file_bytes);
	NEED(c->file_bytes, "no memory for %ju files", (uintmax_t)c->sd->file_count);
	for (uint64_t i = 0; i < c->sd->file_count; i++) {
		const struct sd_file *f = &c->sd->files[i];
		if (f->name.n >= sizeof name)
			return ERR(FORMAT_METADATA, "a file name of %zu bytes", f->name.n);
		memcpy(name, f->name.p, f->name.n);
		name[f->name.n] = '\0';
		enum err e = store_stat(c->dir, name, &st);
		bool missing = e == ERR_NOT_FOUND;
		if (missing && c->verifies) /* each of its items is lost */
			st = (struct stat){ .st_mode = S_IFREG };
		else if (missing)
			return err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the file is missing"), name, -1);
		else if (e)
			return err_at_file(e, name, -1);
		TRY(err_at_file(check_regular(&st), name, -1));
		c->file_bytes[i] = (uint64_t)st.st_size;
		if (f->rank < FORMAT_RANKS_MAX && f->rank + 1 > c->world_size)
			c->world_size = f->rank + 1;
	}
	return OK;
}

static FALLIBLE enum err check_loc(const struct checkpoint *c, struct str fqn, struct sd_loc loc, uint32_t rank)
{
	char name[ERR_FILE_MAX];

	bool lost = loc.length == 0 && c->verifies && format_holds(c->format, FORMAT_ARCHIVES); /* no archive has no bytes */
	if (!lost && num_inside(loc.offset, loc.length, c->file_bytes[loc.file]))
		return OK;
	struct str f = c->sd->files[loc.file].name;
	snprintf(name, sizeof name, "%.*s", (int)(f.n < sizeof name ? f.n : sizeof name - 1), f.p);
	enum err e = loc.length ? ERR(CHECKPOINT_INCOMPLETE, "an item of %ju bytes at %ju ends beyond the file's %ju",
				      (uintmax_t)loc.length, (uintmax_t)loc.offset, (uintmax_t)c->file_bytes[loc.file])
				: ERR(FORMAT_METADATA, "an item of no bytes");
	return err_at_rank(err_at_fqn(err_at_file(e, name, (int64_t)loc.offset), fqn.p, fqn.n), rank);
}

/* No archive gives more than this from its bytes, deflated or not; the size of a small one costs nothing. */
static FALLIBLE enum err check_payload(const struct checkpoint *c, const struct sd_chunk *k)
{
	const struct sd_tensor *t = &c->sd->tensors[k->tensor];
	char name[ERR_FILE_MAX];
	uint64_t numel, bytes;

	TRY(box_numel(t->ndim, sd_sizes(k, t->ndim), &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	if (!format_holds(c->format, FORMAT_ARCHIVES) || k->loc.transform || bytes <= PAYLOAD_SMALL ||
	    bytes / DEFLATE_MOST <= k->loc.length)
		return OK;
	struct str f = c->sd->files[k->loc.file].name;
	snprintf(name, sizeof name, "%.*s", (int)(f.n < sizeof name ? f.n : sizeof name - 1), f.p);
	return err_at_file(ERR(FORMAT_METADATA, "an item of %ju bytes cannot hold a chunk of %ju", (uintmax_t)k->loc.length,
			       (uintmax_t)bytes), name, (int64_t)k->loc.offset);
}

static FALLIBLE enum err check_chunk(struct checkpoint *c, struct sd_chunk *k)
{
	struct str fqn = c->sd->tensors[k->tensor].fqn;

	enum err e = check_loc(c, fqn, k->loc, k->rank);
	e = e ?: err_at_rank(err_at_fqn(check_payload(c, k), fqn.p, fqn.n), k->rank);
	return checkpoint_lose(c, &k->loc, CHECKED_FILE, e);
}

static FALLIBLE enum err check_locs(struct checkpoint *c)
{
	for (uint64_t i = 0; i < c->sd->chunk_count; i++)
		TRY(check_chunk(c, &c->sd->chunks[i]));
	each(v, c->sd->values, c->sd->value_count) {
		if (v->kind == SD_VALUE_STORED)
			TRY(checkpoint_lose(c, &v->loc, CHECKED_FILE, check_loc(c, v->fqn, v->loc, v->rank)));
	}
	return OK;
}

enum err checkpoint_open_dir(const struct store *store, const char *name, struct store_at *out, const char **file_out)
{
	const char *slash = strrchr(name, '/');
	char parent[4096];
	struct stat st;

	*file_out = NULL;
	TRY(store_stat(store_top(store), name, &st));
	if (!S_ISREG(st.st_mode))
		return store_enter(store_top(store), name, out);
	*file_out = slash ? slash + 1 : name;
	snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - name) : 0, name);
	return store_enter(store_top(store), parent, out);
}

static FALLIBLE enum err read_checkpoint(struct checkpoint *c)
{
	const char *file;

	if (c->instead && c->instead->format != FORMAT_NONE)
		c->format = c->instead->format;
	if (c->format == FORMAT_NONE) {
		struct stat st;
		TRY(store_stat(store_top(c->store), c->name, &st));
		return ERR(CHECKPOINT_INCOMPLETE, "'%s' has no " DCP_METADATA ": it is no checkpoint, or not a complete one", c->name);
	}
	if (!format_reads(c->format))
		return ERR(FORMAT_UNSUPPORTED, "'%s' is in %s format, which cannot be read yet", c->name, format_name(c->format));
	TRY(checkpoint_open_dir(c->store, c->name, &c->dir, &file));
	c->single = file != NULL;
	if (c->instead && c->instead->metadata && !c->instead->bytes.p)
		TRY(read_instead(c, NULL, NULL));
	TRY(open_format(c, file));
	TRY(stat_files(c));
	return check_locs(c);
}

enum err checkpoint_take_rank(struct checkpoint *c, uint64_t i)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	char name[FORMAT_FILE_MAX];
	uint64_t n = 0;

	c->metadata_bytes = 0;
	format_dcp_metadata(c->ranks[i], name);
	TRY(read_bytes(c, name, false, &bytes, &n));
	TRY(err_at_file(dcp_meta_read(bytes, n, &sd), name, -1));
	sdict_free(c->sd);
	mem_free(c->file_bytes);
	c->file_bytes = NULL;
	c->sd = move(sd);
	TRY(stat_files(c));
	return check_locs(c);
}

enum err checkpoint_open(const struct stores *stores, const struct ref *ref, struct checkpoint **out)
{
	return checkpoint_open_instead(stores, ref, NULL, NULL, out);
}

enum err checkpoint_open_instead(const struct stores *stores, const struct ref *ref, const struct checkpoint_instead *instead,
				 struct checked *checked, struct checkpoint **out)
{
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = mem_zalloc(1, sizeof *c);

	NEED(c, "no memory for a checkpoint");
	c->reading = STORE_NOTHING;
	c->world_size = 1;
	c->verifies = checked;
	c->instead = instead;
	c->keeps_lost = instead && instead->keeps_lost;
	if (ref->kind != REF_CHECKPOINT || ref->name.n >= sizeof c->name)
		return ERR(VALIDATION_FAILED, "not a checkpoint's reference");
	TRY(stores_find(stores, ref->storage.p, &c->store));
	enum err e = checkpoint_follow(c->store, ref->name.p, c->name, &c->format);
	e = e ?: read_checkpoint(c);
	if (e == ERR_NOT_FOUND)
		return ERR(NOT_FOUND, "there is no checkpoint '%s:%s'", ref->storage.p, ref->name.p);
	TRY(e);
	c->instead = NULL;
	*out = move(c);
	return OK;
}

enum err checkpoint_open_file(const struct checkpoint *c, uint32_t file, struct store_at *out)
{
	const char *name = c->sd->files[file].name.p;

	return store_open_file(c->dir, name, STORE_READ, out);
}
