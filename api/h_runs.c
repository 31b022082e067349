/* h_runs.c: /v1/runs: trainings, as their checkpoints' names tell them apart, and the checkpoints of each (server/catalogue.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "server/catalogue.h"
#include "server/job.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/resume.h"
#include "server/resume_choice.h"
#include "server/runs.h"
#include "server/storage.h"
#include "spec/layout_rules.h"
#include "spec/ref.h"

enum { MTBF_MAX = 1000000000 };

static void on_catalogue(void *user, enum err e, json_t *answer)
{
	struct req *r = user;

	req_done(r, e ? e : req_json_doc(r, 200, answer));
}

FALLIBLE enum err h_runs_list(struct req *r)
{
	struct str storage = { 0 };
	struct h_page page;
	struct storage *st;
	bool there;

	TRY(h_page_query(r, &page));
	TRY(req_query(r, "storage", &storage, &there));
	if (!there)
		return ERR(INVALID_REQUEST, "the query needs \"storage\"");
	TRY(ref_check_storage(storage));
	if (page.token.n && !str_is(page.token, "-") && ref_check_name(page.token))
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	TRY(storage_find(r->core->storages, storage, &st));
	req_hold(r);
	catalogue_runs(r->core, st->name, page.token, page.size, on_catalogue, r);
	return OK;
}

/* "90s", "30m", "24h", "7d". */
static FALLIBLE enum err read_mtbf(struct req *r, double *out)
{
	static const struct { char unit; double seconds; } units[] = { { 's', 1 }, { 'm', 60 }, { 'h', 3600 }, { 'd', 86400 } };
	struct str text;
	uint64_t n = 0;
	bool there;

	TRY(req_query(r, "mtbf", &text, &there));
	for (size_t i = 0; there && i < sizeof units / sizeof *units; i++)
		if (text.n > 1 && text.p[text.n - 1] == units[i].unit && str_to_u64((struct str){ text.p, text.n - 1 }, &n) && n &&
		    n <= MTBF_MAX)
			*out = (double)n * units[i].seconds;
	return there && *out == 0 ? ERR(INVALID_REQUEST, "the query's \"mtbf\" is a time such as 90s, 30m, 24h or 7d") : OK;
}

static void on_run(void *user, enum err e, json_t *run)
{
	struct req *r = user;
	json_t *next = json_object_get(run, "next");

	if (!e && next && (json_object_set(run, "next_page_token", next) != 0 || json_object_del(run, "next") != 0))
		e = ERR(NO_MEMORY, "cannot answer");
	on_catalogue(r, e, run);
}

