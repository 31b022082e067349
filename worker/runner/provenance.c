/* provenance.c: see provenance.h. */
#include "runner/provenance.h"

#include "base/clock.h"
#include "io/digest.h"
#include "store/record.h"

static FALLIBLE enum err set(json_t *doc, const char *key, json_t *value_new)
{
	return json_object_set_new(doc, key, value_new) == 0 ? OK : ERR(NO_MEMORY, "no memory for a record");
}

/* ---- parents ---- */

/* Adds the job and the content digest that the parent's own record tells. */
static FALLIBLE enum err identify(const struct job *j, const struct ref *ref, json_t *parent)
{
	CLEANUP(record_free) struct record record = { 0 };
	const struct store *store;

	TRY(stores_find(&j->worker->stores, ref->storage.p, &store));
	enum err e = record_of(store_top(store), ref->name.p, &record);
	if (e == ERR_NO_MEMORY)
		return e;
	err_clear(); /* who reads the parent's bytes has the better error */
	json_t *job = json_object_get(json_object_get(record.doc, "made_by"), "job");
	json_t *content = json_object_get(record.doc, "content_digest");
	if (job)
		TRY(set(parent, "job", json_incref(job)));
	return content ? set(parent, "content_digest", json_incref(content)) : OK;
}

enum err provenance_parent(const struct job *j, const char *role, const struct ref *ref, json_t **out)
{
	CLEANUP(jval_drop) json_t *parent = json_pack("{s:s, s:s, s:s}", "role", role, "storage", ref->storage.p, "name", ref->name.p);

	NEED(parent, "no memory for a record");
	TRY(identify(j, ref, parent));
	*out = move(parent);
	return OK;
}

enum err provenance_add(struct job *j, json_t *parent)
{
	if (!j->parents)
		j->parents = json_array();
	NEED(j->parents, "no memory for a record");
	if (json_array_size(j->parents) >= RECORD_PARENTS_MAX)
		return ERR(LIMIT_EXCEEDED, "a checkpoint of more than %d parents", RECORD_PARENTS_MAX);
	return json_array_append(j->parents, parent) == 0 ? OK : ERR(NO_MEMORY, "no memory for a record");
}

static FALLIBLE enum err add_parent(struct job *j, const char *role, const struct ref *ref)
{
	CLEANUP(jval_drop) json_t *parent = NULL;

	TRY(provenance_parent(j, role, ref, &parent));
	return provenance_add(j, parent);
}

enum err provenance_begin(struct job *j)
{
	const struct spec *s = &j->spec;

	json_decref(j->parents);
	j->parents = NULL;
	if (s->base.kind == REF_CHECKPOINT)
		TRY(add_parent(j, "base", &s->base));
	if (s->source.kind == REF_CHECKPOINT && !s->sources.n) /* a merge repeats its first member there */
		TRY(add_parent(j, "source", &s->source));
	for (size_t i = 0; i < s->sources.n; i++)
		TRY(add_parent(j, "member", &s->sources.v[i]));
	return OK;
}

/* ---- the record ---- */

static FALLIBLE enum err put_plan_digest(const json_t *plan, json_t *made_by)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(1 << 30);
	unsigned char xxh3[16];
	char hex[33];

	TRY(jval_dump(plan, &text));
	digest_xxh3(text.p, text.len, xxh3);
	digest_hex(xxh3, hex);
	return set(made_by, "plan_digest", json_string(hex));
}

static FALLIBLE enum err put_wishes(const struct spec *s, json_t *doc)
{
	json_t *labels = s->labels.n ? json_object() : NULL, *metrics = s->metrics.n ? json_object() : NULL;

	if (labels)
		TRY(set(doc, "labels", labels));
	for (size_t i = 0; i < s->labels.n; i++)
		TRY(set(labels, s->labels.v[i].left.p, json_stringn(s->labels.v[i].right.p, s->labels.v[i].right.n)));
	if (metrics)
		TRY(set(doc, "metrics", metrics));
	for (size_t i = 0; i < s->metrics.n; i++)
		TRY(set(metrics, s->metrics.v[i].name.p, json_real(s->metrics.v[i].value)));
	return OK;
}

static FALLIBLE enum err fill(const struct job *j, const struct provenance *p, json_t *doc)
{
	char now[CLOCK_TEXT_MAX];
	json_t *made_by = json_pack("{s:s, s:s, s:I, s:s, s:I}", "job", j->id, "kind", kind_of(j->kind)->name, "attempt",
				    (json_int_t)j->attempt, "version", DCPD_VERSION, "uid", (json_int_t)j->uid);

	TRY(set(doc, "made_by", made_by));
	if (p->plan)
		TRY(put_plan_digest(p->plan, made_by));
	TRY(set(doc, "durable_at", json_string(clock_text(clock_wall_ms(), now))));
	if (p->has_generation)
		TRY(set(doc, "generation", json_integer((json_int_t)p->generation)));
	TRY(put_wishes(&j->spec, doc));
	if (j->parents)
		TRY(set(doc, "parents", json_incref(j->parents)));
	if (j->shares)
		TRY(set(doc, "bytes_shared", json_integer((json_int_t)j->bytes_shared)));
	if (p->content_unknown)
		TRY(set(doc, "content_unknown", json_string(p->content_unknown)));
	return p->content_digest[0] ? set(doc, "content_digest", json_string(p->content_digest)) : OK;
}

enum err provenance_make(const struct job *j, const struct provenance *p, json_t **out)
{
	json_t *doc = json_object();

	NEED(doc, "no memory for a record");
	enum err e = fill(j, p, doc);
	if (e)
		json_decref(doc);
	else
		*out = doc;
	return e;
}
