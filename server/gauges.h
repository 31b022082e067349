/* gauges.h: the metrics that mirror state: jobs, queues, storages, workers, memory, runs, and the process itself. */
#pragma once
#include <stdint.h>

struct device_images;
struct jobs;
struct journal;
struct metrics;
struct runs;
struct state_dicts;
struct storages;
struct tiers;
struct workers;

/* The parts below that have state to mirror. */
struct gauge_parts {
	struct metrics *metrics;
	const struct jobs *jobs;
	struct journal *journal;
	const struct runs *runs;
	const struct tiers *tiers;
	const struct state_dicts *state_dicts;
	const struct storages *storages;
	const struct workers *workers;
	const struct device_images *device_images;
	uint64_t neighbour_limit;
	int64_t started_ms;           /* wall clock */
};

/* Sets them to what is now: before metrics_render. */
void gauges_fill(const struct gauge_parts *s);
