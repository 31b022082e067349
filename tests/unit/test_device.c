/* test_device.c: copies, marks, pinning and errors of worker/device over the fake driver; the cases without injected errors run over
 * a real one too (make check-gpu). */
#include "device/device.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "base/mem.h"
#include "lib/t_fakes.h"
#include "os/seg.h"

enum { MIB = 1 << 20, WAIT_MS = 20000 };

static const struct seg_owner nobody;

static void need_device(void)
{
	if (!t_gpu())
		return;
	enum err e = device_cuda_open();
	if (e)
		fprintf(stderr, "skipped: %s\n", err_last()->text);
	if (e)
		_exit(T_NO_GPU);
}

static void fill(unsigned char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)(i * 131 + i / 251 + seed);
}

/* There and back, with a move in between. */
static void round_trip(int32_t index, size_t n)
{
	struct device *d;
	void *a, *b;
	unsigned char *from = mem_alloc(n), *to = mem_zalloc(1, n);

	C_TRUE(from && to);
	fill(from, n, 7);
	C_OK(device_open(index, &d));
	C_TRUE(device_is_cpu(d) == (index == DEVICE_CPU));
	C_OK(device_alloc(d, n, &a));
	C_OK(device_alloc(d, n, &b));
	C_OK(device_copy(d, a, from, n, DEVICE_PUT));
	C_OK(device_copy(d, b, a, n, DEVICE_MOVE));
	C_OK(device_copy(d, to, b, n, DEVICE_GET));
	C_OK(device_wait(d, WAIT_MS));
	C_TRUE(memcmp(from, to, n) == 0);
	/* a part, from the middle */
	memset(to, 0, n);
	C_OK(device_copy(d, to, (char *)b + n / 2, n - n / 2, DEVICE_GET));
	C_OK(device_copy(d, to, b, 0, DEVICE_GET));
	C_OK(device_wait(d, WAIT_MS));
	C_TRUE(memcmp(from + n / 2, to, n - n / 2) == 0);
	device_free(d, a);
	device_free(d, b);
	device_free(d, NULL);
	C_OK(device_alloc(d, 0, &a));
	device_free(d, a);
	device_close(d);
	device_close(NULL);
	mem_free(from);
	mem_free(to);
}

static void cpu_case(void *arg)
{
	struct device *d;
	bool done = false;
	char page[64];

	(void)arg;
	round_trip(DEVICE_CPU, 3 * MIB + 5);
	C_OK(device_open(DEVICE_CPU, &d));
	C_TRUE(device_stream(d) == NULL);
	C_OK(device_enter(d));
	C_OK(device_mark(d, 0));
	C_OK(device_mark_done(d, 0, &done));
	C_TRUE(done);
	C_ERR(BACKEND_UNAVAILABLE, device_pin(d, page, sizeof page));
	C_TEXT("needs a GPU");
	device_close(d);
	C_ERR(VALIDATION_FAILED, device_open(-2, &d));
}

static void test_cpu(void **state)
{
	(void)state;
	t_fakes_run(cpu_case, NULL);
}

