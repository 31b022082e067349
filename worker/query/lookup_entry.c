/* lookup_entry.c: a checkpoint as searches know it: its record as a list shows it, and what of that can be asked for, in one allocation.
 * The record is the one of lists (lookup_put_summary): whatever is told of a checkpoint there can be searched for, too. */
#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "io/digest.h"
#include "query/lookup_tree.h"
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

static struct str text_of(const json_t *doc, const char *key)
{
	const json_t *text = json_object_get(doc, key);

	return json_is_string(text) ? (struct str){ json_string_value(text), json_string_length(text) } : STR("");
}

/* The number of an object's members, and the bytes that their names and texts take in the room. */
static uint32_t measure(json_t *object, size_t *bytes)
{
	uint32_t n = 0;
	const char *key;
	json_t *value;

	json_object_foreach(object, key, value) {
		*bytes += strlen(key) + 1 + (json_is_string(value) ? json_string_length(value) + 1 : 0);
		n++;
	}
	return n;
}

static void take_metrics(struct lookup_entry *e, struct checkpoint_metric *to, json_t *metrics, struct room *r)
{
	const char *key;
	json_t *value;

	e->facts.metrics = to;
	json_object_foreach(metrics, key, value)
		if (json_is_number(value))
			to[e->facts.metric_count++] = (struct checkpoint_metric){ keep(r, str_of(key)), json_number_value(value) };
}

static void take_labels(struct lookup_entry *e, struct checkpoint_label *to, json_t *labels, struct room *r)
{
	const char *key;
	json_t *value;

	e->facts.labels = to;
	json_object_foreach(labels, key, value)
		if (json_is_string(value)) {
			struct str name = keep(r, str_of(key));
			struct str text = { json_string_value(value), json_string_length(value) };
			to[e->facts.label_count++] = (struct checkpoint_label){ name, keep(r, text) };
		}
}

static void take_time(struct lookup_entry *e, const json_t *doc, struct room *r)
{
	struct str text = text_of(doc, "durable_at");

	if (text.n == 0 || !clock_of_text(text.p, &e->facts.at_ms)) {
		text = text_of(doc, "modified_at");
		if (text.n == 0 || !clock_of_text(text.p, &e->facts.at_ms))
			text = STR("");
	}
	e->time = keep(r, text);
}

static struct str noted_of(const json_t *doc)
{
	return text_of(json_object_get(doc, "verified"), "state");
}

/* Makes the entry of the record, which is in `doc` and, as text, in `record`. */
static FALLIBLE enum err make(const char *path, json_t *doc, struct str record, struct lookup_entry **out)
{
	json_t *metrics = json_object_get(doc, "metrics"), *labels = json_object_get(doc, "labels");
	const json_t *step = json_object_get(doc, "step"), *world = json_object_get(doc, "world_size");
	size_t bytes = strlen(path) + record.n + text_of(doc, "etag").n + text_of(doc, "durable_at").n + text_of(doc, "modified_at").n +
		       text_of(doc, "content_digest").n + text_of(doc, "format").n + noted_of(doc).n + 9;
	uint32_t metric_count = measure(metrics, &bytes), label_count = measure(labels, &bytes);
	size_t arrays = metric_count * sizeof(struct checkpoint_metric) + label_count * sizeof(struct checkpoint_label);
	struct lookup_entry *e = mem_zalloc(1, sizeof *e + arrays + bytes);

	NEED(e, "no memory for what is known of checkpoints");
	struct checkpoint_metric *metric = (struct checkpoint_metric *)(e + 1);
	struct checkpoint_label *label = (struct checkpoint_label *)(metric + metric_count);
	struct room r = { (char *)(label + label_count) };
	e->facts = (struct checkpoint_facts){ .name = keep(&r, str_of(path)), .format = keep(&r, text_of(doc, "format")),
					      .digest = keep(&r, text_of(doc, "content_digest")), .verified = "",
					      .bytes = (uint64_t)json_integer_value(json_object_get(doc, "bytes")),
					      .world_size = (uint64_t)json_integer_value(world),
					      .is_held = json_is_object(json_object_get(doc, "hold")),
					      .is_dcpd = json_is_true(json_object_get(doc, "dcpd")) };
	e->facts.step = json_is_integer(step) ? json_integer_value(step) : ref_step(path, -1);
	e->facts.run = ref_run(e->facts.name.p);
	take_metrics(e, metric, metrics, &r);
	take_labels(e, label, labels, &r);
	take_time(e, doc, &r);
	e->etag = keep(&r, text_of(doc, "etag"));
	e->noted = keep(&r, noted_of(doc));
	e->record = keep(&r, record);
	*out = e;
	return OK;
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
	TRY(make(path, doc, (struct str){ (const char *)record.p, record.len }, out));
	(*out)->format = format;
	(*out)->brief = brief;
	memcpy((*out)->told, told, sizeof told);
	return OK;
}

/* The entry is what lies there, by a look at all its files. */
static void note_look(const struct lookup_look *l, struct lookup_entry *e, const struct lookup_mark *mark)
{
	e->mark = *mark;
	e->settled = lookup_mark_settled(mark);
	e->asked = e->looked = l->tree->questions;
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
		note_look(l, old, &mark);
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
}
