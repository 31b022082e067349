/* libcuda_stream.c: the fake driver's streams, events, copies and kernels. See libcuda.c. */
#include <stdlib.h>
#include <string.h>

#include "device/gather_cast.h"
#include "fakes/libcuda_impl.h"

struct work {
	struct work *next;
	int (*step)(void *arg);
	void *arg;
};

struct CUstream_st {
	struct work *first, **end;
};

struct CUevent_st {
	struct CUstream_st *stream;
	int pending;
};

void fake_cuda_push(struct CUstream_st *s, int (*step)(void *arg), void *arg)
{
	struct work *w = calloc(1, sizeof *w);

	w->step = step;
	w->arg = arg;
	*s->end = w;
	s->end = &w->next;
}

/* Does at most one piece of the stream's work. True: the stream had none. */
static bool advance(struct CUstream_st *s)
{
	struct work *w = s->first;

	if (!w)
		return true;
	if (w->step(w->arg) == FAKE_LATER)
		return false;
	s->first = w->next;
	if (!s->first)
		s->end = &s->first;
	free(w);
	return false;
}

cuda_result cuStreamCreate(struct CUstream_st **out, unsigned flags)
{
	(void)flags;
	BEGIN();
	NEED_CONTEXT();
	*out = calloc(1, sizeof **out);
	(*out)->end = &(*out)->first;
	return CUDA_OK;
}

cuda_result cuStreamDestroy_v2(struct CUstream_st *s)
{
	BEGIN();
	while (s->first) { /* work that never ends would hold us: it is dropped */
		struct work *w = s->first;
		s->first = w->next;
		free(w);
	}
	free(s);
	return CUDA_OK;
}

cuda_result cuStreamQuery(struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return advance(s) ? CUDA_OK : CUDA_NOT_READY;
}

cuda_result cuEventCreate(struct CUevent_st **out, unsigned flags)
{
	(void)flags;
	BEGIN();
	NEED_CONTEXT();
	*out = calloc(1, sizeof **out);
	return CUDA_OK;
}

cuda_result cuEventDestroy_v2(struct CUevent_st *e)
{
	BEGIN();
	free(e);
	return CUDA_OK;
}

static int reach_event(void *arg)
{
	((struct CUevent_st *)arg)->pending--;
	return FAKE_DONE;
}

cuda_result cuEventRecord(struct CUevent_st *e, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	e->stream = s;
	e->pending++;
	fake_cuda_push(s, reach_event, e);
	return CUDA_OK;
}

cuda_result cuEventQuery(struct CUevent_st *e)
{
	BEGIN();
	NEED_CONTEXT();
	if (e->pending)
		(void)advance(e->stream);
	return e->pending ? CUDA_NOT_READY : CUDA_OK;
}

struct copy {
	void *to;
	const void *from;
	size_t bytes;
};

static int do_copy(void *arg)
{
	struct copy *c = arg;

	memmove(c->to, c->from, c->bytes);
	free(c);
	return FAKE_DONE;
}

static cuda_result copy(void *to, const void *from, size_t bytes, struct CUstream_st *s)
{
	struct copy *c = calloc(1, sizeof *c);

	if (!to || !from) {
		free(c);
		return INVALID_VALUE;
	}
	*c = (struct copy){ to, from, bytes };
	fake_cuda_push(s, do_copy, c);
	return CUDA_OK;
}

cuda_result cuMemcpyHtoDAsync_v2(cuda_ptr to, const void *from, size_t bytes, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return copy(fake_cuda_target((void *)(uintptr_t)to, bytes), from, bytes, s);
}

cuda_result cuMemcpyDtoHAsync_v2(void *to, cuda_ptr from, size_t bytes, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return copy(to, fake_cuda_bytes((void *)(uintptr_t)from, bytes), bytes, s);
}

cuda_result cuMemcpyDtoH_v2(void *to, cuda_ptr from, size_t bytes)
{
	BEGIN();
	NEED_CONTEXT();
	const void *at = fake_cuda_bytes((void *)(uintptr_t)from, bytes);
	if (!to || !at)
		return INVALID_VALUE;
	memcpy(to, at, bytes);
	return CUDA_OK;
}

cuda_result cuMemcpyDtoDAsync_v2(cuda_ptr to, cuda_ptr from, size_t bytes, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return copy(fake_cuda_target((void *)(uintptr_t)to, bytes), fake_cuda_bytes((void *)(uintptr_t)from, bytes), bytes, s);
}

/* ---- kernels, by the functions that they are made of ---- */

struct CUmod_st {
	int kernels;
};

struct launch {
	const void *rows;              /* behind the device's address */
	unsigned count, blocks, threads;
};

struct CUfunc_st {
	const char *name;
	void (*run)(const struct launch *l, unsigned row);
	size_t row_bytes;
	struct CUmod_st *module;
};

struct launched {
	struct launch l;
	const struct CUfunc_st *kernel;
};

/* A fat binary: a head, and images with a head each. The forms are not documented; cuobjdump and fatbinary agree on these fields. */
#define ENTRY ".visible .entry dcpd_gather("
enum { FATBIN_MAGIC = 0xba55ed50, FATBIN_PTX = 1, FATBIN_ELF = 2 };

struct fatbin {
	uint32_t magic;
	uint16_t version, head;
	uint64_t bytes;                /* behind the head */
};

