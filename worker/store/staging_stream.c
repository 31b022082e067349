/* staging_stream.c: a file of a staging directory whose bytes come in pieces and whose size nobody knows before (see staging.h). */
#include <string.h>

#include "base/num.h"
#include "io/digest.h"
#include "store/staging.h"

enum { STREAM_BYTES = 1 << 20 };

struct stream {
	const char *name;
	struct store_at file;
	uint64_t at;
	unsigned char *buffer;
	size_t used;
	struct digest_stream digest;
};

static FALLIBLE enum err flush(struct stream *s)
{
	digest_add(&s->digest, s->buffer, s->used);
	TRY(s->file.store->ops->write(s->file, s->buffer, s->used, s->at, s->name));
	s->at += s->used;
	s->used = 0;
	return OK;
}

static enum err take(void *user, const void *bytes, size_t n)
{
	struct stream *s = user;

	for (const unsigned char *p = bytes; n > 0;) {
		size_t part = (size_t)num_min(n, STREAM_BYTES - s->used);
		memcpy(s->buffer + s->used, p, part);
		s->used += part;
		p += part;
		n -= part;
		if (s->used == STREAM_BYTES)
			TRY(flush(s));
	}
	return OK;
}

enum err staging_put_stream(struct staging *st, const char *name, staging_source source, void *from, struct staging_digest *out)
{
	struct stream s = { .name = name, .buffer = mem_alloc(STREAM_BYTES) };
	struct digest digest;

	digest_begin_one(&s.digest, DIGEST_XXH3);
	enum err e = s.buffer ? store_open_file(st->dir, name, STORE_WRITE | STORE_NEW, &s.file) : ERR(NO_MEMORY, "no memory for a file");
	e = e ?: source(from, take, &s);
	e = e ?: flush(&s);
	e = e ?: st->store->ops->finish(&s.file, true, name);
	store_close(&s.file);
	mem_free(s.buffer);
	digest_end(&s.digest, &digest);
	memcpy(out->xxh3_128, digest.xxh3_128, sizeof out->xxh3_128);
	out->bytes = s.at;
	return err_at_file(e, name, -1);
}

enum err staging_mtime(const struct staging *s, const char *name, int64_t *ns_out)
{
	struct stat st;

	TRY(err_at_file(store_stat(s->dir, name, &st), name, -1));
	if (__builtin_mul_overflow((int64_t)st.st_mtim.tv_sec, 1000000000, ns_out) ||
	    __builtin_add_overflow(*ns_out, (int64_t)st.st_mtim.tv_nsec, ns_out) || *ns_out < 0)
		*ns_out = 0;
	return OK;
}
