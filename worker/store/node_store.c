/* node_store.c: see node_store.h. Requests are repeated for a while: a node that is restarted, or is busy, answers again soon. Those for a
 * copy are not, unless a connection broke: a node that is silent must not cost more than reading from the storage does.
 *
 * A node takes as long to hash a generation as it is large, and says every few seconds that it is at it (202): a request has no limit then
 * but the node's own, which ends what makes no progress. */
#include "store/node_store.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"
#include "format/format.h"
#include "store/manifest.h"
#include "store/s3_fetch.h"
#include "store/s3_http.h"

enum { HANDLES_MAX = 1 << 16, PATH_BYTES = 512, URL_BYTES = 2048, DIGESTS_MAX = 256 << 20, WORDS_MAX = 16 << 10, CONNECTIONS = 32,
       CONNECT_MS = 1000, STALL_MS = 10000, CALL_MS = 30000, COPY_STALL_MS = 2000, WAIT_S = 5, TRIES = 5, COPY_TRIES = 2,
       PAUSE_MS = 100, DEPTH = 3, CA_MAX = 4 << 20 };

/* A generation: its digests, which say which files there are. */
struct node_folder {
	uint32_t refs;
	char path[PATH_BYTES], etag[S3_ETAG_MAX];
	void *text;
	uint64_t bytes;
	struct manifest *manifest;
};

struct node_thing {
	char path[PATH_BYTES];
	struct node_folder *folder;    /* NULL: a place above generations */
	uint32_t file;                 /* of its manifest; UINT32_MAX: the folder itself; manifest's file_count: the manifest */
};

struct node_own {
	struct s3_http *http;
	char url[512], authorization[160], peer[96];
	pthread_mutex_t lock;          /* of what follows */
	struct vec(struct node_thing *) things;        /* by handle; 0 is the top */
	struct node_folder *last;      /* the one that was looked at last; NULL: none */
	uint64_t counted;
};

static const struct node_thing top_thing = { .file = UINT32_MAX };

static struct node_own *own_of(const struct store *s)
{
	return s->own;
}

/* ---- requests ---- */

struct ask {
	struct node_own *own;
	const char *path;              /* "CALLER/NAME/GENERATION", or with NODE_STORE_COPY behind */
	const char *what;              /* of the state dict: "digests", "ranks/0/image" */
	const char *etag;              /* that it must have (if_range), or that need not be sent again; NULL: any */
	bool if_range;
	uint64_t offset, of;           /* of the range; the image's bytes */
	void *into;                    /* the range; NULL: all goes to `text` */
	size_t n;
	unsigned which;                /* digests of the range that are computed as it comes; 0: none */
	struct digest *digest;
	struct buf *text;
	long status;
	char got_etag[S3_ETAG_MAX];
};

static bool is_copy(const char *path)
{
	size_t n = strlen(path), tail = strlen(NODE_STORE_COPY);

	return n > tail && strcmp(path + n - tail, NODE_STORE_COPY) == 0;
}

/* Divides "CALLER/NAME/GENERATION". */
static FALLIBLE enum err split(const char *path, struct str *caller, struct str *name, struct str *generation)
{
	const char *a = strchr(path, '/'), *b = a ? strchr(a + 1, '/') : NULL;

	if (!b || strchr(b + 1, '/'))
		return ERR(NAME_INVALID, "'%s' is no generation of a state dict", path);
	*caller = (struct str){ path, (size_t)(a - path) };
	*name = (struct str){ a + 1, (size_t)(b - a - 1) };
	*generation = (struct str){ b + 1, strlen(b + 1) - (is_copy(path) ? strlen(NODE_STORE_COPY) : 0) };
	return OK;
}

/* Is the head that of the range that was asked for? */
static enum err check_range(void *user, const struct s3_answer *a)
{
	const struct ask *k = user;
	bool all = k->offset == 0 && k->n == k->of;

