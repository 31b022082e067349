/* Locations of bytes, in limited time: a question that takes too long is answered in part, and soon. The test sets the clock, so the
 * machine's speed does not matter. */
#include "lib/t_worker.h"

#include <time.h>

#include "base/buf.h"
#include "format/dcp_meta.h"
#include "query/lookup.h"
#include "store/checkpoint.h"

T_WORKER_EACH(t);
static const char *const GOLDEN = "torch-2.15.0/sharded_rowwise";

/* ------------------------------------------------------------------------------------------------------ the clock */

int __wrap_clock_gettime(clockid_t which, struct timespec *out);
int __real_clock_gettime(clockid_t which, struct timespec *out);

static _Thread_local struct {
	bool on;
	int calls, jump_at;            /* at this call, from 1 on, an hour has passed */
} fake;

int __wrap_clock_gettime(clockid_t which, struct timespec *out)
{
	if (!fake.on || which != CLOCK_MONOTONIC)
		return __real_clock_gettime(which, out);
	fake.calls++;
	*out = (struct timespec){ .tv_sec = 1000 + (fake.jump_at && fake.calls >= fake.jump_at ? 3600 : 0) };
	return 0;
}

/* ---------------------------------------------------------------------------------------------------- questions */

static json_t *ints(const int64_t *v, uint32_t n)
{
	json_t *list = json_array();

	for (uint32_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(v[i]));
	return list;
}

/* A question for every stored chunk of `name`. */
static json_t *question(const char *name)
{
	const struct ref ref = ref_checkpoint("main", name);
	json_t *boxes = json_array();
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = NULL;

	T_OK(checkpoint_open(&t.w.stores, &ref, &c));
	for (uint64_t i = 0; i < c->sd->chunk_count; i++) {
		const struct sd_chunk *k = &c->sd->chunks[i];
		const struct sd_tensor *x = &c->sd->tensors[k->tensor];
		json_array_append_new(boxes, json_pack("{s:s%, s:s, s:o, s:o, s:o}", "fqn", x->fqn.p, (int)x->fqn.n, "dtype",
						       dtype_name(x->dtype), "shape", ints(x->shape, x->ndim), "offsets",
						       ints(k->dims, x->ndim), "sizes", ints(sd_sizes(k, x->ndim), x->ndim)));
	}
	return json_pack("{s:s, s:s, s:o}", "storage", "main", "name", name, "boxes", boxes);
}

static json_t *ask(const json_t *q, int jump_at)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(1 << 20);
	int fd = -1;

	fake.calls = 0;
	fake.jump_at = jump_at;
	fake.on = true;
	enum err e = lookup_locate(&t.w, q, NULL, 0, &out, &fd);
	fake.on = false;
	T_OK(e);
	off_t n = lseek(fd, 0, SEEK_END);
	char *text = mem_zalloc((uint64_t)n, 1);
	T_OK(fs_pread(fd, text, (size_t)n, 0, "answer"));
	json_t *a = json_loadb(text, (size_t)n, 0, NULL);
	assert_non_null(a);
	mem_free(text);
	fs_drop(&fd);
	return a;
}

/* How many boxes there was no time for. All that is among the others is there for that. */
static size_t late(const json_t *answer)
{
	const json_t *others = json_object_get(answer, "others");

	for (size_t i = 0; i < json_array_size(others); i++)
		assert_string_equal(json_string_value(json_object_get(json_array_get(others, i), "why")), "limit");
	return json_array_size(others);
}

/* The reads of those that were in time are those of the whole answer: boxes are looked for one by one, tensor by tensor. */
static void check_part(const json_t *part, const json_t *whole)
{
	const json_t *reads = json_object_get(part, "reads"), *all = json_object_get(whole, "reads");
	size_t k = 0;

	for (size_t i = 0; i < json_array_size(reads); i++) {
		json_int_t box = json_integer_value(json_object_get(json_array_get(reads, i), "box"));
		while (json_integer_value(json_object_get(json_array_get(all, k), "box")) != box)
			k++;
		const json_t *a = json_array_get(reads, i), *b = json_array_get(all, k++);
		assert_true(json_equal(json_object_get(a, "offset"), json_object_get(b, "offset")));
		assert_true(json_equal(json_object_get(a, "count"), json_object_get(b, "count")));
	}
}

/* --------------------------------------------------------------------------------------------------------- tests */

/* Wherever the time is up: what was found so far, and the rest by name. */
static void test_time_is_up(void **state)
{
	size_t n, before = SIZE_MAX, parts = 0;

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	json_t *q = question("x"), *whole = ask(q, 0);
	n = json_array_size(json_object_get(q, "boxes"));
	int calls = fake.calls, fds = t_count_fds();
	assert_int_equal(late(whole), 0);
	assert_true(n > 4 && (size_t)calls > n + 1);
	for (int k = 2; k <= calls; k++) {
		json_t *a = ask(q, k);
		assert_true(late(a) > 0 && late(a) <= before);
		assert_true(fake.calls == k); /* once it is late, it is late */
		before = late(a);
		parts += before < n;
		check_part(a, whole);
		json_decref(a);
	}
	assert_true(parts > 2 && before == 1);
	assert_int_equal(t_count_fds(), fds);
	json_decref(whole);
	json_decref(q);
}

