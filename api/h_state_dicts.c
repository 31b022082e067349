/* h_state_dicts.c: /v1/state-dicts: the trainers' side: reserve, seal, renew, release. */
#include <stdio.h>

#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/cluster.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "spec/spec.h"
#include "server/state_dict.h"

static FALLIBLE enum err take(struct req *r, enum err e, struct buf *b)
{
	if (e) {
		buf_free(b);
		return e;
	}
	return req_json(r, 200, b);
}

FALLIBLE enum err h_sdicts_list(struct req *r)
{
	struct buf b = BUF_INIT(64 << 20);
	struct principal who = req_principal(r);
	struct str of = { 0 };
	struct h_page page;
	struct ref ref;
	bool there, of_run = false;

	TRY(h_page_query(r, &page));
	TRY(req_query(r, "replica_of", &of, &there));
	if (!there) {
		TRY(req_query(r, "replica_of_run", &of, &of_run));
		there = of_run;
	}
	if (there) {
		TRY(ref_parse(of, &ref));
		if (ref.kind != REF_CHECKPOINT)
			return ERR(INVALID_REQUEST, "the query's \"%s\" must be STORAGE:NAME", of_run ? "replica_of_run" : "replica_of");
		if (!cluster_heeds(r->core->cluster)) /* a search that gets an empty list looks no further */
			return ERR(CLUSTER_UNAVAILABLE, "which copies were withdrawn while this node was away is not known yet: ask again");
		return take(r, state_dict_list_replicas(r->core->state_dicts, &who, &ref, of_run, &b), &b);
	}
	return take(r, state_dict_list(r->core->state_dicts, &who, page.size, page.token, &b), &b);
}

FALLIBLE enum err h_sdicts_withdraw(struct req *r)
{
	struct replica_withdrawal w = { 0 };
	CLEANUP(buf_free) struct buf b = BUF_INIT(64);
	struct str of;
	bool there, is_before;

	if (!r->caller.is_node)
		return ERR(FORBIDDEN, "nodes of a cluster tell each other this, when a checkpoint is deleted or a save comes to nothing");
	TRY(req_query(r, "replica_of", &of, &there));
	TRY(req_query(r, "saved_by", &w.job, &w.is_exact));
	if (!w.is_exact)
		TRY(req_query(r, "saved_before", &w.job, &is_before));
	if (!there || !job_id_ok(w.job) || ref_parse(of, &w.of) || w.of.kind != REF_CHECKPOINT)
		return ERR(INVALID_REQUEST, "replica_of=STORAGE:NAME and saved_by or saved_before with a job's id are needed");
	cluster_take_withdrawal(r->core, &w);
	buf_puts(&b, "{}");
	return req_json(r, 200, &b);
}

/* {"save":{"storage":…,"name":"run1/step-{generation}"}}: the name is checked as it will be with a number in it. one: for one
 * generation only, whose name is as it is, with options and labels of the save. */
static FALLIBLE enum err check_owner_death(const struct jval *v, bool one)
{
	struct jval save = jval_get(v, "save"), name = jval_get(&save, "name");
	bool drop = false;
	struct ref ref;

	if (!v->j)
		return OK;
	TRY(jval_only(v, (const char *const[]){ "save", "drop", NULL }));
	TRY(jval_opt_bool(v, "drop", &drop));
	if (drop && save.j)
		return jval_fail(v, ERR_VALIDATION_FAILED, "save or drop, not both");
	if (!save.j)
		return OK;
	if (one)
		return spec_check_save_wish(&save);
	TRY(ref_read(&save, REF_CHECKPOINT, (const char *const[]){ "format", NULL }, &ref));
	TRY(jval_failed(&name, ref_check_name(ref.name)));
	TRY(spec_check_save_format(&save));
	if (!memmem(ref.name.p, ref.name.n, "{generation}", 12))
		return jval_fail(&name, ERR_VALIDATION_FAILED, "must contain {generation}, or two saves would collide");
	return OK;
}

static void on_made(void *user, enum err e, const char *name, bool existing)
{
	struct req *r = user;
	struct buf b = BUF_INIT(64 << 20);
	struct principal who = req_principal(r);

	if (e == OK)
		e = state_dict_put(r->core->state_dicts, &who, str_of(name), &b);
	if (e == OK)
		e = req_json(r, 201, &b);
	if (e == OK && existing)
		e = req_header(r, "Idempotency-Replayed", "true");
	buf_free(&b);
	req_done(r, e);
}

