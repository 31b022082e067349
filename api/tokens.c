/* tokens.c: see tokens.h. Digests are compared, all of them each time, without an early end: time says nothing about how near a guess is,
 * nor about whose token it is. */
#include "api/tokens.h"

#include <sodium.h>
#include <strings.h>

#include "api/guard.h"
#include "api/secrets.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/vec.h"
#include "server/config.h"

enum { TOKENS_MAX = 1000, TOKEN_MIN = 16, TOKEN_MAX = 255, BUCKET_SECONDS = 2, HASH_BYTES = crypto_hash_sha256_BYTES };

struct token {
	char name[TOKEN_NAME_MAX + 1];
	enum scope scope;
	unsigned char hash[HASH_BYTES];
	double bucket;                 /* requests that it may make now */
	int64_t filled_ns;
};

struct tokens {
	struct vec(struct token) list;
	uint64_t rate;                 /* requests a second; 0: any number */
	bool has_own;
};

void tokens_free(struct tokens *t)
{
	if (!t)
		return;
	vec_free(&t->list);
	mem_free(t);
}

bool tokens_have_own(const struct tokens *t)
{
	return t->has_own;
}

static bool name_ok(struct str s)
{
	for (size_t i = 0; i < s.n; i++) {
		char c = s.p[i];
		bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
		if (!plain && (i == 0 || !strchr("._-", c) || !c))
			return false;
	}
	return s.n > 0 && s.n <= TOKEN_NAME_MAX;
}

static FALLIBLE enum err add_token(struct tokens *t, struct str name, enum scope scope, const unsigned char hash[HASH_BYTES])
{
	struct token *added;

	each(other, t->list.v, t->list.n)
		if (str_is(name, other->name) || sodium_memcmp(other->hash, hash, HASH_BYTES) == 0)
			return ERR(CONFIG, "the token \"%s\" is there twice", other->name);
	if (t->list.n >= TOKENS_MAX)
		return ERR(CONFIG, "there are more than %d tokens", TOKENS_MAX);
	TRY(vec_push(&t->list, &added));
	*added = (struct token){ .scope = scope, .bucket = (double)(BUCKET_SECONDS * t->rate), .filled_ns = clock_mono_ns() };
	memcpy(added->name, name.p, name.n);
	memcpy(added->hash, hash, HASH_BYTES);
	return OK;
}

/* Takes the next word of a line; empty at its end. */
static struct str take_word(struct str *line)
{
	size_t from = 0, n = 0;

	while (from < line->n && strchr(" \t\r", line->p[from]))
		from++;
	while (from + n < line->n && !strchr(" \t\r", line->p[from + n]))
		n++;
	struct str word = { line->p + from, n };
	*line = (struct str){ line->p + from + n, line->n - from - n };
	return word;
}

static FALLIBLE enum err read_line(struct tokens *t, const char *path, unsigned number, struct str line)
{
	struct str name = take_word(&line), scope_name, hex, rest;
	unsigned char hash[HASH_BYTES];
	enum scope scope = SCOPE_BY_METHOD;

	if (name.n == 0 || name.p[0] == '#')
		return OK;
	scope_name = take_word(&line);
	hex = take_word(&line);
	rest = take_word(&line);
	for (enum scope s = SCOPE_READ; s <= SCOPE_ADMIN; s++)
		scope = str_is(scope_name, auth_scope_names[s]) ? s : scope;
	if (!name_ok(name) || str_is(name, TOKEN_OWN_NAME))
		return ERR(CONFIG, "%s:%u: \"%.*s\" is no name of a token", path, number, (int)(name.n < 64 ? name.n : 64), name.p);
	if (scope == SCOPE_BY_METHOD)
		return ERR(CONFIG, "%s:%u: the scope is none of read, submit, admin", path, number);
	if (rest.n || hex.n != 2 * HASH_BYTES || buf_unhex(hex, hash, HASH_BYTES) != OK)
		return ERR(CONFIG, "%s:%u: a line is NAME SCOPE SHA256, the SHA256 as 64 digits and letters a to f", path, number);
	return add_token(t, name, scope, hash);
}

static FALLIBLE enum err read_list(struct tokens *t, const char *path)
{
	CLEANUP(mem_free_ptr) char *text = NULL;
	enum err e = secrets_text(path, &text);
	unsigned number = 0;

	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	for (struct str rest = str_of(text); rest.n;) {
		const char *end = memchr(rest.p, '\n', rest.n);
		struct str line = { rest.p, end ? (size_t)(end - rest.p) : rest.n };
		TRY(read_line(t, path, ++number, line));
		rest = (struct str){ rest.p + line.n + (end != NULL), rest.n - line.n - (end != NULL) };
	}
	return OK;
}

static FALLIBLE enum err read_own(struct tokens *t, const char *path)
{
	CLEANUP(mem_free_ptr) char *text = NULL;
	unsigned char hash[HASH_BYTES];

	enum err e = secrets_token(path, &text);
	if (e == ERR_STORAGE_FULL) { /* guard.c asks again when there is space */
		log_err("no token can be made: over TCP nobody is let in", NULL);
		return OK;
	}
	TRY(e);
	size_t n = strcspn(text, " \t\r\n");
	if (n < TOKEN_MIN || n > TOKEN_MAX)
		return ERR(CONFIG, "the token in %s must have %d to %d characters", path, TOKEN_MIN, TOKEN_MAX);
	crypto_hash_sha256(hash, (const unsigned char *)text, n);
	sodium_memzero(text, n);
	t->has_own = true;
	return add_token(t, STR(TOKEN_OWN_NAME), SCOPE_ADMIN, hash);
}

FALLIBLE enum err tokens_read(const struct config *c, struct tokens **out)
{
	struct tokens *t = mem_zalloc(1, sizeof *t);

	NEED(t, "cannot keep tokens");
	t->rate = c->token_rate;
	enum err e = read_own(t, c->token_file);
	e = e ?: read_list(t, c->tokens_file);
	if (e) {
		tokens_free(t);
		return e;
	}
	tokens_free(*out);
	*out = t;
	return OK;
}

static FALLIBLE enum err take_request(const struct tokens *t, struct token *k)
{
	int64_t now = clock_mono_ns();
	double most = (double)(BUCKET_SECONDS * t->rate);

	if (t->rate == 0)
		return OK;
	k->bucket += (double)(now - k->filled_ns) * 1e-9 * (double)t->rate;
	k->bucket = k->bucket < most ? k->bucket : most;
	k->filled_ns = now;
	if (k->bucket < 1)
		return ERR(TOO_MANY_REQUESTS, "the token \"%s\" has made more than %ju requests a second: see --token-rate", k->name,
			   (uintmax_t)t->rate);
	k->bucket -= 1;
	return OK;
}

FALLIBLE enum err tokens_find(struct tokens *t, const char *authorization, struct caller *out)
{
	unsigned char hash[HASH_BYTES];
	struct token *found = NULL;

	if (strncasecmp(authorization, "Bearer ", 7) != 0)
		return OK;
	for (authorization += 7; *authorization == ' ';)
		authorization++;
	crypto_hash_sha256(hash, (const unsigned char *)authorization, strlen(authorization));
	each(k, t->list.v, t->list.n)
		found = sodium_memcmp(k->hash, hash, sizeof hash) == 0 ? k : found;
	if (!found)
		return OK;
	out->known = true;
	out->admin = found->scope == SCOPE_ADMIN;
	out->scope = found->scope;
	memcpy(out->token, found->name, sizeof out->token);
	return take_request(t, found);
}
