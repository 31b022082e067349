/* buf.h: a growable byte buffer with a hard maximum and a sticky error, for building headers, JSON and messages.
 * Writers may ignore each put's outcome and ask buf_status() once at the end. */
#pragma once
#include "base/err.h"
#include "base/str.h"

struct buf {
	unsigned char *p;
	size_t len, cap, max;
	enum err failed;       /* the first error; later puts do nothing */
};

#define BUF_INIT(max_bytes) ((struct buf){ .max = (max_bytes) })

void buf_free(struct buf *b);                       /* for CLEANUP(buf_free) too; b is empty and usable afterwards */
void buf_put(struct buf *b, const void *p, size_t n);
void buf_puts(struct buf *b, const char *z);
void buf_putc(struct buf *b, unsigned char c);
void buf_fill(struct buf *b, unsigned char c, size_t n);
void buf_le16(struct buf *b, uint16_t v);
void buf_le32(struct buf *b, uint32_t v);
void buf_le64(struct buf *b, uint64_t v);
void buf_printf(struct buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
void buf_json_str(struct buf *b, struct str s);     /* with quotes; bytes that are not UTF-8 become U+FFFD */
void buf_json_member(struct buf *b, const char *key, struct str s);  /* key: as it stands in front of the text: ",\"name\":" */
void buf_base64(struct buf *b, const void *p, size_t n); /* RFC 4648, padded, without quotes */
FALLIBLE enum err buf_reserve(struct buf *b, size_t more, unsigned char **at_out); /* len grows by `more` */
FALLIBLE enum err buf_status(const struct buf *b);
/* Appends the decoded bytes; ERR_VALIDATION_FAILED for anything but canonical padded base64. */
FALLIBLE enum err buf_unbase64(struct buf *b, struct str text);
/* Exactly `bytes` of them, from twice as many hex digits in lower case; else ERR_VALIDATION_FAILED. */
FALLIBLE enum err buf_unhex(struct str text, unsigned char *out, size_t bytes);
