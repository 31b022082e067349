/* assets.c: see assets.h. A file is compressed when it is first asked for, as small as can be, and kept: a start should not wait for
 * files that nobody may want. */
#include "api/assets.h"

#include <stdio.h>
#include <xxhash.h>

#include "api/api_impl.h"
#include "api/form.h"
#include "base/mem.h"

enum { PACK_MIN = 512 };

struct packed {
	char mark[20];                  /* of the bytes; "": not asked for yet */
	struct buf coded[CODING_COUNT];
};

struct assets_packed {
	size_t count;
	struct packed files[];
};

FALLIBLE enum err assets_packed_new(struct assets_packed **out)
{
	size_t n = 0;

	while (assets[n].path)
		n++;
	*out = mem_zalloc(1, sizeof **out + n * sizeof(*out)->files[0]);
	NEED(*out, "cannot keep the page's files");
	(*out)->count = n;
	return OK;
}

void assets_packed_free(struct assets_packed *p)
{
	for (size_t i = 0; p && i < p->count; i++)
		for (size_t c = 0; c < CODING_COUNT; c++)
			buf_free(&p->files[i].coded[c]);
	mem_free(p);
}

const struct asset *assets_find(const char *path)
{
	for (const struct asset *a = assets; a->path; a++)
		if (strcmp(a->path, path) == 0)
			return a;
	return NULL;
}

FALLIBLE enum err assets_send(struct req *r, const char *content_type, const struct asset *a)
{
	struct packed *p = &r->api->packed->files[a - assets];
	struct str bytes = { (const char *)a->begin, (size_t)(a->end - a->begin) };
	struct form form;

	if (!p->mark[0])
		snprintf(p->mark, sizeof p->mark, "%016jx", (uintmax_t)XXH3_64bits(bytes.p, bytes.n));
	form_decide(r, p->mark, &form);
	struct buf *coded = &p->coded[form.coding];
	if (form.coding && !form.same && bytes.n >= PACK_MIN && coded->len == 0) {
		*coded = BUF_INIT(2 * bytes.n + 1024);
		enum err e = coding_apply(form.coding, true, bytes, coded);
		if (e)
			buf_free(coded);
		TRY(e);
	}
	if (coded->len > 0 && coded->len < bytes.n)
		bytes = (struct str){ (const char *)coded->p, coded->len };
	else
		form.coding = CODING_NONE;
	return req_static(r, content_type, bytes, &form);
}
