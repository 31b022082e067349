/* lineage.c: see lineage.h. All checkpoints of a storage are listed once, for nobody else knows a checkpoint's children; of each a few
 * texts stay. A parent in another storage has that one listed, too. */
#include "server/lineage.h"

#include <jansson.h>
#include <stdio.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "server/catalogue.h"
#include "server/parts.h"
#include "server/storage.h"

enum { KNOWN_MAX = 1000000, ANSWER_MAX = 64 << 20, REF_TEXT_MAX = 4200 };

struct known {
	char *ref;                     /* "main:run1/step-1" */
	char *job, *kind, *content, *durable_at;       /* NULL: its record does not tell */
	json_t *parents;               /* NULL: none */
	int64_t step;
	uint32_t storage_bytes;        /* of ref */
	bool is_node, is_up, is_down;  /* of the answer; its parents, its children were looked at */
};

struct link {
	uint32_t parent, child, next;  /* next: 1 + the next link of the same parent; 0: none */
	const json_t *told;            /* the child's word of it */
};

struct lineage {
	struct server *server;
	char *root;                    /* "main:name" */
	char storage[STORAGE_NAME_MAX + 1];    /* being listed */
	char (*listed)[STORAGE_NAME_MAX + 1];  /* storages; they may be taken away meanwhile */
	uint32_t listed_count;
	struct vec(struct known) known;
	struct map names;              /* ref → index */
	struct vec(uint32_t) queue;    /* nodes whose parents, or children, are to be looked at */
	struct vec(struct link) links;
	struct vec(uint32_t) first_link;       /* per checkpoint: 1 + its first child's link */
	struct map missing;            /* refs of parents that are not there */
	struct buf nodes, edges;
	uint32_t node_count;
	bool truncated;
	enum err failed;
	lineage_fn fn;
	void *user;
};

static const char *text_in(const json_t *object, const char *key)
{
	return json_string_value(json_object_get(object, key));
}

static void lineage_end(struct lineage *l, enum err e, struct buf *out)
{
	struct err_info info = *err_last();

	each(k, l->known.v, l->known.n) {
		mem_free(k->ref);
		mem_free(k->job);
		mem_free(k->kind);
		mem_free(k->content);
		mem_free(k->durable_at);
		json_decref(k->parents);
	}
	vec_free(&l->known);
	map_free(&l->names);
	mem_free(l->listed);
	map_free(&l->missing);
	vec_free(&l->queue);
	vec_free(&l->links);
	vec_free(&l->first_link);
	buf_free(&l->nodes);
	buf_free(&l->edges);
	mem_free(l->root);
	err_restore(&info);
	l->fn(l->user, e, out);
	mem_free(l);
}

/* ---- what is listed ---- */

static char *copy_of(const char *text)
{
	return text ? mem_strdup(text) : NULL;
}

