/* Conformance tests of the store face (store/store.h). Two stores pass the same tests: posix, and an object store in memory
 * (lib/t_objects.h) without rename, directories or descriptors. */
#include "lib/t_store.h"

#include <pthread.h>

#include "base/clock.h"
#include "store/aliases.h"
#include "store/kept_trash.h"

enum { WRITERS = 8 };

/* How often writers race. SeaweedFS makes one that finds an object locked wait for a second and more: few races show as much there. */
static int turns(void) { return getenv("DCPD_TEST_S3") ? 2 : 20; }

/* ---- what is promised ---- */

static void test_parts_come_in_any_order_and_all_appear_at_once(void **state)
{
	struct store_at part, dir, file;
	struct staging s;
	enum format format;
	char middle[4];
	struct stat st;

	(void)state;
	T_OK(open_as("A", "run/x", false, &s));
	T_OK(store_open_file(s.dir, "__0_0.distcp", STORE_WRITE | STORE_NEW, &part));
	T_OK(store->ops->resize(part, 12, "__0_0.distcp"));
	T_OK(store->ops->write(part, "efghijkl", 8, 4, "__0_0.distcp"));
	T_OK(store->ops->write(part, "abcd", 4, 0, "__0_0.distcp"));
	T_OK(store->ops->finish(&part, true, "__0_0.distcp"));
	T_ERR(CHECKPOINT_EXISTS, store_open_file(s.dir, "__0_0.distcp", STORE_WRITE | STORE_NEW, &part));
	T_OK(staging_put_file(&s, DCP_METADATA, "meta", 4));
	assert_false(is_there("run/x"));
	T_OK(checkpoint_recognise(store, "run/x", &format));
	assert_int_equal(format, FORMAT_NONE);
	if (is_there("run"))
		assert_names("run", false, "");
	T_OK(staging_commit(&s, false));
	staging_close(&s);

	assert_names("run", true, "x ");
	assert_names("run/x", true, ".metadata __0_0.distcp ");
	T_OK(checkpoint_recognise(store, "run/x", &format));
	assert_int_equal(format, FORMAT_DCP);
	T_OK(store_stat(store_top(store), "run/x", &st));
	assert_true(S_ISDIR(st.st_mode));
	T_OK(store_enter(store_top(store), "run/x", &dir));
	T_OK(store_stat(dir, "__0_0.distcp", &st));
	assert_true(S_ISREG(st.st_mode) && st.st_size == 12 && st.st_uid == geteuid());
	T_OK(store_open_file(dir, "__0_0.distcp", STORE_READ, &file));
	T_OK(store_read(file, middle, sizeof middle, 5, ""));
	assert_memory_equal(middle, "fghi", 4);
	T_ERR(STORAGE_IO, store_read(file, middle, sizeof middle, 10, ""));
	T_ERR(NOT_FOUND, store_open_file(dir, "__1_0.distcp", STORE_READ, &part));
	T_ERR(NOT_FOUND, store_enter(dir, "y", &part));
	store_close(&file);
	store_close(&dir);
}

static void test_a_late_part_is_written_again_and_cut(void **state)
{
	struct store_at part;
	struct staging s;
	struct stat st;

	(void)state;
	T_OK(open_as("A", "x", false, &s));
	T_OK(staging_add_file(&s, STR("__0_0.distcp"), 5, 0, STAGING_LATE));
	T_OK(staging_make_files(&s));
	T_OK(store_open_file(s.dir, "__0_0.distcp", STORE_WRITE, &part));
	T_OK(store->ops->write(part, "abcdefgh", 8, 0, ""));
	store_close(&part);
	T_OK(staging_end_late(&s, 0, &(struct staging_field){ 1, 0x64636261 }, 1));
	T_OK(store_stat(s.dir, "__0_0.distcp", &st));
	assert_int_equal(st.st_size, 5);
	T_OK(staging_put_file(&s, DCP_METADATA, "m", 1));
	T_OK(staging_commit(&s, false));
	staging_close(&s);
	assert_job("x", "aabcd");
}

static void test_what_is_given_up_leaves_nothing(void **state)
{
	struct staging s;

	(void)state;
	T_OK(open_as("A", "run/x", false, &s));
	fill(&s);
	staging_close(&s);
	assert_false(is_there("run/x"));
	assert_false(is_there("run/.dcpd-A-1"));
	if (is_there("run")) /* a file system keeps the directory above */
		assert_names("run", true, "");
}

