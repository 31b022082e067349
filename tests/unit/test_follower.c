/* Webhooks and chains, as far as they are functions: addresses, signatures, waiting times, filters, names and circles of chains. */
#include "lib/t_json.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "server/chain.h"
#include "server/chain_steps.h"
#include "server/follower.h"
#include "server/webhook.h"
#include "server/webhook_address.h"
#include "server/courier.h"
#include "server/webhook_sign.h"

static bool may(const char *text, const char *allowed)
{
	struct sockaddr_in v4 = { .sin_family = AF_INET };
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };
	struct webhook_net net;
	bool is_v4 = inet_pton(AF_INET, text, &v4.sin_addr) == 1;

	if (!is_v4)
		assert_int_equal(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
	if (allowed)
		T_OK(webhook_address_parse(allowed, &net));
	return webhook_address_ok(is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6, &net, allowed != NULL);
}

static void test_addresses(void **state)
{
	static const char *const closed[] = { "127.0.0.1", "127.255.255.255", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
					      "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "198.18.0.1",
					      "::1", "::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "fe80::1", "fc00::1",
					      "ff02::1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1", "fec0::1" };
	static const char *const open[] = { "8.8.8.8", "172.15.255.255", "172.32.0.0", "11.0.0.0", "2606:4700::1111", "2a00::1",
					    "192.167.255.255", "100.63.255.255" };

	(void)state;
	for (size_t i = 0; i < sizeof closed / sizeof *closed; i++)
		if (may(closed[i], NULL))
			T_FAIL("%s is taken for public", closed[i]);
	for (size_t i = 0; i < sizeof open / sizeof *open; i++)
		if (!may(open[i], NULL))
			T_FAIL("%s is taken for private", open[i]);
	assert_true(may("127.0.0.1", "127.0.0.0/8"));
	assert_true(may("10.1.2.3", "10.1.2.3"));
	assert_false(may("10.1.2.4", "10.1.2.3"));
	assert_true(may("10.1.2.3", "10.1.2.2/31"));
	assert_false(may("10.1.2.4", "10.1.2.2/31"));
	assert_true(may("::ffff:10.1.2.3", "10.0.0.0/8"));
	assert_true(may("fd00::5", "fd00::/8"));
	assert_true(may("::1", "::1"));
	assert_false(may("::1", "127.0.0.0/8"));
}

static void test_networks(void **state)
{
	static const char *const bad[] = { "", "x", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/-1", "10.0.0/8", "::1/129", "::g", "10.0.0.0/8 ",
					   "/8", "1111111111111111111111111111111111111111111111111111111111111" };
	struct webhook_net net;

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		T_ERR(CONFIG, webhook_address_parse(bad[i], &net));
	T_OK(webhook_address_parse("10.0.0.0/8", &net));
	assert_int_equal(net.bits, 104);
	T_OK(webhook_address_parse("fd00::/8", &net));
	assert_int_equal(net.bits, 8);
}

/* The vector was made with Python: hmac.new(b"0123456789abcdef", b'1700000000.{"id":"x"}', "sha256"). */
static void test_signature(void **state)
{
	char out[WEBHOOK_SIGNATURE_MAX];

	(void)state;
	webhook_sign((const unsigned char *)"0123456789abcdef", 16, 1700000000, STR("{\"id\":\"x\"}"), out);
	assert_string_equal(out, "t=1700000000,v1=f1cf8ba6a2fa64bd8193b9db564f42cd35d0fc2a46f6a2c2903f897838a7f23a");
}

static void test_secrets(void **state)
{
	char dir[] = "/tmp/dcpd-secrets-XXXXXX", path[64];
	unsigned char out[WEBHOOK_SECRET_MAX];
	static char big[WEBHOOK_SECRET_MAX + 2];
	size_t n = 0;

	(void)state;
	assert_non_null(mkdtemp(dir));
	snprintf(path, sizeof path, "%s/s", dir);
	T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
	T_ERR(VALIDATION_FAILED, webhook_sign_secret("/nonexistent", "s", out, &n));
	int fd = open(path, O_CREAT | O_WRONLY, 0600);
	assert_int_equal(write(fd, "0123456789abcdef\r\n \n", 20), 20);
	T_OK(webhook_sign_secret(dir, "s", out, &n));
	assert_int_equal(n, 16);
	assert_int_equal(fchmod(fd, 0640), 0);
	T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
	assert_int_equal(fchmod(fd, 0600), 0);
	if (geteuid() == 0) {
		assert_int_equal(fchown(fd, 65534, 65534), 0);
		T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
		assert_int_equal(fchown(fd, 0, 0), 0);
	}
	assert_int_equal(ftruncate(fd, 15), 0);
	T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
	memset(big, 'x', sizeof big);
	assert_int_equal(pwrite(fd, big, WEBHOOK_SECRET_MAX, 0), WEBHOOK_SECRET_MAX);
	T_OK(webhook_sign_secret(dir, "s", out, &n));
	assert_int_equal(n, WEBHOOK_SECRET_MAX);
	assert_int_equal(pwrite(fd, big, sizeof big, 0), (ssize_t)sizeof big);
	T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
	close(fd);
	unlink(path);
	assert_int_equal(symlink("/etc/hostname", path), 0);
	T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
	unlink(path);
	assert_int_equal(mkfifo(path, 0600), 0);
	T_ERR(VALIDATION_FAILED, webhook_sign_secret(dir, "s", out, &n));
	unlink(path);
	rmdir(dir);
}

