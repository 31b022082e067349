/* job.c: see job.h. */
#include "session/job.h"

#include <unistd.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "os/fs.h"

enum { PROGRESS_MS = 250, WAIT_MS = 500 };

enum err job_send(struct job *j, enum frame_type type, struct str json, const int *fds, uint32_t fd_count)
{
	bool empty = false;

	if (!j->worker->conn)
		return OK;
	TRY(frame_send(j->worker->conn, (uint16_t)type, j->generation, json, fds, fd_count));
	while (frame_wants_write(j->worker->conn) && !empty)
		TRY(frame_flush(j->worker->conn, &empty));
	return OK;
}

enum err job_send_json(struct job *j, enum frame_type type, const json_t *doc)
{
	char *text = j->worker->conn ? jtext_of(doc) : NULL;

	if (doc && !text && j->worker->conn)
		return ERR(NO_MEMORY, "no memory for a message");
	enum err e = job_send(j, type, text ? str_of(text) : STR("{}"), NULL, 0);
	mem_free(text);
	return e;
}

static void put_text(struct buf *b, const char *key, const char *value)
{
	if (!value[0])
		return;
	buf_printf(b, ",\"%s\":", key);
	buf_json_str(b, str_of(value));
}

void job_problem_put(struct buf *b, enum err e)
{
	const struct err_info *i = err_last();

	buf_printf(b, "{\"code\":\"%s\",\"detail\":", err_code_name(e));
	buf_json_str(b, str_of(i->code == e ? i->text : err_title(e)));
	if (i->code == e) {
		put_text(b, "fqn", i->fqn);
		put_text(b, "file", i->file);
		put_text(b, "expected", i->expected);
		put_text(b, "actual", i->actual);
		put_text(b, "pointer", i->pointer);
		if (i->rank >= 0)
			buf_printf(b, ",\"rank\":%jd", (intmax_t)i->rank);
		if (i->offset >= 0)
			buf_printf(b, ",\"offset\":%jd", (intmax_t)i->offset);
		if (i->in_doubt)
			buf_puts(b, ",\"in_doubt\":true");
		put_text(b, "place", i->place ? i->place : "");
	}
	buf_puts(b, "}");
}

enum err job_state(struct job *j, const char *state, const char *stage, const json_t *plan, uint64_t bytes_total)
{
	CLEANUP(json_decrefp) json_t *doc = json_pack("{s:s, s:s, s:I}", "state", state, "stage", stage, "bytes_total",
						      (json_int_t)bytes_total);

	if (doc && plan)
		json_object_set(doc, "plan", (json_t *)(uintptr_t)plan);
	NEED(doc, "no memory for a message");
	TRY(job_tell_io(j->worker)); /* it was moved in the stage before */
	return job_send_json(j, FRAME_STATE, doc);
}

enum err job_progress(struct job *j)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64 << 10);

	if (j->work)
		j->work->put_progress(j->work, &b);
	else
		buf_puts(&b, "{\"bytes_done\":0,\"bytes_total\":0,\"ranks\":[]}");
	TRY(buf_status(&b));
	return job_send(j, FRAME_PROGRESS, (struct str){ (char *)b.p, b.len }, NULL, 0);
}

enum err job_tell_io(struct worker *w)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64 << 10);
	bool empty = false;

	if (!w->conn) /* in a program of a user's (api/c): nobody counts */
		return OK;
	each(s, w->stores.v, w->stores.count) {
		uint64_t bytes_read = s->top >= 0 ? s->ops->count(s, false) : 0, written = s->top >= 0 ? s->ops->count(s, true) : 0;
		if (bytes_read || written)
			buf_printf(&b, "%c\"%s\":[%ju,%ju]", b.len ? ',' : '{', s->name, (uintmax_t)bytes_read, (uintmax_t)written);
	}
	if (b.len == 0)
		return OK;
	buf_putc(&b, '}');
	TRY(buf_status(&b));
	TRY(frame_send(w->conn, FRAME_IO, 0, (struct str){ (char *)b.p, b.len }, NULL, 0));
	while (frame_wants_write(w->conn) && !empty)
		TRY(frame_flush(w->conn, &empty));
	return OK;
}

