/* reshard.c: checkpoint → checkpoint, in any layout, world size and format. Convert is a reshard; so is a plain copy; so is a merge, whose
 * tensors come from several (merge.h), and a delta and its base (apply.h). */

#include "base/num.h"
#include "ops/apply.h"
#include "ops/merge.h"
#include "ops/reshard_assets.h"
#include "ops/reshard_gguf.h"
#include "ops/convert_rules.h"
#include "runner/input.h"
#include "runner/target.h"
#include "runner/write.h"

enum { VALUES_MAX = 8 << 20, EMBEDDED_MAX = 256 << 20 };

struct reshard {
	struct job *job;
	struct input source;
	struct spec_view stored;       /* what takes part of the source */
	struct convert_rules rules;
	struct merge merge;
	struct apply apply;
	struct spec_view view;         /* what is written: that, as the rules convert it; its sdict is not its own */
	struct gguf_head gguf;         /* of a target in GGUF */
	struct reshard_assets assets;
	struct sdict *plan;
	struct arena *arena;
	struct run_build build;
	uint32_t *file_map, *value_src;
	uint32_t world_size;
	enum format format;
	struct str (*meta)[2];
	uint64_t meta_count;
	struct buf values;             /* JSON object for __metadata__ */
};

/* JSON of one value into r->values, if JSON can say it and there is room: every file of the target repeats what is there. */
static FALLIBLE enum err keep_value(struct reshard *r, const struct sd_value *v, bool *any)
{
	struct item_value value;
	void *bytes = NULL;
	uint64_t n = 0, room = VALUES_MAX - num_min(r->values.len, VALUES_MAX);

	if ((v->kind == SD_VALUE_INLINE ? v->bytes.n : v->loc.length) > VALUES_MAX)
		return OK;
	TRY(input_value(&r->source, v, &bytes, &n));
	enum err e = input_item_value(bytes, n, &value);
	mem_free(bytes);
	if (e)
		return input_at_value(&r->source, v, e);
	if (value.kind == ITEM_VALUE_JSON && 6 * v->fqn.n + value.text.len < room) {
		buf_puts(&r->values, *any ? "," : "");
		buf_json_str(&r->values, v->fqn);
		buf_puts(&r->values, ":");
		buf_put(&r->values, value.text.p, value.text.len);
		*any = true;
	}
	item_value_free(&value);
	return OK;
}

/* Takes over the source's __metadata__, but for what a target says itself; none if it is larger than values may be. */
static FALLIBLE enum err keep_meta(struct reshard *r, bool with_values)
{
	static const char *const own[] = { "format", "DCP_SHARDING_INFO", "DCP_VERSION" };
	const struct sdict *sd = r->format == FORMAT_SAFETENSORS && r->source.checkpoint ? r->source.checkpoint->sd : NULL;
	uint64_t n = sd ? sd->meta_count : 0, bytes = 0;

	TRY(arena_alloc(r->arena, n + 2, sizeof *r->meta, &r->meta));
	for (uint64_t i = 0; i < n; i++)
		bytes += 6 * (sd->meta[i][0].n + sd->meta[i][1].n);
	if (bytes > VALUES_MAX)
		checked_warn(&r->job->checked, "metadata_dropped", "the source's __metadata__ is too large to be repeated in every file");
	for (uint64_t i = 0; i < n && bytes <= VALUES_MAX; i++) {
		bool skip = with_values && str_is(sd->meta[i][0], "dcpd_values");
		for (size_t k = 0; k < sizeof own / sizeof *own; k++)
			skip = skip || str_is(sd->meta[i][0], own[k]);
		if (skip)
			continue;
		r->meta[r->meta_count][0] = sd->meta[i][0];
		r->meta[r->meta_count++][1] = sd->meta[i][1];
	}
	return OK;
}

/* A format without values: those that JSON can say go to its header, all are listed. */
static FALLIBLE enum err drop_values(struct reshard *r)
{
	const struct sdict *sd = r->view.sd;
	bool any = false;

	if (sd->value_count) {
		CLEANUP(mem_free_ptr) struct str *names = mem_zalloc(sd->value_count, sizeof *names);
		NEED(names, "no memory for %ju values", (uintmax_t)sd->value_count);
		for (uint64_t i = 0; i < sd->value_count; i++)
			names[i] = sd->values[i].fqn;
		json_object_set_new(r->job->result, "dropped", target_names(names, sd->value_count));
	}
	buf_puts(&r->values, "{");
	for (uint64_t i = 0; i < sd->value_count; i++) {
		TRY(keep_value(r, &sd->values[i], &any));
		TRY(job_tick(r->job));
	}
	buf_puts(&r->values, "}");
	TRY(keep_meta(r, any));
	r->meta[r->meta_count][0] = STR("format");
	r->meta[r->meta_count++][1] = STR("pt");
	if (any) {
		r->meta[r->meta_count][0] = STR("dcpd_values");
		r->meta[r->meta_count++][1] = (struct str){ (char *)r->values.p, r->values.len };
	}
	return buf_status(&r->values);
}

