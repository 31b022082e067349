/* h_storages.c: /v1/storages. */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/parts.h"
#include "spec/ref.h"
#include "server/lookup.h"
#include "server/storage.h"
#include "server/tier.h"

/* With what is known of the storage behind it. */
static FALLIBLE enum err put_storage(struct req *r, const struct storage *st, struct buf *b)
{
	TRY(storage_put(st, b));
	b->len--; /* its closing brace */
	tier_put_state(r->core->tiers, str_of(st->name), b);
	buf_putc(b, '}');
	return buf_status(b);
}

FALLIBLE enum err h_storages_list(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(8 << 20);
	struct h_page page;
	const struct storages *all = r->core->storages;
	uint32_t i = 0, shown = 0;

	TRY(h_page_query(r, &page));
	buf_puts(&b, "{\"storages\":[");
	while (i < storage_count(all) && page.token.n && str_cmp(str_of(storage_at(all, i)->name), page.token) <= 0)
		i++;
	for (; i < storage_count(all) && shown < page.size; i++) {
		if (shown++)
			buf_putc(&b, ',');
		TRY(put_storage(r, storage_at(all, i), &b));
	}
	buf_putc(&b, ']');
	if (i < storage_count(all))
		buf_printf(&b, ",\"next_page_token\":\"%s\"", storage_at(all, i - 1)->name);
	buf_putc(&b, '}');
	return req_json(r, 200, &b);
}

/* Not the memory of another node: its paths name the caller for whom a worker reads. */
static FALLIBLE enum err find(struct req *r, struct str name, struct storage **out)
{
	TRY(storage_find(r->core->storages, name, out));
	return (*out)->name[0] == '@' ? ERR(NOT_FOUND, "there is no storage \"%s\"", (*out)->name) : OK;
}

/* The record with what was moved there, which the list is too long to have. */
static FALLIBLE enum err answer_storage(struct req *r, unsigned status, struct str name)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	struct storage *st;

	TRY(find(r, name, &st));
	TRY(put_storage(r, st, &b));
	b.len--; /* its closing brace */
	buf_puts(&b, ",\"io\":");
	TRY(storage_put_io(st, &b));
	buf_putc(&b, '}');
	return req_json(r, status, &b);
}

FALLIBLE enum err h_storage_get(struct req *r)
{
	return answer_storage(r, 200, r->parts[2]);
}

static void on_made(void *user, enum err e)
{
	struct req *r = user;

	req_done(r, e ? e : answer_storage(r, 201, str_of(json_string_value(json_object_get(r->body, "name")))));
}

FALLIBLE enum err h_storages_create(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), name = jval_get(&root, "name"), path = jval_get(&root, "path");
	struct storage_request rq = { .who = req_principal(r) };
	int64_t lease_s = 0;

	if (!r->caller.over_unix || !r->caller.admin)
		return ERR(FORBIDDEN, "storages are added over the Unix socket, by root or dcpd's own user");
	TRY(jval_only(&root, (const char *const[]){ "name", "path", "lease_seconds", NULL }));
	TRY(jval_string(&name, &rq.name));
	TRY(jval_failed(&name, ref_check_storage(rq.name)));
	TRY(jval_string(&path, &rq.path));
	if (rq.path.n == 0 || rq.path.n > 4000 || rq.path.p[0] != '/')
		return jval_fail(&path, ERR_VALIDATION_FAILED, "must be an absolute path");
	TRY(jval_opt_integer(&root, "lease_seconds", 1, 86400, &lease_s));
	rq.lease_ms = lease_s * 1000;
	req_hold(r);
	storage_create(r->core, &rq, on_made, r);
	return OK;
}

/* Do two daemons see the same storage? One puts a token that the other looks for. */
FALLIBLE enum err h_storage_meet(struct req *r)
{
	static const char *const actions[] = { "look", "put", "drop", NULL };
	struct jval root = JVAL_ROOT(r->body), name = jval_get(&root, "name"), token = jval_get(&root, "token");
	struct storage *st;
	struct str target, text;
	size_t action = 0;

	TRY(jval_only(&root, (const char *const[]){ "name", "token", "action", NULL }));
	TRY(jval_string(&name, &target));
	TRY(ref_check_name(target));
	TRY(jval_string(&token, &text));
	if (text.n < 8 || text.n > 64 || strspn(text.p, "abcdefghijklmnopqrstuvwxyz0123456789") != text.n)
		return jval_fail(&token, ERR_VALIDATION_FAILED, "has 8 to 64 of a-z and 0-9");
	TRY(jval_opt_word(&root, "action", actions, &action));
	TRY(find(r, r->parts[2], &st));
	json_t *q = json_pack("{s:s, s:s, s:s%, s:s%, s:s}", "op", "meet", "storage", st->name, "name", target.p, target.n, "token",
			      text.p, text.n, "action", actions[action]);
	NEED(q, "cannot ask");
	req_hold(r);
	lookup_ask(r->core->lookups, st->name, q, NULL, 0, h_pass_on, r);
	return OK;
}
