/* complete.c: completions. The shells' scripts are a few lines that hand the line so far to `dcpctl __complete`, which answers out of the
 * rows of commands.c and with the names that the daemon knows. It is quick and silent: without a daemon there are no names, that is all. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/jval.h"

enum { QUICK_MS = 800, LINE_MAX_ = 8192 };

static const char bash_script[] =
	"# Completions of dcpctl for bash: `dcpctl completion bash` prints them.\n"
	"_dcpctl() {\n"
	"  local line=${COMP_LINE:0:COMP_POINT} cur IFS=$'\\n'\n"
	"  cur=${line##* }\n"
	"  COMPREPLY=($(dcpctl __complete \"$line\" 2>/dev/null | cut -f1))\n"
	"  if [[ $cur == *:* && $COMP_WORDBREAKS == *:* ]]; then # bash replaces only what stands behind the colon\n"
	"    local before=${cur%\"${cur##*:}\"}\n"
	"    COMPREPLY=(\"${COMPREPLY[@]#\"$before\"}\")\n"
	"  fi\n"
	"  case ${COMPREPLY[0]} in *[:/]) compopt -o nospace ;; esac\n"
	"}\n"
	"complete -o default -F _dcpctl dcpctl\n";

static const char zsh_script[] =
	"#compdef dcpctl\n"
	"# Completions of dcpctl for zsh: `dcpctl completion zsh` prints them.\n"
	"_dcpctl() {\n"
	"  local line word tab=$'\\t'\n"
	"  local -a whole said begun said_begun # what is to be gone on with gets no space behind it\n"
	"  for line in ${(f)\"$(dcpctl __complete \"${(j: :)words[1,CURRENT-1]} $PREFIX\" 2>/dev/null)\"}; do\n"
	"    word=${line%%$tab*}\n"
	"    case $word in\n"
	"      *[:/]) begun+=(\"$word\") said_begun+=(\"${line/$tab/  }\") ;;\n"
	"      *) whole+=(\"$word\") said+=(\"${line/$tab/  }\") ;;\n"
	"    esac\n"
	"  done\n"
	"  (( $#whole )) && compadd -Q -l -d said -- $whole\n"
	"  (( $#begun )) && compadd -Q -l -S '' -d said_begun -- $begun\n"
	"  (( $#whole + $#begun )) || _files\n"
	"}\n"
	"compdef _dcpctl dcpctl\n";

static const char fish_script[] =
	"# Completions of dcpctl for fish: `dcpctl completion fish` prints them.\n"
	"complete -c dcpctl -f -a '(dcpctl __complete (commandline -cp) 2>/dev/null)'\n";

int complete_script(const struct command *, struct client *, const struct args *a)
{
	const char *shell = a->words[0];
	static const struct {
		const char *name, *text;
	} all[] = { { "bash", bash_script }, { "zsh", zsh_script }, { "fish", fish_script } };

	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (strcmp(all[i].name, shell) == 0) {
			fputs(all[i].text, stdout);
			return EXIT_DONE;
		}
	show_note("dcpctl: completions are for bash, zsh and fish, not \"%.50s\"\n", shell);
	return EXIT_USAGE;
}

/* ---- candidates ---- */

struct line {
	struct str word;            /* the one that is typed, to be completed */
	struct str before;          /* the one in front of it */
	struct str command;
	struct str argument;        /* the first word behind the command that is no option */
	struct client *client;
	bool asked;
};

/* A word that no shell would take apart, and that steers no terminal. */
static bool is_plain(const char *text)
{
	for (; *text; text++)
		if ((unsigned char)*text <= ' ' || *text == 0x7f || strchr("\"'`$\\|&;<>()*?[]{}!#~", *text))
			return false;
	return true;
}

static void offer(const struct line *l, const char *candidate, const char *what)
{
	if (strlen(candidate) >= l->word.n && memcmp(candidate, l->word.p, l->word.n) == 0 &&
	    is_plain(candidate))
		printf("%s\t%s\n", candidate, what);
}

static void offer_words(const struct line *l, const char *words)
{
	while (*words) {
		size_t n = strcspn(words, "|");
		char one[64];
		snprintf(one, sizeof one, "%.*s", (int)n, words);
		if (n < sizeof one && one[0] >= 'a' && one[0] <= 'z')
			offer(l, one, "");
		words += n + (words[n] == '|');
	}
}

