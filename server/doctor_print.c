/* doctor_print.c: see doctor_print.h. Without a daemon, too, nothing here may hang: a worker of the role "probe" opens the drivers, and a
 * child looks at each storage. */
#include "server/doctor_print.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/fs.h"
#include "server/doctor.h"
#include "server/doctor_drivers.h"

enum { STORAGE_MS = 5000 };

struct printer {
	FILE *text;                         /* NULL: JSON alone */
	struct buf json;
	unsigned count, bad;
};

/* Of a storage on a file system, in a child: it may be a dead NFS. */
static void look_storage(const char *name, const char *dir, struct doctor_finding *f)
{
	struct sigaction before, plain = { .sa_handler = SIG_DFL };
	int status = 0;
	pid_t ended;

	(void)sigaction(SIGCHLD, &plain, &before); /* where it is ignored, as under some parents, no child can be waited for */
	pid_t child = fork();

	f->name = name;
	if (child == 0) {
		int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		_exit(fd < 0 || faccessat(fd, ".", W_OK, AT_EACCESS) != 0 ? 2 : !fs_direct_ok(fd));
	}
	int ms = 0;
	while ((ended = waitpid(child, &status, WNOHANG)) == 0 && ms < STORAGE_MS) {
		(void)poll(NULL, 0, 10);
		ms += 10;
	}
	(void)sigaction(SIGCHLD, &before, NULL);
	if (ended == 0) {
		kill(child, SIGKILL);
		doctor_say(f, DOCTOR_BAD, "mount | grep nfs (is the server there?)", "%s does not answer", dir);
		return;
	}
	if (ended != child)
		doctor_say(f, DOCTOR_BAD, "", "%s cannot be looked at: %s", dir, strerror(errno));
	else if (status == 0)
		doctor_say(f, DOCTOR_OK, "", "%s can be written to, with O_DIRECT", dir);
	else if (WIFEXITED(status) && WEXITSTATUS(status) == 1)
		doctor_say(f, DOCTOR_WARN, "put the storage on ext4 or xfs", "%s has no O_DIRECT: bytes go through the page cache, "
			"which is "
			   "slower, and counts as memory", dir);
	else
		doctor_say(f, DOCTOR_BAD, "dcpd --check-config (as the service's user) says why", "%s cannot be written to by uid %u", dir,
			   (unsigned)geteuid());
}

static void print_finding(const struct doctor_finding *f, FILE *to)
{
	fprintf(to, "%-4s  %-17s %s\n", doctor_state_names[f->state], f->name, f->words);
	if (f->command[0])
		fprintf(to, "      %-17s -> %s\n", "", f->command);
}

static void add(struct printer *p, const struct doctor_finding *f)
{
	p->bad += f->state == DOCTOR_BAD;
	buf_puts(&p->json, p->count++ ? "," : "");
	doctor_put(f, &p->json);
	if (p->text)
		print_finding(f, p->text);
}

static FALLIBLE enum err add_storages(struct printer *p, const struct config *c)
{
	char name[64];
	const char *dir;
	struct str of;

	for (uint32_t i = 0; i < c->storage.count; i++) {
		struct doctor_finding f = { 0 };
		TRY(config_storage(c->storage.items[i], &of, &dir));
		if (dir[0] != '/')
			continue; /* its workers ask, and it may be away now and then */
		snprintf(name, sizeof name, "storage %.*s", (int)of.n, of.p);
		look_storage(name, dir, &f);
		add(p, &f);
	}
	return OK;
}

FALLIBLE enum err doctor_print(const struct config *c, FILE *to, unsigned *bad_out)
{
	bool as_json = strcmp(c->doctor, "json") == 0;
	struct printer p = { .text = as_json ? NULL : to, .json = BUF_INIT(1 << 18) };
	struct doctor_finding f, drivers[DOCTOR_DRIVERS];
	struct doctor_host h = { c, "" };

	if (!as_json && strcmp(c->doctor, "text") != 0)
		return ERR(CONFIG, "doctor: must be text or json, not \"%.50s\"", c->doctor);
	buf_puts(&p.json, "{\"findings\":[");
	for (uint32_t i = 0; doctor_look(i, &h, &f); i++)
		add(&p, &f);
	doctor_drivers_ask(&h, drivers);
	for (uint32_t i = 0; i < DOCTOR_DRIVERS; i++)
		add(&p, &drivers[i]);
	enum err e = add_storages(&p, c);
	buf_printf(&p.json, "],\"bad\":%u}\n", p.bad);
	e = e ?: buf_status(&p.json);
	if (!e && as_json)
		fwrite(p.json.p, 1, p.json.len, to);
	buf_free(&p.json);
	*bad_out = p.bad;
	return e;
}
