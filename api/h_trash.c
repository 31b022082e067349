/* h_trash.c: deleted checkpoints that may come back: what lies in a storage's trash, and how it is had back (worker/store/kept_trash.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "base/log.h"
#include "server/events.h"
#include "server/parts.h"
#include "server/policy.h"
#include "server/storage.h"
#include "server/trash_care.h"
#include "spec/ref.h"

static void on_listed(void *user, enum err e, const json_t *ok, int *)
{
	CLEANUP(jval_drop) json_t *answer = NULL;
	struct req *r = user;

	if (!e) {
		answer = json_pack("{s:s, s:O, s:O, s:O}", "storage", r->parts[2].p, "trash", json_object_get(ok, "entries"), "checkpoints",
				   json_object_get(ok, "checkpoints"), "bytes", json_object_get(ok, "bytes"));
		e = answer ? OK : ERR(PROTOCOL, "the look-up's answer has no list");
	}
	req_done(r, e ? e : req_json_doc(r, 200, answer));
}

FALLIBLE enum err h_trash_list(struct req *r)
{
	struct str name = { 0 };
	struct storage *st;
	bool there;

	TRY(req_query(r, "name", &name, &there));
	if (there)
		TRY(ref_check_name(name));
	TRY(h_storage(r, NULL, &st));
	json_t *q = json_pack("{s:s, s:s, s:s*}", "op", "trash", "storage", st->name, "name", there ? name.p : NULL);
	NEED(q, "cannot ask");
	req_hold(r);
	lookup_ask(r->core->lookups, st->name, q, NULL, 0, on_listed, r);
	return OK;
}

static void on_restored(void *user, enum err e, const json_t *ok, int *)
{
	CLEANUP(jval_drop) json_t *answer = NULL;
	const struct principal who = req_principal(user);
	struct req *r = user;
	struct storage *st;

	policy_note_delta(r->core); /* it may be one; and a worker that died may have brought it back, too */
	if (!e) {
		answer = json_pack("{s:s, s:O, s:O}", "storage", r->parts[2].p, "name", json_object_get(ok, "name"), "id",
				   json_object_get(ok, "id"));
		e = answer ? OK : ERR(NO_MEMORY, "cannot answer");
	}
	if (!e) {
		log_info("checkpoint undeleted", "storage", r->parts[2].p, "name", json_string_value(json_object_get(ok, "name")), NULL);
		events_emit(r->core->events, "checkpoint.restored", NULL,
			    json_pack("{s:s, s:O, s:O, s:I}", "storage", r->parts[2].p, "name", json_object_get(ok, "name"), "id",
				      json_object_get(ok, "id"), "uid", (json_int_t)who.uid));
		if (storage_find(r->core->storages, r->parts[2], &st) == OK)
			st->commits++; /* a list that is asked for from now on has it */
		trash_care_changed(r->core, r->parts[2].p);
	}
	req_done(r, e ? e : req_json_doc(r, 200, answer));
}

FALLIBLE enum err h_checkpoint_undelete(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), id = jval_get(&root, "id");
	const struct principal who = req_principal(r);
	struct storage *st;
	struct str text;

	if (r->body)
		TRY(jval_only(&root, (const char *const[]){ "id", NULL }));
	if (id.j)
		TRY(jval_string(&id, &text));
	TRY(h_storage(r, ref_check_name, &st));
	json_t *q = json_pack("{s:s, s:s, s:s%, s:O*, s:I, s:b}", "op", "trash", "storage", st->name, "restore", r->parts[3].p,
			      r->parts[3].n, "id", id.j, "uid", (json_int_t)who.uid, "admin", who.admin);
	NEED(q, "cannot ask");
	policy_note_delta(r->core);
	req_hold(r);
	lookup_ask(r->core->lookups, st->name, q, NULL, 0, on_restored, r);
	return OK;
}
