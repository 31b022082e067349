/* image_values.c: the values of an image become stored items, as DCP would have made them: dicts are taken apart
 * (dcp.md 3.5), lists too where a dict is below; what is left is one torch.save archive each. */
#include "format/image_impl.h"

#include "base/mem.h"
#include "format/pickle.h"
#include "format/torch_item.h"

/* One value on its way into the sdict. */
struct flat {
	struct sdict *sd;
	const struct image *im;
	struct arena *scratch;
	struct image_seen *seen;
};

void image_seen_free(struct image_seen *seen)
{
	mem_free(seen->v);
}

/* Notes whose value number i is, as written. */
static FALLIBLE enum err see(const struct flat *f, uint32_t i, const struct image_text *v)
{
	struct image_seen *s = f->seen;

	if (i >= s->cap) {
		uint64_t want = 64 + s->cap * 2;
		void *more = mem_grow(s->v, want, sizeof *s->v);
		NEED(more, "no memory for %ju values", (uintmax_t)want);
		s->v = more;
		s->cap = want;
	}
	s->v[i].text = *v;
	s->v[i].rank = f->im->rank;
	return OK;
}

/* Is there a dict anywhere in this JSON text? Brackets inside of strings do not count, so it is scanned. */
static FALLIBLE enum err holds_dict(struct str json, bool *out)
{
	struct jscan js = jscan_of(json, ERR_FORMAT_IMAGE);
	struct jscan_token t;

	*out = false;
	do {
		TRY(jscan_next(&js, &t));
		*out |= t.kind == JSCAN_OBJECT;
	} while (t.kind != JSCAN_END && !*out);
	return OK;
}

static FALLIBLE enum err put_archive(const struct image_text *v, struct buf *b)
{
	CLEANUP(buf_free) struct buf plain = BUF_INIT(v->text.n + 1);

	if (v->kind == IMAGE_TEXT_JSON)
		return item_put_value_json(b, v->text);
	enum err e = buf_unbase64(&plain, v->text);
	if (e)
		return ERR(FORMAT_IMAGE, "the value is not base64: %s", err_last()->text);
	if (v->kind == IMAGE_TEXT_BYTES)
		return item_put_value_bytes(b, plain.p, plain.len);
	if (item_is_archive(plain.p, plain.len)) {
		buf_put(b, plain.p, plain.len);
		return buf_status(b);
	}
	CLEANUP(pickle_free_ptr) struct pickle *pk = NULL; /* a look at its form: nobody could read it back */
	TRY(pickle_parse(plain.p, plain.len, NULL, &pk));
	return item_put_value_pickle(b, plain.p, plain.len);
}

/* A further rank's value. Equal text is not parsed again; 0.1 and 1e-1 are equal, too. */
static FALLIBLE enum err add_replica(const struct flat *f, const struct sd_value *there, const struct image_text *v)
{
	uint32_t i = (uint32_t)(there - f->sd->values);
	CLEANUP(buf_free) struct buf b = BUF_INIT(v->text.n * 4 + 4096);
	const struct image_text *first = &f->seen->v[i].text;

	if (f->seen->v[i].rank == f->im->rank)
		return ERR(DUPLICATE_KEY, "a key for the second time");
	f->seen->v[i].rank = f->im->rank;
	if (first->kind == v->kind && str_eq(first->text, v->text))
		return OK;
	TRY(put_archive(v, &b));
	struct str bytes = { (char *)b.p, b.len };
	return str_eq(bytes, there->bytes) ? OK : sdict_add_differing(f->sd, i, f->im->rank, bytes);
}

