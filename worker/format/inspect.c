/* inspect.c: see inspect.h. Where the bytes may be anything, such as the payload of a tensor, only that counts as a pickle which ends as
 * one, or which gets as far as a call: a loader that fails sooner has run nothing. */
#include "format/inspect.h"

#include <stdio.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/reader.h"
#include "format/pickle.h"
#include "format/zip.h"

enum { DEPTH_MAX = 4, STREAM_PICKLES = 5, ROW_MAX = 64, SNIFF = 16, HEADER_MAX = 64 << 10 };
#define BYTES_MAX (256ull << 20)  /* of one pickle, but for those that must be there */

static const unsigned char stream_number[] = { 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19 };

/* The bytes that are looked into now. */
struct part {
	struct inspect *in;
	struct inspect_place place;    /* offset: of the first of them */
	unsigned depth;
	bool expected;
	bool probe;                    /* only finds out whether they call something */
	bool calls;
};

static FALLIBLE enum err look_into(const struct part *p, const unsigned char *bytes, uint64_t n);

/* -------------------------------------------------------------------------------------------------------- notes */

enum err inspect_begin(struct inspect *in)
{
	in->arena = arena_new(UINT64_MAX); /* the lists are bounded, and their names */
	return in->arena ? OK : ERR(NO_MEMORY, "no memory for a report");
}

void inspect_end(struct inspect *in)
{
	vec_free(&in->globals);
	vec_free(&in->broken);
	map_free(&in->index);
	arena_free(in->arena);
}

bool inspect_is_safe(const struct inspect *in)
{
	return !in->runs && in->broken_count == 0;
}

static struct str cut(struct str s)
{
	uint64_t n = num_min(s.n, INSPECT_NAME);

	while (n < s.n && n > 0 && ((unsigned char)s.p[n] & 0xC0) == 0x80) /* not inside a character */
		n--;
	return (struct str){ s.p, n };
}

static FALLIBLE enum err keep_place(struct inspect *in, const struct inspect_place *from, uint64_t offset, struct inspect_place *out)
{
	out->offset = offset;
	TRY(arena_str(in->arena, cut(from->file), &out->file));
	TRY(arena_str(in->arena, cut(from->record), &out->record));
	return arena_str(in->arena, cut(from->fqn), &out->fqn);
}

static FALLIBLE enum err note_why(struct inspect *in, const struct inspect_place *place, uint64_t offset, const char *why)
{
	struct inspect_broken *b;

	if (in->broken_count++ >= INSPECT_BROKEN)
		return OK;
	TRY(vec_push(&in->broken, &b));
	TRY(keep_place(in, place, offset, &b->place));
	return arena_str(in->arena, str_of(why), &b->why);
}

/* Of the error in err_last(), whose offset counts from `from`. */
static FALLIBLE enum err note_error(struct inspect *in, const struct inspect_place *place, uint64_t from)
{
	struct err_info e = *err_last();

	err_clear();
	return note_why(in, place, e.offset >= 0 ? from + (uint64_t)e.offset : from, e.text[0] ? e.text : err_title(e.code));
}

enum err inspect_note_broken(struct inspect *in, const struct inspect_file *file)
{
	const struct err_info *e = err_last();
	struct inspect_place place = { .file = e->file[0] ? str_of(e->file) : file->name, .fqn = e->fqn[0] ? str_of(e->fqn) : file->fqn };
	char name[sizeof e->file], fqn[sizeof e->fqn];

	snprintf(name, sizeof name, "%.*s", (int)num_min(place.file.n, sizeof name - 1), place.file.n ? place.file.p : "");
	snprintf(fqn, sizeof fqn, "%.*s", (int)num_min(place.fqn.n, sizeof fqn - 1), place.fqn.n ? place.fqn.p : "");
	place.file = str_of(name);
	place.fqn = str_of(fqn);
	return note_error(in, &place, 0);
}

