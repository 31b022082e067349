/* s3_impl.h: inside the S3 client: a request in S3's terms, and what carries it out. */
#pragma once
#include "store/s3_client.h"
#include "store/s3_credentials.h"
#include "store/s3_http.h"

enum { S3_QUERY_MAX = 10, S3_HEADERS_MAX = 16, S3_XML_MAX = 16 << 20 };

struct s3 {
	struct s3_http *http;
	struct s3_credentials *credentials;
	char *base;                    /* "https://HOST[:PORT]" of requests */
	char *host;                    /* as the header Host has it */
	char *path;                    /* encoded: "/BUCKET/" or "/" */
	char *bucket, *prefix, *region;
	int64_t call_ms, stall_ms;
	uint32_t tries;
	int budget;                    /* repeats that all calls still have: s3_call.c, atomic */
	uint64_t repeats;              /* atomic */
	int64_t clock_ms;              /* the server's wall clock less this host's monotonic one; 0: not told yet. Atomic */
};

/* A request to be signed and sent. Parameters and headers may point to memory that lives as long as the op. */
struct s3_op {
	struct s3 *s3;
	const struct s3_call *call;
	const char *verb;
	const char *key;               /* relative; NULL: the bucket itself */
	struct s3_pair query[S3_QUERY_MAX];
	size_t query_count;
	struct s3_pair headers[S3_HEADERS_MAX];        /* names in lower case; host and x-amz-date, … are added */
	size_t header_count;
	bool reads;                    /* its 412 is about the ETag of what it reads */
	bool is_once;                  /* no repeats */
	bool is_slow;                  /* the server may work for long before it answers */
	/* body, into, text, begin: as in s3_http.h */
	struct s3_exchange x;
	int64_t deadline_ms;           /* set by s3_run, once */
	bool is_ambiguous;             /* a try ended without an answer: it may have been carried out */
	char range[64];                /* room for a header's value */
};

struct s3_op s3_op(struct s3 *s3, const struct s3_call *call, const char *verb, const char *key);
void s3_op_query(struct s3_op *op, const char *name, const char *value);
void s3_op_header(struct s3_op *op, const char *name, const char *value);
/* If-None-Match or If-Match. */
void s3_op_condition(struct s3_op *op, struct s3_condition condition);
/* The header that lets the server check the bytes: x-amz-checksum-crc32, base64 into op's own room. */
void s3_op_checksum(struct s3_op *op, uint32_t crc32, char room[16]);
/* Sends it, again and again while that may help and time is left. OK: a 2xx, whose body is where op->x says. */
enum err s3_run(struct s3_op *op);
/* ERR_STORAGE_IO: the answer lacks an ETag. etag_out may be NULL. */
FALLIBLE enum err s3_op_etag(const struct s3_op *op, char *etag_out);

/* A mark that no other call has. */
FALLIBLE enum err s3_new_mark(char out[S3_MARK_MAX]);
/* After a conditional write ended with `e`: OK if the key has the object that this very write made, as its mark tells; else e. */
enum err s3_settle(struct s3_op *op, enum err e, const char *mark, char *etag_out);

/* ---- lists in pages ---- */

/* A list ends: by its deadline, and whatever the server says of a next page. */
struct s3_paging {
	struct s3_call call;           /* of the next page */
	int64_t end_ms;
	uint64_t entries, empty;       /* so far; pages without any, in a row */
};
void s3_paging_begin(const struct s3 *s3, const struct s3_call *call, struct s3_paging *out);
/* Before each further page; `entries` are those of the last one. */
FALLIBLE enum err s3_paging_next(const struct s3 *s3, struct s3_paging *p, uint64_t entries);

/* ---- answers and bodies of XML ---- */
FALLIBLE enum err s3_unescape(struct str v, struct buf *out);          /* replaces what out has by the bytes that %XX stand for */
FALLIBLE enum err s3_relative(const struct s3 *s3, const char *prefix, struct str key, struct str *out);
FALLIBLE enum err s3_iso_time(struct str text, int64_t *out);
void s3_xml_put(struct buf *out, struct str text);                     /* escaped */
