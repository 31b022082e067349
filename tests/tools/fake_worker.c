/* fake_worker.c: a worker that only talks: it follows worker/ctl/README.md and moves no tensor. A "checkpoint" is a directory with
 * `.dcpd.json` naming its job. The label `fake` of a job says how to misbehave:
 *
 *   slow:MS           runs that long, with progress          fail:CODE        answers FAILED
 *   damage:N          answers FAILED checkpoint_damaged with N entries and the identity "1-a"     identity:ID      reads the checkpoint ID
 *   crash:WHERE       dies in attempt 1 at planning, making (its segments), running, peer, commit (before the rename) or committed
 *                     (after it); crash:WHERE+slow:MS: the next one takes that long
 *   always:WHERE      the same in every attempt              hang             no progress, deaf to CANCEL
 *   slow:MS+fail:CODE runs that long and answers FAILED in attempt 1
 *   stall:MS          no progress for that long, in one system call              garbage          sends what is no JSON object
 *   idle:MS           the same in many short ones
 *   meet              leader and peers meet twice; the result says who was there        meet-alone: the peers do not come
 *   meet-twice        the leader sends its part twice
 *
 * An operation on state dicts asks for a segment for each rank of its source, of the first byte count of the label `bytes`.
 *
 * A root that holds a file `.hang` makes look-ups hang; `.free` holds the free bytes that probe tells. A sweep of one job writes its id to
 * `.swept`, and fails while there is a file `.stuck`; so does a recovery. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ctl/build_id.h"
#include "ctl/frame.h"

static struct frame_conn *conn;
static char root[4096], all_roots[8][4096], root_names[8][64];
static int root_count, my_index, my_count;
static uint64_t generation;
static bool peers_done;              /* it may come while the leader still works */

static void die(const char *what)
{
	fprintf(stderr, "fake_worker: %s: %s\n", what, err_last()->text);
	_exit(9);
}

static void say(uint16_t type, json_t *doc, const int *fds, uint32_t n)
{
	char *text = json_dumps(doc, JSON_COMPACT);
	bool empty = false;

	if (frame_send(conn, type, generation, text ? str_of(text) : STR("{}"), fds, n) != OK)
		die("send");
	while (!empty) {
		if (frame_flush(conn, &empty) != OK)
			die("flush");
		if (!empty)
			usleep(1000);
	}
	free(text);
	json_decref(doc);
}

static int number(const char *text)
{
	return (int)strtol(text, NULL, 10);
}

/* The next frame within `ms` (-1: any time); false: none. The process ends with its socket. */
static bool hear(int ms, struct frame *f)
{
	bool got = false, closed = false;

	if (frame_wait(conn, ms, f, &got, &closed) != OK)
		die("receive");
	if (closed)
		_exit(0);
	return got;
}

static const char *path_of(const json_t *ref)
{
	static char path[8192];
	const char *storage = json_string_value(json_object_get(ref, "storage"));
	const char *name = json_string_value(json_object_get(ref, "name"));

	for (int i = 0; i < root_count; i++)
		if (storage && strcmp(storage, root_names[i]) == 0) {
			snprintf(path, sizeof path, "%s/%s", all_roots[i], name ? name : "");
			return path;
		}
	snprintf(path, sizeof path, "%s/%s", root, name ? name : "");
	return path;
}

static bool read_small(const char *dir, const char *name, char *text, size_t cap)
{
	char path[9000];
	snprintf(path, sizeof path, "%s/%s", dir, name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, cap - 1);
	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = '\0';
	return fd >= 0;
}

static void make_checkpoint(const char *path, const char *job)
{
	char part[9000], whole[9000];

	for (const char *p = path + 1; *p; p++)
		if (*p == '/') {
			snprintf(part, sizeof part, "%.*s", (int)(p - path), path);
			mkdir(part, 0755);
		}
	mkdir(path, 0755);
	snprintf(part, sizeof part, "%s/.part", path);
	snprintf(whole, sizeof whole, "%s/.dcpd.json", path);
	int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	if (fd < 0 || write(fd, job, strlen(job)) < 0 || rename(part, whole) != 0) /* all at once, as a commit is */
		die("make");
	close(fd);
}