	if (!k->if_range)
		return OK;
	if (strcmp(a->etag, k->etag) != 0)
		return ERR(CHECKPOINT_REPLACED, "the generation was replaced on %s while it was read", k->own->peer);
	if (a->status == 200 && all && (!a->has_length || a->length == k->n))
		return OK;
	if (a->status == 206 && a->has_range && a->range_begin == k->offset && a->range_end == k->offset + k->n &&
	    (!a->range_total || a->range_total == k->of) && (!a->has_length || a->length == k->n))
		return OK;
	return ERR(STORAGE_IO, "%s sent another range than the one that it was asked for", k->own->peer);
}

/* The words of a problem+json body. */
static void read_words(const struct buf *text, char out[S3_WORDS_MAX])
{
	CLEANUP(json_decrefp) json_t *doc = NULL;

	out[0] = '\0';
	if (!text->len || jtext_parse((struct str){ (const char *)text->p, text->len }, 0, &doc)) {
		err_clear();
		return;
	}
	const char *detail = json_string_value(json_object_get(doc, "detail"));
	if (detail)
		s3_answer_put(out, S3_WORDS_MAX, str_of(detail));
}

static enum err refused(const struct ask *k, const struct buf *text)
{
	const char *peer = k->own->peer;
	char words[S3_WORDS_MAX];

	read_words(text, words);
	switch (k->status) {
	case 401:
		return ERR(FORBIDDEN, "%s does not take this node for one of its cluster", peer);
	case 403:
		return ERR(FORBIDDEN, "%s: %s", peer, words);
	case 404:
		return ERR(SEGMENT_GONE, "%s: %s", peer, words);
	case 409:
		return ERR(CHECKPOINT_REPLACED, "%s: %s", peer, words);
	case 422:
		return ERR(FORMAT_IMAGE, "%s: %s", peer, words);
	case 429: case 503:
		return ERR(BUSY, "%s: %s", peer, words);
	default:
		return ERR(STORAGE_IO, "%s answers with status %ld: %s", peer, k->status, words);
	}
}

/* Sets k->status; an answer of any status but 2xx and 304 is an error. *again: it may go better soon. */
static enum err try(struct ask *k, int64_t deadline_ms, const char *url, bool *again)
{
	struct str caller, name, generation;
	char range[96], who[64], prefer[16];
	CLEANUP(buf_free) struct buf words = BUF_INIT(WORDS_MAX);
	struct digest_stream stream;
	bool copy = is_copy(k->path), is_hashed = !copy && !k->into;
	enum s3_outcome outcome;
	uint32_t count = 2;

	digest_begin_one(&stream, k->which);
	TRY(split(k->path, &caller, &name, &generation));
	bool admin = caller.n && caller.p[caller.n - 1] == 'a';
	snprintf(who, sizeof who, "%.*s 1 %d -", (int)(caller.n - admin), caller.p, admin);
	snprintf(prefer, sizeof prefer, "wait=%d", WAIT_S);
	snprintf(range, sizeof range, "bytes=%ju-%ju", (uintmax_t)k->offset, (uintmax_t)(k->offset + k->n - 1));
	struct s3_pair headers[5] = { { "Authorization", k->own->authorization }, { "Dcpd-Caller", who } };
	if (k->etag)
		headers[count++] = (struct s3_pair){ k->if_range ? "If-Range" : "If-None-Match", k->etag };
	if (k->if_range)
		headers[count++] = (struct s3_pair){ "Range", range };
	if (is_hashed)
		headers[count++] = (struct s3_pair){ "Prefer", prefer };
	struct s3_exchange x = { .verb = "GET", .url = url, .headers = headers, .header_count = count,
				 .deadline_ms = deadline_ms, .stall_ms = copy ? COPY_STALL_MS : 0, .into = k->into, .into_bytes = k->n,
				 .digest = k->which ? &stream : NULL, .text = k->into ? &words : k->text, .begin = check_range,
				 .user = k };
	enum err e = s3_http_do(k->own->http, &x, &outcome);
	k->status = x.answer.status;
	memcpy(k->got_etag, x.answer.etag, sizeof k->got_etag);
	*again = copy ? outcome == S3_BROKEN : outcome != S3_ANSWERED && outcome != S3_IMPOSSIBLE;
	if (e)
		return e;
	if (k->status == 304 || (k->status >= 200 && k->status < 300)) {
		if (x.is_long || (k->into && x.got != k->n))
			return ERR(STORAGE_IO, "%s sent more or fewer bytes than it was asked for", k->own->peer);
		if (k->which)
			digest_end(&stream, k->digest);
		return OK;
	}
	*again = k->status == 429 || k->status == 503;
	e = refused(k, x.text);
	x.text->len = 0;
	return e;
}

