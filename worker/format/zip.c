/* zip.c: reads the directory of a torch.save archive (see zip.h).
 *
 * Everything in it is hostile: each number is checked against the length of the archive before it is used, the records sorted by
 * position must not overlap each other or the directory, and a deflated record may not claim more bytes than deflate can make
 * of what is stored. zip64 fields count only where the classic field is saturated; where both are there they must agree, so that
 * two readers cannot see two archives. */
#include "format/zip.h"

#include <isa-l/crc.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/reader.h"
#include "base/vec.h"
#include "format/transform.h"

enum {
	LOCAL_SIG = 0x04034b50, CENTRAL_SIG = 0x02014b50, END_SIG = 0x06054b50,
	END64_SIG = 0x06064b50, LOCATOR_SIG = 0x07064b50,
	LOCAL_BYTES = 30, CENTRAL_BYTES = 46, END_BYTES = 22, END64_BYTES = 56, LOCATOR_BYTES = 20,
	DOS_DIRECTORY = 0x10, /* of a record's external attributes */
	FLAGS_REFUSED = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13, /* encrypted, patched, masked */
	TAIL_FIRST = 1024, TAIL_MAX = END_BYTES + 65535,
	DIRECTORY_MAX = 256 << 20,
	DEFLATE_RATIO_MAX = 1032,
	BLOCK = 64 << 10,
};
#define SATURATED 0xFFFFFFFFu

struct end {
	uint64_t at;                     /* of the first end record: the directory ends here at the latest */
	uint64_t count, bytes, off;
};

/* The last end record in the tail; what lies behind it is a comment or junk, as miniz sees it. */
static FALLIBLE enum err find_end(const struct item_source *src, unsigned char end[END_BYTES], uint64_t *at)
{
	CLEANUP(buf_free) struct buf tail = BUF_INIT(TAIL_MAX);

	if (src->length < END_BYTES)
		return ERR(FORMAT_ZIP, "%ju bytes are no archive", (uintmax_t)src->length);
	for (uint64_t want = TAIL_FIRST;; want = TAIL_MAX) {
		size_t n = (size_t)num_min(want, src->length);
		unsigned char *p;
		tail.len = 0;
		TRY(buf_reserve(&tail, n, &p));
		TRY(source_read(src, src->length - n, p, n));
		for (size_t i = n - END_BYTES + 1; i-- > 0;) {
			struct reader r = reader_of(p + i, END_BYTES);
			if (reader_u32(&r) == END_SIG) {
				memcpy(end, p + i, END_BYTES);
				*at = src->length - n + i;
				return OK;
			}
		}
		if (n == src->length || want == TAIL_MAX)
			return ERR(FORMAT_ZIP, "no end-of-directory record in %ju bytes",
				   (uintmax_t)src->length);
	}
}

static FALLIBLE enum err agree(uint64_t classic, uint64_t saturated, uint64_t wide, const char *what)
{
	if (classic != saturated && classic != wide)
		return ERR(FORMAT_ZIP, "the two end records disagree on the %s: %ju and %ju", what,
			   (uintmax_t)classic, (uintmax_t)wide);
	return OK;
}

/* The zip64 end record, if a locator stands before the classic one. */
static FALLIBLE enum err read_end64(const struct item_source *src, struct end *e, bool needed)
{
	unsigned char loc[LOCATOR_BYTES] = { 0 }, rec[END64_BYTES];
	struct reader r = reader_of(loc, sizeof loc);

	if (e->at >= LOCATOR_BYTES)
		TRY(source_read(src, e->at - LOCATOR_BYTES, loc, sizeof loc));
	if (reader_u32(&r) != LOCATOR_SIG)
		return needed ? ERR(FORMAT_ZIP, "the zip64 end record is missing") : OK;
	uint32_t disk = reader_u32(&r);
	uint64_t at = reader_u64(&r);
	if (disk != 0 || reader_u32(&r) != 1)
		return ERR(FORMAT_ZIP, "the archive spans several disks");
	if (!num_inside(at, END64_BYTES, e->at - LOCATOR_BYTES))
		return ERR(FORMAT_ZIP, "the zip64 end record at %ju is beyond the archive", (uintmax_t)at);
	TRY(source_read(src, at, rec, sizeof rec));
	r = reader_of(rec, sizeof rec);
	if (reader_u32(&r) != END64_SIG || reader_u64(&r) < END64_BYTES - 12)
		return ERR(FORMAT_ZIP, "no zip64 end record at %ju", (uintmax_t)at);
	reader_u32(&r); /* versions */
	uint64_t disks = reader_u64(&r), count_here = reader_u64(&r);
	struct end wide = { .at = at, .count = reader_u64(&r) };
	wide.bytes = reader_u64(&r);
	wide.off = reader_u64(&r);
	if (disks != 0 || count_here != wide.count)
		return ERR(FORMAT_ZIP, "the archive spans several disks");
	TRY(agree(e->count, 0xFFFF, wide.count, "number of records"));
	TRY(agree(e->bytes, SATURATED, wide.bytes, "directory's size"));
	TRY(agree(e->off, SATURATED, wide.off, "directory's place"));
	*e = wide;
	return OK;
}

