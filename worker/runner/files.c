/* files.c: see files.h. */
#include "runner/files.h"

#include <sys/stat.h>

#include "base/mem.h"
#include "runner/spread.h"
#include "store/posix.h"

enum err files_open(struct run *run, const struct stores *stores, const int *fds, uint32_t fd_count, struct files *out)
{
	struct files f = { .run = run, .stores = stores, .fds = fds, .fd_count = fd_count };

	f.dirs = mem_zalloc(run->dirs_n, sizeof *f.dirs);
	f.opened = mem_zalloc(run->files_n, sizeof *f.opened);
	f.direct = mem_zalloc(run->files_n, sizeof *f.direct);
	f.refuses_direct = mem_zalloc(run->files_n, sizeof *f.refuses_direct);
	f.pins = mem_zalloc(run->files_n, sizeof *f.pins);
	f.under = mem_zalloc(run->files_n, sizeof *f.under);
	f.maps = mem_zalloc(run->files_n, sizeof *f.maps);
	*out = f;
	if (!f.dirs || !f.opened || !f.direct || !f.refuses_direct || !f.pins || !f.under || !f.maps) {
		files_close(out);
		return ERR(NO_MEMORY, "no memory for %ju files", (uintmax_t)run->files_n);
	}
	return OK;
}

/* Not one of the descriptors that came with the run. */
static bool is_stored(const struct files *f, uint64_t file)
{
	return f->run->files[file].kind == RUN_FILE_SOURCE || f->run->files[file].kind == RUN_FILE_TARGET;
}

void files_close(struct files *f)
{
	for (uint64_t i = 0; f->dirs && i < f->run->dirs_n; i++)
		store_close(&f->dirs[i]);
	for (uint64_t i = 0; f->opened && f->direct && f->maps && i < f->run->files_n; i++) {
		if (is_stored(f, i))
			store_close(&f->opened[i]);
		store_close(&f->direct[i]);
		seg_leave(f->leavings, &f->maps[i]);
	}
	mem_free(f->dirs);
	mem_free(f->opened);
	mem_free(f->direct);
	mem_free(f->refuses_direct);
	mem_free(f->pins);
	mem_free(f->under);
	mem_free(f->maps);
	*f = (struct files){ 0 };
}

static bool is_open(const struct store_at *at)
{
	return at->store && at->handle >= 0;
}

static FALLIBLE enum err enter_dir(struct files *f, uint32_t dir)
{
	const struct run_dir *d = &f->run->dirs[dir];
	struct str path = run_str(f->run, d->path_at, d->path_len);
	char z[4096];

	if (is_open(&f->dirs[dir]))
		return OK;
	if (path.n >= sizeof z)
		return ERR(NAME_INVALID, "a path of %zu bytes", path.n);
	memcpy(z, path.p, path.n);
	z[path.n] = '\0';
	return store_enter(store_top(&f->stores->v[d->root]), z, &f->dirs[dir]);
}

/* Closes the next file that nobody uses, in turn. */
static void make_room(struct files *f)
{
	uint32_t n = (uint32_t)f->run->files_n;

	for (uint32_t tried = 0; tried < n; tried++) {
		uint32_t i = f->clock = (f->clock + 1) % n;
		if (is_open(&f->opened[i]) && f->pins[i] == 0) {
			f->open_count -= 1 + is_open(&f->direct[i]);
			store_close(&f->opened[i]);
			store_close(&f->direct[i]);
			return;
		}
	}
}

static FALLIBLE enum err open_as(struct files *f, uint32_t file, unsigned flags, struct store_at *out)
{
	const struct run_file *rf = &f->run->files[file];
	struct str name = run_file_name(f->run, rf);
	char z[4096], label[ERR_FILE_MAX];

	if (name.n >= sizeof z)
		return ERR(NAME_INVALID, "a file name of %zu bytes", name.n);
	memcpy(z, name.p, name.n);
	z[name.n] = '\0';
	TRY(enter_dir(f, rf->dir));
	if (f->open_count >= FILES_OPEN_MAX)
		make_room(f);
	enum err e = store_open_file(f->dirs[rf->dir], z, flags, out);
	TRY(err_at_file(e, run_file_label(f->run, file, label), -1));
	f->open_count++;
	return OK;
}

static FALLIBLE enum err open_file(struct files *f, uint32_t file)
{
	const struct run_file *rf = &f->run->files[file];
	char label[ERR_FILE_MAX];

	unsigned flags = (rf->kind == RUN_FILE_TARGET ? STORE_WRITE : STORE_READ) | (rf->direct ? STORE_DIRECT : 0);
	TRY(open_as(f, file, flags, &f->opened[file]));
	if (rf->spread && !f->as_stored)
		spread_wrap(f, file, &f->opened[file]);
	/* without descriptors this process may know nothing of the part yet */
	const struct store_ops *ops = f->opened[file].store->ops;
	if (rf->kind != RUN_FILE_TARGET || rf->late || ops->fd_of)
		return OK;
	return ops->resize(f->opened[file], rf->bytes, run_file_label(f->run, file, label));
}

