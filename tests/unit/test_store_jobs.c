/* Whole jobs on a store that has no descriptors (lib/t_objects.h): all bytes go through the store's own functions, each part is written
 * once, and a load brings back what was saved. The same jobs on a file system, with O_DIRECT and without. */
#include "lib/t_worker.h"

#include <sys/mman.h>

#include "format/image.h"
#include "lib/t_objects.h"

enum { RANKS = 2, ROWS = 1500, COLS = 1201, SMALL = 40 };

static struct t_worker t;
static struct store *store;            /* "main" of t */
static bool fails;                     /* the store is told to: the next job ends with its error */

struct state {
	int fds[RANKS];
	uint64_t bytes[RANKS];
};

static int setup_with(enum io_engine_kind kind)
{
	t_worker_make(&t);
	store = &t.w.stores.v[0];
	close(store->top);
	store->ops = &objects_ops;
	T_OK(store->ops->open(store, NULL));
	io_engine_close(t.w.io);
	t.w.io = NULL;
	T_OK(io_engine_open(kind, 8, &t.w.io));
	return 0;
}

static int setup_posix(void **state)
{
	(void)state;
	t_worker_make(&t);
	store = &t.w.stores.v[0];
	return 0;
}

static int setup_tmpfs(void **state)
{
	const char *dir = getenv("TMPDIR");
	char *was = dir ? mem_strdup(dir) : NULL;

	setenv("TMPDIR", "/dev/shm", 1);
	(void)setup_posix(state);
	if (was)
		setenv("TMPDIR", was, 1);
	else
		unsetenv("TMPDIR");
	mem_free(was);
	return 0;
}

static int teardown_posix(void **state)
{
	(void)state;
	t_worker_remove(&t);
	return 0;
}

static int setup_threads(void **state)
{
	(void)state;
	return setup_with(IO_THREADS);
}

static int setup_auto(void **state)
{
	(void)state;
	return setup_with(IO_AUTO);
}

static int teardown(void **state)
{
	objects_free(store);
	store->top = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* t_worker closes one */
	return teardown_posix(state);
}

/* A large tensor in rows, small ones, and a value; elements count up from `first`. */
static void make_state(float first, struct state *out)
{
	const struct image_value lr = { .fqn = STR("lr"), .kind = IMAGE_VALUE_JSON, .bytes = STR("0.1") };
	int64_t shape[2] = { RANKS * ROWS, COLS }, three = 3;
	struct sdict *sd;
	uint32_t index;
	char fqn[16];

	T_OK(sdict_new(UINT64_MAX, &sd));
	for (uint32_t r = 0; r < RANKS; r++) {
		snprintf(fqn, sizeof fqn, "%u", r);
		T_OK(sdict_add_file(sd, str_of(fqn), r, &index));
	}
	T_OK(sdict_add_tensor(sd, STR("w"), DT_FLOAT32, 2, shape, &index));
	for (uint32_t r = 0; r < RANKS; r++)
		T_OK(sdict_add_chunk(sd, index, (int64_t[]){ r * ROWS, 0, ROWS, COLS }, r, (struct sd_loc){ .file = r }));
	for (uint32_t i = 0; i < SMALL; i++) {
		snprintf(fqn, sizeof fqn, "b.%02u", i);
		T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT32, 1, &three, &index));
		T_OK(sdict_add_chunk(sd, index, (int64_t[]){ 0, 3 }, i % RANKS, (struct sd_loc){ .file = i % RANKS }));
	}
	for (uint32_t r = 0; r < RANKS; r++) {
		struct buf head = BUF_INIT(1 << 20);
		T_OK(image_build(sd, r, r ? NULL : &lr, r ? 0 : 1, &head, &out->bytes[r]));
		out->fds[r] = memfd_create("t", MFD_CLOEXEC);
		assert_true(out->fds[r] >= 0 && ftruncate(out->fds[r], (off_t)out->bytes[r]) == 0);
		float *p = mmap(NULL, out->bytes[r], PROT_READ | PROT_WRITE, MAP_SHARED, out->fds[r], 0);
		assert_true(p != MAP_FAILED);
		memcpy(p, head.p, head.len);
		for (uint64_t c = 0; c < sd->chunk_count; c++)
			for (uint64_t k = 0; first != 0 && sd->chunks[c].loc.file == r && k < sd->chunks[c].loc.length / 4; k++)
				p[sd->chunks[c].loc.offset / 4 + k] = first + (float)k + (float)(c * 7);
		munmap(p, out->bytes[r]);
		buf_free(&head);
	}
	sdict_free(sd);
}

