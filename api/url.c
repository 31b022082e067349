/* url.c: see url.h. Splitting comes before decoding: "%2F" is a slash inside a checkpoint's name, not a separator. */
#include "api/url.h"

FALLIBLE enum err url_decode(char *text, size_t n, size_t *n_out)
{
	size_t to = 0;

	for (size_t i = 0; i < n; i++) {
		if (text[i] == '%') {
			int64_t c = str_hex((struct str){ text + i + 1, n - i - 1 }, 2);
			if (c < 0)
				return ERR(INVALID_REQUEST, "a bad percent escape in the URL");
			if (c == 0)
				return ERR(INVALID_REQUEST, "%%00 has no place in a URL");
			text[to++] = (char)c;
			i += 2;
		} else {
			text[to++] = text[i];
		}
	}
	if (to < n)
		text[to] = '\0';
	*n_out = to;
	return OK;
}

void url_encode(struct buf *b, struct str text)
{
	for (size_t i = 0; i < text.n; i++) {
		unsigned char c = (unsigned char)text.p[i];
		unsigned char low = c | 0x20;
		bool plain = (low >= 'a' && low <= 'z') || (c >= '0' && c <= '9') || (c && strchr("-._~", c));
		if (plain)
			buf_putc(b, c);
		else
			buf_printf(b, "%%%02X", c);
	}
}

FALLIBLE enum err url_split(char *text, struct str *parts, uint32_t max, uint32_t *count_out)
{
	size_t end = strlen(text), from = 1;
	uint32_t count = 0;

	if (text[0] != '/')
		return ERR(INVALID_REQUEST, "the path does not begin with '/'");
	for (size_t i = 1; i <= end && end > 1; i++) {
		size_t n = i - from;
		if (i < end && text[i] != '/')
			continue;
		if (n == 0)
			return ERR(NOT_FOUND, "the path has an empty component");
		if (count == max)
			return ERR(NOT_FOUND, "the path has more than %u components", max);
		text[i] = '\0';
		TRY(url_decode(text + from, n, &n));
		parts[count++] = (struct str){ text + from, n };
		from = i + 1;
	}
	*count_out = count;
	return OK;
}
