/* help.c: what dcpctl can do, as --help and as a manual page: both walk the rows of commands.c. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"

static void print_words(void)
{
	fputs("REF is STORAGE:NAME, such as main:run1/step-100, or STORAGE:RUN@ALIAS, such as main:run1@latest; a state dict in\n"
	      "shared memory is shm:NAME.\n"
	      "RULE is PATTERN=PLACEMENTS@MESH[:RANKS], such as 'model.*=Replicate(),Shard(0)@2x4'; with a ? in front it is no error\n"
	      "if all tensors that it matches lack a dim that it names.\n"
	      "\n"
	      "Job commands wait and show their progress. --detach prints the job's id at once, --dry-run the plan. Operations on state\n"
	      "dicts without DST write the next generation of SRC. dcpctl COMMAND --help says what the options are.\n"
	      "Every command takes --json (the API's object), --output table|json|ndjson|csv, --columns NAME,..., --timeout 90s,\n"
	      "--url URL and --help.\n"
	      "\n"
	      "The daemon is found by DCPD_URL (http://... or unix:///path, with DCPD_TOKEN or DCPD_TOKEN_FILE), else at\n"
	      "$XDG_STATE_HOME/dcpd/dcpd.sock, then /run/dcpd/dcpd.sock, then /var/lib/dcpd/dcpd.sock.\n"
	      "\n"
	      "Exit: 0 done, 1 differs or does not fit, 2 wrong usage, 3 no daemon, 4 timed out, 5 the job failed, 6 not found,\n"
	      "130 interrupted, or answered with no.\n", stdout);
}

void help_all(void)
{
	struct command k;

	puts("dcpctl: save, load, reshard, verify and compare checkpoints through dcpd\n");
	for (unsigned i = 0; commands_at(i, &k); i++)
		printf("  dcpctl %s\n      %s\n", k.usage, k.what);
	putchar('\n');
	print_words();
}

static void print_wrapped(const char *text, size_t columns)
{
	size_t at = 0;

	for (const char *p = text; *p;) {
		size_t n = strcspn(p, " ");
		if (at && at + 1 + n > columns) {
			putchar('\n');
			at = 0;
		}
		printf("%s%.*s", at ? " " : "    ", (int)n, p);
		at += (at ? 1 : 4) + n;
		p += n + strspn(p + n, " ");
	}
	putchar('\n');
}

void help_command(const struct command *k)
{
	struct command_option o;

	printf("dcpctl %s\n    %s\n", k->usage, k->what);
	if (k->more) {
		putchar('\n');
		print_wrapped(k->more, 116);
	}
	puts("\noptions:");
	for (unsigned i = 0; commands_option(k, i, &o); i++)
		printf("  --%s%s%s\n      %s\n", o.name, o.value ? " " : "", o.value ? o.value : "", o.what);
	putchar('\n');
	print_words();
}

/* ---- the manual page ---- */

/* Backslashes are roff's, a line must not begin with its dot or quote, and hyphens are those of options. */
static void roff(const char *text)
{
	for (const char *p = text; *p; p++) {
		if (*p == '\\')
			fputs("\\e", stdout);
		else if (*p == '-')
			fputs("\\-", stdout);
		else if ((*p == '.' || *p == '\'') && (p == text || p[-1] == '\n'))
			printf("\\&%c", *p);
		else
			putchar(*p);
	}
}

static void roff_option(const struct command_option *o)
{
	fputs(".TP\n\\fB", stdout);
	roff("--");
	roff(o->name);
	fputs("\\fR", stdout);
	if (o->value) {
		fputs(strchr(o->value, '|') ? " " : " \\fI", stdout);
		roff(o->value);
		fputs("\\fR", stdout);
	}
	putchar('\n');
	roff(o->what);
	putchar('\n');
}

static void roff_command(const struct command *k)
{
	struct command_option o;
	enum job_kind kind;

	fputs(".TP\n\\fB", stdout);
	roff(k->name);
	fputs("\\fR", stdout);
	roff(k->usage + strlen(k->name));
	putchar('\n');
	roff(k->more ? k->more : k->what);
	putchar('\n');
	if (!k->options[0] || jobs_kind(k->name, &kind)) /* those have a section of their own */
		return;
	puts(".RS");
	for (unsigned i = 0; commands_option(k, i, &o) && !strstr(args_global, o.name); i++)
		roff_option(&o);
	puts(".RE");
}

