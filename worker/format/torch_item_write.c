/* torch_item_write.c: items that every PyTorch from 2.3 on loads with weights_only=True. The opcodes are those of its restricted
 * unpickler; nothing is memoised, since nothing repeats. Each piece is made by the same function whether it is only measured
 * (item_layout_tensor) or written, so that the sizes cannot disagree. */
#include "base/num.h"
#include "format/torch_item_graph.h"

#include <isa-l/crc.h>

enum { HEAD_MAX = 64 << 10 };

static const char byteorder[] = "little", version[] = "3\n";

static void put_global(struct buf *b, const char *module, const char *name)
{
	buf_printf(b, "c%s\n%s\n", module, name);
}

static void put_int(struct buf *b, uint64_t v)
{
	if (v < 256) {
		buf_putc(b, 'K');
		buf_putc(b, (unsigned char)v);
	} else if (v < 65536) {
		buf_putc(b, 'M');
		buf_le16(b, (uint16_t)v);
	} else if (v <= INT32_MAX) {
		buf_putc(b, 'J');
		buf_le32(b, (uint32_t)v);
	} else { /* LONG1, signed: beyond int64 a ninth byte keeps the top bit free */
		buf_putc(b, 0x8a);
		buf_putc(b, v <= INT64_MAX ? 8 : 9);
		buf_le64(b, v);
		if (v > INT64_MAX)
			buf_putc(b, 0);
	}
}

static void put_str(struct buf *b, const char *z)
{
	buf_putc(b, 'X');
	buf_le32(b, (uint32_t)strlen(z));
	buf_puts(b, z);
}

static void put_tuple(struct buf *b, uint32_t n, const int64_t *v)
{
	if (n > 3)
		buf_putc(b, '(');
	for (uint32_t i = 0; i < n; i++)
		put_int(b, (uint64_t)v[i]);
	static const unsigned char codes[] = { ')', 0x85, 0x86, 0x87, 't' };
	buf_putc(b, codes[n < 4 ? n : 4]);
}

/* A contiguous tensor. Only an empty one may have strides that overflow. */
enum err item_put_tensor(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes, const char *key, bool requires_grad)
{
	const char *cls = dtype_storage_class(dtype);
	int64_t strides[NDIM_MAX];
	uint64_t numel, run = 1;