FALLIBLE enum err h_run_get(struct req *r)
{
	struct catalogue_wish wish = { .run = r->parts[3], .sort = STR("-time") };
	struct h_page page;
	struct storage *st;
	bool there;

	TRY(read_mtbf(r, &wish.mtbf_s));
	TRY(h_page_query(r, &page));
	TRY(req_query(r, "filter", &wish.filter, &there));
	TRY(req_query(r, "sort", &wish.sort, &there));
	TRY(h_storage(r, h_check_run, &st));
	wish.size = page.size;
	wish.after = page.token;
	TRY(catalogue_check(&wish));
	req_hold(r);
	catalogue_run(r->core, st->name, &wish, on_run, r);
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

	TRY(h_storage(r, h_check_run, &st));
	TRY(ref_check_alias(r->parts[5]));
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

/* ---- what a training goes on from ---- */

enum { RESUME_RULES_MAX = 1000, RESUME_UNWANTED_MAX = 1000, RESUME_WHY_MAX = 4096, RESUME_ATTEMPTS_MAX = 1000000 };

static FALLIBLE enum err check_unwanted(const struct jval *list)
{
	size_t n = 0;
	struct str text;

	if (list->j)
		TRY(jval_array(list, RESUME_UNWANTED_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(list, i), name = jval_get(&one, "name"), why = jval_get(&one, "why");
		TRY(jval_only(&one, (const char *const[]){ "name", "why", NULL }));
		TRY(jval_must_text(&one, "name", &text));
		TRY(jval_failed(&name, ref_check_name(text)));
		TRY(jval_must_text(&one, "why", &text));
		if (text.n > RESUME_WHY_MAX)
			return jval_fail(&why, ERR_VALIDATION_FAILED, "has more than %d bytes", RESUME_WHY_MAX);
	}
	return OK;
}

/* Other checkpoints are not opened for an answer, so that no rule names one. */
static FALLIBLE enum err check_layout(const struct jval *layout, int64_t *world)
{
	struct arena *arena = arena_new(UINT64_MAX);
	struct layout_rules rules = { 0 };

	NEED(arena, "cannot read a layout");
	enum err e = layout_rules_read(layout, RESUME_RULES_MAX, arena, &rules);
	if (!e)
		e = layout_rules_check(layout, &rules, false, world);
	for (uint32_t i = 0; !e && i < rules.n; i++)
		if (rules.v[i].kind == LAYOUT_LIKE)
			e = jval_fail(layout, ERR_UNSUPPORTED, "has a rule with \"like\", which is not possible here");
	arena_free(arena);
	return e;
}

/* doc: {"world_size","layout","attempts_max","optimizer","unwanted"}, all optional. */
static FALLIBLE enum err find_resume(struct req *r, json_t *doc, bool is_attempt)
{
	static const char *const optimizers[] = { "whole", "any", NULL };
	struct jval root = JVAL_ROOT(doc), layout = jval_get(&root, "layout"), unwanted = jval_get(&root, "unwanted");
	struct resume_wish wish = { .run = r->parts[3], .attempts_max = RESUME_ATTEMPTS, .is_attempt = is_attempt };
	size_t optimizer = 0;
	struct storage *st;

	TRY(h_storage(r, h_check_run, &st));
	TRY(jval_only(&root, (const char *const[]){ "world_size", "layout", "attempts_max", "optimizer", "unwanted", NULL }));
	TRY(jval_opt_integer(&root, "world_size", 1, LAYOUT_WORLD_MAX, &wish.world_size));
	TRY(jval_opt_integer(&root, "attempts_max", 0, RESUME_ATTEMPTS_MAX, &wish.attempts_max));
	TRY(jval_opt_word(&root, "optimizer", optimizers, &optimizer));
	TRY(check_layout(&layout, &wish.world_size));
	TRY(check_unwanted(&unwanted));
	wish.who = req_principal(r);
	wish.storage = st->name;
	wish.layout = layout.j;
	wish.unwanted = unwanted.j;
	wish.any_optimizer = optimizer == 1;
	req_hold(r);
	resume_find(r->core, &wish, h_pass_text, r);
	return OK;
}

/* A number of the query becomes a member, as a number of a body would be. */
static FALLIBLE enum err take_number(struct req *r, const char *key, json_t *doc)
{
	uint64_t value = UINT64_MAX;

	TRY(req_query_u64(r, key, INT64_MAX, &value));
	if (value != UINT64_MAX && json_object_set_new(doc, key, json_integer((json_int_t)value)) != 0)
		return ERR(NO_MEMORY, "cannot read the query");
	return OK;
}

FALLIBLE enum err h_run_resume(struct req *r)
{
	CLEANUP(jval_drop) json_t *doc = json_object(), *layout = NULL;
	struct str text;
	bool there;

	NEED(doc, "cannot read the query");
	TRY(take_number(r, "world_size", doc));
	TRY(take_number(r, "attempts_max", doc));
	TRY(req_query(r, "optimizer", &text, &there));
	if (there)
		TRY(h_set_text(doc, "optimizer", text));
	TRY(req_query(r, "layout", &text, &there));
	if (there && (jtext_parse(text, JSON_REJECT_DUPLICATES, &layout) || json_object_set(doc, "layout", layout) != 0))
		return ERR(INVALID_REQUEST, "the query's \"layout\" is no list of rules in JSON");
	return find_resume(r, doc, false);
}

FALLIBLE enum err h_run_resume_take(struct req *r)
{
	CLEANUP(jval_drop) json_t *none = r->body ? NULL : json_object();

	return find_resume(r, r->body ? r->body : none, true);
}

/* ---- drain ---- */

static void on_drained(void *user, enum err e, bool drained, const json_t *saves)
{
	struct req *r = user;
	CLEANUP(jval_drop) json_t *doc = NULL;

	if (!e) {
		doc = json_pack("{s:s%, s:s%, s:b, s:O}", "storage", r->parts[2].p, r->parts[2].n, "run", r->parts[3].p, r->parts[3].n,
				"drained", (int)drained, "saves", saves);
		e = doc ? OK : ERR(NO_MEMORY, "cannot answer");
	}
	req_done(r, e ? e : req_json_doc(r, 200, doc));
}

FALLIBLE enum err h_run_drain(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body);
	unsigned wait_ms = 0;
	struct storage *st;

	TRY(r->body ? jval_only(&root, (const char *const[]){ NULL }) : OK);
	TRY(req_query_wait(r, &wait_ms));
	TRY(ref_check_storage(r->parts[2]));
	if (!str_is(r->parts[3], "-"))
		TRY(ref_check_name(r->parts[3]));
	TRY(storage_find(r->core->storages, r->parts[2], &st));
	req_hold(r);
	job_drain(r->core, r->parts[2], r->parts[3], wait_ms, on_drained, r);
	return OK;
}