static FALLIBLE enum err cut(struct reshard *r)
{
	CLEANUP(sdict_free_ptr) struct sdict *held = NULL;
	struct save_plan_stats stats;

	if (!format_holds(r->format, FORMAT_CHUNKS)) {
		TRY(target_whole(&r->view, &r->plan));
		const struct target_ties first = { &r->stored, &r->view, r->rules.c.count ? r->rules.made.views : NULL };
		return r->format == FORMAT_TORCH ? merge_tie(&r->merge, &first, r->plan) : OK;
	}
	TRY(target_cut(r->job->worker, &r->view, &r->job->spec.layout, r->world_size, NULL, &held,
		       r->job->result));
	TRY(save_plan_make(held, r->job->spec.dedup, UINT64_MAX, &r->plan, &stats));
	json_object_set_new(r->job->result, "dedup_bytes_saved", json_integer((json_int_t)stats.bytes_saved));
	return save_plan_validate(r->plan);
}

/* Values are copied byte for byte: their sources are the raw ones behind the stored chunks, in the same order. */
static FALLIBLE enum err map_values(struct reshard *r, uint32_t first)
{
	const struct sdict *from = r->stored.sd, *view = r->view.sd;
	uint32_t next = first + (uint32_t)from->chunk_count;
	CLEANUP(mem_free_ptr) uint32_t *srcs = mem_alloc(from->value_count * sizeof *srcs + 1);

	r->value_src = mem_alloc(r->plan->value_count * sizeof *r->value_src + 1);
	if (!r->value_src || !srcs)
		return ERR(NO_MEMORY, "no memory for %ju values", (uintmax_t)from->value_count);
	if (r->plan->value_count == 0) /* dropped: the plan still knows their names */
		return OK;
	for (uint64_t i = 0; i < from->value_count; i++)
		srcs[i] = from->values[i].kind == SD_VALUE_STORED ? next++ : UINT32_MAX;
	for (uint64_t i = 0; i < view->value_count; i++) {
		const struct sd_value *to = sdict_value(r->plan, view->values[i].fqn);
		if (to)
			r->value_src[to - r->plan->values] = srcs[convert_rules_value(&r->rules, i)];
	}
	return OK;
}

/* A format whose head holds the values: they are read now. */
static FALLIBLE enum err embed_values(struct reshard *r)
{
	uint64_t total = 0;

	each(from, r->view.sd->values, r->view.sd->value_count) {
		struct sd_value *to = sdict_value(r->plan, from->fqn);
		CLEANUP(mem_free_ptr) void *bytes = NULL;
		uint64_t n = 0;
		if (!to || from->kind == SD_VALUE_INLINE)
			continue;
		TRY(num_add(total, from->loc.length, &total));
		if (total > EMBEDDED_MAX)
			return err_at_fqn(ERR(LIMIT_EXCEEDED, "more than %u bytes of values, which the head of one file would hold",
					      EMBEDDED_MAX), from->fqn.p, from->fqn.n);
		TRY(input_value(&r->source, from, &bytes, &n));
		to->kind = SD_VALUE_INLINE;
		TRY(arena_str(r->arena, (struct str){ bytes, n }, &to->bytes));
		TRY(job_tick(r->job));
	}
	return OK;
}

/* Reports the rules in the plan, and the result of casts. */
static FALLIBLE enum err report(struct reshard *r, json_t **table)
{
	json_t *casts = NULL;

	TRY(target_casts(r->view.sd, r->plan, NULL, &casts));
	enum err e = convert_rules_casts(&r->rules, &casts);
	if (casts)
		json_object_set_new(r->job->result, "cast", casts);
	return e ? e : convert_rules_table(&r->rules, &r->view, table);
}

