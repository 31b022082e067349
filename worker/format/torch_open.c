/* torch_open.c: torch.save files as sources: one file (`.pt`, `.pth`, `.bin`, or any name: the first bytes tell), or a directory of shards
 * with the index that Hugging Face's libraries write beside them (pytorch_model.bin.index.json). */
#include "format/hf_index.h"
#include "format/torch_file.h"

/* Leaves that the index has in another file do not count. */
static void leave_out(struct hf_index *ix, struct torch_file *f, struct str name)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < f->leaves.n; i++)
		if (hf_index_takes(ix, f->leaves.v[i].fqn, name))
			f->leaves.v[n++] = f->leaves.v[i];
	f->leaves.n = n;
}

static enum err open_file(struct hf_index *ix, const char *name, uint32_t file)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };

	TRY(torch_file_open(ix->s, name, &f));
	leave_out(ix, &f, str_of(name));
	return torch_file_add(&f, ix->sd, file, 0);
}

enum err format_open_torch(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	/* a tensor takes a call, a persistent id and two tuples in the pickle */
	static const struct hf_index_limits limits = { ITEM_VALUE_PICKLE_MAX, 24, ERR_FORMAT_METADATA, .is_delta = false };

	return hf_index_open(s, &limits, open_file, scratch, out);
}
