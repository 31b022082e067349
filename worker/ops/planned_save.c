/* planned_save.c: see planned_save.h. The client is believed about what its bytes mean, not about where they lie: offsets are
 * checked against the segments, and the metadata that it brings must name no place that was not written. */
#include "ops/planned_save.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/num.h"
#include "format/dcp_meta.h"
#include "os/fs.h"
#include "runner/hosts.h"
#include "runner/input.h"
#include "runner/target.h"
#include "runner/write.h"

enum { NAME_MAX_BYTES = 200, LISTED_FILES_MAX = 1 << 20, LISTED_WORLD_MAX = 65536, LISTED_BYTES_MAX = 1 << 30 };

struct planned_save {
	struct job *job;
	struct input source;
	json_t *doc;                   /* of `items` */
	void *items, *metadata;
	uint64_t items_bytes, metadata_bytes;
	struct sdict *target, *stored; /* stored: as the metadata tell; NULL: they cannot be read */
	struct file_plan_given build;
	struct str *names;
	uint32_t *ranks, *chunk_file, *part_file;
	bool *exact, *chunk_raw;
	const char **places;           /* per file: where another host has written it (hosts.h), or NULL */
	bool *local;                   /* per rank; NULL: all are here */
	uint32_t world_size, part_count;
	const char *metadata_name;
	struct run_build run;
	struct content_items contents; /* of the metadata */
	struct arena *arena;
};

static enum err wrong(const char *what, size_t index)
{
	return ERR(VALIDATION_FAILED, "the list of items: %s %zu cannot be used", what, index);
}

/* This save is but a part: "hosts": {"id","part":true}. */
static const char *part_of(const struct planned_save *l)
{
	return l->job->spec.hosts.part ? l->job->spec.hosts.id.p : NULL;
}

/* ---- what the client sent ---- */

/* A tensor of the source's image, whole. */
static FALLIBLE enum err read_bytes(struct planned_save *l, const char *fqn, void **out, uint64_t *n_out)
{
	const struct sd_tensor *t = sdict_tensor(l->source.sd, str_of(fqn));

	if (!t)
		return OK;
	const struct sd_loc *loc = &l->source.sd->chunks[t->first_chunk].loc;
	if (t->dtype != DT_UINT8 || t->chunk_count != 1 || loc->length > LISTED_BYTES_MAX)
		return ERR(VALIDATION_FAILED, "'%s' of the list must be at most %d bytes of dtype uint8", fqn, LISTED_BYTES_MAX);
	CLEANUP(mem_free_ptr) void *bytes = mem_alloc(loc->length + 1);
	NEED(bytes, "no memory for %ju bytes of '%s'", (uintmax_t)loc->length, fqn);
	TRY(input_segment_error(fs_pread(l->job->fds[l->source.state_dict->v[0].fd], bytes, loc->length, loc->offset,
					 "segment")));
	*n_out = loc->length;
	*out = move(bytes);
	return OK;
}

static bool name_usable(const char *name)
{
	size_t n = name ? strlen(name) : 0;

	if (n == 0 || n > NAME_MAX_BYTES || name[0] == '.')
		return false;
	for (const char *p = name; *p; p++)
		if (*p == '/' || (unsigned char)*p < 32)
			return false;
	return true;
}

/* ".metadata" or "__{rank}.metadata". */
static bool metadata_name_usable(const char *name)
{
	struct format_file file;

	return name && format_file(name, &file) && file.role == FORMAT_METADATA && file.format <= FORMAT_DCP_RANK_LOCAL;
}

/* Finds the ranks of this host: a rank with one file on another host has all its files there. */
static FALLIBLE enum err read_locals(struct planned_save *l)
{
	bool elsewhere = false;

	for (uint32_t i = 0; i < l->build.file_count; i++)
		elsewhere = elsewhere || l->places[i];
	if (!elsewhere)
		return OK;
	l->local = mem_alloc(l->world_size * sizeof *l->local);
	NEED(l->local, "no memory for %u ranks", l->world_size);
	memset(l->local, 1, l->world_size * sizeof *l->local);
	for (uint32_t i = 0; i < l->build.file_count; i++)
		if (l->places[i])
			l->local[l->ranks[i]] = false;
	for (uint32_t i = 0; i < l->build.file_count; i++)
		if (!l->places[i] && !l->local[l->ranks[i]])
			return wrong("file", i);
	return OK;
}

