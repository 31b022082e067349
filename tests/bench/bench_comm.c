/* bench_comm.c: what a collective takes, between real processes of this host.
 *
 *     bench_comm --backend shm --op all_gather --ranks 4 --bytes 67108864 --runs 9 [--source private|window|mapped]
 *
 * One JSON line: seconds (median over the runs; a run takes as long as its slowest member), bytes moved between members, CPU seconds of
 * all members. --bytes: of each rank (of the root, for broadcast). Each member ends with a private, writable copy in warm pages, which
 * is compared with what was sent after the last run. --source: where the input lies: in the member's own memory, in shared memory that
 * all know (as the tensors of a state dict do), or there and mapped read-only by the others instead of being copied. */
#include <getopt.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"

enum { RANKS = 16, RUNS = 4096, MEETS = 8, COLUMNS = 64, ITEM = 4 };
enum op { ALL_GATHER, BROADCAST, GATHER, REDISTRIBUTE, OPS };
enum source { PRIVATE, WINDOW, MAPPED, SOURCES };

static const char *const op_names[OPS] = { "all_gather", "broadcast", "gather", "redistribute" };
static const char *const source_names[SOURCES] = { "private", "window", "mapped" };

static struct {
	enum comm_backend backend;
	enum op op;
	enum source source;
	uint32_t ranks, runs;
	uint64_t bytes;
} want = { COMM_SHM, ALL_GATHER, PRIVATE, 4, 9, 64 << 20 };

static struct shared {
	_Atomic uint32_t met[MEETS], good;
	unsigned char notes[MEETS][RANKS][COMM_RENDEZVOUS_BYTES];
	double seconds[RANKS][RUNS], cpu[RANKS];
	struct comm_counts counts[RANKS];
} *shared;

static struct comm_spec spec;
static unsigned char *sources;        /* WINDOW and MAPPED: every member's part */
static int sources_fd;

static _Noreturn void fail(const char *what)
{
	fprintf(stderr, "bench_comm: rank %u: %s: %s\n", spec.rank, what, err_last()->text);
	exit(1);
}

static double now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static enum err meet(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all)
{
	uint32_t round = (*(uint32_t *)user)++ % MEETS;

	memcpy(shared->notes[round][spec.rank], mine, COMM_RENDEZVOUS_BYTES);
	atomic_fetch_add(&shared->met[round], 1);
	while (atomic_load(&shared->met[round]) < want.ranks)
		usleep(200);
	for (uint32_t r = 0; r < want.ranks; r++)
		memcpy(all + (size_t)r * COMM_RENDEZVOUS_BYTES, shared->notes[round][r], COMM_RENDEZVOUS_BYTES);
	return OK;
}

static void fill(unsigned char *p, uint32_t rank)
{
	uint64_t x = rank + 1;

	for (uint64_t i = 0; i < want.bytes; i += sizeof x) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		memcpy(p + i, &x, want.bytes - i < sizeof x ? want.bytes - i : sizeof x);
	}
}

static unsigned char *private_memory(uint64_t bytes)
{
	unsigned char *p = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		fail("no memory");
	memset(p, 0xEE, bytes);
	return p;
}

static bool receives(uint32_t rank)
{
	return want.op != GATHER || rank == 0;
}

static uint64_t out_bytes(void)
{
	return want.op == BROADCAST || want.op == REDISTRIBUTE ? want.bytes : want.bytes * want.ranks;
}

/* Rows → columns: from every member a box of its rows and of this member's columns. */
static enum err redistribute(struct comm *c, const unsigned char *in, unsigned char *out)
{
	struct comm_box boxes[RANKS * RANKS];
	const int64_t width = COLUMNS * ITEM, pitch = width * want.ranks;
	const int64_t rows = (int64_t)want.bytes / pitch;
	const int64_t sizes[2] = { rows, COLUMNS }, from[2] = { pitch, ITEM }, to[2] = { width, ITEM };

	for (uint32_t i = 0; i < want.ranks * want.ranks; i++) {
		uint32_t a = i / want.ranks, b = i % want.ranks;
		boxes[i] = (struct comm_box){ .from = a, .to = b, .ndim = 2, .item_bytes = ITEM, .sizes = sizes, .src_strides = from,
					      .dst_strides = to, .src = in + b * width, .dst = out + a * rows * width };
	}
	return comm_all_to_all(c, boxes, want.ranks * want.ranks);
}

