/* test_device_import.c: memory of another process, by legacy handle and by descriptor, and new memory for others, with every call of the
 * driver failing once: the error names the call, and nothing stays open unless the error says that this process must end. The cases without
 * injected errors run over a real GPU too (make check-gpu). */
#include "device/device.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include "base/mem.h"
#include "fakes/fake_cuda.h"
#include "lib/t_fakes.h"

enum { NOT_SUPPORTED = 801, VMM_BYTES = 2 << 20, LEGACY_BYTES = 300001, WAIT_MS = 20000 };

static struct {
#define X(member, symbol, params) cuda_result (*member) params;
	CUDA_FUNCTIONS(X)
	FAKE_CUDA_EXPORTS(X)
#undef X
	int (*left)(void);
} driver;

static void load(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);

	if (!lib && t_gpu())
		_exit(T_NO_GPU);
	C_TRUE(lib);
#define X(member, symbol, params) *(void **)&driver.member = dlsym(lib, #symbol);
	CUDA_FUNCTIONS(X)
	FAKE_CUDA_EXPORTS(X)
#undef X
	*(void **)&driver.left = dlsym(lib, "fake_cuda_left");
	if (device_cuda_open() != OK && t_gpu())
		_exit(T_NO_GPU);
}

static unsigned char *pattern(size_t n)
{
	unsigned char *p = mem_alloc(n);

	C_TRUE(p);
	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)(i * 131 + i / 251);
	return p;
}

static void *device_with(struct device *d, size_t n)
{
	unsigned char *host = pattern(n);
	void *p;

	C_OK(device_alloc(d, n, &p));
	C_OK(device_copy(d, p, host, n, DEVICE_PUT));
	C_OK(device_wait(d, WAIT_MS));
	mem_free(host);
	return p;
}

/* Bytes 5 to the end are the pattern's. */
static void is_pattern(struct device *d, const struct device_import *i, size_t n)
{
	unsigned char *want = pattern(n), *got = mem_zalloc(1, n);

	C_TRUE(got);
	C_OK(device_copy(d, got, (char *)i->p + 5, n - 5, DEVICE_GET));
	C_OK(device_wait(d, WAIT_MS));
	C_TRUE(memcmp(got, want + 5, n - 5) == 0);
	mem_free(want);
	mem_free(got);
}

/* ---- legacy handles: of a process of its own ---- */

struct exporter {
	int to, from;                  /* a byte from `from`: it may end */
	struct device_handle handle;
	pid_t pid;
};

static void export_legacy(void *arg)
{
	struct exporter *x = arg;
	struct device *d;
	char end;

	load();
	C_OK(device_open(0, &d));
	void *p = device_with(d, LEGACY_BYTES);
	C_TRUE(driver.ipc_get((struct CUipcMemHandle_st *)(void *)x->handle.ipc, (cuda_ptr)(uintptr_t)p) == CUDA_OK);
	C_TRUE(write(x->to, x->handle.ipc, DEVICE_IPC_BYTES) == DEVICE_IPC_BYTES);
	C_TRUE(read(x->from, &end, 1) == 1);
	device_free(d, p);
	device_close(d);
}

static void start_exporter(struct exporter *x)
{
	int pair[2];

	C_TRUE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	*x = (struct exporter){ .to = pair[1], .from = pair[1], .handle = { .fd = -1, .bytes = LEGACY_BYTES } };
	char *fail = getenv("FAKE_CUDA_FAIL"), *kept = fail ? mem_strdup(fail) : NULL;
	unsetenv("FAKE_CUDA_FAIL");
	fflush(NULL);
	x->pid = fork();
	if (x->pid == 0) {
		close(pair[0]);
		export_legacy(x);
		_exit(0);
	}
	if (kept)
		setenv("FAKE_CUDA_FAIL", kept, 1);
	mem_free(kept);
	close(pair[1]);
	x->to = pair[0];
	if (recv(pair[0], x->handle.ipc, DEVICE_IPC_BYTES, MSG_WAITALL) != DEVICE_IPC_BYTES) {
		int status = 0;
		C_TRUE(waitpid(x->pid, &status, 0) == x->pid && WIFEXITED(status) && WEXITSTATUS(status) == T_NO_GPU);
		_exit(T_NO_GPU);
	}
}