static void test_nothing_is_replaced_unless_told(void **state)
{
	struct staging s = { .name = "" };

	(void)state;
	T_OK(save("A", "x", false));
	T_ERR(CHECKPOINT_EXISTS, open_as("B", "x", false, &s));
	staging_close(&s);
	T_OK(open_as("C", "y", false, &s));
	fill(&s);
	T_OK(save("D", "y", false)); /* meanwhile */
	T_ERR(CHECKPOINT_EXISTS, staging_commit(&s, false));
	staging_close(&s);
	assert_job("x", "A");
	assert_job("y", "D");
	assert_names("", true, "x y ");
}

static void test_who_reads_goes_on_reading(void **state)
{
	struct store_at dir, file;
	char byte;

	(void)state;
	T_OK(save("A", "x", false));
	T_OK(store_enter(store_top(store), "x", &dir));
	T_OK(store_open_file(dir, "__0_0.distcp", STORE_READ, &file));
	T_OK(save("B", "x", true));
	T_OK(store_read(file, &byte, 1, 0, ""));
	assert_int_equal(byte, 'A');
	store_close(&file);
	store_close(&dir);
	assert_job("x", "B");
}

/* A reader, where nothing keeps a removed object, is told so, and gets no bytes of another checkpoint. */
static void test_who_reads_is_told(void **state)
{
	char data[FORMAT_FILE_MAX] = "", byte = 0;
	struct store_at dir, file;

	(void)state;
	T_OK(save("A", "x", false));
	T_OK(store_enter(store_top(store), "x", &dir));
	T_OK(store_list(dir, take_data, data));
	T_OK(store_open_file(dir, data, STORE_READ, &file));
	T_OK(save("B", "x", true));
	enum err e = store_read(file, &byte, 1, 0, "");
	assert_true(e == ERR_NOT_FOUND || e == ERR_CHECKPOINT_REPLACED);
	assert_int_equal(byte, 0);
	store_close(&file);
	store_close(&dir);
	assert_job("x", "B");
}

static void test_replaced_is_what_was_looked_at_only(void **state)
{
	char first[IDENTITY_MAX], second[IDENTITY_MAX], again[IDENTITY_MAX];
	struct staging s;

	(void)state;
	T_OK(save("A", "x", false));
	identity("x", first);
	T_OK(open_as("B", "x", true, &s));
	fill(&s);
	T_OK(save("C", "x", true));
	identity("x", second);
	assert_string_not_equal(first, second);
	T_ERR(CHECKPOINT_EXISTS, store->ops->publish(&s, first));
	assert_false(s.done);
	identity("x", again);
	assert_string_equal(again, second);
	assert_job("x", "C");
	T_OK(store->ops->publish(&s, second));
	assert_true(s.done);
	staging_close(&s);
	assert_job("x", "B");

	T_OK(open_as("D", "x", true, &s));
	fill(&s);
	identity("x", first);
	struct store_job by = { .stores = &t.w.stores, .id = "E", .attempt = 1, .uid = geteuid() };
	const struct ref x = ref_checkpoint("main", "x");
	T_OK(gone(&by, &x));
	assert_false(is_there("x"));
	T_ERR(CHECKPOINT_EXISTS, store->ops->publish(&s, first)); /* it is gone, and nothing takes its place unasked */
	assert_false(is_there("x"));
	T_OK(staging_commit(&s, true));
	staging_close(&s);
	assert_job("x", "D");
}

struct writer {
	struct staging s;
	const char *replaces;
	char id[8];
	pthread_barrier_t *begin;
	enum err e;
};

static void *publish_one(void *user)
{
	struct writer *w = user;

	pthread_barrier_wait(w->begin);
	w->e = store->ops->publish(&w->s, w->replaces);
	return NULL;
}

/* All publish one name at a time, under one condition. The id of the one that won. */
static void race(const char *name, int turn, const char *replaces, char won[8])
{
	struct writer w[WRITERS] = { 0 };
	pthread_t threads[WRITERS];
	pthread_barrier_t begin;
	int wins = 0;

	pthread_barrier_init(&begin, NULL, WRITERS);
	for (int i = 0; i < WRITERS; i++) {
		w[i] = (struct writer){ .replaces = replaces, .begin = &begin };
		snprintf(w[i].id, sizeof w[i].id, "T%d%c", turn % 1000, 'a' + i);
		T_OK(open_as(w[i].id, name, true, &w[i].s));
		fill(&w[i].s);
	}
	for (int i = 0; i < WRITERS; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, publish_one, &w[i]), 0);
	for (int i = 0; i < WRITERS; i++)
		pthread_join(threads[i], NULL);
	pthread_barrier_destroy(&begin);
	for (int i = 0; i < WRITERS; i++) {
		assert_true(w[i].e == OK || w[i].e == ERR_CHECKPOINT_EXISTS);
		assert_int_equal(w[i].s.done, w[i].e == OK);
		if (w[i].e == OK) {
			memcpy(won, w[i].id, sizeof w[i].id);
			wins++;
		}
		staging_close(&w[i].s);
	}
	assert_int_equal(wins, 1);
}

