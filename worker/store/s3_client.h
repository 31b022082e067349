/* s3_client.h: objects of one bucket, over HTTP: what s3.c, the store, stands on. Only files of worker/store include this.
 *
 * Every function blocks its caller's thread and may be called from any number of threads at once: a pool of connections stands behind
 * them, which stay open between calls. A call ends by its deadline: `call_ms` of the configuration, or sooner that of struct s3_call.
 * A transfer that moves next to nothing for `stall_ms` ends with ERR_STORAGE_STALLED before its deadline, and is repeated if there is time.
 *
 * Keys are relative: the configured prefix stands before each, here and in what a list gives. They are bytes of UTF-8, 1 to 1,024 with
 * the prefix. Memory that is sent or filled is the caller's and is used in place.
 *
 * Repeats: answers 500, 502, 503 (SlowDown), 504 and 429, connections that break and transfers that stall are repeated with full jitter, by
 * a budget that all calls share, so that a storage in trouble is not flooded. Repeating is safe for every function here: see s3_put() and
 * s3_upload_complete() for conditions.
 *
 * Errors (err_last() has S3's code, message, request id and the HTTP status in its text):
 *   ERR_NOT_FOUND            no such key, upload, or range behind the object's end (ERR_RANGE_INVALID for the latter)
 *   ERR_CHECKPOINT_EXISTS    the condition of a write does not hold (412, or 409 after all repeats)
 *   ERR_CHECKPOINT_REPLACED  the object is not the one whose ETag was told to s3_get
 *   ERR_FORBIDDEN            signature, credentials or rights (403, 401, expired tokens, a clock that differs)
 *   ERR_STORAGE_GONE         no such bucket, another region, a redirect, an address that is refused, no connection
 *   ERR_STORAGE_STALLED      no answer or no progress in time; SlowDown after all repeats
 *   ERR_STORAGE_FULL         507, QuotaExceeded and the like
 *   ERR_STORAGE_IO           5xx after all repeats, an answer that contradicts itself or what was asked: lengths, ranges, checksums, XML
 *   ERR_UNSUPPORTED          501: the server lacks the function
 *   ERR_LIMIT_EXCEEDED       an answer longer than what the caller takes
 *   ERR_CANCELLED            struct s3_call's `go_on` said so */
#pragma once
#include <sys/socket.h>

#include "base/buf.h"
#include "base/err.h"

enum {
	S3_ETAG_MAX = 128,             /* with quotes and NUL, as HTTP has it */
	S3_MARK_MAX = 65,
	S3_UPLOAD_ID_MAX = 1024,
	S3_KEY_MAX = 1024,
	S3_PARTS_MAX = 10000,
	S3_LIST_PAGE = 1000,
};
#define S3_PART_MIN (UINT64_C(5) << 20)  /* of all parts but the last */
#define S3_PART_MAX (UINT64_C(5) << 30)

struct s3;                             /* a bucket below a prefix, at one endpoint, as one identity */

enum s3_credentials_from {
	S3_CREDENTIALS_CHAIN,          /* AWS's order: environment, web identity, file, container, instance */
	S3_CREDENTIALS_ENV,
	S3_CREDENTIALS_FILE,           /* `credentials_file`, section `profile` */
	S3_CREDENTIALS_WEB_IDENTITY,   /* AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE, by STS */
	S3_CREDENTIALS_CONTAINER,      /* AWS_CONTAINER_CREDENTIALS_(RELATIVE|FULL)_URI */
	S3_CREDENTIALS_INSTANCE,       /* IMDSv2, at AWS_EC2_METADATA_SERVICE_ENDPOINT or 169.254.169.254 */
	S3_CREDENTIALS_NONE,           /* requests are not signed */
};

/* All texts are copied. 0 and NULL mean the default that is given here. */
struct s3_config {
	const char *endpoint;          /* "http[s]://HOST[:PORT]"; NULL: https://s3.REGION.amazonaws.com */
	const char *region;            /* NULL: AWS_REGION, AWS_DEFAULT_REGION, else us-east-1 */
	const char *bucket;
	const char *prefix;            /* stands before each key as it is: "", "runs/" */
	bool path_style;               /* ENDPOINT/BUCKET/KEY, else BUCKET.ENDPOINT/KEY (see there for exceptions) */
	enum s3_credentials_from credentials;
	const char *credentials_file;  /* NULL: AWS_SHARED_CREDENTIALS_FILE, else ~/.aws/credentials */
	const char *profile;           /* NULL: AWS_PROFILE, else "default" */
	struct str ca_pem;             /* authorities that TLS trusts, copied; empty: AWS_CA_BUNDLE, else the system's, read at s3_open */
	uint32_t connections;          /* at most so many at once: 32 */
	int64_t connect_ms;            /* 5 s */
	int64_t stall_ms;              /* with less than 64 KiB either way: 20 s */
	int64_t call_ms;               /* a call with all its repeats: 5 min */
	uint32_t tries;                /* of one call: 6 */

