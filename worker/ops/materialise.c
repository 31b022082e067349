/* materialise.c: a checkpoint that shares bytes with others (runner/share.h) gets its own: each file that has another name, or, where files
 * may have blocks in common, each file, is copied beside it and takes its own place by a rename.
 *
 * Every byte is compared with the manifest on its way, so that a damaged file is told and stays as it is. A job that breaks off has lost
 * nothing: what it had copied stands alone, and the next one goes on with the rest. Where blocks are shared is not asked: only root may. */
#include "base/mem.h"
#include "base/num.h"
#include "format/torch_item.h"
#include "session/job.h"
#include "store/owner.h"
#include "store/record.h"
#include "store/staging.h"

enum { PIECE = 4 << 20, HEAD_MAX_BYTES = 1 << 20 };

struct materialise {
	struct job *job;
	const struct store *store;
	struct store_at dir;           /* the checkpoint's */
	struct manifest *manifest;
	struct staging staging;
	bool staged;
	unsigned char *piece;          /* PIECE bytes */
	uint64_t files, bytes;         /* that were copied */
};

/* A file on its way. */
struct copy {
	struct materialise *m;
	const struct manifest_file *file;
	struct store_at from, to;
	char name[ERR_FILE_MAX];
};

/* ---------------------------------------------------------------------------------------------------------- one file */

/* Copies [begin, end). check: what the bytes are compared with; NULL: they are zeros. */
static FALLIBLE enum err copy_range(struct copy *c, uint64_t begin, uint64_t end, struct manifest_check *check)
{
	const struct store_ops *ops = c->m->store->ops;
	unsigned char *piece = c->m->piece;

	if (begin == end && check)
		return manifest_check_add(check, piece, 0, true);
	for (uint64_t at = begin; at < end;) {
		uint64_t n = num_min(end - at, PIECE);
		TRY(job_tick(c->m->job));
		TRY(store_read(c->from, piece, n, at, c->name));
		if (check)
			TRY(manifest_check_add(check, piece, n, at + n == end));
		else if (!mem_is_zero(piece, n))
			return ERR(DIGEST_MISMATCH, "bytes between items are not zeros");
		TRY(ops->write(c->to, piece, n, at, c->name));
		at += n;
	}
	return OK;
}

struct item_at {
	struct copy *copy;
	uint64_t offset;
};

static enum err read_item(void *user, uint64_t offset, void *into, size_t n)
{
	const struct item_at *at = user;

	return store_read(at->copy->from, into, n, at->offset + offset, at->copy->name);
}

/* The archive around a payload [begin, end) of the item. */
static FALLIBLE enum err copy_edges(struct copy *c, const struct manifest_item *item, uint64_t begin, uint64_t end)
{
	const struct store_ops *ops = c->m->store->ops;
	uint64_t tail = item->length - end;
	CLEANUP(mem_free_ptr) unsigned char *bytes = NULL;
	unsigned char got[16];

	if (begin > HEAD_MAX_BYTES || tail > HEAD_MAX_BYTES)
		return ERR(LIMIT_EXCEEDED, "an archive of %ju bytes around a payload", (uintmax_t)(begin + tail));
	bytes = mem_alloc(begin + tail + 1);
	NEED(bytes, "no memory for an archive");
	TRY(store_read(c->from, bytes, begin, item->offset, c->name));
	TRY(store_read(c->from, bytes + begin, tail, item->offset + end, c->name));
	digest_xxh3(bytes, begin + tail, got);
	if (memcmp(got, item->edges, sizeof got) != 0)
		return ERR(DIGEST_MISMATCH, "the archive around a payload is not the one written");
	TRY(ops->write(c->to, bytes, begin, item->offset, c->name));
	return ops->write(c->to, bytes + begin, tail, item->offset + end, c->name);
}

static FALLIBLE enum err copy_item(struct copy *c, const struct manifest_item *item)
{
	struct item_at at = { c, item->offset };
	const struct item_source src = { read_item, &at, item->length };
	uint64_t begin = 0, end = item->length;
	struct manifest_check check;
	struct item_tensor t;

	if (!item->raw && !item->has_edges)
		return ERR(UNSUPPORTED, "the manifest is of an older version: it does not tell all digests");
	if (!item->raw) {
		TRY(item_read_tensor(&src, &t));
		if (t.deflated || t.payload_off > item->length || t.payload_bytes > item->length - t.payload_off)
			return ERR(DIGEST_MISMATCH, "the archive is not one that dcpd writes");
		begin = t.payload_off;
		end = begin + t.payload_bytes;
		TRY(copy_edges(c, item, begin, end));
	}
	manifest_check_begin(&check, c->m->manifest->digests.v + item->digest_at, item->digest_count);
	return copy_range(c, item->offset + begin, item->offset + end, &check);
}

static FALLIBLE enum err copy_items(struct copy *c)
{
	const struct manifest *m = c->m->manifest;
	uint64_t at = 0;

	for (uint64_t i = 0; i < c->file->item_count; i++) {
		const struct manifest_item *item = &m->items.v[c->file->first_item + i];
		if (item->offset < at || item->offset > c->file->bytes || item->length > c->file->bytes - item->offset)
			return ERR(FORMAT_MANIFEST, "items lie in each other, or beyond the file's end");
		TRY(copy_range(c, at, item->offset, NULL));
		TRY(err_at_file(copy_item(c, item), c->name, (int64_t)item->offset));
		at = item->offset + item->length;
	}
	return copy_range(c, at, c->file->bytes, NULL);
}