static FALLIBLE enum err check_publish(const struct jval *v)
{
	struct jval readers = jval_get(v, "readers");
	size_t n = 0;

	TRY(jval_only(v, (const char *const[]){ "readers", NULL }));
	if (readers.j)
		TRY(jval_array(&readers, STATE_DICT_READERS_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(&readers, i);
		int64_t uid;
		TRY(jval_integer(&one, 0, UINT32_MAX - 1, &uid));
	}
	return OK;
}

/* A publication of this node itself needs no node. */
static FALLIBLE enum err check_node(const struct jval *v, const struct cluster *cluster)
{
	struct jval at = jval_get(v, "node");
	struct str node;

	if (!at.j)
		return OK;
	TRY(jval_string(&at, &node));
	enum cluster_presence is = cluster ? cluster_presence(cluster, node.p) : CLUSTER_IS_UNKNOWN;
	if (is == CLUSTER_IS_UNKNOWN)
		return jval_failed(&at, cluster ? ERR(NOT_FOUND, "the cluster has no node \"%s\"", node.p)
						: ERR(NOT_FOUND, "there is no node \"%s\": this daemon is in no cluster", node.p));
	if (is == CLUSTER_IS_SELF)
		(void)json_object_del(v->j, "node");
	return OK;
}

/* This thread's latest error is of an update's request, and told of the subscriber's. */
static void move_pointer(void)
{
	static const char of_load[] = "/target/";
	struct err_info info = *err_last();
	char pointer[sizeof info.pointer + 16], text[sizeof info.text + sizeof pointer];
	size_t n = strlen(info.pointer), skip = strncmp(info.pointer, of_load, sizeof of_load - 1) == 0 ? sizeof of_load - 2 : 0;

	snprintf(pointer, sizeof pointer, "/subscribe%s", info.pointer + skip);
	snprintf(text, sizeof text, "%s%s", pointer, info.text + n);
	if (n && strncmp(info.text, info.pointer, n) == 0)
		snprintf(info.text, sizeof info.text, "%.*s", (int)sizeof info.text - 1, text);
	snprintf(info.pointer, sizeof info.pointer, "%.*s", (int)sizeof info.pointer - 1, pointer);
	err_restore(&info);
}

/* The rules are checked as the updates' requests will have them. */
static FALLIBLE enum err check_subscribe(const struct jval *v, const struct state_dict_request *rq, const struct cluster *cluster)
{
	CLEANUP(spec_free) struct spec spec = { 0 };
	struct jval transform = jval_get(v, "transform");
	struct str publication;

	if (transform.j)
		return jval_fail(&transform, ERR_VALIDATION_FAILED, "is no option of subscribers, which pick, rename and cast tensors: "
				 "publish a state dict that is converted");
	TRY(jval_only(v, (const char *const[]){ "publication", "node", "layout", "include", "exclude", "rename", "dtype", NULL }));
	TRY(jval_must_text(v, "publication", &publication));
	TRY(check_node(v, cluster));
	struct jval name = jval_get(v, "publication");
	TRY(jval_failed(&name, ref_check_state_dict(publication)));
	if (!json_object_get(v->j, "node") && str_eq(publication, rq->name))
		return jval_fail(&name, ERR_VALIDATION_FAILED, "a state dict cannot subscribe to itself");
	CLEANUP(jval_drop) json_t *doc = state_dict_update_request(v->j, rq->name.p, rq->world_size, 0);
	NEED(doc, "cannot check a layout");
	enum err e = spec_read(doc, &spec);
	if (!e)
		return OK;
	move_pointer();
	return e;
}

/* Reads `publish` or `subscribe` of a request; *role is the caller's. */
static FALLIBLE enum err read_role(const struct jval *root, const struct cluster *cluster, struct state_dict_request *rq, json_t **role)
{
	struct jval publish = jval_get(root, "publish"), subscribe = jval_get(root, "subscribe");

	if (publish.j && subscribe.j)
		return jval_fail(&subscribe, ERR_VALIDATION_FAILED, "a state dict publishes or subscribes, not both");
	if (publish.j)
		TRY(check_publish(&publish));
	if (subscribe.j)
		TRY(check_subscribe(&subscribe, rq, cluster));
	if (!publish.j && !subscribe.j)
		return OK;
	*role = json_pack("{s:O}", publish.j ? "publish" : "subscribe", publish.j ? publish.j : subscribe.j);
	NEED(*role, "cannot make a state dict");
	rq->role = *role;
	return OK;
}

FALLIBLE enum err h_sdicts_create(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), name = jval_get(&root, "name"), world = jval_get(&root, "world_size");
	struct jval death = jval_get(&root, "on_owner_death");
	struct state_dict_request rq = { .who = req_principal(r), .on_owner_death = death.j };
	CLEANUP(jval_drop) json_t *role = NULL;
	int64_t lease_s = 0;

	TRY(jval_only(&root, (const char *const[]){ "name", "world_size", "slots", "on_owner_death", "lease_seconds", "publish",
						    "subscribe", NULL }));
	TRY(jval_string(&name, &rq.name));
	TRY(jval_failed(&name, ref_check_state_dict(rq.name)));
	TRY(jval_integer(&world, 1, STATE_DICT_WORLD_MAX, &rq.world_size));
	TRY(jval_opt_integer(&root, "slots", 1, STATE_DICT_SLOTS_MAX, &rq.slots));
	TRY(jval_opt_integer(&root, "lease_seconds", 1, 86400, &lease_s));
	rq.lease_ms = lease_s * 1000;
	TRY(check_owner_death(&death, false));
	TRY(read_role(&root, r->core->cluster, &rq, &role));
	TRY(h_idempotency(r, &rq.idem));
	req_hold(r);
	state_dict_create(r->core->state_dicts, &rq, on_made, r);
	return OK;
}

