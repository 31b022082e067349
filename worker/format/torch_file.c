/* torch_file.c: see torch_file.h. The walk goes over a graph that may be shared and cyclic: depth and steps are bounded, the latter by the
 * size of the pickle. Storages are found by a map from key to record, since a file may have a million of either. */
#include "format/torch_file.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/reader.h"

enum { TAR_MAGIC_AT = 257, NAME_FIRST_MAX = 256, STEPS_FREE = 1 << 16, VALUE_MAX = 1 << 30, STREAM_FIRST = 1 << 20,
       STREAM_GROWTH = 16 };

struct walk {
	struct torch_file *f;
	const struct pickle *pk;
	struct buf fqn;
	struct sd_path_part parts[PICKLE_DEPTH_MAX];
	uint32_t depth;
	uint64_t steps_left;
};

/* ------------------------------------------------------------------------------------------------------- recognise */

static bool is_tar(const unsigned char *p, size_t n)
{
	return n >= TAR_MAGIC_AT + 5 && memcmp(p + TAR_MAGIC_AT, "ustar", 5) == 0;
}

/* torch.save writes NAME/data.pkl first. */
bool torch_file_is(const void *first, size_t n)
{
	const unsigned char *p = first;

	if (item_is_stream(p, n))
		return true;
	if (n < 30 || memcmp(p, "PK\3\4", 4) != 0)
		return false;
	size_t name = (size_t)(p[26] | p[27] << 8);
	return name <= NAME_FIRST_MAX && 30 + name <= n && str_ends((struct str){ (const char *)p + 30, name }, "/data.pkl");
}

static FALLIBLE enum err check_container(const struct item_source *src)
{
	unsigned char first[TORCH_FILE_FIRST];
	size_t n = (size_t)num_min(src->length, sizeof first);

	TRY(source_read(src, 0, first, n));
	if (is_tar(first, n))
		return ERR(FORMAT_UNSUPPORTED, "a tar archive, as torch.save wrote before version 0.1.10; save it with a newer PyTorch");
	return OK;
}

/* ----------------------------------------------------------------------------------------------------------- the walk */

static bool is_mapping(const struct pickle *pk, pnode n)
{
	enum pickle_kind kind = pickle_kind(pk, n);

	return kind == PK_DICT || kind == PK_ORDERED_DICT || pickle_is_call(pk, n, "collections", "defaultdict");
}

static FALLIBLE enum err step(struct walk *w)
{
	if (w->steps_left-- == 0)
		return ERR(LIMIT_EXCEEDED, "the containers share so many parts that they describe more than the file can hold");
	return OK;
}

/* Does a list hold a tensor, a dict or such a list? */
static FALLIBLE enum err is_walked(struct walk *w, pnode list, uint32_t depth, bool *out)
{
	struct pickle_iter it = pickle_iter(w->pk, list);
	pnode item;

	*out = false;
	if (depth == PICKLE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "containers are nested more than %d deep", PICKLE_DEPTH_MAX);
	while (!*out && pickle_next(w->pk, &it, &item)) {
		TRY(step(w));
		if (pickle_kind(w->pk, item) == PK_LIST)
			TRY(is_walked(w, item, depth + 1, out));
		else
			*out = is_mapping(w->pk, item) || item_is_tensor(w->pk, item);
	}
	return OK;
}

/* Flattening makes text of a dict's key; of an int, the path keeps that it was one. */
static FALLIBLE enum err key_part(struct walk *w, pnode key, struct sd_path_part *part)
{
	const struct pickle *pk = w->pk;
	char text[32], name[64];
	int64_t i;

	*part = (struct sd_path_part){ .key = pickle_str(pk, key) };
	if (pickle_kind(pk, key) == PK_STR)
		return OK;
	if (pickle_int(pk, key, &i)) {
		snprintf(text, sizeof text, "%jd", (intmax_t)i);
		part->index = SD_PATH_INT_KEY;
	} else if (pickle_kind(pk, key) == PK_BOOL) {
		snprintf(text, sizeof text, "%s", pickle_is_true(pk, key) ? "True" : "False");
	} else if (pickle_kind(pk, key) == PK_NONE) {
		snprintf(text, sizeof text, "None");
	} else {
		return ERR(FORMAT_UNSUPPORTED, "a dict with a key of class %s: keys are strings or ints",
			   pickle_class_name(pk, key, name, sizeof name));
	}
	return arena_str(w->f->arena, str_of(text), &part->key);
}

