/* test_image.c: segment images, one rank's and those of several joined, and the way back. */
#include "lib/t.h"

#include <string.h>

#include "base/mem.h"
#include "format/image.h"
#include "format/torch_item.h"

/* The header of an image of `bytes` of data. */
static struct buf header(const char *json)
{
	struct buf b = BUF_INIT(1 << 22);

	buf_le64(&b, strlen(json));
	buf_puts(&b, json);
	return b;
}

static enum err parse(const char *json, uint64_t data_bytes, uint32_t rank, struct image **out)
{
	CLEANUP(buf_free) struct buf b = header(json);

	return image_parse(b.p, b.len, b.len + data_bytes, rank, out);
}

static void free_sd(struct sdict **sd)
{
	sdict_free(*sd);
}

static void free_im(struct image *(*im)[2])
{
	image_free((*im)[0]);
	image_free((*im)[1]);
}

/* Joins two ranks; the second may be NULL. */
static enum err join(const char *a, uint64_t a_bytes, const char *b, uint64_t b_bytes, struct sdict **out)
{
	CLEANUP(free_im) struct image *im[2] = { NULL, NULL };

	TRY(parse(a, a_bytes, 0, &im[0]));
	if (b)
		TRY(parse(b, b_bytes, 1, &im[1]));
	return image_collect(im, b ? 2 : 1, out);
}

static enum err refused(const char *json, uint64_t bytes)
{
	CLEANUP(free_sd) struct sdict *sd = NULL;

	return join(json, bytes, NULL, 0, &sd);
}

#define META(text) "\"__metadata__\":{\"dcpd\":\"" text "\"}"
#define W8 "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"

static void a_plain_file_is_an_image(void **state)
{
	CLEANUP(free_sd) struct sdict *sd = NULL;

	(void)state;
	T_OK(join("{\"a\":" W8 ",\"__dcpd_pad__/0\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]},"
		  "\"b\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[12,20]}}", 20, NULL, 0, &sd));
	assert_int_equal(sd->tensor_count, 2);
	assert_int_equal(sd->chunk_count, 2);
	assert_true(str_is(sd->tensors[1].fqn, "b") && sd->tensors[1].ndim == 0 && sd->tensors[1].dtype == DT_INT64);
	assert_int_equal(sd->chunks[1].loc.length, 8);
	assert_int_equal(sd->chunks[1].loc.offset - sd->chunks[0].loc.offset, 12);
	assert_true(sd->has_paths && sd->tensors[0].path.count == 1 && str_is(sd->tensors[0].path.parts[0].key, "a"));
	assert_int_equal(sd->file_count, 1);
}

static void chunks_of_two_ranks(void **state)
{
	CLEANUP(free_sd) struct sdict *sd = NULL;

	(void)state;
	T_OK(join("{" META("{\\\"version\\\":1,\\\"tensors\\\":{\\\"x\\\":{\\\"fqn\\\":\\\"__metadata__\\\","
			   "\\\"global_shape\\\":[5],\\\"offsets\\\":[0]},\\\"y\\\":{\\\"fqn\\\":\\\"__metadata__\\\","
			   "\\\"global_shape\\\":[5],\\\"offsets\\\":[4]}},\\\"paths\\\":{\\\"__metadata__\\\":[\\\"m\\\",3]}}")
		  ",\"x\":" W8 ",\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}", 12,
		  "{" META("{\\\"version\\\":1,\\\"tensors\\\":{\\\"x\\\":{\\\"fqn\\\":\\\"__metadata__\\\","
			   "\\\"global_shape\\\":[5],\\\"offsets\\\":[2]}}}") ",\"x\":" W8 "}", 8, &sd));
	assert_int_equal(sd->tensor_count, 1);
	assert_int_equal(sd->chunk_count, 3);
	struct sd_tensor *t = sdict_tensor(sd, STR("__metadata__"));
	assert_non_null(t);
	assert_int_equal(t->shape[0], 5);
	assert_int_equal(t->path.count, 2);
	assert_int_equal(t->path.parts[1].index, 3);
	assert_null(t->path.parts[1].key.p);
	assert_int_equal(sd->chunks[2].rank, 1);
	assert_int_equal(sd->chunks[2].loc.file, 1);
	assert_int_equal(sd_offsets(&sd->chunks[2])[0], 2);
}

#define RAW(shape, bytes, meta) \
	"{" META("{\\\"version\\\":1,\\\"tensors\\\":{\\\"c\\\":{" meta "\\\"dtype\\\":\\\"complex128\\\"}}}") \
	",\"c\":{\"dtype\":\"U8\",\"shape\":" shape ",\"data_offsets\":[0," bytes "]}}"
