/* dcp.c: the C library (see dcp.h): the engine's look-ups behind opaque types. One open checkpoint is one parsed `struct checkpoint`, which
 * nothing changes any more, and a stack of idle readers: a reader is what one thread needs during a call (an I/O engine), so that
 * threads share no more than the structure and the list of what is unverified. */
#include "api/c/dcp.h"

#include <locale.h>
#include <pthread.h>

#include "base/jval.h"
#include "base/num.h"
#include "os/fs.h"
#include "runner/part_read.h"
#include "store/posix.h"
#include "tensor/box.h"

enum { IO_DEPTH = 32, IDLE_MAX = 16 };
static const uint64_t READER_BYTES = 64 << 20; /* of buffers, for bytes that the page cache does not hold */
#define ROOT "checkpoint"                      /* the only storage of a reader: the checkpoint's directory itself */

struct reader {
	struct reader *next;
	struct worker worker;
};

struct dcp_checkpoint {
	struct checkpoint *stored;
	int fd;
	pthread_mutex_t lock;
	const json_t *noted;           /* in `checked`: the warning that opening gave; NULL: none */
	struct stores stores;          /* the directory; readers, which come and go, have one each */
	struct reader *idle;           /* under the lock, as what follows */
	uint32_t idle_count;
	struct checked checked;
};

/* ------------------------------------------------------------------------------------------------------- errors */

/* The engine reads and writes numbers as in C, and its messages are English, whatever the host has chosen. */
static locale_t enter(void)
{
	locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* static, never fails */

	return uselocale(c);
}

static dcp_status status_of(enum err e)
{
	switch (e) {
	case OK:
		return DCP_OK;
	case ERR_VALIDATION_FAILED:
	case ERR_RANGE_INVALID:
		return DCP_INVALID;
	case ERR_NOT_FOUND:
		return DCP_NOT_FOUND;
	case ERR_FORMAT_UNSUPPORTED:
	case ERR_DTYPE_UNSUPPORTED:
	case ERR_UNSUPPORTED:
		return DCP_UNSUPPORTED;
	case ERR_STORAGE_IO:
	case ERR_STORAGE_GONE:
	case ERR_STORAGE_STALLED:
	case ERR_STORAGE_FULL:
	case ERR_STORAGE_READONLY:
	case ERR_FORBIDDEN:
		return DCP_IO;
	case ERR_COVERAGE_HOLE:
	case ERR_NAME_INVALID: /* a link, or a name that leads out of the directory */
		return DCP_DAMAGED;
	case ERR_NO_MEMORY:
		return DCP_NO_MEMORY;
	default:
		return checked_is_damage(e) ? DCP_DAMAGED : DCP_FAILED;
	}
}

static dcp_status leave(locale_t host, enum err e)
{
	uselocale(host);
	return status_of(e);
}

const char *dcp_version(void)
{
	return DCPD_VERSION;
}

const char *dcp_error_code(void)
{
	return err_last()->code ? err_code_name(err_last()->code) : "";
}

const char *dcp_error_message(void)
{
	return err_last()->text;
}

const char *dcp_error_file(void)
{
	return err_last()->file;
}

int64_t dcp_error_offset(void)
{
	return err_last()->offset;
}

const char *dcp_error_fqn(void)
{
	return err_last()->fqn;
}

int64_t dcp_error_rank(void)
{
	return err_last()->rank;
}

/* ------------------------------------------------------------------------------------------------------- readers */

static void reader_free(struct reader *r)
{
	if (r)
		io_engine_close(r->worker.io);
	mem_free(r);
}

/* root_fd stays the caller's. */
static void set_store(struct stores *s, int root_fd)
{
	s->v[0] = (struct store){ .name = ROOT, .ops = &posix_ops, .top = root_fd };
	s->count = 1;
}

