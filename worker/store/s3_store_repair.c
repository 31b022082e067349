/* s3_store_repair.c: single objects of a checkpoint are replaced by better ones (see s3_store.h).
 *
 * The object under its key is replaced in one step, if it is the one that was looked at, and if the checkpoint's commit still is, too. What
 * is whole of an object is not sent: its parts are copied on the server, under the same condition. A repaired object is marked as the
 * attempt's that made the checkpoint, and with the repair's own number, so that an answer that was lost is told from another repair's. */
#include <stdio.h>

#include "base/mem.h"
#include "os/fs.h"
#include "store/s3_store_impl.h"

bool s3_clones(struct store_at folder)
{
	return s3_thing_at(folder)->repairs;
}

enum err s3_clone(struct store_at from, uint64_t from_offset, struct store_at to, uint64_t offset, uint64_t bytes, const char *name)
{
	const struct s3_entry *file = &s3_thing_at(from)->file;
	struct s3_upload *u = s3_thing_at(to)->upload;

	if (!u->repairs || from_offset || offset || u->pieces.n || u->base.key || bytes > file->bytes)
		return ERR(UNSUPPORTED, "'%s' cannot be copied on the server", name);
	u->base = *file;
	u->base.name = NULL;
	u->base.bytes = bytes;
	u->base.key = mem_strdup(file->key);
	return u->base.key ? OK : ERR(NO_MEMORY, "no memory for a name");
}

static FALLIBLE enum err replaced(const struct s3_folder *f)
{
	return ERR(CHECKPOINT_REPLACED, "'%s' is no longer the checkpoint that is repaired", f->path);
}

/* Looks at the checkpoint anew. */
static FALLIBLE enum err look_again(struct s3 *s3, struct s3_folder *f)
{
	char path[S3_PATH_MAX];

	memcpy(path, f->path, sizeof path);
	s3_folder_clear(f);
	return s3_folder_look(s3, path, false, f);
}

static FALLIBLE enum err check_same(struct s3 *s3, const struct s3_folder *f)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *now = mem_zalloc(1, sizeof *now);

	NEED(now, "no memory for a folder");
	TRY(s3_folder_look(s3, f->path, false, now));
	return now->commit.key && strcmp(now->commit.etag, f->commit.etag) == 0 ? OK : replaced(f);
}

enum err s3_replace(struct staging *s, const char *name)
{
	struct s3_own *own = s3_own(s->store);
	struct s3_folder *f = s3_thing_at(s->repaired)->folder;
	struct s3_upload *u = s3_part_find(own, s->path, name);
	char etag[S3_ETAG_MAX] = "", commit[S3_ETAG_MAX];

	if (!f || !u || !u->is_finished)
		return ERR(INTERNAL, "'%s' was not written to its end", name);
	TRY(check_same(own->client, f));
	const struct s3_entry *old = s3_folder_find(f, name);
	bool is_commit = old && f->commit.key && strcmp(old->key, f->commit.key) == 0;
	memcpy(commit, f->commit.etag, sizeof commit);
	if (old)
		memcpy(etag, old->etag, sizeof etag);
	fs_fault("commit.replace");
	enum err e = s3_part_complete(u, (struct s3_condition){ old ? S3_IF_ETAG : S3_IF_NONE, etag });
	fs_fault("commit.replaced");
	if (e == ERR_CHECKPOINT_EXISTS || e == ERR_NOT_FOUND)
		return !u->unsure ? replaced(f) : ERR(STATE_CONFLICT, "whether '%s' was repaired is not known: another wrote it, and an "
						      "answer of the storage was lost", name);
	TRY(u->unsure ? err_in_doubt(e) : e);
	TRY(err_in_doubt(look_again(own->client, f)));
	if (is_commit || strcmp(commit, f->commit.etag) == 0)
		return OK;
	if (!old) /* a file that was lost, of a checkpoint that is gone by now */
		TRY(s3_delete(own->client, u->key, NULL));
	return replaced(f);
}
