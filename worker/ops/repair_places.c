/* repair_places.c: from the damaged places that verify has listed to the items that they are in, file by file. */
#include "ops/repair_impl.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"

/* A damaged place as verify listed it. */
struct place {
	struct str file, fqn;
	int64_t rank;
	uint64_t offset, bytes;
	const char *detail;
	bool padding;                  /* no item's: zeros in a file of dcpd's */
};

static bool holds(struct sd_loc loc, uint32_t file, uint64_t offset)
{
	return loc.file == file && offset >= loc.offset && offset - loc.offset < num_max(loc.length, 1);
}

/* The item of the file that a place is in. */
static void find_item(struct repair_file *f, uint32_t file, const struct place *p)
{
	const struct sdict *sd = f->c->sd;
	const struct manifest *m = f->c->manifest;
	struct repair_item *it = &f->item;
	uint32_t mf = m ? map_get(&m->names, sd->files[file].name) : MAP_NONE;

	*it = (struct repair_item){ .kind = ITEM_NONE, .fqn = p->fqn, .rank = p->rank };
	for (uint64_t i = 0; i < sd->chunk_count && it->kind == ITEM_NONE; i++)
		if (holds(sd->chunks[i].loc, file, p->offset))
			*it = (struct repair_item){ ITEM_CHUNK, i, sd->chunks[i].loc.offset, sd->chunks[i].loc.length, NULL,
					     sd->tensors[sd->chunks[i].tensor].fqn, sd->chunks[i].rank };
	for (uint64_t i = 0; i < sd->value_count && it->kind == ITEM_NONE; i++)
		if (holds(sd->values[i].loc, file, p->offset))
			*it = (struct repair_item){ ITEM_VALUE, i, sd->values[i].loc.offset, sd->values[i].loc.length, NULL,
						    sd->values[i].fqn, sd->values[i].rank };
	if (it->kind != ITEM_NONE && m)
		it->known = manifest_find(m, sd->files[file].name, it->offset, it->length);
	for (uint64_t i = 0; mf != MAP_NONE && it->kind == ITEM_NONE && i < m->files.v[mf].item_count; i++) {
		const struct manifest_item *item = &m->items.v[m->files.v[mf].first_item + i];
		if (item->raw && p->offset >= item->offset && p->offset - item->offset < item->length)
			*it = (struct repair_item){ ITEM_INDEX, 0, item->offset, item->length, item, p->fqn, p->rank };
	}
}

static FALLIBLE enum err open_file(struct repair_file *f, uint32_t file)
{
	uint32_t mf = f->c->manifest ? map_get(&f->c->manifest->names, f->c->sd->files[file].name) : MAP_NONE;
	struct stat st;

	f->old = f->copy = STORE_NOTHING;
	enum err e = checkpoint_open_file(f->c, file, &f->old);
	if (e == ERR_NOT_FOUND)
		err_clear();
	else
		TRY(e);
	f->old_bytes = 0;
	if (!e) {
		TRY(store_stat(f->old, "", &st));
		f->old_bytes = (uint64_t)st.st_size;
	}
	f->bytes = mf == MAP_NONE ? f->old_bytes : f->c->manifest->files.v[mf].bytes;
	return OK;
}

static FALLIBLE enum err close_file(struct repair_file *f, enum err e)
{
	if (!e && f->copy.handle >= 0)
		e = f->copy.store->ops->finish(&f->copy, true, f->file);
	store_close(&f->copy);
	store_close(&f->old);
	return err_at_file(e, f->file, -1);
}

/* Bytes between items, and what is behind the last: as they are where the file is too short, for its copy begins as zeros. */
static FALLIBLE enum err restore_padding(struct repair_file *f, const struct place *p)
{
	uint64_t end = num_min(p->offset + num_min(p->bytes, UINT64_MAX - p->offset), num_min(f->old_bytes, f->bytes));
	CLEANUP(mem_free_ptr) void *zeros = mem_zalloc(1, REPAIR_PIECE);

	NEED(zeros, "no memory for zeros");
	TRY(repair_begin_copy(f));
	for (uint64_t at = p->offset; at < end; at += REPAIR_PIECE)
		TRY(repair_put(f, zeros, num_min(REPAIR_PIECE, end - at), at));
	repair_restored(f, p->offset, p->bytes, "items");
	return OK;
}

static FALLIBLE enum err restore_item(struct repair_file *f, uint32_t file, const struct place *p)
{
	if (f->item.kind == ITEM_NONE && p->padding)
		return restore_padding(f, p);
	if (f->item.kind == ITEM_NONE) {
		repair_unknown(f, p->offset, p->bytes, p->detail);
		return OK;
	}
	if (f->item.kind == ITEM_INDEX)
		return repair_index(f, file);
	if (!f->item.known && !format_holds(f->c->format, FORMAT_ARCHIVES)) {
		repair_unknown(f, p->offset, p->bytes, "nothing tells what its bytes were");
		return OK;
	}
	return f->item.known ? repair_known(f) : repair_archived(f);
}