static void remove_checkpoint(const char *path)
{
	char part[9000];

	snprintf(part, sizeof part, "%s/.dcpd.json", path);
	unlink(part);
	rmdir(path);
}

/* ---- jobs ---- */

static char fake[128];
static int attempt;

static int slow(void)
{
	const char *at = strstr(fake, "slow:");

	return at ? number(at + 5) : 0;
}

static void crash_at(const char *where)
{
	size_t n = strncmp(fake, "crash:", 6) == 0 ? strcspn(fake + 6, "+") : 0;
	bool now = (n != 0 && attempt == 1 && strlen(where) == n && strncmp(fake + 6, where, n) == 0) ||
		   (strncmp(fake, "always:", 7) == 0 && strcmp(fake + 7, where) == 0);
	if (now)
		kill(getpid(), SIGKILL);
}

/* true: cancelled, and answered. */
static bool work(int ms, bool progress)
{
	struct frame f;

	for (int t = 0; t <= ms; t += 20) {
		if (progress)
			say(FRAME_PROGRESS, json_pack("{s:i, s:i, s:[{s:i, s:i, s:i}]}", "bytes_done", ms ? 1000 * t / ms : 1000,
						      "bytes_total", 1000, "ranks", "rank", my_index, "bytes_done",
						      ms ? 1000 * t / ms : 1000, "bytes_total", 1000), NULL, 0);
		if (t >= ms || !hear(20, &f))
			continue;
		peers_done |= f.type == FRAME_PEERS_DONE;
		if (f.type == FRAME_CANCEL) {
			say(FRAME_FAILED, json_pack("{s:s, s:s}", "code", "cancelled", "detail", "as asked"), NULL, 0);
			return true;
		}
	}
	return false;
}

static bool expect(uint16_t type)
{
	struct frame f;

	for (;;) {
		if (!hear(-1, &f))
			continue;
		if (f.type == type)
			return true;
		if (f.type == FRAME_CANCEL) {
			say(FRAME_FAILED, json_pack("{s:s}", "code", "cancelled"), NULL, 0);
			return false;
		}
	}
}

/* How many ranks an operation's target gets: those of its source. 0: it is none. */
static json_int_t operation_world(const json_t *spec, const json_t *dicts, const char *kind)
{
	const char *source = json_string_value(json_object_get(json_object_get(spec, "source"), "state_dict"));

	if (strcmp(kind, "save") == 0 || !source || !json_object_get(spec, "backend"))
		return 0;
	return json_integer_value(json_object_get(json_object_get(dicts, source), "world_size"));
}

static bool want_segments(const json_t *spec, const json_t *dicts, const char *kind)
{
	const json_t *target = json_object_get(spec, "target");
	const char *name = json_string_value(json_object_get(target, "state_dict"));
	const char *bytes = json_string_value(json_object_get(json_object_get(spec, "labels"), "bytes"));
	json_int_t world = operation_world(spec, dicts, kind);

	if (!name || (!world && json_object_get(dicts, name)))
		return true;
	if (!world)
		world = json_integer_value(json_object_get(target, "world_size"));
	json_t *ranks = json_array();
	for (json_int_t r = 0; r < (world ? world : 1); r++)
		json_array_append_new(ranks, json_pack("{s:I, s:i, s:i}", "rank", r, "bytes", bytes ? number(bytes) : 8192, "image_bytes",
						       5000));
	say(FRAME_WANT_SEGMENTS, json_pack("{s:I, s:o}", "world_size", world ? world : 1, "ranks", ranks), NULL, 0);
	crash_at("making");
	return expect(FRAME_SEGMENTS);
}

static void do_hang(void)
{
	for (;;)
		pause();
}

/* A verify that found N damaged chunks, each with an FQN of 500 characters. */
static void say_damage(int n)
{
	json_t *list = json_array();
	char fqn[501];

	memset(fqn, 'w', sizeof fqn - 1);
	fqn[sizeof fqn - 1] = '\0';
	for (int i = 0; i < n; i++)
		json_array_append_new(list, json_pack("{s:s, s:i, s:s, s:i, s:i}", "fqn", fqn, "rank", i, "file", "__0_0.distcp",
						      "offset", 4096 * i, "bytes", 16));
	say(FRAME_FAILED, json_pack("{s:s, s:s, s:{s:o, s:i, s:s}}", "code", "checkpoint_damaged", "detail", "as the test wished",
				    "more", "damage", list, "damage_count", n, "code", "ok"), NULL, 0);
}