static void test_of_many_one_wins(void **)
{
	char id[IDENTITY_MAX], won[8], name[16];

	for (int turn = 0; turn < turns(); turn += 2) {
		struct store_swept swept;
		snprintf(name, sizeof name, "x%d", turn);
		race(name, turn, NULL, won);
		assert_job(name, won);
		identity(name, id);
		race(name, turn + 1, id, won);
		assert_job(name, won);
		T_OK(store->ops->sweep(store, NULL, NULL, NULL, &swept));
	}
}

static void test_after_a_crash_nothing_is_visible_and_nothing_stays(void **state)
{
	struct manifest *m = NULL;
	struct staging s;
	bool done;

	(void)state;
	T_OK(open_as("A", "run/x", false, &s));
	fill(&s);
	store_close(&s.dir); /* it died here */
	store_close(&s.parent);
	assert_false(is_there("run/x"));
	assert_names("run", false, "");
	T_OK(store->ops->recover(&(struct store_job){ .id = "A" }, store, "run/x", false, &done, &m));
	assert_false(done);
	assert_null(m);
	assert_false(is_there("run/.dcpd-A-1"));

	T_OK(save("B", "run/x", false)); /* it died behind its commit */
	T_OK(store->ops->recover(&(struct store_job){ .id = "B" }, store, "run/x", false, &done, &m));
	assert_true(done);
	assert_string_equal(m->job, "B");
	manifest_free(m);
	assert_job("run/x", "B");
	T_OK(store->ops->recover(&(struct store_job){ .id = "C" }, store, "run/y", true, &done, &m)); /* a delete that was through */
	assert_true(done);
}

/* The sweep behind an attempt that was cancelled comes while a retry, the same job, is at work. */
static void test_a_sweep_leaves_later_attempts_alone(void **state)
{
	struct commit_keep keep = { .attempt = 1 };
	struct staging first, retry;
	struct store_swept swept;

	(void)state;
	T_OK(open_attempt("A", 1, "run/x", false, &first));
	fill(&first);
	store_close(&first.dir); /* it was killed */
	store_close(&first.parent);
	T_OK(open_attempt("A", 2, "run/x", false, &retry));
	fill(&retry);
	T_OK(store->ops->sweep(store, &keep, "run/x", "A", &swept));
	T_OK(staging_commit(&retry, false));
	staging_close(&retry);
	assert_job("run/x", "A");
}

static void test_a_sweep_takes_what_nobody_continues(void **state)
{
	json_t *jobs = json_pack("[s]", "A");
	struct commit_keep keep = { .jobs = jobs };
	struct staging a, b;
	struct store_swept swept;

	(void)state;
	T_OK(save("C", "run/y", false));
	T_OK(open_as("A", "run/x", false, &a));
	fill(&a);
	T_OK(open_as("B", "run/x", false, &b));
	fill(&b);
	struct store_at run;
	T_OK(store_enter(store_top(store), "run", &run));
	T_OK(store->ops->put(run, ".dcpd-0.dcpd-notes.json", "{}", 2, false)); /* notes of a file "dcpd-0" */
	T_OK(store->ops->sweep(store, &keep, NULL, NULL, &swept));
	assert_true(swept.removed > 0);
	assert_false(is_there("run/.dcpd-B-1/" DCP_METADATA));
	assert_true(is_there("run/.dcpd-0.dcpd-notes.json"));
	T_OK(store_drop(run, ".dcpd-0.dcpd-notes.json"));
	store_close(&run);
	assert_job("run/y", "C");
	staging_close(&b);
	T_OK(staging_commit(&a, false));
	staging_close(&a);
	assert_job("run/x", "A");
	json_decref(jobs);
}

static void test_removed_is_gone(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "B", .attempt = 1, .uid = geteuid() };
	struct ref ref = ref_checkpoint("main", "run/x");

	(void)state;
	T_ERR(NOT_FOUND, gone(&by, &ref));
	T_OK(save("A", "run/x", false));
	T_OK(save("A2", "run/y", false));
	by.uid = geteuid() + 1;
	T_ERR(FORBIDDEN, gone(&by, &ref));
	by.uid = geteuid();
	T_OK(gone(&by, &ref));
	assert_false(is_there("run/x"));
	assert_names("run", false, "y ");
	T_ERR(NOT_FOUND, gone(&by, &ref));
}

