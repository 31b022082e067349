/* job_create.c: from a request to a job in the journal. A request that can be refused is refused here, before the answer 202:
 *
 *   form of the request → idempotency key → storages, state dicts, target busy → exists? → space? → journal → queue
 *
 * The middle asks a look-up worker, so this is a chain of callbacks; each step ends in next() or in refuse(). */
#include <stdio.h>
#include <unistd.h>

#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/catalogue.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/job_impl.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/storage.h"
#include "server/tier.h"
#include "server/trace.h"

enum { KEY_MAX = 255, DRY_RUNS_MAX = 64, PROBE_FRESH_MS = 2000, ALIASED_MAX = 64 };

enum step { COPIES, SOURCE_A, SOURCE_B, TARGET, SIZE, SPACE, JOURNAL };

struct creation {
	struct server *server;
	struct job *job;
	enum step step;
	const struct ref *asked;        /* the checkpoint that is being looked at */
	size_t as_named;                /* references with an alias' form that stay what they are */
	size_t others;                  /* of a merge's sources: looked at, but for the first */
	job_created_fn fn;
	job_planned_fn planned;
	void *user;
	char key[KEY_MAX + 1], node_key[KEY_MAX + 16], existing[JOB_ID_LEN + 1];
	uint64_t digest;
	bool keyed;                     /* in jobs->keys, by node_key */
	char silent[65];                /* a node that was asked for copies, and has not answered */
	struct cluster_search *search;  /* nodes are being asked for copies of the source; NULL: they are not */
	struct found *found;            /* what the look at the source has found, until that is over; or why copies cannot be named */
};

struct found {
	enum err e;
	struct err_info info;
	json_t *ok;
};

static void next(struct creation *c);

static void found_free(struct found *f)
{
	if (f)
		json_decref(f->ok);
	mem_free(f);
}

static void finish(struct creation *c, enum err e)
{
	const char *id = c->existing[0] ? c->existing : c->job ? c->job->id : NULL;

	if (c->keyed)
		map_remove(&c->server->jobs->keys, str_of(c->node_key));
	if (c->planned) {
		if (e) /* else the job answers when it has planned */
			c->planned(c->user, e, NULL);
	} else {
		c->fn(c->user, e, e ? NULL : id, c->existing[0] != '\0');
	}
	found_free(c->found);
	mem_free(c);
}

static void refuse(struct creation *c, enum err e)
{
	struct err_info info = *err_last();

	if (c->job) {
		job_drop_uses(c->job);
		job_live_remove(c->job);
		job_free(c->job);
		c->job = NULL;
	}
	err_restore(&info);
	finish(c, e);
}

static void refuse_later(void *user, enum err e)
{
	refuse(user, e);
}

static void finish_later(void *user, enum err e)
{
	finish(user, e);
}

/* ---- what is known at once ---- */

static FALLIBLE enum err check_room(const struct creation *c)
{
	const struct server *s = c->server;

	if (s->draining)
		return ERR(DRAINING, "the daemon is shutting down");
	if (s->jobs->live_count > s->config->queue_max)
		return ERR(TOO_MANY_JOBS, "%u jobs are waiting", s->jobs->live_count - 1);
	if (c->planned && s->jobs->dry_count > DRY_RUNS_MAX)
		return ERR(TOO_MANY_JOBS, "%d dry runs are waiting", DRY_RUNS_MAX);
	return OK;
}

static FALLIBLE enum err check_now(struct creation *c)
{
	struct job *j = c->job;

	if (c->server->draining)
		return ERR(DRAINING, "the daemon is shutting down");
	TRY(job_spec_resolve(j));
	j->retries_left = (int)j->spec.retries;
	TRY(job_spec_check_free(j));
	TRY(job_take_uses(j));
	return job_state_dict_op_check(j);
}

static size_t name_key(char out[KEY_MAX + 16], uid_t uid, struct str key)
{
	return (size_t)snprintf(out, KEY_MAX + 16, "%u:%.*s", uid, (int)key.n, key.p);
}