/* The leader tells how far all are; the others, that they are there. */
static FALLIBLE enum err show_life(struct job *j)
{
	TRY(job_tell_io(j->worker));
	return j->worker->index == 0 ? job_progress(j) : job_send(j, FRAME_PROGRESS, str_of("{}"), NULL, 0);
}

enum err job_read_state_dicts(struct job *j)
{
	json_t *all = json_object_get(j->doc, "state_dicts"), *entry;
	const char *name;

	j->dicts = mem_zalloc(json_object_size(all) + 1, sizeof *j->dicts);
	NEED(j->dicts, "no memory for %zu state dicts", json_object_size(all));
	json_object_foreach(all, name, entry) {
		struct job_dict *d = &j->dicts[j->dict_count++];
		d->name = name;
		TRY(rank_segments_read(entry, 0, j->segment_count, &d->segments));
	}
	return OK;
}

/* Of two generations of a state dict the second one's key is "train:6". */
static bool is_second(const struct job_dict *d, const struct ref *ref)
{
	struct str name = str_of(d->name);

	return ref->generation >= 0 && name.n > ref->name.n && name.p[ref->name.n] == ':' &&
	       memcmp(name.p, ref->name.p, ref->name.n) == 0 && d->segments.generation == (uint64_t)ref->generation;
}

const struct rank_segments *job_state_dict(const struct job *j, const struct ref *ref)
{
	const struct rank_segments *found = NULL;

	for (uint32_t i = 0; ref->kind == REF_STATE_DICT && i < j->dict_count; i++)
		if (str_is(ref->name, j->dicts[i].name) ? !found : is_second(&j->dicts[i], ref))
			found = &j->dicts[i].segments;
	return found;
}

static FALLIBLE enum err take_segments(struct job *j, struct frame *f)
{
	uint32_t index;

	if (j->segments_doc)
		return ERR(PROTOCOL, "SEGMENTS comes twice");
	enum err e = jtext_parse(f->json, 0, &j->segments_doc);
	if (e)
		return e == ERR_NO_MEMORY ? e : ERR(PROTOCOL, "SEGMENTS is not JSON");
	j->made_at = j->fd_count;
	TRY(rank_segments_read(j->segments_doc, j->made_at, f->fd_count, &j->segments));
	for (uint32_t i = 0; i < f->fd_count; i++) {
		TRY(job_add_fd(j, f->fds[i], &index));
		f->fds[i] = -1;
	}
	return OK;
}

static FALLIBLE enum err take_frame(struct job *j, struct frame *f)
{
	if (f->generation != j->generation)
		return OK;
	switch (f->type) {
	case FRAME_CANCEL:
		j->cancelled = true;
		return ERR(CANCELLED, "the job was cancelled");
	case FRAME_PEERS_DONE:
		j->peers_done = true;
		return OK;
	case FRAME_COMMIT_OK:
		j->commit_ok = true;
		return OK;
	case FRAME_SEALED:
		j->sealed = true;
		if (j->work)
			j->work->seal(j->work);
		return OK;
	case FRAME_SEGMENTS:
		return take_segments(j, f);
	case FRAME_RENDEZVOUS_ALL:
		json_decref(j->met);
		return jtext_parse(f->json, 0, &j->met);
	default:
		return ERR(PROTOCOL, "a frame of type %u in a job", f->type);
	}
}

static FALLIBLE enum err poll_frames(struct job *j, int timeout_ms)
{
	for (;;) {
		struct frame f;
		bool got = false, closed = false;
		TRY(frame_wait(j->worker->conn, timeout_ms, &f, &got, &closed));
		if (closed)
			_exit(0); /* the coordinator is gone: nobody waits for this job any more */
		if (!got)
			return OK;
		TRY(take_frame(j, &f));
		timeout_ms = 0;
	}
}