static void test_a_removal_with_a_condition(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "D", .attempt = 1, .uid = geteuid() };
	struct str there = STR("run/y"), lacking = STR("run/z");
	struct spec_only_if only_if = { .is_given = true, .unaliased = true };
	struct commit_removal how = { .only_if = &only_if };
	struct ref ref = ref_checkpoint("main", "run/x");
	char identity[IDENTITY_MAX];

	(void)state;
	T_OK(save("A", "run/x", false));
	T_OK(save("A2", "run/y", false));
	T_OK(identity_of(store_top(store), "run/y", identity));
	only_if.etag = str_of(identity);
	T_ERR(STATE_CONFLICT, gone_if(&by, &ref, &how));
	T_OK(identity_of(store_top(store), "run/x", identity));
	only_if.present = (struct strs){ &lacking, 1 };
	T_ERR(STATE_CONFLICT, gone_if(&by, &ref, &how));
	assert_non_null(strstr(err_last()->text, "run/z"));
	only_if.present = (struct strs){ &there, 1 };
	T_OK(aliases_move(&by, store, "run", &(struct alias_move){ .alias = "best", .name = "run/x" }));
	T_ERR(STATE_CONFLICT, gone_if(&by, &ref, &how));
	assert_non_null(strstr(err_last()->text, "best"));
	T_OK(aliases_move(&by, store, "run", &(struct alias_move){ .alias = "best", .name = "run/y" }));
	assert_job("run/x", "A");
	T_OK(gone_if(&by, &ref, &how));
	assert_false(is_there("run/x"));
}

static void trash_it(const char *job, const char *name, int64_t keep_ms)
{
	struct store_job by = { .stores = &t.w.stores, .id = job, .attempt = 1, .uid = geteuid() };
	struct ref ref = ref_checkpoint("main", name);

	T_OK(gone_if(&by, &ref, &(struct commit_removal){ .trash_ms = keep_ms, .policy = "p", .why = "ttl" }));
	assert_false(is_there(name));
}

static void assert_trash(const char *name, const char *text)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(1 << 20);

	T_OK(kept_trash_list(store, name, &out));
	buf_putc(&out, '\0');
	if (!strstr((char *)out.p, text))
		fail_msg("%s is not in %s", text, (char *)out.p);
}

static void test_a_trash_that_gives_back(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "U", .attempt = 1, .uid = geteuid() }, other = by;
	struct ref ref = ref_checkpoint("main", "run/x");
	struct kept_trash_sum sum;
	char id[65];

	(void)state;
	T_OK(save("A", "run/x", false));
	if (!store->ops->trash_list) { /* refuses by name, and nothing has gone */
		T_ERR(UNSUPPORTED, gone_if(&by, &ref, &(struct commit_removal){ .trash_ms = 1000 }));
		assert_non_null(strstr(err_last()->text, "main"));
		assert_job("run/x", "A");
		T_OK(kept_trash_sweep(store, INT64_MAX, &sum));
		assert_int_equal(sum.checkpoints + sum.removed, 0);
		return;
	}
	T_ERR(NOT_FOUND, kept_trash_restore(&by, store, "run/x", NULL, id));
	trash_it("D1", "run/x", 3600000);
	T_OK(save("B", "run/x", false));
	trash_it("D2", "run/x", 3600000);
	assert_names("", false, "run ");
	assert_trash("run/x", "\"id\":\"D2\"");
	assert_trash(NULL, "\"checkpoints\":2");
	assert_trash(NULL, "\"policy\":\"p\",\"why\":\"ttl\"");
	assert_trash("run/y", "\"entries\":[],\"checkpoints\":0,\"bytes\":0");
	other.uid++;
	T_ERR(FORBIDDEN, kept_trash_restore(&other, store, "run/x", NULL, id));
	T_ERR(NOT_FOUND, kept_trash_restore(&by, store, "run/x", "D3", id));
	T_ERR(NOT_FOUND, kept_trash_restore(&by, store, "run/y", "D1", id));
	T_OK(kept_trash_restore(&by, store, "run/x", NULL, id));
	assert_string_equal(id, "D2");
	assert_job("run/x", "B");
	T_ERR(CHECKPOINT_EXISTS, kept_trash_restore(&by, store, "run/x", NULL, id));
	trash_it("D3", "run/x", 3600000);
	T_OK(kept_trash_restore(&by, store, "run/x", "D1", id));
	assert_job("run/x", "A");
	T_OK(kept_trash_sweep(store, clock_wall_ms(), &sum));
	assert_true(sum.removed == 0 && sum.checkpoints == 1 && sum.bytes > 0);
	trash_it("D4", "run/x", 7200000);
	T_OK(kept_trash_sweep(store, -1, &sum));
	assert_true(sum.removed == 0 && sum.checkpoints == 2);
	T_OK(kept_trash_sweep(store, clock_wall_ms() + 3660000, &sum));
	assert_true(sum.removed == 1 && sum.checkpoints == 1 && sum.next_ms > clock_wall_ms() + 3660000);
	assert_trash(NULL, "\"id\":\"D4\"");
	assert_trash(NULL, "\"checkpoints\":1");
}