static FALLIBLE enum err reader_new(int root_fd, struct reader **out)
{
	struct reader *r = mem_zalloc(1, sizeof *r);

	NEED(r, "no memory for a reader");
	struct worker *w = &r->worker;
	set_store(&w->stores, root_fd);
	w->count = 1;
	w->memory_bytes = READER_BYTES;
	w->lookup = true;
	enum err e = io_engine_open(IO_AUTO, IO_DEPTH, &w->io);
	if (e) {
		mem_free(r);
		return e;
	}
	*out = r;
	return OK;
}

static FALLIBLE enum err take_reader(dcp_checkpoint *c, struct reader **out)
{
	pthread_mutex_lock(&c->lock);
	struct reader *r = c->idle;
	if (r) {
		c->idle = r->next;
		c->idle_count--;
	}
	pthread_mutex_unlock(&c->lock);
	*out = r;
	return r ? OK : reader_new(c->fd, out);
}

/* Gives the reader back; what it learnt about bytes goes to the checkpoint. */
static void put_reader(dcp_checkpoint *c, struct reader *r, const struct checked *learnt)
{
	pthread_mutex_lock(&c->lock);
	checked_add(&c->checked, learnt);
	bool keep = c->idle_count < IDLE_MAX;
	if (keep) {
		r->next = c->idle;
		c->idle = r;
		c->idle_count++;
	}
	pthread_mutex_unlock(&c->lock);
	if (!keep)
		reader_free(r);
}

/* ------------------------------------------------------------------------------------------------- open and close */

static FALLIBLE enum err open_directory(const char *path, int *fd_out)
{
	enum err e = fs_open_root(path, fd_out);
	struct err_info why = *err_last();

	if (e == ERR_STORAGE_GONE && (why.sys_errno == ENOENT || why.sys_errno == ENOTDIR))
		return ERR(NOT_FOUND, "there is no directory '%s'", path);
	if (e)
		err_record(e, why.sys_errno, ERR_PLACE, "cannot open '%s'", path);
	return e;
}

static FALLIBLE enum err recognise(int fd, const char *path)
{
	enum format format;

	TRY(checkpoint_format_of_dir(posix_at(fd), &format));
	if (format == FORMAT_NONE)
		return ERR(CHECKPOINT_INCOMPLETE, "'%s' has no .metadata: it is no checkpoint, or not a complete one", path);
	if (!format_is_dcp(format) && format != FORMAT_DCP_RANK_LOCAL)
		return ERR(FORMAT_UNSUPPORTED, "'%s' is in %s format, this library reads dcp: dcpctl reshard makes one of the other", path,
			   format_name(format));
	return OK;
}

/* dcp_tensor_bytes cannot fail later. */
static FALLIBLE enum err check_sizes(const struct sdict *sd)
{
	each(t, sd->tensors, sd->tensor_count) {
		uint64_t n;
		enum err e = box_numel(t->ndim, t->shape, &n);
		e = e ?: num_mul(n, dtype_bytes(t->dtype), &n);
		if (e)
			return err_at_fqn(e, t->fqn.p, t->fqn.n);
	}
	return OK;
}

static FALLIBLE enum err open_stored(dcp_checkpoint *c, const char *path)
{
	const struct ref ref = ref_checkpoint(ROOT, ".");

	TRY(open_directory(path, &c->fd));
	TRY(recognise(c->fd, path));
	set_store(&c->stores, c->fd);
	enum err e = checkpoint_open(&c->stores, &ref, &c->stored);
	TRY(e);
	checkpoint_note(c->stored, false, &c->checked);
	c->noted = json_array_get(c->checked.warnings, 0);
	return check_sizes(c->stored->sd);
}

dcp_status dcp_open(const char *path, dcp_checkpoint **out)
{
	locale_t host = enter();

	if (!path || !out)
		return leave(host, ERR(VALIDATION_FAILED, "an argument is NULL"));
	dcp_checkpoint *c = mem_zalloc(1, sizeof *c);
	if (!c)
		return leave(host, ERR(NO_MEMORY, "no memory for a checkpoint"));
	c->fd = -1;
	pthread_mutex_init(&c->lock, NULL);
	enum err e = open_stored(c, path);
	if (e) {
		struct err_info why = *err_last();
		dcp_close(c);
		err_restore(&why);
		return leave(host, e);
	}
	*out = c;
	return leave(host, OK);
}

