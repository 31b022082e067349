/* follow.h: waits for a job and shows how it goes. */
#pragma once
#include "api/cli/client.h"

enum exit_code {
	EXIT_DONE, EXIT_DIFFERS, EXIT_USAGE, EXIT_NO_DAEMON, EXIT_TIMED_OUT, EXIT_JOB_FAILED, EXIT_NOT_FOUND, EXIT_INTERRUPTED = 130
};

struct follow {
	bool json;
	int64_t timeout_ms;         /* 0: none */
};

/* Waits for the job's end and says how it ended; with json the record goes to stdout. */
int follow_job(struct client *c, const char *id, const struct follow *f);
/* Prints the latest error and gives its exit code. */
int follow_failed(const struct client *c, enum err e);
/* GETs the path and prints the answer: whole as JSON, or by `print`. The exit code. */
int follow_show(struct client *c, struct buf *path, bool json, void (*print)(const json_t *doc));
/* Says on stderr which layout rules of a result or plan took nothing, and how many tensors went past one. */
void follow_warn_of_rules(const json_t *result);
void follow_catch_interrupts(void);
