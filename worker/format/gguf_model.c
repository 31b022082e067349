/* gguf_model.c: what a config.json of Hugging Face's says of a model, as llama.cpp's metadata, and the rules that bring its tensors to
 * llama.cpp's names and orders (convert_hf_to_gguf.py of llama.cpp; tensor names: gguf-py/gguf/tensor_mapping.py).
 *
 * q and k of Llama's family are permuted: Hugging Face rotates the halves of a head, llama.cpp pairs of neighbours. GPT-2's matrices are
 * transposed, experts stacked to one tensor of three dims. */
#include "format/gguf.h"

#include <math.h>
#include <stdio.h>

#include "base/jval.h"
#include "format/gguf_impl.h"

enum { TEXT_MAX = 256, KV_MAX = 512 << 20, LAYERS_MAX = 100000 };

struct rename {
	const char *from, *to;
};

/* Of all decoders whose layers are called as Llama's are. */
static const struct rename of_llama[] = {
	{ "^model\\.embed_tokens\\.weight$", "token_embd.weight" },
	{ "^model\\.norm\\.weight$", "output_norm.weight" },
	{ "^lm_head\\.weight$", "output.weight" },
	{ "^model\\.layers\\.(\\d+)\\.input_layernorm\\.weight$", "blk.$1.attn_norm.weight" },
	{ "^model\\.layers\\.(\\d+)\\.post_attention_layernorm\\.weight$", "blk.$1.ffn_norm.weight" },
	{ "^model\\.layers\\.(\\d+)\\.self_attn\\.([qkv])_proj\\.(weight|bias)$", "blk.$1.attn_$2.$3" },
	{ "^model\\.layers\\.(\\d+)\\.self_attn\\.o_proj\\.(weight|bias)$", "blk.$1.attn_output.$2" },
	{ "^model\\.layers\\.(\\d+)\\.self_attn\\.([qk])_norm\\.weight$", "blk.$1.attn_$2_norm.weight" },
	{ "^model\\.layers\\.(\\d+)\\.mlp\\.(gate|up|down)_proj\\.(weight|bias)$", "blk.$1.ffn_$2.$3" },
	{ "^model\\.layers\\.(\\d+)\\.(?:block_sparse_moe|mlp)\\.gate\\.weight$", "blk.$1.ffn_gate_inp.weight" },
	{ NULL, NULL }
};

static const struct rename of_gpt2[] = {
	{ "^(?:transformer\\.)?wte\\.weight$", "token_embd.weight" },
	{ "^(?:transformer\\.)?wpe\\.weight$", "position_embd.weight" },
	{ "^(?:transformer\\.)?ln_f\\.(weight|bias)$", "output_norm.$1" },
	{ "^lm_head\\.weight$", "output.weight" },
	{ "^(?:transformer\\.)?h\\.(\\d+)\\.ln_1\\.(weight|bias)$", "blk.$1.attn_norm.$2" },
	{ "^(?:transformer\\.)?h\\.(\\d+)\\.ln_2\\.(weight|bias)$", "blk.$1.ffn_norm.$2" },
	{ "^(?:transformer\\.)?h\\.(\\d+)\\.attn\\.c_attn\\.(weight|bias)$", "blk.$1.attn_qkv.$2" },
	{ "^(?:transformer\\.)?h\\.(\\d+)\\.attn\\.c_proj\\.(weight|bias)$", "blk.$1.attn_output.$2" },
	{ "^(?:transformer\\.)?h\\.(\\d+)\\.mlp\\.c_fc\\.(weight|bias)$", "blk.$1.ffn_up.$2" },
	{ "^(?:transformer\\.)?h\\.(\\d+)\\.mlp\\.c_proj\\.(weight|bias)$", "blk.$1.ffn_down.$2" },
	{ NULL, NULL }
};

/* Experts' matrices, stacked. */
static const struct rename experts[] = {
	{ "^model\\.layers\\.(\\d+)\\.block_sparse_moe\\.experts\\.\\d+\\.w1\\.weight$", "blk.$1.ffn_gate_exps.weight" },
	{ "^model\\.layers\\.(\\d+)\\.block_sparse_moe\\.experts\\.\\d+\\.w2\\.weight$", "blk.$1.ffn_down_exps.weight" },
	{ "^model\\.layers\\.(\\d+)\\.block_sparse_moe\\.experts\\.\\d+\\.w3\\.weight$", "blk.$1.ffn_up_exps.weight" },
	{ "^model\\.layers\\.(\\d+)\\.mlp\\.experts\\.\\d+\\.(gate|up|down)_proj\\.weight$", "blk.$1.ffn_$2_exps.weight" },
	{ NULL, NULL }
};