static FALLIBLE enum err visit(struct walk *w, pnode n);

/* Goes one level down: to the value of a key, or to position `index` of a list. */
static FALLIBLE enum err visit_part(struct walk *w, struct sd_path_part part, pnode value)
{
	size_t len = w->fqn.len;

	if (w->depth == PICKLE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "containers are nested more than %d deep", PICKLE_DEPTH_MAX);
	if (w->depth)
		buf_putc(&w->fqn, '.');
	if (part.key.p)
		buf_put(&w->fqn, part.key.p, part.key.n);
	else
		buf_printf(&w->fqn, "%jd", (intmax_t)part.index);
	TRY(buf_status(&w->fqn));
	w->parts[w->depth++] = part;
	TRY(visit(w, value));
	w->depth--;
	w->fqn.len = len;
	return OK;
}

static FALLIBLE enum err visit_dict(struct walk *w, pnode dict)
{
	struct pickle_iter it = pickle_iter(w->pk, dict);
	struct sd_path_part part;
	pnode key, value;

	while (pickle_next(w->pk, &it, &key) && pickle_next(w->pk, &it, &value)) {
		TRY(key_part(w, key, &part));
		TRY(visit_part(w, part, value));
	}
	return OK;
}

static FALLIBLE enum err visit_list(struct walk *w, pnode list)
{
	struct pickle_iter it = pickle_iter(w->pk, list);
	struct sd_path_part part = { .index = 0 };
	pnode item;

	for (; pickle_next(w->pk, &it, &item); part.index++)
		TRY(visit_part(w, part, item));
	return OK;
}

static FALLIBLE enum err add_leaf(struct walk *w, pnode n, struct torch_leaf **out)
{
	struct sd_path_part *parts;
	struct torch_leaf *leaf;

	TRY(vec_push(&w->f->leaves, &leaf));
	TRY(arena_alloc(w->f->arena, w->depth + 1, sizeof *parts, &parts));
	memcpy(parts, w->parts, w->depth * sizeof *parts);
	leaf->path = (struct sd_path){ parts, w->depth };
	leaf->node = n;
	*out = leaf;
	return arena_str(w->f->arena, (struct str){ w->fqn.len ? (char *)w->fqn.p : "", w->fqn.len }, &leaf->fqn);
}

/* Views of one storage agree on what it is. */
enum err torch_file_storage(struct torch_file *f, const struct item_storage *s, uint32_t *index_out)
{
	uint32_t next = (uint32_t)f->storages.n;
	struct torch_storage *at;

	TRY(map_intern(&f->by_key, s->key, next, index_out));
	if (*index_out != next) {
		at = &f->storages.v[*index_out];
		if (at->says.bytes != s->bytes || dtype_bytes(at->says.dtype) != dtype_bytes(s->dtype))
			return ERR(FORMAT_ITEM, "storage '%.*s' has %ju bytes for one tensor and %ju for another",
				   (int)num_min(s->key.n, 64), s->key.p, (uintmax_t)at->says.bytes, (uintmax_t)s->bytes);
		return OK;
	}
	TRY(vec_push(&f->storages, &at));
	at->says = *s;
	return OK;
}

/* Notes the storages of a tensor that is not read: where a stream's storages lie follows from the sizes of all of them. */
static FALLIBLE enum err note_storages(struct walk *w, pnode n, uint32_t depth)
{
	struct pickle_iter it = pickle_iter(w->pk, n);
	enum pickle_kind kind = pickle_kind(w->pk, n);
	struct item_storage s;
	uint32_t index;
	pnode item;

	TRY(step(w));
	if (depth == PICKLE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "containers are nested more than %d deep", PICKLE_DEPTH_MAX);
	if (kind == PK_OBJECT)
		return note_storages(w, pickle_args(w->pk, n), depth + 1);
	if (kind == PK_PERSID) {
		TRY(item_storage_of(w->pk, n, true, &s));
		return torch_file_storage(w->f, &s, &index);
	}
	while ((kind == PK_TUPLE || kind == PK_LIST) && pickle_next(w->pk, &it, &item))
		TRY(note_storages(w, item, depth + 1));
	return OK;
}