static void test_backoff(void **state)
{
	(void)state;
	assert_int_equal(webhook_sign_backoff_ms(1, 0), 1000);
	assert_int_equal(webhook_sign_backoff_ms(2, 0), 2000);
	assert_int_equal(webhook_sign_backoff_ms(10, 0), 512000);
	assert_int_equal(webhook_sign_backoff_ms(13, 0), 3600000);
	assert_int_equal(webhook_sign_backoff_ms(1000000, 0), 3600000);
	for (uint32_t r = 0; r < 100000; r += 7) {
		int64_t ms = webhook_sign_backoff_ms(3, r * 40503u);
		assert_true(ms >= 2000 && ms <= 4000);
	}
}

static void test_urls(void **state)
{
	static const char *const bad[] = { "", "example.org", "ftp://example.org/", "file:///etc/passwd", "http://", "http://u:p@a.org/",
					   "https://u@example.org/", "http://example.org/#x", "http://exa mple.org/", "http://a.org/\n",
					   "gopher://x/", "http://ex\xc3\xa4mple.org/" };

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		T_ERR(VALIDATION_FAILED, courier_check_url(str_of(bad[i])));
	T_OK(courier_check_url(STR("https://example.org/hook?a=b")));
	T_OK(courier_check_url(STR("http://[2606:4700::1111]:8080/x")));
}

static void test_filters(void **state)
{
	struct follower_filter f = { "main", "run*" }, any = { 0 };

	(void)state;
	assert_true(follower_matches(&f, "main", "run1/step-1"));
	assert_false(follower_matches(&f, "other", "run1/step-1"));
	assert_false(follower_matches(&f, "main", "x/run1"));
	assert_false(follower_matches(&f, NULL, NULL));
	assert_true(follower_matches(&any, NULL, NULL));
	assert_true(follower_matches(&(struct follower_filter){ "main", "-" }, "main", "alone"));
	T_OK(follower_check_name(STR("a-b_c.9")));
	T_ERR(NAME_INVALID, follower_check_name(STR("")));
	T_ERR(NAME_INVALID, follower_check_name(STR("../x")));
	T_ERR(NAME_INVALID, follower_check_name(STR(".x")));
	T_ERR(NAME_INVALID, follower_check_name(STR("a/b")));
	assert_string_equal(follower_task_states[TASK_SKIPPED], "skipped");
}

static void test_globs_meet(void **state)
{
	static const struct {
		const char *a, *b;
		bool meet;
	} cases[] = { { "a", "a", true }, { "a", "b", false }, { "*", "", true }, { "*", "x", true }, { "", "", true }, { "", "a", false },
		      { "a*", "*b", true }, { "a*c", "b*c", false }, { "run*", "run1", true }, { "run*-hf", "run1", false },
		      { "run*-hf", "*", true }, { "*x*", "*y*", true }, { "a*b*c", "abc", true }, { "ab", "a*b*c", false },
		      { "**", "*", true }, { "x/*", "*-hf", true }, { "eval/*", "train/*", false } };

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		if (chain_steps_meet(cases[i].a, cases[i].b) != cases[i].meet || chain_steps_meet(cases[i].b, cases[i].a) != cases[i].meet)
			T_FAIL("%s and %s", cases[i].a, cases[i].b);
	}
	char a[400], b[400]; /* long names are told apart; of long globs that would take too long */
	memset(a, 'x', sizeof a);
	a[399] = '\0';
	snprintf(b, sizeof b, "%.398sy", a);
	assert_false(chain_steps_meet(a, b));
	a[0] = b[0] = '*';
	assert_true(chain_steps_meet(a, b));
}

static json_t *request_of(const char *step, const char *name)
{
	json_t *doc = t_json(step), *out = NULL;
	struct jval v = JVAL_ROOT(doc);
	enum job_kind kind;

	T_OK(chain_step_request(&v, "c", "main", name, &kind, &out));
	json_decref(doc);
	return out;
}

static void names(const char *step, const char *name, const char *expected)
{
	json_t *doc = request_of(step, name);

	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "target"), "name")), expected);
	json_decref(doc);
}

