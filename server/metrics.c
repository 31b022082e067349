/* metrics.c: see metrics.h. Series are few (METRICS_SERIES_MAX at most), so that a list per family is found fast enough. */
#include "server/metrics.h"

#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "server/job_own.h"
#include "server/storage.h"
#include "server/worker.h"

enum type { COUNTER, GAUGE, HISTOGRAM };
enum { BUCKETS = 14, LABELS_MAX = 160 };

static const double bounds[BUCKETS] = { 0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800 };

static const struct family {
	const char *name;
	enum type type;
	const char *help;
} families[] = {
	{ "dcpd_build_info", GAUGE, "1, with the version as a label" },
	{ "dcpd_start_time_seconds", GAUGE, "when the daemon started, since 1970" },
	{ "dcpd_jobs", GAUGE, "jobs that have not ended" },
	{ "dcpd_jobs_total", COUNTER, "jobs ended since the start, by outcome" },
	{ "dcpd_job_duration_seconds", HISTOGRAM, "from the first attempt's start to the end" },
	{ "dcpd_job_stage_duration_seconds", HISTOGRAM, "time that jobs spent in each stage" },
	{ "dcpd_job_bytes_total", COUNTER, "bytes moved by jobs that succeeded" },
	{ "dcpd_comm_bytes_total", COUNTER, "bytes that operations on state dicts moved between ranks, by kind and back end" },
	{ "dcpd_save_lag_seconds", HISTOGRAM, "from snapshotted to durable" },
	{ "dcpd_last_durable_timestamp_seconds", GAUGE, "when the last checkpoint became durable, by the job's label run" },
	{ "dcpd_last_durable_step", GAUGE, "the generation of the last durable save, by the job's label run" },
	{ "dcpd_dedup_bytes_saved_total", COUNTER, "bytes of replicas that saves did not write" },
	{ "dcpd_verify_failures_total", COUNTER, "verify jobs that failed, by level" },
	{ "dcpd_workers", GAUGE, "worker processes" },
	{ "dcpd_workers_lost_total", COUNTER, "worker processes that died without being told to" },
	{ "dcpd_stale_frames_total", COUNTER, "messages of an attempt that is over" },
	{ "dcpd_shm_bytes", GAUGE, "shared memory of state dicts" },
	{ "dcpd_state_dicts", GAUGE, "state dicts in shared memory" },
	{ "dcpd_storage_free_bytes", GAUGE, "at the latest probe" },
	{ "dcpd_storage_state", GAUGE, "1 for the state that the storage is in" },
	{ "dcpd_journal_commits_total", COUNTER, "group commits of the journal" },
	{ "dcpd_journal_waiting", GAUGE, "transactions that wait for the disk" },
	{ "dcpd_http_requests_total", COUNTER, "answers by route and status" },
	{ "dcpd_http_request_duration_seconds", HISTOGRAM, "from the first byte to the answer" },
	{ "dcpd_http_connections", GAUGE, "open connections" },
	{ "dcpd_http_streams", GAUGE, "open event streams" },
};

enum { FAMILIES = sizeof families / sizeof *families };

struct series {
	struct series *next;
	char labels[LABELS_MAX];
	double value;                      /* a histogram's sum */
	uint64_t buckets[BUCKETS + 1], count;
};

struct metrics {
	struct series *first[FAMILIES];
	uint32_t count, dropped;
};

FALLIBLE enum err metrics_new(struct metrics **out)
{
	*out = mem_zalloc(1, sizeof **out);
	return *out ? OK : ERR(NO_MEMORY, "cannot keep metrics");
}

void metrics_free(struct metrics *m)
{
	for (int f = 0; m && f < FAMILIES; f++)
		for (struct series *s = m->first[f], *next; s; s = next) {
			next = s->next;
			mem_free(s);
		}
	mem_free(m);
}

static int family_of(const char *name)
{
	for (int f = 0; f < FAMILIES; f++)
		if (strcmp(families[f].name, name) == 0)
			return f;
	must_failed(name, ERR_PLACE);
}

static struct series *find(struct metrics *m, const char *name, const char *labels)
{
	int f = family_of(name);
	struct series **at = &m->first[f];

	while (*at && strcmp((*at)->labels, labels) != 0)
		at = &(*at)->next;
	if (*at)
		return *at;
	if (m->count >= METRICS_SERIES_MAX || strlen(labels) >= LABELS_MAX || !(*at = mem_zalloc(1, sizeof **at))) {
		m->dropped++;
		return NULL;
	}
	m->count++;
	snprintf((*at)->labels, sizeof(*at)->labels, "%s", labels);
	return *at;
}

void metrics_add(struct metrics *m, const char *family, const char *labels, double by)
{
	struct series *s = find(m, family, labels);

	if (s)
		s->value += by;
}

void metrics_set(struct metrics *m, const char *family, const char *labels, double value)
{
	struct series *s = find(m, family, labels);

	if (s)
		s->value = value;
}

