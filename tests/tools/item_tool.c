/* item_tool.c: the formats by hand, for tests against PyTorch: describes stored items, writes items, casts runs of elements.
 *
 *     item_tool describe              reads lines FILE \t OFFSET \t LENGTH \t TRANSFORMS \t tensor|value, answers a JSON line each
 *     item_tool write DTYPE ALIGN SIZES        raw bytes on stdin → the item on stdout (SIZES: 4,3 or - for 0-d)
 *     item_tool head DTYPE ALIGN SIZES         layout as JSON, then head and tail with CRC 0 (for payloads nobody wants to pipe)
 *     item_tool value json|bytes|pickle        stdin → the item on stdout
 *     item_tool cast FROM TO                   raw elements on stdin → raw elements on stdout
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <isa-l/crc.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/jscan.h"
#include "format/torch_item.h"
#include "format/transform.h"
#include "tensor/cast.h"

enum { IN_MAX = 1 << 30 };

struct file_part {
	FILE *f;
	uint64_t offset;
};

static enum err file_read(void *user, uint64_t offset, void *into, size_t n)
{
	struct file_part *p = user;

	if (fseeko(p->f, (off_t)(p->offset + offset), SEEK_SET) != 0 || fread(into, 1, n, p->f) != n)
		return ERR(STORAGE_IO, "cannot read %zu bytes at %" PRIu64, n, offset);
	return OK;
}

static FALLIBLE enum err slurp(FILE *f, struct buf *b)
{
	char block[65536];
	size_t n;

	while ((n = fread(block, 1, sizeof block, f)) > 0)
		buf_put(b, block, n);
	return buf_status(b);
}

static FALLIBLE enum err undo(const struct item_source *src, struct str transforms, struct buf *out)
{
	struct transform *t CLEANUP(transform_free_ptr) = NULL;
	char in[1000], some[777]; /* odd sizes, so that every edge is met */
	uint64_t at = 0;
	struct str rest = { in, 0 };

	TRY(transform_new(transforms, &t));
	while (!transform_done(t)) {
		size_t n;
		if (rest.n == 0 && at < src->length) {
			rest = (struct str){ in, (size_t)num_min(sizeof in, src->length - at) };
			TRY(source_read(src, at, in, rest.n));
			at += rest.n;
		}
		size_t had = rest.n;
		TRY(transform_feed(t, &rest, some, sizeof some, &n));
		if (n == 0 && rest.n == had && at == src->length)
			TRY(transform_end(t));
		buf_put(out, some, n);
	}
	return buf_status(out);
}

static void put_list(struct buf *b, const char *name, uint32_t n, const int64_t *v)
{
	buf_printf(b, ",\"%s\":[", name);
	for (uint32_t i = 0; i < n; i++)
		buf_printf(b, "%s%" PRId64, i ? "," : "", v[i]);
	buf_putc(b, ']');
}

static FALLIBLE enum err describe_tensor(const struct item_source *src, struct buf *b)
{
	struct item_tensor t;
	uint64_t checked, unknown;

	TRY(item_read_tensor(src, &t));
	TRY(item_check_crc(src, false, &checked, &unknown));
	buf_printf(b, "{\"dtype\":\"%s\",\"storage_offset\":%" PRIu64 ",\"payload_off\":%" PRIu64
		   ",\"payload_bytes\":%" PRIu64 ",\"stored_bytes\":%" PRIu64, dtype_name(t.dtype), t.storage_offset,
		   t.payload_off, t.payload_bytes, t.stored_bytes);
	buf_printf(b, ",\"deflated\":%d,\"conj\":%d,\"neg\":%d,\"c_order\":%d,\"crc_known\":%d,\"checked\":%" PRIu64
		   ",\"unknown\":%" PRIu64, t.deflated, t.conj, t.neg, t.c_order, t.crc_known, checked, unknown);
	put_list(b, "sizes", t.ndim, t.sizes);
	put_list(b, "strides", t.ndim, t.strides);
	buf_putc(b, '}');
	return buf_status(b);
}

static FALLIBLE enum err describe_value(const struct item_source *src, struct buf *b)
{
	static const char *const kinds[] = { "json", "bytes", "opaque" };
	CLEANUP(item_value_free) struct item_value v = { 0 };
	uint64_t checked, unknown;

	TRY(item_read_value(src, &v));
	TRY(item_check_crc(src, false, &checked, &unknown));
	buf_printf(b, "{\"kind\":\"%s\",\"value\":", kinds[v.kind]);
	if (v.kind == ITEM_VALUE_JSON) {
		buf_put(b, v.text.p, v.text.len);
	} else if (v.kind == ITEM_VALUE_BYTES) {
		buf_putc(b, '"');
		buf_base64(b, v.text.p, v.text.len);
		buf_putc(b, '"');
	} else {
		TRY(jscan_put_str(b, (struct str){ (char *)v.text.p, v.text.len }));
	}
	buf_putc(b, '}');
	return buf_status(b);
}

