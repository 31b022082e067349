/* hf_open.c: safetensors as a source: one file, or a directory of them, with or without the index that says which tensor lies in which
 * file.
 *
 * With an index only the files that it names are read, and of a tensor that several hold (tied weights) the one that the index names. */
#include <string.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "base/num.h"
#include "format/format.h"
#include "format/jscan.h"
#include "format/safetensors.h"

enum { FILE_NAME_MAX = 255 };

/* A tensor of the index, and the file that the index says it lies in. */
struct home {
	struct str fqn;
	uint32_t file;                 /* into `files` */
	bool found;
};

/* A file that the index names. */
struct named {
	struct str name;
	uint64_t room;                 /* how many more tensors its header can describe */
};

struct opening {
	const struct format_source *s;
	struct arena *arena;           /* of the index */
	struct sdict *sd;
	void *index;                   /* the text of the index; FQNs point into it */
	struct vec(struct named) files;
	struct vec(struct home) homes; /* one per tensor of the index */
	struct map by_file, by_fqn;
	bool indexed;
};

/* Adds a file that the index names for the first time. Its size bounds how many tensors the index may say it has, so that a long index of
 * few or missing files ends early. */
static FALLIBLE enum err add_file(struct opening *o, struct str name, uint32_t *at_out)
{
	uint32_t at = (uint32_t)o->files.n;
	struct named *file;
	uint64_t bytes;

	TRY(vec_push(&o->files, &file));
	TRY(arena_str(o->arena, name, &file->name));
	TRY(o->s->bytes_of(o->s->user, file->name.p, &bytes));
	file->room = num_min(bytes, SFT_HEADER_MAX) / SFT_ENTRY_MIN;
	*at_out = at;
	return map_put(&o->by_file, file->name, at);
}

static FALLIBLE enum err add_home(struct opening *o, const struct jscan *js, struct str fqn, struct str file)
{
	uint32_t at = map_get(&o->by_file, file);
	struct home *home;

	if (file.n == 0 || file.n > FILE_NAME_MAX || memchr(file.p, '/', file.n) || memchr(file.p, '\0', file.n) || file.p[0] == '.')
		return jscan_bad(js, "a name that no file of the directory has");
	if (map_get(&o->by_fqn, fqn) != MAP_NONE)
		return err_at_fqn(jscan_bad(js, "a tensor that is named twice"), fqn.p, fqn.n);
	if (at == MAP_NONE)
		TRY(add_file(o, file, &at));
	if (o->files.v[at].room-- == 0)
		return err_at_fqn(err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the index names more tensors than the file has room for"),
					      o->files.v[at].name.p, -1), fqn.p, fqn.n);
	TRY(map_put(&o->by_fqn, fqn, (uint32_t)o->homes.n));
	TRY(vec_push(&o->homes, &home));
	*home = (struct home){ fqn, at, false };
	return OK;
}

static FALLIBLE enum err read_weight_map(struct opening *o, struct jscan *js)
{
	struct jscan_token t;
	struct str fqn, file;

	TRY(jscan_expect(js, JSCAN_OBJECT, &t));
	for (;;) {
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			return OK;
		TRY(jscan_str(js, &t, o->arena, &fqn));
		TRY(jscan_expect(js, JSCAN_STRING, &t));
		TRY(jscan_str(js, &t, o->arena, &file));
		TRY(add_home(o, js, fqn, file));
	}
}

static FALLIBLE enum err parse_index(struct opening *o, struct str text)
{
	struct jscan js = jscan_of(text, ERR_FORMAT_SAFETENSORS);
	struct jscan_token t;
	struct str key, skipped;

	TRY(jscan_expect(&js, JSCAN_OBJECT, &t));
	for (;;) {
		TRY(jscan_next(&js, &t));
		if (t.kind == JSCAN_OBJECT_END)
			break;
		TRY(jscan_str(&js, &t, o->arena, &key));
		if (str_is(key, "weight_map")) {
			if (o->indexed)
				return jscan_bad(&js, "a second weight_map");
			o->indexed = true;
			TRY(read_weight_map(o, &js));
			continue;
		}
		TRY(jscan_next(&js, &t));
		TRY(jscan_skip(&js, &t, &skipped));
	}
	TRY(jscan_expect(&js, JSCAN_END, &t));
	return o->indexed ? OK : ERR(FORMAT_SAFETENSORS, "an index without weight_map");
}

