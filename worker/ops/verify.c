/* verify.c: is what a checkpoint says true? Three levels: structure (sizes, offsets, coverage, overlap: metadata and file sizes only), digest
 * (our XXH3-128s, else the CRC32s in the archives), values (all of that, and what the numbers are). */
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "ops/build.h"
#include "ops/input.h"
#include "os/fs.h"
#include "plan/save_plan.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LIST_MAX = 1000 };

struct verify {
	struct job *job;
	struct input source;
	struct spec_view view;
	struct run_build build;
	uint32_t *file_map;
	bool digest, values;
	uint64_t verified, unverifiable;
};

struct place {
	struct sd_loc loc;
	struct str fqn;
};

static int by_place(const void *a, const void *b)
{
	const struct place *x = a, *y = b;

	if (x->loc.file != y->loc.file)
		return x->loc.file < y->loc.file ? -1 : 1;
	if (x->loc.offset != y->loc.offset)
		return x->loc.offset < y->loc.offset ? -1 : 1;
	return x->loc.length < y->loc.length ? -1 : x->loc.length > y->loc.length;
}

/* No two items share bytes. */
static FALLIBLE enum err check_items(const struct sdict *sd)
{
	uint64_t n = 0;
	CLEANUP(mem_free_ptr) struct place *p = mem_zalloc(sd->chunk_count + sd->value_count, sizeof *p);
	char name[ERR_FILE_MAX];

	if (!p)
		return ERR(NO_MEMORY, "no memory for %ju items", (uintmax_t)sd->chunk_count);
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		p[n++] = (struct place){ sd->chunks[i].loc, sd->tensors[sd->chunks[i].tensor].fqn };
	for (uint64_t i = 0; i < sd->value_count; i++)
		p[n++] = (struct place){ sd->values[i].loc, sd->values[i].fqn };
	qsort(p, n, sizeof *p, by_place);
	for (uint64_t i = 1; i < n; i++) {
		if (p[i].loc.file != p[i - 1].loc.file || p[i].loc.offset >= p[i - 1].loc.offset + p[i - 1].loc.length)
			continue;
		struct str f = sd->files[p[i].loc.file].name;
		snprintf(name, sizeof name, "%.*s", (int)(f.n < sizeof name ? f.n : sizeof name - 1), f.p);
		enum err e = ERR(FORMAT_METADATA, "the item overlaps that of '%.*s'", (int)num_min(p[i - 1].fqn.n, 200),
				 p[i - 1].fqn.p);
		return err_at_fqn(err_at_file(e, name, (int64_t)p[i].loc.offset), p[i].fqn.p, p[i].fqn.n);
	}
	return OK;
}

static FALLIBLE enum err check_metadata(struct verify *v)
{
	const struct manifest *m = v->source.checkpoint->manifest;
	XXH128_canonical_t canonical;
	void *bytes = NULL;
	uint64_t n = 0;

	if (!m || !m->metadata_name[0])
		return OK;
	TRY(fs_read_all(v->source.checkpoint->dirfd, m->metadata_name, MANIFEST_MAX, &bytes, &n));
	XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, n));
	mem_free(bytes);
	if (n != m->metadata_bytes || memcmp(canonical.digest, m->metadata_xxh3, sizeof m->metadata_xxh3) != 0)
		return err_at_file(ERR(DIGEST_MISMATCH, "the metadata is not what was written"), m->metadata_name, 0);
	return OK;
}

static void list_add(json_t *list, struct str fqn, uint64_t count)
{
	if (json_array_size(list) >= LIST_MAX)
		return;
	json_t *name = json_stringn(fqn.p, fqn.n);
	json_array_append_new(list, json_pack("{s:o, s:I}", "fqn", name ? name : json_string("?"), "count",
					      (json_int_t)count));
}

/* Per tensor: NaN, Inf, nothing but zeros. */
static void report_values(struct verify *v, const struct run *run)
{
	const struct sdict *sd = v->source.sd;
	json_t *nan = json_array(), *inf = json_array(), *zero = json_array();

	for (uint64_t t = 0; t < sd->tensor_count; t++) {
		uint64_t nans = 0, infs = 0, elements = 0;
		bool nonzero = false;
		for (uint64_t c = 0; c < sd->tensors[t].chunk_count; c++) {
			const struct run_src *s = &run->srcs[sd->tensors[t].first_chunk + c];
			nans += atomic_load(&s->nan_count);
			infs += atomic_load(&s->inf_count);
			nonzero = nonzero || atomic_load(&s->nonzero);
			uint64_t numel = 0;
			if (!box_numel(s->ndim, run->dims + s->dims_at + s->ndim, &numel))
				elements += numel;
		}
		if (nans)
			list_add(nan, sd->tensors[t].fqn, nans);
		if (infs)
			list_add(inf, sd->tensors[t].fqn, infs);
		if (!nonzero && elements)
			list_add(zero, sd->tensors[t].fqn, elements);
	}
	json_object_set_new(v->job->result, "nan", nan);
	json_object_set_new(v->job->result, "inf", inf);
	json_object_set_new(v->job->result, "all_zero", zero);
}

