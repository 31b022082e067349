/* answers.c: see answers.h. A table with one place per hash: a job that is watched stays, one that is not makes room. libmicrohttpd
 * counts references, so an entry can go while it is still being sent. A large record is not kept: it is counted as unread.h does. */
#include "api/answers.h"

#include <stdio.h>
#include <xxhash.h>

#include "api/api_impl.h"
#include "api/form.h"
#include "base/mem.h"
#include "server/job.h"
#include "server/parts.h"
#include "server/unread.h"

static const char no_id[] = "0000000000000000"; /* req_ready writes the request's */
_Static_assert(sizeof no_id == REQUEST_ID_OWN + 1, "as long as an id of ours");

enum { PLACES = 512, MARK_MAX = 20, CODE_MIN = 1 << 10 };

struct place {
	char id[JOB_ID_LEN + 1], mark[MARK_MAX];
	uint64_t version;
	struct {
		struct MHD_Response *full, *same;
	} coded[CODING_COUNT];        /* made when first asked for */
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
	for (size_t i = 0; i < CODING_COUNT; i++) {
		if (p->coded[i].full)
			MHD_destroy_response(p->coded[i].full);
		if (p->coded[i].same)
			MHD_destroy_response(p->coded[i].same);
	}
	*p = (struct place){ 0 };
}

void answers_free(struct answers *a)
{
	for (size_t i = 0; a && i < PLACES; i++)
		clear_place(&a->places[i]);
	mem_free(a);
}

static struct MHD_Response *make_response(struct str text, const struct form *form)
{
	struct MHD_Response *m =
		MHD_create_response_from_buffer(text.n, (void *)(uintptr_t)text.p, MHD_RESPMEM_MUST_COPY);

	if (m && (form_dress(form, m) != OK || req_dress(m, form->same ? NULL : "application/json", false, no_id) != OK)) {
		MHD_destroy_response(m);
		m = NULL;
	}
	return m;
}

static struct MHD_Response *make_full(struct str text, struct form form)
{
	CLEANUP(buf_free) struct buf coded = BUF_INIT(2 * UNREAD_SMALL);

	form.same = false;
	if (form.coding == CODING_NONE || text.n < CODE_MIN) {
		form.coding = CODING_NONE;
		return make_response(text, &form);
	}
	if (coding_apply(form.coding, false, text, &coded) != OK)
		return NULL;
	return make_response((struct str){ (const char *)coded.p, coded.len }, &form);
}

static FALLIBLE enum err fill_place(struct place *p, struct str text, struct form form)
{
	p->coded[form.coding].full = make_full(text, form);
	form.same = true;
	p->coded[form.coding].same = make_response(STR(""), &form);
	if (p->coded[form.coding].full && p->coded[form.coding].same)
		return OK;
	clear_place(p);
	return ERR(NO_MEMORY, "cannot make an answer");
}

/* The mark is the text's, as that of all other answers: versions begin anew when a record is read from the journal. */
FALLIBLE enum err answers_job(struct req *r, struct str id)
{
	uint64_t version = id.n == JOB_ID_LEN ? job_version(r->core, id) : 0;
	struct place *p = &r->api->answers->places[str_hash(id) % PLACES];
	bool may_keep = version != 0 && !r->suspended && !r->id_is_sent && r->refs == 1;
	struct buf b = BUF_INIT(64 << 20);
	struct form form;
	struct str text;

	if (!may_keep || p->version != version || memcmp(p->id, id.p, JOB_ID_LEN) != 0) {
		TRY(job_text(r->core, id, &text));
		if (!may_keep || text.n > UNREAD_SMALL) {
			buf_put(&b, text.p, text.n);
			return req_json(r, 200, &b);
		}
		clear_place(p);
		memcpy(p->id, id.p, id.n);
		snprintf(p->mark, sizeof p->mark, "%016jx", (uintmax_t)XXH3_64bits(text.p, text.n));
		p->version = version;
	}
	form_decide(r, p->mark, &form);
	if (!p->coded[form.coding].full) {
		TRY(job_text(r->core, id, &text));
		TRY(fill_place(p, text, form));
	}
	return req_ready(r, form.same ? 304 : 200, form.same ? p->coded[form.coding].same : p->coded[form.coding].full);
}