/* Errors of HTTP speak of a storage: here it is a node of the cluster. */
static enum err as_node(enum err e)
{
	struct err_info info = *err_last();

	if (e == ERR_STORAGE_GONE || e == ERR_STORAGE_STALLED)
		return ERR(CLUSTER_UNAVAILABLE, "%s", info.text);
	return e;
}

static FALLIBLE enum err url_of(const struct ask *k, char out[URL_BYTES])
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(URL_BYTES);
	struct str caller, name, generation;

	TRY(split(k->path, &caller, &name, &generation));
	buf_printf(&b, "%s/v1/state-dicts/", k->own->url);
	s3_sign_encode(&b, name, 0);
	buf_printf(&b, "/%s?generation=%.*s%s", k->what, (int)generation.n, generation.p,
		   is_copy(k->path) && !k->into ? "&of=headers" : "");
	buf_putc(&b, '\0');
	TRY(buf_status(&b));
	memcpy(out, b.p, b.len);
	return OK;
}

static FALLIBLE enum err ask(struct ask *k)
{
	int64_t deadline_ms = clock_mono_ms() + CALL_MS;
	char url[URL_BYTES];
	bool again = true;
	enum err e = OK;

	TRY(url_of(k, url));
	for (uint32_t i = 0, most = is_copy(k->path) ? COPY_TRIES : TRIES; i < most && again; i += k->status != 202) {
		if (i || k->status == 202)
			usleep((useconds_t)(PAUSE_MS << i) * 1000);
		if (clock_mono_ms() >= deadline_ms)
			break;
		again = false;
		if (k->text && !k->into)
			k->text->len = 0;
		e = try(k, deadline_ms, url, &again);
		if (!e && k->status != 202)
			return OK;
		again = again || !e;
		deadline_ms = e ? deadline_ms : clock_mono_ms() + CALL_MS;
	}
	return as_node(e);
}

/* ---- generations ---- */

static void folder_drop(struct node_own *own, struct node_folder *f)
{
	pthread_mutex_lock(&own->lock);
	bool last = f && --f->refs == 0;
	pthread_mutex_unlock(&own->lock);
	if (!last)
		return;
	manifest_free(f->manifest);
	mem_free(f->text);
	mem_free(f);
}

static struct node_folder *folder_last(struct node_own *own, const char *path)
{
	struct node_folder *f;

	pthread_mutex_lock(&own->lock);
	f = own->last && strcmp(own->last->path, path) == 0 ? own->last : NULL;
	if (f)
		f->refs++;
	pthread_mutex_unlock(&own->lock);
	return f;
}

static FALLIBLE enum err folder_new(const char *path, const char *etag, struct buf *text, struct node_folder **out)
{
	struct node_folder *f = mem_zalloc(1, sizeof *f);

	NEED(f, "no memory for the digests of a state dict");
	*f = (struct node_folder){ .refs = 2, .text = text->p, .bytes = text->len };
	*text = BUF_INIT(text->max);
	snprintf(f->path, sizeof f->path, "%s", path);
	snprintf(f->etag, sizeof f->etag, "%s", etag);
	enum err e = manifest_parse(f->text, f->bytes, &f->manifest);
	if (!e && f->manifest->files.n == 0)
		e = ERR(FORMAT_MANIFEST, "the digests are of no image");
	if (e) {
		manifest_free(f->manifest);
		mem_free(f->text);
		mem_free(f);
		return err_at_file(e, MANIFEST_NAME, err_last()->offset);
	}
	*out = f;
	return OK;
}