/* Of a file that is too short: what is cut off is no item, and was not noted. */
static FALLIBLE enum err restore_end(struct repair_file *f, uint32_t file)
{
	const struct place end = { .rank = f->c->sd->files[file].rank, .offset = f->bytes - 1, .bytes = 1 };

	if (f->old_bytes >= f->bytes)
		return OK;
	find_item(f, file, &end);
	return f->item.kind == ITEM_INDEX ? repair_index(f, file) : OK;
}

/* The places of one file. */
static FALLIBLE enum err restore_file(struct repair_file *f, uint32_t file, const struct place *places, uint64_t count)
{
	uint64_t end = 0;
	enum err e = open_file(f, file);

	for (uint64_t i = 0; !e && i < count; i++) {
		if (i && places[i].offset < end) /* the item was restored as a whole */
			continue;
		find_item(f, file, &places[i]);
		end = f->item.kind == ITEM_NONE ? 0 : f->item.offset + f->item.length;
		e = restore_item(f, file, &places[i]);
	}
	e = e ?: restore_end(f, file);
	return close_file(f, e);
}

static int by_file(const void *a, const void *b)
{
	const struct place *x = a, *y = b;
	int order = str_cmp(x->file, y->file);

	return order ? order : x->offset < y->offset ? -1 : x->offset > y->offset;
}

static struct str text_of(const json_t *doc, const char *key)
{
	const json_t *t = json_object_get(doc, key);

	return json_is_string(t) ? (struct str){ json_string_value(t), json_string_length(t) } : (struct str){ NULL, 0 };
}

static void list_places(const json_t *damage, bool padding, struct place *out)
{
	for (size_t i = 0; i < json_array_size(damage); i++) {
		const json_t *one = json_array_get(damage, i), *rank = json_object_get(one, "rank");
		const char *detail = json_string_value(json_object_get(one, "detail"));
		out[i] = (struct place){ text_of(one, "file"), text_of(one, "fqn"), json_is_integer(rank) ? json_integer_value(rank) : -1,
					 (uint64_t)json_integer_value(json_object_get(one, "offset")),
					 (uint64_t)json_integer_value(json_object_get(one, "bytes")), detail ? detail : "?", padding };
	}
}

/* A file of a rank-local checkpoint is in the metadata of its own rank. */
static FALLIBLE enum err take_rank(struct repair_file *f, int64_t rank)
{
	for (uint64_t i = 0; f->others && i < f->c->rank_count; i++)
		if (f->c->ranks[i] == rank)
			return checkpoint_take_rank(f->c, i);
	return OK;
}

static FALLIBLE enum err restore_places(struct repair_file *f, const struct place *places, uint64_t count)
{
	uint32_t file = UINT32_MAX;

	f->item = (struct repair_item){ .kind = ITEM_NONE, .fqn = places->fqn, .rank = places->rank };
	snprintf(f->file, sizeof f->file, "%.*s", (int)num_min(places->file.n, sizeof f->file - 1), places->file.n ? places->file.p : "");
	TRY(take_rank(f, places->rank));
	for (uint32_t i = 0; i < f->c->sd->file_count; i++)
		if (str_eq(f->c->sd->files[i].name, places->file))
			file = i;
	if (file != UINT32_MAX && !strchr(f->file, '/'))
		return restore_file(f, file, places, count);
	for (uint64_t i = 0; i < count; i++)
		repair_unknown(f, places[i].offset, places[i].bytes, places[i].detail);
	return OK;
}

/* Damage was noted before. */
static FALLIBLE enum err open_checkpoint(struct repair_file *f, struct checkpoint **out)
{
	struct checkpoint_instead instead = f->r->instead;

	instead.keeps_lost = true;
	return checkpoint_open_instead(&f->r->job->worker->stores, &f->r->job->spec.target, &instead, &f->ignored, out);
}

static FALLIBLE enum err restore_all(struct repair_file *f, const struct place *places, uint64_t n)
{
	uint64_t first;

	TRY(open_checkpoint(f, &f->c));
	if (f->c->format == FORMAT_DCP_RANK_LOCAL)
		TRY(open_checkpoint(f, &f->others));
	for (uint64_t i = 0; i < n;) {
		for (first = i; i < n && str_eq(places[i].file, places[first].file); i++)
			;
		TRY(restore_places(f, places + first, i - first));
	}
	return OK;
}

enum err repair_places(struct repair *r, const json_t *damage, const json_t *padding)
{
	uint64_t n = json_array_size(damage) + json_array_size(padding);
	struct repair_file f = { .r = r, .old = STORE_NOTHING, .copy = STORE_NOTHING, .reader = *r->job->worker };
	CLEANUP(mem_free_ptr) struct place *places = mem_zalloc(n + 1, sizeof *places);

	NEED(places, "no memory for damaged places");
	if (n == 0)
		return OK;
	list_places(damage, false, places);
	list_places(padding, true, places + json_array_size(damage));
	qsort(places, n, sizeof *places, by_file);
	f.reader.lookup = true;
	f.reader.conn = NULL;
	enum err e = job_state(r->job, "running", "restore", NULL, 0);
	e = e ?: restore_all(&f, places, n);
	checkpoint_free(f.c);
	checkpoint_free(f.others);
	checked_free(&f.ignored);
	mem_free(f.block);
	return e;
}