#define SHAPE(s) "\\\"global_shape\\\":" s ","

static void raw_entries(void **state)
{
	static const struct { const char *json; uint64_t bytes; enum err code; int64_t d0, d1; } cases[] = {
		{ RAW("[2,3,16]", "96", ""), 96, OK, 2, 3 },
		{ RAW("[2,3,16]", "96", SHAPE("[2,3]")), 96, OK, 2, 3 },
		{ RAW("[2,48]", "96", SHAPE("[2,3]")), 96, OK, 2, 3 },
		{ RAW("[96]", "96", SHAPE("[2,3]")), 96, OK, 2, 3 },
		{ RAW("[80]", "80", SHAPE("[2,3]")), 80, ERR_FORMAT_IMAGE, 0, 0 },
		{ RAW("[2,40]", "80", SHAPE("[2,3]")), 80, ERR_FORMAT_IMAGE, 0, 0 },
		{ RAW("[2,3]", "6", ""), 6, ERR_FORMAT_IMAGE, 0, 0 },
		{ RAW("[2,64]", "128", SHAPE("[2,3]")), 128, ERR_PLAN_INVALID, 0, 0 },
		{ RAW("[96]", "96", SHAPE("[2,3]") "\\\"offsets\\\":[0,0],"), 96, ERR_FORMAT_IMAGE, 0, 0 },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		CLEANUP(free_sd) struct sdict *sd = NULL;
		enum err e = join(cases[i].json, cases[i].bytes, NULL, 0, &sd);
		if (e != cases[i].code)
			T_FAIL("case %zu: %s %s", i, err_code_name(e), err_last()->text);
		if (e)
			continue;
		assert_int_equal(sd->tensors[0].dtype, DT_COMPLEX128);
		assert_int_equal(sd->tensors[0].shape[0], cases[i].d0);
		assert_int_equal(sd->tensors[0].shape[1], cases[i].d1);
	}
}

static void bad_metadata(void **state)
{
	static const struct { const char *text; enum err code; } bad[] = {
		{ "{}", ERR_FORMAT_IMAGE }, { "{\\\"version\\\":2}", ERR_FORMAT_IMAGE }, { "", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"x\\\":1}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"version\\\":1}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1} 1", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"layout\\\":{}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"zz\\\":{}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{},\\\"a\\\":{}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"offsets\\\":[0]}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"global_shape\\\":[1]}}}", ERR_PLAN_INVALID },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"global_shape\\\":[2,2]}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"global_shape\\\":[4],"
					"\\\"offsets\\\":[3]}}}", ERR_PLAN_INVALID },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"global_shape\\\":[-1]}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"dtype\\\":\\\"float64\\\"}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"dtype\\\":\\\"bits8\\\"}}}", ERR_DTYPE_UNSUPPORTED },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"v\\\":{}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"v\\\":{\\\"json\\\":NaN}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"v\\\":{\\\"bytes\\\":\\\"a===\\\"}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"v\\\":{\\\"json\\\":1,\\\"bytes\\\":\\\"\\\"}}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"v\\\":{\\\"json\\\":1},"
					"\\\"v\\\":{\\\"json\\\":1}}}", ERR_DUPLICATE_KEY },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"v.a\\\":{\\\"json\\\":1},"
					"\\\"v\\\":{\\\"json\\\":{\\\"a\\\":2}}}}", ERR_DUPLICATE_KEY },
		{ "{\\\"version\\\":1,\\\"values\\\":{\\\"a\\\":{\\\"json\\\":1}}}", ERR_PLAN_INVALID },
		{ "{\\\"version\\\":1,\\\"paths\\\":{\\\"a\\\":[]}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"paths\\\":{\\\"a\\\":[1.5]}}", ERR_FORMAT_IMAGE },
		{ "{\\\"version\\\":1,\\\"paths\\\":{\\\"a\\\":[[]]}}", ERR_FORMAT_IMAGE },
	};

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		char json[600];
		snprintf(json, sizeof json, "{" META("%s") ",\"a\":" W8 "}", bad[i].text);
		enum err e = refused(json, 8);
		if (e != bad[i].code)
			T_FAIL("case %zu (%s): %s %s", i, bad[i].text, err_code_name(e), e ? err_last()->text : "");
		assert_int_equal(err_last()->rank, 0);
	}
}