static FALLIBLE enum err check_key(struct creation *c, const struct job_request *rq)
{
	struct journal_key key = { .scope = "job", .uid = rq->who.uid, .key = rq->idem.key };
	bool found = false;

	if (rq->idem.key.n == 0)
		return OK;
	if (rq->idem.key.n > KEY_MAX)
		return ERR(VALIDATION_FAILED, "an Idempotency-Key has at most %d bytes", KEY_MAX);
	memcpy(c->key, rq->idem.key.p, rq->idem.key.n);
	c->digest = journal_digest(rq->idem.body);
	size_t n = name_key(c->node_key, rq->who.uid, rq->idem.key);
	if (map_object(&c->server->jobs->keys, (struct str){ c->node_key, n }))
		return ERR(IDEMPOTENCY_IN_FLIGHT, "the first request with this key is still being worked on");
	TRY(journal_read_key(c->server->journal, &key, &found));
	if (found && key.digest != c->digest)
		return ERR(IDEMPOTENCY_MISMATCH, "the key was used for job %s, with another body", key.resource);
	if (found) {
		snprintf(c->existing, sizeof c->existing, "%.*s", JOB_ID_LEN, key.resource);
		return OK;
	}
	TRY(map_add(&c->server->jobs->keys, (struct str){ c->node_key, n }, c));
	c->keyed = true;
	return OK;
}

/* ---- what the storage knows ---- */

/* Told here, before anything is done; what counts is the worker's own look when it removes or replaces (worker/store/owner.h). */
static FALLIBLE enum err check_owner(const struct creation *c, const json_t *ok)
{
	struct principal who = job_owner(c->job);
	json_int_t owner = json_integer_value(json_object_get(ok, "owner"));

	if (principal_may(&who, (uid_t)owner))
		return OK;
	return ERR(FORBIDDEN, "%s belongs to uid %jd: only that one, root and dcpd's own user remove or replace it", c->job->target,
		   (intmax_t)owner);
}

/* Nothing removes or replaces a held checkpoint. The worker looks again when it comes to that (worker/store/notes.h). */
static FALLIBLE enum err check_held(const struct creation *c, const json_t *ok)
{
	const char *held = json_string_value(json_object_get(ok, "held"));

	TRY(check_owner(c, ok));
	return held ? ERR(CHECKPOINT_HELD, "%s", held) : OK;
}

/* The next of a merge's sources behind the first one; NULL: there is none. */
static const struct ref *other_source(struct creation *c)
{
	const struct spec *s = &c->job->spec;

	return c->job->kind == JOB_MERGE && c->others + 1 < s->sources.n ? &s->sources.v[c->others + 1] : NULL;
}

static void on_behind(void *user, enum err e, const json_t *ok, int *)
{
	struct creation *c = user;
	bool there = !e && json_is_true(json_object_get(ok, "exists"));

	e = there ? job_serve_from_tier(c->job, c->asked, ERR_NOT_FOUND)
		  : ERR(NOT_FOUND, "there is no checkpoint %s:%s", c->asked->storage.p, c->asked->name.p);
	if (e)
		refuse(c, e);
	else
		next(c); /* once more, about the copy */
}

/* A checkpoint that the fast storage lacks may lie in the one behind it. True: that is being asked. */
static bool ask_behind(struct creation *c)
{
	const struct tier *t = tier_of(c->server->tiers, c->asked->storage);
	json_t *q = NULL;

	if (t && job_may_use_tier(c->job, c->asked))
		q = json_pack("{s:s, s:s, s:s, s:I}", "op", "exists", "storage", t->how->target, "name", c->asked->name.p, "uid",
			      (json_int_t)c->job->uid);
	if (q)
		lookup_ask(c->server->lookups, t->how->target, q, NULL, 0, on_behind, c);
	return q;
}

