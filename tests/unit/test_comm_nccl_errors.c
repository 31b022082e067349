/* test_comm_nccl_errors.c: what goes wrong in a group over libnccl: members that differ, fail, hang, die, never come; libraries that are
 * not there. All members end within the deadline, and where it can be known they agree on the rank. */
#include "comm/nccl.h"

#include "lib/t_nccl.h"

/* ---- errors ---- */

static void mismatch(void)
{
	void *p;

	open_group();
	C_OK(device_alloc(me.d, 64, &p));
	C_ERR(COLLECTIVE_MISMATCH, comm_broadcast(me.c, p, me.rank == 1 ? 32 : 64, 0));
	C_TRUE(err_last()->rank == 1);
	C_ERR(COLLECTIVE_MISMATCH, comm_barrier(me.c)); /* from then on */
	device_free(me.d, p);
	close_group();
}

static void callback_fails(void)
{
	open_group();
	struct traffic t = traffic_of(400, 60000, 5);
	struct comm_exchange x = { t.messages, t.count, pack, unpack, &t };
	t.fail = me.rank == 2 ? ERR_FORMAT_IMAGE : OK;
	while (t.messages[t.fail_at].from != 2)
		t.fail_at++;
	C_ERR(FORMAT_IMAGE, comm_exchange(me.c, &x));
	C_TRUE(err_last()->rank == 2);
	C_TEXT("is cut off");
	if (me.rank == 2)
		C_TRUE(strcmp(err_last()->fqn, "model.w") == 0);
	mem_free(t.messages);
	close_group();
}

static void told_abort(void)
{
	open_group();
	C_OK(comm_barrier(me.c));
	if (me.rank == 1)
		comm_abort(me.c, err_at_rank(ERR(SEGMENT_SHRUNK, "the segment became smaller"), 1));
	C_ERR(SEGMENT_SHRUNK, comm_barrier(me.c));
	C_TRUE(err_last()->rank == 1);
	C_TEXT("the segment became smaller");
	close_group();
}

static void no_memory_there(void)
{
	open_group();
	if (me.rank == 0)
		setenv("FAKE_CUDA_MEMORY", "4194304", 1); /* not enough for the slots */
	struct traffic t = traffic_of(10, 100, 3);
	struct comm_exchange x = { t.messages, t.count, pack, unpack, &t };
	C_ERR(NO_MEMORY, comm_exchange(me.c, &x));
	C_TRUE(err_last()->rank == 0 && t.packed == 0);
	C_TEXT("out of memory");
	mem_free(t.messages);
	close_group();
}

/* Nobody is still in the collective before, when what comes next breaks. */
static void all_are_out(void)
{
	atomic_fetch_add(&shared->turn, 1);
	while (atomic_load(&shared->turn) < me.size)
		sched_yield();
}

static void async_error(void)
{
	setenv("FAKE_NCCL_ASYNC_AFTER", "3", 1);
	setenv("FAKE_NCCL_RANK", "1", 1);
	open_group();
	C_OK(comm_barrier(me.c));
	C_OK(comm_barrier(me.c));
	C_OK(comm_barrier(me.c));
	all_are_out();
	if (me.rank == 1) {
		C_ERR(DEVICE_FAILED, comm_barrier(me.c));
		C_TEXT("unhandled system error (NCCL error 2): fake: as the environment asked");
	} else {
		C_ERR(PEER_LOST, comm_barrier(me.c));
		C_TEXT("remote process exited or there was a network error");
	}
	close_group();
}

static void hang(void)
{
	setenv("FAKE_NCCL_HANG_AFTER", "2", 1);
	setenv("FAKE_NCCL_QUIET", "1", 1);
	me.deadline_ms = DEADLINE_MS;
	open_group();
	C_OK(comm_barrier(me.c));
	C_OK(comm_barrier(me.c));
	uint64_t start = now_ms();
	C_ERR(PEER_TIMEOUT, comm_barrier(me.c));
	C_TEXT("did not come in time");
	C_TRUE(now_ms() - start >= DEADLINE_MS);
	C_ERR(PEER_TIMEOUT, comm_barrier(me.c));
	close_group();
}

static void dead_peer(void)
{
	setenv("FAKE_NCCL_QUIET", "1", 1);
	me.deadline_ms = DEADLINE_MS;
	open_group();
	void *p = to_device("x", 1);
	C_OK(comm_broadcast(me.c, p, 1, 0));
	if (me.rank == 1) {
		atomic_fetch_add(&shared->passed, 1);
		_exit(0);
	}
	C_ERR(PEER_TIMEOUT, comm_broadcast(me.c, p, 1, 0));
	device_free(me.d, p);
	close_group();
}