#define LISTED(entry, fqn, shape, off) "\\\"" entry "\\\":{\\\"fqn\\\":\\\"" fqn "\\\"," \
			"\\\"global_shape\\\":[" shape "],\\\"offsets\\\":[" off "]}"

static void ranks_that_disagree(void **state)
{
	CLEANUP(free_sd) struct sdict *sd = NULL;

	(void)state;
	T_ERR(PLAN_INVALID, join("{\"a\":" W8 "}", 8,
				"{\"a\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, &sd));
	assert_string_equal(err_last()->fqn, "a");
	assert_int_equal(err_last()->rank, 1);
	T_ERR(PLAN_INVALID, join("{\"a\":" W8 "}", 8,
				"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}", 8, &sd));
	err_clear();
	T_ERR(PLAN_INVALID, join("{\"a\":" W8 "}", 8, "{" META("{\\\"version\\\":1,"
				"\\\"values\\\":{\\\"a\\\":{\\\"json\\\":1}}}") "}", 0, &sd));
	assert_string_equal(err_last()->fqn, "a");
	assert_int_equal(err_last()->rank, 1);
	err_clear();
	T_ERR(DUPLICATE_KEY, join("{" META("{\\\"version\\\":1,\\\"tensors\\\":{" LISTED("a", "w", "4", "0") ","
				LISTED("b", "w", "4", "2")
					   "," LISTED("c", "w", "4", "0") "}}") ",\"a\":" W8
				  ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]},"
				  "\"c\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]}}", 24, NULL, 0, &sd));
	assert_string_equal(err_last()->fqn, "w");
	T_OK(join("{\"a\":" W8 "}", 8, "{\"a\":" W8 "}", 8, &sd)); /* replicas are none of it */
	assert_int_equal(sd->chunk_count, 2);
}

static void value_is(const struct sdict *sd, const char *fqn, const char *json, const char *path)
{
	const struct sd_value *v = sdict_value(sd, str_of(fqn));
	CLEANUP(item_value_free) struct item_value got = { 0 };
	char text[200] = "";

	if (!v)
		T_FAIL("%s is not there", fqn);
	struct item_source src = source_memory(&v->bytes);
	T_OK(item_read_value(&src, &got));
	assert_int_equal(v->kind, SD_VALUE_INLINE);
	assert_int_equal(got.text.len, strlen(json));
	assert_memory_equal(got.text.p, json, got.text.len);
	for (uint32_t i = 0; i < v->path.count; i++) {
		struct sd_path_part p = v->path.parts[i];
		size_t n = strlen(text);
		if (p.key.p)
			snprintf(text + n, sizeof text - n, "/%.*s", (int)p.key.n, p.key.p);
		else
			snprintf(text + n, sizeof text - n, "/[%jd]", (intmax_t)p.index);
	}
	assert_string_equal(text, path);
}

static void values_are_taken_apart(void **state)
{
	CLEANUP(free_sd) struct sdict *sd = NULL;

	(void)state;
	T_OK(join("{" META("{\\\"version\\\":1,\\\"values\\\":{\\\"o\\\":{\\\"json\\\":{\\\"lr\\\":0.1,\\\"e\\\":{},"
				"\\\"g\\\":[{\\\"x\\\":[1,2]},[],7],"
			   "\\\"l\\\":[1,[2]]}},\\\"n\\\":{\\\"json\\\":null},\\\"b\\\":{\\\"bytes\\\":\\\"AP8=\\\"},"
			   "\\\"p\\\":{\\\"pickle\\\":\\\"gAJLAYUu\\\"},\\\"only\\\":{\\\"json\\\":[{}]}},"
			   "\\\"paths\\\":{\\\"o\\\":[\\\"opt\\\",0]}}") "}", 0,
		  "{" META("{\\\"version\\\":1,\\\"values\\\":{\\\"n\\\":{\\\"json\\\":5},"
					"\\\"o.y\\\":{\\\"json\\\":\\\"{\\\"}}}") "}", 0, &sd));
	assert_int_equal(sd->value_count, 9);
	value_is(sd, "o.lr", "0.1", "/opt/[0]/lr");
	value_is(sd, "o.g.0.x", "[1,2]", "/opt/[0]/g/[0]/x");
	value_is(sd, "o.g.1", "[]", "/opt/[0]/g/[1]");
	value_is(sd, "o.g.2", "7", "/opt/[0]/g/[2]");
	value_is(sd, "o.l", "[1,[2]]", "/opt/[0]/l");
	value_is(sd, "n", "null", "/n"); /* the lowest rank's */
}