static void test_requests(void **state)
{
	(void)state;
	names("{'export':{'storage':'hf'}}", "a/b/step-7", "a/b/step-7");
	names("{'export':{'storage':'hf'}}", "step-7", "step-7");
	names("{'export':{'storage':'hf','name':'{run}/{name}-hf'}}", "a/b/step-7", "a/b/step-7-hf");
	names("{'export':{'storage':'hf','name':'x-{step}/{storage}/{run}'}}", "a/b/step-7", "x-7/main/a/b");
	names("{'export':{'storage':'hf','name':'{run}/{name}{x}'}}", "step-7", "step-7{x}");
	json_t *doc = request_of("{'export':{'storage':'hf','format':'safetensors','overwrite':true,'dtype':[['*','bfloat16']]}}", "a/s-1");
	json_t *want = t_json("{'kind':'reshard','labels':{'chain':'c'},'source':{'storage':'main','name':'a/s-1'},"
			    "'target':{'storage':'hf','name':'a/s-1','format':'safetensors'},'dtype':[['*','bfloat16']],"
			    "'options':{'overwrite':true,'pace':'background'}}");
	assert_true(json_equal(doc, want));
	json_decref(doc);
	json_decref(want);
	doc = request_of("{'delete':{}}", "a/s-1");
	want = t_json("{'kind':'delete','labels':{'chain':'c'},'target':{'storage':'main','name':'a/s-1'},'options':{}}");
	assert_true(json_equal(doc, want));
	json_decref(doc);
	json_decref(want);
}

static void refused(enum err code, const char *pointer, const char *steps)
{
	json_t *doc = t_json(steps);
	struct jval root = JVAL_ROOT(doc), v = jval_get(&root, "steps");

	enum err e = chain_steps_check(&v, "main", "run1");
	if (e != code || strcmp(err_last()->pointer, pointer) != 0)
		T_FAIL("%s: %s at %s: %s", steps, err_code_name(e), err_last()->pointer, err_last()->text);
	json_decref(doc);
}

static void test_steps(void **state)
{
	json_t *doc = t_json("{'steps':[{'verify':{}},{'verify':{'level':'values'}},{'export':{'storage':'hf','format':'safetensors'}},"
			     "{'delete':{}}]}");
	struct jval root = JVAL_ROOT(doc), v = jval_get(&root, "steps");

	(void)state;
	T_OK(chain_steps_check(&v, "main", "run*"));
	T_OK(chain_steps_check(&v, "main", NULL));
	T_OK(chain_steps_check(&v, "main", "-"));
	json_decref(doc);
	refused(ERR_VALIDATION_FAILED, "/steps", "{'steps':[]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0", "{'steps':[{'train':{}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0", "{'steps':[{'verify':{},'delete':{}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0/verify", "{'steps':[{'verify':1}]}");
	refused(ERR_UNKNOWN_FIELD, "/steps/0/verify/levle", "{'steps':[{'verify':{'levle':'digest'}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0/verify/level", "{'steps':[{'verify':{'level':'deep'}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/1/export/storage", "{'steps':[{'verify':{}},{'export':{}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0/export/storage", "{'steps':[{'export':{'storage':'main'}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0/export/format", "{'steps':[{'export':{'storage':'hf','format':'x'}}]}");
	refused(ERR_NAME_INVALID, "/steps/0/export", "{'steps':[{'export':{'storage':'hf','format':'torch'}}]}");
	refused(ERR_NAME_INVALID, "/steps/0/export/name", "{'steps':[{'export':{'storage':'hf','name':'../x'}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0/export/retries", "{'steps':[{'export':{'storage':'hf','retries':99}}]}");
	refused(ERR_VALIDATION_FAILED, "/steps/0", "{'steps':[{'delete':{}},{'verify':{}}]}");
	refused(ERR_UNKNOWN_FIELD, "/steps/0/delete/storage", "{'steps':[{'delete':{'storage':'hf'}}]}");
}

static void makes(const char *step, const char *match, const char *storage, const char *run)
{
	json_t *doc = t_json(step);
	const char *in = NULL;
	char *glob = NULL;

	T_OK(chain_step_makes(doc, "main", match, &in, &glob));
	if (run) {
		assert_string_equal(in, storage);
		assert_string_equal(glob, run);
	} else {
		assert_null(glob);
	}
	mem_free(glob);
	json_decref(doc);
}

static void test_what_steps_make(void **state)
{
	(void)state;
	makes("{'verify':{}}", "run1", NULL, NULL);
	makes("{'export':{'storage':'hf'}}", "run1", "hf", "run1");
	makes("{'export':{'storage':'hf'}}", NULL, "hf", "*");
	makes("{'export':{'storage':'main','name':'out/{run}/{name}'}}", "a*", "main", "out/a*");
	makes("{'export':{'storage':'main','name':'{name}'}}", "a*", "main", "-");
	assert_true(CHAIN_DEPTH_MAX >= 1 && FOLLOWER_QUEUE_MAX >= 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_addresses), cmocka_unit_test(test_networks), cmocka_unit_test(test_signature),
		cmocka_unit_test(test_secrets),	  cmocka_unit_test(test_backoff),  cmocka_unit_test(test_urls),
		cmocka_unit_test(test_filters),	  cmocka_unit_test(test_globs_meet), cmocka_unit_test(test_requests),
		cmocka_unit_test(test_steps),	  cmocka_unit_test(test_what_steps_make),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