static void gpu_case(void *arg)
{
	struct device_info info;
	struct device *d;

	(void)arg;
	need_device();
	C_OK(device_cuda_open());
	C_OK(device_cuda_open());
	C_TRUE(device_cuda_count() >= 1);
	C_OK(device_cuda_info(0, &info));
	C_TRUE(info.name[0] && strncmp(info.uuid, "GPU-", 4) == 0 && strlen(info.uuid) == 40 && info.memory_bytes > 0);
	if (t_gpu())
		fprintf(stderr, "GPU 0: %s, %s, %ju bytes\n", info.name, info.uuid, (uintmax_t)info.memory_bytes);
	else
		C_TRUE(strcmp(info.uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") == 0 && strcmp(info.name, "Fake GPU 0") == 0);
	C_ERR(VALIDATION_FAILED, device_cuda_info(device_cuda_count(), &info));
	C_ERR(VALIDATION_FAILED, device_open((int32_t)device_cuda_count(), &d));
	C_TEXT("there is no GPU");
	round_trip(0, 1);
	round_trip(0, 5 * MIB + 3);
}

static void test_gpu(void **state)
{
	(void)state;
	t_fakes_run(gpu_case, NULL);
}

/* Two buffers take turns; a buffer is touched again only when its mark is done. */
static void marks_case(void *arg)
{
	enum { ROUNDS = 20, N = 256 << 10 };
	struct device *d;
	unsigned char *host[2], *back = mem_alloc(N);
	void *at;
	bool done = true;

	(void)arg;
	need_device();
	C_OK(device_open(0, &d));
	C_OK(device_alloc(d, (uint64_t)ROUNDS * N, &at));
	host[0] = mem_alloc(N);
	host[1] = mem_alloc(N);
	C_TRUE(back && host[0] && host[1]);
	for (uint32_t i = 0; i < DEVICE_MARKS; i++) {
		C_OK(device_mark_done(d, i, &done));
		C_TRUE(done);
	}
	for (uint32_t i = 0; i < ROUNDS; i++) {
		do {
			C_OK(device_mark_done(d, i % 2, &done));
		} while (!done);
		fill(host[i % 2], N, i);
		C_OK(device_copy(d, (char *)at + (size_t)i * N, host[i % 2], N, DEVICE_PUT));
		C_OK(device_mark(d, i % 2));
	}
	for (uint32_t i = 0; i < ROUNDS; i++) {
		C_OK(device_copy(d, back, (char *)at + (size_t)i * N, N, DEVICE_GET));
		C_OK(device_wait(d, WAIT_MS));
		fill(host[0], N, i);
		C_TRUE(memcmp(back, host[0], N) == 0);
	}
	device_free(d, at);
	device_close(d);
	mem_free(host[0]);
	mem_free(host[1]);
	mem_free(back);
}

static void test_marks(void **state)
{
	(void)state;
	t_fakes_run(marks_case, NULL);
}

/* A segment, as `create` with pin_memory pins it. */
static void pin_case(void *arg)
{
	struct device *d;
	struct seg_map m;
	char name[SEG_NAME_MAX];
	unsigned char *back = mem_alloc(4 * MIB);
	void *at;
	int fd;

	(void)arg;
	need_device();
	C_OK(seg_create(&nobody, 4 * MIB, name, &fd));
	C_OK(seg_unlink(name));
	C_OK(seg_allocate(fd, 0, 4 * MIB));
	C_OK(seg_map(fd, 4 * MIB, true, &m));
	fill(m.p, 4 * MIB, 3);
	C_OK(device_open(0, &d));
	C_OK(device_pin(d, m.p, 4 * MIB));
	C_ERR(DEVICE_FAILED, device_pin(d, m.p, 4 * MIB));
	C_TEXT("cuMemHostRegister of 4194304 bytes: ");
	C_TEXT("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, error 712");
	C_OK(device_alloc(d, 4 * MIB, &at));
	C_OK(device_copy(d, at, m.p, 4 * MIB, DEVICE_PUT));
	C_OK(device_copy(d, back, at, 4 * MIB, DEVICE_GET));
	C_OK(device_wait(d, WAIT_MS));
	C_TRUE(memcmp(back, m.p, 4 * MIB) == 0);
	C_OK(device_unpin(d, m.p));
	C_ERR(DEVICE_FAILED, device_unpin(d, m.p));
	C_TEXT("cuMemHostUnregister: ");
	device_free(d, at);
	device_close(d);
	seg_unmap(&m);
	close(fd);
	mem_free(back);
}

static void test_pin(void **state)
{
	(void)state;
	t_fakes_run(pin_case, NULL);
}

static void memory_case(void *arg)
{
	struct device *d;
	struct device_info info;
	void *at;

	(void)arg;
	need_device();
	C_OK(device_open(0, &d));
	C_OK(device_cuda_info(0, &info));
	C_ERR(NO_MEMORY, device_alloc(d, info.memory_bytes + MIB, &at));
	C_TEXT("out of memory (CUDA_ERROR_OUT_OF_MEMORY, error 2)");
	C_OK(device_alloc(d, MIB, &at)); /* and goes on working */
	device_free(d, at);
	device_close(d);
}

static void test_memory(void **state)
{
	(void)state;
	t_fakes_run(memory_case, NULL);
}

/* ---- reasons ---- */

static void reason_case(void *arg)
{
	struct device *d;
	struct device_info info;

	C_ERR(BACKEND_UNAVAILABLE, device_cuda_open());
	C_TEXT((const char *)arg);
	C_ERR(BACKEND_UNAVAILABLE, device_cuda_open()); /* the first answer again, text and all */
	C_TEXT((const char *)arg);
	C_TRUE(device_cuda_count() == 0);
	C_ERR(BACKEND_UNAVAILABLE, device_open(0, &d));
	C_ERR(BACKEND_UNAVAILABLE, device_cuda_info(0, &info));
	C_TEXT((const char *)arg);
}

/* A GPU that fell off is looked at before the one that is wanted. */
static void second_of_two(void *arg)
{
	struct device_info info;
	uint32_t index;

	(void)arg;
	C_OK(device_cuda_info(1, &info));
	setenv("FAKE_CUDA_FAIL", "cuDeviceGetName:1:999", 1);
	C_OK(device_cuda_find(info.uuid, &index));
	C_TRUE(index == 1);
	setenv("FAKE_CUDA_FAIL", "cuDeviceGetUuid_v2:1:999", 1);
	C_ERR(DEVICE_FAILED, device_cuda_find("GPU-of-another-host", &index));
	C_TEXT("cuDeviceGetUuid");
}

static void test_find(void **state)
{
	(void)state;
	if (t_gpu())
		skip();
	setenv("FAKE_CUDA_DEVICES", "2", 1);
	t_fakes_run(second_of_two, NULL);
	unsetenv("FAKE_CUDA_DEVICES");
}

static void test_reasons(void **state)
{
	static const struct { const char *name, *value, *text; } cases[] = {
		{ "FAKE_CUDA_INIT", "100", "cuInit: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE, error 100)" },
		{ "FAKE_CUDA_INIT", "804", "cuInit: the driver has no text for it (unknown error, error 804)" },
		{ "FAKE_CUDA_DEVICES", "0", "the NVIDIA driver shows no GPU to this process" },
		{ "FAKE_CUDA_FAIL", "cuDriverGetVersion:1:3", "cuDriverGetVersion: initialization error (CUDA_ERROR_NOT_INITIAL" },
		{ "FAKE_CUDA_VERSION", "11030", "the NVIDIA driver is too old: it is of CUDA 11.3, and 11.4 or newer is needed" },
		{ "FAKE_CUDA_FAIL", "cuDeviceGetCount:1:3", "cuDeviceGetCount: initialization error (CUDA_ERROR_NOT_INITIAL" },
	};

	(void)state;
	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		setenv(cases[i].name, cases[i].value, 1);
		t_fakes_run(reason_case, (void *)(uintptr_t)cases[i].text);
		unsetenv(cases[i].name);
	}
}

/* A library search path decides, and it is read at start: the case is this program again. */
static void run_alone(const char *path, const char *expected)
{
	fflush(NULL);
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		setenv("LD_LIBRARY_PATH", path, 1);
		execl("/proc/self/exe", "test_device", "--reason", expected, NULL);
		_exit(1);
	}
	t_fakes_end(pid);
}

