/* `.dcpd.json`: what a run writes is what is read back; what others write is refused or does no harm. */
#include "lib/t.h"

#include <string.h>

#include "io/digest.h"
#include "runner/manifest_put.h"
#include "store/manifest.h"

static struct run_build build;
static struct run run;

static void add_dst(uint32_t file, uint64_t offset, uint64_t length, uint64_t parts)
{
	struct run_dst *d;
	struct run_part *p;

	T_OK(vec_push(&build.dsts, &d));
	*d = (struct run_dst){ .file = file, .offset = offset, .length = length, .first_part = build.parts.n, .part_count = parts,
			       .crc32 = 0xdeadbeef };
	memset(d->xxh3_128, (int)offset + 1, sizeof d->xxh3_128);
	for (uint64_t i = 0; i < parts; i++) {
		T_OK(vec_push(&build.parts, &p));
		p->begin = length * i / parts;
		p->end = length * (i + 1) / parts;
		memset(p->xxh3_128, (int)(100 + i), sizeof p->xxh3_128);
	}
}

/* Two target files, the second item of the first in three blocks, added out of order; a source file in between. */
static int setup(void **state)
{
	uint32_t file;

	(void)state;
	memset(&build, 0, sizeof build);
	T_OK(run_add_file(&build, RUN_FILE_TARGET, 0, STR("__0_0.distcp"), 9000, &file));
	T_OK(run_add_file(&build, RUN_FILE_SOURCE, 0, STR("elsewhere"), 1, &file));
	T_OK(run_add_file(&build, RUN_FILE_TARGET, 0, STR("__1_0 \"x\".distcp"), 77, &file));
	add_dst(0, 4096, 3000, 3);
	add_dst(2, 0, 77, 1);
	add_dst(0, 0, 100, 1);
	T_OK(run_share(&build, &run));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	run_detach(&run);
	run_build_free(&build);
	return 0;
}

static const struct manifest_head head = { .job = "01J", .kind = "save", .created_at = "2026-01-01T00:00:00Z",
					   .metadata_name = ".metadata", .attempt = 2, .generation = 7, .world_size = 2,
					   .metadata_bytes = 55, .has_generation = true, .metadata_xxh3 = { 1, 2, 3 } };

static void test_round_trip(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;

	(void)state;
	T_OK(manifest_put(&b, &head, &run, NULL));
	T_OK(manifest_parse(b.p, b.len, &m));
	assert_string_equal(m->job, "01J");
	assert_string_equal(m->kind, "save");
	assert_string_equal(m->metadata_name, ".metadata");
	assert_int_equal(m->attempt, 2);
	assert_true(m->has_generation && m->generation == 7);
	assert_int_equal(m->bytes, 9077);
	assert_int_equal(m->files.n, 2);
	assert_int_equal(m->metadata_xxh3[2], 3);
	const struct manifest_item *i = manifest_find(m, STR("__0_0.distcp"), 4096, 3000);
	assert_non_null(i);
	assert_int_equal(i->digest_count, 3);
	assert_int_equal(m->digests.v[i->digest_at + 1].end, 2000);
	assert_int_equal(m->digests.v[i->digest_at + 2].xxh3_128[15], 102);
	i = manifest_find(m, STR("__1_0 \"x\".distcp"), 0, 77);
	assert_non_null(i);
	assert_int_equal(i->digest_count, 1);
	assert_true(m->digests.v[i->digest_at].end == UINT64_MAX);
	assert_null(manifest_find(m, STR("__0_0.distcp"), 4096, 2999));
	assert_null(manifest_find(m, STR("__0_0.distcp"), 4097, 3000));
	assert_null(manifest_find(m, STR("elsewhere"), 0, 1));
}

static void test_names(void **state)
{
	static const char *const of[][2] = {
		{ ".metadata", ".dcpd.json" }, { "model.safetensors.index.json", ".dcpd.json" }, { "__0.metadata", ".dcpd.0.json" },
		{ "__4711.metadata", ".dcpd.4711.json" }, { "__.metadata", ".dcpd.json" }, { "__x.metadata", ".dcpd.json" },
	};
	static const char *const none[] = { ".dcpd..json", ".dcpd.-1.json", ".dcpd.1.jso", ".dcpd.01.json", ".dcpd.1x.json",
					    ".dcpd-1.json", "dcpd.json", ".dcpd.99999999999.json", ".dcpd", "" };
	char name[MANIFEST_NAME_MAX];
	int64_t rank;

	(void)state;
	for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
		manifest_name(of[i][0], name);
		assert_string_equal(name, of[i][1]);
		assert_true(manifest_is(name, &rank));
		assert_int_equal(rank, i == 2 ? 0 : i == 3 ? 4711 : -1);
	}
	for (size_t i = 0; i < sizeof none / sizeof *none; i++)
		assert_false(manifest_is(none[i], &rank));
}

