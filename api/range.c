/* range.c: see range.h. */
#include "api/range.h"

#include <stdio.h>

#include "base/num.h"
#include "base/str.h"

bool range_read(const char *text, uint64_t of, struct range *out)
{
	struct str all = str_of(text);
	uint64_t first = 0, last = UINT64_MAX;

	if (!str_starts(all, "bytes="))
		return true;
	all = (struct str){ all.p + 6, all.n - 6 };
	const char *minus = all.n ? memchr(all.p, '-', all.n) : NULL;
	if (!minus)
		return true;
	struct str a = { all.p, (size_t)(minus - all.p) }, b = { minus + 1, all.n - a.n - 1 };
	if ((a.n && !str_to_u64(a, &first)) || (b.n && !str_to_u64(b, &last)) || (a.n == 0 && b.n == 0) || (a.n && last < first))
		return true;
	if (a.n == 0) {
		uint64_t n = num_min(last, of);
		*out = (struct range){ of - n, n };
		return n > 0;
	}
	if (first >= of)
		return false;
	*out = (struct range){ first, num_min(last, of - 1) - first + 1 };
	return true;
}

const char *range_text(const struct range *range, uint64_t of, char out[RANGE_TEXT_MAX])
{
	if (range)
		snprintf(out, RANGE_TEXT_MAX, "bytes %ju-%ju/%ju", (uintmax_t)range->from, (uintmax_t)(range->from + range->bytes - 1),
			 (uintmax_t)of);
	else
		snprintf(out, RANGE_TEXT_MAX, "bytes */%ju", (uintmax_t)of);
	return out;
}
