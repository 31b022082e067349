/* run.c: the shared tables of a planned job (see run.h). */
#include "runner/run.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/num.h"
#include "os/seg.h"

#define RUN_MAGIC 0x316e757264706364ull /* "dcpdrun1" */

void run_build_free(struct run_build *b)
{
#define X(type, name) vec_free(&b->name);
	RUN_TABLES(X)
#undef X
	vec_free(&b->record_parts);
}

enum err run_add_string(struct run_build *b, struct str s, uint64_t *at_out)
{
	TRY(vec_reserve(&b->strings, s.n));
	*at_out = b->strings.n;
	if (s.n)
		memcpy(b->strings.v + b->strings.n, s.p, s.n);
	b->strings.n += s.n;
	return OK;
}

enum err run_add_dims(struct run_build *b, const int64_t *dims, uint32_t ndim, uint64_t *at_out)
{
	TRY(vec_reserve(&b->dims, 2ull * ndim));
	*at_out = b->dims.n;
	if (ndim)
		memcpy(b->dims.v + b->dims.n, dims, 2ull * ndim * sizeof *dims);
	b->dims.n += 2ull * ndim;
	return OK;
}

enum err run_add_dir(struct run_build *b, uint32_t root, struct str path, uint32_t *index_out)
{
	struct run_dir *d;

	*index_out = (uint32_t)b->dirs.n;
	TRY(vec_push(&b->dirs, &d));
	d->root = root;
	d->path_len = (uint32_t)path.n;
	return run_add_string(b, path, &d->path_at);
}

enum err run_add_file(struct run_build *b, enum run_file_kind kind, uint32_t dir, struct str name, uint64_t bytes,
		      uint32_t *index_out)
{
	struct run_file *f;

	*index_out = (uint32_t)b->files.n;
	TRY(vec_push(&b->files, &f));
	f->kind = (uint8_t)kind;
	f->dir = dir;
	f->bytes = bytes;
	f->name_len = (uint32_t)name.n;
	return run_add_string(b, name, &f->name_at);
}

static void set_pointers(struct run *r)
{
	unsigned char *base = (unsigned char *)r->head;

#define X(type, name)                                \
	r->name = (type *)(base + r->head->name.at); \
	r->name##_n = r->head->name.n;
	RUN_TABLES(X)
#undef X
}

static FALLIBLE enum err map_run(int fd, uint64_t bytes, struct run *out)
{
	struct seg_map map;

	if (seg_map(fd, bytes, true, &map) != OK) {
		const struct err_info why = *err_last();
		return ERR(NO_MEMORY, "cannot map a run of %ju bytes: %.200s", (uintmax_t)bytes, why.text);
	}
	*out = (struct run){ .head = (void *)map.p, .bytes = bytes, .fd = fd };
	return OK;
}

static FALLIBLE enum err make_run(uint64_t bytes, struct run *out)
{
	int fd = memfd_create("dcpd-run", MFD_CLOEXEC);

	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot make a memfd for the run");
	enum err e = ftruncate(fd, (off_t)bytes) < 0
			     ? ERR_SYS(NO_MEMORY, "cannot size a run of %ju bytes", (uintmax_t)bytes)
			     : map_run(fd, bytes, out);
	if (e)
		close(fd);
	return e;
}

enum err run_share(const struct run_build *b, struct run *out)
{
	struct run_table tables[32];
	uint64_t at = sizeof(struct run_head);
	unsigned i = 0;

#define X(type, name)                                                                    \
	tables[i] = (struct run_table){ (at + 15) & ~15ull, b->name.n };                 \
	at = tables[i].at + tables[i].n * sizeof(type);                                  \
	i++;
	RUN_TABLES(X)
#undef X
	uint64_t room_at = num_div_up(at, MEM_HUGE_PAGE) * MEM_HUGE_PAGE, bytes = b->room ? room_at + b->room : at;
	TRY(make_run(bytes, out));
	if (b->room && seg_allocate(out->fd, room_at, b->room) != OK)
		err_clear(); /* pages come as they are touched */
	out->head->magic = RUN_MAGIC;
	out->head->total_bytes = bytes;
	out->head->room_at = room_at;
	out->head->opts = b->opts;
	i = 0;
#define X(type, name) out->head->name = tables[i++];
	RUN_TABLES(X)
#undef X
	set_pointers(out);
#define X(type, name)     \
	if (b->name.n)    \
		memcpy(out->name, b->name.v, b->name.n * sizeof(type));
	RUN_TABLES(X)
#undef X
	return OK;
}

static bool table_fits(struct run_table t, uint64_t item, uint64_t bytes)
{
	return t.at % 16 == 0 && t.at >= sizeof(struct run_head) && t.at <= bytes && t.n <= (bytes - t.at) / item;
}

static bool tables_fit(const struct run *r)
{
	bool fit = true;

#define X(type, name) fit = fit && table_fits(r->head->name, sizeof(type), r->bytes);
	RUN_TABLES(X)
#undef X
	return fit;
}

enum err run_attach(int fd, struct run *out)
{
	off_t size = lseek(fd, 0, SEEK_END);

	if (size < (off_t)sizeof(struct run_head))
		return ERR(PROTOCOL, "a run of %jd bytes", (intmax_t)size);
	TRY(map_run(fd, (uint64_t)size, out));
	if (out->head->magic != RUN_MAGIC || out->head->total_bytes != (uint64_t)size || !tables_fit(out)) {
		out->fd = -1;
		run_detach(out);
		return ERR(PROTOCOL, "not a run");
	}
	set_pointers(out);
	return OK;
}

void run_detach(struct run *r)
{
	if (r->head)
		munmap(r->head, r->bytes);
	if (r->head && r->fd >= 0)
		close(r->fd);
	*r = (struct run){ .fd = -1 };
}

