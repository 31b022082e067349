/* test_s3.c: the S3 client's pure parts: signatures by AWS's published examples, the canonical form of keys, XML and headers of servers
 * that lie. The client as a whole is run against servers by tests/worker/test_s3_client.py. */
#include "lib/t.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "store/s3_answer.h"
#include "store/s3_impl.h"
#include "store/s3_sign.h"
#include "store/s3_store_impl.h"
#include "store/s3_xml.h"

#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define SUITE_STAMP "20150830T123600Z"
#define S3_STAMP "20130524T000000Z"
#define BUCKET { "host", "examplebucket.s3.amazonaws.com" }

/* The first five are of AWS's Signature Version 4 test suite, the others of "Authenticating Requests" in the manual of S3. */
static const struct {
	const char *verb, *key;
	struct s3_pair query[3];
	const char *body;
	struct s3_pair headers[6];
	const char *signature;
} published[] = {
	{ "GET", "", { { 0 } }, "", { { "host", "example.amazonaws.com" }, { "x-amz-date", SUITE_STAMP } },
	  "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31" },
	{ "POST", "", { { 0 } }, "", { { "host", "example.amazonaws.com" }, { "x-amz-date", SUITE_STAMP } },
	  "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b" },
	{ "GET", "", { { "Param2", "value2" }, { "Param1", "value1" } }, "",
	  { { "host", "example.amazonaws.com" }, { "x-amz-date", SUITE_STAMP } },
	  "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500" },
	{ "GET", "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", { { 0 } }, "",
	  { { "host", "example.amazonaws.com" }, { "x-amz-date", SUITE_STAMP } },
	  "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f" },
	{ "GET", "\u1234", { { 0 } }, "", { { "host", "example.amazonaws.com" }, { "x-amz-date", SUITE_STAMP } },
	  "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85" },
	{ "GET", "test.txt", { { 0 } }, "",
	  { BUCKET, { "range", "bytes=0-9" }, { "x-amz-content-sha256", EMPTY }, { "x-amz-date", S3_STAMP } },
	  "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41" },
	{ "PUT", "test$file.text", { { 0 } }, "Welcome to Amazon S3.",
	  { { "date", "Fri, 24 May 2013 00:00:00 GMT" }, BUCKET,
	    { "x-amz-content-sha256", "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072" }, { "x-amz-date", S3_STAMP },
	    { "x-amz-storage-class", " REDUCED_REDUNDANCY " } },
	  "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd" },
	{ "GET", "", { { "lifecycle", "" } }, "", { BUCKET, { "x-amz-content-sha256", EMPTY }, { "x-amz-date", S3_STAMP } },
	  "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543" },
	{ "GET", "", { { "prefix", "J" }, { "max-keys", "2" } }, "",
	  { BUCKET, { "x-amz-content-sha256", EMPTY }, { "x-amz-date", S3_STAMP } },
	  "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7" },
};

static size_t count_pairs(const struct s3_pair *p)
{
	size_t n = 0;

	while (p[n].name)
		n++;
	return n;
}

static void test_published_signatures(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
		bool suite = i < 5;
		struct s3_keys keys = { "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "" };
		CLEANUP(buf_free) struct buf path = BUF_INIT(1024), query = BUF_INIT(1024);
		char hash[S3_HASH_HEX], out[S3_AUTHORIZATION_MAX], stamp[S3_STAMP_MAX];
		if (suite) {
			snprintf(keys.access, sizeof keys.access, "AKIDEXAMPLE");
			keys.secret[21] = '+';
		}
		buf_putc(&path, '/');
		s3_sign_encode(&path, str_of(published[i].key), '/');
		buf_putc(&path, '\0');
		s3_sign_query(&query, published[i].query, count_pairs(published[i].query));
		buf_putc(&query, '\0');
		s3_sign_hash(published[i].body, strlen(published[i].body), hash);
		s3_sign_stamp(suite ? INT64_C(1440938160999) : INT64_C(1369353600000), stamp);
		struct s3_to_sign sign = { published[i].verb, (char *)path.p, (char *)query.p, published[i].headers,
					   count_pairs(published[i].headers), hash, "us-east-1", suite ? "service" : "s3", stamp };
		T_OK(s3_sign(&sign, &keys, out));
		assert_string_equal(strstr(out, "Signature=") + 10, published[i].signature);
		assert_non_null(strstr(out, suite ? "AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders=host;x-amz-date, " :
						    "/20130524/us-east-1/s3/aws4_request, SignedHeaders="));
	}
}

