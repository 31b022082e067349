/* test_comm_nccl_errors.c: what goes wrong in a group over libnccl: members that differ, fail, hang, die, never come; libraries that are
 * not there. All members end within the deadline, and where it can be known they agree on the rank. */
#include "comm/nccl.h"

#include "comm/nccl_abi.h"
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
	enum err e = comm_barrier(me.c);
	C_TRUE(e == ERR_SEGMENT_SHRUNK || (me.rank != 1 && e == ERR_PEER_LOST)); /* the last word is not waited for for ever */
	if (e == ERR_SEGMENT_SHRUNK) {
		C_TRUE(err_last()->rank == 1);
		C_TEXT("the segment became smaller");
	}
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
		nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
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
			nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
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
			nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
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

/* ---- each call of NCCL's ---- */

#define X(member, symbol, ...) #symbol,
static const char *symbols[] = { NCCL_FUNCTIONS(X) };
#undef X

static enum err collectives(void)
{
	const uint64_t uneven[RANKS] = { 3, 5 };
	const uint32_t both[] = { 0, 1 };
	struct traffic t = traffic_of(20, 1000, 7);
	struct comm_exchange x = { t.messages, t.count, pack, unpack, &t };
	struct comm *sub = NULL;
	void *p = to_device("0123456789abcdef", 16), *out = to_device("0123456789abcdef0123456789abcdef", 32);
	enum err e = comm_barrier(me.c);

	e = e ?: comm_broadcast(me.c, p, 16, 0);
	e = e ?: comm_all_gather_v(me.c, p, uneven, out);
	e = e ?: comm_reduce(me.c, p, out, 4, DT_FLOAT32, REDUCE_MAX, 1);
	e = e ?: comm_all_reduce(me.c, p, out, 4, DT_FLOAT32, REDUCE_MAX);
	e = e ?: comm_reduce_scatter(me.c, p, out, 2, DT_FLOAT32, REDUCE_MAX);
	e = e ?: comm_exchange(me.c, &x);
	e = e ?: comm_split(me.c, both, 2, &sub);
	e = e ?: comm_barrier(sub);
	comm_close(sub);
	mem_free(t.messages);
	return e;
}

/* A call that fails on member 0, and how often it was made before. tells: the error names it; else it is one of the end, where nobody is
 * left to be told. */
static struct call {
	const char *name;
	unsigned before;
	bool tells;
} calls[] = {
	{ "ncclGetVersion", 0, true },	      { "ncclGetUniqueId", 0, true },	   { "ncclCommInitRankConfig", 0, true },
	{ "ncclCommGetAsyncError", 0, true }, { "ncclAllGather", 0, true },
	{ "ncclAllGather", 3, true },	      { "ncclBroadcast", 0, true },	   { "ncclReduce", 0, true },
	{ "ncclAllReduce", 0, true },	      { "ncclReduceScatter", 0, true },	   { "ncclGroupStart", 0, true },
	{ "ncclGroupStart", 1, true },	      { "ncclGroupEnd", 0, true },	   { "ncclGroupEnd", 1, true },
	{ "ncclSend", 0, true },	      { "ncclSend", 1, true },		   { "ncclRecv", 0, true },
	{ "ncclRecv", 1, true },	      { "ncclCommInitRankConfig", 1, true }, { "ncclGetUniqueId", 1, true },
	{ "ncclCommFinalize", 0, false },     { "ncclCommDestroy", 0, false },	   { "ncclCommAbort", 0, false },
	{ "ncclGetErrorString", 0, false },   { "ncclGetLastError", 0, false },
}, *call;

static void each_call(void)
{
	struct comm_spec spec;
	char fail[64];

	me.deadline_ms = call->tells ? 5 * DEADLINE_MS : PLENTY_MS;
	snprintf(fail, sizeof fail, "%s:%u:3", call->name, call->before + 1);
	if (me.rank == 0)
		setenv("FAKE_NCCL_FAIL", fail, 1);
	open_device();
	spec = spec_of();
	enum err e = comm_open(&spec, &me.c);
	bool opened = e == OK;
	e = e ?: collectives();
	/* Member 1 may have had all that it waits for, or be in its last collective when the end of member 0 turns into an abort. */
	C_TRUE(me.rank == 1 || !call->tells == (e == OK));
	if (call->tells && me.rank == 0) {
		C_TEXT(call->name);
		C_TRUE(e == ERR_DEVICE_FAILED || e == ERR_BACKEND_UNAVAILABLE);
	}
	if (opened)
		comm_close(me.c);
	unsetenv("FAKE_NCCL_FAIL"); /* and the next group is sound */
	me.rank = 1 - me.rank;
	me.deadline_ms = PLENTY_MS;
	spec = spec_of();
	if (strcmp(call->name, "ncclGetVersion") == 0)
		C_ERR(BACKEND_UNAVAILABLE, comm_open(&spec, &me.c)); /* the library is opened once */
	else
		C_OK(comm_open(&spec, &me.c));
	if (strcmp(call->name, "ncclGetVersion") != 0) {
		C_OK(collectives());
		comm_close(me.c);
	}
	C_TRUE(!comm_nccl_stuck());
	device_close(me.d);
}

