/* h_runs.c: /v1/runs: trainings, as their checkpoints' names tell them apart, and the checkpoints of each (server/catalogue.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "server/catalogue.h"
#include "server/parts.h"
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