static FALLIBLE enum err read_end(const struct item_source *src, struct end *e)
{
	unsigned char rec[END_BYTES];

	TRY(find_end(src, rec, &e->at));
	struct reader r = reader_of(rec, sizeof rec);
	reader_u32(&r); /* its signature */
	uint32_t disks = reader_u32(&r);
	uint16_t count_here = reader_u16(&r);
	e->count = reader_u16(&r);
	e->bytes = reader_u32(&r);
	e->off = reader_u32(&r);
	if (disks != 0 || count_here != e->count)
		return ERR(FORMAT_ZIP, "the archive spans several disks");
	TRY(read_end64(src, e, e->count == 0xFFFF || e->bytes == SATURATED || e->off == SATURATED));
	if (!num_inside(e->off, e->bytes, e->at))
		return ERR(FORMAT_ZIP, "the directory (%ju bytes at %ju) is beyond the archive",
			   (uintmax_t)e->bytes, (uintmax_t)e->off);
	if (num_inside(e->off + e->bytes, 4, e->at)) {
		TRY(source_read(src, e->off + e->bytes, rec, 4));
		r = reader_of(rec, 4);
		if (reader_u32(&r) == END64_SIG)
			return ERR(FORMAT_ZIP, "nothing leads to the zip64 end record behind the directory");
	}
	if (e->count > ZIP_RECORDS_MAX || e->bytes > DIRECTORY_MAX)
		return ERR(LIMIT_EXCEEDED, "an archive of %ju records", (uintmax_t)e->count);
	if (e->count > e->bytes / CENTRAL_BYTES)
		return ERR(FORMAT_ZIP, "%ju records do not fit a directory of %ju bytes",
			   (uintmax_t)e->count, (uintmax_t)e->bytes);
	return OK;
}

/* The zip64 extra field holds, in this order, those of the three that are saturated in the record. */
static FALLIBLE enum err widen(struct zip_record *r, struct reader extra)
{
	uint64_t *fields[3] = { &r->bytes, &r->packed_bytes, &r->header_off };
	struct reader wide = { 0 };

	while (!wide.p && !extra.failed) { /* PyTorch's reader ignores a damaged extra field too */
		uint16_t id = reader_u16(&extra), n = reader_u16(&extra);
		const unsigned char *p = reader_take(&extra, n);
		if (id == 1)
			wide = reader_of(p, p ? n : 0);
	}
	for (unsigned f = 0; f < 3; f++)
		if (*fields[f] == SATURATED)
			*fields[f] = reader_u64(&wide);
	return wide.failed ? ERR(FORMAT_ZIP, "a zip64 size or place is missing") : OK;
}

static FALLIBLE enum err check_record(const struct zip_record *r, unsigned method, unsigned flags, uint64_t dir_off)
{
	int n = (int)num_min(r->name.n, 80);
	uint64_t room;

	if (flags & FLAGS_REFUSED)
		return ERR(FORMAT_ZIP, "record '%.*s' is encrypted", n, r->name.p);
	if (method != 0 && method != 8)
		return ERR(FORMAT_ZIP, "record '%.*s' is compressed by method %u", n, r->name.p, method);
	if (method == 0 && r->bytes != r->packed_bytes)
		return ERR(FORMAT_ZIP, "stored record '%.*s' has two sizes", n, r->name.p);
	if (method == 8 && r->bytes / DEFLATE_RATIO_MAX > r->packed_bytes)
		return ERR(FORMAT_ZIP, "record '%.*s' cannot unpack to %ju bytes", n, r->name.p,
			   (uintmax_t)r->bytes);
	TRY(num_add(r->packed_bytes, LOCAL_BYTES, &room));
	TRY(num_add(room, r->name.n, &room));
	if (!num_inside(r->header_off, room, dir_off))
		return ERR(FORMAT_ZIP, "record '%.*s' (%ju bytes at %ju) is beyond the archive", n, r->name.p,
			   (uintmax_t)r->packed_bytes, (uintmax_t)r->header_off);
	return OK;
}