static FALLIBLE enum err read_files(struct planned_save *l)
{
	const json_t *files = json_object_get(l->doc, "files"), *one;
	size_t n = json_array_size(files), i;

	l->names = mem_zalloc(n, sizeof *l->names);
	l->ranks = mem_zalloc(n, sizeof *l->ranks);
	l->exact = mem_zalloc(n, sizeof *l->exact);
	l->places = mem_zalloc(n, sizeof *l->places);
	NEED(l->names && l->ranks && l->exact && l->places, "no memory for %zu files", n);
	if (n > LISTED_FILES_MAX)
		return ERR(LIMIT_EXCEEDED, "a save of more than %d files", LISTED_FILES_MAX);
	json_array_foreach(files, i, one) {
		const char *name = json_string_value(json_array_get(one, 0));
		const json_t *rank = json_array_get(one, 1);
		if (!name_usable(name) || !json_is_integer(rank) || json_integer_value(rank) < 0 ||
		    json_integer_value(rank) >= LISTED_WORLD_MAX)
			return wrong("file", i);
		l->names[i] = str_of(name);
		l->ranks[i] = (uint32_t)json_integer_value(rank);
		l->exact[i] = json_is_true(json_array_get(one, 2));
		l->places[i] = json_string_value(json_array_get(one, 3));
		if (l->places[i] && !hosts_part_id(l->places[i]))
			return wrong("file", i);
		if (l->ranks[i] >= l->world_size)
			l->world_size = l->ranks[i] + 1;
	}
	l->build.file_count = (uint32_t)n;
	l->build.names = l->names;
	l->build.ranks = l->ranks;
	l->build.exact = l->exact;
	return read_locals(l);
}

static FALLIBLE enum err read_list(struct planned_save *l)
{
	TRY(read_bytes(l, "items", &l->items, &l->items_bytes));
	TRY(read_bytes(l, "metadata", &l->metadata, &l->metadata_bytes));
	if (!l->items)
		return ERR(VALIDATION_FAILED, "a planned save needs a tensor `items` in its source");
	if (!l->metadata && !l->job->dry_run && !part_of(l))
		return ERR(VALIDATION_FAILED, "a planned save needs a tensor `metadata` in its source");
	enum err e = jtext_parse((struct str){ l->items, l->items_bytes }, JSON_REJECT_DUPLICATES, &l->doc);
	if (e)
		return e == ERR_NO_MEMORY ? e : ERR(VALIDATION_FAILED, "the list of items is no JSON");
	l->metadata_name = json_string_value(json_object_get(l->doc, "metadata_name"));
	if (!metadata_name_usable(l->metadata_name))
		return ERR(VALIDATION_FAILED, "the metadata's file is .metadata or __RANK.metadata");
	l->world_size = 1;
	return read_files(l);
}

/* ---- parts ---- */

static const struct rank_segment *part_rank(const struct planned_save *l, size_t i)
{
	const struct rank_segments *s = job_state_dict(l->job, &l->job->spec.parts.v[i]);

	return s && s->count ? &s->v[0] : NULL;
}

/* Items of other hosts have a source that nobody reads. */
static FALLIBLE enum err add_elsewhere(struct planned_save *l)
{
	uint32_t file;

	TRY(run_add_file(&l->run, RUN_FILE_SEGMENT, 0, STR("elsewhere"), 0, &l->part_file[l->part_count]));
	return sdict_add_file(l->target, STR("elsewhere"), 0, &file);
}

static FALLIBLE enum err add_parts(struct planned_save *l)
{
	l->part_count = (uint32_t)l->job->spec.parts.n;
	l->part_file = mem_zalloc((uint64_t)l->part_count + 1, sizeof *l->part_file);
	NEED(l->part_file, "no memory for %u segments", l->part_count);
	for (uint32_t i = 0; i < l->part_count; i++) {
		const struct rank_segment *rank = part_rank(l, i);
		if (!rank)
			return ERR(NOT_FOUND, "part %u of the source is no state dict", i);
		TRY(input_add_segment(&l->run, rank, 0, false, &l->part_file[i]));
		l->job->streams = l->job->streams || rank->filling;
		uint32_t file;
		char number[16];
		snprintf(number, sizeof number, "%u", i);
		TRY(sdict_add_file(l->target, str_of(number), 0, &file));
		must(file == i);
	}
	return l->local ? add_elsewhere(l) : OK;
}