struct wanting {
	pthread_barrier_t *begin;
	bool empties;
	char id[8], said[ERR_TEXT_MAX];
	enum err e;
};

static void *want_entry(void *user)
{
	struct wanting *w = user;
	const struct store_job by = { .stores = &t.w.stores, .id = w->id, .attempt = 1, .uid = geteuid() };

	pthread_barrier_wait(w->begin);
	w->e = w->empties ? store->ops->trash_empty(store, "D") : store->ops->trash_restore(&by, store, "D", "run/x");
	snprintf(w->said, sizeof w->said, "%s", w->e ? err_last()->text : "");
	return NULL;
}

/* Some want it back, some empty the trash: one has it, and the checkpoint is whole or gone. */
static void test_of_many_one_has_the_entry(void **)
{
	struct wanting w[WRITERS];
	pthread_t threads[WRITERS];
	pthread_barrier_t begin;

	if (!store->ops->trash_list)
		skip();
	for (int turn = 0; turn < turns() / 2; turn++) {
		const struct ref x = ref_checkpoint("main", "run/x");
		bool back = false;
		int wins = 0;
		char id[16];
		T_OK(save("A", "run/x", false));
		trash_it("D", "run/x", 3600000);
		pthread_barrier_init(&begin, NULL, WRITERS);
		for (int i = 0; i < WRITERS; i++) {
			w[i] = (struct wanting){ .begin = &begin, .empties = i % 2 };
			snprintf(w[i].id, sizeof w[i].id, "W%d", i);
			assert_int_equal(pthread_create(&threads[i], NULL, want_entry, &w[i]), 0);
		}
		for (int i = 0; i < WRITERS; i++) {
			pthread_join(threads[i], NULL);
			if (w[i].e != OK && w[i].e != ERR_NOT_FOUND && w[i].e != ERR_CHECKPOINT_EXISTS)
				fail_msg("%s: %s", w[i].id, w[i].said);
			wins += w[i].e == OK;
			back |= w[i].e == OK && !w[i].empties;
		}
		pthread_barrier_destroy(&begin);
		assert_int_equal(wins, 1);
		assert_int_equal(is_there("run/x"), back);
		assert_trash(NULL, "\"checkpoints\":0");
		if (!back)
			continue;
		assert_job("run/x", "A");
		snprintf(id, sizeof id, "E%d", turn); /* a job's id is used once: what a removal renames goes a moment later */
		T_OK(gone(&(struct store_job){ .stores = &t.w.stores, .id = id, .attempt = 1, .uid = geteuid() }, &x));
	}
}

static void put_trash(const char *id, const char *until)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	char path[128], about[256];

	snprintf(path, sizeof path, ".dcpd-trash/%s/item", id);
	T_OK(store->ops->make(store_top(store), path, &dir));
	T_OK(store->ops->put(dir, ".metadata", "x", 1, false));
	store_close(&dir);
	snprintf(path, sizeof path, ".dcpd-trash/%s", id);
	snprintf(about, sizeof about, "{\"name\":\"run/%s\",\"bytes\":1,\"until\":\"%s\"}", id, until);
	T_OK(store_enter(store_top(store), path, &dir));
	T_OK(store->ops->put(dir, "about.json", about, strlen(about), false));
}

/* Many small ones go by a few sweeps, each of which reads all once; one that cannot go keeps none of them. */
static void test_a_trash_of_many(void **state)
{
	CLEANUP(store_close) struct store_at taken = STORE_NOTHING;
	struct kept_trash_sum sum = { .checkpoints = 2 };
	char id[65];
	int sweeps = 0;

	(void)state;
	if (store->ops != &posix_ops)
		skip();
	for (int i = 0; i < 400; i++) {
		snprintf(id, sizeof id, "E%03d", i);
		put_trash(id, i == 399 ? "2999-01-01T00:00:00Z" : "2020-01-01T00:00:00Z");
	}
	T_OK(store->ops->make(store_top(store), ".dcpd-trash-E000/x", &taken));
	for (; sum.checkpoints > 2 || sweeps == 0; sweeps++) {
		T_OK(kept_trash_sweep(store, clock_wall_ms(), &sum));
		assert_true(sum.removed > 0);
	}
	assert_true(sweeps <= 20 && sum.bytes == 2);
	assert_trash(NULL, "\"checkpoints\":2");
	enum err e = kept_trash_sweep(store, clock_wall_ms(), &sum);
	assert_true(e && sum.removed == 0 && sum.checkpoints == 2);
	err_clear();
}