	TRY(box_numel(ndim, sizes, &numel));
	for (uint32_t d = ndim; d-- > 0;) {
		if (run > INT64_MAX)
			return ERR(LIMIT_EXCEEDED, "the strides of an empty tensor do not fit 64 bits");
		strides[d] = (int64_t)run;
		TRY(num_mul(run, sizes[d] ? (uint64_t)sizes[d] : 1, &run));
	}
	put_global(b, "torch._utils", cls ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
	buf_puts(b, "((");
	put_str(b, "storage");
	if (cls)
		put_global(b, "torch", cls);
	else
		put_global(b, "torch.storage", "UntypedStorage");
	put_str(b, key);
	put_str(b, "cpu");
	put_int(b, cls ? numel : numel * dtype_bytes(dtype));
	buf_puts(b, "tQ");
	put_int(b, 0);
	put_tuple(b, ndim, sizes);
	put_tuple(b, ndim, strides);
	buf_putc(b, requires_grad ? 0x88 : 0x89);
	put_global(b, "collections", "OrderedDict");
	buf_puts(b, ")R");
	if (!cls)
		put_global(b, "torch", dtype_name(dtype));
	buf_puts(b, "tR");
	return buf_status(b);
}

/* data.pkl. */
static FALLIBLE enum err put_pickle(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes)
{
	buf_puts(b, "\x80\x02");
	TRY(item_put_tensor(b, dtype, ndim, sizes, "0", false));
	buf_putc(b, '.');
	return buf_status(b);
}

static void put_record(struct zip_writer *w, struct buf *b, size_t start, const char *name, const void *p, size_t n)
{
	zip_put_local(w, b, b->len - start, name, n, crc32_gzip_refl(0, p, n), 1);
	buf_put(b, p, n);
}

/* The records that every archive has. */
static FALLIBLE enum err put_common(struct zip_writer *w, struct buf *b, size_t start, const struct buf *pickle)
{
	put_record(w, b, start, "archive/data.pkl", pickle->p, pickle->len);
	put_record(w, b, start, "archive/byteorder", byteorder, sizeof byteorder - 1);
	put_record(w, b, start, "archive/version", version, sizeof version - 1);
	return buf_status(b);
}

static FALLIBLE enum err put_head(struct zip_writer *w, struct buf *b, enum dtype dtype, uint32_t ndim,
				  const int64_t *sizes, uint32_t align, uint32_t crc32)
{
	CLEANUP(buf_free) struct buf pickle = BUF_INIT(HEAD_MAX);
	size_t start = b->len;
	uint64_t numel, bytes;

	must((align == 64 || align == 4096) && ndim <= NDIM_MAX);
	TRY(box_numel(ndim, sizes, &numel));
	TRY(num_mul(numel, dtype_bytes(dtype), &bytes));
	TRY(put_pickle(&pickle, dtype, ndim, sizes));
	TRY(put_common(w, b, start, &pickle));
	zip_put_local(w, b, b->len - start, "archive/data/0", bytes, crc32, align);
	return buf_status(b);
}

enum err item_put_head(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align,
		       uint32_t payload_crc32)
{
	struct zip_writer w = { 0 };

	return put_head(&w, b, dtype, ndim, sizes, align, payload_crc32);
}

/* Offset of the archive's tail: small items have it right behind the payload. */
static FALLIBLE enum err tail_place(uint64_t payload_off, uint64_t payload_bytes, uint32_t align, uint64_t *out)
{
	uint64_t end;

	TRY(num_add(payload_off, payload_bytes, &end));
	if (align == 64) {
		*out = end;
		return OK;
	}
	return num_align(end, align, out);
}

enum err item_layout_tensor(enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align,
			    struct item_layout *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(HEAD_MAX);
	struct zip_writer w = { 0 };
	struct item_layout l;

	TRY(put_head(&w, &b, dtype, ndim, sizes, align, 0));
	l.payload_off = b.len;
	l.payload_bytes = w.out[w.count - 1].bytes;
	TRY(tail_place(l.payload_off, l.payload_bytes, align, &l.tail_off));
	b.len = 0;
	zip_put_tail(&w, &b, l.tail_off);
	TRY(buf_status(&b));
	TRY(num_add(l.tail_off, b.len, &l.length));
	*out = l;
	return OK;
}

enum err item_put_tail(struct buf *b, enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align,
		       uint32_t payload_crc32)
{
	CLEANUP(buf_free) struct buf head = BUF_INIT(HEAD_MAX);
	struct zip_writer w = { 0 };
	uint64_t tail_off;

	TRY(put_head(&w, &head, dtype, ndim, sizes, align, payload_crc32));
	TRY(tail_place(head.len, w.out[w.count - 1].bytes, align, &tail_off));
	zip_put_tail(&w, b, tail_off);
	return buf_status(b);
}

enum err item_put_value_pickle(struct buf *b, const void *pickle, size_t n)
{
	struct zip_writer w = { 0 };
	size_t start = b->len;

	if (n >= UINT32_MAX)
		return ERR(LIMIT_EXCEEDED, "a value of %zu bytes", n);
	zip_put_local(&w, b, 0, "archive/data.pkl", n, crc32_gzip_refl(0, pickle, n), 1);
	buf_put(b, pickle, n);
	put_record(&w, b, start, "archive/byteorder", byteorder, sizeof byteorder - 1);
	put_record(&w, b, start, "archive/version", version, sizeof version - 1);
	zip_put_tail(&w, b, b->len - start);
	return buf_status(b);
}