FALLIBLE enum err h_sdict_get(struct req *r)
{
	struct buf b = BUF_INIT(64 << 20);
	struct principal who = req_principal(r);

	return take(r, state_dict_put(r->core->state_dicts, &who, r->parts[2], &b), &b);
}

static FALLIBLE enum err answer_publications(struct req *r, struct str name)
{
	struct buf b = BUF_INIT(64 << 20);
	struct principal who = req_principal(r);

	return take(r, state_dict_publications(r->core->state_dicts, &who, name, &b), &b);
}

FALLIBLE enum err h_publications_list(struct req *r)
{
	return answer_publications(r, (struct str){ 0 });
}

FALLIBLE enum err h_publication_get(struct req *r)
{
	return answer_publications(r, r->parts[2]);
}

static void on_version(void *user, enum err e)
{
	struct req *r = user;

	req_done(r, e ? e : answer_publications(r, r->parts[2]));
}

static FALLIBLE enum err read_guest(const struct jval *v, struct state_dict_guest *out)
{
	struct jval world = jval_get(v, "world_size");
	struct str name, node;

	*out = (struct state_dict_guest){ .applied = -1 };
	TRY(jval_only(v, (const char *const[]){ "name", "node", "world_size", "applied", "gone", NULL }));
	TRY(jval_must_text(v, "name", &name));
	struct jval name_at = jval_get(v, "name"), node_at = jval_get(v, "node");
	TRY(jval_failed(&name_at, ref_check_state_dict(name)));
	TRY(jval_must_text(v, "node", &node));
	if (node.n >= sizeof out->node)
		return jval_fail(&node_at, ERR_VALIDATION_FAILED, "has at most %zu bytes", sizeof out->node - 1);
	TRY(jval_integer(&world, 1, STATE_DICT_WORLD_MAX, &out->world_size));
	TRY(jval_opt_integer(v, "applied", 0, INT64_MAX, &out->applied));
	TRY(jval_opt_bool(v, "gone", &out->gone));
	snprintf(out->name, sizeof out->name, "%s", name.p);
	snprintf(out->node, sizeof out->node, "%s", node.p);
	return OK;
}

FALLIBLE enum err h_publication_follow(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), subscriber = jval_get(&root, "subscriber");
	struct principal who = req_principal(r);
	struct state_dict_guest guest;
	int64_t after = -1;
	unsigned wait_ms = 0;

	TRY(req_query_wait(r, &wait_ms));
	if (r->body) {
		TRY(jval_only(&root, (const char *const[]){ "after", "subscriber", NULL }));
		TRY(jval_opt_integer(&root, "after", 0, INT64_MAX, &after));
	}
	if (subscriber.j) {
		TRY(read_guest(&subscriber, &guest));
		if (!r->caller.is_node)
			return jval_fail(&subscriber, ERR_FORBIDDEN, "is for the daemons of other nodes: a client makes a state dict that "
					 "subscribes");
		TRY(state_dict_note_guest(r->core->state_dicts, &who, r->parts[2], &guest));
	}
	req_hold(r);
	state_dict_await_version(r->core->state_dicts, &who, r->parts[2], after, wait_ms, on_version, r);
	return OK;
}

