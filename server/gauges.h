/* gauges.h: the metrics that mirror state: jobs, queues, storages, workers, memory, runs, and the process itself. */
#pragma once

struct server;

/* Sets them to what is now: before metrics_render. */
void gauges_fill(struct server *s);
