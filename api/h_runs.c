/* h_runs.c: /v1/runs: trainings, as their checkpoints' names tell them apart, and the checkpoints of each (server/catalogue.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/catalogue.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/storage.h"
#include "spec/ref.h"

static FALLIBLE enum err read_page(struct req *r, struct catalogue_page *out)
{
	struct h_page page;

	TRY(h_page_query(r, &page));
	*out = (struct catalogue_page){ .size = page.size };
	if (page.token.n && !str_to_u64(page.token, &out->from))
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	return OK;
}

static void on_catalogue(void *user, enum err e, struct buf *out)
{
	struct req *r = user;

	req_done(r, e ? e : req_json(r, 200, out));
}

FALLIBLE enum err h_runs_list(struct req *r)
{
	struct catalogue_page page;
	struct str storage = { 0 };
	struct storage *st;
	bool there;

	TRY(read_page(r, &page));
	TRY(req_query(r, "storage", &storage, &there));
	if (!there)
		return ERR(INVALID_REQUEST, "the query needs \"storage\"");
	TRY(ref_check_storage(storage));
	TRY(storage_find(r->core->storages, storage, &st));
	req_hold(r);
	catalogue_runs(r->core, st->name, page, on_catalogue, r);
	return OK;
}

FALLIBLE enum err h_run_get(struct req *r)
{
	struct catalogue_page page;
	struct storage *st;

	TRY(read_page(r, &page));
	TRY(ref_check_storage(r->parts[2]));
	if (!str_is(r->parts[3], "-"))
		TRY(ref_check_name(r->parts[3]));
	TRY(storage_find(r->core->storages, r->parts[2], &st));
	req_hold(r);
	catalogue_run(r->core, st->name, r->parts[3], page, on_catalogue, r);
	return OK;
}

/* ---- aliases ---- */

static void on_moved(void *user, enum err e, const json_t *ok, int *)
{
	struct req *r = user;
	const json_t *name = json_object_get(json_object_get(ok, "aliases"), r->parts[5].p);
	CLEANUP(jval_drop) json_t *answer = NULL;

	if (!e) {
		answer = json_pack("{s:s, s:s, s:s, s:O}", "storage", r->parts[2].p, "run", r->parts[3].p, "alias", r->parts[5].p, "name",
				   name ? name : json_null());
		e = answer ? OK : ERR(NO_MEMORY, "cannot answer");
	}
	req_done(r, e ? e : req_json_doc(r, 200, answer));
}

/* name NULL: the alias goes. */
static FALLIBLE enum err ask_move(struct req *r, json_t *name, const struct jval *condition)
{
	CLEANUP(jval_drop) json_t *q = NULL;
	struct principal who = req_principal(r);
	struct storage *st;
	struct str text;

	TRY(ref_check_storage(r->parts[2]));
	if (!str_is(r->parts[3], "-"))
		TRY(ref_check_name(r->parts[3]));
	TRY(ref_check_alias(r->parts[5]));
	TRY(storage_find(r->core->storages, r->parts[2], &st));
	if (condition->j && !json_is_null(condition->j))
		TRY(jval_string(condition, &text));
	q = json_pack("{s:s, s:s, s:s, s:s, s:O, s:I, s:b}", "op", "aliases", "storage", st->name, "run", r->parts[3].p, "alias",
		      r->parts[5].p, "name", name ? name : json_null(), "uid", (json_int_t)who.uid, "admin", who.admin);
	if (!q || (condition->j && json_object_set(q, "if", condition->j) != 0))
		return ERR(NO_MEMORY, "cannot move an alias");
	req_hold(r);
	lookup_ask(r->core->lookups, st->name, move(q), NULL, 0, on_moved, r);
	return OK;
}

FALLIBLE enum err h_alias_put(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), name = jval_get(&root, "name"), condition = jval_get(&root, "if");
	struct str text;

	TRY(jval_only(&root, (const char *const[]){ "name", "if", NULL }));
	TRY(jval_must_text(&root, "name", &text));
	TRY(jval_failed(&name, ref_check_name(text)));
	if (!str_eq(run_of(text.p), r->parts[3]))
		return jval_fail(&name, ERR_VALIDATION_FAILED, "is no checkpoint of run \"%.400s\"", r->parts[3].p);
	return ask_move(r, name.j, &condition);
}

FALLIBLE enum err h_alias_delete(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), condition = jval_get(&root, "if");

	if (r->body)
		TRY(jval_only(&root, (const char *const[]){ "if", NULL }));
	return ask_move(r, NULL, &condition);
}