static void ticked(void)
{
	open_group();
	C_OK(comm_barrier(me.c));
	all_are_out();
	if (me.rank == 0) {
		while (atomic_load(&shared->turn) < me.size + me.size - 1)
			sched_yield();
	} else {
		me.tick = ERR_CANCELLED;
		C_ERR(CANCELLED, comm_barrier(me.c));
		C_TEXT("the coordinator said so");
		C_TRUE(err_last()->rank == me.rank);
		atomic_fetch_add(&shared->turn, 1);
	}
	close_group();
}

/* A group is looked at between collectives: has a peer died, or given up? */
static void idle(void)
{
	open_group();
	C_OK(comm_barrier(me.c));
	C_OK(comm_check(me.c));
	all_are_out();
	if (me.rank == 1) {
		comm_abort(me.c, ERR(CANCELLED, "not needed any more"));
		C_ERR(CANCELLED, comm_check(me.c));
	} else {
		while (comm_check(me.c) == OK)
			sched_yield();
		C_TRUE(err_last()->code == ERR_PEER_LOST);
		C_ERR(PEER_LOST, comm_barrier(me.c));
	}
	close_group();
}

/* A GPU falls off in the middle: its member says so, and the others hear of it, or wait no longer than their deadline. */
static void device_lost(void)
{
	me.deadline_ms = 5 * DEADLINE_MS;
	open_group();
	struct traffic t = traffic_of(400, 60000, 5);
	struct comm_exchange x = { t.messages, t.count, pack, unpack, &t };
	C_OK(comm_exchange(me.c, &x));
	memset(t.last, 0, sizeof t.last);
	all_are_out();
	if (me.rank == 1)
		setenv("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:2:999:sticky", 1);
	enum err e = comm_exchange(me.c, &x);
	if (me.rank == 1) {
		C_TRUE(e == ERR_DEVICE_FAILED);
		C_TEXT("cuMemcpyHtoDAsync");
	} else if (e != ERR_PEER_LOST && e != ERR_PEER_TIMEOUT) {
		fprintf(stderr, "member %u: %s\n", me.rank, e ? err_last()->text : "no error");
		C_TRUE(e == ERR_DEVICE_FAILED && err_last()->rank == 1);
	}
	mem_free(t.messages);
	close_group();
}

static void call_fails(void)
{
	open_group();
	/* a pointer of the host where one of the device is wanted: NCCL refuses the call itself */
	char host[64];
	uint64_t bytes[RANKS] = { 1, 2, 3, 4 };
	C_ERR(DEVICE_FAILED, comm_all_gather_v(me.c, host, bytes, host));
	close_group();
}

static void test_errors(void **state)
{
	(void)state;
	run(mismatch, 4);
	run(callback_fails, 4);
	run(told_abort, 3);
	if (t_gpu()) {
		finish();
		return;
	}
	run(no_memory_there, 3);
	run(async_error, 3);
	run(hang, 3);
	run(dead_peer, 3);
	run(ticked, 3);
	run(idle, 3);
	run(device_lost, 3);
	run(call_fails, 1);
}

/* ---- opening ---- */

static void one_without(void)
{
	struct comm_spec spec = spec_of();

	if (me.rank == 1)
		spec.device = NULL;
	else
		C_OK(device_open((int32_t)me.rank, &spec.device));
	C_ERR(BACKEND_UNAVAILABLE, comm_open(&spec, &me.c));
	C_TRUE(err_last()->rank == 1);
	C_TEXT("rank 1: an NCCL group needs a GPU, and this member has none");
	device_close(spec.device);
}

static void one_gpu_for_two(void)
{
	struct comm_spec spec = spec_of();

	C_OK(device_open(me.rank == 2 ? 1 : (int32_t)me.rank, &spec.device));
	C_ERR(BACKEND_UNAVAILABLE, comm_open(&spec, &me.c));
	C_TRUE(err_last()->rank == 2);
	C_TEXT("ranks 1 and 2 are both on GPU-");
	C_TEXT("NCCL takes one member a GPU");
	setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* the fake is one that takes more */
	C_OK(comm_open(&spec, &me.c));
	C_OK(comm_barrier(me.c));
	comm_close(me.c);
	device_close(spec.device);
}