static void test_keys_are_encoded(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1024);

	(void)state;
	s3_sign_encode(&b, STR("a b/=+~*\xc3\xbc?&#%.\n"), '/');
	buf_putc(&b, '\0');
	assert_string_equal(b.p, "a%20b/%3D%2B~%2A%C3%BC%3F%26%23%25.%0A");
	T_OK(s3_unescape(STR("a%20b/%3D%2b~%2A%C3%BC%3F+%0A"), &b));
	assert_true(str_eq((struct str){ (char *)b.p, b.len }, STR("a b/=+~*\xc3\xbc? \n")));
	T_ERR(STORAGE_IO, s3_unescape(STR("a%2"), &b));
	T_ERR(STORAGE_IO, s3_unescape(STR("a%zz"), &b));
}

static void test_signature_too_long(void **state)
{
	static struct s3_keys keys;
	static char name[1200];
	char out[S3_AUTHORIZATION_MAX];

	(void)state;
	memset(name, 'x', sizeof name - 1);
	struct s3_pair header = { name, "" };
	struct s3_to_sign sign = { "GET", "/", "", &header, 1, EMPTY, "r", "s3", S3_STAMP };
	T_ERR(LIMIT_EXCEEDED, s3_sign(&sign, &keys, out));
}

/* ---- XML ---- */

static char seen[4096];

static enum err note(void *user, const char *path, struct str text)
{
	size_t n = strlen(seen);

	(void)user;
	snprintf(seen + n, sizeof seen - n, "%s=%.*s;", path, (int)text.n, text.p);
	return str_is(text, "stop") ? ERR_NOT_FOUND : OK;
}

static enum err read_xml(const char *text)
{
	seen[0] = '\0';
	return s3_xml_read(str_of(text), note, NULL);
}

static void test_xml(void **state)
{
	static char deep[200], wide[40000];

	(void)state;
	T_OK(read_xml("<?xml version=\"1.0\"?><A xmlns=\"x\">\n<s:B>1&amp;&#50;<C>&lt;</C>3</s:B><B/></A>"));
	assert_string_equal(seen, "A/B/C=<;A/B=1&23;A/B=;A=\n;");
	T_ERR(NOT_FOUND, read_xml("<A><B>stop</B><B>more</B></A>"));
	assert_string_equal(seen, "A/B=stop;");
	T_ERR(STORAGE_IO, read_xml(""));
	T_ERR(STORAGE_IO, read_xml("<A><B></A>"));
	T_ERR(STORAGE_IO, read_xml("<A>&x;</A>"));
	T_ERR(STORAGE_IO, read_xml("<A/><B/>"));
	T_ERR(STORAGE_IO, read_xml("<!DOCTYPE a [<!ENTITY x \"xx\"><!ENTITY y \"&x;&x;\">]><a>&y;</a>"));
	assert_string_equal(seen, "");
	T_ERR(STORAGE_IO, read_xml("<!DOCTYPE a SYSTEM \"file:///etc/passwd\"><a/>"));
	for (int i = 0; i < 9; i++) {
		memcpy(deep + 3 * i, "<a>", 3);
		memcpy(deep + 27 + 4 * i, "</a>", 4);
	}
	T_ERR(STORAGE_IO, read_xml(deep));
	deep[27 + 8 * 4] = '\0';
	T_OK(read_xml(deep + 3));      /* one level less */
	memset(wide, 'x', sizeof wide - 1);
	memcpy(wide, "<a>", 3);
	memcpy(wide + sizeof wide - 5, "</a>", 4);
	T_ERR(STORAGE_IO, read_xml(wide));
	memset(wide, 'x', sizeof wide - 1);
	memcpy(wide, "<", 1);
	memcpy(wide + sizeof wide - 3, "/>", 2);
	T_ERR(STORAGE_IO, read_xml(wide));
}

static void test_xml_without_memory(void **state)
{
	(void)state;
	for (uint64_t nth = 1;; nth++) {
		mem_fail_at(nth);
		enum err e = read_xml("<A><B>1</B><C>2</C></A>");
		mem_fail_at(0);
		if (!e)
			break;
		assert_int_equal(e, ERR_NO_MEMORY);
		assert_true(nth < 1000);
	}
}

