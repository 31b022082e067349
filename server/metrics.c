/* metrics.c: see metrics.h. Series are few (METRICS_SERIES_MAX at most), so that a list per family is found fast enough. */
#include "server/metrics.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/list.h"
#include "base/mem.h"

/* SPAN: a histogram of what jobs do, up to hours; HISTOGRAM: of answers, from half a millisecond. */
enum type { COUNTER, GAUGE, HISTOGRAM, SPAN };
enum { BUCKETS = 14 };

static const double answer_bounds[BUCKETS] = { 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10 };
static const double span_bounds[BUCKETS] = { 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200 };

static const struct family {
	const char *name;
	enum type type;
	const char *help;
} families[] = {
	{ "dcpd_build_info", GAUGE, "1, with the version as a label" },
	{ "dcpd_start_time_seconds", GAUGE, "when the daemon started, since 1970" },
	{ "dcpd_jobs_unfinished", GAUGE, "jobs that have not ended" },
	{ "dcpd_jobs_total", COUNTER, "jobs ended since the start, by outcome" },
	{ "dcpd_job_duration_seconds", SPAN, "from the first attempt's start to the end" },
	{ "dcpd_job_stage_duration_seconds", SPAN, "time that jobs spent in each stage" },
	{ "dcpd_job_bytes_total", COUNTER, "bytes moved by jobs that succeeded" },
	{ "dcpd_comm_bytes_total", COUNTER, "bytes that operations on state dicts moved between ranks, by kind and back end" },
	{ "dcpd_save_lag_seconds", SPAN, "from snapshotted to durable" },
	{ "dcpd_queue_oldest_seconds", GAUGE, "how long the job at the head of its kind has waited for a lane; 0: none waits" },
	{ "dcpd_last_durable_timestamp_seconds", GAUGE, "when a run's last checkpoint became durable, since 1970" },
	{ "dcpd_last_durable_step", GAUGE, "step of a run's last durable checkpoint: the number at its name's end, or the generation" },
	{ "dcpd_lost_work_seconds", GAUGE, "age of the last durable checkpoint of a run whose trainer lives: work lost if it ended now" },
	{ "dcpd_lost_work_steps", GAUGE, "steps from there to the newest snapshot of the run" },
	{ "dcpd_last_verified_timestamp_seconds", GAUGE, "when a checkpoint of a run was last verified without a fault, by level" },
	{ "dcpd_dedup_bytes_saved_total", COUNTER, "bytes of replicas that saves did not write" },
	{ "dcpd_policy_removals_failed_total", COUNTER, "removals by policies that failed" },
	{ "dcpd_policy_unmet_total", COUNTER, "times that the budget of a policy was found to be exceeded by what must stay" },
	{ "dcpd_checkpoints_removed_total", COUNTER, "checkpoints deleted by requests and by policies, for good or into the trash" },
	{ "dcpd_checkpoint_removed_bytes_total", COUNTER, "bytes of the checkpoints deleted" },
	{ "dcpd_stale_saves_total", COUNTER, "saves whose tensors all equal those of the save before in their run" },
	{ "dcpd_verify_failures_total", COUNTER, "verify jobs that failed, by level" },
	{ "dcpd_workers", GAUGE, "worker processes" },
	{ "dcpd_workers_lost_total", COUNTER, "worker processes that died without being told to" },
	{ "dcpd_stale_frames_total", COUNTER, "messages of an attempt that is over" },
	{ "dcpd_shm_bytes", GAUGE, "shared memory of state dicts" },
	{ "dcpd_device_copies_total", COUNTER, "copies between device memory and segments, by result" },
	{ "dcpd_device_copy_bytes_total", COUNTER, "bytes that they moved" },
	{ "dcpd_device_images", GAUGE, "device images, also those that only engines hold" },
	{ "dcpd_device_image_bytes", GAUGE, "device memory that they take" },
	{ "dcpd_rings_dropped_total", COUNTER, "rings whose process ended, and whose memory was given back before the lease was over" },
	{ "dcpd_state_dicts", GAUGE, "state dicts in shared memory" },
	{ "dcpd_versions_published_total", COUNTER, "versions of publications that all ranks sealed" },
	{ "dcpd_version_applied_seconds", SPAN, "from a version's publication to the moment when all ranks of a subscriber use it" },
	{ "dcpd_update_bytes_total", COUNTER, "bytes of versions given to subscribers: changed since the one before, or kept" },
	{ "dcpd_subscribers", GAUGE, "subscribers of publications" },
	{ "dcpd_subscriber_lag_seconds", GAUGE, "how long the subscriber furthest behind has lacked its publication's newest version" },
	{ "dcpd_storage_free_bytes", GAUGE, "at the latest probe" },
	{ "dcpd_storage_read_bytes_total", COUNTER, "bytes that workers read from the storage, page cache included" },
	{ "dcpd_storage_written_bytes_total", COUNTER, "bytes that workers wrote to the storage" },
	{ "dcpd_storage_io_bytes_total", COUNTER, "bytes that workers moved, by direction and stage of the job; lookup: of no job" },
	{ "dcpd_storage_io_seconds_total", COUNTER, "time in which jobs moved them: the sum over jobs, not over their workers" },
	{ "dcpd_storage_state", GAUGE, "1 for the state that the storage is in" },
	{ "dcpd_tier_waiting", GAUGE, "durable checkpoints that are not yet in the storage behind theirs" },
	{ "dcpd_tier_waiting_bytes", GAUGE, "and their bytes" },
	{ "dcpd_tier_lag_seconds", GAUGE, "for how long the oldest of them has been durable; 0: none waits" },
	{ "dcpd_tier_failing", GAUGE, "1 if the last copy to the storage behind failed" },
	{ "dcpd_tier_failures_total", COUNTER, "copies to the storage behind that failed, and are tried again" },
	{ "dcpd_tier_skipped_total", COUNTER, "checkpoints that were superseded before they were copied behind" },
	{ "dcpd_cluster_nodes", GAUGE, "nodes of the cluster, by state" },
	{ "dcpd_cluster_joined", GAUGE, "0 while this node is not in its cluster: its etcd does not answer, or refuses it" },
	{ "dcpd_cluster_failures_total", COUNTER, "attempts to reach the cluster's etcd that failed" },
	{ "dcpd_replicas_total", COUNTER, "copies of saves for other nodes' memory, by outcome: held there, or failed" },
	{ "dcpd_replicated_seconds", SPAN, "from snapshotted to the moment when all neighbours that a save asks for have it" },
	{ "dcpd_neighbour_bytes", GAUGE, "shared memory for copies of other nodes' checkpoints, used and limit" },
	{ "dcpd_journal_commits_total", COUNTER, "group commits of the journal" },
	{ "dcpd_journal_writable", GAUGE, "0 while the state directory is full and dcpd is read-only" },
	{ "dcpd_journal_waiting", GAUGE, "transactions that wait for the disk" },
	{ "dcpd_trace_spans_total", COUNTER, "spans of jobs, by outcome: sent to the collector, or dropped" },
	{ "dcpd_http_requests_total", COUNTER, "answers by route, method and class of status" },
	{ "dcpd_http_request_duration_seconds", HISTOGRAM, "from the first byte to the answer" },
	{ "dcpd_http_connections", GAUGE, "open connections" },
	{ "dcpd_http_streams", GAUGE, "open event streams" },
	{ "dcpd_http_unread_bytes", GAUGE, "bytes of answers that wait for their clients to read them" },
	{ "process_cpu_seconds_total", COUNTER, "CPU time of the daemon, without its workers" },
	{ "process_resident_memory_bytes", GAUGE, "memory of the daemon, without its workers" },
	{ "process_virtual_memory_bytes", GAUGE, "address space of the daemon" },
	{ "process_open_fds", GAUGE, "descriptors that the daemon holds" },
	{ "process_max_fds", GAUGE, "descriptors that it may hold" },
	{ "process_start_time_seconds", GAUGE, "when the process started, since 1970" },
};

