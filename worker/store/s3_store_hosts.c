/* s3_store_hosts.c: where the daemons of several hosts meet for one save (runner/hosts.h), in a bucket.
 *
 *   .dcpd/hosts/{place}/…        their pages; {place} has the path that callers name in it, beside the target
 *   .dcpd/hosts/{place}/data     names the staging of the leader's attempt
 *   .dcpd/hosts/{place}/.dcpd-made   is there from the place's begin on, and is no page
 *
 * All meeting places lie below one prefix: a sweep finds those that nobody comes to any more by one list, and no list of a run shows them.
 *
 * Behind the page `data` there is an attempt as of any save, the leader's: each host writes its files into the target's folder, with the
 * attempt's number, and the leader commits by one conditional PUT. So fence, recovery and sweep are those of all attempts. A leader that
 * begins anew goes on with the attempt of the page, with what others wrote, as long as it is not given up; its commit and one of its first
 * attempt that comes late are of the same bytes. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "store/fence.h"
#include "store/s3_store_impl.h"

#define MEETINGS S3_MARKS "hosts/"
#define DATA     "data"
#define MADE     ".dcpd-made"

enum { PAGE_MAX = S3_PATH_MAX };

bool s3_meeting_key(const char *path, char out[S3_PATH_MAX])
{
	const char *slash = strrchr(path, '/'), *last = slash ? slash + 1 : path;

	if (!str_starts(str_of(last), HOSTS_PREFIX))
		return false;
	snprintf(out, S3_PATH_MAX, MEETINGS "%.200s-%0*jx", last + strlen(HOSTS_PREFIX), S3_ATTEMPT_DIGITS, (uintmax_t)s3_attempt_at(path));
	return true;
}

enum err s3_meeting_make(struct s3 *s3, const char *key)
{
	char page[S3_PATH_MAX];

	TRY(s3_join(key, MADE, page));
	return s3_put(s3, page, "", 0, S3_ALWAYS, NULL, NULL, NULL);
}

/* A page that came after the end makes no place. */
enum err s3_meeting_look(struct s3 *s3, const char *key)
{
	char page[S3_PATH_MAX];
	struct s3_object made;

	TRY(s3_join(key, MADE, page));
	enum err e = s3_head(s3, page, NULL, &made);
	return e == ERR_NOT_FOUND ? s3_missing(key) : e;
}

/* ---- removing ---- */

static enum err drop_key(void *user, struct str key, const struct s3_object *object)
{
	char whole[S3_PATH_MAX];

	if (!object || key.n >= sizeof whole)
		return OK;
	snprintf(whole, sizeof whole, "%.*s", (int)key.n, key.p);
	return s3_delete(user, whole, NULL);
}

enum err s3_meeting_drop(struct s3 *s3, const char *key)
{
	char prefix[S3_PATH_MAX + 1];

	snprintf(prefix, sizeof prefix, "%s/", key);
	TRY(s3_list(s3, prefix, 0, NULL, 0, NULL, drop_key, s3));
	return s3_delete(s3, prefix, NULL); /* some servers keep folders that are empty, and list them */
}

/* Meeting places in a list, which has the keys of each one behind another. */
struct meetings {
	struct s3 *s3;
	char key[S3_PATH_MAX];         /* of the one that is gone through; "": none */
	int64_t newest_ms;
	struct store_swept *out;
};

static FALLIBLE enum err end_meeting(struct meetings *m)
{
	if (!m->key[0] || s3_now_ms(m->s3) - m->newest_ms < S3_OTHERS_MS)
		return OK;
	m->out->removed++;
	return s3_meeting_drop(m->s3, m->key);
}

static enum err take_page(void *user, struct str key, const struct s3_object *object)
{
	struct meetings *m = user;
	const size_t skip = sizeof MEETINGS - 1;
	const char *slash = key.n > skip ? memchr(key.p + skip, '/', key.n - skip) : NULL;
	size_t n = slash ? (size_t)(slash - key.p) : 0;

	if (!object || n == 0 || n >= sizeof m->key)
		return OK;
	if (!str_is((struct str){ key.p, n }, m->key)) {
		TRY(end_meeting(m));
		snprintf(m->key, sizeof m->key, "%.*s", (int)n, key.p);
		m->newest_ms = 0;
	}
	m->newest_ms = object->mtime_ms > m->newest_ms ? object->mtime_ms : m->newest_ms;
	return OK;
}

