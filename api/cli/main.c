/* main.c: dcpctl: the table of commands, and which one is meant. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/near.h"

#define WAITING "detach dry-run "
#define PICKING "include= exclude= "
#define CHANGING PICKING "rename= dtype= "
#define COMMON "label= retries= "
#define PACED COMMON "pace= "
#define GROUPED WAITING COMMON "group= device= no-type-check backend= "

static const struct command commands[] = {
	{ "status", "status", "", "the daemon, its storages and workers", 0, 0, look_status },
	{ "ls", "ls [STORAGE[:PREFIX] | shm:]", "", "checkpoints, or state dicts in shared memory", 0, 1, look_ls },
	{ "show", "show REF | shm:NAME [--tensors GLOB]", "tensors=", "one checkpoint or state dict, or its tensors", 1, 1,
	  look_show },
	{ "cat", "cat REF FQN [--slice 0:4,:] [--format raw|npy|safetensors] [--verify digest|none]", "slice= format= verify=",
	  "a tensor's values; with --format its bytes", 2, 2, cat_tensor },
	{ "rm", "rm REF | shm:NAME [--yes] [--detach]", "yes detach",
	  "delete a checkpoint or a state dict; asks first on a terminal, unless --yes", 1, 1, look_rm },
	{ "jobs", "jobs [--filter 'state=running AND kind=save'] [--limit N]", "filter= limit=", "jobs, newest first", 0, 0,
	  jobs_list },
	{ "job", "job ID [--follow]", "follow", "one job", 1, 1, jobs_one },
	{ "cancel", "cancel ID", "", "cancel a job", 1, 1, jobs_act },
	{ "retry", "retry ID", "", "run a failed or cancelled job again", 1, 1, jobs_act },
	{ "events", "events [ID]", "", "what happens, as it happens; of one job with ID", 0, 1, jobs_events },
	{ "load", "load REF shm:NAME [--world-size N] [--layout RULE]... [--no-strict] [--verify none|digest] "
	  "[--optimizer KEY --model shm:NAME] [--pace full|background]",
	  WAITING CHANGING PACED "world-size= layout= no-strict verify= optimizer= model=",
	  "a checkpoint into shared memory", 2, 2, jobs_submit },
	{ "save", "save shm:NAME REF [--generation N] [--overwrite] [--files-per-rank N] [--on-divergence report|fail] "
	  "[--dedup balanced|lowest_rank] [--no-flatten] [--pace full|background]",
	  WAITING CHANGING PACED "generation= format= overwrite files-per-rank= on-divergence= dedup= no-flatten",
	  "a state dict in shared memory as a checkpoint", 2, 2, jobs_submit },
	{ "reshard", "reshard SRC DST [--world-size N] [--layout RULE]... [--format dcp|safetensors] [--overwrite] "
	  "[--pace full|background]",
	  WAITING CHANGING PACED "world-size= layout= format= overwrite files-per-rank= dedup= verify=",
	  "a checkpoint in another layout, world size or format", 2, 2, jobs_submit },
	{ "verify", "verify REF [--level structure|digest|values] [--pace full|background]", WAITING PICKING PACED "level=",
	  "is the checkpoint whole and unchanged?", 1, 1, jobs_submit },
	{ "diff", "diff A B [--rtol R] [--atol A]", WAITING PICKING COMMON "rtol= atol=",
	  "what differs between two checkpoints or state dicts; exit 1 if anything does", 2, 2, jobs_submit },
	{ "check", "check REF [shm:NAME] [--world-size N] [--layout RULE]... [--no-strict]", CHANGING "world-size= layout= no-strict",
	  "can the checkpoint be loaded so, or into that state dict? Nothing is read but metadata; exit 1 if not", 1, 2, jobs_check },
	{ "create", "create shm:SRC shm:DST [--pin-memory] [--no-share-memory]", GROUPED "generation= pin-memory no-share-memory",
	  "a state dict of the same structure, with new tensors", 2, 2, jobs_submit },
	{ "copy", "copy shm:SRC shm:DST", GROUPED "generation=", "tensors and values into a state dict of the same structure", 2, 2,
	  jobs_submit },
	{ "offload", "offload shm:SRC [shm:DST] [--ranks-only 0,2]", GROUPED "generation= ranks-only=",
	  "each rank's own part, as CPU tensors", 1, 2, jobs_submit },
	{ "gather", "gather shm:SRC [shm:DST] [--ranks-only 0,2] [--cpu-offload]", GROUPED "generation= ranks-only= cpu-offload",
	  "whole tensors from their shards", 1, 2, jobs_submit },
	{ "broadcast", "broadcast shm:SRC [shm:DST] [--root N] [--strict] [--cpu-offload] [--layout RULE]... [--world-size N]",
	  GROUPED "generation= root= strict cpu-offload layout= world-size=", "what the root holds, to all ranks", 1, 2, jobs_submit },
	{ "distribute", "distribute shm:SRC [shm:DST] [--layout RULE]... [--world-size N]", GROUPED "generation= layout= world-size=",
	  "whole tensors, cut over the ranks", 1, 2, jobs_submit },
	{ "redistribute", "redistribute shm:SRC [shm:DST] [--layout RULE]... [--world-size N]",
	  GROUPED "generation= layout= world-size=", "sharded tensors in another layout", 1, 2, jobs_submit },
	{ "compare", "compare shm:A shm:B [--values] [--rtol R] [--atol A]", GROUPED "values rtol= atol=",
	  "what differs between two state dicts in memory; exit 1 if anything does", 2, 2, jobs_submit },
	{ NULL, NULL, NULL, NULL, 0, 0, NULL },
};

static void print_words(void)
{
	fputs("REF is STORAGE:NAME, such as main:run1/step-100; a state dict in shared memory is shm:NAME.\n"
	      "RULE is PATTERN=PLACEMENTS@MESH[:RANKS], such as 'model.*=Replicate(),Shard(0)@2x4'; with a ? in front it is no error\n"
	      "if all tensors that it matches lack a dim that it names.\n"
	      "\n"
	      "Job commands wait and show their progress. --detach prints the job's id at once, --dry-run the plan.\n"
	      "--include G, --exclude G (globs), --rename 's/^module\\.//', --dtype G=bfloat16 may be repeated;\n"
	      "Operations on state dicts (create, copy, offload, gather, broadcast, distribute, redistribute, compare) take\n"
	      "--group 0,2,3 (default: all ranks; --ranks-only and --root count within it), --device cpu|cuda,\n"
	      "--backend auto|shm|tcp|nccl and --no-type-check. Without DST they write the next generation of SRC.\n"
	      "--pace background takes little of each core, and longer, so that training on the same cores is hardly slowed.\n"
	      "--label KEY=VALUE marks the job, --retries N lets it start again after a lost worker.\n"
	      "Every command takes --json (the API's object), --timeout 90s, --url URL and --help.\n"
	      "\n"
	      "The daemon is found by DCPD_URL (http://... or unix:///path, with DCPD_TOKEN or DCPD_TOKEN_FILE), else at\n"
	      "$XDG_STATE_HOME/dcpd/dcpd.sock, then /run/dcpd/dcpd.sock.\n"
	      "\n"
	      "Exit: 0 done, 1 differs or does not fit, 2 wrong usage, 3 no daemon, 4 timed out, 5 the job failed, 6 not found,\n"
	      "130 interrupted, or answered with no.\n", stdout);
}

static void print_help(void)
{
	puts("dcpctl: save, load, reshard, verify and compare checkpoints through dcpd\n");
	for (const struct command *k = commands; k->name; k++)
		printf("  dcpctl %s\n      %s\n", k->usage, k->what);
	putchar('\n');
	print_words();
}

static void print_command_help(const struct command *k)
{
	const char *p = k->options;

	printf("dcpctl %s\n    %s\n\noptions:", k->usage, k->what);
	while (*p) {
		size_t n = strcspn(p, " ");
		bool valued = p[n - 1] == '=';
		printf(" --%.*s%s", (int)(n - valued), p, valued ? " X" : "");
		p += n + strspn(p + n, " ");
	}
	puts(" --json --timeout X --url X --help\n");
	print_words();
}

static int usage(const struct command *k)
{
	if (k)
		fprintf(stderr, "usage: dcpctl %s\n", k->usage);
	else
		fputs("usage: dcpctl COMMAND ...; see dcpctl --help\n", stderr);
	return EXIT_USAGE;
}

static int run(const struct command *k, int argc, char *const *argv)
{
	struct client *c = NULL;
	struct args a;
	int code;
	enum err e = args_parse(argc, argv, k->options, &a);

	if (e) {
		show_error();
		return usage(k);
	}
	if (args_flag(&a, "help")) {
		print_command_help(k);
		return EXIT_DONE;
	}
	if (a.word_count < k->words_min || a.word_count > k->words_max)
		return usage(k);
	client_json = args_flag(&a, "json");
	e = client_new(args_value(&a, "url"), &c);
	if (e) {
		show_error();
		code = EXIT_USAGE;
	} else {
		code = k->run(k, c, &a);
	}
	client_free(c);
	return code;
}

int main(int argc, char **argv)
{
	int at = 1;

	/* Global options may stand before the command: they are moved behind it. */
	if (argc < 2)
		return usage(NULL);
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
		print_help();
		return EXIT_DONE;
	}
	if (strcmp(argv[1], "--version") == 0) {
		puts("dcpctl " DCPD_VERSION);
		return EXIT_DONE;
	}
	while (at < argc && argv[at][0] == '-')
		at += strcmp(argv[at], "--url") == 0 || strcmp(argv[at], "--timeout") == 0 ? 2 : 1;
	if (at >= argc)
		return usage(NULL);
	char *name = argv[at];
	for (; at > 1; at--)
		argv[at] = argv[at - 1];
	for (const struct command *k = commands; k->name; k++)
		if (strcmp(k->name, name) == 0)
			return run(k, argc - 2, argv + 2);
	struct near near = near_begin(str_of(name));
	char hint[NEAR_HINT_MAX];
	for (const struct command *k = commands; k->name; k++)
		near_try(&near, str_of(k->name));
	fprintf(stderr, "dcpctl: there is no command \"%.50s\"%s; see dcpctl --help\n", name, near_text(&near, hint));
	return EXIT_USAGE;
}
