/* fuzz_torch_file.c: any bytes as a file of torch.save, or, behind "DIR", as a folder of them ({name's length, name, 32-bit length, bytes}
 * each): of ranks, of DeepSpeed's. What is described lies inside of the files, each storage once; values are archives that can be read
 * again; a tensor's chunks have as many elements as it has. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/reader.h"
#include "format/format.h"
#include "format/torch_file.h"
#include "tensor/box.h"

enum { FILES_MAX = 32, NAME_MAX_ = 64 };

struct folder {
	struct file {
		char name[NAME_MAX_];
		struct str bytes;
		int64_t rank;
	} files[FILES_MAX];
	uint32_t count;
};

static const struct str *find(const struct folder *d, const char *name)
{
	for (uint32_t i = 0; i < d->count; i++)
		if (strcmp(d->files[i].name, name) == 0)
			return &d->files[i].bytes;
	return NULL;
}

static enum err bytes_of(void *user, const char *name, uint64_t *out)
{
	const struct str *bytes = find(user, name);

	must(bytes);
	*out = bytes->n;
	return OK;
}

static enum err read_at(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	const struct str *bytes = find(user, name);

	must(bytes && num_inside(offset, n, bytes->n));
	if (n)
		memcpy(into, bytes->p + offset, n);
	return OK;
}

static uint64_t check_chunk(const struct sdict *sd, const struct sd_chunk *c, size_t n)
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

static void check_value(const struct sdict *sd, const struct sd_value *v, const struct folder *d)
{
	struct item_source src = source_memory(&v->bytes);
	struct item_value value = { 0 };

	if (v->kind == SD_VALUE_STORED) {
		must(num_inside(v->loc.offset, v->loc.length, find(d, sd->files[v->loc.file].name.p)->n));
		return;
	}
	must(item_is_archive(v->bytes.p, v->bytes.n));
	(void)!item_read_value(&src, &value);
	item_value_free(&value);
}

static void check(const struct sdict *sd, const struct folder *d)
{
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		uint64_t sum = 0, numel;
		for (uint64_t k = t->first_chunk; k < t->first_chunk + (uint64_t)t->chunk_count; k++)
			sum += check_chunk(sd, &sd->chunks[k], find(d, sd->files[sd->chunks[k].loc.file].name.p)->n);
		must(box_numel(t->ndim, t->shape, &numel) == OK && sum == numel);
	}
	for (uint64_t i = 0; i < sd->value_count; i++)
		check_value(sd, &sd->values[i], d);
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

	while (reader_left(&r) && d->count < FILES_MAX) {
		struct file *f = &d->files[d->count];
		struct str name = reader_str(&r, reader_u8(&r) % NAME_MAX_);
		*f = (struct file){ .bytes = reader_str(&r, reader_u32(&r)) };
		if (r.failed)
			break;
		memcpy(f->name, name.p, name.n);
		if (memchr(f->name, '\0', name.n) || name.n == 0 || find(d, f->name))
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
	const char *names[FILES_MAX];
	struct format_source s = { .user = &d, .payload = names, .read = read_at, .bytes_of = bytes_of };
	enum format format = FORMAT_TORCH;
	struct sdict *sd = NULL;

	d.count = 1;
	d.files[0] = (struct file){ .name = "x.pt", .bytes = { (const char *)data, n } };
	if (n > 3 && memcmp(data, "DIR", 3) == 0) {
		d.count = 0;
		format = read_folder(data + 3, n - 3, &d);
	}
	for (uint32_t i = 0; i < d.count; i++)
		names[i] = d.files[i].name;
	s.payload_count = d.count;
	(void)torch_file_is(data, n);
	if (format != FORMAT_TORCH && format != FORMAT_TORCH_RANKS && format != FORMAT_ZERO && format != FORMAT_ZERO_UNIVERSAL)
		return 0;
	if (format_open(format, &s, &sd) == OK)
		check(sd, &d);
	sdict_free(sd);
	return 0;
}