static bool misbehave(void)
{
	if (strcmp(fake, "hang") == 0)
		do_hang();
	if (strncmp(fake, "fail:", 5) == 0) {
		json_t *problem = json_pack("{s:s, s:s, s:i, s:s, s:s, s:i}", "code", fake + 5, "detail", "as the test wished", "rank",
					    1, "fqn", "model.w", "file", "__1_0.distcp", "offset", 4096);
		say(FRAME_FAILED, problem, NULL, 0);
		return true;
	}
	if (strncmp(fake, "damage:", 7) == 0) {
		say_damage(number(fake + 7));
		return true;
	}
	if (strcmp(fake, "garbage") == 0)
		if (frame_send(conn, FRAME_STATE, generation, STR("[1,2"), NULL, 0) != OK)
			die("garbage");
	return false;
}

static bool commit(const json_t *spec, const char *kind, const char *job)
{
	bool writes = strcmp(kind, "save") == 0 || strcmp(kind, "reshard") == 0;

	if (strcmp(kind, "delete") == 0)
		remove_checkpoint(path_of(json_object_get(spec, "target")));
	if (!writes)
		return true;
	say(FRAME_WANT_COMMIT, json_object(), NULL, 0);
	if (!expect(FRAME_COMMIT_OK))
		return false;
	crash_at("commit");
	make_checkpoint(path_of(json_object_get(spec, "target")), job);
	crash_at("committed");
	return true;
}

/* Two rounds of finding each other; false: it was answered with FAILED. */
static bool meet(void)
{
	char data[32];
	struct frame f;

	for (int round = 0; round < 2; round++) {
		snprintf(data, sizeof data, "w%d-%d", my_index, round);
		for (int i = 0; i < 1 + (strcmp(fake, "meet-twice") == 0 && my_index == 0); i++)
			say(FRAME_RENDEZVOUS, json_pack("{s:i, s:i, s:s}", "round", round, "size", my_count, "data", data), NULL, 0);
		do {
			if (!hear(-1, &f))
				f.type = 0;
			peers_done |= f.type == FRAME_PEERS_DONE;
		} while (f.type != FRAME_RENDEZVOUS_ALL && f.type != FRAME_CANCEL);
		json_t *all = json_loadb(f.json.p, f.json.n, 0, NULL);
		for (int i = 0; i < my_count && f.type == FRAME_RENDEZVOUS_ALL; i++) {
			snprintf(data, sizeof data, "w%d-%d", i, round);
			const char *got = json_string_value(json_array_get(json_object_get(all, "all"), (size_t)i));
			if (!got || strcmp(got, data) != 0)
				die("meet");
		}
		json_decref(all);
		if (f.type == FRAME_CANCEL) {
			say(FRAME_FAILED, json_pack("{s:s}", "code", "cancelled"), NULL, 0);
			return false;
		}
	}
	return true;
}