/* ---- items ---- */

static bool read_number(const json_t *v, uint64_t end, uint64_t *out)
{
	if (!json_is_integer(v) || json_integer_value(v) < 0 || (uint64_t)json_integer_value(v) >= end)
		return false;
	*out = (uint64_t)json_integer_value(v);
	return true;
}

struct planned_item {
	uint64_t file, part, at, bytes;
	struct str fqn;
	enum dtype dtype;
	uint32_t ndim;
	int64_t dims[2 * NDIM_MAX];    /* offsets, all 0, then sizes */
	bool raw;
};

static FALLIBLE enum err read_shape(const json_t *one, size_t index, struct planned_item *it)
{
	const char *dtype = json_string_value(json_array_get(one, 5));
	const json_t *sizes = json_array_get(one, 6), *size;
	uint64_t numel, bytes;
	size_t d;

	it->raw = dtype == NULL;
	it->ndim = it->raw ? 1 : (uint32_t)json_array_size(sizes);
	if (it->ndim > NDIM_MAX)
		return wrong("item", index);
	memset(it->dims, 0, 2 * it->ndim * sizeof *it->dims);
	it->dtype = DT_UINT8;
	if (it->raw) {
		it->dims[1] = (int64_t)it->bytes;
		return OK;
	}
	TRY(err_at_fqn(dtype_parse(str_of(dtype), &it->dtype), it->fqn.p, it->fqn.n));
	json_array_foreach(sizes, d, size) {
		if (!json_is_integer(size) || json_integer_value(size) < 0)
			return wrong("item", index);
		it->dims[it->ndim + d] = json_integer_value(size);
	}
	TRY(box_numel(it->ndim, it->dims + it->ndim, &numel));
	TRY(num_mul(numel, dtype_bytes(it->dtype), &bytes));
	return bytes == it->bytes ? OK : wrong("item", index);
}

static FALLIBLE enum err read_item(const struct planned_save *l, const json_t *one, size_t index, struct planned_item *it)
{
	const char *fqn = json_string_value(json_array_get(one, 4));

	if (!read_number(json_array_get(one, 0), l->build.file_count, &it->file) ||
	    !read_number(json_array_get(one, 1), (uint64_t)l->part_count + (l->local != NULL), &it->part) ||
	    !read_number(json_array_get(one, 2), INT64_MAX, &it->at) ||
	    !read_number(json_array_get(one, 3), INT64_MAX, &it->bytes) || !fqn)
		return wrong("item", index);
	it->fqn = (struct str){ fqn, json_string_length(json_array_get(one, 4)) };
	if ((it->part == l->part_count) != (l->places[it->file] != NULL))
		return wrong("item", index);
	if (it->part == l->part_count) {
		it->at = 0;
		return read_shape(one, index, it);
	}
	uint64_t image = l->run.files.v[l->part_file[it->part]].bytes;
	if (it->at > image || it->bytes > image - it->at)
		return err_at_fqn(ERR(VALIDATION_FAILED, "item %zu goes beyond the end of its segment", index), it->fqn.p, it->fqn.n);
	return read_shape(one, index, it);
}

/* Each item is a tensor of its own here: chunks of one FQN, or items of one name from several ranks, are the client's matter. */
static FALLIBLE enum err add_item(struct planned_save *l, const struct planned_item *it, size_t index)
{
	char other[64];
	struct str name = it->fqn;
	uint32_t tensor;

	if (sdict_find(l->target, name) != SD_NONE) {
		snprintf(other, sizeof other, "\x01%zu", index);
		name = str_of(other);
	}
	TRY(sdict_add_tensor(l->target, name, it->dtype, it->ndim, it->dims + it->ndim, &tensor));
	l->target->tensors[tensor].fqn = name;
	TRY(arena_str(l->target->arena, it->fqn, &l->target->tensors[tensor].fqn));
	l->chunk_file[index] = (uint32_t)it->file;
	l->chunk_raw[index] = it->raw;
	return sdict_add_chunk(l->target, tensor, it->dims, l->ranks[it->file],
			       (struct sd_loc){ (uint32_t)it->part, 0, it->at, it->bytes });
}

