/* exec_cached.c: a scan whose bytes are in memory already: in the page cache, or in a segment that has what the checkpoint has.
 *
 * Bytes that go to one place, or nowhere (verify), are taken from a mapping of the file and hashed on their way: one pass over memory.
 * Where nothing can be mapped, cached pages are read and hashed piece by piece, while a piece is in the CPU's cache. */
#include "base/num.h"
#include "io/copy.h"
#include "os/fs.h"
#include "runner/exec_impl.h"

enum { PIECE = 256 << 10, MAPPED_MIN = 256 << 10 };

struct window_copy {
	struct digest_stream *stream;
	unsigned char *into;           /* NULL: nowhere */
	const unsigned char *from;
	uint64_t bytes;
};

static void copy_window(void *user)
{
	const struct window_copy *c = user;

	if (c->into)
		copy_hashed(c->stream, c->into, c->from, c->bytes);
	else
		digest_add(c->stream, c->from, c->bytes);
}

/* Takes a range from a mapping of its file. false: it must be read, which also tells what is wrong if file or target has shrunk. */
static bool take_mapped(int fd, uint64_t offset, struct window_copy *c)
{
	struct err_info before = *err_last();
	struct fs_window w;

	if (!fs_map_cached(fd, offset, c->bytes, &w))
		return false;
	c->from = w.p;
	bool taken = seg_guard(copy_window, c) == OK;
	fs_unmap_cached(&w);
	if (taken)
		fs_count(fd, false, c->bytes);
	else
		err_restore(&before);
	return taken;
}

enum err exec_read_cached(struct slot *s, const struct slot_scan *sc, int fd, uint64_t offset, unsigned which,
			  struct digest_stream *stream, bool *got_out)
{
	const struct run *run = s->x->run;
	const struct run_scan *scan = &run->scans[sc->scan];
	bool keep = exec_fills(run) || run->head->opts.values || run->srcs[scan->src].shape_at;
	unsigned char *into = sc->direct ? sc->direct_at : s->in;
	uint64_t bytes = scan->end - scan->begin;
	struct window_copy c = { .stream = stream, .into = keep ? into : NULL, .bytes = bytes };

	*got_out = false;
	if (fs_cached(fd, offset, bytes) == FS_NOT_CACHED)
		return OK;
	digest_begin_one(stream, which);
	*got_out = bytes >= MAPPED_MIN && (sc->direct || (!keep && which)) && take_mapped(fd, offset, &c);
	if (*got_out)
		return OK;
	digest_begin_one(stream, which); /* a part of them may be in it */
	for (uint64_t at = 0; at < bytes; at += PIECE) {
		size_t n = (size_t)num_min(PIECE, bytes - at);
		unsigned char *piece = into + (keep ? at : 0);
		if (!fs_pread_cached(fd, piece, n, offset + at))
			return OK;
		if (stream->which)
			digest_add(stream, piece, n);
	}
	*got_out = true;
	return OK;
}
