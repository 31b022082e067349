/* repair_metadata.c: `.metadata` of a DCP checkpoint, made anew.
 *
 * Its files say what they hold, if dcpd wrote them (format/dcp_index.h). An item of PyTorch's says dtype and sizes of a chunk, and neither
 * FQN nor place in the tensor. These another checkpoint knows that has the same layout, such as the run's step before: its files hold the
 * same items in the same order. That is an assumption. Each item's dtype and sizes are compared, and if there is a manifest, the digest of
 * the old metadata proves it. */
#include "ops/repair_impl.h"

#include <stdio.h>
#include <stdlib.h>

#include "format/dcp_index.h"
#include "format/zip.h"
#include "io/digest.h"
#include "plan/save_plan.h"
#include "runner/write.h"

enum { METADATA_MAX = 1 << 30 };

struct payload {
	char *name;
	uint32_t rank;
};

struct rebuild {
	struct repair *repair;
	const struct manifest *manifest;
	struct vec(struct payload) files;      /* that are here, sorted by rank and name */
	struct sdict *sd;
	const char *by;                        /* "items", or the name of the other checkpoint */
};

static enum err note_payload(void *user, const char *name, unsigned char)
{
	struct rebuild *b = user;
	struct format_file is;
	struct payload *f;

	if (!format_file(name, &is) || is.format != FORMAT_DCP || is.role != FORMAT_PAYLOAD)
		return OK;
	TRY(vec_push(&b->files, &f));
	*f = (struct payload){ mem_strdup(name), (uint32_t)is.rank };
	return f->name ? OK : ERR(NO_MEMORY, "no memory for a file's name");
}

static int by_rank(const void *a, const void *b)
{
	const struct payload *x = a, *y = b;

	return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : strcmp(x->name, y->name);
}

static FALLIBLE enum err open_payload(const struct repair *r, const char *name, struct repair_source *at, struct item_source *out)
{
	struct stat st;

	*at = (struct repair_source){ STORE_NOTHING, 0 };
	TRY(err_at_file(store_open_file(r->dir, name, STORE_READ, &at->file), name, -1));
	TRY(err_at_file(store_stat(at->file, "", &st), name, -1));
	*out = (struct item_source){ repair_read, at, (uint64_t)st.st_size };
	return OK;
}

/* -------------------------------------------------------------------------------------------------- what files say */

static FALLIBLE enum err add_index(struct rebuild *b, struct dcp_indexes *all, const struct payload *f)
{
	struct repair_source at;
	struct item_source src;
	char *text = NULL;
	uint64_t begin;

	enum err e = open_payload(b->repair, f->name, &at, &src);
	e = e ?: dcp_index_find(&src, &begin, &text);
	if (!e && text)
		e = dcp_indexes_add(all, str_of(f->name), f->rank, src.length, (struct str){ text, src.length - begin });
	else if (!e && src.length) /* a rank that wrote nothing has an empty file */
		e = ERR(CHECKPOINT_INCOMPLETE, "the file does not say which tensors it holds: name a checkpoint of the same layout, such "
			"as the step before, with `from`");
	store_close(&at.file);
	mem_free(text);
	return err_at_file(e, f->name, -1);
}

static FALLIBLE enum err from_indexes(struct rebuild *b)
{
	CLEANUP(dcp_indexes_free_ptr) struct dcp_indexes *all = NULL;

	TRY(dcp_indexes_new(&all));
	for (uint64_t i = 0; i < b->files.n; i++) {
		TRY(job_tick(b->repair->job));
		TRY(add_index(b, all, &b->files.v[i]));
	}
	TRY(dcp_indexes_join(all, &b->sd));
	b->by = "items";
	return OK;
}

/* ---------------------------------------------------------------------------------------------- what the other says */

/* An item of the other checkpoint: chunk `index` of its sdict, or value. */
struct item_ref {
	struct sd_loc *loc;
	uint64_t index;
	bool is_value;
};

static int by_place(const void *a, const void *b)
{
	const struct item_ref *x = a, *y = b;

	if (x->loc->file != y->loc->file)
		return x->loc->file < y->loc->file ? -1 : 1;
	return x->loc->offset < y->loc->offset ? -1 : x->loc->offset > y->loc->offset;
}

static FALLIBLE enum err spans_of(struct rebuild *b, const char *name, const struct item_source *src, item_spans *out)
{
	uint32_t f = b->manifest ? map_get(&b->manifest->names, str_of(name)) : MAP_NONE;
	struct item_span *span;
	uint64_t end;

	if (dcp_index_find(src, &end, NULL)) /* a damaged one: its own place is all that is of interest */
		err_clear();
	if (f == MAP_NONE)
		return item_walk(src, end, job_tick, b->repair->job, out);
	for (uint64_t i = 0; i < b->manifest->files.v[f].item_count; i++) {
		const struct manifest_item *item = &b->manifest->items.v[b->manifest->files.v[f].first_item + i];
		if (item->offset >= end)
			break;
		TRY(vec_push(out, &span));
		*span = (struct item_span){ item->offset, item->length };
	}
	return OK;
}

