/* t_server.h: a coordinator inside the test's process, with the fake worker and a state dir and a storage of its own. */
#pragma once
#include <event2/event.h>
#include "lib/t.h"
#include "server/config.h"
#include "server/job.h"
#include "server/parts.h"
#include "server/server.h"
#include "server/state_dict.h"

struct t_server {
	char dir[64];                      /* holds state/ and main/ (the storage "main") and other/ */
	struct config *config;
	struct event_base *base;
	struct server *s;
	struct principal me;               /* admin */
};

/* options: NULL-terminated, beside state dir, storages and worker path; may be NULL. */
void t_server_start(struct t_server *t, const char *const *options);
void t_server_stop(struct t_server *t);          /* orderly; the directory stays */
void t_server_crash(struct t_server *t);         /* as kill -9 does: what is not in the journal is lost */
void t_server_remove(struct t_server *t);        /* the directory, and segments the daemon would sweep */
/* Runs the loop until *flag, or fails the test when that hangs. */
void t_server_until(struct t_server *t, const bool *flag);
void t_server_run(struct t_server *t, int ms);
/* The same for any condition. */
#define T_UNTIL(t, cond)                                               \
	do {                                                           \
		for (int t_ms_ = 0; !(cond); t_ms_ += 5) {             \
			if (t_ms_ > T_HUNG_MS)                         \
				T_FAIL("it does not become so: " #cond); \
			t_server_run(t, 5);                            \
		}                                                      \
	} while (0)

/* The answer that a callback left behind. */
struct t_answer {
	bool called, existing;
	enum err e;
	struct err_info info;
	char id[256];
	struct reservation reserved;
	char segment[80];
	json_t *doc;
};
void t_done(void *user, enum err e);
void t_created(void *user, enum err e, const char *id, bool existing);
void t_reserved(void *user, enum err e, const struct reservation *r);
void t_planned(void *user, enum err e, const json_t *plan);

/* A member of a job's JSON: what the fake worker is to do. */
#define FAKE(script) ",'labels':{'fake':'" script "'}"
/* Creates a job from a JSON text with ' for "; the id, or fails. t_job_try gives the error. */
enum err t_job_try(struct t_server *t, const char *spec, struct t_answer *a);
void t_job(struct t_server *t, const char *spec, char id[27]);
/* Waits until it is running. */
void t_job_runs(struct t_server *t, const char *id);
/* Waits for its end; its state. */
enum job_state t_job_end(struct t_server *t, const char *id);
/* The record, parsed; the caller frees it. */
json_t *t_job_doc(struct t_server *t, const char *id);
/* Reserves and seals one generation on all ranks. */
void t_seal_all(struct t_server *t, const char *name, uint32_t world, int64_t generation);
void t_state_dict(struct t_server *t, const char *name, uint32_t world);
/* A server of its own for a test, with the state dict "train" of two ranks, sealed; 0, for cmocka. */
int t_server_train(struct t_server *t, const char *const *options);
