/* main.c: dcpd: reads the configuration, puts the coordinator and the API on one event loop, and ends them in order.
 *
 *   SIGTERM, SIGINT: drain: new work is refused, running jobs end or are kept for the next start, then clients are let go
 *   a second one: leave now; the journal and the segments make that safe
 *   SIGHUP: token, log format and new storages are read again */
#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>

#include "api/api.h"
#include "api/listen.h"
#include "base/log.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/doctor.h"
#include "server/doctor_print.h"
#include "server/loop.h"
#include "server/parts.h"
#include "server/server.h"

enum { DRAIN_LOOK_MS = 20, API_DRAIN_MS = 3000 };

struct daemon {
	int argc;
	char **argv;
	struct event_base *base;
	struct config *config, *reloaded;
	struct server *server;
	struct api *api;
	struct event *signals[3];
	struct loop_timer *look, *watchdog;
	int64_t api_deadline_ms;
	uint64_t watchdog_us;
};

/* ---- the end ---- */

static void look_drained(void *user)
{
	struct daemon *d = user;

	d->look = NULL;
	if (!d->api_deadline_ms && server_drained(d->server)) {
		api_drain(d->api);
		d->api_deadline_ms = clock_mono_ms() + API_DRAIN_MS;
	}
	if (d->api_deadline_ms && (api_drained(d->api) || clock_mono_ms() >= d->api_deadline_ms)) {
		event_base_loopbreak(d->base);
		return;
	}
	loop_timer_start(d->server->loop, DRAIN_LOOK_MS, look_drained, d, &d->look);
}

static void on_stop(evutil_socket_t, short, void *user)
{
	struct daemon *d = user;

	if (d->server->draining) {
		event_base_loopbreak(d->base);
		return;
	}
	(void)sd_notify(0, "STOPPING=1");
	server_drain(d->server);
	look_drained(d);
}

static FALLIBLE enum err reload(struct daemon *d)
{
	extern char **environ;
	struct config *fresh;

	TRY(config_load(d->argc, d->argv, environ, &fresh));
	enum err e = server_reload(d->server, fresh);
	config_free(d->reloaded);
	d->reloaded = fresh;
	return e ?: api_reload(d->api);
}

static void on_reload(evutil_socket_t, short what, void *user)
{
	struct daemon *d = user;

	(void)what;
	(void)sd_notify(0, "RELOADING=1");
	if (reload(d) != OK)
		log_err("reload failed: what was in use stays", NULL);
	else
		log_info("reloaded", NULL);
	(void)sd_notify(0, "READY=1");
}

static void on_watchdog(void *user)
{
	struct daemon *d = user;

	(void)d;
	(void)sd_notify(0, "WATCHDOG=1");
}

/* ---- the start ---- */

/* A segment is a descriptor: a large world needs many. */
static void raise_limits(void)
{
	struct rlimit r;

	if (getrlimit(RLIMIT_NOFILE, &r) == 0 && r.rlim_cur < r.rlim_max) {
		r.rlim_cur = r.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &r);
	}
	signal(SIGPIPE, SIG_IGN);
	umask(0077);
}

static FALLIBLE enum err listen_signals(struct daemon *d)
{
	static const struct {
		int signo;
		event_callback_fn fn;
	} table[] = { { SIGTERM, on_stop }, { SIGINT, on_stop }, { SIGHUP, on_reload } };

	for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
		d->signals[i] = evsignal_new(d->base, table[i].signo, table[i].fn, d);
		if (!d->signals[i] || event_add(d->signals[i], NULL) != 0)
			return ERR(SYSTEM, "cannot listen to signals");
	}
	return OK;
}

static FALLIBLE enum err start(struct daemon *d)
{
	struct listen_given given;

	TRY(listen_given_take(&given)); /* first of all: no worker may inherit them */
	d->base = event_base_new();
	NEED(d->base, "cannot make an event loop");
	TRY(listen_signals(d));
	TRY(server_new(d->config, d->base, &d->server));
	TRY(api_start(d->server, &given, &d->api));
	for (uint32_t i = 0; api_url(d->api, i); i++) {
		log_info("listening", "url", api_url(d->api, i), NULL);
		printf("listening on %s\n", api_url(d->api, i));
	}
	doctor_self_test(d->config);
	printf("ready\n");
	fflush(stdout);
	(void)sd_notify(0, "READY=1");
	if (sd_watchdog_enabled(0, &d->watchdog_us) > 0)
		return loop_every(d->server->loop, (int64_t)(d->watchdog_us / 2000), on_watchdog, d, &d->watchdog);
	return OK;
}

static void stop(struct daemon *d)
{
	if (d->server) {
		loop_timer_stop(&d->look);
		loop_timer_stop(&d->watchdog);
	}
	api_free(d->api);
	server_free(d->server);
	for (int i = 0; i < 3; i++)
		if (d->signals[i])
			event_free(d->signals[i]);
	if (d->base)
		event_base_free(d->base);
	config_free(d->reloaded);
	config_free(d->config);
}

static int run(struct daemon *d)
{
	enum err e = start(d);

	if (e) {
		log_err("dcpd cannot start", NULL);
		fprintf(stderr, "dcpd: %s\n", err_last()->text);
		stop(d);
		return 1;
	}
	event_base_dispatch(d->base);
	log_info("dcpd ends", NULL);
	stop(d);
	return 0;
}

/* --check-config: what the configuration's reader does not know about, the listeners, is asked of the API. */
static int check(struct daemon *d)
{
	enum err e = api_check(d->config);

	if (e)
		fprintf(stderr, "dcpd: %s\n", err_last()->text);
	unsigned wrong = config_check_paths(d->config, stderr);
	config_free(d->config);
	return e || wrong ? 2 : 0;
}

/* --doctor: 1 if something is in the way of a save or load, as dcpctl doctor. */
static int doctor(struct daemon *d)
{
	unsigned bad = 0;
	enum err e = doctor_print(d->config, stdout, &bad);

	if (e)
		fprintf(stderr, "dcpd: %s\n", err_last()->text);
	config_free(d->config);
	return e ? 2 : bad > 0;
}

int main(int argc, char **argv)
{
	extern char **environ;
	struct daemon d = { .argc = argc, .argv = argv };

	if (config_load(argc, argv, environ, &d.config) != OK) {
		fprintf(stderr, "dcpd: %s\n", err_last()->text);
		return 2;
	}
	if (d.config->help) {
		config_help(stdout);
	} else if (d.config->manual) {
		if (config_manual(d.config->manual, stdout) != OK) {
			fprintf(stderr, "dcpd: %s\n", err_last()->text);
			return 2;
		}
	} else if (d.config->version) {
		printf("dcpd %s\n", DCPD_VERSION);
	} else if (d.config->print_config) {
		config_print(d.config, stdout);
	} else if (d.config->doctor) {
		return doctor(&d);
	} else if (d.config->check_config) {
		return check(&d);
	} else {
		log_init("dcpd", d.config->log_json, LOG_LEVEL_INFO);
		raise_limits();
		return run(&d);
	}
	config_free(d.config);
	return 0;
}