void dcp_close(dcp_checkpoint *c)
{
	if (!c)
		return;
	while (c->idle) {
		struct reader *r = c->idle;
		c->idle = r->next;
		reader_free(r);
	}
	checkpoint_free(c->stored);
	checked_free(&c->checked);
	fs_drop(&c->fd);
	pthread_mutex_destroy(&c->lock);
	mem_free(c);
}

uint32_t dcp_world_size(const dcp_checkpoint *c)
{
	return c->stored->world_size;
}

/* ----------------------------------------------------------------------------------------------------- unverified */

const char *dcp_warning(const dcp_checkpoint *c)
{
	return jval_text(c->noted, "detail");
}

static pthread_mutex_t *lock_of(const dcp_checkpoint *c)
{
	return (pthread_mutex_t *)(uintptr_t)&c->lock;
}

uint64_t dcp_unverified_bytes(const dcp_checkpoint *c)
{
	pthread_mutex_lock(lock_of(c));
	uint64_t n = c->checked.unverified_bytes;
	pthread_mutex_unlock(lock_of(c));
	return n;
}

int dcp_unverified_at(const dcp_checkpoint *c, size_t i, const char **fqn, const char **file, uint64_t *offset, uint64_t *bytes)
{
	pthread_mutex_lock(lock_of(c)); /* the list may move; its entries stay */
	const json_t *entry = json_array_get(c->checked.unverified, i);
	pthread_mutex_unlock(lock_of(c));
	if (entry && fqn)
		*fqn = jval_text(entry, "fqn");
	if (entry && file)
		*file = jval_text(entry, "file");
	if (entry && offset)
		*offset = (uint64_t)jval_int(entry, "offset");
	if (entry && bytes)
		*bytes = (uint64_t)jval_int(entry, "bytes");
	return entry != NULL;
}

/* -------------------------------------------------------------------------------------------------------- verify */

static void tell_damage(const struct checked *checked, dcp_damage_fn on_damage, void *user)
{
	const json_t *entry;
	size_t i;

	json_array_foreach(checked->damage, i, entry) {
		const json_t *rank = json_object_get(entry, "rank");
		on_damage(user, jval_text(entry, "fqn"), json_is_integer(rank) ? (int64_t)json_integer_value(rank) : -1,
			  jval_text(entry, "file"), (uint64_t)jval_int(entry, "offset"), (uint64_t)jval_int(entry, "bytes"),
			  jval_text(entry, "detail"));
	}
}

/* Verifies all of the checkpoint; the findings are in j->checked. */
static FALLIBLE enum err run_verify(struct job *j)
{
	field_fallbacks(&j->spec);
	j->spec.source = ref_checkpoint(ROOT, ".");
	j->id = "verify";
	j->kind = JOB_VERIFY;
	return verify_job(j);
}

static FALLIBLE enum err verify_path(const char *path, struct job *j)
{
	CLEANUP(fs_drop) int fd = -1;
	struct reader *r = NULL;

	TRY(open_directory(path, &fd));
	TRY(recognise(fd, path));
	TRY(reader_new(fd, &r));
	j->worker = &r->worker;
	enum err e = run_verify(j);
	reader_free(r);
	return e;
}

dcp_status dcp_verify(const char *path, dcp_damage_fn on_damage, void *user, uint64_t *unverified_bytes)
{
	struct job j = { 0 };
	locale_t host = enter();

	enum err e = path ? verify_path(path, &j) : ERR(VALIDATION_FAILED, "an argument is NULL");
	struct err_info why = *err_last();
	if (unverified_bytes)
		*unverified_bytes = j.checked.unverified_bytes;
	uselocale(host); /* the callback is the host's */
	if (on_damage)
		tell_damage(&j.checked, on_damage, user);
	job_free(&j);
	if (e)
		err_restore(&why);
	return status_of(e);
}

/* -------------------------------------------------------------------------------------------------------- tensors
 *
 * A dcp_tensor is an sd_tensor, a dcp_value an sd_value, of the checkpoint's own sdict, which does not move any more. FQNs there end with a
 * NUL. */