/* Each tensor that the index names lies in the file that it names. */
static FALLIBLE enum err check_found(const struct opening *o)
{
	for (uint64_t i = 0; i < o->homes.n; i++) {
		const struct home *h = &o->homes.v[i];
		if (!h->found)
			return err_at_fqn(err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the file lacks a tensor that the index says it has"),
						      o->files.v[h->file].name.p, -1), h->fqn.p, h->fqn.n);
	}
	return OK;
}

static FALLIBLE enum err add_entry(struct opening *o, const struct sft *head, const struct sft_entry *it, uint32_t file)
{
	const struct sd_loc loc = { file, 0, head->data_off + it->begin, it->end - it->begin };
	struct str name = o->sd->files[file].name;
	uint32_t at = map_get(&o->by_fqn, it->name), tensor;
	int64_t dims[2 * NDIM_MAX] = { 0 };

	if (at != MAP_NONE && str_cmp(o->files.v[o->homes.v[at].file].name, name) != 0)
		return OK; /* the index names another file */
	if (at != MAP_NONE)
		o->homes.v[at].found = true;
	for (uint32_t i = 0; i < it->ndim; i++)
		dims[it->ndim + i] = it->shape[i];
	enum err e = sdict_add_tensor(o->sd, it->name, it->dtype, it->ndim, it->shape, &tensor);
	if (!e)
		e = sdict_add_chunk(o->sd, tensor, dims, 0, loc);
	return err_at_fqn(err_at_file(e, name.p, -1), it->name.p, it->name.n);
}

static FALLIBLE enum err read_header(struct opening *o, const char *name, uint32_t file)
{
	CLEANUP(arena_free_ptr) struct arena *arena = arena_new(UINT64_MAX);
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t file_bytes, n;
	struct sft head;

	if (!arena)
		return ERR(NO_MEMORY, "no memory for a header");
	TRY(o->s->bytes_of(o->s->user, name, &file_bytes));
	unsigned char first[8];
	if (file_bytes < sizeof first)
		return ERR(FORMAT_SAFETENSORS, "a file of %ju bytes is too short", (uintmax_t)file_bytes);
	TRY(o->s->read(o->s->user, name, first, sizeof first));
	TRY(sft_header_bytes(first, file_bytes, &n));
	TRY(o->s->read_head(o->s->user, name, sizeof first + n, &bytes));
	if (memcmp(bytes, first, sizeof first) != 0)
		return ERR(FORMAT_SAFETENSORS, "the header changes while it is read");
	TRY(sft_parse((struct str){ (char *)bytes + sizeof first, n }, file_bytes, arena, &head));
	for (uint64_t i = 0; i < head.entry_count; i++)
		TRY(add_entry(o, &head, &head.entries[i], file));
	return OK;
}

static FALLIBLE enum err open_file(struct opening *o, const char *name)
{
	uint32_t file;

	TRY(sdict_add_file(o->sd, str_of(name), 0, &file));
	return err_at_file(read_header(o, name, file), name, -1);
}

static FALLIBLE enum err read_index(struct opening *o)
{
	uint64_t n = 0;

	enum err e = o->s->read_all(o->s->user, o->s->metadata[0], &o->index, &n);
	if (!e)
		e = parse_index(o, (struct str){ o->index, n });
	return err_at_file(e, o->s->metadata[0], -1);
}

static FALLIBLE enum err open_all(struct opening *o)
{
	if (o->s->metadata_count > 1)
		return ERR(FORMAT_SAFETENSORS, "%ju indexes, one of them '%s'", (uintmax_t)o->s->metadata_count, o->s->metadata[0]);
	if (o->s->metadata_count)
		TRY(read_index(o));
	for (uint64_t i = 0; i < o->files.n; i++)
		TRY(open_file(o, o->files.v[i].name.p));
	for (uint64_t i = 0; i < o->s->payload_count && !o->indexed; i++)
		TRY(open_file(o, o->s->payload[i]));
	return check_found(o);
}

enum err format_open_hf(const struct format_source *s, struct sdict **out)
{
	struct opening o = { .s = s, .arena = arena_new(UINT64_MAX) };

	enum err e = o.arena ? sdict_new(UINT64_MAX, &o.sd) : ERR(NO_MEMORY, "no memory for an index");
	if (!e)
		e = open_all(&o);
	if (!e)
		*out = o.sd;
	else
		sdict_free(o.sd);
	map_free(&o.by_file);
	map_free(&o.by_fqn);
	vec_free(&o.files);
	vec_free(&o.homes);
	mem_free(o.index);
	arena_free(o.arena);
	return e;
}
