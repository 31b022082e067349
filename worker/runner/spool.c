/* spool.c: see spool.h. */
#include "runner/spool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/num.h"
#include "format/transform.h"
#include "os/fs.h"
#include "tensor/box.h"

enum { SPOOL_MEMORY_MAX = 32 << 20, PIECE = 256 << 10, ITEM_PAGE = 4096, ITEM_MORE = 64 << 20, VALUE_MAX = 1 << 30 };

struct spool {
	struct job *job;
	struct checkpoint *c;
	bool digested;                 /* what the manifest has a digest of stays */
	int fd;
	bool in_memory;
	uint64_t used;
	unsigned char *in, *out;
	struct sd_origin *origins;     /* of what is spooled; room for all */
	uint32_t origin_count;
};

/* A file without a name on a root that can be written: the target's, or any. */
static FALLIBLE enum err open_on_disk(struct job *j, int *fd_out)
{
	enum err e = ERR(STORAGE_READONLY, "no storage of the job can hold a spool file");
	const struct str target = j->spec.target.storage;
	const struct store *own;

	if (target.p && stores_find(&j->worker->stores, target.p, &own) == OK && own->top >= 0 && own->ops->scratch &&
	    own->ops->scratch(own, fd_out) == OK)
		return OK;
	each(s, j->worker->stores.v, j->worker->stores.count) {
		if (s->top < 0 || !s->ops->scratch)
			continue;
		e = s->ops->scratch(s, fd_out);
		if (!e)
			return OK;
	}
	return e;
}

/* Moves the spooled bytes to the disk when they outgrow memory. */
static FALLIBLE enum err move_to_disk(struct spool *s)
{
	int fd = -1;

	TRY(open_on_disk(s->job, &fd));
	for (uint64_t at = 0; at < s->used; at += PIECE) {
		size_t n = (size_t)num_min(PIECE, s->used - at);
		enum err e = fs_pread(s->fd, s->out, n, at, "spool");
		e = e ?: fs_pwrite(fd, s->out, n, at, "spool");
		if (e) {
			fs_drop(&fd);
			return e;
		}
	}
	if (dup3(fd, s->fd, O_CLOEXEC) < 0) {
		fs_drop(&fd);
		return ERR_SYS(SYSTEM, "cannot move a spool file");
	}
	fs_drop(&fd);
	s->in_memory = false;
	return OK;
}

static FALLIBLE enum err put(struct spool *s, const void *p, size_t n)
{
	if (s->in_memory && s->used + n > SPOOL_MEMORY_MAX) {
		CLEANUP(mem_free_ptr) void *copy = mem_alloc(n);
		NEED(copy, "no memory for a spool");
		memcpy(copy, p, n);
		TRY(move_to_disk(s));
		TRY(fs_pwrite(s->fd, copy, n, s->used, "spool"));
	} else {
		TRY(fs_pwrite(s->fd, p, n, s->used, "spool"));
	}
	return num_add(s->used, n, &s->used);
}

/* A few bytes of input can give as much output as one likes: `most` is what the item may become. */
static FALLIBLE enum err undo(struct spool *s, struct store_at from, struct str descriptors, const struct sd_loc *loc, uint64_t most)
{
	CLEANUP(transform_free_ptr) struct transform *t = NULL;
	struct str in = { NULL, 0 };
	uint64_t at = 0, begin = s->used;
	const struct manifest *m = s->c->manifest;
	const struct manifest_item *item = m ? manifest_find(m, s->c->sd->files[loc->file].name, loc->offset, loc->length) : NULL;
	struct manifest_check check;

	if (item && item->raw)
		manifest_check_begin(&check, m->digests.v + item->digest_at, item->digest_count);
	TRY(transform_new(descriptors, &t));
	while (!transform_done(t)) {
		size_t got = 0;
		if (in.n == 0 && at < loc->length) {
			size_t n = (size_t)num_min(PIECE, loc->length - at);
			TRY(store_read(from, s->in, n, loc->offset + at, ""));
			in = (struct str){ (char *)s->in, n };
			at += n;
			if (item && item->raw)
				TRY(manifest_check_add(&check, s->in, n, at == loc->length));
		}
		size_t had = in.n;
		TRY(transform_feed(t, &in, s->out, PIECE, &got));
		if (got == 0 && in.n == had && at == loc->length) /* all is in, and nothing is left inside */
			TRY(transform_end(t));
		if (got > most - (s->used - begin))
			return ERR(LIMIT_EXCEEDED, "the item becomes more than %ju bytes", (uintmax_t)most);
		TRY(put(s, s->out, got));
		TRY(job_tick(s->job));
	}
	return OK;
}

