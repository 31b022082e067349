/* t_files.h: bytes in memory as the files of a format's source (struct format_source), for fuzz targets: one file, or the files that an
 * input is divided into. */
#pragma once
#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/format.h"

enum { T_FILES_MAX = 32 };

struct t_files {
	const char *names[T_FILES_MAX];        /* metadata first */
	struct str bytes[T_FILES_MAX];
	uint32_t metadata_count, count;
	bool closed;                           /* no index names files: the parser asks for none but these */
};

static inline FALLIBLE enum err t_files_find(const struct t_files *f, const char *name, struct str *out)
{
	for (uint32_t i = 0; i < f->count; i++)
		if (strcmp(f->names[i], name) == 0) {
			*out = f->bytes[i];
			return OK;
		}
	must(!f->closed);
	return ERR(CHECKPOINT_INCOMPLETE, "the file is missing");
}

static enum err t_files_bytes_of(void *user, const char *name, uint64_t *out)
{
	struct str file;

	TRY(t_files_find(user, name, &file));
	*out = file.n;
	return OK;
}

static enum err t_files_read(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	struct str file;

	TRY(t_files_find(user, name, &file));
	must(num_inside(offset, n, file.n));
	if (n)
		memcpy(into, file.p + offset, n);
	return OK;
}

static enum err t_files_read_head(void *user, const char *name, uint64_t n, void **out)
{
	*out = mem_alloc(n);
	NEED(*out, "no memory for a head");
	return t_files_read(user, name, 0, *out, n);
}

static enum err t_files_read_all(void *user, const char *name, void **out, uint64_t *n_out)
{
	struct str file;

	TRY(t_files_find(user, name, &file));
	*n_out = file.n;
	return t_files_read_head(user, name, file.n, out);
}

static inline struct t_files t_files_one(const char *name, const uint8_t *data, size_t n)
{
	return (struct t_files){ .names = { name }, .bytes = { { (const char *)data, n } }, .count = 1 };
}

/* Takes the input's next file: two bytes of length, and the bytes; the last one has all that is left. */
static inline void t_files_take(struct t_files *f, const char *name, const uint8_t **at, size_t *left, bool last)
{
	size_t n = *left < 2 ? 0 : last ? *left - 2 : num_min((size_t)(*at)[0] | (size_t)(*at)[1] << 8, *left - 2);
	size_t head = num_min(*left, 2);

	must(f->count < T_FILES_MAX);
	f->names[f->count] = name;
	f->bytes[f->count++] = (struct str){ (const char *)*at + head, n };
	*at += head + n;
	*left -= head + n;
}

static inline struct format_source t_files_source(struct t_files *f)
{
	return (struct format_source){ .user = f, .metadata = f->names, .metadata_count = f->metadata_count,
				       .payload = f->names + f->metadata_count, .payload_count = f->count - f->metadata_count,
				       .read_all = t_files_read_all, .read = t_files_read, .read_head = t_files_read_head,
				       .bytes_of = t_files_bytes_of };
}

/* Every chunk and stored value of what was opened lies inside its file. */
static inline void t_files_check_inside(const struct t_files *f, const struct sdict *sd)
{
	struct str file;

	for (uint64_t i = 0; i < sd->chunk_count + sd->value_count; i++) {
		bool is_chunk = i < sd->chunk_count;
		const struct sd_value *v = is_chunk ? NULL : &sd->values[i - sd->chunk_count];
		const struct sd_loc *loc = is_chunk ? &sd->chunks[i].loc : &v->loc;
		if (v && v->kind != SD_VALUE_STORED)
			continue;
		must(loc->file < sd->file_count && t_files_find(f, sd->files[loc->file].name.p, &file) == OK);
		must(num_inside(loc->offset, loc->length, file.n));
	}
}
