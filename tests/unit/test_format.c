/* test_format.c: what the names of files say. */
#include "format/format.h"
#include "lib/t.h"

static void test_names(void **state)
{
	static const struct { const char *name; struct format_file is; } cases[] = {
		{ ".metadata", { FORMAT_DCP, FORMAT_METADATA, -1 } },
		{ ".metadata.tmp", { FORMAT_DCP, FORMAT_TEMPORARY, -1 } },
		{ "__12_3.distcp", { FORMAT_DCP, FORMAT_PAYLOAD, 12 } },
		{ "__x_0.distcp", { FORMAT_DCP, FORMAT_PAYLOAD, -1 } },
		{ "__65536_0.distcp", { FORMAT_DCP, FORMAT_PAYLOAD, -1 } },
		{ "__7.metadata", { FORMAT_DCP_RANK_LOCAL, FORMAT_METADATA, 7 } },
		{ "__7.metadata.tmp", { FORMAT_DCP_RANK_LOCAL, FORMAT_TEMPORARY, 7 } },
		{ "__07.metadata", { FORMAT_NONE, FORMAT_OTHER, -1 } },     /* no two names for one rank */
		{ "__.metadata", { FORMAT_NONE, FORMAT_OTHER, -1 } },
		{ "model-00001-of-00002.safetensors", { FORMAT_SAFETENSORS, FORMAT_PAYLOAD, -1 } },
		{ "model.safetensors.index.json", { FORMAT_SAFETENSORS, FORMAT_METADATA, -1 } },
		{ "weights.pth", { FORMAT_TORCH, FORMAT_PAYLOAD, -1 } },
		{ "model_world_size_8_rank_3.pt", { FORMAT_TORCH_RANKS, FORMAT_PAYLOAD, 3 } },
		{ "pytorch_model_fsdp_rank11.bin", { FORMAT_TORCH_RANKS, FORMAT_PAYLOAD, 11 } },
		{ "frank_3.pt", { FORMAT_TORCH, FORMAT_PAYLOAD, -1 } },
		{ "rank_03.pt", { FORMAT_TORCH, FORMAT_PAYLOAD, -1 } },
		{ "pytorch_model.bin.index.json", { FORMAT_TORCH, FORMAT_METADATA, -1 } },
		{ "config.json", { FORMAT_NONE, FORMAT_OTHER, -1 } },
		{ "", { FORMAT_NONE, FORMAT_OTHER, -1 } },
	};
	struct format_file f;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		bool is = format_file(cases[i].name, &f);
		if (f.format != cases[i].is.format || f.role != cases[i].is.role || f.rank != cases[i].is.rank ||
		    is != (f.role != FORMAT_OTHER))
			T_FAIL("'%s': format %d, role %d, rank %d", cases[i].name, f.format, f.role, (int)f.rank);
	}
}

static enum format of(const char *const *names)
{
	struct format_listing l = { 0 };

	for (; *names; names++)
		format_listing_add(&l, *names);
	return format_of_listing(&l);
}

static void test_listings(void **state)
{
	(void)state;
	assert_int_equal(of((const char *const[]){ "x.safetensors", ".metadata", "__0.metadata", NULL }), FORMAT_DCP);
	assert_int_equal(of((const char *const[]){ "x.safetensors", "__0.metadata", NULL }), FORMAT_DCP_RANK_LOCAL);
	assert_int_equal(of((const char *const[]){ "config.json", "x.safetensors", NULL }), FORMAT_SAFETENSORS);
	assert_int_equal(of((const char *const[]){ "__0_0.distcp", ".metadata.tmp", "a.pt", "model.safetensors.index.json", NULL }),
			 FORMAT_NONE);
	assert_int_equal(format_of_file("a.pt"), FORMAT_TORCH);
	assert_int_equal(format_of_file("a.safetensors"), FORMAT_SAFETENSORS);
	assert_int_equal(format_of_file("__0_0.distcp"), FORMAT_NONE);
}

/* The names that writers give are those that readers know. */
static void test_round_trip(void **state)
{
	char name[FORMAT_FILE_MAX];
	struct format_file f;

	(void)state;
	format_dcp_payload(65535, 4, name);
	assert_true(format_file(name, &f) && f.format == FORMAT_DCP && f.rank == 65535);
	format_dcp_metadata(3, name);
	assert_true(format_file(name, &f) && f.format == FORMAT_DCP_RANK_LOCAL && f.rank == 3);
	format_hf_payload(0, 2, name);
	assert_string_equal(name, "model-00001-of-00002.safetensors");
	for (enum format i = FORMAT_NONE + 1; i < FORMAT_COUNT; i++)
		if (format_metadata(i))
			assert_true(format_file(format_metadata(i), &f) && f.format == i && f.role == FORMAT_METADATA);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_names),
		cmocka_unit_test(test_listings),
		cmocka_unit_test(test_round_trip),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