/* Keeps the reason why a tensor cannot be read: a job that leaves it out reads the others. */
static FALLIBLE enum err leave_unread(struct walk *w, struct torch_leaf *leaf, pnode n)
{
	leaf->is_tensor = false;
	TRY(arena_str(w->f->arena, str_of(err_last()->text), &leaf->unread));
	err_clear();
	return w->f->item.zip ? OK : note_storages(w, n, 0);
}

static FALLIBLE enum err add_tensor(struct walk *w, pnode n)
{
	struct torch_leaf *leaf;
	struct item_storage s;

	TRY(add_leaf(w, n, &leaf));
	leaf->is_tensor = true;
	leaf->is_sharded = torch_shards_is(w->pk, n);
	if (leaf->is_sharded)
		return err_at_fqn(torch_shards_read(w->f, leaf), leaf->fqn.p, leaf->fqn.n);
	enum err e = item_tensor_of(w->pk, n, &leaf->tensor, &s);
	e = e == ERR_FORMAT_UNSUPPORTED ? leave_unread(w, leaf, n) : e ?: torch_file_storage(w->f, &s, &leaf->storage);
	return err_at_fqn(e, leaf->fqn.p, leaf->fqn.n);
}

static FALLIBLE enum err visit(struct walk *w, pnode n)
{
	struct torch_leaf *leaf;
	bool walked = false;

	TRY(step(w));
	if (is_mapping(w->pk, n))
		return visit_dict(w, n);
	if (pickle_kind(w->pk, n) == PK_LIST)
		TRY(is_walked(w, n, w->depth, &walked));
	if (walked)
		return visit_list(w, n);
	return item_is_tensor(w->pk, n) ? add_tensor(w, n) : add_leaf(w, n, &leaf);
}

/* A file may hold one tensor, or a list of them, by itself. */
static FALLIBLE enum err visit_root(struct walk *w, pnode root)
{
	struct sd_path_part part = { .key = STR("tensor") };
	char name[128];

	if (is_mapping(w->pk, root))
		return visit_dict(w, root);
	if (pickle_kind(w->pk, root) == PK_LIST)
		return visit_list(w, root);
	if (item_is_tensor(w->pk, root))
		return visit_part(w, part, root);
	return ERR(FORMAT_UNSUPPORTED, "the file holds a %s: only dicts, lists and tensors are read, and no class is loaded",
		   pickle_class_name(w->pk, root, name, sizeof name));
}

/* ------------------------------------------------------------------------------------------------------- storages */

/* The record data/KEY of each storage. */
static FALLIBLE enum err find_records(struct torch_file *f)
{
	const struct zip *z = f->item.zip;
	struct item_tensor t = { 0 };

	each(r, z->records, z->count) {
		struct str tail = { r->name.p + z->prefix.n, r->name.n - z->prefix.n };
		if (!str_starts(tail, "data/"))
			continue;
		uint32_t at = map_get(&f->by_key, (struct str){ tail.p + 5, tail.n - 5 });
		if (at == MAP_NONE)
			continue;
		struct torch_storage *s = &f->storages.v[at];
		if (s->found)
			return ERR(FORMAT_ZIP, "record '%.*s' is there twice", (int)num_min(r->name.n, 80), r->name.p);
		if (r->deflated)
			return ERR(FORMAT_UNSUPPORTED, "record '%.*s' is compressed, which torch.save does not do and PyTorch cannot map",
				   (int)num_min(r->name.n, 80), r->name.p);
		TRY(item_take_record(z, r, &s->says, &t));
		s->found = true;
		s->offset = t.payload_off;
		s->crc32 = t.crc32;
		s->crc_known = t.crc_known;
	}
	return OK;
}

