/* Opening a stored checkpoint: what it is, that all of it is there, and what is wrong with it if not. */
#include "lib/t_worker.h"

#include <sys/stat.h>

#include "io/digest.h"
#include "store/checkpoint.h"

T_WORKER_EACH(t);
static const char *const GOLDEN = "torch-2.15.0/sharded_rowwise";

static enum err open_it(const char *name, struct checkpoint **out)
{
	const struct ref ref = ref_checkpoint("main", name);

	return checkpoint_open(&t.w.stores, &ref, out);
}

static enum err try_it(const char *name)
{
	struct checkpoint *c = NULL;
	enum err e = open_it(name, &c);

	checkpoint_free(c);
	return e;
}

/* The first file of the checkpoint that holds something. */
static void data_file(const char *name, char *path, size_t max)
{
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = NULL;

	T_OK(open_it(name, &c));
	const struct sd_loc *loc = &c->sd->chunks[0].loc;
	snprintf(path, max, "%s/%.*s", name, (int)c->sd->files[loc->file].name.n, c->sd->files[loc->file].name.p);
}

static enum format recognise(const char *name)
{
	enum format f;

	T_OK(checkpoint_recognise(&t.w.stores.v[0], name, &f));
	return f;
}

static void test_open(void **state)
{
	struct checkpoint *c = NULL;

	(void)state;
	int fds = t_count_fds();
	t_worker_copy(&t, GOLDEN, "run/x");
	T_OK(open_it("run/x", &c));
	assert_int_equal(c->format, FORMAT_DCP);
	assert_int_equal(c->world_size, 4);
	assert_null(c->manifest);
	assert_true(c->sd->tensor_count > 0 && c->metadata_bytes > 0);
	for (uint64_t i = 0; i < c->sd->file_count; i++)
		assert_true(c->file_bytes[i] > 0);
	checkpoint_free(c);
	t_worker_copy(&t, "torch-2.15.0/rank_local", "local");
	T_OK(open_it("local", &c));
	assert_int_equal(c->format, FORMAT_DCP_RANK_LOCAL);
	checkpoint_free(c);
	assert_int_equal(t_count_fds(), fds);
}

static void test_recognise(void **state)
{
	(void)state;
	t_worker_put(&t, "a.safetensors", "", 0);
	t_worker_put(&t, "b.pt", "", 0);
	t_worker_put(&t, "c.txt", "", 0);
	t_worker_put(&t, "hf/model.safetensors", "", 0);
	t_worker_put(&t, "local/__3.metadata", "", 0);
	t_worker_put(&t, "not/__x.metadata", "", 0);
	t_worker_put(&t, "tricky/.metadata/file", "", 0); /* a folder of that name */
	t_worker_put(&t, "tricky2/x.safetensors/file", "", 0);
	assert_int_equal(recognise("a.safetensors"), FORMAT_SAFETENSORS);
	assert_int_equal(recognise("b.pt"), FORMAT_TORCH);
	assert_int_equal(recognise("c.txt"), FORMAT_NONE);
	assert_int_equal(recognise("hf"), FORMAT_SAFETENSORS);
	assert_int_equal(recognise("local"), FORMAT_DCP_RANK_LOCAL);
	assert_int_equal(recognise("not"), FORMAT_NONE);
	assert_int_equal(recognise("tricky"), FORMAT_NONE);
	assert_int_equal(recognise("tricky2"), FORMAT_NONE);
	assert_int_equal(recognise("nothing"), FORMAT_NONE);
}

static const struct store_ops *true_ops;

/* Of root's folders none is forbidden to root, as tests may be. */
static enum err enter_but_some(struct store_at folder, const char *path, struct store_at *out)
{
	if (strcmp(path, "forbidden") == 0)
		return ERR(FORBIDDEN, "not yours");
	if (strcmp(path, "gone") == 0)
		return ERR(NOT_FOUND, "not there any more");
	return true_ops->enter(folder, path, out);
}

