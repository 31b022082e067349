/* s3_answer.h: what a server answered: its headers, its words, and what they mean for the call. Pure: bytes of a server that may lie. */
#pragma once
#include "base/buf.h"
#include "base/err.h"
#include "store/s3_client.h"

enum { S3_WORD_MAX = 64, S3_WORDS_MAX = 320 };
#define S3_MARK_HEADER "x-amz-meta-dcpd-mark"

struct s3_answer {
	long status;                   /* 0: no answer */
	bool has_length, has_range, is_composite;
	uint64_t length;               /* Content-Length */
	uint64_t range_begin, range_end, range_total;  /* Content-Range: [begin, end) of total; total 0: not told */
	int64_t mtime_ms, date_ms;     /* 0: not told */
	uint64_t retry_after_s;
	char etag[S3_ETAG_MAX];
	char request_id[S3_WORD_MAX], region[S3_WORD_MAX], date[S3_WORD_MAX], crc32[16], mark[S3_MARK_MAX];
	/* of an error's XML */
	char code[S3_WORD_MAX], message[S3_WORDS_MAX];
};

/* Takes a line of an answer's head, with or without its end. A status line begins a new answer and drops the lines before it. */
void s3_answer_header(struct s3_answer *a, struct str line);
/* Takes S3's code, message, region and request id out of an error's body, if it is one. */
void s3_answer_words(struct s3_answer *a, struct str body);
/* Copies at most max - 1 bytes, for people to read: no control characters, and UTF-8. */
void s3_answer_put(char *out, size_t max, struct str text);

/* An ETag of XML, which some servers write without its quotes, as headers have it. False: it is none. */
bool s3_answer_etag(char out[S3_ETAG_MAX], struct str text);

/* After an answer that is no success. */
enum s3_verdict { S3_FINAL, S3_REPEAT, S3_SLOW, S3_RENEW };    /* S3_SLOW: repeat, later; S3_RENEW: once more with new credentials */
/* Records the error, with the server's words; never OK. reads: a GET or HEAD of an object, whose 412 is about its ETag. */
enum err s3_answer_error(const struct s3_answer *a, bool reads, enum s3_verdict *verdict_out);