/* model_type of config.json. */
static const struct family {
	const char *model_type, *arch;
	const struct rename *names;
	bool rotates_pairs;            /* q and k are permuted */
	bool has_experts;
} families[] = {
	{ "llama", "llama", of_llama, true, false },        { "mistral", "llama", of_llama, true, false },
	{ "mixtral", "llama", of_llama, true, true },       { "qwen2", "qwen2", of_llama, false, false },
	{ "qwen3", "qwen3", of_llama, false, false },       { "qwen3_moe", "qwen3moe", of_llama, false, true },
	{ "gpt2", "gpt2", of_gpt2, false, false },
};

struct model {
	const json_t *config;
	const json_t *rope;            /* with rope_theta, where that is not in the config itself */
	const struct family *family;
	struct gguf_head *h;
	int64_t layers, heads, kv_heads, hidden, head_dim;
};

static FALLIBLE enum err bad_config(const char *what, const char *key)
{
	return err_at_file(ERR(FORMAT_GGUF, "%s \"%s\"", what, key), "config.json", -1);
}

/* The integer of the first key that is there, 1 … 2^31 - 1; 0: none is. `also` may be NULL. */
static FALLIBLE enum err get(const struct model *m, const char *key, const char *also, int64_t *out)
{
	const json_t *v = json_object_get(m->config, key);

	if (!v && also)
		v = json_object_get(m->config, key = also);
	*out = 0;
	if (!v || json_is_null(v))
		return OK;
	*out = json_integer_value(v);
	return *out > 0 && *out <= INT32_MAX ? OK : bad_config("not a positive integer:", key);
}

static FALLIBLE enum err must_get(const struct model *m, const char *key, const char *also, int64_t *out)
{
	TRY(get(m, key, also, out));
	return *out ? OK : bad_config("a model needs", key);
}

static void put_u32(struct model *m, const char *key, int64_t v)
{
	char full[TEXT_MAX];

	snprintf(full, sizeof full, "%s.%s", m->family->arch, key);
	if (v)
		gguf_kv_u32(m->h, full, (uint32_t)v);
}

/* Nothing if the number is not there. */
static void put_f32(struct model *m, const char *key, const json_t *v)
{
	char full[TEXT_MAX];

	snprintf(full, sizeof full, "%s.%s", m->family->arch, key);
	if (json_is_number(v))
		gguf_kv_f32(m->h, full, (float)json_number_value(v));
}

/* ------------------------------------------------------------------------------------------------------- rules */

static FALLIBLE enum err add_rule(struct model *m, const char *match, const char *key, json_t *value)
{
	json_t *rule = value ? json_pack("{s:s, s:o, s:b}", "match", match, key, value, "optional", 1) : NULL;

	return rule && json_array_append_new(m->h->rules, rule) == 0 ? OK : ERR(NO_MEMORY, "no memory for conversion rules");
}

/* [heads, 2, half, …] → [heads, half, 2, …] over the rows, as LlamaModel.permute does. */
static FALLIBLE enum err add_rotation(struct model *m, const char *letter, int64_t heads)
{
	char match[TEXT_MAX];
	json_int_t n = heads, half = m->head_dim / 2, columns = m->hidden;

	snprintf(match, sizeof match, "^model\\.layers\\.\\d+\\.self_attn\\.%s_proj\\.weight$", letter);
	TRY(add_rule(m, match, "reshape", json_pack("[I, I, I, I]", n, (json_int_t)2, half, columns)));
	TRY(add_rule(m, match, "permute", json_pack("[i, i, i, i]", 0, 2, 1, 3)));
	TRY(add_rule(m, match, "reshape", json_pack("[I, I]", n * 2 * half, columns)));
	snprintf(match, sizeof match, "^model\\.layers\\.\\d+\\.self_attn\\.%s_proj\\.bias$", letter);
	TRY(add_rule(m, match, "reshape", json_pack("[I, I, I]", n, (json_int_t)2, half)));
	TRY(add_rule(m, match, "permute", json_pack("[i, i, i]", 0, 2, 1)));
	return add_rule(m, match, "reshape", json_pack("[I]", n * 2 * half));
}