static void test_libraries(void **state)
{
	char dir[] = "/tmp/dcpd-device-XXXXXX", lib[64];

	(void)state;
	if (t_gpu())
		skip();
	assert_non_null(mkdtemp(dir));
	if (access("/usr/lib/x86_64-linux-gnu/libcuda.so.1", F_OK) != 0)
		run_alone(dir, "libcuda.so.1 was not found: no NVIDIA driver is installed here");
	snprintf(lib, sizeof lib, "%s/libcuda.so.1", dir);
	int fd = open(lib, O_CREAT | O_WRONLY | O_CLOEXEC, 0700);
	assert_true(fd >= 0 && write(fd, "no library", 10) == 10);
	close(fd);
	run_alone(dir, "libcuda.so.1 cannot be loaded: ");
	unlink(lib);
	/* a library that is one, without the driver's functions */
	char fake[4300];
	snprintf(fake, sizeof fake, "%s/libnccl.so.2", getenv("DCPD_TEST_FAKES"));
	assert_int_equal(symlink(fake, lib), 0);
	run_alone(dir, "libcuda.so.1 lacks cuInit: the NVIDIA driver is too old");
	unlink(lib);
	rmdir(dir);
}

/* ---- errors of single calls ---- */

static void open_fails(void *arg)
{
	struct device *d;

	C_ERR(DEVICE_FAILED, device_open(0, &d));
	C_TEXT((const char *)arg);
	unsetenv("FAKE_CUDA_FAIL");
	C_OK(device_open(0, &d));
	device_close(d);
}

