/* s3_store_folder.c: which keys are files of a checkpoint, and under which names they are seen (see s3_store.h). */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/format.h"
#include "io/digest.h"
#include "store/aliases.h"
#include "store/copied.h"
#include "store/manifest.h"
#include "store/notes.h"
#include "store/s3_store_impl.h"

enum { LOOKS = 5, GIVEN_LOOKS = 64 };

/* ---- names ---- */

enum err s3_join(const char *a, const char *b, char out[S3_PATH_MAX])
{
	int n = snprintf(out, S3_PATH_MAX, "%s%s%s", a, a[0] && b[0] ? "/" : "", b);

	return n < S3_KEY_MAX ? OK : ERR(NAME_INVALID, "a key of %d bytes: S3 takes %d", n, S3_KEY_MAX);
}

uint64_t s3_attempt_at(const char *staging)
{
	unsigned char xxh3[16];
	uint64_t half;

	digest_xxh3(staging, strlen(staging), xxh3);
	memcpy(&half, xxh3, sizeof half);
	return (half & ((UINT64_C(1) << 39) - 1)) | UINT64_C(1) << 39;
}

static bool is_attempt(uint64_t n)
{
	return n >> 39 == 1;
}

bool s3_is_side(const char *name)
{
	int64_t rank;

	return manifest_is(name, &rank) || strcmp(name, COPIED_NAME) == 0;
}

/* The n of "__{rank}_{n}.distcp". */
static uint64_t data_number(const char *name)
{
	struct str s = str_of(name), end = STR(".distcp");
	const char *bar = str_starts(s, "__") ? strchr(name + 2, '_') : NULL;
	uint64_t n;

	if (!bar || !str_ends(s, end.p) || !str_to_u64((struct str){ bar + 1, s.n - end.n - (size_t)(bar + 1 - name) }, &n))
		return 0;
	return n;
}

uint64_t s3_attempt_of(const char *name, const char **rest)
{
	static const char prefix[] = ".dcpd-";
	uint64_t n = data_number(name) >> S3_FILES_SHIFT;
	struct str s = str_of(name);

	*rest = name;
	if (is_attempt(n))
		return n;
	if (!str_starts(s, prefix) || s.n < sizeof prefix + S3_ATTEMPT_DIGITS || name[sizeof prefix - 1 + S3_ATTEMPT_DIGITS] != '-')
		return 0;
	int64_t hex = str_hex((struct str){ name + sizeof prefix - 1, S3_ATTEMPT_DIGITS }, S3_ATTEMPT_DIGITS);
	if (hex < 0 || !is_attempt((uint64_t)hex))
		return 0;
	*rest = name + sizeof prefix + S3_ATTEMPT_DIGITS;
	return (uint64_t)hex;
}

uint64_t s3_attempt_of_key(struct str key)
{
	const char *slash = memrchr(key.p, '/', key.n), *rest;
	size_t skip = slash ? (size_t)(slash + 1 - key.p) : 0;
	char name[S3_NAME_MAX];

	if (key.n >= S3_KEY_MAX || key.n - skip >= sizeof name)
		return 0;
	memcpy(name, key.p + skip, key.n - skip);
	name[key.n - skip] = '\0';
	return s3_attempt_of(name, &rest);
}

void s3_attempt_mark(const char *kind, uint64_t attempt, char out[65])
{
	snprintf(out, 65, "%s%0*jx", kind, S3_ATTEMPT_DIGITS, (uintmax_t)attempt);
}

bool s3_is_commit_of(const char *mark, uint64_t attempt)
{
	char whole[65];

	s3_attempt_mark(S3_MARK_COMMIT, attempt, whole);
	return strncmp(mark, whole, strlen(whole)) == 0;
}

/* Names that dcpd gives to things of its own, which are no files of a checkpoint. */
static bool is_internal(const char *name)
{
	return str_starts(str_of(name), ".dcpd-") && !notes_is(name) && strcmp(name, COPIED_NAME) != 0 && strcmp(name, ALIASES_NAME) != 0;
}

/* May the file be the commit of a folder? .metadata before all others. */
static int commit_rank(const char *name)
{
	struct format_file file;

	if (strcmp(name, DCP_METADATA) == 0)
		return 2;
	return format_file(name, &file) && file.role == FORMAT_METADATA;
}