/* The generation as it is now: asked for once, and from then on whether it is still the same. */
static FALLIBLE enum err look(const struct store *s, const char *path, struct node_folder **out)
{
	struct node_own *own = own_of(s);
	CLEANUP(buf_free) struct buf text = BUF_INIT(DIGESTS_MAX);
	struct node_folder *f = folder_last(own, path);
	struct ask k = { .own = own, .path = path, .what = "digests", .etag = f ? f->etag : NULL, .text = &text };

	*out = NULL;
	enum err e = ask(&k);
	if (!e && k.status == 304 && f) {
		*out = f;
		return OK;
	}
	if (f)
		folder_drop(own, f);
	TRY(e);
	if (k.status != 200 || !k.got_etag[0])
		return ERR(STORAGE_IO, "%s sent no digests", own->peer);
	TRY(folder_new(path, k.got_etag, &text, out));
	pthread_mutex_lock(&own->lock);
	f = own->last;
	own->last = *out;
	pthread_mutex_unlock(&own->lock);
	folder_drop(own, f);
	return OK;
}

/* The number of the file; that behind the last: the manifest. ERR_NOT_FOUND. */
static FALLIBLE enum err find_file(const struct node_folder *f, const char *name, uint32_t *out)
{
	*out = map_get(&f->manifest->names, str_of(name));
	if (strcmp(name, MANIFEST_NAME) == 0)
		*out = (uint32_t)f->manifest->files.n;
	return *out == MAP_NONE ? err_at_file(ERR(NOT_FOUND, "there is no '%s'", name), name, -1) : OK;
}

static uint64_t bytes_of(const struct node_folder *f, uint32_t file)
{
	return file < f->manifest->files.n ? f->manifest->files.v[file].bytes : f->bytes;
}

/* ---- handles ---- */

static struct node_thing *thing_at(struct store_at at)
{
	struct node_own *own = own_of(at.store);

	if (at.handle == 0)
		return (struct node_thing *)&top_thing; /* nothing of it changes */
	pthread_mutex_lock(&own->lock);
	must(at.handle > 0 && (uint64_t)at.handle <= own->things.n && own->things.v[at.handle - 1]);
	struct node_thing *t = own->things.v[at.handle - 1];
	pthread_mutex_unlock(&own->lock);
	return t;
}

/* Takes the reference of thing->folder. */
static FALLIBLE enum err open_thing(const struct store *s, const struct node_thing *thing, struct store_at *out)
{
	struct node_own *own = own_of(s);
	struct node_thing **at = NULL, *t = mem_zalloc(1, sizeof *t);
	enum err e = t ? OK : ERR(NO_MEMORY, "no memory for an open file");

	pthread_mutex_lock(&own->lock);
	for (uint64_t i = 0; !e && i < own->things.n && !at; i++)
		at = own->things.v[i] ? NULL : &own->things.v[i];
	if (!e && !at && own->things.n >= HANDLES_MAX)
		e = ERR(SYSTEM, "more than %d files are open", HANDLES_MAX);
	else if (!e && !at)
		e = vec_push(&own->things, &at);
	if (!e) {
		*t = *thing;
		*at = t;
		*out = (struct store_at){ s, (int)(at - own->things.v) + 1 };
	}
	pthread_mutex_unlock(&own->lock);
	if (!e)
		return OK;
	mem_free(t);
	if (thing->folder)
		folder_drop(own, thing->folder);
	return e;
}

static void drop_handle(struct store_at *at)
{
	struct node_own *own = own_of(at->store);

	if (at->handle > 0) {
		struct node_thing *t = thing_at(*at);
		pthread_mutex_lock(&own->lock);
		own->things.v[at->handle - 1] = NULL;
		pthread_mutex_unlock(&own->lock);
		if (t->folder)
			folder_drop(own, t->folder);
		mem_free(t);
	}
	at->handle = -1;
}