static FALLIBLE enum err read_record(struct zip *z, struct reader *dir, uint64_t dir_off, struct zip_record *r)
{
	uintmax_t number = (uintmax_t)(r - z->records);

	if (reader_u32(dir) != CENTRAL_SIG)
		return ERR(FORMAT_ZIP, "the directory is damaged at record %ju", number);
	reader_u32(dir); /* versions */
	uint16_t flags = reader_u16(dir), method = reader_u16(dir);
	reader_u32(dir); /* time and date */
	r->crc32 = reader_u32(dir);
	r->packed_bytes = reader_u32(dir);
	r->bytes = reader_u32(dir);
	r->deflated = method == 8;
	uint16_t name_bytes = reader_u16(dir), extra_bytes = reader_u16(dir), comment_bytes = reader_u16(dir), disk = reader_u16(dir);
	reader_u16(dir); /* internal attributes */
	uint32_t attributes = reader_u32(dir);
	r->header_off = reader_u32(dir);
	struct str name = reader_str(dir, name_bytes);
	const unsigned char *extra = reader_take(dir, extra_bytes);
	struct str comment = reader_str(dir, comment_bytes);
	if (dir->failed)
		return ERR(FORMAT_ZIP, "the directory ends inside record %ju", number);
	if (disk != 0)
		return ERR(FORMAT_ZIP, "the archive spans several disks");
	if (attributes & DOS_DIRECTORY) /* PyTorch takes it for empty, whatever its size */
		return ERR(FORMAT_ZIP, "record %ju is marked as a directory", number);
	TRY(arena_str(z->arena, name, &r->name));
	if (comment.n)
		TRY(arena_str(z->arena, comment, &r->comment));
	TRY(widen(r, reader_of(extra, extra_bytes)));
	return check_record(r, method, flags, dir_off);
}

static int by_place(const void *a, const void *b)
{
	const struct zip_record *x = *(struct zip_record *const *)a, *y = *(struct zip_record *const *)b;

	return x->header_off < y->header_off ? -1 : x->header_off > y->header_off;
}

static FALLIBLE enum err check_overlap(struct zip *z, uint64_t dir_off)
{
	struct zip_record **sorted;

	TRY(arena_alloc(z->arena, z->count, sizeof(struct zip_record *), &sorted));
	for (uint64_t i = 0; i < z->count; i++)
		sorted[i] = &z->records[i];
	qsort(sorted, z->count, sizeof *sorted, by_place);
	for (uint64_t i = 0; i < z->count; i++) {
		struct zip_record *r = sorted[i];
		r->limit = i + 1 < z->count ? sorted[i + 1]->header_off : dir_off;
		if (r->header_off + LOCAL_BYTES + r->name.n + r->packed_bytes > r->limit)
			return ERR(FORMAT_ZIP, "record '%.*s' overlaps the next",
				   (int)num_min(r->name.n, 80), r->name.p);
	}
	return OK;
}

static FALLIBLE enum err read_directory(struct zip *z, const struct end *e)
{
	CLEANUP(buf_free) struct buf dir = BUF_INIT(DIRECTORY_MAX);
	unsigned char *at;

	TRY(buf_reserve(&dir, (size_t)e->bytes, &at));
	TRY(source_read(z->src, e->off, at, (size_t)e->bytes));
	TRY(arena_alloc(z->arena, e->count, sizeof *z->records, &z->records));
	z->count = e->count;
	struct reader r = reader_of(at, e->bytes);
	for (uint64_t i = 0; i < z->count; i++)
		TRY(read_record(z, &r, e->off, &z->records[i]));
	for (uint64_t i = 0; i < z->count; i++)
		if (!str_utf8(z->records[i].name))
			return ERR(FORMAT_ZIP, "the name of record %ju is not UTF-8", (uintmax_t)i);
	return check_overlap(z, e->off);
}