/* GETs a list of the daemon; false: there is none, or it takes too long. */
static bool ask(struct line *l, const char *path, struct answer *out)
{
	if (!l->client && !l->asked && client_new(NULL, &l->client) == OK)
		client_limit(l->client, QUICK_MS);
	l->asked = true;
	return l->client && client_get(l->client, path, out) == OK;
}

/* The members `key` of a list, each with `prefix` in front. */
static void offer_list(struct line *l, const char *path, const char *list, const char *prefix, const char *key, const char *what)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	const json_t *item;
	size_t i;

	if (!ask(l, path, &got))
		return;
	json_array_foreach(json_object_get(got.json, list), i, item) {
		char name[2048];
		if ((size_t)snprintf(name, sizeof name, "%s%s", prefix, show_text(item, key)) < sizeof name)
			offer(l, name, show_text(item, what));
	}
}

static void offer_storages(struct line *l, bool runs)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	const json_t *item;
	char name[80];
	size_t i;

	if (!runs)
		offer(l, "shm:", "state dicts in shared memory");
	if (!ask(l, "/v1/storages", &got))
		return;
	json_array_foreach(json_object_get(got.json, "storages"), i, item) {
		snprintf(name, sizeof name, "%.60s:", show_text(item, "name"));
		offer(l, name, show_text(item, "path"));
	}
}

/* "main:run1@" and the names of the run's aliases that lead somewhere. */
static void offer_aliases(struct line *l, const char *storage, char *name)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(LINE_MAX_);
	CLEANUP(client_drop) struct answer got = { 0 };
	const char *alias;
	json_t *leads_to;

	*strchr(name, '@') = '\0';
	client_put(&path, "/v1/runs/%/%?page_size=1", storage, name[0] ? name : "-");
	if (client_end(&path) != OK || !ask(l, (char *)path.p, &got))
		return;
	json_object_foreach(json_object_get(got.json, "aliases"), alias, leads_to) {
		char whole[2048];
		int n = snprintf(whole, sizeof whole, "%s:%s@%s", storage, name, alias);
		if (json_is_string(leads_to) && n > 0 && (size_t)n < sizeof whole)
			offer(l, whole, json_string_value(leads_to));
	}
}

/* "main:" while no storage stands there, then names of its checkpoints, or of its runs. */
static void offer_refs(struct line *l, bool runs)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(LINE_MAX_);
	char storage[64], prefix[80], name[1024];
	const char *colon = memchr(l->word.p, ':', l->word.n);
	size_t n = colon ? (size_t)(colon - l->word.p) : 0;

	if (!colon) {
		offer_storages(l, runs);
		return;
	}
	if (n >= sizeof storage || l->word.n - n >= sizeof name)
		return;
	snprintf(storage, sizeof storage, "%.*s", (int)n, l->word.p);
	snprintf(name, sizeof name, "%.*s", (int)(l->word.n - n - 1), colon + 1);
	snprintf(prefix, sizeof prefix, "%s:", storage);
	if (strcmp(storage, "shm") == 0) {
		offer_list(l, "/v1/state-dicts", "state_dicts", prefix, "name", "created_at");
		return;
	}
	if (!runs && strchr(name, '@')) {
		offer_aliases(l, storage, name);
		return;
	}
	if (runs)
		client_put(&path, "/v1/runs?storage=%&page_size=200", storage);
	else
		client_put(&path, "/v1/checkpoints/%?page_size=200&prefix=%", storage, name);
	if (client_end(&path) == OK)
		offer_list(l, (char *)path.p, runs ? "runs" : "checkpoints", prefix, runs ? "run" : "name", "modified_at");
}

/* The value of an option, by its row. */
static void offer_value(struct line *l, const struct command_option *o)
{
	if (strcmp(o->value, "REF") == 0)
		offer_refs(l, false);
	else if (strcmp(o->value, "shm:NAME") == 0)
		offer_list(l, "/v1/state-dicts", "state_dicts", "shm:", "name", "created_at");
	else if (strcmp(o->value, "STORAGE") == 0)
		offer_list(l, "/v1/storages", "storages", "", "name", "path");
	else
		offer_words(l, o->value);
}