static FALLIBLE enum err read_items(struct planned_save *l)
{
	const json_t *items = json_object_get(l->doc, "items"), *one;
	struct planned_item it;
	size_t n = json_array_size(items), i;

	l->chunk_file = mem_zalloc(n, sizeof *l->chunk_file);
	l->chunk_raw = mem_zalloc(n, sizeof *l->chunk_raw);
	NEED(l->chunk_file && l->chunk_raw, "no memory for %zu items", n);
	l->build.chunk_file = l->chunk_file;
	l->build.chunk_raw = l->chunk_raw;
	json_array_foreach(items, i, one) {
		TRY(read_item(l, one, i, &it));
		TRY(add_item(l, &it, i));
	}
	return OK;
}

/* ---- metadata ---- */

struct place {
	struct str file;
	uint64_t offset, length;
};

static int compare_places(const void *a, const void *b)
{
	const struct place *x = a, *y = b;
	int by_name = str_cmp(x->file, y->file);

	if (by_name)
		return by_name;
	return num_order(x->offset, y->offset) ?: num_order(x->length, y->length);
}

static FALLIBLE enum err check_place(const struct place *all, uint64_t n, const struct sdict *sd, const struct sd_loc *loc, struct str fqn)
{
	struct place p = { sd->files[loc->file].name, loc->offset, UINT64_MAX };
	char name[ERR_FILE_MAX];
	uint64_t lo = 0, hi = n;

	while (lo < hi) { /* the last place that begins at the offset or before */
		uint64_t mid = lo + (hi - lo) / 2;
		if (compare_places(&all[mid], &p) <= 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo && str_cmp(all[lo - 1].file, p.file) == 0 && loc->offset - all[lo - 1].offset <= all[lo - 1].length &&
	    loc->length <= all[lo - 1].length - (loc->offset - all[lo - 1].offset))
		return OK;
	snprintf(name, sizeof name, "%.*s", (int)num_min(p.file.n, sizeof name - 1), p.file.p);
	return err_at_fqn(err_at_file(ERR(FORMAT_METADATA, "the metadata names %ju bytes that were not written as an item",
					  (uintmax_t)loc->length), name, (int64_t)p.offset), fqn.p, fqn.n);
}

/* Metadata with objects that only its owner's Python knows cannot be read here; that is noted. */
static FALLIBLE enum err read_metadata(struct planned_save *l)
{
	struct content_items *c = &l->contents;

	l->job->result = json_object();
	if (!l->metadata || part_of(l)) {
		c->unknown = "other hosts write a part";
		return OK;
	}
	enum err e = dcp_meta_read(l->metadata, l->metadata_bytes, &l->stored);
	if (e == ERR_NO_MEMORY)
		return e;
	json_object_set_new(l->job->result, "metadata_checked", json_boolean(e == OK));
	err_clear();
	if (e)
		c->unknown = "only its owner's Python can read the metadata";
	else if (strcmp(l->metadata_name, DCP_METADATA) != 0)
		c->unknown = "each rank has metadata of its own";
	else
		c->sd = l->stored;
	return OK;
}

/* When all is written, before anything can be seen: what the metadata points at is there. */
static enum err check_metadata(void *user, const struct run *run, const struct build_place *places)
{
	struct planned_save *l = user;
	uint64_t n = l->target->chunk_count;
	CLEANUP(mem_free_ptr) struct place *all = mem_zalloc(n, sizeof *all);
	const struct sdict *sd = l->stored;

	NEED(all, "no memory for %ju places", (uintmax_t)n);
	if (!sd)
		return OK;
	json_object_set_new(l->job->result, "tensors", json_integer((json_int_t)sd->tensor_count));
	json_object_set_new(l->job->result, "values", json_integer((json_int_t)sd->value_count));
	for (uint64_t i = 0; i < n; i++)
		all[i] = (struct place){ run_file_name(run, &run->files[places[i].file]), places[i].offset, places[i].length };
	qsort(all, n, sizeof *all, compare_places);
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		TRY(check_place(all, n, sd, &sd->chunks[i].loc, sd->tensors[sd->chunks[i].tensor].fqn));
	for (uint64_t i = 0; i < sd->value_count; i++)
		TRY(check_place(all, n, sd, &sd->values[i].loc, sd->values[i].fqn));
	return OK;
}

/* ---- the job ---- */

/* Every place once, with its files. */
static enum err publish_parts(const struct write_store *store, struct write *w)
{
	struct planned_save *l = store->user;
	struct run *run = w->run;
	CLEANUP(mem_free_ptr) uint32_t *files = mem_alloc(l->build.file_count * sizeof *files);
	CLEANUP(mem_free_ptr) uint32_t *targets = mem_alloc(l->build.file_count * sizeof *targets);
	uint32_t n = 0;

	NEED(files && targets, "no memory for %u files", l->build.file_count);
	for (uint32_t i = 0; i < run->files_n; i++)
		if (run->files[i].kind == RUN_FILE_TARGET && n < l->build.file_count)
			targets[n++] = i;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t count = 0;
		bool before = !l->places[i];
		for (uint32_t k = 0; k < i && !before; k++)
			before = l->places[k] && strcmp(l->places[k], l->places[i]) == 0;
		for (uint32_t k = i; k < n && !before; k++)
			if (l->places[k] && strcmp(l->places[k], l->places[i]) == 0)
				files[count++] = targets[k];
		if (count)
			TRY(hosts_part_take(w, l->places[i], files, count));
	}
	return write_publish(w);
}

