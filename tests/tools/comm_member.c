/* comm_member.c: one member of a group over tcp, for tests that put each into a network namespace of its own.
 *
 *     comm_member RANK SIZE LISTEN DIR DEADLINE_MS CONNECTIONS BYTES ROUNDS
 *
 * The members meet through files in DIR. Each round broadcasts and gathers BYTES, and is announced as "round N"; the last line is
 * "ok SECONDS" or "CODE RANK SECONDS TEXT". */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "comm/comm.h"

static struct comm_spec spec = { .inside = COMM_TCP, .between = COMM_TCP, .secret = "between namespaces" };
static const char *dir;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static enum err meet(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out)
{
	char path[300], made[300];

	(void)user;
	snprintf(path, sizeof path, "%s/new-%u", dir, spec.rank);
	snprintf(made, sizeof made, "%s/card-%u", dir, spec.rank);
	FILE *f = fopen(path, "w");
	if (!f || fwrite(mine, COMM_RENDEZVOUS_BYTES, 1, f) != 1 || fclose(f) != 0 || link(path, made) != 0)
		return ERR_SYS(SYSTEM, "cannot write a card");
	for (uint32_t r = 0; r < spec.size; r++) {
		snprintf(path, sizeof path, "%s/card-%u", dir, r);
		f = NULL;
		for (int i = 0; !f && i < 2000; i++, usleep(5000))
			f = fopen(path, "r");
		if (!f || fread(all_out + (size_t)r * COMM_RENDEZVOUS_BYTES, COMM_RENDEZVOUS_BYTES, 1, f) != 1)
			return ERR(TIMED_OUT, "no card of member %u", r);
		fclose(f);
	}
	return OK;
}

static enum err rounds(struct comm *c, size_t bytes, int count)
{
	unsigned char *one = mem_alloc(bytes), *all = mem_alloc(spec.size * bytes);
	enum err e = one && all ? OK : ERR(NO_MEMORY, "no memory");

	for (int i = 0; !e && i < count; i++) {
		uint32_t root = (uint32_t)i % spec.size;
		memset(one, spec.rank == root ? i + 1 : 0, bytes);
		e = comm_broadcast(c, one, bytes, root);
		if (!e && (one[0] != (unsigned char)(i + 1) || one[bytes - 1] != one[0]))
			e = ERR(INTERNAL, "the broadcast brought something else");
		memset(one, (int)(spec.rank + 1), bytes);
		if (!e)
			e = comm_all_gather(c, one, bytes, all);
		for (uint32_t r = 0; !e && r < spec.size; r++)
			if (all[r * bytes] != r + 1 || all[(r + 1) * bytes - 1] != r + 1)
				e = ERR(INTERNAL, "the all-gather brought something else");
		if (!e)
			printf("round %d\n", i);
		fflush(stdout);
	}
	mem_free(one);
	mem_free(all);
	return e ? e : comm_barrier(c);
}

int main(int argc, char **argv)
{
	static uint32_t hosts[COMM_RANKS_MAX];
	struct comm *c = NULL;

	if (argc != 9)
		return 2;
	spec.rank = (uint32_t)strtoul(argv[1], NULL, 10);
	spec.size = (uint32_t)strtoul(argv[2], NULL, 10);
	spec.listen = argv[3];
	dir = argv[4];
	spec.deadline_ms = (uint32_t)strtoul(argv[5], NULL, 10);
	spec.connections = (uint32_t)strtoul(argv[6], NULL, 10);
	spec.meet = meet;
	for (uint32_t r = 0; r < COMM_RANKS_MAX; r++)
		hosts[r] = r;
	spec.hosts = hosts;
	double since = now();
	enum err e = comm_open(&spec, &c);
	if (!e)
		e = rounds(c, strtoul(argv[7], NULL, 10), (int)strtol(argv[8], NULL, 10));
	if (e)
		printf("%s %lld %.3f %s\n", err_code_name(e), (long long)err_last()->rank, now() - since, err_last()->text);
	else
		printf("ok %.3f\n", now() - since);
	comm_close(c);
	return e ? 1 : 0;
}