/* A folder with a .safetensors file is a checkpoint only if no other can be below it. */
static void test_folders_that_cannot_be_searched(void **state)
{
	struct store *store = &t.w.stores.v[0];
	struct store_ops ops = *store->ops;
	char path[64];

	(void)state;
	true_ops = store->ops;
	ops.enter = enter_but_some;
	store->ops = &ops;
	t_worker_put(&t, "a/x.safetensors", "", 0);
	t_worker_put(&t, "a/gone/x", "", 0);
	assert_int_equal(recognise("a"), FORMAT_SAFETENSORS);
	t_worker_put(&t, "a/forbidden/x", "", 0);
	assert_int_equal(recognise("a"), FORMAT_NONE);
	t_worker_put(&t, "b/x.safetensors", "", 0);
	t_worker_put(&t, "b/below/gone/x", "", 0);
	t_worker_put(&t, "b/below/run/step/y.safetensors", "", 0);
	assert_int_equal(recognise("b"), FORMAT_NONE);
	t_worker_put(&t, "c/x.safetensors", "", 0);
	for (int i = 0; i < 64; i++) {
		snprintf(path, sizeof path, "c/%d/x", i);
		t_worker_put(&t, path, "", 0);
	}
	assert_int_equal(recognise("c"), FORMAT_SAFETENSORS);
	t_worker_put(&t, "c/one-more/x", "", 0);
	assert_int_equal(recognise("c"), FORMAT_NONE);
	store->ops = true_ops;
}

static void test_not_there(void **state)
{
	const struct ref elsewhere = ref_checkpoint("other", "x");
	const struct ref in_memory = { .kind = REF_STATE_DICT, .name = STR("x"), .generation = -1 };
	struct checkpoint *c = NULL;

	(void)state;
	T_ERR(NOT_FOUND, try_it("nothing"));
	t_worker_put(&t, "plain/file", "x", 1);
	T_ERR(CHECKPOINT_INCOMPLETE, try_it("plain"));
	t_worker_put(&t, "one.safetensors", "x", 1);
	T_ERR(FORMAT_SAFETENSORS, try_it("one.safetensors"));
	t_worker_put(&t, "one.pt", "x", 1);
	T_ERR(FORMAT_ITEM, try_it("one.pt"));
	T_ERR(NAME_INVALID, try_it("../x"));
	T_ERR(VALIDATION_FAILED, checkpoint_open(&t.w.stores, &in_memory, &c));
	T_ERR(NOT_FOUND, checkpoint_open(&t.w.stores, &elsewhere, &c));
}

/* Whatever is missing or too short is named, before anything is planned. */
static void test_missing_and_cut(void **state)
{
	char path[512];
	struct stat st;

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	data_file("x", path, sizeof path);
	assert_int_equal(fstatat(t.dir.fd, path, &st, 0), 0);
	int fd = openat(t.dir.fd, path, O_RDWR | O_CLOEXEC);
	for (int cut = 1; cut < 3; cut++) {
		assert_int_equal(ftruncate(fd, cut == 1 ? st.st_size / 2 : 0), 0);
		T_ERR(CHECKPOINT_INCOMPLETE, try_it("x"));
		assert_non_null(strstr(path, err_last()->file));
		assert_true(err_last()->fqn[0] && err_last()->offset >= 0 && err_last()->rank >= 0);
	}
	close(fd);
	T_OK(fs_unlink(t.dir.fd, path));
	T_ERR(CHECKPOINT_INCOMPLETE, try_it("x"));
	assert_non_null(strstr(path, err_last()->file));
	assert_int_equal(symlinkat("/etc/passwd", t.dir.fd, path), 0);
	enum err e = try_it("x");
	assert_true(e == ERR_NAME_INVALID || e == ERR_FORMAT_METADATA);
	assert_int_equal(unlinkat(t.dir.fd, path, 0), 0);
	assert_int_equal(mkfifoat(t.dir.fd, path, 0644), 0);
	e = try_it("x");
	assert_true(e == ERR_NAME_INVALID || e == ERR_FORMAT_METADATA);
}