FALLIBLE enum err h_sdict_delete(struct req *r)
{
	struct principal who = req_principal(r);

	req_hold(r);
	state_dict_delete(r->core->state_dicts, &who, r->parts[2], h_pass_nothing, r);
	return OK;
}

FALLIBLE enum err h_sdict_tensors(struct req *r)
{
	struct principal who = req_principal(r);
	struct str prefix = { 0 };
	uint64_t generation = UINT64_MAX;
	struct h_page page;
	bool there;

	TRY(h_page_query(r, &page));
	TRY(req_query(r, "prefix", &prefix, &there));
	TRY(req_query_u64(r, "generation", INT64_MAX, &generation));
	CLEANUP(jval_drop) json_t *more = json_pack("{s:s,s:i}", "op", "tensors", "page_size", (int)page.size);
	NEED(more, "cannot ask");
	TRY(h_set_text(more, "prefix", prefix));
	TRY(h_set_text(more, "page_token", page.token));
	req_hold(r);
	state_dict_ask(r->core->state_dicts, &who, r->parts[2], generation == UINT64_MAX ? -1 : (int64_t)generation, move(more),
			      h_pass_on, r);
	return OK;
}

FALLIBLE enum err h_rank(const struct req *r, int64_t *out)
{
	uint64_t rank = 0;

	if (!str_to_u64(r->parts[4], &rank) || rank >= STATE_DICT_WORLD_MAX)
		return ERR(NOT_FOUND, "a rank is a number below %d", STATE_DICT_WORLD_MAX);
	*out = (int64_t)rank;
	return OK;
}

static void on_reserved(void *user, enum err e, const struct reservation *v)
{
	struct buf b = BUF_INIT(4096);
	char when[CLOCK_TEXT_MAX];

	if (e == OK) {
		buf_json_member(&b, "{\"segment\":", str_of(v->segment));
		buf_printf(&b, ",\"slot\":%u,\"bytes\":%ju,\"generation\":%jd,\"fresh\":%s", v->slot, (uintmax_t)v->bytes,
			   (intmax_t)v->generation, v->fresh ? "true" : "false");
		if (v->lease_expires_ms)
			buf_printf(&b, ",\"lease_expires_at\":\"%s\"", clock_text(v->lease_expires_ms, when));
		buf_putc(&b, '}');
		e = req_json(user, 200, &b);
	}
	req_done(user, e);
}

FALLIBLE enum err h_rank_reserve(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), bytes_at = jval_get(&root, "bytes"), gen_at = jval_get(&root, "generation");
	struct principal who = req_principal(r);
	int64_t rank = 0, bytes = 0, generation = 0;
	unsigned wait_ms = 0;

	TRY(req_query_wait(r, &wait_ms));
	TRY(h_rank(r, &rank));
	TRY(jval_only(&root, (const char *const[]){ "bytes", "generation", NULL }));
	TRY(jval_integer(&bytes_at, 1, INT64_MAX, &bytes));
	TRY(jval_integer(&gen_at, 0, INT64_MAX, &generation));
	req_hold(r);
	state_dict_reserve(r->core->state_dicts, &who, r->parts[2], rank, (uint64_t)bytes, generation, wait_ms, on_reserved, r);
	return OK;
}

static FALLIBLE enum err answer_sealed(struct req *r)
{
	struct buf b = BUF_INIT(4096);

	buf_printf(&b, "{\"rank\":%.*s,\"generation\":%jd,\"state\":\"%s\"}", (int)r->parts[4].n, r->parts[4].p,
		   (intmax_t)json_integer_value(json_object_get(r->body, "generation")),
		   json_is_true(json_object_get(r->body, "filling")) ? "filling" : "sealed");
	return req_json(r, 200, &b);
}

static void on_sealed(void *user, enum err e)
{
	req_done(user, e ? e : answer_sealed(user));
}

static FALLIBLE enum err read_ring(const struct jval *at, struct slot_ring *out)
{
	struct jval offset = jval_get(at, "offset"), bytes = jval_get(at, "bytes");
	int64_t a = 0, n = 0;

	TRY(jval_only(at, (const char *const[]){ "offset", "bytes", NULL }));
	TRY(jval_integer(&offset, 1, INT64_MAX, &a));
	TRY(jval_integer(&bytes, 1, INT64_MAX, &n));
	*out = (struct slot_ring){ (uint64_t)a, (uint64_t)n };
	return OK;
}