/* ---- a look ---- */

void s3_entry_free(struct s3_entry *e)
{
	mem_free(e->name);
	mem_free(e->key);
	e->name = e->key = NULL;
}

void s3_folder_clear(struct s3_folder *f)
{
	each(e, f->v.v, f->v.n)
		s3_entry_free(e);
	vec_free(&f->v);
	f->is_there = f->is_guess = false;
	f->attempt = f->given = 0;
	f->commit = (struct s3_entry){ 0 };
	f->claim_key[0] = f->claim_etag[0] = '\0';
}

void s3_folder_free(struct s3_folder *f)
{
	if (!f)
		return;
	s3_folder_clear(f);
	mem_free(f);
}

void s3_folder_free_ptr(struct s3_folder **f)
{
	s3_folder_free(*f);
}

bool s3_is_folder_entry(const struct s3_entry *e)
{
	return e->key[strlen(e->key) - 1] == '/';
}

struct taking {
	struct s3_folder *f;
	size_t skip;
};

static enum err set_entry(struct s3_entry *e, struct str key, struct str name, const struct s3_object *o)
{
	if (o) {
		e->bytes = o->bytes;
		e->mtime_ms = o->mtime_ms;
		memcpy(e->etag, o->etag, sizeof e->etag);
	}
	e->key = mem_strndup(key.p, key.n);
	e->name = mem_strndup(name.p, name.n);
	return e->key && e->name ? OK : ERR(NO_MEMORY, "no memory for a list of keys");
}

/* Keys that no path can have ("a//b", "a/./b") are passed over, as those with NULs are. */
static enum err take(void *user, struct str key, const struct s3_object *object)
{
	struct taking *t = user;
	struct str name = { key.p + t->skip, key.n - t->skip };
	struct s3_entry *e;

	if (!object && name.n)
		name.n--; /* its '/' */
	if (key.n < t->skip || name.n == 0 || name.n >= S3_NAME_MAX || memchr(name.p, '\0', name.n) || str_is(name, ".") ||
	    str_is(name, "..") || memchr(name.p, '/', name.n))
		return OK;
	TRY(vec_push(&t->f->v, &e));
	return set_entry(e, key, name, object);
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct s3_entry *)a)->name, ((const struct s3_entry *)b)->name);
}

static void remove_at(struct s3_folder *f, uint64_t i)
{
	s3_entry_free(&f->v.v[i]);
	memmove(&f->v.v[i], &f->v.v[i + 1], (f->v.n - i - 1) * sizeof *f->v.v);
	f->v.n--;
}

/* A folder whose commit has no mark: the one attempt that has data in it, and the one that has pages; nothing, if there are several. */
static void guess_attempts(struct s3_folder *f)
{
	uint64_t data = 0, pages = 0;
	const char *rest;

	each(e, f->v.v, f->v.n) {
		uint64_t n = s3_attempt_of(e->name, &rest), *found = rest == e->name ? &data : &pages;
		if (n && *found && n != *found)
			return;
		*found = n ? n : *found;
	}
	f->attempt = pages ? pages : data;
	f->is_guess = f->attempt;
	f->given = data && data != f->attempt ? data : 0;
}

/* Finds the attempt that the data of a copy was saved by: copies keep the names. Such data has the mark of the attempt that brought it. */
static FALLIBLE enum err find_given(struct s3 *s3, struct s3_folder *f)
{
	uint64_t other[GIVEN_LOOKS], heads = 0;
	const char *rest;

	each(e, f->v.v, f->v.n)
		if (s3_attempt_of(e->name, &rest) == f->attempt && rest == e->name)
			return OK; /* it has data of its own */
	each(e, f->v.v, f->v.n) {
		uint64_t n = s3_attempt_of(e->name, &rest);
		bool known = !n || n == f->attempt || rest != e->name || s3_is_folder_entry(e) || heads == GIVEN_LOOKS;
		for (uint64_t i = 0; i < heads && !known; i++)
			known = other[i] == n;
		if (known)
			continue;
		struct s3_object o;
		enum err bad = s3_head(s3, e->key, NULL, &o);
		if (bad && bad != ERR_NOT_FOUND)
			return bad;
		other[heads++] = bad ? 0 : n; /* what is gone says nothing of the others */
		if (bad)
			err_clear();
		else if (s3_is_commit_of(o.mark, f->attempt)) {
			f->given = n;
			return OK;
		}
	}
	return OK;
}

