/* fuzz_torch_file.c: any bytes as a file of torch.save, or, behind "DIR", as a folder of them ({name's length, name, 32-bit length, bytes}
 * each): of ranks, of DeepSpeed's. What is described lies inside of the files, each storage once; values are archives that can be read
 * again; a tensor's chunks have as many elements as it has. */
#include <stdlib.h>

#include "base/reader.h"
#include "format/torch_file.h"
#include "lib/t_files.h"
#include "tensor/box.h"

enum { NAME_BYTES = 64 };

struct folder {
	struct file {
		char name[NAME_BYTES];
		struct str bytes;
		int64_t rank;
	} files[T_FILES_MAX];
	uint32_t count;
};

static bool has(const struct folder *d, const char *name)
{
	for (uint32_t i = 0; i < d->count; i++)
		if (strcmp(d->files[i].name, name) == 0)
			return true;
	return false;
}

static uint64_t bytes_of(const struct t_files *f, const struct sdict *sd, struct sd_loc loc)
{
	struct str file;

	must(t_files_find(f, sd->files[loc.file].name.p, &file) == OK);
	return file.n;
}

static uint64_t check_chunk(const struct sdict *sd, const struct sd_chunk *c, uint64_t n)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	uint32_t item = dtype_bytes(t->dtype);
	const struct sd_strided *view = sd_strided_of(sd, c->loc);
	uint64_t numel, last = 0;

	must(num_inside(c->loc.offset, c->loc.length, n) && box_numel(t->ndim, sd_sizes(c, t->ndim), &numel) == OK);
	must(box_inside(t->ndim, sd_offsets(c), sd_sizes(c, t->ndim), t->shape));
	for (uint32_t d = 0; d < t->ndim && view && numel; d++)
		last += (uint64_t)(sd_sizes(c, t->ndim)[d] - 1) * (uint64_t)view->strides[d];
	must(c->loc.length == (numel == 0 ? 0 : view ? (last + 1) * item : numel * item));
	const struct sd_record *r = sdict_record(sd, c->loc);
	must(!r || num_inside(r->offset, r->length, n));
	return numel;
}

static void check_value(const struct sdict *sd, const struct sd_value *v, const struct t_files *f)
{
	struct item_source src = source_memory(&v->bytes);
	struct item_value value = { 0 };

	if (v->kind == SD_VALUE_STORED) {
		must(num_inside(v->loc.offset, v->loc.length, bytes_of(f, sd, v->loc)));
		return;
	}
	if (v->unread.n) { /* a tensor that is named, and that no job may take */
		must(v->bytes.n == 0);
		return;
	}
	must(item_is_archive(v->bytes.p, v->bytes.n));
	(void)!item_read_value(&src, &value);
	item_value_free(&value);
}

static void check(const struct sdict *sd, const struct t_files *f)
{
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		uint64_t sum = 0, numel;
		for (uint64_t k = t->first_chunk; k < t->first_chunk + (uint64_t)t->chunk_count; k++)
			sum += check_chunk(sd, &sd->chunks[k], bytes_of(f, sd, sd->chunks[k].loc));
		must(box_numel(t->ndim, t->shape, &numel) == OK && sum == numel);
	}
	for (uint64_t i = 0; i < sd->value_count; i++)
		check_value(sd, &sd->values[i], f);
	for (uint64_t i = 1; i < sd->record_count; i++) {
		const struct sd_record *a = &sd->records[i - 1], *b = &sd->records[i];
		must(a->file < b->file || (a->file == b->file && a->offset + a->length <= b->offset));
	}
}

static int by_rank(const void *a, const void *b)
{
	const struct file *x = a, *y = b;

	return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : strcmp(x->name, y->name);
}

/* The files that the format of such a folder has, in the order in which stores give them. */
static enum format read_folder(const uint8_t *data, size_t n, struct folder *d)
{
	struct reader r = reader_of(data, n);
	struct format_listing listing = { 0 };
	struct format_file is;
	uint32_t kept = 0;

	while (reader_left(&r) && d->count < T_FILES_MAX) {
		struct file *f = &d->files[d->count];
		struct str name = reader_str(&r, reader_u8(&r) % NAME_BYTES);
		*f = (struct file){ .bytes = reader_str(&r, reader_u32(&r)) };
		if (r.failed)
			break;
		memcpy(f->name, name.p, name.n);
		if (memchr(f->name, '\0', name.n) || name.n == 0 || has(d, f->name))
			continue;
		if (str_starts(name, "zero/"))
			format_listing_add(&listing, "zero/");
		else
			format_listing_add(&listing, f->name);
		d->count++;
	}
	enum format format = format_of_listing(&listing);
	for (uint32_t i = 0; i < d->count; i++)
		if (format_file_in(format, d->files[i].name, &is) && is.format == format && is.role == FORMAT_PAYLOAD) {
			d->files[kept] = d->files[i];
			d->files[kept++].rank = is.rank;
		}
	d->count = kept;
	qsort(d->files, kept, sizeof *d->files, by_rank);
	return format;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static struct folder d;
	struct t_files files = t_files_one("x.pt", data, n);
	enum format format = FORMAT_TORCH;
	struct sdict *sd = NULL;

	if (n > 3 && memcmp(data, "DIR", 3) == 0) {
		d.count = 0;
		format = read_folder(data + 3, n - 3, &d);
		for (files.count = 0; files.count < d.count; files.count++) {
			files.names[files.count] = d.files[files.count].name;
			files.bytes[files.count] = d.files[files.count].bytes;
		}
	}
	files.closed = true;
	struct format_source s = t_files_source(&files);
	(void)torch_file_is(data, n);
	if (format != FORMAT_TORCH && format != FORMAT_TORCH_RANKS && format != FORMAT_ZERO && format != FORMAT_ZERO_UNIVERSAL)
		return 0;
	if (format_open(format, &s, &sd) == OK)
		check(sd, &files);
	sdict_free(sd);
	return 0;
}