static enum err run_once(struct comm *c, unsigned char *in, unsigned char *out)
{
	uint64_t parts[RANKS];

	if (want.source == MAPPED) {
		/* The others' memory is there already: what is left is to know that it is complete, and to look at it. */
		TRY(comm_barrier(c));
		void *p = mmap(NULL, want.bytes * want.ranks, PROT_READ, MAP_SHARED, sources_fd, 0);
		if (p == MAP_FAILED)
			return ERR_SYS(SYSTEM, "cannot map the sources");
		munmap(p, want.bytes * want.ranks);
		return OK;
	}
	if (want.op == BROADCAST)
		return comm_broadcast(c, spec.rank == 0 ? in : out, want.bytes, 0);
	if (want.op == ALL_GATHER)
		return comm_all_gather(c, in, want.bytes, out);
	if (want.op == REDISTRIBUTE)
		return redistribute(c, in, out);
	for (uint32_t r = 0; r < want.ranks; r++)
		parts[r] = want.bytes;
	return comm_gather(c, in, parts, out, 0);
}

/* Straight from the definition of each operation: what one member gave, after the other. */
static void check(const unsigned char *out)
{
	const uint64_t width = COLUMNS * ITEM, pitch = width * want.ranks, rows = want.bytes / pitch;
	unsigned char *part = private_memory(want.bytes);
	bool same = true;

	for (uint32_t r = 0; r < (want.op == BROADCAST ? 1 : want.ranks); r++) {
		fill(part, r);
		if (want.op != REDISTRIBUTE)
			same = same && memcmp(out + r * want.bytes, part, want.bytes) == 0;
		for (uint64_t i = 0; want.op == REDISTRIBUTE && i < rows; i++)
			same = same && memcmp(out + (r * rows + i) * width, part + i * pitch + spec.rank * width, width) == 0;
	}
	if (!same)
		fail("the copy is not what was sent");
	atomic_fetch_add(&shared->good, 1);
}