/* A checkpoint that the storage lacks, because its save has not ended or never will, may lie whole in one node's memory. Only a save of
 * the job's own user counts: anybody may save under that name as far as sealing goes, and an administrator sees the copies of all. NULL:
 * the newest save's are parts, which are no checkpoint, or there is none. */
static const json_t *find_whole_copy(const struct creation *c)
{
	const json_t *one;
	size_t i;

	if (c->asked != &c->job->spec.source)
		return NULL;
	json_array_foreach(c->job->copies, i, one)
		if (jval_int(one, "uid") == (json_int_t)c->job->uid)
			return json_is_true(json_object_get(one, "part")) ? NULL : one;
	return NULL;
}

static void serve_from_copy(struct creation *c, const json_t *copy)
{
	enum err e = job_serve_from_neighbour(c->job, copy);

	if (e)
		refuse(c, e);
	else
		next(c); /* once more, about the copy */
}

static void take_source(struct creation *c, enum err e, const json_t *ok)
{
	const char *what = json_string_value(json_object_get(ok, "what"));
	bool leads = json_is_true(json_object_get(ok, "leads")); /* to a checkpoint, which the worker finds */

	bool lacks = !e && what && strcmp(what, "none") == 0;
	if (lacks && ask_behind(c))
		return;
	const json_t *copy = lacks ? find_whole_copy(c) : NULL;
	if (copy) {
		serve_from_copy(c, copy);
		return;
	}
	if (!e && what && strcmp(what, "none") == 0)
		e = ERR(NOT_FOUND, "there is no such checkpoint");
	else if (!e && what && strcmp(what, "other") == 0 && !leads && !kind_is(c->job->kind, KIND_ANY_FILE))
		e = ERR(NOT_A_CHECKPOINT, "what is there is no checkpoint");
	if (e == ERR_NOT_FOUND && c->silent[0])
		e = ERR(CLUSTER_UNAVAILABLE, "there is no checkpoint %s:%s, but maybe in the memory of node \"%s\", which does not answer",
			c->asked->storage.p, c->asked->name.p, c->silent);
	else if (e == ERR_NOT_FOUND)
		e = ERR(NOT_FOUND, "there is no checkpoint %s:%s", c->asked->storage.p, c->asked->name.p);
	else if (e == ERR_NOT_A_CHECKPOINT)
		e = ERR(NOT_A_CHECKPOINT, "%s:%s is no checkpoint", c->asked->storage.p, c->asked->name.p);
	if (!e && kind_is(c->job->kind, KIND_REMOVES))
		e = check_held(c, ok);
	else if (!e && kind_is(c->job->kind, KIND_REPAIRS))
		e = check_owner(c, ok);
	if (e) {
		refuse(c, e);
		return;
	}
	if (c->step == SOURCE_A || !other_source(c))
		c->step++;
	next(c);
}

static void park(struct creation *c, enum err e, const json_t *ok)
{
	c->found = mem_sure(sizeof *c->found);
	*c->found = (struct found){ e, *err_last(), json_incref((json_t *)(uintptr_t)ok) };
}

static void on_source(void *user, enum err e, const json_t *ok, int *)
{
	struct creation *c = user;

	if (!c->search && c->found) {
		err_restore(&c->found->info);
		refuse(c, c->found->e);
		return;
	}
	if (!c->search) {
		take_source(c, e, ok);
		return;
	}
	park(c, e, ok);
	if (!e && strcmp(jval_text(ok, "what"), "none") != 0)
		c->server->hooks->replicas_enough(c->search);
}

static void on_copies(void *user, const json_t *list, const char *silent)
{
	struct creation *c = user;
	struct found *f = c->found;

	c->search = NULL;
	c->found = NULL;
	snprintf(c->silent, sizeof c->silent, "%s", silent ? silent : "");
	c->job->copies = json_array_size(list) ? json_incref((json_t *)(uintptr_t)list) : NULL;
	enum err e = c->job->copies ? job_spec_resolve(c->job) : OK;
	if (e && f) {
		refuse(c, e);
	} else if (e) {
		park(c, e, NULL);
	} else if (f) {
		err_restore(&f->info);
		take_source(c, f->e, f->ok);
	}
	found_free(f);
}

