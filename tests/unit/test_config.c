/* The configuration: one table, three sources, and what is refused. */
#include "lib/t.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/config.h"

static enum err load(const char *const *args, const char *const *env, struct config **out)
{
	const char *argv[32] = { "dcpd" };
	int argc = 1;

	for (; args && *args; args++)
		argv[argc++] = *args;
	return config_load(argc, (char *const *)argv, (char *const *)env, out);
}

#define ARGS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static void test_defaults(void **state)
{
	struct config *c;

	(void)state;
	T_OK(load(ARGS("--state-dir", "/tmp/x"), NULL, &c));
	assert_int_equal(c->listen.count, 2);
	assert_string_equal(c->listen.items[0], "unix:/tmp/x/dcpd.sock");
	assert_string_equal(c->listen.items[1], "127.0.0.1:8427");
	assert_true(c->workers >= 2);
	assert_int_equal(c->keep_jobs, 10000);
	assert_int_equal(c->keep_jobs_ms, 30LL * 86400000);
	assert_string_equal(c->token_file, "/tmp/x/token");
	assert_true(c->shm_limit > 0);
	config_free(c);
}

static void test_precedence(void **state)
{
	char path[] = "/tmp/dcpd-conf-XXXXXX";
	struct config *c;
	int fd = mkstemp(path);
	static const char text[] = "# a comment\nworkers = 3\nshm-limit = 1GiB\n storage=a=/a\nstorage = b=/b\nlog-format = json\n\n";

	(void)state;
	assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
	close(fd);
	T_OK(load(ARGS("--config", path, "--state-dir=/tmp/x", "--workers", "5"), ARGS("DCPD_WORKERS=4", "DCPD_SHM_LIMIT=2GiB",
		       "DCPD_STORAGE=c=/c,d=/d", "DCPD_TOKEN=secret", "DCPD_PACE=background", "HOME=/nowhere"), &c));
	assert_int_equal(c->workers, 5);           /* command line over environment over file */
	assert_int_equal(c->shm_limit, 2ULL << 30);
	assert_int_equal(c->storage.count, 2);     /* a higher list replaces a lower one */
	assert_string_equal(c->storage.items[0], "c=/c");
	assert_true(c->log_json);
	config_free(c);
	T_OK(load(ARGS("--config", path, "--state-dir=/tmp/x"), ARGS("DCPD_WORKERS=", "DCPD_STORAGE=", "DCPD_CONFIG="), &c));
	assert_int_equal(c->workers, 3);           /* an empty variable is as none */
	assert_int_equal(c->storage.count, 2);
	config_free(c);
	T_OK(load(ARGS("--state-dir=/tmp/x"), ARGS("DCPD_CONFIG=/dev/null"), &c));
	assert_string_equal(c->config_file, "/dev/null");
	config_free(c);
	unlink(path);
}

static void refused(const char *const *args, const char *const *env, const char *says);

static void test_storage_locations(void **state)
{
	struct str name;
	const char *dir;

	(void)state;
	T_OK(config_storage("a=/srv/a:b", &name, &dir));
	assert_true(str_is(name, "a"));
	assert_string_equal(dir, "/srv/a:b");
	T_OK(config_storage("a=file:///srv/a", &name, &dir));
	assert_string_equal(dir, "/srv/a");
}

