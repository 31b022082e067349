/* commit.c: see commit.h. What a store must not decide: may it go, and may this user have it go? The act itself is the store's. */
#include "store/commit.h"

#include <stdio.h>
#include <string.h>

#include "base/jval.h"
#include "base/mem.h"
#include "spec/kinds.h"
#include "store/aliases.h"
#include "store/beside.h"
#include "store/checkpoint.h"
#include "store/copied.h"
#include "store/fence.h"
#include "store/identity.h"
#include "store/kept_trash.h"
#include "store/notes.h"
#include "store/owner.h"

enum err commit_in_doubt(const char *what, const char *name)
{
	struct err_info why = *err_last();

	err_record(ERR_NOT_DURABLE, why.sys_errno, why.place,
		   "'%s' %s, but the storage did not confirm it (%.600s): a power cut may undo it", name, what, why.text);
	return ERR_NOT_DURABLE;
}

struct removal {
	const struct store_job *by;
	const struct commit_removal *how;
	const struct store *store;
	const char *name;
};

static FALLIBLE enum err check_present(const struct removal *r, struct str other)
{
	enum format format;

	enum err e = checkpoint_recognise(r->store, other.p, &format);
	if (e && e != ERR_NOT_FOUND)
		return e;
	if (e || format == FORMAT_NONE)
		return ERR(STATE_CONFLICT, "'%s' stays: '%s', which is to stay in its run, is not there", r->name, other.p);
	return OK;
}

static FALLIBLE enum err check_unaliased(const struct removal *r)
{
	CLEANUP(jval_drop) json_t *all = NULL;
	CLEANUP(mem_free_ptr) char *run = mem_strdup(r->name);
	const char *alias;
	json_t *name;

	NEED(run, "no memory for a run's name");
	char *slash = strrchr(run, '/');
	if (slash)
		*slash = '\0';
	TRY(aliases_read(r->store, slash ? run : "-", &all));
	json_object_foreach(all, alias, name)
		if (strcmp(json_string_value(name), r->name) == 0)
			return ERR(STATE_CONFLICT, "'%s' stays: the alias '%s' leads to it", r->name, alias);
	return OK;
}

/* Under the store's locks. */
static enum err check_only_if(void *user)
{
	const struct removal *r = user;
	const struct spec_only_if *only_if = r->how->only_if;
	char identity[IDENTITY_MAX];

	TRY(fence_check(r->by, r->store, r->name));
	if (!only_if || !only_if->is_given)
		return OK;
	if (only_if->etag.n) {
		TRY(identity_of(store_top(r->store), r->name, identity));
		if (!str_is(only_if->etag, identity))
			return ERR(STATE_CONFLICT, "'%s' stays: it is another one than was meant", r->name);
	}
	for (size_t i = 0; i < only_if->present.n; i++)
		TRY(check_present(r, only_if->present.v[i]));
	return only_if->unaliased ? check_unaliased(r) : OK;
}

static FALLIBLE enum err remove_checked(const struct store_job *by, const struct store *store, const char *name,
					const struct commit_removal *how, struct commit_removed *out)
{
	struct kept_trash_words words = { .keep_ms = how->trash_ms, .policy = how->policy, .why = how->why };
	struct removal r = { by, how, store, name };
	CLEANUP(mem_free_ptr) char *about = NULL;
	enum format format;
	struct stat st;

	TRY(store_stat(store_top(store), name, &st));
	TRY(checkpoint_recognise(store, name, &format));
	if (format == FORMAT_NONE)
		return ERR(NOT_A_CHECKPOINT, "'%s' is no checkpoint, and is not deleted", name);
	TRY(owner_check(by, store, name));
	TRY(notes_check_removal(store_top(store), name));
	TRY(check_only_if(&r)); /* before anything is made in the trash; and again, under the locks */
	TRY(kept_trash_size(store, name, &words.bytes));
	if (how->trash_ms)
		TRY(kept_trash_describe(by, store, name, &words, &about));
	TRY(store->ops->remove(by, store, name, &(struct store_removal){ check_only_if, &r, about }));
	*out = (struct commit_removed){ words.bytes, about };
	about = NULL;
	return OK;
}