/* Of a load, which may then take bytes from there. */
static void ask_copies(struct creation *c)
{
	struct principal who = job_owner(c->job);

	if (c->job->kind == JOB_LOAD && c->job->spec.source.kind == REF_CHECKPOINT && c->server->cluster)
		c->search = c->server->hooks->find_replicas(c->server, &c->job->spec.source, false, &who, on_copies, c);
}

static void on_target(void *user, enum err e, const json_t *ok, int *)
{
	struct creation *c = user;
	const char *what = json_string_value(json_object_get(ok, "what"));

	if (!e && what && strcmp(what, "other") == 0 && c->job->spec.in_place == IN_PLACE_NEVER)
		e = ERR(NOT_A_CHECKPOINT, "%s holds something else than a checkpoint", c->job->target);
	else if (!e && what && strcmp(what, "checkpoint") == 0 && !c->job->spec.overwrite)
		e = ERR(CHECKPOINT_EXISTS, "%s exists", c->job->target);
	else if (!e && what && strcmp(what, "checkpoint") == 0)
		e = check_held(c, ok);
	if (e) {
		refuse(c, e);
		return;
	}
	c->step++;
	next(c);
}

static void on_size(void *user, enum err e, const json_t *ok, int *)
{
	struct creation *c = user;
	json_int_t bytes = json_integer_value(json_object_get(ok, "bytes"));

	if (e) {
		refuse(c, e);
		return;
	}
	c->job->space_needed = bytes > 0 ? (uint64_t)bytes : 0;
	c->step++;
	next(c);
}

/* Bytes of the same storage that are promised to a job and not yet allocated: a job allocates its files whole when it begins to run. */
static uint64_t promised_bytes(const struct job *j)
{
	uint64_t sum = 0;

	for (const struct job *other = j->server->jobs->live; other; other = other->live_next) {
		if (other == j || other->dry_run || other->state >= JOB_RUNNING ||
		    !str_eq(other->spec.target.storage, j->spec.target.storage))
			continue;
		if (num_add(sum, other->space_needed, &sum) != OK)
			return UINT64_MAX;
	}
	return sum;
}

static void check_space(struct creation *c, const struct storage *st)
{
	char needed[32], have[32];
	uint64_t promised = promised_bytes(c->job), left = st->free_bytes > promised ? st->free_bytes - promised : 0;

	if (!st->probed_ms || st->total_bytes == 0 || c->job->space_needed <= left) {
		c->step++;
		next(c);
		return;
	}
	snprintf(needed, sizeof needed, "%ju", (uintmax_t)c->job->space_needed);
	snprintf(have, sizeof have, "%ju", (uintmax_t)left);
	enum err e = ERR(STORAGE_FULL, "storage %s: %s bytes are needed, %s are free and not promised to other jobs", st->name, needed,
			 have);
	refuse(c, err_expected(e, needed, have));
}

static void on_probe(void *user, enum err e)
{
	struct creation *c = user;
	struct storage *st = NULL;

	e = e ?: storage_find(c->server->storages, c->job->spec.target.storage, &st);
	if (e)
		refuse(c, e);
	else
		check_space(c, st);
}

static void ask(struct creation *c, const char *op, const struct ref *ref, lookup_fn fn)
{
	c->asked = ref;
	lookup_ask(c->server->lookups, ref->storage.p,
		   json_pack("{s:s, s:s, s:s, s:I}", "op", op, "storage", ref->storage.p, "name", ref->name.p, "uid",
			     (json_int_t)c->job->uid),
		   NULL, 0, fn, c);
}

/* ---- into the journal ---- */

