/* file_plan_hf.c: the files of a safetensors checkpoint as Hugging Face lays them out, and the index that names them. */
#include "format/file_plan.h"

#include <stdlib.h>

#include "base/arena.h"
#include "base/num.h"
#include "format/delta.h"
#include "format/format.h"
#include "format/safetensors.h"

#define FILE_MAX_BYTES 5000000000u     /* Hugging Face's own limit */

enum { CHECKSUMS_MAX = SFT_META_MAX / 2 };  /* of a delta's file: they are in its header */

struct whole {
	uint32_t chunk, file;
	uint64_t bytes;
};

struct planner {
	const struct file_plan_target *t;
	struct file_plan *p;
	struct whole *wholes;
	uint64_t n;
};

static FALLIBLE enum err check_tensor(const struct sd_tensor *t)
{
	enum err e = OK;

	if (!dtype_safetensors_word(t->dtype) || (t->dtype == DT_FLOAT4_E2M1FN_X2 && t->ndim == 0))
		e = ERR(DTYPE_UNSUPPORTED, "safetensors has no dtype %s", dtype_name(t->dtype));
	else if (str_is(t->fqn, "__metadata__") || !str_utf8(t->fqn))
		e = ERR(NAME_INVALID, "safetensors has no place for a tensor of this name");
	return err_at_fqn(e, t->fqn.p, t->fqn.n);
}

static FALLIBLE enum err collect(struct planner *pl)
{
	const struct sdict *sd = pl->t->sd;

	pl->wholes = mem_zalloc(sd->tensor_count, sizeof *pl->wholes);
	pl->n = sd->tensor_count;
	NEED(pl->wholes, "no memory for %ju tensors", (uintmax_t)pl->n);
	for (uint64_t i = 0; i < pl->n; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		uint64_t numel;
		must(t->chunk_count == 1);
		TRY(check_tensor(t));
		TRY(box_numel(t->ndim, t->shape, &numel));
		pl->wholes[i].chunk = (uint32_t)t->first_chunk;
		TRY(num_mul(numel, dtype_bytes(t->dtype), &pl->wholes[i].bytes));
	}
	return OK;
}

/* In the order given, a new file when the next tensor would make it too large. */
static uint32_t split_files(struct planner *pl)
{
	uint64_t max = pl->t->file_name.p ? UINT64_MAX : pl->t->max_file_bytes ? pl->t->max_file_bytes : FILE_MAX_BYTES, filled = 0;
	uint64_t first = 0;
	uint32_t files = 0;

	for (uint64_t i = 0; i < pl->n; i++) {
		bool full = pl->wholes[i].bytes > max - num_min(filled, max) || (pl->t->delta && i - first == CHECKSUMS_MAX);
		if (i > 0 && full) {
			files++;
			first = i;
			filled = 0;
		}
		filled += pl->wholes[i].bytes;
		pl->wholes[i].file = files;
	}
	return files + 1;
}

static int by_element_size(const void *a, const void *b, void *user)
{
	const struct sdict *sd = user;
	const struct whole *x = a, *y = b;

	uint32_t dx = dtype_bytes(sd->tensors[sd->chunks[x->chunk].tensor].dtype);
	uint32_t dy = dtype_bytes(sd->tensors[sd->chunks[y->chunk].tensor].dtype);

	return num_order(x->file, y->file) ?: num_order(dy, dx) ?: num_order(x->chunk, y->chunk);
}

static FALLIBLE enum err add_item(struct file_plan *p, enum file_plan_kind kind, uint32_t index, uint64_t bytes, uint64_t *offset)
{
	struct file_plan_item *it;

	TRY(vec_push(&p->items, &it));
	*it = (struct file_plan_item){ .kind = (uint8_t)kind, .bare = true, .index = index, .offset = *offset,
				       .at = { 0, bytes, bytes, bytes } };
	return num_add(*offset, bytes, offset);
}

/* The checksums of the tensors of a delta's file. */
static FALLIBLE enum err put_checksums(const struct planner *pl, const struct whole *wholes, uint64_t count,
				       const struct sft_entry *entries, struct buf *b)
{
	CLEANUP(mem_free_ptr) struct str(*meta)[2] = mem_zalloc(count, sizeof *meta);

	NEED(meta, "no memory for %ju checksums", (uintmax_t)count);
	for (uint64_t i = 0; i < count; i++) {
		meta[i][0] = entries[i].name;
		meta[i][1] = pl->t->delta->checksums[pl->t->sd->chunks[wholes[i].chunk].tensor];
	}
	return sft_put_header(b, entries, count, (const struct str(*)[2])meta, count, FILE_PLAN_PAGE);
}

