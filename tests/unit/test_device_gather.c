/* test_device_gather.c: many small pieces by one launch, in both directions: every distance of the addresses from a word's boundary, every
 * short length, nothing written beside a piece; casts between all floating dtypes, bit for bit as the CPU's; and a driver that does not
 * run the kernels. The fake driver runs the kernels' own functions; the cases without injected errors run over a real GPU too (make
 * check-gpu). */
#include "device/device.h"

#include <dlfcn.h>

#include "base/mem.h"
#include "lib/t_fakes.h"
#include "tensor/cast.h"

enum { ROOM = 1 << 20, WAIT_MS = 20000, BESIDE = 0x5a };

static struct device *need_device(void)
{
	struct device *d;

	if (t_gpu() && device_cuda_open() != OK)
		_exit(T_NO_GPU);
	C_OK(device_open(0, &d));
	return d;
}

struct world {
	struct device *d;
	unsigned char *host, *seen, *want, *back;
	char *there;
	struct device_piece *pieces;
	uint32_t n;
};

static void begin(struct world *w)
{
	void *p;

	*w = (struct world){ .d = need_device() };
	C_TRUE(posix_memalign((void **)&w->host, 4096, ROOM) == 0);
	w->want = mem_alloc(ROOM);
	w->back = mem_alloc(ROOM);
	w->pieces = mem_zalloc(DEVICE_GATHER_MAX, sizeof *w->pieces);
	C_TRUE(w->want && w->back && w->pieces);
	C_OK(device_alloc(w->d, ROOM, &p));
	w->there = p;
	C_OK(device_pin(w->d, w->host, ROOM));
	C_OK(device_host_pointer(w->d, w->host, &p));
	w->seen = p;
}

static void end(struct world *w)
{
	C_OK(device_unpin(w->d, w->host));
	device_free(w->d, w->there);
	device_close(w->d);
	free(w->host);
	mem_free(w->want);
	mem_free(w->back);
	mem_free(w->pieces);
}

/* Source and target: to the host the pattern is on the device, and the other way round. Makes `want` of it. */
static void lay_out(struct world *w, bool to_host)
{
	unsigned char *pattern = w->back;
	uint64_t at = 0;

	for (uint32_t i = 0; i < ROOM; i++)
		pattern[i] = (unsigned char)(i * 131 + i / 251 + 1);
	memset(w->want, BESIDE, ROOM);
	for (w->n = 0; w->n < 17 * 17 * 8; w->n++) {
		uint32_t a = w->n % 17, b = w->n / 17 % 17;
		uint64_t bytes = w->n / 289 == 7 ? 1000 + w->n : w->n / 289 * 7 + a % 5;
		uint64_t from = at + a, to = at + b;
		w->pieces[w->n] = to_host ? (struct device_piece){ w->seen + to, w->there + from, bytes }
					  : (struct device_piece){ w->there + to, w->seen + from, bytes };
		memcpy(w->want + to, pattern + from, bytes);
		at += bytes + 32 - bytes % 16;
		C_TRUE(at + 8192 < ROOM);
	}
}

static void gather_case(void *arg)
{
	bool to_host = arg != NULL;
	struct world w;

	begin(&w);
	lay_out(&w, to_host);
	if (!to_host)
		memcpy(w.host, w.back, ROOM);
	C_OK(device_copy(w.d, w.there, w.back, ROOM, DEVICE_PUT));
	C_OK(device_wait(w.d, WAIT_MS));
	memset(w.back, BESIDE, ROOM);
	if (to_host)
		memset(w.host, BESIDE, ROOM);
	else
		C_OK(device_copy(w.d, w.there, w.back, ROOM, DEVICE_PUT));
	C_OK(device_gather(w.d, w.pieces, w.n, 3));
	C_OK(device_mark(w.d, 3));
	memset(w.pieces, 0, w.n * sizeof *w.pieces); /* read by the call */
	C_OK(device_mark_wait(w.d, 3, WAIT_MS));
	if (!to_host)
		C_OK(device_copy(w.d, w.back, w.there, ROOM, DEVICE_GET));
	C_OK(device_wait(w.d, WAIT_MS));
	C_TRUE(memcmp(to_host ? w.host : w.back, w.want, ROOM) == 0);
	C_OK(device_gather(w.d, w.pieces, 0, 0));
	end(&w);
}

static void test_gather(void **)
{
	t_fakes_run(gather_case, NULL);
	t_fakes_run(gather_case, "to the host");
}

static const enum dtype floats[] = { DT_FLOAT64, DT_FLOAT32, DT_FLOAT16, DT_BFLOAT16, DT_FLOAT8_E4M3FN, DT_FLOAT8_E5M2,
				     DT_FLOAT8_E4M3FNUZ, DT_FLOAT8_E5M2FNUZ, DT_FLOAT8_E8M0FNU };

enum { FLOATS = sizeof floats / sizeof *floats, CODES = 1 << 16, SPAN = ROOM / 2 };

