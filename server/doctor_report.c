/* doctor_report.c: see doctor_report.h. Nothing is asked here: storages, workers and drivers were looked at before. */
#include "server/doctor_report.h"

#include <jansson.h>
#include <stdio.h>

#include "server/devices.h"
#include "server/doctor_drivers.h"
#include "server/gang.h"
#include "server/journal.h"
#include "server/parts.h"
#include "server/storage.h"

struct report {
	struct buf *out;
	uint32_t count, bad;
};

static void add(struct report *r, const struct doctor_finding *f)
{
	buf_puts(r->out, r->count++ ? "," : "");
	doctor_put(f, r->out);
	r->bad += f->state == DOCTOR_BAD;
}

static void add_journal(struct report *r, const struct server *s)
{
	struct doctor_finding f = { .name = "journal" };

	if (journal_may_write(s->journal) == OK)
		doctor_say(&f, DOCTOR_OK, "", "the journal can be written");
	else
		doctor_say(&f, DOCTOR_BAD, "make space in the state directory; the daemon goes on by itself", "%s", err_last()->text);
	add(r, &f);
}

static void add_sandbox(struct report *r, const struct server *s)
{
	struct doctor_finding f = { .name = "sandbox" };
	const char *why = gang_unconfined(s->gangs);

	if (!why)
		return; /* the row landlock says what there is */
	doctor_say(&f, DOCTOR_WARN, "run dcpd as a user that owns only the storages, or enable Landlock", "workers are not confined to the "
		   "storages: no Landlock, and no mount namespace: %.200s", why);
	add(r, &f);
}

static void add_storage(struct report *r, const struct storage *st)
{
	char name[STORAGE_NAME_MAX + 16];
	struct doctor_finding f = { .name = name };
	const char *why = json_string_value(json_object_get(st->problem, "detail"));
	const char *fs = json_string_value(json_object_get(st->probe, "fs"));

	snprintf(name, sizeof name, "storage %s", st->name);
	if (st->state == STORAGE_UNKNOWN)
		doctor_say(&f, DOCTOR_IDLE, "", "%.150s has not been looked at yet", st->path);
	else if (st->state != STORAGE_OK)
		doctor_say(&f, DOCTOR_BAD, "is it mounted, and is its server there? dcpctl status says when it is back", "%.100s is "
			"%s%s%.150s",
			   st->path, storage_state_text(st->state), why ? ": " : "", why ? why : "");
	else if (json_is_false(json_object_get(st->probe, "writable")))
		doctor_say(&f, DOCTOR_WARN, "systemctl edit dcpd: [Service] ReadWritePaths= with its path, or mount it read-write",
			   "%.150s cannot be written to: checkpoints can be read there, not saved", st->path);
	else if (json_is_false(json_object_get(st->probe, "direct_io")))
		doctor_say(&f, DOCTOR_WARN, "put the storage on ext4 or xfs", "%.150s (%.30s) has no O_DIRECT: bytes go through the "
			"page cache, "
			   "which is slower, and counts as memory", st->path, fs ? fs : "?");
	else
		doctor_say(&f, DOCTOR_OK, "", "%.150s%s%.30s, with all that a save needs", st->path, fs ? ": " : "", fs ? fs : "");
	add(r, &f);
}

static void add_drivers(struct report *r, const struct doctor_host *h, const struct devices *d)
{
	struct doctor_heard heard = { .no_cuda = devices_missing(d, "cuda"), .no_nccl = devices_missing(d, "nccl"),
				      .gpu_problem = doctor_gpu_problem(devices_found(d)), .nccl_version = devices_version(d, "nccl"),
				      .is_pending = devices_pending(d) };
	struct doctor_finding f[DOCTOR_DRIVERS];

	doctor_drivers_say(h, &heard, f);
	for (uint32_t i = 0; i < DOCTOR_DRIVERS; i++)
		add(r, &f[i]);
}

FALLIBLE enum err doctor_report(const struct server *s, struct buf *out)
{
	struct doctor_host h = { s->config, "" };
	struct report r = { .out = out };
	struct doctor_finding f;

	buf_puts(out, "{\"findings\":[");
	add_journal(&r, s);
	for (uint32_t i = 0; doctor_look(i, &h, &f); i++)
		add(&r, &f);
	add_sandbox(&r, s);
	for (uint32_t i = 0; i < storage_count(s->storages); i++)
		add_storage(&r, storage_at(s->storages, i));
	add_drivers(&r, &h, s->devices);
	buf_printf(out, "],\"bad\":%u}", r.bad);
	return buf_status(out);
}
