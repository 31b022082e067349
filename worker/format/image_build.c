/* image_build.c: lays out one rank's chunks as an image. safetensors allows no holes, so filler entries take the chunks to multiples
 * of 4096: then a file's bytes go into the segment by DMA. An entry is called by its FQN where that is possible, so that any
 * safetensors reader finds "model.w"; further chunks and odd names get names of our own and are listed in the metadata. */
#include "format/image_impl.h"

#include "base/num.h"
#include "base/vec.h"

struct build {
	struct sdict *sd;
	uint32_t rank;
	struct arena *arena;
	struct sft_entry *entries;
	uint64_t count, at, pads, named;
	struct buf tensors, values, paths;       /* members of the JSON objects */
	const struct image_more *more;
};

static void drop_build(struct build *b)
{
	arena_free(b->arena);
	buf_free(&b->tensors);
	buf_free(&b->values);
	buf_free(&b->paths);
}

static FALLIBLE enum err pad(struct build *b)
{
	uint64_t to;
	int64_t *shape;

	TRY(num_align(b->at, IMAGE_ALIGN, &to));
	if (to == b->at)
		return OK;
	struct sft_entry *e = &b->entries[b->count++];
	TRY(arena_i64(b->arena, 1, &shape));
	shape[0] = (int64_t)(to - b->at);
	TRY(arena_printf(b->arena, &e->name, IMAGE_PAD_PREFIX "%ju", (uintmax_t)b->pads++));
	*e = (struct sft_entry){ e->name, DT_UINT8, 1, shape, b->at, to };
	b->at = to;
	return OK;
}

static void put_dims(struct buf *b, const char *name, uint32_t n, const int64_t *v)
{
	buf_printf(b, ",\"%s\":[", name);
	for (uint32_t i = 0; i < n; i++)
		buf_printf(b, "%s%jd", i ? "," : "", (intmax_t)v[i]);
	buf_putc(b, ']');
}

static FALLIBLE enum err put_key(struct buf *b, struct str key)
{
	if (b->len)
		buf_putc(b, ',');
	TRY(jscan_put_str(b, key));
	buf_putc(b, ':');
	return buf_status(b);
}

static FALLIBLE enum err put_parts(struct buf *b, struct sd_path path)
{
	buf_putc(b, '[');
	for (uint32_t i = 0; i < path.count; i++) {
		if (i)
			buf_putc(b, ',');
		if (path.parts[i].key.p)
			TRY(jscan_put_str(b, path.parts[i].key));
		else
			buf_printf(b, "%jd", (intmax_t)path.parts[i].index);
	}
	buf_putc(b, ']');
	return buf_status(b);
}

static FALLIBLE enum err put_path(struct build *b, struct str fqn, struct sd_path path)
{
	bool self = path.count == 1 && path.parts[0].key.p && str_eq(path.parts[0].key, fqn);

	if (path.count == 0 || self)
		return OK;
	TRY(put_key(&b->paths, fqn));
	return put_parts(&b->paths, path);
}

/* A part of a nested shard: its box in that shard, and the shard's box in the tensor. */
static void put_nested(struct buf *b, const struct sd_tensor *t, const struct sd_chunk *c, const struct sd_outer *outer)
{
	int64_t inside[NDIM_MAX];

	for (uint32_t d = 0; d < t->ndim; d++)
		inside[d] = c->dims[d] - outer->offsets[d];
	put_dims(b, "global_shape", t->ndim, outer->sizes);
	put_dims(b, "offsets", t->ndim, inside);
	buf_puts(b, ",\"outer\":{\"global_shape\":");
	for (uint32_t d = 0; d < t->ndim; d++)
		buf_printf(b, "%s%jd", d ? "," : "[", (intmax_t)t->shape[d]);
	buf_puts(b, t->ndim ? "]" : "[]");
	put_dims(b, "offsets", t->ndim, outer->offsets);
	for (uint32_t i = 0; i < outer->rank_count; i++)
		buf_printf(b, "%s%u", i ? "," : ",\"ranks\":[", outer->ranks[i]);
	buf_puts(b, outer->rank_count ? "]}" : "}");
}