static void test_a_meeting_place(void **state)
{
	struct store_at here, there, part;
	struct staging s;
	void *bytes = NULL;
	uint64_t n = 0;

	(void)state;
	T_ERR(NOT_FOUND, store_enter(store_top(store), "run/.dcpd-hosts-1", &there));
	T_OK(store->ops->make(store_top(store), "run/.dcpd-hosts-1", &here));
	T_OK(store->ops->put(here, "beat-0", "1", 1, false));
	T_OK(store->ops->put(here, "beat-0", "22", 2, true));
	T_OK(store->ops->make(store_top(store), "run/.dcpd-hosts-1", &there)); /* it may be there */
	T_OK(store_get(there, "beat-0", 8, &bytes, &n, NULL));
	assert_true(n == 2 && memcmp(bytes, "22", 2) == 0);
	mem_free(bytes);
	T_ERR(LIMIT_EXCEEDED, store_get(there, "beat-0", 1, &bytes, &n, NULL));
	store_close(&there);
	T_OK(store_open_file(here, "__1_0.distcp", STORE_WRITE | STORE_NEW, &part));
	T_OK(store->ops->write(part, "theirs", 6, 0, ""));
	T_OK(store->ops->finish(&part, true, ""));
	assert_names("run/.dcpd-hosts-1", true, "__1_0.distcp beat-0 ");

	T_OK(open_as("A", "run/x", false, &s));
	fill(&s);
	T_OK(store->ops->adopt(&s, here, "__1_0.distcp"));
	store_close(&here);
	T_OK(store_drop(store_top(store), "run/.dcpd-hosts-1"));
	T_OK(store_drop(store_top(store), "run/.dcpd-hosts-1")); /* nothing there is fine */
	assert_false(is_there("run/.dcpd-hosts-1"));
	T_OK(staging_commit(&s, false)); /* the place of what was adopted is gone by then */
	staging_close(&s);
	T_OK(store_enter(store_top(store), "run/x", &there));
	T_OK(store_get(there, "__1_0.distcp", 8, &bytes, &n, NULL));
	assert_true(n == 6 && memcmp(bytes, "theirs", 6) == 0);
	mem_free(bytes);
	store_close(&there);
}

static void test_the_storage_itself(void **state)
{
	struct store_facts f = { 0 };

	(void)state;
	T_OK(store->ops->check(store));
	T_OK(store->ops->probe(store, &f));
	assert_true(f.writable && (f.free_bytes > 0 || f.total_bytes == 0) && f.free_bytes <= f.total_bytes && f.kind[0]);
}

/* ---- what only some have ---- */

static void test_objects_refuse_what_they_have_not(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "A", .attempt = 1, .uid = geteuid() };
	struct spec spec = { .target = ref_checkpoint("main", "x"), .in_place = IN_PLACE_ALWAYS, .sync_files = true };
	struct staging s = { .name = "" };
	(void)state;
	T_ERR(UNSUPPORTED, staging_open(&by, &spec, &s));
	staging_close(&s);
}

static void test_locations_name_their_store(void **state)
{
	char location[300];
	struct store s = { .name = "a" };

	(void)state;
	snprintf(location, sizeof location, "file://%s", t.dir.path);
	T_OK(store_open(&s, &(struct store_place){ location, 0600, (gid_t)-1, NULL }));
	assert_ptr_equal(s.ops, &posix_ops);
	assert_true(s.top >= 0);
	close(s.top);
	T_ERR(CONFIG, store_open(&s, &(struct store_place){ "ftp://host", 0600, (gid_t)-1, NULL }));
	assert_int_equal(s.top, -1);
	assert_non_null(strstr(err_last()->text, "'ftp'"));
	T_ERR(STORAGE_GONE, store_open(&s, &(struct store_place){ "/no/such/directory", 0600, (gid_t)-1, NULL }));
}