static FALLIBLE enum err find_in_stream(struct torch_file *f, const struct item_source *src, struct str key, uint64_t *off)
{
	uint32_t at = map_get(&f->by_key, key);
	unsigned char count[8];
	uint64_t n;

	if (at == MAP_NONE || f->storages.v[at].found)
		return ERR(FORMAT_ITEM, "storage '%.*s' %s", (int)num_min(key.n, 64), key.p,
			   at == MAP_NONE ? "is of no tensor" : "is listed twice");
	struct torch_storage *s = &f->storages.v[at];
	TRY(source_read(src, *off, count, sizeof count));
	struct reader r = reader_of(count, sizeof count);
	TRY(num_mul(reader_u64(&r), dtype_bytes(s->says.dtype), &n));
	s->offset = *off + sizeof count;
	if (n != s->says.bytes || !num_inside(s->offset, n, src->length))
		return err_at_file(ERR(FORMAT_ITEM, "storage '%.*s' has %ju bytes, its tensors say %ju, and the file has %ju from there on",
				       (int)num_min(key.n, 64), key.p, (uintmax_t)n, (uintmax_t)s->says.bytes,
				       (uintmax_t)(src->length - s->offset)), "", (int64_t)*off);
	s->found = true;
	*off = s->offset + n;
	return OK;
}

/* A stream names its storages in a list of keys, and has them behind it in that order. */
static FALLIBLE enum err find_all_in_stream(struct torch_file *f, const struct item_source *src)
{
	struct pickle *keys CLEANUP(pickle_free_ptr) = NULL;
	uint64_t off = f->item.data_off;
	pnode key;

	TRY(pickle_parse(f->item.pickle.p + off, f->item.pickle.len - off, NULL, &keys));
	if (pickle_kind(keys, pickle_root(keys)) != PK_LIST)
		return ERR(FORMAT_ITEM, "the keys of the storages are no list");
	off += pickle_consumed(keys);
	struct pickle_iter it = pickle_iter(keys, pickle_root(keys));
	while (pickle_next(keys, &it, &key))
		TRY(find_in_stream(f, src, pickle_str(keys, key), &off));
	return OK;
}

static FALLIBLE enum err find_storages(struct torch_file *f, const struct item_source *src)
{
	TRY(f->item.zip ? find_records(f) : find_all_in_stream(f, src));
	each(s, f->storages.v, f->storages.n) {
		if (!s->found)
			return ERR(FORMAT_ITEM, "the file has no storage '%.*s'", (int)num_min(s->says.key.n, 64), s->says.key.p);
	}
	return OK;
}

/* ----------------------------------------------------------------------------------------------------------- the file */

void torch_file_close(struct torch_file *f)
{
	item_close(&f->item);
	arena_free(f->arena);
	vec_free(&f->leaves);
	vec_free(&f->shards);
	vec_free(&f->storages);
	map_free(&f->by_key);
	*f = (struct torch_file){ 0 };
}

static FALLIBLE enum err read_leaves(struct torch_file *f)
{
	CLEANUP(mem_free_ptr) struct walk *w = mem_zalloc(1, sizeof *w);

	NEED(w, "no memory to walk a state dict");
	w->f = f;
	w->pk = f->item.pk;
	w->fqn = BUF_INIT(SD_FQN_MAX);
	w->steps_left = STEPS_FREE + f->item.pickle.len;
	enum err e = visit_root(w, pickle_root(w->pk));
	if (e == ERR_LIMIT_EXCEEDED || e == ERR_FORMAT_UNSUPPORTED)
		e = err_at_fqn(e, w->fqn.len ? (char *)w->fqn.p : "", w->fqn.len);
	buf_free(&w->fqn);
	return e;
}

static FALLIBLE enum err open_within(const struct item_source *src, uint64_t pickle_max, struct torch_file *f)
{
	f->item.pickle = BUF_INIT(0);
	TRY(item_open(src, pickle_max, &f->item));
	if (f->item.big_endian)
		return ERR(FORMAT_UNSUPPORTED, "the file is big-endian");
	f->arena = arena_new(UINT64_MAX);
	NEED(f->arena, "no memory for a state dict");
	TRY(read_leaves(f));
	return find_storages(f, src);
}

/* The pickles of a stream do not say how long they are: as much as the first try takes is enough for nearly all. */
static FALLIBLE enum err open_source(const struct item_source *src, struct torch_file *out)
{
	unsigned char first[TORCH_FILE_FIRST];
	size_t n = (size_t)num_min(src->length, sizeof first);
	enum err e;

	*out = (struct torch_file){ 0 };
	TRY(check_container(src));
	TRY(source_read(src, 0, first, n));
	bool stream = item_is_stream(first, n);
	for (uint64_t max = stream ? STREAM_FIRST : ITEM_VALUE_PICKLE_MAX;; max *= STREAM_GROWTH) {
		e = open_within(src, max, out);
		if (e)
			torch_file_close(out);
		if (e != ERR_FORMAT_PICKLE || max >= num_min(src->length, ITEM_VALUE_PICKLE_MAX))
			return e;
		err_clear();
	}
}

