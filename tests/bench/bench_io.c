/* bench_io.c: what the parts of a save cost by themselves, one JSON line per figure:
 *
 *     bench_io DIR [MIB]
 *
 * memcpy, the digests (hot in cache and from memory), and a sequential O_DIRECT write of MIB (default 512) from shared memory
 * to a preallocated file in DIR with fsync, by each engine, for several depths and block sizes, each also with digests on the
 * way. Memory is touched before the clock starts. Several rounds over all cases in turn, so that a noisy minute hits them all
 * alike; the median is shown with the best and the worst. "In L2" is a window of 256 KiB: for CRC32 alone it is not, since its
 * non-temporal reads leave nothing there; its own speed shows in L1. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench.h"
#include "base/mem.h"
#include "base/str.h"
#include "io/digest.h"
#include "io/engine.h"
#include "os/fs.h"
#include "os/seg.h"

enum { RUNS = 5, DEPTH_MAX = 8, CASES_MAX = 64 };

static const struct seg_owner nobody;

static void check(enum err e)
{
	if (e == OK)
		return;
	fprintf(stderr, "bench_io: %s (%s)\n", err_last()->text, err_last()->place);
	exit(1);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void show(const char *name, uint64_t bytes, double seconds[RUNS])
{
	double g = (double)bytes / 1e9;

	qsort(seconds, RUNS, sizeof *seconds, by_value);
	printf("{\"name\":\"%s\",\"unit\":\"GB/s\",\"median\":%.3f,\"best\":%.3f,\"worst\":%.3f,\"runs\":%d}\n", name,
	       g / seconds[RUNS / 2], g / seconds[0], g / seconds[RUNS - 1], RUNS);
	fflush(stdout);
}

/* Keeps results alive. */
static volatile uint64_t sink;

enum digest_kind { CRC, XXH, BOTH };

static void digest_some(enum digest_kind kind, const unsigned char *p, size_t n)
{
	struct digest d = { .crc32 = 0 };

	if (kind == CRC) {
		d.crc32 = digest_crc32(0, p, n);
	} else if (kind == XXH) {
		digest_xxh3(p, n, d.xxh3_128);
	} else {
		digest_block(p, n, &d);
	}
	sink += d.crc32 + d.xxh3_128[0];
}

struct memory_case {
	const char *name;
	enum digest_kind kind;
	size_t window;                 /* bytes gone over again and again; 0: all, from memory */
};

static double time_digest(const struct memory_case *c, const unsigned char *p, size_t n)
{
	size_t window = c->window ? c->window : n;
	double t = now();

	for (size_t done = 0; done < n; done += window)
		digest_some(c->kind, p, window);
	return now() - t;
}

static double time_memcpy(unsigned char *to, const unsigned char *p, size_t n)
{
	double t = now();

	memcpy(to, p, n);
	t = now() - t;
	sink += to[n / 2];
	return t;
}

static void bench_memory(const unsigned char *p, size_t n)
{
	static const struct memory_case cases[] = {
		{ "crc32 in L1", CRC, 8 << 10 }, { "crc32 in L2", CRC, 256 << 10 }, { "crc32 from memory", CRC, 0 },
		{ "xxh3_128 in L1", XXH, 8 << 10 }, { "xxh3_128 in L2", XXH, 256 << 10 }, { "xxh3_128 from memory", XXH, 0 },
		{ "digest_block in L2", BOTH, 256 << 10 }, { "digest_block from memory", BOTH, 0 },
	};
	enum { N = sizeof cases / sizeof *cases };
	double s[N + 1][RUNS];
	unsigned char *to = mem_alloc(n);

	if (!to)
		return;
	memset(to, 1, n);
	for (int r = 0; r < RUNS; r++) {
		s[N][r] = time_memcpy(to, p, n);
		for (int i = 0; i < N; i++)
			s[i][r] = time_digest(&cases[i], p, n);
	}
	mem_free(to);
	show("memcpy", n, s[N]);
	for (int i = 0; i < N; i++)
		show(cases[i].name, n, s[i]);
}

struct write_case {
	struct io_engine *e;
	const unsigned char *p;
	size_t bytes, block;
	int fd;
	bool digests;
};