static void on_journalled(void *user, enum err e)
{
	struct creation *c = user;
	struct job *j = c->job;

	if (e) {
		map_remove(&c->server->jobs->table, str_of(j->id));
		refuse(c, e);
		return;
	}
	j->in_journal = true;
	log_info("job accepted", "job", j->id, "kind", kind_of(j->kind)->name, "target", j->target, NULL);
	if (j->snapshotted_ms)
		c->server->hooks->snapshotted(j);
	job_queue(j);
	finish(c, OK);
}

/* Whoever is told of a refusal must not find the job in a list, or run after a restart: what can fail comes before its row. */
static void write_journal(struct creation *c)
{
	struct job *j = c->job;
	enum err e = map_add(&c->server->jobs->table, (struct str){ j->id, JOB_ID_LEN }, j);

	if (e) {
		loop_later(c->server->loop, refuse_later, c, e);
		return;
	}
	struct journal_txn *t = journal_txn_new(c->server->journal);
	j->shared = job_may_be_shared(j);
	if (j->kind == JOB_SAVE && !j->await) /* sealed in shared memory that outlives the trainer: it may go on */
		job_snapshotted(j);
	snprintf(j->stage, sizeof j->stage, "waiting");
	job_put_row(t, j, j->state);
	for (size_t i = 0; i < j->spec.labels.n; i++)
		journal_put_label(t, j->id, j->spec.labels.v[i].left, j->spec.labels.v[i].right);
	if (c->keyed) {
		struct journal_key key = { .scope = "job", .uid = j->uid, .key = str_of(c->key), .digest = c->digest,
					   .created_ms = clock_service_ms() };
		memcpy(key.resource, j->id, sizeof j->id);
		journal_put_key(t, &key);
	}
	journal_commit(c->server->journal, t, on_journalled, c);
}

/* The generation that the node has now is the job's, however long it waits. */
static void on_image(void *user, enum err e, int64_t generation)
{
	struct creation *c = user;
	json_t *source = json_object_get(c->job->request, "source");

	if (!e && json_object_set_new(source, "generation", json_integer(generation)) != 0)
		e = ERR(NO_MEMORY, "cannot keep a job");
	if (e) {
		refuse(c, e);
		return;
	}
	c->job->spec.source.generation = generation;
	c->step++;
	next(c);
}

static void ask_node(struct creation *c, const struct ref *ref)
{
	struct principal who = job_owner(c->job);

	c->server->hooks->ask_image(c->server, ref, &who, on_image, c);
}

static bool ask_step(struct creation *c)
{
	struct job *j = c->job;
	const struct ref *source = job_spec_compares(j) ? &j->spec.a : &j->spec.source;
	const struct ref *other = other_source(c), *b = &j->spec.b, *target = &j->spec.target;
	struct storage *st;

	if (kind_is(j->kind, KIND_REMOVES | KIND_REPAIRS))
		b = &j->spec.target;
	else if (other || j->spec.base.kind)
		b = other ? other : &j->spec.base;

	switch (c->step) {
	case COPIES:
		ask_copies(c);
		return false;
	case SOURCE_A:
		if (source->kind == REF_CHECKPOINT)
			ask(c, "exists", source, on_source);
		else if (source->kind == REF_REMOTE)
			ask_node(c, source);
		return source->kind == REF_CHECKPOINT || source->kind == REF_REMOTE;
	case SOURCE_B:
		c->others += other != NULL;
		if (b->kind == REF_CHECKPOINT)
			ask(c, "exists", b, on_source);
		return b->kind == REF_CHECKPOINT;
	case TARGET:
		if (job_spec_writes_checkpoint(j))
			ask(c, "exists", target, on_target);
		return job_spec_writes_checkpoint(j);
	case SIZE:
		c->job->space_needed = j->kind == JOB_SAVE ? job_use_bytes(j->source_use) : 0;
		for (uint32_t i = 0; i < j->part_count; i++)
			if (num_add(j->space_needed, job_use_bytes(j->part_uses[i]), &j->space_needed) != OK)
				j->space_needed = UINT64_MAX;
		source = j->kind == JOB_APPLY ? &j->spec.base : source; /* a delta is as large as it is when all is read */
		if ((j->kind != JOB_RESHARD && j->kind != JOB_MERGE && j->kind != JOB_APPLY && j->kind != JOB_REPLICATE) ||
		    job_spec_selects(j) || source->kind != REF_CHECKPOINT)
			return false;
		ask(c, "show", source, on_size);
		return true;
	case SPACE:
		if (c->job->space_needed == 0 || job_spec_selects(j) || j->spec.incremental ||
		    storage_find(c->server->storages, target->storage, &st) != OK)
			return false;
		if (clock_mono_ms() - st->fresh_ms < PROBE_FRESH_MS && j->space_needed < st->free_bytes / 4 &&
		    promised_bytes(j) < st->free_bytes / 4)
			return false;
		storage_probe(c->server->storages, c->server->lookups, st, on_probe, c);
		return true;
	default:
		return false;
	}
}