static FALLIBLE enum err add_rules(struct model *m)
{
	TRY(add_rule(m, "\\.rotary_emb\\.inv_freq$", "drop", json_true()));
	if (m->family->names == of_gpt2) {
		TRY(add_rule(m, "^(?:transformer\\.)?h\\.\\d+\\.attn\\.(masked_)?bias$", "drop", json_true()));
		TRY(add_rule(m, "^(?:transformer\\.)?h\\.\\d+\\.(?:attn|mlp)\\.c_(?:attn|proj|fc)\\.weight$", "permute",
			     json_pack("[i, i]", 1, 0)));
	}
	if (m->family->rotates_pairs) {
		TRY(add_rotation(m, "q", m->heads));
		TRY(add_rotation(m, "k", m->kv_heads));
	}
	for (const struct rename *r = experts; r->from && m->family->has_experts; r++)
		TRY(add_rule(m, r->from, "stack", json_pack("{s:i, s:s}", "dim", 0, "into", r->to)));
	for (const struct rename *r = m->family->names; r->from; r++)
		TRY(add_rule(m, r->from, "rename", json_string(r->to)));
	return OK;
}

/* ---------------------------------------------------------------------------------------------------- metadata */

static const json_t *rope_theta(const struct model *m)
{
	const json_t *v = json_object_get(m->config, "rope_theta");

	return v ? v : json_object_get(m->rope, "rope_theta");
}

/* Llama 3.1's frequencies: high ones stay, low ones are divided, and between them it goes smoothly (generate_extra_tensors). */
static FALLIBLE enum err put_llama3_factors(struct model *m, const json_t *scaling)
{
	double base = 10000, factor = 8, low = 1, high = 4, context = 8192, dim = (double)m->head_dim;
	const struct { const char *key; double *value; } numbers[] = {
		{ "factor", &factor }, { "low_freq_factor", &low }, { "high_freq_factor", &high },
		{ "original_max_position_embeddings", &context },
	};
	const json_t *theta = rope_theta(m);

	base = json_is_number(theta) ? json_number_value(theta) : base;
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
		const json_t *v = json_object_get(scaling, numbers[i].key);
		if (json_is_number(v))
			*numbers[i].value = json_number_value(v);
		if (!(*numbers[i].value > 0))
			return bad_config("not a positive number:", numbers[i].key);
	}
	for (int64_t i = 0; i < m->head_dim; i += 2) {
		/* in float32 as torch computes the frequencies; what follows is Python's double */
		float freq = 1.0f / powf((float)base, (float)i / (float)dim);
		double wavelength = 2 * M_PI / (double)freq, smooth = (context / wavelength - low) / (high - low);
		double scale = wavelength < context / high ? 1 : wavelength > context / low ? factor : 1 / ((1 - smooth) / factor + smooth);
		float out = (float)scale;
		uint32_t bits;
		memcpy(&bits, &out, sizeof bits);
		buf_le32(&m->h->rope_freqs, bits);
	}
	return OK;
}

static FALLIBLE enum err put_scaling(struct model *m)
{
	const json_t *scaling = m->rope, *factor = json_object_get(scaling, "factor");
	const json_t *type = json_object_get(scaling, "rope_type");
	const char *word = json_string_value(type ? type : json_object_get(scaling, "type"));
	char key[TEXT_MAX];

	if (!word || strcmp(word, "default") == 0)
		return OK;
	if (strcmp(word, "llama3") == 0)
		return put_llama3_factors(m, scaling);
	if ((strcmp(word, "linear") != 0 && strcmp(word, "yarn") != 0) || !json_is_number(factor))
		return bad_config("no rope_scaling that is known:", word);
	snprintf(key, sizeof key, "%s.rope.scaling.type", m->family->arch);
	gguf_kv_string(m->h, key, str_of(word));
	put_f32(m, "rope.scaling.factor", factor);
	put_u32(m, "rope.scaling.original_context_length",
		json_integer_value(json_object_get(scaling, "original_max_position_embeddings")));
	return OK;
}

static FALLIBLE enum err read_sizes(struct model *m)
{
	TRY(must_get(m, "num_hidden_layers", "n_layer", &m->layers));
	TRY(must_get(m, "num_attention_heads", "n_head", &m->heads));
	TRY(must_get(m, "hidden_size", "n_embd", &m->hidden));
	TRY(get(m, "num_key_value_heads", NULL, &m->kv_heads));
	TRY(get(m, "head_dim", NULL, &m->head_dim));
	m->kv_heads = m->kv_heads ? m->kv_heads : m->heads;
	if (m->layers > LAYERS_MAX)
		return bad_config("too many layers:", "num_hidden_layers");
	if (!m->head_dim && m->hidden % m->heads)
		return bad_config("no multiple of num_attention_heads:", "hidden_size");
	m->head_dim = m->head_dim ? m->head_dim : m->hidden / m->heads;
	return m->head_dim % 2 ? bad_config("an odd", "head_dim") : OK;
}