/* Every beginning of .metadata, a few apart, is an error that names the file. */
static void test_cut_metadata(void **state)
{
	void *bytes = NULL;
	uint64_t n = 0;

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	T_OK(fs_read_all(t.dir.fd, "x/.metadata", 1 << 20, &bytes, &n));
	for (uint64_t k = 0; k + 1 < n; k += 1 + n / 300) {
		t_worker_put(&t, "x/.metadata", bytes, k);
		enum err e = try_it("x");
		if (e != ERR_FORMAT_PICKLE && e != ERR_FORMAT_METADATA)
			T_FAIL("%ju bytes gave %s", (uintmax_t)k, err_code_name(e));
		assert_string_equal(err_last()->file, ".metadata");
	}
	mem_free(bytes);
}

static void test_manifest(void **state)
{
	struct checkpoint *c = NULL;

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	t_worker_put(&t, "x/" MANIFEST_NAME, "{\"job\":\"J\"}", 11);
	T_OK(open_it("x", &c));
	assert_string_equal(c->manifest->job, "J");
	checkpoint_free(c);
	t_worker_put(&t, "x/" MANIFEST_NAME, "{\"job\":", 7);
	T_ERR(FORMAT_MANIFEST, try_it("x"));
	assert_string_equal(err_last()->file, MANIFEST_NAME);
}

static void put_manifest_of(const char *file, const char *metadata, const void *bytes, uint64_t n, const char *job)
{
	unsigned char digest[16];
	char hex[33], text[512];

	digest_xxh3(bytes, n, digest);
	digest_hex(digest, hex);
	int len = snprintf(text, sizeof text, "{\"job\":\"%s\",\"metadata\":{\"name\":\"%s\",\"bytes\":%ju,\"xxh3_128\":\"%s\"},"
			   "\"files\":[{\"name\":\"of-%s\",\"items\":[[0,1,\"c\",\"%s\"]]}]}", job, metadata, (uintmax_t)n, hex, job, hex);
	t_worker_put(&t, file, text, (uint64_t)len);
}

/* Somebody has saved over ours: the manifest does not speak for what is there now. */
static void test_manifest_of_other_metadata(void **state)
{
	struct checkpoint *c = NULL;
	void *bytes = NULL;
	uint64_t n = 0;

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	T_OK(fs_read_all(t.dir.fd, "x/.metadata", 1 << 20, &bytes, &n));
	put_manifest_of("x/" MANIFEST_NAME, ".metadata", bytes, n, "J");
	T_OK(open_it("x", &c));
	assert_string_equal(c->manifest->job, "J");
	assert_string_equal(c->outdated, "");
	checkpoint_free(c);
	put_manifest_of("x/" MANIFEST_NAME, ".metadata", bytes, n - 1, "J");
	T_OK(open_it("x", &c));
	assert_null(c->manifest);
	assert_string_equal(c->outdated, ".metadata");
	checkpoint_free(c);
	put_manifest_of("x/" MANIFEST_NAME, "__0.metadata", bytes, n, "J");
	T_OK(open_it("x", &c));
	assert_null(c->manifest);
	checkpoint_free(c);
	mem_free(bytes);
}

/* Each rank's manifest is joined, if it is of that rank's metadata. */
static void test_manifests_of_ranks(void **state)
{
	struct checkpoint *c = NULL;
	void *bytes = NULL;
	uint64_t n = 0;

	(void)state;
	t_worker_copy(&t, "torch-2.15.0/rank_local", "x");
	T_OK(fs_read_all(t.dir.fd, "x/__0.metadata", 1 << 20, &bytes, &n));
	put_manifest_of("x/.dcpd.0.json", "__0.metadata", bytes, n, "A");
	put_manifest_of("x/.dcpd.1.json", "__0.metadata", bytes, n, "B"); /* a copy of another's */
	mem_free(bytes);
	T_OK(fs_read_all(t.dir.fd, "x/__1.metadata", 1 << 20, &bytes, &n));
	T_OK(open_it("x", &c));
	assert_int_equal(c->format, FORMAT_DCP_RANK_LOCAL);
	assert_int_equal(c->manifest->files.n, 1);
	assert_string_equal(c->outdated, "__1.metadata");
	checkpoint_free(c);
	put_manifest_of("x/.dcpd.1.json", "__1.metadata", bytes, n, "B");
	T_OK(open_it("x", &c));
	assert_non_null(manifest_find(c->manifest, STR("of-A"), 0, 1));
	assert_non_null(manifest_find(c->manifest, STR("of-B"), 0, 1));
	assert_string_equal(c->outdated, "");
	checkpoint_free(c);
	t_worker_put(&t, "x/.dcpd.1.json", "{", 1);
	T_ERR(FORMAT_MANIFEST, try_it("x"));
	assert_string_equal(err_last()->file, ".dcpd.1.json");
	mem_free(bytes);
}

