/* t_one_file.h: bytes in memory as the one payload file of a format's source (struct format_source), for fuzz targets. */
#pragma once
#include "base/num.h"
#include "format/format.h"

static enum err bytes_of(void *user, const char *name, uint64_t *out)
{
	const struct str *file = user;

	(void)name;
	*out = file->n;
	return OK;
}

static enum err read_at(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	const struct str *file = user;

	(void)name;
	must(num_inside(offset, n, file->n));
	if (n)
		memcpy(into, file->p + offset, n);
	return OK;
}

/* file and name must stay as long as the source is used. */
static struct format_source t_one_file(struct str *file, const char *const *name)
{
	return (struct format_source){ .user = file, .payload = name, .payload_count = 1, .read = read_at, .bytes_of = bytes_of };
}