/* PyTorch reads no archive with records beside the folder of the first. */
static FALLIBLE enum err find_prefix(struct zip *z)
{
	struct str first = z->count ? z->records[0].name : STR("");
	if (!z->count)
		return ERR(FORMAT_ZIP, "the archive is empty");
	const char *slash = first.n ? memchr(first.p, '/', first.n) : NULL;
	if (!slash)
		return ERR(FORMAT_ZIP, "record '%.*s' is in no folder", (int)num_min(first.n, 80), first.p);
	z->prefix = (struct str){ first.p, (size_t)(slash - first.p) + 1 };
	for (uint64_t i = 0; i < z->count; i++)
		if (z->records[i].name.n < z->prefix.n || memcmp(z->records[i].name.p, z->prefix.p, z->prefix.n) != 0)
			return ERR(FORMAT_ZIP, "record '%.*s' is not in the folder of the first", (int)num_min(z->records[i].name.n, 80),
				   z->records[i].name.p);
	return OK;
}

enum err zip_open_any(const struct item_source *src, struct zip **out)
{
	struct zip *z CLEANUP(zip_free_ptr) = mem_zalloc(1, sizeof *z);
	struct end e;

	NEED(z, "no memory for a zip directory");
	TRY(read_end(src, &e));
	z->src = src;
	/* per record: its entry, a pointer to sort, its name with alignment */
	z->arena = arena_new((64 << 10) + e.bytes + e.count * (sizeof *z->records + 64));
	NEED(z->arena, "no memory for a zip directory");
	TRY(read_directory(z, &e));
	*out = move(z);
	return OK;
}

enum err zip_open(const struct item_source *src, struct zip **out)
{
	struct zip *z CLEANUP(zip_free_ptr) = NULL;

	TRY(zip_open_any(src, &z));
	TRY(find_prefix(z));
	*out = move(z);
	return OK;
}

void zip_free(struct zip *z)
{
	if (!z)
		return;
	arena_free(z->arena);
	mem_free(z);
}

void zip_free_ptr(struct zip **z)
{
	zip_free(*z);
}

enum err zip_find(const struct zip *z, struct str name, const struct zip_record **out)
{
	const struct zip_record *found = NULL;

	each(r, z->records, z->count) {
		struct str tail = { r->name.p + z->prefix.n, r->name.n - z->prefix.n };
		if (r->name.n < z->prefix.n || !str_eq(tail, name) ||
		    memcmp(r->name.p, z->prefix.p, z->prefix.n) != 0)
			continue;
		if (found)
			return ERR(FORMAT_ZIP, "record '%.*s' is there twice", (int)num_min(r->name.n, 80),
				   r->name.p);
		found = r;
	}
	*out = found;
	return OK;
}

enum err zip_locate(const struct zip *z, const struct zip_record *r, uint64_t *data_off_out)
{
	unsigned char h[LOCAL_BYTES];
	int n = (int)num_min(r->name.n, 80);

	TRY(source_read(z->src, r->header_off, h, sizeof h));
	struct reader in = reader_of(h, sizeof h);
	uint32_t signature = reader_u32(&in);
	reader_u16(&in); /* version */
	uint16_t flags = reader_u16(&in), method = reader_u16(&in);
	reader_u64(&in); /* time, date, CRC32: the directory has it */
	uint64_t packed = reader_u32(&in);
	reader_u32(&in); /* unpacked size */
	uint16_t name = reader_u16(&in), extra = reader_u16(&in);
	if (signature != LOCAL_SIG)
		return ERR(FORMAT_ZIP, "no local header at %ju for record '%.*s'", (uintmax_t)r->header_off, n,
			   r->name.p);
	if (flags & FLAGS_REFUSED || method != (r->deflated ? 8 : 0) || name != r->name.n)
		return ERR(FORMAT_ZIP, "the local header of record '%.*s' is not what the directory says", n,
			   r->name.p);
	CLEANUP(mem_free_ptr) char *local = mem_alloc(name + 1u);
	NEED(local, "no memory for a record's name");
	TRY(source_read(z->src, r->header_off + LOCAL_BYTES, local, name));
	if (memcmp(local, r->name.p, name) != 0)
		return ERR(FORMAT_ZIP, "the local header at %ju has another name than record '%.*s'", (uintmax_t)r->header_off, n,
			   r->name.p);
	bool later = flags & 8 || packed == 0 || packed == SATURATED;
	if (!later && packed != r->packed_bytes)
		return ERR(FORMAT_ZIP, "record '%.*s' has %ju bytes, its local header says %ju", n, r->name.p,
			   (uintmax_t)r->packed_bytes, (uintmax_t)packed);
	uint64_t off = r->header_off + LOCAL_BYTES + name + extra;
	if (off > r->limit || r->packed_bytes > r->limit - off)
		return ERR(FORMAT_ZIP, "record '%.*s' overlaps the next", n, r->name.p);
	*data_off_out = off;
	return OK;
}