/* Access to the files of checkpoints. */
static void test_access(void **state)
{
	char path[] = "/tmp/dcpd-conf-XXXXXX", *text = NULL;
	static const char conf[] = "storage = main=/a\nstorage = open=/b\nfile-mode = 600\nopen.file-mode = 0644\nopen.file-group = root\n";
	const char *const group = getegid() == 0 ? "root" : NULL;
	struct config_access a;
	struct config *c;
	int fd = mkstemp(path);
	size_t n = 0;

	(void)state;
	if (!group)
		skip();
	assert_int_equal(write(fd, conf, sizeof conf - 1), sizeof conf - 1);
	close(fd);
	T_OK(load(ARGS("--config", path, "--state-dir=/x"), NULL, &c));
	T_OK(config_access_of(c, STR("main"), &a));
	assert_true(a.mode == 0600 && a.gid == CONFIG_NO_GROUP);
	T_OK(config_access_of(c, STR("open"), &a));
	assert_true(a.mode == 0644 && a.gid == 0);
	T_OK(config_access_of(c, STR("ope"), &a));
	assert_int_equal(a.mode, 0600);
	FILE *f = open_memstream(&text, &n);
	config_print(c, f);
	fclose(f);
	assert_non_null(strstr(text, "file-mode = 0600    # file"));
	assert_non_null(strstr(text, "open.file-mode = 0644\n"));
	free(text);
	config_free(c);
	T_OK(load(ARGS("--config", path, "--state-dir=/x", "--open.file-mode=0660", "--file-group", group), NULL, &c));
	T_OK(config_access_of(c, STR("open"), &a));
	assert_int_equal(a.mode, 0660); /* the command line comes behind the file */
	T_OK(config_access_of(c, STR("main"), &a));
	assert_int_equal(a.gid, 0);
	config_free(c);
	unlink(path);
	T_OK(load(ARGS("--state-dir=/x"), ARGS("RUNTIME_DIRECTORY=/run/dcpd"), &c));
	assert_int_equal(c->file_mode, 0640);
	config_free(c);
	refused(ARGS("--file-mode", "0448"), NULL, "0640");
	refused(ARGS("--file-mode", "0440"), NULL, "rw for the owner");
	refused(ARGS("--file-mode", "0755"), NULL, "no x");
	refused(ARGS("--file-mode", "01640"), NULL, "0640");
	refused(ARGS("--file-group", "no-such-group"), NULL, "no-such-group");
	refused(ARGS("--main.file-mode", "0640"), NULL, "no such storage");
	refused(ARGS("--storage", "main=/a", "--main.file-group", "no-such-group"), NULL, "no-such-group");
	refused(ARGS("--main.workers", "2"), NULL, "unknown option");
	refused(ARGS("--.file-mode", "0640"), NULL, "unknown option");
}

static void refused(const char *const *args, const char *const *env, const char *says)
{
	struct config *c = NULL;

	/* A user other than root needs a home for the state. */
	T_ERR(CONFIG, load(args, env ? env : ARGS("HOME=/nowhere"), &c));
	if (!strstr(err_last()->text, says))
		T_FAIL("\"%s\" does not say \"%s\"", err_last()->text, says);
}

static void test_refused(void **state)
{
	(void)state;
	refused(ARGS("--sorage", "a=/a"), NULL, "unknown option");
	refused(ARGS("stray"), NULL, "unexpected argument");
	refused(ARGS("--workers"), NULL, "needs N");
	refused(ARGS("--workers", "0"), NULL, "workers (command line)");
	refused(ARGS("--workers", "-1"), NULL, "workers");
	refused(ARGS("--storage", "shm=/a"), NULL, "shm");
	refused(ARGS("--storage", "Main=/a"), NULL, "Main");
	refused(ARGS("--storage", "main=relative"), NULL, "main");
	refused(ARGS("--storage", "main=ftp://bucket/run"), NULL, "there is no store \"ftp\"; known are file:///DIR s3://BUCKET/PREFIX");
	refused(ARGS("--storage", "a=s3://bucket/run", "--s3.b.region=x"), NULL, "there is no storage \"b\"");
	refused(ARGS("--storage", "a=/bucket", "--s3.a.region=x"), NULL, "at s3://");
	refused(ARGS("--storage", "a=s3://bucket/run", "--s3.a.colour=x"), NULL, "endpoint, region");
	refused(ARGS("--storage", "a=s3://bucket/run", "--s3.a.endpoint=ftp://x"), NULL, "http[s]://");
	refused(ARGS("--storage", "a=s3://bucket/run", "--s3.a.credentials=keys"), NULL, "absolute path");
	refused(ARGS("--storage", "a=s3://bucket/run", "--s3.a.region=eu-1   # a comment"), NULL, "line of its own");
	refused(ARGS("--storage", "main=file://a"), NULL, "NAME=/DIR");
	refused(ARGS("--storage", "a=/a", "--storage", "a=/b"), NULL, "twice");
	refused(ARGS("--shm-limit", "10XB"), NULL, "size");
	refused(ARGS("--shm-limit", "99999999999999999999"), NULL, "size");
	refused(ARGS("--keep-jobs", "10"), NULL, "COUNT/AGE");
	refused(ARGS("--lease", "soon"), NULL, "time");
	refused(ARGS("--log-format", "xml"), NULL, "logfmt or json");
	refused(ARGS("--state-dir", "relative"), NULL, "absolute");
	refused(ARGS("--tls-cert", "/c"), NULL, "go together");
	refused(ARGS("--config", "/nonexistent/file"), NULL, "/nonexistent/file");
	refused(ARGS("--state-dir", "/x"), ARGS("DCPD_WROKERS=2"), "DCPD_WROKERS");
}