static FALLIBLE enum err differs(const struct rebuild *b, const char *detail)
{
	return ERR(CHECKPOINT_INCOMPLETE, "%s: %s has another layout, and does not say which tensors these are", detail, b->by);
}

/* Is the item what the other checkpoint has in its place? Of one whose head is damaged only the length tells. */
static FALLIBLE enum err check_item(const struct rebuild *b, const struct item_ref *ref, const struct item_source *file,
				    const struct item_span *span)
{
	struct repair_source at = { ((struct repair_source *)file->user)->file, span->offset };
	struct item_source src = { repair_read, &at, span->length };
	const struct sdict *sd = b->sd;
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	struct item_tensor t;

	enum err e = ref->is_value ? zip_open(&src, &z) : item_read_tensor(&src, &t);
	if (checked_is_damage(e) && span->length == ref->loc->length) {
		err_clear();
		return OK;
	}
	TRY(e);
	if (ref->is_value)
		return OK;
	const struct sd_chunk *c = &sd->chunks[ref->index];
	const struct sd_tensor *want = &sd->tensors[c->tensor];
	if (t.dtype != want->dtype || t.ndim != want->ndim ||
	    (t.ndim && memcmp(t.sizes, sd_sizes(c, t.ndim), t.ndim * sizeof *t.sizes) != 0))
		return err_at_fqn(differs(b, "an item of another dtype or size"), want->fqn.p, want->fqn.n);
	return OK;
}

/* Finds the other checkpoint's items [refs, refs + n) of one file in this checkpoint's file of the same name. */
static FALLIBLE enum err match_file(struct rebuild *b, const char *name, struct item_ref *refs, uint64_t n)
{
	struct repair_source at;
	struct item_source src;
	item_spans spans = { 0 };

	enum err e = open_payload(b->repair, name, &at, &src);
	if (e == ERR_NOT_FOUND)
		e = ERR(CHECKPOINT_INCOMPLETE, "the file is missing");
	e = e ?: spans_of(b, name, &src, &spans);
	if (!e && spans.n != n)
		e = differs(b, spans.n < n ? "fewer items" : "more items");
	for (uint64_t i = 0; !e && i < n; i++) {
		e = job_tick(b->repair->job);
		e = e ?: err_at_file(check_item(b, &refs[i], &src, &spans.v[i]), name, (int64_t)spans.v[i].offset);
	}
	for (uint64_t i = 0; !e && i < n; i++) {
		refs[i].loc->offset = spans.v[i].offset;
		refs[i].loc->length = spans.v[i].length;
	}
	store_close(&at.file);
	vec_free(&spans);
	return err_at_file(e, name, -1);
}

static FALLIBLE enum err list_items(struct sdict *sd, struct item_ref *refs, uint64_t *n_out)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < sd->chunk_count; i++)
		refs[n++] = (struct item_ref){ &sd->chunks[i].loc, i, false };
	for (uint64_t i = 0; i < sd->value_count; i++)
		refs[n++] = (struct item_ref){ &sd->values[i].loc, i, true };
	*n_out = n;
	qsort(refs, n, sizeof *refs, by_place);
	for (uint64_t i = 0; i < n; i++)
		if (refs[i].loc->transform || (i && by_place(&refs[i], &refs[i - 1]) == 0))
			return ERR(FORMAT_UNSUPPORTED, "items with a transform, or several tensors in one, do not say how long they are");
	return OK;
}

/* Every file here that has bytes is one of the other's, too. */
static FALLIBLE enum err check_files(struct rebuild *b)
{
	struct stat st;

	for (uint64_t i = 0; i < b->files.n; i++) {
		bool known = false;
		for (uint64_t k = 0; k < b->sd->file_count && !known; k++)
			known = str_is(b->sd->files[k].name, b->files.v[i].name);
		TRY(err_at_file(store_stat(b->repair->dir, b->files.v[i].name, &st), b->files.v[i].name, -1));
		if (!known && st.st_size)
			return err_at_file(differs(b, "the file is there"), b->files.v[i].name, -1);
	}
	return OK;
}