static void drop_state(struct state *s)
{
	for (uint32_t r = 0; r < RANKS; r++)
		close(s->fds[r]);
}

static void assert_same(const struct state *a, const struct state *b)
{
	for (uint32_t r = 0; r < RANKS; r++) {
		assert_int_equal(a->bytes[r], b->bytes[r]);
		void *p = mmap(NULL, a->bytes[r], PROT_READ, MAP_SHARED, a->fds[r], 0);
		void *q = mmap(NULL, b->bytes[r], PROT_READ, MAP_SHARED, b->fds[r], 0);
		assert_memory_equal(p, q, a->bytes[r]);
		munmap(p, a->bytes[r]);
		munmap(q, b->bytes[r]);
	}
}

/* A job as the coordinator would send it; s: the state dict "t". Its result, to be freed. */
static json_t *run(enum err (*fn)(struct job *j), enum job_kind kind, const struct state *s, const char *spec)
{
	static uint64_t generation;
	char id[32];
	struct job j = { .worker = &t.w, .generation = ++generation, .id = id, .kind = kind, .attempt = 1, .uid = geteuid() };
	json_t *ranks = json_array();
	uint32_t index;

	snprintf(id, sizeof id, "01T%023ju", (uintmax_t)generation);
	for (uint32_t r = 0; s && r < RANKS; r++) {
		T_OK(job_add_fd(&j, dup(s->fds[r]), &index));
		json_array_append_new(ranks, json_pack("{s:I, s:I, s:s, s:I, s:I}", "rank", (json_int_t)r, "fd", (json_int_t)index,
						       "segment", "/t", "bytes", (json_int_t)s->bytes[r], "image_bytes",
						       (json_int_t)s->bytes[r]));
	}
	j.segment_count = j.fd_count;
	j.doc = json_pack("{s:o, s:{s:{s:i, s:i, s:o}}}", "spec", json_loads(spec, 0, NULL), "state_dicts", "t", "world_size", RANKS,
			  "generation", 1, "ranks", ranks);
	assert_non_null(json_object_get(j.doc, "spec"));
	json_object_set_new(json_object_get(j.doc, "spec"), "kind", json_string(kind_of(kind)->name));
	j.request = json_object_get(j.doc, "spec");
	T_OK(job_read_state_dicts(&j));
	T_OK(spec_read(json_object_get(j.doc, "spec"), &j.spec));
	t_worker_say(&t, FRAME_COMMIT_OK, generation);
	if (fails) {
		T_ERR(STORAGE_STALLED, fn(&j));
		job_free(&j);
		t_worker_drain(&t);
		return NULL;
	}
	T_OK(fn(&j));
	json_t *result = json_incref(j.result);
	job_free(&j);
	seg_leavings_unmap(&t.w.leavings); /* as the worker does after each job */
	t_worker_drain(&t);
	return result;
}

#define MAIN(name) "{\"storage\":\"main\",\"name\":\"" name "\""

static json_int_t figure(json_t *result, const char *name)
{
	json_int_t n = json_integer_value(json_object_get(result, name));

	json_decref(result);
	return n;
}

/* Loads the checkpoint over zeros, and compares every byte. */
static void assert_loads(const char *spec, const struct state *want)
{
	struct state got;

	make_state(0, &got);
	json_decref(run(load_job, JOB_LOAD, &got, spec));
	assert_same(&got, want);
	drop_state(&got);
}

