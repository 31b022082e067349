/* s3_fetch.c: see s3_fetch.h. */
#include "store/s3_fetch.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/jval.h"
#include "store/s3_xml.h"

enum { ANSWER_MAX = 64 << 10, FETCH_MS = 5000, INSTANCE_MS = 2000, TRIES = 3 };

const char *s3_variable(const char *name)
{
	const char *v = getenv(name);

	return v && *v ? v : NULL;
}

FALLIBLE enum err s3_read_file(const struct s3_config *config, const char *path, struct buf *out)
{
	char part[4096];
	size_t n;

	if (config->read_file)
		return config->read_file(config->user, path, out);
	FILE *f = fopen(path, "rbe");
	if (!f)
		return errno == ENOENT ? ERR(NOT_FOUND, "there is no file %s", path) : ERR_SYS(CONFIG, "cannot read %s", path);
	while ((n = fread(part, 1, sizeof part, f)) > 0)
		buf_put(out, part, n);
	bool bad = ferror(f);
	fclose(f);
	explicit_bzero(part, sizeof part);
	if (bad)
		return ERR_SYS(CONFIG, "cannot read %s", path);
	return buf_status(out);
}

/* ---- one request ---- */

/* Text of a success in `text`, NUL behind it. ERR_FORBIDDEN otherwise, without the body: it may hold keys. */
static FALLIBLE enum err ask(struct s3_http *http, const char *what, const char *verb, const char *url, const struct s3_pair *headers,
			     size_t count, struct str body, int64_t deadline_ms, struct buf *text)
{
	struct s3_exchange x = { .verb = verb, .url = url, .headers = headers, .header_count = count, .text = text };
	enum s3_outcome outcome;

	if (body.n) {
		x.body = body.p;
		x.body_bytes = body.n;
	}
	x.deadline_ms = deadline_ms;
	for (int try = 0;; try++) {
		text->len = 0;
		enum err e = s3_http_do(http, &x, &outcome);
		bool again = outcome == S3_ANSWERED ? x.answer.status >= 500 || x.answer.status == 429 : outcome == S3_BROKEN;
		if (again && try < TRIES && clock_mono_ms() < deadline_ms)
			continue;
		TRY(e);
		break;
	}
	if (x.answer.status < 200 || x.answer.status >= 300) {
		s3_answer_words(&x.answer, text->len ? (struct str){ (const char *)text->p, text->len } : STR(""));
		return ERR(FORBIDDEN, "%s answered %ld %s%s%s", what, x.answer.status, x.answer.code, x.answer.code[0] ? ": " : "",
			   x.answer.code[0] ? x.answer.message : "");
	}
	if (x.is_long)
		return ERR(FORBIDDEN, "%s sent more than %d bytes", what, ANSWER_MAX);
	buf_putc(text, '\0');
	return buf_status(text);
}

static void forget(struct buf *b)
{
	if (b->p)
		explicit_bzero(b->p, b->cap);
	buf_free(b);
}

static FALLIBLE enum err put_text(char *out, size_t max, const char *what, struct str v)
{
	if (v.n == 0 || v.n >= max || memchr(v.p, '\0', v.n))
		return ERR(FORBIDDEN, "%s sent a key that cannot be used", what);
	memcpy(out, v.p, v.n);
	out[v.n] = '\0';
	return OK;
}

static FALLIBLE enum err put_expiry(const char *what, struct str v, int64_t *out)
{
	char text[CLOCK_TEXT_MAX];

	TRY(put_text(text, sizeof text, what, v));
	return clock_of_text(text, out) ? OK : ERR(FORBIDDEN, "%s sent a time of expiry that is none", what);
}

/* {"AccessKeyId", "SecretAccessKey", "Token", "Expiration"} of the container's and the instance's service. */
static FALLIBLE enum err read_json(const char *what, const struct buf *text, struct s3_keys *out, int64_t *expires_ms_out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct str access, secret, token, expiry;

	if (jval_parse((struct str){ (const char *)text->p, text->len - 1 }, &doc) != OK)
		return ERR(FORBIDDEN, "%s sent something else than JSON", what);
	struct jval root = JVAL_ROOT(doc);
	if (jval_must_text(&root, "AccessKeyId", &access) != OK || jval_must_text(&root, "SecretAccessKey", &secret) != OK ||
	    jval_must_text(&root, "Token", &token) != OK || jval_must_text(&root, "Expiration", &expiry) != OK)
		return ERR(FORBIDDEN, "%s sent no AccessKeyId, SecretAccessKey, Token and Expiration", what);
	TRY(put_text(out->access, sizeof out->access, what, access));
	TRY(put_text(out->secret, sizeof out->secret, what, secret));
	TRY(put_text(out->token, sizeof out->token, what, token));
	return put_expiry(what, expiry, expires_ms_out);
}

