/* reshard_gguf.c: see reshard_gguf.h. */
#include "ops/reshard_gguf.h"

#include "plan/companions.h"
#include "store/assets.h"

static FALLIBLE enum err make_head(struct job *j, struct store_at folder, struct gguf_head *out)
{
	static const char *const names[] = { "config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
					     "chat_template.jinja" };
	struct gguf_assets a = { 0 };
	struct str *const at[] = { &a.config, &a.tokenizer, &a.sentencepiece, &a.tokenizer_config, &a.chat_template };
	const char *slash = strrchr(j->spec.target.name.p, '/'), *name = slash ? slash + 1 : j->spec.target.name.p;
	enum err e = OK;

	for (size_t i = 0; i < sizeof names / sizeof *names && !e; i++) {
		void *bytes = NULL;
		uint64_t n = 0;
		e = assets_read(folder, names[i], &bytes, &n);
		if (bytes)
			*at[i] = (struct str){ bytes, n };
	}
	e = e ?: gguf_head_make(&a, (struct str){ name, strlen(name) - strlen(".gguf") }, out);
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		mem_free((void *)(uintptr_t)at[i]->p);
	return e;
}

enum err reshard_gguf_head(struct job *j, const struct input *source, struct gguf_head *out)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING;
	struct str path;

	TRY(assets_open(&j->worker->stores, &j->spec.assets, source->checkpoint, &folder, &path));
	return make_head(j, folder, out);
}

static bool has_name(struct str name)
{
	static const char *const known[] = { "token_embd.weight", "position_embd.weight", "output.weight", "output_norm.weight",
					     "output_norm.bias" };

	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (str_is(name, known[i]))
			return true;
	return str_starts(name, "blk.");
}

/* As convert_hf_to_gguf.py decides: rows that blocks do not divide become float16. */
static FALLIBLE enum err choose(const struct spec *spec, struct gguf_head *h, struct sd_tensor *t, enum dtype *dtype)
{
	bool blocks = false, f32 = h->arch && gguf_keeps_f32(t->fqn, t->ndim);

	if (h->arch && !has_name(t->fqn))
		return ERR(NAME_INVALID, "the rules for %s have no name in GGUF for this tensor: exclude, rename or drop it", h->arch);
	for (size_t i = 0; i < spec->dtype.n; i++)
		if (str_glob(spec->dtype.v[i].glob, t->fqn)) {
			blocks = spec->dtype.v[i].q8_0;
			*dtype = blocks ? *dtype : spec->dtype.v[i].dtype;
			break;
		}
	if (t->blocks && *dtype != t->dtype)
		return companions_no_cast(str_of(t->blocks));
	if (f32 && dtype_is_float(*dtype)) {
		*dtype = DT_FLOAT32;
	} else if (blocks && dtype_is_float(*dtype)) {
		t->q8_0 = t->ndim > 0 && t->shape[t->ndim - 1] % GGUF_BLOCK == 0;
		*dtype = t->q8_0 ? DT_FLOAT32 : DT_FLOAT16;
		h->quantises = h->quantises || t->q8_0;
	}
	return OK;
}

enum err reshard_gguf_types(const struct spec *spec, struct gguf_head *h, const struct spec_view *view)
{
	for (uint64_t i = 0; i < view->sd->tensor_count; i++) {
		struct sd_tensor *t = &view->sd->tensors[i];
		TRY(err_at_fqn(choose(spec, h, t, &view->dtypes[i]), t->fqn.p, t->fqn.n));
	}
	return OK;
}