enum err files_pin(struct files *f, uint32_t file, struct store_at **out)
{
	const struct run_file *rf = &f->run->files[file];

	must(file < f->run->files_n);
	*out = &f->opened[file];
	if (!is_stored(f, file)) {
		must(rf->fd_index < f->fd_count);
		**out = posix_at(f->fds[rf->fd_index]);
		return OK;
	}
	if (!is_open(*out))
		TRY(open_file(f, file));
	f->pins[file]++;
	return OK;
}

void files_unpin(struct files *f, uint32_t file)
{
	if (!is_stored(f, file))
		return;
	f->pins[file]--;
	if (f->pins[file] == 0 && !is_open(&f->opened[file])) /* it was ended */
		f->open_count--;
}

/* A name may lead to another file by now than the one that was opened first. */
static bool is_same(int fd, int other)
{
	struct stat a, b;

	return fstat(fd, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

int files_direct(struct files *f, uint32_t file)
{
	struct store_at *at = &f->direct[file];
	struct err_info before = *err_last();

	if (f->refuses_direct[file] || f->run->files[file].kind != RUN_FILE_SOURCE || store_fd(f->opened[file]) < 0)
		return -1;
	if (!is_open(at)) {
		if (open_as(f, file, STORE_READ | STORE_DIRECT, at))
			err_restore(&before);
		f->refuses_direct[file] = !is_open(at) || !is_same(store_fd(*at), store_fd(f->opened[file]));
	}
	return f->refuses_direct[file] ? -1 : store_fd(*at);
}

void files_refuse_direct(struct files *f, uint32_t file)
{
	f->refuses_direct[file] = true;
}

bool files_spare_answers(struct files *f, uint32_t file)
{
	struct store_at *at;

	if (atomic_load(&f->run->files[file].gone))
		return false;
	if (files_pin(f, file, &at)) {
		err_clear();
		files_spare_gone(f, file);
		return false;
	}
	files_unpin(f, file);
	return true;
}

void files_spare_gone(struct files *f, uint32_t file)
{
	struct run *run = f->run;

	each(rf, run->files, run->files_n)
		if (rf->spare && rf->dir == run->files[file].dir)
			atomic_store(&rf->gone, 1);
}

/* With a NUL. */
static FALLIBLE enum err name_of(const struct run *run, uint32_t file, char out[ERR_FILE_MAX])
{
	struct str name = run_file_name(run, &run->files[file]);

	if (name.n >= ERR_FILE_MAX)
		return ERR(NAME_INVALID, "a file name of %zu bytes", name.n);
	memcpy(out, name.p, name.n);
	out[name.n] = '\0';
	return OK;
}

enum err files_make(struct files *f, uint32_t file)
{
	const struct run_file *rf = &f->run->files[file];
	char name[ERR_FILE_MAX];
	struct store_at at;

	TRY(name_of(f->run, file, name));
	TRY(enter_dir(f, rf->dir));
	TRY(store_open_file(f->dirs[rf->dir], name, STORE_WRITE | STORE_NEW, &at));
	const struct store_ops *ops = at.store->ops;
	enum err e = ops->extend ? ops->extend(at, rf->bytes, name) : ops->resize(at, rf->bytes, name);
	store_close(&at);
	return err_at_file(e, name, -1);
}

enum err files_link(struct files *f, uint32_t from, uint32_t to)
{
	const struct run_file *base = &f->run->files[from], *target = &f->run->files[to];
	char base_name[ERR_FILE_MAX], name[ERR_FILE_MAX];
	const struct stat is = { .st_size = (off_t)base->bytes, .st_mtim = { base->mtime_ns / 1000000000, base->mtime_ns % 1000000000 } };

	TRY(name_of(f->run, from, base_name));
	TRY(name_of(f->run, to, name));
	TRY(enter_dir(f, base->dir));
	TRY(enter_dir(f, target->dir));
	return f->dirs[target->dir].store->ops->link(f->dirs[base->dir], base_name, &is, f->dirs[target->dir], name);
}

enum err files_segment(struct files *f, uint32_t file, unsigned char **p_out)
{
	const struct run_file *rf = &f->run->files[file];

	if (rf->kind == RUN_FILE_MEMORY) {
		*p_out = NULL;
		return OK;
	}
	must(rf->kind == RUN_FILE_SEGMENT && rf->fd_index < f->fd_count);
	if (!f->maps[file].p)
		TRY(seg_map(f->fds[rf->fd_index], rf->bytes, rf->writable, &f->maps[file]));
	*p_out = f->maps[file].p;
	return OK;
}

enum err files_at(struct files *f, uint32_t file, uint64_t offset, unsigned char **p_out)
{
	const struct run_file *rf = &f->run->files[file];

	if (!rf->ring_bytes) {
		TRY(files_segment(f, file, p_out));
		*p_out += offset;
		return OK;
	}
	must(rf->fd_index < f->fd_count);
	if (!f->maps[file].p)
		TRY(seg_map_ring(f->fds[rf->fd_index], rf->ring_at, rf->ring_bytes, &f->maps[file]));
	*p_out = f->maps[file].p + offset % rf->ring_bytes;
	return OK;
}
