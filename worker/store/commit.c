/* commit.c: see commit.h. What a store must not decide: may it go, and may this user have it go? The act itself is the store's. */
#include "store/commit.h"

#include "spec/kinds.h"
#include "store/notes.h"
#include "store/owner.h"

enum err commit_in_doubt(const char *what, const char *name)
{
	struct err_info why = *err_last();

	err_record(ERR_NOT_DURABLE, why.sys_errno, why.place,
		   "'%s' %s, but the storage did not confirm it (%.600s): a power cut may undo it", name, what, why.text);
	return ERR_NOT_DURABLE;
}

static FALLIBLE enum err remove_checked(const struct store_job *by, const struct store *store, const char *name)
{
	enum format format;
	struct stat st;

	TRY(store_stat(store_top(store), name, &st));
	TRY(checkpoint_recognise(store, name, &format));
	if (format == FORMAT_NONE)
		return ERR(NOT_A_CHECKPOINT, "'%s' is no checkpoint, and is not deleted", name);
	TRY(owner_check(by, store, name));
	TRY(notes_check_removal(store_top(store), name));
	return store->ops->remove(by, store, name);
}

enum err commit_delete(const struct store_job *by, const struct ref *ref)
{
	const struct store *store;
	char parent[4096], last[256];

	TRY(stores_find(by->stores, ref->storage.p, &store));
	TRY(staging_divide(ref->name.p, parent, sizeof parent, last, sizeof last));
	enum err e = remove_checked(by, store, ref->name.p);
	return e == ERR_NOT_FOUND ? ERR(NOT_FOUND, "there is no checkpoint '%s'", ref->name.p) : e;
}

enum err commit_recover(const struct stores *stores, const json_t *question, bool *committed_out, struct manifest **manifest_out)
{
	const char *kind = json_string_value(json_object_get(question, "kind"));
	const struct store *store;
	enum job_kind k;

	*committed_out = false;
	TRY(stores_find(stores, json_string_value(json_object_get(question, "storage")), &store));
	bool removes = kind && kind_parse(str_of(kind), &k) && kind_is(k, KIND_REMOVES);
	return store->ops->recover(store, json_string_value(json_object_get(question, "name")),
				   json_string_value(json_object_get(question, "job")), removes, committed_out, manifest_out);
}
