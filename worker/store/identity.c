/* identity.c: see identity.h. */
#include "store/identity.h"

#include <stdio.h>
#include <string.h>

#include "format/format.h"
#include "io/digest.h"
#include "store/manifest.h"
#include "store/parts.h"

/* A manifest counts as metadata. */
static enum format_role role_of(const char *name)
{
	struct format_file file;
	int64_t rank;

	return manifest_is(name, &rank) ? FORMAT_METADATA : format_file(name, &file) ? file.role : FORMAT_OTHER;
}

static void mix(struct identity *id, struct str name, const struct stat *st, bool changed)
{
	unsigned char xxh3[16], of_name[16];
	uint64_t half[2];

	digest_xxh3(name.p, name.n, of_name);
	memcpy(half, of_name, sizeof half);
	const uint64_t all[] = { half[0], half[1], st->st_ino, (uint64_t)st->st_size, (uint64_t)st->st_mtim.tv_sec,
				 (uint64_t)st->st_mtim.tv_nsec, changed ? (uint64_t)st->st_ctim.tv_sec : 0,
				 changed ? (uint64_t)st->st_ctim.tv_nsec : 0 };
	digest_xxh3(all, sizeof all, xxh3);
	memcpy(half, xxh3, sizeof half);
	id->sum[0] += half[0];
	id->sum[1] += half[1];
}

void identity_begin(struct identity *id, const struct stat *top)
{
	*id = (struct identity){ .top = top->st_ino };
	if (!S_ISDIR(top->st_mode))
		mix(id, STR(""), top, true);
}

void identity_add(struct identity *id, const char *name, const struct stat *st)
{
	enum format_role role = S_ISREG(st->st_mode) ? role_of(name) : FORMAT_OTHER;

	if (role == FORMAT_PAYLOAD || role == FORMAT_METADATA)
		mix(id, str_of(name), st, role == FORMAT_METADATA);
}

void identity_text(const struct identity *id, char out[IDENTITY_MAX])
{
	snprintf(out, IDENTITY_MAX, "%jx-%016jx%016jx", (uintmax_t)id->top, (uintmax_t)id->sum[0], (uintmax_t)id->sum[1]);
}

struct walk {
	struct identity id;
	struct store_at dir;
};

static enum err add_file(void *user, const char *name, unsigned char)
{
	struct walk *w = user;
	struct stat st;

	enum err e = role_of(name) != FORMAT_OTHER ? store_stat(w->dir, name, &st) : ERR_NOT_FOUND;
	if (!e)
		identity_add(&w->id, name, &st);
	return e == ERR_NOT_FOUND ? OK : e;
}

enum err identity_of(struct store_at folder, const char *name, char out[IDENTITY_MAX])
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct walk walk;
	struct stat st;

	TRY(store_stat(folder, name, &st));
	if (S_ISDIR(st.st_mode)) {
		TRY(store_enter(folder, name, &dir));
		TRY(store_stat(dir, "", &st)); /* of the very directory that is listed */
	}
	identity_begin(&walk.id, &st);
	walk.dir = dir;
	if (dir.store)
		TRY(parts_list(dir, add_file, &walk));
	identity_text(&walk.id, out);
	return OK;
}

void identity_version(const struct stat *dir, const struct stat *metadata, char out[IDENTITY_VERSION_MAX])
{
	const struct timespec *t = &metadata->st_ctim;
	int64_t ns;

	out[0] = '\0';
	if (!__builtin_mul_overflow((int64_t)t->tv_sec, 1000000000, &ns) && !__builtin_add_overflow(ns, (int64_t)t->tv_nsec, &ns))
		snprintf(out, IDENTITY_VERSION_MAX, "%ju:%ju:%ju:%jd", (uintmax_t)dir->st_dev, (uintmax_t)dir->st_ino,
			 (uintmax_t)metadata->st_ino, (intmax_t)ns);
}
