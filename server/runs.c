/* runs.c: see runs.h. An array of 256 is searched in microseconds, and only when a job ends or metrics are asked for. */
#include "server/runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/mem.h"
#include "base/vec.h"
#include "server/journal.h"
#include "server/metrics.h"
#include "server/save_interval.h"
#include "server/service_clock.h"
#include "server/storage.h"

enum { COSTS_KEPT = 9,             /* last saves whose median counts */
       COURSE_MAX = 2048, TRAINER_MAX = 256 };

struct cost {
	int64_t save_ms, stall_ms;     /* stall_ms -1: not known */
};

struct run {
	char storage[STORAGE_NAME_MAX + 1];
	char *name;
	int64_t step;                       /* of the last durable checkpoint; -1: unknown */
	int64_t at_ms[RUN_MARK_COUNT];      /* wall clock; 0: never */
	char tensors[33];                   /* digest of all tensors of the last save; "": none */
	char *saved;                        /* its name; NULL: none */
	int64_t seen_step, seen_ms;         /* of the newest snapshot; -1, 0: none */
	char trainer[TRAINER_MAX];          /* the state dict that it was of; "": none */
	struct cost costs[COSTS_KEPT];      /* the newest first */
	uint32_t cost_count;
};

struct runs {
	struct run items[RUNS_MAX];
	uint32_t count;
};

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
	*r = (struct run){ .name = copy, .step = -1, .seen_step = -1 };
	snprintf(r->storage, sizeof r->storage, "%s", storage);
	return r;
}

/* ---- the row ---- */

/* {"seen":[step,ms],"trainer":"","saves":[[save_ms,stall_ms],…]} */
static void put_course(const struct run *r, struct buf *b)
{
	buf_printf(b, "{\"seen\":[%jd,%jd]", (intmax_t)r->seen_step, (intmax_t)r->seen_ms);
	buf_json_member(b, ",\"trainer\":", str_of(r->trainer));
	buf_puts(b, ",\"saves\":[");
	for (uint32_t i = 0; i < r->cost_count; i++)
		buf_printf(b, "%s[%jd,%jd]", i ? "," : "", (intmax_t)r->costs[i].save_ms, (intmax_t)r->costs[i].stall_ms);
	buf_puts(b, "]}");
	buf_putc(b, '\0');
}

static int64_t number_at(const json_t *list, size_t i)
{
	return json_integer_value(json_array_get(list, i));
}

/* A course that cannot be read is as none. */
static void take_course(struct run *r, const char *text)
{
	json_t *doc = NULL;

	if (jtext_parse(str_of(text), 0, &doc)) {
		err_clear();
		return;
	}
	const json_t *seen = json_object_get(doc, "seen"), *saves = json_object_get(doc, "saves");
	const char *trainer = json_string_value(json_object_get(doc, "trainer"));
	if (json_array_size(seen) == 2) {
		r->seen_step = number_at(seen, 0);
		r->seen_ms = number_at(seen, 1);
	}
	for (size_t i = 0; i < json_array_size(saves) && i < COSTS_KEPT; i++)
		r->costs[r->cost_count++] = (struct cost){ number_at(json_array_get(saves, i), 0), number_at(json_array_get(saves, i), 1) };
	snprintf(r->trainer, sizeof r->trainer, "%s", trainer ? trainer : "");
	json_decref(doc);
}

static void put_row(const struct run *r, struct journal_txn *txn)
{
	CLEANUP(buf_free) struct buf course = BUF_INIT(COURSE_MAX);

	put_course(r, &course);
	journal_put_run(txn, &(struct journal_run){ r->storage, r->name, r->step, r->at_ms, r->tensors, r->saved ? r->saved : "",
						    buf_status(&course) == OK ? (char *)course.p : "" });
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
	put_row(r, txn);
}

void run_put(const struct runs *all, struct journal_txn *txn, const char *storage, const char *name)
{
	for (uint32_t i = 0; i < all->count; i++)
		if (strcmp(all->items[i].storage, storage) == 0 && str_is(run_of(name), all->items[i].name))
			put_row(&all->items[i], txn);
}

void run_note_seen(struct runs *all, const char *storage, const char *name, int64_t step, int64_t at_ms, const char *state_dict)
{
	struct run *r = find(all, storage, run_of(name));

	if (!r && !(r = make(all, NULL, storage, run_of(name))))
		return; /* out of memory: a figure is missing */
	if (at_ms < r->seen_ms)
		return; /* the end of an older save */
	r->seen_step = step;
	r->seen_ms = at_ms;
	snprintf(r->trainer, sizeof r->trainer, "%s", state_dict);
}

