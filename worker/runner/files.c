/* files.c: see files.h. */
#include "runner/files.h"

#include <fcntl.h>

#include "base/mem.h"
#include "base/num.h"
#include "os/fs.h"

enum err files_open(struct run *run, const int *root_fds, const int *fds, uint32_t fd_count, struct files *out)
{
	struct files f = { .run = run, .root_fds = root_fds, .fds = fds, .fd_count = fd_count };

	f.dir_fds = mem_zalloc(run->dirs_n, sizeof *f.dir_fds);
	f.file_fds = mem_zalloc(run->files_n, sizeof *f.file_fds);
	f.pins = mem_zalloc(run->files_n, sizeof *f.pins);
	f.maps = mem_zalloc(run->files_n, sizeof *f.maps);
	*out = f;
	if (!f.dir_fds || !f.file_fds || !f.pins || !f.maps) {
		files_close(out);
		return ERR(NO_MEMORY, "no memory for %ju files", (uintmax_t)run->files_n);
	}
	for (uint64_t i = 0; i < run->dirs_n; i++)
		f.dir_fds[i] = -1;
	for (uint64_t i = 0; i < run->files_n; i++)
		f.file_fds[i] = -1;
	return OK;
}

void files_close(struct files *f)
{
	for (uint64_t i = 0; f->dir_fds && i < f->run->dirs_n; i++)
		fs_drop(&f->dir_fds[i]);
	for (uint64_t i = 0; f->file_fds && f->maps && i < f->run->files_n; i++) {
		fs_drop(&f->file_fds[i]);
		seg_unmap(&f->maps[i]);
	}
	mem_free(f->dir_fds);
	mem_free(f->file_fds);
	mem_free(f->pins);
	mem_free(f->maps);
	*f = (struct files){ 0 };
}

static FALLIBLE enum err files_dir(struct files *f, uint32_t dir, int *fd_out)
{
	const struct run_dir *d = &f->run->dirs[dir];
	struct str path = run_str(f->run, d->path_at, d->path_len);
	char z[4096];

	if (f->dir_fds[dir] < 0) {
		if (path.n >= sizeof z)
			return ERR(NAME_INVALID, "a path of %zu bytes", path.n);
		memcpy(z, path.p, path.n);
		z[path.n] = '\0';
		TRY(fs_open_dir(f->root_fds[d->root], path.n ? z : ".", &f->dir_fds[dir]));
	}
	*fd_out = f->dir_fds[dir];
	return OK;
}

/* Closes the next file that nobody uses, in turn. */
static void make_room(struct files *f)
{
	uint32_t n = (uint32_t)f->run->files_n;

	for (uint32_t tried = 0; tried < n; tried++) {
		uint32_t i = f->clock = (f->clock + 1) % n;
		if (f->file_fds[i] >= 0 && f->pins[i] == 0) {
			fs_drop(&f->file_fds[i]);
			f->open_count--;
			return;
		}
	}
}

static FALLIBLE enum err open_file(struct files *f, uint32_t file)
{
	const struct run_file *rf = &f->run->files[file];
	struct str name = run_file_name(f->run, rf);
	int flags = rf->kind == RUN_FILE_TARGET ? O_RDWR : O_RDONLY, dirfd;
	char z[4096];

	if (name.n >= sizeof z)
		return ERR(NAME_INVALID, "a file name of %zu bytes", name.n);
	memcpy(z, name.p, name.n);
	z[name.n] = '\0';
	TRY(files_dir(f, rf->dir, &dirfd));
	if (f->open_count >= FILES_OPEN_MAX)
		make_room(f);
	enum err e = fs_open(dirfd, z, flags | (rf->direct ? O_DIRECT : 0), 0, &f->file_fds[file]);
	if (e)
		return err_at_file(e, z, -1);
	f->open_count++;
	return OK;
}

enum err files_pin(struct files *f, uint32_t file, int *fd_out)
{
	const struct run_file *rf = &f->run->files[file];

	must(file < f->run->files_n);
	if (rf->kind == RUN_FILE_SPOOL || rf->kind == RUN_FILE_SEGMENT) {
		must(rf->fd_index < f->fd_count);
		*fd_out = f->fds[rf->fd_index];
		return OK;
	}
	if (f->file_fds[file] < 0)
		TRY(open_file(f, file));
	f->pins[file]++;
	*fd_out = f->file_fds[file];
	return OK;
}

void files_unpin(struct files *f, uint32_t file)
{
	if (f->run->files[file].kind == RUN_FILE_SOURCE || f->run->files[file].kind == RUN_FILE_TARGET)
		f->pins[file]--;
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