static void finish_one(struct io_engine *e, struct io_op **op_out)
{
	check(io_wait(e, op_out));
	if ((*op_out)->error)
		check(io_report(*op_out));
}

/* The pipeline of a save: digest a block, hand it to the engine, go on with the next while there is a slot. */
static void write_all(const struct write_case *c)
{
	struct io_op ops[DEPTH_MAX], *op;
	uint32_t made = 0;

	for (size_t at = 0; at < c->bytes; at += c->block) {
		if (c->digests)
			digest_some(BOTH, c->p + at, c->block);
		if (io_engine_free_slots(c->e) == 0)
			finish_one(c->e, &op);
		else
			op = &ops[made++];
		*op = (struct io_op){ .kind = IO_WRITE, .fd = c->fd, .buf = (void *)(uintptr_t)(c->p + at),
				      .bytes = c->block, .offset = at };
		check(io_submit(c->e, op));
	}
	while (io_in_flight(c->e))
		finish_one(c->e, &op);
	check(fs_fsync(c->fd, "bench"));
}

struct write_kind {
	enum io_engine_kind engine;
	uint32_t depth;
	size_t block;
	bool digests;
	const char *engine_name;       /* NULL: not to be had here */
	double seconds[RUNS];
};

static double time_write(int dir, struct write_kind *k, const unsigned char *p, size_t n)
{
	struct write_case c = { NULL, p, n, k->block, -1, k->digests };
	char file[64];

	if (io_engine_open(k->engine, k->depth, &c.e))
		return 0;
	k->engine_name = io_engine_name(c.e);
	snprintf(file, sizeof file, ".bench-io-%d", (int)getpid());
	check(fs_open(dir, file, O_RDWR | O_CREAT | O_EXCL | (fs_direct_ok(dir) ? O_DIRECT : 0), 0600, &c.fd));
	double t = now();
	check(fs_allocate(c.fd, c.bytes, file));
	write_all(&c);
	t = now() - t;
	check(fs_close(&c.fd));
	check(fs_unlink(dir, file));
	io_engine_close(c.e);
	return t;
}

static void bench_writes(int dir, const unsigned char *p, size_t n)
{
	static const uint32_t depths[] = { 1, 4, 8 };
	static const size_t blocks[] = { 1 << 20, 4 << 20, 8 << 20 };
	static struct write_kind kinds[CASES_MAX];
	int count = 0;
	char name[128];

	for (int e = 0; e < 2; e++)
		for (int d = 0; d < 3; d++)
			for (int b = 0; b < 6; b++)
				kinds[count++] = (struct write_kind){ .engine = e ? IO_THREADS : IO_URING, .depth = depths[d],
								      .block = blocks[b % 3], .digests = b >= 3 };
	for (int r = 0; r < RUNS; r++)
		for (int i = 0; i < count; i++)
			kinds[i].seconds[r] = time_write(dir, &kinds[i], p, n);
	for (int i = 0; i < count; i++) {
		if (!kinds[i].engine_name)
			continue;
		snprintf(name, sizeof name, "write %s depth %" PRIu32 " block %zu MiB%s", kinds[i].engine_name, kinds[i].depth,
			 kinds[i].block >> 20, kinds[i].digests ? " with digests" : "");
		show(name, n, kinds[i].seconds);
	}
}

int main(int argc, char **argv)
{
	char name[SEG_NAME_MAX];
	struct seg_map m;
	uint64_t mib = 512;
	int fd, dir;

	if (argc < 2 || argc > 3 || (argc == 3 && (!str_to_u64(str_of(argv[2]), &mib) || mib % 8 || mib > 65536 || !mib))) {
		fprintf(stderr, "usage: bench_io DIR [MIB, a multiple of 8]\n");
		return 2;
	}
	check(fs_open_root(argv[1], &dir));
	check(seg_create(&nobody, mib << 20, name, &fd));
	check(seg_unlink(name));
	check(seg_allocate(fd, 0, mib << 20));
	check(seg_map(fd, mib << 20, true, &m));
	for (uint64_t i = 0; i < m.bytes / 8; i++)
		((uint64_t *)(void *)m.p)[i] = i * 0x9E3779B97F4A7C15ull;
	bench_memory(m.p, m.bytes);
	bench_writes(dir, m.p, m.bytes);
	seg_unmap(&m);
	return 0;
}
