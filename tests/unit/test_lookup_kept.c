/* The file in which look-up workers keep checkpoints: they are read back as they were put, and never otherwise, whatever happens to it. */
#include "lib/t.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/fs.h"
#include "query/lookup_kept.h"

enum { COUNT = 5 };

static int file;

static struct lookup_kept begin(void)
{
	struct lookup_kept k = { 0 };
	int fd = dup(file);

	assert_true(fd >= 0);
	lookup_kept_in(&k, fd);
	lookup_kept_read(&k);
	return k;
}

static uint64_t file_bytes(void)
{
	struct stat st;

	assert_int_equal(fstat(file, &st), 0);
	return (uint64_t)st.st_size;
}

static struct lookup_entry *made(int i, const char *record)
{
	struct checkpoint_metric metrics[] = { { STR("loss"), i + 0.5 }, { STR("\xc3\xa9"), -1 } };
	struct checkpoint_label labels[] = { { STR("team"), STR("a\0b") } };
	struct lookup_entry *out = NULL, e = { .mark = { .dev = 1, .ino = (ino_t)i }, .format = FORMAT_DCP, .brief = 3 };
	char name[32];

	snprintf(name, sizeof name, "run/step-%d", i);
	e.facts = (struct checkpoint_facts){ .name = str_of(name), .format = STR("dcp"), .step = i, .at_ms = -i, .bytes = 1000,
					     .world_size = 4, .is_held = i == 1, .metrics = metrics, .metric_count = 2,
					     .labels = labels, .label_count = 1 };
	e.record = str_of(record);
	e.etag = STR("etag");
	T_OK(lookup_entry_pack(&e, &out));
	return out;
}

static void put(struct lookup_kept *k, int i, const char *record)
{
	static const struct lookup_tree none;
	struct lookup_entry *e = made(i, record);

	lookup_kept_put(k, e);
	assert_true(e->kept_bytes > 0);
	mem_free(e);
	lookup_kept_flush(k, &none);
}

static void put_all(void)
{
	struct lookup_kept k = begin();

	for (int i = 0; i < COUNT; i++)
		put(&k, i, "\"name\":\"x\"");
	lookup_kept_free(&k);
}

static struct lookup_entry *take(struct lookup_kept *k, int i)
{
	struct lookup_mark mark = { .dev = 1, .ino = (ino_t)i };
	char name[32];

	snprintf(name, sizeof name, "run/step-%d", i);
	return lookup_kept_has(k, name) ? lookup_kept_take(k, name, &mark) : NULL;
}

static void assert_as_put(struct lookup_entry *e, int i, const char *record)
{
	struct lookup_entry *want = made(i, record);
	const struct checkpoint_facts *a = &e->facts, *b = &want->facts;

	assert_true(str_eq(a->name, b->name) && str_eq(a->run, STR("run")) && str_eq(a->format, b->format));
	assert_true(a->step == i && a->at_ms == -i && a->bytes == 1000 && a->world_size == 4);
	assert_true(a->is_held == (i == 1) && a->metric_count == 2 && a->label_count == 1 && str_eq(a->labels[0].value, STR("a\0b")));
	assert_true(str_eq(a->metrics[0].key, STR("loss")) && a->metrics[0].value > i && a->metrics[1].value < 0);
	assert_true(str_eq(e->record, want->record) && str_eq(e->etag, want->etag) && e->brief == 3 && e->settled && e->looked == 0);
	mem_free(want);
	mem_free(e);
}

static int setup(void **state)
{
	(void)state;
	file = memfd_create("kept", MFD_CLOEXEC);
	return file < 0;
}

static int teardown(void **state)
{
	(void)state;
	fs_drop(&file);
	return 0;
}

static void test_what_was_put_is_there(void **state)
{
	struct lookup_mark other = { .dev = 2 };

	(void)state;
	put_all();
	struct lookup_kept k = begin();
	put(&k, 1, "\"name\":\"newer\"");
	lookup_kept_free(&k);
	k = begin();
	assert_as_put(take(&k, 1), 1, "\"name\":\"newer\"");
	assert_as_put(take(&k, 4), 4, "\"name\":\"x\"");
	assert_null(take(&k, 4));
	assert_true(lookup_kept_has(&k, "run/step-0") && !lookup_kept_has(&k, "run/step-9"));
	assert_null(lookup_kept_take(&k, "run/step-0", &other)); /* its folder has changed */
	assert_false(lookup_kept_has(&k, "run/step-0"));
	assert_true(k.wasted > 0 && k.bytes == file_bytes());
	lookup_kept_free(&k);
}

/* Each byte another one, each end: what is read is what was put, and the file is good again. */
static void test_a_damaged_file(void **state)
{
	(void)state;
	put_all();
	uint64_t n = file_bytes();
	CLEANUP(mem_free_ptr) unsigned char *whole = mem_alloc(n);
	T_OK(fs_pread(file, whole, n, 0, ""));
	for (uint64_t at = 0; at < n; at++) {
		unsigned char byte = whole[at] ^ 0x41;
		T_OK(fs_pwrite(file, whole, n, 0, ""));
		assert_int_equal(ftruncate(file, (off_t)(at % 2 ? at : n)), 0);
		if (at % 2 == 0)
			T_OK(fs_pwrite(file, &byte, 1, at, ""));
		struct lookup_kept k = begin();
		uint64_t left = file_bytes();
		assert_true(left <= at && left == k.bytes && k.has_file);
		for (int i = 0; i < COUNT; i++) {
			struct lookup_entry *e = take(&k, i);
			assert_true((e != NULL) == ((uint64_t)i < left / (n / COUNT)));
			if (e)
				assert_as_put(e, i, "\"name\":\"x\"");
		}
		lookup_kept_free(&k);
	}
}

/* Of a checkpoint that changes again and again the file keeps no more than a few megabytes. */
static void test_what_is_old_goes(void **state)
{
	static const struct lookup_tree none;
	CLEANUP(mem_free_ptr) char *record = mem_zalloc(1, 100001);

	(void)state;
	memset(record, 'x', 100000);
	struct lookup_kept k = begin();
	struct lookup_entry *e = made(0, record);
	for (int i = 0; i < 100; i++) {
		lookup_kept_put(&k, e);
		lookup_kept_flush(&k, &none);
		assert_true(file_bytes() < 3 << 20);
	}
	mem_free(e);
	lookup_kept_free(&k);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_what_was_put_is_there, setup, teardown),
		cmocka_unit_test_setup_teardown(test_a_damaged_file, setup, teardown),
		cmocka_unit_test_setup_teardown(test_what_is_old_goes, setup, teardown),
	};
	return cmocka_run_group_tests_name("lookup_kept", tests, NULL, NULL);
}