	/* May this address be connected to? NULL: every address. Called for the endpoint and for those of credentials, from any thread. */
	bool (*address_ok)(void *user, const struct sockaddr *address);
	/* Reads a small file (credentials, tokens, CA): a sandbox that opens no paths answers from what it took along. NULL: the file. */
	enum err (*read_file)(void *user, const char *path, struct buf *out);
	void *user;
};

FALLIBLE enum err s3_open(const struct s3_config *config, struct s3 **out);    /* connects nowhere. ERR_CONFIG */
void s3_close(struct s3 *s3);          /* no call may be under way; NULL is fine */

/* A call may bring this along; NULL for none. */
struct s3_call {
	int64_t deadline_ms;           /* clock_mono_ms() by which it ends; 0: call_ms from now */
	/* Asked about each second, and whenever bytes moved: bytes of this try that went either way. False ends it with ERR_CANCELLED. */
	bool (*go_on)(void *user, uint64_t moved);
	void *user;
	/* Set for a write that was tried again although a try before may have been carried out, or whose end is not known: what is there
	 * may be, or may have been, its object, whatever it returns. NULL: not wanted. */
	bool *unsure_out;
};

struct s3_object {
	uint64_t bytes;
	int64_t mtime_ms;              /* Last-Modified, of whole seconds where HTTP says it; 0: not known */
	char etag[S3_ETAG_MAX];
	char mark[S3_MARK_MAX];        /* that it was written with; "": none, or a list, which does not tell */
};

/* ---- reading ---- */

/* Fills into[0 .. n) with the object's bytes from offset on: all n, or an error. etag: the object must be this one
 * (ERR_CHECKPOINT_REPLACED); NULL: any. out may be NULL. n > 0. */
FALLIBLE enum err s3_get(struct s3 *s3, const char *key, uint64_t offset, void *into, size_t n, const char *etag,
			 const struct s3_call *call, struct s3_object *out);
/* Appends a whole object to `out`; beyond out's max ERR_LIMIT_EXCEEDED. Compared with the checksum that the server keeps, if it has one.
 * is may be NULL. */
FALLIBLE enum err s3_get_all(struct s3 *s3, const char *key, const struct s3_call *call, struct buf *out, struct s3_object *is);
FALLIBLE enum err s3_head(struct s3 *s3, const char *key, const struct s3_call *call, struct s3_object *out);

/* Called for each entry: a key (relative, whole), or, with a delimiter, a common prefix that ends in it; `object` is NULL then. */
typedef enum err (*s3_entry_fn)(void *user, struct str key, const struct s3_object *object);
/* All keys that begin with `prefix`, behind `after` (NULL: from the first), ascending; with a delimiter ('/', else 0) each page has its
 * keys before its common prefixes. at_most 0: all. fn's error stops it. Pages are asked for as fn takes them: what changes meanwhile may
 * be seen or not. */
FALLIBLE enum err s3_list(struct s3 *s3, const char *prefix, char delimiter, const char *after, uint64_t at_most,
			  const struct s3_call *call, s3_entry_fn fn, void *user);

/* ---- writing ---- */

enum s3_if { S3_IF_ANY, S3_IF_NONE, S3_IF_ETAG };     /* S3_IF_NONE: nothing has the key. S3_IF_ETAG: what has it is `etag` */
struct s3_condition {
	enum s3_if is;
	const char *etag;
};
#define S3_ALWAYS ((struct s3_condition){ S3_IF_ANY, NULL })

/* Writes a whole object; OK: it is durable, and every later read sees it. A conditional one whose answer was lost is settled by a look:
 * if the key has the object of this very call (each carries a random mark as metadata), that is OK, not ERR_CHECKPOINT_EXISTS.
 * mark: NULL, or 1 to 64 letters and digits that take the random mark's place: a later call, of another process too, that
 * brings the same mark counts the object as its own. etag_out may be NULL. */
FALLIBLE enum err s3_put(struct s3 *s3, const char *key, const void *bytes, size_t n, struct s3_condition condition, const char *mark,
			 const struct s3_call *call, char etag_out[S3_ETAG_MAX]);
