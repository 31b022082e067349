/* audit.c: see audit.h. */
#include "server/audit.h"

#include <stdio.h>

#include "base/jval.h"
#include "server/journal.h"
#include "server/parts.h"
#include "server/service_clock.h"

void audit_add(struct server *s, const struct audit_entry *entry, done_fn fn, void *user)
{
	CLEANUP(buf_free) struct buf request = BUF_INIT(AUDIT_REQUEST_MAX);
	struct journal_txn *t = journal_txn_new(s->journal);

	if (entry->request && jval_dump(entry->request, &request) != OK) {
		buf_free(&request);
		err_clear();
	}
	journal_put_audit(t, &(struct journal_audit){ .at_ms = clock_wall_ms(), .uid = entry->uid, .token = entry->token,
						      .policy = entry->policy, .action = entry->action, .subject = entry->subject,
						      .job = entry->job, .request = { (char *)request.p, request.len } });
	journal_commit(s->journal, t, fn, user);
}

struct page {
	struct buf *out;
	uint32_t left, shown;
	int64_t last;
	bool more;
};

static void put_text(struct buf *b, const char *key, const char *text)
{
	if (text[0])
		buf_json_member(b, key, str_of(text));
}

static enum err put_row(void *user, const struct journal_audit *a)
{
	struct page *p = user;
	char when[CLOCK_TEXT_MAX];

	if (p->left == 0) {
		p->more = true;
		return OK;
	}
	p->left--;
	p->last = a->id;
	buf_printf(p->out, "%s{\"id\":\"%jd\",\"time\":\"%s\",\"uid\":%ju", p->shown++ ? "," : "", (intmax_t)a->id,
		   clock_text(a->at_ms, when), (uintmax_t)a->uid);
	put_text(p->out, ",\"token\":", a->token);
	put_text(p->out, ",\"policy\":", a->policy);
	put_text(p->out, ",\"action\":", a->action);
	put_text(p->out, ",\"subject\":", a->subject);
	put_text(p->out, ",\"job\":", a->job);
	if (a->request.n) {
		buf_puts(p->out, ",\"request\":");
		buf_put(p->out, a->request.p, a->request.n);
	}
	buf_putc(p->out, '}');
	return buf_status(p->out);
}

FALLIBLE enum err audit_list(struct server *s, struct str before, uint32_t limit, struct buf *out)
{
	struct page page = { .out = out, .left = limit };
	uint64_t from = 0;

	if (before.n && (!str_to_u64(before, &from) || from > INT64_MAX))
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	buf_puts(out, "{\"audit\":[");
	TRY(journal_read_audit(s->journal, (int64_t)from, limit + 1, put_row, &page));
	buf_putc(out, ']');
	if (page.more)
		buf_printf(out, ",\"next_page_token\":\"%jd\"", (intmax_t)page.last);
	buf_putc(out, '}');
	return buf_status(out);
}
