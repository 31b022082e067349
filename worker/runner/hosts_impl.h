/* hosts_impl.h: what hosts.c and hosts_data.c share. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>

#include "runner/hosts.h"

struct hosts_seen {
	uint64_t beat;
	int64_t at_ms;                 /* when it last grew; 0: never seen */
	int64_t read_ms;               /* when its page was last read */
};

struct hosts {
	struct job *job;
	const struct spec_hosts *spec;
	char name[96];                 /* ".dcpd-hosts-{id}" */
	char path[STAGING_BESIDE_MAX]; /* of it, from the top of the store */
	const struct store *store;
	uint32_t index, count, world;
	int64_t timeout_ms, began_ms;
	struct store_at dir;
	uint32_t *host_of;             /* per rank of the world */
	bool *local;
	struct hosts_seen *seen;       /* per host */
	char leader_job[64];
	bool leads, met;
	bool is_committed;             /* the leader had committed before this attempt met it */
	struct rank_segments whole;    /* the world's, for input.state_dict */
	/* the beat */
	pthread_t beater;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	bool beating, stop;
};

/* Contents of the rendezvous directory now. */
struct hosts_view {
	bool gone;
	struct vec(char *) names;
};

/* Reads which host's job leads. */
FALLIBLE enum err hosts_read_leader(struct hosts *h);
const char *hosts_name(const struct hosts *h, uint32_t host);
/* Our files are written: tells our digests; the leader waits for those of the others and puts them in the run's tables. */
FALLIBLE enum err hosts_exchange(struct hosts *h, struct run *run);
/* "heads-3" */
void hosts_file(char out[32], const char *what, uint32_t host);
/* A page that appears whole. */
FALLIBLE enum err hosts_put(struct hosts *h, const char *what, const void *bytes, uint64_t n, bool durable);
/* Waits until every host has the file `what`; fails if one says that it failed, is silent, or has not come. */
FALLIBLE enum err hosts_wait_all(struct hosts *h, const char *what);