/* ---- names ---- */

static FALLIBLE enum err join(struct store_at at, const char *path, char out[PATH_BYTES])
{
	const char *base = thing_at(at)->path;
	bool same = path[0] == '\0' || strcmp(path, ".") == 0;
	int n = same ? snprintf(out, PATH_BYTES, "%s", base) : snprintf(out, PATH_BYTES, "%s%s%s", base, base[0] ? "/" : "", path);

	return n < PATH_BYTES ? OK : ERR(NAME_INVALID, "a path of %d bytes", n);
}

static uint32_t depth_of(const char *path)
{
	uint32_t n = path[0] != '\0';

	for (; *path; path++)
		n += *path == '/';
	return n;
}

/* The thing of a path: t->folder is NULL for a place above generations. */
static FALLIBLE enum err find(struct store_at at, const char *path, struct node_thing *t)
{
	char *name = NULL;

	*t = (struct node_thing){ .file = UINT32_MAX };
	TRY(join(at, path, t->path));
	uint32_t depth = depth_of(t->path);
	if (depth < DEPTH)
		return OK;
	if (depth > DEPTH + 1)
		return ERR(NOT_FOUND, "there is no '%s'", path);
	if (depth > DEPTH) {
		name = strrchr(t->path, '/');
		*name++ = '\0';
	}
	struct node_thing *parent = thing_at(at);
	if (parent->folder && strcmp(parent->folder->path, t->path) == 0) { /* as it was when it was entered */
		pthread_mutex_lock(&own_of(at.store)->lock);
		parent->folder->refs++;
		pthread_mutex_unlock(&own_of(at.store)->lock);
		t->folder = parent->folder;
	} else {
		TRY(look(at.store, t->path, &t->folder));
	}
	enum err e = name ? find_file(t->folder, name, &t->file) : OK;
	if (e)
		folder_drop(own_of(at.store), t->folder);
	return e;
}

/* ---- the table ---- */

static const char *option(const struct store_place *place, const char *key)
{
	const char *text = json_string_value(json_object_get(place->options, key));

	return text ? text : "";
}

static FALLIBLE enum err open_own(struct node_own *own, const struct store_place *place)
{
	CLEANUP(buf_free) struct buf ca = BUF_INIT(CA_MAX);
	const struct s3_config none = { 0 };

	snprintf(own->url, sizeof own->url, "%s", option(place, "url"));
	snprintf(own->authorization, sizeof own->authorization, "Bearer %s", option(place, "reader"));
	snprintf(own->peer, sizeof own->peer, "node \"%s\"", option(place, "node"));
	const char *path = option(place, "ca");
	if (str_starts(str_of(own->url), "https:")) /* read now: the sandbox opens no paths */
		TRY(s3_read_file(&none, path[0] ? path : S3_HTTP_CA_SYSTEM, &ca));
	const struct s3_http_config http = { .peer = own->peer, .ca_pem = { (const char *)ca.p, ca.len }, .connections = CONNECTIONS,
					     .connect_ms = CONNECT_MS, .stall_ms = STALL_MS };
	return s3_http_new(&http, &own->http);
}

static enum err open_store(struct store *s, const struct store_place *place)
{
	struct node_own *own = mem_zalloc(1, sizeof *own);

	NEED(own, "no memory for a node");
	enum err e = open_own(own, place);
	if (e) {
		mem_free(own);
		return e;
	}
	pthread_mutex_init(&own->lock, NULL);
	s->own = own;
	s->top = 0;
	s->ports[s->port_count++] = s3_http_port(own->url);
	return OK;
}

static enum err check(const struct store *s)
{
	(void)s;
	return OK;
}

static enum err probe(const struct store *s, struct store_facts *out)
{
	(void)s;
	*out = (struct store_facts){ .kind = "node" };
	return OK;
}

