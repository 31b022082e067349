/* hf_index.c: see hf_index.h. */
#include "format/hf_index.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/jscan.h"

enum { FILE_NAME_MAX = 255 };

/* Adds a file that the index names for the first time. Its size bounds how many tensors the index may say it has, so that a long index of
 * few or missing files ends early. */
static FALLIBLE enum err add_file(struct hf_index *ix, struct str name, uint32_t *at_out)
{
	uint32_t at = (uint32_t)ix->files.n;
	struct hf_file *file;
	uint64_t bytes;

	TRY(vec_push(&ix->files, &file));
	TRY(arena_str(ix->arena, name, &file->name));
	TRY(ix->s->bytes_of(ix->s->user, file->name.p, &bytes));
	file->room = num_min(bytes, ix->limits->head_max) / ix->limits->entry_min;
	*at_out = at;
	return map_put(&ix->by_file, file->name, at);
}

static FALLIBLE enum err add_home(struct hf_index *ix, const struct jscan *js, struct str fqn, struct str file)
{
	uint32_t at = map_get(&ix->by_file, file);
	struct hf_home *home;

	if (file.n == 0 || file.n > FILE_NAME_MAX || memchr(file.p, '/', file.n) || memchr(file.p, '\0', file.n) || file.p[0] == '.')
		return jscan_bad(js, "a name that no file of the directory has");
	if (map_get(&ix->by_fqn, fqn) != MAP_NONE)
		return err_at_fqn(jscan_bad(js, "a tensor that is named twice"), fqn.p, fqn.n);
	if (at == MAP_NONE)
		TRY(add_file(ix, file, &at));
	if (ix->files.v[at].room-- == 0)
		return err_at_fqn(err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the index names more tensors than the file has room for"),
					      ix->files.v[at].name.p, -1), fqn.p, fqn.n);
	TRY(map_put(&ix->by_fqn, fqn, (uint32_t)ix->homes.n));
	TRY(vec_push(&ix->homes, &home));
	*home = (struct hf_home){ fqn, at, false };
	return OK;
}

static FALLIBLE enum err read_weight_map(struct hf_index *ix, struct jscan *js)
{
	struct jscan_token t;
	struct str fqn, file;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			return OK;
		TRY(jscan_str(js, &t, ix->arena, &fqn));
		TRY(jscan_expect(js, JSCAN_STRING, &t));
		TRY(jscan_str(js, &t, ix->arena, &file));
		TRY(add_home(ix, js, fqn, file));
	}
}

/* Reads the member "metadata", whose JSON object is open. */
static FALLIBLE enum err read_metadata(struct hf_index *ix, struct jscan *js)
{
	struct jscan_token t;
	struct str skipped;

	JSCAN_EACH(js, &t) {
		ix->is_delta = ix->is_delta || str_is(t.raw, "delta_encoding");
		TRY(jscan_next(js, &t));
		TRY(jscan_skip(js, &t, &skipped));
	}
	return OK;
}

static FALLIBLE enum err parse_index(struct hf_index *ix, struct str text)
{
	struct jscan js = jscan_of(text, ix->limits->bad);
	struct jscan_token t;
	struct str key, skipped;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	for (;;) {
		TRY(jscan_next(&js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			break;
		TRY(jscan_str(&js, &t, ix->arena, &key));
		if (str_is(key, "weight_map")) {
			if (ix->there)
				return jscan_bad(&js, "a second weight_map");
			ix->there = true;
			TRY(read_weight_map(ix, &js));
			continue;
		}
		TRY(jscan_next(&js, &t));
		if (str_is(key, "metadata") && t.kind == JSCAN_OBJECT)
			TRY(read_metadata(ix, &js));
		else
			TRY(jscan_skip(&js, &t, &skipped));
	}
	TRY(jscan_expect(&js, JSCAN_END, &t));
	return ix->there ? OK : jscan_bad(&js, "an index without weight_map");
}

/* Each tensor that the index names lies in the file that it names. */
static FALLIBLE enum err check(const struct hf_index *ix)
{
	each(h, ix->homes.v, ix->homes.n) {
		if (!h->found)
			return err_at_fqn(err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the file lacks a tensor that the index says it has"),
						      ix->files.v[h->file].name.p, -1), h->fqn.p, h->fqn.n);
	}
	return OK;
}

bool hf_index_takes(struct hf_index *ix, struct str fqn, struct str file)
{
	uint32_t at = map_get(&ix->by_fqn, fqn);

	if (at == MAP_NONE)
		return true;
	if (str_cmp(ix->files.v[ix->homes.v[at].file].name, file) != 0)
		return false;
	ix->homes.v[at].found = true;
	return true;
}

static FALLIBLE enum err open_one(struct hf_index *ix, hf_open_file *open_file, const char *name)
{
	uint32_t file;

	TRY(sdict_add_file(ix->sd, str_of(name), 0, &file));
	return err_at_file(open_file(ix, name, file), name, -1);
}

static FALLIBLE enum err open_files(struct hf_index *ix, hf_open_file *open_file)
{
	for (uint64_t i = 0; i < ix->files.n; i++)
		TRY(open_one(ix, open_file, ix->files.v[i].name.p));
	for (uint64_t i = 0; i < ix->s->payload_count && !ix->there; i++)
		TRY(open_one(ix, open_file, ix->s->payload[i]));
	return OK;
}

static FALLIBLE enum err read_text(struct hf_index *ix)
{
	uint64_t n = 0;

	if (ix->s->metadata_count > 1) {
		err_record(ix->limits->bad, 0, ERR_PLACE, "%ju indexes, one of them '%s'", (uintmax_t)ix->s->metadata_count,
			   ix->s->metadata[0]);
		return ix->limits->bad;
	}
	if (ix->s->metadata_count == 0)
		return OK;
	enum err e = ix->s->read_all(ix->s->user, ix->s->metadata[0], &ix->text, &n);
	e = e ?: parse_index(ix, (struct str){ ix->text, n });
	if (!e && ix->is_delta != ix->limits->is_delta) {
		err_record(ix->limits->bad, 0, ERR_PLACE, "the index of a delta begins with its metadata");
		e = ix->limits->bad;
	}
	return err_at_file(e, ix->s->metadata[0], -1);
}

enum err hf_index_open(const struct format_source *s, const struct hf_index_limits *limits, hf_open_file *open_file,
		       struct arena *scratch, struct sdict **out)
{
	struct hf_index ix = { .s = s, .limits = limits, .arena = scratch };

	enum err e = read_text(&ix);
	e = e ?: sdict_new(UINT64_MAX, out);
	ix.sd = *out;
	e = e ?: open_files(&ix, open_file);
	e = e ?: check(&ix);
	map_free(&ix.by_file);
	map_free(&ix.by_fqn);
	vec_free(&ix.files);
	vec_free(&ix.homes);
	mem_free(ix.text);
	return e;
}