static void init_fails(void)
{
	struct comm_spec spec = spec_of();

	setenv("FAKE_NCCL_INIT", "2", 1);
	C_OK(device_open((int32_t)me.rank, &spec.device));
	C_ERR(DEVICE_FAILED, comm_open(&spec, &me.c));
	C_TEXT("ncclCommInitRankConfig: unhandled system error (NCCL error 2)");
	device_close(spec.device);
}

/* Two met, and one never gets to NCCL: the other one's deadline counts. */
static void never_joins(void)
{
	struct comm_spec spec = spec_of();

	spec.deadline_ms = DEADLINE_MS;
	C_OK(device_open((int32_t)me.rank, &spec.device));
	if (me.rank == 1)
		setenv("FAKE_NCCL_INIT", "2", 1);
	if (me.rank == 1)
		C_ERR(DEVICE_FAILED, comm_open(&spec, &me.c));
	else
		C_ERR(PEER_TIMEOUT, comm_open(&spec, &me.c));
	device_close(spec.device);
}

static void old_library(void)
{
	int version = 7;

	setenv("FAKE_NCCL_VERSION", "21304", 1);
	C_ERR(BACKEND_UNAVAILABLE, comm_nccl_available(&version));
	C_TEXT("libnccl.so.2 is of version 21304: older than 2.14");
	C_ERR(BACKEND_UNAVAILABLE, comm_nccl_available(NULL));
	C_TEXT("older than 2.14");
	C_TRUE(version == 0);
}

static void next_library(void)
{
	setenv("FAKE_NCCL_VERSION", "30000", 1);
	C_ERR(BACKEND_UNAVAILABLE, comm_nccl_available(NULL));
	C_TEXT("another major version than NCCL 2");
	C_TEXT("install NCCL 2.14 or newer");
}

static void this_library(void)
{
	int version = 0;

	C_OK(comm_nccl_available(&version));
	C_TRUE(version >= 21400);
	C_TRUE(strcmp(comm_backend_name(COMM_NCCL), "nccl") == 0);
}

static void test_open(void **state)
{
	(void)state;
	run(this_library, 1);
	if (t_gpu()) {
		finish();
		return;
	}
	run(one_without, 3);
	run(init_fails, 2);
	run(never_joins, 2);
	run(old_library, 1);
	run(next_library, 1);
	run(one_gpu_for_two, 3);
}

/* The search path is read at start, so these are the program again, without the loader's cache, which may know of an NCCL here. */
static void run_alone(const char *path, const char *how, const char *reason)
{
	char self[4096] = "";

	assert_true(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
	fflush(NULL);
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		setenv("LD_LIBRARY_PATH", path, 1);
		execl("/lib64/ld-linux-x86-64.so.2", "ld.so", "--inhibit-cache", self, how, reason, NULL);
		execl(self, self, how, reason, NULL);
		_exit(1);
	}
	t_fakes_end(pid);
}

static void test_libraries(void **state)
{
	char dir[] = "/tmp/dcpd-nccl-XXXXXX", lib[64], fake[4300];

	(void)state;
	if (t_gpu())
		skip();
	assert_non_null(mkdtemp(dir));
	run_alone(dir, "--absent", "libnccl.so.2 was not found: NCCL is not installed here");
	snprintf(lib, sizeof lib, "%s/libnccl.so.2", dir);
	FILE *f = fopen(lib, "w");
	assert_true(f && fputs("no library", f) >= 0 && fclose(f) == 0);
	run_alone(dir, "--reason", "libnccl.so.2 cannot be loaded: ");
	unlink(lib);
	snprintf(fake, sizeof fake, "%s/libcuda.so.1", getenv("DCPD_TEST_FAKES"));
	assert_int_equal(symlink(fake, lib), 0);
	run_alone(dir, "--reason", "libnccl.so.2 lacks ncclGetVersion: it is older than 2.14");
	unlink(lib);
	rmdir(dir);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_errors), cmocka_unit_test(test_open), cmocka_unit_test(test_libraries) };

	if (argc == 3 && argv[1][0] == '-') {
		int version;
		if (strcmp(argv[1], "--absent") == 0 && comm_nccl_available(&version) == OK) {
			fprintf(stderr, "NCCL %d is installed here: its absence was not tested\n", version);
			return 0;
		}
		C_ERR(BACKEND_UNAVAILABLE, comm_nccl_available(NULL));
		C_TEXT(argv[2]);
		return 0;
	}
	t_fakes_use(argv);
	return share() ? cmocka_run_group_tests_name("comm_nccl_errors", tests, NULL, NULL) : 1;
}
