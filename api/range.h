/* range.h: one range of an answer's bytes (RFC 9110, 14). */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { RANGE_TEXT_MAX = 80 };

struct range {
	uint64_t from, bytes;
};

/* Reads "bytes=0-99", "bytes=100-" or "bytes=-100" against an answer of so many bytes. Another unit, several ranges and what is no range
 * ask for all bytes: *out stays as it is. false: none of the range's bytes is there. */
bool range_read(const char *text, uint64_t of, struct range *out);
/* "bytes 0-99/1000", of a Content-Range; NULL: of a 416. */
const char *range_text(const struct range *range, uint64_t of, char out[RANGE_TEXT_MAX]);
