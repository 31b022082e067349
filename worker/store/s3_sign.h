/* s3_sign.h: requests in S3's canonical form, signed with AWS's Signature Version 4. Pure: no clock, no network, no files.
 *
 * Our own because the packaged libcurl's signer (7.88) signs only two headers and breaks on "=" in keys and on queries without a value.
 * SHA-256, HMAC and MD5 are OpenSSL's libcrypto: it uses the CPU's instructions, has the MD5 that DeleteObjects wants (libsodium has none),
 * and libcurl brings it along anyway. */
#pragma once
#include "base/buf.h"
#include "base/err.h"

enum { S3_ACCESS_MAX = 256, S3_SECRET_MAX = 512, S3_TOKEN_MAX = 8192, S3_HASH_HEX = 65, S3_AUTHORIZATION_MAX = 1024, S3_STAMP_MAX = 20 };

/* An identity. token: "", unless the keys are temporary. */
struct s3_keys {
	char access[S3_ACCESS_MAX], secret[S3_SECRET_MAX], token[S3_TOKEN_MAX];
};

/* A header (name in lower case) or a parameter of a query (neither part encoded). value "" stands for a parameter without one. */
struct s3_pair {
	const char *name, *value;
};

struct s3_to_sign {
	const char *verb;
	const char *path;              /* encoded: s3_sign_encode() */
	const char *query;             /* canonical: s3_sign_query() */
	const struct s3_pair *headers; /* ascending by name, host among them */
	size_t header_count;
	const char *body_hash;         /* lower-case hex, or "UNSIGNED-PAYLOAD" */
	const char *region, *service;
	const char *stamp;             /* "20150830T123600Z", as in the header x-amz-date */
};

#define S3_UNSIGNED "UNSIGNED-PAYLOAD"

/* Appends bytes as RFC 3986 has them: all but A-Z a-z 0-9 - . _ ~ as %XX. keep: a byte that stays too ('/' of a path), 0: none. */
void s3_sign_encode(struct buf *out, struct str bytes, char keep);
/* Appends name=value pairs, sorted and encoded. */
void s3_sign_query(struct buf *out, const struct s3_pair *pairs, size_t count);
void s3_sign_hash(const void *bytes, size_t n, char hex_out[S3_HASH_HEX]);
/* Appends the base64 of the bytes' MD5, for Content-MD5. */
FALLIBLE enum err s3_sign_md5(struct buf *out, struct str bytes);
void s3_sign_stamp(int64_t wall_ms, char out[S3_STAMP_MAX]);
/* The value of the header Authorization. ERR_LIMIT_EXCEEDED: keys or headers are too long for it. */
FALLIBLE enum err s3_sign(const struct s3_to_sign *what, const struct s3_keys *keys, char out[S3_AUTHORIZATION_MAX]);
