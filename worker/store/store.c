/* store.c: finds a store by the scheme of its location, and an open one by its name (see store.h). */
#include "store/store.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "store/node_store.h"
#include "store/posix.h"
#include "store/s3_store.h"

static const struct {
	const char *scheme;
	const struct store_ops *ops;
} rows[] = {
#define X(scheme, location, ops) { scheme, &(ops) },
#include "store/stores.def"
};

enum err store_open(struct store *s, const struct store_place *place)
{
	const char *location = place->location, *colon = strstr(location, "://");
	struct str scheme = colon ? (struct str){ location, (size_t)(colon - location) } : STR("file");
	struct store_place there = *place;

	there.location = colon ? colon + 3 : location;
	s->top = -1;
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		if (!str_is(scheme, rows[i].scheme))
			continue;
		s->ops = rows[i].ops;
		return s->ops->open(s, &there);
	}
	return ERR(CONFIG, "storage '%s': this worker has no store '%.*s'", s->name, (int)scheme.n, scheme.p);
}

enum err stores_find(const struct stores *stores, const char *name, const struct store **out)
{
	each(s, stores->v, stores->count) {
		if (strcmp(s->name, name) != 0)
			continue;
		*out = s;
		if (s->top >= 0)
			return OK;
		err_restore(&s->error);
		return s->error.code;
	}
	return ERR(NOT_FOUND, "this worker has no storage '%s'", name);
}

enum err store_read_span(void *user, uint64_t offset, void *into, size_t n)
{
	const struct store_span *s = user;

	return store_read(s->file, into, n, s->offset + offset, "");
}

enum err store_get(struct store_at folder, const char *name, uint64_t max, void **bytes_out, uint64_t *n_out, struct stat *st_out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	struct stat st;

	if (folder.store->ops->get)
		return folder.store->ops->get(folder, name, max, bytes_out, n_out, st_out);
	TRY(store_open_file(folder, name, STORE_READ, &file));
	TRY(store_stat(file, "", &st));
	if ((uint64_t)st.st_size > max)
		return err_at_file(ERR(LIMIT_EXCEEDED, "the file has %jd bytes, at most %ju are read", (intmax_t)st.st_size,
				       (uintmax_t)max), name, -1);
	bytes = mem_alloc((uint64_t)st.st_size + 1);
	NEED(bytes, "no memory for %jd bytes", (intmax_t)st.st_size);
	TRY(store_read(file, bytes, (size_t)st.st_size, 0, name));
	*n_out = (uint64_t)st.st_size;
	*bytes_out = move(bytes);
	if (st_out)
		*st_out = st;
	return OK;
}