/* Each option of the job kinds once: a field's row is the same for all kinds that have it. */
static void roff_job_options(void)
{
	CLEANUP(buf_free) struct buf seen = BUF_INIT(1 << 16);
	struct command_option o;
	struct command k;
	enum job_kind kind;

	for (unsigned i = 0; commands_at(i, &k); i++)
		for (unsigned n = 0; jobs_kind(k.name, &kind) && commands_option(&k, n, &o); n++) {
			char word[64];
			snprintf(word, sizeof word, " %s ", o.name);
			if ((seen.len && memmem(seen.p, seen.len, word, strlen(word))) || strstr(args_global, o.name))
				continue;
			buf_puts(&seen, word);
			roff_option(&o);
			(void)commands_at(i, &k); /* its texts were good until then */
		}
}

static void roff_end(void)
{
	puts(".SH EXIT STATUS\n"
	     ".TP\n.B 0\ndone\n"
	     ".TP\n.B 1\n.B diff\nor\n.B compare\nfound differences,\n.B check\nthat it does not fit,\n.B inspect\nmore than data, or\n"
	     ".B repair\nleft damage\n"
	     ".TP\n.B 2\nwrong usage: also a request that dcpd refused as wrong in itself\n"
	     ".TP\n.B 3\nno daemon\n.TP\n.B 4\ntimed out\n.TP\n.B 5\nthe job failed\n.TP\n.B 6\nwhat was named is not there\n"
	     ".TP\n.B 130\ninterrupted; the job was left running. Or\n.B rm\nwas answered with no\n"
	     ".SH ENVIRONMENT\n"
	     ".TP\n.B DCPD_URL\n.RI http:// HOST : PORT\nor\n.RI unix:/// PATH .\n"
	     "Without it, $XDG_STATE_HOME/dcpd/dcpd.sock, then /run/dcpd/dcpd.sock, then /var/lib/dcpd/dcpd.sock.\n"
	     ".TP\n.BR DCPD_TOKEN \", \" DCPD_TOKEN_FILE\nThe token for TCP, or the file that holds it.\n"
	     ".TP\n.B NO_COLOR\nIf it is set, nothing is coloured. Without it states are, on a terminal.\n"
	     ".SH EXAMPLES\n.nf\n"
	     "dcpctl reshard main:a main:b \\-\\-world\\-size 2 \\-\\-layout '*=Shard(1)@2'\n"
	     "dcpctl reshard main:a main:a\\-hf \\-\\-format safetensors \\-\\-rename 's/^module\\e.//'\n"
	     "dcpctl diff main:a main:b \\-\\-rtol 1e\\-5 && echo same\n"
	     "dcpctl ls main \\-\\-output csv \\-\\-columns name,bytes,step\n"
	     ".fi\n.SH SEE ALSO\n.BR dcpd (8),\n.BR dcpd.conf (5)");
}

int help_manual(const struct command *, struct client *, const struct args *)
{
	struct command k;
	struct command_option o;

	puts(".TH DCPCTL 1 \"\" \"dcpd " DCPD_VERSION "\" \"User commands\"\n"
	     ".SH NAME\ndcpctl \\- save, load, reshard, verify and compare checkpoints through dcpd\n"
	     ".SH SYNOPSIS\n.B dcpctl\n.I command\n.RI [ argument ...]\n.RI [ option ...]\n"
	     ".SH DESCRIPTION\n.B dcpctl\ntalks to\n.BR dcpd (8)\nover its HTTP API. A checkpoint is named\n.IR STORAGE : NAME ,\n"
	     "such as main:run1/step-100, or by an alias,\n.IR STORAGE : RUN @ ALIAS ,\nsuch as main:run1@latest; a state dict in\n"
	     "shared memory is\n"
	     ".BR shm: \\fINAME\\fR.\n"
	     "A checkpoint's format is recognised by what lies there. The directory of a DeepSpeed training stands for the step that its\n"
	     "file\n.I latest\nnames.\n"
	     ".SH COMMANDS");
	for (unsigned i = 0; commands_at(i, &k); i++)
		roff_command(&k);
	puts(".SH OPTIONS\n.SS Every command");
	(void)commands_find(STR("status"), &k);
	for (unsigned i = 0; commands_option(&k, i, &o); i++)
		roff_option(&o);
	puts(".SS Commands that make jobs\n"
	     "They wait and show their progress: a bar on a terminal, plain lines otherwise. Ctrl-C offers to cancel the job or\n"
	     "to leave it running.");
	roff_job_options();
	roff_end();
	return EXIT_DONE;
}
