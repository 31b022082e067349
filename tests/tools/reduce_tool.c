/* reduce_tool.c: the arithmetic of a reduction, for tests/interop/test_reduce_kernels.py.
 *     reduce_tool DTYPE OP MEMBERS COUNT   reads the members' elements from stdin, writes the result; "unsupported" on stderr */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/reduce.h"

int main(int argc, char **argv)
{
	enum dtype d;
	unsigned op = 0;

	if (argc != 5 || dtype_parse((struct str){ argv[1], strlen(argv[1]) }, &d))
		return 2;
	while (op < REDUCE_OPS && strcmp(placement_reduce_name((enum reduce_op)op), argv[2]) != 0)
		op++;
	if (op == REDUCE_OPS)
		return 2;
	if (comm_reduce_check(d, (enum reduce_op)op)) {
		fprintf(stderr, "unsupported\n");
		return 3;
	}
	uint32_t members = (uint32_t)strtoul(argv[3], NULL, 10);
	size_t bytes = strtoul(argv[4], NULL, 10) * dtype_bytes(d);
	unsigned char *in = malloc(bytes * members + 1), *out = malloc(bytes + 1);
	const void *sources[64];
	if (!in || !out || members > 64 || fread(in, 1, bytes * members, stdin) != bytes * members)
		return 2;
	for (uint32_t m = 0; m < members; m++)
		sources[m] = in + m * bytes;
	comm_reduce_run(out, sources, members, bytes / dtype_bytes(d), d, (enum reduce_op)op);
	fwrite(out, 1, bytes, stdout);
	return 0;
}