/* The entry's dtype, shape and name; what they cannot say goes into the metadata. */
static FALLIBLE enum err name_chunk(struct build *b, const struct sd_tensor *t, const struct sd_chunk *c, bool first,
				    struct sft_entry *e)
{
	const int64_t *sizes = sd_sizes(c, t->ndim), *offsets = sd_offsets(c);
	bool raw = !dtype_safetensors_name(t->dtype), whole = true;
	bool plain = first && str_utf8(t->fqn) && !str_starts(t->fqn, IMAGE_OWN_PREFIX) &&
		     !str_is(t->fqn, "__metadata__");
	uint32_t k = dtype_bytes(t->dtype);
	int64_t *shape;

	e->dtype = raw ? DT_UINT8 : t->dtype;
	e->ndim = t->ndim + (raw && k > 1);
	if (e->ndim > NDIM_MAX)
		return ERR(LIMIT_EXCEEDED, "a %s tensor of %u dims has no place in an image", dtype_name(t->dtype),
			   t->ndim);
	TRY(arena_i64(b->arena, (uint64_t)e->ndim + 1, &shape));
	memcpy(shape, sizes, t->ndim * sizeof *shape);
	if (e->ndim > t->ndim)
		shape[t->ndim] = k;
	e->shape = shape;
	for (uint32_t d = 0; d < t->ndim; d++)
		whole &= offsets[d] == 0 && sizes[d] == t->shape[d];
	e->name = t->fqn;
	if (!plain)
		TRY(arena_printf(b->arena, &e->name, IMAGE_OWN_PREFIX "_/%ju", (uintmax_t)b->named++));
	bool boxed = b->more && b->more->plain ? !b->more->plain[t - b->sd->tensors] : !whole || raw || !plain;
	const struct sd_outer *outer = b->more && b->more->outers ? b->more->outers[c - b->sd->chunks] : NULL;
	boxed |= outer != NULL;
	if (plain && !boxed && !raw)
		return OK;
	TRY(put_key(&b->tensors, e->name));
	buf_puts(&b->tensors, "{\"fqn\":");
	TRY(jscan_put_str(&b->tensors, t->fqn));
	if (outer) {
		put_nested(&b->tensors, t, c, outer);
	} else if (boxed) {
		put_dims(&b->tensors, "global_shape", t->ndim, t->shape);
		put_dims(&b->tensors, "offsets", t->ndim, offsets);
	}
	if (raw)
		buf_printf(&b->tensors, ",\"dtype\":\"%s\"", dtype_name(t->dtype));
	buf_putc(&b->tensors, '}');
	return buf_status(&b->tensors);
}

