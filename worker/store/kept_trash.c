/* kept_trash.c: see kept_trash.h. */
#include "store/kept_trash.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/mem.h"
#include "base/vec.h"
#include "store/checkpoint.h"
#include "store/parts.h"
#include "store/trash.h"

enum {
	OVER_MAX = 100000,             /* that a sweep removes */
	WAITING_MAX = 64,              /* behind it; each holds a descriptor */
	LITTLE_MS = 5000,              /* as server/trash_care.c has it */
	NAP_NS = 1000000,
	REMOVING = 9                   /* times the time that reading took … */
};
static const int64_t SLICE_MIN_NS = 200000000, SLICE_MAX_NS = 30000000000; /* … within these */
static const int64_t LATEST_MS = 253402300799999; /* the end of the year 9999, the last that a time is written of */

struct entry {
	char id[65];
	json_t *about;                 /* NULL: it cannot be read */
};

struct entries {
	struct vec(struct entry) list;
	const char *name;              /* NULL: all */
};

static void entries_free(struct entries *all)
{
	each(e, all->list.v, all->list.n)
		json_decref(e->about);
	vec_free(&all->list);
}

static FALLIBLE enum err check_store(const struct store *store)
{
	return store->ops->trash_list ? OK : ERR(UNSUPPORTED, "the storage '%s' has no trash: what is deleted there is gone", store->name);
}

/* ---- the words about a checkpoint ---- */

struct sum {
	struct store_at dir;
	uint64_t bytes;
};

static enum err add_file(void *user, const char *name, unsigned char)
{
	struct sum *s = user;
	struct stat st;

	if (store_stat(s->dir, name, &st))
		err_clear(); /* gone meanwhile */
	else
		s->bytes += S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
	return OK;
}

FALLIBLE enum err kept_trash_size(const struct store *store, const char *name, uint64_t *out)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct stat st;

	TRY(store_stat(store_top(store), name, &st));
	*out = (uint64_t)st.st_size;
	if (!S_ISDIR(st.st_mode))
		return OK;
	TRY(store_enter(store_top(store), name, &dir));
	struct sum s = { .dir = dir };
	TRY(parts_list(dir, add_file, &s));
	*out = s.bytes;
	return OK;
}

FALLIBLE enum err kept_trash_describe(const struct store_job *by, const struct store *store, const char *name,
				      const struct kept_trash_words *words, char **about_out)
{
	char now[CLOCK_TEXT_MAX], until[CLOCK_TEXT_MAX];
	int64_t ms = clock_wall_ms(), keep_ms = words->keep_ms > LATEST_MS - ms ? LATEST_MS - ms : words->keep_ms;
	enum format format;

	TRY(check_store(store));
	TRY(checkpoint_recognise(store, name, &format));
	CLEANUP(jval_drop) json_t *doc =
		json_pack("{s:i, s:s, s:s, s:I, s:I, s:s, s:s?, s:s?, s:s, s:s}", "version", 1, "name", name, "format", format_name(format),
			  "bytes", (json_int_t)words->bytes, "uid", (json_int_t)by->uid, "job", by->id, "policy", words->policy, "why",
			  words->why, "deleted_at", clock_text(ms, now), "until", clock_text(ms + keep_ms, until));
	*about_out = doc ? jtext_of(doc) : NULL;
	return *about_out ? OK : ERR(NO_MEMORY, "no memory to delete a checkpoint");
}

/* ---- the list ---- */

/* Words of a page that is none of ours are none. */
static bool is_about(json_t *doc)
{
	const char *name = json_string_value(json_object_get(doc, "name"));
	int64_t ms;

	return name && ref_check_name(str_of(name)) == OK && json_is_integer(json_object_get(doc, "bytes")) &&
	       json_integer_value(json_object_get(doc, "bytes")) >= 0 && json_is_string(json_object_get(doc, "until")) &&
	       clock_of_text(json_string_value(json_object_get(doc, "until")), &ms);
}