static void cut_headers(void **state)
{
	CLEANUP(buf_free) struct buf b = header("{" META("{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{}}}") ",\"a\":" W8 "}");

	(void)state;
	for (size_t n = 0; n < b.len; n++) {
		struct image *im = NULL;
		enum err e = image_parse(b.p, n, b.len + 8, 3, &im);
		assert_true(e == ERR_FORMAT_IMAGE || e == ERR_FORMAT_SAFETENSORS);
		assert_null(im);
	}
}

static void odd_target(struct sdict **out)
{
	const int64_t shape[] = { 5, 4 };
	static const struct { const char *fqn; enum dtype dtype; } tensors[] = {
		{ "w", DT_FLOAT32 }, { "__metadata__", DT_BFLOAT16 }, { "__dcpd_pad__/0", DT_COMPLEX128 },
		{ "f4", DT_FLOAT4_E2M1FN_X2 },
	};
	uint32_t index;

	T_OK(sdict_new(1 << 20, out));
	(*out)->has_paths = true;
	for (uint32_t r = 0; r < 2; r++)
		T_OK(sdict_add_file(*out, r ? STR("1") : STR("0"), r, &index));
	for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
		struct sd_loc nowhere = { .file = SD_NO_FILE };
		static const int64_t boxes[][4] = { { 0, 0, 2, 4 }, { 2, 0, 2, 4 }, { 4, 0, 1, 4 }, { 5, 0, 0, 4 } };
		uint32_t t;
		T_OK(sdict_add_tensor(*out, str_of(tensors[i].fqn), tensors[i].dtype, 2, shape, &t));
		const struct sd_path_part parts[] = { { .key = STR("model") }, { .index = (int64_t)i } };
		T_OK(sdict_copy_path(*out, (struct sd_path){ parts, 2 }, &(*out)->tensors[t].path));
		for (int k = 0; k < 4; k++)
			T_OK(sdict_add_chunk(*out, t, boxes[k], k == 1, nowhere));
	}
}

static void built_images_are_read_back(void **state)
{
	CLEANUP(free_sd) struct sdict *sd = NULL, *back = NULL;
	CLEANUP(free_im) struct image *im[2] = { NULL, NULL };
	const struct sd_path_part part = { .key = STR("v") };
	const struct image_value values[] = {
		{ STR("v"), { &part, 1 }, IMAGE_VALUE_JSON, STR("[1,2.0,\"\\u00e9\"]") },
		{ STR("b"), { NULL, 0 }, IMAGE_VALUE_BYTES, STR("\0\1") },
		{ STR("p"), { NULL, 0 }, IMAGE_VALUE_PICKLE, STR("\x80\2K\1.") },
	};

	(void)state;
	odd_target(&sd);
	for (uint32_t r = 0; r < 2; r++) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
		uint64_t bytes;
		T_OK(image_build(sd, r, values, r ? 0 : 3, &b, &bytes));
		assert_int_equal(b.len % IMAGE_ALIGN, 0);
		assert_int_equal(bytes % IMAGE_ALIGN, 0);
		T_OK(image_parse(b.p, b.len, bytes, r, &im[r]));
	}
	T_OK(image_collect(im, 2, &back));
	assert_int_equal(back->tensor_count, 4);
	assert_int_equal(back->chunk_count, 16);
	assert_int_equal(back->value_count, 3);
	value_is(back, "v", "[1,2.0,\"\xc3\xa9\"]", "/v");
	for (uint64_t i = 0; i < 4; i++) {
		const struct sd_tensor *a = &sd->tensors[i], *b = sdict_tensor(back, a->fqn);
		assert_non_null(b);
		assert_int_equal(a->dtype, b->dtype);
		assert_int_equal(b->path.count, 2);
		for (uint64_t k = 0, found; k < 4; k++) {
			const struct sd_chunk *c = &sd->chunks[a->first_chunk + k];
			assert_int_equal(c->loc.offset % IMAGE_ALIGN, 0);
			assert_int_equal(c->loc.file, c->rank);
			found = 0;
			for (uint64_t m = 0; m < 4; m++) {
				const struct sd_chunk *d = &back->chunks[b->first_chunk + m];
				found += memcmp(c->dims, d->dims, 4 * sizeof *c->dims) == 0 && c->rank == d->rank &&
					 c->loc.offset == d->loc.offset && c->loc.length == d->loc.length;
			}
			assert_int_equal(found, 1);
		}
	}
}

