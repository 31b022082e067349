/* torch_open.c: torch.save files as sources: one file (`.pt`, `.pth`, `.bin`, or any name: the first bytes tell), or a directory of shards
 * with the index that Hugging Face's libraries write beside them (pytorch_model.bin.index.json). */
#include "base/mem.h"
#include "base/num.h"
#include "format/hf_index.h"
#include "format/torch_file.h"

struct opening {
	const struct format_source *s;
	struct hf_index index;
	struct sdict *sd;
};

/* Leaves that the index has in another file do not count. */
static void leave_out(struct opening *o, struct torch_file *f, struct str name)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < f->leaves.n; i++)
		if (hf_index_takes(&o->index, f->leaves.v[i].fqn, name))
			f->leaves.v[n++] = f->leaves.v[i];
	f->leaves.n = n;
}

static enum err open_file(void *user, const char *name)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };
	struct opening *o = user;
	struct format_part part;
	struct item_source src;
	uint32_t file;

	TRY(sdict_add_file(o->sd, str_of(name), 0, &file));
	TRY(format_part_of(o->s, name, &part, &src));
	TRY(torch_file_open(&src, &f));
	leave_out(o, &f, str_of(name));
	return torch_file_add(&f, o->sd, file, 0);
}

enum err format_open_torch(const struct format_source *s, struct sdict **out)
{
	/* a tensor takes a call, a persistent id and two tuples in the pickle */
	static const struct hf_index_limits limits = { ITEM_VALUE_PICKLE_MAX, 24, ERR_FORMAT_METADATA };
	struct opening o = { .s = s };

	enum err e = hf_index_read(s, &limits, &o.index);
	if (!e)
		e = sdict_new(UINT64_MAX, &o.sd);
	if (!e)
		e = hf_index_each(&o.index, open_file, &o);
	if (!e)
		e = hf_index_check(&o.index);
	if (!e)
		*out = o.sd;
	else
		sdict_free(o.sd);
	hf_index_free(&o.index);
	return e;
}
