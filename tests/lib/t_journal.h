/* t_journal.h: a journal in a folder of its own, on a loop that nobody runs but the test. */
#pragma once
#include "lib/t_server.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "server/journal.h"
#include "server/loop.h"

struct t_journal {
	char dir[64], path[96];
	struct event_base *base;
	struct loop *loop;
	struct journal *j;
	uint64_t boot;
};

static inline void t_journal_make(struct t_journal *t)
{
	snprintf(t->dir, sizeof t->dir, "/tmp/dcpd-journal-XXXXXX");
	assert_non_null(mkdtemp(t->dir));
	snprintf(t->path, sizeof t->path, "%s/journal.db", t->dir);
	t->base = event_base_new();
	T_OK(loop_new(t->base, &t->loop));
}

static inline void t_journal_reopen(struct t_journal *t)
{
	journal_close(t->j);
	t->j = NULL;
	T_OK(journal_open(t->path, t->loop, &t->j, &t->boot));
}

static inline void t_journal_remove(struct t_journal *t)
{
	static const char *const ends[] = { "", "-wal", "-shm" };
	char path[128];

	journal_close(t->j);
	t->j = NULL;
	loop_free(t->loop);
	event_base_free(t->base);
	for (int i = 0; i < 3; i++) {
		snprintf(path, sizeof path, "%s%s", t->path, ends[i]);
		unlink(path);
	}
	rmdir(t->dir);
}
