/* s3_sign.c: see s3_sign.h. The steps are those of "Create a signed AWS API request": canonical request, its hash in a string to sign,
 * a key derived from date, region and service, and one HMAC. */
#include "store/s3_sign.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAC = SHA256_DIGEST_LENGTH, PAIRS_MAX = 32 };

void s3_sign_encode(struct buf *out, struct str bytes, char keep)
{
	static const char hex[] = "0123456789ABCDEF";

	for (size_t i = 0; i < bytes.n; i++) {
		unsigned char c = (unsigned char)bytes.p[i];
		bool is_word = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
		if (is_word || c == '-' || c == '.' || c == '_' || c == '~' || (keep && c == (unsigned char)keep))
			buf_putc(out, c);
		else
			buf_put(out, (char[]){ '%', hex[c >> 4], hex[c & 15] }, 3);
	}
}

static int pair_order(const void *a, const void *b)
{
	const struct s3_pair *x = a, *y = b;
	int by_name = strcmp(x->name, y->name);

	return by_name ? by_name : strcmp(x->value, y->value);
}

/* Names of S3's parameters have none of the bytes whose order encoding changes. */
void s3_sign_query(struct buf *out, const struct s3_pair *pairs, size_t count)
{
	struct s3_pair sorted[PAIRS_MAX];

	must(count <= PAIRS_MAX);
	for (size_t i = 0; i < count; i++)
		sorted[i] = pairs[i];
	qsort(sorted, count, sizeof *sorted, pair_order);
	for (size_t i = 0; i < count; i++) {
		if (i)
			buf_putc(out, '&');
		s3_sign_encode(out, str_of(sorted[i].name), 0);
		buf_putc(out, '=');
		s3_sign_encode(out, str_of(sorted[i].value), 0);
	}
}

static void hex_of(const unsigned char *bytes, size_t n, char *out)
{
	for (size_t i = 0; i < n; i++)
		snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

void s3_sign_hash(const void *bytes, size_t n, char hex_out[S3_HASH_HEX])
{
	unsigned char hash[SHA256_DIGEST_LENGTH];

	SHA256(bytes, n, hash);
	hex_of(hash, sizeof hash, hex_out);
}

FALLIBLE enum err s3_sign_md5(struct buf *out, struct str bytes)
{
	unsigned char hash[EVP_MAX_MD_SIZE];
	unsigned n = 0;

	if (EVP_Digest(bytes.p, bytes.n, hash, &n, EVP_md5(), NULL) != 1)
		return ERR(UNSUPPORTED, "this host's OpenSSL has no MD5, which deleting several objects at a time needs");
	buf_base64(out, hash, n);
	return OK;
}

void s3_sign_stamp(int64_t wall_ms, char out[S3_STAMP_MAX])
{
	time_t seconds = wall_ms / 1000;
	struct tm t;

	if (!gmtime_r(&seconds, &t) || strftime(out, S3_STAMP_MAX, "%Y%m%dT%H%M%SZ", &t) == 0)
		snprintf(out, S3_STAMP_MAX, "19700101T000000Z");
}

static bool mac(const void *key, size_t key_n, struct str text, unsigned char out[MAC])
{
	unsigned n = MAC;

	return HMAC(EVP_sha256(), key, (int)key_n, (const unsigned char *)text.p, text.n, out, &n) != NULL;
}

static FALLIBLE enum err signature(const struct s3_to_sign *w, const struct s3_keys *keys, struct str text, char hex_out[S3_HASH_HEX])
{
	unsigned char a[MAC], b[MAC];
	char first[sizeof "AWS4" + S3_SECRET_MAX];
	int n = snprintf(first, sizeof first, "AWS4%s", keys->secret);

	bool ok = mac(first, (size_t)n, (struct str){ w->stamp, 8 }, a) && mac(a, MAC, str_of(w->region), b) &&
		  mac(b, MAC, str_of(w->service), a) && mac(a, MAC, STR("aws4_request"), b) && mac(b, MAC, text, a);
	explicit_bzero(first, sizeof first);
	explicit_bzero(b, sizeof b);
	if (!ok)
		return ERR(SYSTEM, "OpenSSL cannot compute an HMAC");
	hex_of(a, MAC, hex_out);
	return OK;
}

static void signed_names(struct buf *out, const struct s3_to_sign *w)
{
	for (size_t i = 0; i < w->header_count; i++)
		buf_printf(out, "%s%s", i ? ";" : "", w->headers[i].name);
}

/* A header's value as it is signed: trimmed, runs of spaces as one. */
static void put_value(struct buf *out, const char *v)
{
	bool space = false, any = false;

	for (; *v; v++) {
		if (*v == ' ' || *v == '\t') {
			space = any;
			continue;
		}
		if (space)
			buf_putc(out, ' ');
		buf_putc(out, (unsigned char)*v);
		space = false;
		any = true;
	}
}

FALLIBLE enum err s3_sign(const struct s3_to_sign *w, const struct s3_keys *keys, char out[S3_AUTHORIZATION_MAX])
{
	CLEANUP(buf_free) struct buf canonical = BUF_INIT(1 << 17), names = BUF_INIT(1024);
	char hash[S3_HASH_HEX], scope[128], text[256], hex[S3_HASH_HEX];

	must(strlen(w->stamp) >= 8);
	signed_names(&names, w);
	buf_putc(&names, '\0');
	TRY(buf_status(&names));
	buf_printf(&canonical, "%s\n%s\n%s\n", w->verb, w->path, w->query);
	for (size_t i = 0; i < w->header_count; i++) {
		buf_printf(&canonical, "%s:", w->headers[i].name);
		put_value(&canonical, w->headers[i].value);
		buf_putc(&canonical, '\n');
	}
	buf_printf(&canonical, "\n%s\n%s", (const char *)names.p, w->body_hash);
	TRY(buf_status(&canonical));
	s3_sign_hash(canonical.p, canonical.len, hash);
	int n = snprintf(scope, sizeof scope, "%.8s/%s/%s/aws4_request", w->stamp, w->region, w->service);
	if (n >= (int)sizeof scope)
		return ERR(LIMIT_EXCEEDED, "the region's name is too long");
	n = snprintf(text, sizeof text, "AWS4-HMAC-SHA256\n%s\n%s\n%s", w->stamp, scope, hash);
	must(n < (int)sizeof text);
	TRY(signature(w, keys, str_of(text), hex));
	n = snprintf(out, S3_AUTHORIZATION_MAX, "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s", keys->access, scope,
		     (const char *)names.p, hex);
	return n < S3_AUTHORIZATION_MAX ? OK : ERR(LIMIT_EXCEEDED, "the request's headers are too long to be signed");
}