/* ---- answers ---- */

static struct s3_answer heard(const char *lines)
{
	struct s3_answer a = { 0 };

	for (const char *end; *lines; lines = end + 1) {
		end = strchr(lines, '\n');
		s3_answer_header(&a, (struct str){ lines, (size_t)(end - lines) + 1 });
	}
	return a;
}

static void test_headers(void **state)
{
	struct s3_answer a = heard("HTTP/1.1 100 Continue\r\nETag: \"old\"\r\n\r\nHTTP/1.1 206 Partial Content\r\nCONTENT-LENGTH: 10\r\n"
				   "Content-Range: bytes 5-14/100\r\netag:\"x\" \r\nLast-Modified: Fri, 24 May 2013 00:00:00 GMT\r\n"
				   "x-amz-request-id: a\x01" "b\r\nX-Amz-Meta-Dcpd-Mark: m1\r\nx-amz-checksum-crc32: AAAAAA==\r\n");

	(void)state;
	assert_true(a.has_length && a.length == 10 && a.has_range && a.range_begin == 5 && a.range_end == 15 && a.range_total == 100);
	assert_string_equal(a.etag, "\"x\"");
	assert_int_equal(a.mtime_ms, INT64_C(1369353600000));
	assert_string_equal(a.request_id, "a?b");
	assert_string_equal(a.mark, "m1");
	assert_string_equal(a.crc32, "AAAAAA==");
	static const char *const lies[] = { "bytes 5-4/10", "bytes -5/10", "bytes 5-/10", "bytes 0-18446744073709551615/1", "bytes 1-2",
					    "bytes 1-2/x", "lines 1-2/3", "bytes 1/2-3", "bytes  1-2/3", "" };
	for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
		char line[100];
		snprintf(line, sizeof line, "Content-Range: %s\n", lies[i]);
		assert_false(heard(line).has_range);
	}
	assert_false(heard("Content-Length: -1\n").has_length);
	assert_false(heard("Content-Length: 99999999999999999999\n").has_length);
	static char wide[600];
	memcpy(wide, "ETag: ", 6);
	memset(wide + 6, 'e', sizeof wide - 8);
	wide[sizeof wide - 2] = '\n';
	assert_string_equal(heard(wide).etag, "");     /* half an ETag is none */
}

static void error_is(long status, const char *body, bool reads, enum err code, enum s3_verdict verdict, const char *text)
{
	struct s3_answer a = heard("x-amz-bucket-region: eu-west-1\ndate: today\n");
	enum s3_verdict v;

	a.status = status;
	s3_answer_words(&a, str_of(body));
	assert_int_equal(s3_answer_error(&a, reads, &v), code);
	assert_int_equal(v, verdict);
	if (!strstr(err_last()->text, text))
		T_FAIL("'%s' lacks '%s'", err_last()->text, text);
}

