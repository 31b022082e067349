/* lookup_entry.c: a checkpoint as searches know it: its record as a list shows it, and what of that can be asked for, in one allocation.
 * The record is the one of lists (lookup_put_summary): whatever is told of a checkpoint there can be searched for, too. */
#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "io/digest.h"
#include "query/lookup_kept.h"
#include "spec/derived.h"
#include "spec/ref.h"
#include "store/checkpoint.h"

/* Room behind the entry that is filled from its beginning. */
struct room {
	char *at;
};

static struct str keep(struct room *r, struct str s)
{
	char *p = r->at;

	if (s.n)
		memcpy(p, s.p, s.n);
	p[s.n] = '\0';
	r->at += s.n + 1;
	return (struct str){ p, s.n };
}

static void take_metrics(struct checkpoint_metric *to, json_t *metrics, uint32_t *count)
{
	const char *key;
	json_t *value;

	json_object_foreach(metrics, key, value)
		if (json_is_number(value))
			to[(*count)++] = (struct checkpoint_metric){ str_of(key), json_number_value(value) };
}

static void take_labels(struct checkpoint_label *to, json_t *labels, uint32_t *count)
{
	const char *key;
	json_t *value;

	json_object_foreach(labels, key, value)
		if (json_is_string(value))
			to[(*count)++] = (struct checkpoint_label){ str_of(key), { json_string_value(value), json_string_length(value) } };
}

static struct str take_time(const json_t *doc, int64_t *at_ms)
{
	struct str text = jval_str(doc, "durable_at");

	if (text.n && clock_of_text(text.p, at_ms))
		return text;
	text = jval_str(doc, "modified_at");
	return text.n && clock_of_text(text.p, at_ms) ? text : STR("");
}

static struct str noted_of(const json_t *doc)
{
	return jval_str(json_object_get(doc, "verified"), "state");
}

/* With a zero behind each. */
static size_t texts_bytes(const struct lookup_entry *e)
{
	const struct checkpoint_facts *f = &e->facts;
	size_t bytes = f->name.n + f->format.n + f->digest.n + e->noted.n + e->etag.n + e->time.n + e->record.n + 7;

	each(m, f->metrics, f->metric_count)
		bytes += m->key.n + 1;
	each(l, f->labels, f->label_count)
		bytes += l->key.n + l->value.n + 2;
	return bytes;
}

FALLIBLE enum err lookup_entry_pack(const struct lookup_entry *from, struct lookup_entry **out)
{
	const struct checkpoint_facts *f = &from->facts;
	size_t metric_bytes = f->metric_count * sizeof *f->metrics, label_bytes = f->label_count * sizeof *f->labels;
	struct lookup_entry *e = mem_zalloc(1, sizeof *e + metric_bytes + label_bytes + texts_bytes(from));

	NEED(e, "no memory for what is known of checkpoints");
	struct checkpoint_metric *metrics = (struct checkpoint_metric *)(e + 1);
	struct checkpoint_label *labels = (struct checkpoint_label *)(metrics + f->metric_count);
	struct room r = { (char *)(labels + f->label_count) };
	*e = *from;
	e->facts.name = keep(&r, f->name);
	e->facts.run = ref_run(e->facts.name.p);
	e->facts.format = keep(&r, f->format);
	e->facts.digest = keep(&r, f->digest);
	for (uint32_t i = 0; i < f->metric_count; i++)
		metrics[i] = (struct checkpoint_metric){ keep(&r, f->metrics[i].key), f->metrics[i].value };
	for (uint32_t i = 0; i < f->label_count; i++) {
		labels[i].key = keep(&r, f->labels[i].key);
		labels[i].value = keep(&r, f->labels[i].value);
	}
	e->facts.metrics = metrics;
	e->facts.labels = labels;
	e->etag = keep(&r, from->etag);
	e->time = keep(&r, from->time);
	e->noted = keep(&r, from->noted);
	e->record = keep(&r, from->record);
	*out = e;
	return OK;
}

/* Makes the entry of the record, which is in `doc` and, as text, in e->record. */
static FALLIBLE enum err make(const char *path, const json_t *doc, struct lookup_entry *e, struct lookup_entry **out)
{
	json_t *of_metrics = json_object_get(doc, "metrics"), *of_labels = json_object_get(doc, "labels");
	const json_t *step = json_object_get(doc, "step"), *world = json_object_get(doc, "world_size");
	CLEANUP(mem_free_ptr) struct checkpoint_metric *metrics = mem_zalloc(json_object_size(of_metrics), sizeof *metrics);
	CLEANUP(mem_free_ptr) struct checkpoint_label *labels = mem_zalloc(json_object_size(of_labels), sizeof *labels);

	NEED((metrics || !json_object_size(of_metrics)) && (labels || !json_object_size(of_labels)),
	     "no memory for what is known of checkpoints");
	e->facts = (struct checkpoint_facts){ .name = str_of(path), .format = jval_str(doc, "format"), .verified = "",
					      .digest = jval_str(doc, "content_digest"), .metrics = metrics, .labels = labels,
					      .bytes = (uint64_t)json_integer_value(json_object_get(doc, "bytes")),
					      .world_size = (uint64_t)json_integer_value(world),
					      .is_held = json_is_object(json_object_get(doc, "hold")),
					      .is_dcpd = json_is_true(json_object_get(doc, "dcpd")) };
	e->facts.step = json_is_integer(step) ? json_integer_value(step) : ref_step(path, -1);
	take_metrics(metrics, of_metrics, &e->facts.metric_count);
	take_labels(labels, of_labels, &e->facts.label_count);
	e->time = take_time(doc, &e->facts.at_ms);
	int64_t of_ms = derived_ms(doc, path);
	e->facts.of_ms = of_ms > 0 && of_ms < e->facts.at_ms ? of_ms : e->facts.at_ms;
	e->etag = jval_str(doc, "etag");
	e->noted = noted_of(doc);
	return lookup_entry_pack(e, out);
}

