/* gauges.c: see gauges.h. A family whose labels name things that come and go is emptied first: a storage that was removed while it
 * stalled would else be reported as stalled for ever. */
#include "server/gauges.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/device_image.h"
#include "server/service_clock.h"
#include "server/job_impl.h"
#include "server/metrics.h"
#include "server/runs.h"
#include "server/storage.h"
#include "server/tier.h"
#include "server/worker.h"

enum { LABELS_MAX = 160 };

static void fill_jobs(const struct gauge_parts *s)
{
	uint32_t counts[JOB_KIND_COUNT][JOB_STATE_COUNT] = { { 0 } };
	int64_t now = clock_mono_ms(), oldest[JOB_KIND_COUNT] = { 0 };
	char labels[LABELS_MAX];

	for (const struct job *j = s->jobs->live; j; j = j->live_next) {
		if (j->dry_run)
			continue;
		counts[j->kind][j->state]++;
		if (j->step == STEP_WAITING && j->lane && now - j->queued_ms > oldest[j->kind])
			oldest[j->kind] = now - j->queued_ms;
	}
	for (int k = 0; k < JOB_KIND_COUNT; k++) {
		snprintf(labels, sizeof labels, "kind=\"%s\"", kind_of((enum job_kind)k)->name);
		metrics_set(s->metrics, "dcpd_queue_oldest_seconds", labels, (double)oldest[k] / 1000);
		for (int st = 0; st < JOB_SUCCEEDED; st++) {
			snprintf(labels, sizeof labels, "kind=\"%s\",state=\"%s\"", kind_of((enum job_kind)k)->name,
				 job_state_text((enum job_state)st));
			metrics_set(s->metrics, "dcpd_jobs_unfinished", labels, counts[k][st]);
		}
	}
}

static void fill_io(struct metrics *m, const struct storage *st)
{
	static const char *const directions[] = { "read", "write" };
	char labels[LABELS_MAX];

	for (const struct storage_io *io = st->io; io && io < st->io + STORAGE_STAGES_MAX && io->stage[0]; io++)
		for (int w = 0; w < 2; w++) {
			if (!io->bytes[w])
				continue;
			snprintf(labels, sizeof labels, "storage=\"%s\",direction=\"%s\",stage=\"%s\"", st->name, directions[w], io->stage);
			metrics_set(m, "dcpd_storage_io_bytes_total", labels, (double)io->bytes[w]);
			metrics_set(m, "dcpd_storage_io_seconds_total", labels, (double)io->ns[w] / 1e9);
		}
}

static void fill_storages(const struct gauge_parts *s)
{
	char labels[LABELS_MAX];

	metrics_clear(s->metrics, "dcpd_storage_free_bytes");
	metrics_clear(s->metrics, "dcpd_storage_state");
	metrics_clear(s->metrics, "dcpd_storage_read_bytes_total");
	metrics_clear(s->metrics, "dcpd_storage_written_bytes_total");
	metrics_clear(s->metrics, "dcpd_storage_io_bytes_total");
	metrics_clear(s->metrics, "dcpd_storage_io_seconds_total");
	for (uint32_t i = 0; i < storage_count(s->storages); i++) {
		const struct storage *st = storage_at(s->storages, i);
		snprintf(labels, sizeof labels, "storage=\"%s\"", st->name);
		if (st->probed_ms && st->total_bytes)
			metrics_set(s->metrics, "dcpd_storage_free_bytes", labels, (double)st->free_bytes);
		metrics_set(s->metrics, "dcpd_storage_read_bytes_total", labels, (double)st->read_bytes);
		metrics_set(s->metrics, "dcpd_storage_written_bytes_total", labels, (double)st->written_bytes);
		fill_io(s->metrics, st);
		for (int state = STORAGE_UNKNOWN; state <= STORAGE_UNAVAILABLE; state++) {
			snprintf(labels, sizeof labels, "storage=\"%s\",state=\"%s\"", st->name,
				 storage_state_text((enum storage_state)state));
			metrics_set(s->metrics, "dcpd_storage_state", labels, (int)st->state == state);
		}
	}
}

