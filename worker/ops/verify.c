/* verify.c: is what a checkpoint says true? Three levels: structure (sizes, offsets, coverage, overlap: metadata and file sizes only), digest
 * (our XXH3-128s of payloads, values and the archives around payloads, else the CRC32s in the archives), values (all of that, and what the
 * numbers are). Damage is listed, all of it, and the job fails then; zeros between items that are none any more are only reported. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/num.h"
#include "ops/verify.h"
#include "os/fs.h"
#include "plan/save_plan.h"
#include "runner/build.h"
#include "runner/content_sums.h"
#include "runner/gang_run.h"
#include "runner/input.h"
#include "store/assets.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/record.h"

enum { LIST_MAX = 1000 };

/* The sources that come from one sdict: its chunks, then its values. */
struct part {
	uint64_t first, chunks;
};

struct verify {
	struct job *job;
	struct input source;
	struct spec_view view;
	struct run_build build;        /* of all parts: a job has one run */
	struct vec(struct part) parts;
	bool digest, values;
	bool sums;                     /* the content digest is made of what is read: it is not on record, or is all that can be compared */
	bool summed;                   /* it was made, and is what the record says, if that says one */
	char content[33];              /* the content digest; "": not known */
};

struct place {
	struct sd_loc loc;
	struct str fqn;
};

static int by_place(const void *a, const void *b)
{
	const struct place *x = a, *y = b;

	return num_order(x->loc.file, y->loc.file) ?: num_order(x->loc.offset, y->loc.offset) ?: num_order(x->loc.length, y->loc.length);
}

/* Both are parts of one item that was written as a whole: PyTorch gives the tensors of a safetensors file no places of their own. */
static bool in_one_item(const struct manifest *m, struct str file, struct sd_loc a, struct sd_loc b)
{
	const struct manifest_item *item = m ? manifest_covering(m, file, a.offset, a.length) : NULL;

	return item && item == manifest_covering(m, file, b.offset, b.length);
}

/* No two items share bytes. */
static FALLIBLE enum err check_items(const struct sdict *sd, const struct manifest *m)
{
	uint64_t n = 0;
	CLEANUP(mem_free_ptr) struct place *p = mem_zalloc(sd->chunk_count + sd->value_count, sizeof *p);
	char name[ERR_FILE_MAX];

	NEED(p, "no memory for %ju items", (uintmax_t)sd->chunk_count);
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		p[n++] = (struct place){ sd->chunks[i].loc, sd->tensors[sd->chunks[i].tensor].fqn };
	for (uint64_t i = 0; i < sd->value_count; i++)
		p[n++] = (struct place){ sd->values[i].loc, sd->values[i].fqn };
	qsort(p, n, sizeof *p, by_place);
	for (uint64_t i = 1; i < n; i++) {
		if (p[i].loc.file != p[i - 1].loc.file || p[i].loc.offset >= p[i - 1].loc.offset + p[i - 1].loc.length)
			continue;
		struct str f = sd->files[p[i].loc.file].name;
		if (in_one_item(m, f, p[i].loc, p[i - 1].loc))
			continue;
		snprintf(name, sizeof name, "%.*s", (int)(f.n < sizeof name ? f.n : sizeof name - 1), f.p);
		enum err e = ERR(FORMAT_METADATA, "the item overlaps that of '%.*s'", (int)num_min(p[i - 1].fqn.n, 200),
				 p[i - 1].fqn.p);
		return err_at_fqn(err_at_file(e, name, (int64_t)p[i].loc.offset), p[i].fqn.p, p[i].fqn.n);
	}
	return OK;
}

/* Bytes that a file has lost or gained at its end: items that went with them are listed by themselves, the rest is padding. */
static void check_sizes(const struct checkpoint *c, struct checked *checked)
{
	const struct manifest *m = c->manifest;
	char name[ERR_FILE_MAX];

	for (uint64_t i = 0; m && i < c->sd->file_count; i++) {
		struct str file = c->sd->files[i].name;
		uint32_t f = file.n ? map_get(&m->names, file) : MAP_NONE;
		uint64_t now = c->file_bytes[i], was = f == MAP_NONE ? now : m->files.v[f].bytes;
		if (now == was || !was)
			continue;
		snprintf(name, sizeof name, "%.*s", (int)num_min(file.n, sizeof name - 1), file.p);
		enum err e = ERR(DIGEST_MISMATCH, "the file has %ju bytes, %ju were written", (uintmax_t)now, (uintmax_t)was);
		(void)err_at_file(e, name, (int64_t)num_min(now, was));
		checked_damage(checked, CHECKED_PADDING, now > was ? now - was : was - now);
	}
}

