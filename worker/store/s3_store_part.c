/* s3_store_part.c: files that are being written (see s3_store.h). Bytes come in any order, in pieces of any size, from several threads;
 * they go as parts of a multipart upload as soon as all bytes of a part are there, from where they lie if one write brings them all. A file
 * of one part is one PUT. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/format.h"
#include "store/s3_store_impl.h"

enum { PIECE = 8 << 20, PIECES_MAX = 9000, WAITING_MAX = 256 << 10, LINK_MIN = 64 << 10 };
#define LATE_MAX (UINT64_C(1) << 30)
#define COPY_MAX (UINT64_C(1) << 30)   /* in one request: the server has so much to do in its time */

/* ---- the uploads of this process ---- */

static struct s3_upload *find(struct s3_own *own, const char *staging, const char *name)
{
	for (struct s3_upload *u = own->uploads; u; u = u->next)
		if (strcmp(u->staging, staging) == 0 && strcmp(u->name, name) == 0)
			return u;
	return NULL;
}

struct s3_upload *s3_part_find(struct s3_own *own, const char *staging, const char *name)
{
	pthread_mutex_lock(&own->lock);
	struct s3_upload *u = find(own, staging, name);
	pthread_mutex_unlock(&own->lock);
	return u;
}

struct s3_upload *s3_part_next(struct s3_own *own, const char *staging, struct s3_upload *after)
{
	pthread_mutex_lock(&own->lock);
	struct s3_upload *u = after ? after->next : own->uploads;
	while (u && strcmp(u->staging, staging) != 0)
		u = u->next;
	pthread_mutex_unlock(&own->lock);
	return u;
}

static void drop_piece(struct s3_upload *u, struct s3_piece *p)
{
	if (p->p && u->late)
		atomic_fetch_sub((_Atomic uint64_t *)&u->own->late_bytes, u->piece_bytes);
	mem_free(p->p);
	p->p = NULL;
}

static void free_upload(struct s3_upload *u)
{
	each(p, u->pieces.v, u->pieces.n)
		drop_piece(u, p);
	vec_free(&u->pieces);
	vec_free(&u->parts);
	s3_entry_free(&u->base);
	pthread_mutex_destroy(&u->lock);
	mem_free(u);
}

/* Takes it out of the list. */
static void unlink_upload(struct s3_own *own, struct s3_upload *u)
{
	struct s3_upload **at = &own->uploads;

	while (*at && *at != u)
		at = &(*at)->next;
	if (*at)
		*at = u->next;
}

static void abandon(struct s3_upload *u)
{
	CLEANUP(err_restore) struct err_info info = *err_last();

	if (u->id[0] && s3_upload_abort(u->own->client, u->key, u->id, NULL))
		err_clear(); /* the sweep finds it */
	free_upload(u);
}

/* Somebody has the staging open. */
static bool is_open(const struct s3_own *own, const char *staging)
{
	each(t, own->things.v, own->things.n)
		if (*t && ((*t)->kind == S3_THING_STAGING || (*t)->meets) && strcmp((*t)->path, staging) == 0)
			return true;
	return false;
}

void s3_part_leave(struct s3_own *own, const char *staging)
{
	for (struct s3_upload *u = s3_part_next(own, staging, NULL); u; u = s3_part_next(own, staging, u)) {
		u->id[0] = '\0';
		u->is_spent = true;
	}
}

void s3_part_forget(struct s3_own *own, const char *staging, bool others)
{
	for (;;) {
		pthread_mutex_lock(&own->lock);
		struct s3_upload *u = own->uploads;
		while (u && ((strcmp(u->staging, staging) == 0) == others || u->handles || (others && is_open(own, u->staging))))
			u = u->next;
		if (u)
			unlink_upload(own, u);
		pthread_mutex_unlock(&own->lock);
		if (!u)
			return;
		abandon(u);
	}
}

/* Closes a handle. The last one frees the upload if that is finished and waits for no commit: it is an object by now. */
void s3_part_close(struct s3_upload *u)
{
	struct s3_own *own = u->own;

	pthread_mutex_lock(&own->lock);
	bool last = --u->handles == 0 && u->is_finished && !u->waits;
	if (last)
		unlink_upload(own, u);
	pthread_mutex_unlock(&own->lock);
	if (last)
		free_upload(u);
}

/* ---- opening ---- */