/* The lowest rank's value counts, as in PyTorch; within a rank a key may be there once. */
static FALLIBLE enum err add_leaf(const struct flat *f, struct str fqn, struct sd_path path, const struct image_text *v)
{
	const struct sd_value *there = sdict_value(f->sd, fqn);
	CLEANUP(buf_free) struct buf b = BUF_INIT(v->text.n * 4 + 4096);
	struct sd_loc nowhere = { .file = SD_NO_FILE };
	uint32_t i;

	if (sdict_tensor(f->sd, fqn))
		return ERR(PLAN_INVALID, "a value here, a tensor of the same key elsewhere");
	if (there)
		return add_replica(f, there, v);
	TRY(put_archive(v, &b));
	TRY(sdict_add_value(f->sd, fqn, f->im->rank, nowhere, &i));
	struct sd_value *out = &f->sd->values[i];
	out->kind = SD_VALUE_INLINE;
	TRY(sdict_copy_path(f->sd, path, &out->path));
	TRY(see(f, i, v));
	return arena_str(f->sd->arena, (struct str){ (char *)b.p, b.len }, &out->bytes);
}

static FALLIBLE enum err add_value(const struct flat *f, struct str fqn, struct sd_path path, const struct image_text *v);

/* One member of a dict or list: fqn.key, path + key. */
static FALLIBLE enum err add_member(const struct flat *f, struct str fqn, struct sd_path path,
				    struct sd_path_part part, struct str json)
{
	struct image_text child = { .text = json, .kind = IMAGE_TEXT_JSON };
	CLEANUP(buf_free) struct buf name = BUF_INIT(UINT32_MAX);
	CLEANUP(mem_free_ptr) struct sd_path_part *parts = mem_zalloc((size_t)path.count + 1, sizeof *parts);

	NEED(parts, "no memory for a path");
	memcpy(parts, path.parts, path.count * sizeof *parts);
	parts[path.count] = part;
	buf_put(&name, fqn.p, fqn.n);
	buf_putc(&name, '.');
	if (part.key.p)
		buf_put(&name, part.key.p, part.key.n);
	else
		buf_printf(&name, "%jd", (intmax_t)part.index);
	TRY(buf_status(&name));
	return add_value(f, (struct str){ (char *)name.p, name.len }, (struct sd_path){ parts, path.count + 1 }, &child);
}

static FALLIBLE enum err add_value(const struct flat *f, struct str fqn, struct sd_path path, const struct image_text *v)
{
	struct jscan js = jscan_of(v->text, ERR_FORMAT_IMAGE);
	struct jscan_token t;
	struct str json;
	bool dict = false;

	if (v->kind == IMAGE_TEXT_JSON)
		TRY(holds_dict(v->text, &dict));
	if (!dict) {
		enum err e = add_leaf(f, fqn, path, v);
		return e ? err_at_fqn(e, fqn.p, fqn.n) : OK;
	}
	TRY(jscan_next(&js, &t));
	bool list = t.kind == JSCAN_ARRAY;
	for (int64_t i = 0;; i++) {
		struct sd_path_part part = { .index = i };
		TRY(jscan_next(&js, &t));
		if (js.depth == 0)
			return OK;
		if (!list) {
			TRY(jscan_str(&js, &t, f->scratch, &part.key));
			part.key = part.key.p ? part.key : STR("");
			TRY(jscan_next(&js, &t));
		}
		TRY(jscan_skip(&js, &t, &json));
		TRY(add_member(f, fqn, path, part, json));
	}
}

enum err image_add_values(struct sdict *sd, const struct image *im, struct image_seen *seen)
{
	struct arena *scratch CLEANUP(arena_free_ptr) = arena_new((1 << 20) + im->sft.data_off * JSCAN_DEPTH_MAX);
	struct flat f = { sd, im, scratch, seen };

	NEED(scratch, "no memory for values");
	for (uint32_t i = 0; i < im->value_count; i++) {
		struct sd_path_part self;
		struct str fqn = im->values[i].fqn;
		TRY(err_at_rank(err_at_fqn(add_value(&f, fqn, image_path(im, fqn, &self), &im->values[i]), fqn.p, fqn.n), im->rank));
	}
	return OK;
}