static void list_add(json_t *list, struct str fqn, uint64_t count)
{
	if (json_array_size(list) >= LIST_MAX)
		return;
	json_array_append_new(list, json_pack("{s:o, s:I}", "fqn", jtext_value(fqn), "count", (json_int_t)count));
}

static uint64_t elements_of(const struct run *run, const struct run_src *s)
{
	uint64_t n;

	if (box_numel(s->ndim, run->dims + s->dims_at + s->ndim, &n))
		return 0;
	return s->dtype == DT_FLOAT4_E2M1FN_X2 ? 2 * n : n;
}

/* Per tensor: NaN, Inf, nothing but zeros. */
static void report_values(struct verify *v, const struct run *run, const struct part *p)
{
	json_t *r = v->job->result, *nan = json_object_get(r, "nan"), *inf = json_object_get(r, "inf"), *zero = json_object_get(r, "all_zero");

	for (uint64_t i = p->first, next; i < p->first + p->chunks; i = next) {
		const struct run_src *t = &run->srcs[i];
		const struct run_stats *s = &run->stats[t->stats];
		uint64_t nans = atomic_load(&s->nan_count), infs = atomic_load(&s->inf_count), zeros = atomic_load(&s->zero_count);
		uint64_t elements = 0; /* not all of them were looked at where items lie in no row, or are read as raw bytes */
		for (next = i; next < p->first + p->chunks && run->srcs[next].fqn_at == t->fqn_at; next++)
			elements += elements_of(run, &run->srcs[next]);
		if (nans)
			list_add(nan, run_src_fqn(run, t), nans);
		if (infs)
			list_add(inf, run_src_fqn(run, t), infs);
		if (zeros && zeros == elements)
			list_add(zero, run_src_fqn(run, t), elements);
	}
}

/* Items that nothing could be compared with. */
static uint64_t count_unverifiable(const struct run *run)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < run->srcs_n; i++)
		n += atomic_load(&run->srcs[i].unverified) != 0;
	return n;
}

/* Items that are lost (checkpoint_lose) or checked by another source have no bytes to look at. */
static void leave_out(struct verify *v, uint64_t first)
{
	for (uint64_t i = first; i < v->build.srcs.n; i++)
		if (v->build.srcs.v[i].length == 0)
			atomic_store(&v->build.srcs.v[i].damaged, 1);
}

/* Adds the present input as sources of the run. */
static FALLIBLE enum err add_part(struct verify *v, struct part **out)
{
	CLEANUP(mem_free_ptr) uint32_t *map = NULL;
	const struct manifest *m = input_manifest(&v->source);
	uint32_t first;

	TRY(input_add_files(&v->source, &v->build, false, &map));
	TRY(build_sources(&v->build, v->source.sd, input_kind(&v->source), map, m, &first));
	if (v->values)
		TRY(build_stats(&v->build, first, v->source.sd->chunk_count));
	TRY(build_raw_sources(&v->build, v->source.sd, m, first));
	TRY(build_records(&v->build, v->source.sd, first));
	if (v->source.checkpoint)
		TRY(build_indexes(&v->build, v->source.checkpoint->sd, map, m));
	TRY(build_edges(&v->build, m, first));
	leave_out(v, first);
	if (v->sums)
		TRY(content_want(&v->build, v->source.sd, first));
	TRY(vec_push(&v->parts, out));
	**out = (struct part){ first, v->source.sd->chunk_count };
	return OK;
}

static bool transformed(const struct sdict *sd, uint64_t i)
{
	if (i >= sd->chunk_count + sd->value_count)
		return false;
	return sd_is_transformed(i < sd->chunk_count ? sd->chunks[i].loc : sd->values[i - sd->chunk_count].loc);
}

/* The stored bytes of transformed items: besides what is in them, if that is looked at. */
static FALLIBLE enum err add_stored(struct verify *v)
{
	const struct sdict *sd = v->source.sd;
	struct part *p;

	TRY(add_part(v, &p));
	for (uint64_t i = p->first; i < v->build.srcs.n; i++) {
		struct run_src *s = &v->build.srcs.v[i];
		if (s->kind == RUN_SRC_RAW && s->digest_count && transformed(sd, i - p->first))
			continue;
		s->kind = RUN_SRC_RAW;
		s->length = 0;
		s->digest_count = 0;
	}
	leave_out(v, p->first);
	return OK;
}

/* All that one set of metadata names. Transforms are undone where nobody has a digest of the stored bytes, or where values are looked at;
 * that changes where items lie, so that what is selected is looked up again. */