static void test_file_errors(void **state)
{
	char path[] = "/tmp/dcpd-conf-XXXXXX";
	static const char *const texts[] = { "bogus = 1\n", "workers\n", "\n\nworkers = x\n", "help = true\n" };
	static const char *const says[] = { ":1: unknown key \"bogus\"", ":1: expected key = value", "line 3", "unknown key \"help\"" };

	(void)state;
	close(mkstemp(path));
	for (size_t i = 0; i < 4; i++) {
		FILE *f = fopen(path, "w");
		assert_non_null(f);
		fputs(texts[i], f);
		fclose(f);
		refused(ARGS("--config", path), NULL, says[i]);
	}
	unlink(path);
}

static void test_values(void **state)
{
	uint64_t n;
	int64_t ms;

	(void)state;
	T_OK(config_bytes(STR("512"), 0, &n));
	assert_int_equal(n, 512);
	T_OK(config_bytes(STR("64MiB"), 0, &n));
	assert_int_equal(n, 64 << 20);
	T_OK(config_bytes(STR("50%"), 1000, &n));
	assert_int_equal(n, 500);
	T_ERR(CONFIG, config_bytes(STR("50%"), 0, &n));
	T_ERR(CONFIG, config_bytes(STR("101%"), 1000, &n));
	T_ERR(CONFIG, config_bytes(STR("17000000T"), 0, &n));
	T_OK(config_duration(STR("500ms"), &ms));
	assert_int_equal(ms, 500);
	T_OK(config_duration(STR("2h"), &ms));
	assert_int_equal(ms, 7200000);
	T_ERR(CONFIG, config_duration(STR("5"), &ms));
	T_ERR(CONFIG, config_duration(STR(""), &ms));
}

/* Workers of a node that other hosts reach must not listen on loopback. */
static void test_workers_of_nodes(void **state)
{
	static const struct {
		const char *advertise, *listen, *comm_listen;
		bool reached;
	} cases[] = {
		{ "127.0.0.1:8427", "127.0.0.1:8427", "127.0.0.1", true }, { "localhost:1", "127.0.0.1:8427", "lo", true },
		{ "host-1:8427", "0.0.0.0:8427", "127.0.0.1", false },	   { "host-1:8427", "0.0.0.0:8427", "lo", false },
		{ "10.0.0.1:8427", "0.0.0.0:8427", "::1", false },	   { "10.0.0.1:8427", "0.0.0.0:8427", "eth1", true },
		{ "[fd00::1]:8427", "[::]:8427", "10.0.0.1", true },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct config *c;
		T_OK(load(ARGS("--state-dir", "/tmp/x", "--insecure-http", "--cluster", "http://127.0.0.1:2379", "--node", "host-1",
			       "--advertise", cases[i].advertise, "--listen", cases[i].listen, "--comm-listen", cases[i].comm_listen),
			  NULL, &c));
		if (config_cluster_reaches_workers(c) != cases[i].reached)
			T_FAIL("%s, %s", cases[i].advertise, cases[i].comm_listen);
		config_free(c);
	}
}

/* Each option of the table is in --help, and the effective values are printed with their source. */
static void test_help_and_print(void **state)
{
	char *text = NULL;
	size_t n = 0;
	struct config *c;
	FILE *f = open_memstream(&text, &n);

	(void)state;
	config_help(f);
	fclose(f);
	for (uint32_t i = 0; config_key(i); i++) {
		char option[64];
		snprintf(option, sizeof option, "--%s", config_key(i));
		if (!strstr(text, option))
			T_FAIL("%s is not in --help", option);
	}
	free(text);
	T_OK(load(ARGS("--state-dir", "/tmp/x", "--insecure-http"), ARGS("DCPD_LEASE=9s"), &c));
	f = open_memstream(&text, &n);
	config_print(c, f);
	fclose(f);
	assert_non_null(strstr(text, "insecure-http = true    # command line"));
	assert_non_null(strstr(text, "lease = 9000ms    # environment"));
	assert_non_null(strstr(text, "queue-max = 10000    # default"));
	free(text);
	config_free(c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_defaults), cmocka_unit_test(test_precedence),  cmocka_unit_test(test_refused),
		cmocka_unit_test(test_values),	 cmocka_unit_test(test_file_errors), cmocka_unit_test(test_help_and_print),
		cmocka_unit_test(test_workers_of_nodes), cmocka_unit_test(test_access), cmocka_unit_test(test_storage_locations),
	};

	return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