enum err torch_file_open(const struct format_source *s, const char *name, struct torch_file *out)
{
	struct format_part part;
	struct item_source src;

	*out = (struct torch_file){ 0 };
	enum err e = format_part_of(s, name, &part, &src);
	e = e ?: open_source(&src, out);
	return err_at_file(e, name, -1);
}

/* ----------------------------------------------------------------------------------------------------------- leaves */

struct str torch_leaf_tail(const struct torch_leaf *leaf, uint32_t skip)
{
	size_t at = 0;

	each(part, leaf->path.parts, skip)
		at += (part->key.p ? part->key.n : (size_t)snprintf(NULL, 0, "%jd", (intmax_t)part->index)) + 1;
	return at < leaf->fqn.n ? (struct str){ leaf->fqn.p + at, leaf->fqn.n - at } : STR("");
}

enum err torch_leaf_move(struct arena *a, struct torch_leaf *leaf, uint32_t skip, struct str below)
{
	struct str tail = torch_leaf_tail(leaf, skip);
	uint32_t count = leaf->path.count - skip, more = below.n > 0;
	struct sd_path_part *parts;
	char *fqn;

	TRY(arena_alloc(a, below.n + more + tail.n + 1, 1, &fqn));
	TRY(arena_alloc(a, count + more, sizeof *parts, &parts));
	memcpy(fqn, below.p, below.n);
	memcpy(fqn + below.n, ".", more);
	memcpy(fqn + below.n + more, tail.p, tail.n);
	memcpy(parts + more, leaf->path.parts + skip, count * sizeof *parts);
	if (more)
		TRY(arena_str(a, below, &parts[0].key));
	leaf->fqn = (struct str){ fqn, below.n + more + tail.n };
	leaf->path = (struct sd_path){ parts, count + more };
	return OK;
}

/* As a torch.save archive of its own. */
static FALLIBLE enum err put_value(const struct torch_file *f, const struct torch_leaf *leaf, struct buf *b)
{
	CLEANUP(buf_free) struct buf pickle = BUF_INIT(VALUE_MAX);

	enum err e = pickle_put(f->item.pk, leaf->node, &pickle);
	e = e ?: item_put_value_pickle(b, pickle.p, pickle.len);
	return err_at_fqn(e, leaf->fqn.p, leaf->fqn.n);
}

/* ----------------------------------------------------------------------------------------------------------- as an sdict */

enum err torch_file_add_value(const struct torch_file *f, const struct torch_leaf *leaf, struct sdict *sd, uint32_t rank)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(VALUE_MAX);
	uint32_t index;

	if (!leaf->unread.n)
		TRY(put_value(f, leaf, &b));
	TRY(sdict_add_value(sd, leaf->fqn, rank, (struct sd_loc){ .file = SD_NO_FILE }, &index));
	sd->values[index].kind = SD_VALUE_INLINE;
	TRY(arena_str(sd->arena, leaf->unread, &sd->values[index].unread));
	TRY(arena_str(sd->arena, (struct str){ (char *)b.p, b.len }, &sd->values[index].bytes));
	return sdict_copy_path(sd, leaf->path, &sd->values[index].path);
}

/* Cannot overflow: item_tensor_of saw the sum. */
uint64_t torch_file_span(uint32_t ndim, const int64_t *sizes, const int64_t *strides, enum dtype dtype)
{
	uint64_t last = 0;

	if (box_empty(ndim, sizes))
		return 0;
	for (uint32_t d = 0; d < ndim; d++)
		last += (uint64_t)(sizes[d] - 1) * (uint64_t)strides[d];
	return (last + 1) * dtype_bytes(dtype);
}

static bool is_view(const struct item_tensor *t)
{
	return (!t->c_order || t->conj || t->neg) && !box_empty(t->ndim, t->sizes);
}

