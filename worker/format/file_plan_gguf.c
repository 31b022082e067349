/* file_plan_gguf.c: a GGUF file: metadata, the table of tensors, then the tensors in the order of the source. */
#include "format/file_plan.h"

#include "base/arena.h"
#include "base/num.h"
#include "format/gguf.h"
#include "tensor/box.h"

enum { HEAD_MAX = 1 << 30 };

/* llama.cpp's words for what most of a model is stored as (enum llama_ftype). */
enum { FTYPE_F32 = 0, FTYPE_F16 = 1, FTYPE_Q8_0 = 7, FTYPE_BF16 = 32, QUANTIZATION_VERSION = 2 };

struct planner {
	const struct file_plan_target *t;
	struct file_plan *p;
	struct buf table;              /* of the tensors */
	uint64_t tensors, at;          /* at: in the data, where the next tensor begins */
	uint64_t bytes_of[GGUF_BF16 + 1];      /* by type, of matrices */
};

static FALLIBLE enum err tensor_bytes(const struct sd_tensor *t, uint32_t *type_out, uint64_t *bytes_out)
{
	uint64_t numel;

	TRY(box_numel(t->ndim, t->shape, &numel));
	if (t->ndim > GGUF_DIMS_MAX)
		return ERR(FORMAT_UNSUPPORTED, "GGUF has at most %d dims, not %u", GGUF_DIMS_MAX, t->ndim);
	if (t->q8_0) {
		*type_out = GGUF_Q8_0;
		return num_mul(numel / GGUF_BLOCK, GGUF_BLOCK_BYTES, bytes_out);
	}
	if (t->blocks)
		return ERR(DTYPE_UNSUPPORTED, "the weight is in blocks of %s, which dcpd does not write to GGUF: exclude it", t->blocks);
	if (!gguf_type_of(t->dtype, type_out))
		return ERR(DTYPE_UNSUPPORTED, "GGUF has no dtype %s; cast it, such as to float16", dtype_name(t->dtype));
	return num_mul(numel, dtype_bytes(t->dtype), bytes_out);
}

static FALLIBLE enum err check_name(struct str name)
{
	return name.n && name.n <= GGUF_NAME_MAX && str_utf8(name) && !memchr(name.p, '\0', name.n)
		       ? OK
		       : ERR(NAME_INVALID, "a tensor's name in GGUF has 1 to %d bytes of UTF-8; this one has %zu", GGUF_NAME_MAX, name.n);
}

static FALLIBLE enum err add_entry(struct planner *pl, struct str name, uint32_t ndim, const int64_t *shape, uint32_t type, uint64_t bytes)
{
	gguf_put_string(&pl->table, name);
	buf_le32(&pl->table, ndim);
	for (uint32_t d = ndim; d-- > 0;)
		buf_le64(&pl->table, (uint64_t)shape[d]);
	buf_le32(&pl->table, type);
	buf_le64(&pl->table, pl->at);
	pl->tensors++;
	TRY(num_add(pl->at, bytes, &pl->at));
	return num_align(pl->at, GGUF_ALIGN, &pl->at);
}

static FALLIBLE enum err add_table(struct planner *pl)
{
	const struct sdict *sd = pl->t->sd;
	const struct gguf_head *h = pl->t->gguf;
	int64_t freqs = h ? (int64_t)(h->rope_freqs.len / 4) : 0;

	each(t, sd->tensors, sd->tensor_count) {
		uint64_t bytes;
		uint32_t type;
		must(t->chunk_count == 1);
		enum err e = check_name(t->fqn);
		e = e ?: tensor_bytes(t, &type, &bytes);
		e = e ?: add_entry(pl, t->fqn, t->ndim, t->shape, type, bytes);
		TRY(err_at_fqn(e, t->fqn.p, t->fqn.n));
		pl->bytes_of[type] += t->ndim > 1 ? bytes : 0;
	}
	if (freqs)
		TRY(add_entry(pl, STR("rope_freqs.weight"), 1, &freqs, GGUF_F32, h->rope_freqs.len));
	return OK;
}