static FALLIBLE enum err talk(struct job *j)
{
	int64_t now = clock_mono_ms();

	if (now - j->last_progress_ms < PROGRESS_MS)
		return j->cancelled ? ERR(CANCELLED, "the job was cancelled") : OK;
	j->last_progress_ms = now;
	TRY(poll_frames(j, 0));
	return show_life(j);
}

enum err job_tick(void *user)
{
	struct job *j = user;

	if (j->worker->lookup) /* it answers one question at a time, and nothing else may come between */
		return OK;
	TRY(talk(j));
	for (int ms; (ms = pace_rest_ms(&j->pace)) > 0 && !j->work->stopped(j->work);) {
		TRY(poll_frames(j, ms));
		TRY(talk(j));
	}
	return OK;
}

enum err job_wait(struct job *j, const bool *flag)
{
	while (!*flag) {
		TRY(poll_frames(j, WAIT_MS));
		if (!*flag)
			TRY(job_progress(j));
	}
	return OK;
}

enum err job_pause(struct job *j, int ms)
{
	int64_t until = clock_mono_ms() + ms;

	for (int64_t left = ms; left > 0; left = until - clock_mono_ms())
		TRY(poll_frames(j, (int)left));
	return job_tick(j);
}

enum err job_wait_sealed(struct job *j, int64_t until_ms)
{
	while (!j->sealed && clock_mono_ms() < until_ms) {
		TRY(poll_frames(j, WAIT_MS));
		if (!j->sealed)
			TRY(job_progress(j));
	}
	return OK;
}

enum err job_wait_segments(struct job *j)
{
	while (!j->segments.v) {
		TRY(poll_frames(j, WAIT_MS));
		if (!j->segments.v)
			TRY(job_progress(j));
	}
	return OK;
}

enum err job_rendezvous(struct job *j, struct str mine, uint32_t deadline_ms, json_t **all_out)
{
	int64_t until = clock_mono_ms() + deadline_ms;

	TRY(job_send(j, FRAME_RENDEZVOUS, mine, NULL, 0));
	while (!j->met) {
		TRY(poll_frames(j, WAIT_MS));
		if (!j->met)
			TRY(show_life(j));
		if (!j->met && clock_mono_ms() > until)
			return ERR(PEER_TIMEOUT, "the members of the group did not meet within %u ms", deadline_ms);
	}
	const json_t *late = json_object_get(j->met, "late");
	enum err e = !late ? OK : err_at_rank(ERR(PEER_TIMEOUT, "%s", json_string_value(json_object_get(j->met, "why"))),
					      json_integer_value(late));
	*all_out = e ? NULL : json_incref(json_object_get(j->met, "all"));
	json_decref(j->met);
	j->met = NULL;
	return e;
}

enum err job_add_fd(struct job *j, int fd, uint32_t *index_out)
{
	int *more = mem_grow(j->fds, j->fd_count + 1, sizeof *more);

	NEED(more, "no memory for descriptors");
	j->fds = more;
	*index_out = j->fd_count;
	j->fds[j->fd_count++] = fd;
	return OK;
}

void job_free(struct job *j)
{
	for (uint32_t i = 0; i < j->fd_count; i++)
		fs_drop(&j->fds[i]);
	mem_free(j->fds);
	spec_free(&j->spec);
	json_decref(j->doc);
	for (uint32_t i = 0; i < j->dict_count; i++)
		rank_segments_free(&j->dicts[i].segments);
	mem_free(j->dicts);
	rank_segments_free(&j->segments);
	json_decref(j->segments_doc);
	json_decref(j->result);
	json_decref(j->error_more);
	json_decref(j->parents);
	json_decref(j->met);
	checked_free(&j->checked);
	*j = (struct job){ 0 };
}