static uint64_t count(const struct store *s, bool written)
{
	struct node_own *own = own_of(s);
	struct s3_counts c = { 0 };

	if (written)
		return 0;
	s3_http_count(own->http, &c);
	pthread_mutex_lock(&own->lock);
	uint64_t more = c.received_bytes - own->counted;
	own->counted = c.received_bytes;
	pthread_mutex_unlock(&own->lock);
	return more;
}

static enum err enter(struct store_at folder, const char *path, struct store_at *out)
{
	struct node_thing t;

	*out = (struct store_at){ folder.store, -1 };
	TRY(find(folder, path, &t));
	if (t.file == UINT32_MAX)
		return open_thing(folder.store, &t, out);
	folder_drop(own_of(folder.store), t.folder);
	return err_at_file(ERR(NAME_INVALID, "'%s' is no folder", path), path, -1);
}

static enum err list(struct store_at at, store_entry_fn fn, void *user)
{
	const struct node_thing *t = thing_at(at);

	if (!t->folder)
		return OK;
	each(f, t->folder->manifest->files.v, t->folder->manifest->files.n)
		TRY(fn(user, f->name.p, DT_REG));
	return fn(user, MANIFEST_NAME, DT_REG);
}

static void stat_thing(const struct node_thing *t, struct stat *out)
{
	*out = (struct stat){ .st_mode = S_IFDIR };
	if (!t->folder)
		return;
	struct digest_stream tag;
	struct digest d;
	digest_begin_one(&tag, DIGEST_XXH3);
	digest_add(&tag, t->folder->etag, strlen(t->folder->etag));
	digest_end(&tag, &d);
	memcpy(&out->st_ino, d.xxh3_128, sizeof out->st_ino);
	if (t->file == UINT32_MAX)
		return;
	out->st_mode = S_IFREG;
	out->st_size = (off_t)bytes_of(t->folder, t->file);
}

static enum err stat_of(struct store_at at, const char *path, struct stat *out)
{
	struct node_thing t;

	if (path[0] == '\0') {
		stat_thing(thing_at(at), out);
		return OK;
	}
	TRY(find(at, path, &t));
	stat_thing(&t, out);
	if (t.folder)
		folder_drop(own_of(at.store), t.folder);
	return OK;
}

static bool watch(struct store_at folder)
{
	(void)folder;
	return false;
}

static FALLIBLE enum err read_only(const struct store *s)
{
	return ERR(STORAGE_READONLY, "%s is read from, not written to", own_of(s)->peer);
}

static enum err open_file(struct store_at folder, const char *name, unsigned flags, struct store_at *out)
{
	struct node_thing t;

	*out = (struct store_at){ folder.store, -1 };
	if (flags & (STORE_NEW | STORE_WRITE))
		return read_only(folder.store);
	TRY(find(folder, name, &t));
	if (t.file != UINT32_MAX)
		return open_thing(folder.store, &t, out);
	if (t.folder)
		folder_drop(own_of(folder.store), t.folder);
	return err_at_file(ERR(NAME_INVALID, "'%s' is no file", name), name, -1);
}

static void hash(const void *p, size_t n, unsigned which, struct digest *out)
{
	struct digest_stream stream;

	if (!which)
		return;
	digest_begin_one(&stream, which);
	digest_add(&stream, p, n);
	digest_end(&stream, out);
}

static FALLIBLE enum err read_hashed(struct store_at file, void *into, size_t n, uint64_t offset, const char *name, unsigned which,
				     struct digest *out)
{
	const struct node_thing *t = thing_at(file);
	uint64_t bytes = bytes_of(t->folder, t->file);
	char what[48];

