/* owner.c: see owner.h. Reads the head of a manifest only: the whole may be hundreds of megabytes, and is checked where it is used. */
#include "store/owner.h"

#include <string.h>
#include <unistd.h>

#include "base/num.h"
#include "os/mount_ns.h"
#include "store/beside.h"
#include "store/copied.h"
#include "store/record.h"

enum { HEAD_MAX = 1024 };

static const uid_t NOBODY = (uid_t)-1;

struct parts {
	struct store_at dir;
	uid_t dir_uid, asks, owner;
	bool found, differ;            /* a manifest that is believed; one of another owner than `asks` */
};

/* The member "uid" of a manifest's head; false: there is none. */
static bool read_uid(const char *text, size_t n, uid_t *out)
{
	static const char key[] = ",\"uid\":";
	const char *end = memmem(text, n, ",\"metadata\":", 12), *at = memmem(text, end ? (size_t)(end - text) : n, key, sizeof key - 1);
	uint64_t uid;

	if (!at)
		return false;
	at += sizeof key - 1;
	size_t digits = strspn(at, "0123456789");
	if (!str_to_u64((struct str){ at, digits }, &uid) || uid > UINT32_MAX)
		return false;
	*out = (uid_t)uid;
	return true;
}

/* In a user namespace of its own a worker sees the files of all other users as nobody's, and does not know who their owner is. */
static uid_t known(uid_t uid)
{
	return uid == OVERFLOW_ID && geteuid() != OVERFLOW_ID ? NOBODY : uid;
}

static FALLIBLE enum err look_at(struct parts *p, const char *name)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	char head[HEAD_MAX + 1];
	struct stat st;
	uid_t uid;

	TRY(store_open_file(p->dir, name, STORE_READ, &file));
	TRY(store_stat(file, "", &st));
	size_t n = (size_t)num_min((uint64_t)st.st_size, HEAD_MAX);
	TRY(store_read(file, head, n, 0, name));
	head[n] = '\0';
	if (!S_ISREG(st.st_mode) || st.st_uid != p->dir_uid || !read_uid(head, n, &uid))
		return OK;
	if (!p->differ)
		p->owner = uid;
	p->differ = p->differ || uid != p->asks;
	p->found = true;
	return OK;
}

static enum err note_part(void *user, const char *name, unsigned char)
{
	int64_t rank;

	if (!manifest_is(name, &rank))
		return OK;
	enum err e = look_at(user, name);
	return e == ERR_NOT_FOUND ? OK : e; /* gone meanwhile */
}

/* The page beside a file, if it is of this very one, which its record tells. */
static FALLIBLE enum err look_beside(struct parts *p, const char *name)
{
	CLEANUP(record_free) struct record record = { 0 };
	char page[BESIDE_MAX];

	TRY(record_of(p->dir, name, &record));
	if (!json_object_get(record.doc, "made_by") || !beside_path(name, MANIFEST_NAME, page))
		return OK;
	enum err e = look_at(p, page);
	return e == ERR_NOT_FOUND ? OK : e; /* gone meanwhile */
}

enum err owner_find(const struct store *store, const char *name, uid_t asks, uid_t *owner_out)
{
	struct parts p = { .asks = asks };
	struct stat st;

	TRY(store_stat(store_top(store), name, &st));
	p.owner = p.dir_uid = known(st.st_uid);
	if (S_ISDIR(st.st_mode)) {
		TRY(store_enter(store_top(store), name, &p.dir));
		enum err e = look_at(&p, COPIED_NAME); /* a copy's manifests are those of its source, and name its owner */
		if (e == ERR_NOT_FOUND || (!e && !p.found))
			e = store_list(p.dir, note_part, &p);
		store_close(&p.dir);
		TRY(e);
	} else {
		p.dir = store_top(store);
		TRY(look_beside(&p, name));
	}
	*owner_out = p.owner;
	return OK;
}

enum err owner_check(const struct store_job *by, const struct store *store, const char *name)
{
	uid_t owner = 0;

	if (by->admin)
		return OK;
	TRY(owner_find(store, name, by->uid, &owner));
	if (owner == by->uid)
		return OK;
	if (owner == NOBODY)
		return ERR(FORBIDDEN, "'%s' belongs to a user unknown to dcpd: only root and dcpd's own user remove or replace it", name);
	return ERR(FORBIDDEN, "'%s' belongs to uid %u: only that one, root and dcpd's own user remove or replace it", name, owner);
}
