/* plan_million.c: the cost of structure alone: the global plan, `.metadata` and its parsing for many chunks.
 *
 *     plan_million CHUNKS      prints JSON: seconds of plan, validate, write, parse; bytes of memory a chunk; bytes of .metadata
 *
 * 1,000 ranks, tensors of one row block a rank: what a large FSDP job saves. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/bench.h"
#include "base/buf.h"
#include "format/dcp_meta.h"
#include "plan/save_plan.h"

enum { RANKS = 1000 };

/* Anonymous memory of this process. */
static uint64_t anonymous(void)
{
	malloc_trim(0);
	return status_kib("RssAnon:") * 1024;
}

static void check(enum err e, const char *what)
{
	if (e == OK)
		return;
	fprintf(stderr, "plan_million: %s: %s: %s\n", what, err_code_name(e), err_last()->text);
	exit(1);
}

static struct sdict *held(uint64_t tensors)
{
	struct sdict *sd;
	int64_t shape[2] = { RANKS * 4, 16 };

	check(sdict_new(2ull << 30, &sd), "new");
	for (uint64_t t = 0; t < tensors; t++) {
		char name[64];
		uint32_t index;
		int n = snprintf(name, sizeof name, "model.layers.%ju.attention.weight", (uintmax_t)t);
		check(sdict_add_tensor(sd, (struct str){ name, (size_t)n }, DT_BFLOAT16, 2, shape, &index), "tensor");
		for (uint32_t r = 0; r < RANKS; r++) {
			int64_t dims[4] = { 4 * (int64_t)r, 0, 4, 16 };
			check(sdict_add_chunk(sd, index, dims, r, (struct sd_loc){ .file = SD_NO_FILE }), "chunk");
		}
	}
	return sd;
}

static enum err keep(void *user, const void *bytes, size_t n)
{
	buf_put(user, bytes, n);
	return OK;
}

int main(int argc, char **argv)
{
	uint64_t chunks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000, memory;
	struct sdict *have = held(chunks / RANKS), *plan, *back;
	struct save_plan_stats stats;
	struct buf meta = BUF_INIT(2ull << 30);
	double t[5];

	t[0] = now();
	check(save_plan_make(have, DEDUP_BALANCED, 2ull << 30, &plan, &stats), "plan");
	t[1] = now();
	check(save_plan_validate(plan), "validate");
	for (uint32_t r = 0; r < RANKS; r++) {
		char name[64];
		uint32_t file;
		int n = snprintf(name, sizeof name, "__%u_0.distcp", r);
		check(sdict_add_file(plan, (struct str){ name, (size_t)n }, r, &file), "file");
	}
	for (uint64_t i = 0; i < plan->chunk_count; i++)
		plan->chunks[i].loc = (struct sd_loc){ .file = plan->chunks[i].rank, .offset = 4096 * i, .length = 1200 };
	t[2] = now();
	check(dcp_meta_write(plan, &(struct dcp_meta_opts){ .save_id = "6ba7b810-9dad-41d1-80b4-00c04fd430c8" }, keep, &meta), "write");
	check(buf_status(&meta), "write");
	memory = anonymous();
	t[3] = now();
	check(dcp_meta_read(meta.p, meta.len, &back), "parse");
	t[4] = now();
	memory = anonymous() - memory;
	if (back->chunk_count != plan->chunk_count || plan->chunk_count != chunks / RANKS * RANKS)
		return fprintf(stderr, "plan_million: %ju chunks came back\n", (uintmax_t)back->chunk_count), 1;
	printf("{\"chunks\":%ju,\"plan_s\":%.3f,\"validate_s\":%.3f,\"write_s\":%.3f,\"parse_s\":%.3f,"
	       "\"bytes_per_chunk\":%.0f,\"metadata_bytes\":%zu}\n", (uintmax_t)chunks, t[1] - t[0], t[2] - t[1], t[3] - t[2],
	       t[4] - t[3], (double)memory / (double)chunks, meta.len);
	return 0;
}
