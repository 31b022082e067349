/* memspeed.c: the limits that memory sets, measured with as many threads as the daemon has workers. Prints one figure a run, in
 * bytes per second. Pages are touched before the clock starts, but for `fresh`, whose point they are.
 *
 *     memspeed copy  BYTES THREADS RUNS          memcpy, warm pages
 *     memspeed fresh BYTES THREADS RUNS          memcpy into new shared-memory pages
 *     memspeed write BYTES THREADS RUNS DIR      plain write() of new files, one a thread, without fsync */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/bench.h"

enum { THREADS_MAX = 64, BLOCK = 1 << 20 };

struct part {
	pthread_t thread;
	unsigned char *to, *from;
	size_t bytes;
	int fd;
	char path[4096];
};

static void *work(void *user)
{
	struct part *p = user;

	for (size_t at = 0; at < p->bytes; at += BLOCK) {
		size_t n = p->bytes - at < BLOCK ? p->bytes - at : BLOCK;
		if (p->fd < 0)
			memcpy(p->to + at, p->from + at, n);
		else if (write(p->fd, p->from + at, n) != (ssize_t)n)
			abort();
	}
	return NULL;
}

static unsigned char *pages(size_t bytes, int touch)
{
	unsigned char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	if (touch)
		memset(p, 7, bytes);
	return p;
}

static double run(const char *mode, struct part *parts, int threads, size_t bytes, unsigned char *to, unsigned char *from)
{
	size_t each = bytes / (size_t)threads;
	double start = now();

	for (int i = 0; i < threads; i++) {
		struct part *p = &parts[i];
		p->to = to ? to + each * (size_t)i : NULL;
		p->from = from + each * (size_t)i;
		p->bytes = each;
		p->fd = -1;
		if (strcmp(mode, "write") == 0)
			p->fd = open(p->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		if (pthread_create(&p->thread, NULL, work, p) != 0)
			abort();
	}
	for (int i = 0; i < threads; i++) {
		pthread_join(parts[i].thread, NULL);
		if (parts[i].fd >= 0)
			close(parts[i].fd);
	}
	return (double)(each * (size_t)threads) / (now() - start);
}

int main(int argc, char **argv)
{
	static struct part parts[THREADS_MAX];

	if (argc < 5)
		return fprintf(stderr, "usage: memspeed copy|fresh|write BYTES THREADS RUNS [DIR]\n"), 2;
	const char *mode = argv[1];
	size_t bytes = strtoull(argv[2], NULL, 10);
	int threads = (int)strtol(argv[3], NULL, 10), runs = (int)strtol(argv[4], NULL, 10);
	int fresh = strcmp(mode, "fresh") == 0, writing = strcmp(mode, "write") == 0;
	if (threads < 1 || threads > THREADS_MAX || (writing && argc < 6))
		return fprintf(stderr, "memspeed: wrong arguments\n"), 2;
	unsigned char *from = pages(bytes, 1), *to = fresh || writing ? NULL : pages(bytes, 1);

	for (int i = 0; i < runs; i++) {
		for (int t = 0; writing && t < threads; t++) {
			snprintf(parts[t].path, sizeof parts[t].path, "%s/memspeed-%d-%d", argv[5], i, t);
			unlink(parts[t].path);
		}
		unsigned char *into = fresh ? pages(bytes, 0) : to;
		printf("%.0f\n", run(mode, parts, threads, bytes, into, from));
		fflush(stdout);
		if (fresh)
			munmap(into, bytes);
		for (int t = 0; writing && t < threads; t++)
			unlink(parts[t].path);
	}
	return 0;
}