static void end_exporter(struct exporter *x)
{
	int status = 0;

	C_TRUE(write(x->to, "", 1) == 1 && waitpid(x->pid, &status, 0) == x->pid && status == 0);
}

static void legacy_case(void *)
{
	struct device_import i;
	struct exporter x;
	struct device *d;

	start_exporter(&x);
	load();
	C_OK(device_open(0, &d));
	C_OK(device_import(d, &x.handle, &i));
	is_pattern(d, &i, LEGACY_BYTES);
	C_OK(device_import_end(d, &i));
	C_TRUE(i.p == NULL);
	x.handle.bytes = 1ull << 40;
	C_ERR(VALIDATION_FAILED, device_import(d, &x.handle, &i));
	C_TEXT("is said to have 1099511627776");
	x.handle.bytes = LEGACY_BYTES;
	end_exporter(&x);
	if (!t_gpu()) {
		C_ERR(DEVICE_FAILED, device_import(d, &x.handle, &i));
		C_TEXT("cuIpcOpenMemHandle: invalid resource handle");
		C_TRUE(driver.left() == 0);
	}
	device_close(d);
}

static void test_legacy(void **)
{
	t_fakes_run(legacy_case, NULL);
}

/* ---- VMM descriptors ---- */

static void export_vmm(struct device *d, struct device_handle *out, cuda_ptr *at_out)
{
	struct CUmemAccessDesc_st access = { { CUDA_LOCATION_DEVICE, 0 }, CUDA_ACCESS_READWRITE };
	const int how[8] = { 1, CUDA_HANDLE_FD, CUDA_LOCATION_DEVICE, 0 };
	unsigned char *host = pattern(VMM_BYTES);
	cuda_allocation a = 0;
	int fd = -1;

	C_OK(device_enter(d));
	C_TRUE(driver.vmm_create(&a, VMM_BYTES, (const struct CUmemAllocationProp_st *)(const void *)how, 0) == CUDA_OK);
	C_TRUE(driver.vmm_reserve(at_out, VMM_BYTES, 0, 0, 0) == CUDA_OK);
	C_TRUE(driver.vmm_map(*at_out, VMM_BYTES, 0, a, 0) == CUDA_OK && driver.vmm_access(*at_out, VMM_BYTES, &access, 1) == CUDA_OK);
	C_TRUE(driver.vmm_export(&fd, a, CUDA_HANDLE_FD, 0) == CUDA_OK && driver.vmm_release(a) == CUDA_OK);
	C_OK(device_copy(d, (void *)(uintptr_t)*at_out, host, VMM_BYTES, DEVICE_PUT));
	C_OK(device_wait(d, WAIT_MS));
	mem_free(host);
	*out = (struct device_handle){ .fd = fd, .bytes = VMM_BYTES };
}

static void drop_vmm(cuda_ptr at)
{
	C_TRUE(driver.vmm_unmap(at, VMM_BYTES) == CUDA_OK && driver.vmm_unreserve(at, VMM_BYTES) == CUDA_OK);
}

static void vmm_case(void *)
{
	struct device_handle h;
	struct device_import i;
	struct device *d;
	cuda_ptr at;

	load();
	C_OK(device_open(0, &d));
	export_vmm(d, &h, &at);
	drop_vmm(at); /* the memory is the descriptor's, too */
	C_OK(device_import(d, &h, &i));
	is_pattern(d, &i, VMM_BYTES);
	C_OK(device_import_end(d, &i));
	h.bytes *= 2;
	C_ERR(DEVICE_FAILED, device_import(d, &h, &i));
	C_TEXT("cuMemMap of 4194304 bytes: ");
	close(h.fd);
	C_TRUE(t_gpu() || driver.left() == 0);
	device_close(d);
}

