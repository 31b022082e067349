/* config_manual.c: the manual pages dcpd(8) and dcpd.conf(5), made of the rows of config.c, so that they name every option and no other. */
#include "server/config.h"

/* As roff: its backslash, and hyphens that are those of options. */
static void put(FILE *to, const char *text)
{
	for (const char *p = text; *p; p++)
		if (*p == '\\')
			fputs("\\e", to);
		else if (*p == '-')
			fputs("\\-", to);
		else
			fputc(*p, to);
}

static void put_row(const struct config_row *r, bool of_file, FILE *to)
{
	fputs(".TP\n\\fB", to);
	put(to, of_file ? "" : "--");
	put(to, r->key);
	fputs("\\fR", to);
	if (of_file)
		fputs(" = ", to);
	else if (r->argument)
		fputs(" ", to);
	fputs("\\fI", to);
	put(to, r->argument ? r->argument : of_file ? "true|false" : "");
	fputs("\\fR\n\\&", to);
	put(to, r->doc);
	if (r->fallback) {
		fputs(". Default: ", to);
		put(to, r->fallback);
	}
	if (r->repeats)
		fputs(". May be given more than once", to);
	fputs(".\n", to);
}

static void put_rows(bool of_file, FILE *to)
{
	struct config_row r;

	for (uint32_t i = 0; config_row(i, &r); i++)
		if (!of_file || !r.is_command)
			put_row(&r, of_file, to);
}

static void put_8(FILE *to)
{
	fputs(".TH DCPD 8 \"\" \"dcpd " DCPD_VERSION "\" \"System administration\"\n"
	      ".SH NAME\ndcpd \\- daemon that saves, loads, reshards and verifies model checkpoints\n"
	      ".SH SYNOPSIS\n.B dcpd\n.RI [ option ...]\n"
	      ".SH DESCRIPTION\n.B dcpd\n"
	      "serves the checkpoints below its storage roots, and state dicts in shared memory, over HTTP on a Unix socket and on TCP.\n"
	      "Its users are\n.BR dcpctl (1),\n"
	      "the Python package dcpd, the page at its address, and whoever speaks HTTP (GET /openapi.yaml).\n"
	      "Work is done by worker processes, which are confined to the storages.\n"
	      ".SH OPTIONS\nEach may also stand in the file of \\fB\\-\\-config\\fR (see\n.BR dcpd.conf (5))\n"
	      "or in the environment: DCPD_SHM_LIMIT is \\fB\\-\\-shm\\-limit\\fR, and an empty variable is as none.\n"
	      "The command line goes before the environment, and that before the file.\n",
	      to);
	put_rows(false, to);
	fputs(".SH SIGNALS\n.TP\n.B SIGTERM\n"
			"No new work is taken; running jobs get the time of \\fB\\-\\-drain\\-timeout\\fR, then dcpd ends. What is left "
			"goes on after\n"
	      "the next start.\n"
	      ".TP\n.B SIGHUP\nThe configuration, the tokens and the certificate are read again.\n"
	      ".SH FILES\n.TP\n.I $STATE/token\nThe token for TCP, made at the first start.\n"
	      ".TP\n.I $STATE/journal.db\nJobs, runs, policies, webhooks and chains.\n"
	      ".TP\n.I $STATE/secrets/\nSecrets that sign webhooks, a file each.\n"
	      ".SH EXIT STATUS\n0: ended as told. 2: the configuration is wrong. 1: anything else; the last line of the log says what.\n"
	      ".SH SEE ALSO\n.BR dcpctl (1),\n.BR dcpd.conf (5)\n", to);
}

static void put_5(FILE *to)
{
	fputs(".TH DCPD.CONF 5 \"\" \"dcpd " DCPD_VERSION "\" \"File formats\"\n"
	      ".SH NAME\ndcpd.conf \\- configuration of dcpd\n"
	      ".SH DESCRIPTION\nThe file that\n.BR dcpd (8)\n"
	      "is given with \\fB\\-\\-config\\fR. A line is \\fIkey\\fR = \\fIvalue\\fR; lines with # in front are comments; a key that "
	      "takes a list may\n"
	      "be repeated. An unknown key is an error. Sizes take B, KiB, MiB, GiB, TiB, times ms, s, m, h, d.\n"
	      "\\fBdcpd \\-\\-check\\-config\\fR says what is wrong with a file and with the folders in it, \\fBdcpd "
	      "\\-\\-print\\-config\\fR what it amounts to.\n"
	      ".SH KEYS\n", to);
	put_rows(true, to);
	fputs(".PP\nOptions of one storage have its name in front: main.file\\-mode = 0644, tier.main.behind = 10.\n"
	      ".SH EXAMPLE\n.nf\nstate\\-dir = /var/lib/dcpd\nstorage = main=/srv/checkpoints\nlisten = unix:/run/dcpd/dcpd.sock\n"
	      "allow\\-group = dcpd\n.fi\n"
	      ".SH SEE ALSO\n.BR dcpd (8),\n.BR dcpctl (1)\n", to);
}

FALLIBLE enum err config_manual(const char *page, FILE *to)
{
	if (!str_is(str_of(page), "8") && !str_is(str_of(page), "5"))
		return ERR(CONFIG, "--manual is 8 (dcpd) or 5 (dcpd.conf), not \"%.20s\"", page);
	if (page[0] == '8')
		put_8(to);
	else
		put_5(to);
	return OK;
}