/* Elements of a dtype: every code of one that has 16 bits or fewer; of others the edges of each narrower dtype's numbers, their halves and
 * neighbours, subnormals, infinities and NaNs of all kinds, and codes at random. */
static void make_elements(unsigned char *p, enum dtype d)
{
	uint64_t random = 88172645463325252ull;

	for (uint32_t i = 0; i < CODES; i++) {
		random ^= random << 13, random ^= random >> 7, random ^= random << 17;
		uint32_t low = random & 1 ? (uint32_t)(random >> 40) & 3 : (uint32_t)(random >> 40) & 0xFFFF, single = i << 16 | low;
		uint64_t twice = (uint64_t)i << 48 | (random & 2 ? random >> 20 & 0xFFFFFFFFFFFF : random >> 60);
		if (dtype_bytes(d) == 8 && i % 4 == 1) { /* what floats hold, and halves between them */
			float f;
			memcpy(&f, &single, sizeof f);
			double wide = f;
			memcpy(&twice, &wide, sizeof twice);
			twice += random % 3 ? 0 : 1u << 28;
		}
		memcpy(p + (uint64_t)i * dtype_bytes(d), dtype_bytes(d) == 8 ? (void *)&twice : (void *)&single, dtype_bytes(d));
		if (dtype_bytes(d) <= 2) {
			uint16_t code = (uint16_t)i;
			memcpy(p + (uint64_t)i * dtype_bytes(d), &code, dtype_bytes(d));
		}
	}
}

/* Casts elements of `from` to `to` in parts: on both sides, parts begin at every distance of elements from a word's boundary. */
static void cast_pair(struct world *w, enum dtype to, enum dtype from)
{
	CLEANUP(mem_free_ptr) struct device_cast *casts = mem_zalloc(DEVICE_GATHER_MAX, sizeof *casts);
	uint64_t in = dtype_bytes(from), out = dtype_bytes(to), room_in = SPAN + 64, room_out = SPAN + 64, at_in = 0, at_out = 0;
	bool to_host = out <= in;
	unsigned char *source = w->back;
	uint32_t n = 0;

	C_TRUE(casts && device_casts(to, from));
	memset(source, 0, ROOM);
	make_elements(source, from);
	memset(w->want, BESIDE, ROOM);
	memset(w->host, BESIDE, ROOM);
	if (!to_host)
		memcpy(w->host, source, room_in);
	C_OK(device_copy(w->d, w->there, to_host ? source : w->want, ROOM, DEVICE_PUT));
	for (uint32_t done = 0; done < CODES && at_in < room_in && at_out < room_out; n++) {
		uint64_t count = n < 64 ? n % 9 : 4096;
		if (count > CODES - done)
			count = CODES - done;
		if ((at_out + count + 9) * out > room_out || (at_in + count) * in > room_in)
			break;
		char *host = (char *)w->seen + (to_host ? at_out * out : at_in * in);
		char *there = w->there + (to_host ? at_in * in : at_out * out);
		casts[n] = (struct device_cast){ to_host ? host : there, to_host ? there : host, count, to, from };
		C_OK(cast_run(w->want + at_out * out, to, source + at_in * in, from, count));
		done += (uint32_t)count;
		at_in += count;
		at_out += count + n % 5; /* the two sides drift apart */
	}
	C_TRUE(at_in == CODES || in == 8 || out == 8);
	C_OK(device_cast(w->d, casts, n, 1));
	C_OK(device_mark(w->d, 1));
	C_OK(device_mark_wait(w->d, 1, WAIT_MS));
	if (!to_host)
		C_OK(device_copy(w->d, w->host, w->there, ROOM, DEVICE_GET));
	C_OK(device_wait(w->d, WAIT_MS));
	for (uint64_t i = 0; i < room_out; i++)
		if (w->host[i] != w->want[i]) {
			fprintf(stderr, "%s to %s: byte %ju is %02x, not %02x\n", dtype_name(from), dtype_name(to), (uintmax_t)i,
				w->host[i], w->want[i]);
			_exit(1);
		}
}

static void cast_case(void *)
{
	struct world w;

	begin(&w);
	for (uint32_t a = 0; a < FLOATS; a++)
		for (uint32_t b = 0; b < FLOATS; b++)
			if (a != b)
				cast_pair(&w, floats[a], floats[b]);
	C_TRUE(!device_casts(DT_FLOAT32, DT_FLOAT32) && !device_casts(DT_INT8, DT_FLOAT32));
	C_TRUE(!device_casts(DT_FLOAT32, DT_FLOAT4_E2M1FN_X2));
	C_OK(device_cast(w.d, NULL, 0, 0));
	end(&w);
}

static void test_casts(void **)
{
	t_fakes_run(cast_case, NULL);
}