static const struct sd_tensor *tensor_of(const dcp_tensor *t)
{
	return (const struct sd_tensor *)(const void *)t;
}

size_t dcp_tensor_count(const dcp_checkpoint *c)
{
	return c->stored->sd->tensor_count;
}

const dcp_tensor *dcp_tensor_at(const dcp_checkpoint *c, size_t i)
{
	return i < c->stored->sd->tensor_count ? (const void *)&c->stored->sd->tensors[i] : NULL;
}

const dcp_tensor *dcp_tensor_find(const dcp_checkpoint *c, const char *fqn)
{
	return fqn ? (const void *)sdict_tensor(c->stored->sd, str_of(fqn)) : NULL;
}

const char *dcp_tensor_fqn(const dcp_tensor *t)
{
	return tensor_of(t)->fqn.p;
}

const char *dcp_tensor_dtype(const dcp_tensor *t)
{
	return dtype_name(tensor_of(t)->dtype);
}

uint32_t dcp_tensor_element_bytes(const dcp_tensor *t)
{
	return dtype_bytes(tensor_of(t)->dtype);
}

uint32_t dcp_tensor_ndim(const dcp_tensor *t)
{
	return tensor_of(t)->ndim;
}

const int64_t *dcp_tensor_shape(const dcp_tensor *t)
{
	return tensor_of(t)->shape;
}

uint64_t dcp_tensor_bytes(const dcp_tensor *t)
{
	uint64_t n = dcp_tensor_element_bytes(t);

	for (uint32_t d = 0; d < dcp_tensor_ndim(t); d++) /* fits: see check_sizes */
		n *= (uint64_t)tensor_of(t)->shape[d];
	return n;
}

size_t dcp_tensor_chunk_count(const dcp_tensor *t)
{
	return tensor_of(t)->chunk_count;
}

int dcp_tensor_chunk(const dcp_checkpoint *c, const dcp_tensor *t, size_t i, const int64_t **offsets, const int64_t **sizes,
		     uint32_t *rank)
{
	if (i >= tensor_of(t)->chunk_count)
		return 0;
	const struct sd_chunk *k = &c->stored->sd->chunks[tensor_of(t)->first_chunk + i];
	if (offsets)
		*offsets = sd_offsets(k);
	if (sizes)
		*sizes = sd_sizes(k, tensor_of(t)->ndim);
	if (rank)
		*rank = k->rank;
	return 1;
}

static FALLIBLE enum err check_box(const struct sd_tensor *t, const int64_t *dims, size_t buffer_bytes)
{
	uint64_t bytes;

	for (uint32_t d = 0; d < t->ndim; d++) {
		int64_t offset = dims[d], size = dims[t->ndim + d];
		if (offset < 0 || size < 0 || size > t->shape[d] || offset > t->shape[d] - size)
			return ERR(RANGE_INVALID, "dim %u: %jd elements from %jd on are not inside the tensor's %jd", d, (intmax_t)size,
				   (intmax_t)offset, (intmax_t)t->shape[d]);
	}
	TRY(box_numel(t->ndim, dims + t->ndim, &bytes));
	TRY(num_mul(bytes, dtype_bytes(t->dtype), &bytes));
	if (buffer_bytes < bytes)
		return ERR(VALIDATION_FAILED, "a buffer of %zu bytes, %ju are needed", buffer_bytes, (uintmax_t)bytes);
	return OK;
}

static FALLIBLE enum err read_dims(dcp_checkpoint *c, const struct sd_tensor *t, const int64_t *dims, void *buffer, size_t buffer_bytes,
				   unsigned flags, uint64_t *unverified_bytes)
{
	struct part_box box = { .checkpoint = c->stored, .tensor = t, .dims = dims, .verify = !(flags & DCP_UNVERIFIED), .fd = -1,
				.memory = buffer };
	struct checked learnt = { 0 };
	struct reader *r;

	if (flags & ~(unsigned)DCP_UNVERIFIED)
		return ERR(VALIDATION_FAILED, "unknown flags %#x", flags);
	TRY(err_at_fqn(check_box(t, dims, buffer_bytes), t->fqn.p, t->fqn.n));
	TRY(take_reader(c, &r));
	enum err e = part_read_box(&r->worker, &box, &learnt);
	if (!e && unverified_bytes)
		*unverified_bytes = learnt.unverified_bytes;
	put_reader(c, r, &learnt);
	checked_free(&learnt);
	return e;
}

