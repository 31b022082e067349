/* answers.c: see answers.h. A table with one place per hash: a job that is watched stays, one that is not makes room. libmicrohttpd
 * counts references, so an entry can go while it is still being sent. A large record is not kept: it is counted as unread.h does. */
#include "api/answers.h"

#include <stdio.h>

#include "api/api_impl.h"
#include "base/mem.h"
#include "server/job.h"
#include "server/parts.h"
#include "server/unread.h"

enum { PLACES = 512, ETAG_MAX = 64 };

struct place {
	char id[JOB_ID_LEN + 1];
	uint64_t version;
	char etag[ETAG_MAX];
	struct MHD_Response *full, *same;
};

struct answers {
	struct place places[PLACES];
};

FALLIBLE enum err answers_new(struct answers **out)
{
	*out = mem_zalloc(1, sizeof **out);
	return *out ? OK : ERR(NO_MEMORY, "cannot make the table of answers");
}

static void clear_place(struct place *p)
{
	if (p->full)
		MHD_destroy_response(p->full);
	if (p->same)
		MHD_destroy_response(p->same);
	*p = (struct place){ 0 };
}

void answers_free(struct answers *a)
{
	for (size_t i = 0; a && i < PLACES; i++)
		clear_place(&a->places[i]);
	mem_free(a);
}

static struct MHD_Response *make_response(struct str text, const char *etag)
{
	struct MHD_Response *m =
		MHD_create_response_from_buffer(text.n, (void *)(uintptr_t)text.p, MHD_RESPMEM_MUST_COPY);

	if (m && (MHD_add_response_header(m, MHD_HTTP_HEADER_ETAG, etag) != MHD_YES ||
		  req_dress(m, "application/json", false) != OK)) {
		MHD_destroy_response(m);
		m = NULL;
	}
	return m;
}

static FALLIBLE enum err fill_place(struct req *r, struct place *p, struct str id, struct str text, uint64_t version)
{
	clear_place(p);
	snprintf(p->etag, sizeof p->etag, "\"%jx-%jx\"", (uintmax_t)r->core->boot, (uintmax_t)version);
	p->full = make_response(text, p->etag);
	p->same = make_response(STR(""), p->etag);
	if (!p->full || !p->same) {
		clear_place(p);
		return ERR(NO_MEMORY, "cannot make an answer");
	}
	memcpy(p->id, id.p, id.n);
	p->version = version;
	return OK;
}

FALLIBLE enum err answers_job(struct req *r, struct str id)
{
	uint64_t version = id.n == JOB_ID_LEN ? job_version(r->core, id) : 0;
	struct place *p = &r->api->answers->places[str_hash(id) % PLACES];
	bool may_keep = version != 0 && !r->suspended && r->refs == 1;
	struct buf b = BUF_INIT(64 << 20);
	struct str text;

	if (!may_keep || p->version != version || memcmp(p->id, id.p, JOB_ID_LEN) != 0) {
		TRY(job_text(r->core, id, &text));
		if (!may_keep || text.n > UNREAD_SMALL) {
			buf_put(&b, text.p, text.n);
			return req_json(r, 200, &b);
		}
		TRY(fill_place(r, p, id, text, version));
	}
	if (req_etag_matches(r, p->etag))
		return req_ready(r, 304, p->same);
	return req_ready(r, 200, p->full);
}
