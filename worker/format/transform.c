/* transform.c: see transform.h. Stages are joined by small buffers: stage 0 reads the stored bytes, the last one gives the caller
 * what it wants. Each stage takes what the one before has left; the loop ends when nothing moves any more. */
#include "format/transform.h"

#include <zlib.h>
#include <zstd.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"

/* As large as PyTorch's reader allows; a frame of default level needs 2 MiB. */
enum { WINDOW_LOG_MAX = 27, LINK_BYTES = 64 << 10 };

struct stage {
	ZSTD_DCtx *zstd;
	z_stream *deflate;
	unsigned char *link;             /* what this stage gave and the next has not taken yet */
	size_t link_at, link_n;
	bool done;
};

struct transform {
	struct stage stages[TRANSFORM_STAGES_MAX];
	uint32_t count;
};

static void *zlib_alloc(void *, uInt count, uInt bytes)
{
	return mem_zalloc(count, bytes);
}

static void zlib_free(void *, void *p)
{
	mem_free(p);
}

static FALLIBLE enum err add_zstd(struct transform *t)
{
	struct stage *s = &t->stages[t->count];

	s->zstd = ZSTD_createDCtx();
	NEED(s->zstd, "no memory for a zstd decoder");
	t->count++;
	if (ZSTD_isError(ZSTD_DCtx_setParameter(s->zstd, ZSTD_d_windowLogMax, WINDOW_LOG_MAX)))
		return ERR(INTERNAL, "zstd refuses a window of 2^%d bytes", WINDOW_LOG_MAX);
	return OK;
}

/* name[@domain][/version]; the domain says where the name comes from and changes nothing. */
static FALLIBLE enum err add_descriptor(struct transform *t, struct str d)
{
	size_t name_n = 0, slash = 0;

	while (slash < d.n && d.p[slash] != '/')
		slash++;
	while (name_n < slash && d.p[name_n] != '@')
		name_n++;
	struct str name = { d.p, name_n };
	struct str version = { d.p + slash, d.n - slash };
	bool known = str_is(name, "stream.zstd") && (version.n == 0 || str_is(version, "/1") ||
						     str_starts(version, "/1."));
	if (!known)
		return ERR(FORMAT_TRANSFORM, "transform '%.*s' is not known", (int)num_min(d.n, 100), d.p);
	if (t->count == TRANSFORM_STAGES_MAX)
		return ERR(FORMAT_TRANSFORM, "more than %d transforms", TRANSFORM_STAGES_MAX);
	return add_zstd(t);
}

static FALLIBLE enum err add_links(struct transform *t)
{
	for (uint32_t i = 0; i + 1 < t->count; i++) {
		t->stages[i].link = mem_alloc(LINK_BYTES);
		NEED(t->stages[i].link, "no memory for a transform");
	}
	return OK;
}

enum err transform_new(struct str descriptors, struct transform **out)
{
	struct transform *t CLEANUP(transform_free_ptr) = mem_zalloc(1, sizeof *t);
	size_t from = 0;

	NEED(t, "no memory for a transform");
	for (size_t i = 0; i <= descriptors.n; i++) {
		if (i < descriptors.n && descriptors.p[i] != ' ')
			continue;
		if (i > from)
			TRY(add_descriptor(t, (struct str){ descriptors.p + from, i - from }));
		from = i + 1;
	}
	if (t->count == 0)
		return ERR(FORMAT_TRANSFORM, "no transform is named");
	TRY(add_links(t));
	*out = move(t);
	return OK;
}

enum err transform_new_deflate(struct transform **out)
{
	struct transform *t CLEANUP(transform_free_ptr) = mem_zalloc(1, sizeof *t);
	z_stream *z = mem_zalloc(1, sizeof *z);

	if (t)
		t->stages[0].deflate = z;
	if (!t || !z) {
		if (!t)
			mem_free(z);
		return ERR(NO_MEMORY, "no memory for a transform");
	}
	z->zalloc = zlib_alloc;
	z->zfree = zlib_free;
	if (inflateInit2(z, -MAX_WBITS) != Z_OK)
		return ERR(NO_MEMORY, "no memory for a deflate decoder");
	t->count = 1;
	*out = move(t);
	return OK;
}

