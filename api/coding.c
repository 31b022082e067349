/* coding.c: see coding.h. Quick gzip is ISA-L's, which takes a few milliseconds for a megabyte: answers are coded in the event loop. */
#include "api/coding.h"

#include <isa-l/igzip_lib.h>
#include <zlib.h>
#include <zstd.h>

#include "api/accept.h"
#include "base/mem.h"

enum { GZIP_SMALL = 9, ZSTD_SMALL = 15, ZSTD_QUICK = 1, GZIP_HEADROOM = 1024 };

const char *const coding_names[CODING_COUNT] = { [CODING_GZIP] = "gzip", [CODING_ZSTD] = "zstd" };

enum coding coding_choose(const char *list)
{
	int gzip = list ? accept_quality(list, "gzip") : 0, zstd = list ? accept_quality(list, "zstd") : 0;

	if (gzip == 0 && zstd == 0)
		return CODING_NONE;
	return zstd >= gzip ? CODING_ZSTD : CODING_GZIP;
}

static FALLIBLE enum err zstd_apply(int level, struct str bytes, struct buf *out)
{
	unsigned char *at;
	size_t room = ZSTD_compressBound(bytes.n), before = out->len;

	TRY(buf_reserve(out, room, &at));
	size_t n = ZSTD_compress(at, room, bytes.p, bytes.n, level);
	if (ZSTD_isError(n))
		return ERR(NO_MEMORY, "cannot compress an answer");
	out->len = before + n;
	return OK;
}

static FALLIBLE enum err gzip_small(struct str bytes, struct buf *out)
{
	enum { GZIP_WINDOW = 15 + 16 }; /* 16: a gzip header */
	z_stream z = { .next_in = (unsigned char *)(uintptr_t)bytes.p, .avail_in = (unsigned)bytes.n };
	size_t before = out->len;

	if (bytes.n > UINT32_MAX / 2 || deflateInit2(&z, GZIP_SMALL, Z_DEFLATED, GZIP_WINDOW, MAX_MEM_LEVEL, Z_DEFAULT_STRATEGY) != Z_OK)
		return ERR(NO_MEMORY, "cannot compress an answer");
	size_t room = deflateBound(&z, bytes.n);
	enum err e = buf_reserve(out, room, &z.next_out);
	z.avail_out = (unsigned)room;
	if (!e && deflate(&z, Z_FINISH) != Z_STREAM_END)
		e = ERR(INTERNAL, "cannot compress an answer");
	if (!e)
		out->len = before + z.total_out;
	deflateEnd(&z);
	return e;
}

static FALLIBLE enum err gzip_quick(struct str bytes, struct buf *out)
{
	CLEANUP(mem_free_ptr) unsigned char *level = mem_alloc(ISAL_DEF_LVL1_DEFAULT);
	CLEANUP(mem_free_ptr) struct isal_zstream *z = mem_zalloc(1, sizeof *z); /* 80 KiB: too much for a stack */
	size_t room = bytes.n + bytes.n / 8 + GZIP_HEADROOM, before = out->len;

	if (!level || !z || bytes.n > UINT32_MAX / 2)
		return ERR(NO_MEMORY, "cannot compress an answer");
	isal_deflate_init(z);
	z->level = 1;
	z->level_buf = level;
	z->level_buf_size = ISAL_DEF_LVL1_DEFAULT;
	z->gzip_flag = IGZIP_GZIP;
	z->end_of_stream = 1;
	z->next_in = (unsigned char *)(uintptr_t)bytes.p;
	z->avail_in = (uint32_t)bytes.n;
	TRY(buf_reserve(out, room, &z->next_out));
	z->avail_out = (uint32_t)room;
	if (isal_deflate(z) != COMP_OK || z->internal_state.state != ZSTATE_END)
		return ERR(INTERNAL, "cannot compress an answer");
	out->len = before + z->total_out;
	return OK;
}

FALLIBLE enum err coding_apply(enum coding coding, bool small, struct str bytes, struct buf *out)
{
	must(coding == CODING_GZIP || coding == CODING_ZSTD);
	if (coding == CODING_ZSTD)
		return zstd_apply(small ? ZSTD_SMALL : ZSTD_QUICK, bytes, out);
	return small ? gzip_small(bytes, out) : gzip_quick(bytes, out);
}
