/* npz_open.c: NumPy's .npz files as sources: a zip of stored members, FQN.npy each, whose payloads are read where they lie.
 *
 * A member's CRC-32 is of head and payload together. The head is read anyway, and CRC-32s can be taken apart as they can be combined: the
 * payload's own follows, so that every path that reads all of a payload compares it.
 *
 * Refused by name: compressed members (savez_compressed), members that are no arrays, and arrays of objects, texts or dates. */
#include <isa-l/crc.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "base/num.h"
#include "base/reader.h"
#include "format/format.h"
#include "format/npy.h"
#include "format/zip.h"
#include "tensor/box.h"

struct opening {
	struct item_source src;
	struct zip *zip;
	struct sdict *sd;
	struct sd_strided *strided;    /* arrays in Fortran order */
	struct sd_record *records;
	uint32_t file, strided_count;
	uint64_t record_count;
};

/* *fqn: also where the member is refused. */
static FALLIBLE enum err check_member(const struct zip_record *r, struct str *fqn)
{
	bool is_array = r->name.n >= 5 && str_ends(r->name, ".npy");

	*fqn = (struct str){ r->name.p, r->name.n - (is_array ? 4 : 0) };
	if (r->deflated)
		return ERR(FORMAT_UNSUPPORTED, "a compressed member: write the file by numpy.savez, not savez_compressed");
	return is_array ? OK : ERR(FORMAT_UNSUPPORTED, "a member that is no array: its name does not end in .npy");
}

/* mem_free *head, of *n bytes. */
static FALLIBLE enum err read_head(const struct opening *o, const struct zip_record *r, uint64_t at, char **head, uint64_t *n)
{
	unsigned char first[NPY_FIRST];

	if (r->bytes < sizeof first)
		return ERR(FORMAT_NPZ, "a member of %ju bytes", (uintmax_t)r->bytes);
	TRY(source_read(&o->src, at, first, sizeof first));
	TRY(npy_head_bytes(first, n));
	if (*n > r->bytes)
		return ERR(FORMAT_NPZ, "a head of %ju bytes in a member of %ju", (uintmax_t)*n, (uintmax_t)r->bytes);
	*head = mem_alloc(*n);
	NEED(*head, "no memory for the head of an array");
	return source_read(&o->src, at, *head, (size_t)*n);
}

/* Strides of the first dim fastest. Arrays of one dim, and of no elements, have but one order. */
static FALLIBLE enum err add_strides(struct opening *o, const struct npy_head *h, struct sd_loc *loc)
{
	int64_t *strides, at = 1;

	if (!h->fortran || h->ndim < 2 || box_empty(h->ndim, h->shape))
		return OK;
	TRY(arena_i64(o->sd->arena, h->ndim, &strides));
	for (uint32_t d = 0; d < h->ndim; at *= h->shape[d], d++) /* a product that the file has room for */
		strides[d] = at;
	loc->transform = SD_STRIDED | o->strided_count;
	o->strided[o->strided_count++] = (struct sd_strided){ .strides = strides };
	return OK;
}

static FALLIBLE enum err add_array(struct opening *o, const struct zip_record *r, struct str fqn, const struct npy_head *h,
				   struct sd_loc loc)
{
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint64_t numel, bytes;
	uint32_t tensor;
	enum dtype dtype;

	TRY(npy_dtype(h->type, r->comment, &dtype));
	TRY(box_numel(h->ndim, h->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(dtype), &bytes));
	if (bytes != loc.length)
		return ERR(FORMAT_NPZ, "an array of %ju bytes in a member that has room for %ju", (uintmax_t)bytes, (uintmax_t)loc.length);
	TRY(add_strides(o, h, &loc));
	memcpy(dims + h->ndim, h->shape, h->ndim * sizeof *dims);
	TRY(sdict_add_tensor(o->sd, fqn, dtype, h->ndim, h->shape, &tensor));
	return sdict_add_chunk(o->sd, tensor, dims, 0, loc);
}

static FALLIBLE enum err read_member(struct opening *o, const struct zip_record *r, struct str fqn)
{
	CLEANUP(mem_free_ptr) char *head = NULL;
	struct npy_head h;
	uint64_t at, n = 0;

	TRY(zip_locate(o->zip, r, &at));
	enum err e = read_head(o, r, at, &head, &n);
	e = e ?: npy_parse_head((struct str){ head, n }, &h);
	const struct sd_loc loc = { .file = o->file, .offset = at + n, .length = r->bytes - n };
	e = e ?: add_array(o, r, fqn, &h, loc);
	TRY(err_at_file(e, o->sd->files[o->file].name.p, (int64_t)at));
	if (r->crc32 && loc.length) /* 0: may be unknown */
		o->records[o->record_count++] = (struct sd_record){
			o->file, r->crc32 ^ (uint32_t)crc32_combine(crc32_gzip_refl(0, (unsigned char *)head, n), 0, (z_off_t)loc.length),
			loc.offset, loc.length };
	return OK;
}

static FALLIBLE enum err read_members(struct opening *o)
{
	const char *name = o->sd->files[o->file].name.p;
	struct str fqn;

	TRY(arena_alloc(o->sd->arena, o->zip->count, sizeof *o->strided, &o->strided));
	TRY(arena_alloc(o->sd->arena, o->zip->count, sizeof *o->records, &o->records));
	o->sd->strided = o->strided;
	each(r, o->zip->records, o->zip->count) {
		enum err e = check_member(r, &fqn);
		e = e ?: read_member(o, r, fqn);
		TRY(err_at_fqn(err_at_file(e, name, (int64_t)r->header_off), fqn.p, fqn.n));
	}
	if (o->record_count)
		qsort(o->records, o->record_count, sizeof *o->records, sdict_record_order);
	o->sd->records = o->records;
	o->sd->record_count = o->record_count;
	return OK;
}

enum err format_open_npz(const struct format_source *s, struct arena *, struct sdict **out)
{
	CLEANUP(zip_free_ptr) struct zip *zip = NULL;
	struct format_part part;
	struct opening o = { 0 };

	TRY(sdict_new(UINT64_MAX, out));
	TRY(sdict_add_file(*out, str_of(s->payload[0]), 0, &o.file));
	TRY(format_part_of(s, s->payload[0], &part, &o.src));
	TRY(err_at_file(zip_open_any(&o.src, &zip), s->payload[0], -1));
	o.zip = zip;
	o.sd = *out;
	return read_members(&o);
}

/* The first record is an array, or there is none in all of the file. */
bool npz_file_is(const void *first, size_t n)
{
	enum { LOCAL = 0x04034b50, END = 0x06054b50, END_BYTES = 22, UP_TO_LENGTHS = 22, LOCAL_BYTES = 30 };
	struct reader r = reader_of(first, n);
	uint32_t signature = reader_u32(&r);

	reader_take(&r, UP_TO_LENGTHS);
	uint16_t name = reader_u16(&r);
	reader_u16(&r); /* of the extra field */
	struct str text = reader_str(&r, name);
	return (signature == END && n == END_BYTES) || (signature == LOCAL && text.n > 4 && str_ends(text, ".npy"));
}
