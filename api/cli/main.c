/* main.c: dcpctl: the table of commands, and which one is meant. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/near.h"
#include "spec/fields.h"

#define WAITING "detach dry-run "

/* Commands that are no job kind; those of the kinds are made of their rows. */
static const struct command commands[] = {
	{ "status", "status", "", "the daemon, its storages and workers", 0, 0, look_status },
	{ "ls", "ls [STORAGE[:PREFIX] | shm:] [--run RUN] [--filter 'step>=100 AND held=true'] [--sort -time] [--limit N]",
	  "run= filter= sort= limit=", "checkpoints, or state dicts in shared memory", 0, 1, look_ls },
	{ "show", "show REF | shm:NAME [--tensors GLOB]", "tensors=", "one checkpoint or state dict, or its tensors", 1, 1,
	  look_show },
	{ "cat", "cat REF FQN [--slice 0:4,:] [--format raw|npy|safetensors] [--verify digest|none]", "slice= format= verify=",
	  "a tensor's values; with --format its bytes", 2, 2, cat_tensor },
	{ "rm", "rm REF | shm:NAME [--trash TIME] [--yes] [--detach]", "trash= yes detach",
	  "delete a checkpoint or a state dict, for good or into the trash; asks first on a terminal, unless --yes", 1, 1, look_rm },
	{ "trash", "trash STORAGE[:NAME]", "", "deleted checkpoints that may come back, newest first", 1, 1, keep_trash },
	{ "undelete", "undelete REF [--id ID]", "id=", "bring back what was deleted under this name last, or what has the id", 1, 1,
	  keep_undelete },
	{ "runs", "runs [STORAGE[:RUN]] [--mtbf 24h] [--filter TERMS] [--sort KEY] [--limit N]", "mtbf= filter= sort= limit=",
	  "the runs of a storage, or one run's checkpoints, newest first, and how often it should save", 0, 1, look_runs },
	{ "resume", "resume STORAGE:RUN [--world-size N] [--layout RULE]... [--attempts N] [--any-optimizer] [--look]",
	  "world-size= layout= attempts= any-optimizer look",
	  "what a training goes on from: the newest checkpoint that loads and was not tried too often; exit 6 if there is none yet", 1, 1,
	  resume_print },
	{ "alias", "alias STORAGE:RUN ALIAS NAME [--if NAME] | --remove", "if= remove",
	  "let STORAGE:RUN@ALIAS stand for a checkpoint of the run", 2, 3, look_alias },
	{ "lineage", "lineage REF", "", "what a checkpoint was made of, and what was made of it", 1, 1, look_lineage },
	{ "hold", "hold REF [--reason TEXT]", "reason=", "hold a checkpoint: nothing removes or replaces it", 1, 1, look_hold },
	{ "unhold", "unhold REF", "", "lift a checkpoint's hold", 1, 1, look_hold },
	{ "policy", "policy NAME [--storage S --match RUN --keep-last N ...] [--preview] | --rm",
	  "storage= match= keep-last= keep-every-steps= keep-every= keep-best= ttl= bytes= trash= verified-only confirm preview rm",
	  "how long checkpoints of the runs that match are kept; with --preview what would go; without options the policy", 1, 1,
	  keep_policy },
	{ "policies", "policies", "", "retention policies, and what came of them", 0, 0, keep_policies },
	{ "webhook", "webhook NAME [--to URL --secret NAME --event EVENT... [--storage S] [--match RUN] | --deliveries | --test | --rm]",
	  "to= secret= event= storage= match= deliveries test rm", "a URL that is told what happens: set it, look at it, try it", 1, 1,
	  hooks_webhook },
	{ "webhooks", "webhooks", "", "all webhooks", 0, 0, hooks_webhooks },
	{ "chain", "chain NAME [--file FILE | --executions | --rm]", "file= executions rm",
	  "jobs that follow each durable checkpoint of a run: set them from a JSON file, look at how they stand", 1, 1, hooks_chain },
	{ "chains", "chains", "", "all chains", 0, 0, hooks_chains },
	{ "jobs", "jobs [--filter 'state=running AND kind=save'] [--limit N]", "filter= limit=", "jobs, newest first", 0, 0,
	  jobs_list },
	{ "job", "job ID [--follow]", "follow", "one job", 1, 1, jobs_one },
	{ "transforms", "transforms [NAME]", "", "ready sets of conversion rules for --transform NAME, or the rules of one", 0, 1,
	  look_transforms },
	{ "cancel", "cancel ID", "", "cancel a job", 1, 1, jobs_act },
	{ "retry", "retry ID", "", "run a failed or cancelled job again", 1, 1, jobs_act },
	{ "events", "events [ID]", "", "what happens, as it happens; of one job with ID", 0, 1, jobs_events },
	{ "check", "check REF [shm:NAME] [--world-size N] [--layout RULE]... [--no-strict]",
	  "include= exclude= rename= dtype= world-size= layout= no-strict",
	  "can the checkpoint be loaded so, or into that state dict? Nothing is read but metadata; exit 1 if not", 1, 2, jobs_check },
	{ NULL, NULL, NULL, NULL, 0, 0, NULL },
};