static FALLIBLE enum err add_source(struct verify *v)
{
	struct checkpoint *c = v->source.checkpoint;
	struct part *p;

	v->source.sd = c ? c->sd : v->source.images;
	spec_view_free(&v->view);
	if (v->values && c && c->sd->transform_count) {
		TRY(input_select(&v->source, &v->job->spec, &v->view));
		TRY(add_stored(v));
		v->source.sd = c->sd;
		spec_view_free(&v->view);
	}
	TRY(input_undo_transforms(v->job, &v->source, !v->values));
	TRY(input_select(&v->source, &v->job->spec, &v->view));
	return add_part(v, &p);
}

/* A rank-local checkpoint: all that each rank wrote. Some of it another one wrote too, and a load takes one of them. */
static FALLIBLE enum err add_sources(struct verify *v)
{
	struct checkpoint *c = v->source.checkpoint;

	if (!c || c->format != FORMAT_DCP_RANK_LOCAL)
		return add_source(v);
	checked_forget_damage(&v->job->checked); /* items of the union that are lost with their files are lost again, rank by rank */
	for (uint64_t i = 0; i < c->rank_count; i++) {
		TRY(checkpoint_take_rank(c, i));
		TRY(check_items(c->sd, c->manifest));
		TRY(add_source(v));
	}
	return OK;
}

/* Files that travelled along: whole, or damaged. Their bytes become sources where digests are compared. */
static FALLIBLE enum err check_others(struct verify *v)
{
	const struct checkpoint *c = v->source.checkpoint;
	const struct manifest *m = c && !c->single ? c->manifest : NULL;

	for (uint64_t i = 0; m && i < m->files.n; i++) {
		const struct manifest_file *f = &m->files.v[i];
		char name[ERR_FILE_MAX];
		struct stat st = { 0 };
		uint32_t src;
		snprintf(name, sizeof name, "%.*s", (int)num_min(f->name.n, sizeof name - 1), f->name.p);
		if (asset_is_data(name))
			continue;
		enum err e = store_stat(c->dir, name, &st);
		if (e && e != ERR_NOT_FOUND)
			return err_at_file(e, name, -1);
		err_clear();
		if (e || !S_ISREG(st.st_mode))
			e = ERR(CHECKPOINT_INCOMPLETE, "the file is missing");
		else if ((uint64_t)st.st_size != f->bytes)
			e = ERR(DIGEST_MISMATCH, "the file has %jd bytes, %ju were written", (intmax_t)st.st_size, (uintmax_t)f->bytes);
		(void)err_at_file(e, name, 0);
		if (e)
			checked_damage(&v->job->checked, CHECKED_FILE, f->bytes);
		else if (v->digest && manifest_find(m, f->name, 0, f->bytes))
			TRY(build_other_source(&v->build, 0, f->name, f->bytes, m, &src));
	}
	return OK;
}

static void report(struct verify *v, const struct run *run)
{
	json_t *r = v->job->result;

	for (uint64_t i = 0; i < v->parts.n; i++)
		if (v->values)
			report_values(v, run, &v->parts.v[i]);
	gang_run_note(v->job, run);
	json_object_set_new(r, "unverifiable", json_integer((json_int_t)count_unverifiable(run)));
	checked_report(&v->job->checked, r);
	json_object_set(r, "padding", v->job->checked.padding);
	json_object_set_new(r, "padding_damage", json_integer((json_int_t)v->job->checked.padding_count));
}

/* The tensors of one file whose content digest is that of the record: their bytes are those that were written. */
static void prove(const struct part *p, struct run *run)
{
	for (uint64_t i = p->first; i < p->first + p->chunks; i++)
		atomic_fetch_add(&run->head->verified_bytes, atomic_exchange(&run->srcs[i].unverified, 0));
}

/* Lists the whole file as damaged, unless it is another one by now than the one whose record was read. */
static FALLIBLE enum err note_content(struct verify *v, const char *made)
{
	const struct checkpoint *c = v->source.checkpoint;
	char now[IDENTITY_MAX];

	if (v->job->identity[0] && (identity_of(store_top(c->store), c->name, now) || strcmp(now, v->job->identity) != 0))
		return ERR(CHECKPOINT_REPLACED, "'%s' was replaced while it was read", c->name);
	const char *slash = strrchr(c->name, '/');
	enum err e = ERR(DIGEST_MISMATCH, "the content digest of its tensors is %s, that of what was written is %s", made, v->content);
	(void)err_at_file(e, slash ? slash + 1 : c->name, 0);
	checked_damage(&v->job->checked, CHECKED_FILE, c->sd->file_count ? c->file_bytes[0] : 0);
	return OK;
}

