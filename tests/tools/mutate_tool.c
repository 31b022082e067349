/* mutate_tool.c: damages a checkpoint's files in many ways, and reads all of it in this process after each, as a worker reads it.
 *
 *     mutate_tool ROOT NAME COUNT SEED         → {"equal":N,"errors":N,"unverified":N,"codes":{…}}
 *
 * ROOT/NAME is a file or a directory of any format that dcpd reads; its files are put back in the end. After a mutation the data must be
 * equal to those before it, or there must be an error, or they must have been counted as unverified. Exit status 1: it was none of these,
 * memory grew beyond what the files account for, or a descriptor was left open; stderr says which mutation did it. A crash, and a mutation
 * that takes longer than CASE_SECONDS, end the process by a signal; the last line of stderr names the mutation. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/num.h"
#include "os/fs.h"
#include "runner/part_read.h"
#include "store/posix.h"

enum { FILES_MAX = 64, CASE_SECONDS = 20, TENSOR_MAX = 64 << 20, GROWTH_MAX = 192 << 20, WHAT_MAX = 1024, CHANGES_MAX = 3 };

struct file {
	char name[256];                /* below ROOT */
	unsigned char *bytes;
	size_t n;
};

struct outcome {
	enum err e;
	uint64_t unverified;
	unsigned char digest[16];      /* of names, shapes, dtypes and bytes */
};

static struct {
	struct worker w;
	struct file files[FILES_MAX];
	uint32_t count;
	uint64_t random;
	char what[WHAT_MAX];           /* the mutation, for people */
} t;

_Noreturn static void give_up(const char *why)
{
	fprintf(stderr, "%s: %s\n", why, t.what[0] ? t.what : err_last()->text);
	exit(1);
}

static uint64_t draw(uint64_t below)
{
	t.random ^= t.random << 13; /* xorshift64 */
	t.random ^= t.random >> 7;
	t.random ^= t.random << 17;
	return below ? t.random % below : 0;
}

/* ---------------------------------------------------------------------------------------------------------- reading */

static void add(struct digest_stream *s, const void *p, uint64_t n)
{
	digest_add(s, &n, sizeof n);
	digest_add(s, p, n);
}

static FALLIBLE enum err read_tensor(const struct checkpoint *c, const struct sd_tensor *tensor, struct checked *checked,
				     struct digest_stream *s)
{
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint64_t numel, bytes;
	enum dtype dtype = tensor->dtype;

	TRY(box_numel(tensor->ndim, tensor->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(tensor->dtype), &bytes));
	add(s, tensor->fqn.p, tensor->fqn.n);
	add(s, tensor->shape, tensor->ndim * sizeof *tensor->shape);
	add(s, &dtype, sizeof dtype);
	if (bytes > TENSOR_MAX) /* metadata that nothing vouches for may say so */
		return OK;
	CLEANUP(mem_free_ptr) void *into = mem_zalloc(1, bytes + 1);
	NEED(into, "no memory for a tensor");
	if (tensor->ndim)
		memcpy(dims + tensor->ndim, tensor->shape, tensor->ndim * sizeof *tensor->shape);
	const struct part_box box = { .checkpoint = c, .tensor = tensor, .dims = dims, .verify = true, .fd = -1, .memory = into };
	TRY(part_read_box(&t.w, &box, checked));
	add(s, into, bytes);
	return OK;
}

static FALLIBLE enum err read_value(const struct checkpoint *c, const struct sd_value *v, struct checked *checked, struct digest_stream *s)
{
	CLEANUP(item_value_free) struct item_value value = { 0 };

	add(s, v->fqn.p, v->fqn.n);
	TRY(part_read_value(&t.w, c, v, checked, &value));
	add(s, &value.kind, sizeof value.kind);
	add(s, value.text.p, value.text.len);
	return OK;
}

static FALLIBLE enum err read_open(const struct checkpoint *c, struct checked *checked, struct digest_stream *s)
{
	checkpoint_note(c, false, checked);
	for (uint64_t i = 0; i < c->sd->tensor_count; i++)
		TRY(read_tensor(c, &c->sd->tensors[i], checked, s));
	for (uint64_t i = 0; i < c->sd->value_count; i++)
		TRY(read_value(c, &c->sd->values[i], checked, s));
	return OK;
}

static struct outcome read_all(const char *name)
{
	const struct ref ref = { .kind = REF_CHECKPOINT, .storage = STR("main"), .name = str_of(name) };
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = NULL;
	struct checked checked = { 0 };
	struct outcome out = { 0 };
	struct digest_stream s;
	struct digest d;