static void do_job(const json_t *doc)
{
	const json_t *spec = json_object_get(doc, "spec"), *dicts = json_object_get(doc, "state_dicts");
	const char *script = json_string_value(json_object_get(json_object_get(spec, "labels"), "fake"));
	const char *kind = json_string_value(json_object_get(doc, "kind")), *job = json_string_value(json_object_get(doc, "job"));
	json_t *plan = json_pack("{s:i, s:i}", "bytes", 1000, "files", 2);

	snprintf(fake, sizeof fake, "%s", script ? script : "");
	peers_done = false;
	attempt = (int)json_integer_value(json_object_get(doc, "attempt"));
	const char *identity = strncmp(fake, "identity:", 9) == 0 ? fake + 9 : strncmp(fake, "damage:", 7) == 0 ? "1-a" : NULL;
	say(FRAME_STATE, json_pack("{s:s, s:s, s:s*}", "state", "planning", "stage", "metadata", "identity", identity), NULL, 0);
	crash_at("planning");
	if (misbehave())
		return;
	if (json_is_true(json_object_get(doc, "dry_run"))) {
		say(FRAME_DONE, json_pack("{s:o}", "plan", plan), NULL, 0);
		return;
	}
	if (!want_segments(spec, dicts, kind))
		return;
	say(FRAME_STATE, json_pack("{s:s, s:s, s:i, s:o}", "state", "running", "stage", "copy", "bytes_total", 1000, "plan", plan),
	    NULL, 0);
	int memfd = memfd_create("run", MFD_CLOEXEC);
	say(FRAME_RUN, json_pack("{s:s, s:i, s:s}", "job", job, "attempt", attempt, "fake", fake), &memfd, 1);
	close(memfd);
	crash_at("running");
	if (strncmp(fake, "meet", 4) == 0 && !meet())
		return;
	if (strncmp(fake, "stall:", 6) == 0)
		usleep((useconds_t)number(fake + 6) * 1000);
	if (work(strncmp(fake, "idle:", 5) == 0 ? number(fake + 5) : 0, false) || work(slow(), true))
		return;
	const char *late = strstr(fake, "+fail:");
	if (late && attempt == 1) {
		say(FRAME_FAILED, json_pack("{s:s, s:s}", "code", late + 6, "detail", "as the test wished"), NULL, 0);
		return;
	}
	if (my_count > 1 && !peers_done && !expect(FRAME_PEERS_DONE))
		return;
	if (commit(spec, kind, job))
		say(FRAME_DONE, json_pack("{s:{s:i, s:i, s:i, s:i, s:s, s:O*}}", "result", "bytes", 1000, "attempt", attempt,
					  "state_dicts", (int)json_object_size(dicts), "moved_bytes", 700, "backend", "shm", "comm",
					  json_object_get(doc, "comm")), NULL, 0);
}

static void do_run(const json_t *doc)
{
	const char *script = json_string_value(json_object_get(doc, "fake"));

	snprintf(fake, sizeof fake, "%s", script ? script : "");
	attempt = (int)json_integer_value(json_object_get(doc, "attempt"));
	crash_at("peer");
	if (strcmp(fake, "meet-alone") == 0) /* deaf until it is told to stop */
		(void)(expect(FRAME_SEGMENTS));
	else if (strncmp(fake, "meet", 4) == 0 && !meet())
		return;
	else if (!work(slow() / 2, false))
		say(FRAME_DONE, json_object(), NULL, 0);
}

/* ---- look-ups ---- */

static json_t *find_what(const json_t *doc)
{
	const char *path = path_of(doc);
	char job[64];
	struct stat st;

	if (stat(path, &st) != 0)
		return json_pack("{s:b, s:s, s:n}", "exists", 0, "what", "none", "job");
	if (read_small(path, ".dcpd.json", job, sizeof job))
		return json_pack("{s:b, s:s, s:s}", "exists", 1, "what", "checkpoint", "job", job);
	return json_pack("{s:b, s:s, s:n}", "exists", 1, "what", "other", "job");
}

static json_t *answer(const json_t *doc)
{
	const char *op = json_string_value(json_object_get(doc, "op"));
	char text[4200];

	if (strcmp(op, "probe") == 0) {
		json_int_t avail = read_small(root, ".free", text, sizeof text) ? number(text) : (json_int_t)1 << 40;
		return json_pack("{s:I, s:I, s:s, s:b, s:b}", "free_bytes", avail, "total_bytes", (json_int_t)1 << 41, "fs", "fake",
				 "direct_io", 0, "writable", 1);
	}
	if (strcmp(op, "exists") == 0)
		return find_what(doc);
	if (strcmp(op, "show") == 0)
		return json_pack("{s:s, s:i}", "name", json_string_value(json_object_get(doc, "name")), "bytes", 5000);
	if (strcmp(op, "recover") == 0) {
		bool there = read_small(path_of(doc), ".dcpd.json", text, sizeof text);
		bool mine = there && strcmp(text, json_string_value(json_object_get(doc, "job"))) == 0;
		if (strcmp(json_string_value(json_object_get(doc, "kind")), "delete") == 0)
			mine = !there;
		return json_pack("{s:b, s:{s:b}}", "committed", mine, "result", "recovered", 1);
	}
	if (strcmp(op, "sweep") == 0) { /* .others: what another daemon has here, until a question says that it was seen long ago */
		bool others = read_small(root, ".others", text, sizeof text);
		if (others && strcmp(text, json_string_value(json_object_get(json_object_get(doc, "watched"), "/x")) ?: "") == 0) {
			snprintf(text, sizeof text, "%s/.others", root);
			unlink(text);
			others = false;
		}
		return others ? json_pack("{s:i, s:{s:s}}", "removed", 0, "others", "/x", text) : json_pack("{s:i}", "removed", 0);
	}
	return json_pack("{s:O}", "echo", doc);
}