static FALLIBLE enum err write_resharded(struct reshard *r)
{
	struct load_match match = { .strict = true };
	struct load_plan pieces;
	CLEANUP(jval_drop) json_t *table = NULL;
	uint32_t first, first_view;

	TRY(load_plan_make(r->view.sd, r->plan, &match, r->arena, &pieces));
	TRY(input_add_files(&r->source, &r->build, false, &r->file_map));
	TRY(build_sources(&r->build, r->stored.sd, input_kind(&r->source), r->file_map, input_manifest(&r->source), &first));
	TRY(convert_rules_sources(&r->rules, &r->build, first, &first_view));
	if (r->merge.count) {
		TRY(merge_sources(&r->merge, r->view.sd, r->plan, &r->build, first_view));
		merge_report(&r->merge, r->plan, r->job->result);
	}
	if (!format_holds(r->format, FORMAT_VALUES)) {
		TRY(drop_values(r));
		r->plan->value_count = 0; /* their names are still looked up: no array by value number from here on */
	} else {
		TRY(map_values(r, first));
		if (format_holds(r->format, FORMAT_EMBEDS))
			TRY(embed_values(r));
	}
	TRY(reshard_assets_add(r->job, &r->source, &r->build, &r->assets));
	TRY(report(r, &table));
	struct write_spec w = { .build = &r->build, .target = r->plan, .pieces = &pieces, .first_src = first_view,
				.merge = r->merge.count ? &r->merge.build : NULL,
				.value_src = r->value_src, .world_size = r->world_size, .format = r->format,
				.check_sources = r->source.checkpoint && input_verifies(r->job), .source = r->view.sd,
				.shown = table, .transposes = convert_rules_transpose(&r->rules),
				.gguf = r->format == FORMAT_GGUF ? &r->gguf : NULL,
				.others = r->assets.others, .other_count = r->assets.count,
				.meta = (const struct str(*)[2])r->meta, .meta_count = r->meta_count };
	return write_checkpoint(r->job, &w);
}

static FALLIBLE enum err reshard(struct reshard *r)
{
	must(format_parse(str_of(field_word(&r->job->spec, &r->job->spec.format)), &r->format));
	TRY(job_state(r->job, "planning", "metadata", NULL, 0));
	TRY(input_open(r->job, apply_source(r->job), &r->source));
	TRY(input_undo_transforms(r->job, &r->source, false));
	TRY(apply_open(r->job, &r->source, &r->apply));
	if (r->format == FORMAT_GGUF)
		TRY(reshard_gguf_head(r->job, &r->source, &r->gguf));
	struct spec selects = r->job->spec;
	if (r->format == FORMAT_GGUF)
		selects.dtype.n = 0; /* its globs are of the file's names */
	TRY(spec_select(&selects, r->source.sd, &r->stored));
	TRY(convert_rules_apply(r->job, &r->stored, r->gguf.rules, &r->rules, &r->view));
	if (r->format == FORMAT_GGUF)
		TRY(reshard_gguf_types(&r->job->spec, &r->gguf, &r->view));
	TRY(merge_open(r->job, &r->stored, &r->rules, &r->view, &r->merge));
	if (r->merge.count && r->gguf.quantises)
		return ERR(FORMAT_UNSUPPORTED, "an average is not written as " SPEC_Q8_0 " at once: merge first, then reshard");
	TRY(job_state(r->job, "planning", "plan", NULL, 0));
	r->world_size = spec_world_size(&r->job->spec, r->source.world_size);
	if (!format_holds(r->format, FORMAT_CHUNKS))
		r->world_size = 1;
	r->arena = arena_new(UINT64_MAX);
	r->job->result = json_object();
	if (!r->arena || !r->job->result)
		return ERR(NO_MEMORY, "no memory for a plan");
	apply_report(&r->apply, r->job->result);
	TRY(cut(r));
	return write_resharded(r);
}

enum err reshard_job(struct job *j)
{
	struct reshard r = { .job = j, .values = BUF_INIT(VALUES_MAX + 4096) };

	enum err e = reshard(&r);
	run_build_free(&r.build);
	mem_free(r.file_map);
	mem_free(r.value_src);
	buf_free(&r.values);
	sdict_free(r.plan);
	arena_free(r.arena);
	mem_free(r.view.dtypes);
	convert_rules_free(&r.rules);
	merge_free(&r.merge);
	apply_free(&r.apply);
	gguf_head_free(&r.gguf);
	reshard_assets_free(&r.assets);
	spec_view_free(&r.stored);
	input_close(&r.source);
	return e;
}
