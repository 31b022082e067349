/* doctor.h: what this host lacks for dcpd, in plain words, and for each lack the command that mends it.
 *
 * Each row of doctor.c looks at one thing; each answers in microseconds, makes nothing that stays and waits for no storage. The start-up
 * self-test, `dcpd --doctor`, GET /v1/doctor, dcpctl and the page show the same rows; /v1/doctor adds what only a running daemon knows
 * (doctor_report.h),
 * `dcpd --doctor` what a look at storages and drivers tells (doctor_print.h). */
#pragma once
#include "base/buf.h"
#include "server/config.h"

enum doctor_state { DOCTOR_OK, DOCTOR_IDLE, DOCTOR_WARN, DOCTOR_BAD };   /* idle: does not concern this host; bad: saves or loads fail */
extern const char *const doctor_state_names[];

enum { DOCTOR_WORDS_MAX = 400, DOCTOR_COMMAND_MAX = 300 };

struct doctor_finding {
	const char *name;                   /* of the row, "io_uring" */
	enum doctor_state state;
	char words[DOCTOR_WORDS_MAX];       /* a sentence without its full stop */
	char command[DOCTOR_COMMAND_MAX];   /* "" if nothing is to be done */
};

struct doctor_host {
	const struct config *config;
	const char *root;                   /* in front of /dev, /proc, /sys and /usr; "" but in tests */
};

/* Fills *out by the row `index`; false beyond the last. */
bool doctor_look(uint32_t index, const struct doctor_host *host, struct doctor_finding *out);
/* Fills in state, words and command of a finding. */
void doctor_say(struct doctor_finding *f, enum doctor_state state, const char *command, const char *words, ...) PRINTF_LIKE(4, 5);
/* Appends {"name","state","words","command"}. */
void doctor_put(const struct doctor_finding *f, struct buf *out);
/* One line of the log for each row that is bad, and one for all that warn. */
void doctor_self_test(const struct config *c);
/* Does this process run in a container? A command of a finding is another one there. */
bool doctor_in_container(const struct doctor_host *h);