/* The places, each once: what hosts have in memory of this save, they know by these. */
static FALLIBLE enum err list_ids(struct planned_save *l, struct strs *out)
{
	TRY(arena_alloc(l->arena, l->build.file_count + 1, sizeof *out->v, &out->v));
	for (uint32_t i = 0; i < l->build.file_count; i++) {
		bool before = !l->places[i];
		for (size_t k = 0; k < out->n && !before; k++)
			before = str_is(out->v[k], l->places[i]);
		if (!before)
			out->v[out->n++] = str_of(l->places[i]);
	}
	return OK;
}

static FALLIBLE enum err write_planned(struct planned_save *l)
{
	struct load_plan pieces;
	uint32_t first;

	TRY(build_sources(&l->run, l->target, RUN_SRC_PLAIN, l->part_file, NULL, &first));
	TRY(target_identity(l->target->chunk_count, l->arena, &pieces));
	TRY(read_metadata(l));
	struct write_spec w = { .build = &l->run, .target = l->target, .pieces = &pieces, .first_src = first,
				.world_size = l->world_size, .format = FORMAT_DCP, .after_run = check_metadata, .user = l,
				.given = &l->build, .metadata = { l->metadata, l->metadata_bytes },
				.metadata_name = l->metadata_name, .items = &l->contents };
	TRY(list_ids(l, &w.hosts));
	struct write_store store = part_of(l) ? hosts_part_store(part_of(l)) : (struct write_store){
		.stage = write_alone.stage, .publish = publish_parts, .is_shared = true, .user = l };

	store.local = l->local;
	w.store = part_of(l) || l->local ? &store : NULL;
	return write_checkpoint(l->job, &w);
}

static FALLIBLE enum err do_save(struct planned_save *l)
{
	TRY(job_state(l->job, "planning", "metadata", NULL, 0));
	TRY(input_open(l->job, &l->job->spec.source, &l->source));
	TRY(read_list(l));
	TRY(sdict_new(UINT64_MAX, &l->target));
	TRY(add_parts(l));
	TRY(read_items(l));
	l->arena = arena_new(UINT64_MAX);
	NEED(l->arena, "no memory for a plan");
	return write_planned(l);
}

enum err planned_save_job(struct job *j)
{
	struct planned_save l = { .job = j };

	enum err e = do_save(&l);
	for (uint32_t i = 0; e && !j->dry_run && l.local && i < l.build.file_count; i++)
		if (l.places[i])
			hosts_part_drop(j, l.places[i]);
	run_build_free(&l.run);
	json_decref(l.doc);
	mem_free(l.items);
	mem_free(l.metadata);
	mem_free(l.names);
	mem_free(l.ranks);
	mem_free(l.exact);
	mem_free(l.places);
	mem_free(l.local);
	mem_free(l.chunk_file);
	mem_free(l.chunk_raw);
	mem_free(l.part_file);
	mem_free(l.contents.dsts);
	sdict_free(l.stored);
	sdict_free(l.target);
	arena_free(l.arena);
	input_close(&l.source);
	return e;
}
