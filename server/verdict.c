/* verdict.c: see verdict.h. */
#include "server/verdict.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/errdoc.h"
#include "server/service_clock.h"
#include "server/job_impl.h"
#include "server/parts.h"

/* Errors of a verify for which the stored bytes are to blame; the first two in any job. Other codes may only mean that dcpd cannot read a
 * checkpoint that PyTorch can: a load that fails with them proves nothing. */
static const enum err damaged[] = {
	ERR_CHECKPOINT_DAMAGED, ERR_DIGEST_MISMATCH,  ERR_CHECKPOINT_INCOMPLETE,  ERR_COVERAGE_HOLE,   ERR_FORMAT_ZIP, ERR_FORMAT_PICKLE,
	ERR_FORMAT_METADATA,	ERR_FORMAT_ITEM, ERR_FORMAT_TRANSFORM, ERR_FORMAT_SAFETENSORS, ERR_FORMAT_NPZ, ERR_FORMAT_GGUF,
	ERR_FORMAT_MANIFEST,
};
enum { PROOF = 2 };

bool verdict_is_damage(enum err e)
{
	for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++)
		if (e == damaged[i])
			return true;
	return false;
}

static bool tells_damage(const struct job *j)
{
	const char *code = jval_text(j->error, "code");
	enum err e = code[0] ? err_from_name(code) : OK;

	for (size_t i = 0; i < (j->kind == JOB_VERIFY ? sizeof damaged / sizeof *damaged : PROOF); i++)
		if (e == damaged[i])
			return true;
	return false;
}

/* NULL: the job has not found out anything. */
static const char *state_of(const struct job *j, const char *level)
{
	if (j->end_state == JOB_FAILED)
		return tells_damage(j) ? "damaged" : NULL;
	if (j->end_state != JOB_SUCCEEDED || j->kind != JOB_VERIFY || job_spec_selects(j))
		return NULL;
	bool compared = jval_int(j->result, "verified_bytes") > 0 || jval_int(j->result, "unverifiable") == 0;
	return compared && strcmp(level, "structure") != 0 ? "verified" : "unverified";
}

struct wanted {
	const char *identity;
	json_t *found;
};

static enum err take(void *user, const struct journal_verdict *row)
{
	struct wanted *w = user;

	if (strcmp(row->identity, w->identity) == 0)
		return jtext_parse(row->doc, JSON_ALLOW_NUL, &w->found);
	return OK;
}

json_t *verdict_find(struct journal *known, struct str storage, struct str name, const char *identity)
{
	struct wanted w = { .identity = identity };

	if (identity[0] && journal_read_verdict(known, storage, name, take, &w) != OK)
		log_err("cannot read what is known of a checkpoint", NULL);
	return w.found;
}

/* The checkpoint that was read: the folder of a training stands for one of its steps, which lists and records show by its own name. */
const char *verdict_name_read(const struct job *j)
{
	return j->followed ? j->followed : j->spec.source.name.p;
}

/* The list of a verify is worth more than the one place where another job has stopped. */
static bool is_listed(const struct job *j, const struct ref *source)
{
	CLEANUP(json_decrefp) json_t *found = verdict_find(j->server->journal, source->storage, str_of(verdict_name_read(j)), j->identity);

	return j->kind != JOB_VERIFY && strcmp(jval_text(found, "state"), "damaged") == 0;
}

/* A repair that found nothing to do leaves its target, and what is known of it, as they were. */
static bool has_changed(const struct job *j)
{
	return !json_is_false(json_object_get(j->result, "changed"));
}

const char *verdict_note(struct journal_txn *t, const struct job *j)
{
	const struct ref *source = &j->spec.source, *target = &j->spec.target;
	const char *level = field_word(&j->spec, &j->spec.level);
	char at[CLOCK_TEXT_MAX];

	if (j->end_state == JOB_SUCCEEDED && target->kind == REF_CHECKPOINT && has_changed(j))
		journal_delete_verdict(t, target->storage.p, target->name.p);
	const char *state = state_of(j, level);
	if (!state || !j->identity[0] || source->kind != REF_CHECKPOINT || is_listed(j, source))
		return NULL;
	CLEANUP(json_decrefp) json_t *doc = json_pack("{s:s, s:s, s:s, s:s}", "state", state, "level", level, "at",
						  clock_text(j->finished_ms, at), "job", j->id);
	if (j->end_state == JOB_FAILED) {
		json_object_set_new(doc, "damage_count", json_integer(jval_int(j->error, "damage_count") ?: 1));
	} else {
		json_object_set_new(doc, "unverifiable", json_integer(jval_int(j->result, "unverifiable")));
		json_object_set_new(doc, "unverified_bytes", json_integer(jval_int(j->result, "unverified_bytes")));
		if (jval_text(j->result, "content_digest")[0])
			json_object_set(doc, "content_digest", json_object_get(j->result, "content_digest"));
	}
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);
	if (!text)
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot keep what is known of a checkpoint"));
	else
		journal_put_verdict(t, &(struct journal_verdict){ source->storage.p, verdict_name_read(j), j->identity,
								  j->finished_ms, str_of(text) },
				    strcmp(level, "structure") == 0 && j->end_state == JOB_SUCCEEDED);
	return state;
}

void verdict_put(struct journal *known, const char *storage, json_t *record)
{
	json_t *found = verdict_find(known, str_of(storage), str_of(jval_text(record, "name")), jval_text(record, "etag"));
	json_t *noted = json_object_get(record, "verified"); /* beside the checkpoint; another daemon's may be the later one */

	if (json_is_object(noted) && (!found || strcmp(jval_text(found, "at"), jval_text(noted, "at")) < 0)) {
		json_decref(found);
		found = json_incref(noted);
	}
	if (jval_text(found, "content_digest")[0] && !json_object_get(record, "content_digest"))
		(void)json_object_set(record, "content_digest", json_object_get(found, "content_digest"));
	if (json_object_get(record, "content_digest"))
		(void)json_object_del(record, "content_unknown");
	(void)json_object_set_new(record, "verified", found ? found : json_null());
}

bool verdict_warns(struct journal *known, struct str storage, struct str name, const char *identity, char detail[VERDICT_DETAIL_MAX])
{
	CLEANUP(json_decrefp) json_t *found = verdict_find(known, storage, name, identity);

	if (strcmp(jval_text(found, "state"), "damaged") != 0)
		return false;
	snprintf(detail, VERDICT_DETAIL_MAX, "the checkpoint was found damaged at %s: `dcpctl job %s` lists what",
		 jval_text(found, "at"), jval_text(found, "job"));
	return true;
}

void verdict_warn(struct job *j)
{
	const struct ref *source = &j->spec.source;
	char detail[VERDICT_DETAIL_MAX];

	if (j->kind == JOB_VERIFY || source->kind != REF_CHECKPOINT ||
	    !verdict_warns(j->server->journal, source->storage, str_of(verdict_name_read(j)), j->identity, detail))
		return;
	errdoc_warn(j->result, VERDICT_WARNING, detail);
}