static FALLIBLE enum err find_global(struct part *p, struct str module, struct str name, uint64_t at, struct inspect_global **out)
{
	struct inspect *in = p->in;
	char key[2 * INSPECT_NAME + 2];
	struct str m = cut(module), n = cut(name), text;
	struct inspect_global *g;

	int bytes = snprintf(key, sizeof key, "%.*s\n%.*s", (int)m.n, m.n ? m.p : "", (int)n.n, n.n ? n.p : "");
	text = (struct str){ key, (size_t)bytes };
	uint32_t i = map_get(&in->index, text);
	*out = i == MAP_NONE ? NULL : &in->globals.v[i];
	if (*out || in->globals.n >= INSPECT_GLOBALS)
		return OK;
	TRY(arena_str(in->arena, text, &text));
	TRY(map_put(&in->index, text, (uint32_t)in->globals.n));
	TRY(vec_push(&in->globals, &g));
	g->module = (struct str){ text.p, num_min(m.n, text.n) };
	g->name = (struct str){ text.p + m.n + 1, n.n };
	g->is_data = pickle_is_data(module, name);
	TRY(keep_place(in, &p->place, p->place.offset + at, &g->first));
	*out = g;
	return OK;
}

static enum err on_deed(void *user, enum pickle_deed deed, struct str module, struct str name, uint64_t at)
{
	struct part *p = user;
	struct inspect_global *g;

	p->calls = p->calls || deed != PICKLE_IMPORT;
	if (p->probe)
		return OK;
	if (deed == PICKLE_CHANGE || !pickle_is_data(module, name))
		p->in->runs = true;
	TRY(find_global(p, module, name, at, &g));
	if (!g)
		return OK;
	g->imports += deed == PICKLE_IMPORT;
	g->calls += deed == PICKLE_CALL;
	g->changed = g->changed || deed == PICKLE_CHANGE;
	return OK;
}

static enum err on_bytes(void *user, const unsigned char *bytes, uint64_t n, uint64_t at)
{
	const struct part *p = user;
	struct part inner = { .in = p->in, .place = p->place, .depth = p->depth + 1 };

	if (p->probe || p->depth >= DEPTH_MAX)
		return OK;
	inner.place.offset += at;
	return look_into(&inner, bytes, n);
}

/* ------------------------------------------------------------------------------------------------------ pickles */

static FALLIBLE enum err follow(struct part *p, const unsigned char *bytes, uint64_t n, uint64_t *used_out)
{
	const struct pickle_watch watch = { .user = p, .deed = on_deed, .bytes = on_bytes };

	if (p->in->tick)
		TRY(p->in->tick(p->in->user));
	*used_out = 0;
	return pickle_inspect(bytes, n, &watch, used_out);
}

/* One pickle; *used_out: its bytes, or 0 if there is none. */
static FALLIBLE enum err one_pickle(const struct part *from, const unsigned char *bytes, uint64_t n, uint64_t *used_out)
{
	struct part p = *from;
	uint64_t used;

	*used_out = 0;
	p.probe = !p.expected;
	enum err e = follow(&p, bytes, n, &used);
	if (p.probe) {
		if (e && e != ERR_FORMAT_PICKLE && e != ERR_LIMIT_EXCEEDED)
			return e;
		err_clear();
		if (e && !p.calls)
			return OK;
		p.probe = false;
		e = follow(&p, bytes, n, &used);
	}
	if (e && e != ERR_FORMAT_PICKLE && e != ERR_LIMIT_EXCEEDED)
		return e;
	p.in->pickles++;
	if (e)
		return note_error(p.in, &p.place, p.place.offset);
	*used_out = used;
	return OK;
}

static bool begins_pickle(const unsigned char *p, uint64_t n)
{
	return n > 2 && p[0] == 0x80 && p[1] <= 5;
}

static bool begins_archive(const unsigned char *p, uint64_t n)
{
	return n >= 4 && memcmp(p, "PK\3\4", 4) == 0;
}