/* Tensors of the checkpoint or state dict that is named already. */
static void offer_tensors(struct line *l)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(LINE_MAX_);
	char ref[LINE_MAX_], prefix[LINE_MAX_];

	if (l->argument.n >= sizeof ref || l->word.n >= sizeof prefix)
		return;
	snprintf(ref, sizeof ref, "%.*s", (int)l->argument.n, l->argument.p);
	snprintf(prefix, sizeof prefix, "%.*s", (int)l->word.n, l->word.p);
	char *colon = strchr(ref, ':');
	if (!colon)
		return;
	*colon = '\0';
	if (strcmp(ref, "shm") == 0)
		client_put(&path, "/v1/state-dicts/%/tensors?page_size=200&prefix=%", colon + 1, prefix);
	else
		client_put(&path, "/v1/checkpoints/%/%/tensors?page_size=200&prefix=%", ref, colon + 1, prefix);
	if (client_end(&path) == OK)
		offer_list(l, (char *)path.p, "tensors", "", "fqn", "dtype");
}

static void offer_codes(const struct line *l)
{
	for (int code = OK + 1; code < ERR_COUNT; code++)
		offer(l, err_code_name((enum err)code), err_title((enum err)code));
}

/* The argument at this place, by the words of the command's usage. */
static void offer_argument(struct line *l, const struct command *k)
{
	const char *usage = k->usage;

	if (strstr(usage, " FQN") && l->argument.p) {
		offer_tensors(l);
		return;
	}
	if ((strstr(usage, " ID") && !strstr(usage, "--id ID")) || strstr(usage, "[ID"))
		offer_list(l, "/v1/jobs?page_size=50", "jobs", "", "id", "kind");
	if (strstr(usage, "STORAGE:RUN") || strstr(usage, "STORAGE[:RUN]"))
		offer_refs(l, true);
	else if (strcmp(k->name, "completion") == 0)
		offer_words(l, "bash|zsh|fish");
	else if (strcmp(k->name, "explain") == 0)
		offer_codes(l);
	else if (strcmp(k->name, "policy") == 0)
		offer_list(l, "/v1/policies", "policies", "", "name", "storage");
	else if (strcmp(k->name, "webhook") == 0)
		offer_list(l, "/v1/webhooks", "webhooks", "", "name", "url");
	else if (strcmp(k->name, "chain") == 0)
		offer_list(l, "/v1/chains", "chains", "", "name", "storage");
	else if (strcmp(k->name, "transforms") == 0)
		offer_list(l, "/v1/transforms", "transforms", "", "name", "description");
	else if (strstr(usage, "REF") || strstr(usage, "shm:") || strstr(usage, "STORAGE") || strstr(usage, "SRC"))
		offer_refs(l, false);
}

static bool find_option(const struct command *k, struct str name, struct command_option *out)
{
	for (unsigned i = 0; commands_option(k, i, out); i++)
		if (str_is(name, out->name))
			return true;
	return false;
}

static void complete(struct line *l)
{
	struct command k;
	struct command_option o;

	if (!l->command.p) {
		for (unsigned i = 0; commands_at(i, &k); i++)
			offer(l, k.name, k.what);
		return;
	}
	if (!commands_find(l->command, &k))
		return;
	bool of_option = l->before.n > 2 && memcmp(l->before.p, "--", 2) == 0 &&
			 find_option(&k, (struct str){ l->before.p + 2, l->before.n - 2 }, &o) && o.value;
	if (of_option) {
		offer_value(l, &o);
	} else if (l->word.n && l->word.p[0] == '-') {
		for (unsigned i = 0; commands_option(&k, i, &o); i++) {
			char name[80];
			snprintf(name, sizeof name, "--%s", o.name);
			offer(l, name, o.what);
		}
	} else if (k.words_max > 0) {
		offer_argument(l, &k);
	}
}

/* line: "dcpctl show main:ru", up to the cursor. */
int complete_line(const char *line)
{
	struct line l = { .word = { "", 0 } };
	const char *p = line + strcspn(line, " ");

	while (*p) {
		p += strspn(p, " ");
		size_t n = strcspn(p, " ");
		l.before = l.word;
		if (p[n]) { /* it is complete */
			if (!l.command.p && p[0] != '-')
				l.command = (struct str){ p, n };
			else if (!l.argument.p && p[0] != '-')
				l.argument = (struct str){ p, n };
			l.word = (struct str){ p, n };
		}
		if (!p[n]) {
			l.word = (struct str){ p, n };
			break;
		}
		p += n;
	}
	complete(&l);
	client_free(l.client);
	return EXIT_DONE;
}