/* Nothing there is fine. */
FALLIBLE enum err s3_delete(struct s3 *s3, const char *key, const struct s3_call *call);
/* The same of one object: another that has the key by now stays, where the server heeds If-Match of a DELETE. */
FALLIBLE enum err s3_delete_if(struct s3 *s3, const char *key, const char *etag, const struct s3_call *call);
/* Up to S3_LIST_PAGE keys in one request; the first that could not be deleted is the error, when all others are. etags: of the objects
 * that go; another that has the key by now stays, where the server heeds ETags here. NULL: whatever is there. */
FALLIBLE enum err s3_delete_many(struct s3 *s3, const char *const *keys, const char *const *etags, size_t count,
				 const struct s3_call *call);
/* Copies a whole object of up to 5 GiB within the bucket, on the server. from_etag: as in s3_get. mark: of the copy, as of s3_put(); NULL:
 * the one of what is copied. Takes no condition: servers heed none here. */
FALLIBLE enum err s3_copy(struct s3 *s3, const char *from, const char *from_etag, const char *to, const char *mark,
			  const struct s3_call *call, char etag_out[S3_ETAG_MAX]);

/* ---- multipart uploads: an object in parts, seen by nobody before s3_upload_complete() ---- */

struct s3_part {
	uint32_t number;               /* 1 to S3_PARTS_MAX */
	uint32_t crc32;                /* of its bytes */
	bool has_crc;                  /* false: copied on the server, or listed by one that keeps no checksums */
	uint64_t bytes;
	char etag[S3_ETAG_MAX];
};

/* mark: as of s3_put(). id_out holds S3_UPLOAD_ID_MAX. */
FALLIBLE enum err s3_upload_begin(struct s3 *s3, const char *key, const char *mark, const struct s3_call *call, char *id_out);
/* Sends bytes[0 .. n) as part `number`, with their CRC-32: the one that digest.h computes by the CPU and can combine. Sent again, a part
 * replaces the one of its number. Sets *out. */
FALLIBLE enum err s3_upload_part(struct s3 *s3, const char *key, const char *id, uint32_t number, const void *bytes, size_t n,
				 const struct s3_call *call, struct s3_part *out);
/* The same from bytes of an object in the bucket, [offset, offset + n), on the server. */
FALLIBLE enum err s3_upload_part_copy(struct s3 *s3, const char *key, const char *id, uint32_t number, const char *from,
				      const char *from_etag, uint64_t offset, uint64_t n, const struct s3_call *call,
				      struct s3_part *out);
/* Makes the object of the parts, which ascend by number. If all have a CRC, the server compares theirs together. A lost answer is
 * settled by a look, as of s3_put(). */
FALLIBLE enum err s3_upload_complete(struct s3 *s3, const char *key, const char *id, const struct s3_part *parts, size_t count,
				     struct s3_condition condition, const struct s3_call *call, char etag_out[S3_ETAG_MAX]);
/* Nothing there is fine. */
FALLIBLE enum err s3_upload_abort(struct s3 *s3, const char *key, const char *id, const struct s3_call *call);

typedef enum err (*s3_upload_fn)(void *user, struct str key, const char *id, int64_t begun_ms);
/* Uploads under way whose keys begin with `prefix`. */
FALLIBLE enum err s3_uploads_list(struct s3 *s3, const char *prefix, const struct s3_call *call, s3_upload_fn fn, void *user);
typedef enum err (*s3_part_fn)(void *user, const struct s3_part *part);
/* Parts that an upload has, ascending; ERR_NOT_FOUND: it is gone. */
FALLIBLE enum err s3_upload_parts_list(struct s3 *s3, const char *key, const char *id, const struct s3_call *call, s3_part_fn fn,
				       void *user);

/* ---- the server ---- */

/* The time by the server's clock, from the header Date of its latest answer, to a second; this host's before the first one. Ages of
 * objects go by it: their times are the server's, and this host's clock may be any. */
int64_t s3_now_ms(const struct s3 *s3);

/* Finds out, with an object `key` that it writes and deletes, whether the server heeds If-None-Match and If-Match. Without, a commit
 * could overwrite another: ERR_UNSUPPORTED, with the reason. Answers of rights and the like are errors of their own. */
FALLIBLE enum err s3_probe_conditions(struct s3 *s3, const char *key, const struct s3_call *call);

/* Bytes sent and received as objects' content since s3_open, repeats included. */
struct s3_counts {
	uint64_t sent_bytes, received_bytes, requests, repeats, connections;
};
struct s3_counts s3_counts(const struct s3 *s3);