/* Makes the content digest of what was read, or compares it with the one on record. Not made: damage that was found tells more. */
static FALLIBLE enum err sum_content(struct verify *v, struct run *run)
{
	const struct part *p = v->parts.v;
	char made[33];

	if (!v->sums || v->parts.n != 1 || atomic_load(&run->head->damage_count) || v->job->checked.damage_count)
		return OK;
	TRY(content_of_sources(run, v->source.sd, (uint32_t)p->first, made));
	if (v->content[0] && made[0] && strcmp(made, v->content) != 0)
		return note_content(v, made);
	v->summed = made[0];
	if (v->summed && v->content[0])
		prove(p, run);
	if (!v->content[0])
		memcpy(v->content, made, sizeof made);
	return OK;
}

static FALLIBLE enum err read_all(struct verify *v)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };

	v->build.opts = (struct run_options){ .mode = RUN_VERIFY, .task_bytes = BUILD_TASK_BYTES, .verify = true,
					      .past_cache = true, .values = v->values };
	TRY(build_verify(&v->build, 0));
	TRY(gang_run_built(v->job, &v->build, "read", NULL, &run));
	TRY(sum_content(v, &run));
	report(v, &run);
	return OK;
}

static FALLIBLE enum err check_digests(struct verify *v)
{
	static const char *const lists[] = { "nan", "inf", "all_zero" };

	for (size_t i = 0; v->values && i < sizeof lists / sizeof *lists; i++)
		json_object_set_new(v->job->result, lists[i], json_array());
	TRY(add_sources(v));
	TRY(check_others(v));
	return read_all(v);
}

/* An error that stops verify early is listed as the last damage, if the error tells of damage. */
static FALLIBLE enum err noted(struct verify *v, enum err e)
{
	static const struct { enum err code; enum checked_part part; } parts[] = {
		{ ERR_FORMAT_MANIFEST, CHECKED_MANIFEST }, { ERR_FORMAT_METADATA, CHECKED_METADATA },
		{ ERR_FORMAT_PICKLE, CHECKED_METADATA },   { ERR_CHECKPOINT_DAMAGED, CHECKED_METADATA },
	};
	struct checked *c = &v->job->checked;
	enum checked_part part = CHECKED_FILE;
	struct err_info info = *err_last();
	int64_t rank;

	if (e && (!checked_is_damage(e) || e == ERR_LIMIT_EXCEEDED || e == ERR_DTYPE_UNSUPPORTED))
		return e;
	for (size_t i = 0; e && i < sizeof parts / sizeof *parts; i++)
		part = parts[i].code == e ? parts[i].part : part;
	if (e && manifest_is(info.file, &rank))
		part = CHECKED_MANIFEST;
	if (e)
		checked_damage(c, part, 0);
	return OK;
}

static FALLIBLE enum err end(struct verify *v, enum err e)
{
	const struct checked *c = &v->job->checked;

	TRY(noted(v, e));
	if (c->damage_count == 0)
		return OK;
	v->job->error_more = checked_damage_doc(c);
	return checked_damage_error(c);
}

static FALLIBLE enum err check_structure(struct verify *v)
{
	const struct checkpoint *c = v->source.checkpoint;

	if (!c)
		return OK;
	TRY(save_plan_validate(v->source.sd));
	if (!format_holds(c->format, FORMAT_VIEWS))
		TRY(check_items(v->source.sd, c->manifest));
	check_sizes(c, &v->job->checked);
	return OK;
}

static void close_verify(struct verify *v)
{
	run_build_free(&v->build);
	vec_free(&v->parts);
	input_close(&v->source);
	spec_view_free(&v->view);
}

enum err verify_input(struct job *j, struct input *source)
{
	struct verify v = { .job = j, .digest = true, .source = *source };

	*source = (struct input){ 0 };
	enum err e = input_select(&v.source, &j->spec, &v.view);
	e = e ?: check_structure(&v);
	e = e ?: check_digests(&v);
	e = noted(&v, e);
	close_verify(&v);
	return e;
}

/* Reads the content digest from the record, if the checkpoint is looked at as a whole. One file has no digests besides. */
static FALLIBLE enum err find_content(struct verify *v)
{
	const struct spec *spec = &v->job->spec;
	CLEANUP(record_free) struct record record = { 0 };
	const struct store *store;

	if (!v->source.checkpoint || spec->include.n || spec->exclude.n)
		return OK;
	TRY(stores_find(&v->job->worker->stores, spec->source.storage.p, &store));
	TRY(record_of(store_top(store), v->source.checkpoint->name, &record));
	const char *known = json_string_value(json_object_get(record.doc, "content_digest"));
	snprintf(v->content, sizeof v->content, "%s", known ? known : "");
	v->sums = !known || v->source.checkpoint->single;
	return OK;
}