/* Files that no item names count for the world; others do not. */
static void test_world(void **state)
{
	struct checkpoint *c = NULL;

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	t_worker_put(&t, "x/__6_0.distcp", "", 0);
	t_worker_put(&t, "x/__70000_0.distcp", "", 0);
	t_worker_put(&t, "x/__99_0.distcp.tmp", "", 0);
	t_worker_put(&t, "x/__-1_0.distcp", "", 0);
	T_OK(open_it("x", &c));
	assert_int_equal(c->world_size, 7);
	checkpoint_free(c);
}

static void put_index(const char *weight_map)
{
	char text[1024];
	int n = snprintf(text, sizeof text, "{%s}", weight_map);

	t_worker_put(&t, "hf/" HF_INDEX, text, (size_t)n);
}

/* The index of a stranger: what it names twice, names nowhere, or names too often is refused before a header is read. */
static void test_index(void **state)
{
	static const char file[] = "\x34\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}x";
	char map[512] = "\"weight_map\":{\"a\":\"m.safetensors\",\"b\":\"";

	(void)state;
	t_worker_put(&t, "hf/m.safetensors", file, 8 + 0x34 + 1);
	put_index("\"weight_map\":{\"a\":\"m.safetensors\"}");
	T_OK(try_it("hf"));
	put_index("\"weight_map\":{\"a\":\"m.safetensors\"},\"weight_map\":{\"a\":\"other\"}");
	T_ERR(FORMAT_SAFETENSORS, try_it("hf"));
	put_index("\"weight_map\":{\"a\":\"m.safetensors\",\"a\":\"m.safetensors\"}");
	T_ERR(FORMAT_SAFETENSORS, try_it("hf"));
	assert_string_equal(err_last()->file, HF_INDEX);
	assert_string_equal(err_last()->fqn, "a");
	put_index("\"weight_map\":{\"a\":\"m.safetensors\",\"b\":\"m.safetensors\"}");
	T_ERR(CHECKPOINT_INCOMPLETE, try_it("hf"));
	assert_string_equal(err_last()->file, "m.safetensors");
	assert_string_equal(err_last()->fqn, "b");
	put_index("\"weight_map\":{\"a\":\"link.safetensors\"}");
	assert_int_equal(symlinkat("m.safetensors", t.dir.fd, "hf/link.safetensors"), 0);
	T_ERR(FORMAT_METADATA, try_it("hf"));
	assert_string_equal(err_last()->file, "link.safetensors");
	assert_non_null(strstr(err_last()->text, "symbolic link"));
	size_t n = strlen(map);
	memset(map + n, 'x', 300);
	memcpy(map + n + 300, "\"}", 3);
	put_index(map);
	T_ERR(FORMAT_SAFETENSORS, try_it("hf"));
	assert_string_equal(err_last()->file, HF_INDEX);
}

static void test_no_memory(void **state)
{
	(void)state;
	t_worker_copy(&t, "torch-2.15.0/plain", "x");
	int fds = t_count_fds();
	for (uint64_t nth = 1;; nth++) {
		struct checkpoint *c = NULL;
		mem_fail_at(nth);
		enum err e = open_it("x", &c);
		mem_fail_at(0);
		checkpoint_free(c);
		assert_int_equal(t_count_fds(), fds);
		if (e == OK)
			break;
		if (e != ERR_NO_MEMORY)
			T_FAIL("allocation %ju: %s: %s", (uintmax_t)nth, err_code_name(e), err_last()->text);
	}
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_open), T(test_recognise), T(test_folders_that_cannot_be_searched), T(test_not_there), T(test_missing_and_cut),
		T(test_cut_metadata), T(test_manifest), T(test_world), T(test_manifest_of_other_metadata), T(test_manifests_of_ranks),
		T(test_index), T(test_no_memory),
	};

	return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