void run_note_cost(struct runs *all, const char *storage, const char *name, int64_t save_ms, int64_t stall_ms)
{
	struct run *r = find(all, storage, run_of(name));

	if (!r || save_ms < 0)
		return;
	memmove(r->costs + 1, r->costs, (COSTS_KEPT - 1) * sizeof *r->costs);
	r->costs[0] = (struct cost){ save_ms, stall_ms };
	r->cost_count += r->cost_count < COSTS_KEPT;
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
	if (row->course[0])
		take_course(r, row->course);
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

/* ---- work that would be lost, and how often to save ---- */

/* Steps that a snapshot is ahead of the newest durable checkpoint; -1: one of them is not known, or they are of other counts. */
static int64_t steps_ahead(const struct run *r, int64_t step, int64_t since_ms)
{
	if (!r || r->seen_step < 0 || step < 0)
		return -1;
	if (r->seen_ms <= since_ms || r->seen_step <= step) /* a run that was set back counts from there */
		return 0;
	return r->seen_step - step;
}

static int by_size(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/* The median of the last saves; -1: there is none. */
static int64_t median(const struct run *r, bool stall)
{
	int64_t all[COSTS_KEPT];
	uint32_t n = 0;

	for (uint32_t i = 0; r && i < r->cost_count; i++) {
		int64_t ms = stall ? r->costs[i].stall_ms : r->costs[i].save_ms;
		if (ms >= 0)
			all[n++] = ms;
	}
	if (n == 0)
		return -1;
	qsort(all, n, sizeof *all, by_size);
	return all[n / 2];
}

static void put_seconds(struct buf *out, const char *key, int64_t ms)
{
	if (ms < 0)
		buf_printf(out, "\"%s\":null", key);
	else
		buf_printf(out, "\"%s\":%.3f", key, (double)ms / 1000);
}

static void put_interval(const struct run *r, double mtbf_s, struct buf *out)
{
	int64_t save = median(r, false), stall = median(r, true);
	double cost = (double)save / 1000;

	if (save < 0) {
		buf_puts(out, ",\"save_interval\":null");
		return;
	}
	buf_puts(out, ",\"save_interval\":{");
	put_seconds(out, "measured_save_s", save);
	buf_puts(out, ",");
	put_seconds(out, "measured_stall_s", stall);
	buf_printf(out, ",\"saves\":%u,\"mtbf_s\":%.3f,\"young_s\":%.3f,\"daly_s\":%.3f", r->cost_count, mtbf_s,
		   save_interval_young(cost, mtbf_s), save_interval_daly(cost, mtbf_s));
	if (stall >= 0) /* a save that goes on behind the trainer costs the stall; the next one waits for it */
		buf_printf(out, ",\"async_s\":%.3f", fmax(save_interval_daly((double)stall / 1000, mtbf_s), cost));
	else
		buf_puts(out, ",\"async_s\":null");
	buf_puts(out, ",\"last\":[");
	for (uint32_t i = 0; i < r->cost_count; i++) {
		buf_puts(out, i ? ",{" : "{");
		put_seconds(out, "save_s", r->costs[i].save_ms);
		buf_puts(out, ",");
		put_seconds(out, "stall_s", r->costs[i].stall_ms);
		buf_puts(out, "}");
	}
	buf_puts(out, "]}");
}

static void put_count(struct buf *out, const char *key, int64_t n)
{
	if (n < 0)
		buf_printf(out, ",\"%s\":null", key);
	else
		buf_printf(out, ",\"%s\":%jd", key, (intmax_t)n);
}

void run_put_course(const struct runs *all, const char *storage, struct str run, const struct run_newest *newest, double mtbf_s,
		    struct buf *out)
{
	const struct run *r = find((struct runs *)(uintptr_t)all, storage, run);
	int64_t age = clock_wall_ms() - newest->since_ms, ahead = steps_ahead(r, newest->step, newest->since_ms);

	buf_puts(out, "\"lost_work\":{\"since\":");
	if (newest->since[0])
		buf_json_str(out, str_of(newest->since));
	else
		buf_puts(out, "null");
	buf_puts(out, ",");
	put_seconds(out, "seconds", newest->since_ms && age > 0 ? age : newest->since_ms ? 0 : -1);
	put_count(out, "step", newest->step);
	put_count(out, "seen_step", r ? r->seen_step : -1);
	put_count(out, "steps", ahead);
	buf_puts(out, "}");
	put_interval(r, mtbf_s, out);
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

/* A run that has ended loses nothing more, and must not raise an alert for ever. */
static void set_lost_work(struct metrics *m, struct buf *labels, const struct run *r)
{
	int64_t now = clock_wall_ms(), since = r->at_ms[RUN_DURABLE], ahead = steps_ahead(r, r->step, since);

	set(m, labels, "dcpd_lost_work_seconds", now > since ? (double)(now - since) / 1000 : 0);
	if (ahead >= 0)
		set(m, labels, "dcpd_lost_work_steps", (double)ahead);
}

void runs_fill(const struct runs *all, const struct run_trainers *trainers, struct metrics *m)
{
	static const char *const levels[RUN_MARK_COUNT] = { NULL, "structure", "digest", "values" };
	CLEANUP(buf_free) struct buf labels = BUF_INIT(1 << 16);

	metrics_clear(m, "dcpd_last_durable_timestamp_seconds");
	metrics_clear(m, "dcpd_last_durable_step");
	metrics_clear(m, "dcpd_last_verified_timestamp_seconds");
	metrics_clear(m, "dcpd_lost_work_seconds");
	metrics_clear(m, "dcpd_lost_work_steps");
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
		if (r->at_ms[RUN_DURABLE] && r->trainer[0] && trainers->lives(trainers->user, r->trainer))
			set_lost_work(m, &labels, r);
	}
}
