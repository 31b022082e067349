/* chain_impl.h: shared by the files chain*.c; nobody else includes it. */
#pragma once
#include "server/chain.h"

struct execution;

struct chain {
	struct follower base;
	struct follower_filter filter; /* points into the document */
	bool newest;                   /* "behind" */
	int64_t retries;
	struct execution *running;
	bool is_noted, is_gone;        /* gone: removed; freed by the callback that is on its way */
};

static inline struct chain *chain_of(struct follower *f)
{
	return (struct chain *)(void *)f;
}

/* The one that runs. */
struct execution {
	struct chain *chain;
	char id[TASK_ID_LEN + 1];
	json_t *doc;                   /* {"storage","name","job","depth","created_at","etag","steps","step","try","jobs","error",…} */
	char job[TASK_ID_LEN + 1];     /* that is waited for; "": none */
	struct loop_timer *timer;
	int64_t refused_ms, refusals;  /* since when (monotone clock), and how often, the step's job could not be made */
	bool is_pending;               /* a callback is on its way */
};

extern const struct follower_kind chain_kind;
void chain_drop(struct follower *f);