static uint32_t file_type(const struct planner *pl)
{
	static const struct { uint32_t type, word; } words[] = {
		{ GGUF_F32, FTYPE_F32 }, { GGUF_F16, FTYPE_F16 }, { GGUF_BF16, FTYPE_BF16 }, { GGUF_Q8_0, FTYPE_Q8_0 },
	};
	uint32_t best = 0;

	for (uint32_t i = 1; i < sizeof words / sizeof *words; i++)
		if (pl->bytes_of[words[i].type] > pl->bytes_of[words[best].type])
			best = i;
	return words[best].word;
}

static FALLIBLE enum err add_item(struct file_plan *p, enum file_plan_kind kind, uint32_t index, uint64_t offset, uint64_t bytes)
{
	struct file_plan_item *it;

	TRY(vec_push(&p->items, &it));
	*it = (struct file_plan_item){ .kind = (uint8_t)kind, .bare = true, .index = index, .offset = offset,
				       .at = { 0, bytes, bytes, bytes } };
	return OK;
}

static FALLIBLE enum err add_text(struct file_plan *p, const struct buf *b, uint64_t offset)
{
	struct str *text;

	TRY(buf_status(b));
	TRY(vec_push(&p->texts, &text));
	TRY(arena_str(p->arena, (struct str){ (char *)b->p, b->len }, text));
	return add_item(p, FILE_PLAN_TEXT, (uint32_t)(p->texts.n - 1), offset, b->len);
}

/* Everything in front of the data. *data_out: where that begins. */
static FALLIBLE enum err add_head(struct planner *pl, uint64_t *data_out)
{
	const struct gguf_head *h = pl->t->gguf;
	struct gguf_head own = { .kv = BUF_INIT(4096) };
	CLEANUP(buf_free) struct buf b = BUF_INIT(HEAD_MAX);

	if (!h || !h->arch)
		gguf_kv_string(&own, "general.architecture", STR("unknown"));
	gguf_kv_u32(&own, "general.file_type", file_type(pl));
	gguf_kv_u32(&own, "general.quantization_version", QUANTIZATION_VERSION);
	buf_puts(&b, "GGUF");
	buf_le32(&b, GGUF_VERSION);
	buf_le64(&b, pl->tensors);
	buf_le64(&b, own.kv_count + (h ? h->kv_count : 0));
	if (h && h->kv.len)
		buf_put(&b, h->kv.p, h->kv.len);
	buf_put(&b, own.kv.p, own.kv.len);
	if (pl->table.len)
		buf_put(&b, pl->table.p, pl->table.len);
	buf_fill(&b, 0, (GGUF_ALIGN - b.len % GGUF_ALIGN) % GGUF_ALIGN);
	enum err e = buf_status(&own.kv);
	buf_free(&own.kv);
	TRY(e);
	TRY(buf_status(&pl->table));
	*data_out = b.len;
	return add_text(pl->p, &b, 0);
}

static FALLIBLE enum err place(struct planner *pl)
{
	const struct sdict *sd = pl->t->sd;
	const struct gguf_head *h = pl->t->gguf;
	struct file_plan_file *f;
	uint64_t at, bytes = 0;
	uint32_t type;

	TRY(add_table(pl));
	TRY(add_head(pl, &at));
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		TRY(tensor_bytes(&sd->tensors[i], &type, &bytes));
		TRY(add_item(pl->p, FILE_PLAN_CHUNK, (uint32_t)sd->tensors[i].first_chunk, at, bytes));
		pl->p->items.v[pl->p->items.n - 1].q8_0 = sd->tensors[i].q8_0;
		TRY(num_add(at, bytes, &at));
		TRY(num_align(at, GGUF_ALIGN, &at));
	}
	if (h && h->rope_freqs.len) {
		TRY(add_text(pl->p, &h->rope_freqs, at));
		TRY(num_add(at, h->rope_freqs.len, &at));
		TRY(num_align(at, GGUF_ALIGN, &at));
	}
	TRY(vec_push(&pl->p->files, &f));
	*f = (struct file_plan_file){ .name = pl->t->file_name, .item_count = pl->p->items.n, .bytes = at };
	return OK;
}

enum err file_plan_gguf(const struct file_plan_target *t, struct file_plan *out)
{
	struct planner pl = { .t = t, .p = out, .table = BUF_INIT(HEAD_MAX) };

	out->stream = true;
	enum err e = place(&pl);
	buf_free(&pl.table);
	return e;
}