/* Files of a second manifest join the first's; one that both list is as the first has it. */
/* A manifest of one file: text is its list of items. */
static struct manifest *of_items(const char *items)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(1 << 16);
	struct manifest *m;

	buf_printf(&text, "{\"dcpd\":1,\"job\":\"j\",\"kind\":\"save\",\"created_at\":\"2026-01-01T00:00:00Z\",\"world_size\":1,"
			  "\"bytes\":100,\"metadata\":{\"name\":\"\",\"bytes\":0,\"xxh3_128\":\"%032d\"},"
			  "\"files\":[{\"name\":\"f\",\"bytes\":100,\"items\":[%s]}]}\n", 0, items);
	T_OK(manifest_parse(text.p, text.len, &m));
	return m;
}

#define CRC "\"00000000\","
#define A "\"00000000000000000000000000000001\""
#define B "\"00000000000000000000000000000002\""

/* Digests say that two ranges are the same only where both are whole items, or the same blocks of two items. */
static void test_same(void **state)
{
	static const struct {
		const char *a, *b;
		uint64_t offset_a, offset_b, length;
		bool same;
	} cases[] = {
		{ "[0,50," CRC A "]", "[0,50," CRC A "]", 0, 0, 50, true },
		{ "[0,50," CRC A "]", "[20,50," CRC A "]", 0, 20, 50, true }, /* payloads: wherever they lie */
		{ "[0,50," CRC A "]", "[0,50,\"00000000\"," B "]", 0, 0, 50, false },
		{ "[0,50," CRC A "]", "[0,50," CRC A "]", 0, 0, 49, false }, /* no item */
		{ "[0,50," CRC A "]", "[0,50," CRC A ",true]", 0, 0, 50, false },
		{ "[0,50," CRC A ",[20," A ",50," B "]]", "[0,50," CRC A ",[20," A ",50," B "]]", 0, 0, 50, true },
		{ "[0,50," CRC A ",[20," A ",50," B "]]", "[0,50," CRC A ",[30," A ",50," B "]]", 0, 0, 50, false },
		/* parts of items that are known by all their bytes */
		{ "[0,50," CRC A ",[20," A ",50," B "],true]", "[0,50," CRC A ",[20," A ",50," A "],true]", 4, 4, 16, true },
		{ "[0,50," CRC A ",[20," A ",50," B "],true]", "[0,50," CRC A ",[20," A ",50," A "],true]", 4, 4, 17, false },
		{ "[0,50," CRC A ",[20," A ",50," B "],true]", "[0,50," CRC A ",[20," A ",50," B "],true]", 4, 5, 16, false },
		{ "[0,50," CRC A ",[20," A ",50," B "],true]", "[8,50," CRC A ",[20," A ",50," B "],true]", 30, 38, 20, true },
		{ "[0,50," CRC A ",true]", "[0,50," CRC A ",true]", 10, 10, 20, true },
		{ "[0,50," CRC A ",true]", "[0,50," CRC A ",true]", 40, 40, 20, false },
		{ "[0,50," CRC A ",true]", "[0,50," CRC A ",true]", 10, 10, 0, false },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct manifest *a = of_items(cases[i].a), *b = of_items(cases[i].b);
		const struct manifest_range x = { a, STR("f"), cases[i].offset_a, cases[i].length };
		const struct manifest_range y = { b, STR("f"), cases[i].offset_b, cases[i].length };
		const struct manifest_range other = { b, STR("g"), cases[i].offset_b, cases[i].length }, none = { NULL, STR("f"), 0, 50 };
		assert_int_equal(manifest_same(&x, &y), cases[i].same);
		assert_int_equal(manifest_same(&y, &x), cases[i].same);
		assert_false(manifest_same(&x, &other) || manifest_same(&x, &none) || manifest_same(&none, &x));
		manifest_free(a);
		manifest_free(b);
	}
}

static void test_join(void **state)
{
	static const char second[] = "{\"bytes\":5,\"files\":[{\"name\":\"new\",\"bytes\":5,\"items\":"
				     "[[7,8,\"c\",\"00112233445566778899aabbccddeeff\",[4,\"00112233445566778899aabbccddeeff\",8,"
				     "\"10112233445566778899aabbccddeeff\"]]]},{\"name\":\"__0_0.distcp\",\"items\":"
				     "[[9999,1,\"c\",\"00112233445566778899aabbccddeeff\"]]}]}";
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	struct manifest *from = NULL;

	(void)state;
	T_OK(manifest_put(&b, &head, &run, NULL));
	T_OK(manifest_parse(b.p, b.len, &m));
	T_OK(manifest_parse(second, strlen(second), &from));
	T_OK(manifest_join(m, from));
	manifest_free(from);
	assert_int_equal(m->files.n, 3);
	assert_int_equal(m->bytes, 9082);
	const struct manifest_item *i = manifest_find(m, STR("new"), 7, 8);
	assert_non_null(i);
	assert_int_equal(i->digest_count, 2);
	assert_int_equal(m->digests.v[i->digest_at + 1].xxh3_128[0], 0x10);
	assert_non_null(manifest_find(m, STR("__0_0.distcp"), 4096, 3000));
	assert_null(manifest_find(m, STR("__0_0.distcp"), 9999, 1));
}

