/* job_ops.c: what callers do to jobs that exist: cancel, retry, list. */
#include <stdio.h>

#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/near.h"
#include "base/num.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/trace.h"

static FALLIBLE enum err find_owned(struct server *s, const struct principal *who, struct str id, struct job **out)
{
	struct job *j;

	TRY(job_find(s, id, &j));
	if (!principal_may(who, j->uid))
		return ERR(FORBIDDEN, "job %s belongs to uid %u", j->id, j->uid);
	*out = j;
	return OK;
}

static FALLIBLE enum err check_cancel(const struct job *j)
{
	if (job_state_ended(j->state) || j->step == STEP_ENDING)
		return ERR(STATE_CONFLICT, "job %s has ended (%s)", j->id,
			   job_state_text(j->step == STEP_ENDING ? j->end_state : j->state));
	if (j->state == JOB_COMMITTING)
		return ERR(STATE_CONFLICT, "job %s is committing: it can no longer be cancelled", j->id);
	return OK;
}

void job_cancel(struct server *s, const struct principal *who, struct str id, done_fn fn, void *user)
{
	struct job *j;
	enum err e = find_owned(s, who, id, &j);

	e = e ?: check_cancel(j);
	if (e || j->cancel_wanted) {
		loop_later(s->loop, fn, user, e);
		return;
	}
	log_info("job cancel asked", "job", j->id, NULL);
	job_stop(j);
	if (j->step == STEP_ENDING) {
		job_wait(s, id, 60000, fn, user); /* its end is on its way to the journal */
		return;
	}
	job_write(j, fn, user);
}

static void on_cancelled(void *, enum err)
{
	err_clear();
}

void job_cancel_replicas(struct server *s, const struct replica_withdrawal *w)
{
	const struct principal root = { .admin = true };

	for (struct job *j = s->jobs->live, *next; j; j = next) {
		const struct spec_replica *r = &j->spec.replica;
		next = j->live_next;
		if (r->job.p && str_eq(r->of.storage, w->of.storage) && str_eq(r->of.name, w->of.name) &&
		    state_dict_is_withdrawn(r->job.p, w))
			job_cancel(s, &root, str_of(j->id), on_cancelled, NULL);
	}
}

/* ---- retry ---- */

struct retry {
	struct server *server;
	char id[JOB_ID_LEN + 1];
	done_fn fn;
	void *user;
};

static void on_retried(void *user, enum err e)
{
	struct retry *r = user;
	struct job *j = map_object(&r->server->jobs->table, str_of(r->id));

	if (j && j->step == STEP_WAITING && !e)
		job_queue(j);
	else if (j && j->step == STEP_WAITING) /* else it was cancelled meanwhile, and ends */
		job_fail(j, e);
	r->fn(r->user, e);
	mem_free(r);
}

static FALLIBLE enum err check_retry(struct server *s, struct job *j)
{
	if (s->draining)
		return ERR(DRAINING, "the daemon is shutting down");
	if (j->state != JOB_FAILED && j->state != JOB_CANCELLED)
		return ERR(STATE_CONFLICT, "job %s is %s: only a failed or cancelled job can be tried again", j->id,
			   job_state_text(j->state));
	if (j->moved)
		return ERR(JOB_MOVED, "job %s is node \"%s\"'s", j->id, j->moved_to);
	TRY(job_spec_resolve(j));
	TRY(job_spec_check_free(j));
	j->shared = job_may_be_shared(j);
	enum err e = job_take_uses(j);
	e = e ?: job_state_dict_op_check(j);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		job_drop_uses(j);
	}
	return e;
}

static void reset(struct job *j)
{
	json_decref(j->error);
	json_decref(j->result);
	json_decref(j->progress_ranks);
	json_decref(j->stages);
	j->error = j->result = j->progress_ranks = j->stages = NULL;
	trace_again(j->trace);
	j->attempt++;
	j->cancel_wanted = j->commit_asked = j->stalled = j->confirmed = false;
	j->bytes_done = j->bytes_total = 0;
	j->rate = 0;
	j->finished_ms = j->started_ms = j->durable_ms = 0;
	j->retries_left = (int)j->spec.retries;
	job_move(j, STEP_WAITING, JOB_QUEUED);
	snprintf(j->stage, sizeof j->stage, "waiting");
	job_changed(j);
}

void job_retry(struct server *s, const struct principal *who, struct str id, done_fn fn, void *user)
{
	struct job *j;
	enum err e = find_owned(s, who, id, &j);

	e = e ?: check_retry(s, j);
	if (e) {
		loop_later(s->loop, fn, user, e);
		return;
	}
	struct retry *r = mem_sure(sizeof *r);
	*r = (struct retry){ .server = s, .fn = fn, .user = user };
	memcpy(r->id, j->id, sizeof r->id);
	job_revive(j);
	reset(j);
	log_info("job retry asked", "job", j->id, NULL);
	job_write(j, on_retried, r);
}

/* ---- list ---- */

static FALLIBLE enum err bad_filter(struct str term)
{
	return ERR(VALIDATION_FAILED,
		   "filter: \"%.*s\" is none of state=…, kind=…, target=…, labels.KEY=…, joined by \" AND \"",
		   (int)num_min(term.n, 64), term.p);
}