static void test_errors(void **state)
{
#define SAYS(code) "<Error><Code>" code "</Code><Message>some\nwords \x7f</Message><RequestId>r1</RequestId></Error>"
	(void)state;
	error_is(404, SAYS("NoSuchKey"), true, ERR_NOT_FOUND, S3_FINAL, "answered 404 NoSuchKey: some words ? (request r1)");
	error_is(404, "", true, ERR_NOT_FOUND, S3_FINAL, "answered 404");
	error_is(404, SAYS("NoSuchBucket"), true, ERR_STORAGE_GONE, S3_FINAL, "NoSuchBucket");
	error_is(301, SAYS("PermanentRedirect"), true, ERR_STORAGE_GONE, S3_FINAL, "the bucket is in the region eu-west-1");
	error_is(307, "", false, ERR_STORAGE_GONE, S3_FINAL, "307");
	error_is(403, SAYS("RequestTimeTooSkewed"), true, ERR_FORBIDDEN, S3_FINAL, "the server's clock: today, this host's: 2");
	error_is(403, SAYS("AccessDenied"), false, ERR_FORBIDDEN, S3_FINAL, "AccessDenied");
	error_is(400, SAYS("ExpiredToken"), false, ERR_FORBIDDEN, S3_RENEW, "ExpiredToken");
	error_is(412, SAYS("PreconditionFailed"), false, ERR_CHECKPOINT_EXISTS, S3_FINAL, "412");
	error_is(412, "", true, ERR_CHECKPOINT_REPLACED, S3_FINAL, "412");
	error_is(409, SAYS("ConditionalRequestConflict"), false, ERR_CHECKPOINT_EXISTS, S3_REPEAT, "409");
	error_is(503, SAYS("SlowDown"), false, ERR_STORAGE_STALLED, S3_SLOW, "SlowDown");
	error_is(503, "<html>busy", false, ERR_STORAGE_STALLED, S3_SLOW, "503: <html>busy");
	error_is(500, SAYS("InternalError"), false, ERR_STORAGE_IO, S3_REPEAT, "500");
	error_is(400, SAYS("BadDigest"), false, ERR_STORAGE_IO, S3_REPEAT, "BadDigest");
	error_is(400, SAYS("Nobody\x01Knows"), false, ERR_STORAGE_IO, S3_FINAL, "400");
	error_is(507, "", false, ERR_STORAGE_FULL, S3_FINAL, "507");
	error_is(501, "", false, ERR_UNSUPPORTED, S3_FINAL, "501");
	error_is(200, SAYS("InternalError"), false, ERR_STORAGE_IO, S3_REPEAT, "answered InternalError");
	error_is(403, "<!DOCTYPE x [<!ENTITY y \"z\">]><Error><Code>&y;</Code></Error>", false, ERR_FORBIDDEN, S3_FINAL, "403: <!DOCTYPE");
}

/* Keys as a server tells them: of any length, and not ended by a NUL. */
static void test_attempts_of_keys(void **state)
{
	static const struct {
		size_t folder, name;           /* bytes in front of the last '/', and of the name behind it; 0: no '/' */
		bool is_one;
	} cases[] = { { 0, 40, true }, { 100, 40, true }, { 766, 255, true }, { 767, 255, true }, { 768, 255, false }, { 0, 255, true },
		      { 0, 256, false }, { 100, 256, false }, { 1100, 40, false }, { 8151, 40, false }, { 3000, 1000, false } };
	const uint64_t attempt = s3_attempt_at("run/.dcpd-job-1");
	char page[64];

	(void)state;
	int n = snprintf(page, sizeof page, ".dcpd-%010jx-", (uintmax_t)attempt);
	each(c, cases, sizeof cases / sizeof *cases) {
		size_t whole = c->folder + (c->folder ? 1 : 0) + c->name, begin = whole - c->name;
		char *key = mem_alloc(whole);
		assert_non_null(key);
		memset(key, 'x', whole);
		if (c->folder)
			key[c->folder] = '/';
		memcpy(key + begin, page, (size_t)n);
		assert_int_equal(s3_attempt_of_key((struct str){ key, whole }), c->is_one ? attempt : 0);
		mem_free(key);
	}
	assert_int_equal(s3_attempt_of_key(STR("a/b/")), 0);
}

static void test_what_a_sandbox_lets_in(void **state)
{
	char dir[] = "/tmp/test_s3-XXXXXX", file[64], link[64], got[64];

	(void)state;
	assert_non_null(mkdtemp(dir));
	snprintf(file, sizeof file, "%s/token", dir);
	snprintf(link, sizeof link, "%s/..data", dir);
	assert_true(s3_readable_of(file, got, sizeof got));
	assert_string_equal(got, file);
	assert_int_equal(symlink("..2026_01", link), 0);
	assert_true(s3_readable_of(file, got, sizeof got));
	assert_string_equal(got, dir); /* as Kubernetes mounts a secret */
	assert_false(s3_readable_of(file, got, 4));
	assert_int_equal(unlink(link), 0);
	assert_int_equal(mkdir(link, 0700), 0);
	assert_true(s3_readable_of(file, got, sizeof got));
	assert_string_equal(got, file);
	assert_true(s3_readable_of("relative", got, sizeof got));
	assert_int_equal(rmdir(link), 0);
	assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_published_signatures), cmocka_unit_test(test_keys_are_encoded),
		cmocka_unit_test(test_signature_too_long),
		cmocka_unit_test(test_xml), cmocka_unit_test(test_xml_without_memory), cmocka_unit_test(test_headers),
		cmocka_unit_test(test_errors), cmocka_unit_test(test_attempts_of_keys),
		cmocka_unit_test(test_what_a_sandbox_lets_in),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