static void next(struct creation *c)
{
	while (c->step < JOURNAL) {
		if (ask_step(c))
			return;
		c->step++;
	}
	if (!c->planned) {
		write_journal(c);
		return;
	}
	job_queue(c->job);
	c->job = NULL;
	finish(c, OK);
}

/* The owner of the job's checkpoint, whose rights the job has too. The token makes its holder dcpd's own user; but state dicts that a job
 * makes are for the uid that the socket has proved, which must be able to map them. */
static uid_t owner_of(const struct job_request *rq)
{
	bool by_token = rq->who.admin && rq->who.uid != 0;
	bool makes_state_dict = json_object_get(json_object_get(rq->spec, "target"), "state_dict") != NULL;

	return by_token && !makes_state_dict ? geteuid() : rq->who.uid;
}

bool job_key_is_known(struct server *s, const struct job_request *rq)
{
	struct journal_key key = { .scope = "job", .uid = owner_of(rq), .key = rq->idem.key };
	char name[KEY_MAX + 16];
	bool found = false;

	if (rq->idem.key.n > KEY_MAX)
		return false;
	found = map_object(&s->jobs->keys, (struct str){ name, name_key(name, key.uid, key.key) });
	if (!found && journal_read_key(s->journal, &key, &found))
		err_clear(); /* job_create() tells */
	return found;
}

/* ---- aliases ---- */

static void start(struct creation *c)
{
	enum err e = check_now(c);

	if (e)
		loop_later(c->server->loop, refuse_later, c, e);
	else
		next(c);
}

/* The checkpoint that the object refers to: {"storage","name"}, or a layout rule's "like". False: it is none such. */
static bool refers(const json_t *doc, struct ref *out)
{
	const char *storage = json_string_value(json_object_get(doc, "storage")), *name = json_string_value(json_object_get(doc, "name"));
	const char *like = json_string_value(json_object_get(doc, "like"));

	if (storage && name)
		*out = ref_checkpoint(storage, name);
	else if (!like || ref_parse(str_of(like), out) || out->kind != REF_CHECKPOINT)
		return false;
	return true;
}

/* The object of that number among those that refer to an alias; labels do not, and a target is what it is called, unless it is removed or
 * repaired. NULL: there are fewer. */
static json_t *find_alias(const struct creation *c, json_t *doc, bool is_made, size_t *skip)
{
	json_t *value, *found = NULL;
	const char *key;
	struct ref ref;
	size_t i;

	if (!is_made && refers(doc, &ref) && catalogue_is_alias(ref.name.p) && (*skip)-- == 0)
		return doc;
	json_object_foreach(doc, key, value) {
		bool target = strcmp(key, "target") == 0 && !kind_is(c->job->kind, KIND_REMOVES | KIND_REPAIRS);
		if (!found && strcmp(key, "labels") != 0)
			found = find_alias(c, value, target, skip);
	}
	json_array_foreach(doc, i, value)
		found = found ? found : find_alias(c, value, false, skip);
	return found;
}

