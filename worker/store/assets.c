/* assets.c: see assets.h. */
#include "store/assets.h"

enum err assets_open(const struct stores *stores, const struct ref *ref, const struct checkpoint *c, struct store_at *out)
{
	const struct store *store;
	const char *file;

	if (!ref->name.p)
		return store_enter(c->dir, ".", out);
	TRY(stores_find(stores, ref->storage.p, &store));
	enum err e = checkpoint_open_dir(store, ref->name.p, out, &file);
	return e == ERR_NOT_FOUND ? ERR(NOT_FOUND, "there is no '%s:%s' to take files from", ref->storage.p, ref->name.p) : e;
}

enum err assets_read(struct store_at folder, const char *name, void **out, uint64_t *n_out)
{
	*out = NULL;
	*n_out = 0;
	enum err e = store_get(folder, name, ASSET_BYTES_MAX, out, n_out, NULL);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return err_at_file(e, name, -1);
}