#define OUTER(more) "{\\\"version\\\":1,\\\"tensors\\\":{\\\"a\\\":{" more "}}}"
#define INNER "\\\"global_shape\\\":[3],\\\"offsets\\\":[1],"

/* A ShardedTensor in a ShardedTensor: rows 1 and 2 of a slice that begins at row 4 of 9. */
static void nested_shards(void **state)
{
	static const char *const bad[] = {
		OUTER("\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4]}"),           /* no global_shape of its own */
		OUTER(INNER "\\\"outer\\\":{\\\"offsets\\\":[4]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9,1],\\\"offsets\\\":[4,0]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"x\\\":1}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"ranks\\\":[]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"ranks\\\":[-1]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"ranks\\\":[1.5]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"ranks\\\":[[1]]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"types\\\":[\\\"DTensor\\\"]}"),
		OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[4],\\\"types\\\":[\\\"x\\\",\\\"y\\\"]}"),
		OUTER(INNER "\\\"outer\\\":[]"),
	};
	static const int64_t shape[] = { 9 }, dims[] = { 5, 2 }, at[] = { 4 }, size[] = { 3 };
	static const uint32_t ranks[] = { 2, 0 };
	const struct sd_outer outer = { at, size, ranks, 2, false, false }, *outers[] = { &outer };
	CLEANUP(free_sd) struct sdict *sd = NULL;
	CLEANUP(free_im) struct image *im[2] = { NULL, NULL };
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	char json[600];
	uint64_t bytes;
	uint32_t t;

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		snprintf(json, sizeof json, "{" META("%s") ",\"a\":" W8 "}", bad[i]);
		enum err e = refused(json, 8);
		if (e != ERR_FORMAT_IMAGE)
			T_FAIL("case %zu (%s): %s", i, bad[i], err_code_name(e));
	}
	T_ERR(PLAN_INVALID,
	      refused("{" META(OUTER(INNER "\\\"outer\\\":{\\\"global_shape\\\":[9],\\\"offsets\\\":[7]}")) ",\"a\":" W8 "}", 8));
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_file(sd, STR("0"), 0, &t));
	T_OK(sdict_add_tensor(sd, STR("a"), DT_FLOAT32, 1, shape, &t));
	T_OK(sdict_add_chunk(sd, t, dims, 0, (struct sd_loc){ .file = SD_NO_FILE }));
	T_OK(image_build_more(sd, 0, NULL, 0, &(struct image_more){ .outers = outers }, &b, &bytes));
	assert_non_null(memmem(b.p, b.len, "global_shape\\\":[3],\\\"offsets\\\":[1]", 33));
	T_OK(image_parse(b.p, b.len, bytes, 0, &im[0]));
	struct image_part p = image_part_at(im[0], 0);
	assert_int_equal(p.shape[0], 9); /* seen from outside it is a part of the whole */
	assert_int_equal(p.offsets[0], 5);
	assert_int_equal(p.sizes[0], 2);
	assert_int_equal(p.outer->offsets[0], 4);
	assert_int_equal(p.outer->sizes[0], 3);
	assert_int_equal(p.outer->rank_count, 2);
	assert_memory_equal(p.outer->ranks, ranks, sizeof ranks);
}

static void running_out_of_memory(void **state)
{
	unsigned failed = 0;

	(void)state;
	for (uint64_t n = 1; n < 80; n++) {
		CLEANUP(free_sd) struct sdict *sd = NULL;
		CLEANUP(free_im) struct image *im[2] = { NULL, NULL };
		CLEANUP(buf_free) struct buf b = header("{" META("{\\\"version\\\":1,"
					"\\\"values\\\":{\\\"v\\\":{\\\"json\\\":{\\\"a\\\":1}}}}") ",\"a\":" W8 "}");
		mem_fail_at(n);
		enum err e = image_parse(b.p, b.len, b.len + 8, 0, &im[0]);
		if (!e)
			e = image_collect(im, 1, &sd);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY || e == ERR_FORMAT_IMAGE);
		failed += e != OK;
	}
	assert_true(failed > 10);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_plain_file_is_an_image),
		cmocka_unit_test(chunks_of_two_ranks),
		cmocka_unit_test(raw_entries),
		cmocka_unit_test(bad_metadata),
		cmocka_unit_test(ranks_that_disagree),
		cmocka_unit_test(values_are_taken_apart),
		cmocka_unit_test(cut_headers),
		cmocka_unit_test(built_images_are_read_back),
		cmocka_unit_test(nested_shards),
		cmocka_unit_test(running_out_of_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
