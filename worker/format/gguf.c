/* gguf.c: see gguf.h. */
#include "format/gguf.h"

#include <string.h>

bool gguf_type_of(enum dtype d, uint32_t *out)
{
	static const struct { enum dtype dtype; uint32_t type; } types[] = {
		{ DT_FLOAT32, GGUF_F32 }, { DT_FLOAT16, GGUF_F16 }, { DT_BFLOAT16, GGUF_BF16 }, { DT_FLOAT64, GGUF_F64 },
		{ DT_INT8, GGUF_I8 },     { DT_INT16, GGUF_I16 },   { DT_INT32, GGUF_I32 },     { DT_INT64, GGUF_I64 },
	};

	for (size_t i = 0; i < sizeof types / sizeof *types; i++)
		if (types[i].dtype == d) {
			*out = types[i].type;
			return true;
		}
	return false;
}

bool gguf_keeps_f32(struct str name, uint32_t ndim)
{
	return ndim <= 1 || str_ends(name, "_norm.weight") || str_ends(name, ".ffn_gate_inp.weight");
}

void gguf_put_string(struct buf *b, struct str s)
{
	buf_le64(b, s.n);
	if (s.n)
		buf_put(b, s.p, s.n);
}

static void put_key(struct gguf_head *h, const char *key, enum gguf_value type)
{
	gguf_put_string(&h->kv, str_of(key));
	buf_le32(&h->kv, type);
	h->kv_count++;
}

void gguf_kv_string(struct gguf_head *h, const char *key, struct str s)
{
	put_key(h, key, GGUF_STRING);
	gguf_put_string(&h->kv, s);
}

void gguf_kv_u32(struct gguf_head *h, const char *key, uint32_t v)
{
	put_key(h, key, GGUF_U32);
	buf_le32(&h->kv, v);
}

void gguf_kv_f32(struct gguf_head *h, const char *key, float v)
{
	uint32_t bits;

	memcpy(&bits, &v, sizeof bits);
	put_key(h, key, GGUF_FLOAT32);
	buf_le32(&h->kv, bits);
}

void gguf_kv_bool(struct gguf_head *h, const char *key, bool v)
{
	put_key(h, key, GGUF_BOOL);
	buf_putc(&h->kv, v);
}

void gguf_kv_array(struct gguf_head *h, const char *key, enum gguf_value type, uint64_t count)
{
	put_key(h, key, GGUF_ARRAY);
	buf_le32(&h->kv, type);
	buf_le64(&h->kv, count);
}

void gguf_head_free(struct gguf_head *h)
{
	json_decref(h->rules);
	buf_free(&h->kv);
	buf_free(&h->rope_freqs);
	*h = (struct gguf_head){ 0 };
}