/* A copy brings the data of one attempt: its readers are shown no other's. */
static FALLIBLE enum err check_given(const struct s3_own *own, const char *staging, const char *name, uint64_t attempt)
{
	const char *rest;

	for (const struct s3_upload *u = own->uploads; u && attempt; u = u->next) {
		uint64_t other = u->waits && strcmp(u->staging, staging) == 0 ? s3_attempt_of(u->name, &rest) : 0;
		if (other && other != attempt)
			return ERR(UNSUPPORTED, "'%s' and '%s' are of two saves to an object storage and do not make one checkpoint",
				   u->name, name);
	}
	return OK;
}

/* The key of a file of a staging, and whether its object may be there before the commit. */
static FALLIBLE enum err set_key(struct s3_upload *u, const struct s3_thing *staging, const char *name)
{
	char own_name[S3_NAME_MAX + 32];
	const char *rest;

	u->waits = true;
	if (staging->repairs && !(staging->attempt && s3_is_side(name)))
		return s3_join(staging->target, name, u->key);
	if (staging->is_file && s3_is_side(name)) {
		u->waits = false;
		return s3_join(S3_MARKS "receipt", strrchr(staging->path, '/') ? strrchr(staging->path, '/') + 1 : staging->path, u->key);
	}
	if (staging->is_file)
		return s3_join(staging->target, "", u->key);
	uint64_t attempt = s3_attempt_of(name, &rest);
	u->waits = staging->repairs || (attempt != staging->attempt && !s3_is_side(name));
	TRY(u->waits && !staging->repairs ? check_given(u->own, u->staging, name, attempt) : OK);
	if (s3_is_side(name) && staging->attempt) {
		snprintf(own_name, sizeof own_name, ".dcpd-%0*jx-%s", S3_ATTEMPT_DIGITS, (uintmax_t)staging->attempt, name);
		name = own_name;
	}
	return s3_join(staging->target, name, u->key);
}

static FALLIBLE enum err new_upload(struct s3_own *own, const struct s3_thing *staging, const char *name, unsigned flags,
				    struct s3_upload **out)
{
	struct s3_upload *u = mem_zalloc(1, sizeof *u);

	NEED(u, "no memory for an upload");
	u->own = own;
	u->repairs = staging->repairs;
	u->late = flags & STORE_LATE || u->repairs; /* a repair writes over what it has copied */
	snprintf(u->staging, sizeof u->staging, "%s", staging->path);
	enum err e = OK;
	if ((size_t)snprintf(u->name, sizeof u->name, "%s", name) >= sizeof u->name)
		e = ERR(NAME_INVALID, "a file name of %zu bytes", strlen(name));
	e = e ?: set_key(u, staging, name);
	if (e) {
		mem_free(u);
		return e;
	}
	pthread_mutex_init(&u->lock, NULL);
	if (staging->attempt || !u->repairs)
		s3_attempt_mark(S3_MARK_COMMIT, staging->attempt, u->mark);
	if (u->mark[0] && u->repairs)
		s3_attempt_mark("r", s3_attempt_at(staging->path), u->mark + strlen(u->mark));
	u->next = own->uploads;
	own->uploads = u;
	*out = u;
	return OK;
}

enum err s3_part_open(struct store_at at, const char *name, unsigned flags, struct store_at *out)
{
	struct s3_own *own = s3_own(at.store);
	const struct s3_thing *staging = s3_thing_at(at);
	struct s3_thing *thing = mem_zalloc(1, sizeof *thing);
	struct s3_upload *u;

	NEED(thing, "no memory for an open file");
	thing->kind = S3_THING_PART;
	pthread_mutex_lock(&own->lock);
	u = find(own, staging->path, name);
	enum err e = OK;
	if (u && flags & STORE_NEW)
		e = ERR(CHECKPOINT_EXISTS, "'%s' is there", name);
	else if (!u)
		e = new_upload(own, staging, name, flags, &u);
	if (!e)
		u->handles++;
	pthread_mutex_unlock(&own->lock);
	thing->upload = u;
	if (!e)
		return s3_thing_open(at.store, &thing, out);
	mem_free(thing);
	return err_at_file(e, name, -1);
}

/* ---- pieces ---- */

/* Of piece i; the last one of a file whose size is not known yet is as long as the others. */
static uint64_t piece_length(const struct s3_upload *u, uint64_t i)
{
	uint64_t begin = i * u->piece_bytes;

	return u->is_sized ? num_min(u->piece_bytes, u->bytes > begin ? u->bytes - begin : 0) : u->piece_bytes;
}

static void set_piece_bytes(struct s3_upload *u)
{
	uint64_t least = u->bytes / PIECES_MAX;

	if (!u->piece_bytes)
		u->piece_bytes = num_max(PIECE, (least + ((1 << 20) - 1)) & ~(uint64_t)((1 << 20) - 1));
}

