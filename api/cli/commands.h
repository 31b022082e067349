/* commands.h: dcpctl's commands. Each gets its words and options parsed by its row of the table in commands.c. */
#pragma once
#include "api/cli/args.h"
#include "api/cli/client.h"
#include "api/cli/follow.h"
#include "spec/kinds.h"

struct command {
	const char *name, *usage, *options, *what;  /* options: see args_parse */
	const char *more;                           /* sentences for the manual and --help; NULL: `what` is all */
	unsigned words_min, words_max;
	int (*run)(const struct command *self, struct client *c, const struct args *a);
};

typedef int command_fn(const struct command *self, struct client *c, const struct args *a);

struct command_option {
	const char *command;                        /* NULL: of every command that has it */
	const char *name, *value, *what;            /* value: "N", "a|b|c"; NULL: a flag */
};

/* commands.c. Texts of a job kind's command, and of an option's value, are good until the next call. */
bool commands_at(unsigned index, struct command *out);                  /* false beyond the last */
bool commands_find(struct str name, struct command *out);
/* The options of a command, the global ones last. */
bool commands_option(const struct command *k, unsigned index, struct command_option *out);

/* help.c */
void help_all(void);
void help_command(const struct command *k);

/* complete.c */
int complete_line(const char *line);

/* help.c, complete.c: they need no daemon */
command_fn help_manual, complete_script;
/* jobs.c. A kind's command has its name, but for cp, which replicates. */
const char *jobs_command(enum job_kind kind);
bool jobs_kind(const char *command, enum job_kind *out);
command_fn jobs_submit, jobs_check, jobs_list, jobs_one, jobs_act, jobs_events;
/* look.c */
command_fn look_status, look_ls, look_show, look_rm, look_hold, look_lineage, look_runs, look_alias, look_transforms, look_audit;
/* Appends "/v1/checkpoints/main/run1%2Fa" or "/v1/state-dicts/x", and `rest`; ends the path. */
FALLIBLE enum err look_path(struct buf *b, const char *ref, const char *rest);
void look_print_run(const json_t *run);
/* nodes.c */
command_fn look_nodes, look_drain, look_forget, look_publications, look_device_images, look_keep, look_drop;
/* tree.c, plot.c, explain.c, top.c, watch.c */
command_fn doctor_show;     /* doctor.c */
command_fn tree_show, plot_show, explain_code, top_show, watch_one;
struct watch_wishes {
	int64_t every_ms;           /* --interval */
	uint64_t count;             /* --count; 0: without end */
};
FALLIBLE enum err watch_wishes(const struct args *a, struct watch_wishes *out);
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
command_fn image_save;      /* image.c */