/* Pickles one behind the other. In the stream of torch before 1.6 there are five, then bare bytes; else what follows is one if it ends as
 * one. */
static FALLIBLE enum err pickles_in_row(const struct part *from, const unsigned char *bytes, uint64_t n)
{
	bool stream = n > 2 + sizeof stream_number && begins_pickle(bytes, n) &&
		      memcmp(bytes + 2, stream_number, sizeof stream_number) == 0;
	struct part p = *from;
	uint64_t at = 0, used;

	for (unsigned i = 0; i < (stream ? STREAM_PICKLES : ROW_MAX); i++) {
		p.place.offset = from->place.offset + at;
		p.expected = i == 0 ? from->expected : stream;
		TRY(one_pickle(&p, bytes + at, n - at, &used));
		at += used;
		if (used == 0 || at >= n || (!stream && !begins_pickle(bytes + at, n - at)))
			break;
	}
	p.place.offset = from->place.offset + at;
	p.expected = false;
	p.depth++;
	return begins_archive(bytes + at, n - at) ? look_into(&p, bytes + at, n - at) : OK;
}

/* An array of objects in NumPy's own format: a header, then a pickle. */
static FALLIBLE enum err numpy_objects(const struct part *from, const unsigned char *bytes, uint64_t n)
{
	struct part p = *from;
	struct reader r = reader_of(bytes, n);

	(void)reader_take(&r, 6);
	bool old = reader_u8(&r) == 1;
	(void)reader_u8(&r);
	uint64_t length = old ? reader_u16(&r) : reader_u32(&r), head = r.at;

	if (r.failed || length > reader_left(&r) || length > HEADER_MAX)
		return p.expected ? note_why(p.in, &p.place, p.place.offset, "a header of NumPy's that is cut off, or too long") : OK;
	const unsigned char *descr = memmem(bytes + head, length, "'descr'", 7);
	if (!descr || !memchr(descr, 'O', length - (uint64_t)(descr - bytes - head)))
		return OK;
	p.place.offset += head + length;
	p.expected = true;
	return pickles_in_row(&p, bytes + head + length, n - head - length);
}

/* ----------------------------------------------------------------------------------------------------- archives */

static bool ends_with(struct str s, const char *tail)
{
	size_t n = strlen(tail);

	return s.n >= n && memcmp(s.p + s.n - n, tail, n) == 0;
}

static bool contains(struct str s, const char *part)
{
	return s.n && memmem(s.p, s.n, part, strlen(part));
}

/* torch.load hands an archive with code to torch.jit.load, which compiles it. */
static FALLIBLE enum err note_code(struct part *p, const struct zip_record *r)
{
	if (contains(r->name, "code/") && ends_with(r->name, ".py"))
		return on_deed(p, PICKLE_CALL, STR("torch.jit"), STR("load"), r->header_off);
	return OK;
}

static FALLIBLE enum err read_record(const struct zip *z, const struct zip_record *r, uint64_t *data_off, struct buf *b, bool *looks)
{
	unsigned char first[SNIFF];
	bool must = ends_with(r->name, "pkl") || ends_with(r->name, ".pickle");

	*looks = false;
	TRY(zip_locate(z, r, data_off));
	if (!r->deflated && !must) {
		if (r->bytes < sizeof first)
			return OK;
		TRY(source_read(z->src, *data_off, first, sizeof first));
		if (!begins_pickle(first, sizeof first) && !begins_archive(first, sizeof first) && memcmp(first, "\x93NUMPY", 6) != 0)
			return OK;
	}
	if (r->bytes > BYTES_MAX)
		return must ? ERR(LIMIT_EXCEEDED, "a record of %ju bytes", (uintmax_t)r->bytes) : OK;
	*looks = true;
	return zip_read(z, r, BYTES_MAX, b);
}

