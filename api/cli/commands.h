/* commands.h: dcpctl's commands. Each gets its words and options parsed by its row of the table in main.c. */
#pragma once
#include "api/cli/args.h"
#include "api/cli/client.h"
#include "api/cli/follow.h"
#include "spec/kinds.h"

struct command {
	const char *name, *usage, *options, *what;  /* options: see args_parse */
	unsigned words_min, words_max;
	int (*run)(const struct command *self, struct client *c, const struct args *a);
};

typedef int command_fn(const struct command *self, struct client *c, const struct args *a);

/* jobs.c. A kind's command has its name, but for cp, which replicates. */
const char *jobs_command(enum job_kind kind);
bool jobs_kind(const char *command, enum job_kind *out);
command_fn jobs_submit, jobs_check, jobs_list, jobs_one, jobs_act, jobs_events;
/* look.c */
command_fn look_status, look_ls, look_show, look_rm, look_hold, look_lineage, look_runs, look_alias, look_transforms;
/* resume.c */
command_fn resume_print;
/* keep.c */
command_fn keep_trash, keep_undelete, keep_policy, keep_policies;
/* Appends the members of all pages of a list to *all. */
FALLIBLE enum err look_all(struct client *c, const char *path, const char *member, json_t *all);
/* hooks.c */
command_fn hooks_webhook, hooks_webhooks, hooks_chain, hooks_chains;
/* cat.c */
command_fn cat_tensor;