struct str run_str(const struct run *r, uint64_t at, uint64_t len)
{
	must(num_inside(at, len, r->strings_n));
	return (struct str){ r->strings + at, len };
}

uint64_t run_file_span(const struct run_file *f)
{
	return f->ring_bytes ? f->ring_at + f->ring_bytes + 4096 : f->bytes;
}

const char *run_file_label(const struct run *r, uint32_t file, char room[ERR_FILE_MAX])
{
	const struct run_file *f = &r->files[file];
	struct str name = run_file_name(r, f), dir = { "", 0 }, own = { "", 0 };

	if (f->kind == RUN_FILE_SOURCE)
		own = run_str(r, r->dirs[f->dir].path_at, r->dirs[f->dir].path_len);
	for (uint64_t i = 0; i < r->dirs_n && own.n; i++)
		if (r->dirs[i].is_source && !str_eq(run_str(r, r->dirs[i].path_at, r->dirs[i].path_len), own))
			dir = own; /* one directory may be here several times: once for each rank's own part */
	snprintf(room, ERR_FILE_MAX, "%.*s%s%.*s", (int)num_min(dir.n, ERR_FILE_MAX), dir.p, dir.n ? "/" : "",
		 (int)num_min(name.n, ERR_FILE_MAX), name.p);
	return room;
}

bool run_take_task(struct run *r, uint32_t index, uint32_t count, uint64_t *task_out)
{
	uint64_t begin = r->ranks_n * index / count;
	enum run_takers takers = r->head->opts.takers;

	if (takers == RUN_TAKE_FIRST && index)
		return false;
	for (uint64_t i = 0; i < r->ranks_n; i++) {
		uint64_t rank = (begin + i) % r->ranks_n;
		struct run_rank *k = &r->ranks[rank];
		if (takers == RUN_TAKE_OWN && rank % count != index)
			continue;
		if (atomic_load_explicit(&k->next_task, memory_order_relaxed) >= k->task_count)
			continue;
		uint64_t t = atomic_fetch_add(&k->next_task, 1);
		if (t < k->task_count) {
			*task_out = k->first_task + t;
			return true;
		}
	}
	return false;
}

/* Writes one rank's tasks all of each file? */
static bool files_have_one_rank(const struct run *r, uint32_t *rank_of)
{
	for (uint64_t i = 0; i < r->tasks_n; i++) {
		const struct run_task *t = &r->tasks[i];
		for (uint64_t b = t->first; !t->scan && b < t->first + t->count; b++) {
			uint32_t *of = &rank_of[r->blocks[b].file];
			if (*of && *of != t->rank_index + 1)
				return false;
			*of = t->rank_index + 1;
		}
	}
	return true;
}

enum err run_write_whole_files(struct run *r)
{
	CLEANUP(mem_free_ptr) uint32_t *rank_of = mem_zalloc(r->files_n, sizeof *rank_of);
	bool late = false;

	NEED(rank_of, "no memory for %ju files", (uintmax_t)r->files_n);
	each(f, r->files, r->files_n)
		late = late || f->late; /* the leader ends it */
	bool apart = r->head->opts.mode == RUN_WRITE_FILES && r->gates_n == 0 && !late && files_have_one_rank(r, rank_of);
	r->head->opts.takers = apart ? RUN_TAKE_OWN : RUN_TAKE_FIRST;
	return OK;
}

uint64_t run_bytes_done(const struct run *r)
{
	uint64_t sum = 0;

	for (uint64_t i = 0; i < r->ranks_n; i++)
		sum += atomic_load_explicit(&r->ranks[i].bytes_done, memory_order_relaxed);
	return sum;
}

uint64_t run_bytes_total(const struct run *r)
{
	uint64_t sum = 0;

	for (uint64_t i = 0; i < r->ranks_n; i++)
		sum += r->ranks[i].bytes_total;
	return sum;
}

static void keep_larger(_Atomic uint64_t *at, uint64_t v)
{
	uint64_t old = atomic_load(at);

	while (v > old && !atomic_compare_exchange_weak(at, &old, v))
		;
}

/* Doubles that are not negative sort like their bits. */
static void keep_larger_double(_Atomic uint64_t *at, double v)
{
	uint64_t bits;

	memcpy(&bits, &v, sizeof bits);
	keep_larger(at, bits);
}

void run_note_stats(struct run *r, uint64_t scan, const struct stats *s, const uint64_t *bins)
{
	uint32_t tensor = r->srcs[r->scans[scan].src].stats;
	struct run_stats *t = &r->stats[tensor];

	atomic_fetch_add(&t->count, s->count);
	atomic_fetch_add(&t->nan_count, s->nan_count);
	atomic_fetch_add(&t->inf_count, s->inf_count);
	atomic_fetch_add(&t->zero_count, s->zero_count);
	keep_larger(&t->min_key, s->min_key);
	keep_larger(&t->max_key, s->max_key);
	if (r->sums_n)
		r->sums[scan] = s->sums;
	for (unsigned b = 0; r->bins_n && b < STATS_BINS; b++)
		if (bins[b])
			atomic_fetch_add(&r->bins[(uint64_t)tensor * STATS_BINS + b], bins[b]);
}

void run_note_difference(struct run_src *src, const struct stats_diff *diff)
{
	uint64_t first = diff->first + 1, old = atomic_load(&src->diff_first);

	atomic_fetch_add(&src->diff_count, diff->count);
	while ((old == 0 || first < old) && !atomic_compare_exchange_weak(&src->diff_first, &old, first))
		;
	keep_larger_double(&src->diff_max_abs, diff->max_abs);
	keep_larger_double(&src->diff_max_rel, diff->max_rel);
}