static int64_t sooner(int64_t deadline_ms, int64_t ms)
{
	int64_t mine = clock_mono_ms() + ms;

	return mine < deadline_ms ? mine : deadline_ms;
}

/* ---- the instance: IMDSv2 ---- */

FALLIBLE enum err s3_fetch_instance(struct s3_http *http, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out)
{
	static const char what[] = "the instance's metadata service", path[] = "/latest/meta-data/iam/security-credentials/";
	const char *at = s3_variable("AWS_EC2_METADATA_SERVICE_ENDPOINT") ?: "http://169.254.169.254";
	const char *off = s3_variable("AWS_EC2_METADATA_DISABLED");
	const struct s3_pair ttl = { "x-aws-ec2-metadata-token-ttl-seconds", "21600" };
	CLEANUP(forget) struct buf token = BUF_INIT(ANSWER_MAX), role = BUF_INIT(ANSWER_MAX), keys = BUF_INIT(ANSWER_MAX);
	char url[1024];
	int n = (int)strlen(at);

	if (off && strcmp(off, "true") == 0)
		return ERR(NOT_FOUND, "AWS_EC2_METADATA_DISABLED is set");
	n -= n && at[n - 1] == '/';
	deadline_ms = sooner(deadline_ms, INSTANCE_MS);        /* most hosts have none: it is not waited for long */
	snprintf(url, sizeof url, "%.*s/latest/api/token", n, at);
	TRY(ask(http, what, "PUT", url, &ttl, 1, STR(""), deadline_ms, &token));
	const struct s3_pair proof = { "x-aws-ec2-metadata-token", (const char *)token.p };
	if (strpbrk(proof.value, "\r\n"))
		return ERR(FORBIDDEN, "%s sent no token", what);
	snprintf(url, sizeof url, "%.*s%s", n, at, path);
	TRY(ask(http, what, "GET", url, &proof, 1, STR(""), deadline_ms, &role));
	role.p[strcspn((const char *)role.p, "\r\n")] = '\0';
	CLEANUP(buf_free) struct buf role_url = BUF_INIT(2048);
	buf_printf(&role_url, "%.*s%s", n, at, path);
	s3_sign_encode(&role_url, str_of((const char *)role.p), 0);
	buf_putc(&role_url, '\0');
	TRY(buf_status(&role_url));
	TRY(ask(http, what, "GET", (const char *)role_url.p, &proof, 1, STR(""), deadline_ms, &keys));
	return read_json(what, &keys, out, expires_ms_out);
}

/* ---- the container: ECS, EKS ---- */

/* Without TLS the token would be readable on the way: only to this host, and to the services' own addresses. */
static bool is_near(const char *url)
{
	static const char *const fixed[] = { "169.254.170.2", "169.254.170.23", "[fd00:ec2::23]", "localhost", "[::1]" };
	CURLU *u = curl_url();
	char *host = NULL, *scheme = NULL;
	bool near = false;

	if (u && curl_url_set(u, CURLUPART_URL, url, 0) == CURLUE_OK && curl_url_get(u, CURLUPART_HOST, &host, 0) == CURLUE_OK &&
	    curl_url_get(u, CURLUPART_SCHEME, &scheme, 0) == CURLUE_OK) {
		struct in_addr a;
		near = strcmp(scheme, "https") == 0 || (inet_pton(AF_INET, host, &a) == 1 && ntohl(a.s_addr) >> 24 == 127);
		for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
			near |= strcmp(host, fixed[i]) == 0;
	}
	curl_free(host);
	curl_free(scheme);
	curl_url_cleanup(u);
	return near;
}

