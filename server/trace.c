/* trace.c: see trace.h. */
#include "server/trace.h"

#include <sodium.h>
#include <string.h>

enum { PARENT_LEN = 55 }; /* 00-<32>-<16>-<2> */

static void new_id(char *out, size_t hex)
{
	unsigned char bits[TRACE_ID_HEX / 2];

	do { /* all zeros is no id */
		randombytes_buf(bits, hex / 2);
	} while (sodium_is_zero(bits, hex / 2));
	sodium_bin2hex(out, hex + 1, bits, hex / 2);
}

void trace_span_id(char out[TRACE_SPAN_HEX + 1])
{
	new_id(out, TRACE_SPAN_HEX);
}

static bool is_id(const char *p, size_t n)
{
	return strspn(p, "0123456789abcdef") >= n && strspn(p, "0") < n;
}

json_t *trace_of_caller(const char *t)
{
	char span[TRACE_SPAN_HEX + 1];
	size_t n = t ? strlen(t) : 0;

	/* A later version may have more behind it; version ff is none. */
	if (n < PARENT_LEN || strspn(t, "0123456789abcdef") < 2 || memcmp(t, "ff", 2) == 0 || t[2] != '-' || t[35] != '-' || t[52] != '-' ||
	    !is_id(t + 3, TRACE_ID_HEX) || !is_id(t + 36, TRACE_SPAN_HEX) || strspn(t + 53, "0123456789abcdef") < 2 ||
	    (n > PARENT_LEN && (memcmp(t, "00", 2) == 0 || t[PARENT_LEN] != '-')))
		return NULL;
	trace_span_id(span);
	int low = t[54] <= '9' ? t[54] - '0' : t[54] - 'a' + 10;
	return json_pack("{s:s#, s:s, s:s#, s:b}", "trace_id", t + 3, TRACE_ID_HEX, "span_id", span, "parent_id", t + 36, TRACE_SPAN_HEX,
			 "sampled", low & 1);
}

void trace_again(json_t *trace)
{
	char span[TRACE_SPAN_HEX + 1];

	trace_span_id(span);
	if (trace)
		(void)json_object_set_new(trace, "span_id", json_string(span));
}

json_t *trace_new(void)
{
	char id[TRACE_ID_HEX + 1], span[TRACE_SPAN_HEX + 1];

	new_id(id, TRACE_ID_HEX);
	trace_span_id(span);
	return json_pack("{s:s, s:s, s:b}", "trace_id", id, "span_id", span, "sampled", 1);
}