/* Linux tells the number of descriptors as the folder's size since 6.2; before that the entries are counted. */
static uint64_t open_fds(void)
{
	struct stat st;
	uint64_t n = 0;

	if (stat("/proc/self/fd", &st) == 0 && st.st_size > 0)
		return (uint64_t)st.st_size;
	DIR *d = opendir("/proc/self/fd");
	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n > 3 ? n - 3 : 0; /* without ".", ".." and the folder itself */
}

/* The names and meanings are those of every Prometheus client library. */
static void fill_process(const struct gauge_parts *s)
{
	struct metrics *m = s->metrics;
	unsigned long long pages = 0, resident = 0;
	struct rusage use;
	struct rlimit fds;
	FILE *f = fopen("/proc/self/statm", "re");

	if (f && fscanf(f, "%llu %llu", &pages, &resident) == 2) {
		metrics_set(m, "process_virtual_memory_bytes", "", (double)pages * (double)sysconf(_SC_PAGESIZE));
		metrics_set(m, "process_resident_memory_bytes", "", (double)resident * (double)sysconf(_SC_PAGESIZE));
	}
	if (f)
		fclose(f);
	if (getrusage(RUSAGE_SELF, &use) == 0)
		metrics_set(m, "process_cpu_seconds_total", "",
			    (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
				    (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6);
	if (getrlimit(RLIMIT_NOFILE, &fds) == 0)
		metrics_set(m, "process_max_fds", "", (double)fds.rlim_cur);
	metrics_set(m, "process_open_fds", "", (double)open_fds());
	metrics_set(m, "process_start_time_seconds", "", (double)s->started_ms / 1000);
}

static bool lives(const void *user, const char *state_dict)
{
	return state_dict_lives(user, str_of(state_dict));
}

void gauges_fill(const struct gauge_parts *s)
{
	struct metrics *m = s->metrics;
	static const char *const states[] = { "starting", "idle", "busy", "ending" };
	uint64_t limit, used, free_bytes;
	uint32_t device_images;
	char labels[LABELS_MAX];

	metrics_set(m, "dcpd_build_info", "version=\"" DCPD_VERSION "\"", 1);
	metrics_set(m, "dcpd_start_time_seconds", "", (double)s->started_ms / 1000);
	fill_jobs(s);
	fill_storages(s);
	fill_process(s);
	tier_fill(s->tiers, m);
	runs_fill(s->runs, &(struct run_trainers){ lives, s->state_dicts }, m);
	for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
		snprintf(labels, sizeof labels, "state=\"%s\"", states[i]);
		metrics_set(m, "dcpd_workers", labels, workers_count(s->workers, NULL, states[i]));
	}
	state_dict_shm(s->state_dicts, &limit, &used, &free_bytes);
	metrics_set(m, "dcpd_shm_bytes", "state=\"used\"", (double)used);
	metrics_set(m, "dcpd_shm_bytes", "state=\"limit\"", (double)limit);
	metrics_set(m, "dcpd_device_image_bytes", "", (double)device_images_bytes(s->device_images, &device_images));
	metrics_set(m, "dcpd_device_images", "", device_images);
	metrics_set(m, "dcpd_shm_bytes", "state=\"orphaned\"", (double)state_dict_orphaned(s->state_dicts));
	metrics_set(m, "dcpd_neighbour_bytes", "state=\"used\"", (double)state_dict_replica_bytes(s->state_dicts));
	metrics_set(m, "dcpd_neighbour_bytes", "state=\"limit\"", (double)s->neighbour_limit);
	metrics_set(m, "dcpd_state_dicts", "", state_dict_count(s->state_dicts));
	double lag = 0;
	metrics_set(m, "dcpd_subscribers", "", state_dict_subscribers(s->state_dicts, &lag));
	metrics_set(m, "dcpd_subscriber_lag_seconds", "", lag);
	metrics_set(m, "dcpd_journal_commits_total", "", (double)journal_commits(s->journal));
	metrics_set(m, "dcpd_journal_writable", "", journal_may_write(s->journal) == OK);
	metrics_set(m, "dcpd_journal_waiting", "", (double)journal_waiting(s->journal));
}

