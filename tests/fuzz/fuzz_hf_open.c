/* fuzz_hf_open.c: any bytes as a directory of safetensors files, with or without an index. Each tensor of a directory that is accepted has
 * one chunk, all of it, which lies inside its file.
 *
 * Byte 0 is the number of payload files, less one (bits 0 and 1), and whether there is an index (bit 7). Then the index and the files: two
 * bytes of length, and the bytes; the last one has what is left. */
#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/format.h"
#include "tensor/box.h"

enum { FILES_MAX = 4, INDEX = FILES_MAX };

static const char *const names[FILES_MAX + 1] = { "a.safetensors", "b.safetensors", "c.safetensors", "d.safetensors", HF_INDEX };

struct directory {
	struct str files[FILES_MAX + 1];
	uint32_t count;
};

static FALLIBLE enum err find(const struct directory *d, const char *name, struct str *out)
{
	for (uint32_t i = 0; i <= INDEX; i++) {
		if ((i < d->count || i == INDEX) && strcmp(names[i], name) == 0) {
			*out = d->files[i];
			return OK;
		}
	}
	return ERR(CHECKPOINT_INCOMPLETE, "the file is missing");
}

static enum err bytes_of(void *user, const char *name, uint64_t *out)
{
	struct str file;

	TRY(find(user, name, &file));
	*out = file.n;
	return OK;
}

static enum err read_at(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	struct str file;

	TRY(find(user, name, &file));
	must(num_inside(offset, n, file.n));
	memcpy(into, file.p + offset, n);
	return OK;
}

static enum err read_head(void *user, const char *name, uint64_t n, void **out)
{
	*out = mem_alloc(n);
	return *out ? read_at(user, name, 0, *out, n) : ERR(NO_MEMORY, "no memory for a head");
}

static enum err read_all(void *user, const char *name, void **out, uint64_t *n_out)
{
	struct str file;

	TRY(find(user, name, &file));
	*n_out = file.n;
	return read_head(user, name, file.n, out);
}

static struct str take(const uint8_t **at, size_t *left, bool last)
{
	size_t n = *left < 2 ? 0 : last ? *left - 2 : num_min((size_t)(*at)[0] | (size_t)(*at)[1] << 8, *left - 2);
	struct str piece = { *left < 2 ? (const char *)*at : (const char *)*at + 2, n };

	n += *left < 2 ? *left : 2;
	*at += n;
	*left -= n;
	return piece;
}

static void check(const struct directory *d, const struct sdict *sd)
{
	must(sd->chunk_count == sd->tensor_count && sd->value_count == 0);
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct sd_chunk *c = &sd->chunks[i];
		const struct sd_tensor *t = &sd->tensors[c->tensor];
		struct str file;
		uint64_t numel;
		must(c->tensor == i && t->chunk_count == 1 && sdict_find(sd, t->fqn) == i);
		must(find(d, sd->files[c->loc.file].name.p, &file) == OK);
		must(c->loc.offset <= file.n && c->loc.length <= file.n - c->loc.offset);
		must(box_numel(t->ndim, t->shape, &numel) == OK && numel * dtype_bytes(t->dtype) == c->loc.length);
		for (uint32_t k = 0; k < t->ndim; k++)
			must(c->dims[k] == 0 && c->dims[t->ndim + k] == t->shape[k]);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const char *const index_name = HF_INDEX;
	struct directory d = { 0 };
	struct sdict *sd = NULL;

	if (n == 0)
		return 0;
	bool indexed = data[0] & 0x80;
	uint32_t count = 1 + data[0] % FILES_MAX;
	const uint8_t *at = data + 1;
	size_t left = n - 1;
	if (indexed)
		d.files[INDEX] = take(&at, &left, false);
	for (d.count = 0; d.count < count; d.count++)
		d.files[d.count] = take(&at, &left, d.count + 1 == count);
	struct format_source s = { &d, &index_name, names, indexed, count, read_all, read_at, read_head, bytes_of };
	if (format_open(FORMAT_SAFETENSORS, &s, &sd) == OK)
		check(&d, sd);
	sdict_free(sd);
	return 0;
}