/* The copy has the times of the file, which the manifest tells. */
static FALLIBLE enum err copy_file(struct copy *c, const struct stat *st)
{
	struct staging *s = &c->m->staging;
	const struct store_ops *ops = c->m->store->ops;

	TRY(store_open_file(c->m->dir, c->name, STORE_READ, &c->from));
	TRY(store_open_file(s->dir, c->name, STORE_WRITE | STORE_NEW, &c->to));
	TRY(ops->resize(c->to, c->file->bytes, c->name));
	TRY(copy_items(c));
	TRY(ops->stamp(c->to, st, c->name));
	TRY(ops->finish(&c->to, true, c->name));
	return staging_replace(s, c->name);
}

static FALLIBLE enum err stage(struct materialise *m)
{
	const struct store_job by = job_in_store(m->job);

	if (m->staged)
		return OK;
	m->staged = true;
	return staging_open_repair(&by, &m->job->spec, m->dir, &m->staging);
}

static FALLIBLE enum err look_at(struct materialise *m, const struct manifest_file *f, bool clones)
{
	struct copy c = { .m = m, .file = f, .from = STORE_NOTHING, .to = STORE_NOTHING };
	struct stat st;

	if (f->name.n >= sizeof c.name)
		return ERR(NAME_INVALID, "a file name of %zu bytes", f->name.n);
	memcpy(c.name, f->name.p, f->name.n);
	TRY(err_at_file(store_stat(m->dir, c.name, &st), c.name, -1));
	if (st.st_nlink < 2 && !clones)
		return OK;
	if ((uint64_t)st.st_size != f->bytes)
		return err_at_file(ERR(CHECKPOINT_DAMAGED, "the file has %jd bytes, %ju were written", (intmax_t)st.st_size,
				       (uintmax_t)f->bytes), c.name, -1);
	m->files++;
	m->bytes += f->bytes;
	if (m->job->dry_run)
		return OK;
	TRY(stage(m));
	enum err e = copy_file(&c, &st);
	store_close(&c.from);
	store_close(&c.to);
	return err_at_file(e, c.name, -1);
}

/* ----------------------------------------------------------------------------------------------------------- the record */

/* From now on no bytes are shared; the parents stay as what they were. */
static FALLIBLE enum err renew_record(struct materialise *m)
{
	CLEANUP(mem_free_ptr) void *text = NULL;
	CLEANUP(buf_free) struct buf made = BUF_INIT(MANIFEST_MAX);
	CLEANUP(buf_free) struct buf members = BUF_INIT(RECORD_BYTES_MAX);
	CLEANUP(record_free) struct record record = { 0 };
	uint64_t n = 0;

	TRY(record_of_dir(m->dir, MANIFEST_NAME, &record));
	if (json_integer_value(json_object_get(record.doc, "bytes_shared")) == 0)
		return OK;
	if (json_object_set_new(record.doc, "bytes_shared", json_integer(0)) != 0)
		return ERR(NO_MEMORY, "no memory for a record");
	TRY(store_get(m->dir, MANIFEST_NAME, MANIFEST_MAX, &text, &n, NULL));
	TRY(record_put(&members, record.doc));
	TRY(manifest_renew_record((struct str){ text, n }, (struct str){ (const char *)members.p, members.len }, &made));
	TRY(stage(m));
	TRY(staging_put_file(&m->staging, MANIFEST_NAME, made.p, made.len));
	return staging_replace(&m->staging, MANIFEST_NAME);
}

/* -------------------------------------------------------------------------------------------------------------- the job */

static FALLIBLE enum err open_checkpoint(struct materialise *m)
{
	const struct ref *ref = &m->job->spec.target;
	const struct store_job by = job_in_store(m->job);
	const char *file = NULL;

	TRY(stores_find(&m->job->worker->stores, ref->storage.p, &m->store));
	TRY(owner_check(&by, m->store, ref->name.p));
	TRY(checkpoint_open_dir(m->store, ref->name.p, &m->dir, &file));
	if (!file)
		TRY(checkpoint_manifest(m->dir, MANIFEST_NAME, &m->manifest));
	if (!m->manifest)
		return ERR(FORMAT_UNSUPPORTED, "the checkpoint has no manifest of dcpd's: it shares nothing that dcpd knows of");
	m->piece = mem_alloc(PIECE);
	NEED(m->piece, "no memory for a copy");
	return OK;
}

static FALLIBLE enum err materialise(struct materialise *m)
{
	uint64_t bytes = 0;

	TRY(job_state(m->job, "planning", "metadata", NULL, 0));
	TRY(open_checkpoint(m));
	bool clones = m->store->ops->clone && m->store->ops->clones(m->dir);
	for (uint64_t i = 0; i < m->manifest->files.n; i++)
		bytes += m->manifest->files.v[i].bytes;
	TRY(job_state(m->job, "running", "copy", NULL, bytes));
	for (uint64_t i = 0; i < m->manifest->files.n; i++)
		TRY(look_at(m, &m->manifest->files.v[i], clones));
	if (!m->job->dry_run)
		TRY(renew_record(m));
	m->job->result = json_pack("{s:o, s:I, s:I, s:b}", "checkpoint", ref_doc(&m->job->spec.target),
				   m->job->dry_run ? "file_count" : "files", (json_int_t)m->files, /* `files` of a plan is their list */
				   "bytes", (json_int_t)m->bytes, "changed", m->files && !m->job->dry_run);
	NEED(m->job->result, "no memory for the result");
	return OK;
}

enum err materialise_job(struct job *j)
{
	struct materialise m = { .job = j, .dir = STORE_NOTHING, .staging = { .name = "" } };

	enum err e = materialise(&m);
	if (m.staged)
		staging_close(&m.staging);
	manifest_free(m.manifest);
	mem_free(m.piece);
	store_close(&m.dir);
	return e;
}
