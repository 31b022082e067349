/* s3_http.h: one HTTP request and its answer at a time, over connections that are kept. Knows nothing of S3 but its headers.
 *
 * Each connection is a libcurl easy handle, driven by the thread that calls: a transfer needs no other thread to wake up, and memory is
 * sent from and filled where it lies. Redirects are not followed, no proxy is asked, no cookie kept. */
#pragma once
#include "io/digest.h"
#include "store/s3_answer.h"
#include "store/s3_sign.h"

#define S3_HTTP_CA_SYSTEM "/etc/ssl/certs/ca-certificates.crt"

struct s3_http;

struct s3_http_config {
	const char *peer;              /* the server, in errors' texts; borrowed. NULL: "the object storage" */
	struct str ca_pem;
	uint32_t connections;
	int64_t connect_ms, stall_ms;
	bool (*address_ok)(void *user, const struct sockaddr *address);
	void *user;
};

enum s3_outcome {
	S3_ANSWERED,                   /* whatever its status */
	S3_UNSENT,                     /* nobody got the request: not connected */
	S3_BROKEN,                     /* the connection ended before the answer did: the request may have been carried out */
	S3_STALLED,                    /* likewise, after stall_ms without a byte */
	S3_LATE,                       /* the deadline passed */
	S3_IMPOSSIBLE,                 /* an address that is refused, a certificate that is not trusted, no memory, cancelled: no repeats */
};

struct s3_exchange {
	/* asked */
	const char *verb, *url;
	const struct s3_pair *headers;
	size_t header_count;
	const void *body;              /* NULL: the request has none */
	size_t body_bytes;
	int64_t deadline_ms, stall_ms; /* stall_ms 0: the configuration's */
	const struct s3_call *call;    /* may be NULL */
	/* The request gets a connection of its own: on a kept connection that ends without an answer libcurl sends a request again, and
	 * does not tell. */
	bool is_once;
	/* A success goes to `into`, whole, checked by `begin`, or is appended to `text`. An error's body goes to `text`, up to its max. */
	void *into;                    /* it may be in a segment, and shrink */
	size_t into_bytes;
	struct digest_stream *digest;  /* of the bytes in `into`, added as they come; NULL: they are not hashed */
	struct buf *text;
	/* Looks at the head of a success before its body is taken. */
	enum err (*begin)(void *user, const struct s3_answer *a);
	void *user;
	/* found */
	struct s3_answer answer;
	size_t got;                    /* bytes in `into` */
	bool is_long;                  /* the body was longer than `into`, or than text's max */
};

FALLIBLE enum err s3_http_new(const struct s3_http_config *config, struct s3_http **out);
void s3_http_free(struct s3_http *h);          /* NULL is fine */
/* S3_ANSWERED: OK. Else an error, recorded. */
enum err s3_http_do(struct s3_http *h, struct s3_exchange *x, enum s3_outcome *outcome_out);
uint16_t s3_http_port(const char *url);         /* of "http[s]://HOST[:PORT]" */
void s3_http_count(const struct s3_http *h, struct s3_counts *out);