static FALLIBLE enum err from_other(struct rebuild *b)
{
	struct checkpoint *from = b->repair->from;
	struct sdict *sd = from->sd;
	CLEANUP(mem_free_ptr) struct item_ref *refs = mem_zalloc(sd->chunk_count + sd->value_count + 1, sizeof *refs);
	uint64_t n = 0, first;

	NEED(refs, "no memory for %ju items", (uintmax_t)(sd->chunk_count + sd->value_count));
	if (!format_is_dcp(from->format))
		return ERR(FORMAT_UNSUPPORTED, "%s is no DCP checkpoint, and says nothing of the items of one", b->by);
	b->sd = from->sd;
	from->sd = NULL; /* whose places become this one's: it is opened anew */
	TRY(list_items(b->sd, refs, &n));
	TRY(check_files(b));
	for (uint64_t i = 0; i < n;) {
		for (first = i; i < n && refs[i].loc->file == refs[first].loc->file; i++)
			;
		TRY(match_file(b, b->sd->files[refs[first].loc->file].name.p, refs + first, i - first));
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ the pickle */

static enum err to_buf(void *user, const void *bytes, size_t n)
{
	buf_put(user, bytes, n);
	return buf_status(user);
}

/* Are these the bytes that the manifest has the digest of? If not, a new manifest tells of them. */
static FALLIBLE enum err compare_with_manifest(struct rebuild *b, const char *save_id)
{
	struct repair *r = b->repair;
	struct manifest_metadata now = { .name = DCP_METADATA, .save_id = save_id, .bytes = r->metadata.len };
	void *text = NULL;
	uint64_t n = 0;

	if (!b->manifest)
		return OK;
	digest_xxh3(r->metadata.p, r->metadata.len, now.xxh3_128);
	r->proven = strcmp(b->manifest->metadata_name, DCP_METADATA) == 0 && b->manifest->metadata_bytes == now.bytes &&
		    memcmp(b->manifest->metadata_xxh3, now.xxh3_128, sizeof now.xxh3_128) == 0;
	if (r->proven)
		return OK;
	TRY(store_get(r->dir, MANIFEST_NAME, MANIFEST_MAX, &text, &n, NULL));
	enum err e = manifest_renew((struct str){ text, n }, &now, &r->manifest_text);
	mem_free(text);
	return err_at_file(e, MANIFEST_NAME, -1);
}

static FALLIBLE enum err put_metadata(struct rebuild *b)
{
	struct repair *r = b->repair;
	char save_id[MANIFEST_SAVE_ID];

	if (b->manifest && b->manifest->save_id[0])
		memcpy(save_id, b->manifest->save_id, sizeof save_id);
	else
		write_uuid(save_id);
	const struct dcp_meta_opts opts = { .checkpoint_id = r->job->spec.target.name.p, .save_id = save_id };
	TRY(save_plan_validate(b->sd));
	TRY(format_put_metadata(FORMAT_DCP, b->sd, &opts, to_buf, &r->metadata));
	TRY(compare_with_manifest(b, save_id));
	json_t *one = json_pack("{s:s, s:s, s:b, s:I}", "file", DCP_METADATA, "by", b->by, "proven", r->proven, "bytes",
				(json_int_t)r->metadata.len);
	if (!one || json_array_append_new(r->rebuilt, one) != 0)
		return ERR(NO_MEMORY, "no memory for the result");
	return OK;
}

/* Equal items are assumed to be in the other checkpoint's order; only a digest can prove it. */
static void note_assumption(struct rebuild *b)
{
	char text[512];

	if (b->repair->proven || strcmp(b->by, "items") == 0)
		return;
	snprintf(text, sizeof text, "items of equal dtype and size are taken to stand in the order that they have in %s", b->by);
	checked_warn(&b->repair->job->checked, "assumed", text);
}

static FALLIBLE enum err rebuild(struct rebuild *b)
{
	struct repair *r = b->repair;
	char other[4096 + 64];

	TRY(store_list(r->dir, note_payload, b));
	if (b->files.n == 0)
		return ERR(NOT_A_CHECKPOINT, "no file of a DCP checkpoint is there");
	qsort(b->files.v, b->files.n, sizeof *b->files.v, by_rank);
	enum err e = from_indexes(b);
	if (e && r->from && (checked_is_damage(e) || e == ERR_DUPLICATE_KEY)) {
		err_clear();
		snprintf(other, sizeof other, "%s:%s", r->job->spec.from.storage.p, r->job->spec.from.name.p);
		b->by = other;
		e = from_other(b);
	}
	TRY(e);
	TRY(put_metadata(b));
	note_assumption(b);
	return OK;
}

enum err repair_dcp_metadata(struct repair *r, const struct manifest *manifest)
{
	struct rebuild b = { .repair = r, .manifest = manifest };

	r->metadata = BUF_INIT(METADATA_MAX);
	r->manifest_text = BUF_INIT(MANIFEST_MAX);
	enum err e = rebuild(&b);
	for (uint64_t i = 0; i < b.files.n; i++)
		mem_free(b.files.v[i].name);
	vec_free(&b.files);
	sdict_free(b.sd);
	return e;
}