/* Errors without a text of NCCL's, and an abort that fails. */
static void each_call_of_an_error(void)
{
	struct comm_spec spec;
	char fail[64];

	snprintf(fail, sizeof fail, "%s:0:3", call->name);
	setenv("FAKE_NCCL_FAIL", fail, 1);
	open_group();
	setenv("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:1:700", 1);
	C_ERR(DEVICE_FAILED, comm_barrier(me.c));
	C_TEXT("cuMemcpyHtoDAsync");
	unsetenv("FAKE_CUDA_FAIL");
	comm_close(me.c);
	setenv("FAKE_NCCL_INIT", "2", 1);
	spec = spec_of();
	C_ERR(DEVICE_FAILED, comm_open(&spec, &me.c));
	C_TEXT("ncclCommInitRankConfig: ");
	C_TEXT("(NCCL error 2): ");
	device_close(me.d);
}

static void test_each_call(void **state)
{
	(void)state;
	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		call = &calls[i];
		run(each_call, 2);
		if (!call->tells)
			run(each_call_of_an_error, 1);
	}
	for (call = calls; call < calls + sizeof calls / sizeof *calls; call++) /* none of the interface is left out */
		for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
			if (symbols[i] && strcmp(symbols[i], call->name) == 0)
				symbols[i] = NULL;
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
		if (symbols[i])
			fail_msg("%s is not tried", symbols[i]);
}

/* NCCL may wait in an abort for what never comes. The member goes on without it, and no group is opened beside it. */
static void abort_hangs(void)
{
	struct comm_spec spec;

	setenv("FAKE_NCCL_HANG_AFTER", "1", 1);
	setenv("FAKE_NCCL_ABORT_HANGS", "1", 1);
	me.deadline_ms = DEADLINE_MS;
	open_group();
	C_OK(comm_barrier(me.c));
	C_TRUE(!comm_nccl_stuck());
	C_ERR(PEER_TIMEOUT, comm_barrier(me.c));
	C_TRUE(comm_nccl_stuck());
	comm_close(me.c); /* returns, too */
	me.meets = 1;
	spec = spec_of();
	C_ERR(DEVICE_FAILED, comm_open(&spec, &me.c));
	C_TEXT("has not ended");
}

static void test_abort_hangs(void **state)
{
	(void)state;
	if (t_gpu())
		skip();
	run(abort_hangs, 2);
}

/* Rank 1 of four dies. The others, renumbered, are a group of three that is sound. */
static void renumbered(void)
{
	unsigned char all[3 * 100];

	me.deadline_ms = DEADLINE_MS;
	open_group();
	C_OK(comm_barrier(me.c));
	if (me.rank == 1) {
		atomic_fetch_add(&shared->passed, 1);
		_exit(0);
	}
	enum err e = comm_barrier(me.c);
	C_TRUE(e == ERR_PEER_TIMEOUT || e == ERR_PEER_LOST);
	comm_close(me.c);
	me.rank -= me.rank > 1;
	me.size = 3;
	me.deadline_ms = PLENTY_MS;
	struct comm_spec spec = spec_of();
	C_OK(comm_open(&spec, &me.c));
	C_TRUE(comm_size(me.c) == 3 && comm_rank(me.c) == me.rank);
	unsigned char *mine = bytes_of(me.rank, 100);
	void *in = to_device(mine, 100), *out = to_device(all, sizeof all);
	C_OK(comm_all_gather(me.c, in, 100, out));
	from_device(all, out, sizeof all);
	for (uint32_t r = 0; r < 3; r++)
		check_part(all + r * 100, r, 100);
	device_free(me.d, in);
	device_free(me.d, out);
	mem_free(mine);
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
	run(renumbered, 4);
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
	device_close(spec.device);
}

static void two_on_a_gpu(const char *version, enum err want)
{
	struct comm_spec spec = spec_of();

	setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
	setenv("FAKE_NCCL_VERSION", version, 1);
	C_OK(device_open(0, &spec.device));
	C_TRUE(comm_open(&spec, &me.c) == want);
	if (want == OK) {
		C_OK(comm_barrier(me.c));
		comm_close(me.c);
	} else {
		C_TEXT("NCCL takes one member a GPU (NCCL 2.30 takes more");
	}
	device_close(spec.device);
}

static void one_gpu_for_two_of_2_30(void)
{
	two_on_a_gpu("23000", OK);
}

static void one_gpu_for_two_of_an_older_one(void)
{
	two_on_a_gpu("22907", ERR_BACKEND_UNAVAILABLE);
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
	run(one_gpu_for_two_of_2_30, 2);
	run(one_gpu_for_two_of_an_older_one, 2);
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
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_errors), cmocka_unit_test(test_each_call), cmocka_unit_test(test_abort_hangs),
		cmocka_unit_test(test_open), cmocka_unit_test(test_libraries),
	};

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
