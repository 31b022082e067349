/* exact_load.c: see exact_load.h. */
#include "ops/exact_load.h"

#include <stdio.h>

#include "base/num.h"
#include "runner/segments.h"

bool exact_load_is(const struct job *j, const struct rank_segments *existing)
{
	const struct spec *s = &j->spec;
	bool selects = s->include.n || s->exclude.n || s->dtype.n || s->rename.n || s->transform.count || s->optimizer_key.n;

	return s->source.kind == REF_REMOTE && !existing && !s->layout.n && !s->world_size && !selects;
}

enum err exact_load_plan(const struct sdict *source, uint32_t world_size, struct arena *arena, struct sdict **out, struct load_plan *plan)
{
	uint64_t n = source->chunk_count;
	char name[16];
	uint32_t index;

	TRY(sdict_new(UINT64_MAX, out));
	for (uint32_t r = 0; r < world_size; r++) {
		snprintf(name, sizeof name, "%u", r);
		TRY(sdict_add_file(*out, str_of(name), r, &index));
	}
	for (uint64_t t = 0; t < source->tensor_count; t++) {
		const struct sd_tensor *from = &source->tensors[t];
		TRY(sdict_add_tensor(*out, from->fqn, from->dtype, from->ndim, from->shape, &index));
		for (uint64_t i = 0; i < from->chunk_count; i++) {
			const struct sd_chunk *c = &source->chunks[from->first_chunk + i];
			must(from->first_chunk + i == (*out)->chunk_count);
			TRY(sdict_add_chunk(*out, index, c->dims, c->rank, c->loc));
		}
	}
	TRY(arena_alloc(arena, n + 1, sizeof *plan->first, &plan->first));
	TRY(arena_alloc(arena, n + 1, sizeof *plan->sources, &plan->sources));
	for (uint64_t i = 0; i <= n; i++) {
		plan->first[i] = i;
		plan->sources[i] = (uint32_t)i;
	}
	plan->source_count = n;
	return OK;
}

static FALLIBLE enum err check_header(const struct manifest *m, struct str name, const void *header, uint64_t n)
{
	const struct manifest_item *item = m ? manifest_find(m, name, 0, n) : NULL;
	struct manifest_check check;

	if (!item || !item->raw)
		return err_at_file(ERR(FORMAT_MANIFEST, "no digest of an image's header"), name.p, 0);
	manifest_check_begin(&check, m->digests.v + item->digest_at, item->digest_count);
	return err_at_file(manifest_check_add(&check, header, n, true), name.p, 0);
}

static FALLIBLE enum err read_header(const struct checkpoint *c, uint32_t rank, struct buf *out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	struct str name = c->sd->files[rank].name;
	unsigned char first[8], *at;
	uint64_t n;

	TRY(checkpoint_open_file(c, rank, &file));
	TRY(store_read(file, first, sizeof first, 0, name.p));
	TRY(err_at_file(sft_header_bytes(first, c->file_bytes[rank], &n), name.p, 0));
	*out = BUF_INIT(SFT_HEADER_MAX + sizeof first);
	TRY(buf_reserve(out, sizeof first + n, &at));
	TRY(store_read(file, at, sizeof first + n, 0, name.p));
	return check_header(c->manifest, name, at, sizeof first + n);
}

enum err exact_load_headers(struct job *j, const struct input *source)
{
	const struct checkpoint *c = source->checkpoint;
	struct buf *headers = mem_zalloc(source->world_size, sizeof *headers);
	enum err e = headers ? OK : ERR(NO_MEMORY, "no memory for %u headers", source->world_size);

	must(source->world_size == c->sd->file_count);
	for (uint32_t r = 0; !e && r < source->world_size; r++)
		e = err_at_rank(read_header(c, r, &headers[r]), r);
	e = e ?: segments_ask(j, source->world_size, c->file_bytes, NULL);
	e = e ?: segments_put_headers(j, headers);
	for (uint32_t r = 0; headers && r < source->world_size; r++)
		buf_free(&headers[r]);
	mem_free(headers);
	return e;
}