static void transform_free(struct transform *t)
{
	if (!t)
		return;
	each(s, t->stages, TRANSFORM_STAGES_MAX) {
		ZSTD_freeDCtx(s->zstd);
		if (s->deflate)
			inflateEnd(s->deflate); /* harmless when init failed: it checks the state */
		mem_free(s->deflate);
		mem_free(s->link);
	}
	mem_free(t);
}

void transform_free_ptr(struct transform **t)
{
	transform_free(*t);
}

static FALLIBLE enum err zstd_step(struct stage *s, struct str *in, void *out, size_t cap, size_t *out_n)
{
	ZSTD_inBuffer from = { in->p, in->n, 0 };
	ZSTD_outBuffer to = { out, cap, 0 };
	size_t left = ZSTD_decompressStream(s->zstd, &to, &from);

	if (ZSTD_isError(left))
		return ERR(FORMAT_TRANSFORM, "zstd: %s", ZSTD_getErrorName(left));
	s->done = left == 0;
	*in = (struct str){ in->p + from.pos, in->n - from.pos };
	*out_n = to.pos;
	return OK;
}

static FALLIBLE enum err deflate_step(struct stage *s, struct str *in, void *out, size_t cap, size_t *out_n)
{
	z_stream *z = s->deflate;
	uInt give = (uInt)num_min(in->n, 1u << 30), room = (uInt)num_min(cap, 1u << 30);

	z->next_in = (unsigned char *)(uintptr_t)in->p; /* zlib's interface has no const by default */
	z->avail_in = give;
	z->next_out = out;
	z->avail_out = room;
	int r = inflate(z, Z_NO_FLUSH);
	if (r != Z_OK && r != Z_STREAM_END && r != Z_BUF_ERROR)
		return ERR(FORMAT_ZIP, "deflate: %s", z->msg ? z->msg : "damaged data");
	s->done = r == Z_STREAM_END;
	size_t used = give - z->avail_in;
	*in = (struct str){ in->p + used, in->n - used };
	*out_n = room - z->avail_out;
	return OK;
}

static FALLIBLE enum err step(struct stage *s, struct str *in, void *out, size_t cap, size_t *out_n)
{
	*out_n = 0;
	if (s->done)
		return OK;
	return s->zstd ? zstd_step(s, in, out, cap, out_n) : deflate_step(s, in, out, cap, out_n);
}

/* One round over the inner stages: each refills its empty link. */
static FALLIBLE enum err fill_links(struct transform *t, struct str *in, bool *moved)
{
	for (uint32_t i = 0; i + 1 < t->count; i++) {
		struct stage *s = &t->stages[i], *before = i ? s - 1 : NULL;
		if (s->link_at < s->link_n || s->done)
			continue;
		struct str local = before ? (struct str){ (char *)before->link + before->link_at,
							  before->link_n - before->link_at } : *in;
		size_t had = local.n;
		s->link_at = 0;
		TRY(step(s, &local, s->link, LINK_BYTES, &s->link_n));
		*moved |= s->link_n > 0 || local.n != had;
		if (before)
			before->link_at = before->link_n - local.n;
		else
			*in = local;
	}
	return OK;
}

enum err transform_feed(struct transform *t, struct str *in, void *out, size_t out_cap, size_t *out_n)
{
	struct stage *last = &t->stages[t->count - 1], *before = t->count > 1 ? last - 1 : NULL;
	size_t total = 0;

	for (bool moved = true; moved && !last->done;) {
		moved = false;
		TRY(fill_links(t, in, &moved));
		struct str local = before ? (struct str){ (char *)before->link + before->link_at,
							  before->link_n - before->link_at } : *in;
		size_t had = local.n, n;
		TRY(step(last, &local, (char *)out + total, out_cap - total, &n));
		total += n;
		moved |= n > 0 || local.n != had;
		if (before)
			before->link_at = before->link_n - local.n;
		else
			*in = local;
		if (total == out_cap && !last->done && n > 0)
			break;
	}
	*out_n = total;
	return OK;
}

bool transform_done(const struct transform *t)
{
	return t->stages[t->count - 1].done;
}

enum err transform_end(const struct transform *t)
{
	if (transform_done(t))
		return OK;
	return t->stages[0].zstd ? ERR(FORMAT_TRANSFORM, "the zstd stream ends before its end")
				 : ERR(FORMAT_ZIP, "the deflate stream ends before its end");
}