static void test_vmm(void **)
{
	t_fakes_run(vmm_case, NULL);
}

/* ---- new memory for others ---- */

static void new_case(void *)
{
	unsigned char *host = pattern(LEGACY_BYTES);
	struct device_import made, i;
	struct device *d;
	int fd = -1;

	load();
	C_OK(device_open(0, &d));
	C_OK(device_create(d, LEGACY_BYTES, &made));
	C_TRUE(made.bytes == VMM_BYTES);
	C_OK(device_copy(d, made.p, host, LEGACY_BYTES, DEVICE_PUT));
	C_OK(device_wait(d, WAIT_MS));
	C_OK(device_export(d, &made, &fd));
	C_OK(device_import_end(d, &made));
	C_TRUE(t_gpu() || driver.left() == 0);
	C_OK(device_import(d, &(struct device_handle){ .fd = fd, .bytes = VMM_BYTES }, &i)); /* the descriptor alone holds the memory */
	is_pattern(d, &i, LEGACY_BYTES);
	C_OK(device_import_end(d, &i));
	C_OK(device_create(d, VMM_BYTES + 1, &made));
	C_TRUE(made.bytes == 2 * VMM_BYTES);
	C_OK(device_import_end(d, &made));
	close(fd);
	mem_free(host);
	device_close(d);
}

static void full_case(void *)
{
	struct device_import made;
	struct device *d;

	load();
	C_OK(device_open(0, &d));
	C_ERR(NO_MEMORY, device_create(d, 1ull << 40, &made));
	C_TEXT("cuMemCreate of 1099511627776 bytes");
	C_TRUE(driver.left() == 0);
	device_close(d);
}

static void refused_case(void *)
{
	struct device_import made;
	struct device *d;

	setenv("FAKE_CUDA_NO_VMM", "1", 1);
	load();
	C_OK(device_open(0, &d));
	C_ERR(BACKEND_UNAVAILABLE, device_create(d, 1, &made));
	C_TEXT("cannot share memory by descriptors");
	device_close(d);
}

static void test_new(void **)
{
	t_fakes_run(new_case, NULL);
	if (t_gpu())
		return;
	t_fakes_run(full_case, NULL);
	t_fakes_run(refused_case, NULL);
}

/* Each call that makes memory, or exports it, fails: nothing stays open. */
static void failing_new_case(void *arg)
{
	const char *symbol = arg;
	struct device_import made;
	struct device *d;
	char spec[64];
	int fd = -1;

	load();
	C_OK(device_open(0, &d));
	snprintf(spec, sizeof spec, "%s:1:%d", symbol, NOT_SUPPORTED);
	setenv("FAKE_CUDA_FAIL", spec, 1);
	enum err e = device_create(d, LEGACY_BYTES, &made);
	if (e == OK) {
		e = device_export(d, &made, &fd);
		C_OK(device_import_end(d, &made));
	}
	C_TRUE(e == ERR_DEVICE_FAILED && fd < 0 && driver.left() == 0);
	C_TEXT(symbol);
	unsetenv("FAKE_CUDA_FAIL");
	device_close(d);
}

static void test_failing_new(void **)
{
	static char *const calls[] = { "cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve",
				       "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle" };

	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
		t_fakes_run(failing_new_case, calls[i]);
}

/* ---- each call fails once ---- */

struct failing {
	const char *symbol;
	bool vmm, ends;                /* of VMM memory; the call that lets go */
};

struct failure {
	const struct failing *call;
	int answer;
};

static const struct failing failing[] = {
	{ "cuIpcOpenMemHandle", false, false },		 { "cuMemGetAddressRange", false, false }, { "cuIpcCloseMemHandle", false, true },
	{ "cuMemImportFromShareableHandle", true, false }, { "cuMemAddressReserve", true, false },   { "cuMemMap", true, false },
	{ "cuMemSetAccess", true, false },		 { "cuMemUnmap", true, true },		   { "cuMemAddressFree", true, true },
	{ "cuMemRelease", true, true },
};

