/* doctor.c: dcpctl doctor: what the daemon's host lacks. The rows are server/doctor.c's: without a daemon the program dcpd is asked for
 * them. */
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/jval.h"

enum { ANSWER_MAX = 1 << 20, PATH_MAX_ = 4096 };

static const char config_file[] = "/etc/dcpd/dcpd.conf";

/* dcpd beside this program, else in PATH. */
static const char *program(char out[PATH_MAX_])
{
	ssize_t n = readlink("/proc/self/exe", out, PATH_MAX_ - 16);
	char *slash;

	if (n <= 0)
		return "dcpd";
	out[n] = '\0';
	slash = strrchr(out, '/');
	if (!slash)
		return "dcpd";
	memcpy(slash + 1, "dcpd", sizeof "dcpd");
	return access(out, X_OK) == 0 ? out : "dcpd";
}

static FALLIBLE enum err read_all(int fd, struct buf *out)
{
	char chunk[4096];
	ssize_t n;

	while ((n = read(fd, chunk, sizeof chunk)) != 0) {
		if (n < 0 && errno != EINTR)
			return ERR_SYS(SYSTEM, "cannot read what dcpd --doctor says");
		if (n > 0)
			buf_put(out, chunk, (size_t)n);
	}
	return buf_status(out);
}

/* The findings of `dcpd --doctor json`, with the configuration of the service where it can be read. */
static FALLIBLE enum err ask_program(json_t **out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(ANSWER_MAX);
	char path[PATH_MAX_], *argv[] = { "dcpd", "--doctor", "json", "--config", (char *)(uintptr_t)config_file, NULL };
	extern char **environ;
	posix_spawn_file_actions_t actions;
	int ends[2], bad, status;
	pid_t pid;

	if (access(config_file, R_OK) != 0)
		argv[3] = NULL;
	if (pipe2(ends, O_CLOEXEC) != 0)
		return ERR_SYS(SYSTEM, "cannot ask dcpd");
	bad = posix_spawn_file_actions_init(&actions);
	bad = bad ? bad : posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
	bad = bad ? bad : posix_spawnp(&pid, program(path), &actions, NULL, argv, environ);
	posix_spawn_file_actions_destroy(&actions);
	close(ends[1]);
	if (bad) {
		close(ends[0]);
		return ERR(SYSTEM, "no daemon answers, and the program dcpd, which would look at this host, cannot be run: "
			"%s", strerror(bad));
	}
	enum err e = read_all(ends[0], &text);
	close(ends[0]);
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (e == OK && text.len == 0)
		return ERR(SYSTEM, "no daemon answers, and dcpd --doctor said nothing of this host");
	return e ?: jval_parse((struct str){ (char *)text.p, text.len }, out);
}

static void print_finding(const json_t *f)
{
	static const struct {
		const char *state, *mark;
		enum term_colour colour;
	} marks[] = { { "ok", "ok  ", TERM_GREEN }, { "idle", "--  ", TERM_DIM }, { "warn", "warn", TERM_YELLOW }, { "bad", "BAD "
		"", TERM_RED } };
	const char *mark = "?   ", *on = "", *off = term_colour(stdout, TERM_PLAIN);

	for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
		if (strcmp(show_text(f, "state"), marks[i].state) == 0) {
			mark = marks[i].mark;
			on = term_colour(stdout, marks[i].colour);
		}
	fputs(on, stdout);
	fputs(mark, stdout);
	fputs(off, stdout);
	show_say("  %-17s  %s\n", show_text(f, "name"), show_text(f, "words"));
	if (show_text(f, "command")[0])
		show_say("      %-17s  mend: %s\n", "", show_text(f, "command"));
}

int doctor_show(const struct command *, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "STATE=state", "NAME=name", "WORDS=words", "COMMAND=command", NULL };
	CLEANUP(client_drop) struct answer answer = { 0 };
	CLEANUP(jval_drop) json_t *local = NULL;
	const json_t *f;
	size_t i;
	bool asked_for = args_value(a, "url") || getenv("DCPD_URL");
	enum err e = client_get(c, "/v1/doctor", &answer);

	if (e && (asked_for || !client_unreachable(c)))
		return follow_failed(c, e);
	if (e) {
		e = ask_program(&local);
		if (e)
			return follow_failed(c, e);
		show_note("dcpctl: no daemon answers: this is what dcpd would meet here\n");
	}
	const json_t *doc = local ? local : answer.json, *findings = json_object_get(doc, "findings");
	if (args_flag(a, "json"))
		show_json(doc);
	else if (show_form() != SHOW_TABLE)
		show_table(findings, columns);
	else
		json_array_foreach(findings, i, f)
			print_finding(f);
	return show_number(doc, "bad") > 0 ? EXIT_DIFFERS : EXIT_DONE;
}