void metrics_observe(struct metrics *m, const char *family, const char *labels, double value)
{
	struct series *s = find(m, family, labels);
	int b = 0;

	if (!s)
		return;
	while (b < BUCKETS && value > bounds[b])
		b++;
	s->buckets[b]++;
	s->count++;
	s->value += value;
}

/* ---- gauges that mirror state ---- */

static void fill_jobs(struct server *s)
{
	uint32_t counts[JOB_KIND_COUNT][JOB_STATE_COUNT] = { { 0 } };
	char labels[LABELS_MAX];

	for (const struct job *j = s->jobs->live; j; j = j->live_next)
		if (!j->dry_run)
			counts[j->kind][j->state]++;
	for (int k = 0; k < JOB_KIND_COUNT; k++)
		for (int st = 0; st < JOB_SUCCEEDED; st++) {
			snprintf(labels, sizeof labels, "kind=\"%s\",state=\"%s\"", job_kind_text((enum job_kind)k),
				 job_state_text((enum job_state)st));
			metrics_set(s->metrics, "dcpd_jobs", labels, counts[k][st]);
		}
}

static void fill_storages(struct server *s)
{
	char labels[LABELS_MAX];

	for (uint32_t i = 0; i < storage_count(s); i++) {
		const struct storage *st = storage_at(s, i);
		snprintf(labels, sizeof labels, "storage=\"%s\"", st->name);
		if (st->probed_ms)
			metrics_set(s->metrics, "dcpd_storage_free_bytes", labels, (double)st->free_bytes);
		for (int state = STORAGE_UNKNOWN; state <= STORAGE_STATE_GONE; state++) {
			snprintf(labels, sizeof labels, "storage=\"%s\",state=\"%s\"", st->name,
				 storage_state_text((enum storage_state)state));
			metrics_set(s->metrics, "dcpd_storage_state", labels, (int)st->state == state);
		}
	}
}

static void fill(struct server *s)
{
	struct metrics *m = s->metrics;
	static const char *const states[] = { "starting", "idle", "busy", "ending" };
	uint64_t limit, used, free_bytes;
	char labels[LABELS_MAX];

	metrics_set(m, "dcpd_build_info", "version=\"" DCPD_VERSION "\"", 1);
	metrics_set(m, "dcpd_start_time_seconds", "", (double)s->started_ms / 1000);
	fill_jobs(s);
	fill_storages(s);
	for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
		snprintf(labels, sizeof labels, "state=\"%s\"", states[i]);
		metrics_set(m, "dcpd_workers", labels, workers_count(s, NULL, states[i]));
	}
	state_dict_shm(s, &limit, &used, &free_bytes);
	metrics_set(m, "dcpd_shm_bytes", "state=\"used\"", (double)used);
	metrics_set(m, "dcpd_shm_bytes", "state=\"limit\"", (double)limit);
	metrics_set(m, "dcpd_state_dicts", "", state_dict_count(s));
	metrics_set(m, "dcpd_journal_commits_total", "", (double)journal_commits(s->journal));
	metrics_set(m, "dcpd_journal_waiting", "", (double)journal_waiting(s->journal));
}

/* ---- text ---- */

static void put_value(struct buf *out, double v)
{
	if (v == floor(v) && fabs(v) < 1e15)
		buf_printf(out, " %.0f\n", v);
	else
		buf_printf(out, " %.9g\n", v);
}

static void put_histogram(struct buf *out, const struct family *f, const struct series *s)
{
	const char *comma = s->labels[0] ? "," : "";
	uint64_t sum = 0;

	for (int b = 0; b <= BUCKETS; b++) {
		sum += s->buckets[b];
		buf_printf(out, "%s_bucket{%s%sle=\"", f->name, s->labels, comma);
		if (b < BUCKETS)
			buf_printf(out, "%g\"} %ju\n", bounds[b], (uintmax_t)sum);
		else
			buf_printf(out, "+Inf\"} %ju\n", (uintmax_t)sum);
	}
	const char *open = s->labels[0] ? "{" : "", *close = s->labels[0] ? "}" : "";
	buf_printf(out, "%s_sum%s%s%s", f->name, open, s->labels, close);
	put_value(out, s->value);
	buf_printf(out, "%s_count%s%s%s %ju\n", f->name, open, s->labels, close, (uintmax_t)s->count);
}

void metrics_render(struct server *server, struct buf *out)
{
	static const char *const types[] = { "counter", "gauge", "histogram" };

	fill(server);
	for (int i = 0; i < FAMILIES; i++) {
		const struct family *f = &families[i];
		if (!server->metrics->first[i])
			continue;
		buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", f->name, f->help, f->name, types[f->type]);
		for (const struct series *s = server->metrics->first[i]; s; s = s->next) {
			if (f->type == HISTOGRAM) {
				put_histogram(out, f, s);
				continue;
			}
			buf_printf(out, s->labels[0] ? "%s{%s}" : "%s%s", f->name, s->labels);
			put_value(out, s->value);
		}
	}
}