static void member(void)
{
	uint32_t met = 0;
	struct comm *c;
	unsigned char *in = sources ? sources + spec.rank * want.bytes : private_memory(want.bytes);
	unsigned char *out = receives(spec.rank) ? private_memory(out_bytes()) : NULL;

	spec.user = &met;
	fill(in, spec.rank);
	if (comm_open(&spec, &c))
		fail("open");
	if (sources && comm_window_add(c, 1, sources, want.bytes * want.ranks))
		fail("window");
	if (run_once(c, in, out)) /* warm */
		fail("run");
	double cpu = now(CLOCK_PROCESS_CPUTIME_ID);
	struct comm_counts before = comm_counts(c);
	for (uint32_t i = 0; i < want.runs; i++) {
		if (i + 1 == want.runs && out && !(want.op == BROADCAST && spec.rank == 0)) {
			double begun = now(CLOCK_PROCESS_CPUTIME_ID);
			memset(out, 0x11, out_bytes());
			cpu += now(CLOCK_PROCESS_CPUTIME_ID) - begun; /* which is no part of the collective */
		}
		if (comm_barrier(c))
			fail("barrier");
		double t = now(CLOCK_MONOTONIC);
		if (run_once(c, in, out))
			fail("run");
		shared->seconds[spec.rank][i] = now(CLOCK_MONOTONIC) - t;
	}
	shared->cpu[spec.rank] = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	struct comm_counts after = comm_counts(c);
	shared->counts[spec.rank] = (struct comm_counts){ after.copied_bytes - before.copied_bytes, after.sent_bytes - before.sent_bytes,
							  after.received_bytes - before.received_bytes, 0 };
	if (want.source == MAPPED)
		check(sources);
	else if (want.op == BROADCAST && spec.rank == 0)
		check(in);
	else if (out)
		check(out);
	comm_close(c);
	exit(0);
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void report(void)
{
	double runs[RUNS], cpu = 0;
	uint64_t copied = 0, sent = 0;

	for (uint32_t i = 0; i < want.runs; i++) {
		runs[i] = 0;
		for (uint32_t r = 0; r < want.ranks; r++)
			runs[i] = shared->seconds[r][i] > runs[i] ? shared->seconds[r][i] : runs[i];
	}
	qsort(runs, want.runs, sizeof *runs, compare);
	for (uint32_t r = 0; r < want.ranks; r++) {
		cpu += shared->cpu[r];
		copied += shared->counts[r].copied_bytes;
		sent += shared->counts[r].sent_bytes;
	}
	uint64_t needed = want.op != ALL_GATHER ? want.bytes * (want.ranks - 1) :
			  want.bytes * want.ranks * (want.ranks - 1);
	printf("{\"backend\":\"%s\",\"op\":\"%s\",\"ranks\":%u,\"bytes\":%llu,\"source\":\"%s\",\"runs\":%u,\"seconds\":%.9f,"
	       "\"seconds_min\":%.9f,\"seconds_max\":%.9f,\"moved_bytes\":%llu,\"needed_bytes\":%llu,\"cpu_seconds\":%.9f,"
	       "\"checked\":%u}\n",
	       comm_backend_name(want.backend), op_names[want.op], want.ranks, (unsigned long long)want.bytes,
	       source_names[want.source], want.runs, runs[want.runs / 2], runs[0], runs[want.runs - 1],
	       (unsigned long long)((copied + sent) / want.runs), (unsigned long long)needed, cpu / want.runs, shared->good);
}

static unsigned pick(const char *name, const char *const *names, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		if (strcmp(names[i], name) == 0)
			return i;
	fprintf(stderr, "bench_comm: what is %s?\n", name);
	exit(2);
}

static void parse(int argc, char **argv)
{
	static const struct option options[] = { { "backend", 1, 0, 'b' }, { "op", 1, 0, 'o' }, { "ranks", 1, 0, 'r' },
						 { "bytes", 1, 0, 'n' }, { "runs", 1, 0, 'k' }, { "source", 1, 0, 's' }, { 0 } };
	static const char *const backends[] = { "shm", "tcp" };
	int o;

	while ((o = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (o == 'b')
			want.backend = pick(optarg, backends, 2) ? COMM_TCP : COMM_SHM;
		else if (o == 'o')
			want.op = pick(optarg, op_names, OPS);
		else if (o == 's')
			want.source = pick(optarg, source_names, SOURCES);
		else if (o == 'r')
			want.ranks = (uint32_t)strtoul(optarg, NULL, 10);
		else if (o == 'n')
			want.bytes = strtoull(optarg, NULL, 10);
		else if (o == 'k')
			want.runs = (uint32_t)strtoul(optarg, NULL, 10);
		else
			exit(2);
	}
	if (want.ranks < 1 || want.ranks > RANKS || want.runs < 1 || want.runs > RUNS || want.bytes > UINT64_C(1) << 34 ||
	    (want.op == REDISTRIBUTE && (want.bytes == 0 || want.bytes % (COLUMNS * ITEM * want.ranks)))) {
		fprintf(stderr, "bench_comm: 1 to %d ranks, 1 to %d runs, at most 16 GiB\n", RANKS, RUNS);
		exit(2);
	}
}

static void share(void)
{
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED || comm_arena_new(want.ranks, &spec.arena_fd))
		fail("shared memory");
	if (want.source == PRIVATE)
		return;
	uint64_t all = want.bytes * want.ranks;
	sources_fd = memfd_create("sources", MFD_CLOEXEC);
	if (sources_fd < 0 || ftruncate(sources_fd, (off_t)all) < 0)
		fail("sources");
	sources = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, sources_fd, 0);
	if (sources == MAP_FAILED)
		fail("sources");
}

int main(int argc, char **argv)
{
	int status, bad = 0;

	parse(argc, argv);
	spec = (struct comm_spec){ .size = want.ranks, .inside = want.backend, .between = want.backend, .group_id = 1, .generation = 1,
				   .meet = meet };
	share();
	for (uint32_t r = 0; r < want.ranks; r++) {
		pid_t pid = fork();
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			spec.rank = r;
			member();
		}
	}
	while (wait(&status) > 0)
		bad |= status;
	if (bad)
		return 1;
	report();
	return 0;
}