/* Gives the record's unpacked bytes to `take`, a block at a time. */
typedef enum err (*zip_take)(void *user, const unsigned char *p, size_t n);

static FALLIBLE enum err stream_stored(const struct zip *z, uint64_t off, uint64_t n, unsigned char *block,
				       zip_take take, void *user)
{
	while (n > 0) {
		size_t some = (size_t)num_min(n, BLOCK);
		TRY(source_read(z->src, off, block, some));
		TRY(take(user, block, some));
		off += some;
		n -= some;
	}
	return OK;
}

static FALLIBLE enum err stream_deflated(const struct zip *z, const struct zip_record *r, uint64_t off,
					 unsigned char *block, zip_take take, void *user)
{
	struct transform *t CLEANUP(transform_free_ptr) = NULL;
	uint64_t left = r->packed_bytes, total = 0;
	struct str in = { (char *)block, 0 };
	unsigned char *out = block + BLOCK;

	TRY(transform_new_deflate(&t));
	while (!transform_done(t)) {
		if (in.n == 0 && left > 0) {
			in = (struct str){ (char *)block, (size_t)num_min(left, BLOCK) };
			TRY(source_read(z->src, off, block, in.n));
			off += in.n;
			left -= in.n;
		}
		size_t had = in.n, n;
		TRY(transform_feed(t, &in, out, BLOCK, &n));
		if (n == 0 && in.n == had && left == 0)
			TRY(transform_end(t));
		if (n > r->bytes - total)
			return ERR(FORMAT_ZIP, "record '%.*s' unpacks to more than its %ju bytes",
				   (int)num_min(r->name.n, 80), r->name.p, (uintmax_t)r->bytes);
		total += n;
		TRY(take(user, out, n));
	}
	if (total != r->bytes || left > 0 || in.n > 0)
		return ERR(FORMAT_ZIP, "record '%.*s' unpacks to %ju bytes, the directory says %ju",
			   (int)num_min(r->name.n, 80), r->name.p, (uintmax_t)total, (uintmax_t)r->bytes);
	return OK;
}

static FALLIBLE enum err stream(const struct zip *z, const struct zip_record *r, zip_take take, void *user)
{
	CLEANUP(mem_free_ptr) unsigned char *block = mem_alloc(2 * BLOCK);
	uint64_t off;

	NEED(block, "no memory to read a record");
	TRY(zip_locate(z, r, &off));
	return r->deflated ? stream_deflated(z, r, off, block, take, user)
			   : stream_stored(z, off, r->packed_bytes, block, take, user);
}

static FALLIBLE enum err compare_crc(const struct zip_record *r, uint32_t crc)
{
	char expected[16], actual[16];

	if (r->crc32 == 0 || crc == r->crc32) /* 0: PyTorch was told not to compute it */
		return OK;
	snprintf(expected, sizeof expected, "%08x", r->crc32);
	snprintf(actual, sizeof actual, "%08x", crc);
	return err_expected(ERR(DIGEST_MISMATCH, "the CRC32 of record '%.*s' is wrong",
				(int)num_min(r->name.n, 80), r->name.p), expected, actual);
}

static enum err take_bytes(void *user, const unsigned char *p, size_t n)
{
	buf_put(user, p, n);
	return buf_status(user);
}

enum err zip_read(const struct zip *z, const struct zip_record *r, uint64_t max, struct buf *into)
{
	size_t before = into->len;

	if (r->bytes > max)
		return ERR(LIMIT_EXCEEDED, "record '%.*s' has %ju bytes, at most %ju are read",
			   (int)num_min(r->name.n, 80), r->name.p, (uintmax_t)r->bytes, (uintmax_t)max);
	TRY(stream(z, r, take_bytes, into));
	size_t n = into->len - before;
	return compare_crc(r, n ? crc32_gzip_refl(0, into->p + before, n) : 0); /* without bytes there need be no buffer */
}

static enum err take_crc(void *user, const unsigned char *p, size_t n)
{
	uint32_t *crc = user;

	*crc = crc32_gzip_refl(*crc, p, n);
	return OK;
}

enum err zip_check(const struct zip *z, const struct zip_record *r)
{
	uint32_t crc = 0;

	TRY(stream(z, r, take_crc, &crc));
	return compare_crc(r, crc);
}