static FALLIBLE enum err set_name(json_t *doc, const struct ref *ref, const char *name)
{
	json_t *value = json_object_get(doc, "name") ? json_string(name)
						     : json_pack("s%++", ref->storage.p, ref->storage.n, ":", name);

	return json_object_set_new(doc, json_object_get(doc, "name") ? "name" : "like", value) == 0 ? OK
												     : ERR(NO_MEMORY, "cannot keep a job");
}

static void resolve(struct creation *c);

static void on_resolved(void *user, enum err e, const char *name)
{
	struct creation *c = user;
	size_t skip = c->as_named;
	json_t *doc = find_alias(c, c->job->request, false, &skip);
	struct ref ref;

	c->as_named += catalogue_is_alias(name);
	if (!e && refers(doc, &ref))
		e = set_name(doc, &ref, name);
	if (e)
		refuse(c, e);
	else
		resolve(c);
}

/* A job is about the checkpoints that its aliases lead to now, whatever becomes of those. */
static void resolve(struct creation *c)
{
	for (;; c->as_named++) { /* a storage that is not there is named by the check of the request */
		size_t skip = c->as_named;
		const json_t *doc = find_alias(c, c->job->request, false, &skip);
		struct storage *st;
		struct ref ref;

		if (!doc || !refers(doc, &ref)) {
			start(c);
			return;
		}
		if (storage_find(c->server->storages, ref.storage, &st) != OK)
			continue;
		catalogue_resolve(c->server, st->name, ref.name.p, on_resolved, c);
		return;
	}
}

/* Each alias costs look-ups: they are for requests that can be taken. */
static FALLIBLE enum err check_aliases(const struct creation *c)
{
	size_t skip = ALIASED_MAX;

	TRY(check_room(c));
	if (find_alias(c, c->job->request, false, &skip))
		return ERR(VALIDATION_FAILED, "a request has at most %d names with an '@'", ALIASED_MAX);
	return OK;
}

/* The caller's trace, else, where spans are sent, one of the job's own. The log tells which request made which job. */
static void begin_trace(struct job *j, const struct job_request *rq)
{
	if (j->dry_run)
		return;
	j->trace = trace_of_caller(rq->traceparent);
	if (!j->trace && j->server->config->otlp_endpoint)
		j->trace = trace_new();
	log_info("job created", "job", j->id, "kind", kind_of(j->kind)->name, "request", rq->request_id, "trace", job_trace_id(j), NULL);
}

static void begin(struct server *s, const struct job_request *asked, struct creation *c)
{
	struct job_request own = *asked, *rq = &own;

	own.who.uid = owner_of(asked);
	enum err e = check_key(c, rq);
	c->server = s;
	if (e || c->existing[0]) {
		loop_later(s->loop, finish_later, c, e);
		return;
	}
	e = job_alloc(s, rq->kind, rq->spec, rq->who.uid, &c->job);
	if (e) {
		loop_later(s->loop, finish_later, c, e);
		return;
	}
	if (rq->id)
		memcpy(c->job->id, rq->id, sizeof c->job->id);
	c->job->parent = json_deep_copy(rq->parent);
	c->job->dry_run = c->planned != NULL;
	c->job->planned = c->planned;
	c->job->planned_user = c->user;
	begin_trace(c->job, rq);
	c->job->stage[0] = '\0';
	job_live_add(c->job);
	e = check_aliases(c);
	if (e)
		loop_later(s->loop, refuse_later, c, e);
	else
		resolve(c);
}

void job_create(struct server *s, const struct job_request *rq, job_created_fn fn, void *user)
{
	struct creation *c = mem_sure(sizeof *c);

	*c = (struct creation){ .server = s, .fn = fn, .user = user };
	begin(s, rq, c);
}

void job_dry_run(struct server *s, const struct job_request *rq, job_planned_fn fn, void *user)
{
	struct creation *c = mem_sure(sizeof *c);
	struct job_request keyless = *rq;

	*c = (struct creation){ .server = s, .planned = fn, .user = user };
	keyless.idem = (struct idempotency){ 0 };
	begin(s, &keyless, c);
}