FALLIBLE enum err h_rank_seal(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), bytes_at = jval_get(&root, "image_bytes");
	struct jval gen_at = jval_get(&root, "generation"), wish = jval_get(&root, "on_owner_death");
	struct jval ring_at = jval_get(&root, "ring");
	struct slot_ring ring = { 0 };
	struct principal who = req_principal(r);
	int64_t rank = 0, bytes = 0, generation = 0;
	bool filling = false;

	TRY(h_rank(r, &rank));
	TRY(jval_only(&root, (const char *const[]){ "generation", "image_bytes", "on_owner_death", "filling", "ring", NULL }));
	TRY(jval_opt_bool(&root, "filling", &filling));
	if (filling && wish.j)
		return jval_fail(&wish, ERR_VALIDATION_FAILED, "is said with the seal, not while it is being filled");
	TRY(check_owner_death(&wish, true));
	TRY(jval_integer(&gen_at, 0, INT64_MAX, &generation));
	TRY(jval_integer(&bytes_at, 8, INT64_MAX, &bytes));
	if (ring_at.j)
		TRY(read_ring(&ring_at, &ring));
	if (filling) {
		TRY(state_dict_fill(r->core->state_dicts, &who, r->parts[2], rank, generation, (uint64_t)bytes, ring_at.j ? &ring : NULL));
		return answer_sealed(r);
	}
	req_hold(r);
	state_dict_seal(r->core->state_dicts, &who, r->parts[2], rank, generation, (uint64_t)bytes, wish.j,
			ring_at.j ? &ring : NULL, on_sealed, r);
	return OK;
}

enum { REASON_MAX = 2048 }; /* bytes */

FALLIBLE enum err h_rank_release(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), gen_at = jval_get(&root, "generation"), reason_at = jval_get(&root, "reason");
	struct principal who = req_principal(r);
	struct str reason = { 0 };
	int64_t rank = 0, generation = 0;

	TRY(h_rank(r, &rank));
	TRY(jval_only(&root, (const char *const[]){ "generation", "reason", NULL }));
	TRY(jval_integer(&gen_at, 0, INT64_MAX, &generation));
	if (reason_at.j)
		TRY(jval_string(&reason_at, &reason));
	if (reason_at.j && (!reason.n || reason.n > REASON_MAX))
		return jval_fail(&reason_at, ERR_VALIDATION_FAILED, "has 1 to %d bytes", REASON_MAX);
	req_hold(r);
	state_dict_release(r->core->state_dicts, &who, r->parts[2], rank, generation, reason.p, h_pass_nothing, r);
	return OK;
}

static FALLIBLE enum err answer_renewed(struct req *r, int64_t rank, int64_t generation)
{
	struct principal who = req_principal(r);
	struct buf b = BUF_INIT(4096);
	int64_t expires_ms = 0;
	char when[CLOCK_TEXT_MAX];

	TRY(state_dict_renew(r->core->state_dicts, &who, r->parts[2], rank, generation, &expires_ms));
	if (expires_ms)
		buf_printf(&b, "{\"lease_expires_at\":\"%s\"}", clock_text(expires_ms, when));
	else
		buf_puts(&b, "{\"lease_expires_at\":null}");
	return req_json(r, 200, &b);
}

static void on_news(void *user, enum err e)
{
	struct req *r = user;
	int64_t rank = 0;

	e = e ?: h_rank(r, &rank);
	req_done(r, e ? e : answer_renewed(r, rank, -1));
}

/* wait: the answer comes when there is a generation newer than the one taken. */
FALLIBLE enum err h_rank_renew(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body);
	struct principal who = req_principal(r);
	struct jval gen_at = jval_get(&root, "generation"), taken_at = jval_get(&root, "taken");
	int64_t rank = 0, generation = -1, taken = -1, expires_ms;
	unsigned wait_ms = 0;

	TRY(req_query_wait(r, &wait_ms));
	TRY(h_rank(r, &rank));
	if (r->body)
		TRY(jval_only(&root, (const char *const[]){ "generation", "taken", NULL }));
	if (r->body && gen_at.j)
		TRY(jval_integer(&gen_at, 0, INT64_MAX, &generation));
	if (r->body && taken_at.j) {
		TRY(jval_integer(&taken_at, 0, INT64_MAX, &taken));
		TRY(state_dict_take(r->core->state_dicts, &who, r->parts[2], rank, taken));
	}
	if (!wait_ms)
		return answer_renewed(r, rank, generation);
	TRY(state_dict_renew(r->core->state_dicts, &who, r->parts[2], rank, generation, &expires_ms));
	req_hold(r);
	state_dict_follow(r->core->state_dicts, &who, r->parts[2], taken, wait_ms, on_news, r);
	return OK;
}