static FALLIBLE enum err one_record(const struct part *from, const struct zip *z, const struct zip_record *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(BYTES_MAX);
	struct part p = *from;
	uint64_t data_off = r->header_off;
	bool looks;

	p.place.record = r->name;
	p.expected = ends_with(r->name, "pkl") || ends_with(r->name, ".pickle");
	p.depth++;
	TRY(note_code(&p, r));
	enum err e = read_record(z, r, &data_off, &b, &looks);
	if (e == ERR_FORMAT_ZIP || e == ERR_LIMIT_EXCEEDED || e == ERR_FORMAT_TRANSFORM)
		return note_error(from->in, &p.place, from->place.offset);
	TRY(e);
	p.place.offset = r->deflated ? 0 : from->place.offset + data_off;
	return looks ? look_into(&p, b.p, b.len) : OK;
}

/* expected: it begins as an archive does; else there may be one at the end of something else. */
static FALLIBLE enum err archive(const struct part *p, const struct item_source *src, bool expected)
{
	struct zip *z CLEANUP(zip_free_ptr) = NULL;

	enum err e = zip_open_any(src, &z);
	if (e == ERR_FORMAT_ZIP || e == ERR_LIMIT_EXCEEDED) {
		if (expected)
			return note_error(p->in, &p->place, p->place.offset);
		err_clear();
		return OK;
	}
	TRY(e);
	for (uint64_t i = 0; i < z->count; i++)
		TRY(one_record(p, z, &z->records[i]));
	return OK;
}

/* -------------------------------------------------------------------------------------------------------- files */

static FALLIBLE enum err look_into(const struct part *p, const unsigned char *bytes, uint64_t n)
{
	struct str all = { (const char *)bytes, n };
	struct item_source src = source_memory(&all);
	bool zip = begins_archive(bytes, n);

	if (zip && p->depth <= DEPTH_MAX)
		TRY(archive(p, &src, p->expected));
	if (n > 12 && memcmp(bytes, "\x93NUMPY", 6) == 0)
		return numpy_objects(p, bytes, n);
	if (zip || (!p->expected && !begins_pickle(bytes, n)))
		return OK;
	return pickles_in_row(p, bytes, n);
}

/* All of a file that is no archive, or its beginning: the pickles of old torch.save files come before what they are about. */
static FALLIBLE enum err read_file(const struct item_source *src, uint64_t most, unsigned char **out, uint64_t *n_out)
{
	uint64_t n = num_min(src->length, most);
	CLEANUP(mem_free_ptr) unsigned char *bytes = mem_alloc(n + 1);

	NEED(bytes, "no memory for %ju bytes", (uintmax_t)n);
	TRY(source_read(src, 0, bytes, n));
	*out = move(bytes);
	*n_out = n;
	return OK;
}

enum err inspect_file(struct inspect *in, const struct inspect_file *file, const struct item_source *src)
{
	struct part p = { .in = in, .place = { .file = file->name, .fqn = file->fqn, .offset = file->offset },
			  .expected = file->is_pickle };
	CLEANUP(mem_free_ptr) unsigned char *bytes = NULL;
	unsigned char first[SNIFF] = { 0 };
	uint64_t some = num_min(src->length, sizeof first), n = 0;

	TRY(source_read(src, 0, first, some));
	bool zip = begins_archive(first, some), numpy = memcmp(first, "\x93NUMPY", 6) == 0;
	if (zip || file->is_pickle)
		TRY(archive(&p, src, zip));
	if (zip || (!file->is_pickle && !numpy && !begins_pickle(first, some)))
		return OK;
	TRY(read_file(src, file->is_pickle ? PICKLE_BYTES_MAX : BYTES_MAX, &bytes, &n));
	return look_into(&p, bytes, n);
}

bool inspect_expects(struct str name)
{
	static const char *const tails[] = { ".metadata", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".pt2", ".mar", ".t7", ".tar",
					     ".joblib", ".dat" };

	for (size_t i = 0; i < sizeof tails / sizeof *tails; i++)
		if (ends_with(name, tails[i]))
			return true;
	return false;
}
