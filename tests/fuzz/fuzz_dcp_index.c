/* fuzz_dcp_index.c: any bytes as a `.distcp` file: its items are found, one behind the other, and an index at its end says nothing that the
 * file does not have room for. What is accepted can be written again. */
#include "format/dcp_index.h"
#include "format/item_walk.h"
#include "lib/t_files.h"
#include "plan/save_plan.h"

static enum err count_bytes(void *user, const void *bytes, size_t n)
{
	(void)bytes;
	*(uint64_t *)user += n;
	return OK;
}

static void check_index(const struct t_files *files, const struct sdict *sd)
{
	const struct dcp_meta_opts opts = { .checkpoint_id = "fuzz", .save_id = "fuzz" };
	uint64_t bytes = 0;

	t_files_check_inside(files, sd);
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct sd_tensor *t = &sd->tensors[sd->chunks[i].tensor];
		must(box_inside(t->ndim, sd->chunks[i].dims, sd_sizes(&sd->chunks[i], t->ndim), t->shape));
	}
	(void)!save_plan_validate(sd);
	must(dcp_meta_write(sd, &opts, count_bytes, &bytes) != OK || bytes);
}

/* The text alone, as if its CRC32 were right: no fuzzer finds that. */
static void try_index(const struct t_files *files, struct str text)
{
	CLEANUP(dcp_indexes_free_ptr) struct dcp_indexes *all = NULL;
	struct sdict *sd = NULL;

	must(dcp_indexes_new(&all) == OK);
	if (dcp_indexes_add(all, STR("__0_0.distcp"), 0, text.n, text) == OK && dcp_indexes_join(all, &sd) == OK)
		check_index(files, sd);
	sdict_free(sd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct t_files files = t_files_one("__0_0.distcp", data, n);
	struct item_source src = source_memory(&files.bytes[0]);
	item_spans spans = { 0 };
	uint64_t begin = 0, at = 0;
	char *text = NULL;

	if (dcp_index_find(&src, &begin, &text) == OK && text)
		must(begin < n && (n - begin) % 4096 == 0);
	mem_free(text);
	(void)!item_walk(&src, n, NULL, NULL, &spans);
	for (uint64_t i = 0; i < spans.n; i++) {
		must(spans.v[i].offset >= at && num_inside(spans.v[i].offset, spans.v[i].length, n) && spans.v[i].length);
		at = spans.v[i].offset + spans.v[i].length;
	}
	vec_free(&spans);
	try_index(&files, files.bytes[0]);
	return 0;
}
