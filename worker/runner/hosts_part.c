/* hosts_part.c: the files of one rank that is on another host than the coordinator (see hosts.h): written to a place of their own, taken
 * from there by a rename each. The manifest that lies with them is read like any other: it can be wrong, but do no harm. */
#include <stdio.h>
#include <string.h>

#include "runner/hosts.h"
#include "runner/manifest_put.h"
#include "runner/write.h"

enum { ID_MIN = 8, ID_MAX = 64 };

bool hosts_part_id(const char *id)
{
	size_t n = strlen(id);

	return n >= ID_MIN && n <= ID_MAX && strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == n;
}

/* The place of the part `id`: its name, and its path in the store. */
struct place {
	char name[96], path[STAGING_BESIDE_MAX];
	const struct store *store;
};

static FALLIBLE enum err find_place(const struct stores *stores, const struct ref *target, const char *id, struct place *out)
{
	if (!hosts_part_id(id))
		return ERR(VALIDATION_FAILED, "hosts: the id cannot be used");
	snprintf(out->name, sizeof out->name, HOSTS_PREFIX "%s", id);
	TRY(stores_find(stores, target->storage.p, &out->store));
	return staging_beside(target->name.p, out->name, out->path);
}

static enum err stage_part(const struct write_store *store, struct job *j, struct staging *out)
{
	const struct store_job by = job_in_store(j);
	struct place place;

	TRY(find_place(by.stores, &j->spec.target, store->user, &place));
	TRY(store_drop(store_top(place.store), place.path)); /* of an attempt that broke off */
	return staging_open_part(&by, &j->spec, place.name, out);
}

/* The manifest says what is written. */
static enum err publish_part(const struct write_store *, struct write *w)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(MANIFEST_MAX);
	const struct job *j = w->job;
	struct staging *s = w->staging;
	struct manifest_head head = { .job = j->id, .kind = kind_of(j->kind)->name, .created_at = "", .metadata_name = "",
				      .attempt = j->attempt, .uid = j->uid };

	TRY(manifest_put(&b, &head, w->run, NULL));
	TRY(s->store->ops->put(s->dir, MANIFEST_NAME, b.p, b.len, true));
	s->done = true;
	return OK;
}

struct write_store hosts_part_store(const char *id)
{
	return (struct write_store){ .stage = stage_part, .publish = publish_part, .is_shared = true, .user = (void *)(uintptr_t)id };
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

static FALLIBLE enum err take_files(struct staging *s, struct run *run, struct store_at place, const uint32_t *files, uint32_t count)
{
	char name[256];

	for (uint32_t i = 0; i < count; i++) {
		struct str n = run_file_name(run, &run->files[files[i]]);
		must(n.n < sizeof name);
		memcpy(name, n.p, n.n);
		name[n.n] = '\0';
		TRY(s->store->ops->adopt(s, place, name));
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

enum err hosts_part_take(struct write *w, const char *id, const uint32_t *files, uint32_t count)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	CLEANUP(store_close) struct store_at at = STORE_NOTHING;
	struct place place;

	TRY(find_place(w->staging->by.stores, &w->job->spec.target, id, &place));
	enum err e = store_enter(store_top(place.store), place.path, &at);
	if (e == ERR_NOT_FOUND)
		return ERR(PEER_LOST, "what another host has written is not to be seen here: do the daemons share the storage?");
	e = e ?: checkpoint_manifest(at, MANIFEST_NAME, &m);
	if (!e && !m)
		e = ERR(PEER_LOST, "another host's part of the save is not whole");
	e = e ?: take_digests(w->run, m, files, count);
	e = e ?: take_files(w->staging, w->run, at, files, count);
	if (!e && store_drop(store_top(place.store), place.path))
		err_clear(); /* a later sweep takes it */
	return e;
}

enum err hosts_part_remove(const struct stores *stores, const struct ref *target, const char *id)
{
	struct place place;

	TRY(find_place(stores, target, id, &place));
	return store_drop(store_top(place.store), place.path);
}

void hosts_part_drop(struct job *j, const char *id)
{
	CLEANUP(err_restore) struct err_info info = *err_last();

	if (hosts_part_remove(&j->worker->stores, &j->spec.target, id))
		err_clear(); /* a later sweep takes it */
}
