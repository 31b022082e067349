/* hf_open.c: safetensors as a source: one file, or a directory of them, with or without the index that says which tensor lies in which
 * file.
 *
 * With an index only the files that it names are read, and of a tensor that several hold (tied weights) the one that the index names. */
#include <string.h>

#include "base/mem.h"
#include "format/hf_index.h"
#include "format/safetensors.h"

static FALLIBLE enum err add_entry(struct hf_index *ix, const struct sft *head, const struct sft_entry *it, uint32_t file)
{
	const struct sd_loc loc = { file, 0, head->data_off + it->begin, it->end - it->begin };
	struct str name = ix->sd->files[file].name;
	uint32_t tensor;
	int64_t dims[2 * NDIM_MAX] = { 0 };

	if (!hf_index_takes(ix, it->name, name))
		return OK;
	for (uint32_t i = 0; i < it->ndim; i++)
		dims[it->ndim + i] = it->shape[i];
	enum err e = sdict_add_tensor(ix->sd, it->name, it->dtype, it->ndim, it->shape, &tensor);
	e = e ?: sdict_add_chunk(ix->sd, tensor, dims, 0, loc);
	return err_at_fqn(err_at_file(e, name.p, -1), it->name.p, it->name.n);
}

enum err hf_open_header(const struct format_source *s, const char *name, struct arena *arena, struct sft *out, void **text_out)
{
	unsigned char first[8];
	uint64_t file_bytes, n;

	TRY(s->bytes_of(s->user, name, &file_bytes));
	if (file_bytes < sizeof first)
		return ERR(FORMAT_SAFETENSORS, "a file of %ju bytes is too short", (uintmax_t)file_bytes);
	TRY(s->read(s->user, name, 0, first, sizeof first));
	TRY(sft_header_bytes(first, file_bytes, &n));
	TRY(s->read_head(s->user, name, sizeof first + n, text_out));
	if (memcmp(*text_out, first, sizeof first) != 0)
		return ERR(FORMAT_SAFETENSORS, "the header changes while it is read");
	return sft_parse((struct str){ (char *)*text_out + sizeof first, n }, file_bytes, arena, out);
}

/* Keeps the __metadata__ of the first file that has any: the others say the same, as a rule. */
static FALLIBLE enum err keep_meta(struct sdict *sd, const struct sft *head)
{
	struct str (*meta)[2];

	if (sd->meta_count || !head->meta_count)
		return OK;
	TRY(arena_alloc(sd->arena, head->meta_count, sizeof *meta, &meta));
	for (uint64_t i = 0; i < head->meta_count; i++) {
		TRY(arena_str(sd->arena, head->meta[i].key, &meta[i][0]));
		TRY(arena_str(sd->arena, head->meta[i].value, &meta[i][1]));
	}
	sd->meta = (const struct str(*)[2])meta;
	sd->meta_count = head->meta_count;
	return OK;
}

static enum err read_header(struct hf_index *ix, const char *name, uint32_t file)
{
	CLEANUP(arena_free_ptr) struct arena *arena = arena_new(UINT64_MAX);
	CLEANUP(mem_free_ptr) void *text = NULL;
	struct sft head;

	NEED(arena, "no memory for a header");
	TRY(hf_open_header(ix->s, name, arena, &head, &text));
	TRY(keep_meta(ix->sd, &head));
	for (uint64_t i = 0; i < head.entry_count; i++)
		TRY(add_entry(ix, &head, &head.entries[i], file));
	return OK;
}

enum err format_open_hf(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	static const struct hf_index_limits limits = { SFT_HEADER_MAX, SFT_ENTRY_MIN, ERR_FORMAT_SAFETENSORS, .is_delta = false };

	return hf_index_open(s, &limits, read_header, scratch, out);
}

enum err format_open_delta(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	static const struct hf_index_limits limits = { SFT_HEADER_MAX, SFT_ENTRY_MIN, ERR_FORMAT_SAFETENSORS, .is_delta = true };

	return hf_index_open(s, &limits, read_header, scratch, out);
}
