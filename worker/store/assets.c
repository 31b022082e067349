/* assets.c: see assets.h. */
#include "store/assets.h"

#include <dirent.h>
#include <stdlib.h>

/* The path of the folder: without the last part if that is a file. */
static struct str folder_path(const char *name, bool is_file)
{
	const char *slash = is_file ? strrchr(name, '/') : NULL;

	return (struct str){ name, slash ? (size_t)(slash - name) : is_file ? 0 : strlen(name) };
}

enum err assets_open(const struct stores *stores, const struct ref *ref, const struct checkpoint *c, struct store_at *out,
		     struct str *path_out)
{
	const struct store *store;
	const char *file;

	if (!ref->name.p) {
		*path_out = folder_path(c->name, c->single);
		return store_enter(c->dir, ".", out);
	}
	TRY(stores_find(stores, ref->storage.p, &store));
	enum err e = checkpoint_open_dir(store, ref->name.p, out, &file);
	*path_out = folder_path(ref->name.p, file != NULL);
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

bool asset_is_data(const char *name)
{
	struct format_file file;

	return name[0] == '.' || format_file(name, &file);
}

static FALLIBLE enum err check_name(struct str name)
{
	bool plain = str_utf8(name);

	for (size_t i = 0; i < name.n; i++)
		plain = plain && (unsigned char)name.p[i] >= ' ' && name.p[i] != 127;
	return plain ? OK : ERR(NAME_INVALID, "a file beside the source has a name with control characters, or that is no UTF-8");
}

struct walk {
	struct store_at folder;
	struct assets *assets;
};

static FALLIBLE enum err add_file(const struct walk *w, const char *name)
{
	struct asset *a;
	struct stat st;

	TRY(store_stat(w->folder, name, &st));
	if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
		return OK;
	TRY(check_name(str_of(name)));
	if (w->assets->files.n == ASSETS_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d files beside the source", ASSETS_MAX);
	TRY(vec_push(&w->assets->files, &a));
	a->bytes = (uint64_t)st.st_size;
	a->left_out = S_ISLNK(st.st_mode) ? "a symbolic link" : a->bytes > ASSET_BYTES_MAX ? "too large" : NULL;
	return arena_str(w->assets->arena, str_of(name), &a->name);
}

static enum err note_entry(void *user, const char *name, unsigned char d_type)
{
	if (d_type == DT_DIR || asset_is_data(name))
		return OK;
	return err_at_file(add_file(user, name), name, -1);
}

static int by_name(const void *a, const void *b)
{
	return str_cmp(((const struct asset *)a)->name, ((const struct asset *)b)->name);
}

enum err assets_list(struct store_at folder, struct assets *out)
{
	struct walk w = { folder, out };

	*out = (struct assets){ .arena = arena_new(UINT64_MAX) };
	NEED(out->arena, "no memory for a list of files");
	TRY(vec_reserve(&out->files, 0));
	TRY(store_list(folder, note_entry, &w));
	qsort(out->files.v, out->files.n, sizeof *out->files.v, by_name);
	return OK;
}

void assets_free(struct assets *a)
{
	vec_free(&a->files);
	arena_free(a->arena);
}
