/* chain_impl.h: shared by the files chain*.c; nobody else includes it. */
#pragma once
#include "server/chain.h"

struct execution;

struct chain {
	struct chain *next;
	struct chains *all;
	char name[FOLLOWER_NAME_MAX + 1];
	uid_t uid;                     /* as whom its jobs run */
	int64_t created_ms;            /* wall clock */
	json_t *doc;
	struct follower_filter filter; /* points into doc */
	bool newest;                   /* "behind" */
	int64_t retries;
	struct execution *running;
	bool is_noted, is_gone;        /* gone: removed; freed by the callback that is on its way */
};

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

struct chains {
	struct server *server;
	struct chain *first;
	uint32_t count;
};

void chain_free(struct chain *c);
void chain_drop(struct chain *c);      /* removed by somebody: out of the list */
/* Checks the document, and makes a chain of a copy of it. */
FALLIBLE enum err chain_new(struct server *s, const char *name, uid_t uid, int64_t created_ms, const json_t *doc, struct chain **out);