static FALLIBLE enum err add_header(struct planner *pl, const struct whole *wholes, uint64_t count, uint64_t *offset)
{
	const struct sdict *sd = pl->t->sd;
	CLEANUP(mem_free_ptr) struct sft_entry *entries = mem_zalloc(count, sizeof *entries);
	CLEANUP(buf_free) struct buf b = BUF_INIT(SFT_HEADER_MAX + FILE_PLAN_PAGE);
	uint64_t at = 0;
	struct str *text;

	NEED(entries, "no memory for %ju tensors", (uintmax_t)count);
	for (uint64_t i = 0; i < count; i++) {
		const struct sd_tensor *t = &sd->tensors[sd->chunks[wholes[i].chunk].tensor];
		entries[i] = (struct sft_entry){ t->fqn, t->dtype, t->ndim, t->shape, at, at + wholes[i].bytes };
		TRY(num_add(at, wholes[i].bytes, &at));
	}
	if (pl->t->delta)
		TRY(put_checksums(pl, wholes, count, entries, &b));
	else
		TRY(sft_put_header(&b, entries, count, pl->t->meta, pl->t->meta_count, FILE_PLAN_PAGE));
	TRY(vec_push(&pl->p->texts, &text));
	TRY(arena_str(pl->p->arena, (struct str){ (char *)b.p, b.len }, text));
	return add_item(pl->p, FILE_PLAN_TEXT, (uint32_t)(pl->p->texts.n - 1), b.len, offset);
}

static FALLIBLE enum err place_file(struct planner *pl, uint32_t index, uint32_t files, const struct whole *wholes, uint64_t count)
{
	struct file_plan *p = pl->p;
	struct file_plan_file *f;
	char name[FORMAT_FILE_MAX];
	uint64_t offset = 0;

	format_hf_payload(index, files, name);
	TRY(vec_push(&p->files, &f));
	*f = (struct file_plan_file){ .first_item = p->items.n, .item_count = count + 1 };
	TRY(arena_str(p->arena, pl->t->file_name.p ? pl->t->file_name : str_of(name), &f->name));
	TRY(add_header(pl, wholes, count, &offset));
	for (uint64_t i = 0; i < count; i++)
		TRY(add_item(p, FILE_PLAN_CHUNK, wholes[i].chunk, wholes[i].bytes, &offset));
	f->bytes = offset;
	return OK;
}

static FALLIBLE enum err place_files(struct planner *pl)
{
	uint64_t first = 0;

	TRY(collect(pl));
	uint32_t files = split_files(pl);
	qsort_r(pl->wholes, pl->n, sizeof *pl->wholes, by_element_size, (void *)(uintptr_t)pl->t->sd);
	for (uint32_t f = 0; f < files; f++) {
		uint64_t count = 0;
		while (first + count < pl->n && pl->wholes[first + count].file == f)
			count++;
		TRY(place_file(pl, f, files, pl->wholes + first, count));
		first += count;
	}
	return OK;
}

enum err file_plan_hf(const struct file_plan_target *t, struct file_plan *out)
{
	struct planner pl = { .t = t, .p = out };

	out->stream = true;
	enum err e = place_files(&pl);
	mem_free(pl.wholes);
	return e;
}

/* {"metadata":{"total_size":N},"weight_map":{fqn:file}} */
enum err hf_index_write(const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink, void *user)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1u << 30);
	uint64_t total = 0;

	for (uint64_t i = 0; i < sd->chunk_count; i++)
		total += sd->chunks[i].loc.length;
	buf_puts(&b, "{\n  \"metadata\": {");
	if (opts->delta)
		delta_put_metadata(&b, opts->delta);
	else
		buf_printf(&b, "\n    \"total_size\": %ju\n  ", (uintmax_t)total);
	buf_puts(&b, "},\n  \"weight_map\": {");
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		buf_puts(&b, i ? ",\n    " : "\n    ");
		buf_json_str(&b, sd->tensors[i].fqn);
		buf_puts(&b, ": ");
		buf_json_str(&b, sd->files[sd->chunks[sd->tensors[i].first_chunk].loc.file].name);
	}
	buf_puts(&b, "\n  }");
	if (opts->delta)
		delta_put_values(&b, opts->delta);
	buf_puts(&b, "\n}\n");
	TRY(buf_status(&b));
	return sink(user, b.p, b.len);
}