/* *out NULL: it cannot be read. */
static FALLIBLE enum err read_about(const char *about, json_t **out)
{
	*out = NULL;
	enum err e = about ? jval_parse(str_of(about), out) : ERR_NOT_FOUND;
	if (e == ERR_NO_MEMORY)
		return e;
	if (e || !is_about(*out)) {
		err_clear();
		json_decref(*out);
		*out = NULL;
	}
	return OK;
}

static enum err take_entry(void *user, const char *id, const char *about)
{
	struct entries *all = user;
	json_t *doc = NULL;
	struct entry *e;

	TRY(read_about(about, &doc));
	if (all->name && (!doc || strcmp(json_string_value(json_object_get(doc, "name")), all->name) != 0)) {
		json_decref(doc);
		return OK;
	}
	enum err bad = all->list.n < KEPT_TRASH_MAX ? vec_push(&all->list, &e)
						    : ERR(LIMIT_EXCEEDED, "the trash has more than %d checkpoints: ask by a name",
							  KEPT_TRASH_MAX);
	if (bad) {
		json_decref(doc);
		return bad;
	}
	e->about = doc;
	snprintf(e->id, sizeof e->id, "%s", id);
	return OK;
}

/* Ids are those of jobs, which grow. */
static int newest_first(const void *a, const void *b)
{
	return strcmp(((const struct entry *)b)->id, ((const struct entry *)a)->id);
}

static FALLIBLE enum err read_entries(const struct store *store, struct entries *all)
{
	TRY(check_store(store));
	TRY(store->ops->trash_list(store, take_entry, all));
	if (all->list.n)
		qsort(all->list.v, all->list.n, sizeof *all->list.v, newest_first);
	return OK;
}

static FALLIBLE enum err put_entry(const struct entry *e, struct buf *out)
{
	buf_json_member(out, "{\"id\":", str_of(e->id));
	if (!e->about) {
		buf_puts(out, ",\"problem\":\"its page cannot be read\"}");
		return buf_status(out);
	}
	json_object_del(e->about, "version");
	json_object_del(e->about, "id");
	buf_putc(out, ',');
	size_t at = out->len;
	TRY(jval_dump(e->about, out));
	TRY(buf_status(out));
	memmove(out->p + at, out->p + at + 1, out->len - at - 1); /* members of the same object */
	out->len--;
	return OK;
}

FALLIBLE enum err kept_trash_list(const struct store *store, const char *name, struct buf *out)
{
	CLEANUP(entries_free) struct entries all = { .name = name };
	uint64_t bytes = 0;

	TRY(read_entries(store, &all));
	buf_puts(out, "{\"entries\":[");
	each(e, all.list.v, all.list.n) {
		if (e > all.list.v)
			buf_putc(out, ',');
		TRY(put_entry(e, out));
		bytes += (uint64_t)json_integer_value(json_object_get(e->about, "bytes"));
	}
	buf_printf(out, "],\"checkpoints\":%ju,\"bytes\":%ju}", (uintmax_t)all.list.n, (uintmax_t)bytes);
	return buf_status(out);
}

/* ---- out of it ---- */

FALLIBLE enum err kept_trash_restore(const struct store_job *by, const struct store *store, const char *name, const char *id,
				     char id_out[65])
{
	CLEANUP(entries_free) struct entries all = { .name = name };
	uint64_t i = 0;

	TRY(read_entries(store, &all));
	while (id && i < all.list.n && strcmp(all.list.v[i].id, id) != 0)
		i++;
	if (i == all.list.n)
		return id ? ERR(NOT_FOUND, "the trash has no '%s' of id %.64s", name, id) : ERR(NOT_FOUND, "the trash has no '%s'", name);
	snprintf(id_out, 65, "%s", all.list.v[i].id);
	return store->ops->trash_restore(by, store, all.list.v[i].id, name);
}