enum { FAMILIES = sizeof families / sizeof *families };

struct series {
	struct series *next;
	double value;                      /* a histogram's sum */
	uint64_t buckets[BUCKETS + 1], count;
	char labels[];
};

struct metrics {
	struct series *first[FAMILIES];
	uint32_t count;
};

FALLIBLE enum err metrics_new(struct metrics **out)
{
	*out = mem_zalloc(1, sizeof **out);
	return *out ? OK : ERR(NO_MEMORY, "cannot keep metrics");
}

void metrics_free(struct metrics *m)
{
	for (int f = 0; m && f < FAMILIES; f++)
		list_each(s, m->first[f])
			mem_free(s);
	mem_free(m);
}

static int family_of(const char *name)
{
	for (int f = 0; f < FAMILIES; f++)
		if (strcmp(families[f].name, name) == 0)
			return f;
	must_failed(name, ERR_PLACE);
}

static bool is_histogram(const struct family *f)
{
	return f->type == HISTOGRAM || f->type == SPAN;
}

static const double *bounds_of(const struct family *f)
{
	return f->type == SPAN ? span_bounds : answer_bounds;
}

static struct series *find(struct metrics *m, const char *name, const char *labels)
{
	int f = family_of(name);
	struct series **at = &m->first[f];

	while (*at && strcmp((*at)->labels, labels) != 0)
		at = &(*at)->next;
	if (*at)
		return *at;
	if (m->count >= METRICS_SERIES_MAX || !(*at = mem_zalloc(1, sizeof **at + strlen(labels) + 1)))
		return NULL;
	m->count++;
	memcpy((*at)->labels, labels, strlen(labels) + 1);
	return *at;
}