	digest_begin_one(&s, DIGEST_XXH3);
	out.e = checkpoint_open(&t.w.stores, &ref, &c);
	if (!out.e)
		out.e = read_open(c, &checked, &s);
	digest_end(&s, &d);
	memcpy(out.digest, d.xxh3_128, sizeof out.digest);
	out.unverified = checked.unverified_bytes;
	checked_free(&checked);
	return out;
}

/* ------------------------------------------------------------------------------------------------------------ files */

static void write_file(const char *root, const char *name, const unsigned char *bytes, size_t n)
{
	char path[8192];

	snprintf(path, sizeof path, "%s/%s", root, name);
	FILE *f = fopen(path, "wb");
	if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0)
		give_up("cannot write a file");
}

static void load_file(const char *root, const char *name)
{
	struct file *f = &t.files[t.count++];
	char path[8192];
	struct stat st;

	must(t.count <= FILES_MAX && strlen(name) < sizeof f->name);
	snprintf(f->name, sizeof f->name, "%s", name);
	snprintf(path, sizeof path, "%s/%s", root, name);
	FILE *in = fopen(path, "rb");
	if (!in || fstat(fileno(in), &st) != 0)
		give_up("cannot read a file");
	f->n = (size_t)st.st_size;
	f->bytes = mem_alloc(f->n + 1);
	if (!f->bytes || fread(f->bytes, 1, f->n, in) != f->n)
		give_up("cannot read a file");
	fclose(in);
}

static void load(const char *root, const char *name)
{
	char path[8192], below[512];
	struct stat st;

	snprintf(path, sizeof path, "%s/%s", root, name);
	if (stat(path, &st) != 0)
		give_up("nothing is there");
	if (S_ISREG(st.st_mode)) {
		load_file(root, name);
		return;
	}
	DIR *d = opendir(path);
	for (struct dirent *e; d && (e = readdir(d));) {
		snprintf(below, sizeof below, "%s/%s", name, e->d_name);
		if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
			load_file(root, below);
	}
	if (d)
		closedir(d);
}

/* -------------------------------------------------------------------------------------------------------- mutations */

/* A file as it becomes; room for twice its bytes and a page. */
struct draft {
	unsigned char *p;
	size_t n, room;
};

static void flip(struct draft *d, size_t at)
{
	d->p[at] ^= (unsigned char)(1 << draw(8));
}

static void number(struct draft *d, size_t at)
{
	static const uint64_t numbers[] = { 0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, INT64_MAX,
					    UINT64_MAX, 1ull << 63, 1ull << 40 };
	uint64_t v = numbers[draw(sizeof numbers / sizeof *numbers)] + draw(3) - 1;
	size_t n = (size_t)1 << draw(4);

	memcpy(d->p + at, &v, num_min(n, d->n - at));
}

static void erase(struct draft *d, size_t at)
{
	size_t n = (size_t)num_min(1 + draw(draw(2) ? 8 : 4096), d->n - at);

	memmove(d->p + at, d->p + at + n, d->n - at - n);
	d->n -= n;
}

static void insert(struct draft *d, size_t at)
{
	size_t n = (size_t)num_min(1 + draw(draw(2) ? 8 : 4096), d->room - d->n);

	memmove(d->p + at + n, d->p + at, d->n - at);
	for (size_t i = 0; i < n; i++)
		d->p[at + i] = (unsigned char)(draw(2) ? draw(256) : '0' + draw(10));
	d->n += n;
}

/* Bytes of elsewhere in the file. */
static void copy(struct draft *d, size_t at)
{
	size_t from = (size_t)draw(d->n), n = (size_t)num_min(1 + draw(draw(2) ? 16 : 4096), d->n - num_max(at, from));

	memmove(d->p + at, d->p + from, n);
}

static void fill(struct draft *d, size_t at)
{
	memset(d->p + at, (int)(draw(2) ? 0 : draw(256)), (size_t)num_min(1 + draw(draw(2) ? 16 : 4096), d->n - at));
}

static void cut(struct draft *d, size_t at)
{
	d->n = at;
}

static const struct {
	const char *name;
	void (*change)(struct draft *d, size_t at);
} changes[] = { { "flip", flip }, { "flip", flip }, { "number", number }, { "number", number }, { "erase", erase }, { "insert", insert },
		{ "copy", copy }, { "fill", fill }, { "cut", cut } };