enum err s3_meeting_sweep(struct s3 *s3, struct store_swept *out)
{
	struct meetings m = { .s3 = s3, .out = out };

	TRY(s3_list(s3, MEETINGS, 0, NULL, 0, NULL, take_page, &m));
	return end_meeting(&m);
}

/* ---- staging ---- */

/* The staging that the page names, if its attempt is not given up. ERR_NOT_FOUND. */
static FALLIBLE enum err read_page(struct s3 *s3, const char *meets, struct s3_mark *out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(PAGE_MAX);
	char page[S3_PATH_MAX];

	TRY(s3_join(meets, DATA, page));
	TRY(s3_get_all(s3, page, NULL, &text, NULL));
	buf_putc(&text, '\0');
	TRY(buf_status(&text));
	return s3_mark_of_staging(s3, (const char *)text.p, out);
}

static FALLIBLE enum err put_page(struct s3 *s3, const char *meets, const char *staging)
{
	char page[S3_PATH_MAX];

	TRY(s3_join(meets, DATA, page));
	return s3_put(s3, page, staging, strlen(staging), S3_ALWAYS, NULL, NULL, NULL);
}

static bool is_ours(const struct staging *s, const struct s3_mark *m, const char *meets)
{
	return strcmp(m->meets, meets) == 0 && strcmp(m->job, s->by.id) == 0 &&
	       (!s->by.mark || fence_is_of(m->key, str_of(m->job), s->by.mark));
}

static FALLIBLE enum err use_attempt(struct staging *s, const struct s3_mark *m)
{
	const char *slash = strrchr(m->staging, '/');

	snprintf(s->path, sizeof s->path, "%s", m->staging);
	snprintf(s->name, sizeof s->name, "%.*s", (int)sizeof s->name - 1, slash ? slash + 1 : m->staging);
	s->number = m->attempt << S3_FILES_SHIFT;
	s3_part_forget(s3_own(s->store), s->path, false); /* of an attempt that broke off in this process */
	return store_enter(store_top(s->store), s->path, &s->dir);
}

static FALLIBLE enum err lead(struct staging *s, const char *meets)
{
	struct s3 *s3 = s3_own(s->store)->client;
	struct s3_mark m;

	enum err e = read_page(s3, meets, &m);
	if (e && e != ERR_NOT_FOUND)
		return e;
	if (!e && is_ours(s, &m, meets)) {
		s->made = true;
		return use_attempt(s, &m);
	}
	staging_name(&s->by, s->name);
	snprintf(s->path, sizeof s->path, "%s%s%s", s->parent_path, s->parent_path[0] ? "/" : "", s->name);
	TRY(s3_stage_attempt(s, meets));
	return put_page(s3, meets, s->path);
}

/* A staging of several hosts ("…/data"), or of one rank's files, which the save of another daemon takes from the place itself. */
enum err s3_meeting_stage(struct staging *s)
{
	char meets[S3_PATH_MAX], place[STAGING_BESIDE_MAX];
	const char *slash = strchr(s->name, '/');
	struct s3_mark m;

	snprintf(place, sizeof place, "%.*s", (int)(strlen(s->path) - (slash ? strlen(slash) : 0)), s->path);
	if (strlen(place) >= S3_KEY_MAX || !s3_meeting_key(place, meets))
		return ERR(NAME_INVALID, "'%s' is no meeting place in an object storage", place);
	if (!slash)
		return s->store->ops->make(store_top(s->store), s->path, &s->dir);
	if (!s->is_part)
		return lead(s, meets);
	TRY(read_page(s3_own(s->store)->client, meets, &m));
	return use_attempt(s, &m);
}

enum err s3_adopt(struct staging *s, struct store_at from, const char *name)
{
	struct s3_entry e;
	char key[S3_PATH_MAX];

	TRY(s3_join(s3_thing_at(from)->path, name, key));
	TRY(s3_look_file(s3_own(s->store)->client, key, &e));
	return s3_part_adopt(s->dir, name, &e);
}