/* Puts the members of the record: first those that all have who decide about checkpoints (server/catalogue.h). */
static FALLIBLE enum err put_members(json_t *doc, struct buf *out, size_t *brief)
{
	static const char *const wanted[] = { "name", "format", "bytes", "bytes_shared", "modified_at", "durable_at", "etag", "step",
					      "hold", "verified", "metrics", "labels", "content_digest", "made_by", "parents",
					      "copied_from" };
	const char *key;
	json_t *value;

	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
		value = json_object_get(doc, wanted[i]);
		if (!value)
			continue;
		buf_printf(out, "%s\"%s\":", out->len ? "," : "", wanted[i]);
		TRY(jval_dump(value, out));
		*brief = out->len;
		json_object_del(doc, wanted[i]);
	}
	json_object_foreach(doc, key, value) {
		buf_printf(out, "%s\"%s\":", out->len ? "," : "", key);
		TRY(jval_dump(value, out));
	}
	return buf_status(out);
}

FALLIBLE enum err lookup_entry_make(const struct store *store, const char *path, enum format format, const struct lookup_entry *old,
				    struct lookup_entry **out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(4 << 20), record = BUF_INIT(4 << 20);
	CLEANUP(json_decrefp) json_t *doc = NULL;
	unsigned char told[16];
	size_t brief = 0;

	*out = NULL;
	buf_putc(&text, '{');
	TRY(lookup_put_summary(store, path, format, &text));
	buf_putc(&text, '}');
	TRY(buf_status(&text));
	digest_xxh3(text.p, text.len, told);
	if (old && old->format == format && memcmp(old->told, told, sizeof told) == 0)
		return OK;
	TRY(jtext_parse((struct str){ (const char *)text.p, text.len }, JSON_ALLOW_NUL, &doc));
	CLEANUP(json_decrefp) json_t *rest = json_copy(doc);
	NEED(rest, "no memory for what is known of checkpoints");
	TRY(put_members(rest, &record, &brief));
	struct lookup_entry e = { .format = format, .brief = brief, .record = { (const char *)record.p, record.len } };
	memcpy(e.told, told, sizeof told);
	return make(path, doc, &e, out);
}

/* The entry is what lies there, by a look at all its files. */
static void note_look(const struct lookup_look *l, struct lookup_entry *e, const struct lookup_mark *mark)
{
	e->mark = *mark;
	e->settled = lookup_mark_settled(mark);
	e->asked = e->looked = l->tree->questions;
}

/* A hold of a file lies beside it: its mark does not prove what is known of it. */
static void keep_entry(const struct lookup_look *l, const struct lookup_child *c)
{
	if (l->tree->kept && l->trusts_marks && c->entry->settled && !c->is_file)
		lookup_kept_put(l->tree->kept, c->entry);
}

FALLIBLE enum err lookup_entry_refresh(const struct lookup_look *l, struct lookup_child *c, bool whole)
{
	struct lookup_entry *old = c->entry, *fresh = NULL;
	enum format format = old->format;
	struct stat st;

	old->asked = l->tree->questions;
	enum err e = store_stat(store_top(l->store), old->facts.name.p, &st);
	struct lookup_mark mark = e ? old->mark : lookup_mark_of(&st);
	bool same = !e && old->settled && lookup_mark_same(&mark, &old->mark);
	if (same && !whole)
		return OK;
	if (!e && !same)
		e = checkpoint_recognise(l->store, old->facts.name.p, &format);
	if (!e && format != FORMAT_NONE)
		e = lookup_entry_make(l->store, old->facts.name.p, format, old, &fresh);
	if (!e && format != FORMAT_NONE && !fresh) {
		bool is_kept = old->kept_bytes && lookup_mark_same(&mark, &old->mark);
		note_look(l, old, &mark);
		if (!is_kept)
			keep_entry(l, c);
		return OK;
	}
	lookup_tree_forget(l->tree, c);
	lookup_entry_put(l, c, fresh, &mark);
	return lookup_pass_over(e);
}

void lookup_entry_put(const struct lookup_look *l, struct lookup_child *c, struct lookup_entry *e, const struct lookup_mark *mark)
{
	c->entry = e;
	if (!e)
		return;
	note_look(l, e, mark);
	l->tree->entries++;
	l->tree->changes++;
	keep_entry(l, c);
}

void lookup_entry_take(const struct lookup_look *l, struct lookup_child *c, struct lookup_entry *e)
{
	c->entry = e;
	e->asked = l->tree->questions;
	l->tree->entries++;
	l->tree->changes++;
}