struct fatbin_image {
	uint16_t kind, version;
	uint32_t head;
	uint64_t bytes;                /* behind the head; padded */
	uint32_t packed_bytes, options, minor_major, arch;
};

static int loaded_code;

int fake_cuda_code(void)
{
	return loaded_code;
}

/* Machine code runs on its own architecture and on later ones of the same generation; PTX is compiled for any later one. */
static bool fits(const struct fatbin_image *i)
{
	unsigned here = (unsigned)fake_number("FAKE_CUDA_ARCH", 90);

	return i->arch <= here && (i->kind == FATBIN_PTX || (i->kind == FATBIN_ELF && i->arch / 10 == here / 10));
}

/* Takes machine code before PTX, as a driver does. */
static cuda_result choose_code(const char *image)
{
	struct fatbin f;
	struct fatbin_image i;

	memcpy(&f, image, sizeof f);
	loaded_code = 0;
	if (f.magic != FATBIN_MAGIC) { /* the text of a PTX module */
		const char *target = strstr(image, ".target sm_");
		if (!target || !strstr(image, ENTRY))
			return INVALID_PTX;
		i = (struct fatbin_image){ .kind = FATBIN_PTX, .arch = (uint32_t)strtoul(target + strlen(".target sm_"), NULL, 10) };
		loaded_code = -(int)i.arch;
		return fits(&i) ? CUDA_OK : NO_BINARY;
	}
	for (uint64_t at = f.head; at < f.head + f.bytes; at += i.head + i.bytes) {
		memcpy(&i, image + at, sizeof i);
		if (!fits(&i) || loaded_code > 0)
			continue;
		const char *name = i.kind == FATBIN_PTX ? ENTRY : ".text.dcpd_gather";
		if (!memmem(image + at + i.head, i.bytes, name, strlen(name)))
			return i.kind == FATBIN_PTX ? INVALID_PTX : INVALID_IMAGE;
		loaded_code = i.kind == FATBIN_PTX ? -(int)i.arch : (int)i.arch;
	}
	return loaded_code ? CUDA_OK : NO_BINARY;
}

cuda_result cuModuleLoadData(struct CUmod_st **out, const void *image)
{
	BEGIN();
	NEED_CONTEXT();
	cuda_result r = choose_code(image);
	if (r != CUDA_OK)
		return r;
	*out = calloc(1, sizeof **out);
	fake_modules++;
	return CUDA_OK;
}

cuda_result cuModuleUnload(struct CUmod_st *m)
{
	BEGIN();
	fake_modules--;
	free(m);
	return CUDA_OK;
}

static void gather_row(const struct launch *l, unsigned row)
{
	const struct gather_row *r = (const struct gather_row *)l->rows + row;
	unsigned char *to = fake_cuda_seen(r->to, r->bytes), *from = fake_cuda_seen(r->from, r->bytes);

	if (!to || !from)
		fake_sticky = ILLEGAL_ADDRESS;
	for (unsigned thread = 0; to && from && thread < l->threads; thread++)
		gather_part(to, from, r->bytes, thread, l->threads);
}

static void cast_row(const struct launch *l, unsigned row)
{
	const struct gather_cast_row *r = (const struct gather_cast_row *)l->rows + row;
	unsigned char *to = fake_cuda_seen(r->to, r->count * gather_width(r->to_kind));
	unsigned char *from = fake_cuda_seen(r->from, r->count * gather_width(r->from_kind));

	if (!to || !from || r->to % gather_width(r->to_kind) || r->from % gather_width(r->from_kind))
		fake_sticky = ILLEGAL_ADDRESS;
	for (unsigned thread = 0; !fake_sticky && thread < l->threads; thread++)
		gather_cast_part(to, from, r, thread, l->threads);
}

cuda_result cuModuleGetFunction(struct CUfunc_st **out, struct CUmod_st *m, const char *name)
{
	static struct CUfunc_st kernels[] = { { "dcpd_gather", gather_row, sizeof(struct gather_row), NULL },
					      { "dcpd_cast", cast_row, sizeof(struct gather_cast_row), NULL } };

	BEGIN();
	for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
		if (strcmp(name, kernels[i].name) == 0) {
			kernels[i].module = m;
			*out = &kernels[i];
			return CUDA_OK;
		}
	return NOT_FOUND;
}

static int do_launch(void *arg)
{
	struct launched *k = arg;

	for (unsigned block = 0; block < k->l.blocks; block++)
		for (unsigned i = block; i < k->l.count && !fake_sticky; i += k->l.blocks)
			k->kernel->run(&k->l, i);
	free(k);
	return FAKE_DONE;
}

cuda_result cuLaunchKernel(struct CUfunc_st *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			   unsigned shared, struct CUstream_st *s, void **params, void **extra)
{
	struct launch l = { .blocks = gx, .threads = bx };
	cuda_ptr rows;

	BEGIN();
	NEED_CONTEXT();
	if (!f->module || !gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra)
		return INVALID_VALUE;
	memcpy(&rows, params[0], sizeof rows); /* arguments are read by the call */
	memcpy(&l.count, params[1], sizeof l.count);
	l.rows = fake_cuda_bytes((void *)(uintptr_t)rows, l.count * f->row_bytes);
	if (!l.rows)
		return INVALID_VALUE;
	struct launched *kept = calloc(1, sizeof *kept);
	*kept = (struct launched){ l, f };
	fake_cuda_push(s, do_launch, kept);
	return CUDA_OK;
}
