/* torch_item_open.c: finds data.pkl in an item, whatever container torch.save used, and checks the archive around it.
 *
 * The stream form of torch before 1.6 has no directory: five pickles one behind the other (magic number, protocol, system
 * information, the object, the list of storage keys), then each storage as an int64 count and its bytes. */
#include "format/torch_item_graph.h"

#include "base/num.h"

/* PROTO 2, LONG1 0x1950a86a20f9469cfc6c, STOP */
static const unsigned char stream_magic[] = { 0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46,
					      0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e };

bool item_is_stream(const unsigned char *first, size_t n)
{
	/* Any protocol from 2 on writes the number as LONG1. */
	return n >= sizeof stream_magic && first[0] == 0x80 && first[1] >= 2 && first[1] <= 5 &&
	       memcmp(first + 2, stream_magic + 2, sizeof stream_magic - 2) == 0;
}

bool item_is_archive(const void *blob, size_t n)
{
	struct str bytes = { blob, n };
	struct item_source src = source_memory(&bytes);
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	const struct zip_record *pickle = NULL;

	if (item_is_stream(blob, n))
		return true;
	return n >= 4 && memcmp(blob, "PK\3\4", 4) == 0 && zip_open(&src, &z) == OK &&
	       zip_find(z, STR("data.pkl"), &pickle) == OK && pickle;
}

void item_close(struct item *it)
{
	pickle_free(it->pk);
	buf_free(&it->pickle);
	zip_free(it->zip);
}

static FALLIBLE enum err read_small(const struct zip *z, struct str name, struct buf *b, bool *there)
{
	const struct zip_record *r;

	TRY(zip_find(z, name, &r));
	*there = r != NULL;
	b->len = 0;
	return r ? zip_read(z, r, 64, b) : OK;
}

/* PyTorch reads format versions 1 to 10. */
static FALLIBLE enum err check_version(const struct zip *z)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64);
	uint64_t v = 0;
	bool there;

	TRY(read_small(z, STR("version"), &b, &there));
	if (!there)
		TRY(read_small(z, STR(".data/version"), &b, &there));
	if (!there)
		return ERR(FORMAT_ITEM, "the archive has no record 'version'");
	size_t n = b.len;
	while (n && (b.p[n - 1] == '\n' || b.p[n - 1] == '\r' || b.p[n - 1] == ' '))
		n--;
	if (!str_to_u64((struct str){ (char *)b.p, n }, &v) || v < 1 || v > 10)
		return ERR(FORMAT_ITEM, "the archive has format version '%.*s', 1 to 10 are known", (int)n,
			   (char *)b.p);
	return OK;
}

static FALLIBLE enum err check_byteorder(struct item *it)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64);
	bool there;

	TRY(read_small(it->zip, STR("byteorder"), &b, &there));
	if (!there)
		return OK;
	struct str order = { (char *)b.p, b.len };
	it->big_endian = str_is(order, "big");
	if (!it->big_endian && !str_is(order, "little"))
		return ERR(FORMAT_ITEM, "the archive has byte order '%.*s'", (int)b.len, (char *)b.p);
	return OK;
}

static FALLIBLE enum err open_zip(const struct item_source *src, uint64_t pickle_max, struct item *it)
{
	const struct zip_record *r;

	TRY(zip_open(src, &it->zip));
	TRY(check_version(it->zip));
	TRY(check_byteorder(it));
	TRY(zip_find(it->zip, STR("data.pkl"), &r));
	if (!r)
		return ERR(FORMAT_ITEM, "the archive has no record 'data.pkl'");
	TRY(zip_read(it->zip, r, r->deflated ? num_min(pickle_max, ITEM_INFLATED_PICKLE_MAX) : pickle_max, &it->pickle));
	return pickle_parse(it->pickle.p, it->pickle.len, NULL, &it->pk);
}

/* Parses the pickle at *at of the stream's first bytes and moves *at behind it. */
static FALLIBLE enum err next_pickle(const struct buf *b, uint64_t *at, struct pickle **out)
{
	struct pickle *pk CLEANUP(pickle_free_ptr) = NULL;

	TRY(pickle_parse(b->p + *at, b->len - *at, NULL, &pk));
	*at += pickle_consumed(pk);
	*out = move(pk);
	return OK;
}

static FALLIBLE enum err open_stream(const struct item_source *src, uint64_t pickle_max, struct item *it)
{
	struct pickle *version CLEANUP(pickle_free_ptr) = NULL, *info CLEANUP(pickle_free_ptr) = NULL;
	uint64_t at = sizeof stream_magic;
	size_t n = (size_t)num_min(src->length, pickle_max);
	int64_t v = 0;
	unsigned char *p;

	TRY(buf_reserve(&it->pickle, n, &p));
	TRY(source_read(src, 0, p, n));
	TRY(next_pickle(&it->pickle, &at, &version));
	if (!pickle_int(version, pickle_root(version), &v) || v != 1001)
		return ERR(FORMAT_ITEM, "a torch.save stream of protocol version %jd, 1001 is known", (intmax_t)v);
	TRY(next_pickle(&it->pickle, &at, &info));
	/* Storages of a stream are little-endian whatever machine wrote them. */
	TRY(next_pickle(&it->pickle, &at, &it->pk));
	it->data_off = at;
	return OK;
}

enum err item_open(const struct item_source *src, uint64_t pickle_max, struct item *out)
{
	CLEANUP(item_close) struct item it = { .pickle = BUF_INIT((size_t)pickle_max) };
	unsigned char first[sizeof stream_magic];
	size_t n = (size_t)num_min(src->length, sizeof first);

	TRY(source_read(src, 0, first, n));
	if (item_is_stream(first, n)) {
		TRY(open_stream(src, pickle_max, &it));
	} else {
		if (n < 4 || memcmp(first, "PK\3\4", 4) != 0)
			return ERR(FORMAT_ITEM, "neither a torch.save archive nor a torch.save stream");
		TRY(open_zip(src, pickle_max, &it));
	}
	*out = it;
	it = (struct item){ .pickle = BUF_INIT(0) };
	return OK;
}

static FALLIBLE enum err check_record(const struct zip *z, const struct zip_record *r, bool skip_payload,
				      uint64_t *checked, uint64_t *unknown)
{
	uint64_t off;
	struct str tail = { r->name.p + z->prefix.n, r->name.n < z->prefix.n ? 0 : r->name.n - z->prefix.n };

	if (skip_payload && str_starts(tail, "data/"))
		return zip_locate(z, r, &off);
	if (r->crc32 == 0 && r->bytes > 0) {
		++*unknown;
		return zip_locate(z, r, &off);
	}
	TRY(zip_check(z, r));
	++*checked;
	return OK;
}

enum err item_check_crc(const struct item_source *src, bool skip_payload, uint64_t *checked_out,
			uint64_t *unknown_out)
{
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	unsigned char first[sizeof stream_magic];
	size_t n = (size_t)num_min(src->length, sizeof first);
	uint64_t checked = 0, unknown = 0;

	TRY(source_read(src, 0, first, n));
	if (item_is_stream(first, n)) {
		unknown = 1;
	} else {
		TRY(zip_open(src, &z));
		for (uint64_t i = 0; i < z->count; i++)
			TRY(check_record(z, &z->records[i], skip_payload, &checked, &unknown));
	}
	*checked_out = checked;
	*unknown_out = unknown;
	return OK;
}