dcp_status dcp_read_slice(dcp_checkpoint *c, const dcp_tensor *t, const int64_t *offsets, const int64_t *sizes, void *buffer,
			  size_t buffer_bytes, unsigned flags, uint64_t *unverified_bytes)
{
	int64_t dims[2 * NDIM_MAX];
	locale_t host = enter();

	if (!c || !t || (!buffer && buffer_bytes) || (dcp_tensor_ndim(t) && (!offsets || !sizes)))
		return leave(host, ERR(VALIDATION_FAILED, "an argument is NULL"));
	uint32_t n = dcp_tensor_ndim(t);
	for (uint32_t d = 0; d < n; d++) {
		dims[d] = offsets[d];
		dims[n + d] = sizes[d];
	}
	return leave(host, read_dims(c, tensor_of(t), dims, buffer, buffer_bytes, flags, unverified_bytes));
}

dcp_status dcp_read(dcp_checkpoint *c, const dcp_tensor *t, void *buffer, size_t buffer_bytes, unsigned flags, uint64_t *unverified_bytes)
{
	static const int64_t zeros[NDIM_MAX];

	return dcp_read_slice(c, t, zeros, t ? tensor_of(t)->shape : NULL, buffer, buffer_bytes, flags, unverified_bytes);
}

/* --------------------------------------------------------------------------------------------------------- values */

static const struct sd_value *value_of(const dcp_value *v)
{
	return (const struct sd_value *)(const void *)v;
}

size_t dcp_value_count(const dcp_checkpoint *c)
{
	return c->stored->sd->value_count;
}

const dcp_value *dcp_value_at(const dcp_checkpoint *c, size_t i)
{
	return i < c->stored->sd->value_count ? (const void *)&c->stored->sd->values[i] : NULL;
}

const dcp_value *dcp_value_find(const dcp_checkpoint *c, const char *fqn)
{
	return fqn ? (const void *)sdict_value(c->stored->sd, str_of(fqn)) : NULL;
}

const char *dcp_value_fqn(const dcp_value *v)
{
	return value_of(v)->fqn.p;
}

static FALLIBLE enum err read_value(dcp_checkpoint *c, const struct sd_value *v, struct item_value *out)
{
	struct checked learnt = { 0 };
	struct reader *r;

	TRY(take_reader(c, &r));
	enum err e = part_read_value(&r->worker, c->stored, v, &learnt, out);
	put_reader(c, r, &learnt);
	checked_free(&learnt);
	return e;
}

dcp_status dcp_value_read(dcp_checkpoint *c, const dcp_value *v, dcp_value_kind *kind, char **text, size_t *text_bytes)
{
	static const dcp_value_kind kinds[] = {
		[ITEM_VALUE_JSON] = DCP_JSON, [ITEM_VALUE_BYTES] = DCP_BYTES, [ITEM_VALUE_OPAQUE] = DCP_OPAQUE,
	};
	struct item_value got;
	locale_t host = enter();

	if (!c || !v || !text)
		return leave(host, ERR(VALIDATION_FAILED, "an argument is NULL"));
	enum err e = read_value(c, value_of(v), &got);
	if (e)
		return leave(host, e);
	char *copy = mem_alloc(got.text.len + 1); /* malloc's: the host frees it */
	if (copy) {
		memcpy(copy, got.text.p, got.text.len);
		copy[got.text.len] = '\0';
		*text = copy;
		if (kind)
			*kind = kinds[got.kind];
		if (text_bytes)
			*text_bytes = got.text.len;
	}
	item_value_free(&got);
	return leave(host, copy ? OK : ERR(NO_MEMORY, "no memory for a value"));
}