static void copy_fails(void *arg)
{
	struct device *d;
	char host[16];
	void *at;
	bool done;

	(void)arg;
	C_OK(device_open(0, &d));
	C_OK(device_alloc(d, sizeof host, &at));
	setenv("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:1:700", 1);
	C_ERR(DEVICE_FAILED, device_copy(d, at, host, sizeof host, DEVICE_PUT));
	C_TEXT("cuMemcpyHtoDAsync: ");
	setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:1:700", 1);
	C_ERR(DEVICE_FAILED, device_copy(d, host, at, sizeof host, DEVICE_GET));
	C_TEXT("cuMemcpyDtoHAsync: ");
	setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoDAsync_v2:1:700", 1);
	C_ERR(DEVICE_FAILED, device_copy(d, at, at, sizeof host, DEVICE_MOVE));
	C_TEXT("cuMemcpyDtoDAsync: ");
	setenv("FAKE_CUDA_FAIL", "cuStreamQuery:1:700", 1);
	C_ERR(DEVICE_FAILED, device_wait(d, WAIT_MS));
	C_TEXT("cuStreamQuery: ");
	setenv("FAKE_CUDA_FAIL", "cuStreamQuery:0:600", 1); /* never ready */
	C_ERR(TIMED_OUT, device_wait(d, 30));
	C_TEXT("within 30 ms");
	setenv("FAKE_CUDA_FAIL", "cuEventRecord:1:700", 1);
	C_ERR(DEVICE_FAILED, device_mark(d, 1));
	unsetenv("FAKE_CUDA_FAIL");
	C_OK(device_mark_done(d, 1, &done));
	C_TRUE(done);
	/* beyond an allocation */
	C_ERR(DEVICE_FAILED, device_copy(d, (char *)at + 8, host, sizeof host, DEVICE_PUT));
	device_free(d, at);
	device_close(d);
}

static void test_call_errors(void **state)
{
	static const char *const calls[] = { "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate" };
	char spec[64], text[64];

	(void)state;
	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		snprintf(spec, sizeof spec, "%s:1:1", calls[i]);
		snprintf(text, sizeof text, "%s: invalid argument", calls[i]);
		setenv("FAKE_CUDA_FAIL", spec, 1);
		t_fakes_run(open_fails, text);
		unsetenv("FAKE_CUDA_FAIL");
	}
	t_fakes_run(copy_fails, NULL);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_cpu),	  cmocka_unit_test(test_gpu),	    cmocka_unit_test(test_marks),
		cmocka_unit_test(test_pin),	  cmocka_unit_test(test_memory),    cmocka_unit_test(test_find),
		cmocka_unit_test(test_reasons),
		cmocka_unit_test(test_libraries), cmocka_unit_test(test_call_errors),
	};

	if (argc == 3 && strcmp(argv[1], "--reason") == 0) {
		reason_case(argv[2]);
		return 0;
	}
	t_fakes_use(argv);
	return cmocka_run_group_tests_name("device", tests, NULL, NULL);
}
