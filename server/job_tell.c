/* job_tell.c: what a job's end means to those who follow checkpoints: webhooks, chains, readers of the event stream.
 *
 * Webhooks and chains hear of it in the transaction of the end itself: either both are on disk, or neither. */
#include <stdio.h>

#include "server/errdoc.h"
#include "server/events.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/verdict.h"

enum { TELLS_MAX = 3 };

/* The events of an end; of each the checkpoint that it is about. */
struct tells {
	struct happening v[TELLS_MAX];
	uint32_t n;
};

static void add(struct tells *all, const struct job *j, enum event_told what, const struct ref *of, const char *name)
{
	bool is_checkpoint = of && of->kind == REF_CHECKPOINT;

	must(all->n < TELLS_MAX);
	all->v[all->n++] = (struct happening){ .what = what, .storage = is_checkpoint ? of->storage.p : NULL,
					       .name = is_checkpoint ? name ? name : of->name.p : NULL, .job = j->id, .parent = j->parent };
}

static struct tells tells_of(const struct job *j)
{
	const struct ref *source = &j->spec.source, *target = &j->spec.target;
	bool good = j->end_state == JOB_SUCCEEDED;
	struct tells all = { .n = 0 };

	/* The part of a save that another job commits is no checkpoint yet. */
	if (good && job_spec_writes_checkpoint(j) && j->durable_ms && !j->spec.hosts.part)
		add(&all, j, TOLD_DURABLE, target, NULL);
	if (good && kind_is(j->kind, KIND_REMOVES))
		add(&all, j, TOLD_REMOVED, target, NULL);
	if (good && j->kind == JOB_REPLICATE)
		add(&all, j, TOLD_REPLICATED, source, NULL);
	if (j->verdict && strcmp(j->verdict, "verified") == 0)
		add(&all, j, TOLD_VERIFIED, source, verdict_name_read(j));
	if (j->verdict && strcmp(j->verdict, "damaged") == 0)
		add(&all, j, TOLD_DAMAGED, source, verdict_name_read(j));
	if (j->end_state == JOB_FAILED) {
		add(&all, j, TOLD_JOB_FAILED, target->kind == REF_CHECKPOINT ? target : source, NULL);
		all.v[all.n - 1].error = j->error;
	}
	return all;
}

void job_tell_followers(struct journal_txn *t, const struct job *j)
{
	struct tells all = tells_of(j);

	for (uint32_t i = 0; i < all.n && !j->dry_run; i++)
		j->server->hooks->happens(j->server, t, &all.v[i]);
}

/* Adds who removed the checkpoint, by which policy and why, and until when it can be had back. */
static void add_removal(const struct job *j, json_t *doc)
{
	(void)json_object_set_new(doc, "uid", json_integer(j->uid));
	for (size_t i = 0; i < j->spec.labels.n; i++) {
		const struct spec_pair *label = &j->spec.labels.v[i];
		if (str_is(label->left, "policy") || str_is(label->left, "why"))
			(void)json_object_set_new(doc, label->left.p, json_stringn(label->right.p, label->right.n));
	}
	json_t *until = json_object_get(json_object_get(j->result, "trash"), "until");
	if (until)
		(void)json_object_set(doc, "until", until);
}

void job_tell_stream(const struct job *j)
{
	struct tells all = tells_of(j);

	for (uint32_t i = 0; i < all.n; i++) {
		/* job.state tells of a failure, the flusher of copies to the storage behind. */
		if (!all.v[i].name || all.v[i].what == TOLD_JOB_FAILED || all.v[i].what == TOLD_REPLICATED)
			continue;
		json_t *doc = json_pack("{s:s, s:s, s:s}", "storage", all.v[i].storage, "name", all.v[i].name, "job", j->id);
		if (doc && all.v[i].what == TOLD_REMOVED)
			add_removal(j, doc);
		events_emit(j->server->events, event_told_names[all.v[i].what], j->id, doc);
	}
}
