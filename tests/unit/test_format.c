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
			assert_true(format_file_in(i, format_metadata(i), &f) && f.format == i && f.role == FORMAT_METADATA);
}

/* DeepSpeed's files have their role in its formats, and are files of torch.save by themselves. */
static void test_zero_names(void **state)
{
	static const struct {
		const char *name;
		bool is_model;
		int64_t rank, model_rank;
	} good[] = {
		{ "mp_rank_00_model_states.pt", true, -1, 0 },
		{ "mp_rank_07_model_states.pt", true, -1, 7 },
		{ "zero_pp_rank_12_mp_rank_00_model_states.pt", true, 12, 0 },
		{ "zero_pp_rank_3_mp_rank_01_optim_states.pt", false, 3, 1 },
		{ "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", false, 0, 0 },
	};
	static const char *const bad[] = { "mp_rank_00_optim_states.pt", "mp_rank__model_states.pt",
					   "zero_pp_rank_01_mp_rank_00_optim_states.pt",
					   "x_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pth", "_model_states.pt",
					   "mp_rank_99999999999999999999_model_states.pt" };
	static const char *const parts[] = { "zero/a.b/fp32.pt", "zero/optimizer_state.pt" };
	struct format_zero_name is;
	struct format_file f;

	(void)state;
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		assert_true(format_zero_name(good[i].name, &is));
		assert_true(is.is_model == good[i].is_model && is.rank == good[i].rank && is.model_rank == good[i].model_rank);
		assert_true(format_file_in(FORMAT_ZERO, good[i].name, &f) && f.role == FORMAT_PAYLOAD && f.rank == is.rank);
		assert_true(format_file(good[i].name, &f) && f.format == FORMAT_TORCH);
	}
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		assert_false(format_zero_name(bad[i], &is));
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		assert_true(format_file_in(FORMAT_ZERO_UNIVERSAL, parts[i], &f) && f.role == FORMAT_PAYLOAD);
	assert_true(format_folder("zero/") && format_folder("zero/a/") && !format_folder("zero/a/b/") && !format_folder("data/"));
}

/* A folder of steps leads to the one that `latest` names, or to the last. */
static void test_steps(void **state)
{
	struct format_listing l = { 0 };

	(void)state;
	format_listing_add(&l, "global_step9/");
	format_listing_add(&l, "global_step10/");
	format_listing_add(&l, "global_step10_universal/");
	format_listing_add(&l, "global_step11");
	assert_true(format_of_listing(&l) == FORMAT_NONE && !l.pointer);
	assert_string_equal(l.step, "global_step10");
	format_listing_add(&l, "latest_universal");
	assert_string_equal(l.pointer, "latest_universal");
	format_listing_add(&l, "latest");
	format_listing_add(&l, "latest_universal");
	assert_string_equal(l.pointer, "latest");
	format_listing_add(&l, "zero/");
	assert_int_equal(format_of_listing(&l), FORMAT_NONE);
	format_listing_add(&l, "mp_rank_00_model_states.pt");
	assert_int_equal(format_of_listing(&l), FORMAT_ZERO_UNIVERSAL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_names),
		cmocka_unit_test(test_listings),
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_zero_names),
		cmocka_unit_test(test_steps),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