static FALLIBLE enum err read_word(struct str key, struct str v, const char *const *words, int *out)
{
	struct near near = near_begin(v);
	char hint[NEAR_HINT_MAX], list[256];
	size_t n = 0;

	for (int i = 0; words[i]; i++) {
		if (str_is(v, words[i])) {
			*out = i;
			return OK;
		}
		near_try(&near, str_of(words[i]));
		n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? ", " : "", words[i]);
	}
	return ERR(VALIDATION_FAILED, "filter: %.*s \"%.*s\" is none of: %s%s", (int)key.n, key.p, (int)num_min(v.n, 64), v.p, list,
		   near_text(&near, hint));
}

static FALLIBLE enum err read_term(struct str term, struct journal_filter *f)
{
	const char *eq = memchr(term.p, '=', term.n);

	if (!eq)
		return bad_filter(term);
	struct str key = { term.p, (size_t)(eq - term.p) };
	struct str value = { eq + 1, term.n - key.n - 1 };
	if (value.n >= 2 && value.p[0] == '"' && value.p[value.n - 1] == '"')
		value = (struct str){ value.p + 1, value.n - 2 };
	if (str_is(key, "state"))
		return read_word(key, value, job_state_names, &f->state);
	if (str_is(key, "kind"))
		return read_word(key, value, kind_names, &f->kind);
	if (str_is(key, "target")) {
		f->target = value;
		return OK;
	}
	if (!str_starts(key, "labels.") || key.n == 7 || f->label_count == JOURNAL_FILTER_LABELS)
		return bad_filter(term);
	f->label_key[f->label_count] = (struct str){ key.p + 7, key.n - 7 };
	f->label_value[f->label_count++] = value;
	return OK;
}

static FALLIBLE enum err read_filter(struct str text, struct journal_filter *f)
{
	static const char and[] = " AND ";

	while (text.n) {
		const char *at = memmem(text.p, text.n, and, sizeof and - 1);
		size_t n = at ? (size_t)(at - text.p) : text.n;
		TRY(read_term((struct str){ text.p, n }, f));
		size_t skip = at ? n + sizeof and - 1 : n;
		text = (struct str){ text.p + skip, text.n - skip };
		if (at && text.n == 0)
			return bad_filter(text);
	}
	return OK;
}

FALLIBLE enum err job_matches(struct str filter, const json_t *record, bool *out)
{
	struct journal_filter f = { .state = -1, .kind = -1 };
	const json_t *target = json_object_get(record, "target"), *labels = json_object_get(record, "labels");
	char text[4096 + 64] = "";

	TRY(read_filter(filter, &f));
	if (json_object_get(target, "state_dict"))
		snprintf(text, sizeof text, "shm:%s", jval_text(target, "state_dict"));
	else if (target)
		snprintf(text, sizeof text, "%s:%s", jval_text(target, "storage"), jval_text(target, "name"));
	*out = (f.state < 0 || strcmp(jval_text(record, "state"), job_state_names[f.state]) == 0) &&
	       (f.kind < 0 || strcmp(jval_text(record, "kind"), kind_names[f.kind]) == 0) && (!f.target.n || str_is(f.target, text));
	for (uint32_t i = 0; i < f.label_count; i++) {
		char key[256];
		snprintf(key, sizeof key, "%.*s", (int)num_min(f.label_key[i].n, sizeof key - 1), f.label_key[i].p);
		*out = *out && str_is(f.label_value[i], jval_text(labels, key));
	}
	return OK;
}

enum { LIST_BYTES_MAX = 8 << 20 }; /* of a page: a record may have a MiB of damage */

struct listing {
	struct server *server;
	struct buf *out;
	uint32_t left, shown;
	bool more;
	char last[JOB_ID_LEN + 1];
};

/* Ends the walk when the page is full; l->more tells that from an error. */
static enum err put_row(void *user, const struct journal_job *row)
{
	struct listing *l = user;
	const struct job *live = map_object(&l->server->jobs->table, str_of(row->id));
	struct str text = row->doc;

	if (live && !live->in_journal) /* written, and not yet told: job_find() does not find it either */
		return OK;
	if (l->left == 0 || l->out->len >= LIST_BYTES_MAX) {
		l->more = true;
		return ERR(LIMIT_EXCEEDED, "the page is full");
	}
	if (live)
		TRY(job_text(l->server, str_of(row->id), &text));
	if (l->shown++)
		buf_putc(l->out, ',');
	buf_put(l->out, text.p, text.n);
	memcpy(l->last, row->id, sizeof l->last);
	l->left--;
	return buf_status(l->out);
}

FALLIBLE enum err job_list(struct server *s, struct str filter, uint32_t page_size, struct str page_token, struct buf *out)
{
	struct journal_filter f = { .state = -1, .kind = -1, .before_id = page_token };
	struct listing l = { .server = s, .out = out, .left = page_size };

	if (page_size < 1 || page_size > JOB_PAGE_MAX)
		return ERR(VALIDATION_FAILED, "page_size must be from 1 to %d", JOB_PAGE_MAX);
	if (page_token.n != 0 && !job_id_ok(page_token))
		return ERR(VALIDATION_FAILED, "page_token is not one that was given out");
	TRY(read_filter(filter, &f));
	buf_puts(out, "{\"jobs\":[");
	enum err e = journal_read_jobs(s->journal, &f, UINT32_MAX, put_row, &l);
	if (e && !l.more)
		return e;
	err_clear();
	buf_puts(out, "]");
	if (l.more)
		buf_printf(out, ",\"next_page_token\":\"%s\"", l.last);
	buf_puts(out, "}");
	return buf_status(out);
}