static void test_what_is_held_stays(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "D", .uid = geteuid() }, other = by;
	struct ref x = ref_checkpoint("main", "run/x");
	json_t *hold = json_pack("{s:i, s:s, s:s}", "owner", (int)geteuid(), "reason", "kept", "since", "now");

	(void)state;
	other.uid++;
	T_OK(save("A", "run/x", false));
	T_ERR(NOT_FOUND, notes_set_hold(&by, store, "run/y", hold));
	T_ERR(FORBIDDEN, notes_set_hold(&other, store, "run/x", hold));
	T_OK(notes_set_hold(&by, store, "run/x", hold));
	T_ERR(FORBIDDEN, notes_set_hold(&other, store, "run/x", NULL));
	T_ERR(CHECKPOINT_HELD, save("B", "run/x", true));
	assert_non_null(strstr(err_last()->text, "kept"));
	T_ERR(CHECKPOINT_HELD, gone(&by, &x));
	assert_job("run/x", "A");
	T_OK(notes_set_hold(&by, store, "run/x", NULL));
	T_OK(save("B", "run/x", true));
	assert_job("run/x", "B");
	T_OK(gone(&by, &x));
	json_decref(hold);
}

/* Files are replaced one by one in the checkpoint that was opened, and not in another one that has its name by now. */
static void test_replaced_while_it_is_repaired(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "R", .attempt = 1, .uid = geteuid() };
	struct spec spec = { .target = ref_checkpoint("main", "x"), .sync_files = true };
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	char data[FORMAT_FILE_MAX] = "";
	struct staging s;

	(void)state;
	T_OK(save("A", "x", false));
	T_OK(store_enter(store_top(store), "x", &dir));
	T_OK(store_list(dir, take_data, data));
	T_OK(staging_open_repair(&by, &spec, dir, &s));
	T_OK(staging_put_file(&s, data, "R", 1));
	T_OK(save("B", "x", true));
	T_ERR(CHECKPOINT_REPLACED, staging_replace(&s, data));
	assert_job("x", "B");
	T_OK(gone(&by, &spec.target));
	T_ERR(CHECKPOINT_REPLACED, staging_replace(&s, data));
	staging_close(&s);
}

static void assert_file(const char *name, const char *file, const char *want)
{
	struct store_at dir;
	void *bytes = NULL;
	uint64_t n = 0;

	T_OK(store_enter(store_top(store), name, &dir));
	T_OK(store_get(dir, file, 64, &bytes, &n, NULL));
	assert_int_equal(n, strlen(want));
	assert_memory_equal(bytes, want, n);
	mem_free(bytes);
	store_close(&dir);
}

/* Data, manifest and metadata, each in one step; it stays the checkpoint that it was, and goes as one. */
static void test_files_are_replaced_one_by_one(void **state)
{
	struct store_job by = { .stores = &t.w.stores, .id = "R", .attempt = 1, .uid = geteuid() };
	struct spec spec = { .target = ref_checkpoint("main", "x"), .sync_files = true };
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	char data[FORMAT_FILE_MAX] = "";
	struct store_at part, old;
	struct staging s;

	(void)state;
	T_OK(save("A", "x", false));
	T_OK(store_enter(store_top(store), "x", &dir));
	T_OK(store_list(dir, take_data, data));
	T_OK(staging_open_repair(&by, &spec, dir, &s));
	T_OK(store_open_file(dir, data, STORE_READ, &old));
	T_OK(store_open_file(s.dir, data, STORE_WRITE | STORE_NEW, &part));
	T_OK(store->ops->resize(part, 3, data));
	if (store->ops->clone && store->ops->clones(s.dir))
		T_OK(store->ops->clone(old, 0, part, 0, 1, data));
	else
		T_OK(store->ops->write(part, "A", 1, 0, data));
	T_OK(store->ops->write(part, "R", 1, 2, data));
	T_OK(store->ops->finish(&part, true, data));
	store_close(&old);
	T_OK(staging_put_file(&s, MANIFEST_NAME, "{\"dcpd\":1,\"job\":\"R\"}", 20));
	T_OK(staging_put_file(&s, DCP_METADATA, "RR", 2));
	T_OK(staging_replace(&s, data));
	assert_file("x", DCP_METADATA, "A");
	T_OK(staging_replace(&s, MANIFEST_NAME));
	T_OK(staging_replace(&s, DCP_METADATA));
	staging_close(&s);
	T_OK(store_enter(store_top(store), "x", &old));
	void *bytes = NULL;
	uint64_t n = 0;
	T_OK(store_get(old, data, 64, &bytes, &n, NULL));
	assert_true(n == 3 && memcmp(bytes, "A\0R", 3) == 0);
	mem_free(bytes);
	store_close(&old);
	assert_file("x", MANIFEST_NAME, "{\"dcpd\":1,\"job\":\"R\"}");
	assert_file("x", DCP_METADATA, "RR");
	by.id = "G";
	T_OK(gone(&by, &spec.target));
	assert_false(is_there("x"));
	assert_names("", false, "");
}