static FALLIBLE enum err add_chunk(struct build *b, const struct sd_tensor *t, struct sd_chunk *c, bool first)
{
	uint64_t numel, bytes;

	TRY(pad(b));
	struct sft_entry *e = &b->entries[b->count++];
	TRY(name_chunk(b, t, c, first, e));
	TRY(box_numel(t->ndim, sd_sizes(c, t->ndim), &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	e->begin = b->at;
	TRY(num_add(b->at, bytes, &b->at));
	e->end = b->at;
	c->loc = (struct sd_loc){ .file = b->rank, .offset = e->begin, .length = bytes };
	return OK;
}

static FALLIBLE enum err add_tensors(struct build *b)
{
	each(t, b->sd->tensors, b->sd->tensor_count) {
		bool first = true;
		for (uint64_t k = t->first_chunk; k < t->first_chunk + t->chunk_count; k++) {
			struct sd_chunk *c = &b->sd->chunks[k];
			if (c->rank != b->rank)
				continue;
			enum err e = add_chunk(b, t, c, first);
			if (!e && first)
				e = put_path(b, t->fqn, t->path);
			if (e)
				return err_at_fqn(e, t->fqn.p, t->fqn.n);
			first = false;
		}
	}
	return pad(b); /* the last page is whole, so that direct reads may fill it */
}

static FALLIBLE enum err add_value(struct build *b, const struct image_value *v)
{
	static const char *const forms[] = { [IMAGE_VALUE_JSON] = "json", [IMAGE_VALUE_BYTES] = "bytes",
					     [IMAGE_VALUE_PICKLE] = "pickle" };

	TRY(put_key(&b->values, v->fqn));
	buf_printf(&b->values, "{\"%s\":", forms[v->kind]);
	if (v->kind == IMAGE_VALUE_JSON) {
		buf_put(&b->values, v->bytes.p, v->bytes.n);
	} else {
		buf_putc(&b->values, '"');
		buf_base64(&b->values, v->bytes.p, v->bytes.n);
		buf_putc(&b->values, '"');
	}
	buf_putc(&b->values, '}');
	return put_path(b, v->fqn, v->path);
}

static void put_object(struct buf *text, const char *name, const struct buf *members)
{
	if (members->len == 0)
		return;
	buf_printf(text, ",\"%s\":{", name);
	buf_put(text, members->p, members->len);
	buf_putc(text, '}');
}

static FALLIBLE enum err put_header(struct build *b, struct buf *header, uint64_t *data_off)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(SFT_HEADER_MAX);
	size_t start = header->len;

	buf_puts(&text, "{\"version\":1");
	put_object(&text, "tensors", &b->tensors);
	put_object(&text, "values", &b->values);
	put_object(&text, "paths", &b->paths);
	for (uint64_t i = 0; b->more && i < b->more->tuple_count; i++) {
		buf_puts(&text, i ? "," : ",\"tuples\":[");
		TRY(put_parts(&text, b->more->tuples[i]));
	}
	if (b->more && b->more->tuple_count)
		buf_putc(&text, ']');
	if (b->more && b->more->layout.n) {
		buf_puts(&text, ",\"layout\":");
		buf_put(&text, b->more->layout.p, b->more->layout.n);
	}
	buf_putc(&text, '}');
	TRY(buf_status(&text));
	const struct str meta[1][2] = { { STR("dcpd"), { (char *)text.p, text.len } } };
	TRY(sft_put_header(header, b->entries, b->count, meta, 1, IMAGE_ALIGN));
	*data_off = header->len - start;
	return OK;
}

static uint64_t count_chunks(const struct sdict *sd, uint32_t rank)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < sd->chunk_count; i++)
		n += sd->chunks[i].rank == rank;
	return n;
}

enum err image_build(struct sdict *sd, uint32_t rank, const struct image_value *values, uint64_t value_count,
		     struct buf *header, uint64_t *image_bytes_out)
{
	return image_build_more(sd, rank, values, value_count, NULL, header, image_bytes_out);
}

enum err image_build_more(struct sdict *sd, uint32_t rank, const struct image_value *values, uint64_t value_count,
			  const struct image_more *more, struct buf *header, uint64_t *image_bytes_out)
{
	CLEANUP(drop_build) struct build b = { .sd = sd, .rank = rank, .more = more, .tensors = BUF_INIT(SFT_HEADER_MAX),
					       .values = BUF_INIT(SFT_HEADER_MAX), .paths = BUF_INIT(SFT_HEADER_MAX) };
	uint64_t chunks = count_chunks(sd, rank), data_off;

	/* an entry and its filler, their shapes and names */
	b.arena = arena_new((1 << 20) + chunks * (2 * sizeof *b.entries + 1024));
	NEED(b.arena, "no memory for an image");
	TRY(arena_alloc(b.arena, 2 * chunks + 1, sizeof *b.entries, &b.entries));
	TRY(add_tensors(&b));
	for (uint64_t i = 0; i < value_count; i++) {
		TRY(err_at_fqn(add_value(&b, &values[i]), values[i].fqn.p, values[i].fqn.n));
	}
	TRY(put_header(&b, header, &data_off));
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		if (sd->chunks[i].rank == rank)
			sd->chunks[i].loc.offset += data_off;
	return num_add(data_off, b.at, image_bytes_out);
}
