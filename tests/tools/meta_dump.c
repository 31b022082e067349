/* meta_dump.c: `.metadata` as JSON, for the interop tests.
 *
 *     meta_dump FILE … [--rewrite OUT] [--quiet]     several files: their union (rank-local checkpoints)
 *     meta_dump --synthetic RANKS CHUNKS OUT         a large one, to measure with; prints times and memory */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include "base/mem.h"
#include "format/dcp_meta.h"
#include "tensor/box.h"

static void die(const char *what)
{
	const struct err_info *e = err_last();

	fprintf(stderr, "%s: %s: %s (%s) fqn '%s' offset %jd\n", what, err_code_name(e->code), e->text,
		e->place ? e->place : "", e->fqn, (intmax_t)e->offset);
	exit(1);
}

static void *slurp(const char *path, size_t *n)
{
	FILE *f = fopen(path, "rb");
	char *p;

	if (!f || fseek(f, 0, SEEK_END)) {
		perror(path);
		exit(2);
	}
	*n = (size_t)ftell(f);
	rewind(f);
	p = mem_alloc(*n);
	if (!p || fread(p, 1, *n, f) != *n) {
		perror(path);
		exit(2);
	}
	fclose(f);
	return p;
}

static enum err to_file(void *user, const void *bytes, size_t n)
{
	return fwrite(bytes, 1, n, user) == n ? OK : ERR_SYS(STORAGE_IO, "cannot write");
}

/* FQNs may hold lone surrogates, which JSON text cannot: hex. */
static void put_hex(struct str s)
{
	putchar('"');
	for (size_t i = 0; i < s.n; i++)
		printf("%02x", (unsigned char)s.p[i]);
	putchar('"');
}

static void put_dims(const int64_t *v, uint32_t n)
{
	putchar('[');
	for (uint32_t i = 0; i < n; i++)
		printf("%s%jd", i ? "," : "", (intmax_t)v[i]);
	putchar(']');
}

static void put_path(struct sd_path p)
{
	printf(",\"path\":[");
	for (uint32_t i = 0; i < p.count; i++) {
		if (i)
			putchar(',');
		if (p.parts[i].key.p)
			put_hex(p.parts[i].key);
		else
			printf("%jd", (intmax_t)p.parts[i].index);
	}
	putchar(']');
}

static void put_loc(const struct sdict *sd, const struct sd_loc *loc, uint32_t rank)
{
	printf("\"rank\":%u,\"file\":", rank);
	put_hex(sd->files[loc->file].name);
	printf(",\"offset\":%ju,\"length\":%ju,\"transforms\":", (uintmax_t)loc->offset, (uintmax_t)loc->length);
	put_hex(loc->transform ? sd->transforms[loc->transform - 1] : STR(""));
}

static void dump(const struct sdict *sd)
{
	printf("{\"has_paths\":%s,\"tensors\":[", sd->has_paths ? "true" : "false");
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		printf("%s{\"fqn\":", i ? "," : "");
		put_hex(t->fqn);
		printf(",\"dtype\":\"%s\",\"requires_grad\":%s,\"shape\":", dtype_name(t->dtype),
		       t->requires_grad ? "true" : "false");
		put_dims(t->shape, t->ndim);
		put_path(t->path);
		printf(",\"chunks\":[");
		for (uint64_t k = 0; k < t->chunk_count; k++) {
			const struct sd_chunk *c = &sd->chunks[t->first_chunk + k];
			printf("%s{\"offsets\":", k ? "," : "");
			put_dims(c->dims, t->ndim);
			printf(",\"sizes\":");
			put_dims(c->dims + t->ndim, t->ndim);
			putchar(',');
			put_loc(sd, &c->loc, c->rank);
			putchar('}');
		}
		printf("]}");
	}
	printf("],\"values\":[");
	for (uint64_t i = 0; i < sd->value_count; i++) {
		const struct sd_value *v = &sd->values[i];
		printf("%s{\"fqn\":", i ? "," : "");
		put_hex(v->fqn);
		put_path(v->path);
		putchar(',');
		put_loc(sd, &v->loc, v->rank);
		putchar('}');
	}
	printf("]}\n");
}

