/* commands.h: dcpctl's commands. Each gets its words and options parsed by its row of the table in main.c. */
#pragma once
#include "api/cli/args.h"
#include "api/cli/client.h"
#include "api/cli/follow.h"

struct command {
	const char *name, *usage, *options, *what;  /* options: see args_parse */
	unsigned words_min, words_max;
	int (*run)(const struct command *self, struct client *c, const struct args *a);
};

typedef int command_fn(const struct command *self, struct client *c, const struct args *a);

/* jobs.c */
command_fn jobs_submit, jobs_check, jobs_list, jobs_one, jobs_act, jobs_events;
/* look.c */
command_fn look_status, look_ls, look_show, look_rm, look_hold, look_runs, look_alias, look_transforms;
/* cat.c */
command_fn cat_tensor;
