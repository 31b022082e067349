/* item_walk.c: see item_walk.h. */
#include "format/item_walk.h"

#include "base/num.h"
#include "base/reader.h"
#include "format/zip.h"

enum { END_BYTES = 22, END64_BYTES = 56, LOCATOR_BYTES = 20, TRIES_MAX = 1000 };

static const unsigned char item_mark[] = { 'P', 'K', 3, 4 }, entry_mark[] = { 'P', 'K', 1, 2 }, end_mark[] = { 'P', 'K', 5, 6 },
			   end64_mark[] = { 'P', 'K', 6, 6 };

struct walk {
	const struct item_source *file;
	uint64_t end;
	enum err (*tick)(void *user);
	void *user;
	unsigned char *piece;          /* ITEM_WALK_PIECE bytes */
	uint64_t tries;                /* marks that ended no archive, in the item in hand */
};

static FALLIBLE enum err read_piece(struct walk *w, uint64_t at, size_t *n)
{
	*n = (size_t)num_min(ITEM_WALK_PIECE, w->end - at);
	TRY(w->tick ? w->tick(w->user) : OK);
	return source_read(w->file, at, w->piece, *n);
}

/* Moves *at to the next byte that is not zero, or to the end. */
static FALLIBLE enum err skip_zeros(struct walk *w, uint64_t *at)
{
	while (*at < w->end) {
		size_t n, i = 0;
		TRY(read_piece(w, *at, &n));
		while (i < n && w->piece[i] == 0)
			i++;
		*at += i;
		if (i < n)
			break;
	}
	return OK;
}

/* Do the end records at `at` say that their archive begins at `begin`? */
static FALLIBLE enum err names_begin(const struct walk *w, uint64_t begin, uint64_t at, bool *out)
{
	unsigned char end[END_BYTES], end64[END64_BYTES], entry[sizeof entry_mark];
	uint64_t behind = at - begin;  /* the directory */

	*out = false;
	TRY(source_read(w->file, at, end, sizeof end));
	struct reader r = reader_of(end + 12, 10);
	uint64_t bytes = reader_u32(&r), off = reader_u32(&r);
	if (reader_u16(&r) != 0) /* a comment, which PyTorch has no use for */
		return OK;
	if (behind >= LOCATOR_BYTES + END64_BYTES) {
		TRY(source_read(w->file, at - LOCATOR_BYTES - END64_BYTES, end64, sizeof end64));
		if (memcmp(end64, end64_mark, sizeof end64_mark) == 0) {
			behind -= LOCATOR_BYTES + END64_BYTES;
			r = reader_of(end64 + 40, 16);
			bytes = reader_u64(&r);
			off = reader_u64(&r);
		}
	}
	if (bytes < sizeof entry || !num_inside(off, bytes, behind) || off + bytes != behind)
		return OK;
	TRY(source_read(w->file, begin + off, entry, sizeof entry));
	*out = memcmp(entry, entry_mark, sizeof entry_mark) == 0;
	return OK;
}

struct window {
	const struct item_source *file;
	uint64_t offset;
};

static enum err read_window(void *user, uint64_t offset, void *into, size_t n)
{
	const struct window *win = user;

	return source_read(win->file, win->offset + offset, into, n);
}

static bool is_archive(const struct walk *w, uint64_t begin, uint64_t end)
{
	struct window win = { w->file, begin };
	struct item_source src = { read_window, &win, end - begin };
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	bool begins = false;

	if (zip_open(&src, &z)) {
		err_clear();
		return false;
	}
	for (uint64_t i = 0; i < z->count && !begins; i++)
		begins = z->records[i].header_off == 0;
	return begins;
}

static FALLIBLE enum err try_end(struct walk *w, uint64_t begin, uint64_t at, bool *found)
{
	*found = false;
	if (w->end - at < END_BYTES)
		return OK;
	TRY(names_begin(w, begin, at, found));
	*found = *found && is_archive(w, begin, at + END_BYTES);
	if (!*found && ++w->tries > TRIES_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d marks of an archive's end that are none", TRIES_MAX);
	return OK;
}

/* The end of the archive that begins at `begin`. */
static FALLIBLE enum err find_end(struct walk *w, uint64_t begin, uint64_t *end_out)
{
	w->tries = 0;
	for (uint64_t at = begin; at + END_BYTES <= w->end;) {
		size_t n, from = 0;
		bool found;
		TRY(read_piece(w, at, &n));
		for (unsigned char *p; (p = memmem(w->piece + from, n - from, end_mark, sizeof end_mark));) {
			uint64_t mark = at + (uint64_t)(p - w->piece);
			from = (size_t)(p - w->piece) + 1;
			TRY(try_end(w, begin, mark, &found));
			*end_out = mark + END_BYTES;
			if (found)
				return OK;
		}
		if (n < ITEM_WALK_PIECE)
			break;
		at += n - (sizeof end_mark - 1);
	}
	return ERR(FORMAT_ZIP, "an item without an end");
}

static FALLIBLE enum err one_item(struct walk *w, uint64_t *at, item_spans *out)
{
	unsigned char mark[sizeof item_mark] = { 0 };
	struct item_span *span;
	uint64_t end = 0;

	TRY(source_read(w->file, *at, mark, (size_t)num_min(sizeof mark, w->end - *at)));
	if (memcmp(mark, item_mark, sizeof mark) != 0)
		return ERR(FORMAT_ZIP, "neither an item nor zeros");
	TRY(find_end(w, *at, &end));
	TRY(vec_push(out, &span));
	*span = (struct item_span){ *at, end - *at };
	*at = end;
	return OK;
}

enum err item_walk(const struct item_source *file, uint64_t end, enum err (*tick)(void *user), void *user, item_spans *out)
{
	CLEANUP(mem_free_ptr) unsigned char *piece = mem_alloc(ITEM_WALK_PIECE);
	struct walk w = { .file = file, .end = num_min(end, file->length), .tick = tick, .user = user, .piece = piece };
	uint64_t at = 0;

	NEED(piece, "no memory to walk through a file");
	for (;;) {
		TRY(skip_zeros(&w, &at));
		if (at == w.end)
			return OK;
		struct err_info was;
		uint64_t begin = at;
		enum err e = one_item(&w, &at, out);
		was = *err_last();
		if (e && was.offset < 0) {
			was.offset = (int64_t)begin;
			err_restore(&was);
		}
		TRY(e);
	}
}