static FALLIBLE enum err describe_line(char *line, struct buf *b)
{
	char *f[5], *save = NULL;
	CLEANUP(buf_free) struct buf plain = BUF_INIT(IN_MAX);

	for (int i = 0; i < 5; i++)
		if (!(f[i] = strtok_r(i ? NULL : line, "\t\n", &save)))
			return ERR(VALIDATION_FAILED, "five fields are needed");
	struct file_part part = { fopen(f[0], "rb"), strtoull(f[1], NULL, 10) };
	struct item_source src = { file_read, &part, strtoull(f[2], NULL, 10) };
	struct str whole;
	enum err e = part.f ? OK : ERR_SYS(STORAGE_IO, "cannot open %s", f[0]);
	if (!e && f[3][0] != '-') {
		e = undo(&src, str_of(f[3]), &plain);
		whole = (struct str){ (char *)plain.p, plain.len };
		src = source_memory(&whole);
	}
	if (!e)
		e = f[4][0] == 't' ? describe_tensor(&src, b) : describe_value(&src, b);
	if (part.f)
		fclose(part.f);
	return e;
}

static FALLIBLE enum err describe(void)
{
	char *line = NULL;
	size_t cap = 0;

	while (getline(&line, &cap, stdin) > 0) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(IN_MAX);
		enum err e = describe_line(line, &b);
		if (e) {
			buf_free(&b);
			buf_printf(&b, "{\"error\":\"%s\",\"text\":", err_code_name(e));
			buf_json_str(&b, str_of(err_last()->text));
			buf_putc(&b, '}');
		}
		fwrite(b.p, 1, b.len, stdout);
		putchar('\n');
	}
	free(line);
	return OK;
}

static FALLIBLE enum err parse_shape(char **argv, enum dtype *dtype, uint32_t *align, uint32_t *ndim, int64_t *sizes)
{
	char *save = NULL;

	TRY(dtype_parse(str_of(argv[0]), dtype));
	*align = (uint32_t)strtoul(argv[1], NULL, 10);
	*ndim = 0;
	if (argv[2][0] != '-')
		for (char *p = strtok_r(argv[2], ",", &save); p; p = strtok_r(NULL, ",", &save))
			sizes[(*ndim)++] = strtoll(p, NULL, 10);
	return OK;
}

static FALLIBLE enum err write_item(char **argv, bool with_payload)
{
	CLEANUP(buf_free) struct buf in = BUF_INIT(IN_MAX), out = BUF_INIT(IN_MAX);
	struct item_layout l;
	enum dtype dtype;
	uint32_t align, ndim;
	int64_t sizes[NDIM_MAX];

	TRY(parse_shape(argv, &dtype, &align, &ndim, sizes));
	TRY(item_layout_tensor(dtype, ndim, sizes, align, &l));
	if (with_payload)
		TRY(slurp(stdin, &in));
	else
		buf_printf(&out, "{\"payload_off\":%" PRIu64 ",\"tail_off\":%" PRIu64 ",\"length\":%" PRIu64 "}\n",
			   l.payload_off, l.tail_off, l.length);
	uint32_t crc = crc32_gzip_refl(0, in.p, in.len);
	TRY(item_put_head(&out, dtype, ndim, sizes, align, crc));
	if (with_payload) {
		must(out.len == l.payload_off && in.len == l.payload_bytes);
		buf_put(&out, in.p, in.len);
		buf_fill(&out, 0, l.tail_off - out.len);
	}
	TRY(item_put_tail(&out, dtype, ndim, sizes, align, crc));
	must(!with_payload || out.len == l.length);
	fwrite(out.p, 1, out.len, stdout);
	return OK;
}

static FALLIBLE enum err write_value(const char *kind)
{
	CLEANUP(buf_free) struct buf in = BUF_INIT(IN_MAX), out = BUF_INIT(IN_MAX);

	TRY(slurp(stdin, &in));
	if (kind[0] == 'j')
		TRY(item_put_value_json(&out, (struct str){ (char *)in.p, in.len }));
	else if (kind[0] == 'b')
		TRY(item_put_value_bytes(&out, in.p, in.len));
	else
		TRY(item_put_value_pickle(&out, in.p, in.len));
	fwrite(out.p, 1, out.len, stdout);
	return OK;
}

static FALLIBLE enum err cast_stdin(const char *from, const char *to)
{
	CLEANUP(buf_free) struct buf in = BUF_INIT(IN_MAX), out = BUF_INIT(IN_MAX);
	enum dtype a, b;
	unsigned char *p;

	TRY(dtype_parse(str_of(from), &a));
	TRY(dtype_parse(str_of(to), &b));
	TRY(slurp(stdin, &in));
	size_t n = in.len / dtype_bytes(a);
	TRY(buf_reserve(&out, n * dtype_bytes(b), &p));
	TRY(cast_run(p, b, in.p, a, n));
	fwrite(out.p, 1, out.len, stdout);
	return OK;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	enum err e;

	if (strcmp(what, "describe") == 0)
		e = describe();
	else if (argc == 5 && strcmp(what, "write") == 0)
		e = write_item(argv + 2, true);
	else if (argc == 5 && strcmp(what, "head") == 0)
		e = write_item(argv + 2, false);
	else if (argc == 3 && strcmp(what, "value") == 0)
		e = write_value(argv[2]);
	else if (argc == 4 && strcmp(what, "cast") == 0)
		e = cast_stdin(argv[2], argv[3]);
	else
		e = ERR(VALIDATION_FAILED, "usage: item_tool describe|write|head|value|cast …");
	if (e)
		fprintf(stderr, "%s: %s\n", err_code_name(e), err_last()->text);
	return e != OK;
}