/* Every beginning of a manifest is an error, never half of one. */
static void test_cut(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	size_t end;

	(void)state;
	T_OK(manifest_put(&b, &head, &run, NULL));
	for (end = b.len; b.p[end - 1] != '}'; end--)
		;
	for (size_t n = 0; n < end; n++) {
		struct manifest *m = NULL;
		char *copy = mem_alloc(n); /* of its own, so that a sanitizer sees a read behind it */
		memcpy(copy, b.p, n);
		T_ERR(FORMAT_MANIFEST, manifest_parse(copy, n, &m));
		assert_null(m);
		mem_free(copy);
	}
}

/* A manifest says by its edges that it must end with its own digest: no damage to that end makes it one of an older version. */
static void every_bit_counts(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	(void)state;
	T_OK(manifest_put(&b, &head, &run, NULL));
	for (uint64_t i = 0; i < 8 * b.len; i++) {
		struct manifest *m = NULL;
		b.p[i / 8] ^= (unsigned char)(1 << i % 8);
		enum err e = manifest_parse(b.p, b.len, &m);
		b.p[i / 8] ^= (unsigned char)(1 << i % 8);
		manifest_free(m);
		assert_true(e == ERR_CHECKPOINT_DAMAGED || e == ERR_FORMAT_MANIFEST);
	}
}

#define DIGEST "\"00112233445566778899aabbccddeeff\""

static void test_hostile(void **state)
{
	static const char *const bad[] = {
		"[]", "{\"job\":1}", "{\"attempt\":-1}", "{\"bytes\":1e3}", "{\"bytes\":18446744073709551616}", "{\"files\":{}}",
		"{\"files\":[1]}", "{\"files\":[{\"name\":1}]}", "{\"files\":[{\"items\":[{}]}]}", "{\"files\":[{\"items\":[[0]]}]}",
		"{\"files\":[{\"items\":[[0,1,\"c\",\"zz\"]]}]}", "{\"files\":[{\"items\":[[0,1,\"c\"," DIGEST ",1]]}]}",
		"{\"files\":[{\"items\":[[0,1,\"c\"," DIGEST ",[9," DIGEST ",8," DIGEST "]]]}]}",
		"{\"files\":[{\"items\":[[0,1,\"c\"," DIGEST ",[-1," DIGEST "]]]}]}",
		"{\"files\":[{\"items\":[[0,1,\"c\"," DIGEST ",[1]]]}]}",
		"{\"job\":\"0123456789012345678901234567890123456789012345678901234567890123\"}",
		"{\"metadata\":{\"xxh3_128\":\"00112233445566778899AABBCCDDEEFF\"}}", "{} {}",
	};

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct manifest *m = NULL;
		T_ERR(FORMAT_MANIFEST, manifest_parse(bad[i], strlen(bad[i]), &m));
	}
}

/* A list of items that begins again would have been sorted beyond the array's end. */
static void test_two_lists(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	struct manifest *m = NULL;

	(void)state;
	buf_puts(&b, "{\"files\":[{\"name\":\"a\"");
	for (int list = 0; list < 2; list++) {
		buf_puts(&b, ",\"items\":[");
		for (int i = 0; i < 16; i++)
			buf_printf(&b, "%s[%d,1,\"c\",%s]", i ? "," : "", 100 - i, DIGEST);
		buf_puts(&b, "]");
	}
	buf_puts(&b, "}]}");
	T_OK(buf_status(&b));
	T_ERR(FORMAT_MANIFEST, manifest_parse(b.p, b.len, &m));
}

/* Nesting that nobody needs must not use up the stack. */
static void test_deep(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(8 << 20);
	struct manifest *m = NULL;

	(void)state;
	buf_puts(&b, "{\"x\":");
	buf_fill(&b, '[', 1 << 20);
	T_OK(buf_status(&b));
	T_ERR(FORMAT_MANIFEST, manifest_parse(b.p, b.len, &m));
}

static void test_no_memory(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	(void)state;
	T_OK(manifest_put(&b, &head, &run, NULL));
	for (uint64_t nth = 1;; nth++) {
		struct manifest *m = NULL;
		mem_fail_at(nth);
		enum err e = manifest_parse(b.p, b.len, &m);
		mem_fail_at(0);
		manifest_free(m);
		if (e == OK)
			break;
		assert_int_equal(e, ERR_NO_MEMORY);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
		cmocka_unit_test(test_names),
		cmocka_unit_test(test_same),
		cmocka_unit_test_setup_teardown(test_join, setup, teardown),
		cmocka_unit_test_setup_teardown(every_bit_counts, setup, teardown),
		cmocka_unit_test_setup_teardown(test_cut, setup, teardown),
		cmocka_unit_test(test_hostile),
		cmocka_unit_test(test_two_lists),
		cmocka_unit_test(test_deep),
		cmocka_unit_test_setup_teardown(test_no_memory, setup, teardown),
	};

	return cmocka_run_group_tests_name("manifest", tests, NULL, NULL);
}
