/* torch_dist_open.c: checkpoints that Megatron-Core's dist_checkpointing writes as `torch_dist`: DCP, metadata.json beside it, and in
 * common.pt, which torch.save wrote, all that is not sharded (args, iteration, the optimizer's groups). Newer ones have that in the DCP
 * checkpoint as the value common_state/shard_0_1, as each ShardedObject is a value KEY/shard_I_N.
 *
 * Layers of one shape are one tensor with a dim in front ("prepended axes"): decoder.layers.mlp.linear_fc1.weight [layers, …]. The ready
 * rules megatron-unstack take them apart. */
#include "format/format.h"
#include "format/jscan.h"
#include "format/torch_file.h"

#define COMMON "common.pt"

bool torch_dist_is(struct str config)
{
	struct jscan js = jscan_of(config, ERR_FORMAT_METADATA);
	struct jscan_token t;
	bool after_key = false, is = false;
	enum err e = jscan_expect(&js, JSCAN_OBJECT, &t);

	while (!e && !is) {
		e = jscan_next(&js, &t);
		if (e || t.kind == JSCAN_END)
			break;
		is = after_key && t.kind == JSCAN_STRING && str_is(t.raw, "torch_dist");
		after_key = t.kind == JSCAN_KEY && js.depth == 1 && str_is(t.raw, "sharded_backend");
	}
	if (e)
		err_clear();
	return is;
}

/* Keys that the DCP checkpoint has count more. */
static void leave_out(struct torch_file *f, const struct sdict *sd)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < f->leaves.n; i++)
		if (sdict_find(sd, f->leaves.v[i].fqn) == SD_NONE)
			f->leaves.v[n++] = f->leaves.v[i];
	f->leaves.n = n;
}

static FALLIBLE enum err add_common(const struct format_source *s, struct sdict *sd)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };
	bool has_paths = sd->has_paths;
	uint64_t bytes;
	uint32_t file;

	enum err e = s->bytes_of(s->user, COMMON, &bytes);
	if (e == ERR_CHECKPOINT_INCOMPLETE) {
		err_clear();
		return OK;
	}
	TRY(e);
	TRY(torch_file_open(s, COMMON, &f));
	leave_out(&f, sd);
	for (uint64_t i = 0; i < f.leaves.n; i++)
		f.leaves.v[i].tensor.c_order = false; /* by strides: its bytes are no archive of their own, as DCP's items are */
	TRY(sdict_add_file(sd, STR(COMMON), 0, &file));
	TRY(torch_file_add(&f, sd, file, 0));
	sd->has_paths = has_paths;
	return OK;
}

enum err format_open_torch_dist(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	TRY(format_open_dcp(s, scratch, out));
	return err_at_file(add_common(s, *out), COMMON, -1);
}