enum err commit_delete(const struct store_job *by, const struct ref *ref, const struct commit_removal *how, struct commit_removed *out)
{
	const struct store *store;
	char parent[4096], last[256];

	*out = (struct commit_removed){ 0 };
	TRY(stores_find(by->stores, ref->storage.p, &store));
	TRY(staging_divide(ref->name.p, parent, sizeof parent, last, sizeof last));
	enum err e = remove_checked(by, store, ref->name.p, how, out);
	return e == ERR_NOT_FOUND ? ERR(NOT_FOUND, "there is no checkpoint '%s'", ref->name.p) : e;
}

/* ---- what a job that is taken over finds ---- */

struct other {
	const char *job;
	struct store_at folder;
	char *found;                   /* COMMIT_JOB_MAX bytes; "": nobody's */
};

static FALLIBLE enum err look_at_page(struct other *o, const char *page)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;

	enum err e = checkpoint_manifest(o->folder, page, &m);
	if (e == ERR_FORMAT_MANIFEST || e == ERR_LIMIT_EXCEEDED || e == ERR_CHECKPOINT_DAMAGED) {
		err_clear(); /* it tells of no job */
		return OK;
	}
	TRY(e);
	if (m && strlen(m->job) == strlen(o->job) && strcmp(m->job, o->job) != 0 && strcmp(m->job, o->found) > 0)
		snprintf(o->found, COMMIT_JOB_MAX, "%s", m->job);
	return OK;
}

static enum err note_other(void *user, const char *name, unsigned char)
{
	int64_t rank;

	return manifest_is(name, &rank) ? look_at_page(user, name) : OK;
}

/* The job may have ended without telling the others, and its target may have been saved anew since: that is not what it was to replace or
 * remove. Which other job was it? */
static FALLIBLE enum err find_other(const struct store_job *by, const struct store *store, const char *name, char found[COMMIT_JOB_MAX])
{
	struct other o = { .job = by->id, .folder = STORE_NOTHING, .found = found };
	char parent[4096], last[256], page[BESIDE_MAX];
	struct stat st;

	enum err e = store_stat(store_top(store), name, &st);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	if (S_ISDIR(st.st_mode)) {
		TRY(store_enter(store_top(store), name, &o.folder));
		e = look_at_page(&o, COPIED_NAME); /* a copy's manifests are those of its source, and name its job */
		e = e || found[0] ? e : store_list(o.folder, note_other, &o);
	} else {
		TRY(staging_divide(name, parent, sizeof parent, last, sizeof last));
		TRY(store_enter(store_top(store), parent, &o.folder));
		e = beside_path(last, MANIFEST_NAME, page) ? look_at_page(&o, page) : OK;
	}
	store_close(&o.folder);
	return e;
}

enum err commit_recover(const struct stores *stores, const json_t *question, bool *committed_out, struct manifest **manifest_out,
			char other_out[COMMIT_JOB_MAX])
{
	const char *kind = jval_text(question, "kind"), *name = jval_text(question, "name");
	const struct store_job by = { .stores = stores, .id = jval_text(question, "job"),
				      .mark = json_string_value(json_object_get(question, "mark")),
				      .turn = (uint32_t)jval_int(question, "turn") };
	const struct store *store;
	enum job_kind k;

	*committed_out = false;
	other_out[0] = '\0';
	TRY(stores_find(stores, json_string_value(json_object_get(question, "storage")), &store));
	bool removes = kind && kind_parse(str_of(kind), &k) && kind_is(k, KIND_REMOVES);
	bool takes = json_is_true(json_object_get(question, "takes"));
	if (takes) {
		TRY(fence_raise(&by, store, name, removes));
		TRY(store->ops->fence(&by, store, name));
	} else {
		TRY(fence_check(&by, store, name));
	}
	TRY(store->ops->recover(&by, store, name, removes, committed_out, manifest_out));
	return takes && !*committed_out ? find_other(&by, store, name, other_out) : OK;
}