/* The text of the calls that prepare a kernel, the driver's answer. */
static const char *const refusals[][2] = {
	{ "cuModuleLoadData:0:218", "cuModuleLoadData: a PTX JIT compilation failed" },
	{ "cuModuleLoadData:0:222", "cuModuleLoadData: the driver has no text for it" },
	{ "cuModuleGetFunction:1:500", "cuModuleGetFunction: named symbol not found" },
	{ "cuModuleGetFunction:2:500", "cuModuleGetFunction: named symbol not found" },
	{ "cuMemAlloc_v2:1:2", "cuMemAlloc: out of memory" },
};

static void refused_case(void *arg)
{
	const char *const *refusal = arg;
	struct device_piece piece;
	struct world w;

	begin(&w);
	piece = (struct device_piece){ w.seen, w.there, 10 };
	setenv("FAKE_CUDA_FAIL", refusal[0], 1);
	C_ERR(BACKEND_UNAVAILABLE, device_gather(w.d, &piece, 1, 0));
	C_TEXT(refusal[1]);
	unsetenv("FAKE_CUDA_FAIL");
	C_ERR(BACKEND_UNAVAILABLE, device_gather(w.d, &piece, 1, 0)); /* not tried again */
	C_TEXT(refusal[1]);
	C_ERR(BACKEND_UNAVAILABLE, device_cast(w.d, &(struct device_cast){ w.seen, w.there, 1, DT_FLOAT16, DT_FLOAT32 }, 1, 0));
	C_OK(device_copy(w.d, w.host, w.there, 10, DEVICE_GET));
	C_OK(device_wait(w.d, WAIT_MS));
	end(&w);
}

static void launch_case(void *)
{
	struct device_piece piece;
	struct world w;

	begin(&w);
	piece = (struct device_piece){ w.seen, w.there, 10 };
	setenv("FAKE_CUDA_FAIL", "cuLaunchKernel:1:701", 1);
	C_ERR(DEVICE_FAILED, device_gather(w.d, &piece, 1, 0));
	C_TEXT("cuLaunchKernel");
	unsetenv("FAKE_CUDA_FAIL");
	piece.from = w.want; /* the host's own memory: the context is lost, as it is on a GPU */
	C_OK(device_gather(w.d, &piece, 1, 0));
	C_ERR(DEVICE_FAILED, device_wait(w.d, WAIT_MS));
	C_TEXT("CUDA_ERROR_ILLEGAL_ADDRESS");
}

static void test_refused(void **)
{
	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
		t_fakes_run(refused_case, (void *)refusals[i]);
	t_fakes_run(launch_case, NULL);
}

/* The architecture of the GPU, and the code that its driver takes: machine code, or, negative, PTX. */
static const struct { const char *arch; int code; } codes[] = {
	{ "80", 80 }, { "86", 80 }, { "89", 80 }, { "90", 90 }, { "100", 100 }, { "103", 100 }, { "120", -80 },
};

static void code_case(void *arg)
{
	int (*code)(void), *wanted = arg;

	gather_case(NULL);
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	C_TRUE(lib && (*(void **)&code = dlsym(lib, "fake_cuda_code")));
	C_TRUE(code() == *wanted);
}

static const char *const too_old[] = { "", "cuModuleLoadData: no kernel image is available" };

static void test_code(void **)
{
	if (t_gpu())
		skip();
	for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
		int code = codes[i].code;
		setenv("FAKE_CUDA_ARCH", codes[i].arch, 1);
		t_fakes_run(code_case, &code);
	}
	setenv("FAKE_CUDA_ARCH", "90", 1);
	setenv("FAKE_CUDA_FAIL", "cuModuleLoadData:1:200", 1); /* a driver that does not know the fat binary's form takes the PTX */
	t_fakes_run(code_case, (int[]){ -80 });
	unsetenv("FAKE_CUDA_FAIL");
	setenv("FAKE_CUDA_ARCH", "75", 1);
	t_fakes_run(refused_case, (void *)too_old);
	unsetenv("FAKE_CUDA_ARCH");
}

static void cpu_case(void *)
{
	struct device_cast cast = { .count = 1, .to_dtype = DT_FLOAT16, .from_dtype = DT_FLOAT32 };
	struct device_piece piece = { .bytes = 1 };
	struct device *d;
	void *p;

	C_OK(device_open(DEVICE_CPU, &d));
	C_ERR(BACKEND_UNAVAILABLE, device_gather(d, &piece, 1, 0));
	C_ERR(BACKEND_UNAVAILABLE, device_cast(d, &cast, 1, 0));
	C_ERR(BACKEND_UNAVAILABLE, device_host_pointer(d, &piece, &p));
	device_close(d);
}

static void test_cpu(void **)
{
	t_fakes_run(cpu_case, NULL);
}

int main(int, char **argv)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_gather), cmocka_unit_test(test_code),	 cmocka_unit_test(test_casts),
					    cmocka_unit_test(test_refused), cmocka_unit_test(test_cpu) };

	t_fakes_use(argv);
	return cmocka_run_group_tests_name("device_gather", tests, NULL, NULL);
}
