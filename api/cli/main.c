/* main.c: dcpctl: which command is meant. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/near.h"

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
		help_command(k);
		return EXIT_DONE;
	}
	if (a.word_count < k->words_min || a.word_count > k->words_max)
		return usage(k);
	const char *form = args_value(&a, "output");
	bool json = args_flag(&a, "json");
	e = json && form && strcmp(form, "json") != 0 ? ERR(INVALID_REQUEST, "--json is --output json: give one form") :
							show_set(json ? "json" : form, args_value(&a, "columns"));
	if (e) {
		show_error();
		return EXIT_USAGE;
	}
	if (show_form() == SHOW_JSON) /* --output json is --json */
		a.options[a.option_count++].name = "json";
	client_json = args_flag(&a, "json");
	e = client_new(args_value(&a, "url"), &c);
	if (e) {
		show_error();
		code = EXIT_USAGE;
	} else {
		code = k->run(k, c, &a);
	}
	client_free(c);
	return show_columns_failed() ? EXIT_USAGE : code;
}

/* A global option before the command, whose value is the next word. */
static bool takes_value(const char *word)
{
	static const char *const names[] = { "--url", "--timeout", "--output", "--columns" };

	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (strcmp(word, names[i]) == 0)
			return true;
	return false;
}

static int unknown(const char *name)
{
	struct near near = near_begin(str_of(name));
	char hint[NEAR_HINT_MAX];
	struct command k;

	for (unsigned i = 0; commands_at(i, &k); i++)
		near_try(&near, str_of(k.name));
	show_note("dcpctl: there is no command \"%.50s\"%s; see dcpctl --help\n", name, near_text(&near, hint));
	return EXIT_USAGE;
}

int main(int argc, char **argv)
{
	int at = 1;

	term_start();
	/* Global options may stand before the command: they are moved behind it. */
	if (argc < 2)
		return usage(NULL);
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
		help_all();
		return EXIT_DONE;
	}
	if (strcmp(argv[1], "--version") == 0) {
		puts("dcpctl " DCPD_VERSION);
		return EXIT_DONE;
	}
	if (strcmp(argv[1], "__complete") == 0)
		return complete_line(argc > 2 ? argv[2] : "");
	while (at < argc && argv[at][0] == '-')
		at += takes_value(argv[at]) ? 2 : 1;
	if (at >= argc)
		return usage(NULL);
	char *name = argv[at];
	for (; at > 1; at--)
		argv[at] = argv[at - 1];
	struct command k;
	return commands_find(str_of(name), &k) ? run(&k, argc - 2, argv + 2) : unknown(name);
}