/* Makes room for the views of all leaves behind those of the files before. */
static FALLIBLE enum err reserve_views(const struct torch_file *f, struct sdict *sd, struct sd_strided **first_out, uint32_t *index_out)
{
	uint64_t before = 0, more = 0;
	struct sd_strided *all;

	for (uint64_t i = 0; i < f->leaves.n; i++)
		more += f->leaves.v[i].is_tensor && is_view(&f->leaves.v[i].tensor);
	*first_out = NULL;
	*index_out = 0;
	if (more == 0)
		return OK;
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		before += sd_strided_of(sd, sd->chunks[i].loc) != NULL;
	TRY(arena_alloc(sd->arena, before + more, sizeof *all, &all));
	if (before)
		memcpy(all, sd->strided, before * sizeof *all);
	sd->strided = all;
	*first_out = all + before;
	*index_out = (uint32_t)before;
	return OK;
}

static FALLIBLE enum err set_view(struct arena *a, const struct item_tensor *t, struct sd_strided *view)
{
	int64_t *strides;

	TRY(arena_i64(a, t->ndim, &strides));
	memcpy(strides, t->strides, t->ndim * sizeof *strides);
	*view = (struct sd_strided){ .strides = strides, .conj = t->conj, .neg = t->neg };
	return OK;
}

static FALLIBLE enum err add_chunk(const struct torch_file *f, const struct torch_leaf *leaf, struct sdict *sd, struct sd_loc loc,
				   uint32_t rank)
{
	const struct item_tensor *t = &leaf->tensor;
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint32_t index;

	loc.offset = f->storages.v[leaf->storage].offset;
	loc.length = torch_file_span(t->ndim, t->sizes, t->strides, t->dtype);
	if (loc.length)
		loc.offset += t->storage_offset * dtype_bytes(t->dtype);
	memcpy(dims + t->ndim, t->sizes, t->ndim * sizeof *dims);
	TRY(sdict_add_tensor(sd, leaf->fqn, t->dtype, t->ndim, t->sizes, &index));
	TRY(sdict_add_chunk(sd, index, dims, rank, loc));
	sd->tensors[index].requires_grad = t->requires_grad;
	return sdict_copy_path(sd, leaf->path, &sd->tensors[index].path);
}

enum err torch_file_add_records(const struct torch_file *f, struct sdict *sd, uint32_t file)
{
	uint64_t n = sd->record_count, need = n + f->storages.n, cap;
	struct sd_record *all = sd->records;

	if (need > sd->record_cap) {
		cap = num_max(need, 2 * n);
		TRY(arena_alloc(sd->arena, cap, sizeof *all, &all));
		if (n)
			memcpy(all, sd->records, n * sizeof *all);
		sd->records = all;
		sd->record_cap = cap;
	}
	each(s, f->storages.v, f->storages.n) {
		if (s->crc_known)
			all[n++] = (struct sd_record){ file, s->crc32, s->offset, s->says.bytes };
	}
	if (n > sd->record_count)
		qsort(all + sd->record_count, n - sd->record_count, sizeof *all, sdict_record_order);
	sd->record_count = n;
	return OK;
}

static FALLIBLE enum err add_leaves(const struct torch_file *f, struct sdict *sd, uint32_t file, uint32_t rank)
{
	struct sd_strided *view;
	uint32_t index;

	TRY(reserve_views(f, sd, &view, &index));
	each(leaf, f->leaves.v, f->leaves.n) {
		struct sd_loc loc = { .file = file };
		enum err e = OK;
		if (leaf->is_sharded)
			return err_at_fqn(ERR(FORMAT_UNSUPPORTED, "one rank's part of a sharded tensor: name the folder of all ranks"),
					  leaf->fqn.p, leaf->fqn.n);
		if (leaf->is_tensor && is_view(&leaf->tensor)) {
			loc.transform = SD_STRIDED | index++;
			e = set_view(sd->arena, &leaf->tensor, view++);
		}
		e = e ?: (leaf->is_tensor ? add_chunk(f, leaf, sd, loc, rank) : torch_file_add_value(f, leaf, sd, rank));
		if (!e && leaf->unread.n)
			sd->values[sd->value_count - 1].loc.file = file; /* errors name it */
		if (e)
			return err_at_fqn(e, leaf->fqn.p, leaf->fqn.n);
	}
	return OK;
}

enum err torch_file_add(const struct torch_file *f, struct sdict *sd, uint32_t file, uint32_t rank)
{
	sd->has_paths = true;
	TRY(add_leaves(f, sd, file, rank));
	return torch_file_add_records(f, sd, file);
}