/* Heads and tails are where sizes and places are told. */
static size_t place(size_t n)
{
	uint64_t near = num_min(n, 512);

	switch (draw(4)) {
	case 0:
		return (size_t)draw(near);
	case 1:
		return n - 1 - (size_t)draw(near);
	default:
		return (size_t)draw(n);
	}
}

static void mutate(const struct file *f, uint64_t number_of, struct draft *d)
{
	uint64_t times = 1 + draw(CHANGES_MAX);
	size_t n = (size_t)snprintf(t.what, sizeof t.what, "case %ju: %s (%zu bytes)", (uintmax_t)number_of, f->name, f->n);

	memcpy(d->p, f->bytes, f->n);
	d->n = f->n;
	for (uint64_t i = 0; i < times && d->n; i++) {
		size_t which = (size_t)draw(sizeof changes / sizeof *changes), at = place(d->n);
		n += (size_t)snprintf(t.what + n, sizeof t.what - n, " %s@%zu", changes[which].name, at);
		changes[which].change(d, at);
	}
	fprintf(stderr, "%s\n", t.what); /* not buffered: the last line names the mutation of a crash */
}

/* ---------------------------------------------------------------------------------------------------------- the run */

static uint64_t peak_bytes(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return (uint64_t)u.ru_maxrss << 10;
}

static uint64_t open_files(void)
{
	DIR *d = opendir("/proc/self/fd");
	uint64_t n = 0;

	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n;
}

static void start(const char *root)
{
	t.w.stores.v[0] = (struct store){ .name = "main", .ops = &posix_ops };
	t.w.stores.count = t.w.count = 1;
	t.w.memory_bytes = 64 << 20;
	t.w.lookup = true;
	if (fs_open_root(root, &t.w.stores.v[0].top) || io_engine_open(IO_THREADS, 8, &t.w.io))
		give_up("cannot start");
}

struct tally {
	uint64_t equal, errors, unverified, codes[ERR_COUNT];
};

static void one_case(const char *root, const char *name, uint64_t number_of, const struct outcome *want, struct tally *tally)
{
	const struct file *f = &t.files[draw(t.count)];
	struct draft d = { .room = 2 * f->n + 4096 };

	if (f->n == 0)
		return;
	d.p = mem_alloc(d.room);
	must(d.p);
	mutate(f, number_of, &d);
	write_file(root, f->name, d.p, d.n);
	uint64_t before = peak_bytes();
	alarm(CASE_SECONDS);
	struct outcome got = read_all(name);
	alarm(0);
	if (got.e == ERR_INTERNAL || got.e == ERR_NO_MEMORY)
		give_up(err_last()->text);
	if (peak_bytes() - before > GROWTH_MAX)
		give_up("memory grew");
	bool equal = !got.e && memcmp(got.digest, want->digest, sizeof got.digest) == 0;
	if (!got.e && !equal && got.unverified == 0)
		give_up("other data, and all of them verified");
	tally->equal += equal;
	tally->errors += got.e != OK;
	tally->unverified += !got.e && !equal;
	tally->codes[got.e]++;
	write_file(root, f->name, f->bytes, f->n);
	mem_free(d.p);
}

static void print(const struct tally *tally)
{
	const char *comma = "";

	printf("{\"equal\":%ju,\"errors\":%ju,\"unverified\":%ju,\"codes\":{", (uintmax_t)tally->equal, (uintmax_t)tally->errors,
	       (uintmax_t)tally->unverified);
	for (int e = 1; e < ERR_COUNT; e++)
		if (tally->codes[e]) {
			printf("%s\"%s\":%ju", comma, err_code_name((enum err)e), (uintmax_t)tally->codes[e]);
			comma = ",";
		}
	puts("}}");
}

int main(int argc, char **argv)
{
	struct tally tally = { 0 };

	if (argc != 5)
		return 2;
	start(argv[1]);
	load(argv[1], argv[2]);
	t.random = strtoull(argv[4], NULL, 10) * 2 + 1;
	struct outcome want = read_all(argv[2]);
	if (want.e)
		give_up("the checkpoint cannot be read as it is");
	uint64_t files = open_files(), count = strtoull(argv[3], NULL, 10);
	for (uint64_t i = 0; i < count; i++)
		one_case(argv[1], argv[2], i, &want, &tally);
	if (open_files() != files)
		give_up("files were left open");
	print(&tally);
	return 0;
}
