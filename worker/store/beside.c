/* beside.c: see beside.h. */
#include "store/beside.h"

#include <stdio.h>
#include <string.h>

#include "base/str.h"
#include "store/manifest.h"

enum { LAST_MAX = 200 };               /* bytes of a component of a name (spec/ref.h) */

bool beside_path(const char *name, const char *page, char path[BESIDE_MAX])
{
	const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;

	return strlen(last) <= LAST_MAX &&
	       snprintf(path, BESIDE_MAX, "%.*s.%s%s", (int)(last - name), name, last, page) < BESIDE_MAX;
}

bool beside_is(const char *name)
{
	struct str s = str_of(name);

	if (str_ends(s, ".tmp"))
		s.n -= 4;
	return name[0] == '.' && s.n > strlen(MANIFEST_NAME) && str_ends(s, MANIFEST_NAME);
}