static FALLIBLE enum err take(struct lineage *l, const struct catalogue_item *item)
{
	const json_t *made = json_object_get(item->record, "made_by");
	json_t *parents = json_object_get(item->record, "parents");
	uint32_t index = (uint32_t)l->known.n;
	char ref[REF_TEXT_MAX];
	struct known *k;

	if (l->known.n >= KNOWN_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d checkpoints to look through", KNOWN_MAX);
	snprintf(ref, sizeof ref, "%s:%s", l->storage, item->name);
	TRY(vec_push(&l->known, &k));
	*k = (struct known){ .ref = mem_strdup(ref), .job = copy_of(text_in(made, "job")), .kind = copy_of(text_in(made, "kind")),
			     .content = copy_of(text_in(item->record, "content_digest")),
			     .durable_at = copy_of(text_in(item->record, "durable_at")), .step = item->step,
			     .parents = json_array_size(parents) ? json_incref(parents) : NULL,
			     .storage_bytes = (uint32_t)strlen(l->storage) };
	NEED(k->ref, "no memory for a lineage");
	return map_put(&l->names, str_of(k->ref), index);
}

static void on_item(void *user, const struct catalogue_item *item)
{
	struct lineage *l = user;

	if (!l->failed)
		l->failed = take(l, item);
}

/* ---- who is whose ---- */

static uint32_t parent_of(const struct lineage *l, const json_t *told, char ref[REF_TEXT_MAX])
{
	const char *storage = text_in(told, "storage"), *name = text_in(told, "name");

	snprintf(ref, REF_TEXT_MAX, "%s:%s", storage ? storage : "", name ? name : "");
	return map_get(&l->names, str_of(ref));
}

static bool is_listed(const struct lineage *l, const char *storage)
{
	for (uint32_t i = 0; i < l->listed_count; i++)
		if (strcmp(l->listed[i], storage) == 0)
			return true;
	return false;
}

/* Is what lies there now what the child was made of? */
static const char *state_of(const struct lineage *l, const json_t *told, uint32_t parent)
{
	const char *job = text_in(told, "job"), *content = text_in(told, "content_digest"), *storage = text_in(told, "storage");

	if (parent == MAP_NONE)
		return storage && is_listed(l, storage) ? "removed" : "unknown";
	const struct known *k = &l->known.v[parent];
	if ((job && k->job && strcmp(job, k->job) == 0) || (content && k->content && strcmp(content, k->content) == 0))
		return "same";
	return (job && k->job) || (content && k->content) || (job && !k->job) ? "replaced" : "unknown";
}

static FALLIBLE enum err link_all(struct lineage *l)
{
	char ref[REF_TEXT_MAX];
	struct link *link;
	const json_t *told;
	uint32_t *first;
	size_t i;

	for (uint64_t k = 0; k < l->known.n; k++)
		TRY(vec_push(&l->first_link, &first));
	for (uint32_t k = 0; k < l->known.n; k++)
		json_array_foreach(l->known.v[k].parents, i, told) {
			uint32_t parent = parent_of(l, told, ref);
			if (parent == MAP_NONE)
				continue;
			TRY(vec_push(&l->links, &link));
			*link = (struct link){ parent, k, l->first_link.v[parent], told };
			l->first_link.v[parent] = (uint32_t)l->links.n;
		}
	return OK;
}

/* ---- the answer ---- */

static void put_member(struct buf *b, const char *key, const char *text)
{
	if (!text)
		return;
	buf_puts(b, key);
	buf_json_str(b, str_of(text));
}

/* False: there is no room for it. */
static bool add_node(struct lineage *l, const char *ref, struct known *k)
{
	const char *colon = strchr(ref, ':');
	struct buf *b = &l->nodes;

	if (k && k->is_node)
		return true;
	if (l->node_count >= LINEAGE_NODES_MAX) {
		l->truncated = true;
		return false;
	}
	buf_puts(b, l->node_count++ ? ",{\"storage\":" : "{\"storage\":");
	buf_json_str(b, (struct str){ ref, (size_t)(colon - ref) });
	put_member(b, ",\"name\":", colon + 1);
	buf_puts(b, k ? ",\"found\":true" : ",\"found\":false");
	if (k) {
		k->is_node = true;
		put_member(b, ",\"job\":", k->job);
		put_member(b, ",\"kind\":", k->kind);
		put_member(b, ",\"durable_at\":", k->durable_at);
		put_member(b, ",\"content_digest\":", k->content);
		if (k->step >= 0)
			buf_printf(b, ",\"step\":%jd", (intmax_t)k->step);
	}
	buf_puts(b, "}");
	return true;
}

static void add_edge(struct lineage *l, const char *parent, const char *child, const json_t *told, const char *state)
{
	struct buf *b = &l->edges;

	put_member(b, b->len ? ",{\"parent\":" : "{\"parent\":", parent);
	put_member(b, ",\"child\":", child);
	put_member(b, ",\"role\":", text_in(told, "role") ? text_in(told, "role") : "");
	put_member(b, ",\"state\":", state);
	buf_puts(b, "}");
}

static FALLIBLE enum err enqueue(struct lineage *l, uint32_t index)
{
	uint32_t *at;

	TRY(vec_push(&l->queue, &at));
	*at = index;
	return OK;
}

/* A parent that is not there is a node too, once. */
static FALLIBLE enum err add_missing(struct lineage *l, const char *ref, bool *fits)
{
	uint32_t found = 0, index = (uint32_t)l->known.n;
	struct known *k;

	*fits = true;
	if (map_get(&l->missing, str_of(ref)) != MAP_NONE)
		return OK;
	*fits = add_node(l, ref, NULL);
	TRY(vec_push(&l->known, &k)); /* has the text */
	k->ref = mem_strdup(ref);
	NEED(k->ref, "no memory for a lineage");
	return map_intern(&l->missing, str_of(k->ref), index, &found);
}

static FALLIBLE enum err go_up(struct lineage *l, uint32_t index)
{
	const json_t *parents = l->known.v[index].parents, *told;
	char ref[REF_TEXT_MAX];
	size_t i;

	json_array_foreach(parents, i, told) {
		uint32_t parent = parent_of(l, told, ref);
		const char *state = state_of(l, told, parent);
		bool fits;
		if (parent == MAP_NONE)
			TRY(add_missing(l, ref, &fits));
		else
			fits = add_node(l, ref, &l->known.v[parent]);
		if (!fits)
			continue;
		add_edge(l, ref, l->known.v[index].ref, told, state);
		if (parent == MAP_NONE || strcmp(state, "replaced") == 0 || l->known.v[parent].is_up)
			continue;
		l->known.v[parent].is_up = true;
		TRY(enqueue(l, parent));
	}
	return OK;
}

static FALLIBLE enum err go_down(struct lineage *l, uint32_t index)
{
	for (uint32_t i = l->first_link.v[index]; i; i = l->links.v[i - 1].next) {
		const struct link *link = &l->links.v[i - 1];
		const char *state = state_of(l, link->told, index);
		struct known *child = &l->known.v[link->child];
		if (strcmp(state, "replaced") == 0 || !add_node(l, child->ref, child))
			continue;
		add_edge(l, l->known.v[index].ref, child->ref, link->told, state);
		if (child->is_down)
			continue;
		child->is_down = true;
		TRY(enqueue(l, link->child));
	}
	return OK;
}

/* Level by level, each checkpoint once: circles, which only forged records have, end. */
static FALLIBLE enum err walk(struct lineage *l, uint32_t root, enum err (*go)(struct lineage *l, uint32_t index))
{
	uint64_t at = 0;

	l->queue.n = 0;
	TRY(enqueue(l, root));
	for (int depth = 0; at < l->queue.n; depth++) {
		if (depth == LINEAGE_DEPTH_MAX) {
			l->truncated = true;
			return OK;
		}
		for (uint64_t end = l->queue.n; at < end; at++)
			TRY(go(l, l->queue.v[at]));
	}
	return OK;
}

static FALLIBLE enum err make_answer(struct lineage *l, struct buf *out)
{
	uint32_t root = map_get(&l->names, str_of(l->root));
	const char *colon = strchr(l->root, ':');

	if (root == MAP_NONE)
		return ERR(NOT_FOUND, "there is no checkpoint '%s'", colon + 1);
	TRY(link_all(l));
	l->known.v[root].is_up = l->known.v[root].is_down = true;
	(void)add_node(l, l->root, &l->known.v[root]);
	TRY(walk(l, root, go_down)); /* first: parents that are not there are behind all others */
	TRY(walk(l, root, go_up));
	buf_puts(out, "{\"checkpoint\":{\"storage\":");
	buf_json_str(out, (struct str){ l->root, (size_t)(colon - l->root) });
	put_member(out, ",\"name\":", colon + 1);
	buf_puts(out, "},\"nodes\":[");
	buf_put(out, l->nodes.p, l->nodes.len);
	buf_puts(out, "],\"edges\":[");
	buf_put(out, l->edges.p, l->edges.len);
	buf_puts(out, l->truncated ? "],\"truncated\":true}" : "],\"truncated\":false}");
	TRY(buf_status(&l->nodes));
	TRY(buf_status(&l->edges));
	return buf_status(out);
}

/* ---- storage by storage ---- */

static void list_storage(struct lineage *l, const struct storage *st);

/* A storage that a parent lies in, and that is not listed yet. NULL: none. */
static const struct storage *next_storage(struct lineage *l)
{
	for (uint64_t k = 0; k < l->known.n; k++) {
		const json_t *told;
		size_t i;
		json_array_foreach(l->known.v[k].parents, i, told) {
			const char *name = text_in(told, "storage");
			struct storage *st = NULL;
			if (!name || is_listed(l, name) || l->listed_count == STORAGES_MAX)
				continue;
			if (storage_find(l->server->storages, str_of(name), &st) == OK)
				return st;
			err_clear();
		}
	}
	return NULL;
}

static void on_listed(void *user, enum err e)
{
	struct lineage *l = user;
	CLEANUP(buf_free) struct buf out = BUF_INIT(ANSWER_MAX);
	bool is_own = str_starts(str_of(l->root), l->storage) && l->root[strlen(l->storage)] == ':';

	if (e && !is_own) { /* what lies there is not known */
		l->listed_count--; /* it is the last one */
		err_clear();
		l->truncated = true;
		e = OK;
	} else if (!e && !l->failed) {
		const struct storage *next = next_storage(l);
		if (next) {
			list_storage(l, next);
			return;
		}
	}
	e = e ?: l->failed;
	e = e ?: make_answer(l, &out);
	lineage_end(l, e, e ? NULL : &out);
}

static void list_storage(struct lineage *l, const struct storage *st)
{
	snprintf(l->storage, sizeof l->storage, "%s", st->name);
	memcpy(l->listed[l->listed_count++], st->name, sizeof l->listed[0]);
	catalogue_each(l->server, st->name, "*", on_item, on_listed, l);
}

void lineage_find(struct server *s, const char *storage, const char *name, lineage_fn fn, void *user)
{
	struct lineage *l = mem_sure(sizeof *l);
	char root[REF_TEXT_MAX];
	struct storage *st;

	snprintf(root, sizeof root, "%s:%s", storage, name);
	*l = (struct lineage){ .server = s, .root = mem_strdup(root), .listed = mem_zalloc(STORAGES_MAX, sizeof *l->listed),
			       .nodes = BUF_INIT(ANSWER_MAX / 2), .edges = BUF_INIT(ANSWER_MAX / 2), .fn = fn, .user = user };
	enum err e = l->root && l->listed ? storage_find(s->storages, str_of(storage), &st) : ERR(NO_MEMORY, "no memory for a lineage");
	if (e)
		lineage_end(l, e, NULL);
	else
		list_storage(l, st);
}
