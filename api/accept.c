/* accept.c: see accept.h. */
#include "api/accept.h"

#include <strings.h>

#include "base/str.h"

/* Cuts the text before the next c off, without white space around it. false: nothing is left. */
static bool take_until(struct str *rest, char c, struct str *out)
{
	const char *end = rest->n ? memchr(rest->p, c, rest->n) : NULL;
	size_t n = end ? (size_t)(end - rest->p) : rest->n;

	if (rest->n == 0)
		return false;
	*out = (struct str){ rest->p, n };
	*rest = end ? (struct str){ end + 1, rest->n - n - 1 } : (struct str){ rest->p + n, 0 };
	while (out->n && strchr(" \t", out->p[0]))
		*out = (struct str){ out->p + 1, out->n - 1 };
	while (out->n && strchr(" \t", out->p[out->n - 1]))
		out->n--;
	return true;
}

/* "0.25" in thousandths; what is no quality counts as one. */
static int thousandths(struct str text)
{
	int value = 0, digits = 0;

	if (text.n == 0 || (text.p[0] != '0' && text.p[0] != '1') || (text.n > 1 && text.p[1] != '.'))
		return ACCEPT_CERTAIN;
	for (size_t i = 2; i < text.n && digits < 3; i++, digits++)
		if (text.p[i] >= '0' && text.p[i] <= '9')
			value = 10 * value + (text.p[i] - '0');
	for (; digits < 3; digits++)
		value *= 10;
	return text.p[0] == '1' ? ACCEPT_CERTAIN : value;
}

/* 3: the name itself, 2: its type, 1: anything, 0: something else. */
static int fits(struct str range, const char *name)
{
	const char *slash = strchr(name, '/');

	if (range.n == strlen(name) && strncasecmp(range.p, name, range.n) == 0)
		return 3;
	if (slash && range.n == (size_t)(slash - name) + 2 && strncasecmp(range.p, name, range.n - 1) == 0 && range.p[range.n - 1] == '*')
		return 2;
	return str_is(range, slash ? "*/*" : "*");
}

int accept_quality(const char *list, const char *name)
{
	struct str rest = str_of(list ? list : "*/*"), entry, part;
	int best = 0, quality = list ? 0 : ACCEPT_CERTAIN;

	while (list && take_until(&rest, ',', &entry)) {
		int how = take_until(&entry, ';', &part) ? fits(part, name) : 0, q = ACCEPT_CERTAIN;
		while (take_until(&entry, ';', &part))
			if (part.n > 2 && (part.p[0] | 0x20) == 'q' && part.p[1] == '=')
				q = thousandths((struct str){ part.p + 2, part.n - 2 });
		if (how > best) {
			best = how;
			quality = q;
		}
	}
	return quality;
}

bool accept_has(const char *tags, const char *etag)
{
	return tags && (strcmp(tags, "*") == 0 || strstr(tags, etag));
}