/* The code of the problem that sweeps and recoveries answer while the root holds `.stuck`; NULL without one. */
static const char *mending_fails(const json_t *doc)
{
	const char *job = json_string_value(json_object_get(doc, "job")), *op = json_string_value(json_object_get(doc, "op"));
	char path[9000], text[8];

	if (strcmp(op, "recover") == 0)
		return read_small(root, ".stuck", text, sizeof text) ? "forbidden" : NULL;
	if (!job || strcmp(op, "sweep") != 0)
		return NULL;
	snprintf(path, sizeof path, "%s/.swept", root);
	int fd = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
	if (fd < 0 || dprintf(fd, "%s %s\n", job, json_string_value(json_object_get(doc, "mark")) ?: "-") < 0)
		_exit(9);
	close(fd);
	return read_small(root, ".stuck", text, sizeof text) ? "storage_io" : NULL;
}

static void do_lookup(const json_t *doc)
{
	char text[8];

	if (root_count && read_small(root, ".hang", text, sizeof text))
		do_hang();
	const char *fails = mending_fails(doc);
	if (fails) {
		say(FRAME_ANSWER, json_pack("{s:{s:s, s:s}}", "problem", "code", fails, "detail", "it stays"), NULL, 0);
		return;
	}
	say(FRAME_ANSWER, json_pack("{s:o}", "ok", answer(doc)), NULL, 0);
}

static void do_hello(const json_t *doc)
{
	const char *role = json_string_value(json_object_get(doc, "role"));
	const char *build = role && strcmp(role, "gang") == 0 ? getenv("DCPD_FAKE_BUILD") : NULL; /* not look-ups */
	const json_t *r;
	size_t i;
	json_t *roots = json_array();

	my_index = (int)json_integer_value(json_object_get(doc, "index"));
	my_count = (int)json_integer_value(json_object_get(doc, "count"));
	json_array_foreach(json_object_get(doc, "roots"), i, r) {
		const char *name = json_string_value(json_object_get(r, "name")), *path = json_string_value(json_object_get(r, "path"));
		snprintf(all_roots[i], sizeof all_roots[i], "%s", path);
		snprintf(root_names[i], sizeof root_names[i], "%s", name);
		root_count = (int)i + 1;
		if (access(path, R_OK) == 0)
			json_array_append_new(roots, json_pack("{s:s, s:b}", "name", name, "ok", 1));
		else
			json_array_append_new(roots, json_pack("{s:s, s:b, s:{s:s, s:s}}", "name", name, "ok", 0, "problem", "code",
							       "storage_gone", "detail", strerror(errno)));
	}
	if (root_count)
		memcpy(root, all_roots[0], sizeof root);
	json_t *hello = json_pack("{s:s, s:i, s:s, s:s, s:i, s:b, s:o}", "build_id", build ? build : BUILD_ID, "pid", (int)getpid(),
				  "engine", "fake", "sandbox", "none", "landlock", 0, "seccomp", 0, "roots", roots);
	say(FRAME_HELLO, hello, NULL, 0);
}

int main(void)
{
	struct frame f;

	if (frame_conn_new(3, &conn) != OK)
		die("connect");
	for (;;) {
		if (!hear(-1, &f))
			continue;
		json_t *doc = json_loadb(f.json.p, f.json.n, 0, NULL);
		generation = f.generation;
		if (f.type == FRAME_HELLO)
			do_hello(doc);
		else if (f.type == FRAME_JOB)
			do_job(doc);
		else if (f.type == FRAME_RUN)
			do_run(doc);
		else if (f.type == FRAME_LOOKUP)
			do_lookup(doc);
		json_decref(doc);
	}
}