/* The command of a job kind, by its row of kinds.def and its fields' rows. The texts are good until the next call. */
static struct command command_of(enum job_kind kind)
{
	static char usage[256], options[1024];
	const struct kind *k = kind_of(kind);
	size_t n = (size_t)snprintf(options, sizeof options, WAITING);
	unsigned words = 1, optional = 0;

	snprintf(usage, sizeof usage, "%s %s [OPTION]...", jobs_command(kind), k->arguments);
	for (const char *p = k->arguments; *p; p++) {
		words += *p == ' ';
		optional += *p == '[';
	}
	unsigned most = strstr(k->arguments, "...") ? words - 2 + SPEC_SOURCES_MAX : words;
	for (const struct field *f = field_next(kind, NULL); f; f = field_next(kind, f))
		if (f->option && n < sizeof options)
			n += (size_t)snprintf(options + n, sizeof options - n, "%s%s ", f->option, f->type == FIELD_BOOL ? "" : "=");
	must(n < sizeof options);
	return (struct command){ jobs_command(kind), usage, options, k->what, words - optional, most, jobs_submit };
}

/* A kind that removes has a command of its own: rm. */
static bool has_command(enum job_kind kind)
{
	return !kind_is(kind, KIND_REMOVES);
}


static void print_words(void)
{
	fputs("REF is STORAGE:NAME, such as main:run1/step-100, or STORAGE:RUN@ALIAS, such as main:run1@latest; a state dict in\n"
	      "shared memory is shm:NAME.\n"
	      "RULE is PATTERN=PLACEMENTS@MESH[:RANKS], such as 'model.*=Replicate(),Shard(0)@2x4'; with a ? in front it is no error\n"
	      "if all tensors that it matches lack a dim that it names.\n"
	      "\n"
	      "Job commands wait and show their progress. --detach prints the job's id at once, --dry-run the plan. Operations on state\n"
	      "dicts without DST write the next generation of SRC. dcpctl COMMAND --help says what the options are.\n"
	      "Every command takes --json (the API's object), --timeout 90s, --url URL and --help.\n"
	      "\n"
	      "The daemon is found by DCPD_URL (http://... or unix:///path, with DCPD_TOKEN or DCPD_TOKEN_FILE), else at\n"
	      "$XDG_STATE_HOME/dcpd/dcpd.sock, then /run/dcpd/dcpd.sock, then /var/lib/dcpd/dcpd.sock.\n"
	      "\n"
	      "Exit: 0 done, 1 differs or does not fit, 2 wrong usage, 3 no daemon, 4 timed out, 5 the job failed, 6 not found,\n"
	      "130 interrupted, or answered with no.\n", stdout);
}

static void print_help(void)
{
	puts("dcpctl: save, load, reshard, verify and compare checkpoints through dcpd\n");
	for (const struct command *k = commands; k->name; k++)
		printf("  dcpctl %s\n      %s\n", k->usage, k->what);
	for (int i = 0; i < JOB_KIND_COUNT; i++) {
		struct command k = command_of((enum job_kind)i);
		if (has_command((enum job_kind)i))
			printf("  dcpctl %s\n      %s\n", k.usage, k.what);
	}
	putchar('\n');
	print_words();
}

static void print_field(const struct field *f)
{
	printf("  --%s%s%s", f->option, f->value || f->words ? " " : "", f->value ? f->value : "");
	for (size_t i = 0; f->words && f->words[i]; i++)
		printf("%s%s", i ? "|" : "", f->words[i]);
	printf("\n      %s\n", f->what);
}

static void print_command_help(const struct command *k)
{
	enum job_kind kind;
	bool submits = jobs_kind(k->name, &kind);
	const char *p = k->options;

	printf("dcpctl %s\n    %s\n\noptions:", k->usage, k->what);
	while (*p && !submits) {
		size_t n = strcspn(p, " ");
		bool valued = p[n - 1] == '=';
		printf(" --%.*s%s", (int)(n - valued), p, valued ? " X" : "");
		p += n + strspn(p + n, " ");
	}
	puts(submits ? " --detach --dry-run --json --timeout X --url X --help" : " --json --timeout X --url X --help");
	for (const struct field *f = submits ? field_next(kind, NULL) : NULL; f; f = field_next(kind, f))
		if (f->option)
			print_field(f);
	putchar('\n');
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
	enum job_kind kind;
	if (jobs_kind(name, &kind) && has_command(kind)) {
		struct command k = command_of(kind);
		return run(&k, argc - 2, argv + 2);
	}
	struct near near = near_begin(str_of(name));
	char hint[NEAR_HINT_MAX];
	for (const struct command *k = commands; k->name; k++)
		near_try(&near, str_of(k->name));
	for (int i = 0; i < JOB_KIND_COUNT; i++)
		if (has_command((enum job_kind)i))
			near_try(&near, str_of(jobs_command((enum job_kind)i)));
	fprintf(stderr, "dcpctl: there is no command \"%.50s\"%s; see dcpctl --help\n", name, near_text(&near, hint));
	return EXIT_USAGE;
}
