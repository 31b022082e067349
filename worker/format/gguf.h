/* gguf.h: GGUF, version 3 (ggml's docs/gguf.md): metadata as key-value pairs, a table of tensors, then their bytes, each at a multiple of
 * the alignment. Dims stand in the file fastest first. Written here with the names and metadata that llama.cpp's convert_hf_to_gguf.py
 * gives to models of Hugging Face's. */
#pragma once
#include <jansson.h>

#include "base/buf.h"
#include "tensor/sdict.h"

enum {
	GGUF_VERSION = 3,
	GGUF_ALIGN = 32,               /* where no metadata say otherwise */
	GGUF_DIMS_MAX = 4,             /* GGML_MAX_DIMS */
	GGUF_NAME_MAX = 63,            /* GGML_MAX_NAME, less the NUL */
	GGUF_BLOCK = 32,               /* elements of a block of Q8_0, which has GGUF_BLOCK_BYTES: a float16 scale, then an int8 each */
	GGUF_BLOCK_BYTES = 34,
};

enum gguf_type { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q8_0 = 8, GGUF_I8 = 24, GGUF_I16, GGUF_I32, GGUF_I64, GGUF_F64, GGUF_BF16 = 30 };

enum gguf_value { GGUF_U32 = 4, GGUF_S32, GGUF_FLOAT32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY };

/* Do the first bytes of a file say that it is one? */
bool gguf_file_is(const void *first, size_t n);
/* False: ggml has no such type. */
bool gguf_type_of(enum dtype d, uint32_t *out);

/* The metadata of a file to be written. */
struct gguf_head {
	const char *arch;              /* NULL: of no known model; names and dtypes stay what they are */
	json_t *rules;                 /* conversion rules that bring tensors to the model's names and orders */
	struct buf kv;                 /* `kv_count` pairs as they stand in the file */
	uint64_t kv_count;
	bool quantises;                /* some tensors are written as Q8_0 */
	struct buf rope_freqs;         /* float32 values of the tensor rope_freqs.weight, which some models need; empty: none */
};

/* Files beside a model, as far as they are there (p NULL: not). */
struct gguf_assets {
	struct str config;             /* config.json */
	struct str tokenizer;          /* tokenizer.json */
	struct str sentencepiece;      /* tokenizer.model */
	struct str tokenizer_config;   /* tokenizer_config.json */
	struct str chat_template;      /* chat_template.jinja */
};

/* Makes the metadata of a model called `name`. ERR_FORMAT_UNSUPPORTED: a model or tokenizer that is not known; ERR_INVALID_JSON and
 * ERR_FORMAT_GGUF name the file. The caller frees *out, after an error too. */
FALLIBLE enum err gguf_head_make(const struct gguf_assets *a, struct str name, struct gguf_head *out);
void gguf_head_free(struct gguf_head *h);

/* llama.cpp computes with norms, biases and routers in float32: such a tensor is stored so, whatever it was. */
bool gguf_keeps_f32(struct str name, uint32_t ndim);

/* Key-value pairs. */
void gguf_put_string(struct buf *b, struct str s);
void gguf_kv_string(struct gguf_head *h, const char *key, struct str s);
void gguf_kv_u32(struct gguf_head *h, const char *key, uint32_t v);
void gguf_kv_f32(struct gguf_head *h, const char *key, float v);
void gguf_kv_bool(struct gguf_head *h, const char *key, bool v);
/* The head of an array; its elements follow. */
void gguf_kv_array(struct gguf_head *h, const char *key, enum gguf_value type, uint64_t count);
