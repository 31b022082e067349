/* dcp_open.c: DCP checkpoints as sources: one .metadata, or one per rank, whose union is the checkpoint. */
#include "base/mem.h"
#include "format/dcp_meta.h"
#include "format/format.h"

static FALLIBLE enum err open_one(const struct format_source *s, const char *name, struct sdict **out)
{
	void *bytes = NULL;
	uint64_t n = 0;

	enum err e = s->read_all(s->user, name, &bytes, &n);
	e = e ?: dcp_meta_read(bytes, n, out);
	mem_free(bytes);
	return err_at_file(e, name, -1);
}

enum err format_open_dcp(const struct format_source *s, struct arena *, struct sdict **out)
{
	return open_one(s, DCP_METADATA, out);
}

enum err format_open_dcp_ranks(const struct format_source *s, struct arena *, struct sdict **out)
{
	struct sdict **parts = mem_zalloc(s->metadata_count, sizeof *parts);
	enum err e = parts ? OK : ERR(NO_MEMORY, "no memory for %ju ranks", (uintmax_t)s->metadata_count);

	for (uint64_t i = 0; !e && i < s->metadata_count; i++)
		e = open_one(s, s->metadata[i], &parts[i]);
	e = e ?: err_at_file(dcp_meta_union(parts, (uint32_t)s->metadata_count, out), "__*" DCP_METADATA, -1);
	for (uint64_t i = 0; parts && i < s->metadata_count; i++)
		sdict_free(parts[i]);
	mem_free(parts);
	return e;
}
