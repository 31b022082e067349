/* checkpoint_recognise.c: what lies under a name, by the names in a directory and the first bytes of files: a checkpoint, and of which
 * format, or a folder (see checkpoint.h). Lists and saves ask this of each directory on their way: listed once, if that is enough. */
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/num.h"
#include "format/delta.h"
#include "store/checkpoint.h"

enum { POINTER_MAX = 255, SEARCH_DEPTH = 4, SEARCH_MAX = 64 /* folders */ };

struct seen {
	struct format_listing names;
	bool has_folders;
};

static enum err look(void *user, const char *name, unsigned char d_type)
{
	struct seen *seen = user;
	char folder[256];

	seen->has_folders = seen->has_folders || (d_type == DT_DIR && name[0] != '.');
	if (d_type == DT_DIR && snprintf(folder, sizeof folder, "%s/", name) >= (int)sizeof folder)
		return OK;
	format_listing_add(&seen->names, d_type == DT_DIR ? folder : name);
	return OK;
}

/* A delta has the files of a safetensors directory: its index says what it is. */
static FALLIBLE enum err look_into_index(struct store_at dir, enum format *out)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	unsigned char first[DELTA_FIRST_BYTES];
	struct stat st;

	enum err e = store_stat(dir, HF_INDEX, &st);
	if (e == ERR_NOT_FOUND || (!e && !S_ISREG(st.st_mode)))
		return OK;
	TRY(e);
	TRY(store_open_file(dir, HF_INDEX, STORE_READ, &file));
	size_t n = (size_t)num_min((uint64_t)st.st_size, sizeof first);
	TRY(store_read(file, first, n, 0, HF_INDEX));
	if (delta_index_is(first, n))
		*out = FORMAT_DELTA;
	return OK;
}

/* Anything may be called metadata.json. */
static FALLIBLE enum err confirm_torch_dist(struct store_at dir, enum format *out)
{
	CLEANUP(mem_free_ptr) void *text = NULL;
	uint64_t n = 0;

	enum err e = store_get(dir, DIST_CONFIG, DIST_CONFIG_MAX, &text, &n, NULL);
	if (e && e != ERR_NOT_FOUND && e != ERR_LIMIT_EXCEEDED && e != ERR_NAME_INVALID)
		return e;
	err_clear();
	if (e || !torch_dist_is((struct str){ text, n }))
		*out = FORMAT_DCP;
	return OK;
}

/* A directory is listed once: on a store that is slow each more would be felt. */
static FALLIBLE enum err look_at_dir(struct store_at dir, struct seen *seen, enum format *out)
{
	TRY(store_list(dir, look, seen));
	*out = format_of_listing(&seen->names);
	if (*out == FORMAT_TORCH_DIST)
		return confirm_torch_dist(dir, out);
	return *out == FORMAT_SAFETENSORS ? look_into_index(dir, out) : OK;
}

struct search {
	struct store_at dir;
	uint32_t depth, *left;         /* folders that may yet be looked at */
	bool found;
};

static enum err search_entry(void *user, const char *name, unsigned char d_type);

static FALLIBLE enum err search_folder(struct search *s, const char *name)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct seen seen = { .has_folders = false };
	enum format format;

	TRY(store_enter(s->dir, name, &dir));
	TRY(look_at_dir(dir, &seen, &format));
	s->found = format != FORMAT_NONE;
	if (s->found || !seen.has_folders || s->depth == SEARCH_DEPTH)
		return OK;
	struct search below = { dir, s->depth + 1, s->left, false };
	TRY(store_list(dir, search_entry, &below));
	s->found = below.found;
	return OK;
}

/* A folder that cannot be looked into may hold checkpoints, and a delete would take them along: it counts as if it did. */
static enum err search_entry(void *user, const char *name, unsigned char d_type)
{
	struct search *s = user;
	enum err e = OK;

	if (s->found || name[0] == '.' || name[0] == '-' || d_type != DT_DIR)
		return OK;
	if (*s->left > 0) {
		--*s->left;
		e = search_folder(s, name);
	} else {
		s->found = true;
	}
	if (e != ERR_FORBIDDEN && e != ERR_NOT_FOUND) /* not for us to see, or gone meanwhile */
		return e;
	err_clear();
	s->found = e == ERR_FORBIDDEN;
	return OK;
}

/* Any tool may put a .safetensors file into a folder of checkpoints. Unless an index binds such files together, it makes no checkpoint of
 * the folder, which would hide the others. */
