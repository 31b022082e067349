/* lookup_digests.c: the digests of all images of a state dict's generation, in the form of a checkpoint's manifest (store/manifest.h): of
 * each header, and of each tensor's bytes by blocks, unless headers_only. Who reads the images elsewhere, as files of a checkpoint, checks
 * them as such. */
#include <sys/mman.h>
#include <unistd.h>

#include "base/num.h"
#include "format/format.h"
#include "os/fs.h"
#include "query/lookup.h"
#include "runner/build.h"
#include "runner/input.h"
#include "store/manifest.h"

enum { TEXT_MAX = 256 << 20 };

struct digests {
	const struct rank_segments *segments;
	const int *fds;
	void *block;                   /* BUILD_TASK_BYTES */
	struct buf text, ends;         /* ends: of the blocks of one item, as text */
	bool headers_only;
};

static FALLIBLE enum err read_block(const struct digests *d, const struct rank_segment *s, uint64_t at, uint64_t n, char hex[33],
				    struct digest_stream *whole)
{
	unsigned char xxh3[16];

	TRY(err_at_rank(input_segment_error(fs_pread(d->fds[s->fd], d->block, n, at, "segment")), s->rank));
	digest_xxh3(d->block, n, xxh3);
	digest_add(whole, xxh3, sizeof xxh3);
	digest_hex(xxh3, hex);
	return OK;
}

/* Bytes of one image: a tensor's, or its header. */
static FALLIBLE enum err put_item(struct digests *d, const struct rank_segment *s, uint64_t offset, uint64_t n)
{
	struct digest_stream whole;
	struct digest all;
	char hex[33];

	digest_begin_one(&whole, DIGEST_XXH3);
	d->ends.len = 0;
	for (uint64_t at = 0; at < n || (at == 0 && n == 0);) {
		uint64_t part = num_min(n - at, BUILD_TASK_BYTES);
		TRY(read_block(d, s, offset + at, part, hex, &whole));
		at += part;
		buf_printf(&d->ends, "%s%ju,\"%s\"", d->ends.len ? "," : "", (uintmax_t)at, hex);
		if (n == 0)
			break;
	}
	digest_end(&whole, &all);
	if (n > BUILD_TASK_BYTES)
		digest_hex(all.xxh3_128, hex);
	buf_printf(&d->text, "[%ju,%ju,\"00000000\",\"%s\"", (uintmax_t)offset, (uintmax_t)n, hex);
	if (n > BUILD_TASK_BYTES) {
		buf_puts(&d->text, ",[");
		buf_put(&d->text, d->ends.p, d->ends.len);
		buf_puts(&d->text, "]");
	}
	buf_puts(&d->text, ",true]");
	TRY(buf_status(&d->ends));
	return buf_status(&d->text);
}

static FALLIBLE enum err put_image(struct digests *d, uint32_t rank, const struct image *image, uint64_t header)
{
	const struct rank_segment *s = &d->segments->v[rank];
	char name[FORMAT_FILE_MAX];

	format_image_payload(rank, d->segments->count, name);
	buf_printf(&d->text, "%s\n{\"name\":\"%s\",\"bytes\":%ju,\"items\":[", rank ? "," : "", name, (uintmax_t)s->image_bytes);
	TRY(put_item(d, s, 0, header));
	for (uint32_t i = 0; !d->headers_only && i < image_part_count(image); i++) {
		struct image_part part = image_part_at(image, i);
		buf_puts(&d->text, ",");
		TRY(err_at_fqn(put_item(d, s, part.offset, part.bytes), part.fqn.p, part.fqn.n));
	}
	buf_puts(&d->text, "]}");
	return buf_status(&d->text);
}

static FALLIBLE enum err put_rank(struct digests *d, uint32_t rank)
{
	const struct rank_segment *s = &d->segments->v[rank];
	CLEANUP(mem_free_ptr) void *header = NULL;
	struct image *image = NULL;
	uint64_t n = 0;

	TRY(input_read_header(s, d->fds, &header, &n));
	TRY(err_at_rank(image_parse(header, n, s->image_bytes, s->rank, &image), s->rank));
	enum err e = put_image(d, rank, image, n);
	image_free(image);
	return e;
}

static FALLIBLE enum err put_all(struct digests *d, const json_t *q)
{
	uint64_t bytes = 0;

	for (uint32_t r = 0; r < d->segments->count; r++)
		TRY(num_add(bytes, d->segments->v[r].image_bytes, &bytes));
	const char *name = json_string_value(json_object_get(q, "state_dict"));
	buf_json_member(&d->text, "{\"dcpd\":1,\"kind\":\"images\",\"state_dict\":", str_of(name ? name : ""));
	buf_printf(&d->text, ",\"generation\":%ju,\"world_size\":%u,\"bytes\":%ju,\"files\":[", (uintmax_t)d->segments->generation,
		   d->segments->count, (uintmax_t)bytes);
	for (uint32_t r = 0; r < d->segments->count; r++)
		TRY(put_rank(d, r));
	buf_puts(&d->text, "]");
	return manifest_put_self(&d->text);
}

static FALLIBLE enum err answer(const struct digests *d, const json_t *q, struct buf *out, int *fd_out)
{
	TRY(lookup_room(q, d->text.len));
	*fd_out = memfd_create("dcpd-digests", MFD_CLOEXEC);
	if (*fd_out < 0)
		return ERR_SYS(SYSTEM, "cannot make a memfd for an answer");
	buf_printf(out, "{\"bytes\":%zu}", d->text.len);
	return fs_pwrite(*fd_out, d->text.p, d->text.len, 0, "answer");
}

enum err lookup_digests(struct worker *, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out)
{
	CLEANUP(rank_segments_free) struct rank_segments segments;
	struct digests d = { .segments = &segments, .fds = fds, .text = BUF_INIT(TEXT_MAX), .ends = BUF_INIT(TEXT_MAX),
			     .headers_only = json_is_true(json_object_get(q, "headers_only")) };

	TRY(rank_segments_read(q, 0, fd_count, &segments));
	d.block = mem_alloc(BUILD_TASK_BYTES);
	enum err e = d.block ? put_all(&d, q) : ERR(NO_MEMORY, "no memory for digests");
	e = e ?: answer(&d, q, out, fd_out);
	if (e)
		fs_drop(fd_out);
	buf_free(&d.text);
	buf_free(&d.ends);
	mem_free(d.block);
	return e;
}