/* A manifest whose one item has two halves, and many blocks of no bytes between them. */
static void put_blocks(const char *name, int blocks)
{
	CLEANUP(checkpoint_free_ptr) struct checkpoint *c = NULL;
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 24);
	const struct ref ref = ref_checkpoint("main", name);
	const char *hex = "00000000000000000000000000000000";
	char path[64];

	T_OK(checkpoint_open(&t.w.stores, &ref, &c));
	const struct sd_chunk *k = &c->sd->chunks[0];
	const struct sd_tensor *x = &c->sd->tensors[0];
	uint64_t bytes = dtype_bytes(x->dtype);
	for (uint32_t d = 0; d < x->ndim; d++)
		bytes *= (uint64_t)sd_sizes(k, x->ndim)[d];
	buf_puts(&b, "{\"dcpd\":1,\"job\":\"x\",\"kind\":\"save\",\"files\":[{\"name\":");
	buf_json_str(&b, c->sd->files[k->loc.file].name);
	buf_printf(&b, ",\"bytes\":1,\"items\":[[%ju,%ju,\"00000000\",\"%s\",[", (uintmax_t)k->loc.offset, (uintmax_t)k->loc.length, hex);
	for (int i = 0; i < blocks; i++)
		buf_printf(&b, "%ju,\"%s\",", (uintmax_t)bytes / 2, hex);
	buf_printf(&b, "%ju,\"%s\"]]]}]}", (uintmax_t)bytes, hex);
	T_OK(buf_status(&b));
	snprintf(path, sizeof path, "%s/.dcpd.json", name);
	t_worker_put(&t, path, b.p, b.len);
}

static void test_blocks_of_no_bytes(void **state)
{
	enum { BLOCKS = 50000 };

	(void)state;
	t_worker_copy(&t, GOLDEN, "x");
	json_t *q = question("x"), *few, *many, *part;
	put_blocks("x", 1);
	few = ask(q, 0);
	int calls = fake.calls;
	assert_int_equal(late(few), 0);
	put_blocks("x", BLOCKS);
	many = ask(q, 0);
	assert_true(fake.calls >= calls + BLOCKS / 4096); /* it looks at the clock while it counts them */
	assert_true(json_equal(json_object_get(few, "reads"), json_object_get(many, "reads")));
	part = ask(q, fake.calls); /* the last look: at the last box */
	assert_int_equal(late(part), 1);
	json_decref(q);
	json_decref(few);
	json_decref(many);
	json_decref(part);
}

static enum err into_buf(void *user, const void *bytes, size_t n)
{
	buf_put(user, bytes, n);
	return OK;
}

/* A tensor of so many stored chunks that it may take seconds to compare them, if they lie oddly: never, however fast the machine is. */
static void test_very_many_chunks(void **state)
{
	enum { MOST = 1 << 17 };
	struct dcp_meta_opts opts = { .save_id = "x" };

	(void)state;
	for (int more = 0; more < 2; more++) {
		CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 30);
		int64_t shape = MOST + more, dims[2] = { 0, 1 };
		uint32_t file, at;

		T_OK(sdict_new(UINT64_MAX, &sd));
		T_OK(sdict_add_file(sd, STR("f"), 0, &file));
		T_OK(sdict_add_tensor(sd, STR("w"), DT_UINT8, 1, &shape, &at));
		for (dims[0] = 0; dims[0] < shape; dims[0]++)
			T_OK(sdict_add_chunk(sd, at, dims, 0, (struct sd_loc){ .file = file }));
		T_OK(dcp_meta_write(sd, &opts, into_buf, &b));
		T_OK(buf_status(&b));
		t_worker_put(&t, "many/.metadata", b.p, b.len);
		t_worker_put(&t, "many/f", "", 0);
		json_t *q = json_pack("{s:s, s:s, s:[{s:s, s:s, s:[I], s:[i], s:[i]}]}", "storage", "main", "name", "many", "boxes",
				      "fqn", "w", "dtype", "uint8", "shape", (json_int_t)shape, "offsets", 7, "sizes", 0);
		json_t *a = ask(q, 0);
		assert_int_equal(late(a), more);
		json_decref(a);
		json_decref(q);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_time_is_up, setup, teardown),
		cmocka_unit_test_setup_teardown(test_blocks_of_no_bytes, setup, teardown),
		cmocka_unit_test_setup_teardown(test_very_many_chunks, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