void metrics_clear(struct metrics *m, const char *family)
{
	struct series **first = &m->first[family_of(family)];

	while (*first) {
		struct series *s = *first;
		*first = s->next;
		mem_free(s);
		m->count--;
	}
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
	const double *bounds = bounds_of(&families[family_of(family)]);
	while (b < BUCKETS && value > bounds[b])
		b++;
	s->buckets[b]++;
	s->count++;
	s->value += value;
}

/* ---- text ---- */

static void put_value(struct buf *out, double v)
{
	char text[32];

	snprintf(text, sizeof text, v == floor(v) && fabs(v) < 1e15 ? "%.0f" : "%.15g", v);
	if (strtod(text, NULL) != v) /* the shortest text that a scraper reads as the same number */
		snprintf(text, sizeof text, "%.17g", v);
	buf_printf(out, " %s\n", text);
}

static void put_histogram(struct buf *out, const struct family *f, const struct series *s)
{
	const char *comma = s->labels[0] ? "," : "";
	const double *bounds = bounds_of(f);
	uint64_t sum = 0;

	for (int b = 0; b <= BUCKETS; b++) {
		sum += s->buckets[b];
		buf_printf(out, "%s_bucket{%s%sle=\"", f->name, s->labels, comma);
		if (b < BUCKETS) /* 1.0, not 1: the canonical form, which a series of the other text form must equal */
			buf_printf(out, bounds[b] == floor(bounds[b]) ? "%.1f\"} %ju\n" : "%g\"} %ju\n", bounds[b], (uintmax_t)sum);
		else
			buf_printf(out, "+Inf\"} %ju\n", (uintmax_t)sum);
	}
	const char *open = s->labels[0] ? "{" : "", *close = s->labels[0] ? "}" : "";
	buf_printf(out, "%s_sum%s%s%s", f->name, open, s->labels, close);
	put_value(out, s->value);
	buf_printf(out, "%s_count%s%s%s %ju\n", f->name, open, s->labels, close, (uintmax_t)s->count);
}

/* In OpenMetrics a counter's family has its name without the suffix of its samples, and may have a unit. */
static void put_head(struct buf *out, const struct family *f, bool open_metrics)
{
	static const char *const types[] = { "counter", "gauge", "histogram", "histogram" };
	static const char *const units[] = { "seconds", "bytes" };
	struct str name = str_of(f->name);

	if (open_metrics && f->type == COUNTER)
		name.n -= strlen("_total");
	buf_printf(out, "# HELP %.*s %s\n# TYPE %.*s %s\n", (int)name.n, name.p, f->help, (int)name.n, name.p, types[f->type]);
	for (size_t u = 0; open_metrics && u < sizeof units / sizeof *units; u++) {
		size_t n = strlen(units[u]);
		if (name.n > n && memcmp(name.p + name.n - n, units[u], n) == 0 && name.p[name.n - n - 1] == '_')
			buf_printf(out, "# UNIT %.*s %s\n", (int)name.n, name.p, units[u]);
	}
}

void metrics_render(const struct metrics *m, bool open_metrics, struct buf *out)
{
	for (int i = 0; i < FAMILIES; i++) {
		const struct family *f = &families[i];
		if (!m->first[i])
			continue;
		put_head(out, f, open_metrics);
		for (const struct series *s = m->first[i]; s; s = s->next) {
			if (is_histogram(f)) {
				put_histogram(out, f, s);
				continue;
			}
			buf_printf(out, s->labels[0] ? "%s{%s}" : "%s%s", f->name, s->labels);
			put_value(out, s->value);
		}
	}
	if (open_metrics)
		buf_puts(out, "# EOF\n");
}