static FALLIBLE enum err piece_at(struct s3_upload *u, uint64_t i, struct s3_piece **out)
{
	if (i >= S3_PARTS_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d parts", S3_PARTS_MAX);
	while (u->pieces.n <= i) {
		struct s3_piece *p;
		TRY(vec_push(&u->pieces, &p));
	}
	*out = &u->pieces.v[i];
	return OK;
}

/* Counts the bytes of piece i that are the base's. */
static uint64_t base_bytes(const struct s3_upload *u, uint64_t i)
{
	uint64_t begin = i * u->piece_bytes;

	return u->base.key && u->base.bytes > begin ? num_min(piece_length(u, i), u->base.bytes - begin) : 0;
}

static FALLIBLE enum err piece_room(struct s3_upload *u, struct s3_piece *p, uint64_t i)
{
	uint64_t n = base_bytes(u, i);

	if (p->p)
		return OK;
	if (u->repairs && atomic_load((_Atomic uint64_t *)&u->own->late_bytes) + u->piece_bytes > LATE_MAX)
		return ERR(UNSUPPORTED, "too much of the file is damaged to be repaired in an object storage: %ju MiB are kept in memory",
			   (uintmax_t)(LATE_MAX >> 20));
	if (u->late && atomic_load((_Atomic uint64_t *)&u->own->late_bytes) + u->piece_bytes > LATE_MAX)
		return ERR(UNSUPPORTED, "the format needs its first bytes written last, and so all of the file in memory: more than %ju "
			   "MiB is not written so to an object storage; use another format, or another storage and a copy",
			   (uintmax_t)(LATE_MAX >> 20));
	p->p = mem_zalloc(1, u->piece_bytes);
	NEED(p->p, "no memory for %ju bytes of a file", (uintmax_t)u->piece_bytes);
	if (u->late)
		atomic_fetch_add((_Atomic uint64_t *)&u->own->late_bytes, u->piece_bytes);
	enum err e = n ? s3_get(u->own->client, u->base.key, i * u->piece_bytes, p->p, n, u->base.etag, NULL, NULL) : OK;
	if (e)
		drop_piece(u, p); /* who tries again does not take the zeros for the base's bytes */
	return e;
}

/* Is the file one object of one PUT? Small ones that wait for the commit stay in memory. */
static bool is_small(const struct s3_upload *u)
{
	return !u->id[0] && u->bytes <= (u->waits && !u->late ? WAITING_MAX : u->piece_bytes);
}

/* Under the lock: one thread begins the upload. */
static FALLIBLE enum err begin(struct s3_upload *u)
{
	return u->id[0] ? OK : s3_upload_begin(u->own->client, u->key, u->mark[0] ? u->mark : NULL, NULL, u->id);
}

/* Sends bytes as part i; not under the lock. */
static FALLIBLE enum err send_part(struct s3_upload *u, uint64_t i, const void *bytes, size_t n)
{
	struct s3_part part, *at;

	pthread_mutex_lock(&u->lock);
	enum err e = begin(u);
	pthread_mutex_unlock(&u->lock);
	e = e ?: s3_upload_part(u->own->client, u->key, u->id, (uint32_t)i + 1, bytes, n, NULL, &part);
	TRY(e);
	pthread_mutex_lock(&u->lock);
	e = vec_push(&u->parts, &at);
	if (!e)
		*at = part;
	pthread_mutex_unlock(&u->lock);
	return e;
}

/* Takes in what a write brings of one piece. *bytes_out: all bytes of the piece are there, and are the caller's to send; *own_out: to be
 * freed. */
static FALLIBLE enum err gather(struct s3_upload *u, uint64_t i, uint64_t skip, const void *from, size_t n, const void **bytes_out,
				void **own_out)
{
	uint64_t length = piece_length(u, i);
	struct s3_piece *p;

	*bytes_out = *own_out = NULL;
	TRY(piece_at(u, i, &p));
	bool early = !u->late && !is_small(u);
	if (early && n == length && !p->p && !p->sent) {
		p->sent = true;
		*bytes_out = from;
		return OK;
	}
	if (p->sent)
		return ERR(INTERNAL, "bytes of a file are written twice");
	TRY(piece_room(u, p, i));
	memcpy(p->p + skip, from, n);
	p->have += n;
	if (early && p->have >= length) {
		p->sent = true;
		*bytes_out = *own_out = p->p;
		p->p = NULL;
	}
	return OK;
}

enum err s3_part_write(struct store_at file, const void *from, size_t n, uint64_t offset, const char *name)
{
	struct s3_upload *u = s3_thing_at(file)->upload;
	uint64_t end;

	TRY(num_add(offset, n, &end));
	while (n) {
		CLEANUP(mem_free_ptr) void *own = NULL;
		const void *bytes;
		pthread_mutex_lock(&u->lock);
		set_piece_bytes(u);
		uint64_t i = offset / u->piece_bytes, skip = offset % u->piece_bytes;
		size_t part = (size_t)num_min(n, u->piece_bytes - skip);
		if (!u->is_sized && end > u->bytes)
			u->bytes = end;
		enum err e = u->is_finished ? ERR(INTERNAL, "bytes of a file are written behind its end")
					    : gather(u, i, skip, from, part, &bytes, &own);
		pthread_mutex_unlock(&u->lock);
		if (!e && bytes)
			e = send_part(u, i, bytes, piece_length(u, i));
		if (e)
			return err_at_file(e, name[0] ? name : u->name, (int64_t)offset);
		from = (const char *)from + part;
		offset += part;
		n -= part;
	}
	return OK;
}

enum err s3_part_resize(struct store_at file, uint64_t bytes, const char *name)
{
	struct s3_upload *u = s3_thing_at(file)->upload;

	(void)name;
	pthread_mutex_lock(&u->lock);
	u->bytes = bytes;
	u->is_sized = true;
	pthread_mutex_unlock(&u->lock);
	return OK;
}

/* ---- the end ---- */

/* Piece i as it lies in the base. */
static FALLIBLE enum err send_base(struct s3_upload *u, uint64_t i)
{
	struct s3_part part, *at;

	TRY(begin(u));
	TRY(s3_upload_part_copy(u->own->client, u->key, u->id, (uint32_t)i + 1, u->base.key, u->base.etag, i * u->piece_bytes,
				piece_length(u, i), NULL, &part));
	TRY(vec_push(&u->parts, &at));
	*at = part;
	return OK;
}

/* Sends what was not: pieces that were written by halves, those of the base, zeros where nothing was. */
static FALLIBLE enum err send_rest(struct s3_upload *u)
{
	uint64_t count = num_max(1, num_div_up(u->bytes, u->piece_bytes));
	struct s3_piece *p;

	for (uint64_t i = 0; i < count; i++) {
		TRY(piece_at(u, i, &p));
		if (p->sent)
			continue;
		if (!p->p && base_bytes(u, i) && base_bytes(u, i) == piece_length(u, i)) {
			TRY(send_base(u, i));
		} else {
			TRY(piece_room(u, p, i));
			TRY(send_part(u, i, p->p, piece_length(u, i)));
		}
		p = &u->pieces.v[i];
		drop_piece(u, p);
		p->sent = true; /* not before: who tries again sends what failed */
	}
	return OK;
}

static int by_number(const void *a, const void *b)
{
	return num_order(((const struct s3_part *)a)->number, ((const struct s3_part *)b)->number);
}

enum err s3_part_park(struct s3_upload *u)
{
	if (u->bytes == 0)
		return OK;
	TRY(err_at_file(send_rest(u), u->name, -1));
	qsort(u->parts.v, u->parts.n, sizeof *u->parts.v, by_number);
	return OK;
}

/* All bytes of a small file. */
static FALLIBLE enum err small_bytes(struct s3_upload *u, struct s3_piece **out)
{
	TRY(piece_at(u, 0, out));
	return piece_room(u, *out, 0);
}

static FALLIBLE enum err put_small(struct s3_upload *u, struct s3_condition condition, const struct s3_call *call)
{
	const char *mark = u->mark[0] ? u->mark : NULL;
	struct s3_piece *p;

	if (u->bytes == 0)
		return s3_put(u->own->client, u->key, "", 0, condition, mark, call, NULL);
	TRY(small_bytes(u, &p));
	return s3_put(u->own->client, u->key, p->p, u->bytes, condition, mark, call, NULL);
}

enum err s3_part_complete(struct s3_upload *u, struct s3_condition condition)
{
	const struct s3_call call = { .unsure_out = &u->unsure };
	enum err e;

	if (is_small(u))
		e = put_small(u, condition, &call);
	else
		e = s3_upload_complete(u->own->client, u->key, u->id, u->parts.v, u->parts.n, condition, &call, NULL);
	if (!e)
		u->id[0] = '\0'; /* there is no upload to abort any more */
	u->is_spent = u->is_spent || !e;
	return err_at_file(e, u->name, -1);
}

enum err s3_part_finish(struct store_at *file, bool durable, const char *name)
{
	struct s3_upload *u = s3_thing_at(*file)->upload;
	enum err e = OK;

	(void)durable; /* whatever S3 says it has is */
	pthread_mutex_lock(&u->lock);
	set_piece_bytes(u);
	u->is_sized = true; /* what was streamed ends here: its last part is no longer than its bytes */
	pthread_mutex_unlock(&u->lock);
	if (u->is_finished)
		e = ERR(INTERNAL, "'%s' was finished before", name);
	if (!e && !is_small(u))
		e = send_rest(u);
	if (u->parts.n)
		qsort(u->parts.v, u->parts.n, sizeof *u->parts.v, by_number);
	if (!e && !u->waits)
		e = s3_part_complete(u, S3_ALWAYS);
	u->is_finished = !e;
	store_close(file);
	return err_at_file(e, name[0] ? name : "", -1);
}

enum err s3_part_adopt(struct store_at staging, const char *name, struct s3_entry *from)
{
	CLEANUP(store_close) struct store_at at = STORE_NOTHING;
	struct s3_piece *p;

	enum err e = s3_part_open(staging, name, STORE_WRITE | STORE_NEW, &at);
	if (e) {
		s3_entry_free(from);
		return e;
	}
	struct s3_upload *u = s3_thing_at(at)->upload;
	u->bytes = from->bytes;
	u->base = *from;
	*from = (struct s3_entry){ 0 };
	set_piece_bytes(u);
	u->is_sized = true;
	if (u->waits && u->bytes && is_small(u)) /* the part goes before the commit that this file waits for */
		TRY(err_at_file(small_bytes(u, &p), name, -1));
	return s3_part_finish(&at, true, name);
}

/* ---- copies on the server ---- */

void s3_parts_free(struct s3_parts *p)
{
	vec_free(p);
}

static FALLIBLE enum err copy_parts(struct s3 *s3, const struct s3_entry *from, const char *to, const char *id,
				    struct s3_condition condition)
{
	CLEANUP(s3_parts_free) struct s3_parts all = { 0 };
	struct s3_part *part;

	for (uint64_t at = 0; at < from->bytes; at += COPY_MAX) {
		TRY(vec_push(&all, &part));
		TRY(s3_upload_part_copy(s3, to, id, (uint32_t)all.n, from->key, from->etag, at, num_min(COPY_MAX, from->bytes - at), NULL,
					part));
	}
	return s3_upload_complete(s3, to, id, all.v, all.n, condition, NULL, NULL);
}

enum err s3_copy_object(struct s3 *s3, const struct s3_entry *from, const char *to, const char *mark, struct s3_condition condition)
{
	char id[S3_UPLOAD_ID_MAX];

	if (from->bytes == 0)
		return s3_put(s3, to, "", 0, condition, mark, NULL, NULL);
	if (from->bytes <= COPY_MAX && condition.is == S3_IF_ANY)
		return s3_copy(s3, from->key, from->etag, to, mark, NULL, NULL);
	TRY(s3_upload_begin(s3, to, mark, NULL, id));
	enum err e = copy_parts(s3, from, to, id, condition);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		if (s3_upload_abort(s3, to, id, NULL))
			err_clear(); /* the sweep finds it */
	}
	return e;
}

