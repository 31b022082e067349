/* runs.c: see runs.h. An array of 256 is searched in microseconds, and only when a job ends or metrics are asked for. */
#include "server/runs.h"

#include <stdio.h>

#include "base/mem.h"
#include "base/vec.h"
#include "server/journal.h"
#include "server/metrics.h"
#include "server/storage.h"

struct run {
	char storage[STORAGE_NAME_MAX + 1];
	char *name;
	int64_t step;                       /* of the last durable checkpoint; -1: unknown */
	int64_t at_ms[RUN_MARK_COUNT];      /* wall clock; 0: never */
	char tensors[33];                   /* digest of all tensors of the last save; "": none */
	char *saved;                        /* its name; NULL: none */
};

struct runs {
	struct run items[RUNS_MAX];
	uint32_t count;
};

struct str run_of(const char *name)
{
	const char *slash = strrchr(name, '/');

	return slash ? (struct str){ name, (size_t)(slash - name) } : STR("-");
}

int64_t run_step(const char *name, int64_t generation)
{
	size_t end = strlen(name), at = end;
	uint64_t step;

	while (at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9')
		at--;
	if (str_to_u64((struct str){ name + at, end - at }, &step) && step <= INT64_MAX)
		return (int64_t)step;
	return generation;
}

static int64_t newest(const struct run *r)
{
	int64_t ms = 0;

	for (int m = 0; m < RUN_MARK_COUNT; m++)
		ms = r->at_ms[m] > ms ? r->at_ms[m] : ms;
	return ms;
}

static struct run *find(struct runs *all, const char *storage, struct str name)
{
	for (uint32_t i = 0; i < all->count; i++)
		if (strcmp(all->items[i].storage, storage) == 0 && str_is(name, all->items[i].name))
			return &all->items[i];
	return NULL;
}

/* A place for one more run: that of the run that was heard of longest ago, if all are taken. txn NULL: the journal keeps its row. */
static struct run *make(struct runs *all, struct journal_txn *txn, const char *storage, struct str name)
{
	struct run *r = &all->items[0];
	char *copy = mem_alloc(name.n + 1);

	if (!copy)
		return NULL;
	memcpy(copy, name.p, name.n);
	copy[name.n] = '\0';
	if (all->count < RUNS_MAX) {
		r = &all->items[all->count++];
	} else {
		for (uint32_t i = 1; i < RUNS_MAX; i++)
			if (newest(&all->items[i]) < newest(r))
				r = &all->items[i];
		if (txn)
			journal_delete_run(txn, r->storage, r->name);
		mem_free(r->name);
		mem_free(r->saved);
	}
	*r = (struct run){ .name = copy, .step = -1 };
	snprintf(r->storage, sizeof r->storage, "%s", storage);
	return r;
}

void run_note(struct runs *all, struct journal_txn *txn, enum run_mark mark, const char *storage, const char *name, int64_t step,
	      int64_t at_ms)
{
	struct run *r = find(all, storage, run_of(name));

	if (!r && !(r = make(all, txn, storage, run_of(name))))
		return; /* out of memory: a gauge is missing, the job's end is not held up */
	r->at_ms[mark] = at_ms;
	if (mark == RUN_DURABLE)
		r->step = step;
	journal_put_run(txn, &(struct journal_run){ r->storage, r->name, r->step, r->at_ms, r->tensors, r->saved ? r->saved : "" });
}

static void keep_tensors(struct run *r, const char *digest, char *name)
{
	mem_free(r->saved);
	r->saved = name;
	snprintf(r->tensors, sizeof r->tensors, "%s", digest);
}

bool run_note_tensors(struct runs *all, const char *storage, const char *name, const char *digest, char **before_out)
{
	struct run *r = find(all, storage, run_of(name));
	char *copy = mem_strdup(name);

	*before_out = NULL;
	if (!copy || (!r && !(r = make(all, NULL, storage, run_of(name))))) {
		mem_free(copy);
		return false; /* out of memory: a warning is missing */
	}
	bool same = r->tensors[0] && strcmp(r->tensors, digest) == 0;
	if (same) {
		*before_out = r->saved;
		r->saved = NULL;
	}
	keep_tensors(r, digest, copy);
	return same;
}

static enum err take_row(void *user, const struct journal_run *row)
{
	struct runs *all = user;

	if (strlen(row->storage) > STORAGE_NAME_MAX)
		return OK;
	struct run *r = make(all, NULL, row->storage, str_of(row->name));
	NEED(r, "cannot keep runs");
	r->step = row->step;
	memcpy(r->at_ms, row->at_ms, sizeof r->at_ms);
	char *saved = mem_strdup(row->saved);
	NEED(saved, "cannot keep runs");
	keep_tensors(r, row->tensors, saved);
	return OK;
}

FALLIBLE enum err runs_new(struct journal *j, struct runs **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot keep runs");
	return journal_read_runs(j, RUNS_MAX, take_row, *out);
}

void runs_free(struct runs *all)
{
	for (uint32_t i = 0; all && i < all->count; i++) {
		mem_free(all->items[i].name);
		mem_free(all->items[i].saved);
	}
	mem_free(all);
}

/* ---- metrics ---- */

static void put_labels(struct buf *b, const struct run *r, const char *level)
{
	b->len = 0;
	buf_puts(b, "run=\"");
	for (const char *p = r->name; *p; p++) {
		if (*p == '"' || *p == '\\')
			buf_putc(b, '\\');
		buf_putc(b, (unsigned char)*p);
	}
	buf_printf(b, "\",storage=\"%s\"", r->storage);
	if (level)
		buf_printf(b, ",level=\"%s\"", level);
	buf_putc(b, '\0');
}

static void set(struct metrics *m, struct buf *labels, const char *family, double value)
{
	if (buf_status(labels) == OK)
		metrics_set(m, family, (char *)labels->p, value);
}

void runs_fill(const struct runs *all, struct metrics *m)
{
	static const char *const levels[RUN_MARK_COUNT] = { NULL, "structure", "digest", "values" };
	CLEANUP(buf_free) struct buf labels = BUF_INIT(1 << 16);

	metrics_clear(m, "dcpd_last_durable_timestamp_seconds");
	metrics_clear(m, "dcpd_last_durable_step");
	metrics_clear(m, "dcpd_last_verified_timestamp_seconds");
	each(r, all->items, all->count) {
		for (int k = RUN_VERIFIED_STRUCTURE; k < RUN_MARK_COUNT; k++) {
			put_labels(&labels, r, levels[k]);
			if (r->at_ms[k])
				set(m, &labels, "dcpd_last_verified_timestamp_seconds", (double)r->at_ms[k] / 1000);
		}
		put_labels(&labels, r, NULL);
		if (r->at_ms[RUN_DURABLE])
			set(m, &labels, "dcpd_last_durable_timestamp_seconds", (double)r->at_ms[RUN_DURABLE] / 1000);
		if (r->at_ms[RUN_DURABLE] && r->step >= 0)
			set(m, &labels, "dcpd_last_durable_step", (double)r->step);
	}
}