static FALLIBLE enum err put_experts(struct model *m)
{
	int64_t count, used, inner;

	if (!m->family->has_experts)
		return OK;
	TRY(must_get(m, "num_local_experts", "num_experts", &count));
	TRY(must_get(m, "num_experts_per_tok", NULL, &used));
	TRY(get(m, "moe_intermediate_size", NULL, &inner));
	put_u32(m, "expert_count", count);
	put_u32(m, "expert_used_count", used);
	put_u32(m, "expert_feed_forward_length", inner);
	return OK;
}

static FALLIBLE enum err put_sizes(struct model *m)
{
	const json_t *c = m->config;
	bool gpt2 = m->family->names == of_gpt2;
	int64_t context, inner, vocab;

	TRY(must_get(m, "max_position_embeddings", "n_positions", &context));
	TRY(get(m, "intermediate_size", "n_inner", &inner));
	TRY(get(m, "vocab_size", NULL, &vocab));
	if (!inner && !gpt2)
		return bad_config("a model needs", "intermediate_size");
	put_u32(m, "block_count", m->layers);
	put_u32(m, "context_length", context);
	put_u32(m, "embedding_length", m->hidden);
	put_u32(m, "feed_forward_length", inner ? inner : 4 * m->hidden);
	put_u32(m, "attention.head_count", m->heads);
	put_u32(m, "vocab_size", vocab);
	if (gpt2) {
		put_f32(m, "attention.layer_norm_epsilon", json_object_get(c, "layer_norm_epsilon"));
		return OK;
	}
	put_u32(m, "attention.head_count_kv", m->kv_heads);
	put_u32(m, "attention.key_length", m->head_dim);
	put_u32(m, "attention.value_length", m->head_dim);
	put_u32(m, "rope.dimension_count", m->family->rotates_pairs ? m->head_dim : 0);
	put_f32(m, "rope.freq_base", rope_theta(m));
	put_f32(m, "attention.layer_norm_rms_epsilon", json_object_get(c, "rms_norm_eps"));
	TRY(put_experts(m));
	return put_scaling(m);
}

static FALLIBLE enum err find_family(struct model *m)
{
	const char *type = json_string_value(json_object_get(m->config, "model_type"));
	char known[TEXT_MAX] = "";
	size_t n = 0;

	for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
		n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i ? ", " : "", families[i].model_type);
		if (type && strcmp(type, families[i].model_type) == 0)
			m->family = &families[i];
	}
	if (m->family)
		return OK;
	return err_at_file(ERR(FORMAT_UNSUPPORTED, "model_type \"%.60s\" has no rules for GGUF; known are: %s", type ? type : "", known),
			   "config.json", -1);
}

static FALLIBLE enum err read_model(struct model *m, struct str name)
{
	TRY(find_family(m));
	TRY(read_sizes(m));
	m->h->arch = m->family->arch;
	gguf_kv_string(m->h, "general.architecture", str_of(m->h->arch));
	gguf_kv_string(m->h, "general.type", STR("model"));
	gguf_kv_string(m->h, "general.name", name);
	TRY(put_sizes(m));
	return add_rules(m);
}

enum err gguf_head_make(const struct gguf_assets *a, struct str name, struct gguf_head *out)
{
	CLEANUP(jval_drop) json_t *config = NULL;
	struct model m = { .h = out };

	*out = (struct gguf_head){ .rules = json_array(), .kv = BUF_INIT(KV_MAX), .rope_freqs = BUF_INIT(1 << 20) };
	NEED(out->rules, "no memory for conversion rules");
	if (!a->config.p)
		return OK;
	TRY(err_at_file(jval_parse(a->config, &config), "config.json", -1));
	m.config = config;
	m.rope = json_object_get(config, "rope_scaling");
	m.rope = json_is_object(m.rope) ? m.rope : json_object_get(config, "rope_parameters"); /* so since transformers 5 */
	TRY(read_model(&m, name));
	TRY(gguf_put_tokenizer(out, a, config));
	TRY(buf_status(&out->rope_freqs));
	return buf_status(&out->kv);
}