/* A small file is sent as fast as it is copied. */
enum err s3_part_link(struct store_at of, const char *of_name, const struct stat *is, struct store_at to, const char *name)
{
	const struct s3_thing *from = s3_thing_at(of), *staging = s3_thing_at(to);
	const struct s3_entry *e = from->folder ? s3_folder_find(from->folder, of_name) : NULL;
	const char *rest;
	char key[S3_PATH_MAX], mark[65];
	struct stat st;

	if (staging->kind != S3_THING_STAGING || staging->is_file || s3_attempt_of(name, &rest) != staging->attempt || rest != name ||
	    is->st_size < LINK_MIN)
		return ERR(UNSUPPORTED, "'%s' is not copied on the server", name);
	if (!e)
		return s3_missing(of_name);
	s3_stat_file(e, &st);
	if (st.st_size != is->st_size || st.st_mtim.tv_sec != is->st_mtim.tv_sec || st.st_mtim.tv_nsec != is->st_mtim.tv_nsec)
		return ERR(CHECKPOINT_REPLACED, "'%s' is no longer the file that was saved", of_name);
	TRY(s3_join(staging->target, name, key));
	s3_attempt_mark(S3_MARK_COMMIT, staging->attempt, mark);
	return err_at_file(s3_copy_object(s3_own(to.store)->client, e, key, mark, S3_ALWAYS), name, -1);
}