static bool has_attempts(const struct s3_folder *f)
{
	const char *rest;

	each(e, f->v.v, f->v.n)
		if (s3_attempt_of(e->name, &rest))
			return true;
	return false;
}

/* Asks whose the commit's object is. *changed: it is another one than was listed; *claimed: it is a claim. A copy that other tools made has
 * no mark. */
static FALLIBLE enum err look_at_commit(struct s3 *s3, struct s3_folder *f, const struct s3_entry *e, bool *changed, bool *claimed)
{
	struct s3_object o;

	*changed = *claimed = false;
	if (e->bytes > S3_CLAIM_MAX && !has_attempts(f))
		return OK;
	enum err bad = s3_head(s3, e->key, NULL, &o);
	*changed = bad == ERR_NOT_FOUND || (!bad && strcmp(o.etag, e->etag) != 0);
	if (bad || *changed)
		return bad == ERR_NOT_FOUND ? OK : bad;
	*claimed = str_starts(str_of(o.mark), S3_MARK_CLAIM);
	if (str_starts(str_of(o.mark), S3_MARK_COMMIT)) {
		int64_t n = str_hex(str_of(o.mark + sizeof S3_MARK_COMMIT - 1), S3_ATTEMPT_DIGITS);
		f->attempt = n > 0 ? (uint64_t)n : 0;
	} else if (!*claimed) {
		guess_attempts(f);
	}
	return OK;
}

/* Finds the commit; a claim is none, and is no entry. */
static FALLIBLE enum err find_commit(struct s3 *s3, struct s3_folder *f, int rank, bool *changed)
{
	bool claimed;

	*changed = false;
	for (uint64_t i = 0; i < f->v.n; i++) {
		const struct s3_entry *e = &f->v.v[i];
		if (s3_is_folder_entry(e) || commit_rank(e->name) != rank)
			continue;
		TRY(look_at_commit(s3, f, e, changed, &claimed));
		if (*changed)
			return OK;
		if (!claimed)
			continue;
		snprintf(f->claim_key, sizeof f->claim_key, "%s", e->key);
		memcpy(f->claim_etag, e->etag, sizeof f->claim_etag);
		remove_at(f, i--);
	}
	return OK;
}

/* A claim in the place of a checkpoint of one file is empty. */
static bool may_be_claim(const struct s3_entry *e)
{
	return e->bytes == 0 && !s3_is_folder_entry(e) && format_is_file(format_of_file(e->name));
}

/* Files of other attempts are not seen, and those of the checkpoint's own have the names that every store gives them. */
static FALLIBLE enum err show(struct s3_folder *f)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < f->v.n; i++) {
		struct s3_entry *e = &f->v.v[i];
		const char *rest;
		uint64_t attempt = s3_is_folder_entry(e) ? 0 : s3_attempt_of(e->name, &rest);
		bool is_ours = is_internal(e->name) || (f->path[0] == '\0' && strcmp(e->name, ".dcpd") == 0);
		bool is_seen = attempt == f->attempt || (attempt == f->given && rest == e->name);
		bool seen = attempt ? is_seen : !is_ours && !may_be_claim(e);
		if (!seen) {
			s3_entry_free(e);
			continue;
		}
		if (attempt && rest != e->name) {
			char *name = mem_strdup(rest);
			NEED(name, "no memory for a list of keys");
			mem_free(e->name);
			e->name = name;
		}
		f->v.v[n++] = *e;
		if (n - 1 != i)
			*e = (struct s3_entry){ 0 };
	}
	f->v.n = n;
	return OK;
}

static void set_commit(struct s3_folder *f)
{
	int best = 0;

	each(e, f->v.v, f->v.n) {
		int rank = s3_is_folder_entry(e) ? 0 : commit_rank(e->name);
		if (rank > best)
			f->commit = *e;
		best = rank > best ? rank : best;
	}
}