static FALLIBLE enum err settle_folder(struct store_at dir, const struct seen *seen, enum format *format)
{
	uint32_t left = SEARCH_MAX;
	struct search s = { dir, 0, &left, false };

	if (*format != FORMAT_SAFETENSORS || !seen->has_folders || seen->names.roles[FORMAT_SAFETENSORS] & 1u << FORMAT_METADATA)
		return OK;
	TRY(store_list(dir, search_entry, &s));
	if (s.found)
		*format = FORMAT_NONE;
	return OK;
}

enum err checkpoint_format_of_dir(struct store_at dir, enum format *out)
{
	struct seen seen = { .has_folders = false };

	TRY(look_at_dir(dir, &seen, out));
	return settle_folder(dir, &seen, out);
}

enum err checkpoint_recognise_file(struct store_at dir, const char *name, enum format *out)
{
	unsigned char first[FORMAT_FIRST_BYTES];
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	struct format_file part;
	struct stat st;

	*out = FORMAT_NONE;
	if (format_file(name, &part) && !format_is_file(part.format)) /* a .distcp begins as a file of torch.save does */
		return OK;
	TRY(store_open_file(dir, name, STORE_READ, &file));
	TRY(store_stat(file, "", &st));
	size_t n = (size_t)num_min((uint64_t)st.st_size, sizeof first);
	TRY(store_read(file, first, n, 0, name));
	*out = format_of_bytes(first, n);
	if (*out == FORMAT_NONE)
		*out = format_of_file(name);
	return OK;
}

/* Looks at what is at `name`: a directory is left open in *dir, and *seen has what its entries say. */
static FALLIBLE enum err look_at(const struct store *store, const char *name, struct store_at *dir, struct seen *seen, enum format *out)
{
	struct stat st;

	*out = FORMAT_NONE;
	enum err e = store_stat(store_top(store), name, &st);
	if (e == ERR_NOT_FOUND)
		return OK;
	TRY(e);
	if (S_ISREG(st.st_mode))
		return checkpoint_recognise_file(store_top(store), name, out);
	if (!S_ISDIR(st.st_mode))
		return OK;
	TRY(store_enter(store_top(store), name, dir));
	return look_at_dir(*dir, seen, out);
}

enum err checkpoint_recognise(const struct store *store, const char *name, enum format *out)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct seen seen = { .has_folders = false };

	TRY(look_at(store, name, &dir, &seen, out));
	return settle_folder(dir, &seen, out);
}

/* Names the directory that a file like DeepSpeed's `latest` names. */
static FALLIBLE enum err read_pointer(struct store_at dir, const char *pointer, char step[POINTER_MAX + 1])
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t n = 0;

	enum err e = store_get(dir, pointer, POINTER_MAX, &bytes, &n, NULL);
	if (e == ERR_LIMIT_EXCEEDED)
		e = ERR(FORMAT_METADATA, "the file should name a folder beside it, in %d bytes at most", POINTER_MAX);
	TRY(err_at_file(e, pointer, -1));
	const char *p = bytes;
	while (n && (p[n - 1] == '\n' || p[n - 1] == '\r' || p[n - 1] == ' '))
		n--;
	struct str name = { p, n };
	if (n == 0 || memchr(p, '/', n) || memchr(p, '\0', n) || str_is(name, ".") || str_is(name, ".."))
		return err_at_file(ERR(FORMAT_METADATA, "the file should name a folder beside it"), pointer, 0);
	memcpy(step, p, n);
	step[n] = '\0';
	return OK;
}

enum err checkpoint_follow(const struct store *store, const char *name, char out[CHECKPOINT_NAME_MAX], enum format *format)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct seen seen = { .has_folders = false };
	const struct format_listing *l = &seen.names;
	char step[POINTER_MAX + 1];
	struct stat st;

	if ((size_t)snprintf(out, CHECKPOINT_NAME_MAX, "%s", name) >= CHECKPOINT_NAME_MAX)
		return ERR(NAME_INVALID, "a name of %zu bytes", strlen(name));
	TRY(look_at(store, name, &dir, &seen, format));
	if (*format != FORMAT_NONE || (!l->pointer && !l->step[0]))
		return OK;
	if (l->pointer)
		TRY(read_pointer(dir, l->pointer, step));
	const char *to = l->pointer ? step : l->step;
	enum err e = store_stat(dir, to, &st);
	if (e == ERR_NOT_FOUND)
		return err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the step '%s' is not there", to), l->pointer ? l->pointer : to, 0);
	TRY(e);
	if ((size_t)snprintf(out, CHECKPOINT_NAME_MAX, "%s/%s", name, to) >= CHECKPOINT_NAME_MAX)
		return ERR(NAME_INVALID, "a name of %zu bytes", strlen(name) + strlen(to) + 1);
	return checkpoint_recognise(store, out, format);
}