/* A part is a published file, or a copy of one, if that is the one that was told. */
static void test_a_part_that_is_a_published_file(void **state)
{
	static const char content[100000] = "of the parent";
	CLEANUP(store_close) struct store_at parent = STORE_NOTHING;
	char data[FORMAT_FILE_MAX], twin[FORMAT_FILE_MAX], manifest[] = "{\"dcpd\":1,\"job\":\"A\"}", got[14] = "";
	struct staging s;
	struct store_at file;
	struct stat is;

	(void)state;
	if (!store->ops->link)
		skip();
	for (int i = 0; i < 2; i++) {
		T_OK(open_as(i ? "B" : "A", i ? "y" : "x", false, &s));
		format_dcp_payload(0, s.number, i ? twin : data);
		if (!i) {
			T_OK(staging_put_file(&s, data, content, sizeof content));
		} else {
			T_OK(store_enter(store_top(store), "x", &parent));
			T_OK(store_stat(parent, data, &is));
			is.st_size--;
			T_ERR(CHECKPOINT_REPLACED, store->ops->link(parent, data, &is, s.dir, twin));
			is.st_size++;
			T_OK(store->ops->link(parent, data, &is, s.dir, twin));
		}
		T_OK(staging_put_file(&s, DCP_METADATA, s.by.id, 1));
		T_OK(staging_put_file(&s, MANIFEST_NAME, manifest, sizeof manifest - 1));
		T_OK(staging_commit(&s, false));
		staging_close(&s);
	}
	struct store_job by = { .stores = &t.w.stores, .id = "G", .attempt = 1, .uid = geteuid() };
	const struct ref x = ref_checkpoint("main", "x");
	T_OK(gone(&by, &x));
	store_close(&parent);
	T_OK(store_enter(store_top(store), "y", &parent));
	T_OK(store_open_file(parent, twin, STORE_READ, &file));
	T_OK(store_stat(file, "", &is));
	T_OK(store_read(file, got, 13, 0, ""));
	store_close(&file);
	assert_true(is.st_size == sizeof content && strcmp(got, content) == 0);
}

#define OF(kind, f) { #f " [" #kind "]", f, setup_##kind, teardown_##kind, NULL }
#define OF_EVERY(kind)                                                                                                         \
	OF(kind, test_parts_come_in_any_order_and_all_appear_at_once), OF(kind, test_a_late_part_is_written_again_and_cut),      \
	OF(kind, test_what_is_given_up_leaves_nothing), OF(kind, test_nothing_is_replaced_unless_told),                         \
	OF(kind, test_replaced_is_what_was_looked_at_only), OF(kind, test_of_many_one_wins),                                    \
	OF(kind, test_after_a_crash_nothing_is_visible_and_nothing_stays), OF(kind, test_a_sweep_takes_what_nobody_continues),  \
	OF(kind, test_a_sweep_leaves_later_attempts_alone), OF(kind, test_removed_is_gone),                                     \
	OF(kind, test_a_removal_with_a_condition), OF(kind, test_a_trash_that_gives_back), OF(kind, test_of_many_one_has_the_entry), \
	OF(kind, test_a_trash_of_many), OF(kind, test_a_part_that_is_a_published_file), OF(kind, test_the_storage_itself)
#define OF_REPAIRS(kind) OF(kind, test_replaced_while_it_is_repaired), OF(kind, test_files_are_replaced_one_by_one)
#define OF_EACH(kind) OF_EVERY(kind), OF(kind, test_who_reads_goes_on_reading), OF(kind, test_a_meeting_place)

int main(void)
{
	const struct CMUnitTest remote[] = { OF_EVERY(s3), OF(s3, test_who_reads_is_told), OF(s3, test_a_meeting_place),
					     OF(s3, test_objects_refuse_what_they_have_not), OF(s3, test_what_is_held_stays),
					     OF_REPAIRS(s3) };
	const struct CMUnitTest tests[] = {
		OF_EACH(posix), OF_EACH(objects), OF(objects, test_objects_refuse_what_they_have_not),
		OF(posix, test_locations_name_their_store), OF(posix, test_what_is_held_stays), OF_REPAIRS(posix),
	};

	return getenv("DCPD_TEST_S3") ? cmocka_run_group_tests(remote, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
