/* hosts_part.c: the files of one rank that is on another host than the coordinator (see hosts.h): written to a place of their own, taken
 * from there by a rename each. The manifest that lies with them is read like any other: it can be wrong, but do no harm. */
#include <stdio.h>
#include <string.h>

#include "os/fs.h"
#include "runner/hosts.h"
#include "runner/manifest_put.h"
#include "runner/write.h"

enum { ID_MIN = 8, ID_MAX = 64 };

bool hosts_part_id(const char *id)
{
	size_t n = strlen(id);

	return n >= ID_MIN && n <= ID_MAX && strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == n;
}

static void place_name(char out[96], const char *id)
{
	snprintf(out, 96, ".dcpd-hosts-%s", id);
}

static void drop(int parent, const char *id)
{
	char name[96];

	place_name(name, id);
	if (fs_remove_tree(parent, name))
		err_clear(); /* a later sweep takes it */
}

static enum err stage_part(void *user, struct job *j, struct staging *out)
{
	const char *id = user;
	const struct ref *target = &j->spec.target;
	struct worker *w = j->worker;
	struct staging *s = out;
	char place[96];

	if (!hosts_part_id(id))
		return ERR(VALIDATION_FAILED, "hosts: the id cannot be used");
	*s = (struct staging){ .by = job_in_store(j), .parent = -1, .dir = -1 };
	s->no_sync = !j->spec.sync_files;
	TRY(roots_find(&w->roots, target->storage.p, &s->root));
	TRY(staging_divide(target->name.p, s->parent_path, sizeof s->parent_path, s->target,
			   sizeof s->target));
	place_name(place, id);
	snprintf(s->name, sizeof s->name, "%s", place);
	snprintf(s->path, sizeof s->path, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", place);
	TRY(s->parent_path[0] ? fs_mkdirs(w->roots.fds[s->root], s->parent_path, &s->parent)
			      : fs_open_dir(w->roots.fds[s->root], ".", &s->parent));
	TRY(fs_remove_tree(s->parent, place)); /* of an attempt that broke off */
	TRY(fs_mkdir(s->parent, place, 0755));
	s->made = true;
	TRY(fs_open_dir(s->parent, place, &s->dir));
	s->in_memory = fs_in_memory(s->dir);
	s->direct = !s->in_memory && fs_direct_ok(s->dir);
	return OK;
}

/* The manifest says what is written. */
static enum err end_part(void *user, struct job *j, struct run *run, struct staging *s, bool *ends_out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(MANIFEST_MAX);
	(void)user;
	struct manifest_head head = { .job = j->id, .kind = kind_of(j->kind)->name, .created_at = "", .metadata_name = "",
				      .attempt = j->attempt, .uid = j->uid };

	TRY(manifest_put(&b, &head, run, NULL));
	TRY(staging_put_file(s, MANIFEST_NAME, b.p, b.len));
	TRY(fs_fsync(s->dir, "."));
	s->done = true;
	*ends_out = true;
	return OK;
}

struct write_store hosts_part_store(const char *id)
{
	return (struct write_store){ .stage = stage_part, .written = end_part, .user = (void *)(uintptr_t)id };
}

/* ---- the coordinator's side ---- */

static FALLIBLE enum err another_plan(const struct run *run, const struct run_dst *d)
{
	struct str fqn = run_dst_fqn(run, d);

	return err_at_fqn(ERR(PLAN_INVALID, "another host has written the item elsewhere: are all daemons of one version?"), fqn.p, fqn.n);
}

static FALLIBLE enum err take_dst(struct run *run, struct run_dst *d, const struct manifest *m)
{
	const struct manifest_item *item = manifest_find(m, run_file_name(run, &run->files[d->file]), d->offset, d->length);
	bool archive = d->kind == RUN_DST_TENSOR && !d->bare;

	if (!item || item->has_edges != archive || (d->part_count > 1 && item->digest_count != d->part_count))
		return another_plan(run, d);
	d->crc32 = item->crc32;
	memcpy(d->xxh3_128, item->xxh3_128, sizeof d->xxh3_128);
	memcpy(d->edges_xxh3, item->edges, sizeof d->edges_xxh3);
	for (uint64_t i = 0; d->part_count > 1 && i < d->part_count; i++) {
		struct run_part *p = &run->parts[d->first_part + i];
		const struct block_digest *known = &m->digests.v[item->digest_at + i];
		if (known->end != p->end)
			return another_plan(run, d);
		memcpy(p->xxh3_128, known->xxh3_128, sizeof p->xxh3_128);
	}
	return OK;
}

static FALLIBLE enum err take_files(struct staging *s, struct run *run, int place, const uint32_t *files, uint32_t count)
{
	char name[256];

	for (uint32_t i = 0; i < count; i++) {
		struct str n = run_file_name(run, &run->files[files[i]]);
		must(n.n < sizeof name);
		memcpy(name, n.p, n.n);
		name[n.n] = '\0';
		TRY(err_at_file(fs_rename(place, name, s->dir, name), name, -1));
	}
	return OK;
}

static FALLIBLE enum err take_digests(struct run *run, const struct manifest *m, const uint32_t *files, uint32_t count)
{
	for (uint64_t i = 0; i < run->dsts_n; i++)
		for (uint32_t k = 0; k < count; k++)
			if (run->dsts[i].file == files[k])
				TRY(take_dst(run, &run->dsts[i], m));
	return OK;
}

enum err hosts_part_take(struct staging *s, struct run *run, const char *id, const uint32_t *files, uint32_t count)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	char name[96];
	int place = -1;

	place_name(name, id);
	enum err e = fs_open_dir(s->parent, name, &place);
	if (e == ERR_NOT_FOUND)
		return ERR(PEER_LOST, "what another host has written is not to be seen here: do the daemons share the storage?");
	if (!e)
		e = checkpoint_manifest(place, MANIFEST_NAME, &m);
	if (!e && !m)
		e = ERR(PEER_LOST, "another host's part of the save is not whole");
	if (!e)
		e = take_digests(run, m, files, count);
	if (!e)
		e = take_files(s, run, place, files, count);
	fs_drop(&place);
	if (!e)
		drop(s->parent, id);
	return e;
}

void hosts_part_drop(struct job *j, const char *id)
{
	const struct ref *target = &j->spec.target;
	struct err_info info = *err_last();
	char parent_path[4096], last[256];
	uint32_t root;
	int parent = -1;

	if (roots_find(&j->worker->roots, target->storage.p, &root) == OK &&
	    staging_divide(target->name.p, parent_path, sizeof parent_path, last, sizeof last) == OK &&
	    fs_open_dir(j->worker->roots.fds[root], parent_path[0] ? parent_path : ".", &parent) == OK)
		drop(parent, id);
	fs_drop(&parent);
	err_restore(&info);
}
