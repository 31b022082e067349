/* lookup.h: questions about checkpoints and segments, asked of narrow, short-lived workers, each with one storage's root only. The
 * questions are those of worker/ctl/README.md ("Look-ups").
 *
 * Each storage has lanes with workers of their own: what jobs ask before they are accepted (LANE_JOBS) never waits behind a list, a
 * tensor or a sweep. Equal questions that wait are asked once. A look-up that waits too long is answered with ERR_BUSY.
 *
 * A worker that has been in one system call for the look-up deadline is killed, the storage is marked stalled, and further questions to
 * it fail at once with ERR_STORAGE_STALLED (but for one that probes, now and then); other storages notice nothing. A worker that is
 * slow, and a long queue, do not make a storage stalled. */
#pragma once
#include <jansson.h>
#include "base/err.h"

struct lookups;
struct storage;

enum { LOOKUP_WAITING_MAX = 1024 };

/* ok: the answer's object; fd: the memfd that came with it, or -1. The callback may take the fd over by setting *fd = -1; it then owes
 * unread_give() of the memfd's size, which lookup_fd_bytes() tells. */
typedef void (*lookup_fn)(void *user, enum err e, const json_t *ok, int *fd);

/* storage: a root's name, or NULL for questions about segments (which come with fds). Takes `question`. The fds are duplicated. */
void lookup_ask(struct lookups *all, const char *storage, json_t *question, const int *fds, uint32_t fd_count, lookup_fn fn,
		void *user);

uint64_t lookup_fd_bytes(int fd);

/* The parts below that look-ups use, and the callback for a storage on which a worker was killed in a system call. */
struct lookup_parts {
	const struct config *config;
	struct loop *loop;
	struct storages *storages;
	struct unread *unread;
	struct workers *workers;
	struct gangs *gangs;
	void (*hangs)(void *user, struct storage *st);
	void *user;
};
FALLIBLE enum err lookups_new(const struct lookup_parts *parts, struct lookups **out);
void lookups_end(struct lookups *all);           /* ends its workers; open questions are answered with ERR_DRAINING */
void lookups_free(struct lookups *l);         /* after lookups_end */