/* The digest on record holds for bytes that were all compared with what was written. */
static FALLIBLE enum err put_content(struct verify *v)
{
	json_t *r = v->job->result;
	bool holds = v->summed || json_integer_value(json_object_get(r, "unverifiable")) == 0;

	if (!v->content[0] || !holds || v->job->checked.damage_count)
		return OK;
	return json_object_set_new(r, "content_digest", json_string(v->content)) == 0 ? OK : ERR(NO_MEMORY, "no memory for the result");
}

static FALLIBLE enum err verify(struct verify *v)
{
	json_t *r = v->job->result = json_object();

	NEED(r, "no memory for the result");
	v->values = v->job->spec.level == LEVEL_VALUES;
	v->digest = v->job->spec.level != LEVEL_STRUCTURE;
	TRY(job_state(v->job, "planning", "metadata", NULL, 0));
	v->source.verifies = true;
	TRY(input_open(v->job, &v->job->spec.source, &v->source));
	TRY(input_select(&v->source, &v->job->spec, &v->view));
	const struct sdict *sd = v->source.sd;
	json_object_set_new(r, "level", json_string(field_word(&v->job->spec, &v->job->spec.level)));
	json_object_set_new(r, "tensors", json_integer((json_int_t)sd->tensor_count));
	json_object_set_new(r, "values", json_integer((json_int_t)sd->value_count));
	json_object_set_new(r, "chunks", json_integer((json_int_t)sd->chunk_count));
	TRY(check_structure(v));
	if (v->job->dry_run)
		return OK;
	if (!v->digest)
		return check_others(v);
	TRY(find_content(v));
	TRY(check_digests(v));
	return put_content(v);
}

/* The job that made the checkpoint; "": none of dcpd's. A checkpoint that is one file is opened without its page. */
static void find_maker(const struct checkpoint *c, char out[64])
{
	CLEANUP(record_free) struct record record = { 0 };
	const char *made = NULL;

	if (c->manifest)
		made = c->manifest->job;
	else if (c->single && record_of(store_top(c->store), c->name, &record) == OK)
		made = json_string_value(json_object_get(json_object_get(record.doc, "made_by"), "job"));
	err_clear();
	snprintf(out, 64, "%s", made ? made : "");
}

/* Keeps what was found out of all of a checkpoint that a job has made beside its bytes (notes.h), so that a lost journal does not lose it.
 * A storage that cannot be written to keeps none. */
static void note(const struct verify *v, enum err e)
{
	const struct job *j = v->job;
	const struct spec *s = &j->spec;
	const struct checkpoint *c = v->source.checkpoint;
	bool damaged = e == ERR_CHECKPOINT_DAMAGED || e == ERR_DIGEST_MISMATCH;
	CLEANUP(err_restore) struct err_info info = *err_last();
	char at[CLOCK_TEXT_MAX], made[64] = "";

	if (!c || !j->identity[0] || j->dry_run || !v->digest || s->include.n || s->exclude.n || (e && !damaged))
		return;
	find_maker(c, made);
	if (!made[0])
		return;
	json_int_t unverifiable = json_integer_value(json_object_get(j->result, "unverifiable"));
	bool compared = j->checked.verified_bytes || !unverifiable;
	CLEANUP(jval_drop) json_t *doc = json_pack("{s:s, s:s, s:s, s:s}", "state", damaged ? "damaged" : compared ? "verified" : "unverified",
						   "level", field_word(s, &s->level), "at", clock_text(clock_wall_ms(), at), "job", j->id);
	if (damaged) {
		(void)json_object_set_new(doc, "damage_count", json_integer((json_int_t)j->checked.damage_count ?: 1));
	} else {
		(void)json_object_set_new(doc, "unverifiable", json_integer(unverifiable));
		(void)json_object_set_new(doc, "unverified_bytes", json_integer((json_int_t)j->checked.unverified_bytes));
	}
	if (!damaged && v->content[0])
		(void)json_object_set_new(doc, "content_digest", json_string(v->content));
	if (doc && notes_set_verified(c->store, c->name, &(struct notes_verdict){ j->identity, made, doc }))
		err_clear();
}

enum err verify_job(struct job *j)
{
	struct verify v = { .job = j };

	enum err e = verify(&v);
	e = end(&v, e);
	note(&v, e);
	close_verify(&v);
	return e;
}