static FALLIBLE enum err look(struct s3 *s3, struct s3_folder *f, bool *changed)
{
	struct taking t = { f, f->path[0] ? strlen(f->path) + 1 : 0 };
	char prefix[S3_PATH_MAX + 1];

	s3_folder_clear(f);
	snprintf(prefix, sizeof prefix, "%s%s", f->path, f->path[0] ? "/" : "");
	TRY(s3_list(s3, prefix, '/', NULL, 0, NULL, take, &t));
	for (int rank = 2; rank > 0; rank--) {
		TRY(find_commit(s3, f, rank, changed));
		if (*changed)
			return OK;
	}
	if (f->attempt && !f->given)
		TRY(find_given(s3, f));
	if (!f->all)
		TRY(show(f));
	if (f->v.n)
		qsort(f->v.v, f->v.n, sizeof *f->v.v, by_name);
	set_commit(f);
	f->is_there = f->v.n > 0;
	return OK;
}

enum err s3_folder_look(struct s3 *s3, const char *path, bool all, struct s3_folder *out)
{
	bool changed = true;

	*out = (struct s3_folder){ .all = all };
	if (snprintf(out->path, sizeof out->path, "%s", path) >= S3_KEY_MAX)
		return ERR(NAME_INVALID, "a name of %zu bytes is too long for S3", strlen(path));
	enum err e = OK;
	for (int i = 0; i < LOOKS && changed && !e; i++)
		e = look(s3, out, &changed);
	if (!e && changed)
		e = ERR(STORAGE_STALLED, "'%s' changes faster than it is read", path);
	if (e)
		s3_folder_clear(out);
	return e;
}

const struct s3_entry *s3_folder_find(const struct s3_folder *f, const char *name)
{
	const struct s3_entry key = { .name = (char *)name };

	return f->v.n ? bsearch(&key, f->v.v, f->v.n, sizeof *f->v.v, by_name) : NULL;
}

/* ---- one file ---- */

struct single {
	const char *key;
	struct s3_entry *out;
};

static enum err take_single(void *user, struct str key, const struct s3_object *object)
{
	struct single *s = user;
	const char *slash = strrchr(s->key, '/');

	if (!object || !str_is(key, s->key))
		return OK;
	return set_entry(s->out, key, str_of(slash ? slash + 1 : s->key), object);
}

/* By a list, whose times are finer than those of HTTP: of keys that begin so, this one is the first. */
enum err s3_look_file(struct s3 *s3, const char *key, struct s3_entry *out)
{
	struct single s = { key, out };
	struct s3_object o = { .mark = "" };

	*out = (struct s3_entry){ 0 };
	enum err e = s3_list(s3, key, 0, NULL, 1, NULL, take_single, &s);
	if (!e && out->key && may_be_claim(out))
		e = s3_head(s3, key, NULL, &o);
	if (!e && (!out->key || str_starts(str_of(o.mark), S3_MARK_CLAIM)))
		e = s3_missing(key);
	if (e)
		s3_entry_free(out);
	return e;
}

/* ---- stat ---- */

static uint64_t hash_of(const char *text)
{
	unsigned char xxh3[16];
	uint64_t half;

	digest_xxh3(text, strlen(text), xxh3);
	memcpy(&half, xxh3, sizeof half);
	return half;
}

static struct timespec time_of(int64_t ms)
{
	return (struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };
}

void s3_stat_file(const struct s3_entry *e, struct stat *out)
{
	*out = (struct stat){ .st_mode = S_IFREG | 0644, .st_uid = geteuid(), .st_nlink = 1, .st_ino = hash_of(e->etag),
			      .st_size = (off_t)num_min(e->bytes, INT64_MAX), .st_mtim = time_of(e->mtime_ms) };
	out->st_ctim = out->st_mtim;
	out->st_blocks = out->st_size / 512 + 1;
}

void s3_stat_folder(const struct s3_folder *f, struct stat *out)
{
	bool is_one = f->commit.key != NULL;

	*out = (struct stat){ .st_mode = S_IFDIR | 0755, .st_uid = geteuid(), .st_nlink = 2,
			      .st_ino = hash_of(is_one ? f->commit.etag : f->path), .st_mtim = time_of(is_one ? f->commit.mtime_ms : 0) };
	out->st_ctim = out->st_mtim;
}
