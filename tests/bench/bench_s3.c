/* bench_s3.c: the S3 client alone: memory to an object in parts, and back.
 *
 *     bench_s3 ENDPOINT BUCKET KEY MIB PART_MIB THREADS
 *
 * Each line "put" or "get" of stdin is a run, and answered by "put SECONDS CPU_SECONDS": so it takes turns with a peer. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/clock.h"
#include "base/num.h"
#include "store/s3_client.h"

enum { THREADS_MAX = 64 };

static struct s3 *s3;
static const char *key;
static char id[S3_UPLOAD_ID_MAX];
static unsigned char *memory;
static size_t bytes, part_bytes, part_count;
static struct s3_part parts[S3_PARTS_MAX];
static atomic_size_t next;
static bool puts_it;

static void need(enum err e)
{
	if (e) {
		fprintf(stderr, "bench_s3: %s: %s\n", err_code_name(e), err_last()->text);
		exit(1);
	}
}

static void *mover(void *user)
{
	for (size_t i; (i = atomic_fetch_add(&next, 1)) < part_count;) {
		size_t at = i * part_bytes, n = num_min(part_bytes, bytes - at);
		need(puts_it ? s3_upload_part(s3, key, id, (uint32_t)i + 1, memory + at, n, NULL, &parts[i]) :
			       s3_get(s3, key, at, memory + at, n, NULL, NULL, NULL));
	}
	return user;
}

static double cpu(void)
{
	struct rusage r;

	getrusage(RUSAGE_SELF, &r);
	return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

static void run(bool put, unsigned threads)
{
	pthread_t thread[THREADS_MAX];
	double cpu_before = cpu();
	int64_t begin = clock_mono_ns();

	puts_it = put;
	atomic_store(&next, 0);
	if (put)
		need(s3_upload_begin(s3, key, NULL, NULL, id));
	for (unsigned i = 0; i < threads; i++)
		if (pthread_create(&thread[i], NULL, mover, NULL) != 0)
			exit(1);
	for (unsigned i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	if (put)
		need(s3_upload_complete(s3, key, id, parts, part_count, S3_ALWAYS, NULL, NULL));
	printf("%s %.6f %.6f\n", put ? "put" : "get", (double)(clock_mono_ns() - begin) * 1e-9, cpu() - cpu_before);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	if (argc != 7)
		return 2;
	key = argv[3];
	bytes = strtoull(argv[4], NULL, 10) << 20;
	part_bytes = strtoull(argv[5], NULL, 10) << 20;
	part_count = num_div_up(bytes, part_bytes);
	unsigned threads = (unsigned)num_min(strtoul(argv[6], NULL, 10), THREADS_MAX);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED || part_count > S3_PARTS_MAX)
		return 1;
	uint64_t x = 88172645463325252;
	for (size_t i = 0; i < bytes; i += 8, x ^= x << 13, x ^= x >> 7, x ^= x << 17)
		memcpy(memory + i, &x, 8);
	const struct s3_config config = { .endpoint = argv[1], .bucket = argv[2], .path_style = true, .credentials = S3_CREDENTIALS_ENV };
	need(s3_open(&config, &s3));
	for (char line[16]; fgets(line, sizeof line, stdin);)
		run(line[0] == 'p', threads);
	s3_close(s3);
	return 0;
}