static uint64_t count_unverifiable(const struct run *run)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < run->srcs_n; i++) {
		const struct run_src *s = &run->srcs[i];
		if (s->digest_count == 0 && s->kind == RUN_SRC_ITEM && atomic_load(&s->crc_state) != RUN_CRC_KNOWN)
			n++;
	}
	return n;
}

static FALLIBLE enum err read_all(struct verify *v)
{
	struct run run = { .fd = -1 };
	uint32_t first;

	TRY(input_add_files(&v->source, &v->build, false, &v->file_map));
	TRY(build_sources(&v->build, v->source.sd, input_kind(&v->source), v->file_map, input_manifest(&v->source), &first));
	v->build.opts = (struct run_options){ .mode = RUN_VERIFY, .task_bytes = BUILD_TASK_BYTES, .verify = true,
					      .values = v->values };
	TRY(build_verify(&v->build, first));
	TRY(run_share(&v->build, &run));
	run_build_free(&v->build);
	enum err e = job_state(v->job, "running", "read", NULL, run_bytes_total(&run));
	if (!e)
		e = job_execute(v->job, &run);
	if (!e) {
		v->verified = atomic_load(&run.head->verified_bytes);
		v->unverifiable += count_unverifiable(&run);
		json_object_set_new(v->job->result, "read_bytes",
				    json_integer((json_int_t)atomic_load(&run.head->read_bytes)));
		if (v->values)
			report_values(v, &run);
	}
	run_detach(&run);
	return e;
}

/* They change where items lie, so that what is selected is looked up again. */
static FALLIBLE enum err undo_transforms(struct verify *v)
{
	v->source.sd = v->source.checkpoint ? v->source.checkpoint->sd : v->source.images;
	spec_view_free(&v->view);
	TRY(input_undo_transforms(v->job, &v->source));
	return input_select(&v->source, v->job->spec, &v->view);
}

static FALLIBLE enum err verify(struct verify *v)
{
	const char *level = json_string_value(json_object_get(v->job->spec, "level"));
	json_t *r = v->job->result = json_object();

	if (!r)
		return ERR(NO_MEMORY, "no memory for the result");
	v->values = level && strcmp(level, "values") == 0;
	v->digest = v->values || !level || strcmp(level, "digest") == 0;
	TRY(job_state(v->job, "planning", "metadata", NULL, 0));
	TRY(input_open(v->job, json_object_get(v->job->spec, "source"), &v->source));
	TRY(input_select(&v->source, v->job->spec, &v->view));
	const struct sdict *sd = v->source.sd;
	json_object_set_new(r, "level", json_string(level ? level : "digest"));
	json_object_set_new(r, "tensors", json_integer((json_int_t)sd->tensor_count));
	json_object_set_new(r, "values", json_integer((json_int_t)sd->value_count));
	json_object_set_new(r, "chunks", json_integer((json_int_t)sd->chunk_count));
	if (v->source.checkpoint) {
		TRY(save_plan_validate(sd));
		TRY(check_items(sd));
	}
	if (v->digest && !v->job->dry_run) {
		if (v->source.checkpoint)
			TRY(check_metadata(v));
		TRY(undo_transforms(v));
		TRY(read_all(v));
		if (v->source.checkpoint)
			TRY(input_check_values(v->job, &v->source, &v->unverifiable));
		json_object_set_new(r, "verified_bytes", json_integer((json_int_t)v->verified));
		json_object_set_new(r, "unverifiable", json_integer((json_int_t)v->unverifiable));
	}
	return OK;
}

enum err verify_job(struct job *j)
{
	struct verify v = { .job = j };

	enum err e = verify(&v);
	run_build_free(&v.build);
	mem_free(v.file_map);
	input_close(&v.source);
	spec_view_free(&v.view);
	return e;
}