	if (!num_inside(offset, n, bytes))
		return err_at_file(ERR(STORAGE_IO, "the file ends at %ju, %zu bytes at %ju were expected", (uintmax_t)bytes, n,
				       (uintmax_t)offset), name, (int64_t)offset);
	if (n == 0 || t->file == t->folder->manifest->files.n) {
		if (n)
			memcpy(into, (const char *)t->folder->text + offset, n);
		hash(into, n, which, out);
		return OK;
	}
	struct format_image_name is;
	if (!format_image_name(t->folder->manifest->files.v[t->file].name.p, &is))
		return ERR(FORMAT_MANIFEST, "%s has a file that is no image", own_of(file.store)->peer);
	snprintf(what, sizeof what, "ranks/%ju/image", (uintmax_t)is.rank);
	struct ask k = { .own = own_of(file.store), .path = t->folder->path, .what = what, .etag = t->folder->etag, .if_range = true,
			 .offset = offset, .of = bytes, .into = into, .n = n, .which = which, .digest = out };
	return err_at_file(ask(&k), name, (int64_t)offset);
}

static enum err read_at(struct store_at file, void *into, size_t n, uint64_t offset, const char *name)
{
	return read_hashed(file, into, n, offset, name, 0, NULL);
}

static enum err take(struct store_at file, void *into, size_t n, uint64_t offset, unsigned which, struct digest *out)
{
	return read_hashed(file, into, n, offset, "", which, out);
}

/* ---- nothing is written ---- */

static enum err write_at(struct store_at file, const void *from, size_t n, uint64_t offset, const char *name)
{
	(void)from, (void)n, (void)offset, (void)name;
	return read_only(file.store);
}

static enum err resize(struct store_at file, uint64_t bytes, const char *name)
{
	(void)bytes, (void)name;
	return read_only(file.store);
}

static enum err finish(struct store_at *file, bool durable, const char *name)
{
	(void)durable, (void)name;
	drop_handle(file);
	return read_only(file->store);
}

static enum err stage(struct staging *s, bool keep)
{
	(void)s, (void)keep;
	return ERR(STORAGE_READONLY, "nothing is saved to the memory of another node");
}

static enum err publish(struct staging *s, const char *replaces)
{
	(void)replaces;
	return stage(s, false);
}

static void discard(struct staging *s)
{
	(void)s;
}

static enum err remove_from(const struct store_job *by, const struct store *s, const char *name, const struct store_removal *how)
{
	(void)by, (void)name, (void)how;
	return read_only(s);
}

static enum err fence(const struct store_job *by, const struct store *s, const char *name)
{
	(void)by, (void)name;
	return read_only(s);
}

static enum err recover(const struct store_job *by, const struct store *s, const char *name, bool removes, bool *done_out,
			struct manifest **out)
{
	(void)by, (void)name, (void)removes, (void)done_out, (void)out;
	return read_only(s);
}

static enum err sweep(const struct store *s, const struct commit_keep *keep, const char *name, const char *job, struct store_swept *out)
{
	(void)s, (void)keep, (void)name, (void)job;
	*out = (struct store_swept){ 0 };
	return OK;
}

static enum err make(struct store_at folder, const char *path, struct store_at *out)
{
	(void)path, (void)out;
	return read_only(folder.store);
}

static enum err put(struct store_at folder, const char *name, const void *bytes, uint64_t n, bool durable)
{
	(void)name, (void)bytes, (void)n, (void)durable;
	return read_only(folder.store);
}

static enum err adopt(struct staging *s, struct store_at from, const char *name)
{
	(void)from, (void)name;
	return stage(s, false);
}

static enum err drop(struct store_at folder, const char *path)
{
	(void)path;
	return read_only(folder.store);
}

static enum err swap(struct store_at folder, const char *name, const void *bytes, uint64_t n, const struct stat *was)
{
	(void)name, (void)bytes, (void)n, (void)was;
	return read_only(folder.store);
}

const struct store_ops node_ops = {
	open_store, check, probe, count, NULL,
	enter, list, stat_of, watch, open_file, read_at, NULL, drop_handle, NULL,
	write_at, resize, finish,
	stage, publish, NULL, NULL, discard, remove_from, fence, recover, sweep,
	NULL, NULL, NULL,
	make, put, adopt, drop, NULL, swap,
	NULL, NULL, NULL, NULL, NULL, false,
	take,
};
