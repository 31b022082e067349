/* bench_cast.c: how fast cast_run is beside memcpy, in CPU time of one thread. They touch as many bytes, reads and writes counted, in
 * blocks that walk over memory which was touched, and take turns.
 *
 *     bench_cast FROM TO      dtypes; a line per run: what the cast moves and what memcpy moves, in 1e9 bytes per second */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "tensor/cast.h"

enum { RUNS = 5 };
static const size_t BYTES = 128u << 20, BLOCK = 1u << 20; /* of a side; elements */

struct pair {
	enum dtype from, to;
};

/* Bytes read and written per second, in 1e9. */
static double cast(const struct pair *p, unsigned char *to, const unsigned char *from)
{
	size_t in = dtype_bytes(p->from), out = dtype_bytes(p->to), n = BYTES / (in > out ? in : out);
	double start = now();

	for (size_t i = 0; i < n; i += BLOCK)
		if (cast_run(to + i * out, p->to, from + i * in, p->from, n - i < BLOCK ? n - i : BLOCK) != OK)
			exit(1);
	return (double)(n * (in + out)) / (now() - start) / 1e9;
}

static double copy(const struct pair *p, unsigned char *to, const unsigned char *from)
{
	size_t in = dtype_bytes(p->from), out = dtype_bytes(p->to), n = BYTES / (in > out ? in : out);
	size_t half = n * (in + out) / 2, block = BLOCK * (in + out) / 2;
	double start = now();

	for (size_t i = 0; i < half; i += block)
		memcpy(to + i, from + i, half - i < block ? half - i : block);
	return (double)(2 * half) / (now() - start) / 1e9;
}

int main(int argc, char **argv)
{
	unsigned char *from = malloc(BYTES), *to = malloc(BYTES);
	struct pair p;

	if (argc != 3 || dtype_parse(str_of(argv[1]), &p.from) != OK || dtype_parse(str_of(argv[2]), &p.to) != OK)
		return fprintf(stderr, "usage: bench_cast FROM TO, such as float32 bfloat16\n"), 2;
	if (!from || !to)
		return fprintf(stderr, "bench_cast: no memory\n"), 1;
	memset(to, 0, BYTES);
	for (size_t i = 0; i < BYTES; i++) /* 0x3e or 0x3f: normal numbers of every floating-point dtype, below two */
		from[i] = (unsigned char)(0x3e + i * 2654435761u / 7 % 2);
	for (int i = 0; i < RUNS; i++) {
		double peer = copy(&p, to, from);
		printf("%.3f %.3f\n", cast(&p, to, from), peer);
	}
	return 0;
}
