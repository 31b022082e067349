/* s3_source.c: see s3_source.h. Sources, their variables and their order are those of AWS's SDKs: what works for `aws s3` works here. */
#include "store/s3_source.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "store/s3_fetch.h"

enum { FILE_MAX_BYTES = 1 << 20 };

struct s3_source {
	struct s3_config config;       /* its texts are the source's own */
	char *file, *profile, *region;
	struct s3_http *http;
};

/* ---- files ---- */

static struct str trim(struct str s)
{
	while (s.n && (*s.p == ' ' || *s.p == '\t'))
		s = (struct str){ s.p + 1, s.n - 1 };
	while (s.n && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t' || s.p[s.n - 1] == '\r'))
		s.n--;
	return s;
}

/* A key that does not fit is none: a part of it would only be refused. */
static bool put(char *out, size_t max, struct str v)
{
	if (v.n >= max || memchr(v.p, '\0', v.n))
		return false;
	memcpy(out, v.p, v.n);
	out[v.n] = '\0';
	return true;
}

static FALLIBLE enum err read_profile(struct str text, const char *profile, struct s3_keys *out)
{
	bool inside = false, found = false;

	while (text.n) {
		const char *end = memchr(text.p, '\n', text.n);
		size_t n = end ? (size_t)(end - text.p) : text.n;
		struct str line = trim((struct str){ text.p, n });
		text = (struct str){ text.p + n + (end != NULL), text.n - n - (end != NULL) };
		if (line.n == 0 || *line.p == '#' || *line.p == ';')
			continue;
		if (*line.p == '[') {
			struct str name = { line.p + 1, line.n - 1 };
			name.n -= name.n && name.p[name.n - 1] == ']';
			name = trim(name);
			if (str_starts(name, "profile "))      /* as ~/.aws/config has it */
				name = trim((struct str){ name.p + 8, name.n - 8 });
			inside = str_is(name, profile);
			found |= inside;
			continue;
		}
		const char *is = inside ? memchr(line.p, '=', line.n) : NULL;
		if (!is)
			continue;
		struct str key = trim((struct str){ line.p, (size_t)(is - line.p) });
		struct str v = trim((struct str){ is + 1, line.n - (size_t)(is + 1 - line.p) });
		if ((str_is(key, "aws_access_key_id") && !put(out->access, sizeof out->access, v)) ||
		    (str_is(key, "aws_secret_access_key") && !put(out->secret, sizeof out->secret, v)) ||
		    (str_is(key, "aws_session_token") && !put(out->token, sizeof out->token, v)))
			return ERR(FORBIDDEN, "the profile '%s' has a key that is too long", profile);
	}
	if (!found)
		return ERR(NOT_FOUND, "there is no profile '%s'", profile);
	if (!out->access[0] || !out->secret[0])
		return ERR(FORBIDDEN, "the profile '%s' lacks aws_access_key_id or aws_secret_access_key", profile);
	return OK;
}

static FALLIBLE enum err from_file(struct s3_source *s, int64_t, struct s3_keys *out, int64_t *)
{
	struct buf text = BUF_INIT(FILE_MAX_BYTES);
	const char *profile = s->profile ?: s3_variable("AWS_PROFILE") ?: "default";
	const char *path = s->file ?: s3_variable("AWS_SHARED_CREDENTIALS_FILE");
	char usual[1024];

	if (!path) {
		const char *home = s3_variable("HOME");
		if (!home)
			return ERR(NOT_FOUND, "there is no HOME with .aws/credentials");
		snprintf(usual, sizeof usual, "%s/.aws/credentials", home);
		path = usual;
	}
	enum err e = s3_read_file(&s->config, path, &text);
	if (!e)
		e = read_profile((struct str){ text.p ? (const char *)text.p : "", text.len }, profile, out);
	if (text.p)
		explicit_bzero(text.p, text.cap);
	buf_free(&text);
	return e;
}

/* ---- the environment ---- */

static FALLIBLE enum err from_env(struct s3_source *, int64_t, struct s3_keys *out, int64_t *)
{
	const char *access = s3_variable("AWS_ACCESS_KEY_ID"), *secret = s3_variable("AWS_SECRET_ACCESS_KEY");
	const char *token = s3_variable("AWS_SESSION_TOKEN");

	if (!access || !secret)
		return ERR(NOT_FOUND, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set");
	if (!put(out->access, sizeof out->access, str_of(access)) || !put(out->secret, sizeof out->secret, str_of(secret)) ||
	    !put(out->token, sizeof out->token, str_of(token ? token : "")))
		return ERR(FORBIDDEN, "a key in the environment is too long");
	return OK;
}

/* ---- which ---- */

static FALLIBLE enum err from_web_identity(struct s3_source *s, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out)
{
	return s3_fetch_web_identity(s->http, &s->config, s->region, deadline_ms, out, expires_ms_out);
}

static FALLIBLE enum err from_container(struct s3_source *s, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out)
{
	return s3_fetch_container(s->http, &s->config, deadline_ms, out, expires_ms_out);
}

static FALLIBLE enum err from_instance(struct s3_source *s, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out)
{
	return s3_fetch_instance(s->http, deadline_ms, out, expires_ms_out);
}

static FALLIBLE enum err from_none(struct s3_source *, int64_t, struct s3_keys *, int64_t *)
{
	return OK;
}

static const struct {
	enum s3_credentials_from from;
	const char *name;
	enum err (*fetch)(struct s3_source *s, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out);
} sources[] = {
	/* in the chain's order */
	{ S3_CREDENTIALS_ENV, "environment", from_env },
	{ S3_CREDENTIALS_WEB_IDENTITY, "web identity", from_web_identity },
	{ S3_CREDENTIALS_FILE, "file", from_file },
	{ S3_CREDENTIALS_CONTAINER, "container", from_container },
	{ S3_CREDENTIALS_INSTANCE, "instance", from_instance },
	{ S3_CREDENTIALS_NONE, "none", from_none },
};

FALLIBLE enum err s3_source_fetch(struct s3_source *s, int64_t deadline_ms, struct s3_keys *out, int64_t *expires_ms_out)
{
	char why[ERR_TEXT_MAX] = "";
	size_t n = 0;

	for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
		bool chain = s->config.credentials == S3_CREDENTIALS_CHAIN;
		if (chain ? sources[i].from == S3_CREDENTIALS_NONE : sources[i].from != s->config.credentials)
			continue;
		*out = (struct s3_keys){ 0 };
		*expires_ms_out = 0;
		enum err e = sources[i].fetch(s, deadline_ms, out, expires_ms_out);
		/* A source that is there and fails ends the chain: another identity would be a surprise. */
		if (!e || !chain || (e != ERR_NOT_FOUND && sources[i].from != S3_CREDENTIALS_INSTANCE))
			return e == ERR_NOT_FOUND ? ERR(FORBIDDEN, "no credentials for the object storage (%s): %s", sources[i].name,
							(snprintf(why, sizeof why, "%s", err_last()->text), why)) : e;
		int more = snprintf(why + n, sizeof why - n, "%s%s: %.200s", n ? "; " : "", sources[i].name, err_last()->text);
		n = more > 0 ? num_min(n + (size_t)more, sizeof why - 1) : n;
	}
	return ERR(FORBIDDEN, "no credentials for the object storage: %.900s", why);
}

FALLIBLE enum err s3_source_new(const struct s3_config *config, const char *region, struct s3_http *http, struct s3_source **out)
{
	struct s3_source *s = mem_zalloc(1, sizeof *s);

	NEED(s, "cannot use a storage");
	*s = (struct s3_source){ .config = *config, .http = http, .region = mem_strdup(region) };
	s->file = config->credentials_file ? mem_strdup(config->credentials_file) : NULL;
	s->profile = config->profile ? mem_strdup(config->profile) : NULL;
	if (!s->region || (config->credentials_file && !s->file) || (config->profile && !s->profile)) {
		s3_source_free(s);
		return ERR(NO_MEMORY, "cannot use a storage");
	}
	*out = s;
	return OK;
}

void s3_source_free(struct s3_source *s)
{
	if (!s)
		return;
	mem_free(s->file);
	mem_free(s->profile);
	mem_free(s->region);
	mem_free(s);
}