static void test_jobs(void **state)
{
	struct state s;

	(void)state;
	make_state(1, &s);
	assert_int_equal(figure(run(save_job, JOB_SAVE, &s, "{\"source\":{\"state_dict\":\"t\"},\"target\":" MAIN("a") "}}"), "tensors"),
			 SMALL + 1);
	assert_loads("{\"source\":" MAIN("a") "},\"target\":{\"state_dict\":\"t\"},\"strict\":true}", &s);

	json_decref(run(reshard_job, JOB_RESHARD, NULL,
			"{\"source\":" MAIN("a") "},\"target\":" MAIN("b") ",\"world_size\":3,"
			"\"layout\":[{\"match\":\"w\",\"placements\":[\"Shard(1)\"]},"
			"{\"match\":\"*\",\"placements\":[\"Replicate()\"]}]}}"));
	assert_loads("{\"source\":" MAIN("b") "},\"target\":{\"state_dict\":\"t\"},\"strict\":true}", &s);
	json_decref(run(reshard_job, JOB_RESHARD, NULL,
			"{\"source\":" MAIN("b") "},\"target\":" MAIN("c.pt") ",\"format\":\"torch\"}}"));
	assert_loads("{\"source\":" MAIN("c.pt") "},\"target\":{\"state_dict\":\"t\"},\"strict\":true}", &s);
	json_decref(run(reshard_job, JOB_RESHARD, NULL,
			"{\"source\":" MAIN("b") "},\"target\":" MAIN("d") ",\"format\":\"safetensors\"}}"));

	json_t *r = run(verify_job, JOB_VERIFY, NULL, "{\"source\":" MAIN("b") "},\"level\":\"values\"}");
	assert_int_equal(json_array_size(json_object_get(r, "damaged")), 0);
	assert_int_equal(json_integer_value(json_object_get(r, "unverifiable")), 0);
	assert_true(figure(r, "verified_bytes") > 2 * ROWS * COLS * 4);
	r = run(verify_job, JOB_VERIFY, NULL, "{\"source\":" MAIN("c.pt") "},\"level\":\"digest\"}");
	assert_int_equal(json_array_size(json_object_get(r, "damaged")), 0);
	json_decref(r);
	r = run(diff_job, JOB_DIFF, &s, "{\"a\":" MAIN("b") "},\"b\":{\"state_dict\":\"t\"}}");
	assert_true(json_is_true(json_object_get(r, "equal")));
	json_decref(r);

	json_decref(run(delete_job, JOB_DELETE, NULL, "{\"target\":" MAIN("b") "}}"));
	json_decref(run(delete_job, JOB_DELETE, NULL, "{\"target\":" MAIN("c.pt") "}}"));
	struct stat st;
	T_ERR(NOT_FOUND, store_stat(store_top(store), "b", &st));
	T_ERR(NOT_FOUND, store_stat(store_top(store), "c.pt", &st));
	T_OK(store_stat(store_top(store), "a", &st));
	drop_state(&s);
}

/* Texts of a store's errors reach the job, with the file: the code alone would not tell why. */
static void test_errors_are_the_stores_own(void **state)
{
	static const char save[] = "{\"source\":{\"state_dict\":\"t\"},\"target\":" MAIN("a") "}}",
			  load[] = "{\"source\":" MAIN("a") "},\"target\":{\"state_dict\":\"t\"}}";
	struct state s;
	struct stat st;

	(void)state;
	make_state(1, &s);
	objs(store)->fails = "__1_0";
	fails = true;
	(void)run(save_job, JOB_SAVE, &s, save);
	assert_non_null(strstr(err_last()->text, "SlowDown: reduce your request rate"));
	assert_string_equal(err_last()->file, "__1_0.distcp");
	T_ERR(NOT_FOUND, store_stat(store_top(store), "a", &st));
	objs(store)->fails = NULL;
	fails = false;
	json_decref(run(save_job, JOB_SAVE, &s, save));
	objs(store)->fails = "__0_0";
	fails = true;
	(void)run(load_job, JOB_LOAD, &s, load);
	assert_non_null(strstr(err_last()->text, "SlowDown: reduce your request rate"));
	assert_string_equal(err_last()->file, "__0_0.distcp");
	assert_true(err_last()->offset >= 0);
	objs(store)->fails = NULL;
	fails = false;
	drop_state(&s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		{ "test_jobs [posix]", test_jobs, setup_posix, teardown_posix, NULL },
		{ "test_jobs [tmpfs]", test_jobs, setup_tmpfs, teardown_posix, NULL },
		{ "test_jobs [threads]", test_jobs, setup_threads, teardown, NULL },
		{ "test_jobs [auto]", test_jobs, setup_auto, teardown, NULL },
		{ "test_errors_are_the_stores_own", test_errors_are_the_stores_own, setup_auto, teardown, NULL },
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