FALLIBLE enum err s3_fetch_container(struct s3_http *http, const struct s3_config *config, int64_t deadline_ms, struct s3_keys *out,
				     int64_t *expires_ms_out)
{
	static const char what[] = "the container's service of credentials";
	const char *relative = s3_variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
	const char *full = s3_variable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
	const char *token = s3_variable("AWS_CONTAINER_AUTHORIZATION_TOKEN");
	const char *file = s3_variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
	CLEANUP(forget) struct buf read = BUF_INIT(S3_TOKEN_MAX), keys = BUF_INIT(ANSWER_MAX);
	char url[2048];

	if (!relative && !full)
		return ERR(NOT_FOUND, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI and …_FULL_URI are not set");
	if (snprintf(url, sizeof url, "%s%s", relative ? "http://169.254.170.2" : "", relative ? relative : full) >= (int)sizeof url)
		return ERR(FORBIDDEN, "the URI of %s is too long", what);
	if (!is_near(url))
		return ERR(FORBIDDEN, "the URI of %s is neither https nor on this host", what);
	if (file) {
		TRY(s3_read_file(config, file, &read));
		buf_putc(&read, '\0');
		TRY(buf_status(&read));
		read.p[strcspn((const char *)read.p, "\r\n")] = '\0';
		token = (const char *)read.p;
	}
	if (token && strpbrk(token, "\r\n"))
		return ERR(FORBIDDEN, "the token for %s has more than one line", what);
	const struct s3_pair proof = { "authorization", token };
	TRY(ask(http, what, "GET", url, &proof, token ? 1 : 0, STR(""), sooner(deadline_ms, FETCH_MS), &keys));
	return read_json(what, &keys, out, expires_ms_out);
}

/* ---- web identity: a token of the cluster's, exchanged at STS ---- */

struct sts {
	struct s3_keys *out;
	int64_t *expires_ms_out;
};

static FALLIBLE enum err sts_field(void *user, const char *path, struct str text)
{
	static const char what[] = "STS";
	const struct sts *s = user;
	const char *p = strstr(path, "/Credentials/");

	if (!p)
		return OK;
	if (strcmp(p, "/Credentials/AccessKeyId") == 0)
		return put_text(s->out->access, sizeof s->out->access, what, text);
	if (strcmp(p, "/Credentials/SecretAccessKey") == 0)
		return put_text(s->out->secret, sizeof s->out->secret, what, text);
	if (strcmp(p, "/Credentials/SessionToken") == 0)
		return put_text(s->out->token, sizeof s->out->token, what, text);
	return strcmp(p, "/Credentials/Expiration") == 0 ? put_expiry(what, text, s->expires_ms_out) : OK;
}

FALLIBLE enum err s3_fetch_web_identity(struct s3_http *http, const struct s3_config *config, const char *region, int64_t deadline_ms,
					struct s3_keys *out, int64_t *expires_ms_out)
{
	const char *role = s3_variable("AWS_ROLE_ARN"), *file = s3_variable("AWS_WEB_IDENTITY_TOKEN_FILE");
	const char *session = s3_variable("AWS_ROLE_SESSION_NAME"), *at = s3_variable("AWS_ENDPOINT_URL_STS");
	const struct s3_pair form = { "content-type", "application/x-www-form-urlencoded" };
	CLEANUP(forget) struct buf token = BUF_INIT(S3_TOKEN_MAX), body = BUF_INIT(ANSWER_MAX), text = BUF_INIT(ANSWER_MAX);
	struct sts sts = { out, expires_ms_out };
	char usual[128];

	if (!role || !file)
		return ERR(NOT_FOUND, "AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE are not set");
	TRY(s3_read_file(config, file, &token));
	while (token.len && (token.p[token.len - 1] == '\n' || token.p[token.len - 1] == '\r'))
		token.len--;
	snprintf(usual, sizeof usual, "https://sts.%s.amazonaws.com/", region);
	buf_puts(&body, "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=");
	s3_sign_encode(&body, str_of(role), 0);
	buf_puts(&body, "&RoleSessionName=");
	s3_sign_encode(&body, str_of(session ? session : "dcpd"), 0);
	buf_puts(&body, "&WebIdentityToken=");
	s3_sign_encode(&body, (struct str){ token.p ? (const char *)token.p : "", token.len }, 0);
	TRY(buf_status(&body));
	struct str sent = { (const char *)body.p, body.len };
	TRY(ask(http, "STS", "POST", at ? at : usual, &form, 1, sent, sooner(deadline_ms, FETCH_MS), &text));
	TRY(s3_xml_read((struct str){ (const char *)text.p, text.len - 1 }, sts_field, &sts));
	if (!out->access[0] || !out->secret[0] || !out->token[0] || !*expires_ms_out)
		return ERR(FORBIDDEN, "STS sent no credentials");
	return OK;
}