static const char *full_name(const char *symbol)
{
	return strcmp(symbol, "cuIpcOpenMemHandle") == 0 ? "cuIpcOpenMemHandle_v2"
	       : strcmp(symbol, "cuMemGetAddressRange") == 0 ? "cuMemGetAddressRange_v2" : symbol;
}

static void fail_once(const struct failing *f, struct device *d, const struct device_handle *h, int answer)
{
	struct device_import i;
	int before = driver.left();
	char spec[64];

	snprintf(spec, sizeof spec, "%s:1:%d", full_name(f->symbol), answer);
	setenv("FAKE_CUDA_FAIL", spec, 1);
	enum err want = answer == CUDA_OUT_OF_MEMORY ? ERR_NO_MEMORY : ERR_DEVICE_FAILED;
	if (f->ends) {
		C_OK(device_import(d, h, &i));
		C_ERR_IS(want, device_import_end(d, &i));
	} else {
		C_ERR_IS(want, device_import(d, h, &i));
		C_TRUE(driver.left() == before);
	}
	unsetenv("FAKE_CUDA_FAIL");
	C_TEXT(f->symbol);
	C_TEXT(answer == CUDA_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_NOT_SUPPORTED");
}

static void failing_case(void *arg)
{
	const struct failure *failure = arg;
	const struct failing *f = failure->call;
	struct device_handle h;
	struct exporter x;
	struct device *d;
	cuda_ptr at;

	if (!f->vmm)
		start_exporter(&x);
	load();
	C_OK(device_open(0, &d));
	if (f->vmm)
		export_vmm(d, &h, &at);
	else
		h = x.handle;
	fail_once(f, d, &h, failure->answer);
	if (f->vmm)
		close(h.fd);
	else
		end_exporter(&x);
}

static void test_failing(void **)
{
	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof failing / sizeof *failing; i++)
		for (int k = 0; k < 2; k++)
			t_fakes_run(failing_case, &(struct failure){ &failing[i], k ? NOT_SUPPORTED : CUDA_OUT_OF_MEMORY });
}

/* An import that fails and cannot be undone: the error says that the process must end. */
static void stuck_case(void *)
{
	struct device_handle h;
	struct device_import i;
	struct device *d;
	cuda_ptr at;

	load();
	C_OK(device_open(0, &d));
	export_vmm(d, &h, &at);
	setenv("FAKE_CUDA_FAIL", "cuMemMap:1:2:sticky", 1);
	C_ERR(DEVICE_FAILED, device_import(d, &h, &i));
	C_TEXT("cuMemMap");
	unsetenv("FAKE_CUDA_FAIL");
	C_ERR(NO_MEMORY, device_enter(d)); /* and goes on failing */
}

static void test_stuck(void **)
{
	if (t_gpu())
		skip();
	t_fakes_run(stuck_case, NULL);
}

static void cpu_case(void *)
{
	struct device_handle h = { .fd = -1, .bytes = 1 };
	struct device_import i = { 0 };
	struct device *d;

	C_OK(device_open(DEVICE_CPU, &d));
	C_ERR(BACKEND_UNAVAILABLE, device_import(d, &h, &i));
	C_OK(device_import_end(d, &i));
	C_ERR(BACKEND_UNAVAILABLE, device_create(d, 1, &i));
	device_close(d);
}

static void test_cpu(void **)
{
	t_fakes_run(cpu_case, NULL);
}

int main(int, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_legacy), cmocka_unit_test(test_vmm), cmocka_unit_test(test_failing),
		cmocka_unit_test(test_stuck),  cmocka_unit_test(test_cpu), cmocka_unit_test(test_new), cmocka_unit_test(test_failing_new),
	};

	t_fakes_use(argv);
	return cmocka_run_group_tests_name("device_import", tests, NULL, NULL);
}