/* ---- emptied ---- */

struct over {
	char id[65];
	int64_t until;
	uint64_t bytes;
};

struct sweep {
	struct kept_trash_sum *sum;
	int64_t now_ms;
	struct vec(struct over) over;  /* the time of these is over, and they are still there */
};

static void stays(struct kept_trash_sum *sum, uint64_t bytes, int64_t until)
{
	sum->checkpoints++;
	sum->bytes += bytes;
	sum->next_ms = until < sum->next_ms ? until : sum->next_ms;
}

static enum err sort_entry(void *user, const char *id, const char *about)
{
	struct sweep *s = user;
	CLEANUP(json_decrefp) json_t *doc = NULL;
	int64_t until = INT64_MAX;
	struct over *o;

	TRY(read_about(about, &doc));
	uint64_t bytes = (uint64_t)json_integer_value(json_object_get(doc, "bytes"));
	if (doc && !clock_of_text(json_string_value(json_object_get(doc, "until")), &until))
		until = INT64_MAX;
	if (until > s->now_ms || s->over.n == OVER_MAX) {
		stays(s->sum, bytes, until);
		return OK;
	}
	TRY(vec_push(&s->over, &o));
	*o = (struct over){ .until = until, .bytes = bytes };
	snprintf(o->id, sizeof o->id, "%s", id);
	return OK;
}

static int oldest_first(const void *a, const void *b)
{
	return strcmp(((const struct over *)a)->id, ((const struct over *)b)->id);
}

/* Is there time for one more, and is what was removed before it gone, but for a few? Much of it is for the next sweep, which comes once it
 * may be gone (server/trash_care.c). */
static bool may_go_on(const struct kept_trash_sum *sum, int64_t end_ns)
{
	while (trash_stats().waiting >= WAITING_MAX && clock_mono_ns() < end_ns)
		nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
	return sum->removed == 0 || (clock_mono_ns() < end_ns && trash_ms() <= LITTLE_MS);
}

/* An entry that cannot be removed does not keep the others; if none can be removed, that is the outcome. */
static FALLIBLE enum err empty_all(const struct store *store, struct sweep *s, int64_t end_ns)
{
	struct err_info info = { 0 };
	enum err failed = OK;

	each(o, s->over.v, s->over.n) {
		enum err e = may_go_on(s->sum, end_ns) ? store->ops->trash_empty(store, o->id) : ERR_BUSY;
		s->sum->removed += e == OK;
		if (e && e != ERR_NOT_FOUND) /* else somebody brought it back */
			stays(s->sum, o->bytes, o->until);
		if (e && e != ERR_NOT_FOUND && e != ERR_BUSY && !failed) {
			failed = e;
			info = *err_last();
		}
		err_clear();
	}
	if (!failed || s->sum->removed)
		return OK;
	err_restore(&info);
	return failed;
}

/* Reading all takes as long as there are many: so many are removed by one sweep that nine tenths of the time go there. */
FALLIBLE enum err kept_trash_sweep(const struct store *store, int64_t now_ms, struct kept_trash_sum *out)
{
	struct sweep s = { .sum = out, .now_ms = now_ms };
	int64_t begun = clock_mono_ns();

	*out = (struct kept_trash_sum){ .next_ms = INT64_MAX };
	if (!store->ops->trash_list)
		return OK;
	enum err e = store->ops->trash_list(store, sort_entry, &s);
	if (!e && s.over.n)
		qsort(s.over.v, s.over.n, sizeof *s.over.v, oldest_first);
	int64_t now = clock_mono_ns(), slice = (now - begun) * REMOVING;
	slice = slice < SLICE_MIN_NS ? SLICE_MIN_NS : slice > SLICE_MAX_NS ? SLICE_MAX_NS : slice;
	e = e ?: empty_all(store, &s, now + slice);
	vec_free(&s.over);
	return e;
}