static void rewrite(const struct sdict *sd, const char *path)
{
	struct dcp_meta_opts opts = { .checkpoint_id = "rewritten", .save_id = "00000000-0000-4000-8000-000000000000" };
	FILE *f = fopen(path, "wb");

	if (!f || dcp_meta_write(sd, &opts, to_file, f))
		die(path);
	fclose(f);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double peak_mib(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return (double)u.ru_maxrss / 1024;
}

/* Rows of each tensor over all ranks, as FSDP cuts them. */
static void synthesize(struct sdict *sd, uint32_t ranks, uint64_t chunks)
{
	char text[64];
	uint32_t index;

	for (uint32_t r = 0; r < ranks; r++) {
		int n = snprintf(text, sizeof text, "__%u_0.distcp", r);
		if (sdict_add_file(sd, (struct str){ text, (size_t)n }, r, &index))
			die("file");
	}
	sd->has_paths = true;
	for (uint64_t i = 0; sd->chunk_count < chunks; i++) {
		int64_t shape[2] = { (int64_t)ranks * 8, 4096 };
		int n = snprintf(text, sizeof text, "model.layers.%ju.attention.weight", (uintmax_t)i);
		struct str fqn = { text, (size_t)n };
		struct sd_path_part parts[] = { { STR("model"), 0 }, { { text + 6, fqn.n - 6 }, 0 } };
		if (sdict_add_tensor(sd, fqn, DT_BFLOAT16, 2, shape, &index) ||
		    sdict_copy_path(sd, (struct sd_path){ parts, 2 }, &sd->tensors[index].path))
			die("tensor");
		for (uint32_t r = 0; r < ranks; r++) {
			int64_t dims[4] = { (int64_t)r * 8, 0, 8, 4096 };
			struct sd_loc loc = { r, 0, i * 70000 + (3ull << 30), 69000 };
			if (sdict_add_chunk(sd, index, dims, r, loc))
				die("chunk");
		}
	}
}

static int synthetic(char **argv)
{
	uint32_t ranks = (uint32_t)strtoul(argv[0], NULL, 10);
	uint64_t chunks = strtoull(argv[1], NULL, 10);
	struct sdict *sd, *again;
	size_t n;

	if (sdict_new(1ull << 32, &sd))
		die("sdict");
	synthesize(sd, ranks, chunks);
	double from = now();
	rewrite(sd, argv[2]);
	printf("write %.3f s, peak %.1f MiB\n", now() - from, peak_mib());
	sdict_free(sd);
	void *bytes = slurp(argv[2], &n);
	from = now();
	if (dcp_meta_read(bytes, n, &again))
		die(argv[2]);
	printf("read %.3f s, %zu bytes, %ju chunks\n", now() - from, n, (uintmax_t)again->chunk_count);
	sdict_free(again);
	mem_free(bytes);
	return 0;
}

int main(int argc, char **argv)
{
	struct sdict *parts[256], *sd;
	const char *out = NULL;
	uint32_t count = 0;
	bool quiet = false;

	if (argc == 5 && strcmp(argv[1], "--synthetic") == 0)
		return synthetic(argv + 2);
	for (int i = 1; i < argc; i++) {
		size_t n;
		if (strcmp(argv[i], "--rewrite") == 0 && i + 1 < argc) {
			out = argv[++i];
		} else if (strcmp(argv[i], "--quiet") == 0) {
			quiet = true;
		} else if (count < 256) {
			double before = peak_mib(), from = now();
			void *bytes = slurp(argv[i], &n);
			double base = peak_mib();
			if (dcp_meta_read(bytes, n, &parts[count++]))
				die(argv[i]);
			mem_free(bytes);
			if (quiet)
				printf("%s: %.3f s, file %.1f MiB, peak grew by %.1f MiB\n", argv[i], now() - from,
				       base - before, peak_mib() - base);
		}
	}
	if (count == 0)
		return 2;
	sd = parts[0];
	if (count > 1) {
		if (dcp_meta_union(parts, count, &sd))
			die("union");
		for (uint32_t i = 0; i < count; i++)
			sdict_free(parts[i]);
	}
	if (out)
		rewrite(sd, out);
	if (!quiet)
		dump(sd);
	sdict_free(sd);
	return 0;
}