static FALLIBLE enum err spool_loc(struct spool *s, struct str fqn, struct sd_loc *loc, uint32_t file, uint64_t most)
{
	struct str name = s->c->sd->files[loc->file].name;
	uint64_t begin;
	struct store_at from;

	TRY(num_align(s->used, ITEM_PAGE, &begin));
	s->used = begin;
	enum err e = checkpoint_open_file(s->c, loc->file, &from);
	if (!e) {
		e = undo(s, from, s->c->sd->transforms[loc->transform - 1], loc, most);
		store_close(&from);
	}
	if (e)
		return err_at_fqn(err_at_file(e, name.p, (int64_t)loc->offset), fqn.p, fqn.n);
	s->origins[s->origin_count] = (struct sd_origin){ loc->file, loc->offset };
	*loc = (struct sd_loc){ .file = file, .transform = SD_SPOOLED | s->origin_count++, .offset = begin, .length = s->used - begin };
	return OK;
}

static bool stays(const struct spool *s, const struct sd_loc *loc)
{
	const struct manifest *m = s->digested ? s->c->manifest : NULL;

	return !sd_is_transformed(*loc) || !loc->length ||
	       (m && manifest_covering(m, s->c->sd->files[loc->file].name, loc->offset, loc->length));
}

static FALLIBLE enum err spool_chunk(struct spool *s, struct sd_chunk *c, uint32_t file)
{
	const struct sd_tensor *t = &s->c->sd->tensors[c->tensor];
	uint64_t numel, bytes;

	if (stays(s, &c->loc))
		return OK;
	TRY(box_numel(t->ndim, sd_sizes(c, t->ndim), &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	TRY(num_add(bytes, ITEM_MORE, &bytes)); /* the archive around it, or a storage that is larger than the tensor */
	return spool_loc(s, t->fqn, &c->loc, file, bytes);
}

static FALLIBLE enum err spool_all(struct spool *s, uint32_t file)
{
	struct sdict *sd = s->c->sd;

	for (uint64_t i = 0; i < sd->chunk_count; i++)
		TRY(checkpoint_lose(s->c, &sd->chunks[i].loc, CHECKED_PAYLOAD, spool_chunk(s, &sd->chunks[i], file)));
	each(v, sd->values, sd->value_count) {
		if (v->kind == SD_VALUE_STORED && !stays(s, &v->loc))
			TRY(checkpoint_lose(s->c, &v->loc, CHECKED_VALUE, spool_loc(s, v->fqn, &v->loc, file, VALUE_MAX)));
	}
	return OK;
}

enum err spool_transforms(struct job *j, struct checkpoint *c, bool digested)
{
	struct spool s = { .job = j, .c = c, .digested = digested, .in_memory = true };
	uint32_t file, fd_index;

	if (c->sd->transform_count == 0)
		return OK;
	s.fd = memfd_create("dcpd-spool", MFD_CLOEXEC);
	if (s.fd < 0)
		return ERR_SYS(SYSTEM, "cannot make a spool");
	enum err e = job_add_fd(j, s.fd, &fd_index);
	if (e) {
		fs_drop(&s.fd);
		return e;
	}
	TRY(sdict_add_file(c->sd, STR(""), fd_index, &file));
	TRY(arena_alloc(c->sd->arena, c->sd->chunk_count + c->sd->value_count + 1, sizeof *s.origins, &s.origins));
	c->sd->origins = s.origins;
	s.in = mem_alloc(PIECE);
	s.out = mem_alloc(PIECE);
	e = s.in && s.out ? spool_all(&s, file) : ERR(NO_MEMORY, "no memory for a spool");
	mem_free(s.in);
	mem_free(s.out);
	if (e)
		return e;
	uint64_t *more = mem_grow(c->file_bytes, c->sd->file_count, sizeof *more);
	NEED(more, "no memory for %ju files", (uintmax_t)c->sd->file_count);
	c->file_bytes = more;
	more[file] = s.used;
	return OK;
}

enum err spool_new(struct job *j, uint64_t bytes, uint32_t *fd_index_out)
{
	int fd = -1;

	if (bytes > SPOOL_MEMORY_MAX)
		TRY(open_on_disk(j, &fd));
	else if ((fd = memfd_create("dcpd-spool", MFD_CLOEXEC)) < 0)
		return ERR_SYS(SYSTEM, "cannot make a spool");
	enum err e = job_add_fd(j, fd, fd_index_out);
	if (e)
		fs_drop(&fd);
	return e;
}
